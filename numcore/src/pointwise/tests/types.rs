//! Type inference of programs, and the errors it reports.

use super::*;

fn types(p: &Program, inputs: &[DType], outputs: &[Option<DType>]) -> Vec<DType> {
    let typed = p.resolve(inputs, outputs).unwrap();
    p.outputs().iter().map(|&o| typed.dtypes[o as usize]).collect()
}

fn refusal(p: &Program, inputs: &[DType], outputs: &[Option<DType>]) -> String {
    p.resolve(inputs, outputs).unwrap_err().to_string()
}

#[test]
fn inputs_decide() {
    let p = Program::new("axpy", |[x, y], [a]| [a * x + y * 2.0, x.lt(y)]);
    for d in [DType::F32, DType::F64, DType::F16, DType::BF16] {
        assert_eq!(types(&p, &[d, d], &[]), [d, DType::Bool]);
    }
}

#[test]
fn what_meets_nothing_takes_what_is_asked() {
    let full = Program::new("full", |[], [s]| [s]);
    let zero = Program::build("zero", 0, 0, |b, _, _| vec![b.int(0)]);
    for d in DType::ALL {
        assert_eq!(types(&full, &[], &[Some(d)]), [d]);
        assert_eq!(types(&zero, &[], &[Some(d)]), [d]);
    }
    assert_eq!(types(&full, &[], &[]), [DType::F32]);
    assert_eq!(types(&zero, &[], &[]), [DType::I64]);
    let range = Program::build("arange", 0, 2, |b, _, s| vec![b.index() * s[1] + s[0]]);
    assert_eq!(types(&range, &[], &[]), [DType::I64]);
    assert_eq!(types(&range, &[], &[Some(DType::F16)]), [DType::F16]);
    assert_eq!(types(&Program::build("half", 0, 0, |b, _, _| vec![b.index() * 0.5]), &[], &[]), [DType::F32]);
}

/// Equal constants in expressions of different dtypes do not make the dtypes equal.
#[test]
fn numbers_are_of_each_type_they_meet() {
    let p = Program::new("two", |[x, y], [s]| [x * 2.0 + s, y * 2.0 + s, (x * 1 + 3).cast(DType::F64) * y * 3]);
    assert_eq!(types(&p, &[DType::F32, DType::F64], &[]), [DType::F32, DType::F64, DType::F64]);
    let eye = Program::build("eye", 0, 1, |b, _, s| {
        let i = b.index().cast(DType::I64);
        vec![(i % (s[0] + b.int(1))).eq(b.int(0)).select(b.int(1), b.int(0))]
    });
    let typed = eye.resolve(&[], &[Some(DType::F32)]).unwrap();
    let row: Vec<f64> = (0..9).map(|i| eye.eval(&typed, &[], &[3usize.into()], i)[0].to_f64()).collect();
    assert_eq!(row, [1., 0., 0., 0., 1., 0., 0., 0., 1.]);
}

#[test]
fn casts_suggest_types() {
    let p = Program::build("bernoulli", 0, 2, |b, _, s| {
        let u = (b.random(0, 0) >> b.int(8)).cast(DType::F32) * 2f64.powi(-24);
        vec![u.lt(s[1].cast(DType::F32)), s[1].cast(DType::F32)]
    });
    let typed = p.resolve(&[], &[]).unwrap();
    let drawn = p.eval(&typed, &[], &[7u64.into(), 0.3.into()], 0);
    assert_eq!(drawn[1], Number::Float(f64::from(0.3f32)));
    let whole = Program::build("whole", 1, 0, |b, x, _| vec![(b.int(7) / b.int(2)).cast_like(x[0])]);
    assert_eq!(run(&whole, DType::F32, &[0.0], &[]), [3.0]);
    let like = Program::build("like", 1, 0, |b, x, _| vec![b.int(1).cast_like(x[0])]);
    let typed = like.resolve(&[DType::F32], &[]).unwrap();
    assert_eq!(typed.dtypes, [DType::F32; 3], "nothing is left to cast");
}

#[test]
fn mixing_is_refused_by_name() {
    let add = Program::new("add", |[a, b], []| [a + b]);
    assert_eq!(
        refusal(&add, &[DType::F32, DType::BF16], &[]),
        "add: dtypes f32, bf16: `add` meets f32 and bf16, and nothing is promoted silently; cast one with `to_dtype`"
    );
    assert_eq!(
        refusal(&Program::new("soft", |[x], []| [x.exp()]), &[DType::I64], &[]),
        "soft: dtypes i64: `exp` meets i64 where it needs a floating type; cast with `to_dtype`"
    );
    assert_eq!(
        refusal(&add, &[DType::F32; 2], &[Some(DType::F16)]),
        "add: dtypes f32, f16: output 0 is f32, f16 is asked for; cast with `to_dtype`"
    );
    assert!(refusal(&Program::new("scaled", |[x], []| [x * 2.5]), &[DType::I32], &[]).contains("`mul` meets i32"));
    assert!(refusal(&Program::new("where", |[c, x], []| [c.select(x, 0.0)]), &[DType::F32; 2], &[]).contains("bool"));
    assert!(refusal(&Program::new("bits", |[x], []| [x & x.lt(0)]), &[DType::I32], &[]).contains("`and`"));
    assert!(refusal(&Program::new("shift", |[x], []| [x << 2]), &[DType::F32], &[]).contains("an integer type"));
    assert!(refusal(&Program::new("not", |[x], []| [!x]), &[DType::U8], &[]).contains("bool"));
    let clash = Program::new("clash", |[x], []| [x.cast(DType::F32) + x.cast(DType::F64)]);
    assert!(refusal(&clash, &[DType::F32], &[]).contains("f32 and f64"));
}

#[test]
fn counts_are_checked() {
    let add = Program::new("add", |[a, b], []| [a + b]);
    assert!(add.resolve(&[DType::F32], &[]).is_err());
    assert!(add.resolve(&[DType::F32; 2], &[None, None]).is_err());
    let many = Program::build("many", 65, 0, |_, x, _| vec![x[64]]);
    assert!(refusal(&many, &[DType::F32; 65], &[]).contains("at most 64"));
    assert_eq!(many.reads(), 0);
}

#[test]
fn scalars_are_checked() {
    let p = Program::new("scaled", |[x], [s]| [x * s]);
    let check = |d: DType, s: &[Scalar]| p.check_scalars(&p.resolve(&[d], &[]).unwrap(), s);
    assert!(check(DType::I32, &[2.0.into()]).is_ok() && check(DType::F32, &[2.5.into()]).is_ok());
    assert_eq!(
        check(DType::I32, &[2.5.into()]).unwrap_err().to_string(),
        "scaled: scalar is 2.5, and must be whole: scalar 0 is used as i32"
    );
    assert!(check(DType::F32, &[]).is_err());
}

#[test]
fn typings_are_kept() {
    let p = Program::new("kept", |[x], []| [x.exp()]);
    let first = p.resolve(&[DType::F32], &[]).unwrap();
    for d in [DType::F64, DType::BF16, DType::F16, DType::F32] {
        let again = p.resolve(&[d], &[]).unwrap();
        assert_eq!(again.dtypes, [d, d]);
        assert_eq!(std::sync::Arc::ptr_eq(&first, &again), d == DType::F32);
    }
}

#[test]
fn whole_numbers_have_32_bits_where_all_of_them_fit() {
    let program = Program::build("distance", 3, 0, |_, x, _| vec![x[2] + ((x[0] * x[1]) / 3).cast_like(x[2])]);
    let typed = program.resolve(&[DType::I64, DType::I64, DType::F32], &[]).unwrap();
    let end = 1 << 16;
    // The largest product is the largest number of 32 bits, or the one after it.
    let narrow = program.in_32_bits(&typed, &[Some((0, end)), Some((0, (end >> 1) - 1)), None]).unwrap();
    assert!(program.in_32_bits(&typed, &[Some((0, end)), Some((0, end >> 1)), None]).is_none());
    assert!(program.in_32_bits(&typed, &[Some((0, end)), None, None]).is_none());
    for (narrow, wide) in narrow.dtypes.iter().zip(&typed.dtypes) {
        assert_eq!(*narrow, if *wide == DType::I64 { DType::I32 } else { *wide });
    }
    for (a, b) in [(end, (end >> 1) - 1), (-7, 5), (0, 3)] {
        let inputs = [Number::Int(a), Number::Int(b), Number::Float(0.5)];
        assert_eq!(program.eval(&narrow, &inputs, &[], 0), program.eval(&typed, &inputs, &[], 0));
    }
}
