//! ZeRO: parameters, gradients and optimizer state, each either on every rank or cut into equal shards.
//!
//! A unit (a layer) is a buffer of parameters that are gathered, reduced and updated together. There is one engine, and three questions to it:
//! is the state sharded (stage 1), are gradients reduced to shards (stage 2), are parameters gathered before use and released
//! afterwards (stage 3)? Cuts go through parameters; optimizers see rows and cannot tell a shard from the whole.
//!
//! Rajbhandari et al., *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*, 2020; Zhao et al., *PyTorch FSDP*, 2023.
//!
//! Of what is sharded, beside the root and gradients of the root, at most three units are there in whole at once: in forward the one that is
//! read and the next; in backward one, its gradients and, in the first half of its leaves, the gradients before it in flight, in the
//! second, the values of the one after. Options that keep more say so: `reduce_once`, `gathered_until_backward` and `whole_up_to`.
//!
//! Values that someone puts into parameters afterwards (a state dict, [`Param::set`](nn::Param::set)) are the parameters' from then on, as
//! they are in data parallelism; every rank must be given the same ones.
//!
//! **Invariant**: units are reduced in one order on all ranks, which is that in which their gradients became final on rank 0 in the first
//! step, and gathered in the order in which the model reads them.

mod checkpoint;
mod engine;
mod gradients;
mod kept;
mod layout;
mod options;
mod order;
mod rates;
mod residency;
mod sharded;
mod stages;
mod unit;
mod values;

pub use layout::{Piece, UnitLayout};
pub use optim::StatePlace;
pub use options::{UnitOf, ZeroOptions, ZeroStage};
pub use sharded::{OwnedElements, Sharded};

pub use crate::strategy::FullParameters;
pub use stages::{ZeroStage1, ZeroStage2, ZeroStage3};
