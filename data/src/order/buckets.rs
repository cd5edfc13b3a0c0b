//! Batches of examples of similar lengths, so that little of a padded batch is padding.

use std::{hash::Hasher, ops::Range, sync::Arc};

use numcore::{Error, Fnv1a, Result, Within};

use super::Order;
use crate::random::keyed;

/// An order that puts examples of similar lengths side by side. Every `window` batches of the inner order are sorted by
/// length and cut into batches, which are then put in a random order. Every example stays in its window, so an epoch
/// still has each example once.
///
/// Batches have similar lengths only if the loader's global batch is the `batch` given to [`new`](LengthBuckets::new).
///
/// ```
/// use data::order::{LengthBuckets, Order, Shuffled};
/// # fn main() -> numcore::Result<()> {
/// let lengths = |example: u64| (example % 10) as usize;
/// let order = LengthBuckets::new(Shuffled::new(1000, 7), 4, 40, 7, lengths)?;
/// let batch = order.indices(0, 8..12);
/// assert!(batch.iter().map(|&i| lengths(i)).max() <= batch.iter().map(|&i| lengths(i) + 1).min());
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct LengthBuckets<O> {
    inner: O,
    batch: u64,
    window: u64,
    seed: u64,
    lengths: Arc<dyn Fn(u64) -> usize + Send + Sync>,
    /// A digest of the lengths of some examples.
    digest: u64,
}

/// The number of examples whose lengths distinguish one order from another.
const SAMPLED: u64 = 1 << 10;

impl<O: Order> LengthBuckets<O> {
    /// Reorders `inner` in windows of `window` batches of `batch` examples. `lengths` gives the length of an example.
    ///
    /// # Errors
    /// Fails if `batch` or `window` is 0, or their product exceeds a `u64`.
    #[track_caller]
    pub fn new(
        inner: O,
        batch: u64,
        window: u64,
        seed: u64,
        lengths: impl Fn(u64) -> usize + Send + Sync + 'static,
    ) -> Result<Self> {
        const OP: &str = "LengthBuckets";
        let Some(most) = u64::MAX.checked_div(batch) else {
            return Err(Error::range(OP, "batch", batch, "at least 1")).at_caller();
        };
        if window == 0 || window > most {
            return Err(Error::range(OP, "window", window, format!("in 1..={most}, where batches are of {batch}")))
                .at_caller();
        }
        let digest = digest_of(&inner, &lengths);
        Ok(LengthBuckets { inner, batch, window: batch * window, seed, lengths: Arc::new(lengths), digest })
    }

    /// The window that begins at position `start`, sorted and shuffled: each example's index and reading.
    fn sorted(&self, epoch: u64, start: u64) -> Vec<(u64, u64)> {
        let end = start.saturating_add(self.window).min(self.inner.len());
        let readings = self.inner.readings(epoch, start..end).unwrap_or_else(|| vec![epoch; (end - start) as usize]);
        let mut read: Vec<(u64, u64)> = self.inner.indices(epoch, start..end).into_iter().zip(readings).collect();
        // The sort is stable: equal lengths stay in the random order they had.
        read.sort_by_key(|&(index, _)| (self.lengths)(index));
        let mut batches: Vec<&[(u64, u64)]> = read.chunks(self.batch as usize).collect();
        // A short last batch stays last: before others it would shift their boundaries.
        let whole = read.len() / self.batch as usize;
        keyed(self.seed, epoch, start).shuffle(&mut batches[..whole]);
        batches.concat()
    }

    fn read(&self, epoch: u64, positions: Range<u64>) -> Vec<(u64, u64)> {
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
}

/// A digest of the lengths of examples spread over the order. It distinguishes orders of other lengths without reading
/// all of them.
fn digest_of(inner: &impl Order, lengths: &impl Fn(u64) -> usize) -> u64 {
    let sampled = inner.len().min(SAMPLED);
    let mut digest = Fnv1a::new();
    for k in 0..sampled {
        let at = (u128::from(k) * u128::from(inner.len()) / u128::from(sampled)) as u64;
        let length = inner.indices(0, at..at + 1).first().map_or(0, |&index| lengths(index));
        digest.write_u64(length as u64);
    }
    digest.finish()
}

impl<O: Order> Order for LengthBuckets<O> {
    fn len(&self) -> u64 {
        self.inner.len()
    }

    fn indices(&self, epoch: u64, positions: Range<u64>) -> Vec<u64> {
        self.read(epoch, positions).into_iter().map(|(index, _)| index).collect()
    }

    fn readings(&self, epoch: u64, positions: Range<u64>) -> Option<Vec<u64>> {
        self.inner.readings(epoch, 0..0)?;
        Some(self.read(epoch, positions).into_iter().map(|(_, reading)| reading).collect())
    }

    fn describe(&self) -> String {
        let LengthBuckets { inner, batch, window, seed, digest, .. } = self;
        format!("{} bucketed by {batch} in {window} seed {seed} lengths {digest:016x}", inner.describe())
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
        let order = LengthBuckets::new(plain, 8, 25, 2, length).unwrap();
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
        let order = LengthBuckets::new(Shuffled::new(100, 2), 8, 100, 2, length).unwrap();
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
        let order =
            LengthBuckets::new(crate::order::SequentialOrder::new(80), 2, 20, 3, |i| (i % 40) as usize).unwrap();
        let lengths =
            |epoch, start| order.indices(epoch, start..start + 40).into_iter().map(|i| i % 40).collect::<Vec<_>>();
        let (first, second, next) = (lengths(0, 0), lengths(0, 40), lengths(1, 0));
        assert!(first != second && first != next && second != next);
    }

    #[test]
    fn other_lengths_are_another_order() {
        let of = |lengths: fn(u64) -> usize| LengthBuckets::new(Shuffled::new(5000, 1), 4, 10, 1, lengths).unwrap();
        assert_eq!(of(length).describe(), of(length).describe());
        assert_ne!(of(length).describe(), of(|example| length(example) + 1).describe());
        assert!(LengthBuckets::new(Shuffled::new(0, 1), 4, 10, 1, length).is_ok());
    }

    #[test]
    fn readings_go_with_their_examples() {
        let mixture = crate::order::Mixture::new(&[(90, 1.0), (10, 1.0)], 7).unwrap().epoch_of(60);
        let order = LengthBuckets::new(mixture.clone(), 4, 5, 1, length).unwrap();
        let pairs = |order: &dyn Order| {
            let mut pairs: Vec<(u64, u64)> =
                order.indices(1, 0..60).into_iter().zip(order.readings(1, 0..60).unwrap()).collect();
            pairs.sort_unstable();
            pairs
        };
        assert_eq!(pairs(&order), pairs(&mixture));
    }

    #[test]
    fn nothing_is_not_a_window() {
        for (batch, window, says) in
            [(0, 3, "batch is 0"), (3, 0, "window is 0"), (u64::MAX, 2, "window is 2, and must be in 1..=1")]
        {
            let error = LengthBuckets::new(Shuffled::new(9, 0), batch, window, 0, length).map(drop).unwrap_err();
            assert!(error.to_string().contains(says), "{error}");
        }
    }
}
