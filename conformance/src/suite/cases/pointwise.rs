//! Elementwise ops.

use numcore::{Runtime, fused::NnOps, ops::PointwiseOps};

use crate::suite::{
    case::{CaseFn, OpCase, case},
    sample::{centered, real, spread, truth},
};

pub(super) fn cases<R: Runtime>() -> Vec<OpCase<R>> {
    let mut cases = Vec::new();
    // Functions defined everywhere; kinks, if any, are at 0, ±3 or the given bounds.
    let smooth: [(&str, CaseFn<R>); 50] = [
        ("neg", |x| x[0].neg()),
        ("abs", |x| x[0].abs()),
        ("exp", |x| x[0].exp()),
        ("expm1", |x| x[0].expm1()),
        ("exp2", |x| x[0].exp2()),
        ("sin", |x| x[0].sin()),
        ("cos", |x| x[0].cos()),
        ("atan", |x| x[0].atan()),
        ("sinh", |x| x[0].sinh()),
        ("cosh", |x| x[0].cosh()),
        ("tanh", |x| x[0].tanh()),
        ("erf", |x| x[0].erf()),
        ("square", |x| x[0].square()),
        ("sigmoid", |x| x[0].sigmoid()),
        ("relu", |x| x[0].relu()),
        ("silu", |x| x[0].silu()),
        ("gelu", |x| x[0].gelu()),
        ("gelu_tanh", |x| x[0].gelu_tanh()),
        ("log_sigmoid", |x| x[0].log_sigmoid()),
        ("softplus", |x| x[0].softplus()),
        ("softsign", |x| x[0].softsign()),
        ("mish", |x| x[0].mish()),
        ("hardswish", |x| x[0].hardswish()),
        ("hardsigmoid", |x| x[0].hardsigmoid()),
        ("selu", |x| x[0].selu()),
        ("elu", |x| x[0].elu(0.7)),
        ("leaky_relu", |x| x[0].leaky_relu(0.1)),
        ("clamp", |x| x[0].clamp(-1.0, 2.0)),
        ("erfc", |x| x[0].erfc()),
        ("asinh", |x| x[0].asinh()),
        ("relu6", |x| x[0].mul(2.0)?.relu6()),
        ("tanhshrink", |x| x[0].tanhshrink()),
        ("celu", |x| x[0].celu(1.7)),
        ("selu_with", |x| x[0].selu_with(1.5, 0.8)),
        ("hardsigmoid_with", |x| x[0].hardsigmoid_with(0.2, 0.55)),
        ("hardtanh", |x| x[0].hardtanh(-1.0, 2.0)),
        ("softplus_with", |x| x[0].softplus_with(1.5, 3.0)),
        ("softshrink", |x| x[0].softshrink(0.5)),
        ("hardshrink", |x| x[0].hardshrink(0.5)),
        ("threshold", |x| x[0].threshold(1.0, -2.0)),
        ("add a number", |x| x[0].add(2.5)),
        ("sub a number", |x| x[0].sub(2.5)),
        ("mul by a number", |x| x[0].mul(-2.5)),
        ("div by a number", |x| x[0].div(2.5)),
        ("rem by a number", |x| x[0].rem(1.0)),
        ("maximum with a number", |x| x[0].maximum(1.0)),
        ("minimum with a number", |x| x[0].minimum(1.0)),
        ("pow 2", |x| x[0].pow(2.0)),
        ("pow 3", |x| x[0].pow(3.0)),
        ("map", |x| x[0].map(|x| x * x / (x.abs() + 1.0))),
    ];
    // Where tanh is near 1, the derivative 1 − tanh² keeps few of its digits.
    let slack = |name: &str| if name == "gelu_tanh" { 2.0 } else { 1.0 };
    cases.extend(smooth.map(|(name, f)| case(name, [spread(&[3, 7], -4.2, 4.2)], f).slack(slack(name))));
    let positive: [(&str, CaseFn<R>); 8] = [
        ("log", |x| x[0].log()),
        ("log1p", |x| x[0].log1p()),
        ("log2", |x| x[0].log2()),
        ("sqrt", |x| x[0].sqrt()),
        ("rsqrt", |x| x[0].rsqrt()),
        ("recip", |x| x[0].recip()),
        ("pow -1.5", |x| x[0].pow(-1.5)),
        ("pow 0", |x| x[0].pow(0.0)),
    ];
    cases.extend(positive.map(|(name, f)| case(name, [spread(&[2, 5], 0.3, 4.0)], f).slack(4.0)));
    let bounded: [(&str, CaseFn<R>); 4] =
        [("asin", |x| x[0].asin()), ("acos", |x| x[0].acos()), ("tan", |x| x[0].tan()), ("atanh", |x| x[0].atanh())];
    cases.extend(bounded.map(|(name, f)| case(name, [spread(&[9], -0.9, 0.9)], f).slack(4.0)));
    cases.push(case("acosh", [spread(&[9], 1.3, 6.0)], |x| x[0].acosh()).slack(4.0));
    cases.extend(two());
    cases
}

/// Cases of two operands, with and without broadcasting, and of more operands.
fn two<R: Runtime>() -> Vec<OpCase<R>> {
    let mut cases = Vec::new();
    let binary: [(&str, CaseFn<R>); 8] = [
        ("add", |x| x[0].add(&x[1])),
        ("sub", |x| x[0].sub(&x[1])),
        ("mul", |x| x[0].mul(&x[1])),
        ("div", |x| x[0].div(&x[1])),
        ("maximum", |x| x[0].maximum(&x[1])),
        ("minimum", |x| x[0].minimum(&x[1])),
        ("atan2", |x| x[0].atan2(&x[1])),
        ("pow", |x| x[0].pow(&x[1])),
    ];
    let shapes: [(&[usize], &[usize]); 6] =
        [(&[3, 4], &[3, 4]), (&[2, 3, 4], &[4]), (&[4, 1], &[1, 3]), (&[], &[3]), (&[2, 1, 3], &[4, 1]), (&[1], &[])];
    for (name, f) in binary {
        for (a, b) in shapes {
            // Bases of powers and divisors are positive, and no two values that are compared are near.
            let inputs = [spread(a, 0.4, 3.1), spread(b, 0.5, 2.8)];
            cases.push(case(&format!("{name} {a:?} {b:?}"), inputs, f).slack(4.0));
        }
    }
    let others: Vec<OpCase<R>> = vec![
        case("rem", [spread(&[3, 4], -5.3, 5.9), spread(&[3, 4], 0.8, 2.2)], |x| x[0].rem(&x[1])).once().slack(8.0),
        case("lerp", [centered(&[3, 4]), centered(&[3, 4]), real(&[4], 0.0, 1.0)], |x| x[0].lerp(&x[1], &x[2])),
        case("where", [truth(&[3, 4]), centered(&[3, 4]), centered(&[4])], |x| x[1].where_cond(&x[0], &x[2])).once(),
        case("where a number", [truth(&[4]), centered(&[3, 4])], |x| x[1].where_cond(&x[0], 0.5)).once(),
        case("masked_fill", [centered(&[3, 4]), truth(&[3, 1])], |x| x[0].masked_fill(&x[1], -1.5)).once(),
        case("x + x", [centered(&[5])], |x| x[0].add(&x[0])).once(),
        case("x · x", [centered(&[5])], |x| x[0].mul(&x[0])),
        case("prelu", [centered(&[2, 3, 2]), centered(&[3])], |x| x[0].prelu(&x[1])),
        case("prelu of one weight", [centered(&[2, 3]), centered(&[1])], |x| x[0].prelu(&x[1])),
        case("prelu of rank 0", [centered(&[]), centered(&[1])], |x| x[0].prelu(&x[1])),
        case("glu", [centered(&[2, 4, 3])], |x| x[0].glu(1)),
        case("softmin", [centered(&[2, 4])], |x| x[0].softmin(-1)).slack(8.0),
        case("swiglu", [centered(&[3, 5]), centered(&[3, 5])], |x| x[0].swiglu(&x[1])),
        case("dropout", [centered(&[4, 9])], |x| x[0].dropout(0.3, 77)).once(),
        case("a chain", [centered(&[2, 6]), real(&[6], 0.5, 1.5)], |x| {
            x[0].sin()?.mul(&x[1])?.exp()?.add(&x[0])?.tanh()?.div(&x[1])
        }),
    ];
    cases.extend(others);
    cases
}
