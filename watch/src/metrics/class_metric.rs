//! [`ClassMetric`]: precision, recall and what combines them, from the counts of classes.

use numcore::{Error, Result, Runtime, Tensor, Within};

use super::{ConfusionMatrix, Metric};

/// The average over classes, as in scikit-learn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Average {
    /// One class against all others: scikit-learn's `binary`, whose class is 1.
    Of(usize),
    /// The mean over classes that occur as a target or a prediction.
    Macro,
    /// The mean over classes, weighted by their numbers of rows.
    Weighted,
    /// The metric of all classes' counts together. If every row has one class, precision, recall and F are the
    /// accuracy.
    Micro,
}

/// A metric of the counts of a class: `tp` rows that are right, `fp` wrong predictions of it, `fn` rows of it with
/// another prediction.
///
/// A class whose metric is 0/0 counts as 0, as with scikit-learn's default `zero_division`. One that is neither target
/// nor prediction is no part of a mean over classes. Without any row there is no value.
///
/// ```
/// use watch::metrics::{Average, ClassMetric, Metric};
/// # fn main() -> numcore::Result<()> {
/// let mut recall = ClassMetric::recall(2, Average::Of(1))?;
/// recall.update(&[1, 0, 1, 1], &[1, 1, 0, 1])?;
/// assert_eq!(recall.value(), Some(2.0 / 3.0));
/// # Ok(())
/// # }
/// ```
#[doc(alias("Precision", "Recall", "F1", "FBeta", "Jaccard", "IoU"))]
#[derive(Clone, Debug, PartialEq)]
pub struct ClassMetric {
    share: Share,
    average: Average,
    matrix: ConfusionMatrix,
}

/// The weights of `fp` and `fn` in `tp / (tp + fp·a + fn·b)`, of which every metric here is an example.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Share {
    fp: f64,
    fn_: f64,
}

impl ClassMetric {
    /// Makes the precision of `classes` classes: `tp / (tp + fp)`.
    ///
    /// # Errors
    /// An error if no memory holds their matrix, or the class of [`Average::Of`] is none of them.
    #[track_caller]
    pub fn precision(classes: usize, average: Average) -> Result<Self> {
        Self::new(classes, average, Share { fp: 1.0, fn_: 0.0 }).at_caller()
    }

    /// Makes the recall: `tp / (tp + fn)`. Its [`Average::Macro`] is the balanced accuracy.
    ///
    /// # Errors
    /// The errors of [`precision`](ClassMetric::precision).
    #[track_caller]
    pub fn recall(classes: usize, average: Average) -> Result<Self> {
        Self::new(classes, average, Share { fp: 0.0, fn_: 1.0 }).at_caller()
    }

    /// Makes the harmonic mean of precision and recall: `2·tp / (2·tp + fp + fn)`. As a metric of pixels it is Dice's
    /// coefficient.
    ///
    /// # Errors
    /// The errors of [`precision`](ClassMetric::precision).
    #[doc(alias = "Dice")]
    #[track_caller]
    pub fn f1(classes: usize, average: Average) -> Result<Self> {
        Self::f_beta(1.0, classes, average).at_caller()
    }

    /// Makes the mean in which recall weighs `beta²` times as much as precision.
    ///
    /// # Errors
    /// The errors of [`precision`](ClassMetric::precision), and an error unless `beta` is finite and not negative.
    #[track_caller]
    pub fn f_beta(beta: f64, classes: usize, average: Average) -> Result<Self> {
        if !(0.0..=f64::MAX).contains(&beta) {
            return Err(Error::range("ClassMetric::f_beta", "beta", beta, "finite, and not negative")).at_caller();
        }
        let recall = beta * beta / (1.0 + beta * beta);
        // The square of a great beta may be infinite.
        let recall = if recall.is_nan() { 1.0 } else { recall };
        Self::new(classes, average, Share { fp: 1.0 - recall, fn_: recall }).at_caller()
    }

    /// Makes the intersection over union, `tp / (tp + fp + fn)`: of pixels for segmentation, where its
    /// [`Average::Macro`] is the mean IoU.
    ///
    /// # Errors
    /// The errors of [`precision`](ClassMetric::precision).
    #[track_caller]
    pub fn iou(classes: usize, average: Average) -> Result<Self> {
        Self::new(classes, average, Share { fp: 1.0, fn_: 1.0 }).at_caller()
    }

    fn new(classes: usize, average: Average, share: Share) -> Result<Self> {
        if let Average::Of(class) = average
            && class >= classes
        {
            let why = format!("there is no class {class} among {classes}: they are numbered from 0");
            return Err(Error::config("ClassMetric", "average", why));
        }
        Ok(ClassMetric { share, average, matrix: ConfusionMatrix::new(classes)? })
    }

    /// Counts predicted classes `given: [N]` against the right ones `targets: [N]`, as [`ConfusionMatrix::update`]
    /// does.
    ///
    /// # Errors
    /// An error if the two differ in length, or one of them has a value that is no class; nothing is counted then.
    #[track_caller]
    pub fn update(&mut self, given: &[i64], targets: &[i64]) -> Result<()> {
        self.matrix.update(given, targets)
    }

    /// Counts the classes of the highest scores `[.., C]`, as [`ConfusionMatrix::update_tensors`] does.
    ///
    /// # Errors
    /// An error if the sizes do not fit, a target is no class, or a tensor cannot be read.
    #[track_caller]
    pub fn update_tensors<R: Runtime>(&mut self, scores: &Tensor<R>, targets: &Tensor<R>) -> Result<()> {
        self.matrix.update_tensors(scores, targets)
    }

    /// The counts.
    pub fn matrix(&self) -> &ConfusionMatrix {
        &self.matrix
    }

    /// The metric of these classes' counts together; `None` for 0/0.
    fn of(&self, classes: impl Iterator<Item = usize> + Clone) -> Option<f64> {
        let sum = |count: &dyn Fn(usize) -> u64| classes.clone().map(count).sum::<u64>();
        let right = sum(&|class| self.matrix.of(class, class));
        let (rows, given) = (sum(&|class| self.matrix.rows_of(class)), sum(&|class| self.matrix.given(class)));
        let whole = right as f64 + self.share.fp * (given - right) as f64 + self.share.fn_ * (rows - right) as f64;
        (whole > 0.0).then(|| right as f64 / whole)
    }
}

impl Metric for ClassMetric {
    fn counted(&self) -> Vec<u8> {
        self.matrix.counted()
    }

    fn absorb(&mut self, counted: &[u8]) -> Result<()> {
        self.matrix.absorb(counted)
    }

    fn reset(&mut self) {
        self.matrix.reset();
    }

    fn value(&self) -> Option<f64> {
        let rows = self.matrix.count();
        if rows == 0 {
            return None;
        }
        let classes = 0..self.matrix.classes();
        let of = |class| self.of(class..class + 1).unwrap_or(0.0);
        Some(match self.average {
            Average::Of(class) => of(class),
            Average::Micro => self.of(classes).unwrap_or(0.0),
            Average::Macro => {
                let occurs = |class: &usize| self.matrix.rows_of(*class) + self.matrix.given(*class) > 0;
                let known: Vec<f64> = classes.filter(occurs).map(of).collect();
                known.iter().sum::<f64>() / known.len() as f64
            }
            Average::Weighted => {
                classes.map(|class| of(class) * self.matrix.rows_of(class) as f64).sum::<f64>() / rows as f64
            }
        })
    }
}
