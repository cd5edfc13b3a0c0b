//! Gradients of the arguments of programs. The pass over queries sums those of arguments that do not vary along keys;
//! the pass over keys sums others over queries. A reduction adds up the sums of heads, rows and their parts. Arguments
//! that vary along both have a kernel each.

use std::sync::LazyLock;

use numcore::{
    Accumulate, DType, Layout, ReduceKind, Result, Shape, Support,
    fused::{AttentionGrad, ScoredAttention, ScoredAttentionGrad},
    pointwise::Program,
};
use smallvec::{SmallVec, smallvec};

use super::{AttentionCall, AttentionText, SHARE, ScorePrograms, backward::backward, each};
use crate::{WgpuBuffer, bindings::OperandView, fused::FusedCall, reduce};

/// The gradients of attention by a program.
pub(in super::super) fn scored_backward(call: &FusedCall<'_, '_>, op: &ScoredAttentionGrad) -> Result<Support> {
    let ins = &call.ins[AttentionGrad::QUERIES..];
    let varies = |arg: usize, back: usize| {
        let dims = ins[ScoredAttention::ARGS + arg].layout.dims();
        dims.len().checked_sub(back).is_some_and(|axis| dims[axis] != 1)
    };
    if op.learned.iter().any(|arg| ins[ScoredAttention::ARGS + *arg].dtype != DType::F32) {
        return Ok(Support::Decompose);
    }
    let programs = |learned: SmallVec<[usize; 4]>| {
        ScorePrograms::of_gradients(&ScoredAttentionGrad { of: op.of.clone(), learned }, ins)
    };
    let (of_scores, rest): (SmallVec<[usize; 4]>, SmallVec<[usize; 4]>) =
        op.learned.iter().copied().partition(|&arg| varies(arg, 2) && varies(arg, 1));
    let (by_keys, by_queries) = rest.into_iter().partition(|&arg| varies(arg, 1));
    let of_scores =
        of_scores.into_iter().map(|arg| Ok((arg, programs(smallvec![arg])?))).collect::<Result<SmallVec<[_; 1]>>>()?;
    let of_passes = [Some(programs(by_queries)?), Some(programs(by_keys)?)];
    backward(call, &op.of.attention, of_passes, of_scores, |queries, keys| op.of.scores_at_a_time(queries, keys))
}

/// Sums of a pass for each learned argument: `[B, H, T, SHARE]` by queries, `[B, H, SHARE, S]` by keys. The last or
/// third axis is that of the invocations which share a row.
pub(super) struct ArgSums {
    memory: WgpuBuffer,
    layout: Layout,
    learned: SmallVec<[usize; 4]>,
}

impl ArgSums {
    /// Memory for the sums of a pass by keys or by queries; none if it is more than a kernel can bind.
    pub(super) fn new(call: &AttentionCall<'_, '_>, by_keys: bool) -> Result<Option<ArgSums>> {
        let AttentionCall { wgpu, batch, heads, queries, keys, .. } = *call;
        let rows = if by_keys { [SHARE, keys] } else { [queries, SHARE] };
        let layout = Layout::contiguous(Shape::new(&[batch, heads, rows[0], rows[1]])?);
        let bytes = call.learned().len() * layout.numel() * size_of::<f32>();
        if bytes as u64 > wgpu.queue.device.limits.max_storage_buffer_binding_size {
            return Ok(None);
        }
        Ok(Some(ArgSums { memory: wgpu.scratch(bytes)?, layout, learned: call.learned().into() }))
    }

    fn view(&self, k: usize) -> OperandView<'_> {
        OperandView::of(&self.memory, self.layout.at(k * self.layout.numel()), DType::F32)
    }

    /// Outputs of a pass: gradients, then the sums.
    pub(super) fn after<'s>(&'s self, outs: &[OperandView<'s>]) -> SmallVec<[OperandView<'s>; 8]> {
        outs.iter().copied().chain((0..self.learned.len()).map(|k| self.view(k))).collect()
    }

    /// Adds up the sums to the gradients of the arguments.
    pub(super) fn add_up(&self, call: &FusedCall<'_, '_>) -> Result<()> {
        static SUM: LazyLock<Program> = LazyLock::new(|| Program::new("sum", |[x], []| [x]));
        for (k, arg) in self.learned.iter().enumerate() {
            let out = call.outs[ScoredAttention::ARGS + arg];
            let mut dims: SmallVec<[usize; 4]> =
                SmallVec::from_elem(1, ScoredAttention::AXES - out.layout.dims().len());
            dims.extend_from_slice(out.layout.dims());
            let to = out.seen(Layout::contiguous(Shape::new(&dims)?).at(out.layout.offset()));
            let (full, program) = (self.layout.shape(), (&*SUM, &[DType::F32][..], DType::F32));
            reduce::places(
                call.wgpu,
                program,
                &[self.view(k)],
                &[],
                full,
                ReduceKind::Sum,
                (to, Accumulate::Overwrite),
            )?;
        }
        Ok(())
    }
}

impl AttentionText<'_, '_> {
    /// Statements that declare the sums of a row's part.
    pub(super) fn declare_sums(&self) -> String {
        each(self.call.learned().len(), |k| format!("var sum{k} = 0f;\n"))
    }

    /// Statements that add a score's gradients, which the slope's program left.
    pub(super) fn add_to_sums(&self) -> String {
        each(self.call.learned().len(), |k| format!("sum{k} += out{};\n", k + 1))
    }

    /// Statements that store the sums after `outs` gradients, at an index among those of one argument.
    pub(super) fn store_sums(&self, outs: usize, index: &str) -> String {
        each(self.call.learned().len(), |k| {
            let site = self.sites[self.call.views.len() + outs + k];
            format!("{{\nlet at = {} + {index};\n{}}}\n", self.outs[outs + k], site.store("at", &format!("sum{k}")))
        })
    }
}
