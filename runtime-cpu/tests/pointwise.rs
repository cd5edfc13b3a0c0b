//! Pointwise programs against host loops: every operation and type, operands in every layout, outputs of every kind.

mod common;

use common::*;
use numcore::{
    DType, Scalar, Tensor, TensorMut,
    ops::{Op, Pointwise, PointwiseOps, Rule, ViewOp, ViewOps, update},
    pointwise::Program,
    rng::philox4x32_10,
};
use runtime_cpu::Cpu;

type Un = (&'static str, fn(&T) -> numcore::Result<T>, fn(f64) -> f64);
type Bin = (&'static str, fn(&T, &T) -> numcore::Result<T>, fn(f64, f64) -> f64);

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn sign(x: f64) -> f64 {
    if x == 0.0 { x } else { x.signum() }
}

fn floor_rem(x: f64, y: f64) -> f64 {
    x - y * (x / y).floor()
}

const UNARY: [Un; 28] = [
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
    ("erf", |x| x.erf(), libm::erf),
    ("floor", |x| x.floor(), f64::floor),
    ("ceil", |x| x.ceil(), f64::ceil),
    ("round", |x| x.round(), f64::round_ties_even),
    ("trunc", |x| x.trunc(), f64::trunc),
    ("sigmoid", |x| x.sigmoid(), sigmoid),
    ("gelu", |x| x.gelu(), |x| 0.5 * x * (1.0 + libm::erf(x / 2f64.sqrt()))),
    ("silu", |x| x.silu(), |x| x * sigmoid(x)),
];

const BINARY: [Bin; 14] = [
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
];

#[test]
fn unary_operations_of_floats() {
    let cpu = Cpu::with_threads(2);
    for dtype in FLOATS {
        let x = &views(&cpu, dtype, &[3, 87], 1)[1];
        for (name, op, reference) in UNARY {
            let expected: Vec<f64> = x.values.iter().map(|&x| reference(x)).collect();
            close(&op(&x.tensor).unwrap(), &expected, 2.0 * tolerance(dtype), &format!("{name} of {}", x.what));
        }
    }
}

#[test]
fn binary_operations_of_floats() {
    let cpu = Cpu::with_threads(2);
    for dtype in FLOATS {
        let (a, b) = (&views(&cpu, dtype, &[5, 61], 1)[0], &views(&cpu, dtype, &[5, 61], 2)[4]);
        for (name, op, reference) in BINARY {
            let expected: Vec<f64> = a.values.iter().zip(&b.values).map(|(&a, &b)| reference(a, b)).collect();
            // A remainder moves by the rounding of the operands' quotient.
            let tolerance = if name == "rem" { 16.0 } else { 4.0 } * tolerance(dtype);
            close(&op(&a.tensor, &b.tensor).unwrap(), &expected, tolerance, &format!("{name} of {}", a.what));
        }
    }
}

#[test]
fn operations_of_integers_wrap_and_never_trap() {
    let cpu = Cpu::with_threads(1);
    let edge = [i32::MIN, -7, -1, 0, 1, 2, 5, i32::MAX];
    let pairs: Vec<(i32, i32)> = edge.iter().flat_map(|&a| edge.iter().map(move |&b| (a, b))).collect();
    let side = |f: fn(&(i32, i32)) -> i32| Tensor::from_vec(&cpu, pairs.iter().map(f).collect::<Vec<i32>>()).unwrap();
    let (a, b) = (side(|p| p.0), side(|p| p.1));
    let check = |name: &str, got: numcore::Result<T>, f: fn(i32, i32) -> i32| {
        let expected: Vec<i32> = pairs.iter().map(|&(a, b)| f(a, b)).collect();
        assert_eq!(got.unwrap().to_vec::<i32>().unwrap(), expected, "{name}");
    };
    check("add", a.add(&b), i32::wrapping_add);
    check("sub", a.sub(&b), i32::wrapping_sub);
    check("mul", a.mul(&b), i32::wrapping_mul);
    check("div", a.div(&b), |a, b| if b == 0 { 0 } else { a.wrapping_div(b) });
    check("rem", a.rem(&b), |a, b| {
        let r = a.checked_rem(b).unwrap_or(0);
        if r != 0 && (r < 0) != (b < 0) { r + b } else { r }
    });
    check("max", a.maximum(&b), i32::max);
    check("neg", a.neg(), |a, _| a.wrapping_neg());
    check("abs", a.abs(), |a, _| a.wrapping_abs());
    check("and", a.logical_and(&b), |a, b| a & b);
    check("xor", a.logical_xor(&b), |a, b| a ^ b);
    let bytes = Tensor::from_vec(&cpu, vec![250u8, 5, 0]).unwrap();
    assert_eq!(bytes.add(&bytes).unwrap().to_vec::<u8>().unwrap(), [244, 10, 0]);
}

#[test]
fn every_layout_and_shape() {
    let cpu = Cpu::with_threads(2);
    for shape in SHAPES {
        for dtype in [DType::F32, DType::F16, DType::I64, DType::U8] {
            let (left, right) = (views(&cpu, dtype, shape, 3), views(&cpu, dtype, shape, 4));
            for (a, b) in left.iter().zip(right.iter().cycle().skip(3)) {
                let expected: Vec<f64> = a.values.iter().zip(&b.values).map(|(a, b)| round_to(dtype, a + b)).collect();
                let sum = a.tensor.add(&b.tensor).unwrap();
                let expected: Vec<f64> =
                    if dtype == DType::U8 { expected.iter().map(|x| x % 256.0).collect() } else { expected };
                close(&sum, &expected, 0.0, &format!("{} + {}", a.what, b.what));
            }
        }
    }
}

#[test]
fn copies_of_every_layout_and_type() {
    let cpu = Cpu::with_threads(2);
    for dtype in DType::ALL {
        for shape in SHAPES {
            for x in views(&cpu, dtype, shape, 5) {
                close(&x.tensor.copy().unwrap(), &x.values, 0.0, &x.what);
            }
        }
    }
}

#[test]
fn casts_between_all_types() {
    let cpu = Cpu::with_threads(1);
    for from in DType::ALL {
        let (x, values) = store(&cpu, from, &[9], &[0.0, 1.0, -1.0, 2.5, 100.0, 255.0, 3.99, 1e4, -7.5]);
        for to in DType::ALL {
            let (_, expected) = store(&cpu, to, &[9], &values);
            // Integers wrap in narrower types; a negative one has no saturated form to compare with.
            let wraps = from.is_int() && to.is_int();
            let expected: Vec<f64> =
                expected.iter().zip(&values).map(|(&e, &v)| if wraps { wrapped(v, to) } else { e }).collect();
            close(&x.to_dtype(to).unwrap(), &expected, 0.0, &format!("{from} to {to}"));
        }
    }
    let odd = Tensor::from_vec(&cpu, vec![f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 3e9, -3e9]).unwrap();
    assert_eq!(odd.to_dtype(DType::I32).unwrap().to_vec::<i32>().unwrap(), [0, i32::MAX, i32::MIN, i32::MAX, i32::MIN]);
    assert_eq!(odd.to_dtype(DType::Bool).unwrap().to_vec::<bool>().unwrap(), [true; 5]);
}

fn wrapped(x: f64, to: DType) -> f64 {
    let x = x as i64;
    match to {
        DType::I32 => f64::from(x as i32),
        DType::U32 => f64::from(x as u32),
        DType::U8 => f64::from(x as u8),
        _ => x as f64,
    }
}

#[test]
fn selection_and_masks() {
    let cpu = Cpu::with_threads(2);
    for dtype in DType::ALL {
        for shape in [&[6][..], &[40, 70]] {
            let c = &views(&cpu, DType::Bool, shape, 8)[1];
            let (a, b) = (&views(&cpu, dtype, shape, 9)[0], &views(&cpu, dtype, shape, 10)[4]);
            let chosen = a.tensor.where_cond(&c.tensor, &b.tensor).unwrap();
            let expected: Vec<f64> =
                (0..a.values.len()).map(|i| if c.values[i] != 0.0 { a.values[i] } else { b.values[i] }).collect();
            close(&chosen, &expected, 0.0, &a.what);
        }
    }
}

#[test]
fn outputs_may_be_added_to() {
    let cpu = Cpu::with_threads(2);
    for dtype in FLOATS.into_iter().chain(INTS) {
        for shape in [&[3, 5][..], &[66, 130], &[5000]] {
            let (x, y) = (&views(&cpu, dtype, shape, 11)[1], &views(&cpu, dtype, shape, 12)[3]);
            let mut slot = TensorMut::alloc(&cpu, *x.tensor.shape(), dtype).unwrap();
            slot.accumulate(&Op::identity(), &[&x.tensor]).unwrap();
            slot.accumulate(&Op::identity(), &[&y.tensor]).unwrap();
            let expected: Vec<f64> = x.values.iter().zip(&y.values).map(|(x, y)| round_to(dtype, x + y)).collect();
            close(&slot.freeze().unwrap(), &expected, 0.0, &x.what);
        }
    }
}

#[test]
fn outputs_may_be_views() {
    let cpu = Cpu::with_threads(2);
    for dtype in [DType::F32, DType::BF16, DType::I64] {
        let shape = [60, 50];
        let x = &views(&cpu, dtype, &[50, 60], 13)[0];
        let mut slot = TensorMut::alloc(&cpu, shape.into(), dtype).unwrap();
        let turn = [ViewOp::Permute([1, 0].as_slice().into())];
        slot.accumulate_view(&turn, &Op::identity(), &[&x.tensor]).unwrap();
        slot.accumulate_view(&turn, &Op::identity(), &[&x.tensor]).unwrap();
        let expected: Vec<f64> = (0..3000).map(|i| 2.0 * x.values[i % 50 * 60 + i / 50]).collect();
        close(&slot.freeze().unwrap(), &expected, 0.0, &x.what);
    }
}

#[test]
fn several_outputs_and_old_values() {
    let step = Program::new("step", |[w, m, g], [lr]| {
        let m = m * 0.5 + g;
        [w - m * lr, m]
    });
    let swap = Program::new("swap", |[a, b], []| [b, a]);
    for dtype in [DType::F32, DType::F64, DType::BF16] {
        let cpu = Cpu::with_threads(2);
        for n in [3, 1000, 100_000] {
            let parts = [0, 1, 2].map(|i| views(&cpu, dtype, &[n], 20 + i)[0].clone());
            let [mut w, mut m] = [0, 1].map(|i: usize| parts[i].tensor.copy().unwrap().try_mut().ok().unwrap());
            update(&step, &[&parts[2].tensor], &[0.25.into()], &mut [&mut w, &mut m]).unwrap();
            update(&swap, &[], &[], &mut [&mut w, &mut m]).unwrap();
            let new_m: Vec<f64> = (0..n).map(|i| parts[1].values[i] * 0.5 + parts[2].values[i]).collect();
            let new_w: Vec<f64> = (0..n).map(|i| parts[0].values[i] - new_m[i] * 0.25).collect();
            close(&w.freeze().unwrap(), &new_m, tolerance(dtype), "m");
            close(&m.freeze().unwrap(), &new_w, tolerance(dtype), "w");
        }
    }
}

#[test]
fn positions_and_random_bits_follow_row_major_order() {
    let cpu = Cpu::with_threads(2);
    let turned =
        Program::build("positions", 1, 1, |b, x, s| vec![x[0] + b.index() * s[0], b.random(0, 3).cast(DType::I64)]);
    for shape in SHAPES {
        for x in views(&cpu, DType::I64, shape, 30) {
            let outs = x.tensor.apply_program_all(&turned, &[], &[Scalar::U64(7)]).unwrap();
            let positions: Vec<f64> = x.values.iter().enumerate().map(|(i, v)| v + 7.0 * i as f64).collect();
            let bits: Vec<f64> = (0..x.values.len() as u32)
                .map(|i| f64::from(philox4x32_10([i / 4, 0, 3, 0], [7, 0])[i as usize % 4]))
                .collect();
            close(&outs[0], &positions, 0.0, &x.what);
            close(&outs[1], &bits, 0.0, &x.what);
        }
    }
}

#[test]
fn nan_and_signed_zero_survive() {
    let cpu = Cpu::with_threads(1);
    let x = Tensor::from_vec(&cpu, vec![f32::NAN, -0.0, f32::INFINITY, 1.0]).unwrap();
    let one = Tensor::from_vec(&cpu, vec![1f32; 4]).unwrap();
    assert!(x.maximum(&one).unwrap().to_vec::<f32>().unwrap()[0].is_nan());
    assert!(one.minimum(&x).unwrap().to_vec::<f32>().unwrap()[0].is_nan());
    assert!(x.mul(1.0).unwrap().to_vec::<f32>().unwrap()[1].is_sign_negative());
    assert!(x.mul(0.0).unwrap().to_vec::<f32>().unwrap()[2].is_nan());
}

#[test]
fn a_fill_reaches_every_element_of_every_type() {
    let cpu = Cpu::with_threads(2);
    for dtype in DType::ALL {
        for n in [0, 1, 5, 10_000] {
            close(&Tensor::ones(&cpu, [n], dtype).unwrap(), &vec![1.0; n], 0.0, "ones");
        }
    }
}

#[test]
fn wrong_types_are_errors() {
    let cpu = Cpu::with_threads(1);
    let (x, _) = store(&cpu, DType::Bool, &[2], &[0.0, 1.0]);
    assert!(x.add(&x).is_err() && x.exp().is_err());
    let (i, _) = store(&cpu, DType::I64, &[2], &[0.0, 1.0]);
    assert!(i.exp().is_err());
    assert!(Op::from(Pointwise::identity()).infer(&[]).is_err());
}

/// Outputs beyond any cache take another way to memory.
#[test]
fn large_outputs_are_whole() {
    let n = (8 << 20) + 37;
    let values: Vec<f32> = (0..n).map(|i| (i % 1021) as f32).collect();
    for cpu in runtimes() {
        let x = Tensor::from_slice(&cpu, [n], &values).unwrap();
        let sum = x.narrow(0, 1, n - 1).unwrap().add(&x.narrow(0, 0, n - 1).unwrap()).unwrap().to_vec::<f32>().unwrap();
        let wrong = sum.iter().zip(values.windows(2)).position(|(sum, pair)| *sum != pair[0] + pair[1]);
        assert_eq!((wrong, sum.len()), (None, n - 1), "{cpu:?}");
    }
}
