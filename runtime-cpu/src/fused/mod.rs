//! Kernels of fused operations, for floating-point elements in contiguous rows. Operands that are not contiguous are
//! copied first, except attention's. Everything else is decomposed, and so are convolution and pooling of
//! half-precision elements.
//!
//! Half-precision rows are computed in `f32`: they are upcast a few at a time, and rounded once where they are stored
//! ([`half_rows`]). Each kernel reads its rows once or twice while they are in cache, where the decomposition would
//! pass over memory for every primitive. The partition of rows into tasks depends only on the sizes.

mod attention;
mod conv;
mod cross_entropy;
mod half_rows;
mod linear4bit;
mod norm;
mod pool;
mod row_reduce;
mod softmax;

use half::{bf16, f16};
use numcore::{
    Accumulate, DType, Layout, Out, Result, Support, View,
    fused::{FusedOp, ScoredAttention, ScoredAttentionGrad},
};
use smallvec::SmallVec;

use crate::{
    Cpu, CpuBuffer, Engine,
    element::{Lane, Stored},
    gemm::{Vectors, linear},
    math::Math,
    operand::{Base, Operand},
    pointwise,
};

/// A type rows are computed in.
pub(crate) trait Float: Math + numcore::Element + Lane + Stored<Lane = Self> + Vectors {}
impl Float for f32 {}
impl Float for f64 {}

/// A type rows are stored in.
pub(crate) trait StoredFloat: Stored<Lane: Float> {}
impl<S: Stored<Lane: Float>> StoredFloat for S {}

/// The constant 1, since both of a float's traits have a constant of that name.
#[inline(always)]
fn one<T: Float>() -> T {
    <T as crate::math::Real>::ONE
}

/// Tells whether the kernel takes operands and outputs of any strides between rows.
pub(crate) fn is_strided(op: &FusedOp) -> bool {
    use FusedOp::*;
    matches!(op, Attention(_) | AttentionGrad(_) | ScoredAttention(_) | ScoredAttentionGrad(_))
}

/// Tells whether the kernel can accumulate into outputs: a norm's gradient is added to that of the residual branch.
pub(crate) fn adds(op: &FusedOp) -> bool {
    matches!(op, FusedOp::NormGrad(_))
}

/// Runs `op` if there is a kernel for it at these types and strides; otherwise it is decomposed.
pub(crate) fn run(cpu: &Cpu, op: &FusedOp, ins: &[View<'_, Cpu>], outs: &mut [Out<'_, Cpu>]) -> Result<Support> {
    let strided = is_strided(op);
    let fits = |o: &Operand| if strided { is_row_wise(o) } else { o.layout.is_contiguous() };
    if outs.iter().any(|o| o.how == Accumulate::Add && !adds(op) || !fits(&(&o.view).into())) {
        return Ok(Support::Decompose);
    }
    if let FusedOp::Linear(_) = op {
        return linear(cpu, ins, Operand::from(&outs[0].view)).map(|()| Support::Done);
    }
    if let FusedOp::Linear4bit(op) = op {
        return linear4bit::run(cpu, op, ins, Operand::from(&outs[0].view));
    }
    let mut copies = SmallVec::new();
    let operand = |v: &View<'_, Cpu>| if strided { Ok((*v).into()) } else { contiguous(cpu, (*v).into(), &mut copies) };
    let call = FusedCall {
        cpu,
        ins: ins.iter().map(operand).collect::<Result<_>>()?,
        outs: outs.iter().map(|o| Operand::from(&o.view)).collect(),
        added: outs.iter().map(|o| o.how == Accumulate::Add).collect(),
    };
    // Rows are of this type; losses have the type they are computed in.
    let dtype = if matches!(op, FusedOp::CrossEntropy(_)) { call.ins[0].dtype } else { call.outs[0].dtype };
    // The program of scores types its arguments.
    let typed = match op {
        FusedOp::ScoredAttention(_) => ScoredAttention::ARGS,
        FusedOp::ScoredAttentionGrad(_) => ScoredAttentionGrad::ARGS,
        _ => call.ins.len(),
    };
    if (0..typed).any(|i| call.ins[i].dtype != input_dtype(op, i, dtype)) {
        return Ok(Support::Decompose);
    }
    match dtype {
        DType::F32 => call.run::<f32>(op),
        DType::F64 => call.run::<f64>(op),
        DType::F16 => call.run::<f16>(op),
        DType::BF16 => call.run::<bf16>(op),
        _ => Ok(Support::Decompose),
    }
}

/// The type of input `i` of a call on elements of type `dtype`. Classes are integers; statistics and the gradient of
/// losses are stored in the type they are computed in.
fn input_dtype(op: &FusedOp, i: usize, dtype: DType) -> DType {
    let statistic = match op {
        FusedOp::CrossEntropy(_) | FusedOp::CrossEntropyGrad(_) if i == 1 => return DType::I64,
        FusedOp::CrossEntropyGrad(_) => (2..=4).contains(&i),
        FusedOp::AttentionGrad(_) | FusedOp::ScoredAttentionGrad(_) => i == 2,
        FusedOp::NormGrad(op) => i == 2 || i == 3 && op.weight_at() != Some(3),
        _ => false,
    };
    if statistic { dtype.compute() } else { dtype }
}

/// A launch: its operands, as addresses.
struct FusedCall<'a> {
    cpu: &'a Cpu,
    ins: Vec<Operand>,
    outs: Vec<Operand>,
    /// True, for each output, if the result is added to the old value.
    added: SmallVec<[bool; 4]>,
}

impl FusedCall<'_> {
    fn run<S: StoredFloat>(&self, op: &FusedOp) -> Result<Support> {
        match op {
            FusedOp::Attention(op) if self.ins.iter().all(is_row_wise) => attention::forward::<S>(self, op),
            FusedOp::AttentionGrad(op) if self.ins.iter().all(is_row_wise) => attention::backward::<S>(self, &op.0),
            FusedOp::ScoredAttention(op) if self.ins[..ScoredAttention::ARGS].iter().all(is_row_wise) => {
                attention::scored_forward::<S>(self, op)
            }
            FusedOp::ScoredAttentionGrad(op) if self.ins[..ScoredAttentionGrad::ARGS].iter().all(is_row_wise) => {
                attention::scored_backward::<S>(self, op)
            }
            FusedOp::Attention(_) | FusedOp::AttentionGrad(_) => Ok(Support::Decompose),
            FusedOp::Softmax(op) => Ok(softmax::forward::<S>(self, op.log)),
            FusedOp::SoftmaxGrad(op) => Ok(softmax::backward::<S>(self, op.log)),
            FusedOp::Norm(op) => norm::forward::<S>(self, op),
            FusedOp::NormGrad(op) => norm::backward::<S>(self, op),
            FusedOp::CrossEntropy(op) => cross_entropy::forward::<S>(self, op),
            FusedOp::CrossEntropyGrad(op) => cross_entropy::backward::<S>(self, &op.0),
            FusedOp::Conv(op) if S::IS_LANE => conv::run::<S::Lane>(self, op),
            FusedOp::MaxPool(op) if S::IS_LANE => Ok(pool::forward::<S::Lane>(self, op)),
            FusedOp::MaxPoolGrad(op) if S::IS_LANE => Ok(pool::backward::<S::Lane>(self, op)),
            _ => Ok(Support::Decompose),
        }
    }

    fn engine(&self) -> &Engine {
        &self.cpu.queue.engine
    }

    fn input<T: Stored>(&self, i: usize) -> Base<T> {
        self.ins[i].base()
    }

    fn output<T: Stored>(&self, k: usize) -> Base<T> {
        self.outs[k].base()
    }

    /// Parameters `[width]` in the type they are computed in; `buffer` is for upcast ones.
    fn parameter<'a, S: StoredFloat>(
        &'a self,
        i: usize,
        width: usize,
        buffer: &'a mut Option<CpuBuffer>,
    ) -> Result<&'a [S::Lane]> {
        let x = if S::IS_LANE {
            self.ins[i]
        } else {
            let buffer = buffer.insert(self.cpu.scratch(width * size_of::<S::Lane>())?);
            let upcast =
                Operand::of(buffer, Layout::contiguous(*self.ins[i].layout.shape()), self.ins[i].dtype.compute());
            pointwise::convert(self.engine(), self.ins[i], upcast, Accumulate::Overwrite)?;
            upcast
        };
        // SAFETY: contiguous parameters of this length, or their copy.
        Ok(unsafe { x.base().slice(0, width) })
    }

    /// The number of rows and their width, for an input whose rows are its last axis.
    fn rows(&self, i: usize) -> (usize, usize) {
        let dims = self.ins[i].layout.dims();
        let width = dims[dims.len() - 1];
        (dims[..dims.len() - 1].iter().product(), width)
    }
}

/// The operand, or a contiguous copy of it: one pass, where the decomposition takes ten. The gradient of a mean is such
/// an operand: one broadcast element.
fn contiguous(cpu: &Cpu, x: Operand, copies: &mut SmallVec<[CpuBuffer; 2]>) -> Result<Operand> {
    if x.layout.is_contiguous() {
        return Ok(x);
    }
    let layout = Layout::contiguous(*x.layout.shape());
    let copy = cpu.scratch(x.bytes())?;
    let to = Operand::of(&copy, layout, x.dtype);
    pointwise::convert(&cpu.queue.engine, x, to, Accumulate::Overwrite)?;
    copies.push(copy);
    Ok(to)
}

/// Tells whether the last axis has unit stride.
fn is_row_wise(x: &Operand) -> bool {
    x.layout.strides().last().is_none_or(|&s| s == 1) || x.layout.dims().last() == Some(&1)
}

/// Rows of one task: enough elements to be worth a hand-over.
fn grain(width: usize) -> usize {
    (1 << 14) / width.max(1) + 1
}
