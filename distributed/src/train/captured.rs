//! Training steps that are captured once and launched again and again.

use numcore::{Error, Result, Runtime};

use super::TrainStep;
use crate::{ddp::DataParallel, strategy::BufferSync};

impl<R: Runtime> TrainStep<R> {
    /// Counts the next update of a captured step, and writes the numbers of a
    /// [capturable](optim::FlatOptimizer::capturable) optimizer to the device. Every rank calls it before each launch.
    ///
    /// All else that the host computes is that of the capture, as the weights of losses are. In the metrics these are
    /// the learning rate, the rank's own weight and the number of updates.
    ///
    /// # Errors
    /// Fails as [`Optimizer::advance`](optim::Optimizer::advance), and if such a step cannot be captured.
    #[track_caller]
    pub fn advance(&mut self) -> Result<()> {
        self.repeated("TrainStep::advance")?.optimizer_mut().advance()?;
        self.updates.steps += 1;
        Ok(())
    }

    /// The strategy, if launches of a captured step repeat it: each makes the same calls on the same memory.
    pub(super) fn repeated(&mut self, op: &'static str) -> Result<&mut DataParallel<R>> {
        let is_synchronized = self.updates.config.buffers != BufferSync::Own;
        let own = self.strategy.downcast_mut::<DataParallel<R>>();
        let why = "the step cannot be captured: its parameters must be replicated, its gradients sent in their own dtype, \
                   without a custom reducer, and its buffers each rank's own";
        own.filter(|own| own.is_repeatable() && !is_synchronized).ok_or_else(|| Error::usage(op, why))
    }
}
