//! General systems, and inverses.

use autograd::Var;
use faer::{
    MatMut, MatRef,
    linalg::solvers::{PartialPivLu, Solve as _},
};
use numcore::{
    Result, Runtime,
    ops::{Apply, Backprop, Bits, MatmulOps, PointwiseOps, Saves, ViewOps},
};

use crate::{
    host::{Kernel, Real, apply, square},
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
    let [out] = apply(Solve, &[&a, &b])?;
    Ok(out)
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
    let [out] = apply(Inverse, &[a])?;
    Ok(out)
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
    const NAME: &'static str = "solve";

    fn outs(&self, ins: &[[usize; 2]]) -> Vec<Vec<usize>> {
        vec![ins[1].to_vec()]
    }

    fn run<T: Real>(&self, ins: &[MatRef<'_, T>], outs: &mut [MatMut<'_, T>]) -> Result<(), String> {
        outs[0].copy_from(ins[1]);
        lu(ins[0])?.solve_in_place(outs[0].as_mut());
        Ok(())
    }

    fn saves(&self) -> Saves {
        Saves { inputs: Bits::of(&[0]), outputs: Bits::of(&[0]) }
    }

    // `B̄ = A⁻ᵀ X̄`, `Ā = −B̄ Xᵀ`.
    fn backward<R: Runtime>(&self, cx: &mut dyn Backprop<Var<R>>) -> Result<()> {
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
    const NAME: &'static str = "inverse";

    fn outs(&self, ins: &[[usize; 2]]) -> Vec<Vec<usize>> {
        vec![ins[0].to_vec()]
    }

    fn run<T: Real>(&self, ins: &[MatRef<'_, T>], outs: &mut [MatMut<'_, T>]) -> Result<(), String> {
        outs[0].fill(T::default());
        (0..ins[0].nrows()).for_each(|i| outs[0][(i, i)] = T::nearest(1.0));
        lu(ins[0])?.solve_in_place(outs[0].as_mut());
        Ok(())
    }

    fn saves(&self) -> Saves {
        Saves { inputs: Bits::NONE, outputs: Bits::of(&[0]) }
    }

    // `Ā = −Yᵀ Ȳ Yᵀ` of the inverse `Y`.
    fn backward<R: Runtime>(&self, cx: &mut dyn Backprop<Var<R>>) -> Result<()> {
        let (g, y) = (cx.grad()?, cx.output(0)?.t()?);
        cx.give_value(0, &y.matmul(&g)?.matmul(&y)?.neg()?)
    }
}
