//! Resuming from a checkpoint: the notes that are saved beside the training step, and their restoration.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use distributed::{
    checkpoint::{CheckpointPart, Checkpointed, Wanted},
    train::CheckpointNotes,
};
use numcore::{Error, Result, Runtime, Tensor, Within};

use crate::{Callback, CallbackState, control::Selection, replay::LogPlace, run::RunState, sink::Value};

/// The checkpoint from which a run goes on.
///
/// A checkpoint that must be there and is not is an error of kind [`Io`](numcore::ErrorKind::Io) that names the folder.
/// Its source has the kind [`NotFound`](std::io::ErrorKind::NotFound).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Resume {
    /// No checkpoint: the run starts from scratch.
    #[default]
    No,
    /// The checkpoint of the latest step in the folders of all callbacks that save, if there is one. An error if no
    /// callback saves.
    IfThere,
    /// The checkpoint of [`IfThere`](Resume::IfThere); it is an error if there is none.
    Required,
    /// The last checkpoint in this folder, an error if there is none. The run saves in the folders of its own
    /// callbacks.
    From(PathBuf),
}

/// Keys of the loop in the notes of a checkpoint.
const DATA: &str = "trainer/data";
const TOKENS: &str = "trainer/tokens";
const ELAPSED: &str = "trainer/elapsed";
const CHECKED: &str = "trainer/checked";
const OWES_EVALUATION: &str = "trainer/owes_evaluation";
const OWES_SAVE: &str = "trainer/owes_save";
const EVALUATED: &str = "trainer/evaluated/";
const CALLBACK: &str = "callback/";

/// The callbacks of a run.
pub(crate) type Callbacks<'a, R, M, B> = Vec<Box<dyn Callback<R, M, B> + 'a>>;

/// Makes the notes of a checkpoint: the state of loop and callbacks, and the place in the log of the run.
pub(crate) fn notes<R: Runtime, M, B>(
    state: &RunState,
    data: String,
    log: Option<LogPlace>,
    callbacks: &Callbacks<'_, R, M, B>,
) -> CheckpointNotes {
    let mut notes = CheckpointNotes::from([
        (DATA.into(), data),
        (TOKENS.into(), state.progress.tokens.to_string()),
        (ELAPSED.into(), state.progress.elapsed.as_nanos().to_string()),
        (CHECKED.into(), state.checked.as_nanos().to_string()),
    ]);
    notes.extend(log.map(|place| (LogPlace::NOTE.into(), place.to_string())));
    if state.owes_evaluation {
        notes.insert(OWES_EVALUATION.into(), String::new());
    }
    if let Some(which) = state.owes_save {
        notes.insert(OWES_SAVE.into(), if which == Selection::All { "all" } else { "due" }.into());
    }
    notes.extend(state.evaluated.iter().map(|(name, value)| (format!("{EVALUATED}{name}"), value.to_string())));
    for (prefix, callback) in prefixes(callbacks).into_iter().zip(callbacks) {
        notes.insert(prefix.clone(), String::new());
        notes.extend(callback.state().into_iter().map(|(key, value)| (format!("{prefix}{key}"), value)));
    }
    notes
}

/// The parsed notes of a checkpoint, read before anything is changed.
pub(crate) struct ResumedNotes {
    pub data: String,
    /// The place in the log of the run.
    pub log: Option<LogPlace>,
    tokens: f64,
    pub elapsed: Duration,
    /// The time up to which intervals of time were checked.
    pub checked: Duration,
    pub owes_evaluation: bool,
    pub owes_save: Option<Selection>,
    evaluated: BTreeMap<String, f64>,
    notes: CheckpointNotes,
    /// True if the checkpoint has averages of weights, and the run none.
    pub drops_averages: bool,
}

impl ResumedNotes {
    pub(crate) fn read(notes: &CheckpointNotes) -> Result<Self> {
        let text = |key: &str| {
            let why = "is missing in the notes of the checkpoint; was it saved by a `Trainer`?";
            notes.get(key).ok_or_else(|| Error::state(key, why))
        };
        let wrong = |key: &str, text: &str| Error::state(key, format!("is no number: `{text}`"));
        let number = |key: &str, text: &str| text.parse::<f64>().map_err(|_| wrong(key, text));
        let nanos = |key: &str| {
            let text = text(key)?;
            text.parse().map(Duration::from_nanos).map_err(|_| wrong(key, text))
        };
        let evaluated = notes.iter().filter_map(|(key, value)| Some((key.strip_prefix(EVALUATED)?, value)));
        let evaluated = evaluated.map(|(name, value)| Ok((name.into(), number(name, value)?)));
        Ok(ResumedNotes {
            data: text(DATA)?.clone(),
            log: LogPlace::of(notes),
            tokens: number(TOKENS, text(TOKENS)?)?,
            elapsed: nanos(ELAPSED)?,
            checked: nanos(CHECKED)?,
            owes_evaluation: notes.contains_key(OWES_EVALUATION),
            owes_save: notes.get(OWES_SAVE).map(|which| if which == "due" { Selection::Due } else { Selection::All }),
            evaluated: evaluated.collect::<Result<_>>()?,
            notes: notes.clone(),
            drops_averages: false,
        })
    }

    /// Restores loop and callbacks. A callback that was not there when the checkpoint was saved keeps its first state.
    pub(crate) fn restore<R: Runtime, M, B>(
        self,
        state: &mut RunState,
        callbacks: &mut Callbacks<'_, R, M, B>,
    ) -> Result<()> {
        state.progress.tokens = self.tokens;
        state.progress.elapsed = self.elapsed;
        state.evaluated = self.evaluated;
        if self.drops_averages {
            state.measure("averages", Value::Text("of the checkpoint are dropped: the run has none".into()));
        }
        for (prefix, callback) in prefixes(callbacks).into_iter().zip(callbacks) {
            let own = self.notes.iter().filter_map(|(k, v)| Some((k.strip_prefix(&prefix)?.to_string(), v.clone())));
            let mut own: CallbackState = own.collect();
            // A callback that was there without state has only its name in the notes.
            let was_there = own.remove("").is_some() || !own.is_empty();
            if was_there {
                callback.restore(&own)?;
            }
        }
        Ok(())
    }
}

/// The prefixes of each callback's keys in the notes: callbacks of one name are numbered.
fn prefixes<R: Runtime, M, B>(callbacks: &Callbacks<'_, R, M, B>) -> Vec<String> {
    let names: Vec<&str> = callbacks.iter().map(|callback| callback.name()).collect();
    let nth = |i: usize| names[..i].iter().filter(|name| **name == names[i]).count();
    // Slashes within names are replaced, so no prefix begins with another.
    (0..names.len()).map(|i| format!("{CALLBACK}{}/{}/", names[i].replace('/', "."), nth(i))).collect()
}

/// Parses the value of `key` in a callback's state, which [`Callback::state`] wrote with `to_string`.
///
/// # Errors
/// An error if the key is missing, or its text is no `T`.
#[track_caller]
pub fn parsed<T: std::str::FromStr>(state: &CallbackState, key: &str) -> Result<T> {
    let text = state.get(key).ok_or_else(|| Error::state(key, "is missing in the checkpoint's notes")).at_caller()?;
    text.parse().map_err(|_| Error::state(key, format!("cannot be `{text}`"))).at_caller()
}

/// Several states that are saved in one checkpoint; the first is the training step.
pub(crate) struct CombinedState<'c, R: Runtime>(pub Vec<&'c mut dyn Checkpointed<R>>);

impl<R: Runtime> Checkpointed<R> for CombinedState<'_, R> {
    fn parts(&self) -> Result<Vec<CheckpointPart<R>>> {
        let parts = self.0.iter().map(|each| each.parts()).collect::<Result<Vec<_>>>()?;
        Ok(parts.into_iter().flatten().collect())
    }

    fn parameter_parts(&self) -> Result<Vec<CheckpointPart<R>>> {
        self.0.first().map_or_else(|| Ok(Vec::new()), |step| step.parameter_parts())
    }

    fn numbers(&self) -> BTreeMap<String, u64> {
        self.0.iter().flat_map(|each| each.numbers()).collect()
    }

    fn expect(&mut self, numbers: &BTreeMap<String, u64>) {
        self.0.iter_mut().for_each(|each| each.expect(numbers));
    }

    fn wanted(&self) -> Result<Vec<Wanted>> {
        let wanted = self.0.iter().map(|each| each.wanted()).collect::<Result<Vec<_>>>()?;
        Ok(wanted.into_iter().flatten().collect())
    }

    fn check_restore(&mut self, numbers: &BTreeMap<String, u64>) -> Result<()> {
        self.0.iter_mut().try_for_each(|each| each.check_restore(numbers))
    }

    fn restore(
        &mut self,
        read: &mut dyn FnMut(&Wanted) -> Result<Tensor<R>>,
        numbers: &BTreeMap<String, u64>,
    ) -> Result<()> {
        self.0.iter_mut().try_for_each(|each| each.restore(read, numbers))
    }
}
