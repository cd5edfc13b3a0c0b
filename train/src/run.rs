//! A run as its callbacks see it.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use data::Batch;
use distributed::{
    checkpoint::Checkpointed,
    comm::{Collectives, Comm},
    strategy::StepRanks,
    train::WeightedSum,
};
use numcore::{Error, Result, Runtime};

use crate::{BestValue, Control, Interval, Length, Progress, callbacks::interrupt, control::Which, sink::Value};

/// A run as its callbacks see it: how far it is, what was measured, and what they can request.
pub struct Run<'r, R: Runtime, M, B> {
    pub(crate) model: &'r M,
    pub(crate) engine: &'r mut dyn RunEngine<R, M, B>,
    pub(crate) state: &'r mut RunState,
}

/// What a run remembers from step to step.
#[derive(Clone, Debug)]
pub(crate) struct RunState {
    pub progress: Progress,
    /// Where the step began that was taken last.
    pub before: Progress,
    pub length: Length,
    pub control: Control,
    /// What the next record is given, in the order of recording.
    pub measured: Vec<(String, Value)>,
    /// The last values of evaluations, by name.
    pub evaluated: BTreeMap<String, f64>,
    /// Evaluations that have not run yet, with the names that they are known to give.
    pub to_come: BTreeMap<String, Vec<String>>,
    /// Names that evaluations are known to give.
    pub declared: BTreeSet<String>,
    /// When the run is over: the best values of what decisions looked at.
    pub best: BTreeMap<String, BestValue>,
    /// Names of values that decisions need.
    pub monitored: BTreeSet<String>,
    /// Whether ranks may leave and join.
    pub is_elastic: bool,
    /// Whether the folders of callbacks must be empty: the run does not go on from one of them.
    pub from_scratch: bool,
    /// Values of the evaluations that run now.
    pub fresh: Vec<(String, f64)>,
    pub is_record_due: bool,
    pub fast_dev_run: bool,
    pub resumed: Option<u64>,
    /// Whether all evaluations were requested in the step in which a signal came: they run when the run is resumed.
    pub owes_evaluation: bool,
    /// Which callbacks were to save in the step of a commit.
    pub owes_save: Option<Which>,
    /// The clock that intervals are checked against: it stands still within a step.
    pub checked: Duration,
    /// Time spent waiting for data, in seconds.
    pub data_wait: f64,
}

/// The training step and the loss function, whatever their types.
pub(crate) trait RunEngine<R: Runtime, M, B> {
    fn ranks(&self) -> &StepRanks<R>;
    fn state(&mut self) -> &mut dyn Checkpointed<R>;
    /// Sum and weight of this rank's losses of a batch.
    fn evaluate(&mut self, model: &M, batch: &Batch<B>) -> Result<WeightedSum>;
}

impl<'r, R: Runtime, M, B> Run<'r, R, M, B> {
    /// The model.
    pub fn model(&self) -> &'r M {
        self.model
    }

    /// The ranks that take part.
    pub fn comm(&self) -> &Comm<R> {
        &self.engine.ranks().everyone
    }

    /// How far the run is.
    pub fn progress(&self) -> &Progress {
        &self.state.progress
    }

    /// Whether the step that has ended counts as one: on all ranks alike.
    pub(crate) fn has_stepped(&self) -> bool {
        self.state.progress.step > self.state.before.step
    }

    /// How long it is to be.
    pub fn length(&self) -> &Length {
        &self.state.length
    }

    /// Makes the run of another length, from the end of this step on; in [`Ending`](crate::Event::Ending), a longer one goes on. All ranks call it at the same point, with the
    /// same length, so what decides it must be equal on all of them: the [progress](Run::progress) is. Checkpoints do not keep the length; a callback that has chosen one keeps it, and sets it again in
    /// [`Begin`](crate::Event::Begin).
    ///
    /// # Errors
    /// If no run can have this length, ranks give different ones, or the length is in tokens and nothing has counted them so far.
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

    /// Whether this run only tries whether everything works.
    pub fn is_fast_dev_run(&self) -> bool {
        self.state.fast_dev_run
    }

    /// Whether the step that was taken last has completed an interval; in [`Skipped`](crate::Event::Skipped), whether the batches that were left out have.
    pub fn is_due(&self, interval: &Interval) -> bool {
        self.state.is_due(interval)
    }

    /// Whether the measurements of the step that was taken last are given to sinks: what costs time to measure is measured then.
    pub fn is_record_due(&self) -> bool {
        self.state.is_record_due
    }

    /// What this rank requests: to stop, to save, to evaluate, to skip. All ranks do what one requests.
    pub fn control(&mut self) -> &mut Control {
        &mut self.state.control
    }

    /// Measures something: sinks are given it with what else this step measured. A name that was used in this step already gets the new value.
    /// What rank 0 measures is written.
    pub fn record(&mut self, name: &str, value: f64) {
        self.record_value(name, Value::Scalar(value));
    }

    /// Records text: a sample that the model wrote.
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

    /// Says in [`Begin`](crate::Event::Begin) that an evaluation will run, and the names of what it will give, as far as they are known: a
    /// [`Monitor`](crate::Monitor) whose name none of them gives is an error once all have run.
    pub fn declare_evaluation(&mut self, evaluation: &str, names: impl IntoIterator<Item = String>) {
        let names: Vec<String> = names.into_iter().collect();
        self.state.declared.extend(names.iter().cloned());
        self.state.to_come.insert(evaluation.into(), names);
    }

    /// Says that a declared evaluation has run.
    pub fn evaluation_ran(&mut self, evaluation: &str) {
        self.state.to_come.remove(evaluation);
    }

    /// Whether an evaluation gives a value of this name, or may do so when it runs for the first time.
    pub(crate) fn may_be_evaluated(&self, name: &str) -> bool {
        let RunState { evaluated, declared, to_come, .. } = &*self.state;
        evaluated.contains_key(name) || declared.contains(name) || !to_come.is_empty()
    }

    /// Whether a signal came on any rank; the run looks for it at the end of each step, and this is for what takes long within one. All ranks call it at the same point.
    pub(crate) fn is_interrupted(&self) -> Result<bool> {
        let all = self.comm().exchange_equal([u8::from(interrupt::is_asked())])?;
        Ok(all.iter().any(|[asked]| *asked != 0))
    }

    /// How long the step that was taken last waited for data, in seconds.
    pub fn data_wait(&self) -> f64 {
        self.state.data_wait
    }

    /// Everything the training step keeps in checkpoints.
    pub fn step_state(&mut self) -> &mut dyn Checkpointed<R> {
        self.engine.state()
    }

    /// Gives a value of an evaluation, which must be equal on all ranks: reduced over them.
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
    /// A run at its beginning.
    pub fn new(length: Length, epoch_len: u64, fast_dev_run: bool) -> Self {
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
            monitored: BTreeSet::new(),
            is_elastic: false,
            from_scratch: true,
            fresh: Vec::new(),
            is_record_due: false,
            fast_dev_run,
            resumed: None,
            owes_evaluation: false,
            owes_save: None,
            checked: Duration::ZERO,
            data_wait: 0.0,
        }
    }

    /// An error if decisions need a value, and no callback has said that it evaluates.
    pub fn check_evaluations(&self) -> Result<()> {
        let Some(name) = self.monitored.first().filter(|_| self.to_come.is_empty()) else { return Ok(()) };
        let why = format!(
            "nothing in this run evaluates, so `{name}` has no value: add `.with(Evaluate::on(..))`, or have the callback that measures it say so in `Begin` by `Run::declare_evaluation`"
        );
        Err(Error::config("Monitor", "name", why))
    }

    /// An error if decisions needed a value, and the run has come to its end without the evaluation that gives it.
    pub fn check_evaluated(&self) -> Result<()> {
        let is_to_come = |name: &String| match self.to_come.values().flatten().any(|given| given == name) {
            true => true,
            false => !self.declared.contains(name) && !self.to_come.is_empty(),
        };
        let never = |name: &&String| !self.evaluated.contains_key(*name) && is_to_come(name);
        let Some(name) = self.monitored.iter().find(never) else { return Ok(()) };
        let why = format!(
            "the run is over, and no evaluation that gives `{name}` has run: evaluate more often (`Evaluate::every`), or at the end (`Evaluate::at_end`)"
        );
        Err(Error::config("Monitor", "name", why))
    }

    /// Whether an interval was completed since `before`.
    pub fn is_due(&self, interval: &Interval) -> bool {
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
