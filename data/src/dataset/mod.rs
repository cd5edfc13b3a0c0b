//! Datasets: random access to examples by index.

mod adaptors;
mod memory;

use std::sync::Arc;

pub use adaptors::{Concat, Map, Subset, Zip};
pub use memory::{InMemory, Rows};
use numcore::{Error, Result};

/// A collection whose examples can be read in any order, from several threads at once: PyTorch's map-style `Dataset`.
///
/// [`get`](Dataset::get) must be a function of the index alone. Randomness belongs in
/// [`Loader::augment`](crate::Loader::augment), which is keyed by example and epoch.
///
/// ```
/// use data::Dataset;
/// use numcore::Result;
///
/// /// The squares of 0 to 99.
/// struct Squares;
///
/// impl Dataset for Squares {
///     type Example = f32;
///
///     fn len(&self) -> usize {
///         100
///     }
///
///     fn get(&self, index: usize) -> Result<f32> {
///         Ok((index * index) as f32)
///     }
/// }
/// ```
pub trait Dataset: Send + Sync {
    /// The type of an example.
    type Example;

    /// The number of examples.
    fn len(&self) -> usize;

    /// Tells whether the dataset has no example.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The example with this index, from 0.
    ///
    /// # Errors
    /// Fails if there is no such example, or its record is malformed. Other examples stay readable.
    fn get(&self, index: usize) -> Result<Self::Example>;

    /// Passes every example through a function when it is read.
    fn map<T, F>(self, f: F) -> Map<Self, F>
    where
        Self: Sized,
        F: Fn(Self::Example) -> Result<T> + Send + Sync,
    {
        Map::new(self, f)
    }

    /// Pairs each example with the one of equal index in another dataset.
    ///
    /// # Errors
    /// Fails if the datasets differ in length.
    fn zip<D: Dataset>(self, other: D) -> Result<Zip<Self, D>>
    where
        Self: Sized,
    {
        Zip::new(self, other)
    }

    /// The examples with these indices, in this order; an index may repeat.
    ///
    /// # Errors
    /// Fails if an index is out of range.
    fn subset(self, indices: impl IntoIterator<Item = usize>) -> Result<Subset<Self>>
    where
        Self: Sized,
    {
        Subset::new(self, indices.into_iter().collect())
    }

    /// Splits the examples at random, by `seed`, into `first` examples and the rest: PyTorch's `random_split`.
    ///
    /// # Errors
    /// Fails if there are fewer examples than `first`.
    fn random_split(self, first: usize, seed: u64) -> Result<[Subset<Arc<Self>>; 2]>
    where
        Self: Sized,
    {
        let len = self.len();
        if first > len {
            return Err(Error::range("random_split", "first", first, format!("at most {len}, the number of examples")));
        }
        let order = crate::order::KeyedPermutation::new(len as u64, seed, 0);
        let indices: Vec<usize> = (0..len as u64).map(|place| order.number(place) as usize).collect();
        let shared = Arc::new(self);
        let part = |indices: &[usize]| Subset::new(Arc::clone(&shared), indices.to_vec());
        Ok([part(&indices[..first])?, part(&indices[first..])?])
    }
}

macro_rules! forward {
    ($($pointer:ty),*) => {$(
        impl<D: Dataset + ?Sized> Dataset for $pointer {
            type Example = D::Example;

            fn len(&self) -> usize {
                (**self).len()
            }

            fn get(&self, index: usize) -> Result<D::Example> {
                (**self).get(index)
            }
        }
    )*};
}

forward!(&D, Box<D>, Arc<D>);

/// Fails for an index past the end.
pub(crate) fn check_index(op: &'static str, index: usize, len: usize) -> Result<()> {
    if index < len { Ok(()) } else { Err(Error::range(op, "index", index, format!("in 0..{len}"))) }
}
