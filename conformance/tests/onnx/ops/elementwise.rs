//! Operators on elements.

use numcore::{
    DType,
    ops::{PointwiseOps, ReduceOps, ViewOps},
};

use super::one;
use crate::{
    call::{Call, dtype},
    file::Answer,
    graph::T,
};

pub fn run(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    if let Some(y) = unary(c)? {
        return Ok(Some(vec![y]));
    }
    if let Some(y) = binary(c)? {
        return Ok(Some(vec![y]));
    }
    match c.op() {
        "Identity" => one(Ok(c.x(0)?.clone())),
        "Where" => one(c.x(1)?.where_cond(c.x(0)?, c.x(2)?)),
        "Clip" => clip(c),
        "PRelu" => prelu(c),
        "Cast" => one(c.x(0)?.to_dtype(dtype(c.int("to", 0))?)),
        "CastLike" => one(c.x(0)?.to_dtype(c.x(1)?.dtype())),
        "BitCast" => one(c.x(0)?.bit_cast(dtype(c.int("to", 0))?)),
        "SwiGLU" => {
            let (x, alpha) = (c.x(0)?, c.float("alpha", 1.0));
            // Computed in f32, as the suite's halves are.
            let wide = |x: &T| if x.dtype().is_half() { x.to_dtype(DType::F32) } else { Ok(x.clone()) };
            let (a, b) = (wide(x)?, wide(c.x(1)?)?);
            one(a.map(|x| x * (x * alpha).sigmoid())?.mul(&b)?.to_dtype(x.dtype()))
        }
        "Det" => one(determinant(c.x(0)?)),
        "Binarizer" => {
            let x = c.x(0)?;
            one(x.gt(c.float("threshold", 0.0))?.to_dtype(x.dtype()))
        }
        _ => Ok(None),
    }
}

fn unary(c: &Call<'_>) -> Answer<Option<T>> {
    let Some(x) = c.opt(0) else { return Ok(None) };
    let y = match c.op() {
        "Abs" => x.abs(),
        "Neg" => x.neg(),
        "Sign" => x.sign(),
        "Exp" => x.exp(),
        "Log" => x.log(),
        "Sqrt" => x.sqrt(),
        "Reciprocal" => x.recip(),
        "Sin" => x.sin(),
        "Cos" => x.cos(),
        "Tan" => x.tan(),
        "Asin" => x.asin(),
        "Acos" => x.acos(),
        "Atan" => x.atan(),
        "Sinh" => x.sinh(),
        "Cosh" => x.cosh(),
        "Tanh" => x.tanh(),
        "Asinh" => x.asinh(),
        "Acosh" => x.acosh(),
        "Atanh" => x.atanh(),
        "Erf" => x.erf(),
        "Floor" => x.floor(),
        "Ceil" => x.ceil(),
        "Round" => x.round(),
        "Relu" => x.relu(),
        "Sigmoid" => x.sigmoid(),
        "Softplus" => x.softplus(),
        "Softsign" => x.softsign(),
        "Mish" => x.mish(),
        "HardSwish" => x.hardswish(),
        "Not" => x.logical_not(),
        "BitwiseNot" if x.dtype() == DType::I64 || x.dtype() == DType::I32 => x.logical_xor(-1.0),
        "BitwiseNot" => x.logical_xor(((1u64 << (8 * x.dtype().size())) - 1) as f64),
        "IsNaN" => x.isnan(),
        "IsInf" => is_infinite(c, x),
        "Elu" => x.elu(c.float("alpha", 1.0)),
        "Celu" => x.celu(c.float("alpha", 1.0)),
        "Selu" => x.selu_with(c.float("alpha", 1.673_263_192_176_818_8), c.float("gamma", 1.050_700_783_729_553_2)),
        "LeakyRelu" => x.leaky_relu(c.float("alpha", 0.01)),
        "ThresholdedRelu" => x.threshold(c.float("alpha", 1.0), 0.0),
        "HardSigmoid" => x.hardsigmoid_with(c.float("alpha", 0.2), c.float("beta", 0.5)),
        "Gelu" if c.text("approximate", "none") == "tanh" => x.gelu_tanh(),
        "Gelu" => x.gelu(),
        "Swish" => {
            let alpha = c.float("alpha", 1.0);
            x.map(|x| x * (x * alpha).sigmoid())
        }
        "Shrink" => shrink(c, x),
        _ => return Ok(None),
    };
    Ok(Some(y?))
}

fn is_infinite(c: &Call<'_>, x: &T) -> numcore::Result<T> {
    match (c.int("detect_negative", 1), c.int("detect_positive", 1)) {
        (0, _) => x.eq(f64::INFINITY),
        (_, 0) => x.eq(f64::NEG_INFINITY),
        _ => x.isinf(),
    }
}

fn shrink(c: &Call<'_>, x: &T) -> numcore::Result<T> {
    let (bias, lambda) = (c.float("bias", 0.0), c.float("lambd", 0.5));
    let zero = x.mul(0.0)?;
    let low = x.add(bias)?.where_cond(&x.lt(-lambda)?, &zero)?;
    x.sub(bias)?.where_cond(&x.gt(lambda)?, &low)
}

fn binary(c: &Call<'_>) -> Answer<Option<T>> {
    let fold = |f: fn(&T, &T) -> numcore::Result<T>| -> Answer<T> {
        let all = c.all()?;
        Ok(all[1..].iter().try_fold(all[0].clone(), |x, y| f(&x, y))?)
    };
    let two = |f: fn(&T, &T) -> numcore::Result<T>| -> Answer<T> { Ok(f(c.x(0)?, c.x(1)?)?) };
    let y = match c.op() {
        "Add" => two(|a, b| a.add(b)),
        "Sub" => two(|a, b| a.sub(b)),
        "Mul" => two(|a, b| a.mul(b)),
        "Div" => two(|a, b| a.div(b)),
        "Mod" => two(if c.int("fmod", 0) == 1 { truncated_remainder } else { |a, b| a.rem(b) }),
        "Pow" => two(power),
        "And" | "BitwiseAnd" => two(|a, b| a.logical_and(b)),
        "Or" | "BitwiseOr" => two(|a, b| a.logical_or(b)),
        "Xor" | "BitwiseXor" => two(|a, b| a.logical_xor(b)),
        "Equal" => two(|a, b| a.eq(b)),
        "Less" => two(|a, b| a.lt(b)),
        "LessOrEqual" => two(|a, b| a.le(b)),
        "Greater" => two(|a, b| a.gt(b)),
        "GreaterOrEqual" => two(|a, b| a.ge(b)),
        "BitShift" if c.text("direction", "") == "LEFT" => two(|a, b| a.shl(b)),
        "BitShift" => two(|a, b| a.shr(b)),
        "Max" => fold(|a, b| a.maximum(b)),
        "Min" => fold(|a, b| a.minimum(b)),
        "Sum" => fold(|a, b| a.add(b)),
        "Mean" => Ok(fold(|a, b| a.add(b))?.div(c.ins.len() as f64)?),
        _ => return Ok(None),
    };
    Ok(Some(y?))
}

/// The remainder with the sign of the dividend, C's `fmod`.
fn truncated_remainder(a: &T, b: &T) -> numcore::Result<T> {
    let size = a.abs()?.rem(&b.abs()?)?;
    size.neg()?.where_cond(&a.lt(0.0)?, &size)
}

/// A power of the base's type; integers are raised as floats where the exponent is one.
fn power(a: &T, b: &T) -> numcore::Result<T> {
    match (a.dtype(), b.dtype()) {
        (base, exponent) if base == exponent => a.pow(b),
        (base, exponent) if base.is_int() && exponent.is_float() => {
            a.to_dtype(DType::F64)?.pow(&b.to_dtype(DType::F64)?)?.to_dtype(base)
        }
        (base, _) => a.pow(&b.to_dtype(base)?),
    }
}

fn clip(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    let mut x = c.x(0)?.clone();
    if c.has("min") || c.has("max") {
        return one(x.clamp(c.float("min", f64::NEG_INFINITY), c.float("max", f64::INFINITY)));
    }
    if let Some(low) = c.opt(1) {
        x = x.maximum(low)?;
    }
    if let Some(high) = c.opt(2) {
        x = x.minimum(high)?;
    }
    one(Ok(x))
}

fn prelu(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    let x = c.x(0)?;
    one(x.mul(c.x(1)?)?.where_cond(&x.lt(0.0)?, x))
}

/// By Laplace's expansion along the first row; `x: [.., N, N]`.
fn determinant(x: &T) -> numcore::Result<T> {
    let n = x.dims()[x.dims().len() - 1];
    if n == 1 {
        return x.squeeze(-1)?.squeeze(-1);
    }
    let below = x.narrow(-2, 1, n - 1)?;
    let mut terms = Vec::new();
    for j in 0..n {
        let rest = numcore::ops::cat(&[&below.narrow(-1, 0, j)?, &below.narrow(-1, j + 1, n - 1 - j)?], -1)?;
        let sign = if j % 2 == 0 { 1.0 } else { -1.0 };
        terms.push(x.select(-2, 0)?.select(-1, j)?.mul(&determinant(&rest)?)?.mul(sign)?);
    }
    numcore::ops::stack(&terms.iter().collect::<Vec<_>>(), 0)?.sum(&[0])
}
