//! Elementwise ops of the op tables.

use autograd::Var;
use numcore::{Error, Result, Runtime, ops::PointwiseOps, pointwise::Expr};

use crate::golden::call::{Call, OpFn, one};

pub(super) fn find<R: Runtime>(op: &str) -> Option<OpFn<R>> {
    let row: OpFn<R> = match op {
        "neg" => |c| one(c.x(0)?.neg()),
        "abs" => |c| one(c.x(0)?.abs()),
        "sign" => |c| one(c.x(0)?.sign()),
        "exp" => |c| one(c.x(0)?.exp()),
        "expm1" => |c| one(c.x(0)?.expm1()),
        "exp2" => |c| one(c.x(0)?.exp2()),
        "log" => |c| one(c.x(0)?.log()),
        "log1p" => |c| one(c.x(0)?.log1p()),
        "log2" => |c| one(c.x(0)?.log2()),
        "log10" => |c| one(c.x(0)?.map(|x| x.log() * std::f64::consts::LOG10_E)),
        "sqrt" => |c| one(c.x(0)?.sqrt()),
        "rsqrt" => |c| one(c.x(0)?.rsqrt()),
        "recip" | "reciprocal" => |c| one(c.x(0)?.recip()),
        "sin" => |c| one(c.x(0)?.sin()),
        "cos" => |c| one(c.x(0)?.cos()),
        "tan" => |c| one(c.x(0)?.tan()),
        "asin" => |c| one(c.x(0)?.asin()),
        "acos" => |c| one(c.x(0)?.acos()),
        "atan" => |c| one(c.x(0)?.atan()),
        "sinh" => |c| one(c.x(0)?.sinh()),
        "cosh" => |c| one(c.x(0)?.cosh()),
        "tanh" => |c| one(c.x(0)?.tanh()),
        "erf" => |c| one(c.x(0)?.erf()),
        "erfc" => |c| one(c.x(0)?.map(|x| 1.0 - x.erf())),
        "floor" => |c| one(c.x(0)?.floor()),
        "ceil" => |c| one(c.x(0)?.ceil()),
        "round" => |c| one(c.x(0)?.round()),
        "trunc" => |c| one(c.x(0)?.trunc()),
        "frac" => |c| one(c.x(0)?.map(|x| x - x.trunc())),
        "square" => |c| one(c.x(0)?.square()),
        "sigmoid" => |c| one(c.x(0)?.sigmoid()),
        "logsigmoid" | "log_sigmoid" => |c| one(c.x(0)?.log_sigmoid()),
        "relu" => |c| one(c.x(0)?.relu()),
        "relu6" => |c| one(c.x(0)?.map(|x| bounded(x, 0.0, 6.0))),
        "hardtanh" => |c| {
            let (low, high) = (c.attrs.f64("min_val", -1.0)?, c.attrs.f64("max_val", 1.0)?);
            one(c.x(0)?.map(|x| bounded(x, low, high)))
        },
        "silu" => |c| one(c.x(0)?.silu()),
        "gelu" => |c| match c.attrs.str("approximate", "none")? {
            "tanh" => one(c.x(0)?.gelu_tanh()),
            _ => one(c.x(0)?.gelu()),
        },
        "gelu_tanh" => |c| one(c.x(0)?.gelu_tanh()),
        "softplus" => |c| softplus(c.x(0)?, c.attrs.f64("beta", 1.0)?, c.attrs.f64("threshold", 20.0)?),
        "softsign" => |c| one(c.x(0)?.softsign()),
        "tanhshrink" => |c| one(c.x(0)?.map(|x| x - x.tanh())),
        "mish" => |c| one(c.x(0)?.mish()),
        "hardswish" => |c| one(c.x(0)?.hardswish()),
        "hardsigmoid" => |c| one(c.x(0)?.hardsigmoid()),
        "selu" => |c| one(c.x(0)?.selu()),
        "elu" => |c| one(c.x(0)?.elu(c.attrs.f64("alpha", 1.0)?)),
        "celu" => |c| {
            let alpha = c.attrs.f64("alpha", 1.0)?;
            one(c.x(0)?.mul(1.0 / alpha)?.elu(1.0)?.mul(alpha))
        },
        "leaky_relu" => |c| one(c.x(0)?.leaky_relu(c.attrs.f64("negative_slope", 0.01)?)),
        "logical_not" => |c| one(c.x(0)?.logical_not()),
        "add" => |c| one(scaled(c)?.add_to(c.x(0)?)),
        "sub" => |c| one(scaled(c)?.subtract_from(c.x(0)?)),
        "mul" => |c| one(c.x(0)?.mul(c.x(1)?)),
        "div" => |c| one(c.x(0)?.div(c.x(1)?)),
        "remainder" | "rem" => |c| one(c.x(0)?.rem(c.x(1)?)),
        "pow" => |c| one(c.x(0)?.pow(c.x(1)?)),
        "atan2" => |c| one(c.x(0)?.atan2(c.x(1)?)),
        "maximum" => |c| one(c.x(0)?.maximum(c.x(1)?)),
        "minimum" => |c| one(c.x(0)?.minimum(c.x(1)?)),
        "eq" => |c| one(c.x(0)?.eq(c.x(1)?)),
        "ne" => |c| one(c.x(0)?.ne(c.x(1)?)),
        "lt" => |c| one(c.x(0)?.lt(c.x(1)?)),
        "le" => |c| one(c.x(0)?.le(c.x(1)?)),
        "gt" => |c| one(c.x(0)?.gt(c.x(1)?)),
        "ge" => |c| one(c.x(0)?.ge(c.x(1)?)),
        "logical_and" => |c| one(c.x(0)?.logical_and(c.x(1)?)),
        "logical_or" => |c| one(c.x(0)?.logical_or(c.x(1)?)),
        "logical_xor" => |c| one(c.x(0)?.logical_xor(c.x(1)?)),
        "pow_scalar" => |c| one(c.x(0)?.pow(number(c, "exponent")?)),
        "add_scalar" => |c| one(c.x(0)?.add(number(c, "other")?)),
        "sub_scalar" => |c| one(c.x(0)?.sub(number(c, "other")?)),
        "mul_scalar" => |c| one(c.x(0)?.mul(number(c, "other")?)),
        "div_scalar" => |c| one(c.x(0)?.div(number(c, "other")?)),
        "clamp" => clamp,
        "where" => |c| one(c.x(1)?.where_cond(c.x(0)?, c.x(2)?)),
        "lerp" => |c| match (c.maybe(2), c.attrs.maybe_f64("weight")?) {
            (Some(weight), _) => one(c.x(0)?.lerp(c.x(1)?, weight)),
            (None, Some(weight)) => one(c.x(0)?.add(&c.x(1)?.sub(c.x(0)?)?.mul(weight)?)),
            (None, None) => Err(Error::format("golden", "lerp needs a weight, as an input or an attribute")),
        },
        _ => return None,
    };
    Some(row)
}

fn number<R: Runtime>(c: &Call<'_, R>, name: &str) -> Result<f64> {
    let given = c.attrs.maybe_f64(name)?;
    given.ok_or_else(|| Error::format("golden", format!("attribute `{name}` is missing")))
}

/// Computes `min(max(x, low), high)`, whose gradient is 0 at the bounds, as in PyTorch's bounded activations.
fn bounded(x: Expr<'_>, low: f64, high: f64) -> Expr<'_> {
    x.le(low).select(low, x.ge(high).select(high, x))
}

/// The second operand of a sum or difference, times `alpha`.
struct Scaled<R: Runtime>(Var<R>);

fn scaled<R: Runtime>(c: &Call<'_, R>) -> Result<Scaled<R>> {
    let alpha = c.attrs.f64("alpha", 1.0)?;
    Ok(Scaled(if alpha == 1.0 { c.x(1)?.clone() } else { c.x(1)?.mul(alpha)? }))
}

impl<R: Runtime> Scaled<R> {
    fn add_to(&self, x: &Var<R>) -> Result<Var<R>> {
        x.add(&self.0)
    }

    fn subtract_from(&self, x: &Var<R>) -> Result<Var<R>> {
        x.sub(&self.0)
    }
}

/// Clamps the input; an absent bound is infinite.
fn clamp<R: Runtime>(c: &Call<'_, R>) -> Result<Vec<Var<R>>> {
    let (low, high) = (c.attrs.f64("min", f64::NEG_INFINITY)?, c.attrs.f64("max", f64::INFINITY)?);
    one(c.x(0)?.clamp(low, high))
}

fn softplus<R: Runtime>(x: &Var<R>, beta: f64, threshold: f64) -> Result<Vec<Var<R>>> {
    if (beta, threshold) == (1.0, 20.0) {
        return one(x.softplus());
    }
    one(x.map(|x| {
        let linear = (x * beta).gt(threshold);
        linear.select(x, linear.select(0.0, x * beta).exp().log1p() / beta)
    }))
}
