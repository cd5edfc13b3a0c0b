//! Buffers that every rank changes by itself, made equal.

use numcore::{
    DType, Result, Runtime, Tensor,
    ops::{ViewOps, cat},
};

use crate::{
    checkpoint::names::Buffers,
    comm::{Collectives, Comm, Communicator, ReduceOp, memory},
};

/// What becomes of a model's buffers after each step. All ranks begin with those of rank 0; what a rank's own examples
/// move, as they move [`BatchNorm`](nn::BatchNorm)'s running statistics, differs between ranks from the first step on.
/// (Statistics of all ranks' examples are [`SyncBatchNorm`](crate::SyncBatchNorm)'s.) In a pipeline the ranks are those
/// that have the same stage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum BufferSync {
    /// Every rank keeps its own: models give other results in evaluation on each rank, and checkpoints have those of
    /// rank 0.
    #[default]
    Own,
    /// Every rank takes those of rank 0, as PyTorch's `DistributedDataParallel` does with `broadcast_buffers`: there
    /// before each forward pass of training, here after each step, so that an evaluation between steps is the same on
    /// all ranks too.
    Broadcast,
    /// Every rank takes the mean over ranks of what is floating, and what else there is (counts) of rank 0.
    Average,
}

impl<R: Runtime> Buffers<R> {
    /// Makes the buffers of all ranks equal, with one collective for each dtype. The host waits for nothing.
    pub(crate) fn sync(&self, comm: &Comm<R>, how: BufferSync) -> Result<()> {
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
