//! Binary search in sorted sequences.

use std::sync::LazyLock;

use super::zeros;
use crate::{
    DType, Error, Result,
    ops::{Apply, IndexOps, PointwiseOps, ViewOps, rule},
    pointwise::Program,
};

/// Binary search. Results are `i64` and have no gradient.
pub trait SearchOps: Apply {
    /// The insertion points of `values` in the ascending sequences along the last axis of `self`. Each is the number of
    /// the sequence's elements that are smaller or, with `right`, not larger. `self: [M]` serves values of any shape;
    /// `self: [B.., M]` needs `values: [B.., N]`. Both have one dtype; NaN counts as largest. All values take
    /// `⌈log₂(M + 1)⌉` steps together.
    #[track_caller]
    fn searchsorted(&self, values: &Self, right: bool) -> Result<Self> {
        const OP: &str = "searchsorted";
        let (shape, wanted) = (self.spec().shape, values.spec().shape);
        rule::same_dtype(OP, &[self.spec(), values.spec()])?;
        let Some((&len, lead)) = shape.split_last() else {
            return Err(Error::shape(OP, &[shape, wanted], "a scalar is no sequence"));
        };
        if !lead.is_empty() && wanted.split_last().is_none_or(|(_, l)| l != lead) {
            let why = "the sequences must be [M], or agree with the values on every axis but the last";
            return Err(Error::shape(OP, &[shape, wanted], why));
        }
        let rows: usize = lead.iter().product();
        let each = if lead.is_empty() { wanted.numel() } else { wanted[wanted.rank() - 1] };
        let sequences = self.detach().reshape([rows, len])?;
        let found = search(&sequences, &values.detach().reshape([rows, each])?, right)?;
        found.reshape(wanted)
    }
    /// The interval between ascending `boundaries: [M]` that contains each element of `self`: `i` where
    /// `boundaries[i − 1] < x ≤ boundaries[i]`, or, with `right`, `boundaries[i − 1] ≤ x < boundaries[i]`.
    #[doc(alias = "digitize")]
    #[track_caller]
    fn bucketize(&self, boundaries: &Self, right: bool) -> Result<Self> {
        let shape = boundaries.spec().shape;
        if shape.rank() != 1 {
            return Err(Error::shape("bucketize", &[self.spec().shape, shape], "the boundaries must have one axis"));
        }
        boundaries.searchsorted(self, right)
    }
}

impl<T: Apply> SearchOps for T {}

/// Binary search of `values: [B, N]` in `sequences: [B, M]`; every iteration is one gather for all of them.
#[track_caller]
fn search<T: Apply>(sequences: &T, values: &T, right: bool) -> Result<T> {
    static STEP: LazyLock<[Program; 2]> = LazyLock::new(|| {
        [false, true].map(|right| {
            Program::build("searchsorted", 4, 1, |_, x, s| {
                let (found, probed, element, value) = (x[0], x[1], x[2], x[3]);
                // NaN compares greater than every other value, and not greater than NaN.
                let (low, high) = if right { (value, element) } else { (element, value) };
                let below = low.lt(high) | (high.ne(high) & low.eq(low));
                let before = if right { !below } else { below };
                vec![(before & probed.le(s[0])).select(probed, found)]
            })
        })
    });
    let len = sequences.spec().shape[1];
    let mut found = T::constant(crate::Tensor::zeros(values.runtime(), values.spec().shape, DType::I64)?);
    if len == 0 || values.spec().shape.numel() == 0 {
        return Ok(found);
    }
    let end = zeros(values, [1].into(), DType::I64)?.add((len - 1) as f64)?;
    let mut step = (len + 1).next_power_of_two() / 2;
    while step > 0 {
        // At least `probed` elements come before the value if the last of these does.
        let probed = found.add(step as f64)?;
        let element = sequences.gather(1, &probed.sub(1.0)?.minimum(&end)?)?;
        found = found.apply_program(&STEP[usize::from(right)], &[&probed, &element, values], &[(len as i64).into()])?;
        step /= 2;
    }
    Ok(found)
}
