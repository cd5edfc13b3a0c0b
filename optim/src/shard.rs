//! Sharded optimizers: elementwise rules over fragments of parameters in memory of the caller.

use std::{ops::Range, sync::Arc};

use numcore::{
    DType, Error, ErrorKind, Flat, FlatLayout, MemoryCategory, Result, Runtime, Tensor, TensorMut,
    ops::{Input, PointwiseOps, Spec, ViewOps, compute, update},
    pointwise::{Program, standard::FILL},
};
use smallvec::SmallVec;

use crate::{
    Elementwise, HyperParams, Programs, StatePlace, StateRow, StateSpec, StepContext, UpdateRule,
    flat_optimizer::SAMPLED, hyper::require_groups, memory::lending, params::one_of, place::States, runs::next_run,
    schedule::require_rates, state::MASTER,
};

/// A builder of sharded optimizers.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot update shards of parameters",
    label = "give an elementwise rule, `AdamWConfig` for one, or `ParamGroups::new(...)` of it",
    note = "a cut goes through matrices: an optimizer that looks at whole ones or at norms (Muon, LAMB, Adafactor) trains without `zero`"
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
    /// The settings that must be equal on ranks that train together, as text: the rule, hyper-parameters and future
    /// learning rates, but not the group of each parameter. The default covers learning rates.
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
    /// Makes an optimizer of fragments with the given layout, each in its group. Half-precision parameters have an
    /// `f32` master copy, initialized from `values` (one row).
    fn shard(
        &self,
        layout: &FlatLayout,
        groups: Vec<usize>,
        values: &Tensor<R>,
        place: StatePlace,
    ) -> Result<Box<dyn ShardOptimizer<R>>>;
}

/// The optimizer of one shard.
pub trait ShardOptimizer<R: Runtime>: Send {
    /// Returns an error if an [`update`](ShardOptimizer::update) with these rates could not begin; changes nothing. The
    /// reason is a rate that is not finite, a state tensor with another holder, or too little device memory.
    fn check(&mut self, lrs: &[f64]) -> Result<()>;
    /// Returns an error if state could not be written because it has another holder.
    fn check_sole(&mut self) -> Result<()>;
    /// Updates `values`, a row that begins with the shard's fragments, in place, and returns its memory. Gradients have
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
    ) -> Result<TensorMut<R>>;
    /// Replaces the hyper-parameters of each group by some that its builder [accepted](Shards::with_hyper_parameters).
    ///
    /// # Errors
    /// Errors of the builder; nothing changes then.
    fn set_hyper_parameters(&mut self, groups: &[HyperParams]) -> Result<()>;
    /// The names and dtypes of the state kept for each fragment, the master copy included.
    fn state(&self) -> Vec<(&'static str, DType)>;
    /// State `k` of a fragment.
    fn row(&self, k: usize, piece: usize) -> Result<StateRow<R>>;
    /// Replaces state `k` of a fragment by a value of the fragment's shape.
    fn set_row(&mut self, k: usize, piece: usize, value: &Tensor<R>) -> Result<()>;
    /// Adopts a value of a fragment that the caller has replaced: the master copy of a half-precision parameter
    /// follows, unless it already rounds to the value.
    fn adopt(&mut self, piece: usize, value: &Tensor<R>) -> Result<()> {
        let Some(k) = self.state().iter().position(|(name, _)| *name == MASTER) else { return Ok(()) };
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
pub(crate) struct Shard<R: Runtime, E> {
    rules: Rules<E>,
    states: States<R>,
    steps: Vec<u64>,
}

/// The rules that update fragments, and the layout of the fragments.
struct Rules<E> {
    configs: Vec<(E, Programs)>,
    groups: Vec<usize>,
    layout: FlatLayout,
}

impl<R: Runtime, E: Elementwise> Shard<R, E> {
    pub(crate) fn new(
        configs: &[E],
        layout: &FlatLayout,
        groups: Vec<usize>,
        values: &Tensor<R>,
        place: StatePlace,
    ) -> Result<Self> {
        let rt = values.runtime();
        let half = Some(layout.dtype()).filter(|d| d.is_half());
        let working = layout.with_dtype(half.map_or(layout.dtype(), |_| DType::F32));
        let tensors = configs[0].tensors();
        if configs.iter().any(|c| c.tensors().len() != tensors.len()) {
            return Err(Error::config(
                E::NAME,
                "hyper_parameters",
                "all groups of a sharded optimizer keep the same state",
            ));
        }
        let mut states = States::new(rt, place);
        for state in &tensors {
            states.add(state.name, filled(rt, &working, state)?)?;
        }
        if half.is_some() {
            states.add(MASTER, master(rt, &working, values)?)?;
        }
        let configs = with_programs(configs, half)?;
        let steps = vec![0; groups.len()];
        Ok(Shard { rules: Rules { configs, groups, layout: layout.clone() }, states, steps })
    }
}

impl<E: Elementwise> Rules<E> {
    /// Updates adjacent fragments of one group, all at update `now.step`, in one launch.
    fn launch<R: Runtime>(
        &self,
        run: Range<usize>,
        now: StepContext,
        value: &mut TensorMut<R>,
        states: &mut [&mut Flat<R>],
        [grads, scale]: [&Tensor<R>; 2],
    ) -> Result<()> {
        let at = self.layout.span(run.clone());
        if at.is_empty() {
            return Ok(());
        }
        let (config, programs) = &self.configs[self.groups[run.start]];
        let grad = grads.narrow(0, at.start, at.len())?;
        let span = |flat: &mut Flat<R>| flat.lend_span(run.clone());
        lending(states, span, |lent| {
            let mut outs: SmallVec<[&mut TensorMut<R>; 5]> = SmallVec::new();
            outs.push(value);
            outs.extend(lent.iter_mut().map(|part| &mut **part));
            update(programs.get(true), &[&grad, scale], &config.scalars(now), &mut outs)
        })
    }

    /// Checks that there is a rate for every group, and that each is finite.
    fn check_rates(&self, lrs: &[f64]) -> Result<()> {
        if lrs.len() != self.configs.len() {
            return Err(Error::range(E::NAME, "number of learning rates", lrs.len(), self.configs.len()));
        }
        require_rates(E::NAME, lrs)
    }

    /// Names the parameters whose state or value may have another holder.
    fn one_of(&self, what: &str) -> String {
        one_of(what, (0..self.groups.len()).map(|k| self.layout.name(k).to_string()))
    }
}

impl<R: Runtime, E: Elementwise> ShardOptimizer<R> for Shard<R, E> {
    fn check(&mut self, lrs: &[f64]) -> Result<()> {
        self.rules.check_rates(lrs)?;
        self.check_sole()?;
        self.states.require_memory()
    }

    fn check_sole(&mut self) -> Result<()> {
        if self.states.is_sole() {
            return Ok(());
        }
        Err(ErrorKind::Shared { op: E::NAME, what: self.rules.one_of("state tensor") }.into())
    }

    fn update(
        &mut self,
        lrs: &[f64],
        values: TensorMut<R>,
        grads: &Tensor<R>,
        scale: &Tensor<R>,
        used: &dyn Fn(usize) -> bool,
    ) -> Result<TensorMut<R>> {
        self.rules.check_rates(lrs)?;
        let Shard { rules, states, steps } = self;
        let mut runs: Vec<Range<usize>> = Vec::new();
        while let Some(run) =
            next_run(steps.len(), runs.last().map_or(0, |r| r.end), |i| used(i).then(|| (rules.groups[i], steps[i])))
        {
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
            for (run, part) in runs.into_iter().zip(parts.iter_mut().skip(1).step_by(2)) {
                let now = StepContext { lr: lrs[rules.groups[run.start]], step: steps[run.start] + 1 };
                rules.launch(run.clone(), now, part, states, [grads, scale])?;
                steps[run].fill(now.step);
            }
            Ok(())
        })?;
        TensorMut::join(parts)
    }

    fn state(&self) -> Vec<(&'static str, DType)> {
        self.states.names()
    }

    fn set_hyper_parameters(&mut self, groups: &[HyperParams]) -> Result<()> {
        let old: Vec<E> = self.rules.configs.iter().map(|(config, _)| config.clone()).collect();
        let half = Some(self.rules.layout.dtype()).filter(|d| d.is_half());
        self.rules.configs = with_programs(&replaced(&old, groups)?, half)?;
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
pub(crate) fn replaced<E: Elementwise>(configs: &[E], groups: &[HyperParams]) -> Result<Vec<E>> {
    require_groups(E::NAME, groups.len(), configs.len())?;
    let one = |(k, (config, group)): (usize, (&E, &HyperParams))| {
        let new = group.applied(config)?;
        new.validate()?;
        let names = |c: &E| c.tensors().iter().map(|state| state.name).collect::<Vec<_>>();
        if names(config) != names(&new) {
            let why = format!(
                "group {k} keeps {:?}, with these hyper-parameters {:?}: configure it so",
                names(config),
                names(&new)
            );
            return Err(Error::config(E::NAME, "hyper_parameters", why));
        }
        Ok(new)
    };
    configs.iter().zip(groups).enumerate().map(one).collect()
}

fn with_programs<E: Elementwise>(configs: &[E], half: Option<DType>) -> Result<Vec<(E, Programs)>> {
    configs.iter().map(|c| Ok((c.clone(), c.kernel(half)?))).collect()
}

fn filled<R: Runtime>(rt: &R, layout: &FlatLayout, state: &StateSpec) -> Result<Flat<R>> {
    let mut flat = Flat::zeros_for(rt, MemoryCategory::Optimizer, layout.clone())?;
    if state.init != 0.0 {
        let mut whole = flat.lend_whole()?;
        update(&FILL, &[], &[state.init.into()], &mut [&mut whole])?;
        flat.restore(whole)?;
    }
    Ok(flat)
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
