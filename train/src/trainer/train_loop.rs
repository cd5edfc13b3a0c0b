//! The training loop itself.

use std::{
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    time::{Duration, Instant, SystemTime},
};

use adaptive::balance::SpeedShares;
use data::{Batch, Batches, Loader};
use distributed::{
    RankDevices,
    checkpoint::FolderLock,
    comm::{Communicator, abort_on_err, panic_message},
    train::{Step, StepInput, TrainingMetrics},
};
use nn::Buffer;
use numcore::{Error, Result, Runtime};

use super::{
    RunReport,
    before_step::BeforeStep,
    elastic::Commits,
    engine::{StepWithLoss, take_step},
    follow_up::FollowUp,
    shares::summary,
    step_log::StepLog,
};
use crate::{
    Event, Interval, Record, Run, Sink, StopReason,
    control::{Agreed, Control, Selection},
    interrupt::{self, SignalListener},
    resume::Callbacks,
    run::RunState,
    scalars,
    sink::Value,
};

/// The number of consecutive steps with non-finite gradients after which the run ends with an error: a loss scale has
/// settled long before.
const MAX_SKIPPED: u32 = 100;
/// The largest number of steps whose loss weights have not been read from the device yet.
const PENDING: usize = 32;

/// A run in progress.
pub(super) struct TrainLoop<'a, R: Runtime, M, S, B, F> {
    pub(super) model: &'a M,
    pub(super) engine: StepWithLoss<S, F>,
    pub(super) loader: Loader<B>,
    pub(super) batches: Batches<B>,
    pub(super) callbacks: Callbacks<'a, R, M, B>,
    /// Locks of the folders that callbacks save in, held until the run is over.
    pub(super) _locks: Vec<Option<FolderLock>>,
    pub(super) sinks: Vec<Box<dyn Sink + 'a>>,
    pub(super) state: RunState,
    pub(super) record_every: Interval,
    pub(super) clock: Clock,
    /// Steps whose weights are not counted yet.
    pub(super) pending: Vec<TrainingMetrics<R>>,
    pub(super) counts_tokens: bool,
    /// The last step; `last_loss` takes its loss when the run is over.
    pub(super) last: Option<TrainingMetrics<R>>,
    pub(super) last_loss: Option<f64>,
    pub(super) skipped: u32,
    /// The reason in the last `Event::Ending` that callbacks received.
    pub(super) is_ending: Option<StopReason>,
    /// The state before the step that is being taken; none between steps.
    pub(super) before_step: Option<BeforeStep<R>>,
    /// Buffers of the model, and of the modules in the training step.
    pub(super) buffers: Vec<Buffer<R>>,
    pub(super) elastic: Option<Commits<'a, R>>,
    pub(super) log: StepLog,
    /// The devices of several ranks, until the first record has them.
    pub(super) devices: Option<RankDevices>,
}

/// The duration of the run, including the part before it was resumed.
pub(super) struct Clock {
    begun: Instant,
    before: Duration,
}

impl Clock {
    pub(super) fn resumed(before: Duration) -> Self {
        Clock { begun: Instant::now(), before }
    }

    fn elapsed(&self) -> Duration {
        self.before + self.begun.elapsed()
    }
}

impl<R, M, S, B, F> TrainLoop<'_, R, M, S, B, F>
where
    R: Runtime,
    S: Step<R>,
    F: FnMut(&M, &Batch<B>) -> Result<StepInput<R>>,
    B: Send + 'static,
{
    /// Trains to the end.
    pub(super) fn run(mut self) -> Result<RunReport<S>> {
        let comm = self.engine.step.ranks().everyone.clone();
        let reason = match catch_unwind(AssertUnwindSafe(|| self.run_steps())) {
            Ok(Ok(reason)) => reason,
            // All ranks return this error, and form a new world with other members.
            Ok(Err(error)) if self.is_changing() => {
                self.flush_sinks()?;
                return Err(error);
            }
            Ok(Err(error)) => {
                self.wait_for_saves();
                let failed = abort_on_err(&comm, Err(error));
                self.rescue();
                return failed;
            }
            Err(panic) => {
                self.wait_for_saves();
                comm.abort(&panic_message(&*panic));
                self.rescue();
                resume_unwind(panic);
            }
        };
        let RunState { progress, resumed, evaluated, best, .. } = self.state;
        Ok(RunReport { step: self.engine.step, reason, progress, resumed, loss: self.last_loss, evaluated, best })
    }

    fn run_steps(&mut self) -> Result<StopReason> {
        scalars::clear();
        if let Some(reason) = self.before_first()? {
            return self.end(reason);
        }
        let reason = loop {
            if self.state.length.is_reached(&self.state.progress) {
                break StopReason::Finished;
            }
            if let Some(reason) = self.one_step()? {
                break reason;
            }
        };
        self.end(reason)
    }

    /// Carries out the requests that callbacks make before the first step; returns the reason if one stops the run.
    fn before_first(&mut self) -> Result<Option<StopReason>> {
        self.commit()?;
        self.fire(&Event::Begin)?;
        self.log.begin(&mut self.state);
        self.state.check_evaluations()?;
        if let Some(commits) = self.elastic.as_mut().filter(|_| interrupt::is_listening()) {
            // A signal during a change of ranks ends the run in order, in the next world.
            commits.world.keep(SignalListener::start()?);
        }
        if std::mem::take(&mut self.state.owes_evaluation) {
            self.state.control.evaluate();
        }
        // After a save of due callbacks only, the callbacks that still owe one have requested it again by themselves.
        if self.state.owes_save.take() == Some(Selection::All) {
            self.state.control.save();
        }
        let mut follow = FollowUp::new(self.agree()?, self.state.progress.epoch, None);
        self.follow_up(&mut follow)?;
        self.write_measured()?;
        self.save_if_agreed(&follow.agreed)?;
        Ok(self.reason_to_end(&follow))
    }

    fn end(&mut self, reason: StopReason) -> Result<StopReason> {
        self.finish_saves()?;
        self.count_tokens()?;
        let RunState { progress, resumed, fast_dev_run, .. } = &self.state;
        // A dry run may be shorter than any interval.
        if reason == StopReason::Finished && progress.step > resumed.unwrap_or(0) && !fast_dev_run {
            self.state.check_evaluated()?;
        }
        self.last_loss = self.last.take().map(|metrics| metrics.loss()).transpose()?;
        self.fire(&Event::End(&reason))?;
        self.write_measured()?;
        self.flush_sinks()?;
        Ok(reason)
    }

    /// Sends an event to all callbacks, in order.
    pub(super) fn fire(&mut self, event: &Event<'_, R>) -> Result<()> {
        let mut run = Run { model: self.model, engine: &mut self.engine, state: &mut self.state };
        self.callbacks.iter_mut().try_for_each(|callback| callback.on(event, &mut run))?;
        let nothing_follows = matches!(event, Event::Save { .. } | Event::WentBack | Event::End(_));
        if nothing_follows && self.state.control != Control::default() {
            let why = "nothing can be requested of a run while it saves, goes back or is over: request it in `StepEnd`, `Evaluated` or `Ending`";
            return Err(Error::usage("Run::control", why));
        }
        Ok(())
    }

    /// Takes a step and does its follow-ups; returns the reason if it was the last.
    fn one_step(&mut self) -> Result<Option<StopReason>> {
        self.observe_leg()?;
        self.begin_step()?;
        let epoch = self.state.progress.epoch;
        self.before_step = Some(BeforeStep::note(&self.buffers));
        let (metrics, waited) = self.take()?;
        // A step that was left out for its non-finite gradients may have made non-finite statistics too.
        if let Some(before) = self.before_step.take().filter(|_| !metrics.stepped()) {
            before.restore_buffers(&self.buffers)?;
        }
        self.advance(&metrics, waited)?;
        self.fire(&Event::StepEnd(&metrics))?;
        let mut follow = FollowUp::new(self.agree()?, epoch, Some(&metrics));
        self.follow_up(&mut follow)?;
        self.log_state()?;
        self.record(&metrics, &follow.agreed)?;
        self.commit_if_due(&follow)?;
        self.save_if_agreed(&follow.agreed)?;
        self.end_leg()?;
        Ok(self.reason_to_end(&follow))
    }

    /// Takes a step over the next batches. If it has changed the shares of ranks, the following batches are read anew.
    pub(super) fn take(&mut self) -> Result<(TrainingMetrics<R>, f64)> {
        let StepWithLoss { step, loss, weighting, shares } = &mut self.engine;
        let (model, before) = (self.model, shares.clone());
        // A replay has shares and counts from the log, and measures none.
        let measured = shares.as_mut().filter(|_| self.log.leg().is_none());
        let counts = self.log.taken_line().and_then(|line| line.counts.clone());
        let loss = &mut |batch: &_| loss(model, batch);
        let taken = take_step(step, &mut self.batches, *weighting, measured, counts, loss)?;
        let ratios = |shares: &Option<SpeedShares>| shares.as_ref().map(|shares| shares.ratios().to_vec());
        if ratios(shares) != ratios(&before) {
            let shares = shares.clone();
            self.set_shares(shares)?;
        }
        Ok(taken)
    }

    pub(super) fn begin_step(&mut self) -> Result<()> {
        self.log_step()?;
        // A callback has made the run longer after its end was announced: the end will be announced again.
        self.is_ending = None;
        let state = &mut self.state;
        state.before = crate::Progress { elapsed: state.checked, ..state.progress };
        state.checked = state.progress.elapsed;
        if state.progress.position == 0 {
            self.fire(&Event::EpochBegin)?;
        }
        self.fire(&Event::StepBegin)
    }

    /// Updates the progress after a step.
    fn advance(&mut self, metrics: &TrainingMetrics<R>, waited: f64) -> Result<()> {
        self.take_position();
        self.state.progress.step = self.engine.step.global_step();
        self.state.data_wait = waited;
        self.pending.push(metrics.clone());
        self.last = Some(metrics.clone());
        self.skipped = if metrics.stepped() { 0 } else { self.skipped + 1 };
        if self.skipped == MAX_SKIPPED {
            let why = format!(
                "the gradients of the last {MAX_SKIPPED} steps were not finite, so none of them was taken: look at the loss, lower \
                 the learning rate, or go back to an earlier checkpoint"
            );
            return Err(Error::anomaly("Trainer::run", why));
        }
        // A record reads the device anyway; a callback that measures tokens per second reads them then.
        if self.counts_tokens || self.pending.len() == PENDING || self.is_record_due() {
            self.count_tokens()?;
        }
        self.state.is_record_due = self.is_record_due();
        Ok(())
    }

    fn is_record_due(&self) -> bool {
        self.state.is_due(&self.record_every) || self.state.length.is_reached(&self.state.progress)
    }

    /// Sets epoch and position to the next batch's.
    pub(super) fn take_position(&mut self) {
        let at = self.batches.state();
        (self.state.progress.epoch, self.state.progress.position) = (at.epoch, at.position);
    }

    pub(super) fn count_tokens(&mut self) -> Result<()> {
        for metrics in self.pending.drain(..) {
            self.state.progress.tokens += metrics.weight()?;
        }
        Ok(())
    }

    /// Synchronizes the ranks' requests and the time.
    pub(super) fn agree(&mut self) -> Result<Agreed> {
        let comm = self.engine.step.ranks().everyone.clone();
        let elapsed = self.log.elapsed().unwrap_or_else(|| self.clock.elapsed());
        let agreed = self.state.control.agree(&comm, scalars::any_recorded(), elapsed)?;
        self.state.progress.elapsed = agreed.elapsed;
        Ok(agreed)
    }

    /// Sends the step's measurements to sinks where a record is due: once in a step.
    pub(super) fn record(&mut self, metrics: &TrainingMetrics<R>, agreed: &Agreed) -> Result<()> {
        if std::mem::take(&mut self.state.is_record_due) {
            let comm = self.engine.step.ranks().everyone.clone();
            if !self.engine.step.ranks().counts_examples {
                scalars::clear();
            }
            let means = if agreed.recorded { scalars::take_means(&comm)? } else { Vec::new() };
            if !self.sinks.is_empty() {
                let callbacks = std::mem::take(&mut self.state.measured);
                self.state.measure("loss", Value::Scalar(metrics.loss()?));
                self.state.measure("learning_rate", Value::Scalar(metrics.learning_rate()));
                if let Some(norm) = metrics.grad_norm()? {
                    self.state.measure("grad_norm", Value::Scalar(norm));
                }
                means.into_iter().for_each(|(name, mean)| self.state.measure(&name, Value::Scalar(mean)));
                if let Some(devices) = self.devices.take() {
                    self.state.measure("devices", Value::Text(summary(&devices, self.engine.shares.as_ref())));
                }
                callbacks.into_iter().for_each(|(name, value)| self.state.measure(&name, value));
            }
        }
        self.write_measured()
    }

    /// Sends the measurements to sinks; a rank without sinks drops them.
    pub(super) fn write_measured(&mut self) -> Result<()> {
        if self.sinks.is_empty() || self.state.measured.is_empty() {
            self.state.measured.clear();
            return Ok(());
        }
        let values = std::mem::take(&mut self.state.measured);
        let RunState { progress, before, length, .. } = &self.state;
        let fraction = Some(length.fraction(progress).min(1.0));
        let record = Record { step: progress.step, epoch: before.epoch, fraction, time: SystemTime::now(), values };
        self.sinks.iter_mut().try_for_each(|sink| sink.write(&record))
    }

    pub(super) fn flush_sinks(&mut self) -> Result<()> {
        self.sinks.iter_mut().try_for_each(|sink| sink.flush())
    }
}
