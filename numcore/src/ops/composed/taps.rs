//! Linear maps along one axis given by a few weights for each output: what interpolation and means of regions are.

use std::sync::LazyLock;

use super::{along, constant, positions};
use crate::{
    Error, Result, Shape,
    ops::{Apply, IndexOps, Reduce, ScalarList, ViewOps},
    pointwise::Program,
};

/// For each output along an axis the inputs it is made of and their weights:
/// `y[i] = Σ_k weight[i, k] · x[index[i, k]]`.
pub(super) struct Taps {
    index: Vec<i64>,
    weight: Vec<f64>,
    outputs: usize,
}

impl Taps {
    /// From each output's first inputs, with their weights; padded to one length by inputs of weight 0.
    pub(super) fn new(rows: &[Vec<(usize, f64)>]) -> Self {
        let most = rows.iter().map(Vec::len).max().unwrap_or(0).max(1);
        let mut taps = Taps { index: Vec::new(), weight: Vec::new(), outputs: rows.len() };
        for row in rows {
            let last = row.last().map_or(0, |t| t.0);
            for k in 0..most {
                let (at, weight) = row.get(k).copied().unwrap_or((last, 0.0));
                taps.index.push(at as i64);
                taps.weight.push(weight);
            }
        }
        taps
    }

    /// Applies the map along `axis` of `x`, a float.
    pub(super) fn apply<T: Apply>(&self, op: &'static str, x: &T, axis: usize) -> Result<T> {
        static WEIGHTED: LazyLock<Program> = LazyLock::new(|| Program::new("taps", |[x, w], []| [x * w]));
        let shape = x.spec().shape;
        if shape[axis] == 0 || self.outputs == 0 {
            return Err(Error::shape(op, &[shape], "neither the input nor the output may be empty"));
        }
        let each = self.index.len() / self.outputs;
        let picked = x.index_select(axis as isize, &positions(x, [self.index.len()], &self.index)?)?;
        if each == 1 && self.weight.iter().all(|&w| w == 1.0) {
            return Ok(picked);
        }
        // Everything else in one axis before and one behind: many axes would leave no room for the taps'.
        let (outer, inner) = (shape[..axis].iter().product(), shape[axis + 1..].iter().product());
        let apart = picked.reshape([outer, self.outputs, each, inner])?;
        let weight = constant(x, [1, self.outputs, each, 1], x.spec().dtype, &self.weight)?;
        let sum = Reduce::sum_of(WEIGHTED.clone(), ScalarList::new(), Shape::from([outer, self.outputs, 1, inner]));
        T::apply1(sum, &[&apart, &weight])?.reshape(shape.with(axis, self.outputs))
    }
}

/// `x` times numbers of the host, one for each place along `axis`.
#[track_caller]
pub(super) fn scaled_along<T: Apply>(x: &T, axis: usize, by: &[f64]) -> Result<T> {
    use crate::ops::PointwiseOps;
    x.mul(&constant(x, along(x.spec().shape.rank(), axis, by.len()), x.spec().dtype, by)?)
}
