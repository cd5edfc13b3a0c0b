//! The singular value decomposition.

use autograd::Var;
use faer::{MatMut, MatRef, linalg::solvers::Svd as ThinSvd};
use numcore::{
    Result, Runtime,
    ops::{Apply, Backprop, Bits, MatmulOps, PointwiseOps, Saves, ViewOps},
};

use crate::{
    host::{Kernel, Real, apply, axes},
    parts::{diagonal, finite, gaps, positive, sum},
};

/// The factors of `A = U diag(s) Vᵀ`.
#[derive(Clone, Debug)]
pub struct Svd<R: Runtime> {
    /// Left singular vectors in columns, `[.., M, K]`.
    pub u: Var<R>,
    /// Singular values, descending, `[.., K]`.
    pub s: Var<R>,
    /// Right singular vectors in rows, `[.., K, N]`.
    pub vt: Var<R>,
}

/// The reduced singular value decomposition of `a: [.., M, N]`, with `K = min(M, N)` singular values. The largest
/// element of each left singular vector is positive.
///
/// The gradient of singular vectors is infinite, or not a number, where singular values are equal, or 0 in a matrix
/// that is not square. That of singular values is finite.
///
/// # Errors
/// Fails if a matrix has elements that are not finite.
#[track_caller]
pub fn svd<R: Runtime>(a: &Var<R>) -> Result<Svd<R>> {
    axes("svd", &a.spec().shape)?;
    let [u, s, v] = apply(Factors, &[a])?;
    Ok(Svd { u, s, vt: v.t()? })
}

/// The singular values of matrices, as [`svd`] returns them.
///
/// # Errors
/// Fails as [`svd`] does.
#[track_caller]
pub fn svdvals<R: Runtime>(a: &Var<R>) -> Result<Var<R>> {
    Ok(svd(a)?.s)
}

/// `U`, `s` and `V`.
struct Factors;

impl Kernel for Factors {
    const NAME: &'static str = "svd";

    fn outs(&self, ins: &[[usize; 2]]) -> Vec<Vec<usize>> {
        {
            let [m, n] = ins[0];
            let k = m.min(n);
            vec![vec![m, k], vec![k], vec![n, k]]
        }
    }

    fn run<T: Real>(&self, ins: &[MatRef<'_, T>], outs: &mut [MatMut<'_, T>]) -> Result<(), String> {
        let failed = |error| format!("has no singular values that were found: {error:?}");
        let own = ThinSvd::new_thin(finite(ins[0])?).map_err(failed)?;
        let [u, s, v] = outs else { return Err("has three results".into()) };
        u.copy_from(own.U());
        s.as_mut().col_mut(0).copy_from(own.S().column_vector());
        v.copy_from(own.V());
        positive(u, Some(v));
        Ok(())
    }

    fn saves(&self) -> Saves {
        Saves { inputs: Bits::NONE, outputs: Bits::of(&[0, 1, 2]) }
    }

    // Townsend 2016, "Differentiating the singular value decomposition". With `Eᵢⱼ = sⱼ² − sᵢ²` and the antisymmetric
    // part `⟨X⟩ = X − Xᵀ`: `U (⟨UᵀŪ⟩/E · diag(s) + diag(s) · ⟨VᵀV̄⟩/E + diag(s̄)) Vᵀ`, and what the vectors take from
    // outside of the spaces of `U` and `V`.
    fn backward<R: Runtime>(&self, cx: &mut dyn Backprop<Var<R>>) -> Result<()> {
        let (u, s, v) = (cx.output(0)?, cx.output(1)?, cx.output(2)?);
        let (rows, columns) = (s.unsqueeze(-1)?, s.unsqueeze(-2)?);
        let (of_u, of_s, of_v) = (cx.upstream(0)?, cx.upstream(1)?, cx.upstream(2)?);
        let turned = |x: &Var<R>, g: &Var<R>| {
            let product = x.t()?.matmul(g)?;
            product.sub(&product.t()?)?.div(&gaps(&s.square()?)?)
        };
        let from_u = of_u.as_ref().map(|g| turned(&u, g)?.mul(&columns)).transpose()?;
        let from_v = of_v.as_ref().map(|g| turned(&v, g)?.mul(&rows)).transpose()?;
        let from_s = of_s.map(|g| diagonal(&g)).transpose()?;
        let inner = sum(sum(from_u, from_v)?, from_s)?;
        let mut all = inner.map(|inner| u.matmul(&inner)?.matmul(&v.t()?)).transpose()?;
        // The part of a gradient that is orthogonal to the vectors.
        let outside = |x: &Var<R>, g: &Var<R>| g.sub(&x.matmul(&x.t()?.matmul(g)?)?)?.div(&columns);
        let (k, tall, wide) = (s.spec().shape.rank() - 1, u.spec().shape, v.spec().shape);
        let count = s.spec().shape[k];
        if let Some(g) = of_u.filter(|_| tall[k] > count) {
            all = sum(all, Some(outside(&u, &g)?.matmul(&v.t()?)?))?;
        }
        if let Some(g) = of_v.filter(|_| wide[k] > count) {
            all = sum(all, Some(u.matmul(&outside(&v, &g)?.t()?)?))?;
        }
        all.map_or(Ok(()), |all| cx.give_value(0, &all))
    }
}
