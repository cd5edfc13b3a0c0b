//! Transposition in squares that fit the registers: whole cache lines are read and written.

use crate::Simd;

/// Side of a square: a cache line of four-byte elements.
const SQUARE: usize = 16;

/// `to[r][c] = from[c][r]` for `rows × columns` elements; `to` is dense along `c`, `from` along `r`. With each address, the
/// bytes from one line to the next.
///
/// # Safety
/// All elements lie in their operands, aligned; `from` is not written meanwhile, and no other thread accesses `to`.
pub(crate) unsafe fn transpose<T: Copy>(
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
            // SAFETY: the caller's promise; the level is one this CPU has.
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
/// As for [`transpose`], for one square.
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
/// As for [`transpose`], for one square, on a CPU that has these.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn avx512(to: *mut u32, to_line: isize, from: *const u32, from_line: isize) {
    use std::arch::x86_64::*;
    // SAFETY: the caller's promise.
    unsafe {
        for (r, line) in read_transposed(from, from_line).into_iter().enumerate() {
            _mm512_storeu_si512(to.wrapping_byte_offset(r as isize * to_line).cast(), line);
        }
    }
}

/// Sixteen lines of sixteen words, so many bytes apart, turned: quarters of lines are put together as they are read, which leaves squares of four to
/// be transposed. (Of whole lines all of 64 steps, not 32, are moves between lanes, for which the CPU has one port.)
///
/// # Safety
/// They lie there; the CPU supports the instructions.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) unsafe fn read_transposed(from: *const u32, line: isize) -> [std::arch::x86_64::__m512i; SQUARE] {
    use std::arch::x86_64::*;
    let mut transposed = [_mm512_setzero_si512(); SQUARE];
    for (quarter, transposed) in transposed.chunks_exact_mut(4).enumerate() {
        let read = |row: usize| {
            let at = from.wrapping_byte_offset(row as isize * line).wrapping_add(4 * quarter);
            // SAFETY: the caller's promise.
            unsafe { _mm_loadu_si128(at.cast()) }
        };
        let fourth = |row: usize| {
            let x = _mm512_castsi128_si512(read(row));
            let x = _mm512_inserti32x4::<1>(x, read(row + 4));
            let x = _mm512_inserti32x4::<2>(x, read(row + 8));
            _mm512_inserti32x4::<3>(x, read(row + 12))
        };
        let [a, b, c, d] = [fourth(0), fourth(1), fourth(2), fourth(3)];
        let [low, high] = [_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b)];
        let [low2, high2] = [_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d)];
        transposed[0] = _mm512_unpacklo_epi64(low, low2);
        transposed[1] = _mm512_unpackhi_epi64(low, low2);
        transposed[2] = _mm512_unpacklo_epi64(high, high2);
        transposed[3] = _mm512_unpackhi_epi64(high, high2);
    }
    transposed
}
