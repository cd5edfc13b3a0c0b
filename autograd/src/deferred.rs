//! Deferred weight gradients: the weight part (W) of a backward pass that is split into I (input gradients) and W.

use numcore::{Result, Runtime};

use crate::{BackwardHook, no_grad, sweep::Sweep};

/// The op calls that [`Backward::inputs_only`](crate::Backward::inputs_only) deferred. Running them notifies the hook
/// of each remaining leaf once, as an undivided pass does. The deferred calls run first, then the nodes off the paths
/// to the inputs.
#[must_use = "dropping it loses weight gradients"]
pub struct Deferred<R: Runtime>(Sweep<R>);

impl<R: Runtime> Deferred<R> {
    pub(crate) fn new(sweep: Sweep<R>) -> Self {
        Deferred(sweep)
    }

    /// The number of deferred op calls. Nodes off the paths to the inputs, which run later as a whole, are not counted.
    pub fn len(&self) -> usize {
        self.0.kept.len()
    }

    /// Tells whether `len` is 0.
    pub fn is_empty(&self) -> bool {
        self.0.kept.is_empty()
    }

    /// Runs the deferred op calls and nodes, and delivers the gradients of their leaves to `hook`.
    pub fn run(mut self, hook: &mut dyn BackwardHook<R>) -> Result<()> {
        no_grad(|| self.0.resume(hook))
    }
}
