//! State that a step without an update must leave as it was.

use autograd::{RandomState, random_state};
use nn::Buffer;
use numcore::{Result, Runtime, Tensor};

/// The random state and the values of buffers before a step. Weights need no copy: a step changes them last, and
/// reports a failure within that change.
pub(super) struct BeforeStep<R: Runtime> {
    pub random: RandomState,
    buffers: Vec<Tensor<R>>,
}

impl<R: Runtime> BeforeStep<R> {
    pub(super) fn note(buffers: &[Buffer<R>]) -> Self {
        BeforeStep { random: random_state(), buffers: buffers.iter().map(Buffer::value).collect() }
    }

    /// Restores the buffers' values from before the step: forward passes have moved the running statistics of
    /// normalizations.
    pub(super) fn restore_buffers(self, buffers: &[Buffer<R>]) -> Result<()> {
        buffers.iter().zip(self.buffers).try_for_each(|(buffer, value)| buffer.set(value))
    }
}
