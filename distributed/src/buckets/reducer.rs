//! How buckets are summed over ranks.

use std::{collections::BTreeMap, ops::Range, sync::Arc};

use autograd::Leaf;
use numcore::{Result, Runtime, Tensor, TensorMut};

use super::{AllReduce, BucketOptions, Canonical, GradCompression, powersgd::Compressor};
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

/// A bucket whose gradients are final on this rank. Buckets are full in the same order on all ranks.
pub struct FullBucket<'a, R: Runtime> {
    /// The number of the bucket, from 0, in the order in which buckets are sent.
    pub number: usize,
    /// The ranks. Calls over it have the bucket's name.
    pub comm: &'a Comm<R>,
    /// The parameters of the bucket, in the order of the row. Between them there may be gaps, of zeros.
    pub members: &'a [BucketMember<R>],
}

/// Sums buckets of gradients over ranks: [`AllReduce`], [`Canonical`] order, [`PowerSgd`](super::PowerSgd), or one of your own
/// ([`TrainStepBuilder::reducer`](crate::train::TrainStepBuilder::reducer)).
///
/// In a step, [`begin_step`](BucketReducer::begin_step) comes first; then every bucket is sent, in order, in the last backward pass or, where
/// that is asked for, in every one, and waited for when the pass is over; then [`end_step`](BucketReducer::end_step), and
/// [`step_taken`](BucketReducer::step_taken) after the update. All ranks make the same calls in the same order.
pub trait BucketReducer<R: Runtime>: Send + Sync {
    /// Starts to sum a bucket. Its row is this rank's gradients of the step so far, or of the last backward pass where buckets are sent in
    /// [every one](BucketReducer::reduces_every_pass).
    fn send(&mut self, bucket: FullBucket<'_, R>, row: TensorMut<R>) -> Result<()>;

    /// Waits for a bucket that was sent, and gives its row back: the sums over all ranks of the step so far.
    fn wait(&mut self, number: usize) -> Result<TensorMut<R>>;

    /// Whether buckets are sent in every backward pass of a step, and not in the last alone.
    fn reduces_every_pass(&self) -> bool {
        false
    }

    /// Before a step: whatever a step that failed has left in flight is dropped.
    fn begin_step(&mut self) {}

    /// Learns the weight of this rank's losses, before the last backward pass of a step.
    fn set_loss_weight(&mut self, losses: LossWeight) -> Result<()> {
        let _ = losses;
        Ok(())
    }

    /// After the last bucket of a step; no rank used these parameters.
    fn end_step(&mut self, unused: &[&Arc<Leaf<R>>]) {
        let _ = unused;
    }

    /// After the update. It is not called after a step that was left out.
    fn step_taken(&mut self) {}

    /// What of a parameter's mean gradient this rank could not send yet: a row.
    fn residual(&self, leaf: &Arc<Leaf<R>>) -> Result<Option<Tensor<R>>> {
        let _ = leaf;
        Ok(None)
    }

    /// What checkpoints have of it on this rank.
    fn parts(&self, leaves: &[Arc<Leaf<R>>]) -> Result<Vec<CheckpointPart<R>>> {
        let _ = leaves;
        Ok(Vec::new())
    }

    /// What checkpoints have of it as numbers.
    fn numbers(&self) -> BTreeMap<String, u64> {
        BTreeMap::new()
    }

    /// What it reads from a checkpoint, if it is there.
    fn wanted(&self, leaves: &[Arc<Leaf<R>>]) -> Result<Vec<Wanted>> {
        let _ = leaves;
        Ok(Vec::new())
    }

    /// Goes on from a checkpoint. On an error everything is as it was.
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

/// The reducer that options ask for.
pub(crate) fn reducer<R: Runtime>(comm: &Comm<R>, options: &BucketOptions) -> Result<Box<dyn BucketReducer<R>>> {
    Ok(match options.compression {
        GradCompression::PowerSgd(power) => Box::new(Compressor::new(comm, power, options)?),
        _ if options.canonical => Box::new(Canonical::default()),
        compression => Box::new(AllReduce::new(comm, compression)),
    })
}
