//! [`ConfusionMatrix`]: counts of each class given for each right class.

use numcore::{Error, Result, Runtime, Tensor, Within};

use super::{IGNORED, Metric, accuracy::host_scores, bytes, scores};
use crate::sink::Picture;

/// Counts of rows by their right class (row of the matrix) and by their predicted class (column).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfusionMatrix {
    classes: usize,
    counts: Vec<u64>,
}

impl ConfusionMatrix {
    /// Makes the matrix of `classes` classes, with all counts 0.
    ///
    /// # Errors
    /// An error if the matrix would have more elements than there are addresses.
    #[track_caller]
    pub fn new(classes: usize) -> Result<Self> {
        let cells = classes.checked_mul(classes).filter(|n| n.checked_mul(8).is_some_and(|b| b <= isize::MAX as usize));
        let many = || Error::range("ConfusionMatrix::new", "classes", classes, "less, for memory to hold their square");
        let cells = cells.ok_or_else(many).at_caller()?;
        Ok(ConfusionMatrix { classes, counts: vec![0; cells] })
    }

    /// Counts predicted classes `given: [N]` against the right ones `targets: [N]`; rows of the target [`IGNORED`] do
    /// not count.
    ///
    /// # Errors
    /// An error if the two differ in length, or one of them has a value that is no class; nothing is counted then.
    #[track_caller]
    pub fn update(&mut self, given: &[i64], targets: &[i64]) -> Result<()> {
        const OP: &str = "ConfusionMatrix::update";
        if given.len() != targets.len() {
            return Err(Error::lengths(OP, &[given.len(), targets.len()], "each target needs one class")).at_caller();
        }
        let classes = self.classes;
        let rows = given.iter().zip(targets).filter(|(_, target)| **target != IGNORED);
        let cell = |(&given, &target): (&i64, &i64)| {
            Ok(scores::class(OP, target, classes)? * classes + scores::class(OP, given, classes)?)
        };
        let cells: Vec<usize> = rows.map(cell).collect::<Result<_>>().at_caller()?;
        cells.into_iter().for_each(|cell| self.counts[cell] += 1);
        Ok(())
    }

    /// Counts the classes of the highest scores `[.., C]` against classes `[..]` (`i64`), both read back to the host.
    ///
    /// # Errors
    /// An error if the sizes do not fit, a target is no class, or a tensor cannot be read.
    #[track_caller]
    pub fn update_tensors<R: Runtime>(&mut self, scores: &Tensor<R>, targets: &Tensor<R>) -> Result<()> {
        let (values, targets) = (host_scores(scores).at_caller()?, targets.to_vec::<i64>()?);
        if Some(values.len()) != targets.len().checked_mul(self.classes) {
            let why = format!("{} scores are not {} rows of {} classes", values.len(), targets.len(), self.classes);
            return Err(Error::lengths("ConfusionMatrix::update_tensors", &[values.len(), targets.len()], why))
                .at_caller();
        }
        let given = values.chunks(self.classes.max(1)).map(|row| scores::best(row) as i64);
        let given: Vec<i64> = given.collect();
        self.update(&given, &targets)
    }

    /// The number of classes.
    pub fn classes(&self) -> usize {
        self.classes
    }

    /// The number of rows of class `right` with the predicted class `given`; 0 if one of them is no class.
    pub fn of(&self, right: usize, given: usize) -> u64 {
        if right < self.classes && given < self.classes { self.counts[right * self.classes + given] } else { 0 }
    }

    /// The number of counted rows.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The number of rows whose right class this is.
    pub fn rows_of(&self, class: usize) -> u64 {
        (0..self.classes).map(|given| self.of(class, given)).sum()
    }

    /// The number of rows whose predicted class this is.
    pub fn given(&self, class: usize) -> u64 {
        (0..self.classes).map(|right| self.of(right, class)).sum()
    }

    /// A picture of the matrix, for a [sink](crate::sink::Value::Image): the brightness of a cell is its fraction of
    /// the rows of its right class.
    ///
    /// # Errors
    /// An error if there is no class.
    #[track_caller]
    pub fn to_image(&self) -> Result<Picture> {
        /// The side of a cell in pixels.
        const CELL: usize = 16;
        let side = self.classes * CELL;
        let share = |right: usize, given: usize| self.of(right, given) as f32 / self.rows_of(right).max(1) as f32;
        let shares: Vec<f32> = (0..self.classes).flat_map(|r| (0..self.classes).map(move |g| share(r, g))).collect();
        let pixel = |at: usize| shares[at / side / CELL * self.classes + at % side / CELL];
        let numbers: Vec<f32> = (0..side * side).map(pixel).collect();
        Picture::of_numbers(side as u32, side as u32, 1, &numbers)
    }
}

impl Metric for ConfusionMatrix {
    fn counted(&self) -> Vec<u8> {
        bytes::of(self.counts.iter().copied())
    }

    fn absorb(&mut self, counted: &[u8]) -> Result<()> {
        const OP: &str = "ConfusionMatrix::absorb";
        let counts = bytes::read(OP, counted)?;
        if counts.len() != self.counts.len() {
            return Err(bytes::other(OP));
        }
        self.counts.iter_mut().zip(counts).for_each(|(sum, n)| *sum += n);
        Ok(())
    }

    fn reset(&mut self) {
        self.counts.fill(0);
    }

    /// The accuracy.
    fn value(&self) -> Option<f64> {
        let right: u64 = (0..self.classes).map(|class| self.of(class, class)).sum();
        (self.count() > 0).then(|| right as f64 / self.count() as f64)
    }
}
