//! A random order of `0..n` that is computed place by place, in constant memory.
//!
//! A Feistel network whose halves are digits to an even base of about `√n` permutes slightly more than `n` numbers.
//! Results past `n` are permuted again until they fall below it (cycle-walking). Both steps are invertible, so `number`
//! and `place` cost the same. (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002.)

use numcore::rng::philox4x32_10;

/// The number of rounds of the network. Four are enough for large `n`. The orders of four or five numbers are equally
/// frequent only from eight on (`orders_of_a_few_numbers_are_equally_frequent`).
const ROUNDS: u32 = 8;

/// The last word of a counter in this file. Counters of [`numcore::rng::Philox`] end in 0, so no words are drawn twice.
const DOMAIN: u32 = 0x5045_0000;

/// A random order of the numbers below `n`, as a function of a key.
///
/// ```
/// use data::order::KeyedPermutation;
///
/// let order = KeyedPermutation::new(1_000_000_000, 7, 0);
/// let first = order.number(0);
/// assert_eq!(order.place(first), 0);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyedPermutation {
    n: u64,
    /// The base of the two digits: `base² ≥ n`. It is even: with an odd base every round is an even permutation of the
    /// pairs of digits, but half of all permutations are odd.
    base: u64,
    seed: [u32; 2],
    epoch: [u32; 2],
}

impl KeyedPermutation {
    /// The order of `n` numbers in `epoch`, for a seed.
    pub fn new(n: u64, seed: u64, epoch: u64) -> Self {
        KeyedPermutation { n, base: ceil_sqrt(n).max(1).next_multiple_of(2), seed: words(seed), epoch: words(epoch) }
    }

    /// The number of numbers: `n`.
    pub fn len(&self) -> u64 {
        self.n
    }

    /// Tells whether `n` is 0.
    pub fn is_empty(&self) -> bool {
        self.n == 0
    }

    /// The number at `place`; `place` itself if it is not below `n`.
    pub fn number(&self, place: u64) -> u64 {
        self.walk(place, Self::forward)
    }

    /// The place of `number`: the inverse of [`number`](KeyedPermutation::number).
    pub fn place(&self, number: u64) -> u64 {
        self.walk(number, Self::backward)
    }

    /// Applies the network until the result is below `n`. It permutes `base²` numbers, so a walk from below `n` meets
    /// such a number: at the latest its start.
    fn walk(&self, from: u64, network: fn(&Self, u64, u64) -> (u64, u64)) -> u64 {
        if from >= self.n {
            return from;
        }
        let (mut high, mut low) = (from / self.base, from % self.base);
        loop {
            (high, low) = network(self, high, low);
            // In 128 bits: for `n` near 2⁶⁴ the digits can stand for more than 64 bits hold.
            let number = u128::from(high) * u128::from(self.base) + u128::from(low);
            if number < u128::from(self.n) {
                return number as u64;
            }
        }
    }

    fn forward(&self, mut high: u64, mut low: u64) -> (u64, u64) {
        for round in 0..ROUNDS {
            let sum = high + self.drawn(low, round);
            (high, low) = (low, if sum >= self.base { sum - self.base } else { sum });
        }
        (high, low)
    }

    fn backward(&self, mut high: u64, mut low: u64) -> (u64, u64) {
        for round in (0..ROUNDS).rev() {
            let drawn = self.drawn(high, round);
            (high, low) = (if low >= drawn { low - drawn } else { low + self.base - drawn }, high);
        }
        (high, low)
    }

    /// A number below the base, drawn for a digit and a round.
    fn drawn(&self, digit: u64, round: u32) -> u64 {
        // The base is at most 2³², so a digit is one word.
        let [a, b, ..] = philox4x32_10([digit as u32, self.epoch[0], self.epoch[1], DOMAIN | round], self.seed);
        let wide = u64::from(a) | u64::from(b) << 32;
        ((u128::from(wide) * u128::from(self.base)) >> 64) as u64
    }
}

fn words(x: u64) -> [u32; 2] {
    [x as u32, (x >> 32) as u32]
}

/// The least number whose square is at least `n`.
fn ceil_sqrt(n: u64) -> u64 {
    let root = n.isqrt();
    root + u64::from(root * root < n)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(n: u64, seed: u64, epoch: u64) -> Vec<u64> {
        let permutation = KeyedPermutation::new(n, seed, epoch);
        (0..n).map(|place| permutation.number(place)).collect()
    }

    #[test]
    fn every_number_has_one_place() {
        for n in (0..300).chain([1023, 1024, 1025, 4095, 4096]) {
            let permutation = KeyedPermutation::new(n, 3, n);
            let mut seen = vec![false; n as usize];
            for place in 0..n {
                let number = permutation.number(place);
                assert!(!std::mem::replace(&mut seen[number as usize], true), "{number} of {n} twice");
                assert_eq!(permutation.place(number), place);
            }
        }
    }

    #[test]
    fn huge_orders_need_no_memory() {
        for n in [1_000_000_000, u64::from(u32::MAX) + 2, u64::MAX] {
            let permutation = KeyedPermutation::new(n, 1, 2);
            for place in [0, 1, n / 2, n - 1] {
                let number = permutation.number(place);
                assert!(number < n);
                assert_eq!(permutation.place(number), place);
            }
        }
        assert_eq!(KeyedPermutation::new(5, 1, 1).number(9), 9, "no place of this order");
    }

    #[test]
    fn seeds_and_epochs_give_other_orders() {
        let orders = [order(64, 1, 0), order(64, 2, 0), order(64, 1, 1), order(64, 1, 1 << 32), order(64, 1 << 32, 1)];
        for (i, a) in orders.iter().enumerate() {
            assert!(orders[..i].iter().all(|b| a != b));
        }
        assert_eq!(order(64, 1, 0), orders[0]);
    }

    /// `Σ (seen − expected)² / expected`.
    fn chi_squared(counts: &[u32]) -> f64 {
        let expected = f64::from(counts.iter().sum::<u32>()) / counts.len() as f64;
        counts.iter().map(|&c| (f64::from(c) - expected).powi(2) / expected).sum()
    }

    /// Requires χ² below mean + 4 standard deviations of its distribution.
    fn check_even(counts: &[u32], what: &str) {
        let freedom = counts.len() as f64 - 1.0;
        let chi = chi_squared(counts);
        assert!(chi < freedom + 4.0 * (2.0 * freedom).sqrt(), "{what}: {chi} with {freedom} degrees of freedom");
    }

    #[test]
    fn orders_of_a_few_numbers_are_equally_frequent() {
        for (n, orders) in [(2u64, 2), (3, 6), (4, 24), (5, 120)] {
            let mut counts = std::collections::BTreeMap::<Vec<u64>, u32>::new();
            (0..orders * 300).for_each(|seed| *counts.entry(order(n, seed, 0)).or_default() += 1);
            assert_eq!(counts.len() as u64, orders, "{n} numbers");
            check_even(&counts.into_values().collect::<Vec<_>>(), &format!("orders of {n}"));
        }
    }

    #[test]
    fn places_and_neighbours_are_spread_evenly() {
        for n in [100u64, 10_000, 1_000_000_007] {
            let (mut first, mut steps, mut pairs) = (vec![0; 100], vec![0; 100], vec![0; 100]);
            let bucket = |x: u64, parts: u64| (u128::from(x) * u128::from(parts) / u128::from(n)) as usize;
            for seed in 0..30_000 {
                let permutation = KeyedPermutation::new(n, 5, seed);
                let place = seed * 7919 % (n - 1);
                let (a, b) = (permutation.number(place), permutation.number(place + 1));
                first[bucket(a, 100)] += 1;
                steps[bucket((b + n - a) % n, 100)] += 1;
                pairs[bucket(a, 10) * 10 + bucket(b, 10)] += 1;
            }
            check_even(&first, &format!("numbers of {n}"));
            // A number is never its own neighbour, so for n = 100 one step in a hundred never occurs.
            if n > 100 {
                check_even(&steps, &format!("steps of {n}"));
                check_even(&pairs, &format!("pairs of {n}"));
            }
        }
    }
}
