//! The program of scores of a call, and the parameter with which a kernel gets its operands.

use std::sync::Arc;

use numcore::{
    Result, Shape,
    fused::{Attention, ScoredAttention},
    ops::Spec,
    pointwise::Program,
};
use smallvec::SmallVec;

use crate::{
    args::Args,
    codegen::scores::{ScoreSpec, TypedProgram},
    operand::Operand,
};

/// The programs of a call, and the kernels' `struct Program`.
pub(super) struct ScorePlan {
    pub(super) spec: Arc<ScoreSpec>,
    pub(super) parameter: Args,
}

impl ScorePlan {
    /// The programs for the operands of forward; the program of gradients is given for backward.
    pub(super) fn new(op: &ScoredAttention, ins: &[Operand], slope: Option<&Program>) -> Result<ScorePlan> {
        let specs: SmallVec<[Spec; 8]> =
            ins.iter().map(|x| Spec { shape: *x.layout.shape(), dtype: x.dtype }).collect();
        let typed = |program: &Program| op.typed(program, &specs).map(|typed| TypedProgram::new(program, &typed));
        let args = &ins[ScoredAttention::ARGS..];
        let spec = ScoreSpec {
            score: typed(&op.program)?,
            slope: slope.map(typed).transpose()?,
            args: args.iter().map(|x| x.dtype).collect(),
        };
        let (q, keys) = (specs[Attention::QUERIES].shape, specs[Attention::KEYS].shape[2]);
        let ahead = if op.attention.causal { op.attention.offset(q[2], keys) as i64 } else { i64::from(i32::MAX) };
        let mut parameter = Args::default();
        parameter.push(ahead);
        op.first.iter().for_each(|&first| parameter.push(first as i64));
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
