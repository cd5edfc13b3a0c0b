//! Order along an axis: sorted values with their positions, and the largest `k`.

use smallvec::smallvec;

use super::{Apply, Backprop, Bits, IndexOps, Op, Rule, Saves, Spec, Specs, ViewOps};
use crate::{DType, Error, Out, Result, Runtime, Tensor, TensorMut};

/// Stable sort along an axis; outputs values and positions (`i64`). NaN sorts as largest.
#[derive(Clone, Debug)]
pub struct Sort {
    axis: usize,
    descending: bool,
}

impl Rule for Sort {
    fn name(&self) -> &'static str {
        "sort"
    }

    fn infer(&self, ins: &[Spec]) -> Result<Specs> {
        Ok(smallvec![ins[0], Spec { shape: ins[0].shape, dtype: DType::I64 }])
    }

    fn run<R: Runtime>(&self, ins: &[&Tensor<R>], outs: &mut [Out<'_, R>]) -> Result<()> {
        let (rt, x) = (ins[0].runtime(), ins[0]);
        if let [values, index] = outs {
            return rt.sort(x.view(), self.axis, self.descending, values.view.reborrow(), index.view.reborrow());
        }
        let mut index = TensorMut::alloc(rt, *x.shape(), DType::I64)?;
        super::overwriting(rt, &mut outs[0], |out| rt.sort(x.view(), self.axis, self.descending, out, index.out().view))
    }

    fn saves(&self, _: Bits) -> Result<Saves> {
        Ok(Saves { inputs: Bits::NONE, outputs: Bits::of(&[1]) })
    }

    fn gradient<T: Apply>(&self, cx: &mut dyn Backprop<T>) -> Result<()> {
        let (g, index) = (cx.grad()?, cx.output(1)?);
        let size = cx.input_spec(0).shape[self.axis];
        cx.give(0, Op::ScatterAdd(super::ScatterAdd::new(self.axis, size)), &[&g, &index])
    }
}

/// Order along an axis.
pub trait SortOps: Apply {
    /// Sorted values and their positions (`i64`), stable; NaN sorts as largest.
    fn sort(&self, axis: isize, descending: bool) -> Result<(Self, Self)> {
        let axis = self.spec().shape.axis("sort", axis)?;
        let mut both = Self::apply(Sort { axis, descending }.into(), &[self])?;
        let index = both.remove(1);
        Ok((both.remove(0), index))
    }
    /// The `k` largest along `axis`, in descending order, and their positions.
    fn topk(&self, k: usize, axis: isize) -> Result<(Self, Self)> {
        let shape = self.spec().shape;
        if k > shape[shape.axis("topk", axis)?] {
            return Err(Error::shape("topk", &[shape], format!("axis {axis} has fewer than {k} elements")));
        }
        let (_, index) = self.detach().sort(axis, true)?;
        let index = index.narrow(axis, 0, k)?;
        Ok((self.gather(axis, &index)?, index))
    }
    /// The positions that sort `self`.
    fn argsort(&self, axis: isize, descending: bool) -> Result<Self> {
        Ok(self.detach().sort(axis, descending)?.1)
    }
}

impl<T: Apply> SortOps for T {}
