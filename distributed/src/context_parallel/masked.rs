//! Attention within packed documents, whose masks are recomputed in backward, so that no layer keeps them.

use autograd::{Function, Var};
use nn::parallel::SequencePart;
use numcore::{
    Result, Runtime, Tensor,
    fused::{Attention, AttentionGrad},
    ops::{Apply, Backprop},
};

use super::masks::segment_mask;

/// The attention of whole sequences of packed documents.
pub(super) struct MaskedAttention<R: Runtime> {
    pub(super) op: Attention,
    /// The document of each token, `[B, T]`.
    pub(super) segments: Tensor<R>,
}

impl<R: Runtime> MaskedAttention<R> {
    fn mask(&self, like: &Tensor<R>) -> Result<Tensor<R>> {
        let whole = SequencePart::whole(self.segments.shape()[1]);
        segment_mask(&self.segments, &whole, &whole, like)
    }
}

impl<R: Runtime> Function<R> for MaskedAttention<R> {
    fn name(&self) -> &'static str {
        "masked_attention"
    }

    fn forward(&self, ins: &[Tensor<R>]) -> Result<Vec<Tensor<R>>> {
        let mask = self.mask(&ins[0])?;
        Ok(Tensor::apply(self.op.clone().into(), &[&ins[0], &ins[1], &ins[2], &mask])?.into_vec())
    }

    fn backward(&self, cx: &mut dyn Backprop<Var<R>>) -> Result<()> {
        let qkv = [cx.input(0)?, cx.input(1)?, cx.input(2)?];
        let (o, sums) = (cx.output(Attention::OUTPUT)?, cx.output(Attention::LSE)?);
        let mask = self.mask(&qkv[0].value()?)?;
        let found = gradients(&self.op, [&cx.grad()?, &o, &sums], qkv.each_ref(), Some(mask))?;
        found.iter().enumerate().try_for_each(|(i, gradient)| cx.give_value(i, gradient))
    }
}

/// The gradients of queries, keys and values, from the output's gradient, the output, and the log-sum-exp of the
/// scores.
pub(super) fn gradients<R: Runtime>(
    op: &Attention,
    [g, o, sums]: [&Var<R>; 3],
    [q, k, v]: [&Var<R>; 3],
    mask: Option<Tensor<R>>,
) -> Result<Vec<Var<R>>> {
    // Kernels read contiguous sums. A gradient that is differentiated again does not read them.
    let (sums, mask) = (Var::new(sums.value()?.contiguous()?), mask.map(Var::new));
    let operands: Vec<&Var<R>> = [g, o, &sums, q, k, v].into_iter().chain(&mask).collect();
    Ok(Var::apply(AttentionGrad(op.clone()).into(), &operands)?.into_vec())
}
