//! Programs of scores in the kernels of attention, on the emulated GPU: values and gradients are those of the CPU in
//! `f64`.

#![cfg(feature = "emulate")]

use std::path::PathBuf;

use numcore::{
    DType, Result, Runtime, Tensor,
    fused::{Attention, ScoredAttention, ScoredAttentionGrad},
    ops::{Apply, PointwiseOps, ViewOps},
    pointwise::Program,
};
use runtime_cpu::Cpu;

/// A call: batch, query heads, key heads, queries, keys and depth; the dtype; the operation, over a slope of each head, a
/// bias of each key, a value of each score, and a number and a factor of each query; the learned arguments.
struct Call {
    sizes: [usize; 6],
    dtype: DType,
    op: ScoredAttention,
    learned: &'static [usize],
}

fn calls() -> Vec<Call> {
    let alibi = Program::build("alibi", 10, 0, |_, x, _| vec![x[0] + x[5] * (x[4] - x[3]).cast_like(x[0]) * 0.1]);
    let bent = Program::build("bent", 10, 0, |_, x, _| vec![((x[0] * x[5] + x[6]) * 0.5).tanh() * 2.0 + x[7]]);
    let hidden = Program::build("hidden", 10, 0, |b, x, _| {
        let seen = (x[4] / 2 % 3).ne(x[8] % 3) & (x[3] - x[1] * 2 - x[2]).ne(5);
        vec![seen.select(x[0] * x[7], b.c(f64::NEG_INFINITY))]
    });
    let steep = Program::build("steep", 10, 0, |_, x, _| vec![x[0] + x[6] * (x[3] - x[4] + 1).cast_like(x[0]).sqrt()]);
    let warm = Program::build("warm", 10, 0, |_, x, _| vec![x[0] * (x[9] + 1.5) * 0.5 + x[7] * x[6]]);
    let of = |sizes, dtype, program: &Program, causal, lower_right, first, learned| {
        let attention = Attention { causal, lower_right, ..Attention::new(0.3) };
        Call { sizes, dtype, op: ScoredAttention { attention, program: program.clone(), first }, learned }
    };
    // Positions of 32 bits, and of 64.
    let (near, far) = ([1, 2, 3, 0], [0, 0, 1 << 33, (1 << 33) - 4]);
    vec![
        of([1, 2, 1, 21, 83, 32], DType::F32, &alibi, true, true, far, &[0]),
        of([2, 4, 2, 70, 40, 32], DType::BF16, &bent, false, false, near, &[0, 1]),
        of([1, 2, 2, 67, 67, 64], DType::F16, &hidden, true, false, near, &[]),
        // A block of keys that no query sees.
        of([2, 2, 1, 70, 150, 32], DType::F32, &steep, true, false, near, &[1]),
        of([2, 2, 1, 70, 40, 32], DType::F32, &warm, false, false, near, &[1, 4]),
        // One query: values of scores vary along keys alone.
        of([2, 4, 2, 1, 83, 32], DType::F16, &warm, true, true, far, &[1, 2, 4]),
    ]
}

/// Output, logsumexp and gradients of a call, of values rounded to its dtype.
fn all<R: Runtime>(rt: &R, call: &Call, dtype: DType) -> Result<Vec<Tensor<R>>> {
    let [b, h, kv, t, s, d] = call.sizes;
    let (stored, wide) = (call.dtype, if dtype.is_half() { DType::F32 } else { dtype });
    let draw = |shape: &[usize], seed, dtype: DType| {
        let x = Tensor::uniform(rt, shape, DType::F64, -1.0, 1.0, seed)?;
        x.to_dtype(stored)?.to_dtype(dtype)
    };
    // Heads are split by a view.
    let heads = |h, t, seed| draw(&[b, t, h, d], seed, dtype)?.transpose(1, 2);
    let g = heads(h, t, 4)?;
    let numbers = Tensor::arange(rt, 0i64, 1, t, DType::I64)?.reshape([t, 1])?;
    let forward = [
        heads(h, t, 1)?,
        heads(kv, s, 2)?,
        heads(kv, s, 3)?,
        draw(&[h, 1, 1], 5, wide)?,
        draw(&[b, 1, 1, s], 6, wide)?,
        draw(&[h, t, s], 7, wide)?,
        numbers,
        draw(&[t, 1], 8, wide)?,
    ];
    let forward: Vec<&Tensor<R>> = forward.iter().collect();
    let mut outs = Tensor::apply(call.op.clone().into(), &forward)?.into_vec();
    let saved: Vec<&Tensor<R>> = [&g, &outs[0], &outs[1]].into_iter().chain(forward).collect();
    let grad = ScoredAttentionGrad { of: call.op.clone(), learned: call.learned.into() };
    let grads = Tensor::apply(grad.into(), &saved)?;
    outs.extend(grads);
    Ok(outs)
}

#[test]
fn programs_have_the_values_of_the_cpu() -> Result<()> {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("emulated");
    emulated_gpu::compile_for(&folder, |listing| calls().iter().for_each(|call| drop(all(listing, call, call.dtype))))?;
    let (cuda, cpu) = (emulated_gpu::open(&folder)?, Cpu::with_threads(1));
    // Kernels of warpgroups too, where heads are wide enough.
    let wide: Vec<Call> = calls().into_iter().filter(|call| call.sizes[5] == 64).collect();
    let ways = calls().into_iter().map(|call| (false, call)).chain(wide.into_iter().map(|call| (true, call)));
    let ways: Vec<(bool, Call)> = ways.collect();
    let count = ways.len();
    for (grouped, call) in ways {
        let cuda = cuda.clone().with_warpgroups(grouped);
        let tolerance = 2f64.powi(match call.dtype {
            DType::F32 => -19,
            DType::F16 => -9,
            _ => -6,
        });
        let name = call.op.program.name();
        let (got, want) = (all(&cuda, &call, call.dtype)?, all(&cpu, &call, DType::F64)?);
        assert_eq!(got.len(), want.len());
        for (i, (got, want)) in got.iter().zip(want).enumerate() {
            let (got, want) = (got.to_f64s()?, want.to_f64s()?);
            let finite = |most: f64, x: &f64| if x.is_finite() { most.max(x.abs()) } else { most };
            let most = want.iter().fold(f64::MIN_POSITIVE, finite);
            for (at, (a, b)) in got.iter().zip(&want).enumerate() {
                assert!(a == b || (a - b).abs() <= tolerance * most, "output {i} of {name} at {at}: {a}, not {b}");
            }
        }
    }
    let loaded = cuda.loaded_kernels();
    for kernel in
        ["attention.cu attention ", "attention_grad.cu attention_grad_keys", "attention_grad.cu attention_grad_q"]
    {
        let found = loaded.iter().filter(|name| name.starts_with(kernel)).count();
        assert_eq!(found, count, "{kernel} of {loaded:?}");
    }
    Ok(())
}
