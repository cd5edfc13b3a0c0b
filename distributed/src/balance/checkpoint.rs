//! Checkpoints of a balanced step: those of the step that it balances. What was measured before is not saved, and is measured again.

use std::collections::BTreeMap;

use numcore::{Result, Runtime, Tensor};

use super::BalancedStep;
use crate::{
    checkpoint::{CheckpointPart, Checkpointed, Wanted},
    train::Strategy,
};

impl<R: Runtime, S: Strategy<R> + Checkpointed<R>> Checkpointed<R> for BalancedStep<R, S> {
    fn parts(&self) -> Result<Vec<CheckpointPart<R>>> {
        self.inner().parts()
    }

    fn parameter_parts(&self) -> Result<Vec<CheckpointPart<R>>> {
        self.inner().parameter_parts()
    }

    fn put_parameter_parts(&mut self, rows: &[Tensor<R>]) -> Result<bool> {
        self.inner_mut().put_parameter_parts(rows)
    }

    fn numbers(&self) -> BTreeMap<String, u64> {
        self.inner().numbers()
    }

    fn expect(&mut self, numbers: &BTreeMap<String, u64>) {
        self.inner_mut().expect(numbers);
    }

    fn lost_at_another_size(&self) -> Option<&'static str> {
        self.inner().lost_at_another_size()
    }

    fn wanted(&self) -> Result<Vec<Wanted>> {
        self.inner().wanted()
    }

    fn check_restore(&mut self, numbers: &BTreeMap<String, u64>) -> Result<()> {
        self.inner_mut().check_restore(numbers)
    }

    fn restore(
        &mut self,
        read: &mut dyn FnMut(&Wanted) -> Result<Tensor<R>>,
        numbers: &BTreeMap<String, u64>,
    ) -> Result<()> {
        self.inner_mut().restore(read, numbers)
    }
}
