//! The segment allocator: it tracks the free addresses of a pool. A *segment* is one allocation of the driver; a
//! *block* is a piece of one. A request takes the smallest free block that holds it and splits the rest off. A returned
//! block is merged with its free neighbours. Small requests have segments of their own, so that small, long-lived
//! blocks do not cut large segments into pieces.
//!
//! Free segments that are too small for anything add up where sizes change from step to step. So a pool that would
//! grow far beyond its peak use first gives free segments back ([`Segments::grow`]).
//!
//! The allocator is pure arithmetic: it touches no memory and calls no driver, and the same calls give the same
//! addresses.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
};

/// Bytes to whose multiples blocks are sized and aligned.
const ALIGN: usize = 256;
/// Requests below this many bytes have small segments. Few activations are as small. With a higher limit, activations
/// of short batches were below it and those of long ones above it. Neither could then reuse the other's free memory.
const SMALL: usize = 128 << 10;
/// Bytes of a small segment.
const SMALL_SEGMENT: usize = 2 << 20;
/// The least bytes of a large segment.
const LARGE_SEGMENT: usize = 20 << 20;
/// Bytes of the driver's pages; large segments are multiples of them.
const PAGE: usize = 2 << 20;
/// A large segment is at least this fraction (one eighth) of its pool. So the number of segments grows slowly, and
/// blocks whose sizes change from step to step fit into few of them.
const GROWTH: usize = 8;
/// The most bytes by which a segment exceeds its request.
const MOST_AHEAD: usize = 512 << 20;
/// A pool may hold its peak use, one part in this many more, and one large segment. Beyond that it gives segments back
/// in order to grow.
const SLACK: usize = 6;
/// After each run of this many new segments without a new peak, a pool may hold one part in [`PATIENCE_SLACK`] more. So
/// recurring sizes find their places at last.
const PATIENCE: usize = 4;
const PATIENCE_SLACK: usize = 16;

/// A range of device memory in a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DeviceBlock {
    pub address: u64,
    pub bytes: usize,
}

/// Instructions for growing a pool: segments to give back to the driver first, and the bytes of the new one.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Growth {
    pub shed: Vec<u64>,
    pub segment: usize,
}

/// A block, free or used.
#[derive(Clone, Copy, Debug)]
struct Piece {
    bytes: usize,
    /// The address of its segment.
    segment: u64,
    free: bool,
}

#[derive(Clone, Copy, Debug)]
struct Segment {
    bytes: usize,
    small: bool,
}

/// Free blocks by size, then by address.
type FreeList = BTreeSet<(usize, u64)>;

/// The segments of a pool, and their blocks.
#[derive(Debug, Default)]
pub(super) struct Segments {
    /// Segments by their address.
    segments: BTreeMap<u64, Segment>,
    /// All blocks by their address; the blocks of a segment cover it.
    pieces: BTreeMap<u64, Piece>,
    small: FreeList,
    large: FreeList,
    reserved: usize,
    used: usize,
    /// The most bytes that were used at a time, since the last [`drain`](Segments::drain).
    peak: usize,
    /// The number of times that the pool has grown since the last new peak.
    grown: usize,
    /// True if every block is a segment of its own, of exactly its bytes.
    apart: bool,
}

impl Segments {
    /// Segments of one block each, which are not cut or merged. Tools that know only the driver's allocations then see
    /// accesses beyond a block.
    pub(super) fn apart() -> Segments {
        Segments { apart: true, ..Segments::default() }
    }

    /// Bytes of all segments.
    pub(super) fn reserved(&self) -> usize {
        self.reserved
    }

    /// Bytes of all free blocks.
    pub(super) fn free(&self) -> usize {
        self.reserved - self.used
    }

    /// Bytes of the largest free block.
    pub(super) fn largest_free(&self) -> usize {
        let lists = [&self.small, &self.large].into_iter();
        lists.filter_map(|list| list.last()).map(|(bytes, _)| *bytes).max().unwrap_or(0)
    }

    /// Takes `bytes` of the smallest free block that holds them, the first of several; the rest of the block stays
    /// free.
    pub(super) fn take(&mut self, bytes: usize) -> Option<DeviceBlock> {
        let bytes = rounded(bytes)?;
        let list = if bytes < SMALL { &self.small } else { &self.large };
        let (_, address) = *list.range((bytes, 0)..).next().filter(|(found, _)| !self.apart || *found == bytes)?;
        Some(self.cut(address, bytes))
    }

    /// Plans the growth for a request that no free block holds. Segments to give back are removed from the pool. `None`
    /// for more bytes than an address space.
    pub(super) fn grow(&mut self, bytes: usize) -> Option<Growth> {
        let bytes = rounded(bytes)?;
        let ahead = (self.reserved / GROWTH).clamp(LARGE_SEGMENT, MOST_AHEAD).next_multiple_of(PAGE);
        let segment = if self.apart {
            bytes
        } else if bytes < SMALL {
            SMALL_SEGMENT
        } else {
            least_segment(bytes)?.max(ahead)
        };
        self.grown += 1;
        let peak = self.peak.max(self.used + bytes);
        let most = peak + peak / SLACK + LARGE_SEGMENT + self.grown / PATIENCE * (peak / PATIENCE_SLACK);
        // Small segments are kept: they are no smaller than the next small request needs.
        let mut free = self.free_segments();
        free.retain(|(start, _)| self.segments.get(start).is_some_and(|segment| !segment.small));
        free.sort_by_key(|(start, bytes)| (Reverse(*bytes), *start));
        let mut shed = Vec::new();
        for (start, bytes) in free {
            if self.reserved.saturating_add(segment) <= most {
                break;
            }
            self.remove(start, bytes);
            shed.push(start);
        }
        Some(Growth { shed, segment })
    }

    /// Adds a segment and takes its first `bytes`.
    pub(super) fn add(&mut self, start: u64, segment: usize, bytes: usize) -> DeviceBlock {
        let bytes = rounded(bytes).unwrap_or(segment);
        self.segments.insert(start, Segment { bytes: segment, small: bytes < SMALL });
        self.reserved += segment;
        self.pieces.insert(start, Piece { bytes: segment, segment: start, free: true });
        self.list(start).insert((segment, start));
        self.cut(start, bytes)
    }

    /// Frees a block, and merges it with its free neighbours.
    pub(super) fn give_back(&mut self, block: DeviceBlock) {
        let Some(mut piece) = self.pieces.remove(&block.address) else { return };
        self.used -= piece.bytes;
        let (mut start, end) = (block.address, block.address + piece.bytes as u64);
        let before = self.pieces.range(..start).next_back().map(|(at, piece)| (*at, *piece));
        let after = self.pieces.get(&end).map(|piece| (end, *piece));
        for (at, neighbour) in [before, after].into_iter().flatten() {
            if neighbour.free && neighbour.segment == piece.segment {
                self.pieces.remove(&at);
                self.list(piece.segment).remove(&(neighbour.bytes, at));
                piece.bytes += neighbour.bytes;
                start = start.min(at);
            }
        }
        piece.free = true;
        self.pieces.insert(start, piece);
        self.list(piece.segment).insert((piece.bytes, start));
    }

    /// Takes the free parts of these ranges, which may overlap.
    pub(super) fn take_ranges(&mut self, ranges: Vec<DeviceBlock>) -> Vec<DeviceBlock> {
        let mut taken = Vec::new();
        for range in ranges {
            let end = range.address + range.bytes as u64;
            // The block that holds the start of the range, and those that start within.
            let first = self.pieces.range(..=range.address).next_back().map_or(range.address, |(at, _)| *at);
            let within = self.pieces.range(first..end).filter(|(_, piece)| piece.free);
            let free: Vec<(u64, u64)> = within.map(|(at, piece)| (*at, at + piece.bytes as u64)).collect();
            for (at, until) in free {
                let (from, to) = (at.max(range.address), until.min(end));
                if from < to {
                    self.split(at, (from - at) as usize);
                    taken.push(self.cut(from, (to - from) as usize));
                }
            }
        }
        taken
    }

    /// Removes the unused segments, resets the peak, and returns the segments' addresses.
    pub(super) fn drain(&mut self) -> Vec<u64> {
        let free = self.free_segments();
        free.iter().for_each(|(start, bytes)| self.remove(*start, *bytes));
        (self.peak, self.grown) = (self.used, 0);
        free.into_iter().map(|(start, _)| start).collect()
    }

    /// The addresses and bytes of unused segments.
    fn free_segments(&self) -> Vec<(u64, usize)> {
        let is_free = |start: &u64, bytes| self.pieces.get(start).is_some_and(|p| p.free && p.bytes == bytes);
        let all = self.segments.iter().map(|(start, segment)| (*start, segment.bytes));
        all.filter(|(start, bytes)| is_free(start, *bytes)).collect()
    }

    /// Removes an unused segment.
    fn remove(&mut self, start: u64, bytes: usize) {
        self.list(start).remove(&(bytes, start));
        self.pieces.remove(&start);
        self.segments.remove(&start);
        self.reserved -= bytes;
    }

    /// The free list of a segment.
    fn list(&mut self, segment: u64) -> &mut FreeList {
        let small = self.segments.get(&segment).is_some_and(|segment| segment.small);
        if small { &mut self.small } else { &mut self.large }
    }

    /// Takes the first `bytes` of a free block.
    fn cut(&mut self, address: u64, bytes: usize) -> DeviceBlock {
        self.split(address, bytes);
        if let Some(piece) = self.pieces.get_mut(&address) {
            piece.free = false;
            let (bytes, segment) = (piece.bytes, piece.segment);
            self.list(segment).remove(&(bytes, address));
            self.used += bytes;
            if self.used > self.peak {
                (self.peak, self.grown) = (self.used, 0);
            }
        }
        DeviceBlock { address, bytes }
    }

    /// Splits a free block that is longer than `bytes` in two.
    fn split(&mut self, address: u64, bytes: usize) {
        let longer = |piece: &&mut Piece| bytes > 0 && piece.bytes > bytes;
        let Some(piece) = self.pieces.get_mut(&address).filter(longer) else { return };
        let (whole, segment, rest) = (piece.bytes, piece.segment, address + bytes as u64);
        piece.bytes = bytes;
        self.pieces.insert(rest, Piece { bytes: whole - bytes, segment, free: true });
        let list = self.list(segment);
        list.remove(&(whole, address));
        list.insert((bytes, address));
        list.insert((whole - bytes, rest));
    }
}

/// The bytes of a request's block; `None` for more than an address space.
fn rounded(bytes: usize) -> Option<usize> {
    bytes.max(1).checked_next_multiple_of(ALIGN).filter(|bytes| *bytes <= isize::MAX as usize)
}

/// The bytes of the smallest segment that serves a request; `None` for more than an address space.
pub(super) fn least_segment(bytes: usize) -> Option<usize> {
    bytes.max(1).checked_next_multiple_of(PAGE).filter(|bytes| *bytes <= isize::MAX as usize)
}

#[cfg(test)]
mod tests;
