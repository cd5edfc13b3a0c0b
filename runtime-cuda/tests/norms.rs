//! Gradients of norms on the emulator against the CPU's in `f64`: of rows that threads hold and rows that they read again, overwriting and accumulating.
#![cfg(feature = "emulate")]

use std::{path::PathBuf, sync::LazyLock};

use numcore::{
    DType, Result, Runtime, Tensor, TensorMut,
    fused::{NnOps, Norm, NormGrad, NormKind},
    ops::{Apply, Op, PointwiseOps, ViewOps, cat},
};
use runtime_cpu::Cpu;
use runtime_cuda::Cuda;

static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("emulated"));
static CUDA: LazyLock<Cuda> = LazyLock::new(|| emulated_gpu::open(&*FOLDER).unwrap_or_else(|e| panic!("{e}")));

const NORMS: [Norm; 4] = [
    norm(NormKind::Layer, true, true),
    norm(NormKind::Layer, true, false),
    norm(NormKind::Layer, false, false),
    norm(NormKind::Rms, true, false),
];

const fn norm(kind: NormKind, weight: bool, bias: bool) -> Norm {
    Norm { kind, eps: 1e-5, weight, bias }
}

/// Values of `dtype`, in `to`.
fn random<R: Runtime>(rt: &R, shape: &[usize], [dtype, to]: [DType; 2], seed: u64) -> Result<Tensor<R>> {
    Tensor::uniform(rt, shape, DType::F64, -1.0, 1.0, seed)?.to_dtype(dtype)?.to_dtype(to)
}

/// Gradients of values of `dtype`, computed in `to`; then added to old values.
fn gradients<R: Runtime>(rt: &R, norm: &Norm, types: [DType; 2], shape: [usize; 2]) -> Result<[Vec<Vec<f64>>; 2]> {
    let width = [shape[1]];
    let (x, g) = (random(rt, &shape, types, 1)?, random(rt, &shape, types, 2)?);
    let (w, b) = (random(rt, &width, types, 3)?, random(rt, &width, types, 4)?);
    let forward = [Some(&x), norm.weight.then_some(&w), norm.bias.then_some(&b)];
    let outs = Tensor::apply(norm.clone().into(), &forward.into_iter().flatten().collect::<Vec<_>>())?;
    let ins: Vec<&Tensor<R>> = [&x, &g].into_iter().chain(&outs[1..]).chain(norm.weight.then_some(&w)).collect();
    let op = Op::from(NormGrad(norm.clone()));
    let fresh = Tensor::apply(op.clone(), &ins)?;
    // Every second output is overwritten.
    let old = fresh.iter().zip(5..).map(|(t, seed)| random(rt, t.dims(), types, seed)).collect::<Result<Vec<_>>>()?;
    let slot = |k: usize| -> Option<TensorMut<R>> { if k == 1 { None } else { old[k].copy().ok()?.try_mut().ok() } };
    let added = Tensor::compute_into(&op, &ins, slot)?;
    let added = added.into_iter().map(|t| t.freeze()?.to_f64s()).collect::<Result<_>>()?;
    let fresh = outs.iter().chain(&fresh).map(|t| t.to_f64s()).collect::<Result<_>>()?;
    Ok([fresh, added])
}

#[test]
fn outputs_and_gradients_are_those_of_the_cpu() -> Result<()> {
    let cpu = Cpu::with_threads(1);
    // Rows of a warp and of a block: held, and not of whole packs; a single element; no rows.
    let shapes = [[37, 64], [70, 130], [21, 776], [11, 2048], [9, 2500], [3, 1], [0, 8]];
    let all = || NORMS.iter().flat_map(|n| shapes.map(|s| (n, s)));
    for (dtype, unit) in [(DType::F32, 2f64.powi(-19)), (DType::BF16, 2f64.powi(-8))] {
        let run = |rt: &Cuda| all().for_each(|(norm, shape)| drop(gradients(rt, norm, [dtype; 2], shape)));
        emulated_gpu::compile_for(&*FOLDER, run)?;
        for (norm, shape) in all() {
            let got = gradients(&*CUDA, norm, [dtype, dtype], shape)?;
            let want = gradients(&cpu, norm, [dtype, DType::F64], shape)?;
            for (k, (got, want)) in got.iter().flatten().zip(want.iter().flatten()).enumerate() {
                assert_eq!(got.len(), want.len());
                // Sums over rows are of numbers of about 1.
                let near = |(a, b): (&f64, &f64)| (a - b).abs() <= unit * (b.abs() + shape[0] as f64);
                assert!(got.iter().zip(want).all(near), "{norm:?} of {dtype} {shape:?}, value {k}");
            }
        }
    }
    Ok(())
}

/// A row with NaN, and one with an infinity, leave other rows alone.
#[test]
fn rows_that_are_no_numbers_stay_alone() -> Result<()> {
    let rt = &*CUDA;
    for width in [64, 130] {
        let rows = |value| Tensor::full(rt, [1, width], DType::F32, value);
        let line = Tensor::uniform(rt, [1, width], DType::F32, -1.0, 1.0, 1)?;
        let x = cat(&[&line, &rows(f64::NAN)?, &line, &rows(f64::INFINITY)?, &line], 0)?;
        let ones = Tensor::full(rt, [width], DType::F32, 1.0)?;
        let y = x.layer_norm(Some(&ones), Some(&ones), 1e-5)?;
        let first = y.narrow(0, 0, 1)?.to_f64s()?;
        assert!(first.iter().all(|v| v.is_finite()));
        for k in [2, 4] {
            assert_eq!(y.narrow(0, k, 1)?.to_f64s()?, first);
        }
        for k in [1, 3] {
            assert!(y.narrow(0, k, 1)?.to_f64s()?.iter().all(|v| v.is_nan()));
        }
    }
    Ok(())
}
