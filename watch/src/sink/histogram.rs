//! [`Histogram`]: the distribution of numbers.

use std::sync::OnceLock;

/// The distribution of numbers: counts in buckets whose edges grow by a tenth each, as TensorBoard's do. So one
/// histogram shows values of 1e-12 and of 1e20.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Histogram {
    /// The least of the finite numbers; 0 without any.
    pub min: f64,
    /// The greatest of the finite numbers; 0 without any.
    pub max: f64,
    /// The sum of the finite numbers.
    pub sum: f64,
    /// The sum of their squares.
    pub sum_squares: f64,
    /// The right edge of each bucket, which belongs to the next one. The first bucket is empty: its edge is the left
    /// one of the second.
    pub limits: Vec<f64>,
    /// The number of values in each bucket.
    pub counts: Vec<u64>,
    /// The number of NaN and infinities, which are in no bucket.
    pub not_finite: u64,
}

impl Histogram {
    /// The distribution of `values`.
    pub fn of<T: Copy + Into<f64>>(values: &[T]) -> Self {
        let edges = edges();
        let mut buckets = vec![0; edges.len()];
        let mut all = Histogram { min: f64::INFINITY, max: f64::NEG_INFINITY, ..Histogram::default() };
        for x in values.iter().map(|&x| x.into()) {
            if !x.is_finite() {
                all.not_finite += 1;
                continue;
            }
            (all.min, all.max) = (all.min.min(x), all.max.max(x));
            (all.sum, all.sum_squares) = (all.sum + x, all.sum_squares + x * x);
            // The greatest `f64` lies on the last edge.
            let bucket = edges.partition_point(|&edge| edge <= x);
            buckets[bucket.min(edges.len() - 1)] += 1;
        }
        all.keep_used(edges, &buckets)
    }

    /// The number of values in all buckets.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The buckets from the first that holds a number to the last, with an empty one before them.
    fn keep_used(mut self, edges: &[f64], buckets: &[u64]) -> Self {
        let used = |&n: &u64| n > 0;
        let (Some(first), Some(last)) = (buckets.iter().position(used), buckets.iter().rposition(used)) else {
            return Histogram { not_finite: self.not_finite, ..Histogram::default() };
        };
        let from = first.saturating_sub(1);
        self.limits = edges[from..=last].to_vec();
        self.counts = buckets[from..=last].to_vec();
        self
    }
}

/// Right edges of all buckets: ±1e-12 · 1.1^k up to 1e20, 0 between them, the largest number on either end.
fn edges() -> &'static [f64] {
    static EDGES: OnceLock<Vec<f64>> = OnceLock::new();
    EDGES.get_or_init(|| {
        let grown = std::iter::successors(Some(1e-12), |edge| Some(edge * 1.1)).take_while(|edge| *edge < 1e20);
        let positive: Vec<f64> = grown.chain([f64::MAX]).collect();
        positive.iter().rev().map(|edge| -edge).chain([0.0]).chain(positive.iter().copied()).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_is_in_the_bucket_that_holds_it() {
        let values = [-3.5, -1e-13, 0.0, 1e-12, 0.25, 0.25, 7.0, 1e25, f64::MAX, f64::MIN];
        for &x in &values {
            let one = Histogram::of(&[x]);
            let at = one.counts.iter().position(|&n| n == 1).unwrap();
            assert!(x < one.limits[at] || x == f64::MAX, "{x} lies below {}", one.limits[at]);
            assert!(at == 0 || one.limits[at - 1] <= x, "{x} lies at or above {}", one.limits[at - 1]);
            assert_eq!((one.count(), one.min, one.max), (1, x, x));
        }
        let all = Histogram::of(&values);
        assert_eq!(all.count(), values.len() as u64);
        assert!(all.limits.is_sorted());
    }

    #[test]
    fn moments_are_those_of_the_finite_numbers() {
        let h = Histogram::of(&[1.0f32, -2.0, 4.0, f32::NAN, f32::INFINITY]);
        assert_eq!((h.min, h.max, h.sum, h.sum_squares), (-2.0, 4.0, 3.0, 21.0));
        assert_eq!((h.count(), h.not_finite), (3, 2));
    }

    #[test]
    fn nothing_has_no_buckets() {
        assert_eq!(Histogram::of::<f32>(&[]), Histogram::default());
        assert_eq!(Histogram::of(&[f64::NAN]), Histogram { not_finite: 1, ..Histogram::default() });
    }
}
