//! Stores accumulators: complete sums are rounded into the output, row by row.

use std::{arch::x86_64::*, ops::Range};

use smallvec::SmallVec;

use super::{
    TILE_DIM, Tile,
    pack_tiles::PANEL,
    split::{TileElement, not_finite},
    tile_rows::prefetch_row,
};
use crate::gemm::{Epilogue, Matrix, Old};

/// The most addends of the epilogue, with the output's old value.
const ADDENDS: usize = 3;

/// The destination of complete sums, and the addends of the epilogue.
pub(super) struct OutputStore<T> {
    out: Matrix<*mut T>,
    addends: SmallVec<[Matrix<*const T>; ADDENDS]>,
    /// True if the output and its addends have unit column stride.
    unit_stride: bool,
}

impl<T> OutputStore<T> {
    pub(super) fn new(out: Matrix<*mut T>, epilogue: Epilogue<T>) -> Self {
        let old = Matrix { at: out.at.cast_const(), row: out.row, column: out.column };
        let [first, second] = epilogue.addends;
        let addends = [(epilogue.old == Old::Added).then_some(old), first, second];
        let addends: SmallVec<[_; ADDENDS]> = addends.into_iter().flatten().collect();
        let unit_stride = out.column == 1 && addends.iter().all(|x| matches!(x.column, 0 | 1));
        OutputStore { out, addends, unit_stride }
    }

    /// The stores of some lanes of 32 columns, from a row on.
    pub(super) fn row(&self, [row, column]: [usize; 2], lanes: Range<usize>) -> RowStore<T> {
        let none = Matrix { at: std::ptr::null(), row: 0, column: 0 };
        RowStore {
            out: self.out.offset(row, column),
            addends: std::array::from_fn(|i| self.addends.get(i).map_or(none, |x| x.offset(row, column))),
            count: self.addends.len(),
            unit_stride: self.unit_stride,
            mask: u32::MAX >> (PANEL - lanes.len()) << lanes.start,
        }
    }
}

/// The next row of the output to be stored. Its address is an addition. (Computed from its index, a GPT's step in bf16
/// took 1.05 times as long.)
pub(super) struct RowStore<T> {
    out: Matrix<*mut T>,
    addends: [Matrix<*const T>; ADDENDS],
    count: usize,
    unit_stride: bool,
    mask: u32,
}

impl<T> RowStore<T> {
    /// A mask of the sums of split elements that must be recomputed.
    #[inline]
    #[target_feature(enable = "avx512f,avx512dq")]
    pub(super) fn not_finite<const TERMS: usize>(&self, acc: [__m512; 2]) -> u32 {
        let [low, high] = acc.map(|x| if TERMS > 1 { u32::from(not_finite(x)) } else { 0 });
        (low | high << TILE_DIM) & self.mask
    }

    /// Stores a row like [`put`](RowStore::put), where some sums are not finite: `recompute(lane)` gives one of them.
    ///
    /// # Safety
    /// As for [`put`](RowStore::put): the output and its addends are valid in this row.
    #[cold]
    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512bf16")]
    pub(super) unsafe fn put_recomputed<const TERMS: usize>(
        &mut self,
        acc: [__m512; 2],
        recompute: impl Fn(usize) -> f32,
    ) where
        T: TileElement,
    {
        // SAFETY: both types are 32 `f32` without invariants.
        let mut elements: [f32; PANEL] = unsafe { std::mem::transmute(acc) };
        let mut which = self.not_finite::<TERMS>(acc);
        while which != 0 {
            let lane = which.trailing_zeros() as usize;
            elements[lane] = recompute(lane);
            which &= which - 1;
        }
        // SAFETY: both types are 32 `f32` without invariants; the caller guarantees output and addends.
        unsafe { self.put(std::mem::transmute::<[f32; PANEL], [__m512; 2]>(elements)) };
    }

    /// Stores a row of sums and goes to the next row.
    ///
    /// # Safety
    /// The output and its addends are valid in this row's lanes, and no other thread accesses the output. The CPU
    /// supports AVX-512 BF16.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    pub(super) unsafe fn put(&mut self, mut acc: [__m512; 2])
    where
        T: TileElement,
    {
        // SAFETY: the caller guarantees output and addends in this row's lanes.
        unsafe {
            if self.unit_stride {
                // A loop of constant length is unrolled, so that nothing is divided, counted or called.
                for i in 0..ADDENDS {
                    if i == self.count {
                        break;
                    }
                    let Matrix { at, row, column } = self.addends[i];
                    // The next micro-panel's: hardware prefetchers do not foresee it. A residual took 1.1 times as long
                    // to add.
                    if row != 0 && column != 0 {
                        prefetch_row(at.wrapping_add(PANEL));
                    }
                    acc = add_rows(
                        acc,
                        if column == 0 { [_mm512_set1_ps((*at).load()); 2] } else { T::load_f32(at, self.mask) },
                    );
                }
                T::store_f32(self.out.at, self.mask, acc);
            } else {
                self.put_strided(acc);
            }
        }
        self.out = self.out.offset(1, 0);
        self.addends = self.addends.map(|x| x.offset(1, 0));
    }

    /// Stores a row of an output, or with addends, of other column strides.
    ///
    /// # Safety
    /// As for [`put`](RowStore::put): the output and its addends are valid in this row's lanes.
    #[cold]
    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn put_strided(&self, mut acc: [__m512; 2])
    where
        T: TileElement,
    {
        let lanes = || (0..PANEL).filter(|j| self.mask >> j & 1 == 1);
        let mut elements = [T::store(0.0); PANEL];
        // SAFETY: the caller guarantees output and addends in the mask's lanes; `elements` has all 32.
        unsafe {
            for x in &self.addends[..self.count] {
                lanes().for_each(|j| elements[j] = *x.offset(0, j).at);
                acc = add_rows(acc, T::load_f32(elements.as_ptr(), self.mask));
            }
            T::store_f32(elements.as_mut_ptr(), self.mask, acc);
            lanes().for_each(|j| *self.out.offset(0, j).at = elements[j]);
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn add_rows(x: [__m512; 2], y: [__m512; 2]) -> [__m512; 2] {
    [_mm512_add_ps(x[0], y[0]), _mm512_add_ps(x[1], y[1])]
}

/// Loads a row of the accumulators of 32 × 32 elements, which are `[2, 2]` tiles.
///
/// # Safety
/// `acc` is valid for four tiles. The CPU supports AVX-512.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn load(acc: *const Tile, row: usize) -> [__m512; 2] {
    let [low, high] = halves(acc.cast_mut(), row);
    // SAFETY: the caller guarantees the tiles; `halves` are two aligned vectors in them.
    unsafe { [_mm512_load_ps(low), _mm512_load_ps(high)] }
}

/// The sum of a row of accumulators and `x`.
///
/// # Safety
/// `acc` is valid for four tiles. The CPU supports AVX-512.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn add(acc: *const Tile, row: usize, x: [__m512; 2]) -> [__m512; 2] {
    // SAFETY: the caller guarantees the tiles.
    unsafe { add_rows(load(acc, row), x) }
}

/// Overwrites a row of accumulators.
///
/// # Safety
/// `to` is valid for four tiles, which no other thread accesses. The CPU supports AVX-512.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn store(to: *mut Tile, row: usize, x: [__m512; 2]) {
    for (to, x) in halves(to, row).into_iter().zip(x) {
        // SAFETY: the caller guarantees the tiles; `halves` are two aligned vectors in them.
        unsafe { _mm512_store_ps(to, x) };
    }
}

/// The two 16-element vectors of a row of accumulators.
#[inline]
fn halves(acc: *mut Tile, row: usize) -> [*mut f32; 2] {
    let row = acc.cast::<f32>().wrapping_add((row + (row & TILE_DIM)) * TILE_DIM);
    [row, row.wrapping_add(TILE_DIM * TILE_DIM)]
}
