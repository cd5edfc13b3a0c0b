//! Values that move: copies and sums in every layout, casts, selection, fills.

use numcore::{DType, Result, Runtime, Tensor, ops::PointwiseOps};

use super::known::{InMemory, Known, SHAPES, close, round_to};
use crate::suite::{
    dtypes::{computed, stored},
    report::{Section, Verdict},
};

pub(crate) fn copies<R: Runtime>(rt: &R) -> Section {
    let mut section = Section::new("copies and casts");
    let s = &mut section;
    for dtype in computed(rt, s, "sums", [DType::F32, DType::F16, DType::I64, DType::U8]) {
        for shape in SHAPES {
            s.check(format!("sums of {dtype} {shape:?} in every layout"), || sums(rt, dtype, shape));
        }
    }
    for dtype in stored(rt, s, "copies", DType::ALL) {
        for shape in SHAPES {
            s.check(format!("copies of {dtype} {shape:?} in every layout"), || copied(rt, dtype, shape));
        }
        for n in [0, 1, 5, 10_000] {
            s.check(format!("a fill of {n} {dtype}"), || {
                close("ones", &Tensor::ones(rt, [n], dtype)?, &vec![1.0; n], 0.0)
            });
        }
    }
    let types = computed(rt, s, "casts and selection", DType::ALL);
    for &dtype in &types {
        for &to in &types {
            s.check(format!("{dtype} to {to}"), || cast(rt, dtype, to));
        }
        for shape in [&[6][..], &[40, 70]] {
            s.check(format!("selection of {dtype} {shape:?}"), || selected(rt, dtype, shape));
        }
    }
    s.check("casts of what no integer is", || odd_casts(rt));
    s.check("no integer passes through f64 when it is read", || read_exactly(rt));
    section
}

fn sums<R: Runtime>(rt: &R, dtype: DType, shape: &[usize]) -> Result<Verdict> {
    let (left, right) = (Known::all(rt, dtype, shape, 3)?, Known::all(rt, dtype, shape, 4)?);
    let wrap = |x: f64| if dtype == DType::U8 { x % 256.0 } else { x };
    Verdict::all(left.iter().zip(right.iter().cycle().skip(3)).map(|(a, b)| {
        let want: Vec<f64> = a.values.iter().zip(&b.values).map(|(a, b)| wrap(round_to(dtype, a + b))).collect();
        a.expect(&format!("the sum with {}", b.what), &a.tensor.add(&b.tensor)?, &want, 0.0)
    }))
}

fn copied<R: Runtime>(rt: &R, dtype: DType, shape: &[usize]) -> Result<Verdict> {
    let all = Known::all(rt, dtype, shape, 5)?;
    Verdict::all(all.iter().map(|x| x.expect("the copy", &x.tensor.copy()?, &x.values, 0.0)))
}

fn cast<R: Runtime>(rt: &R, from: DType, to: DType) -> Result<Verdict> {
    let x = Known::dense(rt, from, &[9], &[0.0, 1.0, -1.0, 2.5, 100.0, 255.0, 3.99, 1e4, -7.5])?;
    let wraps = from.is_int() && to.is_int();
    let want = if wraps {
        x.values.iter().map(|&v| wrapped(v, to)).collect()
    } else {
        Known::dense(rt, to, &[9], &x.values)?.values
    };
    x.expect(&format!("{to}"), &x.tensor.to_dtype(to)?, &want, 0.0)
}

/// An integer as a narrower type wraps it.
fn wrapped(x: f64, to: DType) -> f64 {
    let x = x as i64;
    match to {
        DType::I32 => f64::from(x as i32),
        DType::U32 => f64::from(x as u32),
        DType::U8 => f64::from(x as u8),
        _ => x as f64,
    }
}

fn odd_casts<R: Runtime>(rt: &R) -> Result<Verdict> {
    let odd = Tensor::from_slice(rt, [5], &[f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 3e9, -3e9])?;
    let (whole, truth) = (odd.to_dtype(DType::I32)?.to_vec::<i32>()?, odd.to_dtype(DType::Bool)?.to_vec::<bool>()?);
    let right = whole == [0, i32::MAX, i32::MIN, i32::MAX, i32::MIN] && truth == [true; 5];
    Ok(Verdict::when(right, || format!("{whole:?}, {truth:?}")))
}

fn selected<R: Runtime>(rt: &R, dtype: DType, shape: &[usize]) -> Result<Verdict> {
    let condition = Known::drawn(rt, DType::Bool, shape, 8, InMemory::Transposed)?;
    let a = Known::drawn(rt, dtype, shape, 9, InMemory::Dense)?;
    let b = Known::drawn(rt, dtype, shape, 10, InMemory::RepeatedRows)?;
    let choice = |i: usize| if condition.values[i] != 0.0 { a.values[i] } else { b.values[i] };
    let want: Vec<f64> = (0..a.values.len()).map(choice).collect();
    a.expect("the selection", &a.tensor.where_cond(&condition.tensor, &b.tensor)?, &want, 0.0)
}

fn read_exactly<R: Runtime>(rt: &R) -> Result<Verdict> {
    let one = |x: i64| Tensor::from_slice(rt, [], &[x]);
    let items = [i64::MAX, (1 << 53) + 1].map(|x| Ok(one(x)?.item_as::<i64>()? == x));
    let shown = [i64::MAX, i64::MIN + 1].map(|x| Ok(one(x)?.to_string().starts_with(&format!("{x}\n"))));
    let wrong_type = one(1)?.item_as::<f32>().map_or_else(|e| e.to_string(), |x| x.to_string());
    let names = wrong_type.contains("item_as") && wrong_type.contains("i64");
    let several = Tensor::ones(rt, [2], DType::I64)?.item_as::<i64>().is_err();
    Verdict::all(
        items.into_iter().chain(shown).chain([Ok(names), Ok(several)]).enumerate().map(
            |(i, right): (usize, Result<bool>)| Ok(Verdict::when(right?, || format!("reading {i}; {wrong_type}"))),
        ),
    )
}
