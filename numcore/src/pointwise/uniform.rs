//! Values that depend on numbers and scalars alone: computed once per launch, on the host, in `f64` or `i64`.

use super::{Const, Inst, Program, Typed, Unary};
use crate::{DType, Scalar};

/// A value computed on the host.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Number {
    /// Of a floating type: not yet rounded to it.
    Float(f64),
    /// Of an integer type.
    Int(i64),
    /// Of `bool`.
    Bool(bool),
}

impl Number {
    /// As the nearest `f64`.
    pub fn to_f64(self) -> f64 {
        match self {
            Number::Float(x) => x,
            Number::Int(x) => x as f64,
            Number::Bool(x) => f64::from(u8::from(x)),
        }
    }

    /// As an integer; reals truncate and saturate.
    pub fn to_i64(self) -> i64 {
        match self {
            Number::Float(x) => x as i64,
            Number::Int(x) => x,
            Number::Bool(x) => i64::from(x),
        }
    }

    fn of(self, dtype: DType) -> Number {
        match dtype {
            DType::Bool => Number::Bool(self.to_f64() != 0.0),
            d if d.is_float() => Number::Float(self.to_f64()),
            DType::I64 => Number::Int(self.to_i64()),
            DType::I32 => Number::Int(i64::from(narrow(self, |x| x as i32, |x| x as i32))),
            DType::U32 => Number::Int(i64::from(narrow(self, |x| x as u32, |x| x as u32))),
            _ => Number::Int(i64::from(narrow(self, |x| x as u8, |x| x as u8))),
        }
    }
}

/// Reals saturate, integers wrap, as the cast of an element does.
fn narrow<T>(x: Number, real: fn(f64) -> T, whole: fn(i64) -> T) -> T {
    if let Number::Float(v) = x { real(v) } else { whole(x.to_i64()) }
}

impl Program {
    /// Which values depend on numbers and scalars alone.
    pub fn uniform(&self) -> Vec<bool> {
        let mut uniform: Vec<bool> = Vec::with_capacity(self.insts().len());
        for inst in self.insts() {
            uniform.push(match inst {
                Inst::Const(_) | Inst::Scalar(_) => true,
                Inst::Input(_) | Inst::Index | Inst::Random { .. } => false,
                other => other.operands().all(|a| uniform[a as usize]),
            });
        }
        uniform
    }

    /// Those values, for these scalars.
    pub fn eval_uniform(&self, typed: &Typed, scalars: &[Scalar]) -> Vec<Option<Number>> {
        let mut values: Vec<Option<Number>> = Vec::with_capacity(self.insts().len());
        for (inst, &dtype) in self.insts().iter().zip(&typed.dtypes) {
            values.push(eval(*inst, dtype, &values, scalars));
        }
        values
    }
}

fn eval(inst: Inst, dtype: DType, values: &[Option<Number>], scalars: &[Scalar]) -> Option<Number> {
    let v = |a: u32| values[a as usize];
    let raw = match inst {
        Inst::Const(Const::Float(bits)) => Number::Float(f64::from_bits(bits)),
        Inst::Const(Const::Int(k)) => Number::Int(k),
        Inst::Const(Const::Bool(b)) => Number::Bool(b),
        Inst::Scalar(i) => match scalars[i as usize] {
            Scalar::F64(x) => Number::Float(x),
            s => Number::Int(s.to_i64()),
        },
        Inst::Unary(op, a) => unary(op, v(a)?),
        Inst::Binary(op, a, b) => binary(op, v(a)?, v(b)?),
        Inst::Select(c, a, b) => {
            let (c, a, b) = (v(c)?, v(a)?, v(b)?);
            if c == Number::Bool(true) { a } else { b }
        }
        Inst::Cast(_, a) => v(a)?,
        Inst::CastLike(a, like) => {
            v(like)?;
            v(a)?
        }
        Inst::Input(_) | Inst::Index | Inst::Random { .. } => return None,
    };
    Some(raw.of(dtype))
}

fn unary(op: Unary, a: Number) -> Number {
    match (op, a) {
        (Unary::Neg, Number::Int(x)) => Number::Int(x.wrapping_neg()),
        (Unary::Abs, Number::Int(x)) => Number::Int(x.wrapping_abs()),
        (Unary::Sign, Number::Int(x)) => Number::Int(x.signum()),
        _ => Number::Float(op.eval(a.to_f64())),
    }
}

fn binary(op: super::Binary, a: Number, b: Number) -> Number {
    use super::Binary::*;
    let (Number::Int(x), Number::Int(y)) = (a, b) else { return Number::Float(op.eval(a.to_f64(), b.to_f64())) };
    Number::Int(match op {
        Add => x.wrapping_add(y),
        Sub => x.wrapping_sub(y),
        Mul => x.wrapping_mul(y),
        Div => x.checked_div(y).unwrap_or(if y == 0 { 0 } else { x }),
        Rem => floor_rem(x, y),
        Pow => power(x, y),
        Max => x.max(y),
        Min => x.min(y),
        And => x & y,
        Or => x | y,
        Xor => x ^ y,
        Shl => x.wrapping_shl(y as u32),
        Shr => x.wrapping_shr(y as u32),
        Eq => i64::from(x == y),
        Ne => i64::from(x != y),
        Lt => i64::from(x < y),
        Le => i64::from(x <= y),
        Atan2 => return Number::Float(op.eval(x as f64, y as f64)),
    })
}

fn floor_rem(x: i64, y: i64) -> i64 {
    let r = x.checked_rem(y).unwrap_or(0);
    if r != 0 && (r < 0) != (y < 0) { r + y } else { r }
}

fn power(x: i64, y: i64) -> i64 {
    match (x, y) {
        (1, _) => 1,
        (-1, y) => {
            if y % 2 == 0 {
                1
            } else {
                -1
            }
        }
        (_, y) if y < 0 => 0,
        (x, y) => x.wrapping_pow(y.min(i64::from(u32::MAX)) as u32),
    }
}
