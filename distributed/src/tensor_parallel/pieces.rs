//! Linear layers with a sequence cut over ranks, which exchange it in pieces. One piece is in flight while the product
//! of another is computed (asynchronous tensor parallelism).

use std::{ops::Range, sync::Arc};

use autograd::{ArrivingGradient, Function, Var, apply_function};
use nn::parallel::Exchange;
use numcore::{
    Error, Result, Runtime, Tensor,
    ops::{Apply, Backprop, Bits, Matmul, MatmulOps, Op, Saves, ViewOps, cat},
};

use crate::{
    comm::{Comm, Communicator, Named},
    differentiable::{exchange_of, start},
};

/// Computes `x · wᵀ + b` from all ranks' parts of `x` ([`Exchange::AllGather`]). With [`Exchange::ReduceScatter`] it
/// computes this rank's part of the sum of all ranks' products, without a bias.
pub(super) fn linear_in_pieces<R: Runtime>(
    what: Exchange,
    comm: &Comm<R>,
    [x, weight]: [&Var<R>; 2],
    bias: Option<&Var<R>>,
    pieces: usize,
    of: &str,
) -> Result<Var<R>> {
    let node = InPieces { what, pieces: pieces.max(1), comm: comm.clone(), of: of.into() };
    let weight = weight.t()?;
    let ins: Vec<&Var<R>> = [x, &weight].into_iter().chain(bias).collect();
    Ok(apply_function(Arc::new(node), &ins)?.remove(0))
}

/// A node of the tape: inputs `x`, the weight viewed as `[I, O]`, and a bias if there is one.
struct InPieces<R: Runtime> {
    what: Exchange,
    pieces: usize,
    comm: Comm<R>,
    of: Arc<str>,
}

const X: usize = 0;
const WEIGHT: usize = 1;
const BIAS: usize = 2;

impl<R: Runtime> Function<R> for InPieces<R> {
    fn name(&self) -> &'static str {
        "linear in pieces"
    }

    fn forward(&self, ins: &[Tensor<R>]) -> Result<Vec<Tensor<R>>> {
        let out = match self.what {
            Exchange::AllGather(dim) => self.of_gathered(dim, ins),
            Exchange::ReduceScatter(dim) => self.scattered(dim, ins),
            other => Err(Error::unsupported("linear in pieces", format!("{} has no pieces", other.name()))),
        };
        Ok(vec![out?])
    }

    fn saves(&self) -> Saves {
        Saves { inputs: Bits::of(&[X, WEIGHT]), outputs: Bits::NONE }
    }

    fn always(&self) -> Option<&R> {
        Some(self.comm.runtime())
    }

    fn backward(&self, cx: &mut dyn Backprop<Var<R>>) -> Result<()> {
        let upstream = cx.grad()?;
        match self.what {
            Exchange::ReduceScatter(_) => {
                let upstream = self.exchanged(self.what.backward(), &upstream, &self.backward_name())?()?;
                if cx.wants(X) {
                    let weight = cx.input(WEIGHT)?.t()?;
                    cx.give(X, Op::Matmul(Matmul), &[&upstream, &weight])?;
                }
                if cx.wants(WEIGHT) {
                    let x = cx.input(X)?;
                    give_weight(cx, &upstream, &x)?;
                }
                Ok(())
            }
            _ => self.backward_of_gathered(cx, &upstream),
        }
    }
}

impl<R: Runtime> InPieces<R> {
    /// Multiplies pieces of all ranks' parts as each arrives.
    fn of_gathered(&self, dim: usize, ins: &[Tensor<R>]) -> Result<Tensor<R>> {
        let (x, ranks) = (&ins[X], self.comm.size());
        let cuts = self.cuts(size_of(x, dim)?);
        let comm = Named::over(&self.comm, &self.of);
        let piece = |cut: &Range<usize>| start(self.what, &comm, x.narrow(dim as isize, cut.start, cut.len())?);
        let under_way = cuts.iter().map(piece).collect::<Result<Vec<_>>>()?;
        let product = |arriving: ArrivingGradient<R>| product(&arriving()?, ins);
        let products = under_way.into_iter().map(product).collect::<Result<Vec<_>>>()?;
        // A product has its piece of every rank's part; a rank's part is all of its pieces.
        let of_rank = |rank: usize| {
            let of_piece =
                move |(all, cut): (&Tensor<R>, &Range<usize>)| all.narrow(dim as isize, rank * cut.len(), cut.len());
            products.iter().zip(&cuts).map(of_piece)
        };
        let all = (0..ranks).flat_map(of_rank).collect::<Result<Vec<_>>>()?;
        cat(&all.iter().collect::<Vec<_>>(), dim as isize)
    }

    /// Sums products of pieces of every rank's part: one is in flight while the next is computed.
    fn scattered(&self, dim: usize, ins: &[Tensor<R>]) -> Result<Tensor<R>> {
        let (x, ranks) = (&ins[X], self.comm.size());
        let all = size_of(x, dim)?;
        let comm = Named::over(&self.comm, &self.of);
        // Unequal parts are an error of the exchange.
        let own =
            if all.is_multiple_of(ranks) { all / ranks } else { return start(self.what, &comm, product(x, ins)?)?() };
        let piece = |cut: &Range<usize>| {
            let of_rank = |rank: usize| x.narrow(dim as isize, rank * own + cut.start, cut.len());
            let rows = (0..ranks).map(of_rank).collect::<Result<Vec<_>>>()?;
            start(self.what, &comm, product(&cat(&rows.iter().collect::<Vec<_>>(), dim as isize)?, ins)?)
        };
        let under_way = self.cuts(own).iter().map(piece).collect::<Result<Vec<_>>>()?;
        let sums = under_way.into_iter().map(|arriving| arriving()).collect::<Result<Vec<_>>>()?;
        cat(&sums.iter().collect::<Vec<_>>(), dim as isize)
    }

    /// The pieces of a part of `own` tokens: of nearly equal size, none empty unless the part is.
    fn cuts(&self, own: usize) -> Vec<Range<usize>> {
        let n = self.pieces.min(own).max(1);
        (0..n).map(|k| k * own / n..(k + 1) * own / n).collect()
    }

    /// The gradient of the product of all ranks' parts. The parts are gathered again while the gradient of the
    /// product's input is computed. That gradient is summed while the weight's is computed.
    fn backward_of_gathered(&self, cx: &mut dyn Backprop<Var<R>>, upstream: &Var<R>) -> Result<()> {
        if cx.inputs() > BIAS && cx.wants(BIAS) {
            cx.give_sum_to(BIAS, upstream)?;
        }
        let own = cx.wants(WEIGHT).then(|| cx.input(X)).transpose()?;
        let gathering = own.map(|own| self.exchanged(self.what, &own, &self.of)).transpose()?;
        let of_all = match cx.wants(X) {
            true => Some(Var::apply1(Matmul, &[upstream, &cx.input(WEIGHT)?.t()?])?),
            false => None,
        };
        let all = gathering.map(|arriving| arriving()).transpose()?;
        let scattering = of_all.map(|g| self.exchanged(self.what.backward(), &g, &self.backward_name())).transpose()?;
        if let Some(all) = &all {
            give_weight(cx, upstream, all)?;
        }
        scattering.map_or(Ok(()), |arriving| cx.give_value(X, &arriving()?))
    }

    fn backward_name(&self) -> String {
        format!("{}, backward", self.of)
    }

    /// An exchange in flight. For a value whose gradient is recorded it is complete.
    fn exchanged(&self, what: Exchange, x: &Var<R>, of: &str) -> Result<Box<dyn FnOnce() -> Result<Var<R>>>> {
        if x.requires_grad() {
            let done = exchange_of(what, &self.comm, x, of)?;
            return Ok(Box::new(|| Ok(done)));
        }
        let arriving = start(what, &Named::over(&self.comm, of), x.value()?)?;
        Ok(Box::new(|| Ok(Var::new(arriving()?))))
    }
}

/// The product of some rows, as the layer computes it for all rows.
fn product<R: Runtime>(rows: &Tensor<R>, ins: &[Tensor<R>]) -> Result<Tensor<R>> {
    rows.linear(&ins[WEIGHT].t()?, ins.get(BIAS))
}

/// Gives the gradient of a weight viewed as `[I, O]`, from all rows of the input at once.
fn give_weight<R: Runtime>(cx: &mut dyn Backprop<Var<R>>, upstream: &Var<R>, x: &Var<R>) -> Result<()> {
    let rows = |x: &Var<R>| {
        let shape = x.spec().shape;
        let width = shape.last().copied().unwrap_or(1);
        x.reshape([shape.numel() / width.max(1), width])
    };
    cx.give(WEIGHT, Op::Matmul(Matmul), &[&rows(x)?.t()?, &rows(upstream)?])
}

fn size_of<R: Runtime>(x: &Tensor<R>, dim: usize) -> Result<usize> {
    let none = || Error::shape("linear in pieces", &[*x.shape()], format!("there is no dimension {dim}"));
    x.dims().get(dim).copied().ok_or_else(none)
}
