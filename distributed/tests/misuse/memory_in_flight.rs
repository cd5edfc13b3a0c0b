//! Memory that a collective works on is lent to it.

use comm::{Collectives, Comm, ReduceOp};
use numcore::{NullRuntime, Result, TensorMut};

fn overlap(comm: Comm<NullRuntime>, mut gradient: TensorMut<NullRuntime>) -> Result<()> {
    let work = comm.all_reduce(gradient, ReduceOp::Sum)?;
    gradient.zero()?;
    work.wait()?;
    Ok(())
}

fn main() {}
