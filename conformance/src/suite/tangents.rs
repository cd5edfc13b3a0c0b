//! Tangents against gradients, in `f64`. The derivative along a direction is the product of the gradients with it, and
//! its gradient is the gradient of that product. Every case gives one direction for all inputs, and one for each alone.

use autograd::{Var, differentiable_grad, grad};
use numcore::{
    DType, Result, Runtime,
    ops::{PointwiseOps, ReduceOps},
};

use super::{
    case::{OpCase, weights},
    cases,
    dtypes::{computes, lacks},
    report::{Section, Verdict},
};

/// The largest difference of two sums of the same products, relative to the larger of 1 and the largest one.
const TOLERANCE: f64 = 1e-10;

pub(crate) fn tangents<R: Runtime>(rt: &R) -> Section {
    let mut section = Section::new("tangents");
    if !computes(rt, DType::F64) {
        section.skip(lacks(DType::F64));
        return section;
    }
    for case in &cases::all::<R>() {
        let reals = case.inputs.iter().filter(|s| s.is_real()).count();
        let single = if reals > 1 { 0..reals } else { 0..0 };
        for chosen in [None].into_iter().chain(single.map(Some)) {
            let name = chosen.map_or_else(|| case.name.clone(), |i| format!("{} along {i}", case.name));
            section.check(&name, || check(rt, case, chosen));
        }
    }
    section
}

/// Compares the tangent along a direction in all real inputs, or in the chosen one, with gradients.
fn check<R: Runtime>(rt: &R, case: &OpCase<R>, chosen: Option<usize>) -> Result<Verdict> {
    let vars = case.vars(&case.tensors(rt, DType::F64)?)?;
    let leaves = case.leaves(&vars);
    let all = leaves.iter().enumerate().map(|(i, x)| weights(rt, x, 5 + i as u64)).collect::<Result<Vec<_>>>()?;
    let is_chosen = |i: usize| chosen.is_none_or(|only| only == i);
    let mut next = 0;
    let along = |(sample, x): (&super::sample::Sample, &Var<R>)| {
        next += usize::from(sample.is_real());
        let moves = sample.is_real() && is_chosen(next - 1);
        if moves { x.with_tangent(&all[next - 1]) } else { Ok(x.clone()) }
    };
    let duals = case.inputs.iter().zip(&vars).map(along).collect::<Result<Vec<_>>>()?;
    let weighted = |y: &Var<R>| y.mul(&weights(rt, y, 1)?)?.sum_all();

    let out = weighted(&(case.f)(&duals)?)?;
    let plain = weighted(&(case.f)(&vars)?)?;
    let gradients = differentiable_grad(&[&plain], &leaves)?;
    let mut product = Var::new(numcore::Tensor::zeros(rt, [], DType::F64)?);
    for (_, (g, t)) in gradients.iter().zip(&all).enumerate().filter(|(i, _)| is_chosen(*i)) {
        if let Some(g) = g {
            product = product.add(&g.mul(t)?.sum_all()?)?;
        }
    }
    let tangent = out.tangent();
    let mut verdict = near("value", &[out.item()?], &[plain.item()?]);
    let got = tangent.as_ref().map_or(Ok(0.0), Var::item)?;
    verdict = verdict.and(near("tangent", &[got], &[product.item()?]));
    if !case.twice {
        return Ok(verdict);
    }
    let of = |root: Option<&Var<R>>| match root.filter(|root| root.requires_grad()) {
        Some(root) => grad(&[root], &leaves),
        None => Ok(vec![None; leaves.len()]),
    };
    for (i, (got, want)) in of(tangent.as_ref())?.iter().zip(of(Some(&product))?).enumerate() {
        let values = |g: &Option<Var<R>>| match g {
            Some(g) => g.value()?.to_f64s(),
            None => Ok(vec![0.0; leaves[i].dims().iter().product()]),
        };
        verdict = verdict.and(near(&format!("gradient {i} of the tangent"), &values(got)?, &values(&want)?));
    }
    Ok(verdict)
}

fn near(of: &str, got: &[f64], want: &[f64]) -> Verdict {
    let largest = want.iter().fold(1.0f64, |m, v| m.max(v.abs()));
    for (k, (g, w)) in got.iter().zip(want).enumerate() {
        // Written so that NaN fails.
        let near = (g - w).abs() <= TOLERANCE * largest;
        if !near {
            return Verdict::failed(format!("element {k} of the {of} is {g}, gradients give {w}"));
        }
    }
    Verdict::PASSED
}
