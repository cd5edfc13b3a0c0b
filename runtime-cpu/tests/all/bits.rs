//! Results have the same bits at every number of threads and on every instruction set. Matrix products of bf16, for
//! which CPUs have their own instructions, have the same bits at every number of threads.

use crate::common::*;
use numcore::{
    DType, Tensor,
    fused::NnOps,
    ops::{IndexOps, MatmulOps, PointwiseOps, ReduceOps, ScanOps, SortOps, ViewOps},
};
use runtime_cpu::{Cpu, Simd};

type Op = (&'static str, fn(&T) -> numcore::Result<T>);

/// Runs an operation on the same values in every runtime.
fn agree(dtype: DType, shape: &[usize], op: Op) {
    agree_on(&runtimes(), dtype, shape, op);
}

fn agree_on(all: &[Cpu], dtype: DType, shape: &[usize], (name, op): Op) {
    let values = draw(dtype, shape.iter().product(), 1);
    let run = |cpu: &Cpu| op(&store(cpu, dtype, shape, &values)).unwrap();
    let first = run(&all[0]);
    for cpu in &all[1..] {
        same_bits(&run(cpu), &first, &format!("{name} of {dtype} {shape:?} on {cpu:?}"));
    }
}

#[test]
fn elementwise() {
    let ops: [Op; 24] = [
        ("exp", |x| x.exp()),
        ("expm1", |x| x.expm1()),
        ("log", |x| x.abs()?.log()),
        ("log1p", |x| x.abs()?.log1p()),
        ("log2", |x| x.abs()?.log2()),
        ("exp2", |x| x.exp2()),
        ("rsqrt", |x| x.abs()?.rsqrt()),
        ("sin", |x| x.sin()),
        ("cos", |x| x.cos()),
        ("tan", |x| x.tan()),
        ("asin", |x| x.asin()),
        ("acos", |x| x.acos()),
        ("atan", |x| x.atan()),
        ("sinh", |x| x.sinh()),
        ("cosh", |x| x.cosh()),
        ("tanh", |x| x.tanh()),
        ("erf", |x| x.erf()),
        ("gelu", |x| x.gelu()),
        ("gelu_tanh", |x| x.gelu_tanh()),
        ("mish", |x| x.mish()),
        ("pow", |x| x.abs()?.pow(&x.flip(&[0, 1])?)),
        ("rem", |x| x.rem(&x.flip(&[0, 1])?)),
        ("to_i64", |x| x.to_dtype(DType::I64)),
        ("clamp", |x| x.clamp(-0.5, 0.5)),
    ];
    for op in ops {
        for dtype in FLOATS {
            agree(dtype, &[301, 431], op);
        }
    }
}

#[test]
fn reductions() {
    let ops: [Op; 8] = [
        ("sum", |x| x.sum_all()),
        ("sum rows", |x| x.sum(&[1])),
        ("sum columns", |x| x.sum(&[0])),
        ("turned", |x| x.t()?.sum(&[0])),
        ("mean", |x| x.mean(&[0])),
        ("logsumexp", |x| x.logsumexp(&[1])),
        ("amax", |x| x.amax(&[0])),
        ("var", |x| x.var(&[0, 1], 1)),
    ];
    for op in ops {
        for dtype in FLOATS {
            for shape in [[301, 431], [3, 40_000], [40_000, 3]] {
                agree(dtype, &shape, op);
            }
        }
    }
}

/// Rows with NaN, and with nothing but infinities. The bits of a NaN are free.
#[test]
fn softmax_of_rows_that_are_not_finite() {
    const INF: f32 = f32::INFINITY;
    let row = |first: [f32; 3], rest: f32| first.into_iter().chain(std::iter::repeat(rest)).take(70);
    let rows = [
        row([1.0, f32::NAN, 1.0], 1.0),
        row([INF, INF, f32::NAN], INF),
        row([-INF; 3], -INF),
        row([2.0, -INF, 2.0], -INF),
        row([INF, 5.0, 1000.0], -1000.0),
    ];
    let rows: Vec<f32> = rows.into_iter().flatten().collect();
    let bits = |cpu: &Cpu| {
        let y = Tensor::from_slice(cpu, [5, 70], &rows).unwrap().softmax(-1).unwrap().to_vec::<f32>().unwrap();
        y.iter().map(|y| if y.is_nan() { u32::MAX } else { y.to_bits() }).collect::<Vec<u32>>()
    };
    let all = runtimes();
    let first = bits(&all[0]);
    for cpu in &all[1..] {
        assert_eq!(bits(cpu), first, "{cpu:?}");
    }
}

#[test]
fn products() {
    let ops: [Op; 4] = [
        ("a·aᵀ", |x| x.matmul(&x.t()?)),
        ("aᵀ·a", |x| x.t()?.matmul(x)),
        ("vector", |x| x.matmul(&x.narrow(0, 0, 1)?.t()?)),
        ("batch", |x| {
            let n = x.dims()[0] / 4;
            let b = x.narrow(0, 0, 4 * n)?.reshape([4, n, x.dims()[1]])?;
            b.matmul(&b.t()?)
        }),
    ];
    let all = runtimes();
    // AMX and dot products of bf16 give other last bits.
    let of = |levels: &[Simd]| all.iter().filter(|cpu| levels.contains(&cpu.simd())).cloned().collect::<Vec<_>>();
    let widening = [Simd::Baseline, Simd::Avx2, Simd::Avx512];
    let groups = |dtype| match dtype {
        DType::F64 => vec![all.clone()],
        DType::BF16 => vec![of(&[Simd::Amx]), of(&[Simd::Avx512Bf16]), of(&widening)],
        _ => vec![of(&[Simd::Amx]), of(&[&widening[..], &[Simd::Avx512Bf16]].concat())],
    };
    for op in ops {
        for shape in [[20, 30], [301, 431], [64, 3000]] {
            for dtype in FLOATS {
                for some in groups(dtype).into_iter().filter(|some| !some.is_empty()) {
                    agree_on(&some, dtype, &shape, op);
                }
            }
        }
    }
}

#[test]
fn order_and_index() {
    let ops: [Op; 6] = [
        ("cumsum", |x| x.cumsum(0)),
        ("cumsum along rows", |x| x.cumsum(1)),
        ("linear scan", |x| x.linear_scan(&x.tanh()?, 0)),
        ("sort", |x| Ok(x.sort(1, true)?.1)),
        ("argmax", |x| x.argmax(0)),
        ("index_add", |x| {
            let n = x.dims()[0];
            let ids = Tensor::from_vec(x.runtime(), (0..n).map(|i| (i * i % 7) as i64).collect())?;
            x.narrow(0, 0, 7)?.index_add(0, &ids, x)
        }),
    ];
    for op in ops {
        for dtype in FLOATS {
            agree(dtype, &[301, 431], op);
        }
    }
}

#[test]
fn random_numbers() {
    let ops: [Op; 2] = [
        ("uniform", |x| Tensor::uniform(x.runtime(), x.dims(), x.dtype(), -1.0, 1.0, 5)),
        ("bernoulli", |x| Tensor::bernoulli(x.runtime(), x.dims(), 0.3, 5)),
    ];
    for op in ops {
        for dtype in FLOATS {
            agree(dtype, &[301, 431], op);
        }
    }
}
