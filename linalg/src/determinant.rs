//! Determinants.

use autograd::Var;
use faer::{MatMut, MatRef, linalg::solvers::PartialPivLu};
use numcore::{
    Result, Runtime,
    ops::{Apply, Backprop, Bits, PointwiseOps, Saves, ViewOps},
};

use crate::{
    host::{Kernel, Real, apply, square},
    inverse,
    parts::sum,
};

/// The determinants of square matrices, `[.., N, N]` to `[..]`.
///
/// # Errors
/// Fails if a matrix is not square. The gradient at a singular matrix is an error.
#[track_caller]
pub fn det<R: Runtime>(a: &Var<R>) -> Result<Var<R>> {
    square("det", &a.spec().shape)?;
    let [.., value] = apply::<_, _, 3>(Determinant, &[a])?;
    Ok(value)
}

/// The signs, -1, 0 or 1, and the logarithms of the absolute values of determinants: `[.., N, N]` to `[..]` each. They
/// neither overflow nor underflow. A singular matrix has 0 and -∞.
///
/// # Errors
/// Fails if a matrix is not square. The gradient at a singular matrix is an error.
#[track_caller]
pub fn slogdet<R: Runtime>(a: &Var<R>) -> Result<(Var<R>, Var<R>)> {
    square("slogdet", &a.spec().shape)?;
    let [sign, log, _] = apply(Determinant, &[a])?;
    Ok((sign.detach(), log))
}

/// The logarithms of determinants, `[.., N, N]` to `[..]`; not a number where they are negative.
///
/// # Errors
/// Fails if a matrix is not square. The gradient at a singular matrix is an error.
#[track_caller]
pub fn logdet<R: Runtime>(a: &Var<R>) -> Result<Var<R>> {
    let (sign, log) = slogdet(a)?;
    // `ln(-1)` is not a number, `ln(1)` is 0, and `ln(0)` is -∞.
    log.add(&sign.log()?)
}

/// The sign, the logarithm and the value.
struct Determinant;

impl Kernel for Determinant {
    const NAME: &'static str = "slogdet";

    fn outs(&self, _: &[[usize; 2]]) -> Vec<Vec<usize>> {
        vec![Vec::new(); 3]
    }

    fn run<T: Real>(&self, ins: &[MatRef<'_, T>], outs: &mut [MatMut<'_, T>]) -> Result<(), String> {
        let lu = PartialPivLu::new(ins[0]);
        let (forward, _) = lu.P().arrays();
        let (mut sign, mut log, mut value) = (parity(forward), 0.0, parity(forward));
        for i in 0..ins[0].nrows() {
            let pivot = lu.U()[(i, i)].wide();
            if pivot == 0.0 {
                // The pivots after it are no numbers.
                (sign, log, value) = (0.0, f64::NEG_INFINITY, 0.0);
                break;
            }
            log += pivot.abs().ln();
            sign *= pivot.signum();
            value *= pivot;
        }
        outs[0].fill(T::nearest(sign));
        outs[1].fill(T::nearest(log));
        outs[2].fill(T::nearest(value));
        Ok(())
    }

    fn saves(&self) -> Saves {
        Saves { inputs: Bits::of(&[0]), outputs: Bits::of(&[2]) }
    }

    // `Ā = (ḡ + d̄ d) A⁻ᵀ` of the logarithm and of the value `d`.
    fn backward<R: Runtime>(&self, cx: &mut dyn Backprop<Var<R>>) -> Result<()> {
        let of_log = cx.upstream(1)?;
        let of_value = match cx.upstream(2)? {
            Some(g) => Some(g.mul(&cx.output(2)?)?),
            None => None,
        };
        let Some(g) = sum(of_log, of_value)? else { return Ok(()) };
        let inverse = inverse(&cx.input(0)?)?.t()?;
        cx.give_value(0, &inverse.mul(&g.unsqueeze(-1)?.unsqueeze(-1)?)?)
    }
}

/// The sign of a permutation.
fn parity(to: &[usize]) -> f64 {
    let mut seen = vec![false; to.len()];
    let mut sign = 1.0;
    for start in 0..to.len() {
        let (mut at, mut len) = (start, 0);
        while !std::mem::replace(&mut seen[at], true) {
            (at, len) = (to[at], len + 1);
        }
        // A cycle of even length is an odd permutation.
        if len > 0 && len % 2 == 0 {
            sign = -sign;
        }
    }
    sign
}
