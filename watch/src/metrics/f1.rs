//! [`F1`]: precision and recall in one number.

use numcore::{Error, Result, Within};

use super::{ConfusionMatrix, Metric};

/// The average of the classes' own F1, as in scikit-learn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Average {
    /// One class against all others: scikit-learn's `binary`, whose class is 1.
    Of(usize),
    /// The mean over classes that occur as a target or a prediction.
    Macro,
    /// The mean over classes, weighted by their numbers of rows.
    Weighted,
    /// The F1 of all classes' counts together. If every row has one class, it is the accuracy.
    Micro,
}

/// The harmonic mean of precision and recall: `2·tp / (2·tp + fp + fn)`.
///
/// A class that is neither target nor prediction of any row has an F1 of 0/0. As in scikit-learn with its default
/// `zero_division`, that is 0 for [`Average::Of`], and such classes are no part of the other averages. Without any row
/// there is no value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct F1 {
    average: Average,
    matrix: ConfusionMatrix,
}

impl F1 {
    /// Makes the metric of `classes` classes.
    ///
    /// # Errors
    /// An error if no memory holds their matrix, or the class of [`Average::Of`] is none of them.
    #[track_caller]
    pub fn new(classes: usize, average: Average) -> Result<Self> {
        if let Average::Of(class) = average
            && class >= classes
        {
            let why = format!("there is no class {class} among {classes}: they are numbered from 0");
            return Err(Error::config("F1", "average", why)).at_caller();
        }
        Ok(F1 { average, matrix: ConfusionMatrix::new(classes)? })
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

    /// The counts.
    pub fn matrix(&self) -> &ConfusionMatrix {
        &self.matrix
    }

    /// The F1 of one class: twice the rows that are right, over the rows of the class plus the predictions of it;
    /// `None` for 0/0.
    fn of_class(&self, class: usize) -> Option<f64> {
        ratio(2 * self.matrix.of(class, class), self.matrix.rows_of(class) + self.matrix.given(class))
    }
}

fn ratio(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

impl Metric for F1 {
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
        let classes = || 0..self.matrix.classes();
        match self.average {
            Average::Of(class) => Some(self.of_class(class).unwrap_or(0.0)),
            Average::Micro => self.matrix.value(),
            Average::Macro => {
                let known: Vec<f64> = classes().filter_map(|class| self.of_class(class)).collect();
                Some(known.iter().sum::<f64>() / known.len() as f64)
            }
            Average::Weighted => {
                let part = |class| self.of_class(class).unwrap_or(0.0) * self.matrix.rows_of(class) as f64;
                Some(classes().map(part).sum::<f64>() / rows as f64)
            }
        }
    }
}
