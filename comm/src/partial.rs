//! Values of which a rank has only its part.

use std::panic::Location;

use numcore::{Result, Runtime, Tensor};

use super::{Collectives, Communicator, ReduceOp, communicator::MakeCall, memory};

/// A rank's own contribution to a value: the square of a norm over its shard, the loss of its tokens. It cannot be read
/// before it is combined with the other ranks' parts, so no rank decides by its own part alone.
#[derive(Clone, Debug)]
#[must_use = "a part means nothing until it is combined with the others"]
pub struct Partial<T>(T);

impl<T> Partial<T> {
    /// Wraps this rank's part.
    pub fn new(part: T) -> Self {
        Partial(part)
    }

    /// Computes with the part; the result is a part again.
    pub fn map<U>(self, f: impl FnOnce(T) -> U) -> Partial<U> {
        Partial(f(self.0))
    }
}

impl<R: Runtime> Partial<Tensor<R>> {
    /// Combines all ranks' parts. Blocks the caller's queue, not the host.
    #[track_caller]
    pub fn combine<C: Communicator<R> + ?Sized>(self, comm: &C, op: ReduceOp) -> Result<Tensor<R>> {
        let own = match self.0.try_mut() {
            Ok(own) => own,
            Err(shared) => memory(&shared)?,
        };
        comm.all_reduce(own, op)?.wait()?.freeze()
    }
}

impl Partial<f64> {
    /// Combines all ranks' parts into a number on the host. Blocks.
    #[track_caller]
    pub fn combine_on<R: Runtime, C: Communicator<R> + ?Sized>(self, comm: &C, op: ReduceOp) -> Result<f64> {
        let all = comm.exchange_equal_at(self.0.to_le_bytes(), Location::caller())?;
        let own: Vec<f64> = all.into_iter().map(f64::from_le_bytes).collect();
        let first = own.first().copied().unwrap_or(0.0);
        let rest = own.iter().skip(1).copied();
        Ok(match op {
            ReduceOp::Sum => rest.fold(first, |a, b| a + b),
            ReduceOp::Avg => rest.fold(first, |a, b| a + b) / own.len() as f64,
            ReduceOp::Prod => rest.fold(first, |a, b| a * b),
            ReduceOp::Min => rest.fold(first, |a, b| if b < a || b.is_nan() { b } else { a }),
            ReduceOp::Max => rest.fold(first, |a, b| if b > a || b.is_nan() { b } else { a }),
        })
    }
}
