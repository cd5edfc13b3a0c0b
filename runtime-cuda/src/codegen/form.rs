//! The specialization of a generated kernel, and the source text that follows from it.

use std::fmt::Write;

use numcore::{
    DType, Result,
    pointwise::{Dialect, Inst, Program, Typed},
};
use smallvec::SmallVec;

use super::{computed, stored};
use crate::axes::InnerStride;

/// An input of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct KernelInput {
    pub dtype: DType,
    pub inner: InnerStride,
    /// The index of the output whose old value this input is; `None` for an input with memory of its own.
    pub own: Option<u16>,
}

/// An output of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct KernelOutput {
    pub dtype: DType,
    pub inner: InnerStride,
    pub add: bool,
}

/// Loops over positions: the number of axes, and whether their arithmetic takes 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Loops {
    pub rank: usize,
    pub wide: bool,
}

impl Loops {
    /// The C type of positions.
    pub(crate) fn count(self) -> &'static str {
        if self.wide { "u64" } else { "u32" }
    }

    /// The C type of offsets.
    pub(crate) fn offset(self) -> &'static str {
        if self.wide { "i64" } else { "int" }
    }

    /// Declarations of the C types that carry sizes and strides, named after `name`.
    pub(crate) fn types(self, name: &str) -> String {
        let (rank, count, offset) = (self.rank, self.count(), self.offset());
        let fields = if self.wide { "size" } else { "size[R], magic[R], shift" };
        let fields = fields.replace('R', &rank.to_string());
        format!(
            "struct {name}_axes {{ {count} {fields}[{rank}]; }};\nstruct {name}_steps {{ {offset} at[{rank}]; }};\n"
        )
    }

    /// Statements that add to the offset `f{j}` of each operand `j` its offset at position `at` along these axes.
    pub(crate) fn offsets(self, name: &str, at: &str, operands: &[usize]) -> String {
        let (count, offset) = (self.count(), self.offset());
        let mut text = format!("{{ {count} rest = {at};\n");
        for axis in (1..self.rank).rev() {
            let quotient = match self.wide {
                true => format!("rest / {name}.size[{axis}]"),
                false => format!("wg_divide(rest, {name}.magic[{axis}], {name}.shift[{axis}])"),
            };
            let _ = writeln!(
                text,
                "{{ const {count} next = {quotient}; const {offset} c = ({offset})(rest - next * {name}.size[{axis}]); rest = next;"
            );
            for j in operands {
                let _ = write!(text, " f{j} += c * {name}{j}.at[{axis}];");
            }
            text += " }\n";
        }
        for j in operands {
            let _ = write!(text, " f{j} += ({offset})rest * {name}{j}.at[0];");
        }
        text + " }\n"
    }
}

/// A program as a device function of one element, and the arguments of its calls.
pub(crate) struct ElementBody {
    /// The source of the function `wg_body`.
    pub text: String,
    /// Types of the values that are equal for all elements, `s0 …`.
    pub values: SmallVec<[DType; 8]>,
    /// Scalars that are keys of random bits, `seed…`.
    pub seeds: SmallVec<[u16; 2]>,
    /// True if the program reads the position.
    pub positional: bool,
}

impl ElementBody {
    pub(crate) fn of(program: &Program, typed: &Typed, inputs: &[DType], outputs: &[DType]) -> Result<ElementBody> {
        let printed = program.print(typed, Dialect::Cuda)?;
        let values = program.launch_values().iter().map(|&id| typed.dtypes[id as usize]).collect();
        let mut seeds: SmallVec<[u16; 2]> = SmallVec::new();
        let mut positional = false;
        for inst in program.insts() {
            match *inst {
                Inst::Random { seed, .. } => {
                    positional = true;
                    seeds.push(seed);
                }
                Inst::Index => positional = true,
                _ => {}
            }
        }
        seeds.sort_unstable();
        seeds.dedup();
        let mut body = ElementBody { text: String::new(), values, seeds, positional };
        let mut parameters: Vec<String> = Vec::new();
        parameters.extend(reads(program, inputs.len()).map(|i| format!("const {} in{i}", computed(inputs[i]))));
        parameters.extend(body.value_parameters());
        parameters.push("const i64 index".into());
        parameters.extend(outputs.iter().enumerate().map(|(k, d)| format!("{} &out{k}", computed(*d))));
        body.text = format!("WG_FN void wg_body({}) {{\n{printed}}}\n", parameters.join(", "));
        Ok(body)
    }

    /// Parameters of the body that carry values and keys.
    fn value_parameters(&self) -> impl Iterator<Item = String> + '_ {
        let keys = self.seeds.iter().map(|k| format!("const u64 seed{k}"));
        self.values().chain(keys)
    }

    /// Parameters of a kernel that carry values and keys. A key is given as a parameter, or read from device memory,
    /// which is filled before each launch of a captured step.
    pub(crate) fn kernel_parameters(&self) -> impl Iterator<Item = String> + '_ {
        let keys = self.seeds.iter().map(|k| format!("const u64 given{k}, const u64 *__restrict__ stored{k}"));
        self.values().chain(keys)
    }

    /// The statements of a kernel that choose between given and stored keys.
    pub(crate) fn keys(&self) -> String {
        let key = |k: &u16| format!("const u64 seed{k} = stored{k} ? *stored{k} : given{k};\n");
        self.seeds.iter().map(key).collect()
    }

    fn values(&self) -> impl Iterator<Item = String> + '_ {
        self.values.iter().enumerate().map(|(k, d)| format!("const {} s{k}", computed(*d)))
    }

    /// A call of the body with the expressions of the inputs that are read, the position, and variables for results.
    pub(crate) fn call(&self, inputs: &[String], index: &str, outputs: usize) -> String {
        let mut arguments = inputs.to_vec();
        arguments.extend((0..self.values.len()).map(|k| format!("s{k}")));
        arguments.extend(self.seeds.iter().map(|k| format!("seed{k}")));
        arguments.push(index.into());
        arguments.extend((0..outputs).map(|k| format!("out{k}")));
        format!("wg_body({});", arguments.join(", "))
    }
}

/// The indices of the inputs that a program reads.
pub(crate) fn reads(program: &Program, inputs: usize) -> impl Iterator<Item = usize> + use<> {
    let bits = program.reads();
    (0..inputs).filter(move |i| bits >> i & 1 == 1)
}

/// The statement that fetches an operand, as `a{j}`; its elements are then `element(j)`.
pub(crate) fn fetch(j: usize, dtype: DType, inner: InnerStride, lanes: usize, pointer: &str, offset: &str) -> String {
    let t = stored(dtype);
    match inner {
        InnerStride::Unit => {
            format!("const wg_pack<{t}, {lanes}> a{j} = wg_read<{t}, {lanes}>({pointer} + {offset}, count);\n")
        }
        InnerStride::Splat | InnerStride::Any => format!("const {t} a{j} = {pointer}[{offset}];\n"),
    }
}

/// The element of lane `i` of a fetched operand, upcast.
pub(crate) fn element(j: usize, inner: InnerStride) -> String {
    match inner {
        InnerStride::Unit => format!("wg_load(a{j}.at[i])"),
        InnerStride::Splat | InnerStride::Any => format!("wg_load(a{j})"),
    }
}
