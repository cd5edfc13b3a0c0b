//! Metrics of an evaluation, exact over ranks.
//!
//! A metric counts on the host, in integers or in sums that never round. So it does not depend on the division of
//! examples into batches and over ranks: [`over_ranks`] gives the bits that one rank would have. A metric without a
//! value (the accuracy of no examples, the area under a curve of one class) has the value `None`.
//!
//! ```
//! use watch::metrics::{Accuracy, IGNORED, Metric};
//! # fn main() -> numcore::Result<()> {
//! let mut accuracy = Accuracy::new();
//! //                 scores of 3 classes for each of 3 rows
//! accuracy.update(&[0.1, 0.7, 0.2, 0.5, 0.3, 0.2, 0.0, 0.0, 1.0], 3, &[1, 2, IGNORED])?;
//! assert_eq!(accuracy.value(), Some(0.5));
//! # Ok(())
//! # }
//! ```

mod accuracy;
mod area_under_curve;
mod bytes;
mod calibration;
mod class_metric;
mod confusion;
mod detection;
mod exact_sum;
mod mean;
mod regression;
mod scores;
mod texts;

pub use accuracy::Accuracy;
pub use area_under_curve::AreaUnderCurve;
pub use calibration::CalibrationError;
pub use class_metric::{Average, ClassMetric};
pub use confusion::ConfusionMatrix;
pub use detection::{Detection, MeanAveragePrecision};
pub use exact_sum::ExactSum;
pub use mean::{Mean, Perplexity};
pub use regression::Regression;
pub use texts::{Bleu, ErrorRate, Rouge};

use comm::{Collectives, Communicator};
use numcore::{Result, Runtime};

/// The target of a row that does not count: PyTorch's `ignore_index`.
pub const IGNORED: i64 = -100;

/// A count over the examples of an evaluation, on every rank over its own.
pub trait Metric {
    /// The counts so far, as [`absorb`](Metric::absorb) reads them.
    fn counted(&self) -> Vec<u8>;

    /// Adds the counts of another metric of this kind, from another rank for one.
    ///
    /// # Errors
    /// An error if the bytes are not the counts of such a metric.
    fn absorb(&mut self, counted: &[u8]) -> Result<()>;

    /// Resets all counts.
    fn reset(&mut self);

    /// The metric, or none if it has no value.
    fn value(&self) -> Option<f64>;
}

/// The metric of all ranks' examples, on every rank. Blocks; all ranks call it.
///
/// # Errors
/// An error if the communicator fails, or a rank has another kind of metric.
#[track_caller]
pub fn over_ranks<M: Metric + Clone, R: Runtime>(metric: &M, comm: &(impl Communicator<R> + ?Sized)) -> Result<M> {
    let all = comm.exchange(&metric.counted())?;
    let mut sum = metric.clone();
    sum.reset();
    all.iter().try_for_each(|counted| sum.absorb(counted))?;
    Ok(sum)
}
