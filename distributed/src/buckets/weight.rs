//! The total weight of a step's losses on all ranks, for formats that send means.

use numcore::{DType, Result, Runtime, Tensor};

use crate::{
    comm::{Collectives, Comm, ReduceOp, Work, memory},
    sums::wide,
};
use numcore::TensorMut;

/// The sum over all ranks of the weights of their losses in a step, for reducers that send means.
pub struct TotalWeight<R: Runtime> {
    comm: Comm<R>,
    work: Option<Work<TensorMut<R>>>,
    total: Option<Tensor<R>>,
}

impl<R: Runtime> TotalWeight<R> {
    /// Makes the sum over the ranks of a communicator.
    pub fn new(comm: &Comm<R>) -> Self {
        TotalWeight { comm: comm.clone(), work: None, total: None }
    }

    /// Starts the sum over ranks; `own` is this rank's part.
    pub fn begin(&mut self, own: f64) -> Result<()> {
        let rt = self.comm.runtime();
        let own = Tensor::full(rt, [1], wide(rt), own)?;
        (self.work, self.total) = (Some(self.comm.all_reduce(memory(&own)?, ReduceOp::Sum)?), None);
        Ok(())
    }

    /// The sum, `[1]`; waits until it has arrived. Without a `begin` in this step, `otherwise`.
    pub fn get(&mut self, otherwise: f64) -> Result<Tensor<R>> {
        if let Some(work) = self.work.take() {
            self.total = Some(work.wait()?.freeze()?);
        }
        match &self.total {
            Some(total) => Ok(total.clone()),
            None => Tensor::full(self.comm.runtime(), [1], DType::F32, otherwise),
        }
    }

    /// Discards the sum of the last step.
    pub fn clear(&mut self) {
        (self.work, self.total) = (None, None);
    }
}
