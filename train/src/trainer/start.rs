//! The start of a run: its options are checked, ranks agree on them, and a checkpoint is loaded.

use std::{
    collections::BTreeSet,
    io,
    path::{Component, Path, PathBuf},
    sync::Arc,
};

use adaptive::balance::SpeedShares;
use data::{Batch, Loader, State};
use distributed::{
    RankDevices,
    checkpoint::{Folder, FolderLock},
    combinations::Feature,
    comm::{Collectives, Comm, Communicator, abort_on_err, all_ok},
    train::{Step, StepInput},
};
use nn::Buffer;
use numcore::{Error, ErrorKind, Result, Runtime};

use super::{
    Shares, Trainer, Weighting,
    engine::StepWithLoss,
    saving::{load, load_step, saved_in},
    shares::own_batches,
    step_log::{KeptLog, StepLog},
    train_loop::{Clock, TrainLoop},
};
use crate::{
    Interval, Length, Progress, Resume,
    replay::{ReplayedLeg, WorldLine},
    resume::{Callbacks, ResumedNotes},
    run::RunState,
};

impl<'a, R, M, S, B, F> TrainLoop<'a, R, M, S, B, F>
where
    R: Runtime,
    S: Step<R>,
    F: FnMut(&M, &Batch<B>) -> Result<StepInput<R>>,
    B: Send + 'static,
{
    pub(super) fn new(trainer: Trainer<'a, R, M, S, B>, loss: F, buffers: Vec<Buffer<R>>) -> Result<Self> {
        let comm = trainer.step.ranks().everyone.clone();
        let begun = Self::begin(trainer, loss, &comm);
        abort_on_err(&comm, begun.map(|cycle| TrainLoop { buffers, ..cycle }))
    }

    fn begin(mut trainer: Trainer<'a, R, M, S, B>, loss: F, comm: &Comm<R>) -> Result<Self> {
        all_ok(comm, "Trainer", trainer.check())?;
        let names: Vec<&str> = trainer.callbacks.iter().map(|callback| callback.name()).collect();
        let Trainer { length, record_every, resume, weighting, shares, fast_dev_run, elastic, hash_state, .. } =
            &trainer;
        let commits = elastic.as_ref().map(|commits| &commits.every);
        let options = format!(
            "until: {length:?}\nrecord_every: {record_every:?}\nresume: {resume:?}\nweighting: {weighting:?}\nshares: {shares:?}\nfast_dev_run: {fast_dev_run:?}\nelastic: {commits:?}\nhash_state: {hash_state:?}\ncallbacks: {names:?}"
        );
        comm.agree("the configuration of the trainer", options.as_bytes())?;
        if let Some(steps) = trainer.fast_dev_run {
            trainer.length = Length::Steps(steps);
            trainer.resume = Resume::No;
            trainer.sinks.clear();
        }
        let replay = all_ok(comm, "StepReplay", ReplayedLeg::current())?;
        if replay.is_none() {
            all_ok(comm, "Trainer", ReplayedLeg::check_elsewhere(&saved_in(&trainer.callbacks)))?;
        }
        if let Some(leg) = &replay {
            all_ok(comm, "StepReplay", leg.check(&saved_in(&trainer.callbacks)))?;
            trainer.length = leg.until;
            trainer.sinks.clear();
        }
        // After ranks have left an elastic world, rank 0 may be another process than the first world's rank 0.
        let is_rank_zero = if trainer.elastic.is_some() { comm.rank() == 0 } else { comm.world_rank() == 0 };
        if !is_rank_zero {
            trainer.sinks.clear();
        }
        let devices = RankDevices::of(comm)?;
        let of = trainer.step.ranks().share.of;
        if trainer.elastic.is_some()
            && let Shares::BySpeed(given) = &trainer.shares
            && given.ratios().len() != of
        {
            // Ranks have left or come: they begin anew.
            trainer.shares = Shares::BySpeed(SpeedShares::new(of)?);
        }
        let shares = match &replay {
            // The log has them.
            Some(_) => None,
            None => trainer.shares.of(&trainer.step, &devices, trainer.weighting)?,
        };
        trainer.loader = own_batches(trainer.loader, &trainer.step, shares.as_ref());
        let steps = all_ok(comm, "Trainer", trainer.loader.steps())?;
        agree_on_batch(comm, trainer.loader.batch_size())?;
        let data = format!("{} {steps}", trainer.loader.note(State::default()));
        comm.agree("the data to train on", data.as_bytes())?;
        trainer.resumed(loss, (devices, is_rank_zero), shares, replay)
    }
}

/// Checks that all ranks have batches of one size; the error on all ranks has both sizes.
fn agree_on_batch<R: Runtime>(comm: &Comm<R>, own: usize) -> Result<()> {
    let all = comm.exchange_equal((own as u64).to_le_bytes())?.into_iter().map(u64::from_le_bytes).collect::<Vec<_>>();
    let Some(other) = all.iter().position(|size| *size != all[0]) else { return Ok(()) };
    let (first, member) = (comm.members()[0], comm.members()[other]);
    let why = format!(
        "rank {first} was given batches of {} examples and rank {member} of {}: `Loader::batch` is the number of examples of all ranks together, so give all ranks \
         the same",
        all[0], all[other]
    );
    Err(Error::from(ErrorKind::Mismatch { op: "Trainer", why }).on_rank(comm.world_rank()))
}

impl<'a, R: Runtime, M, S: Step<R>, B: Send + 'static> Trainer<'a, R, M, S, B> {
    fn check(&self) -> Result<()> {
        self.length.check()?;
        self.record_every.check("record_every")?;
        if let Some(every) = &self.hash_state {
            every.check("hash_state")?;
        }
        if let Some(commits) = &self.elastic {
            commits.every.check("elastic")?;
            self.step.properties().features.and(Feature::Elastic).check("Trainer")?;
        }
        if self.weighting == Weighting::PerMicroBatch && self.counts_tokens() {
            let why = "with `Weighting::PerMicroBatch` every loss has weight 1, so tokens are not counted: give lengths and intervals in steps or epochs, or use `Weighting::ByWeight`";
            return Err(Error::config("Trainer", "weighting", why));
        }
        self.callbacks.iter().try_for_each(|callback| callback.check())?;
        check_folders(&saved_in(&self.callbacks))
    }

    /// Tells whether anything reads the number of tokens after every step.
    fn counts_tokens(&self) -> bool {
        self.length.counts_tokens()
            || self.record_every.counts_tokens()
            || self.hash_state.as_ref().is_some_and(Interval::counts_tokens)
            || self.elastic.as_ref().is_some_and(|commits| commits.every.counts_tokens())
            || self.callbacks.iter().any(|callback| callback.counts_tokens())
    }

    /// Makes the run at its beginning, or resumes it.
    fn resumed<F>(
        mut self,
        loss: F,
        (devices, is_rank_zero): (RankDevices, bool),
        shares: Option<SpeedShares>,
        replay: Option<Arc<ReplayedLeg>>,
    ) -> Result<TrainLoop<'a, R, M, S, B, F>> {
        let comm = self.step.ranks().everyone.clone();
        let mut state = RunState::new(self.length, self.loader.positions(), self.fast_dev_run.is_some());
        for callback in &mut self.callbacks {
            callback.attach(&mut self.step, &comm)?;
        }
        all_ok(&comm, "Trainer", check_tensors(&mut self.callbacks))?;
        state.is_elastic = self.elastic.is_some();
        state.saves &= replay.is_none();
        let folder = self.callbacks.iter().find_map(|callback| callback.folder()).filter(|_| state.saves).cloned();
        if let (Some(commits), Some(folder)) = (&mut self.elastic, &folder) {
            commits.world.save_orphaned_in(folder);
        }
        let locks = self.lock_folders(&comm, &state)?;
        let (mut at, mut from, mut after) = (State::default(), None, None);
        let commit = self.restore_commit()?;
        if let Some(leg) = &replay {
            if let Some((folder, step)) = &leg.from {
                let notes =
                    load_step(&Folder::new(folder), *step, &mut self.step, &mut self.callbacks, fits(&self.loader))?;
                at = self.restore_notes(notes, &mut state)?;
            }
        } else if let Some(notes) = commit {
            after = notes.log;
            at = self.restore_notes(notes, &mut state)?;
            // Checkpoints in the folders of callbacks are this run's own.
            state.from_scratch = false;
        } else if let Some((folders, required)) = self.resume_folders()? {
            match load(&folders, &mut self.step, &mut self.callbacks, fits(&self.loader))? {
                Some((resumed, notes)) => {
                    let is_beside_log = folder.as_ref().is_some_and(|own| is_same(own, &resumed));
                    (from, after) = (Some(absolute(&resumed)).filter(|_| !is_beside_log), notes.log);
                    at = self.restore_notes(notes, &mut state)?;
                    state.from_scratch = !saved_in(&self.callbacks).iter().any(|own| is_same(own, &resumed));
                }
                None if required => return Err(no_checkpoint(&folders)),
                None => {}
            }
        }
        let batches = self.loader.endless(at)?;
        // The checkpoint's position is not used: the rest of its epoch may be too short for a loader with larger
        // batches.
        let at = batches.state();
        let progress = &mut state.progress;
        (progress.step, progress.epoch, progress.position) = (self.step.global_step(), at.epoch, at.position);
        // No interval is complete before the first step.
        state.before = Progress { elapsed: state.checked, ..state.progress };
        let clock = Clock::resumed(state.progress.elapsed);
        let counts_tokens = self.counts_tokens();
        let log = match (replay, folder) {
            (Some(leg), _) => StepLog::Replayed { leg, taken: 0 },
            (None, Some(folder)) => {
                let world =
                    WorldLine { ranks: comm.size(), step: state.progress.step, until: state.length, from, after };
                let file = if is_rank_zero { KeptLog::Begins(folder, world) } else { KeptLog::Elsewhere };
                StepLog::Kept { file, hash_every: self.hash_state }
            }
            (None, None) => StepLog::None,
        };
        let Trainer { model, step, loader, callbacks, sinks, record_every, weighting, elastic, .. } = self;
        Ok(TrainLoop {
            model,
            engine: StepWithLoss { step, loss, weighting, shares },
            batches,
            loader,
            callbacks,
            _locks: locks,
            sinks,
            state,
            record_every,
            clock,
            pending: Vec::new(),
            counts_tokens,
            last: None,
            last_loss: None,
            skipped: 0,
            is_ending: None,
            before_step: None,
            buffers: Vec::new(),
            elastic,
            log,
            devices: Some(devices).filter(|_| comm.size() > 1),
        })
    }

    /// Locks the folders that this run saves in, before it looks into them: another run that has failed may still save
    /// there. Elastic runs take no locks, as a lost rank's process may be alive and still hold them.
    fn lock_folders(&self, comm: &Comm<R>, state: &RunState) -> Result<Vec<Option<FolderLock>>> {
        let folders = if state.is_elastic || !state.saves { Vec::new() } else { saved_in(&self.callbacks) };
        folders.iter().map(|folder| folder.lock_of_all(comm)).collect()
    }

    /// Restores loop and callbacks from the notes; returns the place in the data.
    fn restore_notes(&mut self, notes: ResumedNotes, state: &mut RunState) -> Result<State> {
        let at = self.loader.state_of(&notes.data)?;
        (state.owes_evaluation, state.owes_save, state.checked) =
            (notes.owes_evaluation, notes.owes_save, notes.checked);
        notes.restore(state, &mut self.callbacks)?;
        state.resumed = Some(self.step.global_step());
        Ok(at)
    }

    /// The folders to resume from, and true if one of them must have a checkpoint.
    fn resume_folders(&self) -> Result<Option<(Vec<Folder>, bool)>> {
        let own = saved_in(&self.callbacks);
        match &self.resume {
            Resume::No => Ok(None),
            Resume::From(path) => Ok(Some((vec![Folder::new(path)], true))),
            Resume::IfThere | Resume::Required if own.is_empty() => {
                let why = "no folder of checkpoints is configured: add `Checkpoints`, or give `Resume::From` a folder";
                Err(Error::config("Trainer", "resume", why))
            }
            resume => Ok(Some((own, *resume == Resume::Required))),
        }
    }
}

/// The check that a checkpoint's place in the data is one of this loader's.
fn fits<B: Send + 'static>(loader: &Loader<B>) -> impl Fn(&ResumedNotes) -> Result<()> {
    |notes| loader.state_of(&notes.data).map(|_| ())
}

/// The error of a run that is to resume from one of these folders, which have no checkpoint.
fn no_checkpoint(folders: &[Folder]) -> Error {
    let mut paths = folders.iter().map(Folder::path);
    let path = paths.next().unwrap_or(Path::new(""));
    let others: String = paths.map(|other| format!(", nor in {}", other.display())).collect();
    let why = format!("there is no checkpoint to resume from{others}");
    Error::io(path, io::Error::new(io::ErrorKind::NotFound, why))
}

/// Checks that no two callbacks save in one folder, as each would remove the other's checkpoints.
fn check_folders(folders: &[Folder]) -> Result<()> {
    let again = (1..folders.len()).find(|&k| folders[..k].iter().any(|before| is_same(before, &folders[k])));
    let Some(again) = again else { return Ok(()) };
    let why = format!(
        "two callbacks save in {}: one `Checkpoints` saves at an interval, keeps the last ones, and the best one too (`.every(..).keep(..).best(..)`); give others a \
         folder of their own",
        folders[again].path().display()
    );
    Err(Error::config("Checkpoints", "in_folder", why))
}

/// The path of a folder that is the same in another working folder.
fn absolute(folder: &Folder) -> PathBuf {
    std::path::absolute(folder.path()).unwrap_or_else(|_| folder.path().to_path_buf())
}

/// Tells whether two paths name one folder, which need not exist yet.
pub(super) fn is_same(a: &Folder, b: &Folder) -> bool {
    let whole = |path: &Path| -> PathBuf {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
        let there =
            path.ancestors().find_map(|above| Some((above.canonicalize().ok()?, path.strip_prefix(above).ok()?)));
        let Some((above, rest)) = there else { return path };
        rest.components().fold(above, |at, part| match part {
            Component::ParentDir => at.parent().map_or_else(PathBuf::new, Path::to_path_buf),
            part => at.join(part),
        })
    };
    whole(a.path()) == whole(b.path())
}

/// Checks that no two callbacks keep tensors or numbers of one name in a checkpoint.
fn check_tensors<R: Runtime, M, B>(callbacks: &mut Callbacks<'_, R, M, B>) -> Result<()> {
    let mut all = BTreeSet::new();
    for tensors in callbacks.iter_mut().filter_map(|callback| callback.tensors()) {
        let wanted = tensors.wanted()?.into_iter().map(|wanted| wanted.name);
        let own: BTreeSet<String> = wanted.chain(tensors.numbers().into_keys()).collect();
        if let Some(name) = own.intersection(&all).next() {
            let why = format!("two callbacks keep `{name}` in checkpoints: leave one of them out");
            return Err(Error::config("Trainer", "with", why));
        }
        all.extend(own);
    }
    Ok(())
}
