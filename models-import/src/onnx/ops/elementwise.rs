//! Operators on elements.

use autograd::Var;
use numcore::{
    DType, Result, Runtime,
    ops::{PointwiseOps, ReduceOps, ViewOps, cat, stack},
};

use super::{
    super::call::{NodeCall, NodeOutputs, bad},
    OperatorRow, one, row,
};

pub(super) fn find<R: Runtime>(op: &str) -> Option<OperatorRow<R>> {
    unary(op).or_else(|| binary(op)).or_else(|| other(op))
}

/// The operators of the domain `ai.onnx.ml`.
pub(super) fn find_ml<R: Runtime>(op: &str) -> Option<OperatorRow<R>> {
    match op {
        "Binarizer" => row(&["threshold"], |c| {
            let x = c.x(0)?;
            one(x.gt(c.float("threshold", 0.0))?.to_dtype(x.dtype()))
        }),
        _ => None,
    }
}

fn unary<R: Runtime>(op: &str) -> Option<OperatorRow<R>> {
    match op {
        "Identity" => row(&[], |c| one(Ok(c.x(0)?.clone()))),
        "Abs" => row(&[], |c| one(c.x(0)?.abs())),
        "Neg" => row(&[], |c| one(c.x(0)?.neg())),
        "Sign" => row(&[], |c| one(c.x(0)?.sign())),
        "Exp" => row(&[], |c| one(c.x(0)?.exp())),
        "Log" => row(&[], |c| one(c.x(0)?.log())),
        "Sqrt" => row(&[], |c| one(c.x(0)?.sqrt())),
        "Reciprocal" => row(&[], |c| one(c.x(0)?.recip())),
        "Sin" => row(&[], |c| one(c.x(0)?.sin())),
        "Cos" => row(&[], |c| one(c.x(0)?.cos())),
        "Tan" => row(&[], |c| one(c.x(0)?.tan())),
        "Asin" => row(&[], |c| one(c.x(0)?.asin())),
        "Acos" => row(&[], |c| one(c.x(0)?.acos())),
        "Atan" => row(&[], |c| one(c.x(0)?.atan())),
        "Sinh" => row(&[], |c| one(c.x(0)?.sinh())),
        "Cosh" => row(&[], |c| one(c.x(0)?.cosh())),
        "Tanh" => row(&[], |c| one(c.x(0)?.tanh())),
        "Asinh" => row(&[], |c| one(c.x(0)?.asinh())),
        "Acosh" => row(&[], |c| one(c.x(0)?.acosh())),
        "Atanh" => row(&[], |c| one(c.x(0)?.atanh())),
        "Erf" => row(&[], |c| one(c.x(0)?.erf())),
        "Floor" => row(&[], |c| one(c.x(0)?.floor())),
        "Ceil" => row(&[], |c| one(c.x(0)?.ceil())),
        "Round" => row(&[], |c| one(c.x(0)?.round())),
        "Relu" => row(&[], |c| one(c.x(0)?.relu())),
        "Sigmoid" => row(&[], |c| one(c.x(0)?.sigmoid())),
        "Softplus" => row(&[], |c| one(c.x(0)?.softplus())),
        "Softsign" => row(&[], |c| one(c.x(0)?.softsign())),
        "Mish" => row(&[], |c| one(c.x(0)?.mish())),
        "HardSwish" => row(&[], |c| one(c.x(0)?.hardswish())),
        "Not" => row(&[], |c| one(c.x(0)?.logical_not())),
        "BitwiseNot" => row(&[], |c| {
            let x = c.x(0)?;
            let all = match x.dtype() {
                DType::U8 => 255.0,
                DType::U32 => f64::from(u32::MAX),
                _ => -1.0,
            };
            one(x.logical_xor(all))
        }),
        "IsNaN" => row(&[], |c| one(c.x(0)?.isnan())),
        "IsInf" => row(&["detect_negative", "detect_positive"], |c| {
            let x = c.x(0)?;
            one(match (c.int("detect_negative", 1), c.int("detect_positive", 1)) {
                (0, 0) => x.ne(x),
                (0, _) => x.eq(f64::INFINITY),
                (_, 0) => x.eq(f64::NEG_INFINITY),
                _ => x.isinf(),
            })
        }),
        "Elu" => row(&["alpha"], |c| one(c.x(0)?.elu(c.float("alpha", 1.0)))),
        "Celu" => row(&["alpha"], |c| one(c.x(0)?.celu(c.float("alpha", 1.0)))),
        "Selu" => row(&["alpha", "gamma"], |c| {
            let (alpha, gamma) = (c.float("alpha", 1.673_263_192_176_818_8), c.float("gamma", 1.050_700_783_729_553_2));
            one(c.x(0)?.selu_with(alpha, gamma))
        }),
        "LeakyRelu" => row(&["alpha"], |c| one(c.x(0)?.leaky_relu(c.float("alpha", 0.01)))),
        "ThresholdedRelu" => row(&["alpha"], |c| one(c.x(0)?.threshold(c.float("alpha", 1.0), 0.0))),
        "HardSigmoid" => {
            row(&["alpha", "beta"], |c| one(c.x(0)?.hardsigmoid_with(c.float("alpha", 0.2), c.float("beta", 0.5))))
        }
        "Gelu" => row(&["approximate"], |c| {
            one(if c.text("approximate", "none") == "tanh" { c.x(0)?.gelu_tanh() } else { c.x(0)?.gelu() })
        }),
        "Swish" => row(&["alpha"], |c| {
            let alpha = c.float("alpha", 1.0);
            one(c.x(0)?.map(|x| x * (x * alpha).sigmoid()))
        }),
        "Shrink" => row(&["bias", "lambd"], |c| {
            let (x, bias, lambda) = (c.x(0)?, c.float("bias", 0.0), c.float("lambd", 0.5));
            let zero = x.mul(0.0)?;
            let low = x.add(bias)?.where_cond(&x.lt(-lambda)?, &zero)?;
            one(x.sub(bias)?.where_cond(&x.gt(lambda)?, &low))
        }),
        _ => None,
    }
}

fn binary<R: Runtime>(op: &str) -> Option<OperatorRow<R>> {
    match op {
        "Add" => row(&[], |c| one(c.x(0)?.add(c.x(1)?))),
        "Sub" => row(&[], |c| one(c.x(0)?.sub(c.x(1)?))),
        "Mul" => row(&[], |c| one(c.x(0)?.mul(c.x(1)?))),
        "Div" => row(&[], |c| one(c.x(0)?.div(c.x(1)?))),
        "Mod" => row(&["fmod"], |c| {
            one(if c.flag("fmod") { truncated_remainder(c.x(0)?, c.x(1)?) } else { c.x(0)?.rem(c.x(1)?) })
        }),
        "Pow" => row(&[], |c| one(power(c.x(0)?, c.x(1)?))),
        "And" | "BitwiseAnd" => row(&[], |c| one(c.x(0)?.logical_and(c.x(1)?))),
        "Or" | "BitwiseOr" => row(&[], |c| one(c.x(0)?.logical_or(c.x(1)?))),
        "Xor" | "BitwiseXor" => row(&[], |c| one(c.x(0)?.logical_xor(c.x(1)?))),
        "Equal" => row(&[], |c| one(c.x(0)?.eq(c.x(1)?))),
        "Less" => row(&[], |c| one(c.x(0)?.lt(c.x(1)?))),
        "LessOrEqual" => row(&[], |c| one(c.x(0)?.le(c.x(1)?))),
        "Greater" => row(&[], |c| one(c.x(0)?.gt(c.x(1)?))),
        "GreaterOrEqual" => row(&[], |c| one(c.x(0)?.ge(c.x(1)?))),
        "BitShift" => row(&["direction"], |c| {
            one(if c.text("direction", "") == "LEFT" { c.x(0)?.shl(c.x(1)?) } else { c.x(0)?.shr(c.x(1)?) })
        }),
        "Max" => row(&[], |c| folded(c, |a, b| a.maximum(b))),
        "Min" => row(&[], |c| folded(c, |a, b| a.minimum(b))),
        "Sum" => row(&[], |c| folded(c, |a, b| a.add(b))),
        "Mean" => row(&[], |c| {
            let sum = folded(c, |a, b| a.add(b))?;
            one(sum[0].div(c.ins.len() as f64))
        }),
        _ => None,
    }
}

fn other<R: Runtime>(op: &str) -> Option<OperatorRow<R>> {
    match op {
        "Where" => row(&[], |c| one(c.x(1)?.where_cond(c.x(0)?, c.x(2)?))),
        "Clip" => row(&["min", "max"], clip),
        "PRelu" => row(&[], |c| {
            let x = c.x(0)?;
            one(x.mul(c.x(1)?)?.where_cond(&x.lt(0.0)?, x))
        }),
        "Cast" => row(&["to", "saturate", "round_mode"], |c| one(c.x(0)?.to_dtype(c.dtype("to", 0)?))),
        "CastLike" => row(&["saturate", "round_mode"], |c| one(c.x(0)?.to_dtype(c.x(1)?.dtype()))),
        "BitCast" => row(&["to"], |c| one(Ok(Var::new(c.x(0)?.value()?.bit_cast(c.dtype("to", 0)?)?)))),
        "SwiGLU" => row(&["alpha"], |c| {
            let (x, alpha) = (c.x(0)?, c.float("alpha", 1.0));
            // Computed in f32, as the suite's halves are.
            let wide = |x: &Var<R>| if x.dtype().is_half() { x.to_dtype(DType::F32) } else { Ok(x.clone()) };
            let (a, b) = (wide(x)?, wide(c.x(1)?)?);
            one(a.map(|x| x * (x * alpha).sigmoid())?.mul(&b)?.to_dtype(x.dtype()))
        }),
        "Det" => row(&[], |c| one(determinant(c.x(0)?))),
        _ => None,
    }
}

/// All inputs, combined from the first on.
fn folded<R: Runtime>(c: &NodeCall<'_, R>, f: fn(&Var<R>, &Var<R>) -> Result<Var<R>>) -> NodeOutputs<R> {
    let all = c.all()?;
    one(all[1..].iter().try_fold(all[0].clone(), |x, y| f(&x, y)))
}

/// The remainder with the sign of the dividend, C's `fmod`.
fn truncated_remainder<R: Runtime>(a: &Var<R>, b: &Var<R>) -> Result<Var<R>> {
    let size = a.abs()?.rem(&b.abs()?)?;
    size.neg()?.where_cond(&a.lt(0.0)?, &size)
}

/// A power of the base's type; integers are raised as floats where the exponent is one.
fn power<R: Runtime>(a: &Var<R>, b: &Var<R>) -> Result<Var<R>> {
    match (a.dtype(), b.dtype()) {
        (base, exponent) if base == exponent => a.pow(b),
        (base, exponent) if base.is_int() && exponent.is_float() => {
            a.to_dtype(DType::F64)?.pow(&b.to_dtype(DType::F64)?)?.to_dtype(base)
        }
        (base, _) => a.pow(&b.to_dtype(base)?),
    }
}

fn clip<R: Runtime>(c: &NodeCall<'_, R>) -> NodeOutputs<R> {
    let mut x = c.x(0)?.clone();
    if c.has("min") || c.has("max") {
        return one(x.clamp(c.float("min", f64::NEG_INFINITY), c.float("max", f64::INFINITY)));
    }
    if let Some(low) = c.opt(1)? {
        x = x.maximum(low)?;
    }
    if let Some(high) = c.opt(2)? {
        x = x.minimum(high)?;
    }
    one(Ok(x))
}

/// By Laplace's expansion along the first row; `x: [.., N, N]`, for N up to 6.
fn determinant<R: Runtime>(x: &Var<R>) -> Result<Var<R>> {
    let dims = x.dims();
    let [.., rows, n] = dims[..] else { return Err(bad("a determinant is of [.., N, N]")) };
    if rows != n || !(1..=6).contains(&n) {
        return Err(bad(format!("a determinant is of [.., N, N], for N from 1 to 6, not of {dims:?}")));
    }
    if n == 1 {
        return x.squeeze(-1)?.squeeze(-1);
    }
    let below = x.narrow(-2, 1, n - 1)?;
    let mut terms = Vec::new();
    for j in 0..n {
        let rest = cat(&[&below.narrow(-1, 0, j)?, &below.narrow(-1, j + 1, n - 1 - j)?], -1)?;
        let sign = if j % 2 == 0 { 1.0 } else { -1.0 };
        terms.push(x.select(-2, 0)?.select(-1, j)?.mul(&determinant(&rest)?)?.mul(sign)?);
    }
    stack(&terms.iter().collect::<Vec<_>>(), 0)?.sum(&[0])
}
