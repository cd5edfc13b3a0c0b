//! Programs of scores, as functions that the kernels of attention call for each score.

use std::fmt::Write;

use numcore::{
    DType, Result,
    fused::ScoredAttention,
    pointwise::{Program, Typed},
};
use smallvec::SmallVec;

use super::{
    PRELUDE, computed,
    form::{ElementBody, reads},
    stored,
};

/// A program and the dtypes of its values.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct TypedProgram {
    pub program: Program,
    pub dtypes: Vec<DType>,
}

/// The programs of a kernel of attention: of a score, and of its gradient from that of the result.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ScoreSpec {
    pub score: TypedProgram,
    /// `None` if the gradient is that of the result.
    pub slope: Option<TypedProgram>,
    /// The dtypes of the arguments.
    pub args: SmallVec<[DType; 4]>,
    /// The number of arguments whose gradients the slope's program gives after that of the score.
    pub learned: usize,
}

impl TypedProgram {
    pub(crate) fn new(program: &Program, typed: &Typed) -> TypedProgram {
        TypedProgram { program: program.clone(), dtypes: typed.dtypes.clone() }
    }

    pub(crate) fn typed(&self) -> Typed {
        Typed { dtypes: self.dtypes.clone() }
    }
}

impl ScoreSpec {
    /// The programs, in the order in which a launch has their values.
    pub(crate) fn programs(&self) -> impl Iterator<Item = (&'static str, &TypedProgram)> {
        [("score", Some(&self.score)), ("slope", self.slope.as_ref())].into_iter().filter_map(|(n, p)| Some((n, p?)))
    }

    /// The text before a kernel's file: `struct Program` and the functions `program_score` and `program_slope`. The
    /// structure has the largest visible distance from a query to a key after it, the first positions, where the sums of
    /// learned arguments go and an address more, each argument's address and strides, and the values of programs that
    /// are equal for all scores, in words of 64 bits.
    pub(crate) fn text(&self) -> Result<String> {
        let (mut fields, mut functions) = (String::new(), String::new());
        // Writing to a String cannot fail, here and below.
        for (i, dtype) in self.args.iter().enumerate() {
            let _ = writeln!(fields, "const {} *arg{i};\ni64 step{i}[{}];", stored(*dtype), ScoredAttention::AXES);
        }
        for (name, program) in self.programs() {
            let (text, values) = self.function(name, program)?;
            functions += &text;
            for (k, dtype) in values.iter().enumerate() {
                let _ = writeln!(fields, "alignas(8) {} {name}{k};", computed(*dtype));
            }
        }
        if self.slope.is_none() {
            functions += "WG_FN float program_slope(const Program &, float, float slope, i64, i64, i64, i64, float (&)[1]) { return slope; }\n";
        }
        Ok(format!(
            "{PRELUDE}#define PROGRAM\n#define LEARNED {}\nstruct Program {{\nalignas(8) int ahead;\ni64 first[{}];\n\
             float *sums[LEARNED + 1];\n{fields}}};\n{functions}",
            self.learned,
            ScoredAttention::AXES
        ))
    }

    /// A program as a function, and the types of the values that are equal for all scores.
    fn function(&self, name: &str, of: &TypedProgram) -> Result<(String, SmallVec<[DType; 8]>)> {
        let (program, typed) = (&of.program, of.typed());
        let float = DType::F32;
        let position = if typed.dtypes.contains(&DType::I64) { DType::I64 } else { DType::I32 };
        let dtype = |i: usize| match i {
            1..=ScoredAttention::AXES => position,
            i => i.checked_sub(ScoredAttention::arg(0)).and_then(|i| self.args.get(i)).map_or(float, |&dtype| dtype),
        };
        let dtypes: SmallVec<[DType; 8]> = (0..program.inputs()).map(dtype).collect();
        let outputs = program.outputs().len();
        let body = ElementBody::of(program, &typed, &dtypes, &vec![float; outputs])?;
        let at = ["batch", "head", "query", "key"];
        let value = |i: usize| match i {
            0 => "score".into(),
            1..=ScoredAttention::AXES => format!("({})(p.first[{}] + {})", computed(position), i - 1, at[i - 1]),
            i if i < ScoredAttention::arg(self.args.len()) => {
                let arg = i - ScoredAttention::arg(0);
                let steps = at.iter().enumerate().map(|(axis, at)| format!("{at} * p.step{arg}[{axis}]"));
                format!("wg_load(p.arg{arg}[{}])", steps.collect::<Vec<_>>().join(" + "))
            }
            _ => "slope".into(),
        };
        let inputs: Vec<String> = reads(program, program.inputs()).map(value).collect();
        let (slope, learned) = match name {
            "slope" => ("float slope, ", ", float (&learned)[LEARNED + 1]"),
            _ => ("", ""),
        };
        let mut text = format!("namespace {name} {{\n{}}}\n", body.text);
        let _ = writeln!(
            text,
            "WG_FN float program_{name}(const Program &p, float score, {slope}i64 batch, i64 head, i64 query, i64 key{learned}) {{"
        );
        for (k, dtype) in body.values.iter().enumerate() {
            let _ = writeln!(text, "const {} s{k} = p.{name}{k};", computed(*dtype));
        }
        let outs = (0..outputs).map(|k| format!("out{k}")).collect::<Vec<_>>().join(", ");
        let _ = writeln!(text, "float {outs};\n{name}::{}", body.call(&inputs, "0", outputs));
        (1..outputs).for_each(|k| text += &format!("learned[{}] = out{k};\n", k - 1));
        text += "return out0;\n}\n";
        Ok((text, body.values))
    }
}
