//! AVX-512 BF16: a register's dot products of pairs.

use std::arch::x86_64::*;

use super::{SIDE, Tile, multiply::Strip};

/// Rows whose sums are in registers at once, two each: 16 sums hide the latency of a product, and leave a step 10 loads for 16 products.
const ROWS: usize = 8;

/// `sums += a · b` (`sums = a · b` where there are none yet), `steps` tiles long, for a strip against a panel.
///
/// # Safety
/// The strip has its rows and steps, two tiles a step lie at `b`, four sums at `sums`, which nothing else sees; the processor has the instructions.
#[target_feature(enable = "avx512f,avx512bf16")]
pub(super) unsafe fn multiply(a: Strip, b: *const Tile, sums: *mut Tile, steps: usize, more: bool) {
    for row in (0..2 * SIDE).step_by(ROWS) {
        let (half, line) = (row / SIDE, row % SIDE);
        // SAFETY: these rows are the strip's.
        unsafe {
            let a = Strip { at: a.at.wrapping_byte_offset(row as isize * a.line), ..a };
            let sums = sums.add(2 * half).cast::<f32>().add(line * SIDE);
            rows(a, b, sums, steps, more);
        }
    }
}

/// [`ROWS`] rows.
///
/// # Safety
/// As for [`multiply`].
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn rows(a: Strip, b: *const Tile, sums: *mut f32, steps: usize, more: bool) {
    const NUMBERS: usize = SIDE * SIDE;
    // SAFETY: the caller's promise; pairs are registers' bits.
    unsafe {
        let mut acc = [[_mm512_setzero_ps(); 2]; ROWS];
        if more {
            for (r, acc) in acc.iter_mut().enumerate() {
                *acc = [0, NUMBERS].map(|half| _mm512_load_ps(sums.add(r * SIDE + half)));
            }
        }
        for step in 0..steps {
            let at = |r: usize| a.at.wrapping_byte_offset(step as isize * a.step + r as isize * a.line).cast::<i32>();
            let b = b.add(2 * step).cast::<i32>();
            for pair in 0..SIDE {
                let right: [__m512bh; 2] =
                    [0, NUMBERS].map(|half| std::mem::transmute(_mm512_load_si512(b.add(pair * SIDE + half).cast())));
                for (r, acc) in acc.iter_mut().enumerate() {
                    let left: __m512bh = std::mem::transmute(_mm512_set1_epi32(at(r).add(pair).read_unaligned()));
                    for (acc, right) in acc.iter_mut().zip(right) {
                        *acc = _mm512_dpbf16_ps(*acc, left, right);
                    }
                }
            }
        }
        for (r, acc) in acc.iter().enumerate() {
            _mm512_store_ps(sums.add(r * SIDE), acc[0]);
            _mm512_store_ps(sums.add(r * SIDE + NUMBERS), acc[1]);
        }
    }
}
