//! Non-temporal stores, which bypass the caches, for outputs too large to stay there.
//!
//! A plain store first reads the line it will overwrite: a sum of two tensors then moves 16 bytes per element where 12
//! are needed. Blocks are computed in L1 and copied from there, so kernels need no change.

use crate::{Simd, operand::Base, simd::prefetch};

/// The size in bytes from which on outputs are streamed.
const LARGE: usize = 32 << 20;
/// Bytes of a cache line.
const LINE: usize = 64;
/// Bytes of a page: the hardware prefetcher does not cross into the next page before it is touched.
const PAGE: usize = 4096;
/// Pages that are copied in an interleaved order.
const PAGES: usize = 4;
/// Bytes of the pages that are copied in an interleaved order.
pub(in crate::pointwise) const CHUNK: usize = PAGES * PAGE;

/// Tells whether an output of `bytes` bytes is streamed.
pub(in crate::pointwise) fn pays(bytes: usize) -> bool {
    cfg!(target_arch = "x86_64") && bytes >= LARGE
}

/// The order in which a copy takes lines.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::pointwise) enum Order {
    /// Lines of several pages interleaved, so that several pages are prefetched at once. (On Sapphire Rapids a copy of
    /// 400 MB took 1.4 times as long page by page.)
    Interleaved,
    /// Lines one after another, prefetched this many bytes ahead; 0 for memory in L1.
    Ahead(usize),
}

/// The orders of a copy of memory past the caches. (On Cascade Lake the second takes 0.81 of the time.)
pub(in crate::pointwise) const ORDERS: [Order; 2] = [Order::Interleaved, Order::Ahead(1024)];

/// Copies `bytes` bytes; whole lines of `to` are written without being read.
///
/// # Safety
/// Both sides hold `bytes` bytes. Nothing writes `from` meanwhile, and no other thread accesses `to` before [`finish`].
pub(in crate::pointwise) unsafe fn copy(simd: Simd, order: Order, to: *mut u8, from: *const u8, bytes: usize) {
    let head = to.align_offset(LINE).min(bytes);
    let lines = (bytes - head) / LINE;
    let rest = head + lines * LINE;
    // SAFETY: head, lines and rest are together the `bytes` bytes that the caller guarantees. A runtime is only built
    // with a `Simd` that this CPU supports, and lines are aligned.
    unsafe {
        // Most copies have neither head nor rest, and a call that copies nothing takes as long as eight lines.
        if head > 0 {
            to.copy_from_nonoverlapping(from, head);
        }
        copy_lines(simd, order, to.add(head), from.add(head), lines);
        if rest < bytes {
            to.add(rest).copy_from_nonoverlapping(from.add(rest), bytes - rest);
        }
    }
}

/// Prefetches the bytes `ahead` after the start of a block of each input.
pub(in crate::pointwise) fn prefetch_next(
    slots: &[*mut u8],
    operands: &[(Base<u8>, usize)],
    block: usize,
    ahead: usize,
) {
    for (slot, (_, size)) in slots.iter().zip(operands) {
        prefetch(slot.wrapping_add(ahead), block * size);
    }
}

/// Orders this thread's non-temporal stores before its later stores.
pub(in crate::pointwise) fn finish() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 CPU has the instruction.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// Calls `copy` with every cache line of `from` once, in an order.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn in_order(order: Order, from: *const u8, lines: usize, mut copy: impl FnMut(usize)) {
    const PAGE_LINES: usize = PAGE / LINE;
    let whole = match order {
        Order::Interleaved => lines - lines % (PAGES * PAGE_LINES),
        Order::Ahead(0) => 0,
        Order::Ahead(ahead) => {
            return (0..lines).for_each(|i| {
                prefetch(from.wrapping_add(i * LINE + ahead), 1);
                copy(i);
            });
        }
    };
    for from in (0..whole).step_by(PAGES * PAGE_LINES) {
        for i in from..from + PAGE_LINES {
            (0..PAGES).for_each(|page| copy(i + page * PAGE_LINES));
        }
    }
    (whole..lines).for_each(copy);
}

/// # Safety
/// Both sides hold `lines` cache lines, `to` is aligned to one, and the CPU supports `simd`.
#[cfg(target_arch = "x86_64")]
unsafe fn copy_lines(simd: Simd, order: Order, to: *mut u8, from: *const u8, lines: usize) {
    use std::arch::x86_64::*;
    /// # Safety
    /// As for [`copy_lines`], on a CPU with AVX-512.
    #[target_feature(enable = "avx512f")]
    unsafe fn wide(order: Order, to: *mut u8, from: *const u8, lines: usize) {
        in_order(order, from, lines, |i| {
            // SAFETY: line `i < lines` of both sides, which the caller guarantees.
            unsafe { _mm512_stream_si512(to.add(i * LINE).cast(), _mm512_loadu_si512(from.add(i * LINE).cast())) };
        });
    }
    // SAFETY: lines below `lines` of both sides, which the caller guarantees.
    unsafe {
        if simd >= Simd::Avx512 {
            return wide(order, to, from, lines);
        }
        in_order(order, from, lines, |i| {
            for at in (i * LINE..(i + 1) * LINE).step_by(16) {
                _mm_stream_si128(to.add(at).cast(), _mm_loadu_si128(from.add(at).cast()));
            }
        });
    }
}

/// # Safety
/// Both sides hold `lines` cache lines.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn copy_lines(_: Simd, _: Order, to: *mut u8, from: *const u8, lines: usize) {
    // SAFETY: the caller guarantees `lines` cache lines on both sides.
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
                for order in ORDERS.into_iter().chain([Order::Ahead(0)]) {
                    let mut to = vec![0u8; 80_000];
                    // SAFETY: both vectors are longer; `to` is this test's alone.
                    unsafe { copy(simd, order, to[start..].as_mut_ptr(), from.as_ptr(), bytes) };
                    finish();
                    assert_eq!(to[start..start + bytes], from[..bytes]);
                    assert!(to[..start].iter().chain(&to[start + bytes..]).all(|&x| x == 0));
                }
            }
        }
    }
}
