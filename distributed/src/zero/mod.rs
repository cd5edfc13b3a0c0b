//! ZeRO: parameters, gradients and optimizer state, each either on every rank or cut into shards.
//!
//! A unit (a layer) is a buffer of parameters that are gathered, reduced and updated together. One engine has three
//! switches. Stage 1 shards the state, stage 2 reduces gradients to shards, and stage 3 gathers parameters before use
//! and releases them afterwards. Cuts go through parameters; optimizers see rows, of a shard as of an unsharded buffer.
//! A rule that needs whole parameters (Muon, LAMB, Adafactor) has each of them in one shard.
//!
//! Rajbhandari et al., *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*, 2020; Zhao et al.,
//! *PyTorch FSDP*, 2023.
//!
//! Besides the root and its gradients, at most three units are unsharded in memory at once. In forward these are the
//! unit that is read and the next one. In backward they are a unit, its gradients, and a third. In the first half of
//! the unit's leaves the third is the gradients in flight of the unit before. In the second half it is the values of
//! the unit after. The options `reduce_once`, `gathered_until_backward` and `whole_up_to` keep more.
//!
//! Values that are put into parameters from outside (a state dict, [`Param::set`](nn::Param::set)) are the parameters'
//! from then on, as in data parallelism. Every rank must be given equal ones.
//!
//! **Invariant**: all ranks reduce units in one order, in which their gradients became final on rank 0 in the first
//! step. All ranks gather units in the order in which the model reads them.

mod build;
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
mod sums;
mod unit;
mod values;

pub use layout::{Piece, UnitLayout};
pub use optim::StatePlace;
pub use options::{UnitOf, ZeroOptions, ZeroStage};
pub use sharded::{OwnedElements, Sharded};

pub use crate::strategy::FullParameters;
