//! Tests of every instruction set of this CPU against sums in `f64`.

use half::bf16;

use super::*;
use crate::{element::Stored, gemm::Matrix};

/// A matrix of any strides in owned memory.
struct Operand<T> {
    memory: Vec<T>,
    start: usize,
    strides: [isize; 2],
}

/// Element types that are tested.
trait TestElement<const TERMS: usize>: SplitBf16<TERMS> {
    const ISAS: &[Bf16Isa];
}

impl TestElement<1> for bf16 {
    const ISAS: &[Bf16Isa] = &[Bf16Isa::Amx, Bf16Isa::Dot];
}

impl TestElement<3> for f32 {
    const ISAS: &[Bf16Isa] = &[Bf16Isa::Amx];
}

impl<T: Stored<Lane = f32>> Operand<T> {
    /// Row-major, column-major, every second element of rows with a gap, rows backwards.
    fn all([rows, columns]: [usize; 2], seed: u64) -> [Operand<T>; 4] {
        let (r, c) = (rows as isize, columns as isize);
        let layouts = [(0, [c, 1]), (0, [1, r]), (1, [2 * c + 3, 2]), ((r - 1) * (c + 5), [-(c + 5), 1])];
        layouts.map(|(start, strides)| {
            let len = 4 * (rows + 1) * (columns + 5);
            let mut x = seed | 1;
            let mut next = || {
                x = x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                T::store((x >> 40) as f32 / (1 << 23) as f32 - 1.0)
            };
            Operand { memory: (0..len).map(|_| next()).collect(), start: start as usize, strides }
        })
    }

    fn get(&self, i: usize, j: usize) -> f64 {
        let at = self.start as isize + i as isize * self.strides[0] + j as isize * self.strides[1];
        f64::from(self.memory[at as usize].load())
    }

    fn matrix(&self) -> Matrix<*const T> {
        let [row, column] = self.strides;
        Matrix { at: self.memory[self.start..].as_ptr(), row, column }
    }
}

fn isas<T: TestElement<TERMS>, const TERMS: usize>() -> impl Iterator<Item = Bf16Isa> {
    let (there, missing): (Vec<Bf16Isa>, Vec<Bf16Isa>) = T::ISAS.iter().partition(|l| l.is_available());
    if !missing.is_empty() {
        eprintln!("not tested, this processor lacks it: {missing:?}");
    }
    there.into_iter()
}

fn size([m, k, n]: [usize; 3]) -> GemmSize {
    GemmSize { m, k, n }
}

/// Computes `out = a · b (+ out)`.
fn run_gemm<T: TestElement<TERMS>, O: TileElement, const TERMS: usize>(
    isa: Bf16Isa,
    sizes: [usize; 3],
    [a, b]: [&Operand<T>; 2],
    out: &mut Operand<O>,
    add: bool,
) {
    let [row, column] = out.strides;
    let at = out.memory[out.start..].as_mut_ptr();
    let (out, epilogue) = (Matrix { at, row, column }, Epilogue::accumulate(add));
    // SAFETY: each matrix has memory of its own for these sizes.
    unsafe { tile_loops::gemm::<T, O, TERMS>(isa, size(sizes), out, a.matrix(), b.matrix(), epilogue) }
}

fn check<T: TestElement<TERMS>, O: TileElement, const TERMS: usize>(
    isa: Bf16Isa,
    [m, k, n]: [usize; 3],
    [a, b]: [&Operand<T>; 2],
    out: &mut Operand<O>,
    add: bool,
) {
    let mut expected = vec![(0.0, 0.0); m * n];
    for (at, e) in expected.iter_mut().enumerate() {
        let products = (0..k).map(|q| a.get(at / n, q) * b.get(q, at % n));
        let old = if add { out.get(at / n, at % n) } else { 0.0 };
        *e = (products.clone().sum::<f64>() + old, products.map(f64::abs).sum::<f64>() + old.abs());
    }
    run_gemm(isa, [m, k, n], [a, b], out, add);
    for (at, (e, size)) in expected.into_iter().enumerate() {
        let got = out.get(at / n, at % n);
        let steps = if TERMS == 1 { k } else { k.div_ceil(TILE_K) + 2 };
        let rounding = if O::IS_LANE { 0.0 } else { 1.0 / 256.0 };
        let room = e.abs() * rounding + size * steps as f64 * f64::from(f32::EPSILON);
        assert!((got - e).abs() <= room, "{isa:?} [{m}, {k}, {n}] at {at}: {got} for {e}");
    }
}

/// Tests of both element types, and of bf16 whose sums are stored as they are.
macro_rules! of_all {
    ($($name:ident),* $(,)?) => {$(
        #[test]
        fn $name() {
            of::$name::<bf16, bf16, 1>();
            of::$name::<bf16, f32, 1>();
            of::$name::<f32, f32, 3>();
        }
    )*};
}
of_all!(
    sizes_and_strides,
    rows_far_apart,
    long_sums_and_many_columns,
    partitions_do_not_show,
    what_is_not_finite_stays,
    sums_of_nothing
);

mod of {
    use super::*;

    pub(super) fn sizes_and_strides<T: TestElement<TERMS>, O: TileElement, const TERMS: usize>() {
        let sizes = [1, 15, 16, 17, 31, 32, 33, 70];
        let sizes = sizes.map(|m| sizes.map(|n| [1, 2, 15, 32, 33, 64, 97].map(|k| [m, k, n])));
        for isa in isas::<T, TERMS>() {
            for [m, k, n] in sizes.iter().flatten().flatten().copied() {
                for a in &Operand::<T>::all([m, k], 1) {
                    for b in &Operand::all([k, n], 2) {
                        let out = &mut Operand::<O>::all([m, n], 3)[(m + k + n) % 4];
                        check(isa, [m, k, n], [a, b], out, k % 2 == 0);
                    }
                }
            }
        }
    }

    /// Rows in place, and rows that alias in L1, which are packed; forwards and backwards.
    pub(super) fn rows_far_apart<T: TestElement<TERMS>, O: TileElement, const TERMS: usize>() {
        for isa in isas::<T, TERMS>() {
            for sizes @ [m, k, n] in [[64, 64, 40], [70, 704, 33], [33, 1312, 65]] {
                for apart in [2048, 2049, 4096, -2048, -2080] {
                    let [mut a, ..] = Operand::<T>::all([m, 2200], 14);
                    let start = if apart < 0 { (m as isize - 1) * -apart } else { 0 };
                    a.start = start as usize;
                    a.strides = [apart, 1];
                    let [b, ..] = Operand::all([k, n], 15);
                    check(isa, sizes, [&a, &b], &mut Operand::<O>::all([m, n], 16)[0], apart < 0);
                }
            }
        }
    }

    /// Partial sums, and more columns than are packed at once.
    pub(super) fn long_sums_and_many_columns<T: TestElement<TERMS>, O: TileElement, const TERMS: usize>() {
        for isa in isas::<T, TERMS>() {
            for sizes in [
                [40, 9000, 70],
                [40, 8224, 70],
                [3, 513, 2200],
                [33, 4097, 33],
                [2100, 520, 20],
                // Several A micro-panels against several blocks of B: packed for each, or kept.
                [70, 512, 1400],
                [70, 500, 1400],
                [70, 1056, 900],
                // Several A micro-panels against one B micro-panel, in parts that fit in L1.
                [70, 704, 20],
            ] {
                let [m, k, n] = sizes;
                let (a, b) = (Operand::<T>::all([m, k], 4), Operand::all([k, n], 5));
                for i in 0..3 {
                    check(isa, sizes, [&a[i], &b[(i + 1) % 3]], &mut Operand::<O>::all([m, n], 6)[i], i == 1);
                }
            }
        }
    }

    /// The partition does not change the output's bits.
    pub(super) fn partitions_do_not_show<T: TestElement<TERMS>, O: TileElement, const TERMS: usize>() {
        let [m, k, n] = [70, 700, 90];
        for isa in isas::<T, TERMS>() {
            for (a, b) in Operand::<T>::all([m, k], 7).iter().zip(&Operand::all([k, n], 8)) {
                // A column-major output is the transposed GEMM, which adds other small terms first.
                let [rows, columns, ..] = Operand::<O>::all([m, n], 9);
                for (mut whole, column) in [(rows, 1), (columns, 2)] {
                    run_gemm(isa, [m, k, n], [a, b], &mut whole, false);
                    for i in (0..m).step_by(13) {
                        for j in (0..n).step_by(37) {
                            let mut one = Operand { memory: vec![O::store(0.0)], start: 0, strides: [1, column] };
                            let (row, column) = (a.matrix().offset(i, 0), b.matrix().offset(0, j));
                            let [down, across] = one.strides;
                            let out = Matrix { at: one.memory.as_mut_ptr(), row: down, column: across };
                            // SAFETY: an output of one element, and a row and a column of the operands.
                            unsafe {
                                tile_loops::gemm::<T, O, TERMS>(
                                    isa,
                                    size([1, k, 1]),
                                    out,
                                    row,
                                    column,
                                    Epilogue::accumulate(false),
                                )
                            };
                            assert_eq!(whole.get(i, j), one.get(0, 0), "{isa:?} at {i}, {j}");
                        }
                    }
                }
            }
        }
    }

    pub(super) fn what_is_not_finite_stays<T: TestElement<TERMS>, O: TileElement, const TERMS: usize>() {
        let sizes @ [m, k, n] = [20, 40, 40];
        for isa in isas::<T, TERMS>() {
            let ([mut a, ..], [mut b, ..]) = (Operand::<T>::all([m, k], 10), Operand::all([k, n], 11));
            for (i, x) in [f32::NAN, f32::INFINITY, f32::MAX, -f32::INFINITY].into_iter().enumerate() {
                a.memory[i * k + 7] = T::store(x);
            }
            b.memory[7 * n + 3] = T::store(0.0);
            b.memory[7 * n + 4] = T::store(f32::INFINITY);
            // NaNs with all bits, and signaling, as either element of a pair.
            b.memory[8 * n + 5] = T::store(f32::from_bits(0x7fff_ffff));
            b.memory[25 * n + 6] = T::store(f32::from_bits(0x7f80_0001));
            let [mut out, ..] = Operand::<O>::all([m, n], 12);
            run_gemm(isa, sizes, [&a, &b], &mut out, false);
            for j in 0..n {
                let (x, nothing) = (b.get(7, j), matches!(j, 5 | 6));
                assert!(out.get(0, j).is_nan());
                assert!([0, 3].iter().all(|_| out.get(1, j).is_nan() == (x == 0.0 || nothing)));
                if x != 0.0 && !nothing {
                    assert_eq!(out.get(1, j), x.signum() * f64::INFINITY, "{isa:?} at {j}");
                    assert_eq!(out.get(3, j), x.signum() * -f64::INFINITY, "{isa:?} at {j}");
                    let large = a.get(2, 7) * x;
                    assert!(large.is_infinite() || (out.get(2, j) / large - 1.0).abs() < 1.0 / 128.0);
                }
                assert_eq!(out.get(5, j).is_finite(), j != 4 && !nothing, "{isa:?} at {j}");
            }
        }
    }

    pub(super) fn sums_of_nothing<T: TestElement<TERMS>, O: TileElement, const TERMS: usize>() {
        for isa in isas::<T, TERMS>() {
            let [mut out, ..] = Operand::<O>::all([40, 40], 13);
            let ([a, ..], [b, ..]) = (Operand::<T>::all([40, 0], 1), Operand::all([0, 40], 1));
            run_gemm(isa, [40, 0, 40], [&a, &b], &mut out, false);
            assert!((0..1600).all(|i| out.get(i / 40, i % 40) == 0.0));
        }
    }
}

/// Tests of `f32` split into bf16 terms.
mod split_f32 {
    use super::*;
    use crate::gemm;

    fn random(len: usize, seed: u64, element: impl Fn(f32, u32) -> f32) -> Vec<f32> {
        let mut x = seed | 1;
        let mut next = || {
            x = x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            x
        };
        (0..len).map(|_| element((next() >> 40) as f32 / (1 << 23) as f32 - 1.0, (next() >> 33) as u32)).collect()
    }

    fn row_major(memory: Vec<f32>, columns: usize) -> Operand<f32> {
        Operand { memory, start: 0, strides: [columns as isize, 1] }
    }

    /// The GEMM in tiles, and the SIMD GEMM, which adds one product after the other.
    fn both(sizes @ [m, _, n]: [usize; 3], a: &Operand<f32>, b: &Operand<f32>) -> [Operand<f32>; 2] {
        let [mut tiles, mut lines] = [(); 2].map(|()| row_major(vec![f32::NAN; m * n], n));
        run_gemm(Bf16Isa::Amx, sizes, [a, b], &mut tiles, false);
        let out = Matrix { at: lines.memory.as_mut_ptr(), row: n as isize, column: 1 };
        // SAFETY: each matrix has memory of its own for these sizes.
        unsafe { gemm::gemm(Simd::Avx512, size(sizes), out, a.matrix(), b.matrix(), 1.0, Epilogue::accumulate(false)) };
        [tiles, lines]
    }

    /// The errors of both against sums in `f64`, relative to the sum of absolute products, as root mean squares.
    fn errors(sizes @ [m, k, n]: [usize; 3], a: &Operand<f32>, b: &Operand<f32>) -> [f64; 2] {
        let exact = |at: usize| {
            let products = (0..k).map(|q| a.get(at / n, q) * b.get(q, at % n));
            (products.clone().sum::<f64>(), products.map(f64::abs).sum::<f64>())
        };
        let exact: Vec<_> = (0..m * n).map(exact).collect();
        both(sizes, a, b).map(|got| {
            let error = |(at, (e, size)): (usize, &(f64, f64))| {
                (got.get(at / n, at % n) - e).abs() / size.max(f64::MIN_POSITIVE)
            };
            let errors: Vec<f64> = exact.iter().enumerate().map(error).collect();
            (errors.iter().map(|e| e * e).sum::<f64>() / errors.len() as f64).sqrt()
        })
    }

    #[test]
    fn no_less_precise_than_one_by_one() {
        if !Bf16Isa::Amx.is_available() {
            return eprintln!("not tested, this processor lacks it: {:?}", Bf16Isa::Amx);
        }
        let even: fn(f32, u32) -> f32 = |x, _| x;
        let positive: fn(f32, u32) -> f32 = |x, _| x.abs();
        let wide: fn(f32, u32) -> f32 = |x, r| x * ((r % 61) as f32 - 30.0).exp2();
        let full: fn(f32, u32) -> f32 = |x, r| f32::from_bits((x + 1.5).to_bits() | r & 0xff);
        for (name, element) in [("even", even), ("positive", positive), ("wide", wide), ("full", full)] {
            // k = 22 is the smallest that AMX takes: a convolution's channels. Short sums take several rounds, since
            // one's error is chance by a tenth.
            for k in [16, 22, 32, 40, 100, 384, 2048, 10_000] {
                let sizes @ [m, _, n] = [40, k, 50];
                let mut squares = [0.0; 2];
                for round in 0..(320 / k).max(1) as u64 {
                    let [a, b] = [4 * round + 1, 4 * round + 3];
                    let (a, b) = (row_major(random(m * k, a, element), k), row_major(random(k * n, b, element), n));
                    for (squares, error) in squares.iter_mut().zip(errors(sizes, &a, &b)) {
                        *squares += error * error;
                    }
                }
                let [tiles, lines] = squares.map(f64::sqrt);
                assert!(tiles <= 1.1 * lines, "{name} {k}: {tiles:e}, one by one {lines:e}");
            }
        }
    }

    /// Sums of integers, and of products with ones and zeros, are exact.
    #[test]
    fn what_fits_is_exact() {
        if !Bf16Isa::Amx.is_available() {
            return eprintln!("not tested, this processor lacks it: {:?}", Bf16Isa::Amx);
        }
        let whole = |_: f32, r: u32| (r % 1025) as f32 - 512.0;
        let sizes @ [m, k, n] = [33, 60, 40];
        let (a, b) = (row_major(random(m * k, 3, whole), k), row_major(random(k * n, 4, whole), n));
        let [tiles, lines] = both(sizes, &a, &b);
        assert_eq!(tiles.memory, lines.memory);

        let ones = row_major((0..k * k).map(|i| f32::from(i / k == i % k)).collect(), k);
        let any = |_: f32, r: u32| {
            f32::from_bits((r << 1) % 0x7f00_0000 + 0x0d00_0000 * u32::from(r % 0x3f80_0000 < 0x0d00_0000))
        };
        let any = |x: f32, r: u32| Some(any(x, r)).filter(|x| x.abs() > 1e-30 && x.is_finite()).unwrap_or(x);
        let (a, b) = (row_major(random(m * k, 5, any), k), row_major(random(k * n, 6, any), n));
        assert_eq!(both([m, k, k], &a, &ones)[0].memory, a.memory);
        assert_eq!(both([k, k, n], &ones, &b)[0].memory, b.memory);
    }
}
