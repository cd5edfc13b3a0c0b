//! [`CalibrationError`]: whether predictions of probability `p` are right in a fraction `p` of cases.

use numcore::{Error, Result, Runtime, Tensor, Within};

use super::{ExactSum, Metric, accuracy::host_scores, bytes, scores};

/// The distance of confidence and accuracy, over equally wide bins of confidence: the probability of the best class.
///
/// Bin `k` of `n` has confidences in `k/n..(k+1)/n`, the last one 1 too (Guo et al. 2017, On calibration of modern
/// neural networks).
#[doc(alias("ECE", "MCE", "ExpectedCalibrationError"))]
#[derive(Clone, Debug, PartialEq)]
pub struct CalibrationError {
    is_worst: bool,
    bins: Vec<Bin>,
}

#[derive(Clone, Debug, Default, PartialEq)]
struct Bin {
    rows: u64,
    right: u64,
    confidence: ExactSum,
}

impl Bin {
    /// The rows times the distance of accuracy and mean confidence.
    fn gap(&self) -> f64 {
        let mut gap = self.confidence.clone();
        gap.add(-(self.right as f64));
        gap.value().abs()
    }
}

impl CalibrationError {
    /// Makes the expected calibration error: the mean distance over rows. A common number of bins is 15.
    ///
    /// # Errors
    /// An error without bins.
    #[track_caller]
    pub fn expected(bins: usize) -> Result<Self> {
        Self::new(bins, false).at_caller()
    }

    /// Makes the maximum calibration error: the greatest distance of a bin with rows.
    ///
    /// # Errors
    /// An error without bins.
    #[track_caller]
    pub fn worst(bins: usize) -> Result<Self> {
        Self::new(bins, true).at_caller()
    }

    fn new(bins: usize, is_worst: bool) -> Result<Self> {
        if bins == 0 {
            return Err(Error::range("CalibrationError", "bins", bins, "at least 1"));
        }
        Ok(CalibrationError { is_worst, bins: vec![Bin::default(); bins] })
    }

    /// Counts rows of `probabilities: [N, C]` with `C` = `classes` against the right classes `targets: [N]`; rows of
    /// the target [`IGNORED`](super::IGNORED) do not count.
    ///
    /// # Errors
    /// An error if the sizes do not fit, a target is no class, or a row's best probability is not in `0..=1`. Nothing
    /// is counted then.
    #[track_caller]
    pub fn update(&mut self, probabilities: &[f32], classes: usize, targets: &[i64]) -> Result<()> {
        const OP: &str = "CalibrationError::update";
        let best = |(row, target): (&[f32], usize)| {
            let class = scores::best(row);
            if (0.0..=1.0).contains(&row[class]) {
                return Ok((row[class], class == target));
            }
            let allowed = "a probability, in 0..=1: apply softmax to logits first";
            Err(Error::range(OP, "the probability of a row's best class", f64::from(row[class]), allowed))
        };
        let rows = scores::rows(OP, probabilities, classes, targets).at_caller()?;
        let rows: Vec<(f32, bool)> = rows.map(best).collect::<Result<_>>().at_caller()?;
        let last = self.bins.len() - 1;
        for (confidence, is_right) in rows {
            let confidence = f64::from(confidence);
            let bin = &mut self.bins[((confidence * (last + 1) as f64) as usize).min(last)];
            (bin.rows, bin.right) = (bin.rows + 1, bin.right + u64::from(is_right));
            bin.confidence.add(confidence);
        }
        Ok(())
    }

    /// Counts probabilities `[.., C]` against classes `[..]` (`i64`), both read back to the host.
    ///
    /// # Errors
    /// The errors of [`update`](CalibrationError::update), and an error if a tensor cannot be read.
    #[track_caller]
    pub fn update_tensors<R: Runtime>(&mut self, probabilities: &Tensor<R>, targets: &Tensor<R>) -> Result<()> {
        let classes = probabilities.dims().last().copied().unwrap_or(0);
        self.update(&host_scores(probabilities).at_caller()?, classes, &targets.to_vec::<i64>()?)
    }
}

impl Metric for CalibrationError {
    fn counted(&self) -> Vec<u8> {
        bytes::of(self.bins.iter().flat_map(|bin| [bin.rows, bin.right].into_iter().chain(bin.confidence.limbs())))
    }

    fn absorb(&mut self, counted: &[u8]) -> Result<()> {
        const OP: &str = "CalibrationError::absorb";
        let numbers = bytes::read(OP, counted)?;
        let parts = numbers.chunks(numbers.len().div_ceil(self.bins.len()).max(1));
        let bin = |part: &[u64]| {
            let (&[rows, right], confidence) = part.split_first_chunk::<2>()?;
            Some(Bin { rows, right, confidence: ExactSum::of_limbs(confidence)? })
        };
        let parts: Option<Vec<Bin>> = parts.map(bin).collect();
        let parts = parts.filter(|parts| parts.len() == self.bins.len()).ok_or_else(|| bytes::other(OP))?;
        for (own, other) in self.bins.iter_mut().zip(parts) {
            (own.rows, own.right) = (own.rows + other.rows, own.right + other.right);
            own.confidence.absorb(&other.confidence);
        }
        Ok(())
    }

    fn reset(&mut self) {
        self.bins.fill(Bin::default());
    }

    fn value(&self) -> Option<f64> {
        let rows: u64 = self.bins.iter().map(|bin| bin.rows).sum();
        let filled = || self.bins.iter().filter(|bin| bin.rows > 0);
        (rows > 0).then(|| match self.is_worst {
            true => filled().map(|bin| bin.gap() / bin.rows as f64).fold(0.0, f64::max),
            false => filled().map(Bin::gap).sum::<f64>() / rows as f64,
        })
    }
}
