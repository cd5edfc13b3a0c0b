//! Monitoring of the differences between ranks' weights at synchronizations of local updates.

use std::collections::BTreeMap;

use distributed::train::Synchronization;
use numcore::{Error, Result, Runtime};

use crate::{Callback, CallbackState, Event, Run, parsed};

/// Records, at each synchronization, the differences between ranks that [train by
/// themselves](adaptive::local_updates), as `divergence`. It is the largest distance of a rank's weights from the
/// new ones, over the norm of the new ones. The run ends if a fragment's divergence has risen in three synchronizations
/// in a row and is above a threshold. Ranks should then synchronize more often, or learn more slowly.
///
/// Ranks that never synchronize in full ([`ElasticAveraging`](adaptive::local_updates::ElasticAveraging)) differ
/// more: 0.3 is a threshold for them.
#[derive(Clone, Debug)]
pub struct DivergenceGuard {
    threshold: f64,
    ends: bool,
    /// The last divergence of each fragment, and the number of synchronizations in a row in which it rose.
    fragments: BTreeMap<usize, (f64, u64)>,
}

/// The number of rises in a row that ends the run.
const RISING: u64 = 3;

impl DivergenceGuard {
    /// Ends a run at a divergence above `threshold` that has risen three times in a row; 0.05 is usual.
    pub fn above(threshold: f64) -> Self {
        DivergenceGuard { threshold, ends: true, fragments: BTreeMap::new() }
    }

    /// Records the divergence, and never ends the run.
    pub fn recording() -> Self {
        DivergenceGuard { ends: false, ..DivergenceGuard::above(f64::INFINITY) }
    }

    /// The reason to end the run after a synchronization, if there is one.
    fn reason_to_stop(&mut self, synchronization: Synchronization) -> Option<String> {
        let Synchronization { fragment, divergence, .. } = synchronization;
        let (before, rising) = self.fragments.get(&fragment).copied().unwrap_or((f64::INFINITY, 0));
        let rising = if divergence > before { rising + 1 } else { 0 };
        self.fragments.insert(fragment, (divergence, rising));
        (self.ends && rising >= RISING && divergence > self.threshold).then(|| {
            let threshold = self.threshold;
            format!("the divergence of ranks is {divergence:.3}, above {threshold}, and rose in {RISING} synchronizations in a row: synchronize more often")
        })
    }
}

impl<R: Runtime, M, B> Callback<R, M, B> for DivergenceGuard {
    fn on(&mut self, event: &Event<'_, R>, run: &mut Run<'_, R, M, B>) -> Result<()> {
        let Event::StepEnd(metrics) = event else { return Ok(()) };
        let Some(synchronization) = metrics.synchronization() else { return Ok(()) };
        run.record("divergence", synchronization.divergence);
        if let Some(why) = self.reason_to_stop(synchronization) {
            run.control().stop(why);
        }
        Ok(())
    }

    fn name(&self) -> &str {
        "divergence-guard"
    }

    fn state(&self) -> CallbackState {
        let mut state = CallbackState::new();
        for (fragment, (divergence, rising)) in &self.fragments {
            state.insert(format!("divergence/{fragment}"), divergence.to_string());
            state.insert(format!("rising/{fragment}"), rising.to_string());
        }
        state
    }

    fn restore(&mut self, state: &CallbackState) -> Result<()> {
        self.fragments.clear();
        for fragment in state.keys().filter_map(|key| key.strip_prefix("divergence/")?.parse().ok()) {
            let of = |what: &str| format!("{what}/{fragment}");
            self.fragments.insert(fragment, (parsed(state, &of("divergence"))?, parsed(state, &of("rising"))?));
        }
        Ok(())
    }

    fn check(&self) -> Result<()> {
        if self.threshold > 0.0 {
            return Ok(());
        }
        Err(Error::config("DivergenceGuard", "threshold", format!("cannot be {}", self.threshold)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fragments_are_compared_with_themselves() {
        let mut guard = DivergenceGuard::above(0.05);
        let mut number = 0;
        let mut reason_to_stop = |fragment, divergence| {
            number += 1;
            guard.reason_to_stop(Synchronization { number, fragment, divergence })
        };
        // Each is larger than the one before it, but every fragment stays as it was.
        for _ in 0..3 {
            for (fragment, divergence) in [0.1, 0.2, 0.3, 0.4].into_iter().enumerate() {
                assert!(reason_to_stop(fragment, divergence).is_none());
            }
        }
        assert!(reason_to_stop(1, 0.21).is_none() && reason_to_stop(1, 0.22).is_none());
        assert!(reason_to_stop(1, 0.23).is_some_and(|why| why.contains("is 0.230, above 0.05")));
    }

    #[test]
    fn rises_are_counted_in_a_row_and_over_a_checkpoint() {
        // The last of these divergences stops a run, if any does.
        let rows: [(&[f64], bool); 4] = [
            (&[0.1, 0.2, 0.3, 0.4], true),
            (&[0.1, 0.2, 0.3, 0.2, 0.3], false),
            (&[0.1, 0.2, 0.3, 0.3, 0.4], false),
            (&[0.01, 0.02, 0.03, 0.04], false),
        ];
        for (divergences, stops) in rows {
            let mut guard = DivergenceGuard::above(0.05);
            for (divergence, number) in divergences.iter().zip(1..) {
                // Each value comes after a checkpoint.
                let state = Callback::<numcore::NullRuntime, (), ()>::state(&guard);
                guard = DivergenceGuard::above(0.05);
                Callback::<numcore::NullRuntime, (), ()>::restore(&mut guard, &state).unwrap();
                let synchronization = Synchronization { number, fragment: 3, divergence: *divergence };
                let stops = stops && number == divergences.len() as u64;
                assert_eq!(guard.reason_to_stop(synchronization).is_some(), stops, "{divergences:?}");
            }
        }
    }
}
