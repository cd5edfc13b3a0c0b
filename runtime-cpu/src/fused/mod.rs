//! Kernels of fused operations, for `f32` and `f64` in rows that lie in one line (operands that do not are copied first, but not
//! attention's); everything else is decomposed.
//!
//! Each kernel reads its rows once or twice while they are in cache, where the decomposition would pass over memory for every
//! primitive. Tasks are groups of rows cut by the sizes alone.

mod attention;
mod conv;
mod cross_entropy;
mod lanes;
mod norm;
mod pool;
mod softmax;

use numcore::{Accumulate, DType, Layout, Out, Result, Support, View, fused::FusedOp};
use smallvec::SmallVec;

use crate::{
    Buffer, Cpu, Engine,
    element::{Lane, Stored},
    math::Math,
    matmul::{Registers, linear},
    operand::{Base, Operand},
    pointwise,
};

/// A type rows are computed in.
pub(crate) trait Float: Math + numcore::Element + Lane + Stored<Lane = Self> + Registers {}
impl Float for f32 {}
impl Float for f64 {}

/// 1: both of a float's traits have a constant of that name.
#[inline(always)]
fn one<T: Float>() -> T {
    <T as crate::math::Real>::ONE
}

/// Runs `op` if there is a kernel for it at these types and strides.
pub(crate) fn run(cpu: &Cpu, op: &FusedOp, ins: &[View<'_, Cpu>], outs: &mut [Out<'_, Cpu>]) -> Result<Support> {
    if outs.iter().any(|o| o.how == Accumulate::Add || !o.view.layout().is_contiguous()) {
        return Ok(Support::Decompose);
    }
    if let FusedOp::Linear(_) = op {
        return linear(cpu, ins, Operand::from(&outs[0].view)).map(|()| Support::Done);
    }
    let mut copies = SmallVec::new();
    let strided = matches!(op, FusedOp::Attention(_) | FusedOp::AttentionGrad(_));
    let operand = |v: &View<'_, Cpu>| if strided { Ok((*v).into()) } else { in_one_run(cpu, (*v).into(), &mut copies) };
    let call = Call {
        cpu,
        ins: ins.iter().map(operand).collect::<Result<_>>()?,
        outs: outs.iter().map(|o| Operand::from(&o.view)).collect(),
    };
    match call.outs[0].dtype {
        DType::F32 => call.run::<f32>(op),
        DType::F64 => call.run::<f64>(op),
        _ => Ok(Support::Decompose),
    }
}

/// One launch: its operands, as addresses.
struct Call<'a> {
    cpu: &'a Cpu,
    ins: Vec<Operand>,
    outs: Vec<Operand>,
}

impl Call<'_> {
    fn run<T: Float>(&self, op: &FusedOp) -> Result<Support> {
        match op {
            FusedOp::Attention(op) if self.ins.iter().all(is_row_wise) => attention::forward::<T>(self, op),
            FusedOp::AttentionGrad(op) if self.ins.iter().all(is_row_wise) => attention::backward::<T>(self, &op.0),
            FusedOp::Attention(_) | FusedOp::AttentionGrad(_) => Ok(Support::Decompose),
            FusedOp::Softmax(op) => Ok(softmax::forward::<T>(self, op.log)),
            FusedOp::SoftmaxGrad(op) => Ok(softmax::backward::<T>(self, op.log)),
            FusedOp::Norm(op) => Ok(norm::forward::<T>(self, op)),
            FusedOp::NormGrad(op) => norm::backward::<T>(self, op),
            FusedOp::CrossEntropy(op) => cross_entropy::forward::<T>(self, op),
            FusedOp::CrossEntropyGrad(op) => cross_entropy::backward::<T>(self, &op.0),
            FusedOp::Conv(op) => conv::run::<T>(self, op),
            FusedOp::MaxPool(op) => Ok(pool::forward::<T>(self, op)),
            FusedOp::MaxPoolGrad(op) => Ok(pool::backward::<T>(self, op)),
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

    /// Rows and their width, of an input whose rows are its last axis.
    fn rows(&self, i: usize) -> (usize, usize) {
        let dims = self.ins[i].layout.dims();
        let width = dims[dims.len() - 1];
        (dims[..dims.len() - 1].iter().product(), width)
    }
}

/// The operand, or a copy of it: one pass, where the decomposition takes ten. The gradient of a mean is such an operand: one
/// number, repeated.
fn in_one_run(cpu: &Cpu, x: Operand, copies: &mut SmallVec<[Buffer; 2]>) -> Result<Operand> {
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

/// Whether elements along the last axis are neighbours.
fn is_row_wise(x: &Operand) -> bool {
    x.layout.strides().last().is_none_or(|&s| s == 1) || x.layout.dims().last() == Some(&1)
}

/// Rows of one task: enough elements to be worth a hand-over.
fn grain(width: usize) -> usize {
    (1 << 14) / width.max(1) + 1
}
