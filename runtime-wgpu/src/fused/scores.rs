//! Programs of scores, printed as a function that the attention kernel calls for each score.

use std::{fmt::Write, sync::Arc};

use numcore::{
    DType, Result,
    fused::ScoredAttention,
    ops::Spec,
    pointwise::{Binary, Inst, Program, Typed},
};
use smallvec::{SmallVec, smallvec};

use super::FusedCall;
use crate::{
    Wgpu,
    access::{Params, StorageForm},
    pointwise::{LaunchValues, printed, reads},
};

/// The iterations of a division of 64-bit integers, and the most of a power.
const LONG_STEPS: usize = 64;
/// The most iterations of a remainder of floats.
const FLOAT_STEPS: usize = 256;

/// A program of scores, typed, and what it takes besides the score.
pub(super) struct ScoreProgram<'p> {
    pub(super) program: &'p Program,
    typed: Arc<Typed>,
    values: LaunchValues,
    /// The positions that it reads, by axis, and the first of each.
    positions: SmallVec<[(usize, i64); 4]>,
    /// The arguments that it reads, by their index among the arguments.
    pub(super) args: SmallVec<[usize; 4]>,
    dtypes: SmallVec<[DType; 4]>,
}

impl<'p> ScoreProgram<'p> {
    pub(super) fn new(call: &FusedCall<'_, '_>, op: &'p ScoredAttention) -> Result<Self> {
        let specs: SmallVec<[Spec; 8]> =
            call.ins.iter().map(|x| Spec { shape: *x.layout.shape(), dtype: x.dtype }).collect();
        let typed = op.typed(&op.program, &specs)?;
        let of = |i: &usize| reads(&op.program, *i);
        let positions = (0..ScoredAttention::AXES).filter(|axis| of(&(1 + axis)));
        let args: SmallVec<[usize; 4]> = (0..op.args()).filter(|&i| of(&ScoredAttention::arg(i))).collect();
        Ok(ScoreProgram {
            program: &op.program,
            values: LaunchValues::of(&op.program, &typed, &[])?,
            typed,
            positions: positions.map(|axis| (axis, op.first[axis] as i64)).collect(),
            dtypes: args.iter().map(|&i| specs[ScoredAttention::ARGS + i].dtype).collect(),
            args,
        })
    }

    /// The most iterations of loops for one score.
    pub(super) fn steps(&self) -> usize {
        let of = |inst: &Inst| match *inst {
            Inst::Binary(op, a, _) => match (op, self.typed.dtypes[a as usize]) {
                (Binary::Div | Binary::Rem, DType::I64) => LONG_STEPS,
                (Binary::Pow, dtype) if dtype.is_int() => LONG_STEPS,
                (Binary::Rem, dtype) if dtype.is_float() => FLOAT_STEPS,
                _ => 0,
            },
            _ => 0,
        };
        self.program.insts().iter().map(of).sum()
    }

    /// True if whole numbers have 64 bits.
    fn is_long(&self) -> bool {
        self.typed.dtypes.contains(&DType::I64)
    }

    fn position_form(&self) -> StorageForm {
        if self.is_long() { StorageForm::I64 } else { StorageForm::I32 }
    }

    /// The properties besides the program on which its source depends.
    pub(super) fn details(&self) -> SmallVec<[u32; 8]> {
        let mut details: SmallVec<[u32; 8]> = smallvec![u32::from(self.is_long())];
        details.extend(self.dtypes.iter().map(|&d| d as u32));
        details
    }

    /// The launch parameters.
    pub(super) fn params(&self) -> SmallVec<[u32; 32]> {
        let words = if self.is_long() { 2 } else { 1 };
        let of = |&(_, first): &(usize, i64)| [first as u32, (first >> 32) as u32].into_iter().take(words);
        self.positions.iter().flat_map(of).chain(self.values.words.iter().copied()).collect()
    }

    /// The function `score_of`, and the expressions of the positions that it takes, counted from `batch`, `q_head`,
    /// `time` and `key`.
    pub(super) fn text(&self, wgpu: &Wgpu, params: &mut Params) -> Result<(String, Vec<String>)> {
        let form = self.position_form();
        let mut positions = Vec::new();
        let mut takes = vec!["in0: f32".to_string()];
        for (axis, _) in &self.positions {
            let first = form.parameter(&params.many(if self.is_long() { 2 } else { 1 }));
            let at = ["batch", "q_head", "time", "key"][*axis];
            positions.push(match form {
                StorageForm::I64 => format!("wg_add_i64({first}, vec2<u32>({at}, 0u))"),
                _ => format!("({first} + i32({at}))"),
            });
            takes.push(format!("in{}: {}", 1 + axis, form.ty()));
        }
        let forms = self.dtypes.iter().map(|&dtype| StorageForm::of(dtype).ty());
        takes.extend(self.args.iter().zip(forms).map(|(i, ty)| format!("in{}: {ty}", ScoredAttention::arg(*i))));
        let mut text = format!("fn score_of({}) -> f32 {{\n", takes.join(", "));
        text += &self.values.text(params);
        // Writing to a String cannot fail.
        let _ = write!(text, "var out0: f32;\n{}return out0;\n}}\n", printed(self.program, &self.typed, wgpu)?);
        Ok((text, positions))
    }
}
