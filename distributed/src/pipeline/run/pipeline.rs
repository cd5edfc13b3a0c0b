//! A pipeline on one rank: its stages, its schedule, and its runs.

use std::{
    collections::{BTreeMap, HashMap},
    hash::Hasher,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
};

use autograd::{RandomState, Var, random_state, set_random_state};
use nn::{ModuleExt, set_counted_rows};
use numcore::{Error, ErrorKind, Fnv1a, Result, Runtime};
use parking_lot::Mutex;

use super::{
    MicroBatches, PipelineModel, PipelineOutput, Stage, StageHooks,
    executor::{RunInputs, RunPlan, ScheduleRun},
    hooks::NoHooks,
};
use crate::{
    comm::{Collectives, Comm, Communicator, abort_with, all_ok, panic_message},
    loss::Loss,
    pipeline::{Action, Checked, Limits, Lowering, Schedule, Timeline, TimelineEvent},
};

/// The loss of a micro-batch, from the last stage's outputs and the micro-batch's targets.
pub type LossFn<R> = dyn FnMut(&[Var<R>], &[Var<R>]) -> Result<Loss<R>> + Send;

/// Options of runs, which must be equal on every rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PipelineOptions {
    /// True if the gradients of the first stage's floating inputs are computed.
    pub input_gradients: bool,
    /// True if every action is measured: ranks begin each run together, and passes wait for the device.
    pub measured: bool,
    /// True if the shapes between stages may differ from micro-batch to micro-batch: other numbers of examples, other
    /// lengths of sequences. Ranks then agree on them for every one, which costs a header for each message forward.
    /// Otherwise they agree in the first run, and receive buffers are posted ahead from the beginning of each later
    /// one.
    pub dynamic_shapes: bool,
}

/// A model cut into stages on the ranks of a communicator, run by a checked schedule.
///
/// Gradients of a run are those of the sum of all micro-batches' losses. They are added to the gradients that the
/// [hooks](StageHooks) hold, so several runs can be accumulated. For the same stages the choice of the schedule does
/// not change the losses. It changes no bit of a gradient either, if the parameter is used once in its stage and the
/// micro-batches' backwards have one order. Random numbers (dropout) depend on run, stage and micro-batch alone, and
/// start from the current position in the stream of the rank's thread.
///
/// The ranks at both ends of a boundary agree on the shapes and dtypes of its values. In an evaluation they do so for
/// each micro-batch, in training once for all or for each ([`PipelineOptions::dynamic_shapes`]). The
/// communicator's timeout must be longer than a run: some memory is posted long before it is needed.
///
/// A rank that fails or panics in a run ends it on every rank. The error names the rank and its action; the
/// communicator is unusable then.
pub struct Pipeline<R: Runtime> {
    comm: Comm<R>,
    stages: BTreeMap<usize, Box<dyn Stage<R>>>,
    /// Called through `get_mut`: the lock makes a pipeline `Sync`.
    loss: Option<Mutex<Box<LossFn<R>>>>,
    plan: RunPlan,
    evaluation: RunPlan,
    options: PipelineOptions,
    seed: f64,
}

// Its collective methods are not `#[track_caller]`: ranks are matched by the line of a call, and those of different
// stages may call from different lines.
impl<R: Runtime> Pipeline<R> {
    /// Makes this rank's part. Blocks.
    ///
    /// # Errors
    /// On every rank, if on any rank:
    ///
    /// - the schedule is for another number of ranks;
    /// - a stage is missing, or another rank's;
    /// - two stages share a parameter;
    /// - the loss is missing.
    ///
    /// Ranks must also have equal schedules and options.
    pub fn new(comm: &Comm<R>, model: PipelineModel<R>) -> Result<Self> {
        all_ok(comm, "Pipeline::new", fit(comm, &model))?;
        comm.agree("the pipeline's schedule", &model.fingerprint())?;
        let PipelineModel { checked, stages, loss, options, .. } = model;
        let evaluation = if checked.is_forward_only() { checked.clone() } else { evaluation(&checked)? };
        let (comm, stages, loss) = (comm.clone(), stages.into_iter().collect(), loss.map(Mutex::new));
        let (plan, evaluation) = (RunPlan::new(checked), RunPlan::new(evaluation));
        Ok(Pipeline { comm, stages, loss, plan, evaluation, options, seed: 1.0 })
    }

    /// Runs every micro-batch through every stage and back. Gradients go to `hooks`. With a schedule of forwards alone
    /// it is an [evaluation](Pipeline::evaluate).
    ///
    /// # Errors
    /// On every rank, if a stage, the loss or a hook fails on any rank. The same holds if micro-batches or targets are
    /// missing or too many, or if a shape or dtype between stages changes.
    pub fn run(&mut self, batch: MicroBatches<R>, hooks: &mut dyn StageHooks<R>) -> Result<PipelineOutput<R>> {
        let start = random_state();
        let output = self.run_or_abort(batch, hooks, false);
        let schedule = self.plan.checked.schedule();
        let draws = ScheduleRun::<R>::draws(schedule.stages(), schedule.micro_batches());
        set_random_state(RandomState { drawn: start.drawn.wrapping_add(draws), ..start });
        output
    }

    /// Runs forwards alone, without recording. Returns outputs on the rank of the last stage, and losses if there is a
    /// loss.
    ///
    /// The schedule sets the number of micro-batches. Their shapes are independent of those in training and in other
    /// evaluations. Layers that behave differently in training must be switched with [`eval`](ModuleExt::eval).
    ///
    /// # Errors
    /// Fails as [`run`](Pipeline::run). A rank that had sent all its values before another rank failed returns the
    /// error from its next call.
    pub fn evaluate(&mut self, batch: MicroBatches<R>) -> Result<PipelineOutput<R>> {
        self.evaluate_with(batch, &mut NoHooks)
    }

    /// Evaluates like [`evaluate`](Pipeline::evaluate), with hooks that gather stages.
    pub(crate) fn evaluate_with(
        &mut self,
        batch: MicroBatches<R>,
        hooks: &mut dyn StageHooks<R>,
    ) -> Result<PipelineOutput<R>> {
        let start = random_state();
        let output = self.run_or_abort(batch, hooks, true);
        set_random_state(start);
        output
    }

    /// The sum and the weight of each micro-batch's loss, on every rank, from the rank of the last stage. Blocks.
    pub fn losses(&self, output: &PipelineOutput<R>) -> Result<Vec<(f64, f64)>> {
        let own = output.losses().iter().map(|loss| Ok((loss.sum.item()?, loss.weight))).collect::<Result<Vec<_>>>();
        let own = all_ok(&self.comm, "Pipeline::losses", own)?;
        let bytes: Vec<u8> = own.iter().flat_map(|&(sum, weight)| [sum, weight]).flat_map(f64::to_le_bytes).collect();
        let all = self.comm.exchange(&bytes)?;
        let last = self.rank_of(self.schedule().stages() - 1);
        let words: Vec<f64> = all[last].as_chunks::<8>().0.iter().map(|&word| f64::from_le_bytes(word)).collect();
        Ok(words.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect())
    }

    /// A number of the rank of the last stage, on every rank. Blocks.
    pub(crate) fn of_last_stage(&self, own: f64) -> Result<f64> {
        let all = self.comm.exchange_equal(own.to_le_bytes())?;
        Ok(f64::from_le_bytes(all[self.rank_of(self.schedule().stages() - 1)]))
    }

    /// The times of every rank's actions in a [measured](PipelineOptions::measured) run, in nanoseconds from a moment
    /// at which all ranks had begun. Blocks.
    pub fn timeline(&self, output: &PipelineOutput<R>) -> Result<Timeline> {
        let line = |TimelineEvent { action, start, end }: &TimelineEvent| format!("{action} {start} {end}\n");
        let own: String = output.events.iter().map(line).collect();
        let all = self.comm.exchange(own.as_bytes())?;
        let events = |text: &Vec<u8>| String::from_utf8_lossy(text).lines().map(event).collect::<Result<Vec<_>>>();
        Ok(Timeline { ranks: all.iter().map(events).collect::<Result<_>>()? })
    }

    /// Sets the gradient from which the backward pass of every loss starts, for loss scaling. It is 1 at first. Only
    /// the rank of the last stage uses it.
    pub fn set_loss_scale(&mut self, scale: f64) {
        self.seed = scale;
    }

    /// This rank's stages, by number.
    pub fn stages(&self) -> &BTreeMap<usize, Box<dyn Stage<R>>> {
        &self.stages
    }

    /// The schedule of runs.
    pub fn schedule(&self) -> &Schedule {
        self.plan.checked.schedule()
    }

    /// The communicator.
    pub fn comm(&self) -> &Comm<R> {
        &self.comm
    }

    pub(super) fn rank_of(&self, stage: usize) -> usize {
        self.schedule().placement().rank_of(stage).unwrap_or(0)
    }

    /// Runs a batch. An error or a panic reaches the other ranks, with the action at which it happened.
    fn run_or_abort(
        &mut self,
        batch: MicroBatches<R>,
        hooks: &mut dyn StageHooks<R>,
        evaluate: bool,
    ) -> Result<PipelineOutput<R>> {
        let comm = self.comm.clone();
        let abort_at = |at: Option<Action>, error: Error| {
            match error.kind() {
                ErrorKind::Peer { .. } => abort_with(&comm, &error),
                _ => {
                    let at = at.map_or(String::new(), |action| format!("at {action}: "));
                    comm.abort(&format!("{at}{error}"));
                }
            }
            error.on_rank(comm.world_rank())
        };
        let counted = self.count(&batch);
        let plan = if evaluate { &mut self.evaluation } else { &mut self.plan };
        plan.boundaries.begin(evaluate || self.options.dynamic_shapes || plan.checked.is_forward_only());
        // In a run of forwards alone, ranks of early stages are done before those of late ones begin.
        match plan.checked.is_forward_only() {
            true => all_ok(&comm, "Pipeline::evaluate", counted)?,
            false => counted.map_err(|error| abort_at(None, error))?,
        }
        let (stages, loss, options) =
            (&self.stages, self.loss.as_mut().map(|loss| &mut **loss.get_mut()), self.options);
        let (seed, random) = (self.seed, Some(random_state()));
        let rows = set_counted_rows(None);
        let job =
            RunInputs { comm: comm.clone(), plan, stages, loss, hooks, batch, options, seed, counted: rows, random };
        let run = ScheduleRun::new(job).map(|mut step| (catch_unwind(AssertUnwindSafe(|| step.run())), step));
        set_counted_rows(rows);
        let (run, step) = run.map_err(|error| abort_at(None, error))?;
        match run {
            Ok(Ok(())) => Ok(step.into_output()),
            Ok(Err(error)) => Err(abort_at(step.at, error)),
            Err(panic) => {
                let at = step.at.map_or(String::new(), |action| format!("at {action}: "));
                comm.abort(&format!("{at}{}", panic_message(&*panic)));
                resume_unwind(panic)
            }
        }
    }

    fn count(&self, batch: &MicroBatches<R>) -> Result<()> {
        let micros = self.schedule().micro_batches();
        let last = self.schedule().stages() - 1;
        let needs = [(0, "inputs", &batch.inputs, true), (last, "targets", &batch.targets, self.loss.is_some())];
        for (stage, what, given, needed) in needs {
            if needed && self.stages.contains_key(&stage) && given.len() != micros {
                let why = format!(
                    "the schedule has {micros} micro-batches, the rank of stage {stage} was given {what} for {}",
                    given.len()
                );
                return Err(Error::schedule("Pipeline::run", why));
            }
        }
        Ok(())
    }
}

/// Checks that this rank has the stages and the loss that the schedule requires.
fn fit<R: Runtime>(comm: &Comm<R>, PipelineModel { checked, stages, loss, .. }: &PipelineModel<R>) -> Result<()> {
    let refuse = |why: String| Err(Error::schedule("Pipeline::new", why));
    let (placement, rank) = (checked.schedule().placement(), comm.rank());
    if placement.ranks() != comm.size() {
        return refuse(format!("the schedule is for {} ranks, there are {}", placement.ranks(), comm.size()));
    }
    let mut given: Vec<usize> = stages.iter().map(|(stage, _)| *stage).collect();
    given.sort_unstable();
    let wanted: Vec<usize> = placement.stages_on(rank).collect();
    if given != wanted {
        return refuse(format!("stages {wanted:?} live on rank {rank}, it was given {given:?}"));
    }
    let last = placement.stages() - 1;
    if wanted.contains(&last) && loss.is_none() && !checked.is_forward_only() {
        return refuse(format!("the rank of the last stage, {last}, has no loss"));
    }
    let mut owners: HashMap<usize, (usize, String)> = HashMap::new();
    for (stage, module) in stages {
        for (name, parameter) in module.named_parameters() {
            let leaf = parameter.leaf().id();
            if let Some((other, first)) = owners.get(&leaf) {
                return refuse(format!(
                    "stages {other} and {stage} share a parameter, `{first}` and `{name}`: give each its own and tie them"
                ));
            }
            owners.insert(leaf, (*stage, name));
        }
    }
    Ok(())
}

/// A schedule of the same stages and micro-batches without backward.
fn evaluation(checked: &Checked) -> Result<Checked> {
    let schedule = Schedule::forward_only(checked.schedule().placement(), checked.schedule().micro_batches())?;
    let lowering = Lowering { sharded: checked.is_sharded(), ..Lowering::default() };
    schedule.lower(lowering.clone())?.check(Limits::default())
}

impl<R: Runtime> PipelineModel<R> {
    /// A hash of schedule and options: complete schedules of many ranks are too long to send to all of them.
    pub(crate) fn fingerprint(&self) -> [u8; 8] {
        let (schedule, options, mut hash) = (self.checked.schedule(), self.options, Fnv1a::new());
        let mut add = |text: String| {
            hash.write(text.as_bytes());
            hash.write(&[0]);
        };
        add(format!("{:?} {} {options:?}", schedule.placement(), schedule.micro_batches()));
        schedule.actions().for_each(|(rank, _, action)| add(format!("{rank} {action}")));
        hash.finish().to_le_bytes()
    }
}

/// Parses a line of a rank's timeline.
fn event(line: &str) -> Result<TimelineEvent> {
    let mut words = line.rsplitn(3, ' ');
    let (end, start, action) = (words.next(), words.next(), words.next());
    let number = |word: Option<&str>| word.and_then(|word| word.parse().ok());
    match (action.map(str::parse::<Action>), number(start), number(end)) {
        (Some(action), Some(start), Some(end)) => Ok(TimelineEvent { action: action?, start, end }),
        _ => Err(Error::format("a measured action", format!("cannot read `{line}`"))),
    }
}
