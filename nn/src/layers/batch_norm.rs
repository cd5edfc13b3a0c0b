//! Norm by the statistics of the batch.

use std::sync::LazyLock;

use autograd::{Var, no_grad};
use numcore::{
    DType, Error, Result, Runtime, Shape, Within,
    fused::NnOps,
    ops::{Apply, PointwiseOps, ViewOps, cat},
    pointwise::Program,
};

use super::{Embedding, optional, without_bias};
use crate::{Buffer, Forward, Init, Initializer, Mode, Module, Param, counted_rows, parallel::ContextSlot};

/// Batch norm (Ioffe & Szegedy 2015) of `x: [N, C, ..]`, over all axes but the channel axis.
///
/// In training it uses the batch's own statistics and updates the running statistics with them; in evaluation it uses
/// the running statistics. Padding rows at the end of a batch do not count in its statistics, if the training loop
/// declares them
/// ([`set_counted_rows`](crate::set_counted_rows)).
#[derive(Debug, Module)]
pub struct BatchNorm<R: Runtime> {
    /// The scale of each channel, `[C]`, if the layer has one.
    pub weight: Option<Param<R>>,
    /// The shift of each channel, `[C]`, if the layer has one.
    pub bias: Option<Param<R>>,
    /// The running mean of each channel, `[C]`.
    pub running_mean: Buffer<R>,
    /// The running variance of each channel, unbiased, `[C]`.
    pub running_var: Buffer<R>,
    /// The number of batches it was trained on; one `i64`.
    pub num_batches_tracked: Buffer<R>,
    /// The weight of a batch's statistics in the running ones; 0.1 unless set.
    pub momentum: f64,
    /// The constant added to the variance; 1e-5 unless set.
    pub eps: f64,
    /// The mode of the layer, training or evaluation.
    pub mode: Mode,
    context: ContextSlot<R>,
}

/// Batch norm of `[N, C]` or `[N, C, L]`.
pub type BatchNorm1d<R> = BatchNorm<R>;
/// Batch norm of `[N, C, H, W]`.
pub type BatchNorm2d<R> = BatchNorm<R>;

without_bias!(BatchNorm);

impl<R: Runtime> BatchNorm<R> {
    /// A layer with weight 1, bias 0, running mean 0 and running variance 1.
    #[track_caller]
    pub fn new(init: &Init<R>, channels: usize) -> Result<Self> {
        Ok(BatchNorm {
            weight: Some(init.param([channels], Initializer::Ones)?),
            bias: Some(init.param([channels], Initializer::Zeros)?),
            running_mean: init.float_buffer([channels], 0.0)?,
            running_var: init.float_buffer([channels], 1.0)?,
            num_batches_tracked: init.buffer([], DType::I64, 0i64)?,
            momentum: 0.1,
            eps: 1e-5,
            mode: Mode::default(),
            context: ContextSlot::refuses(),
        })
    }

    /// Drops scale and shift: PyTorch's `affine=False`.
    #[doc(alias = "affine")]
    pub fn without_affine(self) -> Self {
        BatchNorm { weight: None, bias: None, ..self }
    }

    /// The output with the running statistics, as in evaluation.
    #[track_caller]
    fn by_running_statistics(&self, x: &Var<R>) -> Result<Var<R>> {
        let (mean, variance) = (self.running_mean.var(), self.running_var.var());
        let (weight, bias) = (optional(&self.weight), optional(&self.bias));
        x.batch_norm(&mean, &variance, weight.as_ref(), bias.as_ref(), self.eps)
    }

    /// The output with the statistics of all rows of `x`, which also update the running statistics.
    #[track_caller]
    fn by_batch_statistics(&self, x: &Var<R>) -> Result<Var<R>> {
        let shape = x.spec().shape;
        if is_without_variance(shape) {
            let why = "one value per channel has no variance to train with; give it a larger batch, or call `eval`";
            return Err(Error::shape("batch_norm", &[shape], why)).at_caller();
        }
        let (weight, bias) = (optional(&self.weight), optional(&self.bias));
        let (y, mean, variance) = x.batch_norm_train(weight.as_ref(), bias.as_ref(), self.eps).at_caller()?;
        no_grad(|| self.track(&mean, &variance))?;
        Ok(y)
    }

    /// Splits a batch into the rows that [count](crate::counted_rows) and the outputs of the others. Rows that do not
    /// count are no part of the batch's statistics, so their outputs use the running ones. `None` if all count.
    #[track_caller]
    pub fn split_counted(&self, x: &Var<R>) -> Result<Option<(Var<R>, Var<R>)>> {
        let rows = x.spec().shape.dims().first().copied().unwrap_or(0);
        let count = counted_rows(rows);
        if count == rows {
            return Ok(None);
        }
        Ok(Some((x.narrow(0, 0, count)?, self.by_running_statistics(&x.narrow(0, count, rows - count)?)?)))
    }

    /// Updates the running statistics with a batch's mean and unbiased variance, by the momentum, and counts the batch.
    /// Both are `[C]`, of the buffers' dtype.
    #[track_caller]
    pub fn track(&self, mean: &Var<R>, variance: &Var<R>) -> Result<()> {
        static TOWARDS: LazyLock<Program> =
            LazyLock::new(|| Program::new("towards", |[old, new], [by]| [old + by * (new - old)]));
        let towards = |buffer: &Buffer<R>, new: &Var<R>| {
            let moved = buffer.value().apply_program(&TOWARDS, &[&new.value()?], &[self.momentum.into()])?;
            buffer.set(moved)
        };
        towards(&self.running_mean, mean)?;
        towards(&self.running_var, variance)?;
        let count = self.num_batches_tracked.value().add(1.0)?;
        self.num_batches_tracked.set(count)
    }
}

impl<R: Runtime> Forward<R> for BatchNorm<R> {
    #[track_caller]
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        if !self.mode.is_training() {
            return self.by_running_statistics(x);
        }
        match self.split_counted(x)? {
            None => self.by_batch_statistics(x),
            // The counted rows are too few for statistics: training goes on with the running ones.
            Some((own, _)) if own.spec().shape[0] == 0 || is_without_variance(own.spec().shape) => {
                self.by_running_statistics(x)
            }
            Some((own, rest)) => cat(&[&self.by_batch_statistics(&own)?, &rest], 0),
        }
    }
}

/// Batch norm whose scale and shift are those of each example's class (Dumoulin et al. 2017), for generators of images.
#[derive(Debug, Module)]
pub struct ConditionalBatchNorm<R: Runtime> {
    /// The norm, without a scale and shift of its own.
    pub norm: BatchNorm<R>,
    /// The scale and then the shift of each class, `[K, 2C]`; 1 and 0 at first.
    pub embed: Embedding<R>,
}

impl<R: Runtime> ConditionalBatchNorm<R> {
    /// A layer for `channels` channels and `classes` classes.
    #[track_caller]
    pub fn new(init: &Init<R>, channels: usize, classes: usize) -> Result<Self> {
        let [scale, shift] = [Initializer::Ones, Initializer::Zeros].map(|how| init.tensor([classes, channels], how));
        let embed = Embedding::of(Param::new(cat(&[&scale?, &shift?], 1)?)?);
        Ok(ConditionalBatchNorm { norm: BatchNorm::new(init, channels)?.without_affine(), embed })
    }

    /// Normalizes `x: [N, C, ..]`, and applies the scale and shift of `classes: [N]` (`i64`).
    #[track_caller]
    pub fn forward_with(&self, x: &Var<R>, classes: &Var<R>) -> Result<Var<R>> {
        let (shape, given) = (x.spec().shape, classes.spec().shape);
        if shape.rank() < 2 || given.dims() != &shape.dims()[..1] {
            let why = "needs [N, C, ..] and the class of each example, [N]";
            return Err(Error::shape("conditional_batch_norm", &[shape, given], why)).at_caller();
        }
        let of_examples = self.embed.forward(classes)?;
        let places = [&[shape[0], shape[1]][..], &vec![1; shape.rank() - 2]].concat();
        let [scale, shift] = [0, 1].map(|k| of_examples.narrow(1, k * shape[1], shape[1])?.reshape(&places));
        self.norm.forward(x)?.mul(&scale?)?.add(&shift?)
    }
}

/// Tells whether a batch has one value per channel, so that it has no variance.
fn is_without_variance(shape: Shape) -> bool {
    shape.rank() >= 2 && shape.numel() == shape[1]
}
