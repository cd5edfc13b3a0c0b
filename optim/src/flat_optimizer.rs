//! The optimizer over groups of parameters in flat buffers, updated by one rule.

use std::{borrow::Borrow, collections::HashSet, sync::Arc};

use autograd::Leaf;
use nn::{Module, ModuleExt};
use numcore::{Error, Flat, Result, Runtime, Tensor, Within};

use crate::{
    Elementwise, FlatParams, HyperParams, LrSchedule, Optimizer, OptimizerCore, OwnGradients, StepContext, UpdatePhase,
    UpdateRule,
    further_params::GroupsByName,
    hyper::require_groups,
    optimizer::PiecesOf,
    param_part::ParamPart,
    params::{by_dtype, same_places},
    schedule::SAMPLED,
};

/// An optimizer with rule `C` over groups of parameters; each group has one buffer per dtype.
///
/// ```
/// use numcore::{DType, NullRuntime, Tensor};
/// use nn::{Forward, Init, Linear, loss};
/// use optim::{AdamW, AdamWConfig, Optimizer};
/// # fn main() -> numcore::Result<()> {
/// let rt = NullRuntime::new();
/// let model = Linear::new(&Init::new(&rt, 42), 4, 3)?;
/// let mut optimizer = AdamW::new(&model, AdamWConfig { lr: 3e-4, ..Default::default() })?;
/// # let x = autograd::Var::new(Tensor::zeros(&rt, [2, 4], DType::F32)?);
/// # let y = autograd::Var::new(Tensor::zeros(&rt, [2], DType::I64)?);
/// let loss = loss::cross_entropy(&model.forward(&x)?, &y)?; // for each batch
/// optimizer.backward(&loss)?;
/// optimizer.step()?;
/// # Ok(())
/// # }
/// ```
///
/// Groups of parameters have their own hyper-parameters:
///
/// ```
/// # use autograd::Leaf;
/// # use numcore::{DType, NullRuntime, Tensor};
/// # use optim::{AdamW, AdamWConfig, Optimizer, split_decay};
/// # fn main() -> numcore::Result<()> {
/// # let rt = NullRuntime::new();
/// # let weight = Leaf::new("weight", Tensor::zeros(&rt, [4, 3], DType::F32)?)?;
/// # let bias = Leaf::new("bias", Tensor::zeros(&rt, [4], DType::F32)?)?;
/// let (decayed, others) = split_decay([weight, bias]);
/// let mut optimizer = AdamW::in_groups(AdamWConfig { lr: 3e-4, ..Default::default() })
///     .group(decayed, |c| c.weight_decay = 0.1)?
///     .group(others, |c| c.weight_decay = 0.0)?;
/// # Ok(())
/// # }
/// ```
pub struct FlatOptimizer<R: Runtime, C: UpdateRule> {
    defaults: C,
    pub(crate) groups: Vec<C>,
    pub(crate) parts: Vec<ParamPart<R, C>>,
    pub(crate) steps: u64,
    pub(crate) schedule: Option<Arc<dyn LrSchedule>>,
    /// True if updates read their numbers from device memory.
    pub(crate) capturable: bool,
    /// The parameters of the model that were frozen when the optimizer was made.
    pub(crate) frozen: Vec<Arc<Leaf<R>>>,
    pub(crate) by_name: Option<GroupsByName<C>>,
    pub(crate) own: OwnGradients<R>,
}

impl<R: Runtime, C: UpdateRule> FlatOptimizer<R, C> {
    /// Makes an optimizer over the parameters of `model` that require gradients, in one group. A parameter that is
    /// frozen now is trained only after [`add_params`](OptimizerCore::add_params).
    #[track_caller]
    pub fn new(model: &(impl Module<R> + ?Sized), config: C) -> Result<Self> {
        let leaves = model.parameters().into_iter().map(|p| p.leaf());
        let (trained, frozen) = leaves.partition::<Vec<_>, _>(|leaf| leaf.requires_grad());
        Ok(FlatOptimizer { frozen, ..Self::over(config, trained)? })
    }

    /// Makes an optimizer without parameters; its groups start from these hyper-parameters.
    pub fn in_groups(defaults: C) -> Self {
        FlatOptimizer {
            defaults,
            groups: Vec::new(),
            parts: Vec::new(),
            steps: 0,
            schedule: None,
            capturable: false,
            frozen: Vec::new(),
            by_name: None,
            own: OwnGradients::default(),
        }
    }

    /// Adds a group of parameters, whose hyper-parameters `set` may change. Values move into one buffer per dtype.
    ///
    /// # Errors
    /// If the optimizer has one of them or a name already, or by their rule or range they cannot be updated.
    #[track_caller]
    pub fn group<L: Borrow<Arc<Leaf<R>>>>(
        mut self,
        params: impl IntoIterator<Item = L>,
        set: impl FnOnce(&mut C),
    ) -> Result<Self> {
        let mut config = self.defaults.clone();
        set(&mut config);
        config.check().and_then(|()| config.validate()).at_caller()?;
        let leaves: Vec<Arc<Leaf<R>>> = params.into_iter().map(|l| l.borrow().clone()).collect();
        self.require_new(&leaves)?;
        refuse(&config, &leaves)?;
        for leaves in by_dtype(leaves) {
            self.parts.push(ParamPart::new(self.groups.len(), &config, leaves)?);
        }
        self.groups.push(config);
        self.own = OwnGradients::default();
        Ok(self)
    }

    /// Makes an optimizer over these leaves, in one group.
    #[track_caller]
    pub fn over<L: Borrow<Arc<Leaf<R>>>>(config: C, params: impl IntoIterator<Item = L>) -> Result<Self> {
        Self::in_groups(config).group(params, |_| {})
    }

    /// Adds a learning-rate schedule to the optimizer.
    pub fn scheduled(mut self, schedule: impl LrSchedule + 'static) -> Self {
        self.schedule = Some(Arc::new(schedule));
        self
    }

    /// Keeps the numbers of an update (learning rate, bias corrections, weight decay) in device memory. So an update
    /// can be captured even if they change from step to step, like PyTorch's `capturable`. Results have the same bits.
    ///
    /// Before each launch of the captured step, [`advance`](Optimizer::advance) writes the numbers of the next update:
    ///
    /// ```text
    /// let mut optimizer = AdamW::new(&model, config)?.scheduled(schedule).capturable();
    /// // two or three steps, then
    /// let (graph, loss) = rt.capture(|| step(&mut optimizer))?;
    /// loop {
    ///     optimizer.advance()?;
    ///     graph.launch()?;
    /// }
    /// ```
    pub fn capturable(mut self) -> Self
    where
        C: Elementwise,
    {
        self.capturable = true;
        self
    }

    /// The hyper-parameters of group `k`.
    pub fn config(&self, k: usize) -> &C {
        &self.groups[k]
    }

    /// Changes the hyper-parameters of group `k`; an error if they are out of range, or need other state.
    #[track_caller]
    pub fn set_config(&mut self, k: usize, set: impl FnOnce(&mut C)) -> Result<()> {
        let mut config = self.groups[k].clone();
        set(&mut config);
        let kernels = self.prepare(k, &config)?;
        self.install(k, config, kernels);
        Ok(())
    }

    /// The kernel data for `config` in each part of group `k`, or the error that prevents it.
    pub(crate) fn prepare(&self, k: usize, config: &C) -> Result<Vec<C::Kernel>> {
        config.check()?;
        config.validate()?;
        let names = |c: &C| c.tensors().iter().map(|s| s.name).collect::<Vec<_>>();
        if names(config) != names(&self.groups[k]) {
            let why = format!("keeps {:?}, with these hyper-parameters {:?}", names(&self.groups[k]), names(config));
            return Err(Error::config(
                C::NAME,
                "hyper_parameters",
                format!("group {k} {why}; build another optimizer"),
            ));
        }
        self.parts.iter().filter(|p| p.group == k).map(|p| config.kernel(p.params.half())).collect()
    }

    pub(crate) fn install(&mut self, k: usize, config: C, kernels: Vec<C::Kernel>) {
        let of_group = self.parts.iter_mut().filter(|p| p.group == k);
        of_group.zip(kernels).for_each(|(part, kernel)| part.kernel = kernel);
        self.groups[k] = config;
    }

    /// The configurations and kernels with other hyper-parameters.
    fn replaced(&self, groups: &[HyperParams]) -> Result<Vec<(C, Vec<C::Kernel>)>> {
        require_groups(C::NAME, groups.len(), self.groups.len())?;
        let one = |(k, (group, config)): (usize, (&HyperParams, &C))| {
            let config = group.applied(config)?;
            let kernels = self.prepare(k, &config)?;
            Ok((config, kernels))
        };
        groups.iter().zip(&self.groups).enumerate().map(one).collect()
    }

    /// The names of the parameters of group `k`.
    fn names(&self, k: usize) -> impl Iterator<Item = String> {
        let own = self.parts.iter().filter(move |part| part.group == k);
        own.flat_map(|part| part.params.leaves()).map(|leaf| leaf.name().to_string())
    }

    pub(crate) fn lr(&self, config: &C) -> f64 {
        self.schedule.as_ref().map_or(config.lr(), |s| s.lr(config.lr(), self.steps))
    }

    pub(crate) fn require_new(&self, leaves: &[Arc<Leaf<R>>]) -> Result<()> {
        let own = self.parts.iter().flat_map(|p| p.params.leaves());
        let (mut ids, mut names): (HashSet<usize>, HashSet<_>) = own.map(|l| (l.id(), l.name())).unzip();
        for leaf in leaves {
            if !ids.insert(leaf.id()) {
                return Err(Error::state(&*leaf.name(), "was given twice to one optimizer"));
            }
            if !names.insert(leaf.name()) {
                let why = "two parameters of one optimizer are called so; give them their names in the model";
                return Err(Error::state(&*leaf.name(), why));
            }
        }
        Ok(())
    }

    pub(crate) fn require_layouts(&self, grads: &[Flat<R>]) -> Result<()> {
        let fits = |(part, grads): (&ParamPart<R, C>, &Flat<R>)| same_places(part.params.layout(), grads.layout());
        if self.parts.len() == grads.len() && self.parts.iter().zip(grads).all(fits) {
            return Ok(());
        }
        let why = "the gradients are not laid out as its parameters are; make them with `alloc_gradients()` once all groups are there";
        Err(Error::usage(C::NAME, why))
    }

    /// Takes the values out of all leaves, or of none.
    pub(crate) fn claim(&mut self) -> Result<()> {
        for k in 0..self.parts.len() {
            if let Err(e) = self.parts[k].claim() {
                self.parts[..k].iter().try_for_each(|p| p.params.release(|_| false))?;
                return Err(e);
            }
        }
        Ok(())
    }
}

impl<R: Runtime, C: UpdateRule> Optimizer<R> for FlatOptimizer<R, C> {
    fn advance(&mut self) -> Result<()> {
        self.prepare_advance()?;
        self.parts.iter_mut().try_for_each(|part| part.numbers.advance(&mut part.steps))?;
        self.steps += 1;
        Ok(())
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

    fn set_schedule(&mut self, schedule: Arc<dyn LrSchedule>) {
        self.schedule = Some(schedule);
    }

    fn state_dict(&self) -> Result<Vec<(String, Tensor<R>)>> {
        self.save()
    }

    fn load_state_dict(&mut self, state: &[(String, Tensor<R>)]) -> Result<()> {
        self.load(state)
    }
}

impl<R: Runtime, C: UpdateRule> OptimizerCore<R> for FlatOptimizer<R, C> {
    fn params(&self) -> Vec<&FlatParams<R>> {
        self.parts.iter().map(|p| &p.params).collect()
    }

    fn params_mut(&mut self) -> Vec<&mut FlatParams<R>> {
        self.parts.iter_mut().map(|p| &mut p.params).collect()
    }

    fn sum_count(&self) -> usize {
        self.rules().iter().map(C::sum_count).max().unwrap_or(0)
    }

    fn sums(
        &mut self,
        rt: &R,
        grads: &[Flat<R>],
        scale: Option<&Tensor<R>>,
        counts: &dyn Fn(&Arc<Leaf<R>>) -> bool,
    ) -> Result<Option<Tensor<R>>> {
        self.sums_of_rules(rt, grads, scale, counts)
    }

    fn adapt(&mut self, sums: &[f64], loss: Option<f64>) -> Result<()> {
        self.adapt_rules(sums, loss)
    }

    fn update(&mut self, grads: &[Flat<R>], scale: Option<&Tensor<R>>) -> Result<()> {
        self.run(grads, scale, &mut UpdatePhase::Change)
    }

    fn prepare_advance(&mut self) -> Result<()> {
        let lrs = self.lrs();
        crate::schedule::require_rates(C::NAME, &lrs)?;
        let mut captured = false;
        for part in &mut self.parts {
            let (config, lr) = (&self.groups[part.group], lrs[part.group]);
            let rt = part.params.runtime().clone();
            let scalars = |step| config.launch_scalars(StepContext { lr, step });
            captured |= part.numbers.prepare(&rt, &part.steps, scalars)?;
        }
        if !captured {
            let why = "no update of it was captured: make it `capturable()`, and capture a step";
            return Err(Error::usage(C::NAME, why));
        }
        Ok(())
    }

    fn own_gradients(&mut self) -> &mut OwnGradients<R> {
        &mut self.own
    }

    fn frozen(&self) -> Vec<Arc<Leaf<R>>> {
        self.frozen.clone()
    }

    fn check_state_dict(&self, state: &[(String, Tensor<R>)]) -> Result<()> {
        self.read(state).map(|_| ())
    }

    fn hyper_parameters(&self) -> Result<Vec<HyperParams>> {
        let group = |(k, config): (usize, &C)| HyperParams::of(config, self.names(k).collect());
        Ok(self.groups.iter().enumerate().map(group).collect())
    }

    fn set_hyper_parameters(&mut self, groups: &[HyperParams]) -> Result<()> {
        let replaced = self.replaced(groups)?;
        replaced.into_iter().enumerate().for_each(|(k, (config, kernels))| self.install(k, config, kernels));
        Ok(())
    }

    fn check_hyper_parameters(&self, groups: &[HyperParams]) -> Result<()> {
        self.replaced(groups).map(|_| ())
    }

    fn is_elementwise(&self) -> bool {
        !self.rules().iter().any(C::needs_whole)
    }

    fn describe(&self) -> String {
        let group = |(k, config): (usize, &C)| {
            let names: String = self.names(k).map(|name| format!(" {name}")).collect();
            let rates =
                SAMPLED.map(|s| self.schedule.as_ref().map_or(config.lr(), |all| all.lr(config.lr(), self.steps + s)));
            format!("{}{}, rates {rates:?}:{names}\n", C::NAME, crate::rule::described(config))
        };
        self.groups.iter().enumerate().map(group).collect()
    }

    fn reorder(&mut self, key: &dyn Fn(&Arc<Leaf<R>>) -> usize) -> Result<()> {
        self.check_sole()?;
        self.own = OwnGradients::default();
        self.parts.iter_mut().try_for_each(|part| part.reorder(&self.groups[part.group], key))
    }

    fn add_params(&mut self, leaves: &[Arc<Leaf<R>>]) -> Result<()> {
        self.take_in(leaves)
    }

    fn update_whole(&mut self, placed: &PiecesOf<'_, R>) -> Result<Vec<usize>> {
        self.share_out(placed)
    }

    fn check_sole(&mut self) -> Result<()> {
        self.claim()?;
        self.parts.iter().try_for_each(|p| p.params.release(|_| false))
    }
}

pub(crate) fn refuse<R: Runtime, C: UpdateRule>(config: &C, leaves: &[Arc<Leaf<R>>]) -> Result<()> {
    let why = |l: &Arc<Leaf<R>>| Some(format!("`{}` {}", l.name(), config.refuses(&l.spec())?));
    let refused: Vec<String> = leaves.iter().filter_map(why).collect();
    if refused.is_empty() { Ok(()) } else { Err(Error::unsupported(C::NAME, refused.join("; "))) }
}
