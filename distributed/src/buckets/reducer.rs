//! Reducers: ways of summing buckets of gradients over ranks.

use std::{collections::BTreeMap, ops::Range, sync::Arc};

use autograd::Leaf;
use numcore::{Result, Runtime, Tensor, TensorMut};

use super::{AllReduce, BucketOptions, Canonical};
use crate::{
    checkpoint::{CheckpointPart, Wanted},
    comm::Comm,
    strategy::LossWeight,
};

/// A parameter in a bucket.
pub struct BucketMember<R: Runtime> {
    /// The parameter.
    pub leaf: Arc<Leaf<R>>,
    /// The elements of its gradient in the bucket's row.
    pub at: Range<usize>,
}

/// A bucket whose gradients are final on this rank. Buckets are sent in the same order on all ranks.
pub struct FullBucket<'a, R: Runtime> {
    /// The number of the bucket, from 0, in the order in which buckets are sent.
    pub number: usize,
    /// The ranks to sum over. Errors of calls on this communicator name the bucket.
    pub comm: &'a Comm<R>,
    /// The parameters of the bucket, in the order of the row. Gaps between them hold zeros.
    pub members: &'a [BucketMember<R>],
    /// True if [`end_step`](BucketReducer::end_step) may name parameters that no rank has used.
    pub may_be_unused: bool,
}

/// A way of summing buckets of gradients over ranks: [`AllReduce`], [`Canonical`] order, or a custom one
/// ([`TrainStepBuilder::reducer`](crate::train::TrainStepBuilder::reducer)), such as the crate `adaptive`'s PowerSGD.
/// PyTorch's DDP communication hooks do this.
///
/// A step calls [`begin_step`](BucketReducer::begin_step) first. In the last backward pass it sends every bucket, in
/// order, and waits for all of them after the pass. With [`reduces_every_pass`](BucketReducer::reduces_every_pass),
/// this happens in every pass. Then it calls [`end_step`](BucketReducer::end_step) and, after the update,
/// [`step_taken`](BucketReducer::step_taken). All ranks make the same calls in the same order.
pub trait BucketReducer<R: Runtime>: Send + Sync {
    /// Starts to sum a bucket. The row holds this rank's gradients of the step so far, or of the last backward pass
    /// alone if buckets are sent in [every one](BucketReducer::reduces_every_pass).
    fn send(&mut self, bucket: FullBucket<'_, R>, row: TensorMut<R>) -> Result<()>;

    /// Waits for a bucket that was sent, and returns its row: the sums over all ranks of the step so far.
    fn wait(&mut self, number: usize) -> Result<TensorMut<R>>;

    /// Tells whether buckets are sent in every backward pass of a step, and not in the last alone.
    fn reduces_every_pass(&self) -> bool {
        false
    }

    /// Prepares a step: drops everything that a failed step has left in flight.
    fn begin_step(&mut self) {}

    /// Takes the weight of this rank's losses, before the last backward pass of a step. In a pipeline it takes that of
    /// the replica's losses, after the last pass.
    fn set_loss_weight(&mut self, losses: LossWeight) -> Result<()> {
        let _ = losses;
        Ok(())
    }

    /// Ends the exchange of a step, after its last bucket; no rank used the parameters in `unused`.
    fn end_step(&mut self, unused: &[&Arc<Leaf<R>>]) {
        let _ = unused;
    }

    /// Confirms the update of the parameters. Not called after a skipped step.
    fn step_taken(&mut self) {}

    /// Tells whether such reducers have a state, which checkpoints save. It then says with which features they go.
    fn has_state() -> bool
    where
        Self: Sized,
    {
        false
    }

    /// The parts of the reducer's state that this rank saves in checkpoints.
    fn parts(&self, leaves: &[Arc<Leaf<R>>]) -> Result<Vec<CheckpointPart<R>>> {
        let _ = leaves;
        Ok(Vec::new())
    }

    /// The numbers of the reducer's state in checkpoints, by logical name.
    fn numbers(&self) -> BTreeMap<String, u64> {
        BTreeMap::new()
    }

    /// The tensors that the reducer reads from a checkpoint, if they are there.
    fn wanted(&self, leaves: &[Arc<Leaf<R>>]) -> Result<Vec<Wanted>> {
        let _ = leaves;
        Ok(Vec::new())
    }

    /// Restores the reducer's state from a checkpoint. On an error nothing is changed.
    fn restore(
        &mut self,
        leaves: &[Arc<Leaf<R>>],
        read: &mut dyn FnMut(&Wanted) -> Result<Tensor<R>>,
        numbers: &BTreeMap<String, u64>,
    ) -> Result<()> {
        let _ = (leaves, read, numbers);
        Ok(())
    }
}

/// The reducer that the options require.
pub(crate) fn reducer<R: Runtime>(comm: &Comm<R>, options: &BucketOptions) -> Box<dyn BucketReducer<R>> {
    match options.canonical {
        true => Box::new(Canonical::default()),
        false => Box::new(AllReduce::new(comm, options.compression)),
    }
}
