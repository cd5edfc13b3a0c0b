//! The state of an optimizer as named tensors: saving, loading, and the check that a state fits the optimizer.

use std::collections::HashMap;

use numcore::{DType, Error, Flat, Result, Runtime, Shape, Tensor, ops::Spec};

use crate::{FlatOptimizer, OptimizerCore, UpdateRule, param_part::ParamPart};

/// The name, as a state, of the master copies of half-precision parameters.
pub const MASTER: &str = "master";
/// The name, as a state, of weights to evaluate with that an optimizer keeps itself.
pub const AVERAGE: &str = "average";
/// The name of the optimizer's step count in its state.
const STEPS: &str = "steps";

/// A state that was checked and not loaded yet.
pub(crate) struct ValidatedState<'a, R: Runtime, C: UpdateRule> {
    /// The buffer, the range in it, and the tensor to copy there, by part.
    tensors: Vec<Vec<(usize, usize, &'a Tensor<R>)>>,
    updates: Vec<Vec<u64>>,
    configs: Vec<(C, Vec<C::Kernel>)>,
    steps: u64,
}

impl<R: Runtime, C: UpdateRule> FlatOptimizer<R, C> {
    pub(crate) fn save(&self) -> Result<Vec<(String, Tensor<R>)>> {
        let mut entries = Vec::new();
        let Some(rt) = self.parts.first().map(|p| p.params.runtime().clone()) else { return Ok(entries) };
        for part in &self.parts {
            for (name, (flat, i)) in part.entries(&self.groups[part.group]) {
                entries.push((name, flat.tensor(i)?));
            }
            for (leaf, &n) in part.params.leaves().iter().zip(&part.steps) {
                entries.push((format!("step.{}", leaf.name()), Tensor::from_slice(&rt, [], &[n as i64])?));
            }
        }
        for (k, config) in self.groups.iter().enumerate() {
            for setting in config.clone().settings() {
                let numbers = setting.value.numbers();
                let shape: &[usize] = if numbers.len() == 1 { &[] } else { &[numbers.len()] };
                entries.push((setting_name(k, setting.name), Tensor::from_slice(&rt, shape, &numbers)?));
            }
        }
        entries.push((STEPS.into(), Tensor::from_slice(&rt, [], &[self.steps as i64])?));
        Ok(entries)
    }

    /// Checks a state without changing anything.
    pub(crate) fn read<'a>(&self, state: &'a [(String, Tensor<R>)]) -> Result<ValidatedState<'a, R, C>> {
        let mut reader = StateReader::new(state);
        let mut tensors = Vec::new();
        let mut updates = Vec::new();
        for part in &self.parts {
            tensors.push(part.read(&self.groups[part.group], &mut reader));
            let step = |l: &std::sync::Arc<autograd::Leaf<R>>| reader.count(&format!("step.{}", l.name()));
            updates.push(part.params.leaves().iter().map(step).collect());
        }
        let configs = (0..self.groups.len()).filter_map(|k| self.read_config(k, &mut reader)).collect();
        let steps = if self.parts.is_empty() { 0 } else { reader.count(STEPS) };
        reader.finish(C::NAME)?;
        Ok(ValidatedState { tensors, updates, configs, steps })
    }

    fn read_config(&self, k: usize, reader: &mut StateReader<'_, R>) -> Option<(C, Vec<C::Kernel>)> {
        if self.parts.is_empty() {
            return None;
        }
        let mut config = self.groups[k].clone();
        for setting in config.settings() {
            let name = setting_name(k, setting.name);
            let Some(numbers) = reader.numbers(&name) else { continue };
            if !setting.value.assign(&numbers) {
                reader.problem(format!("`{name}` cannot be {numbers:?}"));
            }
        }
        let kernels = self.prepare(k, &config);
        kernels.map_err(|e| reader.problem(format!("group {k}: {e}"))).ok().map(|kernels| (config, kernels))
    }

    pub(crate) fn load(&mut self, state: &[(String, Tensor<R>)]) -> Result<()> {
        let checked = self.read(state)?;
        self.check_sole()?;
        for ((part, tensors), updates) in self.parts.iter_mut().zip(checked.tensors).zip(checked.updates) {
            let master = part.params.master.as_mut();
            let mut flats: Vec<&mut Flat<R>> = part.states.iter_mut().chain(master).collect();
            tensors.into_iter().try_for_each(|(flat, i, t)| flats[flat].overwrite(i, t))?;
            part.steps = updates;
        }
        for (k, (config, kernels)) in checked.configs.into_iter().enumerate() {
            self.install(k, config, kernels);
        }
        self.steps = checked.steps;
        Ok(())
    }
}

impl<R: Runtime, C: UpdateRule> ParamPart<R, C> {
    /// The buffers with state, by name: those of the rule, then the master copies.
    fn flats(&self, config: &C) -> Vec<(&'static str, &Flat<R>)> {
        let states = config.tensors().into_iter().map(|s| s.name).zip(&self.states);
        states.chain(self.params.master.as_ref().map(|m| (MASTER, m))).collect()
    }

    /// All state tensors with elements: the name, the buffer and the range of each.
    fn entries<'a>(&'a self, config: &C) -> Vec<(String, (&'a Flat<R>, usize))> {
        let leaves = self.params.leaves();
        let of = |(state, flat): (&'static str, &'a Flat<R>)| {
            let some = (0..leaves.len()).filter(|&i| flat.layout().range(i).numel() > 0);
            some.map(move |i| (format!("{state}.{}", leaves[i].name()), (flat, i))).collect::<Vec<_>>()
        };
        self.flats(config).into_iter().flat_map(of).collect()
    }

    fn read<'a>(&self, config: &C, reader: &mut StateReader<'a, R>) -> Vec<(usize, usize, &'a Tensor<R>)> {
        let flats = self.flats(config);
        let place = |flat: &Flat<R>| flats.iter().position(|(_, f)| std::ptr::eq(*f, flat));
        let entries = self.entries(config).into_iter();
        let found = entries.filter_map(|(name, (flat, i))| {
            let spec = Spec { shape: *flat.layout().range(i).shape(), dtype: flat.layout().dtype() };
            Some((place(flat)?, i, reader.tensor(&name, spec, flat.runtime())?))
        });
        found.collect()
    }
}

fn setting_name(group: usize, name: &str) -> String {
    format!("group.{group}.{name}")
}

/// Reads entries of a state dict by name and collects all errors.
pub(crate) struct StateReader<'a, R: Runtime> {
    entries: HashMap<&'a str, &'a Tensor<R>>,
    order: Vec<&'a str>,
    problems: Vec<String>,
}

impl<'a, R: Runtime> StateReader<'a, R> {
    pub(crate) fn new(state: &'a [(String, Tensor<R>)]) -> Self {
        let order: Vec<&str> = state.iter().map(|(name, _)| name.as_str()).collect();
        let entries: HashMap<_, _> = state.iter().map(|(name, t)| (name.as_str(), t)).collect();
        let twice = if entries.len() < order.len() { vec!["a name occurs twice".into()] } else { vec![] };
        StateReader { entries, order, problems: twice }
    }

    fn problem(&mut self, why: String) {
        self.problems.push(why);
    }

    fn take(&mut self, name: &str) -> Option<&'a Tensor<R>> {
        let found = self.entries.remove(name);
        if found.is_none() {
            self.problem(format!("`{name}` is missing"));
        }
        found
    }

    pub(crate) fn tensor(&mut self, name: &str, spec: Spec, rt: &R) -> Option<&'a Tensor<R>> {
        let t = self.take(name)?;
        let is = Spec { shape: *t.shape(), dtype: t.dtype() };
        if is != spec {
            self.problem(format!("`{name}` is {} {}, not {} {}", is.dtype, is.shape, spec.dtype, spec.shape));
        }
        if t.device() != rt.device() {
            self.problem(format!("`{name}` is on {}, not {}; use `to_device`", t.device(), rt.device()));
        }
        Some(t)
    }

    pub(crate) fn numbers(&mut self, name: &str) -> Option<Vec<f64>> {
        let t = self.take(name)?;
        let read = if t.dtype() == DType::F64 { t.to_vec::<f64>() } else { Err(Error::state(name, "is no f64")) };
        read.map_err(|e| self.problem(e.to_string())).ok()
    }

    pub(crate) fn count(&mut self, name: &str) -> u64 {
        let Some(t) = self.take(name) else { return 0 };
        let count = match (t.dtype(), *t.shape() == Shape::SCALAR) {
            (DType::I64, true) => t.to_vec::<i64>().ok().and_then(|v| u64::try_from(v[0]).ok()),
            _ => None,
        };
        count.unwrap_or_else(|| {
            self.problem(format!("`{name}` is no count (one i64, 0 or more)"));
            0
        })
    }

    pub(crate) fn finish(mut self, optimizer: &str) -> Result<()> {
        let extra = self.order.iter().filter(|n| self.entries.contains_key(*n)).map(|n| format!("`{n}` is unexpected"));
        self.problems.extend(extra.collect::<Vec<_>>());
        if self.problems.is_empty() {
            Ok(())
        } else {
            Err(Error::state(format!("{optimizer} state"), self.problems.join("; ")))
        }
    }
}
