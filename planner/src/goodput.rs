//! The share of the time of a long run that makes progress, with failures and checkpoints.

use numcore::{Error, Result};

/// The failures of a machine, and the prices of a checkpoint and of a restart.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reliability {
    /// The mean time between failures of one rank, in seconds. A run of `n` ranks fails `n` times as often.
    pub rank_mtbf: f64,
    /// Seconds that training waits for a checkpoint.
    pub save: f64,
    /// Seconds from a failure until training goes on from the last checkpoint.
    pub restart: f64,
}

/// The progress of a run that saves at the best interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Goodput {
    /// Seconds of training between two checkpoints.
    pub interval: f64,
    /// The share of the time that makes progress.
    pub share: f64,
    /// The mean time between failures of the run, in seconds.
    pub mtbf: f64,
}

impl Goodput {
    /// The goodput of a run of `ranks` ranks.
    ///
    /// Failures come at random, independently of each other and of what the run does. Let checkpoints be `T` seconds
    /// apart and take `C` each, the mean time between failures be `M`, and restarts take `R` seconds. Then `T` seconds
    /// of progress take `M·e^(R/M)·(e^((T+C)/M) − 1)` seconds (Daly 2006). The interval is the best, near `√(2·C·M)`
    /// for short checkpoints (Young 1974).
    ///
    /// # Errors
    /// Fails unless times are finite, the time between failures is above 0, and there are ranks.
    pub fn of(ranks: usize, reliability: &Reliability) -> Result<Goodput> {
        let &Reliability { rank_mtbf, save, restart } = reliability;
        let valid = |x: f64| x.is_finite() && x >= 0.0;
        if ranks == 0 || !valid(rank_mtbf) || rank_mtbf == 0.0 || !valid(save) || !valid(restart) {
            let why =
                format!("{ranks} ranks with {reliability:?}: times are at least 0, that between failures above it");
            return Err(Error::config("Goodput", "reliability", why));
        }
        let mtbf = rank_mtbf / ranks as f64;
        // The derivative is 0 where e^(-(T+C)/M) = 1 - T/M, a function of T/M that crosses once.
        let (mut low, mut high) = (0.0_f64, 1.0_f64);
        for _ in 0..200 {
            let middle = 0.5 * (low + high);
            let above = (-middle - save / mtbf).exp() > 1.0 - middle;
            (low, high) = if above { (low, middle) } else { (middle, high) };
        }
        let interval = if save == 0.0 { 0.0 } else { 0.5 * (low + high) * mtbf };
        let share = match save == 0.0 {
            // The limit of the formula for short intervals.
            true => (-restart / mtbf).exp(),
            false => interval / (mtbf * (restart / mtbf).exp() * ((interval + save) / mtbf).exp_m1()),
        };
        Ok(Goodput { interval, share, mtbf })
    }

    /// Seconds that `steps` steps of `step` seconds take in all.
    pub fn seconds(&self, steps: u64, step: f64) -> f64 {
        steps as f64 * step / self.share
    }
}
