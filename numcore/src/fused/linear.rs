//! A matmul with its epilogue: the affine layer, with an optional bias and an optional residual.

use std::ops::RangeInclusive;

use smallvec::smallvec;

use super::{Fused, FusedOp};
use crate::{
    Error, Out, Result, Runtime, Shape, Support, Tensor,
    ops::{
        Apply, Backprop, Bits, Matmul, MatmulOps, Outs, PointwiseOps, Reduce, Rule, Saves, Spec, Specs, ViewOps, matmul,
    },
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
        if let Some(i) = self.residual_at() {
            cx.give_sum_to(i, &g)?;
        }
        let is_trained = self.bias && cx.wants(Linear::BIAS);
        if is_trained && cx.wants(Linear::WEIGHT) && g.runtime().supports_accumulate(&FusedOp::LinearGrad(LinearGrad)) {
            matmul::gradient_of_left(cx, &g)?;
            let (x, g) = matmul::rows_of_both(cx, &g)?;
            return cx.give_all(Linear::WEIGHT, LinearGrad.into(), &[&x, &g]);
        }
        if is_trained {
            cx.give_sum_to(Linear::BIAS, &g)?;
        }
        matmul::gradient(cx, &g)
    }
}

/// The gradients of a linear layer's parameters: of the weight `[K, N]`, `xᵀ · g`, and of the bias `[N]`, the sum of
/// the rows of `g`. Runtimes that [accumulate](Runtime::supports_accumulate) into its outputs compute both in one call;
/// others are given a product and a sum. Inputs are `x: [M, K]` and `g: [M, N]`, of one floating dtype. Outputs may
/// have any layout, and may be accumulated into.
#[derive(Clone, Debug)]
pub struct LinearGrad;

impl LinearGrad {
    /// Position of `x` among the inputs.
    pub const X: usize = 0;
    /// Position of the gradient of the layer's output among the inputs.
    pub const GRAD: usize = 1;
}

impl Fused for LinearGrad {
    fn name(&self) -> &'static str {
        "linear_grad"
    }

    fn arity(&self) -> RangeInclusive<usize> {
        2..=2
    }

    fn infer(&self, ins: &[Spec]) -> Result<Specs> {
        let (x, g) = (ins[LinearGrad::X], ins[LinearGrad::GRAD]);
        if !x.dtype.is_float() || g.dtype != x.dtype {
            return Err(Error::dtype("linear_grad", &[x.dtype, g.dtype], "x and g must have one floating dtype"));
        }
        let ([rows, inner], [of_g, columns]) = (&x.shape[..], &g.shape[..]) else {
            return Err(Error::shape("linear_grad", &[x.shape, g.shape], "needs x [M, K] and g [M, N]"));
        };
        if rows != of_g {
            let why = format!("x has {rows} rows, and g {of_g}");
            return Err(Error::shape("linear_grad", &[x.shape, g.shape], why));
        }
        Ok(smallvec![Spec::new([*inner, *columns], x.dtype), Spec::new([*columns], x.dtype)])
    }

    fn decompose<T: Apply>(&self, ins: &[&T]) -> Result<Outs<T>> {
        let g = ins[LinearGrad::GRAD];
        let weight = ins[LinearGrad::X].t()?.matmul(g)?;
        Ok(smallvec![weight, T::apply1(sum_of_rows(g.spec()), &[g])?])
    }

    fn computes_in_f32(&self) -> bool {
        // Products and sums accumulate in `f32`.
        false
    }

    fn writes_any_layout(&self) -> bool {
        true
    }

    fn run_in_parts<R: Runtime>(&self, ins: &[&Tensor<R>], outs: &mut [Out<'_, R>]) -> Result<Support> {
        let g = ins[LinearGrad::GRAD];
        let [weight, bias] = outs else { return Ok(Support::Decompose) };
        sum_of_rows(g.spec()).run(&[g], std::slice::from_mut(bias))?;
        Matmul.run(&[&ins[LinearGrad::X].t()?, g], std::slice::from_mut(weight))?;
        Ok(Support::Done)
    }

    fn saves(&self, _: Bits) -> Option<Saves> {
        None
    }

    fn gradient<T: Apply>(&self, _: &mut dyn Backprop<T>) -> Result<()> {
        Ok(())
    }
}

/// The sum of the rows of `g: [M, N]`.
pub(crate) fn sum_of_rows(g: Spec) -> Reduce {
    Reduce::sum_to(Shape::from([g.shape[1]]))
}
