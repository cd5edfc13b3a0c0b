//! Tensor parallelism: layers cut over the ranks along a mesh's tensor axis. Any strategy trains them over the data and
//! shard axes, as an unstaged model or as stages of a pipeline.
//!
//! [`Mesh::parallelize`](crate::mesh::Mesh::parallelize) cuts a model, or a stage, by a
//! [`TensorPlan`](nn::parallel::TensorPlan); the layers are in `nn`. This module has the part of a training step:
//!
//! | a parameter that is | sums its gradient over | counts in the norm | is in checkpoints of |
//! |---|---|---|---|
//! | cut | data × shard | on each rank | each rank |
//! | equal on every rank | data × shard | on the first | the first |
//! | equal on every rank, with partial gradients | data × shard, then tensor, once a step | on the first | the first |
//!
//! Partial gradients come from layers that compute on a part of the sequence. Heads of keys and values that several
//! ranks share have them too.
//!
//! **Invariant**: ranks along the tensor axis read the same examples and decide alike.

mod pieces;
mod ranks;

pub use ranks::TensorRanks;
