//! Expert parallelism: experts of mixtures shared out among ranks that read different tokens, beside any strategy for
//! the rest.
//!
//! [`Mesh::parallelize`](crate::mesh::Mesh::parallelize) leaves each rank some of the experts that a plan names
//! ([`TensorPlan::experts`](nn::parallel::TensorPlan::experts)). The layers, which send tokens to their experts and
//! back, are `nn`'s. This module trains experts and all the rest of a model as two models, each with a strategy of its
//! own:
//!
//! | | gradients are summed over | ZeRO shards it over | in the norm it counts |
//! |---|---|---|---|
//! | the rest | data × shard × context | shard × context (or data) | once |
//! | experts | those of data × shard × context with the same ones | see below | once, summed over the expert axis |
//!
//! ZeRO shards an expert over the ranks along shard × context that have it. For that, the size `e` of the expert axis
//! must divide shard × context into several such ranks. Otherwise ZeRO shards over all ranks with the expert.
//!
//! The gradient of an expert sums over the tokens of all ranks that reached it; nothing is scaled.
//!
//! **Invariant**: ranks make the same calls whatever their tokens are. An expert without tokens takes part in every
//! exchange, with none. A rank without examples computes a loss of weight 0.

mod part;
mod strategy;

pub(crate) use part::{expert_leaves, has_experts};
pub(crate) use strategy::{require_experts, with_experts};
