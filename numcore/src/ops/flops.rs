//! Floating-point operations of op calls.

use super::{Op, Spec};
use crate::fused::{ConvKind, FusedOp, ScoredAttention};

impl Op {
    /// The floating-point operations of a call, a multiplication and an addition counting two. The formulas are those
    /// of PyTorch's `FlopCounterMode`; other calls count 0:
    ///
    /// - a product of `[.., M, K]` and `[.., K, N]`, or its cross-entropy: `2·M·N·K` for each matrix of the batch, and
    ///   as much for each gradient computed with it;
    /// - attention of `T` queries and `S` keys: `2·T·S·(D + E)` for each head, where scores take `D` and values `E`
    ///   channels, and `2·T·S·(3D + 2E)` for its gradients. Masked scores count too, but not those that a causal
    ///   [`ScoredAttention`] leaves out;
    /// - a convolution: `2·C/G·R·S` for each element of the larger side, that is, of `y` in `y = conv(x, w)`.
    pub fn flops(&self, inputs: &[Spec], outputs: &[Spec]) -> u64 {
        match self {
            Op::Matmul(_) => product(inputs, outputs),
            Op::Fused(op) => op.flops(inputs, outputs),
            _ => 0,
        }
    }
}

impl FusedOp {
    /// The floating-point operations of a call, as [`Op::flops`] counts them.
    pub fn flops(&self, inputs: &[Spec], outputs: &[Spec]) -> u64 {
        // Each query of `q`, `k` and `v`, the inputs from `first` on, sees each key of its head.
        let of_scores = |scores: u64, first: usize, of_keys: u64, of_values: u64| {
            let (q, v) = (inputs.get(first), inputs.get(first + 2));
            2 * size(q, 4) * size(q, 3) * scores * (of_keys * size(q, 1) + of_values * size(v, 1))
        };
        let queries_and_keys = |first: usize| (size(inputs.get(first), 2), size(inputs.get(first + 1), 2));
        let attention = |first: usize, of_keys: u64, of_values: u64| {
            let (queries, keys) = queries_and_keys(first);
            of_scores(queries * keys, first, of_keys, of_values)
        };
        let scored = |op: &ScoredAttention, first: usize, of_keys: u64, of_values: u64| {
            let (queries, keys) = queries_and_keys(first);
            of_scores(op.computed(queries as usize, keys as usize), first, of_keys, of_values)
        };
        match self {
            FusedOp::Linear(_) | FusedOp::Linear4bit(_) | FusedOp::BlockScaledLinear(_) => product(inputs, outputs),
            FusedOp::LinearGrad(_) => 2 * numel(inputs.first()) * size(inputs.get(1), 1),
            FusedOp::LinearCrossEntropy(op) => {
                let matrices = (0..2).filter(|&i| op.gradients.has(i)).count() as u64;
                2 * numel(inputs.first()) * size(inputs.get(1), 2) * (1 + matrices)
            }
            FusedOp::LinearCrossEntropyGrad(op) => FusedOp::LinearCrossEntropy(op.0.clone()).flops(inputs, outputs),
            FusedOp::Attention(_) => attention(0, 1, 1),
            // After the gradient, the output and its statistics.
            FusedOp::AttentionGrad(_) => attention(3, 3, 2),
            FusedOp::ScoredAttention(op) => scored(op, 0, 1, 1),
            FusedOp::ScoredAttentionGrad(op) => scored(&op.of, 3, 3, 2),
            FusedOp::Conv(conv) => {
                // Operands are x and w, y and w, or x and y; a kernel is [O, C/G, R, S].
                let (y, kernel) = match conv.kind {
                    ConvKind::Forward => (outputs.first(), inputs.get(1)),
                    ConvKind::Input(_) => (inputs.first(), inputs.get(1)),
                    ConvKind::Weight(_) => (inputs.get(1), outputs.first()),
                };
                2 * numel(y) * size(kernel, 3) * size(kernel, 2) * size(kernel, 1)
            }
            _ => 0,
        }
    }
}

fn product(inputs: &[Spec], outputs: &[Spec]) -> u64 {
    2 * numel(outputs.first()) * size(inputs.first(), 1)
}

fn numel(spec: Option<&Spec>) -> u64 {
    spec.map_or(0, |spec| spec.shape.numel() as u64)
}

/// The size of the dimension at `from_end`, 1 for the last; 0 if there is none.
fn size(spec: Option<&Spec>, from_end: usize) -> u64 {
    let shape = spec.map(|spec| &spec.shape[..]).unwrap_or_default();
    shape.len().checked_sub(from_end).and_then(|at| shape.get(at)).map_or(0, |&n| n as u64)
}
