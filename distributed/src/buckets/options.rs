//! How gradients are exchanged.

use super::{BucketLimits, GradCompression, Unused};
use crate::combinations::{Feature, Features};

/// How gradients are exchanged.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct BucketOptions {
    /// Sizes of the buckets; if there are none, [`BucketLimits::of`] all parameters.
    pub limits: Option<BucketLimits>,
    /// Parameters without a gradient.
    pub unused: Unused,
    /// What gradients are sent as.
    pub compression: GradCompression,
    /// Looks, before a bucket is sent, whether every gradient in it is finite; the error names rank, bucket and parameter. Waits for the
    /// device at every bucket: to find out where a NaN comes from.
    pub check_finite: bool,
    /// Adds the gradients of micro-batches one after another, whatever the number of ranks: with a batch cut into `C` chunks, of which
    /// rank `r` of `n` computes `r, n + r, 2n + r …` as its micro-batches, the result is the same to the bit at every `n` that
    /// divides `C`; losses and what they weigh are added in the same order. Costs an exchange in every micro-batch, of `(n − 1)·Ψ`
    /// bytes sent in place of `2·(n − 1)/n·Ψ`, a second buffer of gradients, and `n` times the memory of a bucket in flight.
    /// Gradients travel as they are.
    pub canonical: bool,
    /// Adds gradients of half-precision parameters up in `f32`, over micro-batches and over ranks (Megatron's main gradients, DeepSpeed's
    /// `grad_accum_dtype`): a backward pass computes each in the parameter's type, and it is freed as soon as it was added. They travel in
    /// `f32` then, unless [`compression`](BucketOptions::compression) narrows them. Costs 4 bytes a parameter in place of 2.
    #[doc(alias("main_grad"))]
    #[doc(alias("grad_accum_dtype"))]
    #[doc(alias("accumulate_allreduce_grads_in_fp32"))]
    pub main_gradients: bool,
}

impl BucketOptions {
    /// The features of a step that exchanges gradients so.
    pub fn features(&self) -> Features {
        let narrowed = matches!(self.compression, GradCompression::Bf16 | GradCompression::F16);
        Features::default()
            .and_if(self.unused == Unused::Allow, Feature::Unused)
            .and_if(narrowed, Feature::Narrowed)
            .and_if(matches!(self.compression, GradCompression::PowerSgd(_)), Feature::PowerSgd)
            .and_if(self.canonical, Feature::Canonical)
    }
}
