//! Gradients against finite differences, in `f64`: `(L(x + h) − L(x − h)) / 2h` for every element of every input. `L`
//! is the output, summed with a different weight for every element. Second derivatives are checked likewise, with the
//! gradient in place of the output.

use autograd::{Var, differentiable_grad, grad, no_grad};
use numcore::{
    DType, Result, Runtime, Tensor,
    ops::{PointwiseOps, ReduceOps},
};

use super::{
    case::{OpCase, no_gradient, weights},
    cases,
    dtypes::{computes, lacks},
    report::{Section, Verdict},
};

/// The step: the truncation error (`h²`) and the rounding error (`ε·|L|/h`) are then both near 1e-10, for `L` of about
/// 1.
const STEP: f64 = 1e-5;
/// The largest difference, relative to the larger of 1 and the input's largest derivative.
const TOLERANCE: f64 = 2e-8;

pub(crate) fn first<R: Runtime>(rt: &R) -> Section {
    section("gradients", rt, false)
}

pub(crate) fn second<R: Runtime>(rt: &R) -> Section {
    section("second derivatives", rt, true)
}

fn section<R: Runtime>(name: &'static str, rt: &R, twice: bool) -> Section {
    let mut section = Section::new(name);
    if !computes(rt, DType::F64) {
        section.skip(lacks(DType::F64));
        return section;
    }
    for case in cases::all::<R>().iter().filter(|c| c.twice || !twice) {
        section.check(&case.name, || check(rt, case, twice));
    }
    section
}

/// Compares the derivatives of a case with differences.
pub(crate) fn check<R: Runtime>(rt: &R, case: &OpCase<R>, twice: bool) -> Result<Verdict> {
    let value = |vars: &[Var<R>]| if twice { of_gradient(rt, case, vars) } else { of_output(rt, case, vars) };
    let vars = case.vars(&case.tensors(rt, DType::F64)?)?;
    let leaves = case.leaves(&vars);
    let of = value(&vars)?;
    // The gradient of a linear function depends on nothing.
    let analytic = if twice && !of.requires_grad() { vec![None; leaves.len()] } else { grad(&[&of], &leaves)? };
    let reals = case.inputs.iter().enumerate().filter(|(_, s)| s.is_real());
    let mut verdict = Verdict::PASSED;
    for ((i, sample), analytic) in reals.zip(&analytic) {
        let analytic = match analytic {
            Some(g) => g.value()?.to_f64s()?,
            None if twice => vec![0.0; sample.values().len()],
            None => return Err(no_gradient(i)),
        };
        let (numeric, rounding) =
            differences(rt, case, i, |vars| if twice { value(vars) } else { no_grad(|| value(vars)) })?;
        verdict = verdict.and(compare(i, &analytic, &numeric, rounding));
    }
    Ok(verdict)
}

/// The weighted sum of the output.
fn of_output<R: Runtime>(rt: &R, case: &OpCase<R>, vars: &[Var<R>]) -> Result<Var<R>> {
    let out = (case.f)(vars)?;
    out.mul(&weights(rt, &out, 1)?)?.sum_all()
}

/// The weighted sum of the gradients.
fn of_gradient<R: Runtime>(rt: &R, case: &OpCase<R>, vars: &[Var<R>]) -> Result<Var<R>> {
    let gradients = differentiable_grad(&[&of_output(rt, case, vars)?], &case.leaves(vars))?;
    let mut sum = Var::new(Tensor::zeros(rt, [], DType::F64)?);
    for (i, g) in gradients.iter().flatten().enumerate() {
        sum = sum.add(&g.mul(&weights(rt, g, 2 + i as u64)?)?.sum_all()?)?;
    }
    Ok(sum)
}

/// The central difference of `value` for every element of input `i`, and the error that rounding alone may cause. Both
/// values are rounded by `ε/2`, and the terms of a sum as large as `L` by as much again.
fn differences<R: Runtime>(
    rt: &R,
    case: &OpCase<R>,
    i: usize,
    value: impl Fn(&[Var<R>]) -> Result<Var<R>>,
) -> Result<(Vec<f64>, f64)> {
    let (mut tensors, mut largest) = (case.tensors(rt, DType::F64)?, 0f64);
    let sample = &case.inputs[i];
    let mut moved = sample.values().to_vec();
    let mut at = |k: usize, by: f64| -> Result<f64> {
        let before = std::mem::replace(&mut moved[k], sample.values()[k] + by);
        tensors[i] = sample.with(rt, DType::F64, &moved)?;
        moved[k] = before;
        let value = value(&case.vars(&tensors)?)?.item()?;
        largest = largest.max(value.abs());
        Ok(value)
    };
    let quotients = (0..sample.values().len()).map(|k| Ok((at(k, STEP)? - at(k, -STEP)?) / (2.0 * STEP)));
    let quotients = quotients.collect::<Result<_>>()?;
    Ok((quotients, f64::EPSILON * largest / STEP))
}

fn compare(i: usize, analytic: &[f64], numeric: &[f64], rounding: f64) -> Verdict {
    let largest = numeric.iter().fold(1.0f64, |m, v| m.max(v.abs()));
    for (k, (a, n)) in analytic.iter().zip(numeric).enumerate() {
        // Written so that NaN fails.
        let near = (a - n).abs() <= TOLERANCE * largest + rounding;
        if !near {
            return Verdict::failed(format!(
                "derivative by element {k} of input {i} is {a}, the difference quotient {n}"
            ));
        }
    }
    Verdict::PASSED
}
