//! Numbers of micro-batches for each rank between two exchanges.

use numcore::{Error, Result};

use super::{
    SpeedEstimate, SpeedOptions,
    shares::{require_ranks, settled},
};

/// The policy of fitting numbers of micro-batches to the ranks' speeds.
#[doc(alias("ApplyPolicy"))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum BalancePolicy {
    /// All ranks compute the anchor, which does not change: even steps.
    Sync,
    /// Counts follow speeds from the first measurements on.
    #[doc(alias = "Cadence")]
    FollowSpeeds,
    /// Steps are even until the speeds of two ranks differ by more than [`difference`](BalanceOptions::difference).
    /// From then on, counts follow speeds.
    #[default]
    WhereSpeedsDiffer,
}

/// Options of the choice of micro-batch counts.
#[doc(alias("DdpConfig", "CadenceOptions"))]
#[derive(Clone, Debug, PartialEq)]
pub struct BalanceOptions {
    /// The policy of fitting counts to speeds.
    pub policy: BalancePolicy,
    /// The share of the fastest rank's time for a micro-batch by which the slowest must exceed it for ranks to count as
    /// different.
    pub difference: f64,
    /// The initial anchor: the number of micro-batches of the slowest rank between two exchanges.
    pub anchor: usize,
    /// The largest anchor, to which slow exchanges may raise it. If equal to [`anchor`](BalanceOptions::anchor), the
    /// anchor is fixed, and with it about the number of examples of a step.
    pub max_anchor: usize,
    /// The share of the time, in `(0, 1)`, that exchanges may take before the anchor grows.
    pub overhead_target: f64,
    /// The largest difference between the counts of two ranks, if limited.
    pub max_difference: Option<usize>,
    /// A rank known to be slow, and the speed of the others as a multiple of its speed: sets the initial counts.
    pub speed_hint: Option<(usize, f64)>,
    /// Options of the estimate of a rank's speed.
    pub speed: SpeedOptions,
}

impl Default for BalanceOptions {
    /// An anchor of 1 to 200, exchanges that take a tenth of the time, and uneven counts once ranks differ by a fifth.
    fn default() -> Self {
        BalanceOptions {
            policy: BalancePolicy::default(),
            difference: 0.2,
            anchor: 1,
            max_anchor: 200,
            overhead_target: 0.1,
            max_difference: None,
            speed_hint: None,
            speed: SpeedOptions::default(),
        }
    }
}

/// The measurements between two exchanges.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BalanceWindow<'a> {
    /// The time that each rank computed, in seconds.
    pub seconds: &'a [f64],
    /// The number of micro-batches that each rank computed.
    pub batches: &'a [usize],
    /// The time of exchange and update, from the arrival of the last rank, in seconds.
    pub exchange: f64,
}

/// Counts of micro-batches that ranks of different speeds compute in the same time.
///
/// ```
/// use adaptive::balance::{MicroBatchBalancer, BalanceOptions, BalanceWindow};
/// # fn main() -> numcore::Result<()> {
/// let mut balancer = MicroBatchBalancer::new(2, BalanceOptions { anchor: 4, ..Default::default() })?;
/// for _ in 0..3 {
///     // The first rank takes 0.2 s for a micro-batch, the second 0.5 s.
///     let batches = balancer.counts().to_vec();
///     let seconds = [0.2 * batches[0] as f64, 0.5 * batches[1] as f64];
///     balancer.report(BalanceWindow { seconds: &seconds, batches: &batches, exchange: 0.1 })?;
/// }
/// assert_eq!(balancer.counts(), [10, 4]);
/// # Ok(())
/// # }
/// ```
#[doc(alias = "Cadence")]
#[derive(Clone, Debug, PartialEq)]
pub struct MicroBatchBalancer {
    options: BalanceOptions,
    anchor: usize,
    /// True once counts follow speeds.
    is_on: bool,
    speeds: Vec<SpeedEstimate>,
    exchange: SpeedEstimate,
    /// The unrounded counts.
    exact: Vec<f64>,
    counts: Vec<usize>,
}

impl MicroBatchBalancer {
    /// Counts for `ranks` ranks: the anchor for each, adjusted by a speed hint. An error if an option is out of range.
    pub fn new(ranks: usize, options: BalanceOptions) -> Result<Self> {
        options.check(ranks)?;
        let anchor = options.anchor;
        let mut counts = vec![anchor; ranks];
        let hint = options.speed_hint.filter(|_| options.policy != BalancePolicy::Sync);
        if let Some((slow, ratio)) = hint {
            let fast = (anchor as f64 * ratio).round() as usize;
            (0..ranks).filter(|rank| *rank != slow).for_each(|rank| counts[rank] = fast);
        }
        let exact = counts.iter().map(|&count| count as f64).collect();
        let mut balancer = MicroBatchBalancer {
            anchor,
            is_on: options.policy == BalancePolicy::FollowSpeeds || hint.is_some(),
            speeds: vec![SpeedEstimate::of(&options.speed); ranks],
            exchange: SpeedEstimate::of(&options.speed),
            exact,
            counts,
            options,
        };
        balancer.limit();
        Ok(balancer)
    }

    /// The number of micro-batches of each rank until the next exchange: `[N]` for `N` data-parallel ranks, or replicas
    /// of a pipeline. Each is at least 1.
    pub fn counts(&self) -> &[usize] {
        &self.counts
    }

    /// The number of micro-batches of the slowest rank.
    pub fn anchor(&self) -> usize {
        self.anchor
    }

    /// Tells whether counts follow measurements by now.
    pub fn is_on(&self) -> bool {
        self.is_on
    }

    /// Records the measurements since the last exchange, and chooses the [`counts`](MicroBatchBalancer::counts) until
    /// the next. It does not communicate: call it with equal values on all ranks, so that all choose equal counts.
    ///
    /// A time per micro-batch, or of the exchange, that is not positive and finite is ignored. Counts stay until every
    /// rank is [calibrated](SpeedOptions::calibration), and while all are within the
    /// [dead zone](SpeedOptions::dead_zone). The [policy](BalanceOptions::policy) may keep them equal, too.
    ///
    /// # Errors
    /// Fails, and records nothing, unless `seconds` and `batches` have one entry per rank.
    pub fn report(&mut self, window: BalanceWindow<'_>) -> Result<()> {
        let BalanceWindow { seconds, batches, exchange } = window;
        require_ranks("MicroBatchBalancer", self.speeds.len(), [seconds.len(), batches.len()])?;
        for (speed, (seconds, &batches)) in self.speeds.iter_mut().zip(seconds.iter().zip(batches)) {
            speed.measure(seconds / batches as f64);
        }
        self.exchange.measure(exchange);
        let Some(each) = settled(&self.speeds) else { return Ok(()) };
        let slowest = each.iter().copied().fold(0.0, f64::max);
        let fastest = each.iter().copied().fold(f64::INFINITY, f64::min);
        let differ = slowest > fastest * (1.0 + self.options.difference);
        self.is_on |= differ && self.options.policy == BalancePolicy::WhereSpeedsDiffer;
        if !self.is_on {
            return Ok(());
        }
        self.move_anchor(self.exchange.seconds().unwrap_or(0.0) / (self.anchor as f64 * slowest));
        let wanted: Vec<f64> = each.iter().map(|seconds| self.anchor as f64 * slowest / seconds).collect();
        if wanted.iter().zip(&self.exact).any(|(&wanted, &exact)| self.options.speed.is_far(wanted, exact)) {
            self.counts = wanted.iter().map(|count| (count.round() as usize).max(1)).collect();
            self.exact = wanted;
            self.limit();
        }
        Ok(())
    }

    /// Raises the anchor, at most to twice, if exchanges take more than the target share; lowers it by one below half
    /// of that.
    fn move_anchor(&mut self, overhead: f64) {
        let BalanceOptions { anchor: least, max_anchor: most, overhead_target: target, .. } = self.options;
        if overhead > target {
            let wanted = (self.anchor as f64 * overhead / target).ceil() as usize;
            self.anchor = wanted.min(2 * self.anchor).clamp(least, most.max(least));
        } else if overhead < target / 2.0 && self.anchor > least {
            self.anchor -= 1;
        }
    }

    fn limit(&mut self) {
        let Some(most) = self.options.max_difference else { return };
        let least = self.counts.iter().copied().min().unwrap_or(1);
        self.counts.iter_mut().for_each(|count| *count = (*count).min(least + most));
    }
}

impl BalanceOptions {
    fn check(&self, ranks: usize) -> Result<()> {
        let wrong = |field, why: String| Err(Error::config("BalanceOptions", field, why));
        if ranks == 0 || self.anchor == 0 {
            return wrong(
                "anchor",
                format!("{ranks} ranks with {} micro-batches of the slowest: both are at least one", self.anchor),
            );
        }
        if !(self.overhead_target > 0.0 && self.overhead_target < 1.0) {
            return wrong("overhead_target", format!("is a share of the time in (0, 1), not {}", self.overhead_target));
        }
        if !(self.difference >= 0.0 && self.difference.is_finite()) {
            return wrong("difference", format!("is a share of a micro-batch's time, not {}", self.difference));
        }
        self.speed.check()?;
        match self.speed_hint {
            Some((rank, ratio)) if rank >= ranks || !(1.0..1e6).contains(&ratio) => {
                wrong("speed_hint", format!("rank {rank} of {ranks}, others {ratio} times as fast: at least once"))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use numcore::rng::Philox;

    use super::*;

    /// Simulated ranks with known times for a micro-batch: counts the micro-batches they could do, and did.
    struct VirtualRanks {
        each: Vec<f64>,
        exchange: f64,
        done: f64,
        possible: f64,
        noise: Option<(Philox, f64)>,
    }

    impl VirtualRanks {
        fn new(each: &[f64], exchange: f64) -> Self {
            VirtualRanks { each: each.to_vec(), exchange, done: 0.0, possible: 0.0, noise: None }
        }

        fn step(&mut self, balancer: &mut MicroBatchBalancer) {
            let counts = balancer.counts().to_vec();
            let mut factor = || match &mut self.noise {
                Some((random, width)) => 1.0 + *width * (random.below(2_000_001) as f64 / 1e6 - 1.0),
                None => 1.0,
            };
            let seconds: Vec<f64> =
                self.each.iter().zip(&counts).map(|(each, &count)| each * count as f64 * factor()).collect();
            let longest = seconds.iter().copied().fold(0.0, f64::max) + self.exchange;
            self.done += counts.iter().sum::<usize>() as f64;
            self.possible += self.each.iter().map(|each| longest / each).sum::<f64>();
            balancer.report(BalanceWindow { seconds: &seconds, batches: &counts, exchange: self.exchange }).unwrap();
        }

        /// The share of possible micro-batches that were done, over `steps` steps.
        fn efficiency(&mut self, balancer: &mut MicroBatchBalancer, steps: usize) -> f64 {
            (self.done, self.possible) = (0.0, 0.0);
            (0..steps).for_each(|_| self.step(balancer));
            self.done / self.possible
        }
    }

    fn balancer(ranks: usize, anchor: usize) -> MicroBatchBalancer {
        MicroBatchBalancer::new(ranks, BalanceOptions { anchor, max_anchor: anchor, ..Default::default() }).unwrap()
    }

    #[test]
    fn a_rank_that_is_slow_costs_no_more_than_a_twentieth() {
        for each in [vec![1.0, 2.5], vec![1.0, 1.0, 1.0, 2.5], vec![1.0, 1.7, 2.5], vec![0.3, 0.31, 0.9, 1.4, 2.0]] {
            let mut balancer = balancer(each.len(), 10);
            let mut ranks = VirtualRanks::new(&each, 0.0);
            ranks.efficiency(&mut balancer, 3);
            let reached = ranks.efficiency(&mut balancer, 20);
            assert!(reached >= 0.95, "{each:?}: {reached}, {:?}", balancer.counts());
        }
    }

    #[test]
    fn a_change_of_speed_is_over_within_three_exchanges() {
        let mut balancer = balancer(2, 10);
        let mut ranks = VirtualRanks::new(&[1.0, 2.5], 0.0);
        ranks.efficiency(&mut balancer, 6);
        for each in [[2.5, 1.0], [1.0, 1.0], [1.0, 2.5]] {
            ranks.each = each.to_vec();
            ranks.efficiency(&mut balancer, 3);
            let reached = ranks.efficiency(&mut balancer, 5);
            assert!(reached >= 0.95, "{each:?}: {reached}, {:?}", balancer.counts());
        }
    }

    #[test]
    fn noise_of_a_tenth_changes_no_count() {
        for seed in 0..200 {
            let mut balancer = balancer(4, 10);
            let mut ranks = VirtualRanks::new(&[1.0, 1.0, 2.0, 2.5], 0.0);
            ranks.efficiency(&mut balancer, 3);
            // The calibrated counts are settled once the average is over many measurements.
            ranks.efficiency(&mut balancer, 1);
            let counts = balancer.counts().to_vec();
            ranks.noise = Some((Philox::new(seed, 0), 0.1));
            for _ in 0..50 {
                ranks.step(&mut balancer);
                assert_eq!(balancer.counts(), counts, "seed {seed}");
            }
        }
    }

    #[test]
    fn a_slow_exchange_moves_the_anchor_up_and_back() {
        let policy = BalancePolicy::FollowSpeeds;
        let options = BalanceOptions { policy, anchor: 2, max_anchor: 50, ..Default::default() };
        let mut balancer = MicroBatchBalancer::new(2, options).unwrap();
        let mut ranks = VirtualRanks::new(&[1.0, 1.0], 1.0);
        ranks.efficiency(&mut balancer, 8);
        assert_eq!(balancer.anchor(), 10, "an exchange of a tenth of the time");
        ranks.exchange = 0.01;
        ranks.efficiency(&mut balancer, 60);
        assert_eq!(balancer.anchor(), 2);
        ranks.exchange = 1e9;
        ranks.efficiency(&mut balancer, 1);
        assert_eq!(balancer.anchor(), 2, "a pause");
        ranks.efficiency(&mut balancer, 6);
        assert_eq!(balancer.anchor(), 50);
    }

    #[test]
    fn counts_are_even_until_speeds_differ() {
        let with = |policy, each: &[f64]| {
            let mut balancer =
                MicroBatchBalancer::new(2, BalanceOptions { policy, anchor: 4, ..Default::default() }).unwrap();
            VirtualRanks::new(each, 10.0).efficiency(&mut balancer, 4);
            (balancer.is_on(), balancer.counts().to_vec())
        };
        let (even, apart) = ([1.0, 1.15], [1.0, 2.0]);
        assert_eq!(with(BalancePolicy::WhereSpeedsDiffer, &even), (false, vec![4, 4]), "a slow exchange is none");
        let (is_on, counts) = with(BalancePolicy::WhereSpeedsDiffer, &apart);
        assert!(is_on && counts[0] == 2 * counts[1] && counts[1] > 4, "{counts:?}");
        assert_eq!(with(BalancePolicy::Sync, &apart), (false, vec![4, 4]));
        assert!(with(BalancePolicy::FollowSpeeds, &even).1[1] > 4);
        let mut later =
            MicroBatchBalancer::new(2, BalanceOptions { anchor: 4, max_anchor: 4, ..Default::default() }).unwrap();
        let mut ranks = VirtualRanks::new(&even, 0.0);
        ranks.efficiency(&mut later, 10);
        ranks.each = apart.to_vec();
        ranks.efficiency(&mut later, 3);
        assert_eq!((later.is_on(), later.counts()), (true, &[8, 4][..]));
        let hint = BalanceOptions { policy: BalancePolicy::Sync, speed_hint: Some((1, 2.0)), ..Default::default() };
        assert_eq!(MicroBatchBalancer::new(2, hint).unwrap().counts(), [1, 1]);
    }

    #[test]
    fn hints_and_limits() {
        let hinted = BalanceOptions { anchor: 4, speed_hint: Some((1, 2.5)), ..Default::default() };
        assert_eq!(MicroBatchBalancer::new(3, hinted.clone()).unwrap().counts(), [10, 4, 10]);
        let limited = BalanceOptions { max_difference: Some(3), ..hinted.clone() };
        let mut limited = MicroBatchBalancer::new(3, limited).unwrap();
        assert_eq!(limited.counts(), [7, 4, 7]);
        VirtualRanks::new(&[1.0, 4.0, 1.0], 0.0).efficiency(&mut limited, 4);
        assert_eq!(limited.counts(), [7, 4, 7], "measured");
        let refused = [
            BalanceOptions { anchor: 0, ..hinted.clone() },
            BalanceOptions { overhead_target: 0.0, ..hinted.clone() },
            BalanceOptions { overhead_target: f64::NAN, ..hinted.clone() },
            BalanceOptions { difference: -0.1, ..hinted.clone() },
            BalanceOptions { speed_hint: Some((3, 2.0)), ..hinted.clone() },
            BalanceOptions { speed: SpeedOptions { calibration: 0, ..Default::default() }, ..hinted.clone() },
            BalanceOptions { speed: SpeedOptions { weight: 0.0, ..Default::default() }, ..hinted.clone() },
            BalanceOptions { speed: SpeedOptions { noise: f64::NAN, ..Default::default() }, ..hinted.clone() },
            BalanceOptions { speed: SpeedOptions { dead_zone: -0.1, ..Default::default() }, ..hinted.clone() },
            BalanceOptions { speed_hint: Some((0, 0.5)), ..hinted },
        ];
        assert!(refused.into_iter().all(|options| MicroBatchBalancer::new(3, options).is_err()));
    }
}
