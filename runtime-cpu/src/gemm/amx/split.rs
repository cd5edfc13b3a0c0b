//! Elements as sums of bf16 terms, which is what AMX multiplies. A bf16 is one term; an `f32` is the sum of three
//! (bf16x3).
//!
//! The first term of an `f32` is the element rounded to bf16, the second the remainder rounded, the third the rest,
//! which is exact: together they hold all 24 bits. Of the nine products of two such sums six are added, the small ones
//! first. The other three are less than 2⁻²⁴ of the product, 0.5 ULP (Henry, Tang, Heinecke, *Leveraging the bfloat16
//! artificial intelligence datatype for higher-precision computations*, 2019).
//!
//! A tile adds 32 products before it adds them to the sum. So such a sum is most often half as far from the exact one
//! as a sum of `f32` FMAs in order; where elements differ by many powers of two, about as far.
//!
//! Terms have the range of `f32`. An element that is not finite, or rounds to infinity as a bf16, has a term that is
//! NaN, and so does every sum it is part of. The code that stores sums recomputes non-finite ones in `f32`
//! ([`recompute`]). Terms below 2⁻¹²⁶ count as zero.

use std::arch::x86_64::*;

use half::bf16;

use super::{
    TILE_K,
    pack_tiles::PANEL,
    vnni::{interleave_rows, split_pairs},
};
use crate::element::Stored;

/// An element of an output of tiles, or of what is added to it.
pub(crate) trait TileElement: Stored<Lane = f32> {
    /// Loads those of 32 contiguous elements that the mask names as `f32`; the others are zero.
    ///
    /// # Safety
    /// `at` is valid for reads of the elements that the mask names. The CPU supports AVX-512 BF16.
    unsafe fn load_f32(at: *const Self, mask: u32) -> [__m512; 2];

    /// Stores those of 32 contiguous elements that the mask names, rounded.
    ///
    /// # Safety
    /// `at` is valid for writes of the elements that the mask names, which no other thread accesses. The CPU supports
    /// AVX-512 BF16.
    unsafe fn store_f32(at: *mut Self, mask: u32, x: [__m512; 2]);
}

/// An element that is the sum of `TERMS` bf16.
pub(crate) trait SplitBf16<const TERMS: usize>: TileElement {
    /// The type of 32 elements in vector registers.
    type Row: Copy;

    /// Loads those of 32 contiguous elements that the mask names; the others are zero.
    ///
    /// # Safety
    /// `at` is valid for reads of the elements that the mask names. The CPU supports AVX-512 BF16.
    unsafe fn load_32(at: *const Self, mask: u32) -> Self::Row;

    /// Splits 32 elements along `k` into a row of one tile for each term, the largest terms first.
    ///
    /// # Safety
    /// The CPU supports AVX-512 BF16.
    unsafe fn pack_row(row: Self::Row) -> [__m512i; TERMS];

    /// Splits a pair of rows of 32 columns into a row of two tiles for each term, the largest terms first.
    ///
    /// # Safety
    /// The CPU supports AVX-512 BF16.
    unsafe fn pack_pair(rows: [Self::Row; 2]) -> [[__m512i; 2]; TERMS];
}

impl TileElement for bf16 {
    /// # Safety
    /// [`TileElement`] states what callers guarantee.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn load_f32(at: *const bf16, mask: u32) -> [__m512; 2] {
        // SAFETY: the caller guarantees the elements that the mask names, and the instructions.
        widen_bf16(unsafe { _mm512_maskz_loadu_epi16(mask, at.cast()) })
    }

    /// # Safety
    /// [`TileElement`] states what callers guarantee.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn store_f32(at: *mut bf16, mask: u32, x: [__m512; 2]) {
        // SAFETY: the caller guarantees the elements that the mask names, and the instructions.
        unsafe { _mm512_mask_storeu_epi16(at.cast(), mask, round_bf16(x)) };
    }
}

impl SplitBf16<1> for bf16 {
    type Row = __m512i;

    /// # Safety
    /// [`SplitBf16`] states what callers guarantee.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn load_32(at: *const bf16, mask: u32) -> __m512i {
        // SAFETY: the caller guarantees the elements that the mask names, and the instructions.
        unsafe { _mm512_maskz_loadu_epi16(mask, at.cast()) }
    }

    /// # Safety
    /// [`SplitBf16`] states what callers guarantee.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn pack_row(row: __m512i) -> [__m512i; 1] {
        [row]
    }

    /// # Safety
    /// [`SplitBf16`] states what callers guarantee.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn pack_pair([low, high]: [__m512i; 2]) -> [[__m512i; 2]; 1] {
        [interleave_rows(low, high)]
    }
}

impl TileElement for f32 {
    /// # Safety
    /// [`TileElement`] states what callers guarantee.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn load_f32(at: *const f32, mask: u32) -> [__m512; 2] {
        // SAFETY: the caller guarantees the elements that the mask names; others are not read.
        unsafe {
            let high = at.wrapping_add(PANEL / 2);
            [_mm512_maskz_loadu_ps(mask as u16, at), _mm512_maskz_loadu_ps((mask >> 16) as u16, high)]
        }
    }

    /// # Safety
    /// [`TileElement`] states what callers guarantee.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn store_f32(at: *mut f32, mask: u32, [low, high]: [__m512; 2]) {
        // SAFETY: the caller guarantees the elements that the mask names; others are not written.
        unsafe {
            _mm512_mask_storeu_ps(at, mask as u16, low);
            _mm512_mask_storeu_ps(at.wrapping_add(PANEL / 2), (mask >> 16) as u16, high);
        }
    }
}

impl SplitBf16<3> for f32 {
    type Row = [__m512; 2];

    /// # Safety
    /// [`SplitBf16`] states what callers guarantee.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn load_32(at: *const f32, mask: u32) -> [__m512; 2] {
        // SAFETY: the caller guarantees the elements that the mask names, and the instructions.
        unsafe { Self::load_f32(at, mask) }
    }

    /// # Safety
    /// [`SplitBf16`] states what callers guarantee.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn pack_row(row: [__m512; 2]) -> [__m512i; 3] {
        split_pairs(row)
    }

    /// # Safety
    /// [`SplitBf16`] states what callers guarantee.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn pack_pair([low, high]: [[__m512; 2]; 2]) -> [[__m512i; 2]; 3] {
        let [left, right] = [split_pairs::<3>([low[0], high[0]]), split_pairs::<3>([low[1], high[1]])];
        std::array::from_fn(|term| [left[term], right[term]])
    }
}

/// The lower 16 bits of a 32-bit lane, whose upper 16 are a bf16.
pub(super) const LOW: i32 = 0xffff;

/// Splits 16 elements into bf16 terms, in the upper 16 bits of lanes. Each term is the remainder of those before,
/// rounded to nearest, ties away from zero.
///
/// The lower 16 bits of the last term are zero, or the term is NaN. It is NaN for every element that is not finite,
/// though the rounding makes zero of a NaN of all ones.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn split<const TERMS: usize>(mut left: __m512) -> [__m512i; TERMS] {
    let mut terms = [_mm512_setzero_si512(); TERMS];
    for term in &mut terms[..TERMS - 1] {
        let half = _mm512_set1_epi32(LOW / 2 + 1);
        *term = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(left), half), _mm512_set1_epi32(!LOW));
        left = _mm512_sub_ps(left, _mm512_castsi512_ps(*term));
    }
    terms[TERMS - 1] = _mm512_castps_si512(left);
    terms
}

/// Rounds 32 `f32` to bf16, to nearest, ties to even.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) fn round_bf16([low, high]: [__m512; 2]) -> __m512i {
    // SAFETY: both types are 512 bits without invariants.
    unsafe { std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low)) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn widen_bf16(x: __m512i) -> [__m512; 2] {
    let low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(x));
    let high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64::<1>(x));
    [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(low)), _mm512_castsi512_ps(_mm512_slli_epi32::<16>(high))]
}

/// A mask of the elements that are infinite or NaN.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
pub(crate) fn not_finite(x: __m512) -> u16 {
    const QUIET: i32 = 0x01;
    const INFINITE: i32 = 0x08 | 0x10;
    const SIGNALING: i32 = 0x80;
    _mm512_fpclass_ps_mask::<{ QUIET | INFINITE | SIGNALING }>(x)
}

/// The sum of `k` products of a row and a column, by `f32` FMAs in order.
#[cold]
pub(super) fn recompute(row: impl Fn(usize) -> f32, column: impl Fn(usize) -> f32, k: usize) -> f32 {
    let mut sum = 0.0;
    for from in (0..k).step_by(TILE_K) {
        for q in from..k.min(from + TILE_K) {
            sum = row(q).mul_add(column(q), sum);
        }
        // A NaN stays one. Where everything is NaN, a GEMM would become hundreds of times slower.
        if f32::is_nan(sum) {
            break;
        }
    }
    sum
}
