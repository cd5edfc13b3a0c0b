//! Deferred weight gradients: the W of a backward split into I and W.

use numcore::{Result, Runtime};

use crate::{BackwardHook, no_grad, sweep::Sweep};

/// Op calls that [`Backward::inputs_only`](crate::Backward::inputs_only) deferred. Running them fires the same hooks,
/// in the same order of settlement, as an undivided backward would have.
#[must_use = "dropping it loses weight gradients"]
pub struct Deferred<R: Runtime>(Sweep<R>);

impl<R: Runtime> Deferred<R> {
    pub(crate) fn new(sweep: Sweep<R>) -> Self {
        Deferred(sweep)
    }

    /// The number of deferred op calls.
    pub fn len(&self) -> usize {
        self.0.kept.len()
    }

    /// Whether there are no deferred op calls.
    pub fn is_empty(&self) -> bool {
        self.0.kept.is_empty()
    }

    /// Runs the deferred op calls and delivers their gradients to `hook`.
    pub fn run(mut self, hook: &mut dyn BackwardHook<R>) -> Result<()> {
        no_grad(|| self.0.resume(hook))
    }
}
