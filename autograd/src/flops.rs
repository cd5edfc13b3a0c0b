//! Floating-point operations of op calls.

use numcore::{
    fused::{ConvKind, FusedOp},
    ops::{Op, Spec},
};

/// Floating-point operations of a call, a multiplication and an addition counting two. The formulas are those of
/// PyTorch's `FlopCounterMode`; other calls count 0:
///
/// - a product of `[.., M, K]` and `[.., K, N]`, with a bias or without, or its cross-entropy: `2·M·N·K` for each matrix
///   of the batch;
/// - attention of `T` queries and `S` keys: `2·T·S·(D + E)` for each head, where scores take `D` and values `E`
///   channels. Masked scores count too;
/// - a convolution: `2·C/G·R·S` for each element of the larger side, that is, of `y` in `y = conv(x, w)`.
pub(crate) fn of(op: &Op, inputs: &[Spec], outputs: &[Spec]) -> u64 {
    let size = |spec: Option<&Spec>, from_end: usize| {
        let shape = spec.map(|spec| &spec.shape[..]).unwrap_or_default();
        shape.len().checked_sub(from_end).and_then(|at| shape.get(at)).map_or(0, |&n| n as u64)
    };
    let numel = |spec: Option<&Spec>| spec.map_or(0, |spec| spec.shape.numel() as u64);
    let product = || 2 * numel(outputs.first()) * size(inputs.first(), 1);
    match op {
        Op::Matmul(_) | Op::Fused(FusedOp::Linear(_)) => product(),
        Op::Fused(FusedOp::LinearCrossEntropy(_)) => 2 * numel(inputs.first()) * size(inputs.get(1), 2),
        Op::Fused(FusedOp::Attention(_)) => {
            let (q, k, v) = (inputs.first(), inputs.get(1), inputs.get(2));
            let rows = numel(q) / size(q, 1).max(1);
            2 * rows * size(k, 2) * (size(q, 1) + size(v, 1))
        }
        Op::Fused(FusedOp::Conv(conv)) => {
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
