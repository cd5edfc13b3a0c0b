//! What a step tells.

use numcore::{DType, Result, Runtime, Tensor};

/// What a step did. Its numbers stay on the device until they are asked for.
#[derive(Clone, Debug)]
pub struct TrainingMetrics<R: Runtime> {
    pub(crate) loss: Tensor<R>,
    /// This rank's losses and their weights: `[2, micro-batches]`.
    pub(crate) own: Tensor<R>,
    pub(crate) own_weight: f64,
    pub(crate) weight: Tensor<R>,
    /// How many ranks have parts of the same sequences, of which each says what they weigh.
    pub(crate) alike: usize,
    pub(crate) grad_norm: Option<Tensor<R>>,
    pub(crate) stepped: bool,
    pub(crate) learning_rate: f64,
    pub(crate) global_step: u64,
    pub(crate) meeting: Option<Meeting>,
}

/// How far ranks had gone apart when they brought their weights together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Meeting {
    /// The number of the meeting, from 1.
    pub number: u64,
    /// The fragment that met, or the first of those that did.
    pub fragment: usize,
    /// The largest distance of a rank's weights from the new global ones, over the norm of these.
    pub divergence: f64,
}

impl<R: Runtime> TrainingMetrics<R> {
    /// The mean loss over everything all ranks contributed; waits for the device.
    pub fn loss(&self) -> Result<f64> {
        self.loss.item()
    }

    /// The mean loss over this rank's micro-batches, before anything is summed over ranks; none where they weigh nothing. Waits for the device.
    #[doc(alias("local_loss"))]
    pub fn own_loss(&self) -> Result<Option<f64>> {
        let own: Vec<f64> = match self.own.dtype() {
            DType::F64 => self.own.to_vec()?,
            _ => self.own.to_vec::<f32>()?.into_iter().map(f64::from).collect(),
        };
        let (sums, weights) = own.split_at(own.len() / 2);
        let weight: f64 = weights.iter().sum();
        Ok((weight != 0.0).then(|| sums.iter().sum::<f64>() / weight))
    }

    /// What the losses of all ranks and micro-batches weighed together: tokens, where each was a sum over tokens; waits for the device.
    pub fn weight(&self) -> Result<f64> {
        Ok(self.weight.item()? / self.alike as f64)
    }

    /// The weight of this rank's own losses.
    pub fn own_weight(&self) -> f64 {
        self.own_weight
    }

    /// The meeting of ranks that this step ended with, where they [train by themselves](crate::local_updates) in
    /// between.
    pub fn meeting(&self) -> Option<Meeting> {
        self.meeting
    }

    /// The norm of all gradients before clipping, where there is clipping; waits for the device. Squares are added up for each parameter by
    /// itself, then in the model's order: it depends on the gradients alone, not on buckets. Where gradients are sharded, each piece of a
    /// parameter is added up by itself: on one rank that is the same, to the bit; on more, the last bits depend on where the number of
    /// ranks and the units cut parameters.
    pub fn grad_norm(&self) -> Result<Option<f64>> {
        self.grad_norm.as_ref().map(Tensor::item).transpose()
    }

    /// False if the step was left out because a gradient was not finite somewhere: a scaled one, or any where such steps are
    /// [left out](super::TrainingConfig::skip_non_finite).
    pub fn stepped(&self) -> bool {
        self.stepped
    }

    /// The learning rate it was taken with (of the first group).
    pub fn learning_rate(&self) -> f64 {
        self.learning_rate
    }

    /// Updates so far, this one included.
    pub fn global_step(&self) -> u64 {
        self.global_step
    }
}
