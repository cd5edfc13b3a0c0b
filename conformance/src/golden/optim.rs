//! Optimizers: given gradients, the parameters after a number of steps.

use std::sync::Arc;

use autograd::Leaf;
use numcore::{Error, Result, Runtime};
use optim::{
    AdadeltaConfig, AdafactorConfig, AdagradConfig, AdamConfig, AdamWConfig, AdamaxConfig, Config, FlatOptimizer,
    LambConfig, LionConfig, MuonConfig, NAdamConfig, Optimizer, RAdamConfig, RmsPropConfig, SgdConfig, UpdateRule,
};
use serde_json::Value;

use super::{Attrs, Case, Outcome, compare};

/// Builds the optimizer that a case names, over the subset of `leaves` that it takes.
pub(super) fn optimizer<R: Runtime>(
    name: &str,
    attrs: &Attrs,
    leaves: &[Arc<Leaf<R>>],
) -> Result<Box<dyn Optimizer<R>>> {
    let build = match name {
        "sgd" => build::<R, SgdConfig>,
        "adam" => build::<R, AdamConfig>,
        "adamw" => build::<R, AdamWConfig>,
        "adamax" => build::<R, AdamaxConfig>,
        "nadam" => build::<R, NAdamConfig>,
        "radam" => build::<R, RAdamConfig>,
        "adagrad" => build::<R, AdagradConfig>,
        "rmsprop" => build::<R, RmsPropConfig>,
        "adadelta" => build::<R, AdadeltaConfig>,
        "adafactor" => build::<R, AdafactorConfig>,
        "muon" => build::<R, MuonConfig>,
        "lion" => build::<R, LionConfig>,
        "lamb" => build::<R, LambConfig>,
        _ => return Err(Error::format("golden", format!("`{name}` is not an optimizer this runner knows"))),
    };
    build(attrs, leaves)
}

fn build<R: Runtime, C: UpdateRule>(attrs: &Attrs, leaves: &[Arc<Leaf<R>>]) -> Result<Box<dyn Optimizer<R>>> {
    let config: C = configured(attrs)?;
    let taken: Vec<&Arc<Leaf<R>>> = leaves.iter().filter(|l| config.refuses(&l.spec()).is_none()).collect();
    Ok(Box::new(FlatOptimizer::over(config, taken)?))
}

/// The hyper-parameters that the attributes name; the others have their defaults.
fn configured<C: Config>(attrs: &Attrs) -> Result<C> {
    let mut config = C::default();
    let names: Vec<&'static str> = config.settings().iter().map(|s| s.name).collect();
    for name in names {
        if let Some(numbers) = attrs.raw(pytorch(name)).and_then(|v| numbers(name, v)) {
            config.set(name, &numbers)?;
        }
    }
    Ok(config)
}

/// PyTorch's name of a hyper-parameter.
fn pytorch(name: &'static str) -> &'static str {
    match name {
        "eps1" | "eps2" => "eps",
        "adjust_lr" => "adjust_lr_fn",
        same => same,
    }
}

fn numbers(name: &str, value: &Value) -> Option<Vec<f64>> {
    match (name, value) {
        // Adafactor's two come as a pair, the first of which may be null.
        ("eps1", Value::Array(pair)) => Some(pair.first()?.as_f64().into_iter().collect()),
        ("eps2", Value::Array(pair)) => Some(vec![pair.get(1)?.as_f64()?]),
        ("adjust_lr", Value::String(how)) => {
            let all = ["original", "match_rms_adamw", "spectral_unclamped"];
            Some(vec![all.iter().position(|a| a == how)? as f64])
        }
        (_, Value::Bool(b)) => Some(vec![f64::from(u8::from(*b))]),
        (_, Value::Array(list)) => list.iter().map(Value::as_f64).collect(),
        (_, value) => Some(vec![value.as_f64()?]),
    }
}

/// Runs a case. A parameter that the optimizer does not take must keep its value.
pub(super) fn run<R: Runtime>(rt: &R, case: &Case) -> Result<Outcome> {
    let (params, tol) = (case.count("params")?, case.tolerance()?);
    let leaf = |i: usize| Leaf::new(&format!("p{i}"), case.tensor(&format!("init{i}"))?.on(rt)?);
    let leaves = (0..params).map(leaf).collect::<Result<Vec<_>>>()?;
    let mut optimizer = optimizer(&case.op, &case.attrs, &leaves)?;
    let mut gradients = optimizer.alloc_gradients()?;
    let after = case.numbers("after");
    let mut found = Vec::new();
    for step in 0..case.count("steps")? {
        gradients.zero();
        let owned = optimizer.params().into_iter().flat_map(|p| p.leaves()).cloned().collect::<Vec<_>>();
        for (i, leaf) in leaves.iter().enumerate().filter(|(_, l)| owned.iter().any(|o| Arc::ptr_eq(o, l))) {
            gradients.set(leaf, &case.tensor(&format!("grad{step}.{i}"))?.on(rt)?)?;
        }
        optimizer.step_from(&gradients)?;
        if after.contains(&(step as f64 + 1.0)) {
            for (i, leaf) in leaves.iter().enumerate() {
                let name = format!("after{}.{i}", step + 1);
                found.extend(compare(&name, &leaf.value()?, case.tensor(&name)?, tol)?);
            }
        }
    }
    Ok(Outcome::of(found))
}
