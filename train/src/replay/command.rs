//! Replays that a command asks a program for, by a variable of its environment.

use numcore::{Error, Result};
use serde_json::{Value, json};

use super::{ReplayedStep, StepReplay};

/// The variable with the replay, as JSON.
const VARIABLE: &str = "WEFTGRAD_REPLAY";

impl StepReplay {
    /// The replay that `weftgrad-replay` asks this process for; none if it was not started by it. `weftgrad::Launcher`
    /// runs its program so.
    ///
    /// # Errors
    /// An error if the variable `WEFTGRAD_REPLAY` is not one that [`variable`](StepReplay::variable) gave.
    pub fn from_env() -> Result<Option<Self>> {
        let Some(text) = std::env::var_os(VARIABLE) else { return Ok(None) };
        let text = text.to_string_lossy();
        let parsed = || {
            let value: Value = serde_json::from_str(&text).ok()?;
            let number = |name: &str| value[name].as_u64().and_then(|number| usize::try_from(number).ok());
            let replay = StepReplay::of(value["folder"].as_str()?, value["step"].as_u64()?);
            let scratch = value["scratch"].as_str().map_or_else(|| replay.scratch.clone(), Into::into);
            let (values_of, shown, attempt) = (number("call"), number("rank"), number("attempt"));
            Some(StepReplay { values_of, shown, attempt, scratch, ..replay })
        };
        let why = || Error::config("StepReplay", VARIABLE, format!("`{text}` is none; run `weftgrad-replay`"));
        parsed().ok_or_else(why).map(Some)
    }

    /// The name and the value of the variable by which a process is asked for this replay.
    pub fn variable(&self) -> (&'static str, String) {
        let StepReplay { folder, step, attempt, values_of, shown, scratch, .. } = self;
        let folder = std::path::absolute(folder).unwrap_or_else(|_| folder.clone());
        let (folder, scratch) = (folder.to_string_lossy(), scratch.to_string_lossy());
        let value = json!({
            "folder": folder, "step": step, "attempt": attempt, "call": values_of, "rank": shown, "scratch": scratch,
        });
        (VARIABLE, value.to_string())
    }

    /// The text that shows a replayed step: its ranks, the call in which NaN begins, the chosen call, and the calls of
    /// the chosen rank.
    pub fn text(&self, step: &ReplayedStep) -> String {
        let call =
            self.values_of.map_or(String::new(), |call| step.show_call(self.shown.unwrap_or(0), call).to_string());
        let rank = self.shown.map_or(String::new(), |rank| step.show_rank(rank).to_string());
        format!("{step}{call}{rank}")
    }
}
