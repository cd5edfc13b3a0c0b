//! Finished sums, rounded into the output.

use std::{arch::x86_64::*, ops::Range};

use smallvec::SmallVec;

use super::{
    SIDE, Tile,
    pack::PAIR,
    pieces::{Pieces, not_finite},
};
use crate::matmul::{Epilogue, Matrix};

/// Some rows and lanes of a block of 32 × 32 sums, in `[2, 2]` tiles, and what the epilogue adds. Matrices begin where lane 0 would be.
/// `again(i, j)` adds up a sum of pieces that is not finite.
///
/// # Safety
/// The output's rows and columns are there, and those of what is added, and nothing else sees the output; the processor has the instructions.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512bf16")]
pub(super) unsafe fn block<T: Pieces<P>, const P: usize>(
    sums: *mut Tile,
    out: Matrix<*mut T>,
    rows: usize,
    lanes: Range<usize>,
    epilogue: Epilogue<T>,
    again: impl Fn(usize, usize) -> f32,
) {
    let old = Matrix { at: out.at.cast_const(), row: out.row, column: out.column };
    let [first, second] = epilogue.plus;
    let terms: SmallVec<[_; 3]> = [epilogue.add.then_some(old), first, second].into_iter().flatten().collect();
    let in_lines = out.column == 1 && terms.iter().all(|x| matches!(x.column, 0 | 1));
    for i in 0..rows {
        let tiles = sums.wrapping_add(i / SIDE * 2).cast::<f32>().wrapping_add(i % SIDE * SIDE);
        // SAFETY: the caller's promise.
        unsafe {
            if P > 1 {
                for (half, at) in [0, SIDE * SIDE].into_iter().enumerate() {
                    let to = tiles.add(at);
                    let mut which = not_finite(_mm512_load_ps(to));
                    while which != 0 {
                        let lane = which.trailing_zeros() as usize;
                        let j = half * SIDE + lane;
                        if lanes.contains(&j) {
                            *to.add(lane) = again(i, j);
                        }
                        which &= which - 1;
                    }
                }
            }
            let sums = [_mm512_load_ps(tiles), _mm512_load_ps(tiles.add(SIDE * SIDE))];
            if in_lines {
                line(sums, out.part(i, 0).at, terms.iter().map(|x| x.part(i, 0)), lanes.clone());
            } else {
                scattered(sums, out.part(i, 0), terms.iter().map(|x| x.part(i, 0)), lanes.clone());
            }
        }
    }
}

/// Adds the sums of a block to others.
///
/// # Safety
/// Four tiles lie at each address, and nothing else sees them; the processor has the instructions.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn add(from: *const Tile, to: *mut Tile) {
    let (from, to) = (from.cast::<f32>(), to.cast::<f32>());
    for at in (0..4 * SIDE * SIDE).step_by(SIDE) {
        // SAFETY: the caller's promise.
        unsafe {
            let sum = _mm512_add_ps(_mm512_load_ps(to.add(at)), _mm512_load_ps(from.add(at)));
            _mm512_store_ps(to.add(at), sum);
        }
    }
}

/// So many of 32 numbers side by side, and those of each term, which are neighbours or the same.
///
/// # Safety
/// As for [`block`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn line<T: Pieces<P>, const P: usize>(
    mut sums: [__m512; 2],
    to: *mut T,
    terms: impl Iterator<Item = Matrix<*const T>>,
    lanes: Range<usize>,
) {
    let mask = u32::MAX >> (PAIR - lanes.len()) << lanes.start;
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
/// As for [`block`].
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn scattered<T: Pieces<P>, const P: usize>(
    sums: [__m512; 2],
    to: Matrix<*mut T>,
    terms: impl Iterator<Item = Matrix<*const T>>,
    lanes: Range<usize>,
) {
    let mut made = [T::store(0.0); PAIR];
    // SAFETY: the caller's promise.
    unsafe {
        let lines: SmallVec<[[T; PAIR]; 3]> = terms
            .map(|x| std::array::from_fn(|j| if lanes.contains(&j) { *x.part(0, j).at } else { T::store(0.0) }))
            .collect();
        line(
            sums,
            made.as_mut_ptr(),
            lines.iter().map(|x| Matrix { at: x.as_ptr(), row: 0, column: 1 }),
            lanes.clone(),
        );
        lanes.for_each(|j| *to.part(0, j).at = made[j]);
    }
}
