//! Looking at how far ranks go apart between meetings.

use numcore::{Error, Result, Runtime};

use crate::{Callback, CallbackState, Event, Run, parsed};

/// Records how far ranks that [train by themselves](distributed::local_updates) had gone apart at each meeting, as `divergence`: the largest
/// distance of a rank's weights from the new ones, over the norm of these. Where it has risen three meetings in a row, and is above a threshold, the run ends:
/// ranks should meet more often, or learn more slowly.
///
/// Ranks that never meet in full ([`ElasticAveraging`](distributed::local_updates::ElasticAveraging)) are farther apart: 0.3 is a threshold there.
#[derive(Clone, Debug)]
pub struct DivergenceGuard {
    threshold: f64,
    ends: bool,
    /// The number of the last meeting that was looked at, and its divergence.
    seen: Option<(u64, f64)>,
    /// Meetings in a row of which each was further apart than the one before.
    rising: u64,
}

/// Meetings in a row that are too many to rise in.
const RISING: u64 = 3;

impl DivergenceGuard {
    /// Ends a run at a divergence above `threshold` that has risen three times in a row; 0.05 is usual.
    pub fn above(threshold: f64) -> Self {
        DivergenceGuard { threshold, ends: true, seen: None, rising: 0 }
    }

    /// Records alone.
    pub fn recording() -> Self {
        DivergenceGuard { ends: false, ..DivergenceGuard::above(f64::INFINITY) }
    }

    /// Why the run is to end after a meeting, if it is.
    fn judge(&mut self, number: u64, divergence: f64) -> Option<String> {
        let rises = self.seen.is_some_and(|(_, before)| divergence > before);
        self.rising = if rises { self.rising + 1 } else { 0 };
        self.seen = Some((number, divergence));
        (self.ends && self.rising >= RISING && divergence > self.threshold).then(|| {
            let threshold = self.threshold;
            format!("ranks went {divergence:.3} apart, further in each of {RISING} meetings, and {threshold} is allowed: meet more often")
        })
    }
}

impl<R: Runtime, M, B> Callback<R, M, B> for DivergenceGuard {
    fn on(&mut self, event: &Event<'_, R>, run: &mut Run<'_, R, M, B>) -> Result<()> {
        if !matches!(event, Event::StepEnd(_)) {
            return Ok(());
        }
        let Some(meeting) = run.last_meeting() else { return Ok(()) };
        if self.seen.is_some_and(|(number, _)| number == meeting.number) {
            return Ok(());
        }
        run.record("divergence", meeting.divergence);
        if let Some(why) = self.judge(meeting.number, meeting.divergence) {
            run.control().stop(why);
        }
        Ok(())
    }

    fn name(&self) -> &str {
        "divergence-guard"
    }

    fn state(&self) -> CallbackState {
        let mut state = CallbackState::from([("rising".into(), self.rising.to_string())]);
        if let Some((number, divergence)) = self.seen {
            state.insert("meeting".into(), number.to_string());
            state.insert("divergence".into(), divergence.to_string());
        }
        state
    }

    fn restore(&mut self, state: &CallbackState) -> Result<()> {
        self.rising = parsed(state, "rising")?;
        let seen = || Ok::<_, Error>((parsed(state, "meeting")?, parsed(state, "divergence")?));
        self.seen = state.contains_key("meeting").then(seen).transpose()?;
        Ok(())
    }

    fn check(&self) -> Result<()> {
        if self.threshold > 0.0 {
            return Ok(());
        }
        Err(Error::config("DivergenceGuard", "threshold", format!("cannot be {}", self.threshold)))
    }
}
