//! The same step on one rank.

use std::sync::Arc;

use nn::Module;
use numcore::{Result, Runtime};

use super::{BucketedTrainer, Loss, TrainingConfig, TrainingMetrics};
use crate::{buckets::BucketOptions, comm::NoOpCommunicator};

/// The step of [`BucketedTrainer`] in a world of one.
///
/// ```
/// use distributed::train::{Loss, SimpleTrainer, TrainingConfig};
/// use nn::{Forward, Init, Linear};
/// use numcore::{DType, NullRuntime, Tensor};
/// # fn main() -> numcore::Result<()> {
/// let rt = NullRuntime::new();
/// let model = Linear::new(&Init::new(&rt, 0), 4, 1)?;
/// let mut trainer = SimpleTrainer::new(&rt, &model, TrainingConfig::default())?;
/// let x = autograd::Var::new(Tensor::zeros(&rt, [8, 4], DType::F32)?);
/// let y = autograd::Var::new(Tensor::zeros(&rt, [8, 1], DType::F32)?);
/// let metrics = trainer.step(|_| Ok(Loss::mean(nn::loss::mse(&model.forward(&x)?, &y, Default::default())?)))?;
/// assert_eq!(metrics.global_step(), 1);
/// # Ok(())
/// # }
/// ```
pub struct SimpleTrainer<R: Runtime>(BucketedTrainer<R>);

impl<R: Runtime> SimpleTrainer<R> {
    /// Trains `model`, whose parameters live on `rt`, with AdamW.
    pub fn new(rt: &R, model: &(impl Module<R> + ?Sized), config: TrainingConfig) -> Result<Self> {
        let comm = Arc::new(NoOpCommunicator::new(rt)) as _;
        Ok(SimpleTrainer(BucketedTrainer::new(&comm, model, config, BucketOptions::default())?))
    }

    /// One step: see [`Trainer::step`](super::Trainer::step).
    pub fn step(&mut self, micro_batch: impl FnMut(usize) -> Result<Loss<R>>) -> Result<TrainingMetrics<R>> {
        self.0.step(micro_batch)
    }

    /// Updates so far.
    pub fn global_step(&self) -> u64 {
        self.0.global_step()
    }

    /// The trainer underneath: its optimizer, for schedules and checkpoints.
    pub fn inner(&mut self) -> &mut BucketedTrainer<R> {
        &mut self.0
    }
}
