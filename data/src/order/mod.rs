//! Orders: the example at each position of an epoch, as a pure function of a seed and the epoch.
//!
//! An order alone decides the examples of a batch. At step `s` a [loader](crate::Loader) reads positions
//! `[s·G, (s+1)·G)` of the order, where `G` is the global batch, and hands each rank its share. No number of ranks or
//! workers, and no restart, changes a batch.

mod buckets;
mod first;
mod mixture;
mod permutation;
mod weighted;

use std::ops::Range;

pub use buckets::LengthBuckets;
pub(crate) use first::FirstPositions;
pub use mixture::Mixture;
pub use permutation::KeyedPermutation;
pub use weighted::WeightedOrder;

/// An order of examples: the example at each position, for every epoch.
pub trait Order: Send + Sync {
    /// The number of positions in an epoch.
    fn len(&self) -> u64;

    /// Tells whether an epoch has no position.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The examples at these positions of an epoch. The positions are below [`len`](Order::len).
    fn indices(&self, epoch: u64, positions: Range<u64>) -> Vec<u64>;

    /// The reading number of the example at each of these positions. Example and reading are the key of its random
    /// values, such as those of [`augment`](crate::Loader::augment). `None`, the default, is the epoch for all
    /// positions. An order whose epochs can hold an example twice must override this.
    fn readings(&self, epoch: u64, positions: Range<u64>) -> Option<Vec<u64>> {
        let _ = (epoch, positions);
        None
    }

    /// The order in a few words, for the note in a checkpoint. Equal words must mean equal orders.
    fn describe(&self) -> String;
}

/// The dataset's own order in every epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequentialOrder {
    len: u64,
}

impl SequentialOrder {
    /// The order of `len` examples.
    pub fn new(len: u64) -> Self {
        SequentialOrder { len }
    }
}

impl Order for SequentialOrder {
    fn len(&self) -> u64 {
        self.len
    }

    fn indices(&self, _epoch: u64, positions: Range<u64>) -> Vec<u64> {
        positions.collect()
    }

    fn describe(&self) -> String {
        format!("{} in order", self.len)
    }
}

/// A random order of all examples, each once, which differs from epoch to epoch. It is a [`KeyedPermutation`], so that
/// 10⁹ examples take no memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shuffled {
    len: u64,
    seed: u64,
}

impl Shuffled {
    /// Shuffles `len` examples by `seed`.
    pub fn new(len: u64, seed: u64) -> Self {
        Shuffled { len, seed }
    }
}

impl Order for Shuffled {
    fn len(&self) -> u64 {
        self.len
    }

    fn indices(&self, epoch: u64, positions: Range<u64>) -> Vec<u64> {
        let permutation = KeyedPermutation::new(self.len, self.seed, epoch);
        positions.map(|position| permutation.number(position)).collect()
    }

    fn describe(&self) -> String {
        format!("{} shuffled seed {}", self.len, self.seed)
    }
}

impl<O: Order + ?Sized> Order for std::sync::Arc<O> {
    fn len(&self) -> u64 {
        (**self).len()
    }

    fn indices(&self, epoch: u64, positions: Range<u64>) -> Vec<u64> {
        (**self).indices(epoch, positions)
    }

    fn readings(&self, epoch: u64, positions: Range<u64>) -> Option<Vec<u64>> {
        (**self).readings(epoch, positions)
    }

    fn describe(&self) -> String {
        (**self).describe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_epoch_has_each_example_once() {
        for order in [&SequentialOrder::new(37) as &dyn Order, &Shuffled::new(37, 4)] {
            for epoch in 0..3 {
                let mut all = order.indices(epoch, 0..20);
                all.extend(order.indices(epoch, 20..37));
                all.sort_unstable();
                assert!(all.into_iter().eq(0..37), "{}", order.describe());
            }
        }
    }

    #[test]
    fn pieces_are_pieces_of_the_whole() {
        let order = Shuffled::new(50, 9);
        let whole = order.indices(2, 0..50);
        assert_eq!(order.indices(2, 13..29), whole[13..29]);
        assert_ne!(order.indices(3, 0..50), whole);
        assert!(SequentialOrder::new(0).is_empty());
    }
}
