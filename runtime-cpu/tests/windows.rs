//! Convolutions and pooling at the boundaries of their partition: one image per task and parts of one, micro-panels and
//! rows that end within each other, split sums, adjacent windows and remainders. Against the decomposition, and with
//! equal bits for every thread count and level.

mod common;

use common::*;
use numcore::{
    DType, Tensor,
    fused::{Conv, ConvKind, FusedOp, MaxPool, MaxPoolGrad},
    ops::{Apply, PointwiseOps},
};
use runtime_cpu::{Cpu, Simd};

/// A square kernel over images.
#[derive(Clone, Copy, Debug)]
struct Geometry {
    images: usize,
    /// Input and output channels.
    channels: [usize; 2],
    size: [usize; 2],
    kernel: usize,
    stride: [usize; 2],
    padding: [usize; 2],
    dilation: [usize; 2],
    groups: usize,
}

const PLAIN: Geometry = Geometry {
    images: 13,
    channels: [4, 5],
    size: [7, 9],
    kernel: 3,
    stride: [1, 1],
    padding: [1, 1],
    dilation: [1, 1],
    groups: 1,
};

const GEOMETRIES: [Geometry; 17] = [
    // A task has an image of its own.
    PLAIN,
    Geometry { channels: [8, 16], size: [8, 8], padding: [2, 2], groups: 2, ..PLAIN },
    // The last image has none behind it, and needs no frame.
    Geometry { channels: [3, 9], size: [26, 26], padding: [0, 0], ..PLAIN },
    Geometry { channels: [8, 9], size: [5, 1], kernel: 1, padding: [0, 0], ..PLAIN },
    // Parts of one image.
    Geometry { images: 1, channels: [5, 20], size: [23, 30], ..PLAIN },
    Geometry { images: 1, channels: [5, 20], size: [23, 30], padding: [0, 0], stride: [2, 3], ..PLAIN },
    // More than a part of a sum, and large weights.
    Geometry { channels: [72, 4], size: [5, 6], ..PLAIN },
    Geometry { images: 2, channels: [160, 140], size: [5, 5], ..PLAIN },
    // Windows that are not adjacent.
    Geometry { size: [11, 15], stride: [2, 1], dilation: [1, 3], padding: [0, 2], ..PLAIN },
    Geometry { size: [12, 14], stride: [3, 2], dilation: [2, 3], padding: [2, 1], ..PLAIN },
    Geometry { channels: [8, 8], size: [9, 60], stride: [1, 4], kernel: 2, groups: 2, ..PLAIN },
    // For AMX: one image per task and parts of one, groups, channels without a pair, rows shorter than a tile's,
    // strided positions.
    Geometry { images: 9, channels: [32, 48], size: [9, 31], padding: [1, 2], ..PLAIN },
    Geometry { images: 1, channels: [31, 40], size: [23, 30], padding: [0, 0], ..PLAIN },
    Geometry { images: 2, channels: [64, 40], size: [20, 26], groups: 2, ..PLAIN },
    Geometry { images: 1, channels: [29, 35], size: [60, 5], ..PLAIN },
    Geometry { images: 2, channels: [64, 32], size: [40, 53], padding: [2, 0], stride: [2, 3], ..PLAIN },
    Geometry { images: 1, channels: [64, 64], size: [20, 31], padding: [1, 3], dilation: [1, 3], ..PLAIN },
];

impl Geometry {
    /// Height and width of the output.
    fn output(&self) -> [usize; 2] {
        [0, 1].map(|i| {
            (self.size[i] + 2 * self.padding[i] - (self.kernel - 1) * self.dilation[i] - 1) / self.stride[i] + 1
        })
    }
}

fn made(cpu: &Cpu, dtype: DType, shape: &[usize], seed: u64) -> T {
    store(cpu, dtype, shape, &draw(dtype, shape.iter().product(), seed)).0
}

fn kernel(op: FusedOp, ins: &[&T]) -> Vec<T> {
    Tensor::apply(op.into(), ins).unwrap().into_iter().collect()
}

/// The convolution with and without a bias, and its two adjoints.
fn convolutions(cpu: &Cpu, dtype: DType, geometry: Geometry, apply: impl Fn(FusedOp, &[&T]) -> Vec<T>) -> Vec<T> {
    let Geometry { images: n, channels: [c, o], size: [h, w], kernel, stride, padding, dilation, groups } = geometry;
    let x = made(cpu, dtype, &[n, c, h, w], 1);
    let weights = made(cpu, dtype, &[o, c / groups, kernel, kernel], 2);
    let [p, q] = geometry.output();
    let y = made(cpu, dtype, &[n, o, p, q], 3);
    let [of_y, of_x] = [o, c].map(|channels| made(cpu, dtype, &[channels, 1, 1], 5));
    let op = Conv { kind: ConvKind::Forward, stride, padding, dilation, groups, bias: false };
    let calls: [(ConvKind, &[&T]); 5] = [
        (ConvKind::Forward, &[&x, &weights]),
        (ConvKind::Input([h, w]), &[&y, &weights]),
        (ConvKind::Weight([kernel, kernel]), &[&x, &y]),
        (ConvKind::Forward, &[&x, &weights, &of_y]),
        (ConvKind::Input([h, w]), &[&y, &weights, &of_x]),
    ];
    let calls = calls.into_iter();
    calls.flat_map(|(kind, ins)| apply(FusedOp::Conv(Conv { bias: ins.len() > 2, ..op.with(kind) }), ins)).collect()
}

/// The op computed by primitives alone.
fn decomposed(op: FusedOp, ins: &[&T]) -> Vec<T> {
    match op {
        FusedOp::Conv(op) if op.bias => {
            let product = decomposed(FusedOp::Conv(op.with(op.kind)), &ins[..2]);
            product.iter().map(|y| y.add(ins[2]).unwrap()).collect()
        }
        op => op.decompose(ins).unwrap().into_iter().collect(),
    }
}

/// Pooling by two and its gradient, of inputs with many ties and some NaN.
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
    for geometry in GEOMETRIES {
        let want = convolutions(&cpu, DType::F64, geometry, decomposed);
        for (i, (got, want)) in convolutions(&cpu, DType::F64, geometry, kernel).iter().zip(want).enumerate() {
            close(got, &want.to_f64s().unwrap(), 1e-11, &format!("output {i} of {geometry:?}"));
        }
    }
    for size in [[4, 6], [7, 5], [5, 36], [2, 71], [6, 16], [3, 17]] {
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
    // Tiles have last bits of their own.
    let (tiles, others): (Vec<_>, Vec<_>) = runtimes().into_iter().partition(|cpu| cpu.simd() == Simd::Amx);
    for (dtype, cpus) in [(DType::F32, vec![tiles.clone(), others.clone()]), (DType::F64, vec![runtimes()])] {
        for geometry in GEOMETRIES {
            for cpus in &cpus {
                let Some(first) = cpus.first() else { continue };
                let first = convolutions(first, dtype, geometry, kernel);
                for cpu in cpus {
                    for (i, (a, b)) in convolutions(cpu, dtype, geometry, kernel).iter().zip(&first).enumerate() {
                        same_bits(a, b, &format!("output {i} of {dtype} {geometry:?} on {cpu:?}"));
                    }
                }
            }
        }
    }
}

/// The largest error against `f64`, relative to the largest value.
fn errors(cpu: &Cpu, geometry: Geometry) -> Vec<f64> {
    // Equal inputs in both types.
    let exact = |op: FusedOp, ins: &[&T]| {
        let ins: Vec<T> = ins.iter().map(|x| x.to_dtype(DType::F64).unwrap()).collect();
        kernel(op, &ins.iter().collect::<Vec<_>>())
    };
    let of = |apply: &dyn Fn(FusedOp, &[&T]) -> Vec<T>| {
        convolutions(cpu, DType::F32, geometry, apply).iter().map(|x| x.to_f64s().unwrap()).collect::<Vec<_>>()
    };
    let (got, want) = (of(&kernel), of(&exact));
    got.iter()
        .zip(want)
        .map(|(got, want)| {
            let size = want.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
            got.iter().zip(want).fold(0.0, |m: f64, (got, want)| m.max((got - want).abs())) / size
        })
        .collect()
}

#[test]
fn tiles_are_no_less_precise() {
    let [tiles, lanes] = [Simd::Amx, Simd::Avx512];
    if !tiles.is_available() {
        return eprintln!("not tested, this processor has none");
    }
    let [tiles, lanes] = [tiles, lanes].map(|simd| Cpu::builder().threads(2).simd(simd).build());
    for geometry in GEOMETRIES {
        for (i, (got, most)) in errors(&tiles, geometry).into_iter().zip(errors(&lanes, geometry)).enumerate() {
            // Of short sums, whose error is a rounding or two, the largest is a matter of chance.
            assert!(got <= most.max(1.5e-7), "output {i} of {geometry:?}: {got} instead of {most}");
        }
    }
}

#[test]
fn what_is_not_finite_reaches_its_windows_alone() {
    let cpu = Cpu::with_threads(2);
    for geometry in &GEOMETRIES[11..] {
        let spoil = |x: &T, values: [f64; 4]| {
            let mut numbers = x.to_f64s().unwrap();
            let step = numbers.len() / 4 + 1;
            numbers.iter_mut().step_by(step).zip(values).for_each(|(x, value)| *x = value);
            store(&cpu, DType::F32, x.dims(), &numbers).0
        };
        let largest = f64::from(f32::MAX);
        let spoiled = |op: FusedOp, ins: &[&T], apply: &dyn Fn(FusedOp, &[&T]) -> Vec<T>| {
            let first = spoil(ins[0], [f64::INFINITY, f64::NAN, largest, f64::NEG_INFINITY]);
            // Finite: zeros around an image meet weights, too.
            let second = spoil(ins[1], [0.0, 1.0, 0.0, 0.0]);
            let ins: Vec<&T> = [&first, &second].into_iter().chain(ins[2..].iter().copied()).collect();
            apply(op, &ins)
        };
        let got = convolutions(&cpu, DType::F32, *geometry, |op, ins| spoiled(op, ins, &kernel));
        let want = convolutions(&cpu, DType::F32, *geometry, |op, ins| spoiled(op, ins, &decomposed));
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            let want = want.to_f64s().unwrap();
            let size = want.iter().filter(|x| x.abs() < 1e30).fold(1.0, |m: f64, x| m.max(x.abs()));
            for (j, (got, want)) in got.to_f64s().unwrap().into_iter().zip(want).enumerate() {
                // The sum of an overflow and an infinite element is infinite or NaN, depending on whether products are
                // rounded separately.
                let same = !got.is_finite() && !want.is_finite();
                let room = 1e-5 * if want.abs() < 1e30 { size } else { want.abs() };
                let close = (got - want).abs() <= room;
                assert!(same || close, "output {i} of {geometry:?} on {cpu:?} at {j}: {got} for {want}");
            }
        }
    }
}
