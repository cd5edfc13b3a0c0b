//! Replay of one step of a run, by ranks that are threads of one process.

mod command;
mod log;
mod report;
mod route;

use std::{
    cell::RefCell,
    collections::BTreeMap,
    fmt::Display,
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use adaptive::elastic::{Elastic, ElasticWorld};
use distributed::{
    checkpoint::Folder,
    comm::{Comm, Communicator, Deadlines, Quorum, Ranks, ThreadRendezvous},
};
use numcore::{Error, Result, Runtime};
use parking_lot::Mutex;

pub(crate) use self::log::{LogLine, LogPlace, RunLog, StepLine, WorldLine};
pub(crate) use self::report::CallPlace;
pub use self::report::{ReplayedCall, ReplayedRank, ReplayedStep, ReplayedValue};
use self::route::Route;
use crate::Length;

/// One step of a run, to be taken again from the nearest checkpoint, to the same bits, by ranks that are threads of
/// this process.
///
/// A [`Trainer`](crate::Trainer) that saves checkpoints keeps a log beside them, `replay.jsonl`. It has what the run
/// does not compute: numbers of ranks, lengths, places in the data, times, and measured shares. The rest follows from
/// the checkpoint and the program. Ranks that are processes sum in the order of threads, so a replay on one machine has
/// the bits of a run on many.
///
/// The program is the one that trained, as a function of its communicator. Within a replay its trainer goes on from the
/// checkpoint, takes the steps of the log, saves nothing and writes to no sink. The last step is observed: every op
/// call and gradient, with its operands. Then `run` of the trainer returns an error on every rank, so that nothing
/// after it is done. Callbacks of one's own that write files do so again, unless they ask
/// [`Run::is_replay`](crate::Run::is_replay).
///
/// Bits are those of the run on the same kind of runtime. On CPUs they are equal on all instruction sets, but those
/// with AMX, and those of products in bf16. Sums of NCCL have an order of their own.
///
/// ```
/// use data::{Array, Loader, Rows};
/// use distributed::{comm::{Comm, Ranks}, train::{Loss, TrainStep}};
/// use nn::{Forward, Init, Linear};
/// use numcore::{Result, ops::{PointwiseOps, ReduceOps}};
/// use optim::AdamWConfig;
/// use runtime_cpu::Cpu;
/// use train::{Checkpoints, Interval, Length, StepReplay, Trainer};
/// # use autograd::Var;
///
/// fn train(comm: Comm<Cpu>, folder: &std::path::Path) -> Result<()> {
///     let model = Linear::new(&Init::new(comm.runtime(), 0), 2, 1)?;
///     let step = TrainStep::builder(&comm, &model).optimizer(AdamWConfig::default()).build()?;
///     let rows = Rows::new(Array::new([40, 2], (0..80).map(|i| i as f32 - 30.0).collect())?)?;
///     Trainer::new(&model, step, Loader::new(rows).batch(4).stack().on(comm.runtime()))
///         .until(Length::Steps(10))
///         .with(Checkpoints::in_folder(folder).every(Interval::Steps(5)))
///         .run(|model, batch| {
///             // The logarithm of a number below zero, in the first batches.
///             let y = model.forward(&Var::new(batch.data.log()?))?;
///             Loss::sum(y.sum_all()?, batch.count as f64)
///         })?;
///     Ok(())
/// }
///
/// # fn main() -> Result<()> {
/// let folder = std::env::temp_dir().join(format!("weftgrad-doc-replay-{}", std::process::id()));
/// let cpu = |_| Ok(Cpu::with_threads(1));
/// Ranks::new(2).run(cpu, |comm| train(comm, &folder))?;
/// let step = StepReplay::of(&folder, 7).run(cpu, |comm| train(comm, &folder))?;
/// println!("{step}");
/// assert_eq!((step.ranks.len(), step.from), (2, Some(5)));
/// # std::fs::remove_dir_all(&folder).map_err(|e| numcore::Error::io(&folder, e))
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct StepReplay {
    folder: PathBuf,
    step: u64,
    attempt: Option<usize>,
    values_of: Option<usize>,
    /// The rank whose calls are shown.
    shown: Option<usize>,
    scratch: PathBuf,
    deadlines: Deadlines,
}

impl StepReplay {
    /// The last time that a run took `step`, by the log and the checkpoints in a folder of the run.
    pub fn of(folder: impl Into<PathBuf>, step: u64) -> Self {
        let (folder, scratch) = (folder.into(), std::env::temp_dir());
        // The observed step takes long, and ranks wait for each other in it.
        let deadlines = Duration::from_secs(3600).into();
        StepReplay { folder, step, attempt: None, values_of: None, shown: None, scratch, deadlines }
    }

    /// Selects one of the times that the run took the step, from 0; the last one is the default. A run takes a step
    /// again after it has gone back, lost ranks, or left out an update.
    pub fn attempt(self, attempt: usize) -> Self {
        StepReplay { attempt: Some(attempt), ..self }
    }

    /// The number of ranks that took the step.
    ///
    /// # Errors
    /// An error if the folder has no log or no checkpoint that leads to the step.
    pub fn ranks(&self) -> Result<usize> {
        let route = Route::to(&Folder::new(&self.folder), self.step, self.attempt)?;
        Ok(route.legs.last().map_or(1, |leg| leg.ranks))
    }

    /// Keeps the values of the operands of a call on every rank, in addition to their summaries. The call has this
    /// number on the [shown](StepReplay::show_rank) rank, or else on rank 0. The step is observed twice for it.
    pub fn values_of(self, call: usize) -> Self {
        StepReplay { values_of: Some(call), ..self }
    }

    /// Shows all calls of this rank in the [text](StepReplay::text) of the step.
    pub fn show_rank(self, rank: usize) -> Self {
        StepReplay { shown: Some(rank), ..self }
    }

    /// Sets the folder for states between worlds of different sizes, which are removed afterwards; by default the
    /// system's folder for temporary files.
    pub fn scratch(self, folder: impl Into<PathBuf>) -> Self {
        StepReplay { scratch: folder.into(), ..self }
    }

    /// Sets the time that a rank waits for others in a call, by default an hour.
    pub fn timeout(self, most: impl Into<Deadlines>) -> Self {
        StepReplay { deadlines: most.into(), ..self }
    }

    /// Takes the step again. `runtime` opens the runtime of a rank; `program` is the program of the run.
    ///
    /// # Errors
    /// An error if the folder has no log or no checkpoint that leads to the step, and errors of the program before the
    /// step. Also if the state after an earlier step has another hash than in the run
    /// ([`Trainer::hash_state`](crate::Trainer::hash_state)). An error of the step itself is in the result.
    pub fn run<R: Runtime, T: Send>(
        &self,
        runtime: impl Fn(usize) -> Result<R>,
        program: impl Fn(Comm<R>) -> Result<T> + Sync,
    ) -> Result<ReplayedStep> {
        self.legs(|leg| {
            let ranks = Ranks::new(leg.ranks).timeout(self.deadlines);
            ranks.run(&runtime, |comm| leg.within(comm.rank(), || program(comm))).map(drop)
        })
    }

    /// Takes the step again, by the program of an [elastic](Elastic) run. The numbers of ranks are those of the log.
    ///
    /// # Errors
    /// The errors of [`run`](StepReplay::run).
    pub fn run_elastic<R: Runtime, T: Send>(
        &self,
        runtime: impl Fn(usize) -> Result<R>,
        program: impl Fn(&mut ElasticWorld<R>) -> Result<T> + Sync,
    ) -> Result<ReplayedStep> {
        self.legs(|leg| {
            let runtimes = (0..leg.ranks).map(&runtime).collect::<Result<_>>()?;
            let quorum = Quorum { min_ranks: leg.ranks, ..Quorum::default() };
            let (_rendezvous, seats) = ThreadRendezvous::new(runtimes, quorum, self.deadlines)?;
            let program = |world: &mut ElasticWorld<R>| leg.within(world.comm()?.rank(), || program(world));
            let outcomes = Elastic::on_threads(seats, |elastic| elastic.copies(0), program);
            outcomes.into_iter().try_for_each(|outcome| outcome.map(drop))
        })
    }

    /// Takes the legs of the route one after another, each from the state of the one before.
    fn legs(&self, run: impl Fn(&Arc<ReplayedLeg>) -> Result<()>) -> Result<ReplayedStep> {
        let mut route = Route::to(&Folder::new(&self.folder), self.step, self.attempt)?;
        let of = route.legs.last().map_or(1, |leg| leg.ranks);
        if let Some(shown) = self.shown.filter(|shown| *shown >= of) {
            let allowed = format!("below {of}, the number of ranks that took step {}", self.step);
            return Err(Error::range("StepReplay", "rank", shown, allowed));
        }
        let scratch = Scratch::new(&self.scratch);
        let lost = || Error::internal("StepReplay", "a route has no steps");
        let mut last = route.legs.pop().ok_or_else(lost)?;
        // The step itself is a leg of its own.
        let observed = last.steps.pop().ok_or_else(lost)?;
        let (ranks, until) = (last.ranks, last.until);
        route.legs.extend(Some(last).filter(|leg| !leg.steps.is_empty()));
        let begun = route.from.as_ref().map(|(_, step)| *step);
        let mut from = route.from;
        // The time after the last step of a leg is that before the next one.
        let ends: Vec<Duration> =
            route.legs.iter().skip(1).flat_map(|leg| leg.steps.first()).map(|line| line.elapsed).collect();
        let ends = ends.into_iter().chain([observed.elapsed]);
        for ((k, leg), end) in route.legs.into_iter().enumerate().zip(ends) {
            let folder = Folder::new(scratch.0.join(k.to_string()));
            self.take(&run, (leg, end), from, LegEnd::Save(folder.clone()))?;
            // The state before this leg is not needed again.
            let _ = k.checked_sub(1).map(|before| fs::remove_dir_all(scratch.0.join(before.to_string())));
            from = folder.latest()?.map(|step| (folder.path().to_path_buf(), step));
        }
        let observe = |keep| {
            let leg = route::Leg { ranks, until, steps: vec![observed.clone()] };
            let ranks = self.take(&run, (leg, observed.elapsed), from.clone(), LegEnd::Observe { keep })?;
            Ok::<_, Error>(ReplayedStep { step: self.step, from: begun, ranks })
        };
        let step = observe(None)?;
        // Other ranks may number the call differently, so values are kept when it is known.
        let wanted = self.values_of.and_then(|call| step.place_of(self.shown.unwrap_or(0), call));
        wanted.map_or(Ok(step), |place| observe(Some(place)))
    }

    /// Takes a leg, and returns the observations of its ranks.
    fn take(
        &self,
        run: &impl Fn(&Arc<ReplayedLeg>) -> Result<()>,
        (leg, end): (route::Leg, Duration),
        from: Option<(PathBuf, u64)>,
        then: LegEnd,
    ) -> Result<Vec<ReplayedRank>> {
        let route::Leg { ranks, until, steps } = leg;
        let (of, results) = (Folder::new(&self.folder), Mutex::new(BTreeMap::new()));
        let leg = Arc::new(ReplayedLeg { ranks, until, of, from, steps, end, then, results });
        let outcome = {
            let _replayed = ReplayedFolder::of(&self.folder);
            run(&leg)
        };
        let results = std::mem::take(&mut *leg.results.lock());
        if results.len() < ranks {
            let why = "the program ended before its trainer had taken the steps of the log: is it that of the run?";
            return Err(outcome.err().unwrap_or_else(|| Error::usage("StepReplay", why)));
        }
        Ok(results.into_values().flatten().collect())
    }
}

/// A folder for the states between legs, removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(within: &Path) -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        Scratch(within.join(format!("weftgrad-replay-{}-{number}", std::process::id())))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The folders of runs that this process replays.
static REPLAYED: Mutex<Vec<Folder>> = Mutex::new(Vec::new());

/// A folder that is replayed.
struct ReplayedFolder(Folder);

impl ReplayedFolder {
    fn of(path: &Path) -> Self {
        REPLAYED.lock().push(Folder::new(path));
        ReplayedFolder(Folder::new(path))
    }
}

impl Drop for ReplayedFolder {
    fn drop(&mut self) {
        let mut replayed = REPLAYED.lock();
        if let Some(place) = replayed.iter().position(|folder| folder.path() == self.0.path()) {
            replayed.swap_remove(place);
        }
    }
}

thread_local! {
    /// The leg that this thread replays.
    static LEG: RefCell<Option<Arc<ReplayedLeg>>> = const { RefCell::new(None) };
}

/// Steps of one world that are taken again.
pub(crate) struct ReplayedLeg {
    ranks: usize,
    /// The length of the run, which may have been another one later.
    pub until: Length,
    /// The folder of the run.
    pub of: Folder,
    /// The checkpoint to go on from; none to begin from scratch.
    pub from: Option<(PathBuf, u64)>,
    pub steps: Vec<StepLine>,
    /// The time of the run after these steps.
    end: Duration,
    pub then: LegEnd,
    /// The ranks that are done, with their observations.
    results: Mutex<BTreeMap<usize, Option<ReplayedRank>>>,
}

/// The end of a leg.
pub(crate) enum LegEnd {
    /// The state after the last step is saved.
    Save(Folder),
    /// The only step is observed, and the values of a call kept.
    Observe { keep: Option<CallPlace> },
}

impl ReplayedLeg {
    /// The leg that this thread replays.
    ///
    /// # Errors
    /// An error if the process was asked for a replay, and this thread is of none.
    pub(crate) fn current() -> Result<Option<Arc<Self>>> {
        let leg = LEG.with_borrow(Clone::clone);
        if leg.is_none() && StepReplay::from_env()?.is_some() {
            let why = "`weftgrad-replay` has started this program, whose trainer does not run on a rank of `weftgrad::Launcher::run`: nothing was changed; call `StepReplay::run` or `run_elastic` with the program of a rank";
            return Err(Error::usage("StepReplay", why));
        }
        Ok(leg)
    }

    /// The folders of runs whose steps this process takes again, on whatever threads.
    pub(crate) fn folders() -> Vec<Folder> {
        REPLAYED.lock().clone()
    }

    /// Tells whether this thread replays a leg.
    pub(crate) fn is_here() -> bool {
        LEG.with_borrow(Option::is_some)
    }

    /// Runs a program on a rank of this leg.
    fn within<T>(self: &Arc<Self>, rank: usize, program: impl FnOnce() -> Result<T>) -> Result<T> {
        struct Outer(Option<Arc<ReplayedLeg>>);
        impl Drop for Outer {
            fn drop(&mut self) {
                LEG.set(self.0.take());
            }
        }
        let _outer = Outer(LEG.replace(Some(self.clone())));
        let outcome = program();
        // Other ranks may end with the error of the rank that failed within the observed step.
        if self.results.lock().contains_key(&rank) { Err(replayed()) } else { outcome }
    }

    /// The time of the run before the step of this number.
    pub(crate) fn time_before(&self, taken: usize) -> Duration {
        self.steps.get(taken).map_or(self.end, |line| line.elapsed)
    }

    /// Keeps the result of a rank. The returned error ends its program.
    pub(crate) fn done(&self, rank: usize, result: Option<ReplayedRank>) -> Error {
        self.results.lock().insert(rank, result);
        replayed()
    }

    /// The error of a replay that has parted from the run.
    pub(crate) fn parted(&self, step: u64, why: impl Display) -> Error {
        let why = format!(
            "the replay of step {step} has parted from the run: {why}; is it the same program, with the same data, on a runtime of the same kind?"
        );
        Error::mismatch("StepReplay", why)
    }
}

fn replayed() -> Error {
    Error::usage("StepReplay", "the step was taken again: nothing after it runs")
}
