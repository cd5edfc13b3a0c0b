//! Convolutions and pooling against their decompositions, also with values that are not finite.

use numcore::{
    DType, Result, Runtime, Tensor,
    fused::{Conv, FusedOp, MaxPool, MaxPoolGrad},
    ops::{Apply, Outs, PointwiseOps},
};

use super::{
    convolutions::{ConvCall, GEOMETRIES, Geometry},
    known::{InMemory, Known, close},
};
use crate::suite::{
    dtypes::computed,
    report::{Section, Verdict},
};

pub(crate) fn windows<R: Runtime>(rt: &R) -> Section {
    let mut section = Section::new("windows");
    let s = &mut section;
    for dtype in computed(rt, s, "convolutions", [DType::F64]) {
        for geometry in GEOMETRIES {
            s.check(format!("convolutions {geometry:?} of {dtype}"), || convolutions(rt, dtype, geometry));
        }
    }
    for size in [[4, 6], [7, 5], [5, 36], [2, 71], [6, 16], [3, 17]] {
        s.check(format!("pooling of {size:?}"), || pooling(rt, size));
    }
    for geometry in &GEOMETRIES[11..] {
        s.check(format!("what is not finite reaches its windows alone {geometry:?}"), || not_finite(rt, *geometry));
    }
    section
}

/// The operands of a call.
fn operands<R: Runtime>(rt: &R, dtype: DType, (_, shapes): &ConvCall) -> Result<Vec<Known<R>>> {
    shapes.iter().map(|(shape, seed)| Known::drawn(rt, dtype, shape, *seed, InMemory::Dense)).collect()
}

fn tensors<R: Runtime>(known: &[Known<R>]) -> Vec<&Tensor<R>> {
    known.iter().map(|k| &k.tensor).collect()
}

/// The op computed by primitives alone.
fn decomposed<R: Runtime>(op: &Conv, ins: &[&Tensor<R>]) -> Result<Tensor<R>> {
    let product = FusedOp::Conv(Conv { bias: false, ..op.clone() }).decompose(&ins[..2])?.remove(0);
    ins.get(2).map_or(Ok(product.clone()), |bias| product.add(*bias))
}

fn convolutions<R: Runtime>(rt: &R, dtype: DType, geometry: Geometry) -> Result<Verdict> {
    Verdict::all(geometry.calls().iter().map(|call| {
        let known = operands(rt, dtype, call)?;
        let ins = tensors(&known);
        let got = Tensor::apply1(FusedOp::Conv(call.0.clone()), &ins)?;
        close(&format!("{:?}", call.0), &got, &decomposed(&call.0, &ins)?.to_f64s()?, 1e-11)
    }))
}

/// Checks pooling by two and its gradient to the last bit, with many ties and some NaN.
fn pooling<R: Runtime>(rt: &R, [h, w]: [usize; 2]) -> Result<Verdict> {
    let value = |i: usize| if i % 29 == 7 || i % 31 < 2 { f64::NAN } else { (i * i % 5) as f64 };
    let values: Vec<f64> = (0..2 * 3 * h * w).map(value).collect();
    let x = Known::dense(rt, DType::F32, &[2, 3, h, w], &values)?;
    let g = Known::drawn(rt, DType::F32, &[2, 3, h / 2, w / 2], 4, InMemory::Dense)?;
    let op = MaxPool { kernel: [2, 2], stride: [2, 2], padding: [0, 0] };
    let calls: [(FusedOp, Vec<&Tensor<R>>); 2] = [
        (FusedOp::MaxPool(op.clone()), vec![&x.tensor]),
        (FusedOp::MaxPoolGrad(MaxPoolGrad(op)), vec![&x.tensor, &g.tensor]),
    ];
    Verdict::all(calls.into_iter().map(|(op, ins)| {
        let bits = |outs: Outs<Tensor<R>>| -> Result<Vec<u64>> {
            let values = outs.iter().map(Tensor::to_f64s).collect::<Result<Vec<_>>>()?;
            Ok(values.concat().iter().map(|x| if x.is_nan() { 0 } else { x.to_bits() + 1 }).collect())
        };
        let (want, got) = (bits(op.decompose(&ins)?)?, bits(Tensor::apply(op.clone().into(), &ins)?)?);
        let wrong = got.iter().zip(&want).position(|(got, want)| got != want);
        Ok(Verdict::when(wrong.is_none() && got.len() == want.len(), || format!("{op:?}: element {wrong:?}")))
    }))
}

/// Checks that infinities, NaN and the largest number of an image reach the windows that hold them, and no others.
fn not_finite<R: Runtime>(rt: &R, geometry: Geometry) -> Result<Verdict> {
    Verdict::all(geometry.calls().iter().map(|call| {
        let known = operands(rt, DType::F32, call)?;
        let first = spoil(rt, &known[0], [f64::INFINITY, f64::NAN, f64::from(f32::MAX), f64::NEG_INFINITY])?;
        // Finite: zeros around an image meet weights, too.
        let second = spoil(rt, &known[1], [0.0, 1.0, 0.0, 0.0])?;
        let ins: Vec<&Tensor<R>> = [&first, &second].into_iter().chain(known[2..].iter().map(|k| &k.tensor)).collect();
        let got = Tensor::apply1(FusedOp::Conv(call.0.clone()), &ins)?.to_f64s()?;
        let want = decomposed(&call.0, &ins)?.to_f64s()?;
        let size = want.iter().filter(|x| x.abs() < 1e30).fold(1.0, |m: f64, x| m.max(x.abs()));
        Verdict::all(got.iter().zip(&want).enumerate().map(|(at, (got, want))| {
            // The sum of an overflow and an infinite element is infinite or NaN, depending on whether products are
            // rounded separately.
            let same = !got.is_finite() && !want.is_finite();
            let room = 1e-5 * if want.abs() < 1e30 { size } else { want.abs() };
            Ok(Verdict::when(same || (got - want).abs() <= room, || {
                format!("element {at} of {:?} is {got}, expected {want}", call.0)
            }))
        }))
    }))
}

/// An operand in which four elements, equally spaced, are replaced.
fn spoil<R: Runtime>(rt: &R, x: &Known<R>, values: [f64; 4]) -> Result<Tensor<R>> {
    let mut numbers = x.values.clone();
    let step = numbers.len() / 4 + 1;
    numbers.iter_mut().step_by(step).zip(values).for_each(|(x, value)| *x = value);
    Ok(Known::dense(rt, DType::F32, x.tensor.dims(), &numbers)?.tensor)
}
