//! Sorting along an axis: sorted values with their positions, and the largest `k`.

use std::ops::RangeInclusive;

use smallvec::smallvec;

use super::{Apply, Backprop, Bits, IndexOps, Op, Rule, Saves, Spec, Specs, ViewOps};
use crate::{DType, Error, Out, Result, Runtime, Tensor};

/// Stable sort along an axis, with outputs values and positions (`i64`). NaN sorts as largest.
#[derive(Clone, Debug)]
pub struct Sort {
    axis: usize,
    descending: bool,
}

impl Sort {
    /// The axis that is sorted.
    pub fn axis(&self) -> usize {
        self.axis
    }

    /// Tells whether the largest element comes first.
    pub fn is_descending(&self) -> bool {
        self.descending
    }

    /// The tangent of the sorted values, in their order.
    #[track_caller]
    pub(super) fn tangent<T: Apply>(&self, tangent: &T, index: &T) -> Result<T> {
        tangent.gather(self.axis as isize, index)
    }
}

impl Rule for Sort {
    fn name(&self) -> &'static str {
        "sort"
    }

    fn arity(&self) -> RangeInclusive<usize> {
        1..=1
    }

    fn infer(&self, ins: &[Spec]) -> Result<Specs> {
        Ok(smallvec![ins[0], Spec { shape: ins[0].shape, dtype: DType::I64 }])
    }

    fn run<R: Runtime>(&self, ins: &[&Tensor<R>], outs: &mut [Out<'_, R>]) -> Result<()> {
        let (rt, x) = (ins[0].runtime(), ins[0]);
        let [values, index] = outs else { return Ok(()) };
        super::overwriting(rt, values, |values| {
            super::overwriting(rt, index, |index| rt.sort(x.view(), self.axis, self.descending, values, index))
        })
    }

    fn saves(&self, _: Bits) -> Result<Saves> {
        Ok(Saves { inputs: Bits::NONE, outputs: Bits::of(&[1]) })
    }

    fn gradient<T: Apply>(&self, cx: &mut dyn Backprop<T>) -> Result<()> {
        let (g, index) = (cx.grad()?, cx.output(1)?);
        let size = cx.input_spec(0)?.shape[self.axis];
        cx.give(0, Op::ScatterAdd(super::ScatterAdd::new(self.axis, size)), &[&g, &index])
    }
}

/// Sorting along an axis.
pub trait SortOps: Apply {
    /// Sorted values and their positions (`i64`) along `axis`; the sort is stable, and NaN sorts as largest.
    #[track_caller]
    fn sort(&self, axis: isize, descending: bool) -> Result<(Self, Self)> {
        let axis = self.spec().shape.axis("sort", axis)?;
        let mut both = Self::apply(Sort { axis, descending }.into(), &[self])?;
        let index = both.remove(1);
        Ok((both.remove(0), index))
    }
    /// The `k` largest along `axis`, in descending order, and their positions.
    #[track_caller]
    fn topk(&self, k: usize, axis: isize) -> Result<(Self, Self)> {
        extremes("topk", self, k, axis, true)
    }
    /// The `k` smallest along `axis`, in ascending order, and their positions: PyTorch's `topk(largest=False)`.
    #[doc(alias = "topk")]
    #[track_caller]
    fn topk_smallest(&self, k: usize, axis: isize) -> Result<(Self, Self)> {
        extremes("topk_smallest", self, k, axis, false)
    }
    /// The positions that sort `self` along `axis`, as `i64`.
    #[track_caller]
    fn argsort(&self, axis: isize, descending: bool) -> Result<Self> {
        Ok(self.detach().sort(axis, descending)?.1)
    }
}

impl<T: Apply> SortOps for T {}

/// The first `k` in order along `axis`, and their positions.
#[track_caller]
fn extremes<T: Apply>(op: &'static str, x: &T, k: usize, axis: isize, descending: bool) -> Result<(T, T)> {
    let shape = x.spec().shape;
    if k > shape[shape.axis(op, axis)?] {
        return Err(Error::shape(op, &[shape], format!("axis {axis} has fewer than {k} elements")));
    }
    let index = x.detach().sort(axis, descending)?.1.narrow(axis, 0, k)?;
    Ok((x.gather(axis, &index)?, index))
}
