//! The log that a run keeps for replays, and the steps of a replay.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use adaptive::balance::SpeedShares;
use autograd::{InspectedCall, inspect_calls};
use data::{Batch, State};
use distributed::{
    checkpoint::{CheckpointPart, Checkpointed, Folder},
    comm::{Collectives, Communicator, abort_with, panic_message},
    train::{Step, StepInput, TrainingMetrics},
};
use numcore::{Error, Result, Runtime};
use parking_lot::Mutex;

use super::{saving::combined_state, shares::own_batches, start::is_same, step_log::StepLog, train_loop::TrainLoop};
use crate::{
    Progress,
    hash::hash_of,
    replay::{CallPlace, LegEnd, LogLine, ReplayedCall, ReplayedLeg, ReplayedRank, ReplayedValue, RunLog, StepLine},
};

impl<R, M, S, B, F> TrainLoop<'_, R, M, S, B, F>
where
    R: Runtime,
    S: Step<R>,
    F: FnMut(&M, &Batch<B>) -> Result<StepInput<R>>,
    B: Send + 'static,
{
    /// Logs that the run has gone back to a checkpoint.
    pub(super) fn log_back(&mut self) {
        self.take_position();
        self.log.write(&LogLine::Back, &mut self.state);
    }

    /// Logs that a step is about to be taken; in a replay, takes from the log what the step does not compute.
    pub(super) fn log_step(&mut self) -> Result<()> {
        let Progress { epoch, position, elapsed, step, .. } = self.state.progress;
        let (step, at) = (step + 1, State { epoch, position });
        let shares = self.engine.shares.as_ref().map(|shares| shares.ratios().to_vec());
        let StepLog::Replayed { leg, taken } = &mut self.log else {
            let counts = self.engine.step.properties().in_turn;
            let line = StepLine { step, at, elapsed, shares, counts, hash: None };
            self.log.write(&LogLine::Step(line), &mut self.state);
            return Ok(());
        };
        let Some(line) = leg.steps.get(*taken) else {
            return Err(Error::internal("StepReplay", "a leg has no step left"));
        };
        if (line.step, line.at) != (step, at) {
            return Err(leg.parted(step, format!("it is at {at}, and the run took step {} at {}", line.step, line.at)));
        }
        if line.counts.is_some() != self.engine.step.properties().in_turn.is_some() {
            let why =
                "ranks take numbers of batches by measured speed in one of both alone: the log has none, or this step";
            return Err(leg.parted(step, why));
        }
        *taken += 1;
        if line.shares != shares {
            let given = line.shares.clone();
            self.set_shares(given.map(SpeedShares::of).transpose()?)?;
        }
        Ok(())
    }

    /// Reads the following batches by other shares.
    pub(super) fn set_shares(&mut self, shares: Option<SpeedShares>) -> Result<()> {
        self.engine.shares = shares;
        self.loader = own_batches(self.loader.clone(), &self.engine.step, self.engine.shares.as_ref());
        self.batches = self.loader.endless(self.batches.state())?;
        Ok(())
    }

    /// Logs a hash of the state after a step, if that is due; in a replay, compares it with that of the run.
    pub(super) fn log_state(&mut self) -> Result<()> {
        let known = self.log.taken_line().and_then(|line| line.hash);
        let is_due = match &self.log {
            StepLog::Kept { hash_every, .. } => hash_every.as_ref().is_some_and(|every| self.state.is_due(every)),
            _ => known.is_some(),
        };
        if !is_due {
            return Ok(());
        }
        let hash = self.state_hash()?;
        self.log.write(&LogLine::State { hash }, &mut self.state);
        match (self.log.leg(), known) {
            (Some(leg), Some(known)) if known != hash => {
                let why = format!("the state after it has hash {hash:016x}, and had {known:016x}");
                Err(leg.parted(self.state.progress.step, why))
            }
            _ => Ok(()),
        }
    }

    /// A hash of the state of all ranks: parameters, optimizer, and the tensors of callbacks.
    fn state_hash(&mut self) -> Result<u64> {
        let mut hashes = Vec::new();
        for CheckpointPart { name, start, row, .. } in
            combined_state(&mut self.engine.step, &mut self.callbacks).parts()?
        {
            let value = [hash_of(name.as_bytes()), start as u64, hash_of(&row.to_bytes()?)];
            hashes.extend(value.into_iter().flat_map(u64::to_le_bytes));
        }
        let all = self.engine.step.ranks().everyone.exchange_equal(hash_of(&hashes).to_le_bytes())?;
        Ok(hash_of(all.as_flattened()))
    }

    /// Saves the state after the last step of a leg of a replay; the error ends the run on all ranks.
    pub(super) fn end_leg(&mut self) -> Result<()> {
        let StepLog::Replayed { leg, taken } = &self.log else { return Ok(()) };
        let leg = leg.clone();
        match &leg.then {
            LegEnd::Save(folder) if *taken == leg.steps.len() => {
                self.save_leg(folder)?;
                Err(leg.done(self.engine.step.ranks().everyone.rank(), None))
            }
            _ => Ok(()),
        }
    }

    /// Takes the step that a leg of a replay observes; the error ends the run on all ranks.
    pub(super) fn observe_leg(&mut self) -> Result<()> {
        let Some(leg) = self.log.leg().cloned() else { return Ok(()) };
        let LegEnd::Observe { keep } = &leg.then else { return Ok(()) };
        self.begin_step()?;
        let rank = self.observe(keep.clone())?;
        Err(leg.done(rank.rank, Some(rank)))
    }

    fn save_leg(&mut self, folder: &Folder) -> Result<()> {
        self.count_tokens()?;
        let notes = self.notes_now();
        let comm = self.engine.step.ranks().everyone.clone();
        let state = combined_state(&mut self.engine.step, &mut self.callbacks);
        folder.save(&comm, self.state.progress.step, &state, &notes)?;
        comm.barrier()
    }

    /// Takes a step, and observes its op calls and gradients.
    fn observe(&mut self, keep: Option<CallPlace>) -> Result<ReplayedRank> {
        let comm = self.engine.step.ranks().everyone.clone();
        let calls: Arc<Mutex<Vec<ReplayedCall>>> = Arc::default();
        let seen = calls.clone();
        let see = move |call: &InspectedCall<'_, R>| {
            let mut seen = seen.lock();
            let InspectedCall { op, gradient_of, at, .. } = *call;
            let (at, parameters) = (at.to_string(), call.leaves.iter().map(|leaf| leaf.name().to_string()).collect());
            let mut call_of = ReplayedCall { op, gradient_of, at, parameters, inputs: Vec::new(), outputs: Vec::new() };
            let keeps = keep.as_ref().is_some_and(|place| place.is_next(&seen, &call_of));
            let all = |tensors: &[numcore::Tensor<R>]| tensors.iter().map(|t| ReplayedValue::of(t, keeps)).collect();
            let (inputs, outputs): (Result<_>, Result<_>) = (all(&call.inputs), all(call.outputs));
            (call_of.inputs, call_of.outputs) = (inputs?, outputs?);
            seen.push(call_of);
            Ok(())
        };
        let taken = catch_unwind(AssertUnwindSafe(|| inspect_calls(see, || self.take())));
        let taken = taken.unwrap_or_else(|panic| Err(Error::other(format!("panic: {}", panic_message(&*panic)))));
        let of = |metrics: &TrainingMetrics<R>| Ok((metrics.loss()?, metrics.grad_norm()?));
        let (found, error) = match taken.and_then(|(metrics, _)| of(&metrics)) {
            Ok(found) => (Some(found), None),
            Err(error) => {
                // Other ranks may wait for this one.
                abort_with(&comm, &error);
                (None, Some(error.to_string()))
            }
        };
        let mut not_finite = Vec::new();
        if found.is_some() {
            for part in self.engine.step.parameter_parts()? {
                if part.row.on(comm.runtime())?.to_f64s()?.iter().any(|value| !value.is_finite()) {
                    not_finite.push(part.name);
                }
            }
        }
        // The end of this rank's run would end the calls of others.
        let _ = comm.barrier();
        let calls = std::mem::take(&mut *calls.lock());
        let (loss, grad_norm) = found.map_or((None, None), |(loss, norm)| (Some(loss), norm));
        Ok(ReplayedRank { rank: comm.rank(), calls, loss, grad_norm, not_finite, error })
    }
}

impl ReplayedLeg {
    /// An error if the trainer saves into the folder of a run whose steps other threads take again: it would change it.
    pub(super) fn check_elsewhere(folders: &[Folder]) -> Result<()> {
        let replayed = Self::folders();
        let is_replayed = |folder: &&Folder| replayed.iter().any(|of| is_same(of, folder));
        let Some(folder) = folders.iter().find(is_replayed) else { return Ok(()) };
        let why = format!(
            "steps of the run in {} are taken again, and its trainer runs on a thread that the program has started: run it on the thread \
             of its rank",
            folder.path().display()
        );
        Err(Error::usage("StepReplay", why))
    }

    /// An error if the trainer is that of another run.
    pub(super) fn check(&self, folders: &[Folder]) -> Result<()> {
        // A copy of a run's folder has another path, at which the program knows of none.
        let other = folders.iter().find(|folder| RunLog::is_in(folder.path()));
        if let Some(other) = other.filter(|_| !folders.iter().any(|folder| is_same(folder, &self.of))) {
            let (other, own) = (other.path().display(), self.of.path().display());
            let why = format!(
                "the trainer of the run in {other} comes before that of {own}: replay a program that begins with the latter"
            );
            return Err(Error::usage("StepReplay", why));
        }
        Ok(())
    }
}
