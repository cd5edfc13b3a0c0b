//! Collectives that gradients flow through, for custom layers that are cut over ranks.
//!
//! Each is the gradient of another, so all can be differentiated any number of times ([`Exchange`] has the table). On
//! one rank nothing is exchanged, and nothing is recorded.
//!
//! ```
//! use autograd::Var;
//! use comm::{Comm, Ranks};
//! use distributed::differentiable;
//! use numcore::{NullRuntime, Result, Runtime, ops::MatmulOps};
//!
//! /// Two linear layers, the first cut along its outputs, the second along its inputs: one sum forward, one backward.
//! fn feed_forward<R: Runtime>(comm: &Comm<R>, x: &Var<R>, up: &Var<R>, down: &Var<R>) -> Result<Var<R>> {
//!     let x = differentiable::copy(comm, x)?;
//!     differentiable::all_reduce(comm, &x.linear(up, None)?.linear(down, None)?)
//! }
//! ```
//!
//! **Invariant**: a rank whose value took no part in the loss joins the collective of its gradient with zeros, because
//! the others wait for it. That holds for calls that its backward pass reaches, in [checkpointed](autograd::checkpoint)
//! segments too. From a value outside of every loss nothing is reached, so a rank that does not use one adds
//! `0 · value` to its loss.

mod all_to_all;
mod exchange;

use autograd::Var;
use nn::parallel::Exchange;
use numcore::{Result, Runtime};

pub use all_to_all::{all_to_all, all_to_all_parts, all_to_all_parts_of};
pub(crate) use exchange::start;
pub use exchange::{exchange, exchange_of};

use crate::comm::Comm;

/// Returns the value, which all ranks have and use differently; backward sums its gradients over ranks.
///
/// A parameter that ZeRO shards, passed directly, stays gathered until its gradient is computed: pass a value computed
/// from it.
#[track_caller]
pub fn copy<R: Runtime>(comm: &Comm<R>, x: &Var<R>) -> Result<Var<R>> {
    exchange(Exchange::Copy, comm, x)
}

/// All-reduce: the sum of all ranks' values, which all ranks use alike.
#[track_caller]
pub fn all_reduce<R: Runtime>(comm: &Comm<R>, x: &Var<R>) -> Result<Var<R>> {
    exchange(Exchange::AllReduce, comm, x)
}

/// The part of this rank, along dimension `dim`, of a value that all ranks have.
///
/// # Errors
/// Fails if the parts are not equal.
#[track_caller]
pub fn split<R: Runtime>(comm: &Comm<R>, x: &Var<R>, dim: usize) -> Result<Var<R>> {
    exchange(Exchange::Split(dim), comm, x)
}

/// All-gather: the parts of all ranks, concatenated along `dim`, for ranks that use the result alike.
#[track_caller]
pub fn gather<R: Runtime>(comm: &Comm<R>, x: &Var<R>, dim: usize) -> Result<Var<R>> {
    exchange(Exchange::Gather(dim), comm, x)
}

/// All-gather: the parts of all ranks, concatenated along `dim`, for ranks that use the result differently. Gradients
/// are summed over ranks.
#[track_caller]
pub fn all_gather<R: Runtime>(comm: &Comm<R>, x: &Var<R>, dim: usize) -> Result<Var<R>> {
    exchange(Exchange::AllGather(dim), comm, x)
}

/// Reduce-scatter: this rank's part, along dimension `dim`, of the sum of all ranks' values.
///
/// # Errors
/// Fails if the parts are not equal.
#[track_caller]
pub fn reduce_scatter<R: Runtime>(comm: &Comm<R>, x: &Var<R>, dim: usize) -> Result<Var<R>> {
    exchange(Exchange::ReduceScatter(dim), comm, x)
}
