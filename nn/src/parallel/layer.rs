//! Traits of layers that a plan can cut, for layers made of them.

use autograd::Var;
use numcore::{Result, Runtime};

use super::Cuts;

/// A layer whose weight a plan can cut: [`Linear`](crate::Linear), [`Embedding`](crate::Embedding).
pub trait CutLayer<R: Runtime>: Sized {
    /// Sets the cuts that a plan may choose, for the weight, and for a bias accordingly.
    ///
    /// [`Cuts::Weight`] keeps heads or fused parts together. [`Cuts::Table`] makes the layer one to logits. It is cut
    /// along its vocabulary or not at all: no layer after it takes a part of them. [`Cuts::None`] excludes it
    /// from every plan, as for a table that is read by other means than its layer.
    fn with_cuts(self, cuts: Cuts) -> Self;

    /// The logits of this rank's rows of the vocabulary, `[.., V/t]` where the layer is cut along it over `t` ranks.
    /// Where these do not divide it, the last have fewer logits, or none. For a loss that takes sharded logits
    /// ([`VocabularyLoss`](super::VocabularyLoss)).
    fn project_here(&self, x: &Var<R>) -> Result<Var<R>>;
}

/// A layer that shares its input with others that are cut alike, as queries, keys and values do.
pub trait SharedInput<R: Runtime> {
    /// Prepares an input for this layer and others that are cut alike. Each gets it by
    /// [`forward_entered`](SharedInput::forward_entered), so the input gradient is summed over ranks once for all of
    /// them. Where the sequence is cut, the gathered input is kept for their weight gradients;
    /// [`forward`](crate::Forward::forward) gathers it again instead.
    fn enter(&self, x: &Var<R>) -> Result<Var<R>>;

    /// The output for an input prepared by [`enter`](SharedInput::enter). Outputs of a layer that is cut along them
    /// stay cut.
    fn forward_entered(&self, x: &Var<R>) -> Result<Var<R>>;
}
