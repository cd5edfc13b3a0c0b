//! Linear maps along one axis, given by a few weights per output: for interpolation and means of regions.

use std::sync::LazyLock;

use super::{along, constant, positions, room};
use crate::{
    Error, Result, Shape,
    ops::{Apply, IndexOps, PointwiseOps, Reduce, ScalarList, ViewOps},
    pointwise::Program,
};

/// The indices and weights of the inputs of each output along an axis: `y[i] = Σ_k weight[i, k] · x[index[i, k]]`. An
/// input of weight 0 counts as in PyTorch: an infinite one gives NaN.
pub(super) struct Taps {
    index: Vec<i64>,
    /// The weights; NaN marks the padding of a row.
    weight: Vec<f64>,
    outputs: usize,
    /// The divisors of the sums, one per output, for means; empty for other maps.
    divisors: Vec<f64>,
}

impl Taps {
    /// Builds the taps of `outputs` outputs; `row(i)` returns the inputs and weights of output `i`. Rows are padded to
    /// one length. The caller has checked that memory can hold them.
    pub(super) fn new(op: &'static str, outputs: usize, row: impl Fn(usize) -> Vec<(usize, f64)>) -> Result<Self> {
        // Reserves one input per output before computing any of them.
        drop((room::<i64>(op, outputs)?, room::<f64>(op, outputs)?));
        let most = (0..outputs).map(|i| row(i).len()).max().unwrap_or(0).max(1);
        let total = outputs.saturating_mul(most);
        let mut taps = Taps { index: room(op, total)?, weight: room(op, total)?, outputs, divisors: Vec::new() };
        for row in (0..outputs).map(row) {
            let last = row.last().map_or(0, |t| t.0);
            for k in 0..most {
                let (at, weight) = row.get(k).copied().unwrap_or((last, f64::NAN));
                taps.index.push(at as i64);
                taps.weight.push(weight);
            }
        }
        Ok(taps)
    }

    /// Divides the sums of these taps by the sums of their weights: means, if every weight is 1.
    pub(super) fn averaged(self) -> Self {
        let each = self.weight.len() / self.outputs.max(1);
        let sum = |row: &[f64]| row.iter().filter(|w| !w.is_nan()).sum();
        Taps { divisors: self.weight.chunks(each.max(1)).map(sum).collect(), ..self }
    }

    /// Applies the map along `axis` of `x`, of a floating dtype.
    pub(super) fn apply<T: Apply>(&self, op: &'static str, x: &T, axis: usize) -> Result<T> {
        // Padding of a row contributes 0, even if the element it points to is infinite.
        static WEIGHTED: LazyLock<Program> =
            LazyLock::new(|| Program::new("taps", |[x, w], []| [w.abs().ne(w.abs()).select(0.0, x * w)]));
        let shape = x.spec().shape;
        if shape[axis] == 0 || self.outputs == 0 {
            return Err(Error::shape(op, &[shape], "neither the input nor the output may be empty"));
        }
        let each = self.index.len() / self.outputs;
        let picked = x.index_select(axis as isize, &positions(x, [self.index.len()], &self.index)?)?;
        if each == 1 && self.weight.iter().all(|&w| w == 1.0) {
            return Ok(picked);
        }
        // All axes before are merged into one, and all axes behind into another, so that the rank leaves room for the
        // taps.
        let (outer, inner) = (shape[..axis].iter().product(), shape[axis + 1..].iter().product());
        let apart = picked.reshape([outer, self.outputs, each, inner])?;
        let weight = constant(x, [1, self.outputs, each, 1], x.spec().dtype, &self.weight)?;
        let sum = Reduce::sum_of(WEIGHTED.clone(), ScalarList::new(), Shape::from([outer, self.outputs, 1, inner]));
        let sums = T::apply1(sum, &[&apart, &weight])?.reshape(shape.with(axis, self.outputs))?;
        if self.divisors.is_empty() { Ok(sums) } else { divided_along(&sums, axis, &self.divisors) }
    }
}

/// The bounds of part `i` of `n` equal parts of `len` elements: the first element that overlaps it, and one past the
/// last.
pub(super) fn cell(i: usize, len: usize, n: usize) -> (usize, usize) {
    let (i, len, n) = (i as u128, len as u128, n as u128);
    ((i * len / n) as usize, ((i + 1) * len).div_ceil(n) as usize)
}

/// `x` divided by host values, one for each index along `axis`.
#[track_caller]
pub(super) fn divided_along<T: Apply>(x: &T, axis: usize, by: &[f64]) -> Result<T> {
    x.div(&constant(x, along(x.spec().shape.rank(), axis, by.len()), x.spec().dtype, by)?)
}
