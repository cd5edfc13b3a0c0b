//! Pointwise functions: every float type against functions of `f64`, integers at the ends of their ranges.

use numcore::{
    Result, Runtime, Tensor,
    ops::{Op, Pointwise, PointwiseOps, Rule},
    pointwise::{Number, Unary},
};

use super::known::{FLOATS, InMemory, Known, tolerance};
use crate::suite::{
    dtypes::computed,
    report::{Section, Verdict},
};

/// A function of one tensor, and the same function of one number.
type UnaryRow<R> = (&'static str, fn(&Tensor<R>) -> Result<Tensor<R>>, fn(f64) -> f64);
/// A function of two tensors, and the same function of two numbers.
type BinaryRow<R> = (&'static str, fn(&Tensor<R>, &Tensor<R>) -> Result<Tensor<R>>, fn(f64, f64) -> f64);

pub(crate) fn functions<R: Runtime>(rt: &R) -> Section {
    let mut section = Section::new("functions");
    let s = &mut section;
    for dtype in computed(rt, s, "functions", FLOATS) {
        for (name, f, host) in unary() {
            s.check(format!("{name} of {dtype}"), || {
                let x = Known::drawn(rt, dtype, &[3, 87], 1, InMemory::Transposed)?;
                let want: Vec<f64> = x.values.iter().map(|&x| host(x)).collect();
                x.expect(name, &f(&x.tensor)?, &want, 2.0 * tolerance(dtype))
            });
        }
        for (name, f, host) in binary() {
            s.check(format!("{name} of {dtype}"), || {
                let a = Known::drawn(rt, dtype, &[5, 61], 1, InMemory::Dense)?;
                let b = Known::drawn(rt, dtype, &[5, 61], 2, InMemory::RepeatedRows)?;
                let want: Vec<f64> = a.values.iter().zip(&b.values).map(|(&a, &b)| host(a, b)).collect();
                // A remainder moves by the rounding of the operands' quotient.
                let bound = if name == "rem" { 16.0 } else { 4.0 } * tolerance(dtype);
                a.expect(name, &f(&a.tensor, &b.tensor)?, &want, bound)
            });
        }
    }
    for (name, f, host) in integers() {
        s.check(format!("{name} of i32 wraps and never traps"), || wraps(rt, f, host));
    }
    s.check("sums of u8 wrap", || {
        let bytes = Tensor::from_slice(rt, [3], &[250u8, 5, 0])?;
        let sums = bytes.add(&bytes)?.to_vec::<u8>()?;
        Ok(Verdict::when(sums == [244, 10, 0], || format!("{sums:?}")))
    });
    s.check("NaN and the sign of zero", || signs(rt));
    s.check("wrong types are errors", || wrong_types(rt));
    section
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn sign(x: f64) -> f64 {
    if x == 0.0 { x } else { x.signum() }
}

fn floor_rem(x: f64, y: f64) -> f64 {
    x - y * (x / y).floor()
}

fn erf(x: f64) -> f64 {
    Unary::Erf.eval(Number::Float(x)).to_f64()
}

fn unary<R: Runtime>() -> [UnaryRow<R>; 28] {
    [
        ("neg", |x| x.neg(), |x| -x),
        ("abs", |x| x.abs(), f64::abs),
        ("sign", |x| x.sign(), sign),
        ("exp", |x| x.exp(), f64::exp),
        ("expm1", |x| x.expm1(), f64::exp_m1),
        ("exp2", |x| x.exp2(), f64::exp2),
        ("log", |x| x.abs()?.log(), |x| x.abs().ln()),
        ("log1p", |x| x.abs()?.log1p(), |x| x.abs().ln_1p()),
        ("log2", |x| x.abs()?.log2(), |x| x.abs().log2()),
        ("sqrt", |x| x.abs()?.sqrt(), |x| x.abs().sqrt()),
        ("rsqrt", |x| x.abs()?.rsqrt(), |x| 1.0 / x.abs().sqrt()),
        ("recip", |x| x.recip(), f64::recip),
        ("sin", |x| x.sin(), f64::sin),
        ("cos", |x| x.cos(), f64::cos),
        ("asin", |x| x.asin(), f64::asin),
        ("acos", |x| x.acos(), f64::acos),
        ("atan", |x| x.atan(), f64::atan),
        ("sinh", |x| x.sinh(), f64::sinh),
        ("cosh", |x| x.cosh(), f64::cosh),
        ("tanh", |x| x.tanh(), f64::tanh),
        ("erf", |x| x.erf(), erf),
        ("floor", |x| x.floor(), f64::floor),
        ("ceil", |x| x.ceil(), f64::ceil),
        ("round", |x| x.round(), f64::round_ties_even),
        ("trunc", |x| x.trunc(), f64::trunc),
        ("sigmoid", |x| x.sigmoid(), sigmoid),
        ("gelu", |x| x.gelu(), |x| 0.5 * x * (1.0 + erf(x / 2f64.sqrt()))),
        ("silu", |x| x.silu(), |x| x * sigmoid(x)),
    ]
}

fn binary<R: Runtime>() -> [BinaryRow<R>; 14] {
    [
        ("add", |a, b| a.add(b), |a, b| a + b),
        ("sub", |a, b| a.sub(b), |a, b| a - b),
        ("mul", |a, b| a.mul(b), |a, b| a * b),
        ("div", |a, b| a.div(b), |a, b| a / b),
        ("rem", |a, b| a.rem(b), floor_rem),
        ("pow", |a, b| a.abs()?.pow(b), |a, b| a.abs().powf(b)),
        ("atan2", |a, b| a.atan2(b), f64::atan2),
        ("maximum", |a, b| a.maximum(b), f64::max),
        ("minimum", |a, b| a.minimum(b), f64::min),
        ("eq", |a, b| a.eq(b), |a, b| f64::from(a == b)),
        ("ne", |a, b| a.ne(b), |a, b| f64::from(a != b)),
        ("lt", |a, b| a.lt(b), |a, b| f64::from(a < b)),
        ("le", |a, b| a.le(b), |a, b| f64::from(a <= b)),
        ("gt", |a, b| a.gt(b), |a, b| f64::from(a > b)),
    ]
}

/// A function of two tensors, and the same function of two integers.
type IntegerRow<R> = (&'static str, fn(&Tensor<R>, &Tensor<R>) -> Result<Tensor<R>>, fn(i32, i32) -> i32);

fn integers<R: Runtime>() -> [IntegerRow<R>; 10] {
    [
        ("add", |a, b| a.add(b), i32::wrapping_add),
        ("sub", |a, b| a.sub(b), i32::wrapping_sub),
        ("mul", |a, b| a.mul(b), i32::wrapping_mul),
        ("div", |a, b| a.div(b), |a, b| if b == 0 { 0 } else { a.wrapping_div(b) }),
        (
            "rem",
            |a, b| a.rem(b),
            |a, b| {
                let r = a.checked_rem(b).unwrap_or(0);
                if r != 0 && (r < 0) != (b < 0) { r + b } else { r }
            },
        ),
        ("maximum", |a, b| a.maximum(b), i32::max),
        ("neg", |a, _| a.neg(), |a, _| a.wrapping_neg()),
        ("abs", |a, _| a.abs(), |a, _| a.wrapping_abs()),
        ("logical_and", |a, b| a.logical_and(b), |a, b| a & b),
        ("logical_xor", |a, b| a.logical_xor(b), |a, b| a ^ b),
    ]
}

fn wraps<R: Runtime>(
    rt: &R,
    f: fn(&Tensor<R>, &Tensor<R>) -> Result<Tensor<R>>,
    host: fn(i32, i32) -> i32,
) -> Result<Verdict> {
    let ends = [i32::MIN, -7, -1, 0, 1, 2, 5, i32::MAX];
    let (left, right): (Vec<i32>, Vec<i32>) = ends.iter().flat_map(|&a| ends.map(|b| (a, b))).unzip();
    let n = left.len();
    let got = f(&Tensor::from_slice(rt, [n], &left)?, &Tensor::from_slice(rt, [n], &right)?)?.to_vec::<i32>()?;
    Verdict::all((0..n).map(|i| {
        let (a, b, want) = (left[i], right[i], host(left[i], right[i]));
        Ok(Verdict::when(got[i] == want, || format!("of {a} and {b} it is {}, expected {want}", got[i])))
    }))
}

fn signs<R: Runtime>(rt: &R) -> Result<Verdict> {
    let x = Tensor::from_slice(rt, [4], &[f32::NAN, -0.0, f32::INFINITY, 1.0])?;
    let one = Tensor::from_slice(rt, [4], &[1f32; 4])?;
    let at = |i: usize, t: Result<Tensor<R>>| Ok(t?.to_vec::<f32>()?[i]);
    let nan: [Result<f32>; 3] = [at(0, x.maximum(&one)), at(0, one.minimum(&x)), at(2, x.mul(0.0))];
    let negative: f32 = at(1, x.mul(1.0))?;
    let nan = nan.into_iter().collect::<Result<Vec<f32>>>()?;
    let right = nan.iter().all(|x| x.is_nan()) && negative.is_sign_negative();
    Ok(Verdict::when(right, || format!("{nan:?} in place of NaN, {negative:?} in place of -0.0")))
}

fn wrong_types<R: Runtime>(rt: &R) -> Result<Verdict> {
    let truth = Tensor::from_slice(rt, [2], &[false, true])?;
    let whole = Tensor::from_slice(rt, [2], &[0i64, 1])?;
    let refused = [truth.add(&truth).is_err(), truth.exp().is_err(), whole.exp().is_err()];
    let no_operand = Op::from(Pointwise::identity()).infer(&[]).is_err();
    Ok(Verdict::when(refused == [true; 3] && no_operand, || format!("{refused:?} {no_operand}")))
}
