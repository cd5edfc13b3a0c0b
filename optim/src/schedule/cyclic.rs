//! Schedules that rise and fall between given rates; the base rate is ignored.

use super::{LrSchedule, cosine};

/// The one-cycle schedule: from `max/div` up to `max`, then down to `max/div/final_div`, both along cosines. It stays
/// there from step `total − 1` on.
///
/// Smith and Topin, *Super-Convergence: Very Fast Training of Neural Networks Using Large Learning Rates*, 2018.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OneCycle {
    /// The highest learning rate.
    pub max_lr: f64,
    /// The number of steps of the whole cycle.
    pub total: u64,
    /// The fraction of the steps in which the rate rises.
    pub pct_start: f64,
    /// The ratio of the highest rate to the first.
    pub div: f64,
    /// The ratio of the first rate to the last.
    pub final_div: f64,
}

impl OneCycle {
    /// Uses PyTorch's defaults. The rate rises over 30 % of the steps from a 25th of the highest rate, and falls to a
    /// 10 000th of the first rate.
    pub fn new(max_lr: f64, total: u64) -> Self {
        OneCycle { max_lr, total, pct_start: 0.3, div: 25.0, final_div: 1e4 }
    }
}

impl LrSchedule for OneCycle {
    fn lr(&self, _: f64, step: u64) -> f64 {
        let first = self.max_lr / self.div;
        let (top, end) = (self.pct_start * self.total as f64 - 1.0, self.total as f64 - 1.0);
        let t = step as f64;
        match t <= top {
            true => cosine(first, self.max_lr, if top > 0.0 { t / top } else { 1.0 }),
            false => cosine(self.max_lr, first / self.final_div, ((t - top) / (end - top)).min(1.0)),
        }
    }
}

/// A triangular cycle: linearly up and down between two rates.
///
/// Smith, *Cyclical Learning Rates for Training Neural Networks*, 2017.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CyclicTriangular {
    /// The lowest learning rate.
    pub low: f64,
    /// The highest learning rate.
    pub high: f64,
    /// The number of steps from the lowest to the highest rate; 0 is taken as 1.
    pub up: u64,
    /// The number of steps back to the lowest rate; 0 is taken as `up`.
    pub down: u64,
}

impl LrSchedule for CyclicTriangular {
    fn lr(&self, _: f64, step: u64) -> f64 {
        let up = self.up.max(1);
        let down = if self.down == 0 { up } else { self.down };
        let at = step % (up + down);
        let height = if at <= up { at as f64 / up as f64 } else { (up + down - at) as f64 / down as f64 };
        self.low + (self.high - self.low) * height
    }
}
