//! What goes into a run and what comes out of it.

use numcore::{Error, Result, Runtime, Tensor, ops::ViewOps};

use crate::{loss::Loss, pipeline::TimelineEvent};

/// A step's micro-batches. Only the rank of the first stage looks at inputs and only that of the last stage at targets: elsewhere
/// they may be left empty, or be there because every rank reads the same data.
#[derive(Clone, Debug)]
pub struct MicroBatches<R: Runtime> {
    /// What the first stage is given, per micro-batch.
    pub inputs: Vec<Vec<Tensor<R>>>,
    /// What the loss is given beside the last stage's outputs, per micro-batch.
    pub targets: Vec<Vec<Tensor<R>>>,
    /// Whether their losses weigh nothing, so that they change no gradient: this replica has no example of its own in a step of the others. All of its ranks say
    /// the same.
    pub weightless: bool,
}

impl<R: Runtime> MicroBatches<R> {
    /// None: for a rank with neither the first nor the last stage.
    pub fn none() -> Self {
        MicroBatches { inputs: Vec::new(), targets: Vec::new(), weightless: false }
    }

    /// Cuts a batch along the first axis of all its tensors into `count` equal micro-batches.
    ///
    /// # Errors
    /// When a first axis is no multiple of `count`: micro-batches of one pipeline have the same shapes.
    pub fn split(inputs: &[Tensor<R>], targets: &[Tensor<R>], count: usize) -> Result<Self> {
        let inputs = (0..count).map(|k| part(inputs, k, count)).collect::<Result<_>>()?;
        let targets = (0..count).map(|k| part(targets, k, count)).collect::<Result<_>>()?;
        Ok(MicroBatches { inputs, targets, weightless: false })
    }
}

fn part<R: Runtime>(tensors: &[Tensor<R>], k: usize, count: usize) -> Result<Vec<Tensor<R>>> {
    let one = |x: &Tensor<R>| {
        let rows = x.shape().first().copied().filter(|rows| rows.is_multiple_of(count)).ok_or_else(|| {
            let why =
                format!("the first axis must make {count} equal micro-batches; pad it, or leave the last rows out");
            Error::shape("MicroBatches::split", &[*x.shape()], why)
        })?;
        x.narrow(0, k * (rows / count), rows / count)
    };
    tensors.iter().map(one).collect()
}

/// What a run left on this rank.
pub struct PipelineOutput<R: Runtime> {
    pub(crate) losses: Vec<Loss<R>>,
    pub(super) outputs: Vec<Vec<Tensor<R>>>,
    pub(super) input_gradients: Vec<Vec<Tensor<R>>>,
    pub(super) peak_live: usize,
    pub(super) events: Vec<TimelineEvent>,
}

impl<R: Runtime> PipelineOutput<R> {
    /// The losses of the micro-batches, detached, on the rank of the last stage; empty elsewhere.
    /// [`Pipeline::losses`](super::Pipeline::losses) gives them to all.
    pub fn losses(&self) -> &[Loss<R>] {
        &self.losses
    }

    /// What the last stage made of each micro-batch, where there was no backward; empty elsewhere.
    pub fn outputs(&self) -> &[Vec<Tensor<R>>] {
        &self.outputs
    }

    /// The gradients of the sum of all losses with respect to the floating inputs of each micro-batch, on the rank of the first stage,
    /// if they were [asked for](super::PipelineOptions::input_gradients).
    #[doc(alias("input_grads"))]
    pub fn input_gradients(&self) -> &[Vec<Tensor<R>>] {
        &self.input_gradients
    }

    /// The most micro-batches, summed over this rank's stages, whose activations it held at once: what
    /// [`simulate`](crate::pipeline::Schedule::simulate) says.
    pub fn peak_live(&self) -> usize {
        self.peak_live
    }
}
