//! The optimizer: groups of parameters in flat buffers, updated by one rule.

use std::{borrow::Borrow, collections::HashSet, sync::Arc};

use autograd::{Gradients, Leaf};
use numcore::{DType, Error, ErrorKind, Flat, FlatLayout, Result, Runtime, Tensor};

use crate::{
    FlatGradients, FlatParams, Memory, Now, Rule, Schedule,
    params::{one_of, overwrite, require_sole},
    runs::next_run,
};

/// What every optimizer does, whatever its rule: for code that does not care which one it is.
pub trait Optimizer<R: Runtime>: Send {
    /// The parameters, buffer by buffer, in the order they were given.
    fn params(&self) -> Vec<&FlatParams<R>>;
    /// The same, to read their values.
    fn params_mut(&mut self) -> Vec<&mut FlatParams<R>>;

    /// Updates the parameters from gradients laid out as they are, one buffer each, multiplied by the scalar `scale` if
    /// given. Parameters without a gradient are left alone. If it cannot begin, nothing is changed.
    fn update(&mut self, grads: &[Flat<R>], scale: Option<&Tensor<R>>) -> Result<()>;
    /// As [`step`](Optimizer::step) from gradients by leaf, which are copied into flat buffers first.
    fn step_with(&mut self, gradients: &Gradients<R>) -> Result<()>;

    /// How many steps were taken.
    fn steps(&self) -> u64;
    /// The learning rate of the next step, for each group.
    fn lrs(&self) -> Vec<f64>;
    /// Sets the base learning rate of all groups.
    fn set_lr(&mut self, lr: f64) -> Result<()>;
    /// From now on learning rates are this function of the step, starting from each group's base rate.
    fn set_schedule(&mut self, schedule: Arc<dyn Schedule>);

    /// Everything needed to resume exactly: `<state>.<parameter>`, `master.<parameter>` and `step.<parameter>`,
    /// `group.<k>.<hyper-parameter>` (`f64`) and `steps` (`i64`). The tensors are views: nothing can be updated until they are dropped.
    fn state_dict(&self) -> Result<Vec<(String, Tensor<R>)>>;
    /// Takes such a state over. Names, shapes and dtypes must be exactly this optimizer's: an error lists all that are missing,
    /// unexpected or do not fit, and nothing is changed then.
    fn load_state_dict(&mut self, state: &[(String, Tensor<R>)]) -> Result<()>;
    /// An error if [`load_state_dict`](Optimizer::load_state_dict) would refuse this state.
    fn check_state_dict(&self, state: &[(String, Tensor<R>)]) -> Result<()>;
    /// An error if an update could not begin, because someone holds a parameter's value or a state tensor.
    fn check_sole(&mut self) -> Result<()>;

    /// What must be equal on ranks that train together, as text: the rule, its hyper-parameters, the parameters of each group, learning
    /// rates to come. As far as it is known here: parameters and learning rates.
    fn describe(&self) -> String {
        let names = self.params().into_iter().flat_map(|p| p.leaves()).map(|l| format!(" {}", l.name()));
        format!("{:?}:{}", self.lrs(), names.collect::<String>())
    }

    /// Moves the parameters of each buffer, with their state, into ascending order of `key`: gradients that become ready one after
    /// another then lie one after another. Buffers of gradients made before do not fit any more.
    fn reorder(&mut self, key: &dyn Fn(&Arc<Leaf<R>>) -> usize) -> Result<()>;

    /// Buffers for the gradients of its parameters: the hook to sweep with.
    fn gradients(&self) -> Result<FlatGradients<R>> {
        FlatGradients::new(&self.params())
    }

    /// Updates the parameters from these gradients: one launch for each buffer whose parameters all have one (elementwise rules).
    fn step(&mut self, gradients: &FlatGradients<R>) -> Result<()> {
        self.update(gradients.flats(), gradients.scale())
    }
}

/// An optimizer of rule `C` over groups of parameters, each group's in one buffer per dtype.
///
/// ```
/// use autograd::Leaf;
/// use numcore::{DType, NullRuntime, Tensor};
/// use optim::{AdamW, AdamWConfig, Optimizer, split_decay};
/// # fn main() -> numcore::Result<()> {
/// let rt = NullRuntime::new();
/// let weight = Leaf::new("weight", Tensor::zeros(&rt, [4, 3], DType::F32)?)?;
/// let bias = Leaf::new("bias", Tensor::zeros(&rt, [4], DType::F32)?)?;
/// let (decayed, others) = split_decay([weight, bias]);
/// let mut optimizer = AdamW::new(AdamWConfig { lr: 3e-4, ..Default::default() })
///     .group(decayed, |c| c.weight_decay = 0.1)?
///     .group(others, |c| c.weight_decay = 0.0)?;
/// let mut gradients = optimizer.gradients()?;
/// // for each batch: loss.backward_with_hooks(&mut gradients), then
/// optimizer.step(&gradients)?;
/// gradients.zero();
/// # Ok(())
/// # }
/// ```
pub struct FlatOptimizer<R: Runtime, C: Rule> {
    defaults: C,
    pub(crate) groups: Vec<C>,
    pub(crate) parts: Vec<Part<R, C>>,
    pub(crate) steps: u64,
    schedule: Option<Arc<dyn Schedule>>,
    scratch: Option<FlatGradients<R>>,
}

/// How many steps ahead schedules are compared.
pub(crate) const SAMPLED: [u64; 6] = [0, 1, 10, 100, 1000, 10_000];

/// The parameters of one group and dtype.
pub(crate) struct Part<R: Runtime, C: Rule> {
    pub(crate) group: usize,
    pub(crate) params: FlatParams<R>,
    /// In the order of [`Rule::tensors`].
    pub(crate) states: Vec<Flat<R>>,
    /// Updates each parameter has had.
    pub(crate) steps: Vec<u64>,
    pub(crate) kernel: C::Kernel,
}

impl<R: Runtime, C: Rule> FlatOptimizer<R, C> {
    /// An optimizer without parameters yet; groups start from these hyper-parameters.
    pub fn new(defaults: C) -> Self {
        FlatOptimizer { defaults, groups: Vec::new(), parts: Vec::new(), steps: 0, schedule: None, scratch: None }
    }

    /// With a group of parameters, whose hyper-parameters `set` may change.
    ///
    /// The parameters' values move into one buffer per dtype, in this order. A parameter, or a name, that is there already is
    /// an error, as are hyper-parameters out of range.
    pub fn group<L: Borrow<Arc<Leaf<R>>>>(
        mut self,
        params: impl IntoIterator<Item = L>,
        set: impl FnOnce(&mut C),
    ) -> Result<Self> {
        let mut config = self.defaults.clone();
        set(&mut config);
        config.check()?;
        config.validate()?;
        let leaves: Vec<Arc<Leaf<R>>> = params.into_iter().map(|l| l.borrow().clone()).collect();
        self.require_new(&leaves)?;
        refuse(&config, &leaves)?;
        for leaves in by_dtype(leaves) {
            self.parts.push(Part::new(self.groups.len(), &config, leaves)?);
        }
        self.groups.push(config);
        Ok(self)
    }

    /// With all parameters in one group.
    pub fn over<L: Borrow<Arc<Leaf<R>>>>(config: C, params: impl IntoIterator<Item = L>) -> Result<Self> {
        Self::new(config).group(params, |_| {})
    }

    /// With a schedule.
    pub fn scheduled(mut self, schedule: impl Schedule + 'static) -> Self {
        self.schedule = Some(Arc::new(schedule));
        self
    }

    /// The hyper-parameters of group `k`.
    pub fn config(&self, k: usize) -> &C {
        &self.groups[k]
    }

    /// Changes the hyper-parameters of group `k`. What is kept for each parameter must stay the same.
    pub fn set_config(&mut self, k: usize, set: impl FnOnce(&mut C)) -> Result<()> {
        let mut config = self.groups[k].clone();
        set(&mut config);
        let kernels = self.prepare(k, &config)?;
        self.install(k, config, kernels);
        Ok(())
    }

    /// What `config` needs in each part of group `k`, or why it cannot be had.
    pub(crate) fn prepare(&self, k: usize, config: &C) -> Result<Vec<C::Kernel>> {
        config.check()?;
        config.validate()?;
        let names = |c: &C| c.tensors().iter().map(|s| s.name).collect::<Vec<_>>();
        if names(config) != names(&self.groups[k]) {
            let why = format!("keeps {:?}, with these hyper-parameters {:?}", names(&self.groups[k]), names(config));
            return Err(Error::argument(C::NAME, format!("group {k} {why}; build another optimizer")));
        }
        self.parts.iter().filter(|p| p.group == k).map(|p| config.kernel(p.params.half())).collect()
    }

    pub(crate) fn install(&mut self, k: usize, config: C, kernels: Vec<C::Kernel>) {
        let of_group = self.parts.iter_mut().filter(|p| p.group == k);
        of_group.zip(kernels).for_each(|(part, kernel)| part.kernel = kernel);
        self.groups[k] = config;
    }

    fn lr(&self, config: &C) -> f64 {
        self.schedule.as_ref().map_or(config.lr(), |s| s.lr(config.lr(), self.steps))
    }

    fn require_new(&self, leaves: &[Arc<Leaf<R>>]) -> Result<()> {
        let own = self.parts.iter().flat_map(|p| p.params.leaves());
        let (mut ids, mut names): (HashSet<usize>, HashSet<_>) = own.map(|l| (l.id(), l.name())).unzip();
        for leaf in leaves {
            if !ids.insert(leaf.id()) {
                return Err(Error::argument(C::NAME, format!("parameter `{}` was given twice", leaf.name())));
            }
            if !names.insert(leaf.name()) {
                let why = format!("two parameters are called `{}`; give them their names in the model", leaf.name());
                return Err(Error::argument(C::NAME, why));
            }
        }
        Ok(())
    }

    fn require_layouts(&self, grads: &[Flat<R>]) -> Result<()> {
        let fits = |(part, grads): (&Part<R, C>, &Flat<R>)| same_places(part.params.layout(), grads.layout());
        if self.parts.len() == grads.len() && self.parts.iter().zip(grads).all(fits) {
            return Ok(());
        }
        let why = "the gradients are not laid out as its parameters are; make them with `gradients()` once all groups are there";
        Err(Error::argument(C::NAME, why))
    }

    /// Takes all values out of their leaves, or none.
    fn claim(&mut self) -> Result<()> {
        for k in 0..self.parts.len() {
            if let Err(e) = self.parts[k].claim() {
                self.parts[..k].iter().try_for_each(|p| p.params.release(|_| false))?;
                return Err(e);
            }
        }
        Ok(())
    }
}

/// Gradients may be wider than half parameters; a kernel only needs them in the same places.
fn same_places(a: &FlatLayout, b: &FlatLayout) -> bool {
    let ranges = || a.len() == b.len() && (0..a.len()).all(|i| a.range(i) == b.range(i));
    a == b || (a.numel() == b.numel() && ranges())
}

impl<R: Runtime, C: Rule> Optimizer<R> for FlatOptimizer<R, C> {
    fn params(&self) -> Vec<&FlatParams<R>> {
        self.parts.iter().map(|p| &p.params).collect()
    }

    fn params_mut(&mut self) -> Vec<&mut FlatParams<R>> {
        self.parts.iter_mut().map(|p| &mut p.params).collect()
    }

    fn update(&mut self, grads: &[Flat<R>], scale: Option<&Tensor<R>>) -> Result<()> {
        self.require_layouts(grads)?;
        let lrs = self.lrs();
        crate::schedule::require_rates(C::NAME, &lrs)?;
        self.claim()?;
        let mut done = Ok(());
        for (part, grads) in self.parts.iter_mut().zip(grads) {
            done = done.and_then(|()| part.update(&self.groups[part.group], lrs[part.group], grads, scale));
        }
        for (part, grads) in self.parts.iter().zip(grads) {
            part.params.release(|i| grads.is_written(i))?;
        }
        done?;
        self.steps += 1;
        Ok(())
    }

    fn step_with(&mut self, gradients: &Gradients<R>) -> Result<()> {
        let mut scratch = match self.scratch.take() {
            Some(scratch) if self.require_layouts(scratch.flats()).is_ok() => scratch,
            _ => self.gradients()?,
        };
        let done = scratch.copy_from(gradients).and_then(|()| self.step(&scratch));
        self.scratch = Some(scratch);
        done
    }

    fn steps(&self) -> u64 {
        self.steps
    }

    fn lrs(&self) -> Vec<f64> {
        self.groups.iter().map(|c| self.lr(c)).collect()
    }

    fn set_lr(&mut self, lr: f64) -> Result<()> {
        for config in &mut self.groups {
            let before = config.lr();
            config.set_lr(lr);
            config.check().inspect_err(|_| config.set_lr(before))?;
        }
        Ok(())
    }

    fn set_schedule(&mut self, schedule: Arc<dyn Schedule>) {
        self.schedule = Some(schedule);
    }

    fn state_dict(&self) -> Result<Vec<(String, Tensor<R>)>> {
        self.save()
    }

    fn load_state_dict(&mut self, state: &[(String, Tensor<R>)]) -> Result<()> {
        self.load(state)
    }

    fn check_state_dict(&self, state: &[(String, Tensor<R>)]) -> Result<()> {
        self.read(state).map(|_| ())
    }

    fn describe(&self) -> String {
        let group = |(k, config): (usize, &C)| {
            let own = self.parts.iter().filter(move |part| part.group == k);
            let names: String = own.flat_map(|p| p.params.leaves()).map(|l| format!(" {}", l.name())).collect();
            let rates =
                SAMPLED.map(|s| self.schedule.as_ref().map_or(config.lr(), |all| all.lr(config.lr(), self.steps + s)));
            format!("{}{}, rates {rates:?}:{names}\n", C::NAME, crate::config::described(config))
        };
        self.groups.iter().enumerate().map(group).collect()
    }

    fn reorder(&mut self, key: &dyn Fn(&Arc<Leaf<R>>) -> usize) -> Result<()> {
        self.check_sole()?;
        self.scratch = None;
        self.parts.iter_mut().try_for_each(|part| part.reorder(&self.groups[part.group], key))
    }

    fn check_sole(&mut self) -> Result<()> {
        self.claim()?;
        self.parts.iter().try_for_each(|p| p.params.release(|_| false))
    }
}

impl<R: Runtime, C: Rule> Part<R, C> {
    fn new(group: usize, config: &C, leaves: Vec<Arc<Leaf<R>>>) -> Result<Self> {
        let steps = vec![0; leaves.len()];
        let params = FlatParams::new(leaves)?;
        let states = config.tensors().iter().map(|s| params.state(s)).collect::<Result<_>>()?;
        Ok(Part { group, kernel: config.kernel(params.half())?, states, steps, params })
    }

    fn reorder(&mut self, config: &C, key: &dyn Fn(&Arc<Leaf<R>>) -> usize) -> Result<()> {
        let mut order: Vec<usize> = (0..self.params.len()).collect();
        order.sort_by_key(|&i| key(&self.params.leaves()[i]));
        if order.is_sorted() {
            return Ok(());
        }
        let moved = self.params.permuted(&order)?;
        for (state, old) in config.tensors().iter().zip(&mut self.states) {
            let mut new = moved.state(state)?;
            order.iter().enumerate().try_for_each(|(k, &i)| overwrite(&mut new, k, &old.tensor(i)?))?;
            *old = new;
        }
        self.steps = order.iter().map(|&i| self.steps[i]).collect();
        self.params = moved;
        Ok(())
    }

    fn claim(&mut self) -> Result<()> {
        self.params.claim()?;
        if self.states.iter_mut().all(|s| require_sole(s).is_ok()) {
            return Ok(());
        }
        self.params.release(|_| false)?;
        let what = one_of("state tensor", self.params.leaves().iter().map(|l| l.name().to_string()));
        Err(ErrorKind::Shared { op: C::NAME, what }.into())
    }

    /// The next parameters that one call of the rule updates: neighbours with a gradient and as many updates so far.
    fn next_run(&self, from: usize, grads: &Flat<R>) -> Option<std::ops::Range<usize>> {
        let key = |i: usize| (self.steps[i], if C::PER_PARAMETER { i } else { 0 });
        next_run(self.params.len(), from, |i| grads.is_written(i).then(|| key(i)))
    }

    fn update(&mut self, config: &C, lr: f64, grads: &Flat<R>, scale: Option<&Tensor<R>>) -> Result<()> {
        let mut at = 0;
        while let Some(ranges) = self.next_run(at, grads) {
            at = ranges.end;
            let now = Now { lr, step: self.steps[ranges.start] + 1 };
            let (params, states) = (&mut self.params, &mut self.states[..]);
            if !grads.layout().span(ranges.clone()).is_empty() {
                let mut memory = Memory { params, states, grads, scale, ranges: ranges.clone() };
                config.update(&self.kernel, now, &mut memory)?;
            }
            self.steps[ranges].fill(now.step);
        }
        Ok(())
    }
}

/// Parameters by dtype, in order of first appearance.
fn by_dtype<R: Runtime>(leaves: Vec<Arc<Leaf<R>>>) -> Vec<Vec<Arc<Leaf<R>>>> {
    let mut parts: Vec<(DType, Vec<Arc<Leaf<R>>>)> = Vec::new();
    for leaf in leaves {
        let dtype = leaf.spec().dtype;
        match parts.iter_mut().find(|(d, _)| *d == dtype) {
            Some((_, part)) => part.push(leaf),
            None => parts.push((dtype, vec![leaf])),
        }
    }
    parts.into_iter().map(|(_, part)| part).collect()
}

fn refuse<R: Runtime, C: Rule>(config: &C, leaves: &[Arc<Leaf<R>>]) -> Result<()> {
    let why = |l: &Arc<Leaf<R>>| Some(format!("`{}` {}", l.name(), config.refuses(&l.spec())?));
    let refused: Vec<String> = leaves.iter().filter_map(why).collect();
    if refused.is_empty() { Ok(()) } else { Err(Error::argument(C::NAME, refused.join("; "))) }
}
