//! An image split into bf16 terms, once for all taps of the kernel.

use std::{arch::x86_64::*, ops::Range};

use super::{
    TILE_DIM, TILE_K, Tile,
    split::SplitBf16,
    tile_loops,
    vnni::{deinterleave, k_pair},
};
use crate::gemm::Im2col;

/// Terms of an element.
pub(super) const TERMS: usize = 3;

/// An image split into terms: for every group of one or two channels a plane of each term, with the channels of a group
/// interleaved.
#[derive(Clone, Copy)]
pub(super) struct SplitImage {
    /// The address of the first element of a channel.
    pub at: *const u16,
    /// Elements between terms.
    pub plane: usize,
    /// Elements between groups of channels.
    pub group: usize,
}

/// The elements of a channel that the im2col view has.
fn reach(image: &Im2col<'_, f32>) -> Range<usize> {
    let taps = image.rows[..image.taps].iter();
    let ends = |x: &[usize]| [x.first(), x.last()].map(|x| x.copied().unwrap_or(0));
    let [first, last] = ends(image.columns);
    let [low, high] = [taps.clone().min(), taps.max()].map(|x| x.copied().unwrap_or(0));
    first + low..last + high + 1
}

/// Splits the part of the image that the view reads, in groups of `CHANNELS` channels: one, or the two of a pair among
/// 32. Missing channels are zero. Behind it there are 32 more elements, of any value.
///
/// # Safety
/// The im2col view is valid for reads. The CPU supports AVX-512 BF16.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) unsafe fn split_image<const CHANNELS: usize>(
    image: &Im2col<'_, f32>,
    groups: usize,
    memory: &mut Vec<Tile>,
) -> SplitImage {
    let (channels, reach) = (image.channels(), reach(image));
    // An odd number of cache lines, so that the same position of many planes does not map to the same sets of L1.
    let lines = (reach.len().div_ceil(TILE_K) * CHANNELS) | 1;
    let plane = lines * TILE_K;
    let to = tile_loops::workspace(memory, (groups * TERMS * lines + CHANNELS).div_ceil(TILE_DIM)).cast::<__m512i>();
    for group in 0..groups {
        let to = to.wrapping_add(group * TERMS * lines);
        for (i, from) in reach.clone().step_by(TILE_K).enumerate() {
            let count = TILE_K.min(reach.end - from);
            let read = |channel: usize| {
                if channel >= channels {
                    return [_mm512_setzero_ps(); 2];
                }
                let at = image.at.wrapping_add(channel * image.plane + from);
                // SAFETY: `count` elements from `from` on are within the view's reach, which the caller guarantees in
                // every channel.
                unsafe {
                    if count == TILE_K {
                        return f32::load_32(at, u32::MAX);
                    }
                    let mut some = [0.0; TILE_K];
                    some[..count].copy_from_slice(std::slice::from_raw_parts(at, count));
                    f32::load_32(some.as_ptr(), u32::MAX)
                }
            };
            let to = to.wrapping_add(i * CHANNELS);
            // SAFETY: the workspace has `lines` cache lines for each term of a group; the caller guarantees AVX-512
            // BF16.
            unsafe {
                match CHANNELS {
                    1 => {
                        for (term, row) in f32::pack_row(read(group)).into_iter().enumerate() {
                            *to.wrapping_add(term * lines) = deinterleave(row);
                        }
                    }
                    _ => {
                        let channels = k_pair(group % TILE_DIM, TERMS);
                        let channels = channels.map(|channel| group / TILE_DIM * TILE_K + channel);
                        for (term, halves) in f32::pack_pair(channels.map(read)).into_iter().enumerate() {
                            to.wrapping_add(term * lines).cast::<[__m512i; 2]>().write(halves);
                        }
                    }
                }
            }
        }
    }
    SplitImage { at: to.cast::<u16>().wrapping_sub(reach.start * CHANNELS), plane, group: TERMS * plane }
}
