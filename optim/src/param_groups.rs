//! Groups of hyper-parameters for parameters that are known by name only.

use std::sync::Arc;

use autograd::Leaf;
use numcore::{Error, FlatLayout, Result, Runtime, Tensor, ops::Spec};

use crate::{
    AdamWConfig, FlatOptimizer, Fragment, HyperParams, LrSchedule, Optimizer, ShardOptimizer, Shards, StatePlace,
    UpdateRule,
    further_params::GroupsByName,
    one_of::OneOf,
    phase::adapted,
    schedule::SAMPLED,
    shard::{Shard, replaced},
};

/// Groups of hyper-parameters for parameters that are known by name only; [`FlatOptimizer`](crate::FlatOptimizer) has
/// groups of the parameters themselves.
///
/// ```
/// use optim::{AdamWConfig, ParamGroups};
/// let groups = ParamGroups::new(AdamWConfig { lr: 3e-4, weight_decay: 0.1, ..Default::default() })
///     .group(|_, spec| spec.shape.rank() < 2, |c| c.weight_decay = 0.0);
/// ```
#[derive(Clone)]
pub struct ParamGroups<C> {
    configs: Vec<C>,
    which: Vec<Select>,
    schedule: Option<Arc<dyn LrSchedule>>,
}

type Select = Arc<dyn Fn(&str, &Spec) -> bool + Send + Sync>;

impl<C: UpdateRule> ParamGroups<C> {
    /// Uses these hyper-parameters for all parameters, in one group.
    pub fn new(defaults: C) -> Self {
        ParamGroups { configs: vec![defaults], which: Vec::new(), schedule: None }
    }

    /// Adds a group with the parameters for which `which` is true; a parameter is in the last such group.
    pub fn group(
        mut self,
        which: impl Fn(&str, &Spec) -> bool + Send + Sync + 'static,
        set: impl FnOnce(&mut C),
    ) -> Self {
        let mut config = self.configs[0].clone();
        set(&mut config);
        self.configs.push(config);
        self.which.push(Arc::new(which));
        self
    }

    /// Decreases learning rates towards the input (layer-wise decay; Howard & Ruder 2018, Clark et al. 2020). Depth `k`
    /// of `depths` has `decay^(depths − 1 − k)` times the rate of its group; the last depth and any beyond have that
    /// rate. `depth` gives that of a parameter by its name. Each group so far, of this and other rules, has its own for
    /// each depth.
    ///
    /// ```
    /// use optim::{AdamWConfig, ParamGroups};
    /// // The embedding, twelve blocks and the head of a GPT.
    /// let depth = |name: &str| match name.strip_prefix("blocks.") {
    ///     Some(block) => 1 + block.split('.').next().and_then(|n| n.parse::<usize>().ok()).unwrap_or(0),
    ///     None if name.starts_with("w") => 0,
    ///     None => 13,
    /// };
    /// let groups = ParamGroups::decay_matrices(AdamWConfig::default()).by_depth(14, 0.75, depth);
    /// ```
    #[doc(alias("layer_decay", "layerwise", "LLRD"))]
    pub fn by_depth(self, depths: usize, decay: f64, depth: impl Fn(&str) -> usize + Send + Sync + 'static) -> Self {
        let last = depths.saturating_sub(1);
        self.divided(
            last,
            move |name| Some(depth(name)),
            |k, config| {
                config.set_lr(config.lr() * decay.powf((last - k) as f64));
            },
        )
    }

    /// Divides each group so far by `part`, a number of `parts` for a parameter's name: `set` changes the
    /// hyper-parameters of that part. Parameters without such a number stay as they are.
    pub(crate) fn divided(
        mut self,
        parts: usize,
        part: impl Fn(&str) -> Option<usize> + Send + Sync + 'static,
        set: impl Fn(usize, &mut C),
    ) -> Self {
        let (before, part) = (Arc::new(self.clone()), Arc::new(part));
        for k in 0..parts {
            for (group, config) in before.configs.iter().enumerate() {
                let (before, part, mut config) = (before.clone(), part.clone(), config.clone());
                set(k, &mut config);
                self.configs.push(config);
                let is_own =
                    move |name: &str, spec: &Spec| part(name) == Some(k) && before.group_of(name, spec) == group;
                self.which.push(Arc::new(is_own));
            }
        }
        self
    }

    /// Updates the parameters for which `which` is true by another rule, in groups of its own. There is one schedule:
    /// that of these groups.
    ///
    /// ```
    /// use optim::{AdamWConfig, MuonConfig, ParamGroups};
    /// let groups = ParamGroups::new(MuonConfig { lr: 0.02, ..Default::default() }).others(
    ///     |name, spec| spec.shape.rank() != 2 || name.starts_with("wte"),
    ///     ParamGroups::decay_matrices(AdamWConfig { lr: 3e-4, ..Default::default() }),
    /// );
    /// ```
    pub fn others<D: UpdateRule>(
        self,
        which: impl Fn(&str, &Spec) -> bool + Send + Sync + 'static,
        groups: ParamGroups<D>,
    ) -> ParamGroups<OneOf<C, D>> {
        let which: Select = Arc::new(which);
        let first = self.configs.into_iter().map(OneOf::First);
        let narrowed = groups.which.into_iter().map(|own| {
            let which = which.clone();
            Arc::new(move |name: &str, spec: &Spec| which(name, spec) && own(name, spec)) as Select
        });
        ParamGroups {
            configs: first.chain(groups.configs.into_iter().map(OneOf::Second)).collect(),
            which: self.which.into_iter().chain([which.clone()]).chain(narrowed).collect(),
            schedule: self.schedule,
        }
    }

    /// Adds a learning-rate schedule.
    pub fn scheduled(mut self, schedule: impl LrSchedule + 'static) -> Self {
        self.schedule = Some(Arc::new(schedule));
        self
    }

    /// Makes an optimizer of these parameters, each in the group that selects it. Groups without parameters are
    /// omitted, except one, which has the learning rate.
    pub(crate) fn optimizer<R: Runtime>(&self, leaves: Vec<Arc<Leaf<R>>>) -> Result<FlatOptimizer<R, C>> {
        let mut groups = vec![Vec::new(); self.configs.len()];
        for leaf in leaves {
            groups[self.group_of(&leaf.name(), &leaf.spec())].push(leaf);
        }
        let mut optimizer = FlatOptimizer::in_groups(self.configs[0].clone());
        let (none, mut numbers) = (groups.iter().all(Vec::is_empty), vec![None; self.configs.len()]);
        for (k, (config, leaves)) in self.configs.iter().zip(groups).enumerate() {
            if leaves.is_empty() && !(none && k == 0) {
                continue;
            }
            numbers[k] = Some(optimizer.groups.len());
            optimizer = optimizer.group(leaves, |own| *own = config.clone())?;
        }
        if let Some(schedule) = &self.schedule {
            optimizer.set_schedule(schedule.clone());
        }
        let (groups, configs) = (self.clone(), self.configs.clone());
        let group_of = Arc::new(move |name: &str, spec: &Spec| groups.group_of(name, spec));
        optimizer.by_name = Some(GroupsByName { group_of, configs, groups: numbers });
        Ok(optimizer)
    }

    fn group_of(&self, name: &str, spec: &Spec) -> usize {
        self.which.iter().rposition(|which| which(name, spec)).map_or(0, |k| k + 1)
    }
}

impl ParamGroups<AdamWConfig> {
    /// Applies weight decay only to matrices and tensors of higher rank, not to biases and norms, as
    /// [`split_decay`](crate::split_decay) divides them.
    pub fn decay_matrices(config: AdamWConfig) -> Self {
        ParamGroups::new(config).group(|_, spec| spec.shape.rank() < 2, |c| c.weight_decay = 0.0)
    }
}

impl<R: Runtime, C: UpdateRule> Shards<R> for ParamGroups<C> {
    fn group(&self, name: &str, spec: &Spec) -> usize {
        self.group_of(name, spec)
    }

    fn lrs(&self, step: u64) -> Vec<f64> {
        self.configs.iter().map(|c| self.schedule.as_ref().map_or(c.lr(), |s| s.lr(c.lr(), step))).collect()
    }

    fn base_lrs(&self) -> Vec<f64> {
        self.configs.iter().map(|c| c.lr()).collect()
    }

    fn describe(&self) -> String {
        let rates = SAMPLED.map(|step| <Self as Shards<R>>::lrs(self, step));
        let groups: Vec<String> = self.configs.iter().map(crate::rule::described).collect();
        format!("{} {groups:?}, rates {rates:?}", C::NAME)
    }

    fn hyper_parameters(&self) -> Result<Vec<HyperParams>> {
        Ok(self.configs.iter().map(|config| HyperParams::of(config, Vec::new())).collect())
    }

    fn with_hyper_parameters(&self, groups: &[HyperParams]) -> Result<Arc<dyn Shards<R>>> {
        Ok(Arc::new(ParamGroups { configs: replaced(&self.configs, groups)?, ..self.clone() }))
    }

    fn sum_count(&self) -> usize {
        self.configs.iter().map(C::sum_count).max().unwrap_or(0)
    }

    fn adapted(&self, lrs: &[f64], sums: &[f64], loss: Option<f64>) -> Result<Option<Arc<dyn Shards<R>>>> {
        Ok(Some(Arc::new(ParamGroups { configs: adapted(&self.configs, lrs, sums, loss)?, ..self.clone() })))
    }

    fn may_cut(&self, name: &str, spec: &Spec) -> Result<bool> {
        match self.configs[self.group_of(name, spec)].refuses(spec) {
            Some(why) => Err(Error::unsupported(C::NAME, format!("`{name}` {why}"))),
            None => Ok(!self.configs[self.group_of(name, spec)].needs_whole()),
        }
    }

    fn shard(
        &self,
        layout: &FlatLayout,
        fragments: Vec<Fragment<R>>,
        values: &Tensor<R>,
        place: StatePlace,
    ) -> Result<Box<dyn ShardOptimizer<R>>> {
        for config in &self.configs {
            config.check()?;
            config.validate()?;
        }
        Ok(Box::new(Shard::new(&self.configs, layout, fragments, values, place)?))
    }
}

/// A rule by itself puts all parameters in one group.
impl<R: Runtime, C: UpdateRule> Shards<R> for C {
    fn group(&self, _: &str, _: &Spec) -> usize {
        0
    }

    fn lrs(&self, _: u64) -> Vec<f64> {
        vec![self.lr()]
    }

    fn describe(&self) -> String {
        Shards::<R>::describe(&ParamGroups::new(self.clone()))
    }

    fn hyper_parameters(&self) -> Result<Vec<HyperParams>> {
        Shards::<R>::hyper_parameters(&ParamGroups::new(self.clone()))
    }

    fn with_hyper_parameters(&self, groups: &[HyperParams]) -> Result<Arc<dyn Shards<R>>> {
        ParamGroups::new(self.clone()).with_hyper_parameters(groups)
    }

    fn sum_count(&self) -> usize {
        UpdateRule::sum_count(self)
    }

    fn adapted(&self, lrs: &[f64], sums: &[f64], loss: Option<f64>) -> Result<Option<Arc<dyn Shards<R>>>> {
        ParamGroups::new(self.clone()).adapted(lrs, sums, loss)
    }

    fn may_cut(&self, name: &str, spec: &Spec) -> Result<bool> {
        Shards::<R>::may_cut(&ParamGroups::new(self.clone()), name, spec)
    }

    fn shard(
        &self,
        layout: &FlatLayout,
        fragments: Vec<Fragment<R>>,
        values: &Tensor<R>,
        place: StatePlace,
    ) -> Result<Box<dyn ShardOptimizer<R>>> {
        ParamGroups::new(self.clone()).shard(layout, fragments, values, place)
    }
}
