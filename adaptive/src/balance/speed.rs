//! Estimates of a rank's speed from measurements that jitter.

use numcore::{Error, Result};

/// A rank's time for a unit of work, as an average that noise moves little and a change of speed moves at once.
///
/// The estimate starts as the median of the first measurements, one of which may include compilation. Later, a
/// measurement near the estimate moves it a little. A farther one is dropped, as a pause is, unless the next is far off
/// in the same direction. Then the speed has changed, and the estimate becomes the mean of the two.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SpeedEstimate {
    options: SpeedOptions,
    seconds: f64,
    /// The first measurements, sorted.
    first: Vec<f64>,
    /// The last measurement, if it was far off.
    outlier: Option<f64>,
}

/// Options of a [`SpeedEstimate`] and of the changes that follow from it.
#[derive(Clone, Debug, PartialEq)]
pub struct SpeedOptions {
    /// The number of measurements whose median starts the estimate: at least one.
    pub calibration: usize,
    /// The share of the estimate by which a measurement may be off and still count as noise.
    pub noise: f64,
    /// The weight, in `(0, 1]`, of a new measurement in the moving average.
    pub weight: f64,
    /// The relative change that counts or shares must exceed to be replaced.
    pub dead_zone: f64,
}

impl Default for SpeedOptions {
    /// Three measurements, noise of a quarter, weight and dead zone of a tenth.
    fn default() -> Self {
        SpeedOptions { calibration: 3, noise: 0.25, weight: 0.1, dead_zone: 0.1 }
    }
}

impl SpeedOptions {
    pub(super) fn check(&self) -> Result<()> {
        let share = |x: f64| x >= 0.0 && x.is_finite();
        let wrong = match self {
            SpeedOptions { calibration: 0, .. } => ("calibration", "0: there is at least one measurement".into()),
            SpeedOptions { noise, .. } if !share(*noise) => ("noise", format!("{noise}: it is a share, 0 or more")),
            SpeedOptions { weight, .. } if !(*weight > 0.0 && *weight <= 1.0) => {
                ("weight", format!("{weight}: it is in (0, 1]"))
            }
            SpeedOptions { dead_zone, .. } if !share(*dead_zone) => {
                ("dead_zone", format!("{dead_zone}: it is a share, 0 or more"))
            }
            _ => return Ok(()),
        };
        Err(Error::config("SpeedOptions", wrong.0, wrong.1))
    }

    /// True if a number left the dead zone around its old value.
    pub(super) fn is_far(&self, new: f64, old: f64) -> bool {
        (new / old - 1.0).abs() > self.dead_zone
    }
}

impl SpeedEstimate {
    /// An estimate without measurements.
    pub(super) fn of(options: &SpeedOptions) -> Self {
        SpeedEstimate { options: options.clone(), ..Default::default() }
    }

    /// Adds a measurement, in seconds; ignores numbers that are not positive and finite.
    pub fn measure(&mut self, seconds: f64) {
        if !(seconds > 0.0 && seconds.is_finite()) {
            return;
        }
        let off = (seconds - self.seconds) / self.seconds;
        if self.first.len() < self.options.calibration {
            self.first.push(seconds);
            self.first.sort_by(f64::total_cmp);
            self.seconds = self.first[self.first.len() / 2];
        } else if off.abs() <= self.options.noise {
            self.seconds += self.options.weight * (seconds - self.seconds);
            self.outlier = None;
        } else {
            match self.outlier.filter(|before| (before - self.seconds) * off > 0.0) {
                Some(before) => (self.seconds, self.outlier) = (0.5 * (before + seconds), None),
                None => self.outlier = Some(seconds),
            }
        }
    }

    /// The time for a unit of work, in seconds; none before the first measurement.
    pub fn seconds(&self) -> Option<f64> {
        (!self.first.is_empty()).then_some(self.seconds)
    }

    /// Tells whether there are enough measurements to rely on.
    pub fn is_calibrated(&self) -> bool {
        self.first.len() >= self.options.calibration
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(measured: &[f64]) -> f64 {
        let mut estimate = SpeedEstimate::default();
        measured.iter().for_each(|&seconds| estimate.measure(seconds));
        estimate.seconds().unwrap()
    }

    #[test]
    fn options_say_how_much_measurements_move_the_estimate() {
        let options = SpeedOptions { calibration: 1, noise: 1.0, weight: 0.5, dead_zone: 0.0 };
        let mut estimate = SpeedEstimate::of(&options);
        [1.0, 1.5].into_iter().for_each(|seconds| estimate.measure(seconds));
        assert_eq!((estimate.seconds(), estimate.is_calibrated()), (Some(1.25), true));
        assert!(options.is_far(1.01, 1.0) && !SpeedOptions::default().is_far(1.05, 1.0));
    }

    #[test]
    fn a_pause_is_left_out_and_a_change_is_taken() {
        assert!(SpeedEstimate::default().seconds().is_none());
        assert_eq!(after(&[2.0]), 2.0);
        assert_eq!(after(&[100.0, 2.0, 3.0]), 3.0);
        let steady = [1.0; 6];
        assert_eq!(after(&[&steady[..], &[9.0]].concat()), 1.0);
        assert_eq!(after(&[&steady[..], &[9.0, 1.0, 9.0]].concat()), 1.0);
        assert_eq!(after(&[&steady[..], &[2.5, 2.5]].concat()), 2.5);
        assert_eq!(after(&[&steady[..], &[2.5, 0.4]].concat()), 1.0, "in two directions");
        assert_eq!(after(&[&steady[..], &[f64::NAN, 0.0, -1.0, f64::INFINITY]].concat()), 1.0);
    }
}
