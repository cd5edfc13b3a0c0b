//! A run as its callbacks see it.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    iter,
    sync::Arc,
    time::Duration,
};

use data::Batch;
use distributed::{
    checkpoint::Checkpointed,
    combinations::{Feature, Features},
    comm::{Collectives, Comm},
    strategy::StepRanks,
    train::{StepProperties, WeightedSum},
};
use nn::{Module, ModuleExt};
use numcore::{Error, Result, Runtime};

use crate::{Control, Interval, Length, Progress, control::Selection, interrupt, replay::ReplayedLeg, sink::Value};

/// The view of a training run that [callbacks](crate::Callback) receive: its model, communicator, progress and
/// measurements. Callbacks record values with it, and request stops, saves and evaluations. `M` is the type of the
/// model, `B` that of a batch's data.
pub struct Run<'r, R: Runtime, M, B> {
    pub(crate) model: &'r M,
    pub(crate) engine: &'r mut dyn RunEngine<R, M, B>,
    pub(crate) state: &'r mut RunState,
}

/// The state of a run that stays from step to step.
#[derive(Clone, Debug)]
pub(crate) struct RunState {
    pub progress: Progress,
    /// The progress before the last step.
    pub before: Progress,
    pub length: Length,
    pub control: Control,
    /// The measurements for the next record, in the order of recording.
    pub measured: Vec<(String, Value)>,
    /// The last values of evaluations, by name.
    pub evaluated: BTreeMap<String, f64>,
    /// Evaluations that have not run yet, with the names of values that they declared.
    pub to_come: BTreeMap<String, Vec<String>>,
    /// All names of values that evaluations declared.
    pub declared: BTreeSet<String>,
    /// The best monitored values; filled when the run is over.
    pub best: BTreeMap<String, BestValue>,
    /// The weights that callbacks give the model at the end.
    pub at_end: Features,
    /// Names of values that decisions need.
    pub monitored: BTreeSet<String>,
    /// True if ranks may leave and join.
    pub is_elastic: bool,
    /// True if the folders of callbacks must be empty: the run does not go on from one of them.
    pub from_scratch: bool,
    /// Values of the evaluations that run now.
    pub fresh: Vec<(String, f64)>,
    pub is_record_due: bool,
    pub fast_dev_run: bool,
    /// False if nothing is saved: in a dry run, and in a replay.
    pub saves: bool,
    pub resumed: Option<u64>,
    /// True if all evaluations were requested in the step in which a signal came: they run when the run is resumed.
    pub owes_evaluation: bool,
    /// The callbacks that were to save in the step of a commit.
    pub owes_save: Option<Selection>,
    /// The clock that intervals are checked against: it stands still within a step.
    pub checked: Duration,
    /// The time spent waiting for data in the last step, in seconds.
    pub data_wait: f64,
}

/// The best value of a [`Monitor`](crate::Monitor) in a run so far, and the step at which it was measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BestValue {
    /// The step of the measurement.
    pub step: u64,
    /// The value.
    pub value: f64,
}

/// The training step and the loss function, whatever their types.
pub(crate) trait RunEngine<R: Runtime, M, B> {
    fn ranks(&self) -> &StepRanks<R>;
    fn properties(&self) -> StepProperties;
    /// The modules that the training step holds itself.
    fn modules(&self) -> Vec<&dyn Module<R>>;
    fn state(&mut self) -> &mut dyn Checkpointed<R>;
    /// Sum and weight of this rank's losses of a batch.
    fn evaluate(&mut self, model: &M, batch: &Batch<B>) -> Result<WeightedSum>;
}

impl<'r, R: Runtime, M, B> Run<'r, R, M, B> {
    /// The model that the trainer was given.
    pub fn model(&self) -> &'r M {
        self.model
    }

    /// Tells whether steps of an earlier run are taken again, by [`StepReplay`](crate::StepReplay). A callback that
    /// writes files leaves them as they are then.
    pub fn is_replay(&self) -> bool {
        ReplayedLeg::is_here()
    }

    /// The communicator of all ranks that train.
    pub fn comm(&self) -> &Comm<R> {
        &self.engine.ranks().everyone
    }

    /// Features of the training step.
    pub(crate) fn features(&self) -> Features {
        self.engine.properties().features
    }

    /// The copies of tied parameters on this rank, by the ids of leaves: the parameters' names in checkpoints.
    pub(crate) fn copies(&self) -> Arc<HashMap<usize, String>> {
        self.engine.properties().copies
    }

    /// The model, and the modules that the training step holds itself.
    pub(crate) fn modules(&self) -> Vec<&dyn Module<R>>
    where
        M: Module<R>,
    {
        iter::once(self.model as &dyn Module<R>).chain(self.engine.modules()).collect()
    }

    /// An error, with the reason, if the run cannot end with other weights. Either the training step excludes the
    /// feature, or this run has no module with parameters.
    pub(crate) fn check_end(&mut self, feature: Feature, op: &'static str) -> Result<()>
    where
        M: Module<R>,
    {
        self.state.at_end = self.state.at_end.and(feature);
        self.features().union(self.state.at_end).check(op)?;
        if self.engine.modules().is_empty() && self.model.parameters().is_empty() {
            return Err(Error::config(
                op,
                feature.name(),
                "the model of this run has no parameters: give it to the trainer",
            ));
        }
        Ok(())
    }

    /// The progress of the run.
    pub fn progress(&self) -> &Progress {
        &self.state.progress
    }

    /// Tells whether the last step made an update, on all ranks alike.
    pub(crate) fn has_stepped(&self) -> bool {
        self.state.progress.step > self.state.before.step
    }

    /// The length at which the run ends, in updates, epochs, tokens or seconds:
    /// [`Trainer::until`](crate::Trainer::until), or the last [`set_length`](Run::set_length).
    pub fn length(&self) -> &Length {
        &self.state.length
    }

    /// Sets another length of the run, from the end of this step on; a longer one set in
    /// [`Ending`](crate::Event::Ending) lets the run go on. All ranks call it at one point with equal lengths, so it
    /// may depend only on values that are equal on all. The [progress](Run::progress) is such a value. Checkpoints do
    /// not keep the length; a callback that has chosen one keeps it, and sets it again in
    /// [`Begin`](crate::Event::Begin).
    ///
    /// # Errors
    /// An error if no run can have this length or lengths differ between ranks. Also if the length is in tokens and the
    /// old one is not.
    pub fn set_length(&mut self, length: Length) -> Result<()> {
        length.check()?;
        self.comm().agree("the length of the run", format!("{length:?}").as_bytes())?;
        if length.counts_tokens() && !self.state.length.counts_tokens() {
            let why = "a length in tokens must be given to `Trainer::until`, so that tokens are counted from the first step on";
            return Err(Error::config("Run", "set_length", why));
        }
        self.state.length = length;
        Ok(())
    }

    /// The step it was resumed at, if it was.
    pub fn resumed(&self) -> Option<u64> {
        self.state.resumed
    }

    /// Tells whether this is a dry run ([`Trainer::fast_dev_run`](crate::Trainer::fast_dev_run)).
    pub fn is_fast_dev_run(&self) -> bool {
        self.state.fast_dev_run
    }

    /// Tells whether the last step has completed an interval; in [`Skipped`](crate::Event::Skipped), whether the
    /// skipped batches have.
    pub fn is_due(&self, interval: &Interval) -> bool {
        self.state.is_due(interval)
    }

    /// Tells whether the last step's measurements go to sinks: values that cost time are measured then.
    pub fn is_record_due(&self) -> bool {
        self.state.is_record_due
    }

    /// The requests of this rank: to stop, to save, to evaluate, to skip. A request of one rank is done by all.
    pub fn control(&mut self) -> &mut Control {
        &mut self.state.control
    }

    /// Records a number, which sinks receive with the other measurements of this step. A name that was used in this
    /// step already gets the new value. Sinks are on rank 0, so other ranks' records are dropped.
    pub fn record(&mut self, name: &str, value: f64) {
        self.record_value(name, Value::Scalar(value));
    }

    /// Records text, such as a sample that the model wrote.
    pub fn record_text(&mut self, name: &str, text: impl Into<String>) {
        self.record_value(name, Value::Text(text.into()));
    }

    fn record_value(&mut self, name: &str, value: Value) {
        self.state.measure(name, value);
    }

    /// The last value of an evaluation's measurement, such as `validation/loss`.
    pub fn evaluated(&self, name: &str) -> Option<f64> {
        self.state.evaluated.get(name).copied()
    }

    /// Declares in [`Begin`](crate::Event::Begin) that an evaluation will run, and the known names of its values. A
    /// [`Monitor`](crate::Monitor) of a name that no evaluation gives is an error once all have run.
    pub fn declare_evaluation(&mut self, evaluation: &str, names: impl IntoIterator<Item = String>) {
        let names: Vec<String> = names.into_iter().collect();
        self.state.declared.extend(names.iter().cloned());
        self.state.to_come.insert(evaluation.into(), names);
    }

    /// Marks a declared evaluation as run.
    pub fn evaluation_ran(&mut self, evaluation: &str) {
        self.state.to_come.remove(evaluation);
    }

    /// Tells whether an evaluation gives a value of this name, or may do so when it runs for the first time.
    pub(crate) fn may_be_evaluated(&self, name: &str) -> bool {
        let RunState { evaluated, declared, to_come, .. } = &*self.state;
        evaluated.contains_key(name) || declared.contains(name) || !to_come.is_empty()
    }

    /// Tells whether a signal came on any rank. The run checks this at the end of each step; long work within a step
    /// calls it too, on all ranks at the same point.
    pub(crate) fn is_interrupted(&self) -> Result<bool> {
        let all = self.comm().exchange_equal([u8::from(interrupt::is_signaled())])?;
        Ok(all.iter().any(|[asked]| *asked != 0))
    }

    /// The time that the last step waited for data, in seconds.
    pub fn data_wait(&self) -> f64 {
        self.state.data_wait
    }

    /// The training step's state, as checkpoints hold it.
    pub fn step_state(&mut self) -> &mut dyn Checkpointed<R> {
        self.engine.state()
    }

    /// Records a value of an evaluation, which must be reduced over ranks and thus equal on all.
    pub fn evaluation_value(&mut self, name: &str, value: f64) {
        self.state.evaluated.insert(name.into(), value);
        match self.state.fresh.iter_mut().find(|(known, _)| known == name) {
            Some(known) => known.1 = value,
            None => self.state.fresh.push((name.into(), value)),
        }
        self.record(name, value);
    }
}

impl RunState {
    /// The state of a run at its beginning.
    pub(crate) fn new(length: Length, epoch_len: u64, fast_dev_run: bool) -> Self {
        let progress = Progress { epoch_len, ..Progress::default() };
        RunState {
            progress,
            before: progress,
            length,
            control: Control::default(),
            measured: Vec::new(),
            evaluated: BTreeMap::new(),
            to_come: BTreeMap::new(),
            declared: BTreeSet::new(),
            best: BTreeMap::new(),
            at_end: Features::default(),
            monitored: BTreeSet::new(),
            is_elastic: false,
            from_scratch: true,
            fresh: Vec::new(),
            is_record_due: false,
            fast_dev_run,
            saves: !fast_dev_run,
            resumed: None,
            owes_evaluation: false,
            owes_save: None,
            checked: Duration::ZERO,
            data_wait: 0.0,
        }
    }

    /// Checks that a callback evaluates, if decisions need a value.
    pub(crate) fn check_evaluations(&self) -> Result<()> {
        let Some(name) = self.monitored.first().filter(|_| self.to_come.is_empty()) else { return Ok(()) };
        let why = format!(
            "nothing in this run evaluates, so `{name}` has no value: add `.with(Evaluate::on(..))`, or declare it in `Begin` by `Run::declare_evaluation`"
        );
        Err(Error::config("Monitor", "name", why))
    }

    /// Checks at the end that the evaluations of all values that decisions needed have run.
    pub(crate) fn check_evaluated(&self) -> Result<()> {
        let is_to_come = |name: &String| match self.to_come.values().flatten().any(|given| given == name) {
            true => true,
            false => !self.declared.contains(name) && !self.to_come.is_empty(),
        };
        let never = |name: &&String| !self.evaluated.contains_key(*name) && is_to_come(name);
        let Some(name) = self.monitored.iter().find(never) else { return Ok(()) };
        let why = format!(
            "the run is over, and no evaluation that gives `{name}` has run: evaluate more often (`Evaluate::every`), or at the end (without `Evaluate::skip_end`)"
        );
        Err(Error::config("Monitor", "name", why))
    }

    /// Tells whether an interval was completed since `before`.
    pub(crate) fn is_due(&self, interval: &Interval) -> bool {
        let now = Progress { elapsed: self.checked, ..self.progress };
        interval.is_due(&self.before, &now, &self.length)
    }

    pub(crate) fn measure(&mut self, name: &str, value: Value) {
        match self.measured.iter_mut().find(|(known, _)| known == name) {
            Some(known) => known.1 = value,
            None => self.measured.push((name.into(), value)),
        }
    }
}
