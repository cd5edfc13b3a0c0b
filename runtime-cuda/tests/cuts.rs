//! Sizes at which the partition of launches changes, on the emulator, against the CPU.
#![cfg(feature = "emulate")]

use std::{path::PathBuf, sync::LazyLock};

use numcore::{
    DType, Result, Runtime, Tensor,
    ops::{IndexOps, MatmulOps, PointwiseOps, ReduceOps, ScanOps, SortOps, ViewOps, cat},
};
use runtime_cpu::Cpu;
use runtime_cuda::Cuda;

static CUDA: LazyLock<Cuda> = LazyLock::new(|| {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("emulated");
    emulated_gpu::open(folder).unwrap_or_else(|e| panic!("{e}"))
});

/// Asserts equal results on both; every value within `tolerance` of the largest.
macro_rules! same {
    ($tolerance:expr, $f:expr) => {{
        let (got, want) = (values(&*CUDA, $f).unwrap(), values(&Cpu::new(), $f).unwrap());
        assert_eq!(got.len(), want.len());
        let largest = want.iter().filter(|x| x.is_finite()).fold(1e-30f64, |m, x| m.max(x.abs()));
        for (i, (g, w)) in got.iter().zip(&want).enumerate() {
            assert!(g == w || (g - w).abs() <= $tolerance * largest || g.is_nan() && w.is_nan(), "at {i}: {g} and {w}");
        }
    }};
}

fn values<R: Runtime>(rt: &R, f: impl FnOnce(&R) -> Result<Tensor<R>>) -> Result<Vec<f64>> {
    f(rt)?.to_f64s()
}

fn random<R: Runtime>(rt: &R, shape: &[usize], dtype: DType) -> Result<Tensor<R>> {
    Tensor::uniform(rt, shape, DType::F32, -1.0, 1.0, 7)?.to_dtype(dtype)
}

#[test]
fn long_sums_in_chunks() {
    same!(1e-6, |rt| random(rt, &[1 << 18], DType::F32)?.sum_all());
    same!(1e-6, |rt| random(rt, &[3, 70_001], DType::F32)?.sum(&[1]));
    same!(1e-6, |rt| random(rt, &[20_001, 5], DType::F32)?.sum(&[0]));
    same!(4e-3, |rt| random(rt, &[4096, 40], DType::BF16)?.sum(&[0]));
    same!(0.0, |rt| random(rt, &[40_000], DType::F32)?.amax_all());
    same!(0.0, |rt| random(rt, &[40_000], DType::F32)?.mul(1e6)?.to_dtype(DType::I64)?.sum_all());
}

/// Columns that are read 16 bytes at a time have the sums, to the bit, of those that are not.
#[test]
fn sums_of_aligned_columns_are_those_of_any() -> Result<()> {
    for (dtype, rows, columns) in [
        (DType::BF16, 700, 64),
        (DType::F16, 9, 1000),
        (DType::F32, 515, 36),
        (DType::BF16, 4096, 40),
        (DType::BF16, 300, 20),
        (DType::F64, 65, 34),
    ] {
        let x = random(&*CUDA, &[rows, columns], dtype)?;
        // The same numbers, one element further.
        let apart = cat(&[&x.narrow(1, 0, 1)?, &x], 1)?.narrow(1, 1, columns)?;
        let sums = |x: &Tensor<Cuda>| -> Result<Vec<Vec<f64>>> {
            let squares = x.square()?.sum(&[0])?;
            [x.sum(&[0])?, x.amax(&[0])?, squares].iter().map(Tensor::to_f64s).collect()
        };
        assert_eq!(sums(&x)?, sums(&apart)?, "{dtype} {rows} x {columns}");
        // Added to what is there, through blocks of rows.
        let blocks = |x: &Tensor<Cuda>| x.reshape([rows, 2, columns / 2])?.sum(&[0])?.to_f64s();
        assert_eq!(blocks(&x)?, sums(&apart)?[0], "{dtype} in two blocks");
    }
    Ok(())
}

/// Products of halves that are split along an extent that is no multiple of 16 bytes are rounded once. Rows are padded to
/// a multiple, or not, and stay whole then.
#[test]
fn odd_extents_of_products() -> Result<()> {
    for (dtype, epsilon) in [(DType::BF16, 2f64.powi(-8)), (DType::F16, 2f64.powi(-11))] {
        for (m, k, n) in [(3, 1027, 5), (2, 9, 1029), (1031, 3, 4), (1025, 1030, 3), (2, 1026, 1033)] {
            for case in 0..16 {
                let [left, right, padded, backwards] = [1, 2, 4, 8].map(|bit| case & bit != 0);
                let operand = |rows: usize, columns: usize, turned: bool| -> Result<Tensor<Cuda>> {
                    let (lines, length) = if turned { (columns, rows) } else { (rows, columns) };
                    let whole = if padded { length.next_multiple_of(8) } else { length };
                    let x = random(&*CUDA, &[lines, whole], dtype)?.narrow(1, 0, length)?;
                    if turned { x.t() } else { Ok(x) }
                };
                let (a, b) = (operand(m, k, left)?, operand(k, n, right)?);
                let a = if backwards { a.flip(&[0, 1])? } else { a };
                let (x, y, got) = (a.to_f64s()?, b.to_f64s()?, a.matmul(&b)?.to_f64s()?);
                for (at, got) in got.iter().enumerate() {
                    let terms = (0..k).map(|l| x[at / n * k + l] * y[l * n + at % n]);
                    let (sum, size) = terms.fold((0.0, 0.0f64), |(sum, size), t| (sum + t, size + f64::abs(t)));
                    let allowed = sum.abs() * epsilon + size * 1e-6;
                    let spec = format!("[{m}, {k}] x [{k}, {n}] {dtype}");
                    assert!((got - sum).abs() <= allowed, "{spec} at {at}: {got}, exactly {sum}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn sums_over_axes_in_the_middle() {
    same!(1e-6, |rt| random(rt, &[6, 500, 7], DType::F32)?.sum(&[1]));
    same!(1e-6, |rt| random(rt, &[6, 50, 7, 9], DType::F32)?.sum_keepdim(&[0, 2]));
    same!(1e-6, |rt| random(rt, &[64, 96], DType::F32)?.t()?.sum(&[1]));
}

#[test]
fn extremes_of_long_lines() {
    same!(0.0, |rt| random(rt, &[2, 50_000], DType::F32)?.argmax(1)?.to_dtype(DType::F64));
    same!(0.0, |rt| random(rt, &[300, 100], DType::F32)?.argmin(1)?.to_dtype(DType::F64));
    same!(0.0, |rt| random(rt, &[100, 300], DType::F32)?.argmax(0)?.to_dtype(DType::F64));
}

#[test]
fn recurrences_in_parts() {
    same!(1e-5, |rt| random(rt, &[2, 40_000], DType::F32)?.cumsum(1));
    same!(1e-5, |rt| random(rt, &[3, 1000], DType::F32)?.cumsum(1));
    same!(1e-5, |rt| random(rt, &[3, 1000], DType::F32)?.add(1.0)?.flip(&[1])?.cumprod(1));
    same!(0.0, |rt| random(rt, &[50, 60], DType::F32)?.mul(100.0)?.to_dtype(DType::I32)?.cumsum(0));
}

#[test]
fn sorts_by_digits() {
    for d in [DType::F32, DType::BF16, DType::I64, DType::U8, DType::F64] {
        same!(0.0, |rt| random(rt, &[3, 5000], DType::F32)?
            .mul(100.0)?
            .to_dtype(d)?
            .sort(1, false)?
            .0
            .to_dtype(DType::F64));
        same!(0.0, |rt| random(rt, &[3, 5000], DType::F32)?
            .mul(100.0)?
            .to_dtype(d)?
            .sort(1, true)?
            .1
            .to_dtype(DType::F64));
    }
    same!(0.0, |rt| random(rt, &[3, 4096], DType::F32)?.sort(1, true)?.1.to_dtype(DType::F64));
}

#[test]
fn tables_and_their_gradients() {
    let ids = |n: i64, below: i64| (0..n).map(|i| i * i * 7919 % below).collect::<Vec<i64>>();
    for d in [DType::F32, DType::BF16, DType::F64] {
        for (rows, width, n) in [(50, 24, 300), (50, 7, 300), (3, 33, 10)] {
            let (table, ids) = ([rows as usize, width], ids(n, rows));
            same!(0.0, |rt| random(rt, &table, d)?.embedding(&Tensor::from_slice(rt, [ids.len()], &ids)?));
            same!(1e-2, |rt| {
                let source = random(rt, &[ids.len(), width], d)?;
                let index = Tensor::from_slice(rt, [ids.len()], &ids)?;
                Tensor::zeros(rt, table, d)?.index_add(0, &index, &source)
            });
        }
    }
}

#[test]
fn products_of_every_layout() {
    for d in [DType::F32, DType::F64, DType::BF16] {
        let tolerance = if d == DType::BF16 { 1e-2 } else { 1e-5 };
        same!(tolerance, |rt| random(rt, &[17, 9], d)?.matmul(&random(rt, &[9, 21], d)?));
        same!(tolerance, |rt| random(rt, &[9, 17], d)?.t()?.matmul(&random(rt, &[21, 9], d)?.t()?));
        same!(tolerance, |rt| random(rt, &[4, 5, 8], d)?.matmul(&random(rt, &[8, 3], d)?));
        same!(tolerance, |rt| random(rt, &[2, 3, 5, 8], d)?.matmul(&random(rt, &[3, 8, 4], d)?));
        same!(tolerance, |rt| random(rt, &[2, 5, 3, 8], d)?.transpose(1, 2)?.matmul(&random(rt, &[2, 3, 8, 4], d)?));
        same!(tolerance, |rt| random(rt, &[6, 20], d)?.slice(1, 0, 8, 2)?.matmul(&random(rt, &[8, 4], d)?));
        same!(tolerance, |rt| random(rt, &[6, 1], d)?.matmul(&random(rt, &[1, 4], d)?));
        same!(tolerance, |rt| random(rt, &[3, 1, 8], d)?.matmul(&random(rt, &[8, 1], d)?));
        same!(tolerance, |rt| random(rt, &[2, 1, 4], d)?.broadcast_to([2, 6, 4])?.matmul(&random(rt, &[4, 4], d)?));
    }
}

#[test]
fn more_operands_than_a_kernel_can_be_given() {
    use numcore::pointwise::Program;
    let many = Program::build("many", 60, 0, |_, x, _| vec![x[1..].iter().fold(x[0], |a, b| a + *b)]);
    fn run<R: Runtime>(rt: &R, many: &Program) -> Result<Tensor<R>> {
        let x = random(rt, &[2, 3, 2, 3, 2], DType::F32)?.permute(&[4, 1, 2, 3, 0])?;
        let others = vec![&x; 59];
        x.apply_program(many, &others, &[])
    }
    same!(1e-5, |rt| run(rt, &many));
}

#[test]
fn a_captured_step_keeps_its_memory() {
    let cuda = CUDA.fork().unwrap();
    let x = Tensor::uniform(&cuda, [1000], DType::F32, -1.0, 1.0, 1).unwrap();
    let step = || x.mul(2.0)?.tanh()?.add(&x);
    step().unwrap();
    let want = step().unwrap().to_f64s().unwrap();
    let trimmed = || {
        cuda.trim();
        step()
    };
    let (graph, y) = cuda.capture(trimmed).expect("nothing goes back while work is captured");
    cuda.trim();
    graph.launch().unwrap();
    assert_eq!(y.to_f64s().unwrap(), want);
    // Memory that the step used is not reused while the graph is alive.
    let others: Vec<_> = (0..4).map(|_| x.add(1.0).unwrap()).collect();
    graph.launch().unwrap();
    assert_eq!(y.to_f64s().unwrap(), want);
    let plus_one = x.add(1.0).unwrap().to_f64s().unwrap();
    assert!(others.iter().all(|other| other.to_f64s().unwrap() == plus_one));
    drop((graph, y, others));
    drop(x);
    cuda.trim();
    assert_eq!(cuda.memory().reserved, 0, "all of it has returned");
}

#[test]
fn a_captured_step_finds_the_blocks_it_found_before() {
    let cuda = CUDA.fork().unwrap();
    let [small, large] = [1000, 1100].map(|n| Tensor::uniform(&cuda, [n], DType::F32, -1.0, 1.0, 1).unwrap());
    // A freed block would serve the next request, but a block of the exact size is free too; the third request needs
    // the freed one.
    let step = || {
        drop(large.mul(2.0)?);
        Ok((small.mul(2.0)?, large.mul(2.0)?))
    };
    (0..2).for_each(|_| drop(step().unwrap()));
    cuda.capture(step).unwrap();
}

#[test]
fn a_capture_that_reads_or_allocates_is_an_error() {
    let cuda = CUDA.fork().unwrap();
    let x = Tensor::uniform(&cuda, [77_777], DType::F32, -1.0, 1.0, 1).unwrap();
    let error = cuda.capture(|| x.sum_all()?.item()).err().unwrap().to_string();
    assert!(error.contains("capture"), "{error}");
    let error =
        cuda.capture(|| x.reshape([77_777, 1])?.broadcast_to([77_777, 80])?.contiguous()).err().unwrap().to_string();
    assert!(error.contains("a captured step asks for"), "{error}");
    let error = cuda.capture(|| x.slice(0, 0, 1, 1)?.item()).err().unwrap().to_string();
    assert!(error.starts_with("download: not supported"), "{error}");
    assert_eq!(x.slice(0, 0, 1, 1).unwrap().to_f64s().unwrap().len(), 1);
}
