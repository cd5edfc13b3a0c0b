//! The strategies of a rank's stages as one: where gradients go, and what concerns several stages.

use std::{collections::BTreeMap, sync::Arc};

use autograd::{BackwardHook, Leaf, LeafGrad};
use numcore::{
    Error, Result, Runtime, Tensor, TensorMut,
    ops::{PointwiseOps, ViewOps},
};
use optim::HyperParams;

use super::{StageHooks, tie::Tied};
use crate::{
    comm::{Collectives, Comm, Communicator, ReduceOp, all_gather_bool, memory},
    pipeline::{Compute, Pass},
    train::{GradientObserver, ReducedGradients, StageStrategy, observe, share_groups, wide},
};

/// A strategy for each stage of this rank: the [`StageHooks`] of training.
///
/// Strategies sum over the replicas of their stage, during its last backward pass or, where gradients are sharded, during each: REDUCE_GRAD finds
/// the sums in flight. Tied parameters are summed over their copies after that, in the order of ranks.
pub(super) struct LocalStages<R: Runtime, S> {
    pipe: Comm<R>,
    pub(super) parts: BTreeMap<usize, S>,
    pub(super) ties: Vec<Tied<R>>,
    /// Whether the run that goes on is the step's last.
    sync: bool,
    /// The stage whose backward pass goes on.
    current: usize,
    observer: Option<GradientObserver<R>>,
}

impl<R: Runtime, S: StageStrategy<R>> LocalStages<R, S> {
    pub(super) fn new(
        pipe: &Comm<R>,
        parts: BTreeMap<usize, S>,
        ties: Vec<Tied<R>>,
        observer: Option<GradientObserver<R>>,
    ) -> Self {
        LocalStages { pipe: pipe.clone(), parts, ties, sync: true, current: 0, observer }
    }

    /// Before a step: forgets the last one's gradients.
    pub(super) fn prepare(&mut self) -> Result<()> {
        self.parts.values_mut().try_for_each(S::prepare)
    }

    /// Before a run: `sync` tells whether it is the step's last.
    pub(super) fn begin(&mut self, sync: bool) {
        self.sync = sync;
    }

    /// After the last run: waits until every gradient is the sum over all ranks, as far as this rank keeps it.
    pub(super) fn finish(&mut self) -> Result<()> {
        self.parts.values_mut().try_for_each(S::finish)?;
        let start = |tied: &Tied<R>| tied.start(&mut self.parts);
        let summing = self.ties.iter().map(start).collect::<Result<Vec<_>>>()?;
        for (tied, summing) in self.ties.iter().zip(summing) {
            summing.map_or(Ok(()), |summing| tied.finish(summing, &mut self.parts))?;
        }
        Ok(())
    }

    /// Whether a stage's parameter counts where each of the model counts once.
    fn counts(&self, stage: usize, leaf: &Arc<Leaf<R>>) -> bool {
        !self.ties.iter().any(|tied| tied.first != stage && tied.has(leaf))
    }

    fn part(&mut self, stage: usize) -> Result<&mut S> {
        let missing = || Error::internal("pipeline", format!("stage {stage} has no strategy"));
        self.parts.get_mut(&stage).ok_or_else(missing)
    }
}

impl<R: Runtime, S: StageStrategy<R>> StageHooks<R> for LocalStages<R, S> {
    fn gradients(&mut self, Compute { stage, pass, .. }: Compute, last: bool) -> Result<&mut dyn BackwardHook<R>> {
        let last = last && self.sync;
        let part = self.part(stage)?;
        // I makes no weight gradient: it is no backward pass to a strategy.
        if pass != Pass::I {
            part.begin(last)?;
        }
        self.current = stage;
        Ok(self)
    }

    fn unshard(&mut self, stage: usize) -> Result<()> {
        self.part(stage)?.unshard()
    }

    fn reshard(&mut self, stage: usize) -> Result<()> {
        self.part(stage)?.reshard()
    }
}

/// The hook of the stage whose backward pass goes on.
impl<R: Runtime, S: StageStrategy<R>> BackwardHook<R> for LocalStages<R, S> {
    fn on_leaf_needed(&mut self, leaf: &Arc<Leaf<R>>) -> Result<()> {
        self.part(self.current)?.on_leaf_needed(leaf)
    }

    fn grad_slot(&mut self, leaf: &Arc<Leaf<R>>) -> Result<Option<TensorMut<R>>> {
        self.part(self.current)?.grad_slot(leaf)
    }

    fn on_leaf_grad_ready(&mut self, leaf: &Arc<Leaf<R>>, grad: LeafGrad<R>) -> Result<()> {
        observe(self.observer.as_mut(), leaf, &grad)?;
        self.part(self.current)?.on_leaf_grad_ready(leaf, grad)
    }
}

impl<R: Runtime, S: StageStrategy<R>> ReducedGradients<R> for LocalStages<R, S> {
    fn norm(&self) -> Result<Tensor<R>> {
        let wide = wide(self.pipe.runtime());
        let mut sum = Tensor::zeros(self.pipe.runtime(), [1], wide)?;
        for (&stage, part) in &self.parts {
            sum = sum.add(&part.squared_norm(&|leaf| self.counts(stage, leaf))?.to_dtype(wide)?)?;
        }
        self.pipe.all_reduce(memory(&sum)?, ReduceOp::Sum)?.wait()?.freeze()?.sqrt()?.reshape([])
    }

    fn is_finite(&self) -> Result<bool> {
        let mut own = true;
        // All of them: they may ask other ranks.
        for part in self.parts.values() {
            own &= part.is_finite()?;
        }
        Ok(!all_gather_bool(&self.pipe, own)?.contains(&false))
    }

    fn check_update(&mut self) -> Result<()> {
        self.parts.values_mut().try_for_each(S::check_update)
    }

    fn update(&mut self, scale: &Tensor<R>) -> Result<()> {
        if self.parts.len() > 1 {
            // All of them, before the first is updated.
            self.check_update()?;
        }
        self.parts.values_mut().try_for_each(|part| part.update(scale))
    }

    fn hyper_parameters(&self) -> Result<Vec<HyperParams>> {
        let all: Vec<_> = self.parts.values().map(S::hyper_parameters).collect::<Result<_>>()?;
        Ok(all.concat())
    }

    fn check_hyper_parameters(&mut self, groups: &[HyperParams]) -> Result<()> {
        share_groups(self.parts.values_mut(), groups, S::check_hyper_parameters)
    }

    fn set_hyper_parameters(&mut self, groups: &[HyperParams]) -> Result<()> {
        share_groups(self.parts.values_mut(), groups, S::set_hyper_parameters)
    }

    fn learning_rate(&self) -> f64 {
        self.parts.values().find_map(S::rate).unwrap_or(0.0)
    }
}
