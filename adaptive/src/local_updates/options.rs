//! The times of synchronizations of local updates.

use numcore::{Error, Result};

use distributed::strategy::BufferSync;

/// Options of local updates: the steps between synchronizations of weights, and the parts of each.
#[derive(Clone, Debug, PartialEq)]
pub struct LocalUpdates {
    /// The number of steps from one synchronization to the next, `H`. With `None` ranks synchronize only in calls of
    /// [`LocalSteps::synchronize`](super::LocalSteps::synchronize), which may come after a different number of steps on
    /// each.
    pub every: Option<u64>,
    /// The number of initial steps after each of which ranks synchronize: post-local SGD (Lin et al., *Don't Use Large
    /// Mini-Batches, Use Local SGD*, 2018).
    pub warmup: u64,
    /// The number of parts of the parameters. Parts are consecutive, of about equal size, and synchronized one after
    /// another within [`every`](LocalUpdates::every) steps, which must be a multiple of it.
    /// Parts beyond the number of a rank's parameters are empty.
    pub fragments: usize,
    /// The number of steps for which the sum of a fragment may be in flight before it is applied. It is less than the
    /// number of steps from one fragment to the next.
    pub delay: u64,
    /// The share of its own new weights that a rank keeps when a delayed sum arrives, in `[0, 1)`: its training in the
    /// meantime. At 0 it takes the global weights. [`ElasticAveraging`](super::ElasticAveraging) has its own share,
    /// which replaces this one: leave it at 0.
    pub keep: f64,
    /// The synchronization of buffers, such as running statistics, with each synchronization of the first fragment.
    pub buffers: BufferSync,
}

impl Default for LocalUpdates {
    /// A synchronization after every 100 steps, of all parameters at once, which averages buffers.
    fn default() -> Self {
        LocalUpdates { every: Some(100), warmup: 0, fragments: 1, delay: 0, keep: 0.0, buffers: BufferSync::Average }
    }
}

impl LocalUpdates {
    pub(super) fn check(&self) -> Result<()> {
        let wrong = |field, why: String| Err(Error::config("LocalUpdates", field, why));
        if self.fragments == 0 {
            return wrong("fragments", "`fragments` must be 1 or more: with 1, all parameters are one fragment".into());
        }
        if !(0.0..1.0).contains(&self.keep) {
            return wrong("keep", format!("`keep` must be a share in [0, 1), not {}", self.keep));
        }
        let Some(every) = self.every else {
            return match (self.fragments, self.delay, self.warmup) {
                (1, 0, 0) => Ok(()),
                _ => wrong(
                    "every",
                    "fragments, a delay and a warm-up need a number of steps between synchronizations".into(),
                ),
            };
        };
        if every == 0 || !every.is_multiple_of(self.fragments as u64) {
            return wrong(
                "fragments",
                format!("{} fragments do not divide {every} steps between synchronizations", self.fragments),
            );
        }
        let interval = every / self.fragments as u64;
        if self.delay >= interval {
            return wrong(
                "delay",
                format!(
                    "a sum of {} steps is still in flight when the next fragment is due, after {interval}",
                    self.delay
                ),
            );
        }
        Ok(())
    }

    /// The fragment that is due after this many steps of training; none if no fragment is.
    pub(super) fn due(&self, steps: u64) -> Option<usize> {
        let after = steps.checked_sub(self.warmup).filter(|after| *after > 0)?;
        let interval = self.every? / self.fragments as u64;
        after.is_multiple_of(interval).then(|| ((after / interval - 1) % self.fragments as u64) as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fragments_meet_in_turn_after_the_warmup() {
        let options = LocalUpdates { every: Some(6), warmup: 2, fragments: 3, ..LocalUpdates::default() };
        let due: Vec<_> = (1..=10).map(|step| options.due(step)).collect();
        assert_eq!(due, [None, None, None, Some(0), None, Some(1), None, Some(2), None, Some(0)]);
        let by_hand = LocalUpdates { every: None, ..LocalUpdates::default() };
        assert!((0..9).all(|step| by_hand.due(step).is_none()));
    }

    #[test]
    fn options_that_make_no_sense_are_refused() {
        let good = LocalUpdates { every: Some(6), fragments: 3, delay: 1, ..LocalUpdates::default() };
        assert!(good.check().is_ok());
        let refused = [
            LocalUpdates { fragments: 0, ..good.clone() },
            LocalUpdates { fragments: 4, ..good.clone() },
            LocalUpdates { every: Some(0), fragments: 1, delay: 0, ..good.clone() },
            LocalUpdates { delay: 2, ..good.clone() },
            LocalUpdates { keep: 1.0, ..good.clone() },
            LocalUpdates { keep: f64::NAN, ..good.clone() },
            LocalUpdates { every: None, ..good.clone() },
        ];
        for options in refused {
            assert!(options.check().is_err(), "{options:?}");
        }
    }
}
