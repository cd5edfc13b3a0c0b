//! Examples by number.

mod adaptors;
mod memory;

use std::sync::Arc;

pub use adaptors::{Concat, Map, Subset, Zip};
pub use memory::{InMemory, Rows};
use numcore::{Error, Result};

/// A collection whose examples can be read in any order, from several threads at once: PyTorch's map-style `Dataset`.
///
/// [`get`](Dataset::get) must be a function of the index alone; what is random belongs into
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
    /// What an index gives.
    type Example;

    /// How many examples there are.
    fn len(&self) -> usize;

    /// Whether there is none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The example with this number.
    ///
    /// # Errors
    /// If there is none, or its record is malformed. Other examples stay readable.
    fn get(&self, index: usize) -> Result<Self::Example>;

    /// Every example passed through a function.
    fn map<T, F>(self, f: F) -> Map<Self, F>
    where
        Self: Sized,
        F: Fn(Self::Example) -> Result<T> + Send + Sync,
    {
        Map::new(self, f)
    }

    /// Pairs with the examples of another dataset of this length.
    ///
    /// # Errors
    /// If the lengths differ.
    fn zip<D: Dataset>(self, other: D) -> Result<Zip<Self, D>>
    where
        Self: Sized,
    {
        Zip::new(self, other)
    }

    /// The examples with these numbers, in this order.
    ///
    /// # Errors
    /// If a number names no example.
    fn subset(self, indices: impl IntoIterator<Item = usize>) -> Result<Subset<Self>>
    where
        Self: Sized,
    {
        Subset::new(self, indices.into_iter().collect())
    }

    /// Two parts without an example in common, the first with `first` examples, at random by `seed`: PyTorch's `random_split`.
    ///
    /// # Errors
    /// If there are fewer examples than `first`.
    fn random_split(self, first: usize, seed: u64) -> Result<[Subset<Arc<Self>>; 2]>
    where
        Self: Sized,
    {
        let len = self.len();
        if first > len {
            return Err(Error::argument("random_split", format!("{first} of {len} examples cannot be taken")));
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

/// An error for an index past the end.
pub(crate) fn check_index(op: &'static str, index: usize, len: usize) -> Result<()> {
    if index < len { Ok(()) } else { Err(Error::argument(op, format!("there is no example {index} among {len}"))) }
}
