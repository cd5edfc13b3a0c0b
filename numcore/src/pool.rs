//! A pool of memory: free blocks by size class, and the memory account. The runtime chooses the type of a block.

use crate::{MemoryAccount, MemoryCategory, MemoryReport, MemoryStats};

/// Block sizes are multiples of this, in bytes.
const ALIGN: usize = 256;
/// The number of size classes between consecutive powers of two: at most an eighth of a block is wasted.
const STEPS: usize = 8;
const CLASSES: usize = STEPS * usize::BITS as usize;
/// The number of larger size classes that may also serve a request.
const SLACK: usize = 2;

/// Free blocks by size class, and the account of blocks in use. A training step in its steady state makes no system
/// allocation.
#[derive(Debug)]
pub struct Pool<B> {
    free: Vec<Vec<B>>,
    account: MemoryAccount,
}

impl<B> Default for Pool<B> {
    fn default() -> Self {
        Pool { free: (0..CLASSES).map(|_| Vec::new()).collect(), account: MemoryAccount::default() }
    }
}

impl<B> Pool<B> {
    /// The smallest size class that holds `bytes`; `None` beyond the address space.
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

    /// The size of a class's blocks, in bytes.
    pub fn size_of(class: usize) -> usize {
        if class < STEPS {
            return (class + 1) * ALIGN;
        }
        let (e, k) = (class / STEPS + 2, class % STEPS + 1);
        let units = (1usize << e).saturating_add(k << (e - STEPS.ilog2() as usize));
        units.saturating_mul(ALIGN)
    }

    /// The size classes whose blocks may serve a request of this class: its own and a few larger ones.
    pub fn near(class: usize) -> std::ops::Range<usize> {
        class..(class + 1 + SLACK).min(CLASSES)
    }

    /// Takes a free block of one of the [`near`](Pool::near) classes, with its class.
    pub fn take(&mut self, class: usize) -> Option<(usize, B)> {
        Self::near(class).find_map(|c| self.take_exactly(c).map(|b| (c, b)))
    }

    /// Takes a free block of exactly this class.
    pub fn take_exactly(&mut self, class: usize) -> Option<B> {
        self.free[class].pop()
    }

    /// Keeps a block for reuse.
    pub fn put(&mut self, class: usize, block: B) {
        self.free[class].push(block);
    }

    /// Books a block of this class that was allocated from the system.
    pub fn reserve(&mut self, class: usize) {
        self.account.set_reserved(self.stats().reserved + Self::size_of(class));
    }

    /// Removes and returns all free blocks with their classes, to be returned to the system.
    pub fn drain(&mut self) -> Vec<(usize, B)> {
        let lists = self.free.iter_mut().enumerate();
        let blocks: Vec<(usize, B)> = lists.flat_map(|(c, list)| list.drain(..).map(move |b| (c, b))).collect();
        let bytes: usize = blocks.iter().map(|(c, _)| Self::size_of(*c)).sum();
        self.account.set_reserved(self.stats().reserved - bytes);
        blocks
    }

    /// Books `bytes` under a category, as in use from now on.
    pub fn book(&mut self, bytes: usize, use_: MemoryCategory) {
        self.account.book(bytes, use_);
    }

    /// Books `bytes` that are no longer in use.
    pub fn unbook(&mut self, bytes: usize, use_: MemoryCategory) {
        self.account.unbook(bytes, use_);
    }

    /// The memory account of this pool.
    pub fn stats(&self) -> &MemoryStats {
        self.account.stats()
    }

    /// The report on the memory that this pool holds.
    pub fn report(&self) -> MemoryReport {
        let free = self.free.iter().enumerate().filter(|(_, blocks)| !blocks.is_empty());
        let sizes = free.map(|(class, blocks)| (Self::size_of(class), blocks.len()));
        let (kept, largest_kept) = sizes.fold((0, 0), |(sum, _), (size, count)| (sum + size * count, size));
        MemoryReport { stats: self.stats().clone(), kept, largest_kept, ..MemoryReport::default() }
    }

    /// Resets peaks to the bytes that are live now.
    pub fn reset_peak(&mut self) {
        self.account.reset_peak();
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
        for _ in 0..2 {
            pool.reserve(2);
            pool.put(2, "smaller");
        }
        let (report, sizes) = (pool.report(), [2, 4].map(Pool::<()>::size_of));
        assert_eq!((report.kept, report.largest_kept), (2 * sizes[0] + sizes[1], sizes[1]));
        assert_eq!(pool.take_exactly(2), Some("smaller"));
        pool.put(2, "smaller");
        assert_eq!((pool.drain().len(), pool.stats().reserved), (3, 0));
        pool.reserve(4);
        pool.put(4, "block");
        assert_eq!((pool.drain(), pool.stats().reserved), (vec![(4, "block")], 0));
    }
}
