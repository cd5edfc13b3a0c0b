//! Tensor and context parallelism. Tensor parallelism: a model whose layers are cut over the ranks of a group, with the values and gradients of the whole model.
//!
//! A model is written, and made, as on one rank. A [`TensorPlan`] says by the names of its layers which are cut and how;
//! [`TensorPlan::apply`] leaves each rank with its pieces of the parameters and tells the layers. From then on [`Linear`](crate::Linear),
//! [`Embedding`](crate::Embedding) and what is made of them exchange what they need through the [`TensorGroup`] that they were given, which
//! someone else implements: nothing here knows how ranks talk.
//!
//! | style | weight | forward | backward |
//! |---|---|---|---|
//! | [`Column`](TensorStyle::Column) | cut along its outputs | nothing | input gradients are summed |
//! | [`Row`](TensorStyle::Row) | cut along its inputs | partial outputs are summed; the bias is added after that | nothing |
//! | [`Vocabulary`](TensorStyle::Vocabulary) | cut along its rows | rows are looked up where they are, and summed; logits are gathered | as for `Column` |
//! | [`Replicated`](TensorStyle::Replicated) | whole | nothing | nothing |
//! | [`Experts`](TensorStyle::Experts) | some of the experts | tokens travel to their experts, and back | their gradients do |
//!
//! A column-parallel layer followed by a row-parallel one, as in attention and in a feed-forward network, costs one sum forward and one
//! backward (Shoeybi et al. 2019).
//!
//! Experts are shared out among other ranks ([`ExpertGroups`]): those that have different examples.
//!
//! Context parallelism leaves the layers whole and cuts sequences: a model's [`ContextSlot`]s take a rank's part of tokens and targets, and its
//! attention sees the keys of all ranks through the [`ContextGroup`] that [`cut_sequences`] gave them.
//!
//! **Invariant**: ranks of a group compute with the same inputs, or make the same calls whatever their tokens are, so all of them make the same
//! exchanges in the same order.

mod apply;
mod context;
mod cuts;
mod group;
mod loss;
mod placed;
mod plan;
mod sequence;

pub(crate) use apply::PieceOf;
pub use context::{
    ContextAttention, ContextGroup, ContextRoles, ContextSlot, context_ranks, cut_sequences, cut_sequences_of_part,
    same_segment,
};
pub use cuts::{Cuts, RowCut};
pub use group::{Exchange, ExpertGroups, TensorGroup};
pub use loss::VocabularyLoss;
pub use placed::Placed;
pub(crate) use placed::own_rows;
pub use plan::{TensorPlan, TensorStyle};
pub use sequence::SequencePart;
