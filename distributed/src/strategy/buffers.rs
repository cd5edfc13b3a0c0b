//! Synchronization of buffers that every rank changes by itself.

use numcore::{
    DType, Result, Runtime, Tensor,
    ops::{ViewOps, cat},
};

use crate::{
    checkpoint::names::Buffers,
    comm::{Collectives, Comm, Communicator, ReduceOp, memory},
};

/// The treatment of a model's buffers after each step. All ranks begin with the buffers of rank 0.
///
/// Buffers that follow a rank's own examples, such as the running statistics of [`BatchNorm`](nn::BatchNorm), differ
/// between ranks from the first step on. [`SyncBatchNorm`](crate::SyncBatchNorm) has statistics of all ranks' examples
/// instead. In a pipeline the ranks are the replicas of one stage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum BufferSync {
    /// Every rank keeps its own buffers. Models give other results in evaluation on each rank, and checkpoints have the
    /// buffers of rank 0.
    #[default]
    Own,
    /// Every rank takes the buffers of rank 0. PyTorch's `DistributedDataParallel` does so with `broadcast_buffers`
    /// before each forward pass of training. This mode does it after each step, so that an evaluation between steps is
    /// equal on all ranks too.
    Broadcast,
    /// Every rank takes the mean over ranks of floating-point buffers, and rank 0's value of all others (counts).
    Average,
}

impl<R: Runtime> Buffers<R> {
    /// Makes the buffers of all ranks equal, with one collective for each dtype. The host waits for nothing.
    pub fn sync(&self, comm: &Comm<R>, how: BufferSync) -> Result<()> {
        if how == BufferSync::Own || comm.size() == 1 {
            return Ok(());
        }
        DType::ALL.into_iter().try_for_each(|dtype| self.sync_dtype(comm, how, dtype))
    }

    fn sync_dtype(&self, comm: &Comm<R>, how: BufferSync, dtype: DType) -> Result<()> {
        let all: Vec<_> = self.0.iter().map(|(_, buffer)| buffer).filter(|b| b.spec().dtype == dtype).collect();
        let rows = all.iter().map(|b| b.value().contiguous()?.reshape([b.spec().shape.numel()]));
        let rows = rows.collect::<Result<Vec<Tensor<R>>>>()?;
        if rows.is_empty() {
            return Ok(());
        }
        let joined = memory(&cat(&rows.iter().collect::<Vec<_>>(), 0)?)?;
        let work = match how {
            BufferSync::Average if dtype.is_float() => comm.all_reduce(joined, ReduceOp::Avg)?,
            _ => comm.broadcast(joined, 0)?,
        };
        let (joined, mut at) = (work.wait()?.freeze()?, 0);
        for buffer in all {
            let shape = buffer.spec().shape;
            buffer.set(joined.narrow(0, at, shape.numel())?.reshape(shape)?)?;
            at += shape.numel();
        }
        Ok(())
    }
}
