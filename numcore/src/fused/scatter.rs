//! Scatters that keep the largest or smallest value at each position.

use std::{ops::RangeInclusive, sync::LazyLock};

use smallvec::smallvec;

use super::Fused;
use crate::{
    Error, Result, Tensor,
    ops::{
        Apply, Backprop, Bits, IndexOps, Outs, PointwiseOps, Saves, Sorted, Spec, Specs,
        rule::{self, same_dtype},
    },
    pointwise::Program,
};

/// `x` with `src[.., i, ..]` combined into `x[.., index[.., i, ..], ..]` along an axis by maximum or minimum. Inputs
/// are `x`, `index` (`i64`) and `src`, which has the index's shape. Elements that tie share the gradient evenly, as in
/// [`amax`](crate::ops::ReduceOps::amax).
#[derive(Clone, Debug)]
pub struct ScatterExtreme {
    /// The axis along which the index names positions.
    pub axis: usize,
    /// True to keep the largest value at each position, false to keep the smallest.
    pub largest: bool,
    /// True if the element of `x` at a named position takes part in the reduction there.
    pub include_self: bool,
}

impl Fused for ScatterExtreme {
    fn name(&self) -> &'static str {
        if self.largest { "scatter_amax" } else { "scatter_amin" }
    }

    fn arity(&self) -> RangeInclusive<usize> {
        3..=3
    }

    fn infer(&self, ins: &[Spec]) -> Result<Specs> {
        same_dtype(self.name(), &[ins[0], ins[2]])?;
        rule::index(self.name(), ins[1])?;
        let (x, index, src) = (ins[0].shape, ins[1].shape, ins[2].shape);
        if self.axis >= x.rank()
            || index != src
            || x.rank() != src.rank()
            || x.with(self.axis, 0) != src.with(self.axis, 0)
        {
            let why = format!("sizes may differ only along axis {}, index and source must have one shape", self.axis);
            return Err(Error::shape(self.name(), &[x, index, src], why));
        }
        Ok(smallvec![ins[0]])
    }

    fn decompose<T: Apply>(&self, ins: &[&T]) -> Result<Outs<T>> {
        let (x, index, src) = (ins[0], ins[1], ins[2]);
        if index.spec().shape.numel() == 0 {
            return Ok(smallvec![x.clone()]);
        }
        let combine = |a: &T, b: &T| if self.largest { a.maximum(b) } else { a.minimum(b) };
        let sorted = Sorted::new(index, self.axis)?;
        let winners = sorted.winners(x.spec().shape[self.axis])?;
        let top = winners.pick(self.axis, &sorted.back(&sorted.combined(src, combine)?)?)?;
        let top = if self.include_self { combine(&top, x)? } else { top };
        Ok(smallvec![top.where_cond(&winners.hit()?, x)?])
    }

    fn saves(&self, _: Bits) -> Option<Saves> {
        Some(Saves { inputs: Bits::of(&[0, 1, 2]), outputs: Bits::of(&[0]) })
    }

    fn gradient<T: Apply>(&self, cx: &mut dyn Backprop<T>) -> Result<()> {
        let (g, y, axis) = (cx.grad()?, cx.output(0)?, self.axis as isize);
        let (x, index, src) = (cx.input(0)?, cx.input(1)?, cx.input(2)?);
        let dtype = x.spec().dtype;
        // The comparison treats NaN as equal to itself: NaN wins a position, whose gradient then goes to the NaN
        // values.
        static SAME: LazyLock<Program> =
            LazyLock::new(|| Program::new("scatter_extreme", |[a, b], []| [a.eq(b) | (a.ne(a) & b.ne(b))]));
        let one = |hit: T| hit.to_dtype(dtype).map(|h| h.detach());
        let same = |a: &T, b: &T| one(a.apply_program(&SAME, &[b], &[])?);
        let from_src = same(&src, &y.gather(axis, &index)?)?;
        let none = T::constant(Tensor::zeros(x.runtime(), x.spec().shape, dtype)?);
        let named = none.scatter_add(axis, &index, &from_src)?;
        // A position that no element names keeps its value.
        let from_x = if self.include_self { same(&x, &y)? } else { one(named.eq(0.0)?)? };
        let share = g.div(&named.add(&from_x)?)?;
        if cx.wants(0) {
            cx.give_value(0, &share.mul(&from_x)?)?;
        }
        if cx.wants(2) {
            cx.give_value(2, &share.gather(axis, &index)?.mul(&from_src)?)?;
        }
        Ok(())
    }
}
