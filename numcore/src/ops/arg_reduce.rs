//! Arg-reductions: positions of extremes along an axis.

use std::ops::RangeInclusive;

use smallvec::smallvec;

use super::{Apply, Backprop, Bits, Rule, Saves, Spec, Specs, rule::no_gradient};
use crate::{ArgOp, DType, Error, Out, Result, Runtime, Tensor};

/// The position of an extreme along an axis, as `i64`; that axis keeps size 1.
#[derive(Clone, Debug)]
pub struct ArgReduce {
    op: ArgOp,
    axis: usize,
}

impl ArgReduce {
    /// The extreme whose position is returned.
    pub fn kind(&self) -> ArgOp {
        self.op
    }

    /// The axis along which positions count.
    pub fn axis(&self) -> usize {
        self.axis
    }
}

impl Rule for ArgReduce {
    fn name(&self) -> &'static str {
        match self.op {
            ArgOp::Max => "argmax",
            ArgOp::Min => "argmin",
        }
    }

    fn arity(&self) -> RangeInclusive<usize> {
        1..=1
    }

    fn infer(&self, ins: &[Spec]) -> Result<Specs> {
        let x = ins[0];
        if x.shape[self.axis] == 0 {
            return Err(Error::shape(self.name(), &[x.shape], format!("axis {} has no elements", self.axis)));
        }
        Ok(smallvec![Spec { shape: x.shape.with(self.axis, 1), dtype: DType::I64 }])
    }

    fn run<R: Runtime>(&self, ins: &[&Tensor<R>], outs: &mut [Out<'_, R>]) -> Result<()> {
        super::overwriting(ins[0].runtime(), &mut outs[0], |out| {
            ins[0].runtime().arg_reduce(self.op, ins[0].view(), self.axis, out)
        })
    }

    fn saves(&self, _: Bits) -> Result<Saves> {
        Ok(Saves::NONE)
    }

    fn gradient<T: Apply>(&self, _: &mut dyn Backprop<T>) -> Result<()> {
        Err(no_gradient(self.name(), "positions are whole numbers"))
    }
}

/// `argmax` and `argmin`; the axis stays, with size 1.
#[track_caller]
pub(super) fn arg<T: Apply>(x: &T, op: ArgOp, axis: isize) -> Result<T> {
    let rule = ArgReduce { op, axis: 0 };
    let axis = x.spec().shape.axis(rule.name(), axis)?;
    T::apply1(ArgReduce { axis, ..rule }, &[x])
}
