//! Metrics of any type, counted over the batches of an evaluation.

use data::Batch;
use numcore::Result;

use crate::metrics::Metric;

/// A metric that is counted over batches, whatever its type.
pub(super) trait CountedMetric<B, O> {
    fn reset(&mut self);
    fn update(&mut self, outputs: &O, batch: &Batch<B>) -> Result<()>;
    fn counted(&self) -> Vec<u8>;
    /// The value of the metric from the counts of all ranks.
    fn value_of(&self, all: &[Vec<u8>]) -> Result<Option<f64>>;
}

/// A metric with the function that counts a batch.
pub(super) struct MetricWithUpdate<X, F> {
    pub metric: X,
    pub update: F,
}

impl<B, O, X: Metric + Clone, F: FnMut(&mut X, &O, &Batch<B>) -> Result<()>> CountedMetric<B, O>
    for MetricWithUpdate<X, F>
{
    fn reset(&mut self) {
        self.metric.reset();
    }

    fn update(&mut self, outputs: &O, batch: &Batch<B>) -> Result<()> {
        (self.update)(&mut self.metric, outputs, batch)
    }

    fn counted(&self) -> Vec<u8> {
        self.metric.counted()
    }

    fn value_of(&self, all: &[Vec<u8>]) -> Result<Option<f64>> {
        let mut sum = self.metric.clone();
        sum.reset();
        all.iter().try_for_each(|counted| sum.absorb(counted))?;
        Ok(sum.value())
    }
}
