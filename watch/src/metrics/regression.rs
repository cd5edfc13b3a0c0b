//! [`Regression`]: errors of predicted numbers.

use numcore::{Error, Result, Runtime, Tensor, Within};

use super::{ExactSum, Metric, bytes};

/// A metric of predicted numbers against the right ones. Its sums do not round, so the order of examples and their
/// division over ranks do not change it.
///
/// ```
/// use watch::metrics::{Metric, Regression};
/// # fn main() -> numcore::Result<()> {
/// let mut error = Regression::mae();
/// error.update(&[2.5, 0.0, 2.0, 8.0], &[3.0, -0.5, 2.0, 7.0])?;
/// assert_eq!(error.value(), Some(0.5));
/// # Ok(())
/// # }
/// ```
#[doc(alias("R2Score", "MeanAbsoluteError", "MeanSquaredError", "RMSE", "MAE", "MSE"))]
#[derive(Clone, Debug, PartialEq)]
pub struct Regression {
    of: Of,
    rows: u64,
    /// Of the sizes of errors, of their squares, of the targets, and of their squares.
    sums: [ExactSum; 4],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Of {
    Mae,
    Mse,
    Rmse,
    R2,
}

impl Regression {
    /// Makes the mean size of an error.
    pub fn mae() -> Self {
        Self::new(Of::Mae)
    }

    /// Makes the mean square of an error.
    pub fn mse() -> Self {
        Self::new(Of::Mse)
    }

    /// Makes the root of the mean square of an error.
    pub fn rmse() -> Self {
        Self::new(Of::Rmse)
    }

    /// Makes the coefficient of determination R²: 1 less the squared errors over the squared distances of targets from
    /// their mean. There is no value for targets that do not differ.
    pub fn r2() -> Self {
        Self::new(Of::R2)
    }

    fn new(of: Of) -> Self {
        Regression { of, rows: 0, sums: Default::default() }
    }

    /// Adds predictions `given: [N]` of `targets: [N]`.
    ///
    /// # Errors
    /// An error if the two differ in length; nothing is added then.
    #[track_caller]
    pub fn update(&mut self, given: &[f64], targets: &[f64]) -> Result<()> {
        if given.len() != targets.len() {
            let why = "each target needs one prediction";
            return Err(Error::lengths("Regression::update", &[given.len(), targets.len()], why)).at_caller();
        }
        let [sizes, squares, values, value_squares] = &mut self.sums;
        for (&given, &target) in given.iter().zip(targets) {
            let error = given - target;
            sizes.add(error.abs());
            add_product(squares, error, error);
            values.add(target);
            add_product(value_squares, target, target);
        }
        self.rows += targets.len() as u64;
        Ok(())
    }

    /// Adds predictions and targets of one number of elements, both read back to the host.
    ///
    /// # Errors
    /// An error if the sizes differ, or a tensor cannot be read.
    #[track_caller]
    pub fn update_tensors<R: Runtime>(&mut self, given: &Tensor<R>, targets: &Tensor<R>) -> Result<()> {
        self.update(&given.to_f64s()?, &targets.to_f64s()?)
    }

    /// The sum of the squared distances of targets from their mean.
    fn spread(&self) -> f64 {
        let [_, _, values, value_squares] = &self.sums;
        let (n, sum) = (self.rows as f64, values.value());
        let mut rest = values.clone();
        rest.add(-sum);
        // From a number near the mean, without rounding; then from the mean.
        let near = sum / n;
        let square = near * near;
        let (mut spread, mut off) = (value_squares.clone(), values.clone());
        add_product(&mut spread, -2.0 * near, sum);
        add_product(&mut spread, -2.0 * near, rest.value());
        add_product(&mut spread, n, square);
        add_product(&mut spread, n, near.mul_add(near, -square));
        add_product(&mut off, -n, near);
        spread.value() - off.value() * off.value() / n
    }
}

/// Adds a product without rounding: as its `f64` and the rest (Dekker).
fn add_product(sum: &mut ExactSum, a: f64, b: f64) {
    let product = a * b;
    sum.add(product);
    if product.is_finite() {
        sum.add(a.mul_add(b, -product));
    }
}

impl Metric for Regression {
    fn counted(&self) -> Vec<u8> {
        bytes::of([self.rows].into_iter().chain(self.sums.iter().flat_map(ExactSum::limbs)))
    }

    fn absorb(&mut self, counted: &[u8]) -> Result<()> {
        const OP: &str = "Regression::absorb";
        let numbers = bytes::read(OP, counted)?;
        let (&rows, sums) = numbers.split_first().ok_or_else(|| bytes::other(OP))?;
        let parts = sums.chunks(sums.len().div_ceil(self.sums.len()).max(1));
        let parts: Option<Vec<ExactSum>> = parts.map(ExactSum::of_limbs).collect();
        let parts = parts.filter(|parts| parts.len() == self.sums.len()).ok_or_else(|| bytes::other(OP))?;
        self.rows += rows;
        self.sums.iter_mut().zip(&parts).for_each(|(sum, part)| sum.absorb(part));
        Ok(())
    }

    fn reset(&mut self) {
        *self = Self::new(self.of);
    }

    fn value(&self) -> Option<f64> {
        let (n, [sizes, squares, ..]) = (self.rows as f64, &self.sums);
        match self.of {
            _ if self.rows == 0 => None,
            Of::Mae => Some(sizes.value() / n),
            Of::Mse => Some(squares.value() / n),
            Of::Rmse => Some((squares.value() / n).sqrt()),
            Of::R2 => Some(self.spread()).filter(|&spread| spread != 0.0).map(|spread| 1.0 - squares.value() / spread),
        }
    }
}
