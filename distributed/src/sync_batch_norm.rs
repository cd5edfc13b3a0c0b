//! Batch norm by the statistics of all ranks' examples.

use std::sync::Arc;

use autograd::{Function, Var, apply_function, no_grad};
use nn::{BatchNorm, Forward, Init, Module, Param, Visitor};
use numcore::{
    DType, Error, Result, Runtime, Shape, Tensor, TensorMut,
    fused::NnOps,
    ops::{Apply, Backprop, PointwiseOps, ReduceOps, Saves, ViewOps, cat},
};

use crate::comm::{Collectives, Comm, Communicator, Named, ReduceOp};

/// [`BatchNorm`] of `x: [N, C]`, `[N, C, L]` or `[N, C, H, W]` with training statistics of the examples of all ranks,
/// as PyTorch's `SyncBatchNorm`.
///
/// `n` ranks train as one rank with all examples does. `N` may differ between ranks, and be 0 on some; the other sizes
/// are equal on all ranks. Rows that only [fill a batch up](nn::set_counted_rows) are no part of the statistics.
///
/// Ranks exchange a mean, a sum of squared deviations and a count for each channel. Forward has one all-gather of
/// `2C + 1` numbers, and backward one reduce-scatter of as many for each rank. They are combined by the formula of
/// Chan, Golub and LeVeque (*Updating Formulae and a Pairwise Algorithm for Computing Sample Variances*, 1979).
/// Gradients are exact, of any order. Half precision is computed in `f32`. In evaluation, and on one rank, the layer is
/// [`BatchNorm`]. It has the same parameters, buffers and names, so state dicts and checkpoints are interchangeable.
///
/// Every rank must apply the layer equally often in a step. Its output must reach the loss on every rank, because its
/// backward is a collective. A rank whose examples should not count multiplies its loss by 0, as `TrainStep::run` does,
/// and does not leave the layer out. A rank that does not take part
/// ([`TrainStep::idle`](crate::train::TrainStep::idle)) is an error on all ranks.
///
/// A model takes it in place of [`BatchNorm`]: [`SyncBatchNorm::over`] converts a layer.
#[doc(alias("convert_sync_batchnorm"))]
pub struct SyncBatchNorm<R: Runtime> {
    norm: BatchNorm<R>,
    comm: Comm<R>,
}

impl<R: Runtime> SyncBatchNorm<R> {
    /// Makes a layer with parameters and buffers as in [`BatchNorm::new`]: weight 1, bias 0, running mean 0 and
    /// variance 1, each `[channels]`. Statistics are those of the ranks of `comm`.
    pub fn new(init: &Init<R>, channels: usize, comm: &Comm<R>) -> Result<Self> {
        Ok(Self::over(BatchNorm::new(init, channels)?, comm))
    }

    /// Converts a layer, with its parameters, buffers and options.
    pub fn over(norm: BatchNorm<R>, comm: &Comm<R>) -> Self {
        SyncBatchNorm { norm, comm: Named::over(comm, "batch norm") }
    }

    /// The underlying [`BatchNorm`]: weight, bias, and running statistics of the examples of all ranks.
    pub fn norm(&self) -> &BatchNorm<R> {
        &self.norm
    }

    /// The mean, the biased variance and the number of values of each channel over all ranks: `[C]`, `[C]` and `[1]`.
    fn statistics(&self, x: &Var<R>) -> Result<[Var<R>; 3]> {
        let (shape, dtype, rt) = (x.spec().shape, x.spec().dtype, x.runtime().clone());
        let channels = shape[1];
        let axes: Vec<isize> = (0..shape.rank() as isize).filter(|&axis| axis != 1).collect();
        let count = shape.numel() / channels.max(1);
        // A rank without examples has a mean of 0 that weighs nothing.
        let mean = x.sum_keepdim(&axes)?.div(count.max(1) as f64)?;
        let deviations = x.sub(&mean)?.square()?.sum(&axes)?;
        let count = Var::new(Tensor::full(&rt, [1], dtype, count as f64)?);
        let own = cat(&[&mean.reshape([channels])?, &deviations, &count], 0)?;
        let all = self.exchanged(Exchange::Gather, &own)?;
        let counts = all.narrow(1, 2 * channels, 1)?.detach();
        let total = counts.sum(&[0])?;
        let means = all.narrow(1, 0, channels)?;
        let mean = means.mul(&counts.div(&total)?)?.sum(&[0])?;
        let between = means.sub(&mean)?.square()?.mul(&counts)?;
        let deviations = all.narrow(1, channels, channels)?.add(&between)?.sum(&[0])?;
        Ok([mean, deviations.div(&total)?, total])
    }

    fn exchanged(&self, exchange: Exchange, x: &Var<R>) -> Result<Var<R>> {
        let function = Exchanged { comm: self.comm.clone(), exchange };
        apply_function(Arc::new(function), &[x]).map(|mut outs| outs.remove(0))
    }
}

impl<R: Runtime> Module<R> for SyncBatchNorm<R> {
    fn visit(&self, name: &str, visitor: &mut dyn Visitor<R>) {
        self.norm.visit(name, visitor);
    }
}

impl<R: Runtime> Forward<R> for SyncBatchNorm<R> {
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        let norm = &self.norm;
        if self.comm.size() == 1 || !norm.mode.is_training() {
            return norm.forward(x);
        }
        let shape = x.spec().shape;
        let channels = norm.running_mean.spec().shape[0];
        if shape.rank() < 2 || shape[1] != channels {
            let why = format!("needs [N, C, ..] with {channels} channels");
            return Err(Error::shape("sync_batch_norm", &[shape], why).on_rank(self.comm.world_rank()));
        }
        if let Some((own, rest)) = norm.split_counted(x)? {
            return cat(&[&self.of_all_ranks(&own)?, &rest], 0);
        }
        self.of_all_ranks(x)
    }
}

impl<R: Runtime> SyncBatchNorm<R> {
    /// The output for the rows `x`, normalized by the statistics of the rows of all ranks.
    fn of_all_ranks(&self, x: &Var<R>) -> Result<Var<R>> {
        let (norm, dtype) = (&self.norm, x.spec().dtype);
        let wide = |x: &Var<R>| if dtype.is_half() { x.to_dtype(DType::F32) } else { Ok(x.clone()) };
        let parameter = |p: &Option<Param<R>>| p.as_ref().map(|p| wide(&p.var())).transpose();
        let (x, weight, bias) = (wide(x)?, parameter(&norm.weight)?, parameter(&norm.bias)?);
        let [mean, variance, total] = self.statistics(&x)?;
        let y = x.batch_norm(&mean, &variance, weight.as_ref(), bias.as_ref(), norm.eps)?;
        no_grad(|| {
            let kept = norm.running_mean.spec().dtype;
            let others = total.sub(1.0)?.maximum(1.0)?;
            let unbiased = variance.detach().mul(&total)?.div(&others)?;
            norm.track(&mean.detach().to_dtype(kept)?, &unbiased.to_dtype(kept)?)
        })?;
        if dtype.is_half() { y.to_dtype(dtype) } else { Ok(y) }
    }
}

/// An exchange of a row between ranks. Each kind is the derivative of the other.
#[derive(Clone, Copy)]
enum Exchange {
    /// Every rank's `[K]` becomes `[n, K]` on every rank.
    Gather,
    /// Row `r` of the sum of all ranks' `[n, K]` becomes rank `r`'s `[K]`.
    Scatter,
}

struct Exchanged<R: Runtime> {
    comm: Comm<R>,
    exchange: Exchange,
}

impl<R: Runtime> Function<R> for Exchanged<R> {
    fn name(&self) -> &'static str {
        match self.exchange {
            Exchange::Gather => "all_gather",
            Exchange::Scatter => "reduce_scatter",
        }
    }

    fn forward(&self, ins: &[Tensor<R>]) -> Result<Vec<Tensor<R>>> {
        let (x, n) = (&ins[0], self.comm.size());
        let rt = x.runtime();
        Ok(vec![match self.exchange {
            Exchange::Gather => {
                let shape = [n, x.shape().numel()];
                let all = TensorMut::alloc(rt, Shape::new(&shape)?, x.dtype())?;
                self.comm.all_gather(x, all)?.wait()?.freeze()?.reshape(shape)?
            }
            Exchange::Scatter => {
                let shape = [x.shape().numel() / n];
                let own = TensorMut::alloc(rt, Shape::new(&shape)?, x.dtype())?;
                self.comm.reduce_scatter(x, own, ReduceOp::Sum)?.wait()?.freeze()?.reshape(shape)?
            }
        }])
    }

    fn saves(&self) -> Saves {
        Saves::NONE
    }

    fn backward(&self, cx: &mut dyn Backprop<Var<R>>) -> Result<()> {
        let exchange = match self.exchange {
            Exchange::Gather => Exchange::Scatter,
            Exchange::Scatter => Exchange::Gather,
        };
        let function = Exchanged { comm: self.comm.clone(), exchange };
        let gradient = apply_function(Arc::new(function), &[&cx.grad()?])?.remove(0);
        cx.give_value(0, &gradient)
    }
}
