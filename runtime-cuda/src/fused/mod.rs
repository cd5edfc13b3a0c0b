//! Kernels of fused operations. Operands in a layout that a kernel cannot read are copied to contiguous memory; calls
//! that no kernel supports are decomposed.

mod attention;
mod conv;
mod cross_entropy;
mod linear;
mod linear4bit;
mod norm;
mod scores;
mod softmax;

use numcore::{Accumulate, DType, Out, Result, Support, View, fused::FusedOp};
use smallvec::SmallVec;

use crate::{
    Cuda,
    handwritten::{DefineValue, HandwrittenKernel, element},
    memory::CudaBuffer,
    operand::Operand,
    pointwise::to_dense,
};

/// The widest row that a warp computes; wider rows take a block.
const WARP_WIDTH: usize = 1024;
const WARP: usize = 32;
const BLOCK: usize = 256;
/// Bytes of a pack (`PACK`), which is moved as one, and the most packs that a thread of a warp or of a block holds.
const PACK: usize = 16;
const WARP_PACKS: usize = 8;
const BLOCK_PACKS: usize = 4;
/// The number of rows of a block of warps.
const WARPS: usize = 4;

/// Tells whether the kernel takes outputs of any order of axes, with other elements between their rows.
pub(crate) fn is_strided(op: &FusedOp) -> bool {
    matches!(
        op,
        FusedOp::Attention(_)
            | FusedOp::AttentionGrad(_)
            | FusedOp::ScoredAttention(_)
            | FusedOp::ScoredAttentionGrad(_)
            | FusedOp::CrossEntropyGrad(_)
            | FusedOp::Linear(_)
    )
}

/// Tells whether the kernel can accumulate into outputs: a norm's gradient is added to that of the residual branch, and
/// a linear layer's to that of other micro-batches.
pub(crate) fn adds(op: &FusedOp) -> bool {
    matches!(op, FusedOp::NormGrad(_) | FusedOp::LinearGrad(_))
}

/// Runs `op` if there is a kernel for it.
pub(crate) fn run(cuda: &Cuda, op: &FusedOp, ins: &[View<'_, Cuda>], outs: &mut [Out<'_, Cuda>]) -> Result<Support> {
    let mut call = FusedCall {
        cuda,
        ins: ins.iter().map(|v| Operand::from(*v)).collect(),
        outs: outs.iter().map(|o| Operand::from(&o.view)).collect(),
        added: outs.iter().map(|o| o.how == Accumulate::Add).collect(),
        kept: Vec::new(),
    };
    if !call.dtype().is_float() {
        return Ok(Support::Decompose);
    }
    match op {
        FusedOp::Softmax(op) => softmax::forward(&mut call, op),
        FusedOp::SoftmaxGrad(op) => softmax::backward(&mut call, op),
        FusedOp::Norm(op) => norm::forward(&mut call, op),
        FusedOp::NormGrad(op) => norm::backward(&mut call, &op.0),
        FusedOp::CrossEntropy(op) => cross_entropy::forward(&mut call, op),
        FusedOp::CrossEntropyGrad(op) => cross_entropy::backward(&mut call, &op.0),
        FusedOp::Attention(op) => attention::forward(&mut call, op, None),
        FusedOp::AttentionGrad(op) => attention::backward(&mut call, &op.0, None),
        FusedOp::ScoredAttention(op) => scores::forward(&mut call, op),
        FusedOp::ScoredAttentionGrad(op) => scores::backward(&mut call, op),
        FusedOp::Conv(op) => conv::run(&mut call, op),
        FusedOp::Linear(op) => linear::run(&mut call, op),
        FusedOp::LinearGrad(_) => linear::backward(&mut call),
        FusedOp::Linear4bit(op) => linear4bit::run(&mut call, op),
        _ => Ok(Support::Decompose),
    }
}

/// The number of elements from one row of a matrix to the next.
fn pitch_of(x: &Operand) -> i64 {
    x.layout.strides()[0] as i64
}

/// One call: its operands, and memory that lives until it is queued.
struct FusedCall<'a> {
    cuda: &'a Cuda,
    ins: SmallVec<[Operand; 8]>,
    outs: SmallVec<[Operand; 4]>,
    /// True for each output that is accumulated into.
    added: SmallVec<[bool; 4]>,
    kept: Vec<CudaBuffer>,
}

/// The number and the width of rows along the last axis.
#[derive(Clone, Copy)]
struct RowShape {
    rows: usize,
    width: usize,
}

impl RowShape {
    fn of(x: &Operand) -> RowShape {
        let dims = x.dims();
        RowShape { rows: dims[..dims.len() - 1].iter().product(), width: dims[dims.len() - 1] }
    }

    /// The number of threads that share a row.
    fn threads(self) -> usize {
        if self.width <= WARP_WIDTH { WARP } else { BLOCK }
    }

    /// The number of 16-byte packs of a row that each of its threads holds; 0 where threads cannot hold the row.
    /// Holding takes rows of whole packs, aligned `operands`, and enough registers.
    fn packs(self, dtype: DType, operands: &[u64]) -> usize {
        let bytes = self.width * dtype.size();
        let packs = (bytes / PACK).div_ceil(self.threads());
        let most = if self.threads() == WARP { WARP_PACKS } else { BLOCK_PACKS };
        let aligned = bytes.is_multiple_of(PACK) && operands.iter().all(|at| at.is_multiple_of(PACK as u64));
        if dtype != DType::F64 && aligned && packs <= most { packs } else { 0 }
    }

    /// Blocks and threads of a launch.
    fn grid(self) -> ([usize; 3], [u32; 2]) {
        match self.threads() {
            WARP => ([self.rows.div_ceil(WARPS), 1, 1], [WARP as u32, WARPS as u32]),
            _ => ([self.rows, 1, 1], [BLOCK as u32, 1]),
        }
    }
}

impl FusedCall<'_> {
    /// The type of the elements of rows. Losses and statistics have the compute type instead.
    fn dtype(&self) -> DType {
        self.ins[0].dtype
    }

    /// The address of input `i`, row-major without gaps; copied if it is not so.
    fn dense(&mut self, i: usize) -> Result<u64> {
        if !self.ins[i].layout.is_contiguous() {
            let (memory, copy) = to_dense(self.cuda, &self.ins[i], self.ins[i].dtype)?;
            self.kept.push(memory);
            self.ins[i] = copy;
        }
        Ok(self.ins[i].address)
    }

    /// The address of input `i` as contiguous rows, and the number of elements from one row to the next.
    fn pitched(&mut self, i: usize) -> Result<(u64, i64)> {
        let layout = &self.ins[i].layout;
        let neighbours = layout.strides()[1] == 1 || layout.dims()[1] == 1;
        match neighbours && layout.strides()[0] >= layout.dims()[1] as isize {
            true => Ok((self.ins[i].address, pitch_of(&self.ins[i]))),
            false => Ok((self.dense(i)?, pitch_of(&self.ins[i]))),
        }
    }

    /// An `int` argument of kernels: 1 if output `i` is accumulated into.
    fn adds(&self, i: usize) -> i32 {
        i32::from(self.added[i])
    }

    /// Allocates memory that lives until the call is queued.
    fn scratch(&mut self, bytes: usize) -> Result<u64> {
        let memory = self.cuda.scratch(bytes)?;
        let address = memory.address();
        self.kept.push(memory);
        Ok(address)
    }

    /// A kernel on rows, which moves 16 bytes at a time where all of `operands` begin at a multiple of 16.
    fn kernel(
        &self,
        file: &'static str,
        entry: &'static str,
        variant: &[(&'static str, DefineValue)],
        rows: RowShape,
        operands: &[u64],
    ) -> HandwrittenKernel {
        let vector = operands.iter().all(|at| at.is_multiple_of(PACK as u64));
        let mut defines: SmallVec<[_; 5]> = SmallVec::from_slice(variant);
        defines.push(("T", DefineValue::from(element(self.dtype()))));
        defines.push(("ROW_THREADS", rows.threads().into()));
        defines.push(("VECTOR", vector.into()));
        HandwrittenKernel::new(file, entry, &defines)
    }
}
