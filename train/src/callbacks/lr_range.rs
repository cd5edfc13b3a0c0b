//! The loss at rising learning rates, from which one is chosen.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use numcore::{Error, Result, Runtime};

use crate::{Callback, Event, Run};

/// A learning-rate range test (Smith 2017): the loss of a run whose rates rise from step to step by one factor. It ends
/// the run when the loss diverges. The rate at which the loss falls fastest is a good one to train with.
///
/// The run is thrown away afterwards: make another model and step to train. All ranks see one loss, so they find one
/// rate.
///
/// ```
/// use optim::ExponentialLr;
/// use train::LrRange;
///
/// // From a base rate of 1e-6 to 1, in 100 steps.
/// let rising = ExponentialLr { gamma: 1e6f64.powf(1.0 / 99.0) };
/// let range = LrRange::default();
/// // TrainStep::builder(&comm, &model).optimizer(adamw).schedule(rising);
/// // Trainer::new(..).until(Length::Steps(100)).with(range.clone())
/// assert_eq!(range.steepest(), None); // Before the run.
/// # let _ = rising;
/// ```
#[derive(Clone, Debug, Default)]
#[doc(alias("LRFinder", "lr_find"))]
pub struct LrRange {
    /// The rate and the smoothed loss of each step, which clones share.
    seen: Arc<Mutex<Vec<(f64, f64)>>>,
}

/// The weight of earlier losses in a smoothed loss, as in fast.ai.
const SMOOTHING: f64 = 0.98;
/// The multiple of the smallest loss at which a run has diverged, as in fast.ai.
const DIVERGED: f64 = 4.0;

impl LrRange {
    /// The learning rates so far, each with the smoothed loss of its step.
    pub fn curve(&self) -> Vec<(f64, f64)> {
        self.lock().clone()
    }

    /// The rate at which the smoothed loss falls fastest against the log of the rate; none if it never falls. Slopes
    /// are fitted to windows of a tenth of the steps. The first tenth, whose smoothed losses are those of few batches,
    /// and all after the smallest loss are left out.
    pub fn steepest(&self) -> Option<f64> {
        let seen = self.lock();
        let window = (seen.len() / 10).max(2);
        let lowest = (0..seen.len()).min_by(|&a, &b| seen[a].1.total_cmp(&seen[b].1))?;
        let slopes = seen[seen.len() / 10..=lowest.max(seen.len() / 10)].windows(window).map(|points| {
            let [rates, losses] = [|p: &(f64, f64)| p.0.ln(), |p: &(f64, f64)| p.1]
                .map(|of| points.iter().map(of).sum::<f64>() / window as f64);
            let about = |(rate, loss): &(f64, f64)| (rate.ln() - rates, loss - losses);
            let [with, own] = [|(x, y): (f64, f64)| x * y, |(x, _): (f64, f64)| x * x]
                .map(|of| points.iter().map(about).map(of).sum::<f64>());
            (with / own, points[(window - 1) / 2].0)
        });
        slopes.min_by(|a, b| a.0.total_cmp(&b.0)).filter(|(slope, _)| *slope < 0.0).map(|(_, rate)| rate)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(f64, f64)>> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a step; false if its loss has diverged.
    ///
    /// # Errors
    /// An error if its rate is not above the one before.
    fn add(&self, rate: f64, loss: f64) -> Result<bool> {
        let mut seen = self.lock();
        if let Some((before, _)) = seen.last().filter(|(before, _)| rate <= *before) {
            let why = format!(
                "has a rate of {rate} after {before}: a test needs a schedule that rises, such as `optim::ExponentialLr`"
            );
            return Err(Error::config("LrRange", "schedule", why));
        }
        // The bias of a mean that began at 0 is taken out of each, so it is put back into the one before.
        let [with, without] = [seen.len() + 1, seen.len()].map(|count| 1.0 - SMOOTHING.powf(count as f64));
        let before = seen.last().map_or(0.0, |(_, smooth)| smooth * without);
        let smooth = (SMOOTHING * before + (1.0 - SMOOTHING) * loss) / with;
        let lowest = seen.iter().map(|(_, loss)| *loss).fold(f64::INFINITY, f64::min);
        if lowest > 0.0 && smooth > DIVERGED * lowest {
            return Ok(false);
        }
        seen.push((rate, smooth));
        Ok(true)
    }
}

impl<R: Runtime, M, B> Callback<R, M, B> for LrRange {
    fn on(&mut self, event: &Event<'_, R>, run: &mut Run<'_, R, M, B>) -> Result<()> {
        match event {
            Event::Begin if run.progress().step > 0 => {
                let why = "a range test is of a whole run, and this one goes on from a checkpoint: begin a new one";
                return Err(Error::config("LrRange", "resume", why));
            }
            Event::Begin => self.lock().clear(),
            Event::StepEnd(metrics) => {
                let loss = metrics.loss()?;
                // A step that was left out, or had no examples, says nothing of its rate.
                let counts = metrics.stepped() && metrics.weight()? > 0.0;
                if !loss.is_finite() || (counts && !self.add(metrics.learning_rate(), loss)?) {
                    run.control().stop("the loss has diverged at this learning rate");
                }
            }
            _ => {}
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A test that has seen these losses at rates of 1, 10, 100 and so on.
    fn seen(losses: &[f64]) -> LrRange {
        let range = LrRange::default();
        losses.iter().enumerate().for_each(|(k, loss)| assert!(range.add(10f64.powf(k as f64), *loss).unwrap()));
        range
    }

    #[test]
    fn the_steepest_rate_is_found_and_divergence_is_seen() {
        let range = seen(&[4.0, 4.0, 3.9, 0.5, 0.4, 4.0]);
        assert_eq!(range.steepest(), Some(100.0), "{:?}", range.curve());
        // The weighted mean of fast.ai, with its bias corrected.
        let weights = [0.98f64 * 0.98, 0.98, 1.0];
        let mean = (weights[0] * 4.0 + weights[1] * 4.0 + 3.9) / weights.iter().sum::<f64>();
        assert!((range.curve()[2].1 - mean).abs() < 1e-12);
        assert!(!range.add(1e7, 1e9).unwrap());
        assert_eq!(range.curve().len(), 6);
        let error = range.add(1.0, 1.0).unwrap_err().to_string();
        assert!(error.contains("schedule that rises") && error.contains("100000"), "{error}");
        // A loss of 0 or less, as of a likelihood, has no multiple.
        assert_eq!(seen(&[-1.0, -2.0, 3.0]).steepest(), Some(1.0));
        assert_eq!(seen(&[1.0, 2.0, 3.0]).steepest(), None);
    }
}
