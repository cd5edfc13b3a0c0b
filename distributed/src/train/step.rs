//! One training step, on however many ranks.

use std::{collections::HashSet, panic::Location};

use autograd::backward_with_hooks;
use nn::{CountedRows, set_counted_rows};
use numcore::{
    Error, ErrorKind, Result, Runtime, Within,
    trace::{self, SpanKind},
};
use optim::LossScaler;

use super::{
    GradientObserver, Loss, Strategy, TrainingConfig, TrainingMetrics, Updates,
    observer::{CountedHook, ObservedHook},
};
use crate::comm::{Collectives, abort_on_err, all_gather_bool};

/// Trains a model: forward and backward of some micro-batches, clipping, the update. How it is spread over ranks is the strategy's;
/// the result is that of one rank with all examples of all ranks.
///
/// [`TrainStep::builder`] makes one: a [`SimpleTrainer`](super::SimpleTrainer) on one rank, a [`BucketedTrainer`](super::BucketedTrainer) on
/// many, a [`ZeroTrainer`](super::ZeroTrainer) where state, gradients or parameters are sharded.
///
/// ```
/// use distributed::{comm::NoOpCommunicator, train::{Loss, TrainStep}};
/// use nn::{Forward, Init, Linear};
/// use numcore::{DType, NullRuntime, Tensor};
/// use optim::AdamWConfig;
/// # fn main() -> numcore::Result<()> {
/// let comm = NoOpCommunicator::new(&NullRuntime::new());
/// # use distributed::comm::Communicator;
/// # let rt = comm.runtime();
/// let model = Linear::new(&Init::new(rt, 0), 4, 1)?;
/// let optimizer = AdamWConfig { lr: 3e-4, ..Default::default() };
/// let mut step = TrainStep::builder(&comm, &model).optimizer(optimizer).max_norm(1.0).build()?;
/// # let x = autograd::Var::new(Tensor::zeros(rt, [8, 4], DType::F32)?);
/// # let y = autograd::Var::new(Tensor::zeros(rt, [8, 1], DType::F32)?);
/// let metrics = step.step(|_| Ok(Loss::mean(nn::loss::mse(&model.forward(&x)?, &y, Default::default())?)))?;
/// assert_eq!(metrics.global_step(), 1);
/// # Ok(())
/// # }
/// ```
pub struct TrainStep<R: Runtime, S: Strategy<R>> {
    pub(crate) updates: Updates,
    pub(super) strategy: S,
    pub(super) observer: Option<GradientObserver<R>>,
    /// The losses of the micro-batches that [`backward_and_step`](TrainStep::backward_and_step) was given since the last update.
    pub(super) pushed: Vec<Loss<R>>,
    /// Whether the strategy is prepared for the next of them.
    pub(super) prepared: bool,
    /// Leaves, by identity, of experts that compute for other ranks.
    pub(super) shared: HashSet<usize>,
}

/// An error within a step says at which line of the caller's the step was, unless it knows a line of the caller's own closure: collectives
/// and updates within are the library's. An error of the caller's own comes out as it went in.
pub(crate) fn at_call(error: Error, line: &'static Location<'static>) -> Error {
    if matches!(error.kind(), ErrorKind::Other { .. }) { error } else { error.at(line) }
}

impl<R: Runtime, S: Strategy<R>> TrainStep<R, S> {
    /// A step with a strategy of one's own; [`TrainStep::builder`] makes those with the strategies there are.
    #[track_caller]
    pub fn new(strategy: S, config: TrainingConfig) -> Result<Self> {
        Self::observed(strategy, config, None)
    }

    /// Makes a step like [`new`](TrainStep::new), with an observer of gradients.
    #[track_caller]
    pub(super) fn observed(strategy: S, config: TrainingConfig, observer: Option<GradientObserver<R>>) -> Result<Self> {
        config.check()?;
        strategy.everyone().agree("the training configuration", format!("{config:?}").as_bytes())?;
        let updates = Updates::new(config);
        updates.check_hyper(&strategy)?;
        Ok(TrainStep { updates, strategy, observer, pushed: Vec::new(), prepared: false, shared: HashSet::new() })
    }

    /// One step: `micro_batch(k)` computes the loss of the `k`-th of this rank's [`accumulation`](TrainingConfig::accumulation)
    /// micro-batches.
    ///
    /// An error on one rank is an error on all, and ends the communicator. On one rank nothing has changed then: the next step is what it
    /// would have been.
    #[track_caller]
    pub fn step(&mut self, mut micro_batch: impl FnMut(usize) -> Result<Loss<R>>) -> Result<TrainingMetrics<R>> {
        let line = Location::caller();
        self.step_of(|k| micro_batch(k).map(Some)).map_err(|error| at_call(error, line))
    }

    /// One step of `micro_batches` micro-batches, as many on all ranks, in place of the [configured](TrainingConfig::accumulation) number: the
    /// last step of an epoch, which takes what is left.
    ///
    /// # Errors
    /// As [`step`](TrainStep::step); and if the number is 0, or more than configured.
    #[track_caller]
    pub fn step_with(
        &mut self,
        micro_batches: usize,
        mut micro_batch: impl FnMut(usize) -> Result<Loss<R>>,
    ) -> Result<TrainingMetrics<R>> {
        let (line, most) = (Location::caller(), self.updates.config.accumulation);
        if micro_batches == 0 || micro_batches > most {
            let why =
                format!("a step has 1 to {most} micro-batches by its configuration, it was asked for {micro_batches}");
            return abort_on_err(self.strategy.comm(), Err(Error::argument("TrainStep::step_with", why)));
        }
        let losses = self.accumulate(micro_batches, |k| micro_batch(k).map(Some));
        let done = losses.and_then(|losses| self.update(&losses));
        abort_on_err(self.strategy.comm(), done).map_err(|error| at_call(error, line))
    }

    /// One step of `own` micro-batches on this rank, where no rank has more than `most`, which all ranks say alike: a fast rank takes more than a slow
    /// one, and one that has nothing takes none. The step is that of one rank with the micro-batches of all.
    ///
    /// # Errors
    /// As [`step`](TrainStep::step); and if `most` is 0 or less than `own`, or the strategy [exchanges](Strategy::may_differ_in_passes) something
    /// in every pass.
    #[track_caller]
    pub fn step_uneven(
        &mut self,
        own: usize,
        most: usize,
        micro_batch: impl FnMut(usize) -> Result<Loss<R>>,
    ) -> Result<TrainingMetrics<R>> {
        self.step_observed(own, most, micro_batch, &mut || Ok(()))
    }

    /// A [`step_uneven`](TrainStep::step_uneven) that says when the last backward pass is over.
    #[track_caller]
    pub(crate) fn step_observed(
        &mut self,
        own: usize,
        most: usize,
        mut micro_batch: impl FnMut(usize) -> Result<Loss<R>>,
        computed: &mut dyn FnMut() -> Result<()>,
    ) -> Result<TrainingMetrics<R>> {
        let line = Location::caller();
        let refused = match (self.strategy.may_differ_in_passes(), own) {
            (false, _) => Some(
                "this strategy exchanges in every pass, so ranks take equally many: take ZeRO stage 1, stage 2 with `reduce_once`, or none, \
                 and no canonical order or experts over ranks"
                    .to_string(),
            ),
            (true, own) if most == 0 || own > most => {
                Some(format!("a rank has at most {most} micro-batches of at least one, this one was given {own}"))
            }
            _ => None,
        };
        if let Some(why) = refused {
            return abort_on_err(self.strategy.comm(), Err(Error::argument("TrainStep::step_uneven", why)));
        }
        // The exchange is in the last pass, which all ranks that have examples take with some.
        let idle = most - own;
        let passes = |k: usize| k.checked_sub(idle).map(&mut micro_batch).transpose();
        let losses = self.accumulate(most, passes).and_then(|losses| computed().map(|()| losses));
        let done = losses.and_then(|losses| traced("update", || self.update(&losses)));
        abort_on_err(self.strategy.comm(), done).map_err(|error| at_call(error, line))
    }

    /// Micro-batches in a step.
    pub fn accumulation(&self) -> usize {
        self.updates.config.accumulation
    }

    /// Takes part in a step of the others when this rank has no examples. Its model is not run: layers whose forward or backward exchanges something with other
    /// ranks need a [weightless](Loss::weightless) loss of any batch in its place.
    ///
    /// # Errors
    /// As [`step`](TrainStep::step); and where the strategy needs a backward pass on every rank ([`Strategy::may_idle`]): experts over ranks, and ZeRO stage 3 unless
    /// unused parameters are allowed.
    #[track_caller]
    pub fn idle(&mut self) -> Result<TrainingMetrics<R>> {
        if !self.strategy.may_idle() {
            let why = format!(
                "this strategy needs a sweep on every rank: compute any batch with a weight of 0 (`Loss::weightless`), as `run` does, or {}",
                self.strategy.instead_of_idling()
            );
            return abort_on_err(self.strategy.comm(), Err(Error::argument("TrainStep::idle", why)));
        }
        self.step_of(|_| Ok(None)).at_caller()
    }

    /// Whether any rank has examples left; this one has if `own`. Blocks.
    pub fn any_left(&self, own: bool) -> Result<bool> {
        Ok(all_gather_bool(self.strategy.comm(), own)?.contains(&true))
    }

    /// Steps through this rank's batches until every rank has run out of its own. A step takes
    /// [`accumulation`](TrainingConfig::accumulation) of them, one for each micro-batch; the last step of a rank takes what is left. The mean
    /// of a step is over the batches that all ranks took. In the micro-batches for which it has none a rank computes its last batch again, which then
    /// weighs nothing; a rank that never had a batch takes part as [`idle`](TrainStep::idle) does.
    ///
    /// `see` is given the metrics of every step.
    ///
    /// # Errors
    /// On every rank, before the first step, if a rank has no batch at all while others have some, and the model has experts that compute others' tokens.
    /// On every rank as well what `loss` or `see` returns on one.
    #[track_caller]
    pub fn run<B>(
        &mut self,
        batches: impl IntoIterator<Item = B>,
        loss: impl FnMut(&B) -> Result<Loss<R>>,
        see: impl FnMut(TrainingMetrics<R>) -> Result<()>,
    ) -> Result<()> {
        let line = Location::caller();
        let done = self.run_all(batches, loss, see);
        self.strategy.let_idle(false);
        done.map_err(|error| at_call(error, line))
    }

    fn run_all<B>(
        &mut self,
        batches: impl IntoIterator<Item = B>,
        mut loss: impl FnMut(&B) -> Result<Loss<R>>,
        mut see: impl FnMut(TrainingMetrics<R>) -> Result<()>,
    ) -> Result<()> {
        let (mut batches, mut last) = (batches.into_iter().peekable(), None);
        self.require_batches(batches.peek().is_some())?;
        let runs = self.updates.config.accumulation;
        loop {
            let mut own: Vec<B> = batches.by_ref().take(runs).collect();
            if !self.any_left(!own.is_empty())? {
                return Ok(());
            }
            let metrics = self.step_of(|k| match (own.get(k), own.last().or(last.as_ref())) {
                (Some(batch), _) => loss(batch).map(Some),
                (None, Some(batch)) => {
                    set_counted_rows(NO_ROW);
                    loss(batch)?.weightless().map(Some)
                }
                (None, None) => Ok(None),
            });
            set_counted_rows(None);
            let metrics = metrics?;
            last = own.pop().or(last);
            abort_on_err(self.strategy.comm(), see(metrics))?;
        }
    }

    /// An error on every rank if one can never sweep, and must.
    fn require_batches(&mut self, own: bool) -> Result<()> {
        let have = all_gather_bool(self.strategy.comm(), own)?;
        let without: Vec<usize> = (0..have.len()).filter(|&rank| !have[rank]).collect();
        if without.is_empty() || without.len() == have.len() || self.strategy.let_idle(true) {
            return Ok(());
        }
        let why = format!(
            "no batch at all on rank {}, and this strategy needs a sweep on every rank: give each rank at least one (a \
             loader's share is one, `Loader::rank`), or {}",
            without.iter().map(usize::to_string).collect::<Vec<_>>().join(", "),
            self.strategy.instead_of_idling()
        );
        Err(Error::argument("TrainStep::run", why).on_rank(self.strategy.comm().world_rank()))
    }

    /// Updates so far.
    #[doc(alias("timestep"))]
    pub fn global_step(&self) -> u64 {
        self.updates.steps
    }

    /// The strategy, with optimizer and gradients.
    pub fn strategy(&self) -> &S {
        &self.strategy
    }

    /// The strategy, for schedules and checkpoints.
    pub fn strategy_mut(&mut self) -> &mut S {
        &mut self.strategy
    }

    /// The loss scaler, if there is one.
    pub fn scaler(&mut self) -> Option<&mut LossScaler> {
        self.updates.scaler.as_mut()
    }

    /// A step of micro-batches, for some of which this rank may have nothing.
    fn step_of(&mut self, micro_batch: impl FnMut(usize) -> Result<Option<Loss<R>>>) -> Result<TrainingMetrics<R>> {
        let runs = self.updates.config.accumulation;
        let done = self.accumulate(runs, micro_batch).and_then(|losses| traced("update", || self.update(&losses)));
        abort_on_err(self.strategy.comm(), done)
    }

    /// Runs the micro-batches. Collective calls are equal whether this rank has one or not: other ranks may.
    fn accumulate(
        &mut self,
        runs: usize,
        mut micro_batch: impl FnMut(usize) -> Result<Option<Loss<R>>>,
    ) -> Result<Vec<Loss<R>>> {
        self.prepare_whole()?;
        let mut losses: Vec<Loss<R>> = Vec::with_capacity(runs);
        for k in 0..runs {
            let loss = traced("forward", || micro_batch(k))?;
            self.begin_pass(&losses, loss.as_ref(), k + 1 == runs)?;
            if let Some(loss) = loss {
                losses.push(self.sweep(loss)?);
            }
            self.strategy.end()?;
        }
        Ok(losses)
    }

    /// Before a backward pass, after its forward: the last pass of a step says what all of this rank's losses weigh.
    pub(super) fn begin_pass(&mut self, before: &[Loss<R>], loss: Option<&Loss<R>>, last: bool) -> Result<()> {
        self.strategy.begin(last)?;
        if last {
            let weight = before.iter().chain(loss).map(|loss| loss.weight).sum();
            self.strategy.set_loss_weight(weight, self.updates.loss_scale(), self.updates.may_skip())?;
        }
        Ok(())
    }

    /// The backward pass of a loss, which is left without its graph.
    pub(super) fn sweep(&mut self, loss: Loss<R>) -> Result<Loss<R>> {
        let scaled = self.updates.scaler.as_ref().map(|s| s.scale(&loss.sum)).transpose()?;
        let waits = !self.strategy.may_idle();
        let mut hook = ObservedHook { hook: &mut self.strategy, observer: self.observer.as_mut() };
        let mut hook = CountedHook { hook: &mut hook, counts: loss.counts, waits, shared: &self.shared };
        traced("backward", || backward_with_hooks(scaled.as_ref().unwrap_or(&loss.sum), &mut hook))?;
        loss.told()
    }

    pub(super) fn update(&mut self, losses: &[Loss<R>]) -> Result<TrainingMetrics<R>> {
        self.strategy.finish()?;
        let (comm, everyone) = (self.strategy.comm().clone(), self.strategy.everyone().clone());
        let mut metrics = self.updates.apply(&mut self.strategy, &comm, &everyone, losses)?;
        metrics.alike = comm.size() / self.strategy.share().1.max(1);
        self.strategy.sync_buffers(self.updates.config.buffers)?;
        Ok(metrics)
    }
}

/// Of a batch that is computed for other ranks alone no row counts.
pub(crate) const NO_ROW: Option<CountedRows> = Some(CountedRows { count: 0, rows: 1 });

/// A part of a step, as recordings show it.
fn traced<T>(phase: &'static str, f: impl FnOnce() -> T) -> T {
    let _span = trace::span(SpanKind::Phase, phase);
    f()
}
