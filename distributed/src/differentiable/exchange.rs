//! Exchanges of which each is the gradient of another.

use std::sync::Arc;

use autograd::{ArrivingGradient, Function, Var, apply_function};
use nn::parallel::Exchange;
use numcore::{
    Error, Result, Runtime, Shape, Tensor, TensorMut,
    ops::{Backprop, Bits, Saves, ViewOps, cat},
};

use crate::comm::{Collectives, Comm, Communicator, Named, ReduceOp, memory};

/// Any [`Exchange`] of a value.
#[track_caller]
pub fn exchange<R: Runtime>(what: Exchange, comm: &Comm<R>, x: &Var<R>) -> Result<Var<R>> {
    applied(Exchanged { what, comm: comm.clone(), of: None }, x)
}

/// An exchange whose calls are labelled with `of`, a layer for example. Ranks that make calls in different orders get
/// an error that names both labels, instead of each other's values.
#[track_caller]
pub fn exchange_of<R: Runtime>(what: Exchange, comm: &Comm<R>, x: &Var<R>, of: &str) -> Result<Var<R>> {
    applied(Exchanged { what, comm: comm.clone(), of: Some(of.into()) }, x)
}

/// The tape's node of an exchange.
struct Exchanged<R: Runtime> {
    what: Exchange,
    comm: Comm<R>,
    of: Option<Arc<str>>,
}

#[track_caller]
fn applied<R: Runtime>(node: Exchanged<R>, x: &Var<R>) -> Result<Var<R>> {
    if node.comm.size() == 1 {
        return Ok(x.clone());
    }
    Ok(apply_function(Arc::new(node), &[x])?.remove(0))
}

impl<R: Runtime> Exchanged<R> {
    /// The exchange of the gradient.
    fn reversed(&self) -> Self {
        let of = self.of.as_ref().map(|of| format!("{of}, backward").into());
        Exchanged { what: self.what.backward(), comm: self.comm.clone(), of }
    }

    fn start(&self, x: Tensor<R>) -> Result<ArrivingGradient<R>> {
        match &self.of {
            Some(of) => start(self.what, &Named::over(&self.comm, of), x),
            None => start(self.what, &self.comm, x),
        }
    }
}

impl<R: Runtime> Function<R> for Exchanged<R> {
    fn name(&self) -> &'static str {
        self.what.name()
    }

    fn forward(&self, ins: &[Tensor<R>]) -> Result<Vec<Tensor<R>>> {
        Ok(vec![self.start(ins[0].clone())?()?])
    }

    fn saves(&self) -> Saves {
        Saves { inputs: Bits::NONE, outputs: Bits::NONE }
    }

    fn always(&self) -> Option<&R> {
        self.sends_gradient().then(|| self.comm.runtime())
    }

    fn sends_gradient(&self) -> bool {
        self.what.backward().communicates()
    }

    fn send_gradient(&self, upstream: Tensor<R>) -> Result<ArrivingGradient<R>> {
        self.reversed().start(upstream)
    }

    fn backward(&self, cx: &mut dyn Backprop<Var<R>>) -> Result<()> {
        let upstream = cx.grad()?;
        cx.give_value(0, &applied(self.reversed(), &upstream)?)
    }
}

/// Starts an exchange; the returned closure waits for its result.
pub(crate) fn start<R: Runtime>(what: Exchange, comm: &Comm<R>, x: Tensor<R>) -> Result<ArrivingGradient<R>> {
    match what {
        Exchange::Copy => Ok(Box::new(|| Ok(x))),
        Exchange::AllReduce => {
            let own = x.try_mut().or_else(|shared| memory(&shared))?;
            let sum = comm.all_reduce(own, ReduceOp::Sum)?;
            Ok(Box::new(|| sum.wait()?.freeze()))
        }
        Exchange::Split(dim) => {
            let len = part(what, comm, &x, dim)?;
            // A copy, so that the part does not keep the whole value in memory.
            let own = x.narrow(dim as isize, comm.rank() * len, len)?.copy()?;
            Ok(Box::new(|| Ok(own)))
        }
        Exchange::Gather(dim) | Exchange::AllGather(dim) => gather(what, comm, &x, dim),
        Exchange::ReduceScatter(dim) => scatter(what, comm, &x, dim),
    }
}

/// The length of a rank's equal part of a value along `dim`; an error if the parts are not equal.
fn part<R: Runtime>(what: Exchange, comm: &Comm<R>, x: &Tensor<R>, dim: usize) -> Result<usize> {
    let (shape, ranks) = (*x.shape(), comm.size());
    match shape.dims().get(dim) {
        Some(size) if size.is_multiple_of(ranks) => Ok(size / ranks),
        Some(size) => {
            let why = format!("{size} along dimension {dim} do not make equal parts for {ranks} ranks");
            Err(Error::shape(what.name(), &[shape], why).on_rank(comm.world_rank()))
        }
        None => Err(no_dimension(what, comm, shape, dim)),
    }
}

fn no_dimension<R: Runtime>(what: Exchange, comm: &Comm<R>, shape: Shape, dim: usize) -> Error {
    Error::shape(what.name(), &[shape], format!("there is no dimension {dim}")).on_rank(comm.world_rank())
}

fn gather<R: Runtime>(what: Exchange, comm: &Comm<R>, x: &Tensor<R>, dim: usize) -> Result<ArrivingGradient<R>> {
    let (shape, n) = (*x.shape(), comm.size());
    let Some(&own) = shape.dims().get(dim) else { return Err(no_dimension(what, comm, shape, dim)) };
    let out = TensorMut::alloc(x.runtime(), Shape::new(&[n * shape.numel()])?, x.dtype())?;
    let all = comm.all_gather(x, out)?;
    Ok(Box::new(move || {
        let all = all.wait()?.freeze()?;
        // The gathered parts are contiguous by rank: a cut along the first dimension of more than one element is joined
        // already.
        if shape.dims()[..dim].iter().all(|&size| size == 1) {
            return all.reshape(shape.with(dim, n * own));
        }
        let parts = all.reshape([n, shape.numel()])?.chunk(0, n)?;
        let parts = parts.iter().map(|part| part.reshape(shape)).collect::<Result<Vec<_>>>()?;
        cat(&parts.iter().collect::<Vec<_>>(), dim as isize)
    }))
}

fn scatter<R: Runtime>(what: Exchange, comm: &Comm<R>, x: &Tensor<R>, dim: usize) -> Result<ArrivingGradient<R>> {
    let (len, n) = (part(what, comm, x, dim)?, comm.size());
    let own = x.shape().with(dim, len);
    let parts = (0..n).map(|rank| x.narrow(dim as isize, rank * len, len)?.reshape([own.numel()]));
    let parts = parts.collect::<Result<Vec<_>>>()?;
    let row = match x.shape().dims()[..dim].iter().all(|&size| size == 1) {
        true => x.clone(),
        false => cat(&parts.iter().collect::<Vec<_>>(), 0)?,
    };
    let out = TensorMut::alloc(x.runtime(), own, x.dtype())?;
    let sum = comm.reduce_scatter(&row, out, ReduceOp::Sum)?;
    Ok(Box::new(move || sum.wait()?.freeze()?.reshape(own)))
}
