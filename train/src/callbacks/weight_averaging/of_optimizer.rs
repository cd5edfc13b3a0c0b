//! Averages that the optimizer keeps itself, as schedule-free rules do.

use std::collections::BTreeSet;

use distributed::{
    checkpoint::{CheckpointPart, Checkpointed, Manifest, names},
    comm::{Collectives, Comm, Communicator},
};
use numcore::{Error, Result, Runtime};
use optim::AVERAGE;

use super::{AveragedPart, EVALUATED, WeightAveraging, in_checkpoint};

/// The value of [`EVALUATED`] if evaluations used the optimizer's averages.
pub(super) const OPTIMIZERS: u64 = 2;

/// The logical names of the values that evaluations before a checkpoint used, by parameter.
pub(in crate::callbacks) fn evaluated_names(manifest: &Manifest) -> impl Fn(&str) -> String + use<> {
    let (numbers, names) = (manifest.numbers().clone(), manifest.names().map(String::from).collect::<BTreeSet<_>>());
    move |parameter| {
        let (average, updates) = (names::state(AVERAGE, parameter), names::updates(parameter));
        match numbers.get(EVALUATED).copied().unwrap_or(0) {
            0 => names::parameter(parameter),
            OPTIMIZERS if !names.contains(&average) || numbers.get(&updates).is_none_or(|n| *n == 0) => {
                names::parameter(parameter)
            }
            OPTIMIZERS => average,
            _ => in_checkpoint(parameter),
        }
    }
}

impl<R: Runtime> WeightAveraging<R> {
    /// Evaluates with the averages that the optimizer keeps as its state `average`, as schedule-free rules do. Nothing
    /// further is kept or saved. Parameters without an average, or not updated yet, are evaluated with their weights.
    ///
    /// A run whose optimizer keeps none fails before it begins; so do local updates, which have no common average.
    #[doc(alias("schedule_free"))]
    pub fn of_optimizer() -> Self {
        WeightAveraging { of_optimizer: true, ..WeightAveraging::new(0.0) }
    }

    /// Returns an error, on all ranks, if the optimizer keeps no averages.
    pub(super) fn require_averages(&self, step: &dyn Checkpointed<R>, comm: &Comm<R>) -> Result<()> {
        let found = optimizers(step)?.len();
        if comm.exchange(&found.to_le_bytes())?.iter().any(|count| count.iter().any(|byte| *byte > 0)) {
            return Ok(());
        }
        let why = "has no averages of its own to evaluate: use a schedule-free rule, or `WeightAveraging::new(decay)`";
        Err(Error::state("the optimizer", why))
    }

    /// Drops the optimizer's averages, which are views of its state.
    pub(super) fn drop_averages(&mut self) {
        if self.of_optimizer {
            self.parts.clear();
        }
    }

    /// Takes this rank's part of the optimizer's averages, cut as the weights are if these are in shards.
    pub(super) fn take_averages(
        &mut self,
        step: &mut dyn Checkpointed<R>,
        comm: &Comm<R>,
        is_sharded: bool,
    ) -> Result<()> {
        let numbers = step.numbers();
        let mut averages = optimizers(step)?;
        averages.retain(|part| numbers.get(&names::updates(&part.name)).is_some_and(|n| *n > 0));
        self.parts.clear();
        if is_sharded {
            self.take_parts(step, comm)?;
            for part in &mut self.parts {
                let same = |average: &&CheckpointPart<R>| {
                    (&average.name, &average.placement, average.start) == (&part.name, &part.placement, part.start)
                };
                if let Some(average) = averages.iter().find(same) {
                    part.average = average.row.on(comm.runtime())?.copy()?;
                }
            }
            return Ok(());
        }
        for CheckpointPart { name, placement, start, row } in averages {
            let average = row.on(comm.runtime())?;
            let (len, dtype) = (average.shape().numel(), average.dtype());
            self.parts.push(AveragedPart { name, placement, start, len, dtype, average });
        }
        Ok(())
    }
}

/// This rank's part of the averages that the optimizer keeps.
fn optimizers<R: Runtime>(step: &dyn Checkpointed<R>) -> Result<Vec<CheckpointPart<R>>> {
    let prefix = names::state(AVERAGE, "");
    let named = |mut part: CheckpointPart<R>| {
        part.name = part.name.strip_prefix(&prefix)?.into();
        Some(part)
    };
    Ok(step.parts()?.into_iter().filter_map(named).collect())
}
