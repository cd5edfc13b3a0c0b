//! Attention by AMX, for bf16 and for split `f32`. Scores and gradients of weights are accumulated in `f32`.
//!
//! Weights and gradients of scores that are operands are rounded to bf16 (as in PyTorch) or split into three terms,
//! like the other operands. Accumulators stay in `f32`. A row's weights are summed before they are rounded.
//!
//! Accumulators leave the tile registers as tiles, and the values computed from them go directly into the tiles of the
//! next GEMM: no row-major matrix of weights is ever stored. Micro-panels of queries pass through a software pipeline,
//! so that one's multiplications are interleaved with another's weights ([`Interleaved`](crate::gemm::Interleaved)).
//!
//! An `f32` that is not finite, or rounds to infinity as a bf16, has a term that is NaN. Outputs that are not finite
//! are recomputed without splitting; a gradient of such an element may be NaN where it would be infinite without.

mod backward;
mod forward;
mod score_grads;

use std::arch::x86_64::*;

use numcore::{DType, fused::Attention};

use super::{FusedCall, KEYS, Operand, Seen, Simd};
use crate::{
    gemm::{Matrix, SplitBf16, Tile, TileUnit, not_finite},
    math::{EXP2_SLOPE, Real as _},
    simd::prefetch,
};

pub(super) use backward::keys;
pub(super) use forward::queries;

/// Rows of an A micro-panel, columns of a B micro-panel, and the depth of a tile.
const PANEL: usize = TileUnit::<1>::PANEL;
/// Micro-panels of keys in a block.
const KEY_PANELS: usize = KEYS / PANEL;

/// The smallest depth, and depth times keys, at which AMX is faster with split `f32`. With less, tiles are mostly
/// empty, or splitting takes longer than multiplying. (Forward and backward, 64 keys of depth 16: 0.58 times as fast,
/// 128 of 32: 0.93, 256 of 32: 1.03, 256 of 64: 1.18.)
const MIN_DEPTH: usize = PANEL;
const MIN_DEPTH_KEYS: usize = 256 * MIN_DEPTH;

/// The dtype, if AMX computes a call with such keys. That depends on sizes alone.
pub(super) fn takes(call: &FusedCall<'_>, op: &Attention, keys: &Operand) -> Option<DType> {
    let some = call.ins.iter().all(|x| x.layout.numel() > 0);
    let dtype = call.outs[0].dtype;
    let [keys, depth] = [2, 3].map(|axis| keys.layout.dims()[axis]);
    let pays = dtype != DType::F32 || depth >= MIN_DEPTH && depth * keys >= MIN_DEPTH_KEYS;
    (some && pays && !op.masked && op.is_plain() && call.engine().simd == Simd::Amx).then_some(dtype)
}

/// Rows between prefetching a row of an output and writing it. They are far apart, and hardware prefetchers do not
/// foresee them.
const PREFETCH_ROWS: usize = 16;

/// The number of `f32` in `tiles` tiles.
const fn tiles_len(tiles: usize) -> usize {
    tiles * size_of::<Tile>() / size_of::<f32>()
}

fn tiles(memory: &mut [f32]) -> *mut Tile {
    memory.as_mut_ptr().cast()
}

/// The columns `16 * half ..` of a row of a micro-panel's accumulators: 16 elements.
fn acc_row(acc: *mut Tile, row: usize, half: usize) -> *mut f32 {
    acc.wrapping_add(row / 16 * 2 + half).cast::<f32>().wrapping_add(row % 16 * 16)
}

/// Accumulators of a micro-panel of queries' scores, in tiles.
#[derive(Clone, Copy)]
struct Scores {
    tiles: *const Tile,
    scale: f32,
    seen: Seen,
}

impl Scores {
    /// Micro-panels of keys that any of its queries sees.
    fn panels(&self) -> usize {
        self.seen.last.div_ceil(PANEL)
    }

    /// A query's scaled scores against 16 keys of a micro-panel, and `−∞` where the query does not see the key.
    ///
    /// # Safety
    /// `tiles` is valid for this micro-panel. The CPU supports AVX-512.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    unsafe fn get(&self, i: usize, panel: usize, half: usize) -> __m512 {
        let left = self.seen.of(i).saturating_sub(PANEL * panel + 16 * half).min(16);
        let hidden = !((0xffff_u32 >> (16 - left)) as u16);
        // SAFETY: the caller guarantees the tiles of this micro-panel.
        let x = unsafe { _mm512_load_ps(acc_row(self.tiles.add(panel * 4).cast_mut(), i, half)) };
        let x = _mm512_mul_ps(x, _mm512_set1_ps(self.scale));
        _mm512_mask_mov_ps(x, hidden, _mm512_set1_ps(f32::NEG_INFINITY))
    }
}

/// Computes `Math::exp2_flushed`, bit for bit. (For loops over elements the compiler generates 256-bit vectors.)
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

/// Scales rows of a micro-panel's accumulators and rounds them into the output, as many as there are factors. Returns
/// whether all are finite.
///
/// # Safety
/// `out` is valid for `factors.len()` rows of `columns` elements, which no other thread accesses, and `acc` for their
/// tiles. The CPU supports AVX-512 BF16.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
unsafe fn store_rows<T: SplitBf16<TERMS>, const TERMS: usize>(
    acc: *mut Tile,
    out: Matrix<*mut T>,
    columns: usize,
    factors: &[f32],
) -> bool {
    let mut not_finite_mask = 0;
    for (i, &factor) in factors.iter().enumerate() {
        prefetch(out.offset(i + PREFETCH_ROWS, 0).at, columns);
        for j in (0..columns).step_by(PANEL) {
            let mask = u32::MAX >> (PANEL - PANEL.min(columns - j));
            // SAFETY: row `i` and the masked columns from `j` on, which the caller guarantees.
            unsafe {
                let x = [0, 1].map(|half| {
                    let x = _mm512_load_ps(acc_row(acc.add(j / PANEL * 4), i, half));
                    _mm512_mul_ps(x, _mm512_set1_ps(factor))
                });
                let [low, high] = x.map(|x| u32::from(not_finite(x)));
                not_finite_mask |= (low | high << 16) & mask;
                T::store_f32(out.offset(i, j).at, mask, x);
            }
        }
    }
    not_finite_mask == 0
}
