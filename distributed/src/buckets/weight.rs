//! What a step weighs on all ranks, for wires that send means.

use numcore::{DType, Result, Runtime, Tensor};

use crate::{
    comm::{Collectives, Comm, ReduceOp, Work, memory},
    sums::wide,
};
use numcore::TensorMut;

/// The sum over all ranks of what their losses of a step weigh.
pub(super) struct TotalWeight<R: Runtime> {
    comm: Comm<R>,
    work: Option<Work<TensorMut<R>>>,
    total: Option<Tensor<R>>,
}

impl<R: Runtime> TotalWeight<R> {
    pub(super) fn new(comm: &Comm<R>) -> Self {
        TotalWeight { comm: comm.clone(), work: None, total: None }
    }

    /// Starts the sum; `own` is this rank's part.
    pub(super) fn begin(&mut self, own: f64) -> Result<()> {
        let rt = self.comm.runtime();
        let own = Tensor::full(rt, [1], wide(rt), own)?;
        (self.work, self.total) = (Some(self.comm.all_reduce(memory(&own)?, ReduceOp::Sum)?), None);
        Ok(())
    }

    /// The sum, of one element; waits until it is there. Where nobody has said what losses weigh, `otherwise`.
    pub(super) fn get(&mut self, otherwise: f64) -> Result<Tensor<R>> {
        if let Some(work) = self.work.take() {
            self.total = Some(work.wait()?.freeze()?);
        }
        match &self.total {
            Some(total) => Ok(total.clone()),
            None => Tensor::full(self.comm.runtime(), [1], DType::F32, otherwise),
        }
    }

    /// Forgets the last step's.
    pub(super) fn clear(&mut self) {
        (self.work, self.total) = (None, None);
    }
}
