//! Maximal update parametrization: initial values and learning rates that one can keep when widths change.

use std::collections::{BTreeMap, BTreeSet};

use autograd::observe_outputs;
use nn::{Module, ModuleExt, Param};
use numcore::{
    DType, Error, Result, Runtime, Shape, Tensor,
    ops::{PointwiseOps, ReduceOps},
};

use crate::{ParamGroups, UpdateRule};

/// The dependence of learning rates on widths, by the kind of rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WidthRule {
    /// For rules whose steps do not depend on the size of gradients: Adam, AdamW, Adan, Lion.
    Adaptive,
    /// For stochastic gradient descent.
    Sgd,
}

/// The maximal update parametrization (muP) of a model, from the shapes of a base model that differs in widths alone.
/// With it, hyper-parameters that are best at the base's widths stay so.
///
/// A weight `[O, I, ..]` is hidden if both widths differ from the base's, and an output if it is named so. Otherwise it
/// is an input, as biases, norms and embeddings are. With `r = I/I₀` and `q = O/O₀`:
///
/// | | input | hidden | output |
/// |---|---|---|---|
/// | standard deviation, times the base's | 1 | `1/√r` | `1/r` |
/// | learning rate, adaptive rules | 1 | `1/r` | `1/r` |
/// | learning rate, SGD | `q` | 1 | `1/r` |
///
/// Attention should grow in heads: where the width of heads grows, its scores must be divided by that width, and not by
/// its root. The output must not share its weight with the embedding.
///
/// Yang et al., *Tensor Programs V: Tuning Large Neural Networks via Zero-Shot Hyperparameter Transfer*, 2022, table 3.
#[doc(alias("muP"))]
#[doc(alias("set_base_shapes"))]
#[derive(Clone, Debug)]
pub struct MaximalUpdate {
    weights: BTreeMap<String, WidthFactors>,
}

/// The factors of a parameter.
#[derive(Clone, Copy, Debug)]
struct WidthFactors {
    /// The factor of the values that a model was initialized with.
    values: f64,
    adaptive: f64,
    sgd: f64,
}

impl MaximalUpdate {
    /// Compares the parameters of `model` with those of `base`, which must have initial values too; `is_output` selects
    /// output weights by name.
    ///
    /// # Errors
    /// An error that lists the parameters that only one of the two has, that differ in rank, or are cut over ranks.
    pub fn new<R: Runtime>(
        base: &(impl Module<R> + ?Sized),
        model: &(impl Module<R> + ?Sized),
        is_output: impl Fn(&str) -> bool,
    ) -> Result<Self> {
        let mut bases: BTreeMap<String, Param<R>> = base.named_parameters().into_iter().collect();
        let (mut weights, mut wrong) = (BTreeMap::new(), Vec::new());
        for (name, own) in model.named_parameters() {
            let shape = own.leaf().spec().shape;
            if own.placed().is_some_and(|placed| !placed.is_whole()) {
                wrong.push(format!("`{name}` is cut over ranks: make this before the model is cut"));
                bases.remove(&name);
                continue;
            }
            match bases.remove(&name).map(|base| (base.leaf().spec().shape, base)) {
                Some((from, base)) if from.rank() == shape.rank() => {
                    let factors = WidthFactors::new(from, shape, is_output(&name), [rms(&base)?, rms(&own)?]);
                    weights.insert(name, factors);
                }
                Some((from, _)) => wrong.push(format!("`{name}` is {from} in the base and {shape} in the model")),
                None => wrong.push(format!("`{name}` is in the model alone")),
            }
        }
        wrong.extend(bases.keys().map(|name| format!("`{name}` is in the base alone")));
        if wrong.is_empty() {
            return Ok(MaximalUpdate { weights });
        }
        Err(Error::config("MaximalUpdate", "base", format!("{}: only widths may differ", wrong.join("; "))))
    }

    /// Multiplies the initial values of the model, so that their sizes are those of the parametrization. Call it once,
    /// before the model is given to an optimizer.
    pub fn rescale<R: Runtime>(&self, model: &(impl Module<R> + ?Sized)) -> Result<()> {
        scale_parameters(model, |name| self.weights.get(name).map_or(1.0, |factors| factors.values))
    }

    /// Divides groups by the widths of parameters. Each has its learning rate times that of the table. Its weight decay
    /// is divided by that factor, so that decay per step does not depend on widths.
    pub fn groups<C: UpdateRule>(&self, groups: ParamGroups<C>, rule: WidthRule) -> ParamGroups<C> {
        let rate = move |factors: &WidthFactors| match rule {
            WidthRule::Adaptive => factors.adaptive,
            WidthRule::Sgd => factors.sgd,
        };
        let bits: BTreeSet<u64> = self.weights.values().map(rate).filter(|f| *f != 1.0).map(f64::to_bits).collect();
        let rates: Vec<f64> = bits.into_iter().map(f64::from_bits).collect();
        let (weights, known) = (self.weights.clone(), rates.clone());
        let part = move |name: &str| {
            let own = rate(weights.get(name)?);
            known.iter().position(|factor| *factor == own)
        };
        groups.divided(rates.len(), part, |k, config| {
            config.set_lr(config.lr() * rates[k]);
            let mut settings = config.settings();
            if let Some(decay) = settings.iter_mut().find(|setting| setting.name == "weight_decay") {
                let scaled: Vec<f64> = decay.value.numbers().iter().map(|decay| decay / rates[k]).collect();
                decay.value.assign(&scaled);
            }
        })
    }
}

impl WidthFactors {
    /// The factors of a parameter of `shape`, given the base's and the root mean squares of both.
    fn new(base: Shape, shape: Shape, is_output: bool, [of_base, own]: [f64; 2]) -> Self {
        let ratio = |axis: usize| match (base.get(axis), shape.get(axis)) {
            (Some(&from), Some(&to)) if from > 0 => to as f64 / from as f64,
            _ => 1.0,
        };
        let (q, r) = (ratio(0), ratio(1));
        let is_hidden = q != 1.0 && r != 1.0 && !is_output;
        let (deviation, adaptive, sgd) = match (is_output, is_hidden) {
            (true, _) => (1.0 / r, 1.0 / r, 1.0 / r),
            (_, true) => (1.0 / r.sqrt(), 1.0 / r, 1.0),
            // The width of an embedding is its second axis.
            _ => (1.0, 1.0, q.max(r)),
        };
        let values = if own > 0.0 && of_base > 0.0 { of_base * deviation / own } else { 1.0 };
        WidthFactors { values, adaptive, sgd }
    }
}

/// Multiplies the values of parameters by factors by name. With `1/√(2L)` for the last weights in the branches of `L`
/// residual blocks, the branches' sum does not grow with depth (Radford et al. 2019).
#[doc(alias("depth_scaled_init"))]
pub fn scale_parameters<R: Runtime>(model: &(impl Module<R> + ?Sized), factor: impl Fn(&str) -> f64) -> Result<()> {
    for (name, parameter) in model.named_parameters() {
        let by = factor(&name);
        if by != 1.0 {
            parameter.leaf().set(parameter.leaf().value()?.mul(by)?)?;
        }
    }
    Ok(())
}

/// Runs `forward`, and returns the mean magnitude of the output of each operation that reads a parameter, in order,
/// with that parameter's name. Over several widths, those of a model in the maximal update parametrization stay equal
/// from step to step; otherwise they grow or vanish with width.
#[doc(alias("coord_check"))]
pub fn coordinate_sizes<R: Runtime, T>(forward: impl FnOnce() -> Result<T>) -> Result<Vec<(String, f64)>> {
    let (done, calls) = observe_outputs::<R, _>(forward);
    done?;
    let mut sizes = Vec::new();
    for call in calls {
        if let (Some(name), Some(output)) = (call.op.parameters.first(), call.outputs.first()) {
            sizes.push((name.to_string(), output.to_dtype(DType::F64)?.abs()?.mean_all()?.item()?));
        }
    }
    Ok(sizes)
}

fn rms<R: Runtime>(parameter: &Param<R>) -> Result<f64> {
    let value: Tensor<R> = parameter.leaf().value()?;
    if value.shape().numel() == 0 {
        return Ok(0.0);
    }
    Ok(value.to_dtype(DType::F64)?.square()?.mean_all()?.item()?.sqrt())
}
