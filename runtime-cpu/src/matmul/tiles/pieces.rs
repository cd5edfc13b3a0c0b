//! Numbers as sums of bf16, which is what tiles multiply. A bf16 is itself; an `f32` is the sum of three.
//!
//! The first piece of an `f32` is the number rounded, the second what is left of it rounded, the third what is left then, which fits: together
//! all 24 bits. Of the nine products of two such sums six are added up, the small ones first. The other three are less than 2⁻²⁴ of the
//! product, half a unit of its last place (Henry, Tang, Heinecke, *Leveraging the bfloat16 artificial intelligence datatype for
//! higher-precision computations*, 2019). Since a tile adds up 32 steps before it adds them to the sum, such a sum is most often half as far
//! from the true one as one product after the other in `f32`; where numbers differ by many powers of two, about as far.
//!
//! Pieces have the range of `f32`, and what is not finite, or rounds to infinity as a bf16, has a piece that is NaN, and so every sum it
//! is part of: whoever stores sums adds up anew, in `f32`, those that are not finite ([`again`]). Pieces below 2⁻¹²⁶ count as zero.

use std::arch::x86_64::*;

use half::bf16;

use super::{
    STEP,
    pack::PAIR,
    pairs::{interleaved, pairs},
};
use crate::element::Stored;

/// A number that is the sum of `P` bf16.
pub(crate) trait Pieces<const P: usize>: Stored<Lane = f32> {
    /// 32 numbers in registers.
    type Line: Copy;

    /// Those of 32 numbers side by side that the mask names, others zero.
    ///
    /// # Safety
    /// They are there; the processor has the instructions.
    unsafe fn read(at: *const Self, mask: u32) -> Self::Line;

    /// 32 steps of a row, a line of a tile: the largest pieces first.
    ///
    /// # Safety
    /// The processor has the instructions.
    unsafe fn row(line: Self::Line) -> [__m512i; P];

    /// Two steps of 32 columns, a line of two tiles.
    ///
    /// # Safety
    /// As for [`row`](Pieces::row).
    unsafe fn pair(lines: [Self::Line; 2]) -> [[__m512i; 2]; P];

    /// Those of 32 numbers that the mask names, others zero.
    ///
    /// # Safety
    /// As for [`read`](Pieces::read).
    unsafe fn widen(at: *const Self, mask: u32) -> [__m512; 2];

    /// Writes those of 32 numbers that the mask names.
    ///
    /// # Safety
    /// As for [`read`](Pieces::read); nothing else sees them.
    unsafe fn write(at: *mut Self, mask: u32, x: [__m512; 2]);
}

impl Pieces<1> for bf16 {
    type Line = __m512i;

    /// # Safety
    /// As for [`Pieces`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn read(at: *const bf16, mask: u32) -> __m512i {
        // SAFETY: the caller's promise.
        unsafe { _mm512_maskz_loadu_epi16(mask, at.cast()) }
    }

    /// # Safety
    /// As for [`Pieces`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn row(line: __m512i) -> [__m512i; 1] {
        [line]
    }

    /// # Safety
    /// As for [`Pieces`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn pair([low, high]: [__m512i; 2]) -> [[__m512i; 2]; 1] {
        [interleaved(low, high)]
    }

    /// # Safety
    /// As for [`Pieces`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn widen(at: *const bf16, mask: u32) -> [__m512; 2] {
        // SAFETY: the caller's promise.
        widened(unsafe { _mm512_maskz_loadu_epi16(mask, at.cast()) })
    }

    /// # Safety
    /// As for [`Pieces`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn write(at: *mut bf16, mask: u32, x: [__m512; 2]) {
        // SAFETY: the caller's promise.
        unsafe { _mm512_mask_storeu_epi16(at.cast(), mask, rounded(x)) };
    }
}

impl Pieces<3> for f32 {
    type Line = [__m512; 2];

    /// # Safety
    /// As for [`Pieces`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn read(at: *const f32, mask: u32) -> [__m512; 2] {
        // SAFETY: the caller's promise.
        unsafe { Self::widen(at, mask) }
    }

    /// # Safety
    /// As for [`Pieces`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn row(line: [__m512; 2]) -> [__m512i; 3] {
        pairs(line)
    }

    /// # Safety
    /// As for [`Pieces`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn pair([low, high]: [[__m512; 2]; 2]) -> [[__m512i; 2]; 3] {
        let [left, right] = [pairs::<3>([low[0], high[0]]), pairs::<3>([low[1], high[1]])];
        std::array::from_fn(|piece| [left[piece], right[piece]])
    }

    /// # Safety
    /// As for [`Pieces`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn widen(at: *const f32, mask: u32) -> [__m512; 2] {
        // SAFETY: the caller's promise; where the mask names none, nothing is read.
        unsafe {
            let high = at.wrapping_add(PAIR / 2);
            [_mm512_maskz_loadu_ps(mask as u16, at), _mm512_maskz_loadu_ps((mask >> 16) as u16, high)]
        }
    }

    /// # Safety
    /// As for [`Pieces`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn write(at: *mut f32, mask: u32, [low, high]: [__m512; 2]) {
        // SAFETY: the caller's promise; where the mask names none, nothing is written.
        unsafe {
            _mm512_mask_storeu_ps(at, mask as u16, low);
            _mm512_mask_storeu_ps(at.wrapping_add(PAIR / 2), (mask >> 16) as u16, high);
        }
    }
}

/// The bits of a lane that are not a bf16's, if that lies in the upper half.
pub(super) const LOW: i32 = 0xffff;

/// 16 numbers as sums of so many bf16, the upper halves of lanes: each is what the ones before leave, rounded to nearest, ties away from zero. The lower
/// half of the last is zero, or it is NaN: so it is of whatever is not finite, though a NaN of all ones is rounded to zero.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn cut<const P: usize>(mut left: __m512) -> [__m512i; P] {
    let mut pieces = [_mm512_setzero_si512(); P];
    for piece in &mut pieces[..P - 1] {
        let half = _mm512_set1_epi32(LOW / 2 + 1);
        *piece = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(left), half), _mm512_set1_epi32(!LOW));
        left = _mm512_sub_ps(left, _mm512_castsi512_ps(*piece));
    }
    pieces[P - 1] = _mm512_castps_si512(left);
    pieces
}

/// To nearest, ties to even.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) fn rounded([low, high]: [__m512; 2]) -> __m512i {
    // SAFETY: both are registers' bits.
    unsafe { std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low)) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn widened(x: __m512i) -> [__m512; 2] {
    let low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(x));
    let high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64::<1>(x));
    [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(low)), _mm512_castsi512_ps(_mm512_slli_epi32::<16>(high))]
}

/// Which of the numbers are infinite or NaN.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
pub(crate) fn not_finite(x: __m512) -> u16 {
    const QUIET: i32 = 0x01;
    const INFINITE: i32 = 0x08 | 0x10;
    const SIGNALING: i32 = 0x80;
    _mm512_fpclass_ps_mask::<{ QUIET | INFINITE | SIGNALING }>(x)
}

/// The product of a row and a column of `k` steps, one after the other.
#[cold]
pub(super) fn again(row: impl Fn(usize) -> f32, column: impl Fn(usize) -> f32, k: usize) -> f32 {
    let mut sum = 0.0;
    for from in (0..k).step_by(STEP) {
        for q in from..k.min(from + STEP) {
            sum = row(q).mul_add(column(q), sum);
        }
        // Nothing makes a number of it again; where everything is NaN, products would become hundreds of times slower.
        if f32::is_nan(sum) {
            break;
        }
    }
    sum
}
