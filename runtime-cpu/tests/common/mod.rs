//! Helpers shared by the tests: operands whose values are known without any kernel, and comparison.
#![allow(dead_code)]

use half::{bf16, f16};
use numcore::{DType, Element, Layout, Tensor, ops::ViewOps, rng::Philox};
use runtime_cpu::{Cpu, Simd};

pub type T = Tensor<Cpu>;

pub const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];
pub const INTS: [DType; 4] = [DType::I32, DType::I64, DType::U32, DType::U8];
/// Empty, tiny, odd, longer than a block, short rows, tall and wide, many axes.
pub const SHAPES: [&[usize]; 12] = [
    &[],
    &[1],
    &[0, 3],
    &[5],
    &[4099],
    &[2, 5000],
    &[300, 7],
    &[70, 66],
    &[3, 1, 17],
    &[2, 3, 4, 5],
    &[9, 33, 40],
    &[2, 2, 2, 2, 2, 2, 2, 3],
];

/// A tensor, and its values in row-major order, found through its layout alone.
#[derive(Clone)]
pub struct Known {
    pub tensor: T,
    pub values: Vec<f64>,
    pub what: String,
}

/// Elements of a dtype from `f64`s: the tensor, and the values as they were rounded.
pub fn store(cpu: &Cpu, dtype: DType, shape: &[usize], values: &[f64]) -> (T, Vec<f64>) {
    fn of<E: Element>(cpu: &Cpu, shape: &[usize], values: &[f64]) -> (T, Vec<f64>) {
        let stored: Vec<E> = values.iter().map(|&x| E::from_f64(x)).collect();
        let rounded = stored.iter().map(|x| x.to_f64()).collect();
        (Tensor::from_slice(cpu, shape, &stored).unwrap(), rounded)
    }
    match dtype {
        DType::F32 => of::<f32>(cpu, shape, values),
        DType::F64 => of::<f64>(cpu, shape, values),
        DType::F16 => of::<f16>(cpu, shape, values),
        DType::BF16 => of::<bf16>(cpu, shape, values),
        DType::I32 => of::<i32>(cpu, shape, values),
        DType::I64 => of::<i64>(cpu, shape, values),
        DType::U32 => of::<u32>(cpu, shape, values),
        DType::U8 => of::<u8>(cpu, shape, values),
        DType::Bool => of::<bool>(cpu, shape, values),
    }
}

/// The elements a layout names, of the memory it is about.
pub fn through(layout: &Layout, memory: &[f64]) -> Vec<f64> {
    offsets(layout).into_iter().map(|at| memory[at]).collect()
}

/// The offsets of the elements of a layout, in row-major order.
pub fn offsets(layout: &Layout) -> Vec<usize> {
    (0..layout.numel())
        .map(|mut n| {
            let mut at = layout.offset() as isize;
            for (&d, &s) in layout.dims().iter().zip(layout.strides()).rev() {
                at += (n % d) as isize * s;
                n /= d;
            }
            at as usize
        })
        .collect()
}

/// Random values of a dtype's kind: reals around 0, small integers, `bool`.
pub fn draw(dtype: DType, n: usize, seed: u64) -> Vec<f64> {
    let mut rng = Philox::new(seed, 0);
    let mut next = || rng.normal();
    (0..n)
        .map(|_| match dtype {
            DType::Bool => f64::from(next() > 0.0),
            DType::U8 | DType::U32 => (next().abs() * 20.0).floor(),
            d if d.is_int() => (next() * 20.0).round(),
            _ => next() * 2.0,
        })
        .collect()
}

/// Operands of `shape` that are in memory in every way a view can.
pub fn views(cpu: &Cpu, dtype: DType, shape: &[usize], seed: u64) -> Vec<Known> {
    views_of(cpu, dtype, shape, |n| draw(dtype, n, seed))
}

/// Views of memory that `draw` fills.
pub fn views_of(cpu: &Cpu, dtype: DType, shape: &[usize], draw: impl Fn(usize) -> Vec<f64>) -> Vec<Known> {
    let rank = shape.len();
    let back: Vec<isize> = (0..rank as isize).rev().collect();
    let known = |what: &str, storage: &[usize], view: &dyn Fn(&T) -> T| {
        let (base, values) = store(cpu, dtype, storage, &draw(storage.iter().product()));
        let tensor = view(&base);
        assert_eq!(tensor.dims(), shape, "{what}");
        let values = through(tensor.layout(), &values);
        Known { tensor, values, what: format!("{what} {dtype} {shape:?}") }
    };
    let reversed: Vec<usize> = shape.iter().rev().copied().collect();
    let wide: Vec<usize> = shape.iter().map(|d| 2 * d + 1).collect();
    let thin = |odd: usize| -> Vec<usize> {
        shape.iter().enumerate().map(|(i, &d)| if i % 2 == odd { d } else { 1 }).collect()
    };
    let mut all = vec![
        known("dense", shape, &T::clone),
        known("transposed", &reversed, &|t| t.permute(&back).unwrap()),
        known("every second", &wide, &|t| {
            (0..rank).fold(t.clone(), |t, i| t.slice(i as isize, 1, shape[i], 2).unwrap())
        }),
        known("part", &wide, &|t| (0..rank).fold(t.clone(), |t, i| t.narrow(i as isize, 1, shape[i]).unwrap())),
        known("repeated rows", &thin(0), &|t| t.broadcast_to(shape).unwrap()),
        known("repeated columns", &thin(1), &|t| t.broadcast_to(shape).unwrap()),
        known("one value", &[], &|t| t.broadcast_to(shape).unwrap()),
    ];
    if rank > 0 {
        all.push(known("flipped", shape, &|t| t.flip(&[]).unwrap()));
        all.push(known("last flipped", shape, &|t| t.flip(&[-1]).unwrap()));
    }
    all
}

/// Compares values with expected ones: `tolerance` is relative, and absolute below 1.
pub fn close(got: &T, expected: &[f64], tolerance: f64, what: &str) {
    let got = got.to_f64s().unwrap();
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, (&g, &e)) in got.iter().zip(expected).enumerate() {
        let same = g == e || (g.is_nan() && e.is_nan()) || (g - e).abs() <= tolerance * e.abs().max(1.0);
        assert!(same, "{what}: element {i} is {g}, expected {e}");
    }
}

/// Whether two tensors have the same bits.
pub fn same_bits(a: &T, b: &T, what: &str) {
    assert_eq!(a.dims(), b.dims(), "{what}");
    assert!(a.to_bytes().unwrap() == b.to_bytes().unwrap(), "{what}: bits differ");
}

/// Runtimes that must all give the same bits: one to three threads, every instruction set.
pub fn runtimes() -> Vec<Cpu> {
    let threads = [1, 2, 3].map(Cpu::with_threads);
    let levels = Simd::ALL.into_iter().filter(|s| s.is_available()).map(|s| Cpu::builder().threads(2).simd(s).build());
    threads.into_iter().chain(levels).collect()
}

/// Rounds as a dtype stores.
pub fn round_to(dtype: DType, x: f64) -> f64 {
    match dtype {
        DType::F32 => f64::from(x as f32),
        DType::F16 => f16::from_f64(x).to_f64(),
        DType::BF16 => bf16::from_f64(x).to_f64(),
        _ => x,
    }
}

/// The error that one rounding to a dtype may cause, plus a few ULP of the computation.
pub fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-14,
        DType::F32 => 2e-6,
        d => d.epsilon(),
    }
}
