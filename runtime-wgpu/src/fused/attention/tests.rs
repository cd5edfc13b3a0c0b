use std::sync::Arc;

use numcore::{
    DType, MemoryCategory, Result, Runtime, Tensor,
    fused::{Attention, AttentionGrad, FusedOp, ScoredAttention, ScoredAttentionGrad},
    ops::Apply,
    pointwise::Program,
};
use runtime_cpu::Cpu;

use crate::{Wgpu, device::WgpuDevice, queue::Queue};

/// The most bytes that kernels bind of a buffer: less than the scores of a call below have.
const BINDING: u64 = 8 << 10;

/// A runtime whose kernels bind that many bytes.
fn limited() -> Result<Wgpu> {
    let mut device = Arc::try_unwrap(WgpuDevice::open(0)?).expect("a device that no other test has");
    device.limits.max_storage_buffer_binding_size = BINDING;
    Ok(Wgpu { queue: Arc::new(Queue::new(Arc::new(device))), use_: MemoryCategory::Activations })
}

/// Gradients, their operands after `o` and `lse`, and the operation of forward.
struct Case {
    forward: FusedOp,
    backward: FusedOp,
    shapes: Vec<Vec<usize>>,
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
            all.push(Case { forward, backward: FusedOp::ScoredAttentionGrad(grad), shapes });
        }
    }
    all
}

/// Values of a tensor on another runtime, and in another dtype.
fn moved<R: Runtime>(rt: &R, x: &Tensor<Cpu>, dtype: DType) -> Result<Tensor<R>> {
    let mut values = x.to_f64s()?.into_iter();
    Tensor::from_f64_fn(rt, x.dims(), dtype, || values.next().unwrap_or(f64::NAN))
}

#[test]
fn gradients_of_scores_that_no_kernel_binds() -> Result<()> {
    let (gpu, cpu) = (limited()?, Cpu::with_threads(1));
    for case in cases() {
        let draw =
            |(seed, shape): (usize, &Vec<usize>)| Tensor::uniform(&cpu, &shape[..], DType::F64, -1.0, 1.0, seed as u64);
        let ins = case.shapes.iter().enumerate().map(draw).collect::<Result<Vec<_>>>()?;
        let outs = Tensor::apply(case.forward.clone().into(), &ins.iter().collect::<Vec<_>>())?;
        let g = draw((99, &outs[0].dims().to_vec()))?;
        let all: Vec<&Tensor<Cpu>> = [&g, &outs[0], &outs[1]].into_iter().chain(&ins).collect();
        let want = Tensor::apply(case.backward.clone().into(), &all)?;
        let given = all.iter().map(|x| moved(&gpu, x, DType::F32)).collect::<Result<Vec<_>>>()?;
        let given: Vec<&Tensor<Wgpu>> = given.iter().collect();
        // A value that is added becomes a mask of the same kernel.
        let adds = matches!(&case.backward, FusedOp::ScoredAttentionGrad(op) if op.of.adds());
        let decomposed = case.backward.decompose(&given).map(drop).map_err(|e| e.to_string());
        assert!(adds || decomposed.is_err_and(|e| e.contains("max_storage_buffer_binding_size")));
        let got = Tensor::apply(case.backward.clone().into(), &given)?;
        for (k, (got, want)) in got.iter().zip(&want).enumerate() {
            for (a, b) in got.to_f64s()?.iter().zip(want.to_f64s()?) {
                let what = format!("gradient {k} of {:?} at {:?}", case.forward, case.shapes);
                assert!((a - b).abs() <= 1e-5 * (1.0 + b.abs()), "{what}: {a}, not {b}");
            }
        }
    }
    Ok(())
}
