//! Finished sums: added to those before, and rounded into the output.

use std::{arch::x86_64::*, ops::Range};

use smallvec::SmallVec;

use super::{
    SIDE, Tile,
    pack::PAIR,
    pieces::{Pieces, not_finite},
};
use crate::matmul::{Epilogue, Matrix};

/// Where sums go, and what the epilogue adds. (Worked out anew for each row, a convolution took a tenth longer.)
pub(super) struct Store<T, const P: usize> {
    out: Matrix<*mut T>,
    terms: SmallVec<[Matrix<*const T>; 3]>,
    /// Whether all that is read and written lies in lines.
    in_lines: bool,
}

impl<T: Pieces<P>, const P: usize> Store<T, P> {
    pub(super) fn new(out: Matrix<*mut T>, epilogue: Epilogue<T>) -> Self {
        let old = Matrix { at: out.at.cast_const(), row: out.row, column: out.column };
        let [first, second] = epilogue.plus;
        let terms: SmallVec<[_; 3]> = [epilogue.add.then_some(old), first, second].into_iter().flatten().collect();
        let in_lines = out.column == 1 && terms.iter().all(|x| matches!(x.column, 0 | 1));
        Store { out, terms, in_lines }
    }

    /// Some rows and lanes of a block of 32 × 32 sums, in `[2, 2]` tiles, that begins there. `again(i, j)` adds up a sum of pieces that is not finite.
    ///
    /// # Safety
    /// These numbers of the output are there, and those of what is added, and nothing else sees the output or the sums; the processor has the
    /// instructions.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512bf16")]
    pub(super) unsafe fn rows(
        &self,
        sums: *mut Tile,
        rows: Range<usize>,
        lanes: Range<usize>,
        [row, column]: [usize; 2],
        again: impl Fn(usize, usize) -> f32,
    ) {
        let mask = u32::MAX >> (PAIR - lanes.len()) << lanes.start;
        for i in rows {
            let halves = halves(sums, i);
            let out = self.out.part(row + i, column);
            let terms = self.terms.iter().map(|x| x.part(row + i, column));
            // SAFETY: the caller's promise.
            unsafe {
                if P > 1 {
                    let [low, high] = halves.map(|at| u32::from(not_finite(_mm512_load_ps(at))));
                    let mut which = (low | high << SIDE) & mask;
                    while which != 0 {
                        let j = which.trailing_zeros() as usize;
                        *halves[j / SIDE].add(j % SIDE) = again(i, j);
                        which &= which - 1;
                    }
                }
                let sums = halves.map(|at| _mm512_load_ps(at));
                if self.in_lines {
                    line(sums, out.at, terms, mask);
                } else {
                    scattered(sums, out, terms, mask);
                }
            }
        }
    }
}

/// Both halves of a row of a block's sums.
fn halves(sums: *mut Tile, i: usize) -> [*mut f32; 2] {
    let row = sums.wrapping_add(i / SIDE * 2).cast::<f32>().wrapping_add(i % SIDE * SIDE);
    [row, row.wrapping_add(SIDE * SIDE)]
}

/// Adds some rows of a block's sums to another's.
///
/// # Safety
/// Four tiles lie at each address, and nothing else sees them; the processor has the instructions.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn add(from: *mut Tile, to: *mut Tile, rows: Range<usize>) {
    for i in rows {
        for (from, to) in halves(from, i).into_iter().zip(halves(to, i)) {
            // SAFETY: the caller's promise.
            unsafe { _mm512_store_ps(to, _mm512_add_ps(_mm512_load_ps(to), _mm512_load_ps(from))) };
        }
    }
}

/// Those of 32 numbers side by side that the mask names, and those of each term, which are neighbours or the same.
///
/// # Safety
/// As for [`Store::rows`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn line<T: Pieces<P>, const P: usize>(
    mut sums: [__m512; 2],
    to: *mut T,
    terms: impl Iterator<Item = Matrix<*const T>>,
    mask: u32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        for x in terms {
            let x = if x.column == 0 { [_mm512_set1_ps((*x.at).load()); 2] } else { T::widen(x.at, mask) };
            sums = [_mm512_add_ps(sums[0], x[0]), _mm512_add_ps(sums[1], x[1])];
        }
        T::write(to, mask, sums);
    }
}

/// Numbers that lie apart, or those of a term: by way of lines of their own.
///
/// # Safety
/// As for [`Store::rows`].
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn scattered<T: Pieces<P>, const P: usize>(
    sums: [__m512; 2],
    to: Matrix<*mut T>,
    terms: impl Iterator<Item = Matrix<*const T>>,
    mask: u32,
) {
    let there = |j: usize| mask >> j & 1 == 1;
    let mut made = [T::store(0.0); PAIR];
    // SAFETY: the caller's promise.
    unsafe {
        let lines: SmallVec<[[T; PAIR]; 3]> =
            terms.map(|x| std::array::from_fn(|j| if there(j) { *x.part(0, j).at } else { T::store(0.0) })).collect();
        let terms = lines.iter().map(|x| Matrix { at: x.as_ptr(), row: 0, column: 1 });
        line(sums, made.as_mut_ptr(), terms, mask);
        (0..PAIR).filter(|j| there(*j)).for_each(|j| *to.part(0, j).at = made[j]);
    }
}
