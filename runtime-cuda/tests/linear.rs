//! Linear layers in one call of the library, on the emulator, against the CPU; and products of halves into `f32`.
#![cfg(feature = "emulate")]

use std::{path::PathBuf, sync::LazyLock};

use autograd::Var;
use emulated_gpu::GemmRefusal;
use numcore::{
    DType, Result, Runtime, Shape, Tensor, TensorMut,
    fused::{CrossEntropyOptions, LinearCrossEntropy, LinearGrad, NnOps},
    ops::{Apply, Bits, MatmulOps, Op, PointwiseOps, ReduceOps, ViewOp, ViewOps},
};
use runtime_cpu::Cpu;
use runtime_cuda::Cuda;

static CUDA: LazyLock<Cuda> = LazyLock::new(|| {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("emulated");
    emulated_gpu::open(folder).unwrap_or_else(|e| panic!("{e}"))
});

fn random<R: Runtime>(rt: &R, shape: &[usize], dtype: DType, seed: u64) -> Result<Tensor<R>> {
    Tensor::uniform(rt, shape, DType::F64, -1.0, 1.0, seed)?.to_dtype(dtype)
}

/// Values that every type has exactly, filled one after another.
fn filled<R: Runtime>(rt: &R, shape: &[usize], dtype: DType, value: f64) -> Result<Tensor<R>> {
    Tensor::full(rt, shape, dtype, value)
}

/// What is added is rounded with the product, once: bf16 has no number between 256 and 258.
#[test]
fn bias_and_residual_are_added_before_rounding() -> Result<()> {
    let rt = &*CUDA;
    for dtype in [DType::BF16, DType::F32] {
        let (x, w) = (filled(rt, &[2, 16], dtype, 4.0)?, filled(rt, &[8, 16], dtype, 4.0)?);
        let (bias, residual) = (filled(rt, &[8], dtype, 1.0)?, filled(rt, &[2, 8], dtype, 1.0)?);
        let y = x.linear_onto(&w, Some(&bias), &residual)?;
        assert_eq!(y.to_f64s()?, [258.0; 16], "{dtype}");
        // What the library cannot read is copied.
        let repeated = filled(rt, &[2, 1], dtype, 1.0)?.broadcast_to([2, 8])?;
        assert_eq!(x.linear_onto(&w, Some(&bias.flip(&[0])?), &repeated)?.to_f64s()?, [258.0; 16], "{dtype}");
    }
    Ok(())
}

/// Operands that the library reads in a copy alone are added before rounding too.
#[test]
fn operands_that_are_copied_are_added_before_rounding() -> Result<()> {
    let (rt, dtype) = (&*CUDA, DType::BF16);
    let (x, w) = (filled(rt, &[2, 16], dtype, 4.0)?, filled(rt, &[8, 16], dtype, 4.0)?);
    let (bias, residual) = (filled(rt, &[8], dtype, 1.0)?, filled(rt, &[2, 8], dtype, 1.0)?);
    let spread = |rows: usize| filled(rt, &[2 * rows, 32], dtype, 4.0)?.slice(0, 0, rows, 2)?.slice(1, 0, 16, 2);
    let unaligned = filled(rt, &[9], dtype, 1.0)?.narrow(0, 1, 8)?;
    for y in [
        x.linear_onto(&w, Some(&unaligned), &residual)?,
        spread(2)?.linear_onto(&w, Some(&bias), &residual)?,
        x.linear_onto(&spread(8)?, Some(&bias), &residual)?,
    ] {
        assert_eq!(y.to_f64s()?, [258.0; 16]);
    }
    Ok(())
}

/// Without features, what is added is all there is.
#[test]
fn a_layer_of_no_features() -> Result<()> {
    let rt = &*CUDA;
    let (x, w) = (filled(rt, &[2, 0], DType::F32, 4.0)?, filled(rt, &[3, 0], DType::F32, 4.0)?);
    let bias = filled(rt, &[3], DType::F32, 2.0)?;
    assert_eq!(x.linear(&w, Some(&bias))?.to_f64s()?, [2.0; 6]);
    assert_eq!(x.linear(&w, None)?.to_f64s()?, [0.0; 6]);
    Ok(())
}

/// Rows of an odd vocabulary begin at multiples of 16 bytes: a library that takes no others refuses nothing.
#[test]
fn logits_of_an_odd_vocabulary_are_aligned() -> Result<()> {
    let operations = |refusal: GemmRefusal| -> Result<usize> {
        let (cuda, order) = emulated_gpu::watched(PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("emulated"))?;
        order.refuse_gemms(refusal);
        let (x, w) = (random(&cuda, &[8, 16], DType::BF16, 1)?, random(&cuda, &[13, 16], DType::BF16, 2)?);
        let (b, y) = (random(&cuda, &[13], DType::BF16, 3)?, Tensor::from_slice(&cuda, [8], &[3i64; 8])?);
        let op = LinearCrossEntropy {
            ignore_index: -100,
            label_smoothing: 0.0,
            bias: true,
            summed: true,
            chunk: Some(8),
            gradients: Bits(7),
        };
        let before = order.operations();
        Tensor::apply(op.into(), &[&x, &w, &b, &y])?;
        Ok(order.operations() - before)
    };
    assert_eq!(operations(GemmRefusal::Unaligned)?, operations(GemmRefusal::Nothing)?);
    Ok(())
}

/// Every layout of every operand, with what the library takes and what it does not.
#[test]
fn linear_layers_in_every_layout() -> Result<()> {
    fn all<R: Runtime>(rt: &R, dtype: DType) -> Result<Vec<Tensor<R>>> {
        let x = random(rt, &[6, 5], dtype, 1)?;
        let padded = random(rt, &[6, 8], dtype, 1)?.narrow(1, 1, 5)?;
        let inputs = [
            x.clone(),
            padded,
            x.t()?.contiguous()?.t()?,
            random(rt, &[2, 3, 5], dtype, 1)?,
            random(rt, &[3, 2, 5], dtype, 1)?.transpose(0, 1)?,
            random(rt, &[1, 5], dtype, 1)?.broadcast_to([6, 5])?,
        ];
        let w = random(rt, &[7, 5], dtype, 2)?;
        let weights = [w.clone(), w.t()?.contiguous()?.t()?, random(rt, &[7, 12], dtype, 2)?.narrow(1, 3, 5)?];
        let bias = random(rt, &[7], dtype, 3)?;
        let biases = [None, Some(bias), Some(random(rt, &[9], dtype, 3)?.narrow(0, 1, 7)?)];
        let mut outs = Vec::new();
        for x in &inputs {
            let shape = [&x.dims()[..x.dims().len() - 1], &[7]].concat();
            let r = random(rt, &shape, dtype, 4)?;
            let wide = [&shape[..shape.len() - 1], &[9]].concat();
            let residuals = [
                None,
                Some(r.clone()),
                Some(r.transpose(-1, -2)?.contiguous()?.transpose(-1, -2)?),
                Some(random(rt, &wide, dtype, 4)?.narrow(-1, 2, 7)?),
            ];
            for w in &weights {
                for b in &biases {
                    for r in &residuals {
                        outs.push(match r {
                            Some(r) => x.linear_onto(w, b.as_ref(), r)?,
                            None => x.linear(w, b.as_ref())?,
                        });
                    }
                }
            }
        }
        Ok(outs)
    }
    for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::F64, 1e-12), (DType::BF16, 0.017), (DType::F16, 0.002)] {
        let (got, want) = (all(&*CUDA, dtype)?, all(&Cpu::new(), dtype)?);
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            let (got, want) = (got.to_f64s()?, want.to_f64s()?);
            let far = got.iter().zip(&want).fold(0.0f64, |far, (a, b)| far.max((a - b).abs()));
            assert!(far <= tolerance && got.len() == want.len(), "{dtype}, call {i}: {far} off");
        }
    }
    Ok(())
}

/// The losses and gradients of half-precision logits, in rows of an odd vocabulary, chunk by chunk; also of one whose
/// products are split.
#[test]
fn the_loss_of_a_linear_layer_in_halves() -> Result<()> {
    fn all<R: Runtime>(rt: &R, dtype: DType, v: usize, chunk: usize, bias: bool) -> Result<Vec<Vec<f64>>> {
        let (x, w, b) = (random(rt, &[11, 6], dtype, 1)?, random(rt, &[v, 6], dtype, 2)?, random(rt, &[v], dtype, 3)?);
        let y = Tensor::from_slice(rt, [11], &[0i64, 12, 3, -100, 5, 6, 7, 1, 9, 10, -100])?;
        let op = LinearCrossEntropy {
            ignore_index: CrossEntropyOptions::default().ignore_index,
            label_smoothing: 0.1,
            bias,
            summed: true,
            chunk: Some(chunk),
            gradients: Bits(if bias { 7 } else { 3 }),
        };
        let ins: Vec<&Tensor<R>> = [&x, &w].into_iter().chain(bias.then_some(&b)).chain([&y]).collect();
        let outs = Tensor::apply(op.into(), &ins)?;
        assert!(outs.iter().all(|out| out.dtype() == dtype.compute()));
        outs.iter().map(Tensor::to_f64s).collect()
    }
    for (dtype, v, chunk, bias) in [
        (DType::BF16, 13, 4, false),
        (DType::BF16, 13, 16, true),
        (DType::BF16, 1027, 4, false),
        (DType::F16, 1029, 5, true),
        (DType::F16, 13, 3, true),
        (DType::F32, 13, 4, true),
    ] {
        let (got, want) = (all(&*CUDA, dtype, v, chunk, bias)?, all(&Cpu::new(), dtype, v, chunk, bias)?);
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            let largest = want.iter().fold(0.0f64, |m, x| m.max(x.abs()));
            let far = got.iter().zip(want).fold(0.0f64, |far, (a, b)| far.max((a - b).abs()));
            assert!(far <= 2.0 * dtype.epsilon().max(1e-6) * largest, "{dtype} output {i}: {far} of {largest}");
        }
    }
    Ok(())
}

/// A loss without the fused operation is the same.
#[test]
fn odd_vocabularies_have_the_loss_of_their_logits() -> Result<()> {
    let rt = &*CUDA;
    let (x, w) = (random(rt, &[9, 8], DType::BF16, 1)?, random(rt, &[31, 8], DType::BF16, 2)?);
    let y = Tensor::from_slice(rt, [9], &[0i64, 30, 3, 4, 5, 6, 7, 8, 9])?;
    let (fused, apart) = (x.linear_cross_entropy(&w, &y)?, x.linear(&w, None)?.cross_entropy(&y)?);
    assert_eq!(fused.dtype(), DType::F32);
    assert_eq!(fused.to_f64s()?, apart.to_f64s()?);
    Ok(())
}

/// The gradients of a layer's weight `[N, K]` and bias `[N]`, written through the transpose of the weight, or as the op
/// has them; `times` times into the same memory.
fn parameters<R: Runtime>(x: &Tensor<R>, g: &Tensor<R>, through: bool, times: usize) -> Result<[Tensor<R>; 2]> {
    let (rt, dtype, [k, n]) = (x.runtime(), x.dtype(), [x.dims()[1], g.dims()[1]]);
    let views: &[ViewOp] = if through { &[ViewOp::Permute([1, 0].into_iter().collect())] } else { &[] };
    let sizes = if through { [n, k] } else { [k, n] };
    let mut memory = [TensorMut::alloc(rt, Shape::from(sizes), dtype)?, TensorMut::alloc(rt, Shape::from([n]), dtype)?];
    for _ in 0..times {
        let mut given = memory.map(Some);
        let slot = |i: usize| Some((given[i].take()?, if i == 0 { views } else { &[] }));
        let outs = Tensor::compute_through(&Op::from(LinearGrad), &[x, g], slot)?;
        memory = outs.into_inner().unwrap_or_else(|outs| panic!("{} outputs", outs.len()));
    }
    let [weight, bias] = memory.map(|memory| memory.freeze());
    let weight = weight?;
    Ok([if through { weight.t()? } else { weight }, bias?])
}

/// The library sums the rows of `g` beside the product, whichever operand `g` is; where it refuses, two calls do.
#[test]
fn gradients_of_a_bias_are_summed_in_the_product() -> Result<()> {
    let both = |refusal, dtype, through, times, turned: bool| -> Result<(usize, [Tensor<Cuda>; 2])> {
        let (cuda, order) = emulated_gpu::watched(PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("emulated"))?;
        order.refuse_gemms(refusal);
        let (x, g) = (random(&cuda, &[40, 16], dtype, 1)?, random(&cuda, &[40, 24], dtype, 2)?);
        let g = if turned { g.t()?.contiguous()?.t()? } else { g };
        let before = order.operations();
        let gradients = parameters(&x, &g, through, times)?;
        Ok((order.operations() - before, gradients))
    };
    let cpu = Cpu::new();
    for dtype in [DType::BF16, DType::F16, DType::F32, DType::F64] {
        let (x, g) = (random(&cpu, &[40, 16], dtype, 1)?, random(&cpu, &[40, 24], dtype, 2)?);
        let (x, g) = (x.to_dtype(DType::F64)?, g.to_dtype(DType::F64)?);
        for (through, times, turned) in
            [(true, 1, false), (false, 1, false), (true, 2, false), (false, 2, true), (true, 1, true)]
        {
            let want = parameters(&x, &g, through, times)?;
            for refusal in [GemmRefusal::Nothing, GemmRefusal::Unaligned, GemmRefusal::Workspace] {
                let (operations, got) = both(refusal, dtype, through, times, turned)?;
                let is_summed = dtype != DType::F64 && !turned;
                let due = match (is_summed, times) {
                    (true, 1) => 1,
                    (true, _) => 3,
                    (false, times) => 2 * times,
                };
                assert_eq!(operations, due, "{dtype}, {through}, {times} times, turned {turned}, {refusal:?}");
                for (got, want) in got.iter().zip(&want) {
                    let (got, want) = (got.to_f64s()?, want.to_f64s()?);
                    let largest = want.iter().fold(0.0f64, |m, x| m.max(x.abs()));
                    let far = got.iter().zip(&want).fold(0.0f64, |far, (a, b)| far.max((a - b).abs()));
                    let bound = times as f64 * 2.0 * dtype.epsilon().max(1e-14) * largest;
                    assert!(far <= bound, "{dtype}, {through}, {times} times, turned {turned}: {far} of {largest}");
                }
            }
        }
    }
    Ok(())
}

/// Backward through a layer with a bias launches no more than through one without, and gives the CPU's gradients.
#[test]
fn a_bias_costs_backward_nothing() -> Result<()> {
    fn gradients<R: Runtime>(rt: &R, bias: bool, dtype: DType) -> Result<Vec<Vec<f64>>> {
        let leaf = |name: &str, shape: &[usize], seed| Var::leaf(name, random(rt, shape, dtype, seed)?);
        let (x, w, b) = (leaf("x", &[2, 20, 16], 1)?, leaf("w", &[24, 16], 2)?, leaf("b", &[24], 3)?);
        let seed = Var::new(random(rt, &[2, 20, 24], dtype, 4)?);
        let gradients = x.linear(&w, bias.then_some(&b))?.mul(&seed)?.sum_all()?.backward()?;
        let leaves = [&x, &w, &b].into_iter().take(if bias { 3 } else { 2 });
        leaves.map(|leaf| gradients.of(leaf).expect("a gradient").to_f64s()).collect()
    }
    let operations = |bias| -> Result<(usize, Vec<Vec<f64>>)> {
        let (cuda, order) = emulated_gpu::watched(PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("emulated"))?;
        let got = gradients(&cuda, bias, DType::BF16)?;
        Ok((order.operations(), got))
    };
    let ((with, got), (without, _)) = (operations(true)?, operations(false)?);
    // One more read of a gradient.
    assert!(with <= without + 2, "{with} operations, {without} without a bias");
    let want = gradients(&Cpu::new(), true, DType::BF16)?;
    for (got, want) in got.iter().zip(&want) {
        let largest = want.iter().fold(0.0f64, |m, x| m.max(x.abs()));
        let far = got.iter().zip(want).fold(0.0f64, |far, (a, b)| far.max((a - b).abs()));
        assert!(far <= 2.0 * DType::BF16.epsilon() * largest, "{far} of {largest}");
    }
    Ok(())
}
