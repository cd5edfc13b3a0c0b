//! The ranks of a training step.

use numcore::Runtime;

use crate::comm::Comm;

/// The groups of ranks that train together, and this rank's place in them.
#[derive(Clone, Debug)]
pub struct StepRanks<R: Runtime> {
    /// The ranks that take a step together, and decide alike.
    pub everyone: Comm<R>,
    /// The ranks over which losses are summed, and the gradients of a model without stages. They read different
    /// examples, or parts of the same sequences. In a pipeline the ranks of all stages are among them.
    pub losses: Comm<R>,
    /// This rank's share of a batch. Ranks that have parts of the same sequences, or pieces of the same layers, read
    /// the same share.
    pub share: BatchShare,
    /// True on the first rank along tensor, whose measurements of examples count: the other ranks read the same
    /// examples.
    pub counts_examples: bool,
    /// The number of ranks along context. Each of them reports the weight of the whole sequences, so sums of weights
    /// over [`losses`](StepRanks::losses) are divided by this number.
    pub context_ranks: usize,
    /// The number of the random stream that checkpoints keep for this rank. Ranks that draw the same values have the
    /// same number.
    pub random_stream: usize,
}

/// A share of each batch: part `index` of `of` parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchShare {
    /// The number of the share, from 0.
    pub index: usize,
    /// The number of shares.
    pub of: usize,
}
