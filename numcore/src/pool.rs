//! The pool that every runtime's memory uses: free blocks by size class, and the memory account. A block is of the
//! runtime's own type.

use crate::{MemoryCategory, MemoryStats};

/// Classes are multiples of this.
const ALIGN: usize = 256;
/// Size classes between one power of two and the next: at most an eighth of a block is waste.
const STEPS: usize = 8;
const CLASSES: usize = STEPS * usize::BITS as usize;
/// How many classes above its own a request may take a free block from.
const SLACK: usize = 2;

/// Free blocks by size class, and the account of blocks in use. A training step in its steady state makes no system
/// allocation.
#[derive(Debug)]
pub struct Pool<B> {
    free: Vec<Vec<B>>,
    stats: MemoryStats,
}

impl<B> Default for Pool<B> {
    fn default() -> Self {
        Pool { free: (0..CLASSES).map(|_| Vec::new()).collect(), stats: MemoryStats::default() }
    }
}

impl<B> Pool<B> {
    /// The smallest class that holds `bytes`; `None` beyond what an address can reach.
    pub fn class_of(bytes: usize) -> Option<usize> {
        let units = bytes.checked_add(ALIGN - 1)? / ALIGN;
        if units <= STEPS {
            return Some(units.saturating_sub(1));
        }
        // Between 2^e and 2^(e+1) units there are STEPS classes.
        let e = (units - 1).ilog2() as usize;
        let step = 1usize << (e - STEPS.ilog2() as usize);
        let class = STEPS * (e - 2) + (units - (1 << e)).div_ceil(step) - 1;
        (Self::size_of(class) <= isize::MAX as usize).then_some(class)
    }

    /// Bytes of a class's blocks.
    pub fn size_of(class: usize) -> usize {
        if class < STEPS {
            return (class + 1) * ALIGN;
        }
        let (e, k) = (class / STEPS + 2, class % STEPS + 1);
        let units = (1usize << e).saturating_add(k << (e - STEPS.ilog2() as usize));
        units.saturating_mul(ALIGN)
    }

    /// The classes whose blocks may serve a request of this one: it and a little above.
    pub fn near(class: usize) -> std::ops::Range<usize> {
        class..(class + 1 + SLACK).min(CLASSES)
    }

    /// A free block of one of these classes, with its own.
    pub fn take(&mut self, class: usize) -> Option<(usize, B)> {
        Self::near(class).find_map(|c| self.take_exactly(c).map(|b| (c, b)))
    }

    /// A free block of this very class.
    pub fn take_exactly(&mut self, class: usize) -> Option<B> {
        self.free[class].pop()
    }

    /// Keeps a block for reuse.
    pub fn put(&mut self, class: usize, block: B) {
        self.free[class].push(block);
    }

    /// Books a block of this class that was taken from the system.
    pub fn reserve(&mut self, class: usize) {
        self.stats.reserved += Self::size_of(class);
    }

    /// Every free block, to be given back to the system.
    pub fn drain(&mut self) -> Vec<(usize, B)> {
        let lists = self.free.iter_mut().enumerate();
        let blocks: Vec<(usize, B)> = lists.flat_map(|(c, list)| list.drain(..).map(move |b| (c, b))).collect();
        self.stats.reserved -= blocks.iter().map(|(c, _)| Self::size_of(*c)).sum::<usize>();
        blocks
    }

    /// Books `bytes` that are handed out.
    pub fn book(&mut self, bytes: usize, use_: MemoryCategory) {
        self.stats.allocations += 1;
        for account in [&mut self.stats.by_use[use_ as usize], &mut self.stats.total] {
            account.live += bytes;
            account.peak = account.peak.max(account.live);
        }
    }

    /// Books `bytes` that came back.
    pub fn unbook(&mut self, bytes: usize, use_: MemoryCategory) {
        self.stats.by_use[use_ as usize].live -= bytes;
        self.stats.total.live -= bytes;
    }

    /// The memory account of this pool.
    pub fn stats(&self) -> &MemoryStats {
        &self.stats
    }

    /// Resets peak counters to the bytes that are live now.
    pub fn reset_peak(&mut self) {
        let stats = &mut self.stats;
        stats.by_use.iter_mut().chain([&mut stats.total]).for_each(|b| b.peak = b.live);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_hold_what_they_are_for_and_waste_little() {
        for bytes in (1..20_000).chain((14..45).flat_map(|e| [(1 << e) - 1, 1 << e, (1 << e) + 1, 3 << e])) {
            let class = Pool::<()>::class_of(bytes).unwrap();
            let size = Pool::<()>::size_of(class);
            assert!(size >= bytes, "{bytes}");
            assert!(class == 0 || Pool::<()>::size_of(class - 1) < bytes, "{bytes}: class {class} is not the smallest");
            assert!(size <= bytes + bytes / 8 + ALIGN, "{bytes}");
        }
    }

    #[test]
    fn blocks_come_back() {
        let mut pool = Pool::default();
        assert_eq!(pool.take(3), None);
        pool.reserve(4);
        pool.put(4, "block");
        assert_eq!(pool.take(3), Some((4, "block")));
        pool.put(4, "block");
        assert_eq!((pool.drain(), pool.stats().reserved), (vec![(4, "block")], 0));
    }
}
