//! The input and the output of a pipeline's run.

use numcore::{Error, Result, Runtime, Tensor, ops::ViewOps};

use crate::{loss::Loss, pipeline::TimelineEvent};

/// The micro-batches of a run. Only the rank of the first stage reads inputs, and only the rank of the last stage reads
/// targets. Other ranks may leave them empty, or fill them because every rank reads the same data.
#[derive(Clone, Debug)]
pub struct MicroBatches<R: Runtime> {
    /// The inputs of the first stage, for each micro-batch.
    pub inputs: Vec<Vec<Tensor<R>>>,
    /// The targets, for each micro-batch: the loss gets them beside the last stage's outputs.
    pub targets: Vec<Vec<Tensor<R>>>,
    /// True if the losses weigh nothing and change no gradient: this replica has no example in a step of the others.
    /// All ranks of the replica must set the same value.
    pub weightless: bool,
}

impl<R: Runtime> MicroBatches<R> {
    /// No micro-batches: for a rank with neither the first nor the last stage.
    pub fn none() -> Self {
        MicroBatches { inputs: Vec::new(), targets: Vec::new(), weightless: false }
    }

    /// Cuts a batch along the first axis of all its tensors into `count` micro-batches. The first ones have a row more
    /// if they cannot be equal. That needs [`dynamic_shapes`](super::PipelineOptions::dynamic_shapes), except in
    /// evaluations.
    ///
    /// # Errors
    /// Fails if a first axis has fewer than `count` rows.
    #[track_caller]
    pub fn split(inputs: &[Tensor<R>], targets: &[Tensor<R>], count: usize) -> Result<Self> {
        let inputs = (0..count).map(|k| part(inputs, k, count)).collect::<Result<_>>()?;
        let targets = (0..count).map(|k| part(targets, k, count)).collect::<Result<_>>()?;
        Ok(MicroBatches { inputs, targets, weightless: false })
    }
}

fn part<R: Runtime>(tensors: &[Tensor<R>], k: usize, count: usize) -> Result<Vec<Tensor<R>>> {
    let one = |x: &Tensor<R>| {
        let rows = x.shape().first().copied().filter(|&rows| rows >= count).ok_or_else(|| {
            let why = format!("the first axis has no row for each of {count} micro-batches: fill it up");
            Error::shape("MicroBatches::split", &[*x.shape()], why)
        })?;
        let (each, more) = (rows / count, rows % count);
        x.narrow(0, k * each + k.min(more), each + usize::from(k < more))
    };
    tensors.iter().map(one).collect()
}

/// The output of a run on this rank.
pub struct PipelineOutput<R: Runtime> {
    pub(crate) losses: Vec<Loss<R>>,
    pub(super) outputs: Vec<Vec<Tensor<R>>>,
    pub(super) input_gradients: Vec<Vec<Tensor<R>>>,
    pub(super) peak_live: usize,
    pub(super) events: Vec<TimelineEvent>,
}

impl<R: Runtime> PipelineOutput<R> {
    /// The losses of the micro-batches, detached, on the rank of the last stage; empty on others.
    /// [`Pipeline::losses`](super::Pipeline::losses) gives them to all ranks.
    pub fn losses(&self) -> &[Loss<R>] {
        &self.losses
    }

    /// The outputs of the last stage for each micro-batch, after a run without backward; empty on other ranks.
    pub fn outputs(&self) -> &[Vec<Tensor<R>>] {
        &self.outputs
    }

    /// The gradients of the sum of all losses with respect to the floating inputs of each micro-batch, on the rank of
    /// the first stage. Empty unless [requested](super::PipelineOptions::input_gradients).
    #[doc(alias("input_grads"))]
    pub fn input_gradients(&self) -> &[Vec<Tensor<R>>] {
        &self.input_gradients
    }

    /// The largest number of micro-batches, summed over this rank's stages, whose activations it held at once. It
    /// equals the prediction of [`simulate`](crate::pipeline::Schedule::simulate).
    pub fn peak_live(&self) -> usize {
        self.peak_live
    }
}
