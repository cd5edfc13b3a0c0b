//! When checkpoints are saved, and which of them stay.

use std::{
    path::PathBuf,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use distributed::{
    checkpoint::Folder,
    comm::{Collectives, Comm, Communicator},
};
use numcore::{Error, Result, Runtime};

use super::{
    Monitor, interrupt,
    writer::{CheckpointWriter, WriteJob},
};
use crate::{Callback, CallbackState, Event, Interval, Run, RunSnapshot, parsed};

/// Saves checkpoints: every so often, when a value is the best so far, at the end of the run, and when the process is asked to end (SIGTERM, Ctrl-C), which
/// ends the run. The training step is held up by a copy to host memory; a thread writes that.
///
/// A checkpoint is there whole or not at all, and an old one is removed only after a new one is in place. A save that fails ends the run with its
/// error, unless [`report_failures`](Checkpoints::report_failures) says otherwise; the last good checkpoint stays.
pub struct Checkpoints<R: Runtime> {
    folder: Folder,
    every: Interval,
    keep: Option<usize>,
    best: Option<Monitor>,
    at_end: bool,
    on_signal: bool,
    on_failure: bool,
    in_thread: bool,
    report_failures: bool,
    best_value: Option<f64>,
    best_step: Option<u64>,
    /// The step that was saved last.
    saved: Option<u64>,
    writer: Option<CheckpointWriter<R>>,
    /// This rank, of how many, and a name of this run.
    here: (usize, usize, String),
}

impl<R: Runtime> Checkpoints<R> {
    /// Checkpoints in a folder, which all ranks must see: at the end of the run, and when the process is asked to end. All of them stay.
    pub fn in_folder(path: impl Into<PathBuf>) -> Self {
        Checkpoints::at(Folder::new(path))
    }

    /// Checkpoints as [`in_folder`](Checkpoints::in_folder), in a folder that may be [watched](Folder::watched).
    pub fn at(folder: Folder) -> Self {
        Checkpoints {
            folder,
            every: Interval::Never,
            keep: None,
            best: None,
            at_end: true,
            on_signal: true,
            on_failure: true,
            in_thread: true,
            report_failures: false,
            best_value: None,
            best_step: None,
            saved: None,
            writer: None,
            here: (0, 1, String::new()),
        }
    }

    /// How often one is saved.
    pub fn every(mut self, interval: Interval) -> Self {
        self.every = interval;
        self
    }

    /// How many of the last ones stay; the best one stays beside them.
    pub fn keep(mut self, last: usize) -> Self {
        self.keep = Some(last);
        self
    }

    /// Saves one whenever a value of an evaluation is the best so far: `.best("validation/loss")`, `.best(Monitor::max("validation/accuracy"))`. In
    /// the folder it is [marked](Folder::marked) `best`.
    pub fn best(mut self, monitor: impl Into<Monitor>) -> Self {
        self.best = Some(monitor.into());
        self
    }

    /// Whether one is saved at the end of the run; at first it is.
    pub fn at_end(mut self, yes: bool) -> Self {
        self.at_end = yes;
        self
    }

    /// Whether one is saved, and the run ended, when the process is asked to end; at first it is.
    pub fn on_signal(mut self, yes: bool) -> Self {
        self.on_signal = yes;
        self
    }

    /// Whether one is saved when a step ends by an error or a panic, on any rank: of what there was before that step, so that the run goes on there once the reason is
    /// gone. At first it is. Ranks cannot tell each other anything then, so rank 0 waits some seconds for the files of the others.
    pub fn on_failure(mut self, yes: bool) -> Self {
        self.on_failure = yes;
        self
    }

    /// Whether a thread writes them while training goes on; at first it does. Otherwise the step waits until everything is in place.
    pub fn in_thread(mut self, yes: bool) -> Self {
        self.in_thread = yes;
        self
    }

    /// Lets the run go on when a save fails: what failed is recorded as the text `checkpoint/failure`.
    pub fn report_failures(mut self) -> Self {
        self.report_failures = true;
        self
    }

    /// Whether a value makes this step the best one; it is kept if so.
    fn is_best(&mut self, fresh: &[(String, f64)], run: &Run<'_, R, impl Sized, impl Sized>) -> Result<bool> {
        let Some(monitor) = &self.best else { return Ok(false) };
        let value = monitor.value(fresh, run.evaluated(monitor.name()))?;
        let Some(value) = value.filter(|value| monitor.is_better(*value, self.best_value)) else { return Ok(false) };
        (self.best_value, self.best_step) = (Some(value), Some(run.progress().step));
        Ok(true)
    }

    fn save(&mut self, snapshot: &std::sync::Arc<RunSnapshot>) -> Result<()> {
        let Some(writer) = &mut self.writer else { return Ok(()) };
        self.saved = Some(snapshot.step);
        let also: Vec<u64> = self.best_step.into_iter().collect();
        let mark = self.best_step.filter(|_| self.best.is_some()).map(|step| (BEST, step));
        let keep = self.keep.map(|keep| (keep, also));
        let job = WriteJob { folder: self.folder.clone(), snapshot: snapshot.clone(), keep, mark };
        if self.in_thread { writer.start(job) } else { writer.write(&job) }
    }

    /// What failed is an error, or is recorded.
    fn judged(&self, saved: Result<()>, run: &mut Run<'_, R, impl Sized, impl Sized>) -> Result<()> {
        match saved {
            Err(error) if self.report_failures => {
                run.record_text("checkpoint/failure", error.to_string());
                Ok(())
            }
            saved => saved,
        }
    }
}

/// How long rank 0 waits for the other ranks of a world that has failed.
const PATIENCE: Duration = Duration::from_secs(10);

/// A name that the ranks of this run share, and no other run has.
fn name_of_run<R: Runtime>(comm: &Comm<R>) -> Result<String> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let own = format!("{now:x}-{:x}", std::process::id());
    let first = comm.exchange(own.as_bytes())?.swap_remove(0);
    Ok(String::from_utf8_lossy(&first).into_owned())
}

/// The file that names the best checkpoint.
const BEST: &str = "best";

impl<R: Runtime, M, B> Callback<R, M, B> for Checkpoints<R> {
    fn on(&mut self, event: &Event<'_, R>, run: &mut Run<'_, R, M, B>) -> Result<()> {
        if run.is_fast_dev_run() {
            return Ok(());
        }
        let step = run.progress().step;
        match event {
            Event::Begin => {
                self.writer = Some(CheckpointWriter::new(run.comm())?);
                self.here = (run.comm().rank(), run.comm().size(), name_of_run(run.comm())?);
                self.saved = run.resumed();
                if run.comm().rank() == 0 {
                    self.folder.remove_stranded()?;
                }
                if self.on_signal { interrupt::listen() } else { Ok(()) }
            }
            Event::StepEnd(_) => {
                let polled = self.writer.as_mut().map_or(Ok(()), CheckpointWriter::poll);
                self.judged(polled, run)?;
                if self.on_signal && interrupt::is_asked() {
                    run.control().interrupt();
                    run.control().save();
                }
                if run.is_due(&self.every) {
                    run.control().save();
                }
                Ok(())
            }
            Event::Evaluated(fresh) => {
                if self.is_best(fresh, run)? {
                    run.control().save();
                }
                Ok(())
            }
            Event::Ending(_) if self.at_end && self.saved != Some(step) => {
                run.control().save();
                Ok(())
            }
            Event::Save { snapshot, .. } => {
                // Whether the one before failed is judged first: ranks learn of it at different steps, and all of them save now.
                let before = self.writer.as_mut().map_or(Ok(()), CheckpointWriter::finish);
                self.judged(before, run)?;
                let saved = self.save(snapshot);
                self.judged(saved, run)
            }
            Event::WentBack => {
                self.saved = Some(step);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn name(&self) -> &str {
        "checkpoints"
    }

    fn state(&self) -> CallbackState {
        let value = self.best_value.map(|value| ("best_value".into(), value.to_string()));
        let step = self.best_step.map(|step| ("best_step".into(), step.to_string()));
        value.into_iter().chain(step).collect()
    }

    fn restore(&mut self, state: &CallbackState) -> Result<()> {
        self.best_value = state.contains_key("best_value").then(|| parsed(state, "best_value")).transpose()?;
        self.best_step = state.contains_key("best_step").then(|| parsed(state, "best_step")).transpose()?;
        Ok(())
    }

    fn folder(&self) -> Option<&Folder> {
        Some(&self.folder)
    }

    fn rescue(&mut self, snapshot: &RunSnapshot) -> Result<()> {
        // What was being written either is in place by now, or never will be.
        let written = self.writer.as_mut().map_or(Ok(()), CheckpointWriter::finish);
        let is_there = self.saved == Some(snapshot.step) && written.is_ok();
        if !self.on_failure || self.writer.is_none() || is_there {
            return Ok(());
        }
        let (rank, ranks, run) = &self.here;
        let RunSnapshot { step, state, notes } = snapshot;
        self.folder.save_stranded((*rank, *ranks), *step, state, notes, run, PATIENCE)
    }

    fn finish_saves(&mut self) -> Result<()> {
        let finished = self.writer.as_mut().map_or(Ok(()), CheckpointWriter::finish);
        if self.report_failures { Ok(()) } else { finished }
    }

    fn counts_tokens(&self) -> bool {
        self.every.counts_tokens()
    }

    fn check(&self) -> Result<()> {
        self.every.check("Checkpoints")?;
        self.best.iter().try_for_each(Monitor::check)?;
        if self.keep == Some(0) {
            return Err(Error::config("Checkpoints", "keep", "at least one checkpoint stays: give `keep` 1 or more"));
        }
        Ok(())
    }
}
