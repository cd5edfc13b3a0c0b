//! Expert parallelism: the experts of mixtures shared out among ranks that read different tokens, trained with whatever trains the rest.
//!
//! [`Mesh::parallelize`](crate::mesh::Mesh::parallelize) leaves each rank some of the experts that a plan names
//! ([`TensorPlan::experts`](nn::parallel::TensorPlan::experts)); the layers, which send tokens to their experts and back, are `nn`'s. What is left
//! to do here is what a training step does with experts and with all the rest, which are two models to it, each with a strategy of its own:
//!
//! | | gradients are summed over | ZeRO shards it over | in the norm it counts |
//! |---|---|---|---|
//! | the rest | data × shard × context | shard × context (or data) | once |
//! | experts | the ranks of data × shard × context that have the same ones | those of them along shard × context, if there are and `e` divides these, or all of them | once, summed over the expert axis |
//!
//! The gradient of an expert comes from the tokens of all ranks, which reached it: sums are sums, and nothing is scaled.
//!
//! **Invariant**: ranks make the same calls whatever their tokens are. An expert without tokens takes part in every exchange, with none of them,
//! and a rank without examples computes something that weighs nothing.

mod part;
mod strategy;

pub(crate) use part::{expert_leaves, has_experts};
pub(crate) use strategy::{of_part, require_experts};
