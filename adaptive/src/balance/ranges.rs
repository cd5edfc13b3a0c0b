//! The assignment of batches of a common order to ranks.

use std::ops::Range;

use super::shares::apportioned;

/// A position in an epoch's batches, from which ranks take ranges in turn. One rank reads each batch, once, whatever
/// the counts.
///
/// ```
/// use adaptive::balance::BatchRanges;
/// let mut ranges = BatchRanges::new(10);
/// assert_eq!(ranges.next(&[3, 1]).unwrap(), [0..3, 3..4]);
/// assert_eq!(ranges.next(&[3, 1]).unwrap(), [4..7, 7..8]);
/// // What is left, shared out by the counts.
/// assert_eq!(ranges.next(&[3, 1]).unwrap(), [8..9, 9..10]);
/// assert!(ranges.next(&[3, 1]).is_none());
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchRanges {
    batches: u64,
    next: u64,
}

impl BatchRanges {
    /// All of `batches` batches.
    pub fn new(batches: u64) -> Self {
        BatchRanges { batches, next: 0 }
    }

    /// The batches from `next` on, to resume an epoch.
    pub fn from(batches: u64, next: u64) -> Self {
        BatchRanges { batches, next: next.min(batches) }
    }

    /// The first batch that is not taken yet.
    pub fn position(&self) -> u64 {
        self.next
    }

    /// The next range of each rank: `counts[r]` batches for rank `r`, or the rest of the batches shared out by
    /// `counts`. None when all are taken.
    pub fn next(&mut self, counts: &[usize]) -> Option<Vec<Range<u64>>> {
        let left = usize::try_from(self.batches - self.next).unwrap_or(usize::MAX);
        if left == 0 || counts.is_empty() {
            return None;
        }
        let total: usize = counts.iter().sum();
        let ratios = || counts.iter().map(|&count| count as f64 / total as f64).collect::<Vec<_>>();
        let taken = if left < total { apportioned(left, &ratios()) } else { counts.to_vec() };
        let range = |count: usize| {
            let first = self.next;
            self.next += count as u64;
            first..self.next
        };
        Some(taken.into_iter().map(range).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_batch_is_taken_once() {
        for batches in [1, 2, 7, 40, 41] {
            let (mut ranges, mut seen) = (BatchRanges::new(batches), Vec::new());
            let counts = [[1, 1, 1], [5, 2, 1], [3, 3, 9]];
            for k in 0.. {
                let Some(taken) = ranges.next(&counts[k % 3]) else { break };
                seen.extend(taken.into_iter().flatten());
            }
            assert_eq!(seen, (0..batches).collect::<Vec<_>>());
        }
        assert_eq!(BatchRanges::from(10, 4).next(&[2, 1]), Some(vec![4..6, 6..7]));
        assert_eq!(BatchRanges::new(9).next(&[8, 1, 1]), Some(vec![0..7, 7..8, 8..9]), "by the counts, but one each");
    }
}
