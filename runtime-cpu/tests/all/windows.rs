//! Convolutions at the boundaries of their partition: equal bits for every thread count and level, and AMX as precise
//! as vectors. Their values are the suite's to check.

#[path = "../../../conformance/src/suite/loops/convolutions.rs"]
mod convolutions;

use crate::common::*;
use convolutions::{GEOMETRIES, Geometry};
use numcore::{
    DType, Tensor,
    fused::FusedOp,
    ops::{Apply, PointwiseOps},
};
use runtime_cpu::{Cpu, Simd};

/// The convolution with and without a bias and its two adjoints, of random operands that `prepare` may change.
fn outputs(cpu: &Cpu, dtype: DType, geometry: Geometry, prepare: impl Fn(&T) -> T) -> Vec<T> {
    let call = |(op, shapes): (_, Vec<(Vec<usize>, u64)>)| {
        let operand = |(shape, seed): &(Vec<usize>, u64)| {
            prepare(&store(cpu, dtype, shape, &draw(dtype, shape.iter().product(), *seed)))
        };
        let ins: Vec<T> = shapes.iter().map(operand).collect();
        Tensor::apply1(FusedOp::Conv(op), &ins.iter().collect::<Vec<_>>()).unwrap()
    };
    geometry.calls().into_iter().map(call).collect()
}

#[test]
fn the_same_bits_whoever_computes() {
    // Tiles have last bits of their own.
    let (tiles, others): (Vec<_>, Vec<_>) = runtimes().into_iter().partition(|cpu| cpu.simd() == Simd::Amx);
    for (dtype, cpus) in [(DType::F32, vec![tiles.clone(), others.clone()]), (DType::F64, vec![runtimes()])] {
        for geometry in GEOMETRIES {
            for cpus in &cpus {
                let Some(first) = cpus.first() else { continue };
                let first = outputs(first, dtype, geometry, T::clone);
                for cpu in cpus {
                    for (i, (a, b)) in outputs(cpu, dtype, geometry, T::clone).iter().zip(&first).enumerate() {
                        same_bits(a, b, &format!("output {i} of {dtype} {geometry:?} on {cpu:?}"));
                    }
                }
            }
        }
    }
}

/// The largest error against `f64` of equal operands, relative to the largest value.
fn errors(cpu: &Cpu, geometry: Geometry) -> Vec<f64> {
    let of =
        |prepare: fn(&T) -> T| outputs(cpu, DType::F32, geometry, prepare).into_iter().map(|x| x.to_f64s().unwrap());
    let pairs = of(T::clone).zip(of(|x| x.to_dtype(DType::F64).unwrap()));
    pairs
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
