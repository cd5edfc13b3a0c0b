//! The calls that a communicator starts, built of checked memory.

use std::{panic::Location, sync::Arc};

use numcore::{DType, Error, Result, Runtime, Shape, Tensor, TensorMut, ops::ViewOps};

use super::{
    super::{ByteExchange, Call, Collective, ReduceOp, Work, call::check_reduction, work::given},
    Communicator,
};

/// Builders and checks of the calls that `Collectives` makes.
pub(crate) trait MakeCall<R: Runtime>: Communicator<R> {
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
            timeout: None,
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
        let ByteExchange { own: bytes, of, at, .. } = exchange;
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

    /// An `exchange` of `K` bytes from every rank, in one synchronization of ranks and one wait of
    /// the host for the device.
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
            let all = self.exchange_bytes(ByteExchange::new(&bytes, at))?;
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
pub(crate) fn row<R: Runtime>(x: &Tensor<R>) -> Result<Tensor<R>> {
    x.contiguous()?.reshape([x.shape().numel()])
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
