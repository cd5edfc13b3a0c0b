//! Batches of examples of like lengths, so that little of a padded batch is padding.

use std::{ops::Range, sync::Arc};

use numcore::{Error, Result};

use super::Order;
use crate::random::keyed;

/// Another order with examples of like lengths side by side: every `window` of its positions is sorted by length, cut into batches, and the batches
/// are put in a random order. Every example stays in its window, so an epoch still has each of them once.
///
/// Batches are of like lengths where the loader's global batch is the one given here.
///
/// ```
/// use data::order::{Buckets, Order, Shuffled};
/// # fn main() -> numcore::Result<()> {
/// let lengths = |example: u64| (example % 10) as usize;
/// let order = Buckets::new(Shuffled::new(1000, 7), 4, 40, 7, lengths)?;
/// let batch = order.indices(0, 8..12);
/// assert!(batch.iter().map(|&i| lengths(i)).max() <= batch.iter().map(|&i| lengths(i) + 1).min());
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Buckets<O> {
    inner: O,
    batch: u64,
    window: u64,
    seed: u64,
    lengths: Arc<dyn Fn(u64) -> usize + Send + Sync>,
}

impl<O: Order> Buckets<O> {
    /// `inner`, with windows of `window` batches of `batch` examples; `lengths` gives an example's length.
    ///
    /// # Errors
    /// If a batch or a window is empty.
    pub fn new(
        inner: O,
        batch: u64,
        window: u64,
        seed: u64,
        lengths: impl Fn(u64) -> usize + Send + Sync + 'static,
    ) -> Result<Self> {
        match batch.checked_mul(window) {
            None | Some(0) => {
                let why = format!("windows of {window} batches of {batch} examples: both must be at least 1");
                Err(Error::argument("Buckets", why))
            }
            Some(window) => Ok(Buckets { inner, batch, window, seed, lengths: Arc::new(lengths) }),
        }
    }

    /// The window that begins at `start`, in order.
    fn sorted(&self, epoch: u64, start: u64) -> Vec<u64> {
        let end = start.saturating_add(self.window).min(self.inner.len());
        let mut indices = self.inner.indices(epoch, start..end);
        // Stable: equal lengths stay in the random order they had.
        indices.sort_by_key(|&index| (self.lengths)(index));
        let mut batches: Vec<&[u64]> = indices.chunks(self.batch as usize).collect();
        // A short last batch stays last: before others it would shift their boundaries.
        let whole = indices.len() / self.batch as usize;
        keyed(self.seed, epoch, start).shuffle(&mut batches[..whole]);
        batches.concat()
    }
}

impl<O: Order> Order for Buckets<O> {
    fn len(&self) -> u64 {
        self.inner.len()
    }

    fn indices(&self, epoch: u64, positions: Range<u64>) -> Vec<u64> {
        let mut found = Vec::new();
        let mut at = positions.start;
        while at < positions.end {
            let start = at / self.window * self.window;
            let end = start.saturating_add(self.window).min(positions.end);
            let window = self.sorted(epoch, start);
            found.extend_from_slice(&window[(at - start) as usize..(end - start) as usize]);
            at = end;
        }
        found
    }

    fn describe(&self) -> String {
        format!("{} bucketed by {} in {} seed {}", self.inner.describe(), self.batch, self.window, self.seed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::order::Shuffled;

    fn length(example: u64) -> usize {
        (example * 7919 % 97) as usize
    }

    fn padding(order: &dyn Order, batch: u64) -> usize {
        let starts = (0..order.len()).step_by(batch as usize);
        let one = |start: u64| {
            let lengths: Vec<usize> =
                order.indices(1, start..(start + batch).min(order.len())).into_iter().map(length).collect();
            lengths.iter().max().unwrap_or(&0) * lengths.len() - lengths.iter().sum::<usize>()
        };
        starts.map(one).sum()
    }

    #[test]
    fn little_is_padded_and_nothing_is_lost() {
        let plain = Shuffled::new(1003, 2);
        let order = Buckets::new(plain, 8, 25, 2, length).unwrap();
        for epoch in 0..2 {
            let mut all = order.indices(epoch, 0..1003);
            assert_eq!(order.indices(epoch, 190..415), all[190..415], "over windows");
            all.sort_unstable();
            assert!(all.into_iter().eq(0..1003));
        }
        let (before, after) = (padding(&plain, 8), padding(&order, 8));
        assert!(after * 8 < before, "{before} before, {after} after");
    }

    #[test]
    fn short_batches_do_not_come_first() {
        let order = Buckets::new(Shuffled::new(100, 2), 8, 100, 2, length).unwrap();
        let lengths: Vec<usize> = order.indices(0, 0..100).into_iter().map(length).collect();
        let firsts: Vec<usize> = lengths.chunks(8).map(|batch| batch[0]).collect();
        assert!(!firsts.is_sorted(), "batches are in a random order: {firsts:?}");
        for batch in lengths.chunks(8) {
            assert!(batch.is_sorted(), "{batch:?}");
        }
    }

    #[test]
    fn every_window_of_every_epoch_has_its_own_order() {
        // Windows of 20 batches with the same lengths in each.
        let order = Buckets::new(crate::order::Sequential::new(80), 2, 20, 3, |i| (i % 40) as usize).unwrap();
        let lengths =
            |epoch, start| order.indices(epoch, start..start + 40).into_iter().map(|i| i % 40).collect::<Vec<_>>();
        let (first, second, next) = (lengths(0, 0), lengths(0, 40), lengths(1, 0));
        assert!(first != second && first != next && second != next);
    }

    #[test]
    fn nothing_is_not_a_window() {
        for (batch, window) in [(0, 3), (3, 0), (u64::MAX, 2)] {
            assert!(Buckets::new(Shuffled::new(9, 0), batch, window, 0, length).is_err());
        }
    }
}
