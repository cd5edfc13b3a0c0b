//! General systems, and inverses.

use std::sync::Arc;

use autograd::{Function, Var, apply_function};
use faer::{
    MatMut, MatRef,
    linalg::solvers::{PartialPivLu, Solve as _},
};
use numcore::{
    Result, Runtime, Tensor,
    ops::{Apply, Backprop, Bits, MatmulOps, PointwiseOps, Saves, ViewOps},
};

use crate::{
    host::{Kernel, Real, axes, on_host, square},
    triangular::systems,
};

/// The solution `X` of `A X = B`, by LU with partial pivoting: `a: [.., N, N]`, `b: [.., N, K]`, `X: [.., N, K]`. The
/// axes before the last two broadcast.
///
/// # Errors
/// Fails if shapes do not fit, or if a matrix is singular.
#[track_caller]
pub fn solve<R: Runtime>(a: &Var<R>, b: &Var<R>) -> Result<Var<R>> {
    let [a, b] = systems("solve", a, b)?;
    Ok(apply_function(Arc::new(Solve), &[&a, &b])?.remove(0))
}

/// The inverse of square matrices, `[.., N, N]`. Prefer [`solve`] to a product with it: that is quicker and more
/// precise.
///
/// # Errors
/// Fails if a matrix is not square, or singular.
#[doc(alias("inv"))]
#[track_caller]
pub fn inverse<R: Runtime>(a: &Var<R>) -> Result<Var<R>> {
    square("inverse", &a.spec().shape)?;
    Ok(apply_function(Arc::new(Inverse), &[a])?.remove(0))
}

/// LU of a matrix, or the error of a singular one.
pub(crate) fn lu<T: Real>(a: MatRef<'_, T>) -> Result<PartialPivLu<T>, String> {
    let lu = PartialPivLu::new(a);
    match (0..a.nrows()).find(|i| lu.U()[(*i, *i)] == T::default()) {
        Some(i) => Err(format!("is singular: pivot {i} is 0")),
        None => Ok(lu),
    }
}

#[derive(Debug)]
struct Solve;

impl Kernel for Solve {
    fn run<T: Real>(&self, ins: &[MatRef<'_, T>], outs: &mut [MatMut<'_, T>]) -> Result<(), String> {
        outs[0].copy_from(ins[1]);
        lu(ins[0])?.solve_in_place(outs[0].as_mut());
        Ok(())
    }
}

impl<R: Runtime> Function<R> for Solve {
    fn name(&self) -> &'static str {
        "solve"
    }

    fn forward(&self, ins: &[Tensor<R>]) -> Result<Vec<Tensor<R>>> {
        on_host("solve", self, ins, &[&axes("solve", ins[1].shape())?.1])
    }

    fn saves(&self) -> Saves {
        Saves { inputs: Bits::of(&[0]), outputs: Bits::of(&[0]) }
    }

    // `B̄ = A⁻ᵀ X̄`, `Ā = −B̄ Xᵀ`.
    fn backward(&self, cx: &mut dyn Backprop<Var<R>>) -> Result<()> {
        let of_b = solve(&cx.input(0)?.t()?, &cx.grad()?)?;
        if cx.wants(0) {
            let of_a = of_b.matmul(&cx.output(0)?.t()?)?.neg()?;
            cx.give_value(0, &of_a)?;
        }
        cx.give_value(1, &of_b)
    }
}

#[derive(Debug)]
struct Inverse;

impl Kernel for Inverse {
    fn run<T: Real>(&self, ins: &[MatRef<'_, T>], outs: &mut [MatMut<'_, T>]) -> Result<(), String> {
        outs[0].fill(T::default());
        (0..ins[0].nrows()).for_each(|i| outs[0][(i, i)] = T::nearest(1.0));
        lu(ins[0])?.solve_in_place(outs[0].as_mut());
        Ok(())
    }
}

impl<R: Runtime> Function<R> for Inverse {
    fn name(&self) -> &'static str {
        "inverse"
    }

    fn forward(&self, ins: &[Tensor<R>]) -> Result<Vec<Tensor<R>>> {
        on_host("inverse", self, ins, &[&axes("inverse", ins[0].shape())?.1])
    }

    fn saves(&self) -> Saves {
        Saves { inputs: Bits::NONE, outputs: Bits::of(&[0]) }
    }

    // `Ā = −Yᵀ Ȳ Yᵀ` of the inverse `Y`.
    fn backward(&self, cx: &mut dyn Backprop<Var<R>>) -> Result<()> {
        let (g, y) = (cx.grad()?, cx.output(0)?.t()?);
        cx.give_value(0, &y.matmul(&g)?.matmul(&y)?.neg()?)
    }
}
