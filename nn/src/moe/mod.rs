//! Mixtures of experts: a layer of many feed-forward networks, of which each token uses a few.
//!
//! A [`Router`] scores the experts for every token and picks `k` of them. The tokens are ordered by expert (a
//! [`TokenOrder`]), and each of the [`Experts`] computes its tokens. A token's output is the sum of its experts'
//! outputs by weight, in the order in which they were picked. Nothing is dropped unless a [`Capacity`] says so.
//!
//! | | picks by | weighs by | keeps experts busy by |
//! |---|---|---|---|
//! | Mixtral, Qwen3-MoE | softmax | softmax, divided by the sum over the picked | [`Routing::balance_loss`] |
//! | DeepSeek-V3 | sigmoid + bias | sigmoid, divided by the sum over the picked, times a factor | [`MixtureOfExperts::update_balance_bias`] |
//!
//! A [plan](crate::parallel::TensorPlan::experts) shares out the experts among ranks that have different examples. The
//! layer stays as it is. Rows travel to the ranks of their experts and back, and a token's sum has the order that it
//! has on one rank. Loads, the balance loss and capacities are then those of the tokens of all ranks.
//!
//! Sources: Shazeer et al. 2017 (the layer), Fedus et al. 2021 (balance loss, capacity), Zoph et al. 2022 (z-loss),
//! DeepSeek-AI 2024 (shared experts, bias).

mod capacity;
mod config;
mod dispatch;
mod experts;
mod layer;
mod order;
mod router;
mod routing;

pub use capacity::{Capacity, DropBy};
pub use config::{ClampedSwiGlu, MoeConfig, RouterGroups};
pub use experts::{Experts, GatedMlp};
pub use layer::{MixtureOfExperts, MoeOutput};
pub use order::TokenOrder;
pub use router::{Router, RouterScores};
pub use routing::Routing;
