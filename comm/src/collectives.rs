//! The collectives for users, on every engine.

use std::{panic::Location, sync::Arc};

use numcore::{DType, Error, Result, Runtime, Shape, Tensor, TensorMut, Within, ops::ViewOps};

use super::{
    ByteExchange, Call, Collective, Comm, Communicator, ReduceOp, Work, call::check_reduction, difference, work::given,
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
        self.exchange_bytes(ByteExchange { own: bytes, of: None, at: Location::caller() }).at_caller()
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

/// Builders and checks of the calls that [`Collectives`] makes.
pub(super) trait MakeCall<R: Runtime>: Communicator<R> {
    /// A call without memory.
    fn call(&self, what: Collective, dtype: DType, numel: usize, at: &'static Location<'static>) -> Result<Call<R>> {
        let (rank, size) = (self.rank(), self.size());
        if let Some(r) = what.root().or(what.peer()).filter(|&r| r >= size) {
            return Err(Error::range(what.name(), "rank", r, format!("in 0..{size}")).on_rank(self.world_rank()));
        }
        if what.peer() == Some(rank) {
            return Err(
                Error::range(what.name(), "peer", rank, "another rank than this one").on_rank(self.world_rank())
            );
        }
        if let Some(op) = what.reduce_op() {
            check_reduction(what.name(), op, dtype)?;
        }
        let parts: Arc<[usize]> = Arc::new([numel]);
        Ok(Call {
            what,
            dtype,
            input: None,
            output: None,
            send: parts.clone(),
            recv: parts,
            of: None,
            at,
            header: None,
        })
    }

    fn in_place(
        &self,
        what: Collective,
        x: TensorMut<R>,
        parts: Option<Vec<usize>>,
        at: &'static Location<'static>,
    ) -> Result<Work<TensorMut<R>>> {
        let mut call = self.call(what, x.dtype(), x.shape().numel(), at)?;
        if let Some(parts) = parts {
            call.send = parts.into();
            call.recv = call.send.clone();
        }
        Ok(self.start(Call { output: Some(x), ..call })?.map(given))
    }

    fn scatter(
        &self,
        x: &Tensor<R>,
        parts: &[usize],
        out: TensorMut<R>,
        op: ReduceOp,
        at: &'static Location<'static>,
    ) -> Result<Work<TensorMut<R>>> {
        let own = fit("reduce_scatter", parts, self.size(), x, self.rank(), &out)?;
        let call = self.call(Collective::ReduceScatter(op), x.dtype(), own, at)?;
        let call = Call { send: parts.into(), input: Some(row(x)?), output: Some(out), ..call };
        Ok(self.start(call)?.map(given))
    }

    fn gather(
        &self,
        x: &Tensor<R>,
        parts: &[usize],
        out: TensorMut<R>,
        at: &'static Location<'static>,
    ) -> Result<Work<TensorMut<R>>> {
        self.gather_of(None, x, parts, out, at)
    }

    /// An all-gather that belongs to an object with a name.
    fn gather_of(
        &self,
        of: Option<&Arc<str>>,
        x: &Tensor<R>,
        parts: &[usize],
        out: TensorMut<R>,
        at: &'static Location<'static>,
    ) -> Result<Work<TensorMut<R>>> {
        let whole: usize = parts.iter().sum();
        let own = parts.get(self.rank()).copied().unwrap_or(0);
        require_parts("all_gather", "number of parts", parts.len(), self.size())?;
        require_memory("all_gather", x, own, &out, whole)?;
        let call = self.call(Collective::AllGather, x.dtype(), own, at)?;
        let call = Call { recv: parts.into(), input: Some(row(x)?), output: Some(out), of: of.cloned(), ..call };
        Ok(self.start(call)?.map(given))
    }

    fn exchange_parts(
        &self,
        x: &Tensor<R>,
        send: &[usize],
        out: TensorMut<R>,
        recv: &[usize],
        at: &'static Location<'static>,
    ) -> Result<Work<TensorMut<R>>> {
        let n = self.size();
        require_parts("all_to_all", "number of parts to send", send.len(), n)?;
        require_parts("all_to_all", "number of parts to receive", recv.len(), n)?;
        require_memory("all_to_all", x, send.iter().sum(), &out, recv.iter().sum())?;
        let call = self.call(Collective::AllToAll, x.dtype(), x.shape().numel(), at)?;
        let call = Call { send: send.into(), recv: recv.into(), input: Some(row(x)?), output: Some(out), ..call };
        Ok(self.start(call)?.map(given))
    }

    fn exchange_by_gathers(&self, exchange: ByteExchange<'_>) -> Result<Vec<Vec<u8>>> {
        let ByteExchange { own: bytes, of, at } = exchange;
        let (rt, n) = (self.runtime(), self.size());
        if n == 1 {
            return Ok(vec![bytes.to_vec()]);
        }
        let length = Tensor::from_slice(rt, [1], &[bytes.len() as i64])?;
        let out = TensorMut::alloc(rt, Shape::new(&[n])?, DType::I64)?;
        let lengths = self.gather_of(of, &length, &vec![1; n], out, at)?.wait()?.freeze()?.to_vec::<i64>()?;
        // A wrong length from a faulty engine is an error, not memory of that size.
        let wrong =
            || Error::internal("exchange", format!("ranks have sent {lengths:?} bytes")).on_rank(self.world_rank());
        let counts = lengths.iter().map(|&l| usize::try_from(l).ok()).collect::<Option<Vec<usize>>>();
        let counts = counts.ok_or_else(wrong)?;
        let total = counts.iter().try_fold(0, |sum: usize, &l| sum.checked_add(l)).ok_or_else(wrong)?;
        if total == 0 {
            return Ok(vec![Vec::new(); n]);
        }
        let own = Tensor::from_slice(rt, [bytes.len()], bytes)?;
        let out = TensorMut::alloc(rt, Shape::new(&[total])?, DType::U8)?;
        let all = self.gather_of(of, &own, &counts, out, at)?.wait()?.freeze()?.to_vec::<u8>()?;
        let mut rest = &all[..];
        Ok(counts.iter().map(|&l| rest.split_off(..l).unwrap_or_default().to_vec()).collect())
    }

    /// An [`exchange`](Collectives::exchange) of `K` bytes from every rank, in one synchronization of ranks and one
    /// wait of the host for the device.
    fn exchange_equal_at<const K: usize>(
        &self,
        bytes: [u8; K],
        at: &'static Location<'static>,
    ) -> Result<Vec<[u8; K]>> {
        let (rt, n) = (self.runtime(), self.size());
        if n == 1 {
            return Ok(vec![bytes]);
        }
        if self.guarantees().exchanges_on_host {
            let all = self.exchange_bytes(ByteExchange { own: &bytes, of: None, at })?;
            let other =
                || Error::mismatch("exchange", "a rank gave another number of bytes").on_rank(self.world_rank());
            return all.into_iter().map(|bytes| bytes.try_into().map_err(|_| other())).collect();
        }
        let own = Tensor::from_slice(rt, [K], &bytes)?;
        let out = TensorMut::alloc(rt, Shape::new(&[n * K])?, DType::U8)?;
        let all = self.gather(&own, &vec![K; n], out, at)?.wait()?.freeze()?.to_vec::<u8>()?;
        Ok(all.as_chunks::<K>().0.to_vec())
    }
}

impl<R: Runtime, C: Communicator<R> + ?Sized> MakeCall<R> for C {}

/// The values as one dense row: strided ones are copied, never sent as they are.
fn row<R: Runtime>(x: &Tensor<R>) -> Result<Tensor<R>> {
    x.contiguous()?.reshape([x.shape().numel()])
}

fn even(op: &'static str, shape: &Shape, n: usize) -> Result<Vec<usize>> {
    let numel = shape.numel();
    if !numel.is_multiple_of(n) {
        let why = format!("{numel} elements do not make {n} equal parts; pad them, or give parts of your own");
        return Err(Error::shape(op, &[*shape], why));
    }
    Ok(vec![numel / n; n])
}

fn fit<R: Runtime>(
    op: &'static str,
    parts: &[usize],
    n: usize,
    x: &Tensor<R>,
    rank: usize,
    out: &TensorMut<R>,
) -> Result<usize> {
    require_parts(op, "number of parts", parts.len(), n)?;
    require_memory(op, x, parts.iter().sum(), out, parts[rank])?;
    Ok(parts[rank])
}

fn require_memory<R: Runtime>(
    op: &'static str,
    x: &Tensor<R>,
    send: usize,
    out: &TensorMut<R>,
    recv: usize,
) -> Result<()> {
    if x.dtype() != out.dtype() {
        return Err(Error::dtype(op, &[x.dtype(), out.dtype()], "input and output must have one type"));
    }
    if (x.shape().numel(), out.shape().numel()) == (send, recv) {
        return Ok(());
    }
    let why = format!("the input must have {send} elements and the output {recv}");
    Err(Error::shape(op, &[*x.shape(), *out.shape()], why))
}

fn require_parts(op: &'static str, name: &'static str, parts: usize, ranks: usize) -> Result<()> {
    let allowed = || format!("{ranks}, one for each rank");
    if parts == ranks { Ok(()) } else { Err(Error::range(op, name, parts, allowed())) }
}
