//! Options of the exchange of gradients.

use super::{BucketLimits, GradCompression, Unused};
use crate::combinations::{Feature, Features};

/// Options of the exchange of gradients between replicas.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct BucketOptions {
    /// The sizes of buckets; without them, [`BucketLimits::of`] all parameters.
    pub limits: Option<BucketLimits>,
    /// The treatment of parameters without a gradient in a step.
    pub unused: Unused,
    /// The format in which gradients travel.
    pub compression: GradCompression,
    /// Checks, before a bucket is sent, that every gradient in it is finite; the error names rank, bucket and
    /// parameter. Waits for the device at every bucket: a tool to find the origin of a NaN.
    pub check_finite: bool,
    /// Sums the gradients of micro-batches in one fixed order, whatever the number of ranks `n`. The batch is cut into
    /// `C` chunks; rank `r` computes chunks `r, n + r, 2n + r …` as its micro-batches. Results are bitwise equal at
    /// every `n` that divides `C`; losses and their weights are summed in the same order.
    ///
    /// The price is an exchange in every micro-batch, which sends `(n − 1)·Ψ` bytes in place of `2·(n − 1)/n·Ψ` (`Ψ`:
    /// bytes of the gradients). It is also a second buffer of gradients, and `n` times the memory of a bucket in
    /// flight. Gradients travel in their own dtype.
    pub canonical: bool,
    /// Accumulates gradients of half-precision parameters in `f32`, over micro-batches and over ranks (Megatron's main
    /// gradients, DeepSpeed's `grad_accum_dtype`). A backward pass computes each gradient in the parameter's type, and
    /// frees it once it was added. Gradients then travel in `f32`, unless [`compression`](BucketOptions::compression)
    /// narrows them. Costs 4 bytes a parameter in place of 2.
    #[doc(alias("main_grad"))]
    #[doc(alias("grad_accum_dtype"))]
    #[doc(alias("accumulate_allreduce_grads_in_fp32"))]
    pub main_gradients: bool,
}

impl BucketOptions {
    /// The [`Feature`]s that these options give a training step; [`Features::check`] rejects those that exclude each
    /// other.
    pub fn features(&self) -> Features {
        let narrowed = matches!(self.compression, GradCompression::Bf16 | GradCompression::F16);
        Features::default()
            .and_if(self.unused == Unused::Allow, Feature::Unused)
            .and_if(narrowed, Feature::Narrowed)
            .and_if(self.canonical, Feature::Canonical)
    }
}
