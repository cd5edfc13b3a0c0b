//! Eigenvalues and eigenvectors of symmetric matrices.

use autograd::Var;
use faer::{MatMut, MatRef, Side, linalg::solvers::SelfAdjointEigen};
use numcore::{
    Result, Runtime,
    ops::{Apply, Backprop, Bits, MatmulOps, PointwiseOps, Saves, ViewOps},
};

use crate::{
    host::{Kernel, Real, apply, square},
    parts::{diagonal, finite, gaps, positive, sum},
};

/// The eigenvalues `w: [.., N]`, ascending, and eigenvectors `V: [.., N, N]`, in columns, of symmetric matrices:
/// `A = V diag(w) Vᵀ`. The lower triangle of `a: [.., N, N]` is read; the gradient is symmetric. The largest element of
/// each eigenvector is positive.
///
/// The gradient of eigenvectors is infinite, or not a number, where eigenvalues are equal; that of eigenvalues is not.
///
/// # Errors
/// Fails if a matrix is not square or has elements that are not finite.
#[track_caller]
pub fn eigh<R: Runtime>(a: &Var<R>) -> Result<(Var<R>, Var<R>)> {
    square("eigh", &a.spec().shape)?;
    let [values, vectors] = apply(Eigh, &[a])?;
    Ok((values, vectors))
}

/// The eigenvalues of symmetric matrices, as [`eigh`] returns them.
///
/// # Errors
/// Fails as [`eigh`] does.
#[track_caller]
pub fn eigvalsh<R: Runtime>(a: &Var<R>) -> Result<Var<R>> {
    Ok(eigh(a)?.0)
}

struct Eigh;

impl Kernel for Eigh {
    const NAME: &'static str = "eigh";

    fn outs(&self, ins: &[[usize; 2]]) -> Vec<Vec<usize>> {
        {
            let [n, _] = ins[0];
            vec![vec![n], vec![n, n]]
        }
    }

    fn run<T: Real>(&self, ins: &[MatRef<'_, T>], outs: &mut [MatMut<'_, T>]) -> Result<(), String> {
        if ins[0].nrows() == 0 {
            return Ok(());
        }
        let failed = |error| format!("has no eigenvalues that were found: {error:?}");
        let own = SelfAdjointEigen::new(finite(ins[0])?, Side::Lower).map_err(failed)?;
        let [values, vectors] = outs else { return Err("has two results".into()) };
        values.as_mut().col_mut(0).copy_from(own.S().column_vector());
        vectors.copy_from(own.U());
        positive(vectors, None);
        Ok(())
    }

    fn saves(&self) -> Saves {
        Saves { inputs: Bits::NONE, outputs: Bits::of(&[0, 1]) }
    }

    // Giles 2008, section 3.1: `Ā = V (diag(w̄) + F ∘ Vᵀ V̄) Vᵀ`, where `Fᵢⱼ = 1 / (wⱼ − wᵢ)` off the diagonal.
    fn backward<R: Runtime>(&self, cx: &mut dyn Backprop<Var<R>>) -> Result<()> {
        let (w, v) = (cx.output(0)?, cx.output(1)?);
        let of_values = cx.upstream(0)?.map(|g| diagonal(&g)).transpose()?;
        let of_vectors = match cx.upstream(1)? {
            Some(g) => Some(v.t()?.matmul(&g)?.div(&gaps(&w)?)?),
            None => None,
        };
        let Some(inner) = sum(of_values, of_vectors)? else { return Ok(()) };
        let all = v.matmul(&inner)?.matmul(&v.t()?)?;
        cx.give_value(0, &all.add(&all.t()?)?.mul(0.5)?)
    }
}
