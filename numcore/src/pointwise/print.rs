//! Programs printed as text: readable, and as source code in the dialects of the op table.

use std::fmt::{self, Write};

use smallvec::SmallVec;

use super::{Binary, Const, Dialect, Id, Inst, Program, Typed};
use crate::{DType, Error, Result};

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}({} inputs, {} scalars) {{", self.name(), self.inputs(), self.scalars())?;
        for (i, inst) in self.insts().iter().enumerate() {
            if leaf(*inst).is_none() {
                let operands: Vec<String> = inst.operands().map(|a| self.mention(a)).collect();
                let to = if let Inst::Cast(d, _) = inst { format!(" to {d}") } else { String::new() };
                writeln!(f, "  v{i} = {}({}){to}", inst.name(), operands.join(", "))?;
            }
        }
        let outputs: Vec<String> = self.outputs().iter().map(|o| self.mention(*o)).collect();
        write!(f, "  return {}\n}}", outputs.join(", "))
    }
}

impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Program({} #{:016x})", self.name(), self.hash())
    }
}

/// The source of a value without operands, as written where it is read.
fn leaf(inst: Inst) -> Option<String> {
    Some(match inst {
        Inst::Input(i) => format!("in{i}"),
        Inst::Scalar(i) => format!("s{i}"),
        Inst::Const(Const::Float(bits)) => format!("{:?}", f64::from_bits(bits)),
        Inst::Const(Const::Int(x)) => format!("{x}"),
        Inst::Const(Const::Bool(x)) => format!("{x}"),
        Inst::Index => "index".into(),
        Inst::Random { seed, stream } => format!("random(s{seed}, {stream})"),
        _ => return None,
    })
}

impl Program {
    fn mention(&self, id: Id) -> String {
        leaf(self.insts()[id as usize]).unwrap_or_else(|| format!("v{id}"))
    }

    /// Statements in a dialect that compute `out0 …` from `in0 …`, `s0 …`, `seed0 …` and `index`. Inputs have the form
    /// that their dtype is computed in; `s0 …` are the [`launch_values`](Program::launch_values), and `seed0 …` the
    /// scalars that key random bits.
    ///
    /// The runtime provides functions named `wg_…` (Rust: the traits `Math` and `Int`, and `random`). Arithmetic in a
    /// dtype that the dialect lacks is an error. Unlike other languages, Rust never contracts a multiply and an add by
    /// itself. A product that only a sum reads is printed as `mul_add`, as the CPU runtime computes it.
    pub fn print(&self, typed: &Typed, dialect: Dialect) -> Result<String> {
        // Random values must be equal everywhere. The CPU contracts a multiply and an add to an FMA; WebGPU does not
        // specify whether it does, so the FMA is emulated in software.
        let draws = dialect == Dialect::Wgsl && self.insts().iter().any(|i| matches!(i, Inst::Random { .. }));
        let printer = Printer { program: self, typed, dialect, launch: self.launch_values(), draws };
        let uniform = self.uniform();
        let mut text = String::new();
        for id in 0..self.insts().len() as Id {
            if !uniform[id as usize] && !matches!(self.insts()[id as usize], Inst::Input(_)) && !printer.swallowed(id) {
                text += &printer.statement(id)?;
            }
        }
        for (k, &id) in self.outputs().iter().enumerate() {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "out{k} = {};", printer.operand(id)?);
        }
        Ok(text)
    }
}

struct Printer<'a> {
    program: &'a Program,
    typed: &'a Typed,
    dialect: Dialect,
    launch: Vec<Id>,
    draws: bool,
}

impl Printer<'_> {
    fn dtype(&self, id: Id) -> DType {
        self.typed.dtypes[id as usize]
    }

    fn statement(&self, id: Id) -> Result<String> {
        let (t, value) = (self.type_name(self.dtype(id)), self.value(id)?);
        // A byte is the low bits of a word, since this dialect has no byte type.
        let value = match (self.dialect, self.dtype(id)) {
            (Dialect::Wgsl, DType::U8) => format!("({value}) & 0xffu"),
            _ => value,
        };
        Ok(match self.dialect {
            Dialect::Cuda => format!("const {t} v{id} = {value};\n"),
            Dialect::Rust | Dialect::Wgsl => format!("let v{id}: {t} = {value};\n"),
        })
    }

    /// The operands of a multiplication that depends on the element and is used once.
    fn product(&self, id: Id) -> Option<[Id; 2]> {
        let readers = self.program.insts().iter().flat_map(|inst| inst.operands());
        let used = readers.chain(self.program.outputs().iter().copied()).filter(|&a| a == id).count();
        match self.program.insts()[id as usize] {
            Inst::Binary(Binary::Mul, a, b) if used == 1 && self.launch.binary_search(&id).is_err() => Some([a, b]),
            _ => None,
        }
    }

    /// A sum or difference of floats that contains a product, in Rust: the receiver and arguments of `mul_add`, each
    /// with its sign.
    fn fused(&self, id: Id) -> Option<[(bool, Id); 3]> {
        let Inst::Binary(op, a, b) = self.program.insts()[id as usize] else { return None };
        if self.dialect != Dialect::Rust || !self.dtype(id).is_float() || !matches!(op, Binary::Add | Binary::Sub) {
            return None;
        }
        let minus = op == Binary::Sub;
        let left = self.product(a).map(|[x, y]| [(false, x), (false, y), (minus, b)]);
        left.or_else(|| self.product(b).map(|[x, y]| [(minus, x), (false, y), (false, a)]))
    }

    /// Tells whether a product is printed as part of the `mul_add` that reads it.
    fn swallowed(&self, id: Id) -> bool {
        let Some([x, y]) = self.product(id) else { return false };
        let reads = |user: &Id| self.program.insts()[*user as usize].operands().any(|a| a == id);
        let user = (id + 1..self.program.insts().len() as Id).find(reads);
        user.and_then(|user| self.fused(user)).is_some_and(|[a, b, c]| (a.1, b.1) == (x, y) && c.1 != id)
    }

    fn operand(&self, id: Id) -> Result<String> {
        match self.program.insts()[id as usize] {
            Inst::Input(i) => Ok(format!("in{i}")),
            Inst::Const(c) => self.literal(c, self.dtype(id)),
            _ => Ok(match self.launch.binary_search(&id) {
                Ok(k) => format!("s{k}"),
                Err(_) => format!("v{id}"),
            }),
        }
    }

    fn value(&self, id: Id) -> Result<String> {
        let inst = self.program.insts()[id as usize];
        if let Some(terms) = self.fused(id) {
            let [x, y, c] = terms.map(|(_, id)| self.operand(id));
            let (x, y, c) = (x?, y?, c?);
            let x = if terms[0].0 { format!("(-{x})") } else { x };
            return Ok(format!("{x}.mul_add({y}, {}{c})", if terms[2].0 { "-" } else { "" }));
        }
        match inst {
            Inst::Unary(op, _) => self.fill(inst, op.cell(self.dialect)),
            Inst::Binary(Binary::Add, a, b) if self.draws && self.dtype(id).compute() == DType::F32 => {
                let fused = self.product(a).map(|p| (p, b)).or_else(|| self.product(b).map(|p| (p, a)));
                let Some(([x, y], c)) = fused else { return self.fill(inst, Binary::Add.cell(self.dialect)) };
                Ok(format!("wg_fma({}, {}, {})", self.operand(x)?, self.operand(y)?, self.operand(c)?))
            }
            Inst::Binary(op, ..) => self.fill(inst, op.cell(self.dialect)),
            Inst::Select(c, a, b) => {
                let (c, a, b) = (self.operand(c)?, self.operand(a)?, self.operand(b)?);
                Ok(match self.dialect {
                    Dialect::Rust => format!("if {c} {{ {a} }} else {{ {b} }}"),
                    Dialect::Cuda => format!("{c} ? {a} : {b}"),
                    Dialect::Wgsl => format!("select({b}, {a}, {c})"),
                })
            }
            Inst::Cast(_, a) | Inst::CastLike(a, _) => self.cast(&self.operand(a)?, self.dtype(a), self.dtype(id)),
            Inst::Index => {
                let counted = if self.dialect == Dialect::Wgsl { DType::U32 } else { DType::I64 };
                self.cast("index", counted, self.dtype(id).compute())
            }
            Inst::Random { seed, stream } => Ok(match self.dialect {
                Dialect::Rust => format!("random(seed{seed}, {stream}, index)"),
                Dialect::Cuda | Dialect::Wgsl => format!("wg_random(seed{seed}, {stream}u, index)"),
            }),
            Inst::Input(_) | Inst::Scalar(_) | Inst::Const(_) => self.operand(id),
        }
    }

    fn fill(&self, inst: Inst, cell: &[&str]) -> Result<String> {
        let operands: SmallVec<[Id; 2]> = inst.operands().collect();
        let dtype = self.dtype(operands[0]);
        if let (Dialect::Wgsl, Some(pair)) = (self.dialect, pair(dtype)) {
            let texts = operands.iter().map(|&a| self.operand(a)).collect::<Result<Vec<_>>>()?;
            return match pair {
                DType::I64 => Ok(format!("wg_{}_i64({})", inst.name(), texts.join(", "))),
                _ => Err(self.lacks(dtype)),
            };
        }
        let kind = if dtype.is_float() { 0 } else { 1 + usize::from(dtype == DType::Bool) };
        let t = self.type_name(dtype);
        let mut text = cell[kind.min(cell.len() - 1)].replace("{t}", t).replace("{u}", &format!("unsigned {t}"));
        text = text.replace("unsigned unsigned", "unsigned").replace("{d}", dtype.compute().name());
        for (i, &a) in operands.iter().enumerate() {
            // Drivers may replace `x − x` by 0, which it is not for NaN and infinities.
            let twice = self.dialect == Dialect::Wgsl && kind == 0 && i == 1 && operands[0] == a;
            let name = self.operand(a)?;
            text = text.replace(&format!("{{{i}}}"), &if twice { format!("wg_keep({name})") } else { name });
        }
        Ok(text)
    }

    fn cast(&self, value: &str, from: DType, to: DType) -> Result<String> {
        let (t, rounded) = (self.type_name(to), to.is_half() && from != to);
        let plain = from.compute() == to.compute();
        let value = match self.dialect {
            _ if from.is_storage() || to.is_storage() => {
                return Err(self.lacks(if from.is_storage() { from } else { to }));
            }
            _ if plain => value.to_owned(),
            Dialect::Wgsl if from == DType::F64 || to == DType::F64 => return Err(self.lacks(DType::F64)),
            Dialect::Wgsl if from == DType::I64 => format!("wg_{}_from_i64({value})", to.compute().name()),
            Dialect::Wgsl if to == DType::I64 && !from.is_float() => format!("wg_i64_from_{}({value})", from.name()),
            // Language and drivers disagree on the truth of NaN and subnormals.
            Dialect::Wgsl if to == DType::Bool && from.is_float() => format!("wg_bool({value})"),
            Dialect::Rust if to == DType::Bool => format!("{value} != (0 as {})", self.type_name(from)),
            Dialect::Rust if from == DType::Bool => format!("{value} as u8 as {t}"),
            Dialect::Rust => format!("{value} as {t}"),
            _ if from.is_float() && to.is_int() => format!("wg_{}({value})", to.name()),
            Dialect::Cuda => format!("({t}){value}"),
            Dialect::Wgsl => format!("{t}({value})"),
        };
        Ok(if rounded { format!("wg_{}({value})", to.name()) } else { value })
    }

    fn literal(&self, c: Const, dtype: DType) -> Result<String> {
        let number = super::Number::from(c).computed_as(dtype);
        let t = self.type_name(dtype);
        if let (Dialect::Wgsl, Some(dtype)) = (self.dialect, pair(dtype)) {
            let bits = if dtype == DType::F64 { number.to_f64().to_bits() } else { number.to_i64() as u64 };
            return Ok(format!("vec2<u32>({}u, {}u)", bits as u32, bits >> 32));
        }
        let text = match number {
            super::Number::Bool(x) => return Ok(x.to_string()),
            super::Number::Int(x) => x.to_string(),
            super::Number::Float(x) if !x.is_finite() => return Ok(self.bits(x, dtype)),
            // Drivers may replace `0 · x` by 0 and `x + 0` by x, which is wrong for NaN, infinities and −0.
            super::Number::Float(x) if x == 0.0 && self.dialect == Dialect::Wgsl => {
                return Ok(format!("wg_bits({:#x}u ^ wg_zero)", (x as f32).to_bits()));
            }
            super::Number::Float(x) if dtype == DType::F64 => format!("{x:?}"),
            super::Number::Float(x) => format!("{:?}", x as f32),
        };
        let negative = text.starts_with('-');
        let text = match (self.dialect, dtype) {
            (Dialect::Rust, _) => format!("{text}{t}"),
            (Dialect::Cuda, DType::F64) => text,
            (_, d) if d.is_float() => format!("{text}f"),
            (Dialect::Cuda, DType::I64) if text == i64::MIN.to_string() => "(-9223372036854775807ll - 1)".into(),
            (Dialect::Cuda, DType::I64) => format!("{text}ll"),
            (Dialect::Cuda, _) => format!("({t}){text}"),
            (Dialect::Wgsl, _) => format!("{t}({text})"),
        };
        Ok(if negative { format!("({text})") } else { text })
    }

    /// The source of infinities and NaN, which have no literal.
    fn bits(&self, x: f64, dtype: DType) -> String {
        let narrow = (x as f32).to_bits();
        match (self.dialect, dtype) {
            (Dialect::Rust, DType::F64) => format!("f64::from_bits({:#x})", x.to_bits()),
            (Dialect::Rust, _) => format!("f32::from_bits({narrow:#x})"),
            (Dialect::Cuda, DType::F64) => format!("__longlong_as_double({:#x}ll)", x.to_bits()),
            (Dialect::Cuda, _) => format!("__int_as_float({narrow:#x})"),
            // Constant expressions must be finite, so the bits go through a function.
            (Dialect::Wgsl, _) => format!("wg_bits({narrow:#x}u)"),
        }
    }

    fn type_name(&self, dtype: DType) -> &'static str {
        let columns = match dtype {
            _ if dtype.compute() == DType::F32 => ["f32", "float", "f32"],
            DType::F64 => ["f64", "double", "vec2<u32>"],
            DType::I32 => ["i32", "int", "i32"],
            DType::I64 => ["i64", "long long", "vec2<u32>"],
            DType::U32 => ["u32", "unsigned int", "u32"],
            DType::U8 => ["u8", "unsigned char", "u32"],
            _ => ["bool", "bool", "bool"],
        };
        columns[self.dialect as usize]
    }

    /// The error for a type that WebGPU lacks. WebGPU has no 64-bit types. `i64` is a pair of words with a function per
    /// op; `f64` is such a pair, too, but is only moved.
    fn lacks(&self, dtype: DType) -> Error {
        let why = format!("{:?} cannot compute in this type; cast to a narrower one on the host", self.dialect);
        Error::dtype(self.program.name(), &[dtype], why)
    }
}

/// The types that WGSL holds as two words.
fn pair(dtype: DType) -> Option<DType> {
    matches!(dtype, DType::I64 | DType::F64).then_some(dtype)
}
