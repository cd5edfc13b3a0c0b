//! The QR factorization.

use autograd::{Var, no_autocast};
use faer::{MatMut, MatRef, linalg::solvers::Qr as HouseholderQr};
use numcore::{
    Result, Runtime,
    ops::{Apply, Backprop, Bits, JoinOps, MatmulOps, PointwiseOps, Saves, ViewOps, cat},
};

use crate::{
    Triangle,
    host::{Kernel, Real, apply, axes},
    parts::{negate, sum},
    solve_triangular,
};

/// The factors `Q: [.., M, K]`, with orthonormal columns, and `R: [.., K, N]`, upper triangular, of `A = Q R`, for
/// `a: [.., M, N]` and `K = min(M, N)`. The diagonal of `R` is not negative, so that the factors are unique where the
/// first `K` columns are independent.
///
/// # Errors
/// Fails unless `a` has two axes or more. Where these columns are dependent, the gradient is an
/// error, or huge if rounding hides it.
#[track_caller]
pub fn qr<R: Runtime>(a: &Var<R>) -> Result<(Var<R>, Var<R>)> {
    let (_, [m, n]) = axes("qr", &a.spec().shape)?;
    // The columns behind the first M follow from the factors of these.
    let square = if n > m { a.narrow(-1, 0, m)? } else { a.clone() };
    let [q, r] = apply(Qr, &[&square])?;
    if n <= m {
        return Ok((q, r));
    }
    let rest = no_autocast(|| q.t()?.matmul(&a.narrow(-1, m, n - m)?))?;
    Ok((q, cat(&[&r, &rest], -1)?))
}

struct Qr;

impl Kernel for Qr {
    const NAME: &'static str = "qr";

    fn outs(&self, ins: &[[usize; 2]]) -> Vec<Vec<usize>> {
        {
            let [m, n] = ins[0];
            vec![vec![m, n], vec![n, n]]
        }
    }

    fn run<T: Real>(&self, ins: &[MatRef<'_, T>], outs: &mut [MatMut<'_, T>]) -> Result<(), String> {
        let factors = HouseholderQr::new(ins[0]);
        let [q, r] = outs else { return Err("has two factors".into()) };
        q.copy_from(factors.compute_thin_Q());
        r.fill(T::default());
        r.copy_from_triangular_upper(factors.thin_R());
        for k in 0..r.nrows() {
            if r[(k, k)] < T::default() {
                negate(&mut r.as_mut().transpose_mut(), k);
                negate(q, k);
            }
        }
        Ok(())
    }

    fn saves(&self) -> Saves {
        Saves { inputs: Bits::NONE, outputs: Bits::of(&[0, 1]) }
    }

    // Walter and Lehmann 2010: `Ā = (Q̄ + Q S) R⁻ᵀ`, where `S` is the symmetric matrix with the lower triangle of
    // `R R̄ᵀ − Q̄ᵀ Q`.
    fn backward<R: Runtime>(&self, cx: &mut dyn Backprop<Var<R>>) -> Result<()> {
        let (q, r) = (cx.output(0)?, cx.output(1)?);
        let (of_q, of_r) = (cx.upstream(0)?, cx.upstream(1)?);
        let from_q = of_q.as_ref().map(|g| g.t()?.matmul(&q)?.neg()).transpose()?;
        let from_r = of_r.map(|g| r.matmul(&g.t()?)).transpose()?;
        let Some(m) = sum(from_r, from_q)? else { return Ok(()) };
        let symmetric = m.tril(0)?.add(&m.tril(-1)?.t()?)?;
        let Some(left) = sum(Some(q.matmul(&symmetric)?), of_q)? else { return Ok(()) };
        cx.give_value(0, &solve_triangular(&r, &left.t()?, Triangle::UPPER)?.t()?)
    }
}
