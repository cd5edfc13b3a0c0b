//! The collectives for users, on every engine.

use std::panic::Location;

use numcore::{DType, Error, Result, Runtime, Shape, Tensor, TensorMut, Within};

use super::{
    ByteExchange, Call, Collective, Comm, Communicator, ReduceOp, Work,
    communicator::{MakeCall, row},
    difference,
    work::given,
};

/// The collectives. Memory may have any shape: every call treats it as one row. `n` is the number of ranks, `k` the
/// elements of one part.
///
/// All of them return at once, except those that block; [`Work::wait`] gives the memory back. Every rank must make
/// equal calls, from one place in the program, in one order.
///
/// ```
/// use comm::{Collectives, Communicator, Ranks, ReduceOp};
/// use numcore::{DType, NullRuntime, Shape, TensorMut};
/// # fn main() -> numcore::Result<()> {
/// let sums = Ranks::new(4).run(|_| Ok(NullRuntime::new()), |comm| {
///     let x = TensorMut::zeros(comm.runtime(), Shape::new(&[2])?, DType::F32)?;
///     let work = comm.all_reduce(x, ReduceOp::Sum)?;
///     // compute something else meanwhile
///     work.wait()?.freeze()
/// })?;
/// assert_eq!(sums.len(), 4);
/// # Ok(())
/// # }
/// ```
pub trait Collectives<R: Runtime>: Communicator<R> {
    /// Combines `x` of all ranks; every rank gets the result, in place.
    #[track_caller]
    fn all_reduce(&self, x: TensorMut<R>, op: ReduceOp) -> Result<Work<TensorMut<R>>> {
        self.in_place(Collective::AllReduce(op), x, None, Location::caller()).at_caller()
    }

    /// Combines `x` of all ranks in place: rank `root` gets the result, the memory of the others is arbitrary.
    #[track_caller]
    fn reduce(&self, x: TensorMut<R>, op: ReduceOp, root: usize) -> Result<Work<TensorMut<R>>> {
        self.in_place(Collective::Reduce { op, root }, x, None, Location::caller()).at_caller()
    }

    /// Copies rank `root`'s `x` into that of every rank, in place.
    #[track_caller]
    fn broadcast(&self, x: TensorMut<R>, root: usize) -> Result<Work<TensorMut<R>>> {
        self.in_place(Collective::Broadcast { root }, x, None, Location::caller()).at_caller()
    }

    /// Combines `x: [n·k]` of all ranks; rank `r` gets part `r` of the result in `out: [k]`.
    #[track_caller]
    fn reduce_scatter(&self, x: &Tensor<R>, out: TensorMut<R>, op: ReduceOp) -> Result<Work<TensorMut<R>>> {
        let parts = even("reduce_scatter", x.shape(), self.size()).at_caller()?;
        self.scatter(x, &parts, out, op, Location::caller()).at_caller()
    }

    /// A [`reduce_scatter`](Collectives::reduce_scatter) whose part `r` has `parts[r]` elements.
    #[track_caller]
    fn reduce_scatter_parts(
        &self,
        x: &Tensor<R>,
        parts: &[usize],
        out: TensorMut<R>,
        op: ReduceOp,
    ) -> Result<Work<TensorMut<R>>> {
        self.scatter(x, parts, out, op, Location::caller()).at_caller()
    }

    /// Combines `x: [n·k]` of all ranks in place: rank `r` has part `r` of the result, its other parts are arbitrary
    /// afterwards.
    #[track_caller]
    fn reduce_scatter_in_place(&self, x: TensorMut<R>, op: ReduceOp) -> Result<Work<TensorMut<R>>> {
        let parts = even("reduce_scatter", x.shape(), self.size()).at_caller()?;
        self.in_place(Collective::ReduceScatter(op), x, Some(parts), Location::caller()).at_caller()
    }

    /// Gathers `x: [k]` of all ranks in `out: [n·k]`, on every rank.
    #[track_caller]
    fn all_gather(&self, x: &Tensor<R>, out: TensorMut<R>) -> Result<Work<TensorMut<R>>> {
        let parts = even("all_gather", out.shape(), self.size()).at_caller()?;
        self.gather(x, &parts, out, Location::caller()).at_caller()
    }

    /// An [`all_gather`](Collectives::all_gather) whose part `r` has `parts[r]` elements.
    #[track_caller]
    fn all_gather_parts(&self, x: &Tensor<R>, parts: &[usize], out: TensorMut<R>) -> Result<Work<TensorMut<R>>> {
        self.gather(x, parts, out, Location::caller()).at_caller()
    }

    /// Gathers all parts of `x: [n·k]` on every rank, in place; rank `r` has part `r` already.
    #[track_caller]
    fn all_gather_in_place(&self, x: TensorMut<R>) -> Result<Work<TensorMut<R>>> {
        let parts = even("all_gather", x.shape(), self.size()).at_caller()?;
        self.in_place(Collective::AllGather, x, Some(parts), Location::caller()).at_caller()
    }

    /// Part `j` of rank `i`'s `x: [n·k]` becomes part `i` of rank `j`'s `out: [n·k]`.
    #[track_caller]
    fn all_to_all(&self, x: &Tensor<R>, out: TensorMut<R>) -> Result<Work<TensorMut<R>>> {
        let (send, recv) = (
            even("all_to_all", x.shape(), self.size()).at_caller()?,
            even("all_to_all", out.shape(), self.size()).at_caller()?,
        );
        self.exchange_parts(x, &send, out, &recv, Location::caller()).at_caller()
    }

    /// An [`all_to_all`](Collectives::all_to_all) of uneven parts: `send[j]` elements go to rank `j`, `recv[i]` come
    /// from rank `i`.
    #[track_caller]
    fn all_to_all_parts(
        &self,
        x: &Tensor<R>,
        send: &[usize],
        out: TensorMut<R>,
        recv: &[usize],
    ) -> Result<Work<TensorMut<R>>> {
        self.exchange_parts(x, send, out, recv, Location::caller()).at_caller()
    }

    /// Sends `x` to rank `to`, which must receive it.
    #[track_caller]
    fn send(&self, x: &Tensor<R>, to: usize) -> Result<Work<()>> {
        let what = Collective::Send { to };
        let call = Call {
            input: Some(row(x)?),
            ..self.call(what, x.dtype(), x.shape().numel(), Location::caller()).at_caller()?
        };
        Ok(self.start(call).at_caller()?.map(|_| Ok(())))
    }

    /// Fills `out` with the values that rank `from` sends.
    #[track_caller]
    fn recv(&self, out: TensorMut<R>, from: usize) -> Result<Work<TensorMut<R>>> {
        self.in_place(Collective::Recv { from }, out, None, Location::caller()).at_caller()
    }

    /// Sends `x` to rank `to` while `out` is filled by rank `from`: neither waits for the other, on any engine.
    #[track_caller]
    fn send_recv(&self, x: &Tensor<R>, to: usize, out: TensorMut<R>, from: usize) -> Result<Work<TensorMut<R>>> {
        let (at, numel) = (Location::caller(), out.shape().numel());
        let send = self.call(Collective::Send { to }, x.dtype(), x.shape().numel(), at).at_caller()?;
        let recv = self.call(Collective::Recv { from }, out.dtype(), numel, at).at_caller()?;
        let calls = vec![Call { input: Some(row(x)?), ..send }, Call { output: Some(out), ..recv }];
        let mut works = self.start_all(calls).at_caller()?.into_iter();
        let (sent, received) = (works.next(), given(works.next())?);
        Ok(received.map(move |memory| {
            sent.map_or(Ok(None), Work::wait)?;
            given(memory)
        }))
    }

    /// Waits until every rank has called it. Blocks.
    #[track_caller]
    fn barrier(&self) -> Result<()> {
        let call = self.call(Collective::Barrier, DType::U8, 0, Location::caller()).at_caller()?;
        self.start(call).and_then(Work::wait).map(|_| ()).at_caller()
    }

    /// Gathers the bytes of every rank, by rank. Blocks.
    #[track_caller]
    fn exchange(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.exchange_bytes(ByteExchange::new(bytes, Location::caller())).at_caller()
    }

    /// Gathers `K` bytes of every rank, by rank, in one synchronization; on one rank nothing is done. Blocks.
    #[track_caller]
    fn exchange_equal<const K: usize>(&self, bytes: [u8; K]) -> Result<Vec<[u8; K]>> {
        self.exchange_equal_at(bytes, Location::caller()).at_caller()
    }

    /// Checks that all ranks have equal bytes. Otherwise every rank gets an error, in whose message `what` is the
    /// meaning of the bytes. Blocks.
    #[track_caller]
    fn agree(&self, what: &str, bytes: &[u8]) -> Result<()> {
        let all = self.exchange(bytes)?;
        let members = self.members();
        let others: Vec<usize> = (0..all.len()).filter(|&r| all[r] != all[0]).collect();
        let Some(&first) = others.first() else { return Ok(()) };
        let named: Vec<String> = others.iter().map(|&r| members[r].to_string()).collect();
        let differ = difference::between(&all[0], &all[first]).map_or(String::new(), |(here, there)| {
            format!(": rank {} has {here}, rank {} {there}", members[0], members[first])
        });
        let why = format!("{what} of rank {} differs from that of rank {}{differ}", members[0], named.join(", "));
        Err(Error::from(numcore::ErrorKind::Mismatch { op: "agree", why }).on_rank(self.world_rank())).at_caller()
    }

    /// Splits the ranks into groups of equal `color`, ordered by `key`, then by rank; a rank with `None` takes part and
    /// gets no group. Blocks.
    #[track_caller]
    fn split(&self, color: Option<usize>, key: usize) -> Result<Option<Comm<R>>> {
        self.split_at(color, key, Location::caller()).at_caller()
    }
}

impl<R: Runtime, C: Communicator<R> + ?Sized> Collectives<R> for C {}

fn even(op: &'static str, shape: &Shape, n: usize) -> Result<Vec<usize>> {
    let numel = shape.numel();
    if !numel.is_multiple_of(n) {
        let why = format!("{numel} elements do not make {n} equal parts; pad them, or give parts of your own");
        return Err(Error::shape(op, &[*shape], why));
    }
    Ok(vec![numel / n; n])
}
