//! Results of ops, and the values of a program that are equal for all elements.

use super::*;
use crate::rng::Philox;

fn value(f: impl for<'b> FnOnce(Expr<'b>) -> Expr<'b>, dtype: DType, x: Number) -> Number {
    let p = Program::new("value", |[x], []| [f(x)]);
    p.eval(&p.resolve(&[dtype], &[]).unwrap(), &[x], &[], 0)[0]
}

#[test]
fn floats_are_rounded_to_their_type() {
    let third = value(|x| x / 3.0, DType::F32, Number::Float(1.0));
    assert_eq!(third, Number::Float(f64::from(1.0f32 / 3.0)));
    assert_eq!(value(|x| x / 3.0, DType::BF16, Number::Float(1.0)), Number::Float(0.333_984_375));
    // f16 and bf16 are computed in f32: 1 + 2⁻⁹ is not a bf16 value, but 2⁻⁹ is.
    let kept = value(|x| x + 2f64.powi(-9) - x, DType::BF16, Number::Float(1.0));
    assert_eq!(kept, Number::Float(2f64.powi(-9)));
    let rounded =
        value(|x| (x.cast(DType::F32) + 2f64.powi(-9)).cast(DType::BF16) - x, DType::BF16, Number::Float(1.0));
    assert_eq!(rounded, Number::Float(0.0));
    assert_eq!(value(|x| x * x, DType::F32, Number::Float(1e30)), Number::Float(f64::INFINITY));
}

#[test]
fn integers_wrap_and_never_fail() {
    let int = |f: Write, d: DType, x: i64| value(f, d, Number::Int(x)).to_i64();
    assert_eq!(int(|x| x + 1, DType::I32, i64::from(i32::MAX)), i64::from(i32::MIN));
    assert_eq!(int(|x| -x, DType::U8, 1), 255);
    assert_eq!(int(|x| x * x, DType::U32, 0xffff_ffff), 1);
    assert_eq!([int(|x| x / 0, DType::I64, 5), int(|x| x % 0, DType::I64, 5)], [0, 0]);
    assert_eq!(int(|x| x / -1, DType::I64, i64::MIN), i64::MIN);
    assert_eq!([int(|x| x % 3, DType::I64, -7), int(|x| x % -3, DType::I64, 7)], [2, -2]);
    assert_eq!(
        [int(|x| x << 33, DType::I32, 1), int(|x| x >> 1, DType::I32, -2), int(|x| x >> 31, DType::U32, 1 << 31)],
        [2, -1, 1]
    );
    assert_eq!(
        [int(|x| x.pow(3), DType::I64, -3), int(|x| x.pow(-2), DType::I64, 3), int(|x| x.pow(-3), DType::I64, -1)],
        [-27, 0, -1]
    );
    assert_eq!(
        int(|x| x.pow(i64::MAX), DType::I64, 3),
        3i64.wrapping_pow(u32::MAX).wrapping_mul(int(|x| x.pow(i64::MAX - (1 << 32) + 1), DType::I64, 3))
    );
}

#[test]
fn nan_and_zeros_go_where_they_should() {
    let float = |f: Write, x: f64| value(f, DType::F64, Number::Float(x)).to_f64();
    let propagating: [Write; 5] = [|x| x.relu(), |x| x.max(1.0), |x| x.min(1.0), |x| x.clamp(0.0, 1.0), |x| x.sign()];
    assert!(propagating.into_iter().all(|f| float(f, f64::NAN).is_nan()));
    assert_eq!(float(|x| x.sign(), -0.0).to_bits(), 0);
    assert_eq!([float(|x| x.round(), 2.5), float(|x| x.round(), -0.5)], [2.0, -0.0]);
    assert_eq!([float(|x| x % 3.0, -1.0), float(|x| x % -3.0, 1.0), float(|x| x % 0.1, 1e17)], [2.0, -2.0, 1e17 % 0.1]);
    assert_eq!(float(|x| x.clamp(2.0, 1.0), 0.0), 1.0);
}

#[test]
fn casts_truncate_saturate_and_wrap() {
    let cast = |from: DType, x: Number, to: DType| {
        let p = Program::new("cast", |[x], []| [x.cast(to)]);
        p.eval(&p.resolve(&[from], &[]).unwrap(), &[x], &[], 0)[0]
    };
    assert_eq!(cast(DType::F32, Number::Float(-2.7), DType::I32), Number::Int(-2));
    assert_eq!(cast(DType::F32, Number::Float(300.0), DType::U8), Number::Int(255));
    assert_eq!(cast(DType::F64, Number::Float(f64::NAN), DType::I64), Number::Int(0));
    assert_eq!(cast(DType::I64, Number::Int(300), DType::U8), Number::Int(44));
    assert_eq!(cast(DType::I64, Number::Int(256), DType::Bool), Number::Bool(true));
    assert_eq!(cast(DType::F32, Number::Float(f64::NAN), DType::Bool), Number::Bool(true));
    assert_eq!(cast(DType::Bool, Number::Bool(true), DType::BF16), Number::Float(1.0));
}

#[test]
fn sigmoid_keeps_its_digits() {
    let program = Program::new("sigmoid", |[x], []| [x.sigmoid()]);
    for x in [-80.0, -30.0, -5.0, 0.0, 5.0, 30.0] {
        let want = 1.0 / (1.0 + f64::exp(-x));
        let got = run(&program, DType::F32, &[x], &[])[0];
        assert!((got / want - 1.0).abs() < 3e-7, "sigmoid({x}) = {got}, not {want}");
    }
}

#[test]
fn random_bits_are_the_host_generators() {
    let p = Program::build("bits", 0, 2, |b, _, _| vec![b.random(1, 5)]);
    let typed = p.resolve(&[], &[]).unwrap();
    let seed = 0x0123_4567_89ab_cdef_u64;
    let mut host = Philox::new(seed, 5);
    for i in 0..10 {
        let bits = p.eval(&typed, &[], &[0.0.into(), seed.into()], i)[0];
        assert_eq!(bits, Number::Int(i64::from(host.next_u32())));
    }
}

/// AdamW's bias corrections depend on scalars alone.
#[test]
fn what_scalars_decide_runs_once() {
    let p = Program::new("adam", |[g, m], [beta, t, lr]| {
        let m = m * beta + g * (1.0 - beta);
        [m, m * (lr / (1.0 - beta.pow(t)))]
    });
    let typed = p.resolve(&[DType::F32; 2], &[]).unwrap();
    let uniform = p.eval_uniform(&typed, &[0.9.into(), 3i64.into(), 0.01.into()]);
    assert!(uniform.iter().zip(p.uniform()).all(|(value, same)| value.is_some() == same));
    let launch: Vec<f64> = p.launch_values().iter().map(|&id| uniform[id as usize].unwrap().to_f64()).collect();
    // The launch values are in f64, and the runtime passes on the nearest f32: in f32 arithmetic 1 − 0.9 would lose
    // digits.
    assert_eq!(launch, [0.9, 1.0 - 0.9, 0.01 / (1.0 - libm::pow(0.9, 3.0))]);
    let late = [0.999.into(), 3i64.into(), 0.01.into()];
    let m = p.eval(&typed, &[Number::Float(1.0), Number::Float(0.0)], &late, 0)[0];
    assert_eq!(m, Number::Float(f64::from((1.0 - 0.999) as f32)));
    assert_eq!(launch.len(), 3, "nothing else is passed");
}

#[test]
fn a_cast_of_a_scalar_is_the_same_for_all() {
    let p = Program::new("cast", |[x], [s]| [x + s.cast(DType::F64).cast_like(x)]);
    let typed = p.resolve(&[DType::F32], &[]).unwrap();
    let values = p.eval_uniform(&typed, &[0.1.into()]);
    assert_eq!(values[p.launch_values()[0] as usize], Some(Number::Float(f64::from(0.1f32))));
}
