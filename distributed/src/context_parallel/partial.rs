//! Partial attention over some of the keys, and the merge of two of them.

use std::sync::LazyLock;

use numcore::{
    Result, Runtime, Tensor,
    fused::Attention,
    ops::{Apply, PointwiseOps, ViewOps},
    pointwise::Program,
};

/// The output of attention over some keys `[B, H, n, D]`, and the log-sum-exp of its scores, in the type of
/// computation.
pub(super) struct PartialAttention<R: Runtime> {
    pub(super) o: Tensor<R>,
    /// The log-sum-exp of the scores, `[B, H, n, 1]`.
    pub(super) lse: Tensor<R>,
}

impl<R: Runtime> PartialAttention<R> {
    /// The result of one call; with `partial`, its output is widened to the type of computation, for merging.
    pub(super) fn of(op: Attention, operands: &[&Tensor<R>]) -> Result<Self> {
        let partial = op.partial;
        let found = Tensor::apply(op.into(), operands)?;
        let [o, lse] = [&found[Attention::OUTPUT], &found[Attention::LSE]];
        let o = if partial { o.to_dtype(o.dtype().compute())? } else { o.clone() };
        Ok(PartialAttention { o, lse: lse.unsqueeze(-1)? })
    }
}

/// The attention over the keys of both: weights are `exp` of differences of the log-sum-exps. A query without keys has
/// a sum of 0.
pub(super) fn merged<R: Runtime>(a: &PartialAttention<R>, b: &PartialAttention<R>) -> Result<PartialAttention<R>> {
    static OUTPUT: LazyLock<Program> = LazyLock::new(|| {
        Program::new("merge_attention", |[o, p, l, m], []| {
            let top = l.max(m);
            let top = top.ne(f64::NEG_INFINITY).select(top, 0.0);
            let (x, y) = ((l - top).exp(), (m - top).exp());
            let sum = x + y;
            [(o * x + p * y) / sum.gt(0.0).select(sum, 1.0)]
        })
    });
    static SUM: LazyLock<Program> = LazyLock::new(|| {
        Program::new("merge_lse", |[l, m], []| {
            let top = l.max(m);
            let level = top.ne(f64::NEG_INFINITY).select(top, 0.0);
            [level + ((l - level).exp() + (m - level).exp()).log()]
        })
    });
    Ok(PartialAttention {
        o: a.o.apply_program(&OUTPUT, &[&b.o, &a.lse, &b.lse], &[])?,
        lse: a.lse.apply_program(&SUM, &[&b.lse], &[])?,
    })
}
