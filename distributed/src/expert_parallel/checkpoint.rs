//! Checkpoints of experts and all the rest: under the names of the whole model, in which the experts are one tensor.

use std::collections::BTreeMap;

use numcore::{Result, Runtime, Tensor};

use super::ExpertParallel;
use crate::{
    checkpoint::{CheckpointPart, Checkpointed, Wanted},
    train::{StageStrategy, Strategy},
};

impl<R: Runtime, S: StageStrategy<R>> ExpertParallel<R, S> {
    /// The parts of all, of which those of experts are saved by the first of the ranks along tensor, which have the same ones.
    fn parts_by(&self, of: impl Fn(&S) -> Result<Vec<CheckpointPart<R>>>) -> Result<Vec<CheckpointPart<R>>> {
        let mut parts = of(&self.rest)?;
        let experts = self.experts.as_ref().map_or_else(|| Ok(Vec::new()), &of)?;
        parts.extend(experts.into_iter().filter(|_| self.counts_examples()));
        Ok(parts)
    }
}

impl<R: Runtime, S: StageStrategy<R>> Checkpointed<R> for ExpertParallel<R, S> {
    fn parts(&self) -> Result<Vec<CheckpointPart<R>>> {
        self.parts_by(S::parts)
    }

    fn parameter_parts(&self) -> Result<Vec<CheckpointPart<R>>> {
        self.parts_by(S::parameter_parts)
    }

    fn put_parameter_parts(&mut self, rows: &[Tensor<R>]) -> Result<bool> {
        match self.experts {
            None => self.rest.put_parameter_parts(rows),
            // Where experts are sharded no rank has all of one: they are put whole, as those of layers that are cut.
            Some(_) => Ok(false),
        }
    }

    fn numbers(&self) -> BTreeMap<String, u64> {
        let mut numbers = self.rest.numbers();
        numbers.extend(self.experts.iter().flat_map(S::numbers));
        numbers
    }

    fn expect(&mut self, numbers: &BTreeMap<String, u64>) {
        self.both().for_each(|part| part.expect(numbers));
    }

    fn wanted(&self) -> Result<Vec<Wanted>> {
        let mut wanted = self.rest.wanted()?;
        wanted.extend(self.experts.as_ref().map_or_else(|| Ok(Vec::new()), S::wanted)?);
        Ok(wanted)
    }

    fn check_restore(&mut self, numbers: &BTreeMap<String, u64>) -> Result<()> {
        self.both().try_for_each(|part| part.check_restore(numbers))
    }

    fn restore(
        &mut self,
        read: &mut dyn FnMut(&Wanted) -> Result<Tensor<R>>,
        numbers: &BTreeMap<String, u64>,
    ) -> Result<()> {
        self.both().try_for_each(|part| part.restore(read, numbers))
    }
}
