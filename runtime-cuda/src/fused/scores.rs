//! Attention by programs of scores: the programs of a call, the parameter with which a kernel gets their operands, and
//! the gradients of arguments.
//!
//! A pass over queries sums gradients over keys, of arguments that do not vary along keys. The pass over keys sums those
//! of the others over queries. Both give sums for each head and row, which a reduction adds up to the argument.

use std::{
    iter::once,
    sync::{Arc, LazyLock},
};

use numcore::{
    DType, Layout, ReduceKind, Result, Scalar, Shape, Support,
    fused::{Attention, AttentionGrad, ScoredAttention, ScoredAttentionGrad},
    ops::Spec,
    pointwise::Program,
};
use smallvec::SmallVec;

use super::{FusedCall, attention};
use crate::{
    codegen::scores::{ScoreSpec, TypedProgram},
    driver::KernelArgs,
    operand::Operand,
    pointwise::{self, Target},
    reduce::reduce_operands,
};

/// The programs of a kernel, and its `struct Program`.
pub(super) struct ScorePlan {
    pub(super) spec: Arc<ScoreSpec>,
    pub(super) parameter: KernelArgs,
}

impl ScorePlan {
    /// The programs for the operands of forward. Those of gradients have a slope and the addresses of sums.
    fn new(op: &ScoredAttention, ins: &[Operand], slope: Option<&Program>, sums: &[u64]) -> Result<ScorePlan> {
        let specs: SmallVec<[Spec; 8]> =
            ins.iter().map(|x| Spec { shape: *x.layout.shape(), dtype: x.dtype }).collect();
        let typed = |program: &Program| op.typed(program, &specs).map(|typed| TypedProgram::new(program, &typed));
        let args = &ins[ScoredAttention::ARGS..];
        let spec = ScoreSpec {
            score: typed(&op.program)?,
            slope: slope.map(typed).transpose()?,
            args: args.iter().map(|x| x.dtype).collect(),
            learned: sums.len(),
        };
        let (q, keys) = (specs[Attention::QUERIES].shape, specs[Attention::KEYS].shape[2]);
        let ahead = if op.attention.causal { op.attention.offset(q[2], keys) as i64 } else { i64::from(i32::MAX) };
        let mut parameter = KernelArgs::default();
        parameter.push(ahead);
        op.first.iter().for_each(|&first| parameter.push(first as i64));
        sums.iter().chain(once(&0)).for_each(|&address| parameter.push(address));
        let scores = Shape::new(&[q[0], q[1], q[2], keys])?;
        for arg in args {
            parameter.push(arg.address);
            arg.layout.broadcast_to(scores)?.strides().iter().for_each(|&step| parameter.push(step as i64));
        }
        for (_, of) in spec.programs() {
            let numbers = of.program.launch_numbers(&of.typed(), &[]);
            for (id, value) in of.program.launch_values().into_iter().zip(numbers) {
                parameter.number(value, of.dtypes[id as usize]);
            }
        }
        Ok(ScorePlan { spec: Arc::new(spec), parameter })
    }
}

pub(super) fn forward(call: &mut FusedCall<'_>, op: &ScoredAttention) -> Result<Support> {
    let program = ScorePlan::new(op, &call.ins, None, &[])?;
    attention::forward(call, &op.attention, Some(program))
}

/// A learned argument, and the sums of its gradient: `[B, H, T, 1]`, or `[B, H, 1, S]` from the pass over keys.
struct Learned {
    arg: usize,
    by_keys: bool,
    sums: Operand,
}

pub(super) fn backward(call: &mut FusedCall<'_>, op: &ScoredAttentionGrad) -> Result<Support> {
    let ins: SmallVec<[Operand; 8]> = call.ins[AttentionGrad::QUERIES..].into();
    let is_empty = ins.iter().any(|x| x.numel() == 0);
    let varies = |arg: usize, back: usize| {
        let dims = ins[ScoredAttention::ARGS + arg].dims();
        dims.len().checked_sub(back).is_some_and(|axis| dims[axis] != 1)
    };
    let fits = |&arg: &usize| {
        !(varies(arg, 2) && varies(arg, 1)) && ins[ScoredAttention::ARGS + arg].dtype == DType::F32 && !is_empty
    };
    if !op.learned.iter().all(fits) {
        return Ok(Support::Decompose);
    }
    let (q, keys) = (ins[Attention::QUERIES].dims(), ins[Attention::KEYS].dims()[2]);
    let mut learned: SmallVec<[Learned; 4]> = SmallVec::new();
    for &arg in &op.learned {
        let by_keys = varies(arg, 1);
        let rows = if by_keys { [1, keys] } else { [q[2], 1] };
        let layout = Layout::contiguous(Shape::new(&[q[0], q[1], rows[0], rows[1]])?);
        let address = call.scratch(layout.numel() * size_of::<f32>())?;
        let sums = Operand { address, layout, dtype: DType::F32 };
        if by_keys {
            // A block of keys that no query sees takes no step.
            pointwise::fill(call.cuda, sums, Scalar::F64(0.0), false)?;
        }
        learned.push(Learned { arg, by_keys, sums });
    }
    let plan = |by_keys: bool| {
        let of_pass = learned.iter().filter(|learned| learned.by_keys == by_keys);
        let grad = ScoredAttentionGrad { of: op.of.clone(), learned: of_pass.clone().map(|of| of.arg).collect() };
        let slope = (!grad.learned.is_empty() || !op.of.adds()).then(|| grad.program());
        let sums: SmallVec<[u64; 4]> = of_pass.map(|of| of.sums.address).collect();
        ScorePlan::new(&op.of, &ins, slope.as_ref(), &sums)
    };
    let programs = [plan(true)?, plan(false)?];
    if attention::backward(call, &op.of.attention, Some(programs))? == Support::Decompose {
        return Ok(Support::Decompose);
    }
    for arg in 0..op.given() {
        let out = call.outs[ScoredAttention::ARGS + arg];
        match learned.iter().find(|learned| learned.arg == arg) {
            Some(learned) => add_up(call, &learned.sums, out)?,
            None => pointwise::fill(call.cuda, out, Scalar::I64(0), false)?,
        }
    }
    Ok(Support::Done)
}

/// Adds up the sums of heads and rows to an argument's shape.
fn add_up(call: &FusedCall<'_>, sums: &Operand, out: Operand) -> Result<()> {
    static SUM: LazyLock<Program> = LazyLock::new(|| Program::new("sum", |[x], []| [x]));
    let mut shape: SmallVec<[usize; 4]> = SmallVec::from_elem(1, ScoredAttention::AXES - out.dims().len());
    shape.extend_from_slice(out.dims());
    let to = Operand { layout: Layout::contiguous(Shape::new(&shape)?), ..out };
    let target = Target { to, add: false };
    reduce_operands(call.cuda, &SUM, &[*sums], &[], sums.layout.shape(), ReduceKind::Sum, target)
}
