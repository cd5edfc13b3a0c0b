//! Attention by programs of scores at the boundaries of its partition: against its decomposition, and with equal bits
//! for every thread count and level.

use crate::common::*;
use numcore::{
    DType, Tensor,
    fused::{Attention, FusedOp, ScoredAttention, ScoredAttentionGrad},
    ops::{Apply, PointwiseOps, ReduceOps, ViewOps},
    pointwise::Program,
};
use runtime_cpu::{Cpu, Simd};
use smallvec::SmallVec;

/// Batch, query heads, key heads, queries, keys, depth, depth of values.
type Sizes = [usize; 7];

const SIZES: [Sizes; 6] = [
    [1, 2, 1, 600, 600, 8, 8],
    [2, 4, 2, 130, 530, 5, 20],
    [1, 1, 1, 257, 1100, 5, 3],
    [1, 2, 1, 700, 257, 16, 7],
    [2, 3, 3, 25, 300, 4, 1],
    [1, 4, 1, 1, 65, 3, 2],
];

/// Programs over a slope of each head, a bias of each key, a value of each score, and a number of each query.
fn programs() -> Vec<Program> {
    vec![
        Program::build("alibi", 9, 0, |_, x, _| vec![x[0] + x[5] * (x[4] - x[3]).cast_like(x[0]) * 0.01]),
        Program::build("bent", 9, 0, |_, x, _| vec![((x[0] * x[5] + x[6]) * 0.5).tanh() * 2.0 + x[7]]),
        Program::build("hidden", 9, 0, |b, x, _| {
            let seen = (x[4] % 3).ne(x[8] % 3) & x[3].ne(2);
            vec![seen.select(x[0] * x[7], b.c(f64::NEG_INFINITY))]
        }),
        Program::build("given", 9, 0, |_, x, _| vec![x[6] + x[2].cast_like(x[6]) * 0.1]),
        Program::build("steep", 9, 0, |_, x, _| vec![x[0] + x[5] * (x[3] - x[4] + 1).cast_like(x[0]).sqrt()]),
    ]
}

/// Kinds of masks. A program whose slope has no value at later keys is causal.
fn kinds() -> Vec<(ScoredAttention, SmallVec<[usize; 4]>)> {
    let of = |program: &Program, causal, lower_right, learned: &[usize]| {
        let attention = Attention { causal, lower_right, ..Attention::new(0.3) };
        (ScoredAttention { attention, program: program.clone(), first: [0, 1, 2, 3] }, learned.into())
    };
    let programs = programs();
    let [alibi, bent, hidden, given, steep] = &programs[..] else { unreachable!() };
    vec![
        of(alibi, true, false, &[]),
        of(alibi, true, true, &[0]),
        of(bent, false, false, &[0, 1, 2]),
        of(bent, true, false, &[2]),
        of(bent, true, true, &[1, 2]),
        of(hidden, false, false, &[2]),
        of(hidden, true, false, &[]),
        of(given, false, false, &[1]),
        of(given, true, true, &[]),
        of(steep, true, false, &[0]),
    ]
}

fn operands(cpu: &Cpu, dtype: DType, [b, h, kv, t, s, d, e]: Sizes, strided: bool) -> Vec<T> {
    let make = |dtype: DType, shape: &[usize], seed| {
        let numel = shape.iter().product();
        if !strided || shape.len() < 4 {
            return store(cpu, dtype, shape, &draw(dtype, numel, seed));
        }
        let dense = store(cpu, dtype, shape, &draw(dtype, numel, seed));
        dense.transpose(1, 2).unwrap().contiguous().unwrap().transpose(1, 2).unwrap()
    };
    let wide = dtype.compute();
    vec![
        make(dtype, &[b, h, t, e], 4),
        make(dtype, &[b, h, t, d], 1),
        make(dtype, &[b, kv, s, d], 2),
        make(dtype, &[b, kv, s, e], 3),
        make(wide, &[h, 1, 1], 5),
        make(wide, &[b, 1, 1, s], 6),
        make(wide, &[h, t, s], 7),
        make(DType::I64, &[t, 1], 8),
    ]
}

/// Output, logsumexp and all gradients.
fn all(
    x: &[T],
    (op, learned): &(ScoredAttention, SmallVec<[usize; 4]>),
    apply: impl Fn(FusedOp, &[&T]) -> Vec<T>,
) -> Vec<T> {
    let forward: Vec<&T> = x[1..].iter().collect();
    let mut outs = apply(FusedOp::ScoredAttention(op.clone()), &forward);
    let saved: Vec<&T> = [&x[0], &outs[0], &outs[1]].into_iter().chain(forward).collect();
    let grad = ScoredAttentionGrad { of: op.clone(), learned: learned.clone() };
    let grads = apply(FusedOp::ScoredAttentionGrad(grad), &saved);
    outs.extend(grads);
    outs
}

fn kernel(op: FusedOp, ins: &[&T]) -> Vec<T> {
    Tensor::apply(op.into(), ins).unwrap().into_iter().collect()
}

#[test]
fn as_its_decomposition() {
    let cpu = Cpu::with_threads(2);
    for sizes in SIZES {
        for kind in kinds() {
            let x = operands(&cpu, DType::F64, sizes, false);
            let want = all(&x, &kind, |op, ins| op.decompose(ins).unwrap().into_iter().collect());
            let got = all(&x, &kind, kernel);
            assert_eq!(got.len(), want.len());
            for (i, (got, want)) in got.iter().zip(want).enumerate() {
                assert_eq!(got.dims(), want.dims());
                let name = kind.0.program.name();
                let what = format!("output {i} of {sizes:?}, {name}, {:?}", kind.0.attention);
                close(got, &want.to_f64s().unwrap(), 1e-10, &what);
            }
        }
    }
}

#[test]
fn the_same_bits_wherever_operands_lie_and_whoever_computes() {
    let levels: Vec<Cpu> = runtimes().into_iter().filter(|cpu| cpu.simd() != Simd::Amx).collect();
    for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
        for sizes in SIZES.into_iter().step_by(if dtype.is_half() { 2 } else { 1 }) {
            for kind in kinds().into_iter().step_by(2) {
                let first = all(&operands(&levels[0], dtype, sizes, false), &kind, kernel);
                for cpu in &levels {
                    let outs = all(&operands(cpu, dtype, sizes, true), &kind, kernel);
                    for (i, (a, b)) in outs.iter().zip(&first).enumerate() {
                        let what = format!("output {i} of {dtype} {sizes:?}, {} on {cpu:?}", kind.0.program.name());
                        same_bits(a, b, &what);
                    }
                }
            }
        }
    }
}

#[test]
fn half_precision_is_near_its_decomposition() {
    let cpu = Cpu::with_threads(2);
    for dtype in [DType::F16, DType::BF16] {
        for kind in kinds().into_iter().filter(|(op, _)| op.program.name() != "steep") {
            let x = operands(&cpu, dtype, SIZES[1], false);
            let wide: Vec<T> = x
                .iter()
                .map(|x| x.to_dtype(if x.dtype().is_float() { DType::F64 } else { x.dtype() }).unwrap())
                .collect();
            let [got, want] = [&x, &wide].map(|x| all(x, &kind, kernel));
            for (i, (got, want)) in got.iter().zip(want).enumerate() {
                let (got, want) = (got.to_f64s().unwrap(), want.to_f64s().unwrap());
                let most = want.iter().fold(1.0, |most: f64, x| most.max(x.abs()));
                let off = got.iter().zip(&want).fold(0.0, |off: f64, (g, w)| off.max((g - w).abs()));
                let what = format!("output {i} of {dtype}, {}", kind.0.program.name());
                assert!(off <= 8.0 * dtype.epsilon() * most, "{what}: {off} of {most}");
            }
        }
    }
}

#[test]
fn a_program_that_changes_nothing_keeps_the_bits() {
    // Tiles have last bits of their own.
    let cpu = Cpu::builder().threads(2).simd(Simd::Avx2).build();
    let [g, q, k, v] = &operands(&cpu, DType::F32, SIZES[0], false)[..4] else { unreachable!() };
    let attention = Attention { causal: true, ..Attention::new(0.3) };
    let program = Program::build("same", 5, 0, |_, x, _| vec![x[0]]);
    let op = ScoredAttention { attention: attention.clone(), program, first: [0; 4] };
    let of = |forward: FusedOp, backward: FusedOp| {
        let mut outs = kernel(forward, &[q, k, v]);
        let grads = kernel(backward, &[g, &outs[0], &outs[1], q, k, v]);
        outs.extend(grads);
        outs
    };
    let want =
        of(FusedOp::Attention(attention.clone()), FusedOp::AttentionGrad(numcore::fused::AttentionGrad(attention)));
    let got = of(
        FusedOp::ScoredAttention(op.clone()),
        FusedOp::ScoredAttentionGrad(ScoredAttentionGrad { of: op, learned: SmallVec::new() }),
    );
    got.iter().zip(&want).enumerate().for_each(|(i, (a, b))| same_bits(a, b, &format!("output {i}")));
    assert!(got.iter().all(|x| x.sum_all().unwrap().item().unwrap().is_finite()));
}

/// A long causal call is decomposed by parts, whose gradients are added up: truth values have none.
#[test]
fn a_flag_before_a_learned_argument_has_no_gradient() {
    let cpu = Cpu::with_threads(2);
    let sizes = [1, 2, 1, 600, 600, 8, 8];
    let mut x = operands(&cpu, DType::F64, sizes, false);
    let flags = x[5].gt(0.0).unwrap();
    x.splice(4.., [flags, x[4].clone()]);
    let program = Program::build("flagged", 7, 0, |_, x, _| vec![x[5].select((x[0] * x[6]).tanh(), x[0])]);
    let attention = Attention { causal: true, ..Attention::new(0.3) };
    let kind = (ScoredAttention { attention, program, first: [0; 4] }, SmallVec::from_slice(&[1]));
    let want = all(&x, &kind, |op, ins| op.decompose(ins).unwrap().into_iter().collect());
    for (i, (got, want)) in all(&x, &kind, kernel).iter().zip(want).enumerate() {
        assert_eq!((got.dims(), got.dtype()), (want.dims(), want.dtype()));
        close(&got.to_dtype(DType::F64).unwrap(), &want.to_f64s().unwrap(), 1e-10, &format!("output {i}"));
    }
}

#[test]
fn calls_that_kernels_do_not_know_are_refused() {
    let cpu = Cpu::with_threads(1);
    let x = operands(&cpu, DType::F32, [1, 1, 1, 4, 4, 2, 2], false);
    let plain = Program::build("plain", 5, 0, |_, x, _| vec![x[0]]);
    let refused = |attention: Attention, program: &Program, words: &str| {
        let op = ScoredAttention { attention, program: program.clone(), first: [0; 4] };
        let error = Tensor::apply(FusedOp::ScoredAttention(op).into(), &[&x[1], &x[2], &x[3]]).unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
    };
    refused(Attention { softcap: Some(2.0), ..Attention::new(1.0) }, &plain, "soft cap into the program");
    refused(Attention { masked: true, ..Attention::new(1.0) }, &plain, "write a mask");
    let index = Program::build("index", 5, 0, |b, x, _| vec![x[0] + b.index().cast_like(x[0])]);
    refused(Attention::new(1.0), &index, "no index");
    let short = Program::build("short", 2, 0, |_, x, _| vec![x[0] + x[1]]);
    refused(Attention::new(1.0), &short, "four positions");
    let two = Program::build("two", 5, 0, |_, x, _| vec![x[0], x[0]]);
    refused(Attention::new(1.0), &two, "one value");
}
