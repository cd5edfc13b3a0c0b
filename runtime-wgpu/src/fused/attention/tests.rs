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
const BINDING: u64 = 10 << 10;

/// A runtime whose kernels bind that many bytes of a buffer, and so many buffers, or as many as the adapter can.
fn limited(binding: u64, buffers: Option<u32>) -> Result<Wgpu> {
    let device = WgpuDevice::apart(|device| {
        device.limits.max_storage_buffer_binding_size = binding;
        device.limits.max_storage_buffers_per_shader_stage =
            buffers.unwrap_or(device.limits.max_storage_buffers_per_shader_stage);
    })?;
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

/// A case of a program with these arguments, some of them learned.
fn scored(
    operands: &[Vec<usize>],
    (attention, program, learned): (&Attention, &Program, &[usize]),
    args: Vec<Vec<usize>>,
) -> Case {
    let of = ScoredAttention { attention: attention.clone(), program: program.clone(), first: [3, 1, 2, 2] };
    let forward = FusedOp::ScoredAttention(of.clone());
    let backward = FusedOp::ScoredAttentionGrad(ScoredAttentionGrad { of, learned: learned.into() });
    let shapes = operands.iter().cloned().chain(args).collect();
    Case { forward, backward, shapes, dtype: DType::F32, views: false }
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
    let warm = Program::build("warm", 10, 0, |_, x, _| {
        vec![(x[0] * x[5] + x[6] * x[9]) * (x[7] + 1.5) + x[8] * (x[4] - x[3]).cast_like(x[0]) * 0.1]
    });
    let steep_args =
        Program::build("steep", 10, 0, |_, x, _| vec![x[0] + (x[5] + x[6]) * (x[3] - x[4] + 1).cast_like(x[0]).sqrt()]);
    let hidden_args = Program::build("hidden", 10, 0, |b, x, _| {
        vec![(x[3].ne(5) & (x[4] % 4).ne(1)).select((x[0] * x[5] + x[6]).tanh() * x[7], b.c(f64::NEG_INFINITY))]
    });
    let table = Program::build("table", 7, 0, |_, x, _| vec![(x[0] + x[5]) * (x[6] + 1.5)]);
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
            all.push(scored(&operands, (attention, program, &[]), vec![vec![h, 1, 1], vec![b, 1, 1, s]]));
        }
        // Arguments of heads, keys, queries, examples, and all scores, in the order of inputs.
        let args = || vec![vec![h, 1, 1], vec![b, 1, 1, s], vec![t, 1], vec![b, 1, 1, 1], vec![1]];
        for (attention, program, learned) in [
            (&plain, &warm, &[0, 1, 2, 3][..]),
            (&causal, &warm, &[2, 4]),
            (&ends, &warm, &[1, 3]),
            (&causal, &steep_args, &[0, 1]),
            (&plain, &hidden_args, &[0, 1, 2]),
        ] {
            all.push(scored(&operands, (attention, program, learned), args()));
        }
        // Arguments that vary along queries and keys, and one of heads.
        for (attention, shape) in
            [(&plain, vec![t, s]), (&causal, vec![b, 1, t, s]), (&ends, vec![1, if b > 1 { h } else { 1 }, t, s])]
        {
            all.push(scored(&operands, (attention, &table, &[0, 1]), vec![shape, vec![h, 1, 1]]));
        }
    }
    // The same calls in halves, of views.
    let again = |case: &Case, dtype| Case {
        forward: case.forward.clone(),
        backward: case.backward.clone(),
        shapes: case.shapes.clone(),
        dtype,
        views: true,
    };
    let halves = [3, 7, 11].map(|i| (i, DType::F16)).into_iter().chain([11, 15, 17].map(|i| (i, DType::BF16)));
    let halves: Vec<Case> = halves.map(|(i, dtype)| again(&all[i], dtype)).collect();
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

impl Case {
    /// The operands of gradients on the CPU, of values that the dtype has.
    fn drawn(&self, cpu: &Cpu) -> Result<Vec<Tensor<Cpu>>> {
        let draw = |(seed, shape): (usize, &Vec<usize>)| {
            let x = Tensor::uniform(cpu, &shape[..], DType::F64, -1.0, 1.0, seed as u64)?;
            x.to_dtype(self.dtype)?.to_dtype(DType::F64)
        };
        let ins = self.shapes.iter().enumerate().map(draw).collect::<Result<Vec<_>>>()?;
        let outs = Tensor::apply(self.forward.clone().into(), &ins.iter().collect::<Vec<_>>())?;
        let mut shape_of_g = outs[0].dims().to_vec();
        if self.views {
            shape_of_g[3] = 1;
        }
        let g = draw((99, &shape_of_g))?.broadcast_to(outs[0].dims())?;
        Ok([g].into_iter().chain(outs).chain(ins).collect())
    }

    /// These operands on another runtime.
    fn given(&self, gpu: &Wgpu, all: &[Tensor<Cpu>]) -> Result<Vec<Tensor<Wgpu>>> {
        let wide = self.dtype.compute();
        let is_mask = matches!(self.forward, FusedOp::Attention(_));
        let operand = |(i, x): (usize, &Tensor<Cpu>)| match i {
            AttentionGrad::GRAD if self.views => {
                moved(gpu, &x.narrow(3, 0, 1)?, self.dtype, false)?.broadcast_to(x.dims())
            }
            AttentionGrad::GRAD => moved(gpu, x, self.dtype, false),
            AttentionGrad::LSE => moved(gpu, x, wide, false),
            i if i < AttentionGrad::MASK => moved(gpu, x, self.dtype, self.views),
            _ => moved(gpu, x, if is_mask { self.dtype } else { wide }, false),
        };
        all.iter().enumerate().map(operand).collect()
    }
}

#[test]
fn gradients_of_scores_that_no_kernel_binds() -> Result<()> {
    let cpu = Cpu::with_threads(1);
    for case in cases() {
        // A device of its own, whose kernels are those of the case.
        let gpu = limited(BINDING, None)?;
        let what = format!("{:?} at {:?} in {}", case.backward, case.shapes, case.dtype);
        let all = case.drawn(&cpu)?;
        let want = Tensor::apply(case.backward.clone().into(), &all.iter().collect::<Vec<_>>())?;
        let given = case.given(&gpu, &all)?;
        let given: Vec<&Tensor<Wgpu>> = given.iter().collect();
        let got = Tensor::apply(case.backward.clone().into(), &given)?;
        let mut kernels = gpu.queue.device.pipelines.kinds();
        kernels.retain(|kind| kind.starts_with("attention"));
        let has_table = matches!(&case.forward, FusedOp::ScoredAttention(op) if op.program.name() == "table");
        let kinds = ["attention_grad_queries", "attention_grad_keys", "attention_grad_arg"];
        assert_eq!(kernels, kinds[..2 + usize::from(has_table)], "{what}");
        // A value that is added becomes a mask of the same kernel.
        let adds = matches!(&case.backward, FusedOp::ScoredAttentionGrad(op) if op.of.adds() && op.learned.is_empty());
        if case.dtype == DType::F32 && !adds {
            let decomposed = case.backward.decompose(&given).map(drop).map_err(|e| e.to_string());
            assert!(decomposed.is_err_and(|e| e.contains("max_storage_buffer_binding_size")), "{what}");
        }
        let tolerance = 2f64.powi(match case.dtype {
            DType::F32 => -17,
            DType::F16 => -9,
            _ => -6,
        });
        assert_eq!(got.len(), want.len(), "{what}");
        for (k, (got, want)) in got.iter().zip(&want).enumerate() {
            for (a, b) in got.to_f64s()?.iter().zip(want.to_f64s()?) {
                assert!((a - b).abs() <= tolerance * (1.0 + b.abs()), "gradient {k} of {what}: {a}, not {b}");
            }
        }
    }
    Ok(())
}

/// Operands in more buffers than a kernel binds are copied into one, and change no bit.
#[test]
fn programs_of_more_arguments_than_buffers() -> Result<()> {
    let cpu = Cpu::with_threads(1);
    for case in cases().iter().filter(|case| case.shapes.len() == 8).step_by(5) {
        let all = case.drawn(&cpu)?;
        let of = |buffers| {
            let gpu = limited(BINDING, buffers)?;
            let given = case.given(&gpu, &all)?;
            let given: Vec<&Tensor<Wgpu>> = given.iter().collect();
            let mut outs = Tensor::apply(case.forward.clone().into(), &given[AttentionGrad::QUERIES..])?;
            outs.extend(Tensor::apply(case.backward.clone().into(), &given)?);
            let mut kernels = gpu.queue.device.pipelines.kinds();
            kernels.retain(|kind| ["attention", "pack"].iter().any(|of| kind.starts_with(of)));
            kernels.sort_unstable();
            kernels.dedup();
            Ok::<_, numcore::Error>((outs.iter().map(Tensor::to_bytes).collect::<Result<Vec<_>>>()?, kernels))
        };
        let (many, few) = (of(None)?, of(Some(8))?);
        assert_eq!(few.1, ["attention", "attention_grad_keys", "attention_grad_queries", "pack"]);
        assert!(many.0 == few.0, "{:?} at {:?} in {}", case.backward, case.shapes, case.dtype);
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
        let gpu = limited(binding, None)?;
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

/// Calls of more operations than a launch may have: few in tests.
#[test]
fn long_calls_are_cut_into_launches() -> Result<()> {
    let (cpu, gpu) = (Cpu::with_threads(1), limited(BINDING, None)?);
    let op = FusedOp::Attention(Attention { causal: true, ..Attention::new(0.3) });
    // 16 blocks of queries, 2²⁰ operations: a launch may have 100 000.
    let drawn = |seed| Tensor::uniform(&cpu, [2, 2, 64, 8], DType::F32, -1.0, 1.0, seed);
    let ins = [drawn(1)?, drawn(2)?, drawn(3)?];
    let given = [&ins[0], &ins[1], &ins[2]].map(|x| moved(&gpu, x, DType::F32, false));
    let given = given.into_iter().collect::<Result<Vec<_>>>()?;
    let want = Tensor::apply(op.clone().into(), &ins.iter().collect::<Vec<_>>())?;
    gpu.synchronize()?;
    let got = Tensor::apply(op.into(), &given.iter().collect::<Vec<_>>())?;
    assert_eq!(gpu.queue.recorded(), 8);
    for (got, want) in got.iter().zip(&want) {
        for (a, b) in got.to_f64s()?.iter().zip(want.to_f64s()?) {
            assert!((a - b).abs() <= 1e-5, "{a}, not {b}");
        }
    }
    Ok(())
}
