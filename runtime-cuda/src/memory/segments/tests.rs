//! Tests of the segment allocator on plain numbers: random requests, and the requests of training steps whose sequences
//! change in length.

use std::collections::BTreeMap;

use numcore::rng::Philox;

use super::*;

/// A pool over a driver that gives addresses and counts.
#[derive(Default)]
struct Simulated {
    segments: Segments,
    driver: BTreeMap<u64, usize>,
    next: u64,
    allocations: usize,
    live: usize,
    peak: usize,
    most_reserved: usize,
}

/// A block, and the bytes that were requested.
type Held = (DeviceBlock, usize);

impl Simulated {
    fn alloc(&mut self, bytes: usize) -> Held {
        self.live += bytes;
        self.peak = self.peak.max(self.live);
        let block = self.segments.take(bytes).unwrap_or_else(|| {
            let Growth { shed, segment } = self.segments.grow(bytes).unwrap();
            for start in shed {
                self.driver.remove(&start).expect("a segment of the driver's");
            }
            self.allocations += 1;
            // Adjacent, as the driver's may be: neighbours of two segments are not merged.
            let start = self.next + (1 << 30);
            self.next += segment as u64;
            self.driver.insert(start, segment);
            self.segments.add(start, segment, bytes)
        });
        assert!(block.bytes >= bytes && block.address.is_multiple_of(ALIGN as u64), "{block:?} for {bytes}");
        self.most_reserved = self.most_reserved.max(self.segments.reserved());
        assert_eq!(self.segments.reserved(), self.driver.values().sum::<usize>());
        (block, bytes)
    }

    fn free(&mut self, (block, bytes): Held) {
        self.live -= bytes;
        self.segments.give_back(block);
    }

    /// Checks the allocator's invariants. Blocks cover their segments without a gap, no two free ones of a segment are
    /// neighbours, and the lists hold exactly the free ones.
    fn check(&self) {
        let Segments { segments, pieces, small, large, reserved, used, .. } = &self.segments;
        let (mut listed, mut in_use) = (small.len() + large.len(), 0);
        for (start, segment) in segments {
            let (end, mut at, mut free_before) = (start + segment.bytes as u64, *start, false);
            while at < end {
                let piece = pieces[&at];
                assert_eq!(piece.segment, *start);
                assert!(!(piece.free && free_before), "free neighbours at {at}");
                let list = if segment.small { small } else { large };
                assert_eq!(list.contains(&(piece.bytes, at)), piece.free);
                listed -= usize::from(piece.free);
                in_use += if piece.free { 0 } else { piece.bytes };
                (free_before, at) = (piece.free, at + piece.bytes as u64);
            }
            assert_eq!(at, end, "blocks leave their segment");
        }
        assert_eq!((listed, in_use), (0, *used));
        assert_eq!(segments.values().map(|s| s.bytes).sum::<usize>(), *reserved);
    }

    /// Checks that all blocks merge and go back to the driver once everything is freed.
    fn check_all_is_free(mut self) {
        self.check();
        assert_eq!(self.segments.free(), self.segments.reserved());
        assert_eq!(self.segments.pieces.len(), self.segments.segments.len(), "one free block a segment");
        let mut drained = self.segments.drain();
        drained.sort_unstable();
        assert!(drained.iter().eq(self.driver.keys()));
        assert_eq!((self.segments.reserved(), self.segments.largest_free()), (0, 0));
    }
}

/// A size of up to 64 MiB, small ones as often as large ones.
fn size(rng: &mut Philox) -> usize {
    let bits = 1 + rng.next_u32() % 26;
    1 + rng.next_u32() as usize % (1 << bits)
}

/// Allocates and frees at random; returns the address of every block.
fn random(seed: u64) -> Vec<u64> {
    let (mut rng, mut pool) = (Philox::new(seed, 0), Simulated::default());
    let (mut held, mut addresses): (Vec<Held>, Vec<u64>) = (Vec::new(), Vec::new());
    let mut taken: BTreeMap<u64, u64> = BTreeMap::new();
    for i in 0..3000 {
        if held.is_empty() || rng.next_u32() % 100 < if i % 600 < 300 { 60 } else { 40 } {
            let bytes = size(&mut rng);
            let (block, asked) = pool.alloc(bytes);
            held.push((block, asked));
            let end = block.address + block.bytes as u64;
            let before = taken.range(..end).next_back();
            assert!(before.is_none_or(|(_, until)| *until <= block.address), "{block:?} overlaps {before:?}");
            taken.insert(block.address, end);
            addresses.push(block.address);
        } else {
            let block = held.swap_remove(rng.next_u32() as usize % held.len());
            taken.remove(&block.0.address);
            pool.free(block);
        }
        if i % 50 == 0 {
            pool.check();
        }
    }
    held.into_iter().for_each(|block| pool.free(block));
    pool.check_all_is_free();
    addresses
}

#[test]
fn blocks_do_not_overlap_and_are_merged_when_all_is_freed() {
    for seed in 0..8 {
        assert_eq!(random(seed), random(seed), "seed {seed}: the same calls give the same places");
    }
}

#[test]
fn the_smallest_block_that_holds_a_request_is_taken() {
    let mut pool = Simulated::default();
    let sizes = [6, 3, 4].map(|m| m << 20);
    let blocks = sizes.map(|bytes| (pool.alloc(bytes), pool.alloc(1 << 20)));
    let places = blocks.map(|(block, _)| block.0.address);
    blocks.iter().for_each(|(block, _)| pool.free(*block));
    assert_eq!(pool.alloc(5 << 19).0.address, places[1]);
    assert_eq!(pool.alloc(7 << 19).0.address, places[2]);
    assert_eq!(pool.alloc(5 << 20).0.address, places[0]);
    assert_eq!(pool.allocations, 1);
    pool.check();
}

#[test]
fn blocks_apart_are_segments_of_exactly_their_bytes() {
    let mut pool = Simulated { segments: Segments::apart(), ..Simulated::default() };
    for bytes in [100, 3 << 20, 5000, 30 << 20] {
        let block = pool.alloc(bytes);
        assert_eq!((block.0.bytes, pool.driver[&block.0.address]), (bytes.next_multiple_of(ALIGN), block.0.bytes));
        pool.free(block);
        assert_eq!(pool.alloc(bytes).0, block.0, "it is used again");
        assert_ne!(pool.alloc(bytes).0, block.0);
    }
}

#[test]
fn ranges_are_taken_where_they_are_free() {
    let mut pool = Simulated::default();
    let (a, b, c) = (pool.alloc(3 << 20), pool.alloc(2 << 20), pool.alloc(1 << 20));
    pool.free(a);
    pool.free(c);
    let whole = DeviceBlock { address: a.0.address, bytes: 6 << 20 };
    let inner = DeviceBlock { address: a.0.address + (1 << 20), bytes: 1 << 20 };
    let taken = pool.segments.take_ranges(vec![inner, whole, whole]);
    let bytes: usize = taken.iter().map(|block| block.bytes).sum();
    assert_eq!(bytes, 4 << 20, "a and c, each once: {taken:?}");
    assert!(taken.iter().all(|t| t.address + t.bytes as u64 <= b.0.address || t.address >= c.0.address));
    pool.check();
    taken.into_iter().for_each(|block| pool.segments.give_back(block));
    pool.free(b);
    pool.check_all_is_free();
}

#[test]
fn more_than_an_address_space_is_refused() {
    let mut segments = Segments::default();
    for bytes in [usize::MAX, usize::MAX - 300, isize::MAX as usize + 1] {
        assert_eq!((segments.take(bytes), segments.grow(bytes)), (None, None), "{bytes}");
    }
}

/// A decoder's memory: `layers` of `width`, a vocabulary, `tokens` in a batch, elements of two bytes.
struct Decoder {
    layers: usize,
    width: usize,
    vocabulary: usize,
}

impl Decoder {
    /// Makes the allocations and frees of a step, in order.
    fn step(&self, pool: &mut Simulated, tokens: usize) {
        let unit = 2 * tokens * self.width;
        let logits = 2 * tokens * self.vocabulary;
        let mut saved: Vec<Vec<Held>> = Vec::new();
        let mut x = pool.alloc(unit);
        for _ in 0..self.layers {
            let mut kept = vec![x, pool.alloc(8 * tokens)];
            let normed = pool.alloc(unit);
            kept.push(pool.alloc(3 * unit));
            pool.free(normed);
            kept.extend([unit, 48 * tokens, unit, 8 * tokens].map(|bytes| pool.alloc(bytes)));
            let normed = pool.alloc(unit);
            kept.push(pool.alloc(4 * unit));
            pool.free(normed);
            let activated = pool.alloc(4 * unit);
            x = pool.alloc(unit);
            pool.free(activated);
            saved.push(kept);
        }
        let (values, losses) = (pool.alloc(logits), pool.alloc(4 * tokens));
        let gradient = pool.alloc(logits);
        pool.free(values);
        pool.free(losses);
        let mut g = pool.alloc(unit);
        pool.free(gradient);
        pool.free(x);
        for mut kept in saved.into_iter().rev() {
            let (activated, wide) = (pool.alloc(4 * unit), pool.alloc(4 * unit));
            pool.free(activated);
            let inner = pool.alloc(4 * unit);
            pool.free(wide);
            kept.pop().into_iter().for_each(|block| pool.free(block));
            let down = pool.alloc(unit);
            pool.free(inner);
            let (heads, joined) = (pool.alloc(3 * unit), pool.alloc(unit));
            kept.into_iter().for_each(|block| pool.free(block));
            pool.free(down);
            let next = pool.alloc(unit);
            [heads, joined, std::mem::replace(&mut g, next)].into_iter().for_each(|block| pool.free(block));
        }
        pool.free(g);
    }
}

const GPT2: Decoder = Decoder { layers: 12, width: 768, vocabulary: 50257 };
const NARROW: Decoder = Decoder { layers: 6, width: 512, vocabulary: 8192 };

/// Sequence lengths in turn, upwards, downwards and mixed. Reserved bytes stay within a quarter of the peak. Once every
/// length was met a few times, nothing is requested from the driver.
#[test]
fn sequences_of_changing_length_do_not_fragment() {
    let orders: [fn(usize) -> usize; 3] = [|i| 17 + i, |i| 64 - i, |i| 17 + i * 29 % 48];
    for (decoder, parameters, tokens) in
        [(GPT2, 1_736_000_000, 16), (GPT2, 1_736_000_000, 256), (NARROW, 400 << 20, 64), (NARROW, 0, 512)]
    {
        for (name, order) in ["upwards", "downwards", "mixed"].into_iter().zip(orders) {
            let mut pool = Simulated::default();
            let parameters = pool.alloc(parameters);
            let pass = |pool: &mut Simulated| (0..48).for_each(|i| decoder.step(pool, tokens * order(i)));
            (0..2).for_each(|_| pass(&mut pool));
            let (first, peak) = (pool.allocations, pool.peak);
            (0..2).for_each(|_| pass(&mut pool));
            assert_eq!(pool.allocations, first, "{name}, {tokens}: in the third pass");
            let ratio = pool.most_reserved as f64 / peak as f64;
            assert!(ratio <= 1.25, "{name}, {tokens}: {ratio:.3} times the peak of {} MiB", peak >> 20);
            pool.free(parameters);
            pool.check_all_is_free();
        }
    }
}
