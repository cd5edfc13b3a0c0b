//! Programs as text: readable, and as source in the dialects of the op table.

use std::fmt::{self, Write};

use super::{Const, Dialect, Id, Inst, Program, Typed};
use crate::{DType, Error, Result};

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}({} inputs, {} scalars) {{", self.name(), self.inputs(), self.scalars())?;
        for (i, inst) in self.insts().iter().enumerate() {
            writeln!(f, "  v{i} = {}", Plain(*inst))?;
        }
        let outputs: Vec<String> = self.outputs().iter().map(|o| format!("v{o}")).collect();
        write!(f, "  return {}\n}}", outputs.join(", "))
    }
}

impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Program({} #{:016x})", self.name(), self.hash())
    }
}

struct Plain(Inst);

impl fmt::Display for Plain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Inst::Input(i) => write!(f, "in{i}"),
            Inst::Scalar(i) => write!(f, "s{i}"),
            Inst::Const(Const::Float(bits)) => write!(f, "{:?}", f64::from_bits(bits)),
            Inst::Const(Const::Int(k)) => write!(f, "{k}"),
            Inst::Const(Const::Bool(b)) => write!(f, "{b}"),
            Inst::Index => write!(f, "index"),
            Inst::Random { seed, stream } => write!(f, "random(s{seed}, {stream})"),
            Inst::Unary(op, a) => write!(f, "{} v{a}", op.name()),
            Inst::Binary(op, a, b) => write!(f, "{} v{a} v{b}", op.name()),
            Inst::Select(c, a, b) => write!(f, "select v{c} v{a} v{b}"),
            Inst::Cast(d, a) => write!(f, "{d} v{a}"),
            Inst::CastLike(a, b) => write!(f, "like v{a} v{b}"),
        }
    }
}

impl Program {
    /// Statements that compute every value from `in0 …`, `s0 …` and `index` into `v0 …`, in a dialect. A type the dialect lacks is
    /// an error. Functions named `wg_…` are the dialect's prelude.
    pub fn print(&self, typed: &Typed, dialect: Dialect) -> Result<String> {
        let mut text = String::new();
        for (i, &inst) in self.insts().iter().enumerate() {
            let value = self.value(inst, i as Id, typed, dialect)?;
            let name = type_name(self.name(), typed.dtypes[i], dialect)?;
            let line = match dialect {
                Dialect::Rust => format!("let v{i}: {name} = {value};"),
                Dialect::Cuda => format!("const {name} v{i} = {value};"),
                Dialect::Wgsl => format!("let v{i}: {name} = {value};"),
            };
            // Writing to a String cannot fail.
            let _ = writeln!(text, "{line}");
        }
        Ok(text)
    }

    fn value(&self, inst: Inst, at: Id, typed: &Typed, dialect: Dialect) -> Result<String> {
        let dtype = typed.dtypes[at as usize];
        let name = |d: DType| type_name(self.name(), d, dialect);
        Ok(match inst {
            Inst::Input(i) => format!("in{i}"),
            Inst::Scalar(i) => convert(&format!("s{i}"), name(dtype)?, dialect),
            Inst::Const(c) => literal(c, dtype, name(dtype)?, dialect),
            Inst::Index => convert("index", name(dtype)?, dialect),
            Inst::Random { seed, stream } => {
                format!("wg_philox(s{seed}, {stream}u, index)").replace("u,", suffix(dialect))
            }
            Inst::Unary(op, a) => op.template(dialect).replace("{0}", &format!("v{a}")),
            Inst::Binary(op, a, b) => {
                op.template(dialect).replace("{0}", &format!("v{a}")).replace("{1}", &format!("v{b}"))
            }
            Inst::Select(c, a, b) => match dialect {
                Dialect::Rust => format!("if v{c} {{ v{a} }} else {{ v{b} }}"),
                Dialect::Cuda => format!("v{c} ? v{a} : v{b}"),
                Dialect::Wgsl => format!("select(v{b}, v{a}, v{c})"),
            },
            Inst::Cast(_, a) | Inst::CastLike(a, _) => convert(&format!("v{a}"), name(dtype)?, dialect),
        })
    }
}

fn suffix(dialect: Dialect) -> &'static str {
    if dialect == Dialect::Rust { "u32," } else { "u," }
}

fn convert(value: &str, to: &str, dialect: Dialect) -> String {
    match dialect {
        Dialect::Rust => format!("cast::<_, {to}>({value})"),
        Dialect::Cuda => format!("({to})({value})"),
        Dialect::Wgsl => format!("{to}({value})"),
    }
}

fn literal(c: Const, dtype: DType, name: &str, dialect: Dialect) -> String {
    let number = match c {
        Const::Bool(b) => return b.to_string(),
        Const::Int(k) if !dtype.is_float() => return convert(&k.to_string(), name, dialect),
        Const::Int(k) => k as f64,
        Const::Float(bits) => f64::from_bits(bits),
    };
    if number.is_finite() {
        return convert(&format!("{number:?}"), name, dialect);
    }
    let bits = (number as f32).to_bits();
    match dialect {
        Dialect::Rust => {
            format!("{name}::from_bits({})", if name == "f64" { number.to_bits() } else { u64::from(bits) })
        }
        Dialect::Cuda => format!("({name})__int_as_float({})", bits as i32),
        Dialect::Wgsl => format!("bitcast<f32>(wg_bits({bits}u))"),
    }
}

fn type_name(op: &'static str, dtype: DType, dialect: Dialect) -> Result<&'static str> {
    let columns = match dtype {
        DType::F32 | DType::F16 | DType::BF16 => ["f32", "float", "f32"],
        DType::F64 => ["f64", "double", ""],
        DType::I32 => ["i32", "int", "i32"],
        DType::I64 => ["i64", "long long", ""],
        DType::U32 => ["u32", "unsigned", "u32"],
        DType::U8 => ["u8", "unsigned char", ""],
        DType::Bool => ["bool", "bool", "bool"],
    };
    match columns[dialect as usize] {
        "" => Err(Error::dtype(op, &[dtype], format!("{dialect:?} has no such type"))),
        name => Ok(name),
    }
}
