//! Methods for neural networks: fused operations, and compositions of them.

use std::sync::LazyLock;

use smallvec::SmallVec;

use super::{
    Attention, Conv, Conv1dOptions, ConvKind, ConvOptions, CrossEntropyOptions, MaxPool, Norm, NormKind, RopeOptions,
    SdpaOptions, Softmax, attention, conv::transposed, cross_entropy, linear_cross_entropy, rope,
};
use crate::{
    AxisSet, DType, Error, Result, Scalar, Shape, Tensor,
    ops::{
        Apply, JoinOps, PointwiseOps, PoolOptions, ViewOps,
        composed::{extreme_pool, mean_pool},
        moments,
    },
    pointwise::Program,
};

impl ConvOptions {
    /// Applies the convolution `kind` to operands `a` and `b`, with `bias: [C]` for the `C` channels of the output.
    #[track_caller]
    fn apply<T: Apply>(&self, kind: ConvKind, a: &T, b: &T, bias: Option<&T>) -> Result<T> {
        let ConvOptions { stride, padding, dilation, groups } = *self;
        let bias = bias.map(|b| per_channel(b, 4)).transpose()?;
        let op = Conv { kind, stride, padding, dilation, groups, bias: bias.is_some() };
        let ins: SmallVec<[&T; 3]> = [a, b].into_iter().chain(&bias).collect();
        T::apply1(op, &ins)
    }
}

/// Methods for neural networks, on tensors and variables.
pub trait NnOps: Apply {
    /// Softmax, `eˣ / Σ eˣ` along `axis`; zeros where all elements are `−∞` (PyTorch: NaN).
    #[track_caller]
    fn softmax(&self, axis: isize) -> Result<Self> {
        along_last(self, axis, |x| Self::apply1(Softmax { log: false }, &[x]))
    }
    /// The logarithm of the softmax along `axis`, computed stably; see [`softmax`](NnOps::softmax).
    #[track_caller]
    fn log_softmax(&self, axis: isize) -> Result<Self> {
        along_last(self, axis, |x| Self::apply1(Softmax { log: true }, &[x]))
    }
    /// Cross-entropy of logits `self: [.., C]` with classes `target: [..]` (`i64`): the mean over the targets that are
    /// not −100, a scalar.
    ///
    /// Each row's loss is `ln Σ eˣ − x[target]`, without overflow. Classes are on the last axis, where PyTorch has them
    /// on the second. The loss of half-precision logits is `f32`, computed without a cast copy of them.
    #[track_caller]
    fn cross_entropy(&self, target: &Self) -> Result<Self> {
        self.cross_entropy_with(target, CrossEntropyOptions::default())
    }
    /// Cross-entropy with options; see [`cross_entropy`](NnOps::cross_entropy). With
    /// [`Reduction::None`](super::Reduction::None) the result has the target's shape.
    #[track_caller]
    fn cross_entropy_with(&self, target: &Self, options: CrossEntropyOptions) -> Result<Self> {
        cross_entropy::composed(self, target, None, options)
    }
    /// Cross-entropy with `weight: [C]` of each class, and options; see
    /// [`cross_entropy_with`](NnOps::cross_entropy_with). The mean is over the targets' weights, as in PyTorch.
    #[track_caller]
    fn weighted_cross_entropy(&self, target: &Self, weight: &Self, options: CrossEntropyOptions) -> Result<Self> {
        cross_entropy::composed(self, target, Some(weight), options)
    }
    /// Cross-entropy of the logits `self · weightᵀ` with classes `target: [..]` (`i64`): the mean over the targets that
    /// are not −100, a scalar. Operands are `self: [.., C]` and `weight: [V, C]`, a tied embedding, say.
    ///
    /// This is the loss of a language model, for any number of rows, with one piece of the logits in memory
    /// ([`Capabilities::piece`](crate::Capabilities::piece)).
    /// Their gradients take as much again. Gradients of the operands are computed in the forward pass if they will be
    /// needed, so call it under `no_grad` if they are not. The loss of half-precision operands is `f32`,
    /// and their gradients are rounded once.
    #[doc(alias = "fused_linear_cross_entropy")]
    #[track_caller]
    fn linear_cross_entropy(&self, weight: &Self, target: &Self) -> Result<Self> {
        self.linear_cross_entropy_with(weight, None, target, CrossEntropyOptions::default())
    }
    /// Cross-entropy of the logits `self · weightᵀ + bias`, with `bias: [V]`, and options; see
    /// [`linear_cross_entropy`](NnOps::linear_cross_entropy). With [`Reduction::None`](super::Reduction::None) the
    /// result has the target's shape, and logits are recomputed for gradients.
    #[track_caller]
    fn linear_cross_entropy_with(
        &self,
        weight: &Self,
        bias: Option<&Self>,
        target: &Self,
        options: CrossEntropyOptions,
    ) -> Result<Self> {
        linear_cross_entropy::reduced(self, weight, bias, target, options)
    }
    /// Layer norm over the last axis of `self: [.., C]`.
    #[track_caller]
    fn layer_norm(&self, weight: Option<&Self>, bias: Option<&Self>, eps: f64) -> Result<Self> {
        norm(self, NormKind::Layer, weight, bias, eps)
    }
    /// RMS norm over the last axis of `self: [.., C]`.
    #[track_caller]
    fn rms_norm(&self, weight: Option<&Self>, eps: f64) -> Result<Self> {
        norm(self, NormKind::Rms, weight, None, eps)
    }
    /// Group norm (Wu & He 2018) of `self: [N, C, ..]`, `C` divided into `groups`; `weight` and `bias` are `[C]`.
    #[track_caller]
    fn group_norm(&self, groups: usize, weight: Option<&Self>, bias: Option<&Self>, eps: f64) -> Result<Self> {
        let shape = self.spec().shape;
        if shape.rank() < 2 || groups == 0 || !shape[1].is_multiple_of(groups) {
            return Err(Error::shape(
                "group_norm",
                &[shape],
                format!("needs [N, C, ..] with C a multiple of {groups}"),
            ));
        }
        channels_fit("group_norm", shape, &[weight, bias])?;
        let flat = self.reshape([shape[0] * groups, shape[1..].iter().product::<usize>() / groups])?;
        affine(&norm(&flat, NormKind::Layer, None, None, eps)?.reshape(shape)?, weight, bias)
    }
    /// Batch norm (Ioffe & Szegedy 2015) of `self: [N, C, ..]` by the statistics of this batch. It also returns the
    /// batch's mean and unbiased variance, `[C]`, for running averages.
    #[track_caller]
    fn batch_norm_train(&self, weight: Option<&Self>, bias: Option<&Self>, eps: f64) -> Result<(Self, Self, Self)> {
        let shape = self.spec().shape;
        channels_fit("batch_norm", shape, &[weight, bias])?;
        let dtype = self.spec().dtype;
        if dtype.is_half() {
            let wide = |x: &Self| x.to_dtype(DType::F32);
            let (weight, bias) = (weight.map(wide).transpose()?, bias.map(wide).transpose()?);
            let (y, mean, variance) = wide(self)?.batch_norm_train(weight.as_ref(), bias.as_ref(), eps)?;
            return Ok((y.to_dtype(dtype)?, mean.to_dtype(dtype)?, variance.to_dtype(dtype)?));
        }
        let mut axes = AxisSet::default();
        (0..shape.rank()).filter(|&a| a != 1).for_each(|a| axes.insert(a));
        let (mean, variance) = moments(self, axes, 0)?;
        let count = shape.numel() / shape[1].max(1);
        let unbiased = variance.detach().mul(count as f64 / count.saturating_sub(1).max(1) as f64)?;
        let y = affine(&standardized(self, &mean, &variance, eps)?, weight, bias)?;
        Ok((y, mean.detach().reshape([shape[1]])?, unbiased.reshape([shape[1]])?))
    }
    /// Batch norm by given statistics `mean` and `variance`, `[C]`.
    #[track_caller]
    fn batch_norm(
        &self,
        mean: &Self,
        variance: &Self,
        weight: Option<&Self>,
        bias: Option<&Self>,
        eps: f64,
    ) -> Result<Self> {
        let shape = self.spec().shape;
        channels_fit("batch_norm", shape, &[Some(mean), Some(variance), weight, bias])?;
        let rank = shape.rank();
        affine(&standardized(self, &per_channel(mean, rank)?, &per_channel(variance, rank)?, eps)?, weight, bias)
    }
    /// Attention of queries `self: [B, H, T, D]` over all keys `[B, K, S, D]` and values `[B, K, S, E]`, where `K`
    /// divides `H`. Scores are scaled by `1/√D`.
    #[track_caller]
    fn attention(&self, key: &Self, value: &Self) -> Result<Self> {
        self.attention_with(key, value, SdpaOptions::default())
    }
    /// Attention in which a query sees no key after its own position; see [`attention`](NnOps::attention).
    #[doc(alias = "is_causal")]
    #[track_caller]
    fn causal_attention(&self, key: &Self, value: &Self) -> Result<Self> {
        self.attention_with(key, value, SdpaOptions { causal: true, ..SdpaOptions::default() })
    }
    /// Attention with a mask, a scale, a sliding window, a soft cap, or queries after a KV cache; see
    /// [`attention`](NnOps::attention). A query that may attend to no key gives zeros (PyTorch: NaN).
    #[doc(alias = "scaled_dot_product_attention")]
    #[track_caller]
    fn attention_with(&self, key: &Self, value: &Self, options: SdpaOptions<'_, Self>) -> Result<Self> {
        let depth = self.spec().shape.last().copied().unwrap_or(1);
        let scale = options.scale.unwrap_or(1.0 / (depth as f64).sqrt());
        let SdpaOptions { causal, lower_right, softcap, mask, window: (left, right), .. } = options;
        let banded = causal || left.is_some() || right.is_some();
        // With as many queries as keys, `lower_right` makes no difference.
        let lower_right = lower_right && banded && key.spec().shape.dims().get(2) != self.spec().shape.dims().get(2);
        let causal = causal || right == Some(0);
        let window = [left, right.filter(|_| !causal)];
        let masked = mask.is_some();
        let op = Attention { causal, window, lower_right, softcap, masked, ..Attention::new(scale) };
        let mask = mask.map(|m| attention::additive(self, m)).transpose()?;
        let ins: SmallVec<[&Self; 4]> = [self, key, value].into_iter().chain(&mask).collect();
        Ok(Self::apply(op.into(), &ins)?.remove(0))
    }
    /// Convolution of `self: [N, C, H, W]` with `weight: [O, C/G, R, S]` and `bias: [O]`.
    #[track_caller]
    fn conv2d(&self, weight: &Self, bias: Option<&Self>, options: ConvOptions) -> Result<Self> {
        options.apply(ConvKind::Forward, self, weight, bias)
    }
    /// Convolution of `self: [N, C, L]` with `weight: [O, C/G, R]` and `bias: [O]`.
    #[track_caller]
    fn conv1d(&self, weight: &Self, bias: Option<&Self>, options: Conv1dOptions) -> Result<Self> {
        rank_is("conv1d", &[self, weight], 3)?;
        let y = ConvOptions::from(options).apply(ConvKind::Forward, &self.unsqueeze(2)?, &weight.unsqueeze(2)?, bias);
        y.map_err(|e| e.of_line("conv1d"))?.squeeze(2)
    }
    /// Transposed convolution of `self: [N, O, P, Q]` with `weight: [O, C/G, R, S]` and `bias: [C]`: the adjoint of
    /// [`conv2d`](NnOps::conv2d). `output_padding` lengthens the result, whose size a stride leaves ambiguous. On each
    /// axis it is less than the stride or less than the dilation.
    #[track_caller]
    fn conv_transpose2d(
        &self,
        weight: &Self,
        bias: Option<&Self>,
        options: ConvOptions,
        output_padding: [usize; 2],
    ) -> Result<Self> {
        rank_is("conv_transpose2d", &[self, weight], 4)?;
        let (size, rows) = transposed(self.spec().shape, weight.spec().shape, options, output_padding)?;
        // An output padding of a whole stride equals one row of zeros after the input.
        let pads = [(0, 0), (0, 0), (0, rows[0]), (0, rows[1])];
        let longer = if rows == [0, 0] { self.clone() } else { self.pad(&pads, 0.0)? };
        options.apply(ConvKind::Input(size), &longer, weight, bias)
    }
    /// The largest element of each window of `self: [N, C, H, W]`; the first of equal elements gets the gradient.
    #[track_caller]
    fn max_pool2d(&self, kernel: [usize; 2], stride: [usize; 2], padding: [usize; 2]) -> Result<Self> {
        Self::apply1(MaxPool { kernel, stride, padding }, &[self])
    }
    /// The mean of each window of `self: [N, C, H, W]`, with the padding counted.
    /// [`avg_pool`](crate::ops::PoolOps::avg_pool) has the other options.
    #[track_caller]
    fn avg_pool2d(&self, kernel: [usize; 2], stride: [usize; 2], padding: [usize; 2]) -> Result<Self> {
        rank_is("avg_pool2d", &[self], 4)?;
        mean_pool::mean("avg_pool2d", self, &PoolOptions { stride, padding, ..PoolOptions::new(kernel) })
    }
    /// Means of `self: [N, C, H, W]` over `size` regions of nearly equal size: region `i` of `n` spans
    /// `⌊i·H/n⌋ .. ⌈(i+1)·H/n⌉`.
    #[track_caller]
    fn adaptive_avg_pool2d(&self, size: [usize; 2]) -> Result<Self> {
        rank_is("adaptive_avg_pool2d", &[self], 4)?;
        mean_pool::adaptive("adaptive_avg_pool2d", self, size)
    }
    /// The largest element of each of `size` regions of `self: [N, C, H, W]`, divided as in
    /// [`adaptive_avg_pool2d`](NnOps::adaptive_avg_pool2d); the first of equal elements gets the gradient.
    #[track_caller]
    fn adaptive_max_pool2d(&self, size: [usize; 2]) -> Result<Self> {
        rank_is("adaptive_max_pool2d", &[self], 4)?;
        Ok(extreme_pool::adaptive("adaptive_max_pool2d", self, size)?.0)
    }
    /// Rotary position embedding (Su et al. 2021) of `self: [.., T, D]`, with positions counted from `start`. Component
    /// `i` is paired with `i + D/2`.
    #[track_caller]
    fn rope(&self, base: f64, start: usize) -> Result<Self> {
        rope::rope(self, &RopeOptions { base, start, ..RopeOptions::default() })
    }
    /// Rotary embedding with explicit positions, partial rotation, or interleaved pairs; see [`rope`](NnOps::rope).
    #[track_caller]
    fn rope_with(&self, options: RopeOptions<'_, Self>) -> Result<Self> {
        rope::rope(self, &options)
    }
    /// Rotary position embedding of `self: [.., T, D]` by given tables of cosines and sines. The tables broadcast to
    /// `[.., T, R/2]` and have `self`'s dtype. The first `R` components are rotated: component `i` is paired with
    /// `i + R/2`, or `2i` with `2i + 1` if `interleaved`.
    #[doc(alias = "apply_rotary_pos_emb")]
    #[track_caller]
    fn rotate(&self, cos: &Self, sin: &Self, interleaved: bool) -> Result<Self> {
        rope::rotate(self, cos, sin, interleaved)
    }
    /// The softmax of `−self` along `axis`; see [`softmax`](NnOps::softmax).
    #[track_caller]
    fn softmin(&self, axis: isize) -> Result<Self> {
        self.neg()?.softmax(axis)
    }
    /// The gated linear unit `a · sigmoid(b)` of the two halves `a`, `b` of `self` along `axis` (Dauphin et al. 2017).
    #[track_caller]
    fn glu(&self, axis: isize) -> Result<Self> {
        static GLU: LazyLock<Program> = LazyLock::new(|| Program::new("glu", |[a, b], []| [a * b.sigmoid()]));
        let halves = self.chunk(axis, 2)?;
        halves[0].apply_program(&GLU, &[&halves[1]], &[])
    }
    /// The PReLU activation: `x` where positive, `weight · x` elsewhere (He et al. 2015), of `self: [N, C, ..]` with
    /// one weight for each channel, or `[1]` for all.
    #[track_caller]
    fn prelu(&self, weight: &Self) -> Result<Self> {
        static PRELU: LazyLock<Program> =
            LazyLock::new(|| Program::new("prelu", |[x, w], []| [x.gt(0.0).select(x, x * w)]));
        let shape = self.spec().shape;
        if weight.spec().shape.numel() == 1 {
            return self.apply_program(&PRELU, &[&weight.reshape([1; 0])?], &[]);
        }
        channels_fit("prelu", shape, &[Some(weight)])?;
        self.apply_program(&PRELU, &[&per_channel(weight, shape.rank())?], &[])
    }
    /// The SwiGLU activation, `silu(self) · gate` (Shazeer 2020).
    #[track_caller]
    fn swiglu(&self, gate: &Self) -> Result<Self> {
        static SWIGLU: LazyLock<Program> = LazyLock::new(|| Program::new("swiglu", |[a, b], []| [a.silu() * b]));
        self.apply_program(&SWIGLU, &[gate], &[])
    }
    /// Zeroes elements with probability `p` and scales the others by `1/(1−p)`. The mask is drawn from Philox with this
    /// seed, so backward and every runtime regenerate it instead of storing it.
    #[track_caller]
    fn dropout(&self, p: f64, seed: u64) -> Result<Self> {
        static DROPOUT: LazyLock<Program> = LazyLock::new(|| {
            Program::build("dropout", 1, 3, |b, x, s| {
                let u = (b.random(0, 0) >> b.int(8)).cast(DType::F32) * 2f64.powi(-24);
                vec![s[1].cast(DType::F32).le(u).select(x[0] * s[2], b.int(0).cast_like(x[0]))]
            })
        });
        if !(0.0..1.0).contains(&p) {
            return Err(Error::range("dropout", "probability", p, "in [0, 1)"));
        }
        let scalars: [Scalar; 3] = [seed.into(), p.into(), (1.0 / (1.0 - p)).into()];
        self.apply_program(&DROPOUT, &[], &scalars)
    }
    /// Dropout that also returns the mask of kept elements, `bool` of `self`'s shape; see [`dropout`](NnOps::dropout).
    #[doc(alias = "native_dropout")]
    #[track_caller]
    fn dropout_with_mask(&self, p: f64, seed: u64) -> Result<(Self, Self)> {
        let kept = self.dropout(p, seed)?;
        let dropped = Tensor::bernoulli(self.runtime(), self.spec().shape, p, seed)?;
        Ok((kept, Self::constant(dropped.logical_not()?)))
    }
}

impl<T: Apply> NnOps for T {}

#[track_caller]
fn along_last<T: Apply>(x: &T, axis: isize, f: impl FnOnce(&T) -> Result<T>) -> Result<T> {
    let shape = x.spec().shape;
    let axis = shape.axis("softmax", axis)? as isize;
    if axis as usize + 1 == shape.rank() {
        return f(x);
    }
    f(&x.transpose(axis, -1)?)?.transpose(axis, -1)
}

#[track_caller]
fn norm<T: Apply>(x: &T, kind: NormKind, weight: Option<&T>, bias: Option<&T>, eps: f64) -> Result<T> {
    if weight.is_none() && bias.is_some() {
        return norm(x, kind, None, None, eps)?.add(bias.unwrap_or(x));
    }
    let op = Norm { kind, eps, weight: weight.is_some(), bias: bias.is_some() };
    let ins: Vec<&T> = std::iter::once(x).chain(weight).chain(bias).collect();
    Ok(T::apply(op.into(), &ins)?.remove(0))
}

/// The vector `[C]` as `[C, 1, ..]`, to broadcast against `[N, C, ..]` with `rank` axes.
#[track_caller]
fn per_channel<T: Apply>(x: &T, rank: usize) -> Result<T> {
    let n = x.spec().shape.numel();
    let dims: Vec<usize> = std::iter::once(n).chain(std::iter::repeat_n(1, rank.saturating_sub(2))).collect();
    x.reshape(dims)
}

/// Checks that parameters have one element for each channel of `[N, C, ..]`.
#[track_caller]
fn channels_fit<T: Apply>(op: &'static str, x: Shape, parameters: &[Option<&T>]) -> Result<()> {
    if x.rank() < 2 {
        return Err(Error::shape(op, &[x], "needs [N, C, ..]"));
    }
    match parameters.iter().flatten().map(|p| p.spec().shape).find(|p| p.numel() != x[1]) {
        None => Ok(()),
        Some(p) => Err(Error::shape(op, &[x, p], format!("{} channels, not {}", x[1], p.numel()))),
    }
}

#[track_caller]
fn affine<T: Apply>(x: &T, weight: Option<&T>, bias: Option<&T>) -> Result<T> {
    static BOTH: LazyLock<Program> = LazyLock::new(|| Program::new("affine", |[x, w, b], []| [x * w + b]));
    let rank = x.spec().shape.rank();
    match (weight, bias) {
        (Some(w), Some(b)) => x.apply_program(&BOTH, &[&per_channel(w, rank)?, &per_channel(b, rank)?], &[]),
        (Some(w), None) => x.mul(&per_channel(w, rank)?),
        (None, Some(b)) => x.add(&per_channel(b, rank)?),
        (None, None) => Ok(x.clone()),
    }
}

#[track_caller]
fn standardized<T: Apply>(x: &T, mean: &T, variance: &T, eps: f64) -> Result<T> {
    static STANDARD: LazyLock<Program> =
        LazyLock::new(|| Program::new("standardize", |[x, m, v], [eps]| [(x - m) * (v + eps).rsqrt()]));
    x.apply_program(&STANDARD, &[mean, variance], &[eps.into()])
}

#[track_caller]
fn rank_is<T: Apply>(op: &'static str, xs: &[&T], rank: usize) -> Result<()> {
    let shapes: Vec<Shape> = xs.iter().map(|x| x.spec().shape).collect();
    if shapes.iter().all(|s| s.rank() == rank) {
        return Ok(());
    }
    Err(Error::shape(op, &shapes, format!("needs operands with {rank} axes")))
}
