//! Printing of tensors: nested brackets, aligned columns, long axes abbreviated.

use std::fmt;

use super::Tensor;
use crate::{DType, Result, Runtime};

/// The longest axis printed in full; of a longer one, the first and last `EDGE` elements are shown.
const FULL: usize = 10;
const EDGE: usize = 4;

impl<R: Runtime> fmt::Display for Tensor<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Ok(cells) = Cells::of(self, f.precision()) else {
            return write!(f, "<values not readable> {self:?}");
        };
        cells.write(f, self.dims(), 0, 1)?;
        write!(f, "\n[{} {} {}]", self.device(), self.dtype(), self.shape())
    }
}

impl<R: Runtime> fmt::Debug for Tensor<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({} {} {:?})", self.device(), self.dtype(), self.layout())
    }
}

struct Cells {
    text: Vec<String>,
    width: usize,
}

impl Cells {
    fn of<R: Runtime>(x: &Tensor<R>, precision: Option<usize>) -> Result<Cells> {
        let text: Vec<String> = match x.dtype() {
            // An `f64` does not hold every `i64` exactly.
            DType::I64 => x.to_vec::<i64>()?.iter().map(i64::to_string).collect(),
            dtype => x.to_f64s()?.iter().map(|&v| cell(v, dtype, precision.unwrap_or(4))).collect(),
        };
        let width = text.iter().map(String::len).max().unwrap_or(0);
        Ok(Cells { text, width })
    }

    fn write(&self, f: &mut fmt::Formatter<'_>, dims: &[usize], at: usize, depth: usize) -> fmt::Result {
        let Some((&n, inner)) = dims.split_first() else {
            return write!(f, "{:>w$}", self.text[at], w = self.width);
        };
        let step: usize = inner.iter().product();
        write!(f, "[")?;
        let mut first = true;
        for i in (0..n).filter(|&i| n <= FULL || i < EDGE || i >= n - EDGE) {
            if !first {
                separator(f, inner.len(), depth)?;
            }
            first = false;
            self.write(f, inner, at + i * step, depth + 1)?;
            if n > FULL && i == EDGE - 1 {
                separator(f, inner.len(), depth)?;
                write!(f, "…")?;
            }
        }
        write!(f, "]")
    }
}

fn separator(f: &mut fmt::Formatter<'_>, inner: usize, depth: usize) -> fmt::Result {
    match inner {
        0 => write!(f, ", "),
        _ => write!(f, ",{}{:depth$}", "\n".repeat(inner), ""),
    }
}

fn cell(v: f64, dtype: DType, precision: usize) -> String {
    match dtype {
        DType::Bool => (v != 0.0).to_string(),
        d if d.is_int() => format!("{v}"),
        _ if v != 0.0 && v.is_finite() && !(1e-4..1e6).contains(&v.abs()) => format!("{v:.precision$e}"),
        _ => format!("{v:.precision$}"),
    }
}
