//! The learning rates of sharded training.

use std::sync::Arc;

use numcore::Runtime;
use optim::{LrSchedule, Shards};

/// Steps at which ranks compare their schedules.
const SAMPLED: [u64; 6] = [0, 1, 10, 100, 1000, 10_000];

/// The learning rates of an optimizer, or of a schedule in place of its own.
pub(super) struct Rates<R: Runtime> {
    pub(super) optimizer: Arc<dyn Shards<R>>,
    pub(super) schedule: Option<Arc<dyn LrSchedule>>,
}

impl<R: Runtime> Rates<R> {
    /// The rate of each group at a step, from 0.
    pub(super) fn at(&self, step: u64) -> Vec<f64> {
        match &self.schedule {
            Some(schedule) => self.optimizer.base_lrs().into_iter().map(|base| schedule.lr(base, step)).collect(),
            None => self.optimizer.lrs(step),
        }
    }

    /// A description of optimizer and schedule, which must be equal on all ranks.
    pub(super) fn describe(&self) -> String {
        let own = self.optimizer.describe();
        match self.schedule {
            Some(_) => format!("{own}, scheduled {:?}", SAMPLED.map(|step| self.at(step))),
            None => own,
        }
    }
}
