//! All-to-all, whose gradient is an all-to-all the other way.

use std::sync::Arc;

use autograd::{Function, Var, apply_function};
use numcore::{
    Error, Result, Runtime, Tensor, TensorMut,
    ops::{Apply, Backprop, Bits, Saves},
};

use crate::comm::{Collectives, Comm, Communicator, Named};

/// Sends rank `j` the `j`-th of equal parts of the rows of `x`; returns the parts received, in the order of ranks.
///
/// # Errors
/// Fails if the number of ranks does not divide the rows.
#[track_caller]
pub fn all_to_all<R: Runtime>(comm: &Comm<R>, x: &Var<R>) -> Result<Var<R>> {
    let (shape, n) = (x.spec().shape, comm.size());
    match shape.dims().first() {
        Some(rows) if rows.is_multiple_of(n) => all_to_all_parts(comm, x, &vec![rows / n; n], &vec![rows / n; n]),
        _ => {
            let why = format!("its rows do not make equal parts for {n} ranks; give parts (`all_to_all_parts`)");
            Err(Error::shape("all_to_all", &[shape], why).on_rank(comm.world_rank()))
        }
    }
}

/// Sends rank `j` the next `send[j]` rows of `x`; returns the `recv[i]` rows of each rank `i`, in the order of ranks. A
/// part may be empty.
///
/// # Errors
/// Fails if `send` or `recv` do not have a number for each rank, or `send` does not add up to the rows of `x`. Fails on
/// every rank if the numbers of a pair of ranks differ.
#[track_caller]
pub fn all_to_all_parts<R: Runtime>(comm: &Comm<R>, x: &Var<R>, send: &[usize], recv: &[usize]) -> Result<Var<R>> {
    exchanged(comm, x, send, recv, None)
}

/// An [`all_to_all_parts`] whose calls are labelled, by a layer for example, as in [`exchange_of`](super::exchange_of).
///
/// # Errors
/// The errors of [`all_to_all_parts`].
#[track_caller]
pub fn all_to_all_parts_of<R: Runtime>(
    comm: &Comm<R>,
    x: &Var<R>,
    send: &[usize],
    recv: &[usize],
    of: &str,
) -> Result<Var<R>> {
    exchanged(comm, x, send, recv, Some(of.into()))
}

#[track_caller]
fn exchanged<R: Runtime>(
    comm: &Comm<R>,
    x: &Var<R>,
    send: &[usize],
    recv: &[usize],
    of: Option<Arc<str>>,
) -> Result<Var<R>> {
    let (shape, n) = (x.spec().shape, comm.size());
    let rows: usize = send.iter().sum();
    if send.len() != n || recv.len() != n || shape.dims().first() != Some(&rows) {
        let why = format!("{send:?} rows to send and {recv:?} to receive do not fit it and {n} ranks");
        return Err(Error::shape("all_to_all", &[shape], why).on_rank(comm.world_rank()));
    }
    if n == 1 {
        return Ok(x.clone());
    }
    let node = AllToAll { comm: comm.clone(), send: send.into(), recv: recv.into(), of };
    Ok(apply_function(Arc::new(node), &[x])?.remove(0))
}

/// The tape's node of an all-to-all.
struct AllToAll<R: Runtime> {
    comm: Comm<R>,
    send: Arc<[usize]>,
    recv: Arc<[usize]>,
    of: Option<Arc<str>>,
}

impl<R: Runtime> Function<R> for AllToAll<R> {
    fn name(&self) -> &'static str {
        "all_to_all"
    }

    fn forward(&self, ins: &[Tensor<R>]) -> Result<Vec<Tensor<R>>> {
        let x = &ins[0];
        let row: usize = x.shape().dims()[1..].iter().product();
        let elements = |parts: &[usize]| parts.iter().map(|rows| rows * row).collect::<Vec<_>>();
        let shape = x.shape().with(0, self.recv.iter().sum());
        let out = TensorMut::alloc(x.runtime(), shape, x.dtype())?;
        let comm = self.of.as_ref().map_or_else(|| self.comm.clone(), |of| Named::over(&self.comm, of));
        let work = comm.all_to_all_parts(x, &elements(&self.send), out, &elements(&self.recv))?;
        Ok(vec![work.wait()?.freeze()?])
    }

    fn saves(&self) -> Saves {
        Saves { inputs: Bits::NONE, outputs: Bits::NONE }
    }

    fn always(&self) -> Option<&R> {
        Some(self.comm.runtime())
    }

    fn backward(&self, cx: &mut dyn Backprop<Var<R>>) -> Result<()> {
        let of = self.of.as_ref().map(|of| format!("{of}, backward").into());
        let back = AllToAll { comm: self.comm.clone(), send: self.recv.clone(), recv: self.send.clone(), of };
        let upstream = cx.grad()?;
        cx.give_value(0, &apply_function(Arc::new(back), &[&upstream])?.remove(0))
    }
}
