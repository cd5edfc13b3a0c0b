//! Sharded optimizers: rules over fragments of parameters in memory of the caller. Fragments of a rule that needs whole
//! parameters are whole parameters.

use std::{ops::Range, sync::Arc};

use numcore::{
    DType, Error, ErrorKind, Flat, FlatLayout, MemoryCategory, Result, Runtime, Tensor, TensorMut,
    ops::{Input, PointwiseOps, Spec, ViewOps, compute},
    pointwise::Program,
};

use crate::{
    CutParam, HyperParams, StatePlace, StateRow, StepContext, UpdateMemory, UpdatePhase, UpdateRule,
    cut_params::CutParams,
    hyper::require_groups,
    memory::{Values, read_row},
    params::{one_of, state_of},
    phase::adapted,
    place::States,
    runs::next_run,
    schedule::{SAMPLED, require_rates},
    state::MASTER,
};

/// A builder of sharded optimizers.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot update shards of parameters",
    label = "give the configuration of a rule, `AdamWConfig` for one, or `ParamGroups::new(...)` of it",
    note = "an optimizer that was built already has its parameters, which are whole: it trains without `zero`"
)]
pub trait Shards<R: Runtime>: Send + Sync {
    /// The index of the group that a parameter belongs to.
    fn group(&self, name: &str, spec: &Spec) -> usize;
    /// The learning rate of each group at a step, from 0.
    fn lrs(&self, step: u64) -> Vec<f64>;
    /// The learning rate of each group without a schedule, from which the schedule of a training step starts.
    fn base_lrs(&self) -> Vec<f64> {
        self.lrs(0)
    }
    /// The settings that must be equal on ranks that train together, as text. They are the rule, hyper-parameters and
    /// future learning rates, but not the group of each parameter. The default covers learning rates.
    fn describe(&self) -> String {
        format!("{:?}", SAMPLED.map(|step| self.lrs(step)))
    }
    /// The hyper-parameters of each group, without names of parameters.
    fn hyper_parameters(&self) -> Result<Vec<HyperParams>>;
    /// Returns a builder with other hyper-parameters for each group, in the order of
    /// [`hyper_parameters`](Shards::hyper_parameters); names of parameters are ignored. A schedule continues from the
    /// new base rates.
    ///
    /// # Errors
    /// An error for another number of groups, for a hyper-parameter that is unknown, missing or out of range, and if
    /// other state would be needed.
    fn with_hyper_parameters(&self, groups: &[HyperParams]) -> Result<Arc<dyn Shards<R>>>;
    /// The number of sums over all parameters to which the rules adapt, as of an
    /// [optimizer](crate::OptimizerCore::sum_count).
    fn sum_count(&self) -> usize {
        0
    }
    /// Returns a builder whose rules have adapted to the totals of the sums over all parameters and ranks. `lrs` are
    /// the learning rates of the update, `loss` is that of the gradients. `None` if the rules do not adapt.
    ///
    /// # Errors
    /// An error if a rule cannot adapt to them.
    fn adapted(&self, lrs: &[f64], sums: &[f64], loss: Option<f64>) -> Result<Option<Arc<dyn Shards<R>>>> {
        let _ = (lrs, sums, loss);
        Ok(None)
    }
    /// Tells whether a parameter may be cut into several fragments: not if the update of an element depends on others.
    ///
    /// # Errors
    /// An error if the rule cannot update this parameter.
    fn may_cut(&self, name: &str, spec: &Spec) -> Result<bool> {
        let _ = (name, spec);
        Ok(true)
    }
    /// Makes an optimizer of fragments with the given layout. Half-precision parameters have an
    /// `f32` master copy, initialized from `values` (one row).
    fn shard(
        &self,
        layout: &FlatLayout,
        fragments: Vec<Fragment<R>>,
        values: &Tensor<R>,
        place: StatePlace,
    ) -> Result<Box<dyn ShardOptimizer<R>>>;
}

/// A part of a parameter in a shard.
#[derive(Debug)]
pub struct Fragment<R: Runtime> {
    /// The group of the parameter.
    pub group: usize,
    /// The pieces of a parameter that is cut over ranks, and that its rule needs whole.
    pub cut: Option<CutParam<R>>,
}

/// The optimizer of one shard.
pub trait ShardOptimizer<R: Runtime>: Send {
    /// Returns an error if an [`update`](ShardOptimizer::update) with these rates could not begin; changes nothing. The
    /// reason is a rate that is not finite, a state tensor with another holder, or too little device memory.
    fn check(&mut self, lrs: &[f64]) -> Result<()>;
    /// Returns an error if state could not be written because it has another holder.
    fn check_sole(&mut self) -> Result<()>;
    /// Runs a phase of an update of `values`, a row that begins with the shard's fragments, and returns its memory. The
    /// first phase changes states alone, and numbers its sums by fragments. Gradients have
    /// the same layout and are multiplied by the scalar `scale`. Fragments for which `used` is false are skipped.
    ///
    /// # Errors
    /// On an error the memory is dropped, and the state of every fragment is that before or after its update.
    fn update(
        &mut self,
        lrs: &[f64],
        values: TensorMut<R>,
        grads: &Tensor<R>,
        scale: &Tensor<R>,
        used: &dyn Fn(usize) -> bool,
        phase: &mut UpdatePhase<'_, R>,
    ) -> Result<TensorMut<R>>;
    /// Adapts the rules to the totals of the sums that the first phase of an update gathered, over all parameters and
    /// ranks, as [`Shards::adapted`] does.
    fn adapt(&mut self, lrs: &[f64], sums: &[f64], loss: Option<f64>) -> Result<()>;
    /// Replaces the hyper-parameters of each group by some that its builder [accepted](Shards::with_hyper_parameters).
    ///
    /// # Errors
    /// Errors of the builder; nothing changes then.
    fn set_hyper_parameters(&mut self, groups: &[HyperParams]) -> Result<()>;
    /// The names, shapes and dtypes of the state kept for a fragment, the master copy included. State that only other
    /// fragments have is without elements.
    fn state(&self, piece: usize) -> Vec<(&'static str, Spec)>;
    /// State `k` of a fragment, in one row.
    fn row(&self, k: usize, piece: usize) -> Result<StateRow<R>>;
    /// Replaces state `k` of a fragment by a value of the fragment's shape.
    fn set_row(&mut self, k: usize, piece: usize, value: &Tensor<R>) -> Result<()>;
    /// Adopts a value of a fragment that the caller has replaced. The master copy of a half-precision parameter
    /// follows, unless it already rounds to the value.
    fn adopt(&mut self, piece: usize, value: &Tensor<R>) -> Result<()> {
        let Some(k) = self.state(piece).iter().position(|(name, _)| *name == MASTER) else { return Ok(()) };
        let own = self.row(k, piece)?.on(value.runtime())?;
        let kept = own.apply_program(crate::params::keep(value.dtype()), &[&value.reshape(*own.shape())?], &[])?;
        // State can only be written while it has no other holder.
        drop(own);
        self.set_row(k, piece, &kept)
    }
    /// The number of updates of each fragment.
    fn steps(&self) -> &[u64];
    /// The number of updates of each fragment, writable.
    fn steps_mut(&mut self) -> &mut [u64];
}

/// An optimizer of one shard, with the rule of each fragment's group.
pub(crate) struct Shard<R: Runtime, C: UpdateRule> {
    rules: Rules<C>,
    cut: CutParams<R>,
    states: States<R>,
    steps: Vec<u64>,
}

/// The rules that update fragments, and the layout of the fragments.
struct Rules<C: UpdateRule> {
    configs: Vec<(C, C::Kernel)>,
    /// The states that each group keeps. Groups whose states have equal names share them.
    kept: Vec<Range<usize>>,
    groups: Vec<usize>,
    layout: FlatLayout,
}

impl<R: Runtime, C: UpdateRule> Shard<R, C> {
    pub(crate) fn new(
        configs: &[C],
        layout: &FlatLayout,
        fragments: Vec<Fragment<R>>,
        values: &Tensor<R>,
        place: StatePlace,
    ) -> Result<Self> {
        let rt = values.runtime();
        let (groups, cut): (Vec<usize>, Vec<_>) = fragments.into_iter().map(|own| (own.group, own.cut)).unzip();
        let cut = CutParams::new(rt, layout, cut);
        let half = Some(layout.dtype()).filter(|d| d.is_half());
        let (mut states, mut kept) = (States::new(rt, place), Vec::<(Vec<_>, Range<usize>)>::new());
        for config in configs {
            let names = state_names(config);
            if kept.iter().all(|(known, _)| *known != names) {
                let start = kept.last().map_or(0, |(_, last)| last.end);
                kept.push((names, start..start + config.tensors().len()));
            }
        }
        for (names, range) in &kept {
            // The padding has the state of the last fragment.
            let group = |i: usize| groups.get(i).or(groups.last()).map_or(&configs[0], |&group| &configs[group]);
            for k in 0..range.len() {
                let state = |i: usize| (state_names(group(i)) == *names).then(|| group(i).tensors()[k]);
                states.add(names[k].0, state_of(rt, cut.layout(), |i| cut.kept(i, state(i)?))?)?;
            }
        }
        if half.is_some() {
            states.add(MASTER, master(rt, &layout.with_dtype(DType::F32), values)?)?;
        }
        let of = |config: &C| kept.iter().find(|(names, _)| *names == state_names(config)).map(|(_, own)| own.clone());
        let kept = configs.iter().map(|config| of(config).unwrap_or_default()).collect();
        let (configs, steps) = (with_kernels(configs, half)?, vec![0; groups.len()]);
        Ok(Shard { rules: Rules { configs, kept, groups, layout: layout.clone() }, cut, states, steps })
    }
}

impl<C: UpdateRule> Rules<C> {
    /// The memory of adjacent fragments of one group, or of one fragment `alone`.
    fn memory<'a, R: Runtime>(
        &'a self,
        run: Range<usize>,
        value: &'a mut TensorMut<R>,
        states: &'a mut [Flat<R>],
        [grads, scale]: [&'a Tensor<R>; 2],
        alone: bool,
    ) -> Result<UpdateMemory<'a, R>> {
        let at = self.layout.span(run.clone());
        let all = self.kept.iter().map(|own| own.end).max().unwrap_or(0);
        let (states, master) = states.split_at_mut(all);
        let reads = (C::PER_PARAMETER || alone) && master.is_empty();
        let read = reads.then(|| read_row(value, *self.layout.range(run.start).shape())).transpose()?;
        Ok(UpdateMemory {
            values: Values::Row(value, read),
            layout: &self.layout,
            states: &mut states[self.kept[self.groups[run.start]].clone()],
            master: master.first_mut(),
            grad: grads.narrow(0, at.start, at.len())?,
            scale: Some(scale),
            ranges: run,
            numbers: None,
        })
    }

    /// Checks that there is a rate for every group, and that each is finite.
    fn check_rates(&self, lrs: &[f64]) -> Result<()> {
        if lrs.len() != self.configs.len() {
            return Err(Error::range(C::NAME, "number of learning rates", lrs.len(), self.configs.len()));
        }
        require_rates(C::NAME, lrs)
    }

    /// Names the parameters whose state or value may have another holder.
    fn one_of(&self, what: &str) -> String {
        one_of(what, (0..self.groups.len()).map(|k| self.layout.name(k).to_string()))
    }
}

impl<R: Runtime, C: UpdateRule> ShardOptimizer<R> for Shard<R, C> {
    fn check(&mut self, lrs: &[f64]) -> Result<()> {
        self.rules.check_rates(lrs)?;
        self.check_sole()?;
        self.states.require_memory()
    }

    fn check_sole(&mut self) -> Result<()> {
        if self.states.is_sole() {
            return Ok(());
        }
        Err(ErrorKind::Shared { op: C::NAME, what: self.rules.one_of("state tensor") }.into())
    }

    fn update(
        &mut self,
        lrs: &[f64],
        values: TensorMut<R>,
        grads: &Tensor<R>,
        scale: &Tensor<R>,
        used: &dyn Fn(usize) -> bool,
        phase: &mut UpdatePhase<'_, R>,
    ) -> Result<TensorMut<R>> {
        self.rules.check_rates(lrs)?;
        let Shard { rules, cut, states, steps } = self;
        let mut runs: Vec<Range<usize>> = Vec::new();
        let key = |i: usize| (rules.groups[i], steps[i], if C::PER_PARAMETER || !phase.changes() { i } else { 0 });
        while let Some(run) = next_run(steps.len(), runs.last().map_or(0, |r| r.end), |i| used(i).then(|| key(i))) {
            runs.push(run);
        }
        if runs.is_empty() {
            return Ok(values);
        }
        // The lengths of the gaps between the runs and of the runs themselves, alternating.
        let (mut lens, mut at) = (Vec::new(), 0);
        for run in &runs {
            let span = rules.layout.span(run.clone());
            lens.extend([span.start - at, span.len()]);
            at = span.end;
        }
        lens.push(values.shape().numel() - at);
        let mut parts = values.split(&lens)?;
        states.update(|states| {
            let now = |steps: &[u64], i: usize| StepContext { lr: lrs[rules.groups[i]], step: steps[i] + 1 };
            let mut whole = Vec::new();
            for (run, part) in runs.into_iter().zip(parts.iter_mut().skip(1).step_by(2)) {
                let (i, now) = (run.start, now(steps, run.start));
                if cut.get(i).is_some() {
                    phase.check_whole(&rules.configs[rules.groups[i]].0)?;
                    whole.push((i, part));
                    continue;
                }
                if !rules.layout.span(run.clone()).is_empty() {
                    let (config, kernel) = &rules.configs[rules.groups[i]];
                    let mut memory = rules.memory(run.clone(), part, states, [grads, scale], !phase.changes())?;
                    phase.run((config, kernel), now, &mut memory)?;
                }
                if phase.changes() {
                    steps[run].fill(now.step);
                }
            }
            if !phase.changes() {
                return Ok(());
            }
            let which: Vec<usize> = whole.iter().map(|(i, _)| *i).collect();
            let mut with = |i: usize, f: &mut dyn FnMut(&mut UpdateMemory<'_, R>) -> Result<()>| {
                let part = whole.iter_mut().find(|(own, _)| *own == i);
                part.map_or(Ok(()), |(_, part)| f(&mut rules.memory(i..i + 1, part, states, [grads, scale], false)?))
            };
            // A whole is a value in the dtype of updates, without a master copy.
            let some = rules.configs.iter().filter(|_| !which.is_empty());
            let kernels = some.map(|(config, _)| config.kernel(None)).collect::<Result<Vec<_>>>()?;
            cut.update(&which, grads.dtype(), &mut with, &mut |i, whole| {
                let group = rules.groups[i];
                rules.configs[group].0.update(&kernels[group], now(steps, i), whole)
            })?;
            which.into_iter().for_each(|i| steps[i] += 1);
            Ok(())
        })?;
        TensorMut::join(parts)
    }

    fn adapt(&mut self, lrs: &[f64], sums: &[f64], loss: Option<f64>) -> Result<()> {
        let old: Vec<C> = self.rules.configs.iter().map(|(config, _)| config.clone()).collect();
        let new = adapted(&old, lrs, sums, loss)?;
        self.rules.configs.iter_mut().zip(new).for_each(|((config, _), new)| *config = new);
        Ok(())
    }

    fn state(&self, piece: usize) -> Vec<(&'static str, Spec)> {
        self.states.specs(piece)
    }

    fn set_hyper_parameters(&mut self, groups: &[HyperParams]) -> Result<()> {
        let old: Vec<C> = self.rules.configs.iter().map(|(config, _)| config.clone()).collect();
        let half = Some(self.rules.layout.dtype()).filter(|d| d.is_half());
        self.rules.configs = with_kernels(&replaced(&old, groups)?, half)?;
        Ok(())
    }

    fn row(&self, k: usize, piece: usize) -> Result<StateRow<R>> {
        self.states.row(k, piece)
    }

    fn set_row(&mut self, k: usize, piece: usize, value: &Tensor<R>) -> Result<()> {
        self.states.set(k, piece, value)
    }

    fn steps(&self) -> &[u64] {
        &self.steps
    }

    fn steps_mut(&mut self) -> &mut [u64] {
        &mut self.steps
    }
}

/// Checks rules with other hyper-parameters, which must need the same state as the old ones, and returns them.
pub(crate) fn replaced<C: UpdateRule>(configs: &[C], groups: &[HyperParams]) -> Result<Vec<C>> {
    require_groups(C::NAME, groups.len(), configs.len())?;
    let one = |(k, (config, group)): (usize, (&C, &HyperParams))| {
        let new = group.applied(config)?;
        new.validate()?;
        let (old, names) = (state_names(config), state_names(&new));
        if old != names {
            let why = format!("group {k} keeps {old:?}, with these hyper-parameters {names:?}: configure it so");
            return Err(Error::config(C::NAME, "hyper_parameters", why));
        }
        Ok(new)
    };
    configs.iter().zip(groups).enumerate().map(one).collect()
}

/// The names of a rule's states, with the dtypes of those that have one of their own.
fn state_names<C: UpdateRule>(config: &C) -> Vec<(&'static str, Option<DType>)> {
    config.tensors().iter().map(|state| (state.name, state.dtype)).collect()
}

fn with_kernels<C: UpdateRule>(configs: &[C], half: Option<DType>) -> Result<Vec<(C, C::Kernel)>> {
    configs.iter().map(|c| Ok((c.clone(), c.kernel(half)?))).collect()
}

fn master<R: Runtime>(rt: &R, layout: &FlatLayout, values: &Tensor<R>) -> Result<Flat<R>> {
    let mut flat = Flat::zeros_for(rt, MemoryCategory::Optimizer, layout.clone())?;
    let mut whole = flat.lend_whole()?;
    let own = values.narrow(0, 0, layout.numel())?;
    let widen = Program::new("widen", |[x], []| [x.cast(DType::F32)]);
    compute(rt, &widen, &[Input::Value(&own)], &[], &mut [&mut whole])?;
    flat.restore(whole)?;
    Ok(flat)
}
