//! A matmul with its epilogue: the affine layer, with an optional bias and an optional residual.

use std::ops::RangeInclusive;

use smallvec::smallvec;

use super::Fused;
use crate::{
    Error, Result, Shape,
    ops::{Apply, Backprop, Bits, MatmulOps, Outs, PointwiseOps, Saves, Spec, Specs, matmul},
};

/// The affine map `x · w + b + r`. Inputs are `x: [.., M, K]`, `w: [K, N]`, then `b: [N]` and `r: [.., M, N]` if given,
/// all of one floating dtype; the output is `[.., M, N]`. Terms are added in that order. A half-precision result is
/// rounded once if a kernel computes all of it, and after every operation if it is decomposed.
#[derive(Clone, Debug)]
pub struct Linear {
    /// True if there is a bias.
    pub bias: bool,
    /// True if there is a residual.
    pub residual: bool,
}

impl Linear {
    /// Position of `x` among the inputs.
    pub const X: usize = 0;
    /// Position of `w` among the inputs.
    pub const WEIGHT: usize = 1;
    /// Position of `b` among the inputs, if given.
    pub const BIAS: usize = 2;

    /// Position of the residual among the inputs, if there is one.
    fn residual_at(&self) -> Option<usize> {
        self.residual.then_some(Linear::BIAS + usize::from(self.bias))
    }
}

impl Fused for Linear {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn arity(&self) -> RangeInclusive<usize> {
        let n = 2 + usize::from(self.bias) + usize::from(self.residual);
        n..=n
    }

    fn infer(&self, ins: &[Spec]) -> Result<Specs> {
        let (x, w) = (ins[Linear::X], ins[Linear::WEIGHT]);
        if !x.dtype.is_float() || ins.iter().any(|s| s.dtype != x.dtype) {
            let dtypes: Vec<_> = ins.iter().map(|s| s.dtype).collect();
            return Err(Error::dtype(
                "linear",
                &dtypes,
                "input, weight and what is added must have one floating dtype",
            ));
        }
        let wrong = |why: String| {
            let shapes: Vec<Shape> = ins.iter().map(|s| s.shape).collect();
            Err(Error::shape("linear", &shapes, why))
        };
        let rank = x.shape.rank();
        if rank < 2 || w.shape.rank() != 2 {
            return wrong("needs x [.., M, K] and a weight seen as [K, N]".into());
        }
        if x.shape[rank - 1] != w.shape[0] {
            return wrong(format!("inner sizes {} and {} differ", x.shape[rank - 1], w.shape[0]));
        }
        let out = Spec { shape: x.shape.with(rank - 1, w.shape[1]), dtype: x.dtype };
        if self.bias && ins[Linear::BIAS].shape.dims() != [w.shape[1]] {
            return wrong(format!("needs a bias [{}]", w.shape[1]));
        }
        if self.residual_at().is_some_and(|i| ins[i].shape != out.shape) {
            return wrong(format!("what is added must have the output's shape {}", out.shape));
        }
        Ok(smallvec![out])
    }

    fn decompose<T: Apply>(&self, ins: &[&T]) -> Result<Outs<T>> {
        let product = ins[Linear::X].matmul(ins[Linear::WEIGHT])?;
        Ok(smallvec![ins[Linear::BIAS..].iter().try_fold(product, |y, x| y.add(*x))?])
    }

    fn computes_in_f32(&self) -> bool {
        // A half-precision matmul already accumulates in `f32`, and casting its operands would cost more memory than it
        // saves.
        false
    }

    fn saves(&self, wants: Bits) -> Option<Saves> {
        Some(matmul::saves(wants))
    }

    fn gradient<T: Apply>(&self, cx: &mut dyn Backprop<T>) -> Result<()> {
        let g = cx.grad()?;
        // Gradients are given in the order of the decomposition's nodes.
        self.residual_at()
            .into_iter()
            .chain(self.bias.then_some(Linear::BIAS))
            .try_for_each(|i| cx.give_sum_to(i, &g))?;
        matmul::gradient(cx, &g)
    }
}
