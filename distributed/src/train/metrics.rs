//! Measurements of a training step.

use numcore::{DType, Result, Runtime, Tensor};

/// The measurements of one step. They stay on the device until they are read.
#[derive(Clone, Debug)]
pub struct TrainingMetrics<R: Runtime> {
    pub(crate) loss: Tensor<R>,
    /// This rank's losses and their weights: `[2, micro-batches]`.
    pub(crate) own: Tensor<R>,
    pub(crate) own_weight: f64,
    pub(crate) weight: Tensor<R>,
    /// The number of ranks that have parts of the same sequences; each of them reports the weight of the whole
    /// sequences.
    pub(crate) context_ranks: usize,
    pub(crate) grad_norm: Option<Tensor<R>>,
    pub(crate) stepped: bool,
    pub(crate) learning_rate: f64,
    pub(crate) global_step: u64,
    pub(crate) synchronization: Option<Synchronization>,
}

/// The divergence of ranks when they synchronized their weights after local updates.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Synchronization {
    /// The number of the synchronization, from 1.
    pub number: u64,
    /// The fragment that was synchronized, or the first of several.
    pub fragment: usize,
    /// The largest distance of a rank's weights from the new global weights, over the norm of the global weights.
    pub divergence: f64,
}

impl<R: Runtime> TrainingMetrics<R> {
    /// The mean loss over all micro-batches of all ranks. Waits for the device.
    #[track_caller]
    pub fn loss(&self) -> Result<f64> {
        self.loss.item()
    }

    /// The mean loss over this rank's micro-batches, before anything is summed over ranks; none if they weigh 0. Waits
    /// for the device.
    #[doc(alias("local_loss"))]
    #[track_caller]
    pub fn own_loss(&self) -> Result<Option<f64>> {
        let own: Vec<f64> = match self.own.dtype() {
            DType::F64 => self.own.to_vec()?,
            _ => self.own.to_vec::<f32>()?.into_iter().map(f64::from).collect(),
        };
        let (sums, weights) = own.split_at(own.len() / 2);
        let weight: f64 = weights.iter().sum();
        Ok((weight != 0.0).then(|| sums.iter().sum::<f64>() / weight))
    }

    /// The total weight of the losses of all ranks and micro-batches: tokens, where each loss is a sum over tokens.
    /// Waits for the device.
    #[track_caller]
    pub fn weight(&self) -> Result<f64> {
        Ok(self.weight.item()? / self.context_ranks as f64)
    }

    /// The weight of this rank's own losses.
    pub fn own_weight(&self) -> f64 {
        self.own_weight
    }

    /// The synchronization of weights that this step ended with, where ranks make local updates.
    #[doc(alias = "meeting")]
    pub fn synchronization(&self) -> Option<Synchronization> {
        self.synchronization
    }

    /// The measurements with the weight of another set of ranks, `[]`, of which none report the same sequences.
    pub fn with_weight(self, weight: Tensor<R>) -> Self {
        TrainingMetrics { weight, context_ranks: 1, ..self }
    }

    /// The measurements of a step that ended with a synchronization of weights, or with none.
    pub fn with_synchronization(self, synchronization: Option<Synchronization>) -> Self {
        TrainingMetrics { synchronization, ..self }
    }

    /// The norm of all gradients before clipping; none without clipping. Waits for the device.
    ///
    /// Squares are added up for each parameter separately, then in the model's order. The result depends on the
    /// gradients alone, not on buckets. Sharded gradients are added up for each piece of a parameter separately. On one
    /// rank that gives the same bits; on more, the last bits depend on the places at which parameters are cut.
    #[track_caller]
    pub fn grad_norm(&self) -> Result<Option<f64>> {
        self.grad_norm.as_ref().map(Tensor::item).transpose()
    }

    /// False if the update was skipped because a gradient was not finite on some rank. Steps are skipped with loss
    /// scaling, or where the configuration [skips them](super::TrainingConfig::skip_non_finite).
    pub fn stepped(&self) -> bool {
        self.stepped
    }

    /// The learning rate of the step (of the first group).
    pub fn learning_rate(&self) -> f64 {
        self.learning_rate
    }

    /// The number of updates so far, this one included.
    pub fn global_step(&self) -> u64 {
        self.global_step
    }
}
