//! Optimizers of shards: elementwise rules over pieces of parameters, whose memory is someone else's.

use std::{ops::Range, sync::Arc};

use numcore::{
    DType, Error, Flat, FlatLayout, Result, Runtime, Tensor, TensorMut, Use,
    ops::{Input, Spec, ViewOps, compute, update},
    pointwise::Program,
};
use smallvec::SmallVec;

use crate::{Elementwise, Now, Programs, Rule, Schedule, State, runs::next_run};

/// Hyper-parameters by group: what [`FlatOptimizer`](crate::FlatOptimizer) is told group by group, for parameters that are known by
/// name alone.
///
/// ```
/// use optim::{AdamWConfig, ParamGroups};
/// let groups = ParamGroups::new(AdamWConfig { lr: 3e-4, weight_decay: 0.1, ..Default::default() })
///     .group(|_, spec| spec.shape.rank() < 2, |c| c.weight_decay = 0.0);
/// ```
pub struct ParamGroups<E> {
    configs: Vec<E>,
    which: Vec<Select>,
    schedule: Option<Arc<dyn Schedule>>,
}

type Select = Box<dyn Fn(&str, &Spec) -> bool + Send + Sync>;

impl<E: Elementwise> ParamGroups<E> {
    /// All parameters in one group.
    pub fn new(defaults: E) -> Self {
        ParamGroups { configs: vec![defaults], which: Vec::new(), schedule: None }
    }

    /// Another group, of the parameters `which` picks; the last that picks one has it.
    pub fn group(
        mut self,
        which: impl Fn(&str, &Spec) -> bool + Send + Sync + 'static,
        set: impl FnOnce(&mut E),
    ) -> Self {
        let mut config = self.configs[0].clone();
        set(&mut config);
        self.configs.push(config);
        self.which.push(Box::new(which));
        self
    }

    /// With a schedule.
    pub fn scheduled(mut self, schedule: impl Schedule + 'static) -> Self {
        self.schedule = Some(Arc::new(schedule));
        self
    }
}

/// What makes optimizers of shards; its own type is the rule's affair.
pub trait Shards<R: Runtime>: Send + Sync {
    /// The group a parameter belongs to.
    fn group(&self, name: &str, spec: &Spec) -> usize;
    /// The learning rate of each group at a step, from 0.
    fn lrs(&self, step: u64) -> Vec<f64>;
    /// An optimizer of pieces laid out so, each of a group. Half parameters keep an `f32` master copy, taken from `values` (a row).
    fn shard(&self, layout: &FlatLayout, groups: Vec<usize>, values: &Tensor<R>) -> Result<Box<dyn ShardOptimizer<R>>>;
}

/// The optimizer of one shard.
pub trait ShardOptimizer<R: Runtime>: Send {
    /// Updates `values`, a row that begins with the shard's pieces, in place, from gradients laid out alike and multiplied by a scalar;
    /// gives the memory back. Pieces that are not `used` are left alone.
    fn update(
        &mut self,
        lrs: &[f64],
        values: TensorMut<R>,
        grads: &Tensor<R>,
        scale: &Tensor<R>,
        used: &dyn Fn(usize) -> bool,
    ) -> Result<TensorMut<R>>;
    /// Its state buffers by name, the master copy included: all laid out as the pieces are.
    fn state(&self) -> Vec<(&'static str, &Flat<R>)>;
    /// The same, to fill them.
    fn state_mut(&mut self) -> Vec<(&'static str, &mut Flat<R>)>;
    /// Updates that each piece has had.
    fn steps(&self) -> &[u64];
    /// The same, to set them.
    fn steps_mut(&mut self) -> &mut [u64];
}

impl<R: Runtime, E: Elementwise> Shards<R> for ParamGroups<E> {
    fn group(&self, name: &str, spec: &Spec) -> usize {
        self.which.iter().rposition(|which| which(name, spec)).map_or(0, |k| k + 1)
    }

    fn lrs(&self, step: u64) -> Vec<f64> {
        self.configs.iter().map(|c| self.schedule.as_ref().map_or(c.lr(), |s| s.lr(c.lr(), step))).collect()
    }

    fn shard(&self, layout: &FlatLayout, groups: Vec<usize>, values: &Tensor<R>) -> Result<Box<dyn ShardOptimizer<R>>> {
        for config in &self.configs {
            config.check()?;
            config.validate()?;
        }
        Ok(Box::new(Shard::new(&self.configs, layout, groups, values)?))
    }
}

struct Shard<R: Runtime, E> {
    configs: Vec<(E, Programs)>,
    groups: Vec<usize>,
    layout: FlatLayout,
    names: Vec<&'static str>,
    states: Vec<Flat<R>>,
    master: Option<Flat<R>>,
    steps: Vec<u64>,
}

impl<R: Runtime, E: Elementwise> Shard<R, E> {
    fn new(configs: &[E], layout: &FlatLayout, groups: Vec<usize>, values: &Tensor<R>) -> Result<Self> {
        let rt = values.runtime();
        let half = Some(layout.dtype()).filter(|d| d.is_half());
        let working = layout.with_dtype(half.map_or(layout.dtype(), |_| DType::F32));
        let tensors = configs[0].tensors();
        if configs.iter().any(|c| c.tensors().len() != tensors.len()) {
            return Err(Error::argument(E::NAME, "all groups of a sharded optimizer keep the same state"));
        }
        let states = tensors.iter().map(|s| filled(rt, &working, s)).collect::<Result<Vec<_>>>()?;
        let master = half.map(|_| master(rt, &working, values)).transpose()?;
        let of = |c: &E| Ok((c.clone(), c.kernel(half)?));
        let configs = configs.iter().map(of).collect::<Result<Vec<_>>>()?;
        let (names, steps) = (tensors.iter().map(|s| s.name).collect(), vec![0; groups.len()]);
        Ok(Shard { configs, groups, layout: layout.clone(), names, states, master, steps })
    }

    fn launch(
        &mut self,
        run: Range<usize>,
        lrs: &[f64],
        value: &mut TensorMut<R>,
        grads: &Tensor<R>,
        scale: &Tensor<R>,
    ) -> Result<()> {
        let at = self.layout.span(run.clone());
        if at.is_empty() {
            return Ok(());
        }
        let (config, programs) = &self.configs[self.groups[run.start]];
        let now = Now { lr: lrs[self.groups[run.start]], step: self.steps[run.start] + 1 };
        let grad = grads.narrow(0, at.start, at.len())?;
        let mut flats: SmallVec<[&mut Flat<R>; 4]> = self.states.iter_mut().chain(self.master.as_mut()).collect();
        let mut lent = flats.iter_mut().map(|f| f.lend_span(run.clone())).collect::<Result<Vec<_>>>()?;
        let mut outs: SmallVec<[&mut TensorMut<R>; 5]> = SmallVec::new();
        outs.push(value);
        outs.extend(lent.iter_mut());
        let done = update(programs.get(true), &[&grad, scale], &config.scalars(now), &mut outs);
        drop(outs);
        flats.into_iter().zip(lent).try_for_each(|(flat, part)| flat.restore(part))?;
        done?;
        self.steps[run].fill(now.step);
        Ok(())
    }
}

impl<R: Runtime, E: Elementwise> ShardOptimizer<R> for Shard<R, E> {
    fn update(
        &mut self,
        lrs: &[f64],
        values: TensorMut<R>,
        grads: &Tensor<R>,
        scale: &Tensor<R>,
        used: &dyn Fn(usize) -> bool,
    ) -> Result<TensorMut<R>> {
        let n = self.groups.len();
        let mut runs = Vec::new();
        while let Some(run) = next_run(n, runs.last().map_or(0, |r: &Range<usize>| r.end), |i| {
            used(i).then(|| (self.groups[i], self.steps[i]))
        }) {
            runs.push(run);
        }
        // What lies between the runs, and they themselves, in turn.
        let (mut lens, mut at) = (Vec::new(), 0);
        for run in &runs {
            let span = self.layout.span(run.clone());
            lens.extend([span.start - at, span.len()]);
            at = span.end;
        }
        lens.push(values.shape().numel() - at);
        let mut parts = values.split(&lens)?;
        for (run, part) in runs.into_iter().zip(parts.iter_mut().skip(1).step_by(2)) {
            self.launch(run, lrs, part, grads, scale)?;
        }
        TensorMut::join(parts)
    }

    fn state(&self) -> Vec<(&'static str, &Flat<R>)> {
        let master = self.master.iter().map(|m| (crate::state::MASTER, m));
        self.names.iter().copied().zip(&self.states).chain(master).collect()
    }

    fn state_mut(&mut self) -> Vec<(&'static str, &mut Flat<R>)> {
        let master = self.master.iter_mut().map(|m| (crate::state::MASTER, m));
        self.names.iter().copied().zip(&mut self.states).chain(master).collect()
    }

    fn steps(&self) -> &[u64] {
        &self.steps
    }

    fn steps_mut(&mut self) -> &mut [u64] {
        &mut self.steps
    }
}

fn filled<R: Runtime>(rt: &R, layout: &FlatLayout, state: &State) -> Result<Flat<R>> {
    let mut flat = Flat::zeros_for(rt, Use::Optimizer, layout.clone())?;
    if state.init != 0.0 {
        let fill = Program::new("fill", |[_], [value]| [value]);
        let mut whole = flat.lend_whole()?;
        update(&fill, &[], &[state.init.into()], &mut [&mut whole])?;
        flat.restore(whole)?;
    }
    Ok(flat)
}

fn master<R: Runtime>(rt: &R, layout: &FlatLayout, values: &Tensor<R>) -> Result<Flat<R>> {
    let mut flat = Flat::zeros_for(rt, Use::Optimizer, layout.clone())?;
    let mut whole = flat.lend_whole()?;
    let own = values.narrow(0, 0, layout.numel())?;
    let widen = Program::new("widen", |[x], []| [x.cast(DType::F32)]);
    compute(rt, &widen, &[Input::Value(&own)], &[], &mut [&mut whole])?;
    flat.restore(whole)?;
    Ok(flat)
}
