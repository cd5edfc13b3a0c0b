//! Softmax over the last axis, and its logarithm.

use std::{ops::RangeInclusive, sync::LazyLock};

use smallvec::smallvec;

use super::{Fused, as_forward};
use crate::{
    Error, Result, Shape,
    ops::{Apply, Backprop, Bits, Outs, PointwiseOps, Reduce, ReduceOps, Saves, ScalarList, Spec, Specs, finite_top},
    pointwise::Program,
};

/// Softmax, `eˣ / Σ eˣ` over the last axis, or its logarithm, of `x: [.., C]`. A row of `−∞` gives zeros.
#[derive(Clone, Debug)]
pub struct Softmax {
    /// True for the logarithm of the softmax.
    pub log: bool,
}

impl Fused for Softmax {
    fn name(&self) -> &'static str {
        if self.log { "log_softmax" } else { "softmax" }
    }

    fn arity(&self) -> RangeInclusive<usize> {
        1..=1
    }

    fn infer(&self, ins: &[Spec]) -> Result<Specs> {
        let x = ins[0];
        if !x.dtype.is_float() {
            return Err(Error::dtype(self.name(), &[x.dtype], "needs a floating dtype; cast with `to_dtype`"));
        }
        if x.shape.rank() == 0 {
            return Err(Error::shape(self.name(), &[x.shape], "needs at least one axis"));
        }
        Ok(smallvec![x])
    }

    fn decompose<T: Apply>(&self, ins: &[&T]) -> Result<Outs<T>> {
        static SHIFTED: LazyLock<Program> = LazyLock::new(|| Program::new("softmax", |[x, m], []| [(x - m).exp()]));
        static SHARE: LazyLock<Program> =
            LazyLock::new(|| Program::new("softmax", |[x, m, s], []| [s.eq(0.0).select(s, (x - m).exp() / s)]));
        static LOG: LazyLock<Program> =
            LazyLock::new(|| Program::new("log_softmax", |[x, m, s], []| [x - m - s.log()]));
        let x = ins[0];
        let rows = last_one(x.spec().shape);
        let top = finite_top(x, rows)?;
        let sum = T::apply1(Reduce::sum_of(SHIFTED.clone(), ScalarList::new(), rows), &[x, &top])?;
        let program = if self.log { &LOG } else { &SHARE };
        Ok(smallvec![x.apply_program(program, &[&top, &sum], &[])?])
    }

    fn saves(&self, _: Bits) -> Option<Saves> {
        Some(Saves { inputs: Bits::NONE, outputs: Bits(1) })
    }

    fn gradient<T: Apply>(&self, cx: &mut dyn Backprop<T>) -> Result<()> {
        let (g, y) = (cx.grad()?, cx.output(0)?);
        cx.give(0, SoftmaxGrad { log: self.log }.into(), &[&y, &g])
    }
}

/// The gradient of [`Softmax`]; inputs are its output `y: [.., C]` and the upstream gradient.
#[derive(Clone, Debug)]
pub struct SoftmaxGrad {
    /// True for the gradient of log-softmax.
    pub log: bool,
}

impl Fused for SoftmaxGrad {
    fn name(&self) -> &'static str {
        if self.log { "log_softmax_grad" } else { "softmax_grad" }
    }

    fn arity(&self) -> RangeInclusive<usize> {
        2..=2
    }

    fn infer(&self, ins: &[Spec]) -> Result<Specs> {
        let outs = Softmax { log: self.log }.infer(&ins[..1])?;
        as_forward(self.name(), [("the gradient", &ins[1], &outs[0])])?;
        Ok(outs)
    }

    fn decompose<T: Apply>(&self, ins: &[&T]) -> Result<Outs<T>> {
        static DOT: LazyLock<Program> = LazyLock::new(|| Program::new("softmax_grad", |[y, g], []| [y * g]));
        static BACK: LazyLock<Program> = LazyLock::new(|| Program::new("softmax_grad", |[y, g, d], []| [y * (g - d)]));
        static LOG: LazyLock<Program> =
            LazyLock::new(|| Program::new("log_softmax_grad", |[y, g, d], []| [g - y.exp() * d]));
        let (y, g) = (ins[0], ins[1]);
        if self.log {
            return Ok(smallvec![y.apply_program(&LOG, &[g, &g.sum_keepdim(&[-1])?], &[])?]);
        }
        let dot = T::apply1(Reduce::sum_of(DOT.clone(), ScalarList::new(), last_one(y.spec().shape)), &[y, g])?;
        Ok(smallvec![y.apply_program(&BACK, &[g, &dot], &[])?])
    }

    fn saves(&self, _: Bits) -> Option<Saves> {
        None
    }

    fn gradient<T: Apply>(&self, _: &mut dyn Backprop<T>) -> Result<()> {
        Ok(())
    }
}

pub(super) fn last_one(shape: Shape) -> Shape {
    shape.with(shape.rank() - 1, 1)
}
