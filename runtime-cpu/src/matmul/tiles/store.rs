//! Finished sums: rounded into the output, row by row.

use std::{arch::x86_64::*, ops::Range};

use smallvec::SmallVec;

use super::{
    SIDE, Tile,
    lines::ask,
    pack::PAIR,
    pieces::{Pieces, not_finite},
};
use crate::matmul::{Epilogue, Matrix};

/// Terms that are added to sums, at most.
const TERMS: usize = 3;

/// Where sums go, and what the epilogue adds.
pub(super) struct Store<T> {
    out: Matrix<*mut T>,
    terms: SmallVec<[Matrix<*const T>; TERMS]>,
    /// Whether all that is read and written lies in lines.
    in_lines: bool,
}

impl<T> Store<T> {
    pub(super) fn new(out: Matrix<*mut T>, epilogue: Epilogue<T>) -> Self {
        let old = Matrix { at: out.at.cast_const(), row: out.row, column: out.column };
        let [first, second] = epilogue.plus;
        let terms: SmallVec<[_; TERMS]> = [epilogue.add.then_some(old), first, second].into_iter().flatten().collect();
        let in_lines = out.column == 1 && terms.iter().all(|x| matches!(x.column, 0 | 1));
        Store { out, terms, in_lines }
    }

    /// Some lanes of the row of 32 sums that begins there.
    pub(super) fn line(&self, [row, column]: [usize; 2], lanes: Range<usize>) -> Line<T> {
        let none = Matrix { at: std::ptr::null(), row: 0, column: 0 };
        Line {
            out: self.out.part(row, column),
            terms: std::array::from_fn(|i| self.terms.get(i).map_or(none, |x| x.part(row, column))),
            count: self.terms.len(),
            in_lines: self.in_lines,
            mask: u32::MAX >> (PAIR - lanes.len()) << lanes.start,
        }
    }
}

/// A row of the output: where the next one lies is an addition. (Worked out anew for each row, a GPT's step in bf16 took 1.05 times as long.)
pub(super) struct Line<T> {
    out: Matrix<*mut T>,
    terms: [Matrix<*const T>; TERMS],
    count: usize,
    in_lines: bool,
    mask: u32,
}

impl<T> Line<T> {
    /// Which sums of pieces must be added up anew.
    #[inline]
    #[target_feature(enable = "avx512f,avx512dq")]
    pub(super) fn not_finite<const P: usize>(&self, sums: [__m512; 2]) -> u32 {
        let [low, high] = sums.map(|x| if P > 1 { u32::from(not_finite(x)) } else { 0 });
        (low | high << SIDE) & self.mask
    }

    /// As [`put`](Line::put), of a row with sums that are not finite: `again(lane)` adds one up anew.
    ///
    /// # Safety
    /// As for [`put`](Line::put).
    #[cold]
    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512bf16")]
    pub(super) unsafe fn put_anew<const P: usize>(&mut self, sums: [__m512; 2], again: impl Fn(usize) -> f32)
    where
        T: Pieces<P>,
    {
        // SAFETY: registers' bits are numbers.
        let mut numbers: [f32; PAIR] = unsafe { std::mem::transmute(sums) };
        let mut which = self.not_finite::<P>(sums);
        while which != 0 {
            let lane = which.trailing_zeros() as usize;
            numbers[lane] = again(lane);
            which &= which - 1;
        }
        // SAFETY: as above, and the caller's promise.
        unsafe { self.put(std::mem::transmute::<[f32; PAIR], [__m512; 2]>(numbers)) };
    }

    /// Stores a row's sums and goes to the next.
    ///
    /// # Safety
    /// These numbers of the output are there, and those of what is added, and nothing else sees the output; the processor has the instructions.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    pub(super) unsafe fn put<const P: usize>(&mut self, mut sums: [__m512; 2])
    where
        T: Pieces<P>,
    {
        // SAFETY: the caller's promise.
        unsafe {
            if self.in_lines {
                // One by one, so that nothing is divided, counted or called.
                for i in 0..TERMS {
                    if i == self.count {
                        break;
                    }
                    let Matrix { at, row, column } = self.terms[i];
                    // The next panel's, which nothing foresees: a residual's took 1.1 times as long to add.
                    if row != 0 && column != 0 {
                        ask(at.wrapping_add(PAIR));
                    }
                    sums = plus(
                        sums,
                        if column == 0 { [_mm512_set1_ps((*at).load()); 2] } else { T::widen(at, self.mask) },
                    );
                }
                T::write(self.out.at, self.mask, sums);
            } else {
                self.scattered(sums);
            }
        }
        self.out = self.out.part(1, 0);
        self.terms = self.terms.map(|x| x.part(1, 0));
    }

    /// Numbers that lie apart, or those of a term.
    ///
    /// # Safety
    /// As for [`put`](Line::put).
    #[cold]
    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn scattered<const P: usize>(&self, mut sums: [__m512; 2])
    where
        T: Pieces<P>,
    {
        let lanes = || (0..PAIR).filter(|j| self.mask >> j & 1 == 1);
        let mut numbers = [T::store(0.0); PAIR];
        // SAFETY: the caller's promise.
        unsafe {
            for x in &self.terms[..self.count] {
                lanes().for_each(|j| numbers[j] = *x.part(0, j).at);
                sums = plus(sums, T::widen(numbers.as_ptr(), self.mask));
            }
            T::write(numbers.as_mut_ptr(), self.mask, sums);
            lanes().for_each(|j| *self.out.part(0, j).at = numbers[j]);
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn plus(x: [__m512; 2], y: [__m512; 2]) -> [__m512; 2] {
    [_mm512_add_ps(x[0], y[0]), _mm512_add_ps(x[1], y[1])]
}

/// A row of a block of 32 × 32 sums, in `[2, 2]` tiles.
///
/// # Safety
/// The block lies there; the processor has the instructions.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn load(sums: *const Tile, row: usize) -> [__m512; 2] {
    let [low, high] = halves(sums.cast_mut(), row);
    // SAFETY: the caller's promise.
    unsafe { [_mm512_load_ps(low), _mm512_load_ps(high)] }
}

/// A row of a block of sums, and what is added to it.
///
/// # Safety
/// As for [`load`].
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn add(sums: *const Tile, row: usize, x: [__m512; 2]) -> [__m512; 2] {
    // SAFETY: the caller's promise.
    unsafe { plus(load(sums, row), x) }
}

/// Overwrites a row of a block of sums.
///
/// # Safety
/// As for [`load`], and nothing else sees the block.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn keep(to: *mut Tile, row: usize, x: [__m512; 2]) {
    for (to, x) in halves(to, row).into_iter().zip(x) {
        // SAFETY: the caller's promise.
        unsafe { _mm512_store_ps(to, x) };
    }
}

/// Both halves of a row of a block's sums.
#[inline]
fn halves(sums: *mut Tile, row: usize) -> [*mut f32; 2] {
    let row = sums.cast::<f32>().wrapping_add((row + (row & SIDE)) * SIDE);
    [row, row.wrapping_add(SIDE * SIDE)]
}
