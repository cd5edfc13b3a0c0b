//! Tensor and context parallelism: the layers of a model, or its sequences, cut over the ranks of a group.
//!
//! Tensor parallelism keeps the values and gradients of the uncut model. A model is written, and constructed, as on one
//! rank. A [`TensorPlan`] names the layers to cut and the style of each cut. [`TensorPlan::apply`] leaves each rank
//! with its pieces of the parameters and informs the layers. From then on [`Linear`](crate::Linear),
//! [`Embedding`](crate::Embedding) and layers made of them exchange data through the [`TensorGroup`] they were given.
//! The group is implemented elsewhere: this module does not depend on any means of communication.
//!
//! | style | weight | forward | backward |
//! |---|---|---|---|
//! | [`Column`](TensorStyle::Column) | cut along its outputs | nothing | input gradients are summed |
//! | [`Row`](TensorStyle::Row) | cut along its inputs | partial outputs are summed; the bias is added after that | nothing |
//! | [`Gathered`](TensorStyle::Gathered) | cut along its outputs | inputs are gathered, and outputs | input gradients are summed |
//! | [`Vocabulary`](TensorStyle::Vocabulary) | cut along its rows | rows are looked up where they are, and summed; logits are gathered | as for `Column` |
//! | [`Replicated`](TensorStyle::Replicated) | unsharded | nothing | nothing |
//! | [`Experts`](TensorStyle::Experts) | some of the experts | tokens travel to their experts, and back | their gradients do |
//!
//! A column-parallel layer followed by a row-parallel one, as in attention and feed-forward networks, costs one
//! all-reduce forward and one backward (Shoeybi et al. 2019).
//!
//! Experts are sharded over other ranks ([`ExpertGroups`]), which have different examples.
//!
//! Context parallelism leaves the layers unsharded and cuts sequences. A model's [`ContextSlot`]s take this rank's part
//! of tokens and targets. Its attention sees the keys of all ranks through the [`ContextGroup`] that [`cut_sequences`]
//! gave them.
//!
//! **Invariant**: ranks of a group compute with the same inputs, or make the same calls whatever their tokens are. So
//! all of them make the same exchanges in the same order.

mod apply;
mod context;
mod cut_sequences;
mod cuts;
mod gathered;
mod group;
mod largest_scores;
mod layer;
mod loss;
mod placed;
mod plan;
mod scores;
mod segments;
mod sequence;

pub(crate) use apply::PieceOf;
pub use context::{ContextAttention, ContextGroup, ContextSlot};
pub use cut_sequences::{ContextRoles, attention_slots, context_ranks, cut_sequences, cut_sequences_of_part};
pub use cuts::{Cuts, RowCut};
pub use group::{Exchange, ExpertGroups, TensorGroup};
pub use layer::{CutLayer, SharedInput};
pub use loss::VocabularyLoss;
pub use placed::Placed;
pub(crate) use placed::{fill_up, local_rows};
pub use plan::{TensorPlan, TensorStyle};
pub(crate) use scores::first_query;
pub use scores::{AttendedTokens, AttentionScores, set_scores};
pub use segments::same_segment;
pub use sequence::SequencePart;
