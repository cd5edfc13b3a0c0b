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

use super::{
    saving::{combined_state, saved_in},
    shares::own_batches,
    start::is_same,
    train_loop::TrainLoop,
};
use crate::{
    hash::hash_of,
    replay::{LegEnd, LogLine, ReplayedCall, ReplayedLeg, ReplayedRank, ReplayedValue, RunLog, StepLine, WorldLine},
    sink::Value,
};

impl<R, M, S, B, F> TrainLoop<'_, R, M, S, B, F>
where
    R: Runtime,
    S: Step<R>,
    F: FnMut(&M, &Batch<B>) -> Result<StepInput<R>>,
    B: Send + 'static,
{
    /// Opens the log beside the checkpoints of the first callback that saves, on the rank that writes.
    pub(super) fn begin_log(&mut self) {
        let folder = saved_in(&self.callbacks).into_iter().next();
        let Some(folder) = folder.filter(|_| self.state.saves && self.is_rank_zero) else { return };
        let other = self.resumed_from.as_ref().filter(|from| !is_same(from, &folder)).map(Folder::path);
        let from = other.map(|path| std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf()));
        let world = WorldLine { from, ..self.world_line() };
        match RunLog::begin(folder.path(), self.state.from_scratch, world) {
            Ok(log) => self.log = Some(log),
            Err(error) => self.end_log(&error),
        }
    }

    /// Writes a line to the log.
    fn write_log(&mut self, line: &LogLine) {
        if let Some(Err(error)) = self.log.as_mut().map(|log| log.write(line)) {
            self.end_log(&error);
        }
    }

    /// Goes on without a log, which no run is worth to end for.
    fn end_log(&mut self, error: &Error) {
        self.log = None;
        self.state.measure("replay/failure", Value::Text(error.to_string()));
    }

    fn world_line(&self) -> WorldLine {
        let (ranks, step) = (self.engine.step.ranks().everyone.size(), self.state.progress.step);
        WorldLine { ranks, step, at: self.place(), from: None, back: false }
    }

    /// Logs that the run has gone back to a checkpoint.
    pub(super) fn log_back(&mut self) {
        self.take_position();
        let world = WorldLine { back: true, ..self.world_line() };
        self.write_log(&LogLine::World(world));
    }

    fn place(&self) -> State {
        State { epoch: self.state.progress.epoch, position: self.state.progress.position }
    }

    /// Logs that a step is about to be taken; in a replay, takes from the log what the step does not compute.
    pub(super) fn log_step(&mut self) -> Result<()> {
        let (step, at) = (self.state.progress.step + 1, self.place());
        if let Some(leg) = &self.replay {
            let Some(line) = leg.steps.get(self.replayed) else {
                return Err(Error::internal("StepReplay", "a leg has no step left"));
            };
            if (line.step, line.at) != (step, at) {
                return Err(
                    leg.parted(step, format!("it is at {at}, and the run took step {} at {}", line.step, line.at))
                );
            }
            self.replayed += 1;
            let now = self.engine.shares.as_ref().map(SpeedShares::ratios);
            if line.shares.as_deref() != now {
                let given = line.shares.clone();
                self.set_shares(given.map(SpeedShares::of).transpose()?)?;
            }
            return Ok(());
        }
        if self.log.is_none() {
            return Ok(());
        }
        let shares = self.engine.shares.as_ref().map(|shares| shares.ratios().to_vec());
        self.write_log(&LogLine::Step(StepLine { step, at, elapsed: self.state.progress.elapsed, shares, hash: None }));
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
        let step = self.state.progress.step;
        let line = self.replay.as_ref().and_then(|leg| leg.steps.get(self.replayed.checked_sub(1)?));
        let known = line.and_then(|line| line.hash);
        let is_due = self.hash_state.as_ref().is_some_and(|every| self.state.is_due(every));
        if known.is_none() && (self.replay.is_some() || !is_due || !self.state.saves) {
            return Ok(());
        }
        let hash = self.state_hash()?;
        match (&self.replay, known) {
            (Some(leg), Some(known)) if known != hash => {
                Err(leg.parted(step, format!("the state after it has hash {hash:016x}, and had {known:016x}")))
            }
            (Some(_), _) => Ok(()),
            (None, _) => {
                self.write_log(&LogLine::State { hash });
                Ok(())
            }
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

    /// Ends the leg of a replay before the next step, if it has no more; the error ends the run on all ranks.
    pub(super) fn end_leg(&mut self) -> Result<()> {
        let Some(leg) = self.replay.clone() else { return Ok(()) };
        match &leg.then {
            LegEnd::Save(folder) if self.replayed == leg.steps.len() => {
                self.save_leg(folder)?;
                Err(leg.done(self.engine.step.ranks().everyone.rank(), None))
            }
            LegEnd::Observe { values_of } => {
                self.begin_step()?;
                let rank = self.observe(*values_of)?;
                Err(leg.done(rank.rank, Some(rank)))
            }
            LegEnd::Save(_) => Ok(()),
        }
    }

    fn save_leg(&mut self, folder: &Folder) -> Result<()> {
        self.count_tokens()?;
        let notes = self.notes_at(self.batches.state());
        let comm = self.engine.step.ranks().everyone.clone();
        let state = combined_state(&mut self.engine.step, &mut self.callbacks);
        folder.save(&comm, self.state.progress.step, &state, &notes)?;
        comm.barrier()
    }

    /// Takes a step, and observes its op calls and gradients.
    fn observe(&mut self, values_of: Option<usize>) -> Result<ReplayedRank> {
        let comm = self.engine.step.ranks().everyone.clone();
        let calls: Arc<Mutex<Vec<ReplayedCall>>> = Arc::default();
        let seen = calls.clone();
        let see = move |call: &InspectedCall<'_, R>| {
            let mut seen = seen.lock();
            let keep = values_of == Some(seen.len());
            let all = |tensors: &[numcore::Tensor<R>]| tensors.iter().map(|t| ReplayedValue::of(t, keep)).collect();
            let InspectedCall { op, gradient_of, at, .. } = *call;
            let parameters = call.leaves.iter().map(|leaf| leaf.name().to_string()).collect();
            let (inputs, outputs): (Result<_>, Result<_>) = (all(&call.inputs), all(call.outputs));
            let (at, inputs, outputs) = (at.to_string(), inputs?, outputs?);
            seen.push(ReplayedCall { op, gradient_of, at, parameters, inputs, outputs });
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
    /// An error if the trainer is that of another run, or its ranks take numbers of micro-batches by measured speed,
    /// which are in no log.
    pub(super) fn check<R: Runtime>(&self, step: &impl Step<R>, folders: &[Folder]) -> Result<()> {
        // A copy of a run's folder has another path, at which the program knows of none.
        let other = folders.iter().find(|folder| RunLog::is_in(folder.path()));
        if let Some(other) = other.filter(|_| !folders.iter().any(|folder| is_same(folder, &self.of))) {
            let (other, own) = (other.path().display(), self.of.path().display());
            let why = format!(
                "the trainer of the run in {other} comes before that of {own}: replay a program that begins with the latter"
            );
            return Err(Error::usage("StepReplay", why));
        }
        if step.properties().in_turn.is_none() {
            return Ok(());
        }
        let why = "ranks of this run take numbers of micro-batches by measured speed (`Balanced`), which are in no log";
        Err(Error::unsupported("StepReplay", why))
    }
}
