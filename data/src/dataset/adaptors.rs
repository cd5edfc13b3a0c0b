//! Datasets made of other datasets.

use numcore::{Error, Result};

use super::{Dataset, check_index};

/// A dataset whose examples pass through a function: [`Dataset::map`].
#[derive(Clone, Debug)]
pub struct Map<D, F> {
    inner: D,
    f: F,
}

impl<D, F> Map<D, F> {
    pub(super) fn new(inner: D, f: F) -> Self {
        Map { inner, f }
    }
}

impl<D, F, T> Dataset for Map<D, F>
where
    D: Dataset,
    F: Fn(D::Example) -> Result<T> + Send + Sync,
{
    type Example = T;

    fn len(&self) -> usize {
        self.inner.len()
    }

    fn get(&self, index: usize) -> Result<T> {
        (self.f)(self.inner.get(index)?)
    }
}

/// Pairs of the examples of two datasets with equal index: [`Dataset::zip`].
#[derive(Clone, Debug)]
pub struct Zip<A, B> {
    a: A,
    b: B,
}

impl<A: Dataset, B: Dataset> Zip<A, B> {
    pub(super) fn new(a: A, b: B) -> Result<Self> {
        match (a.len(), b.len()) {
            (m, n) if m == n => Ok(Zip { a, b }),
            (m, n) => {
                let why = format!("datasets of {m} and {n} examples make no pairs");
                Err(Error::lengths("zip", &[m, n], why))
            }
        }
    }
}

impl<A: Dataset, B: Dataset> Dataset for Zip<A, B> {
    type Example = (A::Example, B::Example);

    fn len(&self) -> usize {
        self.a.len()
    }

    fn get(&self, index: usize) -> Result<Self::Example> {
        Ok((self.a.get(index)?, self.b.get(index)?))
    }
}

/// Some examples of a dataset, in a given order: [`Dataset::subset`].
#[derive(Clone, Debug)]
pub struct Subset<D> {
    inner: D,
    indices: Vec<usize>,
}

impl<D: Dataset> Subset<D> {
    pub(super) fn new(inner: D, indices: Vec<usize>) -> Result<Self> {
        let len = inner.len();
        indices.iter().try_for_each(|&index| check_index("subset", index, len))?;
        Ok(Subset { inner, indices })
    }
}

impl<D: Dataset> Dataset for Subset<D> {
    type Example = D::Example;

    fn len(&self) -> usize {
        self.indices.len()
    }

    fn get(&self, index: usize) -> Result<D::Example> {
        check_index("Subset", index, self.len())?;
        self.inner.get(self.indices[index])
    }
}

/// Datasets one after another, as a [`Mixture`](crate::order::Mixture) reads them. Boxed, they may be of different
/// types.
///
/// ```
/// use data::{Array, Concat, Dataset, InMemory};
/// # fn main() -> numcore::Result<()> {
/// let parts: Vec<Box<dyn Dataset<Example = i64>>> =
///     vec![Box::new(InMemory::new(vec![1, 2])), Box::new(InMemory::new(vec![3]).map(|x: i64| Ok(10 * x)))];
/// let all = Concat::new(parts);
/// assert_eq!((0..3).map(|i| all.get(i)).collect::<numcore::Result<Vec<_>>>()?, [1, 2, 30]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Concat<D> {
    parts: Vec<D>,
    /// The end of each part: the index after its last example.
    ends: Vec<usize>,
}

impl<D: Dataset> Concat<D> {
    /// Puts the parts one after another, in this order.
    pub fn new(parts: Vec<D>) -> Self {
        let add = |end: &mut usize, part: &D| {
            *end += part.len();
            Some(*end)
        };
        let ends = parts.iter().scan(0, add).collect();
        Concat { parts, ends }
    }

    /// The number of examples of each part.
    pub fn lens(&self) -> impl Iterator<Item = usize> + '_ {
        self.parts.iter().map(Dataset::len)
    }
}

impl<D: Dataset> Dataset for Concat<D> {
    type Example = D::Example;

    fn len(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    fn get(&self, index: usize) -> Result<D::Example> {
        check_index("Concat", index, self.len())?;
        let part = self.ends.partition_point(|&end| end <= index);
        let start = if part == 0 { 0 } else { self.ends[part - 1] };
        self.parts[part].get(index - start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::InMemory;

    fn all<D: Dataset>(dataset: &D) -> Vec<D::Example> {
        (0..dataset.len()).map(|i| dataset.get(i).unwrap()).collect()
    }

    #[test]
    fn parts_follow_each_other() {
        let part = |values: &[i32]| InMemory::new(values.to_vec());
        let whole = Concat::new(vec![part(&[1, 2]), part(&[]), part(&[3]), part(&[])]);
        assert_eq!(all(&whole), [1, 2, 3]);
        assert!(whole.get(3).unwrap_err().to_string().contains("index is 3, and must be in 0..3"));
        assert!(whole.lens().eq([2, 0, 1, 0]));
        assert_eq!(Concat::<InMemory<i32>>::new(vec![]).len(), 0);
    }

    #[test]
    fn subsets_pairs_and_functions() {
        let squares = InMemory::new((0..10).map(|i| i * i).collect::<Vec<i32>>());
        let some = (&squares).subset([3, 1, 3]).unwrap();
        assert_eq!(all(&some), [9, 1, 9]);
        assert!(some.get(3).is_err() && (&squares).subset([10]).is_err());
        assert_eq!(all(&(&squares).zip(&squares).unwrap().map(|(a, b)| Ok(a + b)).subset([2]).unwrap()), [8]);
        assert!(some.zip(&squares).unwrap_err().to_string().contains("3 and 10"));
        let odd = |x: i32| if x % 2 == 1 { Ok(x) } else { Err(Error::argument("odd", format!("{x} is even"))) };
        let odds = squares.map(odd);
        assert!(odds.get(3).is_ok() && odds.get(4).is_err() && odds.get(5).is_ok(), "one error leaves the others");
    }

    #[test]
    fn a_random_split_is_one() {
        let [a, b] = InMemory::new((0..50).collect::<Vec<i32>>()).random_split(20, 3).unwrap();
        let (mut first, second) = (all(&a), all(&b));
        assert!((first.len(), second.len()) == (20, 30) && !first.is_sorted());
        first.extend(second);
        first.sort_unstable();
        assert!(first.into_iter().eq(0..50));
        assert!(InMemory::new(vec![1]).random_split(2, 0).is_err());
    }
}
