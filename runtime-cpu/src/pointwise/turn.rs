//! Transposition in squares that fit the registers: whole cache lines are read and written.

use crate::Simd;

/// Side of a square: a cache line of four-byte elements.
const SQUARE: usize = 16;

/// `to[r][c] = from[c][r]` for `rows × columns` elements; `to` is dense along `c`, `from` along `r`. With each address, the
/// bytes from one line to the next.
///
/// # Safety
/// All elements lie in their operands, aligned; `from` is not written meanwhile, and nothing else sees `to`.
pub(crate) unsafe fn turn<T: Copy>(
    simd: Simd,
    (to, to_line): (*mut u8, isize),
    (from, from_line): (*mut u8, isize),
    (rows, columns): (usize, usize),
) {
    let square = |r: usize, c: usize| {
        let to = to.wrapping_offset(r as isize * to_line).cast::<T>().wrapping_add(c);
        let from = from.wrapping_offset(c as isize * from_line).cast::<T>().wrapping_add(r);
        (to, from)
    };
    let whole = |n: usize| n / SQUARE * SQUARE;
    let wide = size_of::<T>() == 4 && simd >= Simd::Avx512;
    for r in (0..whole(rows)).step_by(SQUARE) {
        for c in (0..whole(columns)).step_by(SQUARE) {
            let (to, from) = square(r, c);
            // SAFETY: the caller's promise; the level is one this processor has.
            unsafe {
                match wide {
                    #[cfg(target_arch = "x86_64")]
                    true => avx512(to.cast(), to_line, from.cast(), from_line),
                    _ => plain::<T>(to, to_line, from, from_line),
                }
            }
        }
    }
    let rest = |r: std::ops::Range<usize>, c: std::ops::Range<usize>| {
        for r in r {
            for c in c.clone() {
                let (to, from) = square(r, c);
                // SAFETY: the caller's promise.
                unsafe { *to = *from };
            }
        }
    };
    rest(0..whole(rows), whole(columns)..columns);
    rest(whole(rows)..rows, 0..columns);
}

/// Reads lines whole, writes them element by element.
///
/// # Safety
/// As for [`turn`], for one square.
unsafe fn plain<T: Copy>(to: *mut T, to_line: isize, from: *const T, from_line: isize) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut lines = [[*from; SQUARE]; SQUARE];
        for (c, line) in lines.iter_mut().enumerate() {
            *line = *from.wrapping_byte_offset(c as isize * from_line).cast();
        }
        for r in 0..SQUARE {
            let to = to.wrapping_byte_offset(r as isize * to_line);
            for (c, line) in lines.iter().enumerate() {
                *to.wrapping_add(c) = line[r];
            }
        }
    }
}

/// Sixteen lines of sixteen; the plain form takes twice as long.
///
/// # Safety
/// As for [`turn`], for one square, on a processor that has these.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn avx512(to: *mut u32, to_line: isize, from: *const u32, from_line: isize) {
    use std::arch::x86_64::*;
    // SAFETY: the caller's promise.
    unsafe {
        let lines =
            std::array::from_fn(|c| _mm512_loadu_si512(from.wrapping_byte_offset(c as isize * from_line).cast()));
        for (r, line) in turn_square(lines).into_iter().enumerate() {
            _mm512_storeu_si512(to.wrapping_byte_offset(r as isize * to_line).cast(), line);
        }
    }
}

/// Sixteen lines of sixteen words in registers, turned: interleaved in halves four times.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn turn_square(mut x: [std::arch::x86_64::__m512i; SQUARE]) -> [std::arch::x86_64::__m512i; SQUARE] {
    use std::arch::x86_64::*;
    let low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    let high = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    for _ in 0..4 {
        let y = x;
        for i in 0..SQUARE / 2 {
            x[2 * i] = _mm512_permutex2var_epi32(y[i], low, y[i + SQUARE / 2]);
            x[2 * i + 1] = _mm512_permutex2var_epi32(y[i], high, y[i + SQUARE / 2]);
        }
    }
    x
}
