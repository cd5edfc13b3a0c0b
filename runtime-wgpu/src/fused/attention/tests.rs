use std::sync::Arc;

use numcore::{
    DType, MemoryCategory, Result, Runtime, Tensor,
    fused::{Attention, AttentionGrad, FusedOp, ScoredAttention, ScoredAttentionGrad},
    ops::{Apply, PointwiseOps, ViewOps},
    pointwise::Program,
};
use runtime_cpu::Cpu;

use crate::{Wgpu, device::WgpuDevice, queue::Queue};

/// The most bytes that kernels bind of a buffer: less than the scores of a call below have.
const BINDING: u64 = 8 << 10;

/// A runtime whose kernels bind that many bytes of a buffer.
fn limited(binding: u64) -> Result<Wgpu> {
    let mut device = Arc::try_unwrap(WgpuDevice::open(0)?).expect("a device that no other test has");
    device.limits.max_storage_buffer_binding_size = binding;
    Ok(Wgpu { queue: Arc::new(Queue::new(Arc::new(device))), use_: MemoryCategory::Activations })
}

/// Gradients, their operands after `o` and `lse`, and the operation of forward.
struct Case {
    forward: FusedOp,
    backward: FusedOp,
    shapes: Vec<Vec<usize>>,
    dtype: DType,
    /// True if heads are split by a view, and one gradient stands for all columns of the output.
    views: bool,
}

fn cases() -> Vec<Case> {
    let plain = Attention::new(0.4);
    let causal = Attention { causal: true, ..plain.clone() };
    let bent = Program::build("bent", 7, 0, |_, x, _| {
        vec![(x[0] * x[5] + x[6]).tanh() * 2.0 + (x[4] / 3 - x[2]).cast_like(x[0]) * 0.1]
    });
    let alibi = Program::build("alibi", 7, 0, |_, x, _| vec![x[0] + x[5] * (x[4] - x[3]).cast_like(x[0]) * 0.1]);
    let steep = Program::build("steep", 7, 0, |_, x, _| vec![x[0] * (x[3] - x[4] + 1).cast_like(x[0]).sqrt()]);
    // The query at position 5 sees no key.
    let hidden = Program::build("hidden", 7, 0, |b, x, _| {
        vec![(x[3].ne(5) & (x[4] % 4).ne(1)).select(x[0] * x[5] + x[6], b.c(f64::NEG_INFINITY))]
    });
    let mut all = Vec::new();
    for [b, h, kv, t, s, d, e] in [[1, 2, 1, 33, 40, 8, 6], [2, 3, 3, 30, 17, 5, 9]] {
        let operands = vec![vec![b, h, t, d], vec![b, kv, s, d], vec![b, kv, s, e]];
        let ends = Attention { causal: true, lower_right: true, ..plain.clone() };
        for attention in [&plain, &causal, &ends] {
            for masked in [false, true] {
                let op = Attention { masked, ..attention.clone() };
                let mut shapes = operands.clone();
                shapes.extend(masked.then(|| vec![t, s]));
                all.push(Case {
                    forward: FusedOp::Attention(op.clone()),
                    backward: FusedOp::AttentionGrad(AttentionGrad(op)),
                    shapes,
                    dtype: DType::F32,
                    views: false,
                });
            }
        }
        for (attention, program) in
            [(&plain, &bent), (&ends, &bent), (&causal, &alibi), (&causal, &steep), (&plain, &hidden)]
        {
            let of = ScoredAttention { attention: attention.clone(), program: program.clone(), first: [3, 1, 2, 2] };
            let mut shapes = operands.clone();
            shapes.extend([vec![h, 1, 1], vec![b, 1, 1, s]]);
            let forward = FusedOp::ScoredAttention(of.clone());
            let grad = ScoredAttentionGrad { of, learned: [].into_iter().collect() };
            let backward = FusedOp::ScoredAttentionGrad(grad);
            all.push(Case { forward, backward, shapes, dtype: DType::F32, views: false });
        }
    }
    // The same calls in halves, of views.
    let again = |case: &Case| Case {
        forward: case.forward.clone(),
        backward: case.backward.clone(),
        shapes: case.shapes.clone(),
        dtype: DType::F16,
        views: true,
    };
    let halves = [again(&all[3]), again(&all[7])];
    all.extend(halves);
    all
}

/// Values of an operand on another runtime. The first three are heads, which `views` splits from their rows.
fn moved<R: Runtime>(rt: &R, x: &Tensor<Cpu>, dtype: DType, views: bool) -> Result<Tensor<R>> {
    let given = |x: &Tensor<Cpu>| {
        let mut values = x.to_f64s()?.into_iter();
        Tensor::from_f64_fn(rt, x.dims(), dtype, || values.next().unwrap_or(f64::NAN))
    };
    if views { given(&x.transpose(1, 2)?)?.transpose(1, 2) } else { given(x) }
}

#[test]
fn gradients_of_scores_that_no_kernel_binds() -> Result<()> {
    let cpu = Cpu::with_threads(1);
    for case in cases() {
        // A device of its own, whose kernels are those of the case.
        let gpu = limited(BINDING)?;
        let what = format!("{:?} at {:?} in {}", case.forward, case.shapes, case.dtype);
        let draw = |(seed, shape): (usize, &Vec<usize>)| {
            let x = Tensor::uniform(&cpu, &shape[..], DType::F64, -1.0, 1.0, seed as u64)?;
            x.to_dtype(case.dtype)?.to_dtype(DType::F64)
        };
        let ins = case.shapes.iter().enumerate().map(draw).collect::<Result<Vec<_>>>()?;
        let outs = Tensor::apply(case.forward.clone().into(), &ins.iter().collect::<Vec<_>>())?;
        let mut shape_of_g = outs[0].dims().to_vec();
        if case.views {
            shape_of_g[3] = 1;
        }
        let g = draw((99, &shape_of_g))?;
        let whole = g.broadcast_to(outs[0].dims())?;
        let all: Vec<&Tensor<Cpu>> = [&whole, &outs[0], &outs[1]].into_iter().chain(&ins).collect();
        let want = Tensor::apply(case.backward.clone().into(), &all)?;
        let wide = case.dtype.compute();
        let is_mask = matches!(case.forward, FusedOp::Attention(_));
        let operand = |(i, x): (usize, &&Tensor<Cpu>)| match i {
            AttentionGrad::GRAD => moved(&gpu, &g, case.dtype, false)?.broadcast_to(x.dims()),
            AttentionGrad::LSE => moved(&gpu, x, wide, false),
            i if i < AttentionGrad::MASK => moved(&gpu, x, case.dtype, case.views),
            _ => moved(&gpu, x, if is_mask { case.dtype } else { wide }, false),
        };
        let given = all.iter().enumerate().map(operand).collect::<Result<Vec<_>>>()?;
        let given: Vec<&Tensor<Wgpu>> = given.iter().collect();
        let got = Tensor::apply(case.backward.clone().into(), &given)?;
        let mut kernels = gpu.queue.device.pipelines.kinds();
        kernels.retain(|kind| kind.starts_with("attention"));
        assert_eq!(kernels, ["attention_grad_queries", "attention_grad_keys"], "{what}");
        // A value that is added becomes a mask of the same kernel.
        let adds = matches!(&case.backward, FusedOp::ScoredAttentionGrad(op) if op.of.adds());
        if case.dtype == DType::F32 && !adds {
            let decomposed = case.backward.decompose(&given).map(drop).map_err(|e| e.to_string());
            assert!(decomposed.is_err_and(|e| e.contains("max_storage_buffer_binding_size")), "{what}");
        }
        let tolerance = if case.dtype == DType::F32 { 1e-5 } else { 2f64.powi(-9) };
        for (k, (got, want)) in got.iter().zip(&want).enumerate() {
            for (a, b) in got.to_f64s()?.iter().zip(want.to_f64s()?) {
                assert!((a - b).abs() <= tolerance * (1.0 + b.abs()), "gradient {k} of {what}: {a}, not {b}");
            }
        }
    }
    Ok(())
}

#[test]
fn causal_calls_are_decomposed_while_a_kernel_binds_a_part() -> Result<()> {
    let program = Program::build("steep", 5, 0, |_, x, _| vec![x[0] * (x[3] - x[4] + 1).cast_like(x[0]).sqrt()]);
    let attention = Attention { causal: true, ..Attention::new(0.4) };
    let of = ScoredAttention { attention, program, first: [0; 4] };
    let grad = ScoredAttentionGrad { of, learned: [].into_iter().collect() };
    // All scores are 1296 KiB; the last of 9 parts has 144 KiB.
    for (binding, kernels) in [(150 << 10, 0), (120 << 10, 2)] {
        let gpu = limited(binding)?;
        let given = [4, 4, 0, 4, 4, 4].map(|width| match width {
            0 => Tensor::zeros(&gpu, [1, 1, 576], DType::F32),
            width => Tensor::uniform(&gpu, [1, 1, 576, width], DType::F32, -1.0, 1.0, 1),
        });
        let given = given.into_iter().collect::<Result<Vec<_>>>()?;
        Tensor::apply(grad.clone().into(), &given.iter().collect::<Vec<_>>())?;
        let kinds = gpu.queue.device.pipelines.kinds();
        assert_eq!(kinds.iter().filter(|kind| kind.starts_with("attention_grad")).count(), kernels, "{binding}");
    }
    Ok(())
}
