//! Recordings of some steps of a run, as files: [`Profile`].

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use distributed::{
    checkpoint::Checkpointed,
    comm::{Comm, Communicator},
};
use numcore::{
    Error, Result, Runtime, Within,
    trace::{ClockSource, Recording, RecordingOptions, SpanKind},
};

use watch::recorder::{RunTimeline, UsageSampler};

use crate::{Callback, Event, Run};

/// Records windows of steps, each after some steps that are not recorded, and writes them as files. These are
/// `trace.rank<r>.<n>.json` for Perfetto, one file per rank, and `trace.<n>.svg`. PyTorch's `torch.profiler.schedule`.
///
/// A custom loop has one per process. It is a [`Callback`] of a [`Trainer`](crate::Trainer) too, on every rank. If
/// ranks are threads of one process, the first to begin records all of them. In a replay it records nothing.
///
/// ```no_run
/// use train::recorder::Profile;
/// # fn main() -> numcore::Result<()> {
/// let mut profile = Profile::in_folder("runs/a").wait(10).active(3);
/// for _ in 0..100 {
///     profile.step()?; // at the beginning of every step
///     // train
/// }
/// # Ok(())
/// # }
/// ```
#[doc(alias("timeline"))]
#[derive(Debug)]
pub struct Profile {
    folder: PathBuf,
    options: RecordingOptions,
    /// The clock of the recordings: the one that was set, or the runtime's.
    clock: Option<ClockSource>,
    rank: usize,
    ranks: usize,
    wait: u64,
    active: u64,
    repeat: u64,
    /// The number of steps that have begun.
    begun: u64,
    windows: u64,
    /// The number of operations in the table that is printed after each window.
    printed: usize,
    recording: Option<(Recording, UsageSampler)>,
}

impl Profile {
    /// Records one window of 3 steps, after 10 that are not recorded.
    pub fn in_folder(folder: impl AsRef<Path>) -> Self {
        Profile {
            folder: folder.as_ref().into(),
            options: RecordingOptions::default(),
            clock: None,
            rank: 0,
            ranks: 1,
            wait: 10,
            active: 3,
            repeat: 1,
            begun: 0,
            windows: 0,
            printed: 0,
            recording: None,
        }
    }

    /// Sets the number of steps before each window. The first ones of a run are not representative: kernels are
    /// compiled, pools filled.
    pub fn wait(mut self, steps: u64) -> Self {
        self.wait = steps;
        self
    }

    /// Sets the number of steps of a window, at least one.
    pub fn active(mut self, steps: u64) -> Self {
        self.active = steps.max(1);
        self
    }

    /// Sets the number of windows.
    pub fn repeat(mut self, windows: u64) -> Self {
        self.repeat = windows;
        self
    }

    /// Sets the rank of this process and the number of ranks, for file names and for tools that compare ranks.
    pub fn rank(mut self, rank: usize, ranks: usize) -> Self {
        (self.rank, self.ranks) = (rank, ranks);
        self
    }

    /// Prints the `most` costliest operations of each window to standard error, and kernels where they are measured.
    /// Rank 0 prints, for all ranks that its process recorded.
    #[doc(alias("key_averages"))]
    pub fn print_costliest(mut self, most: usize) -> Self {
        self.printed = most;
        self
    }

    /// Sets the clock of the recordings, in place of the options' clock. Without a call, a [`Trainer`](crate::Trainer)
    /// sets [the clock of its runtime](Runtime::clock).
    pub fn clock(mut self, clock: ClockSource) -> Self {
        self.clock = Some(clock);
        self
    }

    /// Sets the kinds of spans that are recorded.
    pub fn options(mut self, options: RecordingOptions) -> Self {
        self.options = options;
        self
    }

    /// Marks the beginning of a step.
    ///
    /// # Errors
    /// An error if another recording is in progress, or a file cannot be written.
    #[track_caller]
    pub fn step(&mut self) -> Result<()> {
        if self.advance().at_caller()? {
            self.record(self.start().at_caller()?).at_caller()?;
        }
        Ok(())
    }

    /// Counts a step that begins, and ends the window that is over; true if another window begins.
    fn advance(&mut self) -> Result<bool> {
        let within = self.begun % (self.wait + self.active);
        if self.ends_window() {
            self.finish()?;
        }
        self.begun += 1;
        let begins = within == self.wait && self.windows < self.repeat;
        self.windows += u64::from(begins);
        Ok(begins)
    }

    /// Tells whether the step that begins is the first after a window.
    fn ends_window(&self) -> bool {
        self.begun.is_multiple_of(self.wait + self.active)
    }

    fn start(&self) -> Result<Recording> {
        Recording::start(RecordingOptions { clock: self.clock.unwrap_or(self.options.clock), ..self.options })
    }

    fn record(&mut self, recording: Recording) -> Result<()> {
        self.recording = Some((recording, UsageSampler::start(Duration::from_millis(50))?));
        Ok(())
    }

    /// Ends the window in progress, if there is one, and writes its files. Kernels that a device has not run yet have
    /// no span: in a custom loop, call [`Runtime::synchronize`] before.
    ///
    /// # Errors
    /// An error if a file cannot be written.
    #[track_caller]
    pub fn finish(&mut self) -> Result<()> {
        let Some((recording, usage)) = self.recording.take() else { return Ok(()) };
        drop(usage);
        self.write(&RunTimeline::of(&recording.stop(), self.rank)).at_caller()
    }

    fn write(&self, timeline: &RunTimeline) -> Result<()> {
        fs::create_dir_all(&self.folder).map_err(|e| Error::io(&self.folder, e))?;
        if self.rank == 0 && self.printed > 0 {
            let tables = [SpanKind::Op, SpanKind::Kernel].map(|kind| timeline.costliest(kind, self.printed));
            eprint!("{}", tables.concat());
        }
        let write = |name: String, text: String| {
            let path = self.folder.join(name);
            fs::write(&path, text).map_err(|e| Error::io(path, e))
        };
        let ranks = timeline.ranks.iter().map(|r| r.rank + 1).max().unwrap_or(0).max(self.ranks);
        for rank in &timeline.ranks {
            let json = timeline.to_chrome_json_of(rank.rank, ranks);
            write(format!("trace.rank{}.{}.json", rank.rank, self.windows), json)?;
        }
        let of = if self.ranks > 1 { format!(".rank{}", self.rank) } else { String::new() };
        write(format!("trace{of}.{}.svg", self.windows), timeline.to_svg())
    }
}

impl<R: Runtime, M, B> Callback<R, M, B> for Profile {
    fn attach(&mut self, _: &mut dyn Checkpointed<R>, comm: &Comm<R>) -> Result<()> {
        (self.rank, self.ranks) = (comm.world_rank(), comm.size());
        self.clock.get_or_insert(comm.runtime().clock());
        Ok(())
    }

    fn on(&mut self, event: &Event<'_, R>, run: &mut Run<'_, R, M, B>) -> Result<()> {
        if run.is_replay() {
            return Ok(());
        }
        let over = match event {
            Event::StepBegin => self.ends_window(),
            _ => matches!(event, Event::End(_)),
        };
        if over && self.recording.is_some() {
            // A device's kernels have their spans once they are done.
            run.comm().runtime().synchronize()?;
        }
        match event {
            Event::StepBegin => {
                if self.advance()?
                    // Another rank of this process may record already, and its recording has this rank's spans too.
                    && let Ok(recording) = self.start()
                {
                    self.record(recording)?;
                }
                Ok(())
            }
            Event::End(_) => self.finish(),
            _ => Ok(()),
        }
    }
}

impl Drop for Profile {
    fn drop(&mut self) {
        // Errors are returned only by a call of `finish`.
        let _ = self.finish();
    }
}
