//! Stores that go past the caches, for outputs too large to be found there again.
//!
//! A plain store first reads the line it will overwrite: a sum of two tensors then moves 16 bytes per element where 12 are needed.
//! Blocks are computed in L1 and sent on from there, so that no kernel needs to know.

use crate::{
    Simd,
    machine::{Machine, Streams},
    operand::Base,
    simd::prefetch,
};

/// Bytes of an output from which on it is streamed.
const LARGE: usize = 32 << 20;
/// A cache line.
const LINE: usize = 64;
/// Bytes the CPU looks ahead in: it does not ask for the next page before it is touched.
const PAGE: usize = 4096;
/// Pages that are copied side by side, so that it looks ahead in several: a copy of 400 MB took 1.4 times as long one by one.
const PAGES: usize = 4;
/// Bytes of those pages.
pub(in crate::pointwise) const SIDE_BY_SIDE: usize = PAGES * PAGE;

/// Whether an output of so many bytes is streamed.
pub(in crate::pointwise) fn pays(bytes: usize) -> bool {
    cfg!(target_arch = "x86_64") && bytes >= LARGE
}

/// Elements of a block that is streamed: so few that reads and writes alternate often. With 4096 they took turns, and a sum 1.1, an exponential
/// 1.7 times as long.
pub(in crate::pointwise) fn block() -> usize {
    Machine::get().streams.block
}

/// Copies `bytes` bytes; whole lines of `to` are written without being read.
///
/// # Safety
/// Both sides hold so many bytes; nothing writes `from` or sees `to` meanwhile. Other threads see `to` after [`finish`].
pub(in crate::pointwise) unsafe fn copy(simd: Simd, to: *mut u8, from: *const u8, bytes: usize) {
    let head = to.align_offset(LINE).min(bytes);
    let lines = (bytes - head) / LINE;
    let rest = head + lines * LINE;
    // SAFETY: the caller's promise; the level is one this CPU has, and lines start at a multiple of their size.
    unsafe {
        // Most have no ends: a call to copy nothing is as long as eight lines take.
        if head > 0 {
            to.copy_from_nonoverlapping(from, head);
        }
        copy_lines(simd, to.add(head), from.add(head), lines);
        if rest < bytes {
            to.add(rest).copy_from_nonoverlapping(from.add(rest), bytes - rest);
        }
    }
}

/// Prefetches what comes a little after a block's inputs: their addresses, and where and how large they are. While stores pass the caches the
/// CPU's own prefetcher looks less far ahead.
pub(in crate::pointwise) fn prefetch_next(slots: &[*mut u8], operands: &[(Base<u8>, usize)]) {
    let Streams { block, ahead, .. } = Machine::get().streams;
    for (slot, (_, size)) in slots.iter().zip(operands) {
        prefetch(slot.wrapping_add(ahead), block * size);
    }
}

/// What was streamed by this thread comes before what it writes from now on.
pub(in crate::pointwise) fn finish() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every CPU of this kind has it.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// Calls `copy` with every line once: those of some pages by turns, the rest one after another.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn by_turns(lines: usize, mut copy: impl FnMut(usize)) {
    const PAGE_LINES: usize = PAGE / LINE;
    let whole = lines - lines % (PAGES * PAGE_LINES);
    for from in (0..whole).step_by(PAGES * PAGE_LINES) {
        for i in from..from + PAGE_LINES {
            (0..PAGES).for_each(|page| copy(i + page * PAGE_LINES));
        }
    }
    (whole..lines).for_each(copy);
}

/// # Safety
/// As for [`copy`], for whole lines; `to` starts at one, and the CPU has the level.
#[cfg(target_arch = "x86_64")]
unsafe fn copy_lines(simd: Simd, to: *mut u8, from: *const u8, lines: usize) {
    use std::arch::x86_64::*;
    /// # Safety
    /// As for [`copy_lines`].
    #[target_feature(enable = "avx512f")]
    unsafe fn wide(to: *mut u8, from: *const u8, lines: usize) {
        by_turns(lines, |i| {
            // SAFETY: the caller's promise.
            unsafe { _mm512_stream_si512(to.add(i * LINE).cast(), _mm512_loadu_si512(from.add(i * LINE).cast())) };
        });
    }
    // SAFETY: the caller's promise.
    unsafe {
        if simd >= Simd::Avx512 {
            return wide(to, from, lines);
        }
        by_turns(lines, |i| {
            for at in (i * LINE..(i + 1) * LINE).step_by(16) {
                _mm_stream_si128(to.add(at).cast(), _mm_loadu_si128(from.add(at).cast()));
            }
        });
    }
}

/// # Safety
/// As for [`copy`].
#[cfg(not(target_arch = "x86_64"))]
unsafe fn copy_lines(_: Simd, to: *mut u8, from: *const u8, lines: usize) {
    // SAFETY: the caller's promise.
    unsafe { to.copy_from_nonoverlapping(from, lines * LINE) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_arrives_whatever_the_alignment() {
        let from: Vec<u8> = (0..100_000u32).map(|i| (i % 251) as u8).collect();
        for simd in Simd::ALL.into_iter().filter(|s| s.is_available()) {
            for (start, bytes) in
                [(0, 1000), (3, 900), (17, 40), (60, 3), (1, 0), (5, 128), (9, 70_000), (64, 4 * PAGE)]
            {
                let mut to = vec![0u8; 80_000];
                // SAFETY: both vectors are longer; `to` is this test's alone.
                unsafe { copy(simd, to[start..].as_mut_ptr(), from.as_ptr(), bytes) };
                finish();
                assert_eq!(to[start..start + bytes], from[..bytes]);
                assert!(to[..start].iter().chain(&to[start + bytes..]).all(|&x| x == 0));
            }
        }
    }
}
