//! Whole training runs: losses, gradient norms, the first gradients and the last weights.

use autograd::{Var, backward_with_hooks};
use nn::{Forward, ModuleExt, functional_call, loss};
use numcore::{Error, Result, Runtime, Tensor, fused::Reduction};
use optim::{FlatGradients, NormOrder, clip_grad_norm};

use super::{Case, HostValue, Mismatch, Outcome, compare_values, model::model, optim::optimizer};

pub(super) fn run<R: Runtime>(rt: &R, case: &Case) -> Result<Outcome> {
    let model = model(rt, case)?;
    let init = case.under("init/").map(|(name, value)| Ok((name.to_string(), value.on(rt)?)));
    model.load_state_dict(init.collect::<Result<_>>()?)?;
    let leaves: Vec<_> = model.parameters().iter().map(|p| p.leaf()).collect();
    let mut optimizer = optimizer(case.attrs.str("optimizer", "sgd")?, &case.attrs, &leaves)?;
    let mut gradients = optimizer.alloc_gradients()?;
    let (clip, mut run) = (case.number("clip"), Record::default());
    run.tangent = tangent(rt, case, &*model)?;
    for step in 0..case.count("steps")? {
        gradients.zero();
        let (x, y) = (case.tensor(&format!("x{step}"))?.on(rt)?, case.tensor(&format!("y{step}"))?.on(rt)?);
        let loss = loss_of(&model.forward(&Var::new(x))?, &Var::new(y))?;
        run.losses.push(loss.item()?);
        backward_with_hooks(&loss, &mut gradients)?;
        if let Some(limit) = clip {
            run.norms.push(clip_grad_norm(&mut gradients, limit, NormOrder::L2)?.item()?);
        }
        if step == 0 {
            run.first = named(&model, |p| gradient(&gradients, &p.leaf()))?;
        }
        optimizer.step_from(&gradients)?;
    }
    run.last = named(&model, |p| p.value()?.to_f64s())?;
    run.compare(case)
}

/// The loss of a task: cross-entropy for classes, the mean squared error for values.
fn loss_of<R: Runtime>(out: &Var<R>, target: &Var<R>) -> Result<Var<R>> {
    if target.dtype().is_float() { loss::mse(out, target, Reduction::Mean) } else { loss::cross_entropy(out, target) }
}

/// The derivative of the first loss along a direction in all parameters, and the product of that direction with the
/// expected gradients before clipping.
fn tangent<R: Runtime>(rt: &R, case: &Case, model: &dyn Forward<R>) -> Result<[f64; 2]> {
    let norm = case.numbers("grad_norms").first().copied();
    let clipped_by = case.number("clip").zip(norm).map_or(1.0, |(limit, norm)| (norm / limit).max(1.0));
    let (x, y) = (case.tensor("x0")?.on(rt)?, case.tensor("y0")?.on(rt)?);
    let (mut duals, mut want) = (Vec::new(), 0.0);
    for (k, (name, parameter)) in model.named_parameters().into_iter().enumerate() {
        let spec = parameter.spec();
        let direction: Vec<f64> = (0..spec.shape.numel()).map(|i| ((i * 5 + k) % 9) as f64 / 8.0 - 0.5).collect();
        let gradient = case.tensor(&format!("grad0/{name}"))?.to_f64s();
        want += direction.iter().zip(gradient).map(|(d, g)| d * g).sum::<f64>();
        let mut rest = direction.into_iter();
        let along = Tensor::from_f64_fn(rt, spec.shape, spec.dtype, || rest.next().unwrap_or(0.0))?;
        duals.push((name, parameter.var().with_tangent(&Var::new(along))?));
    }
    let loss = functional_call(model, &duals, || loss_of(&model.forward(&Var::new(x))?, &Var::new(y)))?;
    Ok([loss.tangent().map_or(Ok(0.0), |along| along.item())?, want * clipped_by])
}

fn gradient<R: Runtime>(gradients: &FlatGradients<R>, leaf: &std::sync::Arc<autograd::Leaf<R>>) -> Result<Vec<f64>> {
    match gradients.get(leaf)? {
        Some(g) => g.to_f64s(),
        None => Err(Error::state(leaf.name().to_string(), "has no gradient")),
    }
}

fn named<R: Runtime>(
    model: &dyn Forward<R>,
    f: impl Fn(&nn::Param<R>) -> Result<Vec<f64>>,
) -> Result<Vec<(String, Vec<f64>)>> {
    model.named_parameters().into_iter().map(|(name, p)| Ok((name, f(&p)?))).collect()
}

/// The results of a training run.
#[derive(Default)]
struct Record {
    losses: Vec<f64>,
    norms: Vec<f64>,
    first: Vec<(String, Vec<f64>)>,
    last: Vec<(String, Vec<f64>)>,
    tangent: [f64; 2],
}

impl Record {
    fn compare(&self, case: &Case) -> Result<Outcome> {
        let tol = case.tolerance()?;
        let mut found: Vec<Mismatch> =
            compare_values("losses", &self.losses, &case.numbers("losses"), tol).into_iter().collect();
        found.extend(compare_values("grad_norms", &self.norms, &case.numbers("grad_norms"), tol));
        let [got, want] = self.tangent;
        found.extend(compare_values("the tangent of the loss", &[got], &[want], tol));
        for (name, got) in &self.first {
            // Gradients are small, so errors are relative to the largest of them.
            let what = format!("grad0/{name}");
            found.extend(compare_scaled(&what, got, case.tensor(&what)?, tol));
        }
        for (name, got) in &self.last {
            let what = format!("final/{name}");
            found.extend(compare_values(&what, got, &case.tensor(&what)?.to_f64s(), tol));
        }
        Ok(Outcome::of(found))
    }
}

/// Compares values; errors are relative to the largest expected value.
fn compare_scaled(what: &str, got: &[f64], want: &HostValue, tol: f64) -> Option<Mismatch> {
    let want = want.to_f64s();
    let largest = want.iter().fold(0.0f64, |m, w| m.max(w.abs()));
    let scale = if largest > 0.0 { 1.0 / largest } else { 1.0 };
    let scaled = |values: &[f64]| values.iter().map(|v| v * scale).collect::<Vec<_>>();
    compare_values(what, &scaled(got), &scaled(&want), tol)
}
