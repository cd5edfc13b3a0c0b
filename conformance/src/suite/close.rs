//! Comparison of two computations of one value.

use autograd::{BackwardHook, Gradients, Var};
use numcore::{DType, Result, Runtime, Tensor, ops::PointwiseOps};

use super::{
    case::{OpCase, no_gradient, weights},
    report::Verdict,
};

/// An output and the gradients of a case's leaves, each in its own order.
pub(crate) type Values = Vec<Vec<f64>>;

/// The output of a case and, by an ordinary backward pass with fixed upstream weights, its gradients.
pub(crate) fn forward_backward<R: Runtime>(rt: &R, case: &OpCase<R>, tensors: &[Tensor<R>]) -> Result<Values> {
    let vars = case.vars(tensors)?;
    let mut gradients = Gradients::new();
    let out = sweep(rt, case, &vars, &mut gradients)?;
    let mut values = vec![out.value()?.to_f64s()?];
    for (i, leaf) in case.leaves(&vars).into_iter().enumerate() {
        values.push(gradients.of(leaf).ok_or_else(|| no_gradient(i))?.to_f64s()?);
    }
    Ok(values)
}

/// Runs a case, and a weighted backward pass from its output.
pub(crate) fn sweep<R: Runtime>(
    rt: &R,
    case: &OpCase<R>,
    vars: &[Var<R>],
    hook: &mut dyn BackwardHook<R>,
) -> Result<Var<R>> {
    let out = (case.f)(vars)?;
    autograd::Backward::from(&out, &weights(rt, &out, 1)?)?.run(hook)?;
    Ok(out)
}

/// Values as a narrower type stores them.
pub(crate) fn rounded<R: Runtime>(rt: &R, values: &[f64], dtype: DType) -> Result<Vec<f64>> {
    Tensor::from_slice(rt, [values.len()], &values.iter().map(|&v| v as f32).collect::<Vec<_>>())?
        .to_dtype(dtype)?
        .to_f64s()
}

/// Checks that all values agree within `tolerance`, relative to the largest of each tensor (or to 1).
pub(crate) fn agree(got: &Values, want: &Values, tolerance: f64) -> Verdict {
    if got.len() != want.len() {
        return Verdict::failed(format!("{} results, expected {}", got.len(), want.len()));
    }
    let mut verdict = Verdict::PASSED;
    for (k, (g, w)) in got.iter().zip(want).enumerate() {
        let what = if k == 0 { "the output".into() } else { format!("gradient {}", k - 1) };
        verdict = verdict.and(near(&what, g, w, tolerance));
    }
    verdict
}

/// Compares one tensor. Infinities must be equal, and NaN is never right.
pub(crate) fn near(what: &str, got: &[f64], want: &[f64], tolerance: f64) -> Verdict {
    if got.len() != want.len() {
        return Verdict::failed(format!("{what} has {} elements, expected {}", got.len(), want.len()));
    }
    let largest = want.iter().filter(|w| w.is_finite()).fold(1.0f64, |m, w| m.max(w.abs()));
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        if !(g == w || (g - w).abs() <= tolerance * largest) {
            return Verdict::failed(format!(
                "element {i} of {what} is {g:?}, expected {w:?} within {:.1e}",
                tolerance * largest
            ));
        }
    }
    Verdict::PASSED
}

/// Compares one tensor element by element: `tolerance` is relative to each expected value, and absolute below 1. NaN is
/// right where it is expected.
pub(crate) fn near_each(what: &str, got: &[f64], want: &[f64], tolerance: f64) -> Verdict {
    if got.len() != want.len() {
        return Verdict::failed(format!("{what} has {} elements, expected {}", got.len(), want.len()));
    }
    let right = |g: f64, w: f64| g == w || g.is_nan() && w.is_nan() || (g - w).abs() <= tolerance * w.abs().max(1.0);
    match got.iter().zip(want).position(|(&g, &w)| !right(g, w)) {
        None => Verdict::PASSED,
        Some(i) => Verdict::failed(format!("element {i} of {what} is {:?}, expected {:?}", got[i], want[i])),
    }
}
