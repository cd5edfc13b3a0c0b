//! The same by the processor's products of bf16 in tiles: scores and gradients of weights are sums in `f32`, weights and gradients of scores
//! are rounded to bf16 where they are factors (as in PyTorch), and what is added up stays in `f32`. A row's weights are summed before they are
//! rounded.
//!
//! Sums leave the registers as tiles, and what is computed of them goes into the tiles of the next product: no matrix of weights is ever
//! laid out in rows.

mod backward;
mod forward;

use std::arch::x86_64::*;

use numcore::{DType, fused::Attention};

use super::{Call, KEYS, Simd};
use crate::{
    math::Math,
    matmul::{Matrix, Pieces, Tile, Tiles},
};

pub(super) use backward::keys;
pub(super) use forward::queries;

/// Rows of a strip, columns of a panel, steps of a tile.
const SIDE: usize = Tiles::<1>::SIDE;
/// Scores of a query and a block of keys.
type Row = [f32; KEYS];

/// The dtype, if it is computed so.
pub(super) fn takes(call: &Call<'_>, op: &Attention) -> Option<DType> {
    let some = call.ins.iter().all(|x| x.layout.numel() > 0);
    (some && !op.masked && call.engine().simd == Simd::Amx).then_some(call.outs[0].dtype)
}

/// Numbers of so many tiles.
const fn room(tiles: usize) -> usize {
    tiles * size_of::<Tile>() / size_of::<f32>()
}

fn tiles(room: &mut [f32]) -> *mut Tile {
    room.as_mut_ptr().cast()
}

/// Half of a row of a panel's sums: 16 numbers.
fn line(sums: *mut Tile, row: usize, half: usize) -> *mut f32 {
    sums.wrapping_add(row / 16 * 2 + half).cast::<f32>().wrapping_add(row % 16 * 16)
}

/// A row of scores, scaled, `−∞` where the query sees no key; and the largest, passing over NaN.
///
/// # Safety
/// There are tiles for the row; the processor has the instructions.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
unsafe fn visible_row(s: *const Tile, i: usize, row: &mut [f32], scale: f32, seen: usize) -> f32 {
    let scale = _mm512_set1_ps(scale);
    let mut most = _mm512_set1_ps(f32::NEG_INFINITY);
    for (j, to) in row.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let left = seen.saturating_sub(16 * j).min(16);
        let hidden = !((0xffff_u32 >> (16 - left)) as u16);
        // SAFETY: the caller's promise.
        unsafe {
            let x = _mm512_mul_ps(_mm512_load_ps(line(s.add(j / 2 * 4).cast_mut(), i, j % 2)), scale);
            let x = _mm512_mask_mov_ps(x, hidden, _mm512_set1_ps(f32::NEG_INFINITY));
            // Of NaN and a number the second is given.
            most = _mm512_max_ps(x, most);
            _mm512_storeu_ps(to.as_mut_ptr(), x);
        }
    }
    _mm512_reduce_max_ps(most)
}

/// Powers of two.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
fn exp2_all(row: &mut [f32], base: f32) {
    for x in row {
        *x = Math::exp2_flushed(*x - base);
    }
}

/// Rows of a strip's sums, scaled and rounded into the output: as many as there are factors.
///
/// # Safety
/// These are rows of the output, which nothing else sees; the processor has the instructions.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
unsafe fn rows_out<T: Pieces<P>, const P: usize>(
    sums: *mut Tile,
    out: Matrix<*mut T>,
    columns: usize,
    factors: &[f32],
) {
    for (i, &factor) in factors.iter().enumerate() {
        for j in (0..columns).step_by(SIDE) {
            let mask = u32::MAX >> (SIDE - SIDE.min(columns - j));
            // SAFETY: the caller's promise.
            unsafe {
                let x = [0, 1].map(|half| {
                    let x = _mm512_load_ps(line(sums.add(j / SIDE * 4), i, half));
                    _mm512_mul_ps(x, _mm512_set1_ps(factor))
                });
                T::write(out.part(i, j).at, mask, x);
            }
        }
    }
}
