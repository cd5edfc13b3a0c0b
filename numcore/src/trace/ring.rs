//! The memory of one thread's spans: a ring that the thread writes, and that the end of a recording reads without a
//! lock.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};

/// The number of words of a record.
pub(super) const WORDS: usize = 5;

/// The records of one thread, the most recent ones if more were written than fit.
#[derive(Debug)]
pub(super) struct Ring {
    /// The name of the thread.
    pub thread: String,
    words: Box<[AtomicU64]>,
    /// The number of records whose writing has begun.
    begun: AtomicU64,
    /// The number of records written so far.
    written: AtomicU64,
    /// The index of the word at which the next record begins.
    at: AtomicUsize,
}

impl Ring {
    /// A ring for the thread of this name, with room for `records` records, at least one.
    pub(super) fn new(thread: String, records: usize) -> Self {
        let words = (0..records.max(1) * WORDS).map(|_| AtomicU64::new(0)).collect();
        Ring { thread, words, begun: AtomicU64::new(0), written: AtomicU64::new(0), at: AtomicUsize::new(0) }
    }

    fn records(&self) -> u64 {
        (self.words.len() / WORDS) as u64
    }

    /// Writes a record, over the oldest one if the ring is full. Only the ring's own thread may call it.
    #[inline]
    pub(super) fn push(&self, record: [u64; WORDS]) {
        let (at, count) = (self.at.load(Ordering::Relaxed), self.written.load(Ordering::Relaxed) + 1);
        self.begun.store(count, Ordering::Relaxed);
        // A reader that sees a word of this record then also sees that its writing has begun.
        fence(Ordering::Release);
        for (word, value) in self.words[at..at + WORDS].iter().zip(record) {
            word.store(value, Ordering::Relaxed);
        }
        // The wrap-around uses no division, which would take as long as the rest.
        let next = at + WORDS;
        self.at.store(if next == self.words.len() { 0 } else { next }, Ordering::Relaxed);
        self.written.store(count, Ordering::Release);
    }

    /// The records, oldest first, and the number of overwritten ones. A record overwritten during the read counts as
    /// overwritten.
    pub(super) fn read(&self) -> (Vec<[u64; WORDS]>, u64) {
        let written = self.written.load(Ordering::Acquire);
        let first = written.saturating_sub(self.records());
        let record = |n: u64| {
            let at = (n % self.records()) as usize * WORDS;
            std::array::from_fn(|k| self.words[at + k].load(Ordering::Relaxed))
        };
        let mut records: Vec<[u64; WORDS]> = (first..written).map(record).collect();
        fence(Ordering::Acquire);
        // The thread may be writing one more record, over the oldest.
        let begun = self.begun.load(Ordering::Relaxed);
        let sound = begun.saturating_sub(self.records()).clamp(first, written);
        records.drain(..(sound - first) as usize);
        (records, sound)
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, thread};

    use super::*;

    #[test]
    fn the_last_records_are_kept() {
        let ring = Ring::new("t".into(), 3);
        for n in 0..5 {
            assert_eq!(ring.read().0.len() as u64, n.min(3));
            ring.push([n; WORDS]);
        }
        assert_eq!(ring.read(), (vec![[2; WORDS], [3; WORDS], [4; WORDS]], 2));
    }

    #[test]
    fn what_is_read_while_it_is_written_is_whole() {
        let ring = Arc::new(Ring::new("t".into(), 8));
        let own = Arc::clone(&ring);
        let writer = thread::spawn(move || (0..200_000).for_each(|n| own.push([n; WORDS])));
        while !writer.is_finished() {
            let (records, lost) = ring.read();
            for (n, record) in (lost..).zip(&records) {
                assert_eq!(*record, [n; WORDS]);
            }
        }
        writer.join().unwrap();
        assert_eq!(ring.read().1, 200_000 - 8);
    }
}
