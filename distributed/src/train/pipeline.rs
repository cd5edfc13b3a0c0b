//! The passes of a step whose model is cut into stages.

use std::{collections::HashMap, sync::Arc};

use autograd::{BackwardHook, Leaf, LeafGrad};
use nn::Module;
use numcore::{Result, Runtime, TensorMut};

use super::{Loss, StepInput, Updates};
use crate::{
    combinations::Feature,
    hooks::{GradientObserver, observe},
    pipeline::{Compute, MicroBatches, Pass, Pipeline, PipelineOutput, StageHooks},
    strategy::{BackwardPass, Strategy},
};

/// The stages of this rank, in the pipeline that runs them.
pub(super) struct Stages<R: Runtime> {
    pub(super) pipeline: Pipeline<R>,
    /// The copies of tied parameters, as in [`StepProperties`](super::StepProperties).
    pub(super) copies: Arc<HashMap<usize, String>>,
    pub(super) last: Option<PipelineOutput<R>>,
}

impl<R: Runtime> Stages<R> {
    /// Runs the pipeline `runs` times. Returns the losses on the rank of the last stage.
    ///
    /// Gradients that are narrowed, or summed by a custom reducer, are sent after the last run. Before, only the last
    /// stage knows the weight of losses.
    pub(super) fn run(
        &mut self,
        strategy: &mut dyn Strategy<R>,
        updates: &Updates,
        mut observer: Option<&mut GradientObserver<R>>,
        runs: usize,
        input: &mut dyn FnMut(usize) -> Result<StepInput<R>>,
    ) -> Result<Vec<Loss<R>>> {
        self.pipeline.set_loss_scale(updates.loss_scale());
        let features = strategy.features();
        let waits = features.has(Feature::Narrowed) || features.has(Feature::Reducer);
        let mut losses: Vec<Loss<R>> = Vec::new();
        for k in 0..runs {
            let batch = input(k)?.run()?;
            let is_last = k + 1 == runs && !waits;
            let mut hooks = StrategyHooks { strategy, observer: observer.as_deref_mut(), is_last };
            let output = self.pipeline.run(batch, &mut hooks)?;
            for loss in output.losses() {
                losses.push(loss.detached()?);
            }
            self.last = Some(output);
        }
        if waits {
            let weight = self.pipeline.of_last_stage(losses.iter().map(|loss| loss.weight).sum())?;
            let losses = updates.loss_weight(weight);
            let stages = self.pipeline.stages().keys();
            stages.copied().try_for_each(|stage| strategy.begin(stage, BackwardPass::Last(Some(losses))))?;
        }
        Ok(losses)
    }

    /// Runs forwards alone. Sharded stages are gathered for them.
    pub(super) fn evaluate(
        &mut self,
        strategy: &mut dyn Strategy<R>,
        batch: MicroBatches<R>,
    ) -> Result<PipelineOutput<R>> {
        let mut hooks = StrategyHooks { strategy, observer: None, is_last: false };
        self.pipeline.evaluate_with(batch, &mut hooks)
    }

    pub(super) fn modules(&self) -> Vec<&dyn Module<R>> {
        self.pipeline.stages().values().map(|stage| &**stage as &dyn Module<R>).collect()
    }
}

/// The strategy of a rank's stages, as the hooks of a run. It sums over the replicas of a stage during the stage's last
/// backward pass or, where gradients are sharded, during each. REDUCE_GRAD finds the sums in flight.
struct StrategyHooks<'a, R: Runtime> {
    strategy: &'a mut dyn Strategy<R>,
    observer: Option<&'a mut GradientObserver<R>>,
    /// True if the run is the step's last.
    is_last: bool,
}

impl<R: Runtime> StageHooks<R> for StrategyHooks<'_, R> {
    fn gradients(&mut self, compute: Compute, last: bool) -> Result<&mut dyn BackwardHook<R>> {
        begin(self.strategy, compute, last && self.is_last)?;
        Ok(self)
    }

    fn unshard(&mut self, stage: usize) -> Result<()> {
        self.strategy.unshard(stage)
    }

    fn reshard(&mut self, stage: usize) -> Result<()> {
        self.strategy.reshard(stage)
    }
}

impl<R: Runtime> BackwardHook<R> for StrategyHooks<'_, R> {
    fn on_leaf_needed(&mut self, leaf: &Arc<Leaf<R>>) -> Result<()> {
        self.strategy.on_leaf_needed(leaf)
    }

    fn grad_slot(&mut self, leaf: &Arc<Leaf<R>>) -> Result<Option<TensorMut<R>>> {
        self.strategy.grad_slot(leaf)
    }

    fn on_leaf_grad_ready(&mut self, leaf: &Arc<Leaf<R>>, grad: LeafGrad<R>) -> Result<()> {
        observe(self.observer.as_deref_mut(), leaf, &grad)?;
        self.strategy.on_leaf_grad_ready(leaf, grad)
    }
}

/// Begins a backward pass through a stage.
pub(super) fn begin<R: Runtime>(strategy: &mut dyn Strategy<R>, compute: Compute, last: bool) -> Result<()> {
    // I makes no weight gradient: it is no backward pass to a strategy.
    let pass = if last { BackwardPass::Last(None) } else { BackwardPass::Earlier };
    if compute.pass == Pass::I { Ok(()) } else { strategy.begin(compute.stage, pass) }
}
