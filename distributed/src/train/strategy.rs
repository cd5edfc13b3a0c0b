//! What differs between ways of training on many ranks.

use autograd::BackwardHook;
use numcore::{Result, Runtime};

use super::{BufferSync, ReducedGradients};
use crate::comm::Comm;

/// A way of spreading training over ranks: where gradients go while the backward pass goes on, and how parameters are updated. The step
/// itself is [`TrainStep`](super::TrainStep)'s.
pub trait Strategy<R: Runtime>: BackwardHook<R> + ReducedGradients<R> {
    /// The ranks over which gradients and losses are summed: those that examples are shared out among, and those that have parts of the same
    /// sequences.
    fn comm(&self) -> &Comm<R>;
    /// Which share of a batch this rank reads, of how many: ranks that have parts of the same sequences read the same.
    fn share(&self) -> (usize, usize);
    /// The ranks that take a step together: those, and the ranks that hold other pieces of the same layers.
    fn everyone(&self) -> &Comm<R> {
        self.comm()
    }
    /// Whether what this rank measures of its examples counts: ranks that have other pieces of the same layers measure the same.
    fn counts_examples(&self) -> bool {
        true
    }
    /// Before a step: forgets the last one's gradients.
    fn prepare(&mut self) -> Result<()>;
    /// Before a backward pass; `last` tells whether it is the step's last.
    fn begin(&mut self, last: bool) -> Result<()>;
    /// Before the last backward pass, after [`begin`](Strategy::begin): what this rank's losses of the step weigh, the loss scale (1 without one), and
    /// whether the step may be left out once its gradients are known; for those who send anything but sums.
    fn set_loss_weight(&mut self, weight: f64, scale: f64, skippable: bool) -> Result<()> {
        let _ = (weight, scale, skippable);
        Ok(())
    }
    /// After a backward pass. Where this rank had nothing to sweep, [`begin`](Strategy::begin) and this are called all the same. A pipeline, whose
    /// passes follow one another in any order, calls [`begin`](Strategy::begin) alone.
    fn end(&mut self) -> Result<()> {
        Ok(())
    }
    /// After the last backward pass: every gradient is the sum over all ranks and micro-batches, as far as this rank keeps it.
    fn finish(&mut self) -> Result<()>;
    /// After the update, on every rank: makes the ranks' buffers equal, if they are to be.
    fn sync_buffers(&self, how: BufferSync) -> Result<()> {
        let _ = how;
        Ok(())
    }
    /// Whether a rank may take part in a step without a backward pass: its losses weigh nothing then.
    fn may_idle(&self) -> bool;
    /// Prepares for steps in which a rank computes nothing, or for others again: whether there can be such. Every rank calls it alike.
    fn let_idle(&mut self, yes: bool) -> bool {
        let _ = yes;
        self.may_idle()
    }
    /// Whether ranks may take different numbers of passes in a step: whether nothing is exchanged in any pass but the last.
    fn may_differ_in_passes(&self) -> bool {
        false
    }
    /// What helps a rank that has none, where it [may not](Strategy::may_idle).
    fn instead_of_idling(&self) -> &'static str {
        "allow unused parameters (`Unused::Allow`)"
    }
}
