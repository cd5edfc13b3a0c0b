//! [`AreaUnderCurve`]: how well scores separate examples of two classes.

use numcore::{Error, Result, Within};

use super::{IGNORED, Metric, bytes};

/// The area under a curve of all thresholds of a score, exactly.
///
/// Every score is kept, 8 bytes an example; combining ranks puts the scores of all ranks on each.
#[doc(alias("AUROC", "AUC", "AUPRC", "AveragePrecision"))]
#[derive(Clone, Debug, PartialEq)]
pub struct AreaUnderCurve {
    curve: Curve,
    positive: Vec<f64>,
    negative: Vec<f64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Curve {
    Roc,
    PrecisionRecall,
}

impl AreaUnderCurve {
    /// Makes the area under the receiver operating characteristic: true positives over false positives.
    ///
    /// It is the probability that a positive example has a higher score than a negative one, equal scores counting a
    /// half. There is no value without examples of both classes.
    pub fn roc() -> Self {
        Self::of(Curve::Roc)
    }

    /// Makes the average precision: the precision at each threshold, weighted by the recall that it adds.
    ///
    /// It is scikit-learn's `average_precision_score`, a step function and no trapezoids. There is no value without a
    /// positive example.
    pub fn precision_recall() -> Self {
        Self::of(Curve::PrecisionRecall)
    }

    fn of(curve: Curve) -> Self {
        AreaUnderCurve { curve, positive: Vec::new(), negative: Vec::new() }
    }

    /// Keeps scores of examples of class 0 or 1; examples of the target [`IGNORED`] do not count.
    ///
    /// # Errors
    /// An error if scores and targets differ in number, a score is NaN, or a target is neither 0 nor 1; nothing is kept
    /// then.
    #[track_caller]
    pub fn update(&mut self, scores: &[f64], targets: &[i64]) -> Result<()> {
        const OP: &str = "AreaUnderCurve::update";
        if scores.len() != targets.len() {
            return Err(Error::lengths(OP, &[scores.len(), targets.len()], "each target needs one score")).at_caller();
        }
        for (i, (score, target)) in scores.iter().zip(targets).enumerate() {
            match *target {
                IGNORED => {}
                0 | 1 if score.is_nan() => {
                    let allowed = format!("a number, to have a place among the others; it is score {i}");
                    return Err(Error::range(OP, "score", *score, allowed)).at_caller();
                }
                0 | 1 => {}
                other => {
                    let allowed = format!("0, 1, or {IGNORED} where it does not count; it is target {i}");
                    return Err(Error::range(OP, "target", other, allowed)).at_caller();
                }
            }
        }
        for (&score, &target) in scores.iter().zip(targets) {
            match target {
                0 => self.negative.push(score),
                1 => self.positive.push(score),
                _ => {}
            }
        }
        Ok(())
    }

    /// The numbers of positive and of all examples of each score, from the lowest.
    fn steps(&self) -> Vec<(u128, u128)> {
        let tagged = |scores: &[f64], is_positive| scores.iter().map(move |&s| (s, is_positive)).collect::<Vec<_>>();
        let mut all = [tagged(&self.positive, true), tagged(&self.negative, false)].concat();
        all.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
        // Zeros of either sign are equal.
        let equal = all.chunk_by(|a, b| a.0 == b.0);
        equal.map(|equal| (equal.iter().filter(|(_, is)| *is).count() as u128, equal.len() as u128)).collect()
    }

    /// Twice the number of pairs of a positive and a negative example in which the positive one is higher, an equal
    /// pair counting a half. It is computed from the ranks of the positive examples among all, equal scores sharing
    /// their mean rank (Mann and Whitney's U, in integers).
    fn twice_won(&self) -> u128 {
        let (mut before, mut twice_ranks) = (0, 0u128);
        for (positive, n) in self.steps() {
            twice_ranks += positive * (2 * before + n + 1);
            before += n;
        }
        let positive = self.positive.len() as u128;
        twice_ranks - positive * (positive + 1)
    }

    /// The sum over thresholds of precision times the positive examples that the threshold adds.
    fn precisions(&self) -> f64 {
        let (mut right, mut given, mut sum) = (0, 0, 0.0);
        for (positive, n) in self.steps().into_iter().rev() {
            (right, given) = (right + positive, given + n);
            sum += positive as f64 * right as f64 / given as f64;
        }
        sum
    }
}

impl Metric for AreaUnderCurve {
    fn counted(&self) -> Vec<u8> {
        let bits = self.positive.iter().chain(&self.negative).map(|score| score.to_bits());
        bytes::of([self.positive.len() as u64].into_iter().chain(bits))
    }

    fn absorb(&mut self, counted: &[u8]) -> Result<()> {
        const OP: &str = "AreaUnderCurve::absorb";
        let numbers = bytes::read(OP, counted)?;
        let (&positive, scores) = numbers.split_first().ok_or_else(|| bytes::other(OP))?;
        let positive = usize::try_from(positive).ok().filter(|&n| n <= scores.len()).ok_or_else(|| bytes::other(OP))?;
        let (positive, negative) = scores.split_at(positive);
        self.positive.extend(positive.iter().map(|&bits| f64::from_bits(bits)));
        self.negative.extend(negative.iter().map(|&bits| f64::from_bits(bits)));
        Ok(())
    }

    fn reset(&mut self) {
        self.positive.clear();
        self.negative.clear();
    }

    fn value(&self) -> Option<f64> {
        let (positive, negative) = (self.positive.len() as u128, self.negative.len() as u128);
        match self.curve {
            Curve::Roc => (positive * negative > 0).then(|| self.twice_won() as f64 / (2 * positive * negative) as f64),
            Curve::PrecisionRecall => (positive > 0).then(|| self.precisions() / positive as f64),
        }
    }
}
