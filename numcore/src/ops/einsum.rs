//! Einstein summation, as batched matmuls.

use smallvec::SmallVec;

use super::{Apply, Matmul, ReduceOps, ViewOps};
use crate::{Error, MAX_RANK, Result, Within};

/// Labels of axes: letters, and [`ELLIPSIS`] for the axes that `...` stands for.
type Labels = SmallVec<[u8; MAX_RANK]>;

/// The label of the last axis that `...` stands for; earlier axes have the labels that follow.
const ELLIPSIS: u8 = 128;

/// Einstein summation: `einsum("bhqd,bhkd->bhqk", &[&q, &k])`. Letters name axes; letters absent on the right are
/// summed.
///
/// `...` stands for any further axes of an operand, aligned at the last axis. A letter that occurs twice in one operand
/// takes its diagonal; an axis of size 1 broadcasts. Without `->`, the result has the axes of `...`, then the letters
/// that occur once, by code point, as in NumPy and PyTorch. Operands are contracted from left to right, each pair as
/// one batched matmul of floating dtypes.
///
/// ```
/// # use numcore::{Tensor, NullRuntime, ops::einsum};
/// # fn traced(x: &Tensor<NullRuntime>) -> numcore::Result<Tensor<NullRuntime>> {
/// einsum("...ii->...", &[x]) // the trace of each matrix of x: [.., N, N]
/// # }
/// ```
#[track_caller]
pub fn einsum<T: Apply>(equation: &str, ins: &[&T]) -> Result<T> {
    let (operands, output) = parse(equation, ins).at_caller()?;
    let mut operands =
        operands.into_iter().zip(ins).map(|(labels, x)| Labelled { labels, value: (*x).clone() }.distinct());
    let mut operands = operands.by_ref().collect::<Result<Vec<_>>>()?;
    let sizes = sizes(equation, &operands).at_caller()?;
    for x in &mut operands {
        x.squeeze(&sizes)?;
    }
    let mut rest = operands.into_iter();
    let Some(mut at) = rest.next() else { return Err(bad(equation, "names no operand")) };
    while let Some(x) = rest.next() {
        let later: Labels = rest.as_slice().iter().flat_map(|x| &x.labels).chain(&output).copied().collect();
        at = contract(at, x, &later)?;
    }
    at.keep(&output)?.arranged(&output)
}

struct Labelled<T> {
    labels: Labels,
    value: T,
}

impl<T: Apply> Labelled<T> {
    fn sizes(&self, labels: &[u8]) -> Vec<usize> {
        let shape = self.value.spec().shape;
        labels.iter().filter_map(|l| self.labels.iter().position(|m| m == l)).map(|i| shape[i]).collect()
    }

    /// Takes the diagonal of axes with the same label, which become the last axis.
    fn distinct(mut self) -> Result<Self> {
        let twice = |l: &Labels| (0..l.len()).find_map(|j| Some((l[..j].iter().position(|m| *m == l[j])?, j)));
        while let Some((i, j)) = twice(&self.labels) {
            let shape = self.value.spec().shape;
            if shape[i] != shape[j] {
                let why = format!("axis `{}` has two sizes, {} and {}", name(self.labels[i]), shape[i], shape[j]);
                return Err(Error::shape("einsum", &[shape], why));
            }
            let (n, label) = (shape[i], self.labels[i]);
            let others: Vec<usize> = (0..shape.rank()).filter(|&k| k != i && k != j).collect();
            let sizes: Vec<usize> = others.iter().map(|&k| shape[k]).chain([n * n]).collect();
            let order: Vec<usize> = others.iter().copied().chain([i, j]).collect();
            // The elements of the diagonal of a row-major `n × n` matrix are n + 1 apart.
            self.value = self.value.permute_axes(&order)?.reshape(sizes)?.slice(-1, 0, n, n + 1)?;
            self.labels = others.iter().map(|&k| self.labels[k]).chain([label]).collect();
        }
        Ok(self)
    }

    /// Drops axes of size 1 that are larger in another operand: a matmul broadcasts an operand without the axis.
    fn squeeze(&mut self, sizes: &[usize; 256]) -> Result<()> {
        for i in (0..self.labels.len()).rev() {
            if self.value.spec().shape[i] != sizes[usize::from(self.labels[i])] {
                self.value = self.value.squeeze(i as isize)?;
                self.labels.remove(i);
            }
        }
        Ok(())
    }

    /// Sums over the labels that are not in `wanted`.
    fn keep(self, wanted: &[u8]) -> Result<Self> {
        let gone: Vec<isize> =
            (0..self.labels.len()).filter(|&i| !wanted.contains(&self.labels[i])).map(|i| i as isize).collect();
        if gone.is_empty() {
            return Ok(self);
        }
        let labels = self.labels.iter().copied().filter(|l| wanted.contains(l)).collect();
        Ok(Labelled { labels, value: self.value.sum(&gone)? })
    }

    fn arranged(self, order: &[u8]) -> Result<T> {
        let axes: Vec<usize> = order.iter().filter_map(|l| self.labels.iter().position(|m| m == l)).collect();
        if axes.iter().enumerate().all(|(i, &a)| i == a) { Ok(self.value) } else { self.value.permute_axes(&axes) }
    }
}

#[track_caller]
fn contract<T: Apply>(a: Labelled<T>, b: Labelled<T>, later: &[u8]) -> Result<Labelled<T>> {
    let wanted_a: Labels = later.iter().chain(&b.labels).copied().collect();
    let wanted_b: Labels = later.iter().chain(&a.labels).copied().collect();
    let (a, b) = (a.keep(&wanted_a)?, b.keep(&wanted_b)?);
    let pick = |from: &Labels, f: &dyn Fn(&u8) -> bool| -> Labels { from.iter().copied().filter(|l| f(l)).collect() };
    let batch = pick(&a.labels, &|l| b.labels.contains(l) && later.contains(l));
    let inner = pick(&a.labels, &|l| b.labels.contains(l) && !later.contains(l));
    let rows = pick(&a.labels, &|l| !b.labels.contains(l));
    let columns = pick(&b.labels, &|l| !a.labels.contains(l));
    let (nb, nm, nk, nn) = (a.sizes(&batch), a.sizes(&rows), a.sizes(&inner), b.sizes(&columns));
    let flat = |v: &[usize]| v.iter().product::<usize>();
    let left = a.arranged(&[&batch[..], &rows, &inner].concat())?.reshape([flat(&nb), flat(&nm), flat(&nk)])?;
    let right = b.arranged(&[&batch[..], &inner, &columns].concat())?.reshape([flat(&nb), flat(&nk), flat(&nn)])?;
    let value = T::apply1(Matmul, &[&left, &right])?.reshape([nb, nm, nn].concat())?;
    Ok(Labelled { labels: [&batch[..], &rows, &columns].concat().into(), value })
}

fn bad(equation: &str, why: impl std::fmt::Display) -> Error {
    Error::format("einsum", format!("`{equation}`: {why}"))
}

fn name(label: u8) -> String {
    if label < ELLIPSIS { char::from(label).into() } else { "...".into() }
}

/// One operand in the equation: the letters before and after `...`.
struct EinsumTerm {
    before: Labels,
    after: Labels,
    ellipsis: bool,
}

impl EinsumTerm {
    fn parse(equation: &str, text: &str) -> Result<EinsumTerm> {
        let letters = |s: &str| -> Result<Labels> {
            if s.bytes().all(|b| b.is_ascii_alphabetic()) {
                return Ok(s.bytes().collect());
            }
            Err(bad(equation, format!("`{text}` names axes by something other than letters and one `...`")))
        };
        let (before, after) = text.split_once("...").unwrap_or((text, ""));
        Ok(EinsumTerm { before: letters(before)?, after: letters(after)?, ellipsis: text.contains("...") })
    }

    fn letters(&self) -> impl Iterator<Item = u8> {
        self.before.iter().chain(&self.after).copied()
    }

    /// The labels of all axes, where `...` stands for `more` of them.
    fn labels(&self, more: usize) -> Labels {
        let more = (0..more as u8).rev().map(|k| ELLIPSIS + k);
        self.before.iter().copied().chain(more).chain(self.after.iter().copied()).collect()
    }
}

/// The axes of each operand and of the result.
#[track_caller]
fn parse<T: Apply>(equation: &str, ins: &[&T]) -> Result<(Vec<Labels>, Labels)> {
    let text: String = equation.chars().filter(|c| !c.is_whitespace()).collect();
    let (left, right) = text.split_once("->").map_or((&text[..], None), |(left, right)| (left, Some(right)));
    let terms = left.split(',').map(|t| EinsumTerm::parse(equation, t)).collect::<Result<Vec<_>>>()?;
    if terms.len() != ins.len() {
        return Err(bad(equation, format!("names {} operands, {} were given", terms.len(), ins.len())));
    }
    let (mut operands, mut longest) = (Vec::new(), 0);
    for (term, x) in terms.iter().zip(ins) {
        let (shape, named) = (x.spec().shape, term.letters().count());
        let more = shape.rank().checked_sub(named).filter(|&more| term.ellipsis || more == 0);
        let Some(more) = more else {
            return Err(Error::shape("einsum", &[shape], format!("`{equation}` names {named} axes for it")));
        };
        longest = longest.max(more);
        operands.push(term.labels(more));
    }
    let Some(right) = right else {
        let all: Labels = terms.iter().flat_map(EinsumTerm::letters).collect();
        let mut once: Labels = all.iter().copied().filter(|l| all.iter().filter(|m| *m == l).count() == 1).collect();
        once.sort_unstable();
        return Ok((operands, EinsumTerm { before: Labels::new(), after: once, ellipsis: true }.labels(longest)));
    };
    let right = EinsumTerm::parse(equation, right)?;
    let output = right.labels(if right.ellipsis { longest } else { 0 });
    for (i, l) in output.iter().enumerate() {
        if output[..i].contains(l) {
            return Err(bad(equation, format!("`{}` occurs twice in the result", name(*l))));
        }
        if !operands.iter().any(|o| o.contains(l)) {
            return Err(bad(equation, format!("`{}` occurs in no operand", name(*l))));
        }
    }
    Ok((operands, output))
}

/// The size of each label. An axis of size 1 takes the size it has in another operand.
#[track_caller]
fn sizes<T: Apply>(equation: &str, operands: &[Labelled<T>]) -> Result<[usize; 256]> {
    let mut sizes = [1; 256];
    for x in operands {
        for (&label, &n) in x.labels.iter().zip(x.value.spec().shape.iter()) {
            let size = &mut sizes[usize::from(label)];
            if n != 1 && *size != 1 && *size != n {
                return Err(bad(equation, format!("axis `{}` has two sizes, {} and {n}", name(label), *size)));
            }
            if n != 1 {
                *size = n;
            }
        }
    }
    Ok(sizes)
}
