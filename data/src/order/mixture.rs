//! Weighted mixtures: every stretch of the order holds each source's share of examples.

use std::ops::Range;

use numcore::{Error, Result, Within};

use super::{KeyedPermutation, Order};

/// The number of positions after which the pattern of sources repeats. Weights are rounded to multiples of its inverse.
const PERIOD: usize = 1 << 12;

/// An order over several sources that stand one after another, as in [`Concat`](crate::Concat). At each position the
/// source furthest behind its weight is read. Each source has its own random order, and starts over in another one
/// after a complete pass.
///
/// Positions count on over epochs, so a source larger than its share of an epoch continues in the next.
///
/// ```
/// use data::order::{Mixture, Order};
/// # fn main() -> numcore::Result<()> {
/// // Of 90 and 10 examples, one in two from each: the second source is read five times as often.
/// let order = Mixture::new(&[(90, 0.5), (10, 0.5)], 7)?.epoch_of(20);
/// let epoch = order.indices(0, 0..20);
/// assert_eq!(epoch.iter().filter(|&&example| example >= 90).count(), 10);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Mixture {
    sources: Vec<Source>,
    /// The source at each position of the period, and the number of its examples earlier in the period.
    pattern: Vec<(u32, u32)>,
    seed: u64,
    epoch: u64,
}

#[derive(Clone, Debug, PartialEq)]
struct Source {
    len: u64,
    weight: f64,
    /// The index of its first example among those of all sources.
    start: u64,
    /// The number of its positions in a period.
    per_period: u64,
}

impl Mixture {
    /// Mixes sources, each given as its number of examples and its weight. Weights need not sum to 1; a source with
    /// weight 0 is not read. An epoch has as many positions as there are examples, unless
    /// [`epoch_of`](Mixture::epoch_of) sets another number.
    ///
    /// # Errors
    /// Fails if a weight is negative or not finite, all are 0, or one is less than a 4096th of their sum. A source with
    /// a weight but no example is an error too, and so is a total length beyond a `u64`.
    #[track_caller]
    pub fn new(sources: &[(u64, f64)], seed: u64) -> Result<Self> {
        let total = sources.iter().fold(0.0, |sum, (_, weight)| sum + weight);
        check(sources, total).at_caller()?;
        let (pattern, taken) = pattern(&sources.iter().map(|(_, weight)| weight / total).collect::<Vec<_>>());
        let mut start = 0;
        let mut place = |(&(len, weight), &per_period): (&(u64, f64), &u64)| {
            let source = Source { len, weight, start, per_period };
            start += len;
            source
        };
        let placed: Vec<Source> = sources.iter().zip(&taken).map(&mut place).collect();
        if let Some(i) = placed.iter().position(|s| s.weight > 0.0 && s.per_period == 0) {
            let allowed = format!("0 or at least a {PERIOD}th of {total}, the sum of all: source {i}");
            return Err(Error::range("Mixture", "weight", placed[i].weight, allowed)).at_caller();
        }
        Ok(Mixture { sources: placed, pattern, seed, epoch: start })
    }

    /// Sets the number of positions in an epoch.
    pub fn epoch_of(mut self, positions: u64) -> Self {
        self.epoch = positions;
        self
    }

    /// The number of the source that holds an example of this order.
    pub fn source_of(&self, example: u64) -> usize {
        self.sources.partition_point(|source| source.start + source.len <= example)
    }

    /// The source of a position counted over all epochs, the number of its complete passes before, and the place in
    /// this pass.
    fn place(&self, count: u128) -> (usize, u64, u64) {
        let (round, at) = (count / PERIOD as u128, (count % PERIOD as u128) as usize);
        let (number, before) = self.pattern[at];
        let source = &self.sources[number as usize];
        let drawn = round * u128::from(source.per_period) + u128::from(before);
        let (pass, place) = (drawn / u128::from(source.len), drawn % u128::from(source.len));
        (number as usize, pass as u64, place as u64)
    }

    fn index(&self, count: u128) -> u64 {
        let (number, pass, place) = self.place(count);
        let source = &self.sources[number];
        // Sources of one length must not be read in one order: the source is part of the key.
        let key = pass.wrapping_mul(self.sources.len() as u64).wrapping_add(number as u64);
        source.start + KeyedPermutation::new(source.len, self.seed, key).number(place)
    }
}

impl Order for Mixture {
    fn len(&self) -> u64 {
        self.epoch
    }

    fn indices(&self, epoch: u64, positions: Range<u64>) -> Vec<u64> {
        let before = u128::from(epoch) * u128::from(self.epoch);
        positions.map(|position| self.index(before + u128::from(position))).collect()
    }

    /// The number of the pass over its source: an example is read once in each.
    fn readings(&self, epoch: u64, positions: Range<u64>) -> Option<Vec<u64>> {
        let before = u128::from(epoch) * u128::from(self.epoch);
        Some(positions.map(|position| self.place(before + u128::from(position)).1).collect())
    }

    fn describe(&self) -> String {
        let sources: Vec<String> = self.sources.iter().map(|s| format!("{}*{}", s.len, s.weight)).collect();
        format!("{} mixture {} seed {}", self.epoch, sources.join("+"), self.seed)
    }
}

fn check(sources: &[(u64, f64)], total: f64) -> Result<()> {
    const OP: &str = "Mixture";
    for (i, &(len, weight)) in sources.iter().enumerate() {
        if !weight.is_finite() || weight < 0.0 {
            return Err(Error::range(OP, "weight", weight, format!("a finite number of 0 or more: source {i}")));
        }
        if weight > 0.0 && len == 0 {
            let allowed = format!("at least 1: source {i} has weight {weight}");
            return Err(Error::range(OP, "number of examples", len, allowed));
        }
    }
    let all = sources.iter().try_fold(0u64, |sum, (len, _)| sum.checked_add(*len));
    if !total.is_finite() || total <= 0.0 {
        return Err(Error::range(OP, "sum of all weights", total, "finite and above 0"));
    }
    all.map(|_| ()).ok_or_else(|| Error::argument(OP, "the sources have more examples than a `u64` counts"))
}

/// One period, and each source's number of positions in it. Each position takes the first source with the largest
/// `weight · (position + 1) − taken`.
fn pattern(weights: &[f64]) -> (Vec<(u32, u32)>, Vec<u64>) {
    let mut taken = vec![0u64; weights.len()];
    let mut next = |position: usize| {
        let behind = |i: usize| weights[i] * (position + 1) as f64 - taken[i] as f64;
        let readable = (0..weights.len()).filter(|&i| weights[i] > 0.0);
        let furthest = readable.reduce(|a, b| if behind(b) > behind(a) { b } else { a }).unwrap_or(0);
        taken[furthest] += 1;
        (furthest as u32, (taken[furthest] - 1) as u32)
    };
    let places = (0..PERIOD).map(&mut next).collect();
    (places, taken)
}

#[cfg(test)]
mod tests {
    use numcore::ErrorKind;

    use super::*;

    fn counts(order: &Mixture, epochs: Range<u64>) -> Vec<u64> {
        let mut counts = vec![0; order.sources.len()];
        for epoch in epochs {
            order.indices(epoch, 0..order.len()).iter().for_each(|&i| counts[order.source_of(i)] += 1);
        }
        counts
    }

    #[test]
    fn every_stretch_has_the_weights() {
        let order = Mixture::new(&[(1000, 5.0), (700, 3.0), (300, 2.0)], 1).unwrap();
        let all = order.indices(0, 0..2000);
        let mut seen = [0f64; 3];
        for (i, &example) in all.iter().enumerate() {
            seen[order.source_of(example)] += 1.0;
            for (seen, weight) in seen.iter().zip([0.5, 0.3, 0.2]) {
                assert!((seen - weight * (i + 1) as f64).abs() <= 1.0, "after {i}: {seen} of {weight}");
            }
        }
    }

    #[test]
    fn a_source_is_read_whole_before_it_is_read_again() {
        let order = Mixture::new(&[(90, 1.0), (10, 1.0)], 7).unwrap().epoch_of(40);
        // The small source has 20 positions in an epoch: each example twice, in two orders.
        let small: Vec<u64> = order.indices(3, 0..40).into_iter().filter(|&i| i >= 90).collect();
        for pass in small.chunks(10) {
            let mut pass = pass.to_vec();
            pass.sort_unstable();
            assert!(pass.into_iter().eq(90..100));
        }
        assert_ne!(small[..10], small[10..]);
        // The large source continues from epoch to epoch: 4.5 epochs read it completely.
        let mut large: Vec<u64> = (0..5).flat_map(|e| order.indices(e, 0..40)).filter(|&i| i < 90).take(90).collect();
        large.sort_unstable();
        assert!(large.into_iter().eq(0..90));
    }

    #[test]
    fn no_reading_of_an_example_comes_twice() {
        let order = Mixture::new(&[(90, 1.0), (10, 1.0)], 7).unwrap().epoch_of(40);
        let mut all = Vec::new();
        for epoch in 0..6 {
            all.extend(order.indices(epoch, 0..40).into_iter().zip(order.readings(epoch, 0..40).unwrap()));
        }
        assert!(all.iter().any(|(_, reading)| *reading == 11), "the small source is read twice in each of six epochs");
        all.sort_unstable();
        assert!(all.windows(2).all(|pair| pair[0] != pair[1]));
    }

    #[test]
    fn shares_hold_over_many_periods() {
        let order = Mixture::new(&[(11, 0.7), (13, 0.3)], 0).unwrap().epoch_of(PERIOD as u64 * 3);
        let seen = counts(&order, 5..6);
        assert!(seen[0].abs_diff(PERIOD as u64 * 21 / 10) <= 3, "{seen:?}");
        assert_eq!(counts(&Mixture::new(&[(5, 0.0), (4, 2.0)], 0).unwrap(), 0..4), [0, 36]);
    }

    #[test]
    fn sources_of_one_length_have_different_orders() {
        let order = Mixture::new(&[(50, 1.0), (50, 1.0)], 3).unwrap();
        let all = order.indices(0, 0..100);
        let [a, b] = [0, 1].map(|s| all.iter().filter(|&&i| i / 50 == s).map(|i| i % 50).collect::<Vec<_>>());
        assert_ne!(a, b);
    }

    #[test]
    fn what_cannot_be_mixed_is_refused() {
        for (sources, says) in [
            (vec![], "sum of all weights is 0"),
            (vec![(3, 0.0)], "sum of all weights is 0"),
            (vec![(3, -1.0), (3, 2.0)], "weight is -1, and must be a finite number of 0 or more: source 0"),
            (vec![(3, 1.0), (3, f64::NAN)], "source 1"),
            (vec![(0, 1.0)], "number of examples is 0"),
            (vec![(9, 1.0), (9, 1e-6)], "4096th"),
            (vec![(u64::MAX, 1.0), (2, 1.0)], "more examples"),
        ] {
            let error = Mixture::new(&sources, 0).unwrap_err();
            assert_eq!(matches!(error.kind(), ErrorKind::Range { .. }), says != "more examples", "{error}");
            let error = error.to_string();
            assert!(error.contains(says), "{error}");
        }
    }
}
