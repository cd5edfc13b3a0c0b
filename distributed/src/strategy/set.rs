//! Several strategies of one model as one.

use std::{collections::HashMap, sync::Arc};

use autograd::{BackwardHook, Leaf, LeafGrad};
use nn::{Module, ModuleExt};
use numcore::{Result, Runtime, Tensor, TensorMut, ops::PointwiseOps};
use optim::HyperParams;

use super::{
    BackwardPass, BufferSync, Computing, FullParameters, GradLoan, LeafFilter, LossWeight, StepRanks, Strategy, Tied,
    hyper::share_groups,
};
use crate::{
    combinations::{Feature, Features},
    comm::{Collectives, Comm, ReduceOp, all_gather_bool, memory},
    sums::wide,
};

/// Several strategies as one, each of which trains parameters of its own: of experts and of all the rest, or of the
/// stages of a pipeline that this rank has.
///
/// What belongs to a parameter goes to the strategy that has it. Norms are summed over the strategies in order and, in
/// a pipeline, over the ranks that have other stages; parameters of which several stages have a copy are summed over
/// the copies last.
pub struct StrategySet<R: Runtime> {
    pub(super) parts: Vec<StrategyPart<R>>,
    /// The part of a leaf, by its identity; others are the first part's.
    of: HashMap<usize, usize>,
    kind: SetKind<R>,
    ranks: StepRanks<R>,
    features: Features,
}

/// A strategy of a [`StrategySet`].
pub(crate) struct StrategyPart<R: Runtime> {
    pub(crate) strategy: Box<dyn Strategy<R>>,
    /// True if this rank saves its part of checkpoints: of ranks that have the same one the first does.
    pub(crate) saves: bool,
    /// The ranks whose losses reach these parameters too, if the strategy must know what all of them weigh.
    pub(crate) weighed_over: Option<Comm<R>>,
    /// True if the parameters compute something for other ranks, so that none may be idle.
    pub(crate) serves_others: bool,
}

impl<R: Runtime> StrategyPart<R> {
    /// A pass as the part begins it: examples of ranks with other parameters reach it, and weigh what all of those do.
    fn weighed(&self, pass: BackwardPass) -> Result<BackwardPass> {
        let (Some(ranks), BackwardPass::Last(Some(losses))) = (&self.weighed_over, pass) else { return Ok(pass) };
        let all = ranks.exchange_equal(losses.weight.to_le_bytes())?;
        let weight = all.into_iter().map(f64::from_le_bytes).sum();
        Ok(BackwardPass::Last(Some(LossWeight { weight, ..losses })))
    }
}

/// Kind of a [`StrategySet`]: how its parts are one model.
pub(crate) enum SetKind<R: Runtime> {
    /// Passes go through all of them.
    Whole,
    /// Passes go through one stage after another.
    Stages {
        /// The number of each part's stage.
        numbers: Vec<usize>,
        /// The ranks that have the other stages.
        pipe: Comm<R>,
        /// Parameters of which several stages have a copy.
        ties: Vec<Tied<R>>,
    },
}

impl<R: Runtime> StrategyPart<R> {
    pub(crate) fn new(strategy: Box<dyn Strategy<R>>) -> Self {
        StrategyPart { strategy, saves: true, weighed_over: None, serves_others: false }
    }
}

impl<R: Runtime> StrategySet<R> {
    /// The set of some parts, with the module that each trains, and features that all ranks know of the model as a
    /// whole.
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

    /// The strategies, to be changed.
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
        match &self.kind {
            SetKind::Whole => &[],
            SetKind::Stages { ties, .. } => ties,
        }
    }

    /// The number of a part's stage.
    pub(super) fn stage(&self, part: usize) -> usize {
        match &self.kind {
            SetKind::Whole => 0,
            SetKind::Stages { numbers, .. } => numbers[part],
        }
    }

    /// Sums the gradients of parameters of which several stages have a copy.
    fn sum_copies(&mut self) -> Result<()> {
        let SetKind::Stages { ties, .. } = &mut self.kind else { return Ok(()) };
        let ties = std::mem::take(ties);
        let summed = Tied::sum(&ties, self);
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

    fn prepare(&mut self, who: Computing) -> Result<()> {
        self.parts_mut().try_for_each(|part| part.prepare(who))
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

    fn squared_norm(&self, counts: &LeafFilter<'_, R>) -> Result<Tensor<R>> {
        let (rt, mut sum) = (self.ranks.losses.runtime(), None);
        let first =
            |stage: usize, leaf: &Arc<Leaf<R>>| !self.ties().iter().any(|tied| tied.first != stage && tied.has(leaf));
        for (k, part) in self.parts().enumerate() {
            // A parameter with copies counts once.
            let own = part.squared_norm(&|leaf| counts(leaf) && first(self.stage(k), leaf))?.to_dtype(wide(rt))?;
            sum = Some(match sum {
                Some(sum) => own.add(&sum)?,
                None => own,
            });
        }
        let sum = sum.map_or_else(|| Tensor::zeros(rt, [], wide(rt)), Ok)?;
        match &self.kind {
            SetKind::Whole => Ok(sum),
            SetKind::Stages { pipe, .. } => pipe.all_reduce(memory(&sum)?, ReduceOp::Sum)?.wait()?.freeze(),
        }
    }

    fn is_finite(&self) -> Result<bool> {
        let mut own = true;
        // All of them: they may ask other ranks.
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

    fn update(&mut self, scale: &Tensor<R>) -> Result<()> {
        if self.parts.len() > 1 {
            // All of them, before the first is updated.
            self.check_update()?;
        }
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
