//! Typing: every value of a program gets one element type. Inputs bring theirs; numbers, scalars and positions take the type of
//! what they meet; nothing is promoted.

use std::sync::Arc;

use super::{Class, Const, Id, Inst, Program};
use crate::{DType, Error, Result};

/// A program's types, for given inputs.
#[derive(Debug, PartialEq, Eq)]
pub struct Typed {
    /// The type of each value.
    pub dtypes: Vec<DType>,
}

pub(super) struct Cached {
    inputs: Vec<DType>,
    outputs: Vec<Option<DType>>,
    typed: Arc<Typed>,
}

impl Program {
    /// Types every value, given the inputs' types and, where known, the outputs'. Kept: asking again allocates nothing.
    pub fn resolve(&self, inputs: &[DType], outputs: &[Option<DType>]) -> Result<Arc<Typed>> {
        let hit = |c: &&Cached| c.inputs == inputs && c.outputs == outputs;
        if let Some(c) = self.0.typed.read().iter().find(hit) {
            return Ok(c.typed.clone());
        }
        let typed = Arc::new(infer(self, inputs, outputs)?);
        let cached = Cached { inputs: inputs.into(), outputs: outputs.into(), typed: typed.clone() };
        self.0.typed.write().push(cached);
        Ok(typed)
    }
}

/// What is known of a class of values that must have one type.
#[derive(Clone, Copy)]
struct Known {
    dtype: Option<DType>,
    /// A real number is among them: no integer type will do.
    real: bool,
}

struct Inference<'a> {
    program: &'a Program,
    parent: Vec<Id>,
    known: Vec<Known>,
}

fn infer(program: &Program, inputs: &[DType], outputs: &[Option<DType>]) -> Result<Typed> {
    if inputs.len() != program.inputs() {
        let why = format!("takes {} inputs, {} were given", program.inputs(), inputs.len());
        return Err(Error::argument(program.name(), why));
    }
    let n = program.insts().len();
    let unknown = Known { dtype: None, real: false };
    let mut types = Inference { program, parent: (0..n as Id).collect(), known: vec![unknown; n] };
    for i in 0..n {
        types.constrain(i as Id, inputs)?;
    }
    for (&o, dtype) in program.outputs().iter().zip(outputs) {
        if let Some(d) = dtype {
            types.is(o, *d)?;
        }
    }
    let dtypes: Vec<DType> = (0..n as Id).map(|i| types.of(i)).collect();
    types.check(&dtypes)?;
    Ok(Typed { dtypes })
}

impl Inference<'_> {
    fn constrain(&mut self, i: Id, inputs: &[DType]) -> Result<()> {
        match self.program.insts()[i as usize] {
            Inst::Input(k) => self.is(i, inputs[k as usize]),
            Inst::Const(Const::Float(_)) => {
                self.known[i as usize].real = true;
                Ok(())
            }
            Inst::Const(Const::Bool(_)) => self.is(i, DType::Bool),
            Inst::Const(Const::Int(_)) | Inst::Scalar(_) | Inst::Index => Ok(()),
            Inst::Random { .. } => self.is(i, DType::U32),
            Inst::Unary(op, a) => {
                if op.class() == Class::Float {
                    let root = self.root(a);
                    self.known[root as usize].real = true;
                }
                self.same(i, a)
            }
            Inst::Binary(op, a, b) => {
                self.same(a, b)?;
                if op.is_comparison() { self.is(i, DType::Bool) } else { self.same(i, a) }
            }
            Inst::Select(c, a, b) => {
                self.is(c, DType::Bool)?;
                self.same(a, b)?;
                self.same(i, a)
            }
            Inst::Cast(to, _) => self.is(i, to),
            Inst::CastLike(_, like) => self.same(i, like),
        }
    }

    fn root(&mut self, mut i: Id) -> Id {
        while self.parent[i as usize] != i {
            let up = self.parent[self.parent[i as usize] as usize];
            self.parent[i as usize] = up;
            i = up;
        }
        i
    }

    fn is(&mut self, i: Id, dtype: DType) -> Result<()> {
        let root = self.root(i) as usize;
        match self.known[root].dtype {
            Some(d) if d != dtype => Err(self.mixed(d, dtype)),
            _ => {
                self.known[root].dtype = Some(dtype);
                Ok(())
            }
        }
    }

    fn same(&mut self, a: Id, b: Id) -> Result<()> {
        let (a, b) = (self.root(a), self.root(b));
        if a == b {
            return Ok(());
        }
        let (x, y) = (self.known[a as usize], self.known[b as usize]);
        if let (Some(d), Some(e)) = (x.dtype, y.dtype)
            && d != e
        {
            return Err(self.mixed(d, e));
        }
        self.parent[b as usize] = a;
        self.known[a as usize] = Known { dtype: x.dtype.or(y.dtype), real: x.real || y.real };
        Ok(())
    }

    fn of(&mut self, i: Id) -> DType {
        let root = self.root(i) as usize;
        let Known { dtype, real } = self.known[root];
        dtype.unwrap_or(if real { DType::F32 } else { DType::I64 })
    }

    /// Whether every op takes the types it got.
    fn check(&mut self, dtypes: &[DType]) -> Result<()> {
        for i in 0..dtypes.len() as Id {
            let (name, class, d) = match self.program.insts()[i as usize] {
                Inst::Unary(op, a) => (op.name(), op.class(), dtypes[a as usize]),
                Inst::Binary(op, a, _) => (op.name(), op.class(), dtypes[a as usize]),
                Inst::Const(Const::Float(_)) => ("a real number", Class::Float, dtypes[i as usize]),
                Inst::Const(Const::Int(_)) | Inst::Index => ("a whole number", Class::Number, dtypes[i as usize]),
                _ => continue,
            };
            if !takes(class, d) {
                let why = format!("{name} does not take {d}; cast with `to_dtype`");
                return Err(Error::dtype(self.program.name(), &[d], why));
            }
        }
        Ok(())
    }

    fn mixed(&self, a: DType, b: DType) -> Error {
        let why = "operands must have one dtype; nothing is promoted silently, cast with `to_dtype`";
        Error::dtype(self.program.name(), &[a, b], why)
    }
}

fn takes(class: Class, d: DType) -> bool {
    match class {
        Class::Float => d.is_float(),
        Class::Number => d.is_float() || d.is_int(),
        Class::Int => d.is_int(),
        Class::Bits => d.is_int() || d == DType::Bool,
        Class::Bool => d == DType::Bool,
        Class::Any => true,
    }
}
