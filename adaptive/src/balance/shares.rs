//! Shares of one batch, by the speeds of ranks.

use distributed::{comm::Collectives, strategy::StepRanks};
use numcore::{Error, Result, Runtime};

use super::{SpeedEstimate, SpeedOptions};

/// Shares of a batch that ranks of different speeds compute in the same time.
///
/// ```
/// use adaptive::balance::SpeedShares;
/// # fn main() -> numcore::Result<()> {
/// let mut shares = SpeedShares::new(2)?;
/// assert_eq!(shares.sizes(30), [15, 15]);
/// for _ in 0..3 {
///     // The second rank takes twice as long for an example.
///     let sizes = shares.sizes(30);
///     shares.report(&[sizes[0] as f64, 2.0 * sizes[1] as f64], &sizes)?;
/// }
/// assert_eq!(shares.sizes(30), [20, 10]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct SpeedShares {
    speeds: Vec<SpeedEstimate>,
    options: SpeedOptions,
    /// The share of each rank; all add up to 1.
    ratios: Vec<f64>,
}

/// The least share of a rank, so that its speed is measured.
const LEAST: f64 = 0.05;

impl SpeedShares {
    /// Equal shares for `ranks` ranks; an error for none.
    pub fn new(ranks: usize) -> Result<Self> {
        if ranks == 0 {
            return Err(Error::range("SpeedShares", "number of ranks", ranks, "at least 1"));
        }
        SpeedShares::of(vec![1.0; ranks])
    }

    /// Initial shares, in any unit. An error unless all are positive and finite.
    pub fn of(ratios: Vec<f64>) -> Result<Self> {
        if ratios.is_empty() || !ratios.iter().all(|ratio| *ratio > 0.0 && ratio.is_finite()) {
            return Err(Error::config("SpeedShares", "ratios", format!("shares are positive numbers, not {ratios:?}")));
        }
        let total: f64 = ratios.iter().sum();
        // Ratios that add up to 1 but for rounding keep their bits.
        let total = if (total - 1.0).abs() < 1e-12 { 1.0 } else { total };
        let (options, ratios): (_, Vec<f64>) =
            (SpeedOptions::default(), ratios.iter().map(|ratio| ratio / total).collect());
        Ok(SpeedShares { speeds: vec![SpeedEstimate::of(&options); ratios.len()], options, ratios })
    }

    /// Restarts the measurements of these shares with other options.
    ///
    /// # Errors
    /// Fails if an option is out of its range.
    pub fn with_options(self, options: SpeedOptions) -> Result<Self> {
        options.check()?;
        Ok(SpeedShares { speeds: vec![SpeedEstimate::of(&options); self.ratios.len()], options, ..self })
    }

    /// Records the computing time of each rank, in seconds, and its number of examples. A rank without examples is not
    /// measured.
    pub fn report(&mut self, seconds: &[f64], examples: &[usize]) -> Result<()> {
        require_ranks("SpeedShares", self.speeds.len(), [seconds.len(), examples.len()])?;
        for (speed, (seconds, &examples)) in self.speeds.iter_mut().zip(seconds.iter().zip(examples)) {
            speed.measure(seconds / examples as f64);
        }
        let Some(each) = settled(&self.speeds) else { return Ok(()) };
        let ratios = bounded(&each.iter().map(|seconds| 1.0 / seconds).collect::<Vec<_>>());
        if ratios.iter().zip(&self.ratios).any(|(&new, &old)| self.options.is_far(new, old)) {
            self.ratios = ratios;
        }
        Ok(())
    }

    /// Exchanges this rank's computing time, in seconds, and its number of examples, and records those of all shares.
    /// The time of a share is that of its slowest rank. Every rank of a step calls it.
    pub fn exchange<R: Runtime>(&mut self, ranks: &StepRanks<R>, seconds: f64, examples: usize) -> Result<()> {
        let (mut times, mut counts) = (vec![0.0; ranks.share.of], vec![0; ranks.share.of]);
        for (share, [seconds, examples]) in measurements(ranks, [seconds, examples as f64])? {
            if let (Some(time), Some(count)) = (times.get_mut(share), counts.get_mut(share)) {
                *time = f64::max(*time, seconds);
                *count = (examples as usize).max(*count);
            }
        }
        self.report(&times, &counts)
    }

    /// The share of each rank; all add up to 1.
    #[doc(alias("chunk_ratios"))]
    pub fn ratios(&self) -> &[f64] {
        &self.ratios
    }

    /// The number of examples for each rank, of `examples`: at least one each, if there are enough.
    #[doc(alias("compute_shard_sizes"))]
    pub fn sizes(&self, examples: usize) -> Vec<usize> {
        apportioned(examples, &self.ratios)
    }
}

/// Ratios that add up to 1, with a lower bound: ratios above it give up what the others lack.
fn bounded(of: &[f64]) -> Vec<f64> {
    let (total, least): (f64, f64) = (of.iter().sum(), LEAST.min(1.0 / of.len() as f64));
    let mut ratios: Vec<f64> = of.iter().map(|ratio| ratio / total).collect();
    // A ratio that falls below the bound by giving is raised in the next round.
    for _ in 0..of.len() {
        let (low, high): (f64, f64) = ratios.iter().fold((0.0, 0.0), |(low, high), &ratio| match ratio <= least {
            true => (low + least, high),
            false => (low, high + ratio),
        });
        ratios.iter_mut().for_each(|ratio| *ratio = if *ratio <= least { least } else { *ratio * (1.0 - low) / high });
    }
    ratios
}

/// Divides a number into whole parts by ratios that add up to 1 (largest remainders); at least one each, if there are
/// enough.
pub(super) fn apportioned(whole: usize, ratios: &[f64]) -> Vec<usize> {
    let least = usize::from(whole >= ratios.len());
    let left = (whole - least * ratios.len()) as f64;
    // The share above the one that each has already.
    let above: Vec<f64> = ratios.iter().map(|ratio| (ratio * whole as f64 - least as f64).max(0.0)).collect();
    let total: f64 = above.iter().sum::<f64>().max(f64::MIN_POSITIVE);
    let exact: Vec<f64> = above.iter().map(|part| part * left / total).collect();
    let mut parts: Vec<usize> = exact.iter().map(|part| *part as usize + least).collect();
    let mut order: Vec<usize> = (0..ratios.len()).collect();
    order.sort_by(|&a, &b| exact[b].fract().total_cmp(&exact[a].fract()).then(a.cmp(&b)));
    let short = whole - parts.iter().sum::<usize>();
    order.into_iter().cycle().take(short).for_each(|rank| parts[rank] += 1);
    parts
}

/// Two measurements of every rank, with the number of the rank's share.
pub(super) fn measurements<R: Runtime>(ranks: &StepRanks<R>, own: [f64; 2]) -> Result<Vec<(usize, [f64; 2])>> {
    let mut bytes = [0; 24];
    let numbers = [ranks.share.index as f64, own[0], own[1]];
    bytes.as_chunks_mut().0.iter_mut().zip(numbers).for_each(|(bytes, number)| *bytes = number.to_le_bytes());
    let numbers = |all: [u8; 24]| std::array::from_fn(|k| f64::from_le_bytes(all.as_chunks().0[k]));
    let parsed = |[share, first, second]: [f64; 3]| (share as usize, [first, second]);
    Ok(ranks.everyone.exchange_equal(bytes)?.into_iter().map(numbers).map(parsed).collect())
}

/// The time of each rank for a unit of work, once all ranks are calibrated.
pub(super) fn settled(speeds: &[SpeedEstimate]) -> Option<Vec<f64>> {
    speeds.iter().map(|speed| speed.seconds().filter(|_| speed.is_calibrated())).collect()
}

/// An error unless each rank has a measurement.
pub(super) fn require_ranks<const K: usize>(what: &'static str, ranks: usize, given: [usize; K]) -> Result<()> {
    match given.iter().find(|&&given| given != ranks) {
        Some(given) => Err(Error::range(what, "number of measurements", *given, format!("{ranks}, one for each rank"))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_make_the_whole() {
        for whole in [0, 1, 2, 3, 7, 100, 1001] {
            for ratios in [vec![1.0], vec![0.5, 0.5], vec![0.7, 0.2, 0.1], vec![0.05, 0.05, 0.9], vec![0.2; 5]] {
                let parts = apportioned(whole, &ratios);
                assert_eq!(parts.iter().sum::<usize>(), whole, "{whole} by {ratios:?}");
                assert!(whole < ratios.len() || parts.iter().all(|&part| part > 0), "{whole} by {ratios:?}: {parts:?}");
            }
        }
        assert_eq!(apportioned(10, &[0.7, 0.2, 0.1]), [7, 2, 1]);
    }

    /// A rank of four that takes a quarter longer has a sixth less, each of the others a twentieth more.
    #[test]
    fn a_share_that_falls_by_more_than_a_tenth_changes() {
        let mut shares = SpeedShares::new(4).unwrap();
        for _ in 0..4 {
            // The first has twice the examples, in twice the time.
            shares.report(&[2.0, 1.0, 1.0, 1.25], &[2, 1, 1, 1]).unwrap();
        }
        assert!((shares.ratios()[3] - 4.0 / 19.0).abs() < 1e-9, "{:?}", shares.ratios());
    }

    #[test]
    fn a_rank_keeps_a_twentieth() {
        let mut shares = SpeedShares::new(3).unwrap();
        for _ in 0..4 {
            shares.report(&[1.0, 1.0, 1000.0], &[1, 1, 1]).unwrap();
        }
        let ratios = shares.ratios();
        assert!((ratios[2] - 0.05).abs() < 1e-12 && (ratios[0] - 0.475).abs() < 1e-9, "{ratios:?}");
        assert!(shares.report(&[1.0], &[1, 1, 1]).is_err());
        assert!(SpeedShares::new(0).is_err() && SpeedShares::of(vec![1.0, 0.0]).is_err());
    }

    #[test]
    fn a_rank_without_examples_teaches_nothing() {
        let mut shares = SpeedShares::new(2).unwrap();
        shares.report(&[1.0, 0.0], &[1, 0]).unwrap();
        assert_eq!(shares.ratios(), [0.5, 0.5]);
    }
}
