//! The same by the CPU's products of tiles, of bf16 and of `f32` in three pieces: scores and gradients of weights are sums in `f32`. Where
//! weights and gradients of scores are factors, they are rounded to bf16 (as in PyTorch) or cut in three pieces, like the operands. What is added
//! up stays in `f32`. A row's weights are summed before they are rounded.
//!
//! Sums leave the registers as tiles, and what is computed of them goes into the tiles of the next product: no matrix of weights is ever
//! laid out in rows. Strips of queries follow each other as on a belt, so that one's products are computed beside another's weights ([`Interleaved`](crate::gemm::Interleaved)).
//!
//! An `f32` that is not finite, or rounds to infinity as a bf16, has a piece that is NaN. Outputs that are not finite are computed anew without
//! pieces; a gradient of what is not finite may be NaN where it would be infinite without.

mod backward;
mod forward;
mod score_grads;

use std::arch::x86_64::*;

use numcore::{DType, fused::Attention};

use super::{Call, KEYS, Operand, Seen, Simd};
use crate::{
    gemm::{Matrix, Split, Tile, TileUnit, not_finite},
    math::{EXP2_SLOPE, Real as _},
    simd::prefetch,
};

pub(super) use backward::keys;
pub(super) use forward::queries;

/// Rows of a strip, columns of a panel, steps of a tile.
const SIDE: usize = TileUnit::<1>::PANEL;
/// Panels of keys in a block.
const PANELS: usize = KEYS / SIDE;

/// Depths, and depths times keys, from which on tiles of `f32` in pieces are faster: with less, tiles are mostly empty, or cutting takes longer than
/// products. (Forward and backward, 64 keys of depth 16: 0.58 times as fast, 128 of 32: 0.93, 256 of 32: 1.03, 256 of 64: 1.18.)
const DEEP: usize = SIDE;
const MANY: usize = 256 * DEEP;

/// The dtype, if a call with such keys is computed so. That depends on sizes alone.
pub(super) fn takes(call: &Call<'_>, op: &Attention, keys: &Operand) -> Option<DType> {
    let some = call.ins.iter().all(|x| x.layout.numel() > 0);
    let dtype = call.outs[0].dtype;
    let [keys, depth] = [2, 3].map(|axis| keys.layout.dims()[axis]);
    let pays = dtype != DType::F32 || depth >= DEEP && depth * keys >= MANY;
    (some && pays && !op.masked && op.is_plain() && call.engine().simd == Simd::Amx).then_some(dtype)
}

/// Rows of an output that are asked for before they are written: they lie apart, and nothing foresees them.
const AHEAD: usize = 16;

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

/// Scores of a strip, in tiles.
#[derive(Clone, Copy)]
struct Scores {
    tiles: *const Tile,
    scale: f32,
    seen: Seen,
}

impl Scores {
    /// Panels of keys that any of its queries sees.
    fn panels(&self) -> usize {
        self.seen.last.div_ceil(SIDE)
    }

    /// Half of a panel's scores of a query, scaled, `−∞` where the query sees no key.
    ///
    /// # Safety
    /// There are tiles for them; the CPU supports the instructions.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    unsafe fn get(&self, i: usize, panel: usize, half: usize) -> __m512 {
        let left = self.seen.of(i).saturating_sub(SIDE * panel + 16 * half).min(16);
        let hidden = !((0xffff_u32 >> (16 - left)) as u16);
        // SAFETY: the caller's promise.
        let x = unsafe { _mm512_load_ps(line(self.tiles.add(panel * 4).cast_mut(), i, half)) };
        let x = _mm512_mul_ps(x, _mm512_set1_ps(self.scale));
        _mm512_mask_mov_ps(x, hidden, _mm512_set1_ps(f32::NEG_INFINITY))
    }
}

/// `Math::exp2_flushed`, the same bits. (The compiler makes registers of half the size of loops over numbers.)
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
fn exp2_flushed(x: __m512) -> __m512 {
    let shift = _mm512_set1_ps(f32::ROUNDER + f32::BIAS);
    let t = _mm512_add_ps(x, shift);
    let r = _mm512_sub_ps(x, _mm512_sub_ps(t, shift));
    let [c0, c1, c2, c3, c4, c5] = EXP2_SLOPE.map(|c| _mm512_set1_ps(c));
    let z = _mm512_mul_ps(r, r);
    let odd = _mm512_fmadd_ps(_mm512_fmadd_ps(c5, z, c3), z, c1);
    let even = _mm512_fmadd_ps(_mm512_fmadd_ps(c4, z, c2), z, c0);
    let y = _mm512_fmadd_ps(r, _mm512_fmadd_ps(odd, r, even), _mm512_set1_ps(1.0));
    let power = _mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_castps_si512(t)));
    let low = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(1.0 - f32::BIAS));
    _mm512_maskz_mul_ps(low, y, power)
}

/// Rows of a strip's sums, scaled and rounded into the output: as many as there are factors. Says whether all are finite.
///
/// # Safety
/// These are rows of the output, which no other thread accesses; the CPU supports the instructions.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
unsafe fn rows_out<T: Split<TERMS>, const TERMS: usize>(
    sums: *mut Tile,
    out: Matrix<*mut T>,
    columns: usize,
    factors: &[f32],
) -> bool {
    let mut strange = 0;
    for (i, &factor) in factors.iter().enumerate() {
        prefetch(out.offset(i + AHEAD, 0).at, columns);
        for j in (0..columns).step_by(SIDE) {
            let mask = u32::MAX >> (SIDE - SIDE.min(columns - j));
            // SAFETY: the caller's promise.
            unsafe {
                let x = [0, 1].map(|half| {
                    let x = _mm512_load_ps(line(sums.add(j / SIDE * 4), i, half));
                    _mm512_mul_ps(x, _mm512_set1_ps(factor))
                });
                let [low, high] = x.map(|x| u32::from(not_finite(x)));
                strange |= (low | high << 16) & mask;
                T::store_f32(out.offset(i, j).at, mask, x);
            }
        }
    }
    strange == 0
}
