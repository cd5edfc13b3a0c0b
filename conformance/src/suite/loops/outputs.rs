//! Outputs of pointwise programs: accumulated, through views, several at once, written in place.

use numcore::{
    DType, Error, Result, Runtime, Scalar, TensorMut,
    ops::{Op, PointwiseOps, ViewOp, update},
    pointwise::Program,
    rng::philox4x32_10,
};

use super::known::{InMemory, Known, NUMBERS, SHAPES, close, round_to, tolerance};
use crate::suite::{
    dtypes::computed,
    report::{Section, Verdict},
};

pub(crate) fn outputs<R: Runtime>(rt: &R) -> Section {
    let mut section = Section::new("outputs");
    let s = &mut section;
    for dtype in computed(rt, s, "outputs that are added to", NUMBERS) {
        for shape in [&[3, 5][..], &[66, 130], &[5000]] {
            s.check(format!("{dtype} {shape:?} that is added to"), || added(rt, dtype, shape));
        }
    }
    for dtype in computed(rt, s, "outputs through views", [DType::F32, DType::BF16, DType::I64]) {
        s.check(format!("{dtype} written through a view"), || through_a_view(rt, dtype));
    }
    for dtype in computed(rt, s, "several outputs", [DType::F32, DType::F64, DType::BF16]) {
        for n in [3, 1000, 100_000] {
            s.check(format!("several outputs of {n} {dtype} in place"), || several(rt, dtype, n));
        }
    }
    for shape in SHAPES {
        s.check(format!("positions and random words of {shape:?} are row-major"), || positions(rt, shape));
    }
    section
}

fn added<R: Runtime>(rt: &R, dtype: DType, shape: &[usize]) -> Result<Verdict> {
    let x = Known::drawn(rt, dtype, shape, 11, InMemory::Transposed)?;
    let y = Known::drawn(rt, dtype, shape, 12, InMemory::Part)?;
    let mut slot = TensorMut::alloc(rt, *x.tensor.shape(), dtype)?;
    slot.accumulate(&Op::identity(), &[&x.tensor])?;
    slot.accumulate(&Op::identity(), &[&y.tensor])?;
    let want: Vec<f64> = x.values.iter().zip(&y.values).map(|(x, y)| round_to(dtype, x + y)).collect();
    x.expect("the sum", &slot.freeze()?, &want, 0.0)
}

fn through_a_view<R: Runtime>(rt: &R, dtype: DType) -> Result<Verdict> {
    let x = Known::drawn(rt, dtype, &[50, 60], 13, InMemory::Dense)?;
    let mut slot = TensorMut::alloc(rt, [60, 50].into(), dtype)?;
    let turn = [ViewOp::Permute([1, 0].as_slice().into())];
    slot.accumulate_view(&turn, &Op::identity(), &[&x.tensor])?;
    slot.accumulate_view(&turn, &Op::identity(), &[&x.tensor])?;
    let want: Vec<f64> = (0..3000).map(|i| 2.0 * x.values[i % 50 * 60 + i / 50]).collect();
    x.expect("the sum", &slot.freeze()?, &want, 0.0)
}

/// Checks a program with several outputs, each of which may read the old values of all.
fn several<R: Runtime>(rt: &R, dtype: DType, n: usize) -> Result<Verdict> {
    let step = Program::new("step", |[w, m, g], [lr]| {
        let m = m * 0.5 + g;
        [w - m * lr, m]
    });
    let swap = Program::new("swap", |[a, b], []| [b, a]);
    let known = |seed| Known::drawn(rt, dtype, &[n], seed, InMemory::Dense);
    let (old_w, old_m, g) = (known(20)?, known(21)?, known(22)?);
    let (mut w, mut m) = (own(&old_w)?, own(&old_m)?);
    update(&step, &[&g.tensor], &[0.25.into()], &mut [&mut w, &mut m])?;
    update(&swap, &[], &[], &mut [&mut w, &mut m])?;
    let new_m: Vec<f64> = (0..n).map(|i| old_m.values[i] * 0.5 + g.values[i]).collect();
    let new_w: Vec<f64> = (0..n).map(|i| old_w.values[i] - new_m[i] * 0.25).collect();
    let first = close("m", &w.freeze()?, &new_m, tolerance(dtype))?;
    Ok(first.and(close("w", &m.freeze()?, &new_w, tolerance(dtype))?))
}

/// Memory without another owner, with the values of an operand.
pub(super) fn own<R: Runtime>(x: &Known<R>) -> Result<TensorMut<R>> {
    let shared = |_| Error::argument("conformance", "a fresh copy has another owner");
    x.tensor.copy()?.try_mut().map_err(shared)
}

fn positions<R: Runtime>(rt: &R, shape: &[usize]) -> Result<Verdict> {
    let program =
        Program::build("positions", 1, 1, |b, x, s| vec![x[0] + b.index() * s[0], b.random(0, 3).cast(DType::I64)]);
    let operands = Known::all(rt, DType::I64, shape, 30)?;
    Verdict::all(operands.iter().map(|x| {
        let outs = x.tensor.apply_program_all(&program, &[], &[Scalar::U64(7)])?;
        let positions: Vec<f64> = x.values.iter().enumerate().map(|(i, v)| v + 7.0 * i as f64).collect();
        let word = |i: u32| f64::from(philox4x32_10([i / 4, 0, 3, 0], [7, 0])[i as usize % 4]);
        let words: Vec<f64> = (0..x.values.len() as u32).map(word).collect();
        Ok(x.expect("positions", &outs[0], &positions, 0.0)?.and(x.expect("words", &outs[1], &words, 0.0)?))
    }))
}
