//! Programs of floats, their values and their derivatives.

use numcore::{DType, Result, Runtime, Tensor, ops::PointwiseOps, rng::Philox};

use super::{
    random,
    tree::{Tree, trees},
};
use crate::{
    golden::Placement,
    suite::{
        dtypes::{computes, lacks},
        report::{Section, Verdict},
    },
};

const INPUTS: usize = 3;
/// The number of elements, not a multiple of any vector's length.
const ELEMENTS: usize = 37;
const CASES: u32 = 400;

pub(super) fn checks<R: Runtime>(rt: &R, section: &mut Section) {
    for dtype in [DType::F32, DType::F64].into_iter().filter(|d| rt.capabilities().compute.contains(d)) {
        section
            .check(format!("values in {dtype}"), || Ok(random(CASES, trees(INPUTS, false), |t| values(rt, t, dtype))));
    }
    if !computes(rt, DType::F64) {
        section.skip(format!("values and derivatives: {}", lacks(DType::F64)));
    } else {
        section.check("derivatives", || Ok(random(CASES, trees(INPUTS, true), |t| derivatives(rt, t))));
    }
}

/// Ordinary values; with `special` also zeros of both signs, infinities, NaN, very large and small values.
fn data(i: usize, special: bool) -> Vec<f64> {
    let mut rng = Philox::new(i as u64, 4);
    let rare = [0.0, -0.0, 1.0, -1.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 1e20, -1e-20, 0.5, 2.0];
    let draw = |k: usize| {
        if special && k % 3 == i % 3 {
            rare[(k * 5 + i * 7) % rare.len()]
        } else {
            f64::from((4.0 * rng.uniform() - 2.0) as f32)
        }
    };
    (0..ELEMENTS).map(draw).map(|x| f64::from(x as f32)).collect()
}

fn tensors<R: Runtime>(rt: &R, data: &[Vec<f64>], dtype: DType) -> Result<Vec<Tensor<R>>> {
    let tensor = |(i, values): (usize, &Vec<f64>)| {
        let t = match dtype {
            DType::F64 => Tensor::from_slice(rt, [ELEMENTS], values)?,
            _ => Tensor::from_slice(rt, [ELEMENTS], &values.iter().map(|&v| v as f32).collect::<Vec<_>>())?,
        };
        Placement::ALL[i % Placement::ALL.len()].of(&t)
    };
    data.iter().enumerate().map(tensor).collect()
}

fn values<R: Runtime>(rt: &R, tree: &Tree, dtype: DType) -> Result<Verdict> {
    if !tree.reads() {
        return Ok(Verdict::PASSED);
    }
    let data: Vec<Vec<f64>> = (0..INPUTS).map(|i| data(i, true)).collect();
    let ins = tensors(rt, &data, dtype)?;
    let got = ins[0].apply_program(&tree.program(INPUTS), &[&ins[1], &ins[2]], &[])?.to_f64s()?;
    for (i, &g) in got.iter().enumerate() {
        let x: Vec<f64> = data.iter().map(|d| d[i]).collect();
        let Some(want) = tree.bounded(&x, dtype.epsilon()) else { continue };
        let right = g == want.value || g.is_nan() && want.value.is_nan() || (g - want.value).abs() <= want.error;
        if !right {
            return Ok(Verdict::failed(format!(
                "at {x:?} it is {g:?}, expected {:?} ± {:.1e}",
                want.value, want.error
            )));
        }
    }
    Ok(Verdict::PASSED)
}

/// Checks the symbolic derivative, run by the runtime, against differences on the host; elements with unstable
/// differences are skipped.
fn derivatives<R: Runtime>(rt: &R, tree: &Tree) -> Result<Verdict> {
    let data: Vec<Vec<f64>> = (0..INPUTS).map(|i| data(i, false)).collect();
    let mut ins = tensors(rt, &data, DType::F64)?;
    ins.push(Tensor::ones(rt, [ELEMENTS], DType::F64)?);
    let program = tree.program(INPUTS);
    for wrt in 0..INPUTS {
        let Some(d) = program.derivative(wrt) else { continue };
        let reads: Vec<&Tensor<R>> = d.inputs.iter().map(|&k| &ins[k as usize]).collect();
        let Some((first, others)) = reads.split_first() else { continue };
        let got = first.apply_program(&d.program, others, &[])?.to_f64s()?;
        for (i, &g) in got.iter().enumerate() {
            let x: Vec<f64> = data.iter().map(|d| d[i]).collect();
            let Some(want) = difference(tree, &x, wrt) else { continue };
            let near = (g - want).abs() <= 1e-5 * want.abs().max(1.0);
            if !near {
                return Ok(Verdict::failed(format!(
                    "derivative {wrt} at {x:?} is {g:?}, the difference quotient {want:?}"
                )));
            }
        }
    }
    Ok(Verdict::PASSED)
}

/// The central difference, if two step sizes agree on it.
fn difference(tree: &Tree, x: &[f64], wrt: usize) -> Option<f64> {
    if !tree.is_tame(x) {
        return None;
    }
    let at = |h: f64| {
        let moved = |by: f64| {
            tree.value(&x.iter().enumerate().map(|(i, v)| if i == wrt { v + by } else { *v }).collect::<Vec<_>>())
        };
        (moved(h) - moved(-h)) / (2.0 * h)
    };
    let (wide, narrow) = (at(1e-4), at(1e-5));
    let stable = (wide - narrow).abs() <= 1e-6 * narrow.abs().max(1.0) && narrow.abs() < 1e6;
    stable.then_some(narrow)
}
