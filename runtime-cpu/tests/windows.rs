//! Convolutions and pooling where they are cut: an image a task and parts of one, weights packed once and weights that are too
//! large for it, windows side by side and those left over. Against the decomposition, and the same bits whoever computes.

mod common;

use common::*;
use numcore::{
    DType, Tensor,
    fused::{Conv, ConvKind, FusedOp, MaxPool, MaxPoolGrad},
    ops::Apply,
};
use runtime_cpu::Cpu;

/// Images, channels in and out, height, width, padding, groups.
const SIZES: [[usize; 7]; 5] = [
    // A task has an image of its own.
    [13, 4, 5, 7, 9, 1, 1],
    [13, 8, 16, 8, 8, 2, 2],
    // Parts of one image.
    [1, 5, 20, 23, 30, 1, 1],
    // More than a part of a sum, and weights that do not stay in cache.
    [13, 72, 4, 5, 6, 1, 1],
    [2, 160, 140, 5, 5, 1, 1],
];

fn made(cpu: &Cpu, dtype: DType, shape: &[usize], seed: u64) -> T {
    store(cpu, dtype, shape, &draw(dtype, shape.iter().product(), seed)).0
}

fn kernel(op: FusedOp, ins: &[&T]) -> Vec<T> {
    Tensor::apply(op.into(), ins).unwrap().into_iter().collect()
}

/// The convolution and its two adjoints.
fn convolutions(cpu: &Cpu, dtype: DType, sizes: [usize; 7], apply: impl Fn(FusedOp, &[&T]) -> Vec<T>) -> Vec<T> {
    let [n, c, o, h, w, padding, groups] = sizes;
    let x = made(cpu, dtype, &[n, c, h, w], 1);
    let weights = made(cpu, dtype, &[o, c / groups, 3, 3], 2);
    let y = made(cpu, dtype, &[n, o, h + 2 * padding - 2, w + 2 * padding - 2], 3);
    let op =
        Conv { kind: ConvKind::Forward, stride: [1, 1], padding: [padding; 2], dilation: [1, 1], groups, bias: false };
    let kinds = [
        (ConvKind::Forward, [&x, &weights]),
        (ConvKind::Input([h, w]), [&y, &weights]),
        (ConvKind::Weight([3, 3]), [&x, &y]),
    ];
    kinds.into_iter().flat_map(|(kind, ins)| apply(FusedOp::Conv(op.with(kind)), &ins)).collect()
}

/// Pooling by two and its gradient, of numbers many of which are equal and some no numbers.
fn poolings(cpu: &Cpu, dtype: DType, [h, w]: [usize; 2], apply: impl Fn(FusedOp, &[&T]) -> Vec<T>) -> Vec<T> {
    let count = 2 * 3 * h * w;
    let values: Vec<f64> =
        (0..count).map(|i| if i % 29 == 7 || i % 31 < 2 { f64::NAN } else { (i * i % 5) as f64 }).collect();
    let x = store(cpu, dtype, &[2, 3, h, w], &values).0;
    let g = made(cpu, dtype, &[2, 3, h / 2, w / 2], 4);
    let op = MaxPool { kernel: [2, 2], stride: [2, 2], padding: [0, 0] };
    let mut outs = apply(FusedOp::MaxPool(op.clone()), &[&x]);
    outs.extend(apply(FusedOp::MaxPoolGrad(MaxPoolGrad(op)), &[&x, &g]));
    outs
}

#[test]
fn as_their_decomposition() {
    let cpu = Cpu::with_threads(2);
    let decomposed = |op: FusedOp, ins: &[&T]| -> Vec<T> { op.decompose(ins).unwrap().into_iter().collect() };
    for sizes in SIZES {
        let want = convolutions(&cpu, DType::F64, sizes, decomposed);
        for (i, (got, want)) in convolutions(&cpu, DType::F64, sizes, kernel).iter().zip(want).enumerate() {
            close(got, &want.to_f64s().unwrap(), 1e-11, &format!("output {i} of {sizes:?}"));
        }
    }
    for size in [[4, 6], [7, 5], [5, 36], [2, 71]] {
        let want = poolings(&cpu, DType::F32, size, decomposed);
        for (i, (got, want)) in poolings(&cpu, DType::F32, size, kernel).iter().zip(want).enumerate() {
            let bits = |x: &T| {
                x.to_f64s().unwrap().iter().map(|x| if x.is_nan() { 0 } else { x.to_bits() + 1 }).collect::<Vec<_>>()
            };
            assert_eq!(bits(got), bits(&want), "output {i} of pooling {size:?}");
        }
    }
}

#[test]
fn the_same_bits_whoever_computes() {
    for dtype in [DType::F32, DType::F64] {
        for sizes in SIZES {
            let first = convolutions(&Cpu::with_threads(1), dtype, sizes, kernel);
            for cpu in runtimes() {
                for (i, (a, b)) in convolutions(&cpu, dtype, sizes, kernel).iter().zip(&first).enumerate() {
                    same_bits(a, b, &format!("output {i} of {dtype} {sizes:?} on {cpu:?}"));
                }
            }
        }
    }
}
