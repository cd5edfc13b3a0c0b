//! Evaluation: forwards alone, every micro-batch through a stage before the rank's next stage.

use numcore::{Error, Result};

use crate::action::{Compute, Pass};
use crate::placement::StagePlacement;
use crate::schedule::Schedule;

impl Schedule {
    /// The forward passes of `micro_batches` through stages at `placement`, without gradients or kept activations.
    ///
    /// # Errors
    /// Fails unless the number of passes, stages times micro-batches, is from 1 to 2^26.
    pub fn forward_only(placement: &StagePlacement, micro_batches: usize) -> Result<Self> {
        let passes = placement.stages().checked_mul(micro_batches).filter(|passes| (1..=1 << 26).contains(passes));
        if passes.is_none() {
            let why = format!(
                "forward only: {micro_batches} micro-batches of {} stages are not 1 … 2^26 passes",
                placement.stages()
            );
            return Err(Error::schedule("pipeline schedule", why));
        }
        let forward = |(stage, micro)| Compute { stage, pass: Pass::F, micro }.into();
        let passes = |rank| {
            let stages = placement.stages_on(rank);
            stages.flat_map(|stage| (0..micro_batches).map(move |micro| (stage, micro))).map(forward).collect()
        };
        Schedule::new(placement.clone(), micro_batches, (0..placement.ranks()).map(passes).collect())
    }
}
