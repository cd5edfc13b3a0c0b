//! Races: the last accesses of each unit of memory, and whether a further one is ordered after them.
//!
//! A barrier begins a new epoch of its block. Two accesses are ordered if one thread makes both, or if a block makes the
//! second in a later epoch. That is independent of the order in which warps happen to run.

/// The block, the epoch and the thread of an access; all zeros stand for none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Stamp(u64);

/// Epochs take 20 bits, and threads 12.
const EPOCH: u32 = 12;
/// The epoch of a copy that is under way: no access is ordered after it.
const UNDER_WAY: u32 = (1 << 20) - 1;
/// Several threads.
const MANY: u32 = 0x7ff;
/// The bit of an atomic operation, beside its thread.
const ATOMIC: u32 = 0x800;
/// Several blocks.
const MANY_BLOCKS: u32 = u32::MAX;

impl Stamp {
    fn of(block: u32, epoch: u32, thread: u32) -> Stamp {
        Stamp(u64::from(block) << 32 | u64::from(epoch) << EPOCH | u64::from(thread))
    }

    /// An access of a thread of a block.
    pub(super) fn new(block: u32, epoch: u32, thread: u32) -> Stamp {
        Stamp::of(block, epoch % UNDER_WAY, thread + 1)
    }

    /// The atomic operation of an access.
    pub(super) fn atomic(self) -> Stamp {
        Stamp(self.0 | u64::from(ATOMIC))
    }

    /// The copy that an access has begun.
    pub(super) fn under_way(self) -> Stamp {
        Stamp::of(self.block(), UNDER_WAY, self.thread())
    }

    /// The access of a unit beside the threads: only a barrier orders it after an access of any of them.
    pub(super) fn by_unit(self) -> Stamp {
        Stamp::of(self.block(), self.epoch(), MANY)
    }

    pub(super) fn block(self) -> u32 {
        (self.0 >> 32) as u32
    }

    fn epoch(self) -> u32 {
        (self.0 as u32) >> EPOCH
    }

    fn thread(self) -> u32 {
        self.0 as u32 & MANY
    }

    /// The thread of an access that is not under way.
    pub(super) fn single_thread(self) -> Option<u32> {
        (self.epoch() != UNDER_WAY && self.thread() != MANY).then(|| self.thread() - 1)
    }

    pub(super) fn is_none(self) -> bool {
        self.0 == 0
    }

    /// Whether an access is ordered before another.
    fn is_before(self, other: Stamp) -> bool {
        let is_same = (self.0 ^ other.0) & !u64::from(ATOMIC) == 0;
        self.is_none() || is_same || self.block() == other.block() && self.epoch() < other.epoch()
    }

    fn is_atomic(self) -> bool {
        self.0 as u32 & ATOMIC != 0
    }

    /// The access in words.
    fn words(self, access: &str) -> String {
        let by = match self.thread() {
            _ if self.is_atomic() => "an atomic operation".into(),
            MANY => "several threads".into(),
            thread => format!("thread {}", thread - 1),
        };
        let of =
            if self.block() == MANY_BLOCKS { "of several blocks".into() } else { format!("of block {}", self.block()) };
        match self.epoch() {
            UNDER_WAY => format!("an asynchronous copy by {by} {of}, which is under way"),
            _ => format!("{access} by {by} {of}"),
        }
    }
}

/// The last accesses of a unit of memory.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct History {
    pub write: Stamp,
    pub read: Stamp,
}

impl History {
    /// Notes a read; returns the earlier access that it races with.
    #[inline]
    pub(super) fn note_read(&mut self, now: Stamp) -> Result<(), String> {
        if !self.write.is_before(now) {
            return Err(self.write.words("a write"));
        }
        if self.read.is_before(now) {
            self.read = now;
        } else if self.read.block() == now.block() {
            self.read = Stamp::of(now.block(), now.epoch(), MANY);
        } else {
            self.read = Stamp::of(MANY_BLOCKS, 0, MANY);
        }
        Ok(())
    }

    /// Notes a write; returns the earlier access that it races with.
    #[inline]
    pub(super) fn note_write(&mut self, now: Stamp) -> Result<(), String> {
        if !self.write.is_before(now) {
            return Err(self.write.words("a write"));
        }
        if !self.read.is_before(now) {
            return Err(self.read.words("a read"));
        }
        *self = History { write: now, read: Stamp::default() };
        Ok(())
    }

    /// Notes an atomic operation, which races with other accesses alone.
    pub(super) fn note_atomic(&mut self, now: Stamp) -> Result<(), String> {
        let now = now.atomic();
        if !self.write.is_atomic() {
            return self.note_write(now);
        }
        if !self.read.is_before(now) {
            return Err(self.read.words("a read"));
        }
        self.write = match self.write.block() == now.block() {
            _ if self.write.is_before(now) => now,
            true => Stamp::of(now.block(), now.epoch(), MANY).atomic(),
            false => Stamp::of(MANY_BLOCKS, 0, MANY).atomic(),
        };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_barrier_orders_the_threads_of_a_block_and_nothing_orders_blocks() {
        let mut history = History::default();
        history.note_write(Stamp::new(0, 1, 3)).unwrap();
        history.note_read(Stamp::new(0, 1, 3)).unwrap();
        assert_eq!(history.note_read(Stamp::new(0, 1, 4)).unwrap_err(), "a write by thread 3 of block 0");
        history.note_read(Stamp::new(0, 2, 4)).unwrap();
        history.note_read(Stamp::new(0, 2, 5)).unwrap();
        assert_eq!(history.note_write(Stamp::new(0, 2, 5)).unwrap_err(), "a read by several threads of block 0");
        history.note_write(Stamp::new(0, 3, 5)).unwrap();
        assert!(history.note_read(Stamp::new(1, 9, 5)).is_err());
    }

    #[test]
    fn readers_of_several_blocks_exclude_every_writer() {
        let mut history = History::default();
        history.note_read(Stamp::new(0, 1, 0)).unwrap();
        history.note_read(Stamp::new(1, 1, 0)).unwrap();
        assert_eq!(history.note_write(Stamp::new(1, 2, 0)).unwrap_err(), "a read by several threads of several blocks");
    }

    #[test]
    fn atomic_operations_race_with_plain_accesses_alone() {
        let mut history = History::default();
        history.note_atomic(Stamp::new(0, 1, 0)).unwrap();
        history.note_atomic(Stamp::new(1, 1, 7)).unwrap();
        history.note_atomic(Stamp::new(0, 1, 1)).unwrap();
        assert!(history.note_read(Stamp::new(0, 5, 0)).unwrap_err().contains("an atomic operation of several blocks"));
    }

    #[test]
    fn a_thread_may_mix_atomic_operations_and_its_own_accesses() {
        let (mut history, now) = (History::default(), Stamp::new(0, 1, 3));
        history.note_write(now).unwrap();
        history.note_atomic(now).unwrap();
        history.note_read(now).unwrap();
        history.note_atomic(now).unwrap();
        history.note_write(now).unwrap();
        history.note_atomic(now).unwrap();
        // Another thread joins: neither may look before a barrier.
        assert!(history.clone().note_read(Stamp::new(0, 1, 4)).is_err());
        history.note_atomic(Stamp::new(0, 1, 4)).unwrap();
        assert!(history.clone().note_read(now).is_err() && history.clone().note_read(Stamp::new(0, 1, 4)).is_err());
        history.note_read(Stamp::new(0, 2, 4)).unwrap();
    }

    #[test]
    fn a_copy_under_way_excludes_even_its_own_thread() {
        let (mut history, now) = (History::default(), Stamp::new(0, 1, 2));
        history.note_write(now.under_way()).unwrap();
        let words = "an asynchronous copy by thread 2 of block 0, which is under way";
        assert_eq!(history.note_read(now).unwrap_err(), words);
        assert_eq!(history.note_write(Stamp::new(0, 7, 2)).unwrap_err(), words);
    }
}
