//! Attention at the boundaries of its partition: blocks of keys, groups of queries, chunks of keys. Against its
//! decomposition, and with equal bits for every thread count and level.

use crate::common::*;
use autograd::{Backward, Var};
use numcore::{
    DType, Runtime as _, Tensor,
    fused::{Attention, AttentionGrad, FusedOp, NnOps, SdpaOptions},
    ops::{Apply, PointwiseOps, ViewOps, cat},
};
use runtime_cpu::{Cpu, Simd};

/// Batch, query heads, key heads, queries, keys, depth, depth of values.
type Sizes = [usize; 7];

const SIZES: [Sizes; 8] = [
    // One key head with several chunks, of three blocks of keys each.
    [1, 1, 1, 1300, 1300, 8, 8],
    [1, 4, 2, 530, 530, 20, 20],
    [1, 1, 1, 257, 1100, 5, 3],
    [1, 2, 1, 1100, 257, 16, 70],
    [2, 24, 24, 65, 65, 4, 64],
    [1, 1, 1, 25, 300, 64, 1],
    // Large enough for `f32` by AMX: heads that share keys, several blocks and chunks of them.
    [1, 4, 2, 530, 530, 36, 40],
    // Enough heads that a task has all queries of one: its micro-panels cross the ends of blocks of keys.
    [4, 8, 4, 300, 300, 3, 2],
];

struct Ins {
    q: T,
    k: T,
    v: T,
    g: T,
    mask: T,
}

/// Operands; as parts of one projection, where they have the same sizes, if `parts`.
fn ins(cpu: &Cpu, dtype: DType, [b, h, kv, t, s, d, e]: Sizes, parts: bool) -> Ins {
    let make = |shape: [usize; 4], seed| {
        let [b, h, t, d] = shape;
        let dense = store(cpu, dtype, &shape, &draw(dtype, b * h * t * d, seed));
        if !parts {
            return dense;
        }
        let tokens = dense.transpose(1, 2).unwrap().reshape([b, t, h * d]).unwrap();
        let wide = cat(&[&tokens, &tokens, &tokens], 2).unwrap();
        wide.narrow(2, h * d, h * d).unwrap().reshape([b, t, h, d]).unwrap().transpose(1, 2).unwrap()
    };
    Ins {
        q: make([b, h, t, d], 1),
        k: make([b, kv, s, d], 2),
        v: make([b, kv, s, e], 3),
        g: make([b, h, t, e], 4),
        mask: store(cpu, dtype, &[t, s], &draw(dtype, t * s, 5)),
    }
}

/// Output, logsumexp and the three gradients.
fn all(ins: &Ins, op: &Attention, apply: impl Fn(FusedOp, &[&T]) -> Vec<T>) -> Vec<T> {
    let op = op.clone();
    let mut given = vec![&ins.q, &ins.k, &ins.v];
    given.extend(op.masked.then_some(&ins.mask));
    let mut outs = apply(FusedOp::Attention(op.clone()), &given);
    let mut saved = vec![&ins.g, &outs[0], &outs[1]];
    saved.extend(given);
    let grads = apply(FusedOp::AttentionGrad(AttentionGrad(op)), &saved);
    outs.extend(grads);
    outs
}

fn kernel(op: FusedOp, ins: &[&T]) -> Vec<T> {
    Tensor::apply(op.into(), ins).unwrap().into_iter().collect()
}

fn causal() -> Attention {
    Attention { causal: true, ..Attention::new(0.3) }
}

/// Options: plain ones, then windows, soft caps and queries that are counted from the end.
fn kinds() -> Vec<Attention> {
    let plain = Attention::new(0.3);
    let kind = |causal, masked| Attention { causal, masked, ..plain.clone() };
    let window = Attention { window: [Some(70), Some(9)], ..plain.clone() };
    vec![
        kind(true, false),
        kind(false, false),
        kind(true, true),
        Attention { softcap: Some(0.8), ..window.clone() },
        Attention { lower_right: true, masked: true, ..window },
        Attention { lower_right: true, softcap: Some(2.0), window: [Some(300), None], ..kind(true, false) },
        Attention { lower_right: true, ..kind(true, false) },
    ]
}

#[test]
fn as_its_decomposition() {
    let cpu = Cpu::with_threads(2);
    for sizes in SIZES {
        for op in kinds() {
            let ins = ins(&cpu, DType::F64, sizes, false);
            let want = all(&ins, &op, |op, ins| op.decompose(ins).unwrap().into_iter().collect());
            for (i, (got, want)) in all(&ins, &op, kernel).iter().zip(want).enumerate() {
                let what = format!("output {i} of {sizes:?}, {op:?}");
                close(got, &want.to_f64s().unwrap(), 1e-11, &what);
            }
        }
    }
}

#[test]
fn the_same_bits_wherever_operands_lie_and_whoever_computes() {
    let all_levels = runtimes();
    let apart: (Vec<Cpu>, Vec<Cpu>) = all_levels.iter().cloned().partition(|cpu| cpu.simd() == Simd::Amx);
    for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
        for sizes in SIZES.into_iter().step_by(if dtype.is_half() { 2 } else { 1 }) {
            for op in kinds().into_iter().step_by(3) {
                // Tiles have last bits of their own.
                let by_tiles = op.is_plain() && !op.masked && matches!(dtype, DType::F32 | DType::BF16);
                let groups = if by_tiles { vec![&apart.0, &apart.1] } else { vec![&all_levels] };
                for group in groups.into_iter().filter(|group| !group.is_empty()) {
                    let first = all(&ins(&group[0], dtype, sizes, false), &op, kernel);
                    for cpu in group {
                        let outs = all(&ins(cpu, dtype, sizes, true), &op, kernel);
                        for (i, (a, b)) in outs.iter().zip(&first).enumerate() {
                            let what = format!("output {i} of {dtype} {sizes:?}, {op:?} on {cpu:?}");
                            same_bits(a, b, &what);
                        }
                    }
                }
            }
        }
    }
}

/// What is before and after a sequence, in a batch or in a cache, changes no bit of its outputs.
#[test]
fn keys_that_a_query_does_not_see_change_no_bit() {
    for cpu in runtimes().iter().filter(|cpu| cpu.simd() != Simd::Amx) {
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            for (n, before, after) in [(30, 7, 3), (270, 301, 0), (530, 1, 40)] {
                let alone = ins(cpu, dtype, [1, 2, 1, n, n, 20, 12], false);
                let first = kernel(FusedOp::Attention(causal()), &[&alone.q, &alone.k, &alone.v]);
                let rows = n - 3..n;
                let queries = alone.q.narrow(2, rows.start, 3).unwrap();
                let op = Attention { lower_right: true, ..causal() };
                let last = kernel(FusedOp::Attention(op), &[&queries, &alone.k, &alone.v]);
                let of = |x: &T, start, len| x.narrow(2, start, len).unwrap();
                same_bits(&last[0], &of(&first[0], rows.start, 3), &format!("the last of {n} on {cpu:?}"));
                // The same among others, which a mask hides.
                let all = before + n + after;
                let others = ins(cpu, dtype, [1, 2, 1, all, all, 20, 12], false);
                let [q, k, v] = [(&alone.q, &others.q), (&alone.k, &others.k), (&alone.v, &others.v)]
                    .map(|(x, other)| cat(&[&of(other, 0, before), x, &of(other, before + n, after)], 2).unwrap());
                let inside = |i: usize| (before..before + n).contains(&i);
                let hidden = |i: usize| if inside(i / all) == inside(i % all) { 0.0 } else { f64::NEG_INFINITY };
                let mask = store(cpu, dtype, &[all, all], &(0..all * all).map(hidden).collect::<Vec<_>>());
                let packed = kernel(FusedOp::Attention(Attention { masked: true, ..causal() }), &[&q, &k, &v, &mask]);
                for (i, (got, due)) in packed.iter().zip(&first).enumerate() {
                    same_bits(
                        &of(got, before, n),
                        due,
                        &format!("output {i} of {dtype}, {n} after {before} on {cpu:?}"),
                    );
                }
            }
        }
    }
}

/// Equal weights of very many keys: a sum key by key would lose four digits.
#[test]
fn long_rows_keep_their_digits() {
    for cpu in &runtimes() {
        let keys = 20_000;
        let [q, k] = [1, keys].map(|rows| store(cpu, DType::F32, &[1, 1, rows, 8], &vec![0.0; 8 * rows]));
        let v = store(cpu, DType::F32, &[1, 1, keys, 8], &vec![f64::from(0.1f32); 8 * keys]);
        let op = Attention { lower_right: true, ..causal() };
        let out = &kernel(FusedOp::Attention(op), &[&q, &k, &v])[0];
        for x in out.to_f64s().unwrap() {
            assert!((x / f64::from(0.1f32) - 1.0).abs() < 2e-5, "{x} on {cpu:?}");
        }
    }
}

/// The level of tiles and the one below it, where there are both.
fn tiles_and_below() -> Option<[Cpu; 2]> {
    let levels = [Simd::Amx, Simd::Avx512];
    levels.iter().all(|s| s.is_available()).then(|| levels.map(|s| Cpu::builder().threads(2).simd(s).build()))
}

fn in_f64(x: &T) -> T {
    x.to_dtype(DType::F64).unwrap()
}

/// The root of the mean square of differences.
fn error(got: &T, want: &T) -> f64 {
    let (got, want) = (got.to_f64s().unwrap(), want.to_f64s().unwrap());
    (got.iter().zip(&want).map(|(g, w)| (g - w).powi(2)).sum::<f64>() / got.len() as f64).sqrt()
}

/// Sizes that go by tiles in `f32`: with smaller ones both sides would be the same kernel.
#[test]
fn tiles_are_as_precise_as_numbers_one_by_one() {
    let Some(cpus) = tiles_and_below() else { return };
    let sizes = [
        [1, 2, 2, 300, 300, 33, 33],
        [1, 2, 1, 300, 300, 40, 40],
        [1, 2, 2, 600, 600, 64, 64],
        [1, 1, 1, 300, 520, 128, 128],
        [1, 2, 2, 100, 700, 64, 24],
        [1, 1, 1, 300, 300, 40, 100],
        [2, 2, 1, 33, 260, 33, 64],
    ];
    for (sizes, causal) in sizes.into_iter().flat_map(|s| [(s, true), (s, false)]) {
        let known = ins(&cpus[0], DType::F32, sizes, false);
        let [q, k, v, g, mask] = [&known.q, &known.k, &known.v, &known.g, &known.mask].map(in_f64);
        let op = Attention { causal, ..Attention::new(0.3) };
        let want = all(&Ins { q, k, v, g, mask }, &op, kernel);
        let [tiles, below] = cpus.clone().map(|cpu| {
            let got = all(&ins(&cpu, DType::F32, sizes, false), &op, kernel);
            got.iter().zip(&want).map(|(got, want)| error(got, want)).collect::<Vec<f64>>()
        });
        for (i, (tiles, below)) in tiles.iter().zip(&below).enumerate() {
            assert!(tiles <= below, "output {i} of {sizes:?}, causal {causal}: off by {tiles}, and by {below} without");
        }
    }
}

/// The split terms of an element that is not finite, or rounds to infinity as a bf16, are NaN: affected outputs are
/// recomputed.
#[test]
fn infinities_come_out_as_at_other_levels() {
    let Some(cpus) = tiles_and_below() else { return };
    let sizes @ [b, h, _, t, s, _, e] = [1, 2, 2, 600, 600, 40, 36];
    for (x, y) in [(f64::INFINITY, f64::NEG_INFINITY), (f64::from(f32::MAX), 1e-3), (f64::NAN, 1.0)] {
        for causal in [true, false] {
            let outs = cpus.clone().map(|cpu| {
                let mut known = ins(&cpu, DType::F32, sizes, false);
                let mut v = known.v.to_f64s().unwrap();
                // Of the first head.
                (v[570 * e + 3], v[595 * e + 3], v[571 * e + 20]) = (x, y, x);
                known.v = store(&cpu, DType::F32, &[b, h, s, e], &v);
                let op = Attention { causal, ..Attention::new(0.01) };
                kernel(FusedOp::Attention(op), &[&known.q, &known.k, &known.v]).remove(0)
            });
            let [tiles, below] = outs.map(|out| out.to_f64s().unwrap());
            for (i, (tiles, below)) in tiles.iter().zip(&below).enumerate() {
                let what = format!("output {i} beside {x}, causal {causal}: {tiles}, and {below} without tiles");
                let near = (tiles - below).abs() <= 1e-4 * below.abs().max(1.0);
                assert!(tiles == below || tiles.is_nan() && below.is_nan() || near, "{what}");
            }
            let strange = |from: &[f64]| from.iter().filter(|x| x.abs() > 1e30 || x.is_nan()).count();
            let first = t * e;
            assert!(strange(&tiles[..first]) >= 2 * (t - 571) && strange(&tiles[first..]) == 0);
        }
    }
}

/// Queries of which a finite mask hides every key attend to all of them equally, and have gradients, as in the
/// decomposition. The lowest finite value is not `−∞`, also in units of log 2, and at such a shift a logsumexp does not
/// determine the weights.
#[test]
fn masks_of_the_lowest_number() {
    let cpu = Cpu::with_threads(2);
    let wide = |x: &T, to| x.to_dtype(to).unwrap();
    for (dtype, computed, lowest, most) in [
        (DType::F32, DType::F32, f64::from(f32::MIN), 2e-5),
        (DType::F64, DType::F64, f64::MIN, 1e-11),
        (DType::BF16, DType::F32, half::bf16::MIN.to_f64(), 8e-3),
        (DType::F16, DType::F32, half::f16::MIN.to_f64(), 1e-3),
    ] {
        // A shift so large that scores are lost in rounding.
        let far = match dtype {
            DType::F16 => lowest,
            DType::F64 => -1e18,
            _ => -1e9,
        };
        for sizes @ [_, _, _, t, s, ..] in [[1, 2, 1, 6, 7, 4, 3], [1, 1, 1, 30, 300, 16, 16]] {
            for unused in [false, true] {
                let mut known = ins(&cpu, dtype, sizes, false);
                let value = |i: usize, j: usize| match i {
                    1 => lowest,
                    2 => far,
                    3 if j < s / 2 => lowest,
                    4 => f64::NEG_INFINITY,
                    5 if j > 0 => lowest,
                    _ => 0.0,
                };
                let values: Vec<f64> = (0..t * s).map(|i| value(i / s, i % s)).collect();
                known.mask = store(&cpu, dtype, &[t, s], &values);
                if unused {
                    // The outputs of these queries are not used, so the kernel's own gradients run.
                    let read: Vec<f64> = (0..t).map(|i| if i == 1 || i == 2 { 0.0 } else { 1.0 }).collect();
                    known.g = known.g.mul(&store(&cpu, dtype, &[t, 1], &read)).unwrap();
                }
                let op = Attention { masked: true, ..Attention::new(0.3) };
                let [q, k, v, g, mask] =
                    [&known.q, &known.k, &known.v, &known.g, &known.mask].map(|x| wide(x, computed));
                let exact = Ins { q, k, v, g, mask };
                let want = all(&exact, &op, |op, ins| op.decompose(ins).unwrap().into_iter().collect());
                for (i, (got, want)) in all(&known, &op, kernel).iter().zip(&want).enumerate() {
                    let (got, want) = (got.to_f64s().unwrap(), want.to_f64s().unwrap());
                    let what = format!("output {i} of {dtype} {sizes:?}, unused {unused}");
                    if i == 1 {
                        // The lowest bf16 is not the lowest `f32`, which a logsumexp becomes.
                        let near = |g: f64, w: f64| g == w || (g - w).abs() <= 1e-2 * w.abs().max(1.0);
                        assert!(got.iter().zip(&want).all(|(&g, &w)| near(g, w)), "{what}: {got:?}, expected {want:?}");
                        continue;
                    }
                    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
                    let off = norm(&mut got.iter().zip(&want).map(|(g, w)| g - w));
                    let size = norm(&mut want.iter().copied());
                    assert!(off <= most * size, "{what}: off by {off}, of {size}: {got:?}, expected {want:?}");
                }
            }
        }
    }
}

/// Half-precision elements are upcast: the only losses are the rounding of outputs and, in bf16, of weights and of
/// gradients of scores.
#[test]
fn halves_as_in_full_precision() {
    let wide = |x: &T| x.to_dtype(DType::F64).unwrap();
    // One for each level.
    let cpus: Vec<Cpu> = runtimes().into_iter().skip(3).collect();
    let sizes = [[1, 1, 1, 1300, 1300, 8, 8], [1, 4, 2, 150, 150, 20, 20], [1, 2, 1, 300, 257, 16, 70]];
    let sizes = sizes.into_iter().chain([[1, 2, 2, 1, 1, 64, 64], [2, 3, 3, 128, 128, 64, 64], SIZES[5]]);
    for ((dtype, most), sizes) in sizes.flat_map(|s| [((DType::F16, 1e-3), s), ((DType::BF16, 8e-3), s)]) {
        for op in kinds().into_iter().step_by(2) {
            let known = ins(&cpus[0], dtype, sizes, true);
            let [q, k, v, g, mask] = [&known.q, &known.k, &known.v, &known.g, &known.mask].map(wide);
            let known = Ins { q, k, v, g, mask };
            let want = all(&known, &op, |op, ins| op.decompose(ins).unwrap().into_iter().collect());
            for cpu in &cpus {
                let got = all(&ins(cpu, dtype, sizes, true), &op, kernel);
                for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                    let what = format!("output {i} of {dtype} {sizes:?}, {op:?} on {cpu:?}");
                    assert_eq!(got.dtype(), if i == 1 { DType::F32 } else { dtype }, "{what}");
                    let (got, want) = (got.to_f64s().unwrap(), want.to_f64s().unwrap());
                    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
                    // A query that sees nothing has a logsumexp of −∞.
                    let off = norm(&mut got.iter().zip(&want).map(|(g, w)| if g == w { 0.0 } else { g - w }));
                    // Gradients of a query with one key are nothing but rounding errors.
                    let size = norm(&mut want.iter().copied().filter(|w| w.is_finite())).max(1.0);
                    assert!(off <= most * size, "{what}: off by {off}, of {size}");
                }
            }
        }
    }
}

#[test]
fn outputs_lie_as_what_they_are_outputs_for() {
    let cpu = Cpu::with_threads(1);
    for dtype in [DType::F32, DType::BF16] {
        let ins = ins(&cpu, dtype, [2, 3, 3, 40, 40, 8, 8], true);
        let outs = all(&ins, &causal(), kernel);
        for i in [0, 2, 3, 4] {
            assert!(outs[i].transpose(1, 2).unwrap().layout().is_contiguous(), "output {i}: {:?}", outs[i].layout());
        }
        let dense = [&ins.q, &ins.k, &ins.v, &ins.g, &ins.mask].map(|x| x.contiguous().unwrap());
        let [q, k, v, g, mask] = dense;
        let outs = all(&Ins { q, k, v, g, mask }, &causal(), kernel);
        assert!(outs.iter().all(|x| x.layout().is_contiguous()));
    }
}

/// Queries, keys and values of one projection: their gradients form one tensor without a copy.
#[test]
fn gradients_of_parts_of_one_projection_lie_as_the_parts() {
    let cpu = Cpu::with_threads(1);
    for [b, h, kv, t, d] in [[8, 2, 2, 256, 64], [8, 4, 1, 200, 16]] {
        let width = (h + 2 * kv) * d;
        let x = store(&cpu, DType::F32, &[b, t, width], &draw(DType::F32, b * t * width, 6));
        let heads = |x: &T, from: usize, n: usize| {
            x.narrow(2, from * d, n * d).unwrap().reshape([b, t, n, d]).unwrap().transpose(1, 2).unwrap()
        };
        let g = store(&cpu, DType::F32, &[b, h, t, d], &draw(DType::F32, b * h * t * d, 7));
        let mask = g.clone();
        let parts = Ins { q: heads(&x, 0, h), k: heads(&x, h, kv), v: heads(&x, h + kv, kv), g, mask };
        let grads = &all(&parts, &causal(), kernel)[2..];
        assert!(grads.iter().all(|dx| dx.shares_memory_with(&grads[0])));
        let copied = |x: &T| x.copy().unwrap();
        let alone = Ins { q: copied(&parts.q), k: copied(&parts.k), v: copied(&parts.v), ..parts };
        let want = &all(&alone, &causal(), kernel)[2..];
        assert!(!want[0].shares_memory_with(&want[1]));
        grads.iter().zip(want).for_each(|(a, b)| same_bits(a, b, "a gradient"));

        if h != kv {
            continue;
        }
        // Through the tape: as much memory as the gradient takes, and no second time.
        let bias = Tensor::zeros(&cpu, [width], DType::F32).unwrap();
        let wide = Var::new(x).add(&Var::leaf("bias", bias).unwrap()).unwrap();
        let pieces = wide.chunk(2, 3).unwrap();
        let head = |x: &Var<Cpu>| x.reshape([b, t, h, d]).unwrap().transpose(1, 2).unwrap();
        let out = head(&pieces[0])
            .attention_with(
                &head(&pieces[1]),
                &head(&pieces[2]),
                SdpaOptions { causal: true, scale: Some(0.3), ..Default::default() },
            )
            .unwrap();
        let before = cpu.memory().total.live;
        cpu.reset_peak();
        let grad = Backward::from(&out, &Var::new(alone.g)).unwrap().grads(&[&wide]).unwrap().remove(0).unwrap();
        let (most, size) = (cpu.memory().total.peak - before, b * t * width * size_of::<f32>());
        assert!(most < 3 * size / 2, "{most} bytes for a gradient of {size}");
        same_bits(&heads(&grad.value().unwrap(), 2 * h, h), &want[2], "the gradient of values");
    }
}
