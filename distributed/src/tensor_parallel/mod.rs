//! Tensor parallelism: layers cut over the ranks along a mesh's tensor axis, trained by any strategy over its data and shard axes, as a whole
//! model or as stages of a pipeline.
//!
//! [`Mesh::parallelize`](crate::mesh::Mesh::parallelize) cuts a model, or a stage, by a [`TensorPlan`](nn::parallel::TensorPlan); the layers are `nn`'s.
//! What is left to do here is what a training step does with pieces:
//!
//! | of a parameter that is | gradients are summed over | in the norm it counts | a checkpoint has it from |
//! |---|---|---|---|
//! | cut | data × shard | on each rank | each rank |
//! | whole on every rank | data × shard | on the first | the first |
//! | whole, of which each rank has a partial gradient | those, then tensor, once a step | on the first | the first |
//!
//! Partial gradients are those of layers that compute on a part of the sequence, and of heads of keys and values that several ranks share.
//!
//! **Invariant**: ranks along the tensor axis read the same examples and decide alike.

mod pieces;
mod ranks;

pub use ranks::TensorRanks;
