//! A table of parameters.

use numcore::Runtime;

use crate::Param;

const TITLES: [&str; 5] = ["parameter", "shape", "dtype", "trained", "numbers"];

/// A table of parameters, with their sum: whole ones, where this rank has pieces.
pub(crate) fn table<R: Runtime>(parameters: &[(String, Param<R>)]) -> String {
    let mut rows = vec![TITLES.map(String::from)];
    let (mut trainable, mut total) = (0, 0);
    for (name, p) in parameters {
        let numel = p.logical_shape().numel();
        total += numel;
        trainable += if p.requires_grad() { numel } else { 0 };
        let trained = if p.requires_grad() { "yes" } else { "no" };
        rows.push([name.clone(), p.logical_shape().to_string(), p.dtype().to_string(), trained.into(), grouped(numel)]);
    }
    let bytes: usize = parameters.iter().map(|(_, p)| p.logical_shape().numel() * p.dtype().size()).sum();
    format!("{}{} numbers, {} trained, {} bytes\n", aligned(&rows), grouped(total), grouped(trainable), grouped(bytes))
}

/// Columns as wide as their widest cell; the last, of counts, is right-aligned.
fn aligned(rows: &[[String; 5]]) -> String {
    let width: [usize; 5] = std::array::from_fn(|c| rows.iter().map(|r| r[c].chars().count()).max().unwrap_or(0));
    let line = |[name, shape, dtype, trained, numbers]: &[String; 5]| {
        let [a, b, c, d, e] = width;
        format!("{name:<a$}  {shape:<b$}  {dtype:<c$}  {trained:<d$}  {numbers:>e$}\n")
    };
    rows.iter().map(line).collect()
}

/// Digits in groups of three: `12,582,912`.
pub(super) fn grouped(n: usize) -> String {
    let digits = n.to_string();
    let cut =
        |(i, d): (usize, char)| (i > 0 && (digits.len() - i).is_multiple_of(3)).then_some(',').into_iter().chain([d]);
    digits.chars().enumerate().flat_map(cut).collect()
}
