//! [`Accuracy`]: the fraction of rows whose right class is among the best.

use numcore::{Result, Runtime, Tensor, Within};

use super::{Metric, bytes, scores};

/// The fraction of rows whose right class is among the `k` of the highest scores. Of equal scores the first class
/// counts as higher, so exactly `k` classes count as best.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Accuracy {
    k: usize,
    right: u64,
    rows: u64,
}

impl Default for Accuracy {
    fn default() -> Self {
        Self::new()
    }
}

impl Accuracy {
    /// Counts rows whose right class has the highest score.
    pub fn new() -> Self {
        Self::top(1)
    }

    /// Counts rows whose right class is among the `k` best.
    pub fn top(k: usize) -> Self {
        Accuracy { k, right: 0, rows: 0 }
    }

    /// Counts rows of `scores: [N, C]` against the right classes `targets: [N]`, with `C` = `classes`; rows of the
    /// target [`IGNORED`](super::IGNORED) do not count.
    ///
    /// # Errors
    /// An error if the number of scores is not rows times classes, or a target is no class; nothing is counted then.
    #[track_caller]
    pub fn update(&mut self, scores: &[f32], classes: usize, targets: &[i64]) -> Result<()> {
        for (row, target) in scores::rows("Accuracy::update", scores, classes, targets).at_caller()? {
            self.rows += 1;
            self.right += u64::from(scores::place(row, target) < self.k);
        }
        Ok(())
    }

    /// Counts scores `[.., C]` against classes `[..]` (`i64`), both read back to the host.
    ///
    /// # Errors
    /// The errors of [`update`](Accuracy::update), and an error if a tensor cannot be read.
    #[track_caller]
    pub fn update_tensors<R: Runtime>(&mut self, scores: &Tensor<R>, targets: &Tensor<R>) -> Result<()> {
        let classes = scores.dims().last().copied().unwrap_or(0);
        self.update(&host_scores(scores).at_caller()?, classes, &targets.to_vec::<i64>()?)
    }

    /// The number of counted rows.
    pub fn count(&self) -> u64 {
        self.rows
    }
}

/// The scores as `f32`, in which halves are exact and order is kept.
pub(super) fn host_scores<R: Runtime>(scores: &Tensor<R>) -> Result<Vec<f32>> {
    if scores.dtype() == numcore::DType::F32 {
        return scores.to_vec();
    }
    Ok(scores.to_f64s()?.into_iter().map(|x| x as f32).collect())
}

impl Metric for Accuracy {
    fn counted(&self) -> Vec<u8> {
        bytes::of([self.k as u64, self.right, self.rows])
    }

    fn absorb(&mut self, counted: &[u8]) -> Result<()> {
        const OP: &str = "Accuracy::absorb";
        match bytes::read(OP, counted)?[..] {
            [k, right, rows] if k == self.k as u64 => {
                (self.right, self.rows) = (self.right + right, self.rows + rows);
                Ok(())
            }
            _ => Err(bytes::other(OP)),
        }
    }

    fn reset(&mut self) {
        (self.right, self.rows) = (0, 0);
    }

    fn value(&self) -> Option<f64> {
        (self.rows > 0).then(|| self.right as f64 / self.rows as f64)
    }
}
