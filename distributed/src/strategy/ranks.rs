//! The ranks of a training step.

use numcore::Runtime;

use crate::comm::Comm;

/// The ranks that train together.
#[derive(Clone, Debug)]
pub struct StepRanks<R: Runtime> {
    /// The ranks that take a step together, and decide alike.
    pub everyone: Comm<R>,
    /// The ranks over which gradients and losses are summed: those that examples are shared out among, and those that
    /// have parts of the same sequences.
    pub losses: Comm<R>,
    /// This rank's share of a batch: ranks that have parts of the same sequences, or pieces of the same layers, read
    /// the same.
    pub share: BatchShare,
    /// True on the first rank along tensor, whose measurements of examples count: the others read the same ones.
    pub counts_examples: bool,
    /// The number of ranks along context, which all tell the weight of the same sequences: sums of weights over
    /// [`losses`](StepRanks::losses) are divided by it.
    pub alike: usize,
    /// The number of the random stream that checkpoints keep of this rank: ranks that draw the same values have the
    /// same one.
    pub draws_as: usize,
}

/// A share of each batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchShare {
    /// The number of the share.
    pub index: usize,
    /// How many shares there are.
    pub of: usize,
}
