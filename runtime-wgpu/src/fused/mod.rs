//! Kernels of fused operations; operations without one are decomposed.

mod attention;
mod cross_entropy;
mod norm;
mod rows;
mod softmax;

use numcore::{
    Accumulate, DType, Out, Result, Scalar, Support, View,
    fused::{FusedOp, ScoredAttention},
};
use smallvec::SmallVec;

use self::attention::ScorePrograms;
use crate::{Wgpu, bindings::OperandView, matmul, reduce::fill};

/// The operands of one call.
struct FusedCall<'c, 'a> {
    wgpu: &'c Wgpu,
    ins: SmallVec<[OperandView<'a>; 8]>,
    outs: SmallVec<[OperandView<'a>; 4]>,
}

impl FusedCall<'_, '_> {
    /// The number of rows and their width, for an input whose rows are its last axis.
    fn rows(&self, i: usize) -> (usize, usize) {
        let dims = self.ins[i].layout.dims();
        let width = dims[dims.len() - 1];
        (dims[..dims.len() - 1].iter().product(), width)
    }
}

/// Runs `op` if there is a kernel for it at these types and strides; otherwise it is decomposed.
pub(crate) fn run(wgpu: &Wgpu, op: &FusedOp, ins: &[View<'_, Wgpu>], outs: &mut [Out<'_, Wgpu>]) -> Result<Support> {
    // Attention and products take any strides.
    let strided = matches!(
        op,
        FusedOp::Attention(_)
            | FusedOp::AttentionGrad(_)
            | FusedOp::ScoredAttention(_)
            | FusedOp::ScoredAttentionGrad(_)
            | FusedOp::Linear(_)
    );
    let dense = (strided || ins.iter().all(|v| v.layout().is_contiguous()))
        && outs.iter().all(|o| o.how == Accumulate::Overwrite && o.view.layout().is_contiguous());
    let empty = ins.iter().any(|v| v.layout().numel() == 0);
    let wide = ins[0].layout().dims().last().is_none_or(|&w| w > rows::WIDEST);
    if !dense || empty || wide || ins[0].dtype() == DType::F64 {
        return Ok(Support::Decompose);
    }
    let call = FusedCall {
        wgpu,
        ins: ins.iter().map(|v| OperandView::from(*v)).collect(),
        outs: outs.iter().map(|o| OperandView::from(&o.view)).collect(),
    };
    match op {
        FusedOp::Softmax(op) => softmax::forward(&call, op.log),
        FusedOp::SoftmaxGrad(op) => softmax::backward(&call, op.log),
        FusedOp::Norm(op) => norm::forward(&call, op),
        FusedOp::NormGrad(op) => norm::backward(&call, op),
        FusedOp::Attention(op) => attention::forward(&call, op, None),
        FusedOp::AttentionGrad(op) => {
            attention::backward(&call, &op.0, [None, None], SmallVec::new(), |queries, keys| queries * keys)
        }
        FusedOp::ScoredAttention(op) => {
            let programs = ScorePrograms::of_scores(op, &call.ins)?;
            attention::forward(&call, &op.attention, Some(programs))
        }
        FusedOp::ScoredAttentionGrad(op) => {
            let support = attention::scored_backward(&call, op)?;
            let learns_nothing = |arg: &usize| support == Support::Done && !op.learned.contains(arg);
            for arg in (0..op.given()).filter(learns_nothing) {
                fill(wgpu, Scalar::I64(0), &mut outs[ScoredAttention::ARGS + arg..][..1])?;
            }
            Ok(support)
        }
        FusedOp::Linear(_) => matmul::linear(wgpu, &call.ins, call.outs[0]),
        FusedOp::CrossEntropy(op) => cross_entropy::forward(&call, op),
        FusedOp::CrossEntropyGrad(op) => cross_entropy::backward(&call, &op.0),
        _ => Ok(Support::Decompose),
    }
}
