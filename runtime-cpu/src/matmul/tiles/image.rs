//! An image in pieces: cut once, and read at every place of a kernel.

use std::{arch::x86_64::*, ops::Range};

use super::{
    SIDE, STEP, Tile, block,
    pairs::{in_line, steps_of},
    pieces::Pieces,
};
use crate::matmul::Unfolded;

/// Pieces of a number.
pub(super) const P: usize = 3;

/// An image in pieces: for every so many channels a plane of each piece, their numbers side by side.
#[derive(Clone, Copy)]
pub(super) struct Image {
    /// Where a channel's first number would be.
    pub at: *const u16,
    /// From a piece to the next.
    pub plane: usize,
    /// From a group of channels to the next.
    pub group: usize,
}

/// The numbers of a channel that windows have.
fn reach(windows: &Unfolded<'_, f32>) -> Range<usize> {
    let places = windows.steps[..windows.places].iter();
    let ends = |x: &[usize]| [x.first(), x.last()].map(|x| x.copied().unwrap_or(0));
    let [first, last] = ends(windows.columns);
    let [low, high] = [places.clone().min(), places.max()].map(|x| x.copied().unwrap_or(0));
    first + low..last + high + 1
}

/// Cuts what windows reach of their image: so many groups of `TOGETHER` channels side by side, the pairs of 32 channels if they are two, zeros where
/// there is no channel. Behind what is reached lie 32 numbers more, whatever they are.
///
/// # Safety
/// All windows lie in their operand; the processor has the instructions.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) unsafe fn cut<const TOGETHER: usize>(
    windows: &Unfolded<'_, f32>,
    groups: usize,
    memory: &mut Vec<Tile>,
) -> Image {
    let (channels, reach) = (windows.channels(), reach(windows));
    // An odd number of cache lines: the same place of many planes does not lie in the same lines of the first cache.
    let lines = (reach.len().div_ceil(STEP) * TOGETHER) | 1;
    let plane = lines * STEP;
    let to = block::room(memory, (groups * P * lines + TOGETHER).div_ceil(SIDE)).cast::<__m512i>();
    for group in 0..groups {
        let to = to.wrapping_add(group * P * lines);
        for (i, from) in reach.clone().step_by(STEP).enumerate() {
            let count = STEP.min(reach.end - from);
            let read = |channel: usize| {
                if channel >= channels {
                    return [_mm512_setzero_ps(); 2];
                }
                let at = windows.at.wrapping_add(channel * windows.plane + from);
                // SAFETY: the caller's promise: so many numbers are reached by windows.
                unsafe {
                    if count == STEP {
                        return f32::read(at, u32::MAX);
                    }
                    let mut some = [0.0; STEP];
                    some[..count].copy_from_slice(std::slice::from_raw_parts(at, count));
                    f32::read(some.as_ptr(), u32::MAX)
                }
            };
            let to = to.wrapping_add(i * TOGETHER);
            // SAFETY: there is room for so many lines of each piece; the processor has the instructions.
            unsafe {
                match TOGETHER {
                    1 => {
                        for (piece, line) in f32::row(read(group)).into_iter().enumerate() {
                            *to.wrapping_add(piece * lines) = in_line(line);
                        }
                    }
                    _ => {
                        let channels = steps_of(group % SIDE, P).map(|channel| group / SIDE * STEP + channel);
                        for (piece, halves) in f32::pair(channels.map(read)).into_iter().enumerate() {
                            to.wrapping_add(piece * lines).cast::<[__m512i; 2]>().write(halves);
                        }
                    }
                }
            }
        }
    }
    Image { at: to.cast::<u16>().wrapping_sub(reach.start * TOGETHER), plane, group: P * plane }
}
