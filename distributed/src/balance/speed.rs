//! How long a rank takes, from measurements that jitter.

/// What a rank takes for a unit of work, as an average that noise does not move much and a change of speed moves at once.
///
/// The median of the first three measurements begins it: the first may be one of compilation. From then on one that is within a quarter of the estimate counts for a tenth; one that is farther
/// off is left out, as a pause is, unless the next one is far off in the same direction: then the rank has another speed now, the
/// mean of the two.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SpeedEstimate {
    seconds: f64,
    /// The first measurements.
    first: Vec<f64>,
    /// A measurement that was far off, the last one.
    outlier: Option<f64>,
}

/// Measurements whose median begins it.
const CALIBRATION: usize = 3;
/// How far a measurement may be off to be noise.
const NOISE: f64 = 0.25;
/// What a measurement counts for.
const TAKEN: f64 = 0.1;

impl SpeedEstimate {
    /// Takes note of a measurement, in seconds; what is no positive number is left out.
    pub fn measure(&mut self, seconds: f64) {
        if !(seconds > 0.0 && seconds.is_finite()) {
            return;
        }
        let off = (seconds - self.seconds) / self.seconds;
        if self.first.len() < CALIBRATION {
            self.first.push(seconds);
            self.first.sort_by(f64::total_cmp);
            self.seconds = self.first[self.first.len() / 2];
        } else if off.abs() <= NOISE {
            self.seconds += TAKEN * (seconds - self.seconds);
            self.outlier = None;
        } else {
            match self.outlier.filter(|before| (before - self.seconds) * off > 0.0) {
                Some(before) => (self.seconds, self.outlier) = (0.5 * (before + seconds), None),
                None => self.outlier = Some(seconds),
            }
        }
    }

    /// Seconds for a unit of work; none before the first measurement.
    pub fn seconds(&self) -> Option<f64> {
        (!self.first.is_empty()).then_some(self.seconds)
    }

    /// Whether enough was measured to go by.
    pub fn is_calibrated(&self) -> bool {
        self.first.len() >= CALIBRATION
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
