//! A small GPT on the device and on the CPU: the loss, and every gradient.

use weftgrad::{
    Cpu, Result, Runtime, Tensor, Var,
    nn::{Forward, Gpt, GptConfig, Init, ModuleExt},
    ops::ViewOps,
    prelude::NnOps,
};

use crate::report::Found;

/// The largest difference of values, relative to a tensor's largest value.
const TOLERANCE: f64 = 1e-4;

/// The loss, and gradients by name.
type Step = (f64, Vec<(String, Vec<f64>)>);

pub(crate) fn run<R: Runtime>(rt: &R) -> Result<Found> {
    let (got, want) = (values(rt)?, values(&Cpu::new())?);
    Ok(Found::checks(want.1.len() + 1, compare(&got, &want)))
}

/// A list of tensors with their names.
pub(crate) type Named<R> = Vec<(String, Tensor<R>)>;

/// A model, and data for one step.
pub(crate) struct Setup<R: Runtime> {
    model: Gpt<R>,
    x: Var<R>,
    y: Var<R>,
}

impl<R: Runtime> Setup<R> {
    pub(crate) fn new(rt: &R) -> Result<Setup<R>> {
        Setup::with_dropout(rt, 0.0)
    }

    pub(crate) fn with_dropout(rt: &R, dropout: f64) -> Result<Setup<R>> {
        let config =
            GptConfig { vocab: 96, context: 48, layers: 2, heads: 2, width: 64, dropout, ..Default::default() };
        let model = Gpt::new(&Init::new(rt, 3), config)?;
        let mut rng = weftgrad::rng::Philox::new(5, 0);
        let tokens: Vec<i64> = (0..4 * 49).map(|_| rng.below(96) as i64).collect();
        let tokens = Tensor::from_slice(rt, [4, 49], &tokens)?;
        let x = Var::new(tokens.narrow(1, 0, 48)?.contiguous()?);
        let y = Var::new(tokens.narrow(1, 1, 48)?.reshape([4 * 48])?);
        Ok(Setup { model, x, y })
    }

    pub(crate) fn model(&self) -> &Gpt<R> {
        &self.model
    }

    pub(crate) fn loss(&self) -> Result<Var<R>> {
        self.model.forward(&self.x)?.reshape([4 * 48, 96])?.cross_entropy(&self.y)
    }

    /// The loss, and the gradients of all parameters that have one.
    pub(crate) fn step(&self) -> Result<(Tensor<R>, Named<R>)> {
        let loss = self.loss()?;
        let gradients = loss.backward()?;
        let leaves = self.model.parameters().into_iter().map(|p| p.leaf());
        let named = leaves.filter_map(|leaf| gradients.get(&leaf).map(|g| (leaf.name().to_string(), g.clone())));
        Ok((loss.value()?, named.collect()))
    }
}

fn values<R: Runtime>(rt: &R) -> Result<Step> {
    let (loss, gradients) = Setup::new(rt)?.step()?;
    let values = |(name, g): (String, Tensor<R>)| Ok((name, g.to_f64s()?));
    Ok((loss.item()?, gradients.into_iter().map(values).collect::<Result<_>>()?))
}

fn compare(got: &Step, want: &Step) -> Vec<String> {
    let mut failures = Vec::new();
    if (got.0 - want.0).abs() > TOLERANCE * want.0.abs() {
        failures.push(format!("loss {} instead of {}", got.0, want.0));
    }
    if got.1.len() != want.1.len() {
        failures.push(format!("{} gradients instead of {}", got.1.len(), want.1.len()));
    }
    for ((name, g), (_, w)) in got.1.iter().zip(&want.1) {
        let largest = w.iter().fold(0f64, |m, x| m.max(x.abs()));
        let error = g.iter().zip(w).fold(0f64, |m, (a, b)| worse(m, (a - b).abs()));
        // NaN is a failure.
        if error.is_nan() || error > TOLERANCE * largest {
            failures.push(format!("gradient of {name}: error {error:.3e}, largest value {largest:.3e}"));
        }
    }
    failures
}

/// The larger value; NaN stays.
fn worse(a: f64, b: f64) -> f64 {
    if a.is_nan() || a > b { a } else { b }
}
