//! One training step, on any number of ranks.

use std::{collections::HashSet, panic::Location, sync::Arc};

use autograd::{Leaf, LeafGrad, backward_with_hooks};
use numcore::{
    Error, ErrorKind, Result, Runtime, Within,
    trace::{self, SpanKind},
};
use optim::LossScaler;
use parking_lot::Mutex;

use super::{Loss, StepInput, StepWork, TrainingConfig, TrainingMetrics, Updates, pipeline::Stages};
use crate::{
    combinations::Feature,
    comm::{Collectives, abort_on_err},
    ddp::DataParallel,
    hooks::{CountedHook, GradientObserver},
    pipeline::{MicroBatches, Pipeline, PipelineOutput},
    strategy::{ActiveRanks, BackwardPass, FullParameters, StepRanks, Strategy},
};

/// Trains a model: forward and backward passes of some micro-batches, clipping, and the update.
///
/// The strategy spreads the step over ranks. The result is that of one rank with all examples of all ranks.
/// [`TrainStep::builder`] makes a step from a model or a [`PipelineModel`](crate::pipeline::PipelineModel); its type is
/// always this.
///
/// ```
/// use distributed::train::{Loss, TrainStep};
/// use nn::{Forward, Init, Linear};
/// use numcore::{DType, NullRuntime, Tensor};
/// use optim::AdamWConfig;
/// # fn main() -> numcore::Result<()> {
/// let rt = NullRuntime::new();
/// let model = Linear::new(&Init::new(&rt, 0), 4, 1)?;
/// let optimizer = AdamWConfig { lr: 3e-4, ..Default::default() };
/// let mut step = TrainStep::builder(&rt, &model).optimizer(optimizer).max_norm(1.0).build()?;
/// # let x = autograd::Var::new(Tensor::zeros(&rt, [8, 4], DType::F32)?);
/// # let y = autograd::Var::new(Tensor::zeros(&rt, [8, 1], DType::F32)?);
/// let metrics = step.step(|_| Ok(Loss::mean(nn::loss::mse(&model.forward(&x)?, &y, Default::default())?)))?;
/// assert_eq!(metrics.global_step(), 1);
/// # Ok(())
/// # }
/// ```
pub struct TrainStep<R: Runtime> {
    pub(super) updates: Updates,
    pub(super) strategy: Box<dyn Strategy<R>>,
    /// The stages that micro-batches go through; none for a model without stages, whose losses are the step's input.
    pub(super) stages: Option<Box<Stages<R>>>,
    pub(super) observer: Option<GradientObserver<R>>,
    /// The losses given to [`backward_and_step`](TrainStep::backward_and_step) since the last update.
    pub(super) pushed: Vec<Loss<R>>,
    /// True if the strategy is prepared for the next of these losses.
    pub(super) prepared: bool,
    /// Parameters of the model that are not trained yet.
    pub(super) frozen: Vec<Arc<Leaf<R>>>,
    /// Leaves, by identity, of experts that compute for other ranks.
    pub(super) shared: HashSet<usize>,
}

/// Adds the caller's line to an error, unless the error already has a line of the caller's closure. Collectives and
/// updates within a step are the library's. An error of the caller's own type is not changed.
pub(crate) fn at_call(error: Error, line: &'static Location<'static>) -> Error {
    if matches!(error.kind(), ErrorKind::Other { .. }) { error } else { error.at(line) }
}

impl<R: Runtime> TrainStep<R> {
    /// Makes a step from a custom strategy. [`TrainStep::builder`] makes steps from the strategies of this crate.
    #[track_caller]
    pub fn new(strategy: impl Strategy<R>, config: TrainingConfig) -> Result<Self> {
        Self::of(Box::new(strategy), config)
    }

    /// Makes a step like [`new`](TrainStep::new), from a boxed strategy.
    #[track_caller]
    pub(super) fn of(strategy: Box<dyn Strategy<R>>, config: TrainingConfig) -> Result<Self> {
        config.check()?;
        strategy.ranks().everyone.agree("the training configuration", format!("{config:?}").as_bytes())?;
        let updates = Updates::new(config);
        updates.check_hyper(&*strategy)?;
        let (pushed, frozen, shared) = (Vec::new(), Vec::new(), HashSet::new());
        Ok(TrainStep { updates, strategy, stages: None, observer: None, pushed, prepared: false, frozen, shared })
    }

    /// Runs one step. `micro_batch(k)` computes the loss of the `k`-th of this rank's
    /// [`accumulation`](TrainingConfig::accumulation) micro-batches. In a pipeline it returns the
    /// [`MicroBatches`](crate::pipeline::MicroBatches) of this replica's `k`-th run.
    ///
    /// # Errors
    /// An error on one rank is an error on all, and ends the communicator. In a world of one rank nothing has changed
    /// then: the next step is the same as without the error. A load that failed while it changed weights makes every
    /// later step an error, until a checkpoint is loaded.
    #[track_caller]
    pub fn step<I: Into<StepInput<R>>>(
        &mut self,
        mut micro_batch: impl FnMut(usize) -> Result<I>,
    ) -> Result<TrainingMetrics<R>> {
        let line = Location::caller();
        let count = self.updates.config.accumulation;
        self.take(StepWork::new(count, &mut |k| micro_batch(k).map(Into::into))).map_err(|error| at_call(error, line))
    }

    /// Runs one step of `micro_batches` micro-batches, the same number on all ranks, in place of the
    /// [configured](TrainingConfig::accumulation) number. The last step of an epoch takes the rest this way.
    ///
    /// # Errors
    /// Fails as [`step`](TrainStep::step), and if the number is 0, or more than configured.
    #[track_caller]
    pub fn step_with<I: Into<StepInput<R>>>(
        &mut self,
        micro_batches: usize,
        mut micro_batch: impl FnMut(usize) -> Result<I>,
    ) -> Result<TrainingMetrics<R>> {
        let line = Location::caller();
        self.step_of(StepWork::new(micro_batches, &mut |k| micro_batch(k).map(Into::into)))
            .map_err(|error| at_call(error, line))
    }

    /// Runs one step of `own` micro-batches on this rank. No rank has more than `most`, which must be equal on all
    /// ranks. A fast rank takes more than a slow one, and a rank that has nothing takes none. The step is that of one
    /// rank with the micro-batches of all.
    ///
    /// # Errors
    /// Fails as [`step`](TrainStep::step), and if `most` is 0 or less than `own`, or the strategy exchanges something
    /// in every pass.
    #[track_caller]
    pub fn step_uneven<I: Into<StepInput<R>>>(
        &mut self,
        own: usize,
        most: usize,
        mut micro_batch: impl FnMut(usize) -> Result<I>,
    ) -> Result<TrainingMetrics<R>> {
        let line = Location::caller();
        let mut input = |k| micro_batch(k).map(Into::into);
        self.step_of(StepWork::new(own, &mut input).of(most)).map_err(|error| at_call(error, line))
    }

    /// The number of micro-batches in a step.
    pub fn accumulation(&self) -> usize {
        self.updates.config.accumulation
    }

    /// Takes part in a step of the other ranks without an example of its own. This rank's model does not run. Layers
    /// that exchange with other ranks in forward or backward need a [weightless](Loss::weightless) loss of any batch
    /// instead.
    ///
    /// # Errors
    /// Fails as [`step`](TrainStep::step), and if the strategy needs a backward pass on every rank. Experts over ranks
    /// and pipelines need one. So does ZeRO stage 3, unless unused parameters are allowed.
    #[track_caller]
    pub fn idle(&mut self) -> Result<TrainingMetrics<R>> {
        let most = self.updates.config.accumulation;
        self.step_of(StepWork::idle(most, &mut nothing)).at_caller()
    }

    /// Sets the number of micro-batches of later steps, which must be equal on all ranks.
    ///
    /// # Errors
    /// Fails if the number is 0, and between the losses of one step that are given to
    /// [`backward_and_step`](TrainStep::backward_and_step).
    pub fn set_accumulation(&mut self, micro_batches: usize) -> Result<()> {
        if !self.pushed.is_empty() {
            let why = "a step has begun: give it the rest of its losses, or call `discard_pushed`";
            return Err(Error::usage("TrainStep::set_accumulation", why));
        }
        if micro_batches == 0 {
            let name = "number of micro-batches";
            return Err(Error::range("TrainStep::set_accumulation", name, micro_batches, "at least 1"));
        }
        self.updates.config.accumulation = micro_batches;
        Ok(())
    }

    /// Calls `look` with the leaf and the gradient of each parameter in later steps, as
    /// [`TrainStepBuilder::on_gradient`](super::TrainStepBuilder::on_gradient) says. It replaces the function before.
    /// A [`LeafGrad::Own`] is of this micro-batch alone. A [`LeafGrad::Slot`] includes the sums in its memory.
    pub fn on_gradient(&mut self, look: impl FnMut(&Arc<Leaf<R>>, &LeafGrad<R>) -> Result<()> + Send + 'static) {
        self.observer = Some(Mutex::new(Box::new(look)));
    }

    /// The number of updates so far.
    #[doc(alias("timestep"))]
    pub fn global_step(&self) -> u64 {
        self.updates.steps
    }

    /// The ranks that take the step together.
    pub fn ranks(&self) -> &StepRanks<R> {
        self.strategy.ranks()
    }

    /// The strategy, with optimizer and gradients.
    pub fn strategy(&self) -> &dyn Strategy<R> {
        &*self.strategy
    }

    /// The strategy as a mutable reference, for schedules and checkpoints.
    pub fn strategy_mut(&mut self) -> &mut dyn Strategy<R> {
        &mut *self.strategy
    }

    /// The number of buckets in which gradients are exchanged; none for sharded gradients, and for sets of strategies.
    pub fn num_buckets(&self) -> Option<usize> {
        self.strategy.downcast_ref().map(DataParallel::num_buckets)
    }

    /// The pipeline that the step runs; none for a model without stages.
    pub fn pipeline(&self) -> Option<&Pipeline<R>> {
        self.stages.as_ref().map(|stages| &stages.pipeline)
    }

    /// The output of the pipeline's last run on this rank: losses, and measurements for a
    /// [timeline](Pipeline::timeline).
    pub fn last_run(&self) -> Option<&PipelineOutput<R>> {
        self.stages.as_ref()?.last.as_ref()
    }

    /// Runs forwards alone through the stages of a pipeline: see [`Pipeline::evaluate`]. Each replica evaluates its own
    /// micro-batches. Replicas of sharded parameters must evaluate together.
    ///
    /// # Errors
    /// Fails as [`Pipeline::evaluate`], and if the model has no stages.
    pub fn evaluate_stages(&mut self, batch: MicroBatches<R>) -> Result<PipelineOutput<R>> {
        let no_stages = || Error::usage("TrainStep::evaluate_stages", "the model is whole: call it");
        self.stages.as_mut().ok_or_else(no_stages)?.evaluate(&mut *self.strategy, batch)
    }

    /// Gathers all parameters on every rank, for evaluation and export. They are released when the scope ends.
    pub fn gather_full_params(&self) -> Result<FullParameters> {
        self.strategy.gather_full_params()
    }

    /// The loss scaler, if there is one.
    pub fn scaler(&mut self) -> Option<&mut LossScaler> {
        self.updates.scaler.as_mut()
    }

    /// Runs a step of at most the configured number of micro-batches. The number may be larger if ranks have different
    /// ones.
    pub(super) fn step_of(&mut self, work: StepWork<'_, R>) -> Result<TrainingMetrics<R>> {
        let fits = self.fits(&work);
        self.all(fits)?;
        self.take(work)
    }

    fn fits(&self, &StepWork { own, most, uneven, .. }: &StepWork<'_, R>) -> Result<()> {
        let (features, configured) = (self.strategy.features(), self.updates.config.accumulation);
        if own == 0 && most > 0 {
            features.and(Feature::Idle).check("TrainStep::idle")?;
        }
        if uneven {
            features.and(Feature::Uneven).check("TrainStep::step_uneven")?;
            if most == 0 {
                let name = "largest number of micro-batches of a rank";
                return Err(Error::range("TrainStep::step_uneven", name, most, "at least 1"));
            }
            if own > most {
                let allowed = format!("at most {most}, the largest of any rank");
                return Err(Error::range("TrainStep::step_uneven", "number of micro-batches", own, allowed));
            }
        } else if own > configured || most == 0 {
            let allowed = format!("in 1..={configured}, by the configuration");
            return Err(Error::range("TrainStep::step_with", "number of micro-batches", own, allowed));
        }
        Ok(())
    }

    fn take(&mut self, work: StepWork<'_, R>) -> Result<TrainingMetrics<R>> {
        let done = self.pass_all(work, ActiveRanks::All);
        self.all(done)
    }

    /// Makes an error of this rank an error of all.
    pub(super) fn all<T>(&self, own: Result<T>) -> Result<T> {
        abort_on_err(&self.strategy.ranks().everyone, own)
    }

    /// Runs all passes of a step, and the update. Gradients are exchanged in the last pass, so a rank with fewer
    /// micro-batches takes them last.
    pub(super) fn pass_all(&mut self, work: StepWork<'_, R>, active: ActiveRanks) -> Result<TrainingMetrics<R>> {
        let StepWork { own, most, input, empty, computed, .. } = work;
        let idle = most - own;
        self.prepare_whole(active)?;
        let losses = match &mut self.stages {
            Some(stages) => stages.run(&mut *self.strategy, &self.updates, self.observer.as_mut(), own, input)?,
            None => self.accumulate(most, &mut |k| k.checked_sub(idle).map(&mut *input).transpose())?,
        };
        computed.map_or(Ok(()), |computed| computed())?;
        traced("update", || self.update(&losses, empty))
    }

    /// Runs the micro-batches. Collective calls do not depend on this rank having a micro-batch: other ranks may have
    /// one.
    fn accumulate(
        &mut self,
        runs: usize,
        input: &mut dyn FnMut(usize) -> Result<Option<StepInput<R>>>,
    ) -> Result<Vec<Loss<R>>> {
        let mut losses: Vec<Loss<R>> = Vec::with_capacity(runs);
        for k in 0..runs {
            let loss = traced("forward", || input(k)?.map(StepInput::loss).transpose())?;
            self.begin_pass(&losses, loss.as_ref(), k + 1 == runs)?;
            if let Some(loss) = loss {
                losses.push(self.sweep(loss)?);
            }
            self.strategy.end()?;
        }
        Ok(losses)
    }

    /// Begins a backward pass, after its forward. The last pass of a step has the total weight of this rank's losses.
    pub(super) fn begin_pass(&mut self, before: &[Loss<R>], loss: Option<&Loss<R>>, last: bool) -> Result<()> {
        let weight = || before.iter().chain(loss).map(|loss| loss.weight).sum();
        let pass =
            if last { BackwardPass::Last(Some(self.updates.loss_weight(weight()))) } else { BackwardPass::Earlier };
        self.strategy.begin(0, pass)
    }

    /// Runs the backward pass of a loss. Returns the loss without its graph.
    pub(super) fn sweep(&mut self, loss: Loss<R>) -> Result<Loss<R>> {
        let scaled = self.updates.scaler.as_ref().map(|s| s.scale(&loss.sum)).transpose()?;
        let mut hook = self.hook(loss.counts);
        traced("backward", || backward_with_hooks(scaled.as_ref().unwrap_or(&loss.sum), &mut hook))?;
        loss.detached()
    }

    /// The hook of a backward pass; `counts` is true if its gradients count.
    pub(super) fn hook(&mut self, counts: bool) -> CountedHook<'_, R> {
        let TrainStep { strategy, observer, shared, .. } = self;
        let waits = !strategy.features().allow(Feature::Idle);
        CountedHook { hook: &mut **strategy, observer: observer.as_mut(), counts, waits, shared }
    }

    pub(super) fn update(&mut self, losses: &[Loss<R>], empty: super::EmptyStep) -> Result<TrainingMetrics<R>> {
        self.strategy.finish()?;
        let metrics = self.updates.apply(&mut *self.strategy, losses, empty)?;
        self.strategy.sync_buffers(self.updates.config.buffers)?;
        Ok(metrics)
    }
}

/// The input of a rank that has none: an error.
pub(super) fn nothing<R: Runtime>(_: usize) -> Result<StepInput<R>> {
    Err(Error::internal("a training step", "a micro-batch was requested from a rank without one"))
}

/// Runs a part of a step as a span of recordings.
fn traced<T>(phase: &'static str, f: impl FnOnce() -> T) -> T {
    let _span = trace::span(SpanKind::Phase, phase);
    f()
}
