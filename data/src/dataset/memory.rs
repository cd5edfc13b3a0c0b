//! Datasets of examples that are in memory.

use numcore::{Error, Result, Within};

use super::{Dataset, check_index};
use crate::Array;

/// A list of values, one per example.
///
/// ```
/// use data::{Dataset, InMemory};
///
/// let words = InMemory::new(vec!["warp", "weft"]);
/// assert_eq!(words.len(), 2);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InMemory<T> {
    values: Vec<T>,
}

impl<T> InMemory<T> {
    /// A dataset of these values.
    pub fn new(values: impl Into<Vec<T>>) -> Self {
        InMemory { values: values.into() }
    }

    /// All values.
    pub fn values(&self) -> &[T] {
        &self.values
    }
}

impl<T: Clone + Send + Sync> Dataset for InMemory<T> {
    type Example = T;

    fn len(&self) -> usize {
        self.values.len()
    }

    fn get(&self, index: usize) -> Result<T> {
        check_index("InMemory", index, self.len())?;
        Ok(self.values[index].clone())
    }
}

/// The rows of an array: PyTorch's `TensorDataset` of one tensor. [`Dataset::zip`] joins several.
///
/// ```
/// use data::{Array, Dataset, Rows};
/// # fn main() -> numcore::Result<()> {
/// let inputs = Rows::new(Array::new([3, 2], vec![0.0f32, 0.1, 1.0, 1.1, 2.0, 2.1])?)?;
/// let labels = Rows::new(Array::from_vec(vec![0i64, 1, 2]))?;
/// let (x, y) = inputs.zip(labels)?.get(1)?;
/// assert_eq!((x.to_vec::<f32>()?, y.to_vec::<i64>()?), (vec![1.0, 1.1], vec![1]));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rows {
    array: Array,
}

impl Rows {
    /// The rows along the first axis of `array`.
    ///
    /// # Errors
    /// Fails if the array has no axis.
    #[track_caller]
    pub fn new(array: Array) -> Result<Self> {
        match array.dims() {
            [] => Err(Error::shape("Rows", &[*array.shape()], "a single value has no rows")).at_caller(),
            _ => Ok(Rows { array }),
        }
    }

    /// The array of all rows.
    pub fn array(&self) -> &Array {
        &self.array
    }
}

impl Dataset for Rows {
    type Example = Array;

    fn len(&self) -> usize {
        self.array.dims()[0]
    }

    fn get(&self, index: usize) -> Result<Array> {
        self.array.row(index)
    }
}
