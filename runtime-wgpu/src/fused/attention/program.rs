//! Programs of scores, printed as functions that the kernels of attention call for each score.

use std::{fmt::Write, sync::Arc};

use numcore::{
    DType, Result,
    fused::{ScoredAttention, ScoredAttentionGrad},
    ops::Spec,
    pointwise::{Binary, Inst, Program, Typed},
};
use smallvec::{SmallVec, smallvec};

use crate::{
    Wgpu,
    access::{Params, StorageForm},
    bindings::OperandView,
    pointwise::{LaunchValues, printed, reads},
};

/// The iterations of a division of 64-bit integers, and the most of a power.
const LONG_STEPS: usize = 64;
/// The most iterations of a remainder of floats.
const FLOAT_STEPS: usize = 256;

/// The programs of a call: of a score, and, for gradients, of its slope.
pub(in super::super) struct ScorePrograms {
    pub(super) score: ScoreFunction,
    /// `None` if the gradient of the score is that of what the program gives.
    pub(super) slope: Option<ScoreFunction>,
    /// The arguments that the programs read, by their index among the arguments.
    pub(super) args: SmallVec<[usize; 4]>,
    /// The arguments whose gradients the slope's program gives after that of the score.
    pub(super) learned: SmallVec<[usize; 4]>,
}

impl ScorePrograms {
    /// The programs of forward for its inputs, with the program of gradients if there is one.
    fn new(op: &ScoredAttention, ins: &[OperandView<'_>], slope: Option<Program>, learned: &[usize]) -> Result<Self> {
        let specs: SmallVec<[Spec; 8]> =
            ins.iter().map(|x| Spec { shape: *x.layout.shape(), dtype: x.dtype }).collect();
        let score = ScoreFunction::new("score_of", op, op.program.clone(), &specs)?;
        let slope = slope.map(|slope| ScoreFunction::new("slope_of", op, slope, &specs)).transpose()?;
        let is_read = |i: &usize| score.args.contains(i) || slope.as_ref().is_some_and(|slope| slope.args.contains(i));
        let args = (0..op.args()).filter(is_read).collect();
        Ok(ScorePrograms { score, slope, args, learned: learned.into() })
    }

    pub(in super::super) fn of_scores(op: &ScoredAttention, ins: &[OperandView<'_>]) -> Result<Self> {
        ScorePrograms::new(op, ins, None, &[])
    }

    /// The programs of a pass of gradients, for the inputs of forward.
    pub(super) fn of_gradients(op: &ScoredAttentionGrad, ins: &[OperandView<'_>]) -> Result<Self> {
        // The gradient of the score may be that of what the program gives.
        let slope = (!op.learned.is_empty() || !op.of.adds()).then(|| op.program());
        ScorePrograms::new(&op.of, ins, slope, &op.learned)
    }

    pub(super) fn functions(&self) -> impl Iterator<Item = &ScoreFunction> {
        std::iter::once(&self.score).chain(&self.slope)
    }
}

/// A program, typed, and what it takes.
pub(super) struct ScoreFunction {
    name: &'static str,
    pub(super) program: Program,
    typed: Arc<Typed>,
    values: LaunchValues,
    /// The positions that it reads, by axis, and the first of each.
    positions: SmallVec<[(usize, i64); 4]>,
    /// The arguments that it reads, and their dtypes.
    args: SmallVec<[usize; 4]>,
    dtypes: SmallVec<[DType; 4]>,
    /// The input that is the gradient of the score that forward gives.
    upstream: Option<usize>,
}

impl ScoreFunction {
    fn new(name: &'static str, op: &ScoredAttention, program: Program, ins: &[Spec]) -> Result<Self> {
        let typed = op.typed(&program, ins)?;
        let of = |i: usize| reads(&program, i);
        let positions = (0..ScoredAttention::AXES).filter(|axis| of(1 + axis));
        let args: SmallVec<[usize; 4]> = (0..op.args()).filter(|&i| of(ScoredAttention::arg(i))).collect();
        Ok(ScoreFunction {
            name,
            values: LaunchValues::of(&program, &typed, &[])?,
            typed,
            positions: positions.map(|axis| (axis, op.first[axis] as i64)).collect(),
            dtypes: args.iter().map(|&i| ins[ScoredAttention::ARGS + i].dtype).collect(),
            args,
            upstream: (program.inputs() > op.program.inputs()).then(|| op.program.inputs()),
            program,
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

    /// The properties besides the program of scores on which its source depends.
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

    /// The function, and the expressions of the positions that it takes, counted from `batch`, `q_head`, `time` and
    /// `key`.
    pub(super) fn text(&self, wgpu: &Wgpu, params: &mut Params) -> Result<(String, String)> {
        let form = if self.is_long() { StorageForm::I64 } else { StorageForm::I32 };
        let mut positions = String::new();
        let mut takes = vec!["in0: f32".to_string()];
        for (axis, _) in &self.positions {
            let first = form.parameter(&params.many(if self.is_long() { 2 } else { 1 }));
            let at = ["batch", "q_head", "time", "key"][*axis];
            // Writing to a String cannot fail, here and below.
            let _ = match form {
                StorageForm::I64 => write!(positions, ", wg_add_i64({first}, vec2<u32>({at}, 0u))"),
                _ => write!(positions, ", {first} + i32({at})"),
            };
            takes.push(format!("in{}: {}", 1 + axis, form.ty()));
        }
        let forms = self.dtypes.iter().map(|&dtype| StorageForm::of(dtype).ty());
        takes.extend(self.args.iter().zip(forms).map(|(i, ty)| format!("in{}: {ty}", ScoredAttention::arg(*i))));
        takes.extend(self.upstream.map(|i| format!("in{i}: f32")));
        // Results after the first are left in variables of the invocation.
        let more = (1..self.program.outputs().len()).map(|k| format!("var<private> out{k}: f32;\n"));
        let mut text = more.collect::<String>();
        let _ = writeln!(text, "fn {}({}) -> f32 {{", self.name, takes.join(", "));
        text += &self.values.text(params);
        let _ = write!(text, "var out0: f32;\n{}return out0;\n}}\n", printed(&self.program, &self.typed, wgpu)?);
        Ok((text, positions))
    }

    /// A call for a score, with the expressions of positions, and the names of arguments by their index.
    pub(super) fn call(
        &self,
        score: &str,
        positions: &str,
        arg: impl Fn(usize) -> String,
        upstream: Option<&str>,
    ) -> String {
        let args = self.args.iter().map(|&i| format!(", {}", arg(i))).collect::<String>();
        let upstream = upstream.map_or(String::new(), |x| format!(", {x}"));
        format!("{}({score}{positions}{args}{upstream})", self.name)
    }
}
