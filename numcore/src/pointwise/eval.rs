//! Evaluation of programs on the host: one element, or the values that are equal for all elements.

use smallvec::SmallVec;

use super::{Const, Inst, Number, Program, Typed};
use crate::{DType, Error, Result, Scalar, rng::philox4x32_10};

/// The host values of a program by id; `None` if they depend on the element.
pub type Values = SmallVec<[Option<Number>; 32]>;

/// The element-dependent operands of an evaluation.
struct EvalElement<'a> {
    inputs: &'a [Number],
    index: u64,
}

impl Program {
    /// The outputs for one element at row-major position `index`. `inputs` are the element's input values, of the
    /// dtypes that `typed` was resolved for.
    ///
    /// A slow reference that runtimes are tested against. Half-precision values are computed in `f32`, and rounded
    /// where they are cast or stored.
    pub fn eval(&self, typed: &Typed, inputs: &[Number], scalars: &[Scalar], index: u64) -> Vec<Number> {
        let mut values = self.eval_uniform(typed, scalars);
        let element = EvalElement { inputs, index };
        for id in 0..values.len() {
            let value = values[id].or_else(|| self.value(id, typed, &values, scalars, Some(&element)));
            values[id] = value.map(|v| v.computed_as(typed.dtypes[id]));
        }
        // Every value is known, since an element is given.
        let known = |&o: &u32| values[o as usize].map_or(Number::Int(0), |v| v.cast(typed.dtypes[o as usize]));
        self.outputs().iter().map(known).collect()
    }

    /// A flag per value: true if it depends on constants and scalars alone.
    pub fn uniform(&self) -> Vec<bool> {
        let mut uniform: Vec<bool> = Vec::with_capacity(self.insts().len());
        for inst in self.insts() {
            uniform.push(match *inst {
                Inst::Input(_) | Inst::Index | Inst::Random { .. } => false,
                Inst::CastLike(a, _) => uniform[a as usize],
                other => other.operands().all(|a| uniform[a as usize]),
            });
        }
        uniform
    }

    /// The values that are [`uniform`](Program::uniform), for these scalars; a runtime computes them once per launch.
    ///
    /// Floats of any dtype are computed in `f64`, like folded constants; a runtime rounds them when it passes them to a
    /// kernel. So `1 − β` keeps the digits that it would lose in `f32`.
    pub fn eval_uniform(&self, typed: &Typed, scalars: &[Scalar]) -> Values {
        let mut values = Values::with_capacity(self.insts().len());
        for (id, &dtype) in typed.dtypes.iter().enumerate() {
            let value = self.value(id, typed, &values, scalars, None);
            let wide = if dtype.is_float() { DType::F64 } else { dtype };
            values.push(value.map(|v| v.computed_as(wide)));
        }
        values
    }

    /// Checks the number of `scalars`, and that no scalar with a fraction is used as an integer.
    pub fn check_scalars(&self, typed: &Typed, scalars: &[Scalar]) -> Result<()> {
        super::require_count(self.name(), "number of scalars", scalars.len(), self.scalars())?;
        if scalars.is_empty() {
            return Ok(());
        }
        for (inst, dtype) in self.insts().iter().zip(&typed.dtypes) {
            if let Inst::Scalar(k) = inst
                && let Scalar::F64(x) = scalars[*k as usize]
                && dtype.is_int()
                && x.fract() != 0.0
            {
                let allowed = format!("whole: scalar {k} is used as {dtype}");
                return Err(Error::range(self.name(), "scalar", x, allowed));
            }
        }
        Ok(())
    }

    fn value(
        &self,
        id: usize,
        typed: &Typed,
        values: &Values,
        scalars: &[Scalar],
        at: Option<&EvalElement<'_>>,
    ) -> Option<Number> {
        let dtype = typed.dtypes[id];
        let v = |a: u32| values[a as usize];
        let number = match self.insts()[id] {
            Inst::Input(i) => at?.inputs[i as usize],
            Inst::Index => Number::Int(at?.index as i64),
            Inst::Random { seed, stream } => random(scalars[seed as usize], stream, at?.index),
            Inst::Scalar(i) if dtype.is_float() => Number::Float(scalars[i as usize].to_f64()),
            Inst::Scalar(i) => scalars[i as usize].into(),
            Inst::Const(c) => c.into(),
            Inst::Unary(op, a) => op.eval(v(a)?),
            Inst::Binary(op, a, b) => op.eval(v(a)?, v(b)?, typed.dtypes[a as usize].size() as u32 * 8),
            Inst::Select(c, a, b) => {
                let (c, a, b) = (v(c)?, v(a)?, v(b)?);
                if c.to_bool() { a } else { b }
            }
            Inst::Cast(_, a) | Inst::CastLike(a, _) if typed.dtypes[a as usize] == dtype => v(a)?,
            Inst::Cast(_, a) | Inst::CastLike(a, _) => v(a)?.computed_as(typed.dtypes[a as usize]).cast(dtype),
        };
        Some(number)
    }
}

fn random(seed: Scalar, stream: u32, index: u64) -> Number {
    let (key, block) = (seed.to_i64() as u64, index / 4);
    let words = philox4x32_10([block as u32, (block >> 32) as u32, stream, 0], [key as u32, (key >> 32) as u32]);
    Number::Int(i64::from(words[(index % 4) as usize]))
}

impl From<Const> for Number {
    fn from(c: Const) -> Number {
        match c {
            Const::Float(bits) => Number::Float(f64::from_bits(bits)),
            Const::Int(x) => Number::Int(x),
            Const::Bool(x) => Number::Bool(x),
        }
    }
}

impl From<Number> for Const {
    fn from(x: Number) -> Const {
        match x {
            Number::Float(x) => Const::Float(x.to_bits()),
            Number::Int(x) => Const::Int(x),
            Number::Bool(x) => Const::Bool(x),
        }
    }
}
