//! Several strategies of one model as one.

use std::{collections::HashMap, sync::Arc};

use autograd::{BackwardHook, Leaf, LeafGrad};
use nn::{Module, ModuleExt};
use numcore::{Result, Runtime, Tensor, TensorMut, ops::PointwiseOps};
use optim::HyperParams;

use super::{
    ActiveRanks, BackwardPass, BufferSync, FullParameters, GradLoan, LeafFilter, LossWeight, StepRanks, Strategy,
    Summed, Tied, hyper::share_groups,
};
use crate::{
    combinations::{Feature, Features},
    comm::{Collectives, Comm, ReduceOp, all_gather_bool, memory},
    sums::wide,
};

/// Several strategies as one, each of which trains parameters of its own: of experts and of all the rest, or of this
/// rank's pipeline stages.
///
/// Calls that concern a parameter go to its strategy. Norms are summed over the strategies in order and, in a pipeline,
/// over the ranks that have other stages. Gradients of tied parameters are summed over their copies last.
pub struct StrategySet<R: Runtime> {
    pub(super) parts: Vec<StrategyPart<R>>,
    /// The index of a leaf's part, by the identity of the leaf. Other leaves belong to part 0.
    of: HashMap<usize, usize>,
    kind: SetKind<R>,
    ranks: StepRanks<R>,
    features: Features,
}

/// A strategy of a [`StrategySet`].
pub(crate) struct StrategyPart<R: Runtime> {
    pub(crate) strategy: Box<dyn Strategy<R>>,
    /// True if this rank saves its part of checkpoints: the first of the ranks that have the same part does.
    pub(crate) saves: bool,
    /// All ranks whose losses reach these parameters, if the strategy must know the total weight of these losses.
    pub(crate) weighed_over: Option<Comm<R>>,
    /// True if the parameters compute something for other ranks, so that no rank may be idle.
    pub(crate) serves_others: bool,
}

impl<R: Runtime> StrategyPart<R> {
    /// The pass as the part begins it. Examples of ranks with other parameters reach the part too, so the weight is
    /// that of all their losses.
    fn weighed(&self, pass: BackwardPass) -> Result<BackwardPass> {
        let (Some(ranks), BackwardPass::Last(Some(losses))) = (&self.weighed_over, pass) else { return Ok(pass) };
        let all = ranks.exchange_equal(losses.weight.to_le_bytes())?;
        let weight = all.into_iter().map(f64::from_le_bytes).sum();
        Ok(BackwardPass::Last(Some(LossWeight { weight, ..losses })))
    }
}

/// The relation of the parts of a [`StrategySet`] to the model.
pub(crate) enum SetKind<R: Runtime> {
    /// Every pass goes through all parts.
    Whole,
    /// Every part is a stage: a pass goes through one stage after another.
    Stages {
        /// The number of each part's stage.
        numbers: Vec<usize>,
        /// The ranks that have the other stages.
        pipe: Comm<R>,
        /// Parameters of which several stages have a copy.
        ties: Vec<Tied<R>>,
    },
}

impl<R: Runtime> SetKind<R> {
    fn ties(&self) -> &[Tied<R>] {
        match self {
            SetKind::Whole => &[],
            SetKind::Stages { ties, .. } => ties,
        }
    }

    fn stage(&self, part: usize) -> usize {
        match self {
            SetKind::Whole => 0,
            SetKind::Stages { numbers, .. } => numbers[part],
        }
    }
}

impl<R: Runtime> StrategyPart<R> {
    pub(crate) fn new(strategy: Box<dyn Strategy<R>>) -> Self {
        StrategyPart { strategy, saves: true, weighed_over: None, serves_others: false }
    }
}

impl<R: Runtime> StrategySet<R> {
    /// Makes a set of parts, each with the module that it trains. `features` are those of the whole model, which all
    /// ranks know.
    pub(crate) fn new(
        parts: Vec<(StrategyPart<R>, &dyn Module<R>)>,
        kind: SetKind<R>,
        ranks: StepRanks<R>,
        features: Features,
    ) -> Self {
        let mut of = HashMap::new();
        for (k, (_, module)) in parts.iter().enumerate() {
            of.extend(module.parameters().iter().map(|parameter| (parameter.leaf().id(), k)));
        }
        StrategySet { parts: parts.into_iter().map(|(part, _)| part).collect(), of, kind, ranks, features }
    }

    /// The strategies: of the rest and of the experts, or of this rank's stages in ascending order.
    pub fn parts(&self) -> impl ExactSizeIterator<Item = &dyn Strategy<R>> {
        self.parts.iter().map(|part| &*part.strategy)
    }

    /// The strategies as mutable references, in the order of `parts`.
    pub fn parts_mut(&mut self) -> impl ExactSizeIterator<Item = &mut dyn Strategy<R>> {
        self.parts.iter_mut().map(|part| &mut *part.strategy)
    }

    /// The strategy that has a leaf.
    fn of(&mut self, leaf: &Arc<Leaf<R>>) -> &mut dyn Strategy<R> {
        let part = self.of.get(&leaf.id()).copied().unwrap_or(0);
        &mut *self.parts[part].strategy
    }

    /// The parts through which a pass of a stage goes.
    fn through(&mut self, stage: usize) -> impl Iterator<Item = &mut StrategyPart<R>> {
        let StrategySet { parts, kind, .. } = self;
        let kind = &*kind;
        let goes = move |k: usize| match kind {
            SetKind::Whole => true,
            SetKind::Stages { numbers, .. } => numbers[k] == stage,
        };
        parts.iter_mut().enumerate().filter(move |(k, _)| goes(*k)).map(|(_, part)| part)
    }

    pub(super) fn ties(&self) -> &[Tied<R>] {
        self.kind.ties()
    }

    /// The number of a part's stage; 0 if the model has no stages.
    pub(super) fn stage(&self, part: usize) -> usize {
        self.kind.stage(part)
    }

    /// Sums the gradients of parameters of which several stages have a copy.
    fn sum_copies(&mut self) -> Result<()> {
        let SetKind::Stages { ties, .. } = &mut self.kind else { return Ok(()) };
        let ties = std::mem::take(ties);
        let may_be_unused = self.features().has(Feature::Unused);
        let summed = Tied::sum(&ties, self, may_be_unused);
        if let SetKind::Stages { ties: own, .. } = &mut self.kind {
            *own = ties;
        }
        summed
    }
}

impl<R: Runtime> Strategy<R> for StrategySet<R> {
    fn ranks(&self) -> &StepRanks<R> {
        &self.ranks
    }

    fn features(&self) -> Features {
        let own = |part: &StrategyPart<R>| part.strategy.features().and_if(part.serves_others, Feature::Experts);
        self.parts.iter().map(own).fold(self.features, Features::union)
    }

    fn prepare(&mut self, active: ActiveRanks) -> Result<()> {
        self.parts_mut().try_for_each(|part| part.prepare(active))
    }

    fn begin(&mut self, stage: usize, pass: BackwardPass) -> Result<()> {
        self.through(stage).try_for_each(|part| {
            let pass = part.weighed(pass)?;
            part.strategy.begin(stage, pass)
        })
    }

    fn end(&mut self) -> Result<()> {
        self.parts_mut().try_for_each(|part| part.end())
    }

    fn finish(&mut self) -> Result<()> {
        self.parts_mut().try_for_each(|part| part.finish())?;
        self.sum_copies()
    }

    fn sums(&mut self, what: &Summed<'_, R>, counts: &LeafFilter<'_, R>) -> Result<Option<Tensor<R>>> {
        let StrategySet { parts, kind, ranks, .. } = self;
        let (rt, mut sum) = (ranks.losses.runtime(), None::<Tensor<R>>);
        let first =
            |stage: usize, leaf: &Arc<Leaf<R>>| !kind.ties().iter().any(|tied| tied.first != stage && tied.has(leaf));
        for (k, part) in parts.iter_mut().enumerate() {
            // A parameter with copies counts once.
            let own = part.strategy.sums(what, &|leaf| counts(leaf) && first(kind.stage(k), leaf))?;
            let Some(own) = own.map(|own| own.to_dtype(wide(rt))).transpose()? else { continue };
            sum = Some(sum.map_or(Ok(own.clone()), |sum| own.add(&sum))?);
        }
        match (kind, sum) {
            (SetKind::Stages { pipe, .. }, Some(sum)) => {
                pipe.all_reduce(memory(&sum)?, ReduceOp::Sum)?.wait()?.freeze().map(Some)
            }
            (_, sum) => Ok(sum),
        }
    }

    fn is_finite(&self) -> Result<bool> {
        let mut own = true;
        // All parts are asked, even after a false: they may exchange with other ranks.
        for part in self.parts() {
            own &= part.is_finite()?;
        }
        match &self.kind {
            SetKind::Whole => Ok(own),
            SetKind::Stages { pipe, .. } => Ok(!all_gather_bool(pipe, own)?.contains(&false)),
        }
    }

    fn check_update(&mut self) -> Result<()> {
        self.parts_mut().try_for_each(|part| part.check_update())
    }

    fn adapt(&mut self, sums: &[f64], loss: f64) -> Result<()> {
        self.parts_mut().try_for_each(|part| part.adapt(sums, loss))
    }

    fn update(&mut self, scale: &Tensor<R>) -> Result<()> {
        self.parts_mut().try_for_each(|part| part.update(scale))
    }

    fn sync_buffers(&self, how: BufferSync) -> Result<()> {
        self.parts().try_for_each(|part| part.sync_buffers(how))
    }

    fn learning_rate(&self) -> Option<f64> {
        self.parts().find_map(|part| part.learning_rate())
    }

    fn hyper_parameters(&self) -> Result<Vec<HyperParams>> {
        let mut all = Vec::new();
        for k in 0..self.parts.len() {
            let groups = self.parts[k].strategy.hyper_parameters()?;
            all.extend(groups.into_iter().map(|group| self.under_own_names(k, group)));
        }
        Ok(all)
    }

    fn check_hyper_parameters(&mut self, groups: &[HyperParams]) -> Result<()> {
        share_groups(self.parts_mut(), groups, |part, own| part.check_hyper_parameters(own))
    }

    fn set_hyper_parameters(&mut self, groups: &[HyperParams]) -> Result<()> {
        share_groups(self.parts_mut(), groups, |part, own| part.set_hyper_parameters(own))
    }

    fn lend_grad(&mut self, leaf: &Arc<Leaf<R>>) -> Result<GradLoan<R>> {
        self.of(leaf).lend_grad(leaf)
    }

    fn restore_grad(&mut self, leaf: &Arc<Leaf<R>>, sum: GradLoan<R>) -> Result<()> {
        self.of(leaf).restore_grad(leaf, sum)
    }

    fn unshard(&mut self, stage: usize) -> Result<()> {
        self.through(stage).try_for_each(|part| part.strategy.unshard(stage))
    }

    fn reshard(&mut self, stage: usize) -> Result<()> {
        self.through(stage).try_for_each(|part| part.strategy.reshard(stage))
    }

    fn gather_full_params(&self) -> Result<FullParameters> {
        self.parts().try_fold(FullParameters::default(), |all, part| Ok(all.and(part.gather_full_params()?)))
    }
}

impl<R: Runtime> BackwardHook<R> for StrategySet<R> {
    fn on_leaf_needed(&mut self, leaf: &Arc<Leaf<R>>) -> Result<()> {
        self.of(leaf).on_leaf_needed(leaf)
    }

    fn grad_slot(&mut self, leaf: &Arc<Leaf<R>>) -> Result<Option<TensorMut<R>>> {
        self.of(leaf).grad_slot(leaf)
    }

    fn on_leaf_grad_ready(&mut self, leaf: &Arc<Leaf<R>>, grad: LeafGrad<R>) -> Result<()> {
        self.of(leaf).on_leaf_grad_ready(leaf, grad)
    }
}
