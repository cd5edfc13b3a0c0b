//! The micro-kernel of AVX-512 BF16: dot products of pairs, over operands packed as for AMX.

use std::arch::x86_64::*;

use super::{TILE_DIM, Tile, micro_kernel::PanelTiles};

/// Rows whose accumulators are in registers at once, two vectors each. 16 accumulators hide the latency of a dot
/// product, and leave 10 loads for 16 of them.
const MR: usize = 8;

/// Computes `acc = a · b (+ acc)` for an A micro-panel and a B micro-panel of `k_tiles` tiles along `k`.
///
/// # Safety
/// `a` is valid for 32 rows, `b` for two tiles for each of `k_tiles`, and `acc` for four tiles, which no other thread
/// accesses. The CPU supports AVX-512 BF16.
#[target_feature(enable = "avx512f,avx512bf16")]
pub(super) unsafe fn multiply(a: PanelTiles, b: *const Tile, acc: *mut Tile, k_tiles: usize, accumulate: bool) {
    for row in (0..2 * TILE_DIM).step_by(MR) {
        let (half, row_in_tile) = (row / TILE_DIM, row % TILE_DIM);
        // SAFETY: rows `row..row + MR` of the 32 that the caller guarantees.
        unsafe {
            let a = PanelTiles { at: a.at.wrapping_byte_offset(row as isize * a.row_bytes), ..a };
            let acc = acc.add(2 * half).cast::<f32>().add(row_in_tile * TILE_DIM);
            rows(a, b, acc, k_tiles, accumulate);
        }
    }
}

/// [`MR`] rows of [`multiply`].
///
/// # Safety
/// As for [`multiply`], with `MR` rows of `a` and of the accumulators.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn rows(a: PanelTiles, b: *const Tile, to: *mut f32, k_tiles: usize, accumulate: bool) {
    const ELEMENTS: usize = TILE_DIM * TILE_DIM;
    // SAFETY: the caller guarantees the rows and tiles; a vector of integers and one of bf16 pairs have the same bits.
    unsafe {
        let mut acc = [[_mm512_setzero_ps(); 2]; MR];
        if accumulate {
            for (r, acc) in acc.iter_mut().enumerate() {
                *acc = [0, ELEMENTS].map(|half| _mm512_load_ps(to.add(r * TILE_DIM + half)));
            }
        }
        for k_tile in 0..k_tiles {
            let row = |r: usize| {
                a.at.wrapping_byte_offset(k_tile as isize * a.k_tile_bytes + r as isize * a.row_bytes).cast::<i32>()
            };
            let b = b.add(2 * k_tile).cast::<i32>();
            for pair in 0..TILE_DIM {
                let right: [__m512bh; 2] = [0, ELEMENTS]
                    .map(|half| std::mem::transmute(_mm512_load_si512(b.add(pair * TILE_DIM + half).cast())));
                for (r, acc) in acc.iter_mut().enumerate() {
                    let left: __m512bh = std::mem::transmute(_mm512_set1_epi32(row(r).add(pair).read_unaligned()));
                    for (acc, right) in acc.iter_mut().zip(right) {
                        *acc = _mm512_dpbf16_ps(*acc, left, right);
                    }
                }
            }
        }
        for (r, acc) in acc.iter().enumerate() {
            _mm512_store_ps(to.add(r * TILE_DIM), acc[0]);
            _mm512_store_ps(to.add(r * TILE_DIM + ELEMENTS), acc[1]);
        }
    }
}
