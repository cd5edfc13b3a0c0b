//! GEMM with a few rows of A. The weights of a linear layer are read once for one token, so the time is that of reading
//! memory.
//!
//! Sixteen columns of B, which are rows in memory, are transposed in registers, or a small tile at a time into L1. They
//! are multiplied from there, without being packed. Sums are cut and added as in [`gemm`](super::gemm), so the output
//! has its bits.

use super::{
    epilogue::{Epilogue, Old},
    loops::KC,
    matrix::{GemmSize, Matrix},
    vector::{Vector, Vectors},
};
#[cfg(target_arch = "x86_64")]
use crate::simd::read_transposed;
use crate::{
    Simd,
    simd::{prefetch_far, transpose},
};

/// The number of columns that are computed together: a cache line of `f32` for each step of the sum.
pub(super) const GROUP: usize = 16;
/// The most rows of A.
pub(super) const MAX_ROWS: usize = 4;
/// The number of steps of the sum that are transposed at once: 4 KiB of `f32`.
const STEPS: usize = 64;
/// The prefetch distance, in elements of each of the sixteen streams. Memory is prefetched into L2, and a line of each
/// stream at a time. With prefetches into L1, and a tile at once, the streams wait for each other, and the product
/// reads 0.6 times as much a second.
const AHEAD: usize = 256;

/// Tells whether these operands are computed by `gemv`: rows of A and columns of B must be adjacent in memory.
pub(super) fn takes<T>(size: GemmSize, out: Matrix<*mut T>, a: Matrix<*const T>, b: Matrix<*const T>) -> bool {
    (1..=MAX_ROWS).contains(&size.m) && size.n >= GROUP && a.column == 1 && b.row == 1 && out.column == 1
}

/// Computes the whole groups of columns of `out = alpha · a · b` with the epilogue, and returns their number of
/// columns.
///
/// # Safety
/// As for [`gemm`](super::gemm), for operands that [`takes`] accepts.
pub(super) unsafe fn gemv<T: Vectors>(
    simd: Simd,
    size: GemmSize,
    out: Matrix<*mut T>,
    a: Matrix<*const T>,
    b: Matrix<*const T>,
    alpha: T,
    epilogue: Epilogue<T>,
) -> usize {
    let call = Gemv { simd, size, out, a, b, alpha, epilogue };
    // SAFETY: the caller guarantees valid operands; a runtime is only built with a `Simd` that this CPU supports.
    unsafe {
        match simd {
            #[cfg(target_arch = "x86_64")]
            Simd::Avx512 | Simd::Avx512Bf16 | Simd::Amx => avx512(&call),
            #[cfg(target_arch = "x86_64")]
            Simd::Avx2 => avx2(&call),
            _ => call.rows::<T::Baseline>(),
        }
    }
    size.n / GROUP * GROUP
}

struct Gemv<T> {
    simd: Simd,
    size: GemmSize,
    out: Matrix<*mut T>,
    a: Matrix<*const T>,
    b: Matrix<*const T>,
    alpha: T,
    epilogue: Epilogue<T>,
}

/// # Safety
/// As for [`gemv`], on a CPU with AVX-512.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,avx512f,avx512vl,avx512bw,avx512dq")]
unsafe fn avx512<T: Vectors>(call: &Gemv<T>) {
    // SAFETY: the caller guarantees valid operands, and AVX-512.
    unsafe { call.rows::<T::Avx512>() }
}

/// # Safety
/// As for [`gemv`], on a CPU with AVX2 and FMA.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn avx2<T: Vectors>(call: &Gemv<T>) {
    // SAFETY: the caller guarantees valid operands, and AVX2 with FMA.
    unsafe { call.rows::<T::Avx2>() }
}

/// A tile of B, transposed.
#[repr(align(64))]
struct Tile<T>([[T; GROUP]; STEPS]);

impl<T: Vectors> Gemv<T> {
    /// # Safety
    /// As for [`gemv`]; the CPU supports the vector `R`.
    #[inline(always)]
    unsafe fn rows<R: Vector<T>>(&self) {
        for j in (0..self.size.n / GROUP * GROUP).step_by(GROUP) {
            // SAFETY: the caller guarantees valid operands, of which these are sixteen columns, and the vector.
            unsafe {
                match self.size.m {
                    1 => self.group::<R, 1>(j),
                    2 => self.group::<R, 2>(j),
                    3 => self.group::<R, 3>(j),
                    _ => self.group::<R, MAX_ROWS>(j),
                }
            }
        }
    }

    /// Computes sixteen columns of `M` rows.
    ///
    /// # Safety
    /// As for [`gemv`]; the CPU supports the vector `R`, and `size.m` is `M`.
    #[inline(always)]
    unsafe fn group<R: Vector<T>, const M: usize>(&self, j: usize) {
        let Gemv { size, out, epilogue, .. } = self;
        let (out, mut tile) = (out.offset(0, j), Tile([[T::ZERO; GROUP]; STEPS]));
        // With k = 0 the output is still written.
        for from in (0..size.k.max(1)).step_by(KC) {
            let (to, add) = (size.k.min(from + KC), epilogue.old == Old::Added || from > 0);
            // SAFETY: the caller guarantees valid operands and the vector.
            unsafe {
                let mut acc = [[R::splat(T::ZERO); GROUP]; M];
                for k in (from..to).step_by(STEPS) {
                    self.step::<R, M>((j, k, STEPS.min(to - k)), &mut tile, &mut acc);
                }
                let alpha = R::splat(self.alpha);
                for (i, row) in acc.iter().enumerate() {
                    for (v, acc) in row.iter().enumerate().take(GROUP / R::LANES) {
                        let at = out.offset(i, v * R::LANES).at;
                        let x = acc.mul(alpha);
                        if add { x.add(R::load(at)) } else { x }.store(at);
                    }
                }
            }
        }
        // SAFETY: the caller guarantees the output and the addends, and the vector.
        unsafe { epilogue.offset(0, j).add_to::<R>(out, (M, GROUP)) };
    }

    /// Adds sixteen products from step `k` on to the sums of columns from `j` on. They are transposed in registers, 1.7
    /// times as fast as through L1.
    ///
    /// # Safety
    /// As for [`group`](Gemv::group), for steps within `k`; `R` is the vector of sixteen `f32` of a CPU with AVX-512.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn square<R: Vector<T>, const M: usize>(&self, (j, k): (usize, usize), acc: &mut [[R; GROUP]; M]) {
        let from = self.b.offset(k, j);
        // SAFETY: the caller guarantees sixteen rows of sixteen elements of four bytes, and a vector that is a register
        // of sixteen words.
        unsafe {
            let lines = read_transposed(from.at.cast(), from.column * size_of::<T>() as isize);
            for (step, line) in lines.iter().enumerate() {
                let line: R = std::mem::transmute_copy(line);
                for (i, acc) in acc.iter_mut().enumerate() {
                    let x = R::splat(*self.a.offset(i, k + step).at);
                    acc[0] = x.mul_add(line, acc[0]);
                }
            }
        }
    }

    /// Prefetches the elements after `steps` steps from step `k` on, of columns from `j` on.
    #[inline(always)]
    fn prefetch(&self, (j, k, steps): (usize, usize, usize)) {
        // At the end of the columns, the beginning of the next ones.
        let next = if k + AHEAD < self.size.k {
            self.b.offset(k + AHEAD, j)
        } else {
            self.b.offset(k + AHEAD - self.size.k, j + GROUP)
        };
        for column in 0..GROUP {
            prefetch_far(next.offset(0, column).at, steps);
        }
    }

    /// Adds `steps` products from step `k` on to the sums of columns from `j` on.
    ///
    /// # Safety
    /// As for [`group`](Gemv::group), for steps within `k`.
    #[inline(always)]
    unsafe fn step<R: Vector<T>, const M: usize>(
        &self,
        (j, k, steps): (usize, usize, usize),
        tile: &mut Tile<T>,
        acc: &mut [[R; GROUP]; M],
    ) {
        #[cfg(target_arch = "x86_64")]
        let (k, steps) = {
            let whole = if R::LANES == GROUP { steps / GROUP * GROUP } else { 0 };
            for line in (k..k + whole).step_by(GROUP) {
                self.prefetch((j, line, GROUP));
                // SAFETY: sixteen steps of sixteen columns of B, which the caller guarantees; only the vector of
                // AVX-512 has sixteen elements.
                unsafe { self.square::<R, M>((j, line), acc) };
            }
            (k + whole, steps - whole)
        };
        self.prefetch((j, k, steps));
        let from = self.b.offset(k, j);
        let row = (GROUP * size_of::<T>()) as isize;
        let stream = (from.at.cast_mut().cast(), from.column * size_of::<T>() as isize);
        // SAFETY: `steps` steps of sixteen columns of B, which the caller guarantees. The tile has room for as many,
        // and is this function's alone.
        unsafe {
            transpose::<T>(self.simd, (tile.0.as_mut_ptr().cast(), row), stream, (steps, GROUP));
            for (step, line) in tile.0.iter().enumerate().take(steps) {
                for (i, acc) in acc.iter_mut().enumerate() {
                    let x = R::splat(*self.a.offset(i, k + step).at);
                    for (v, acc) in acc.iter_mut().enumerate().take(GROUP / R::LANES) {
                        *acc = x.mul_add(R::load(line.as_ptr().add(v * R::LANES)), *acc);
                    }
                }
            }
        }
    }
}
