//! Collation: from examples to a batch.

mod device;
mod pad;

use std::collections::BTreeMap;

pub use device::ToDevice;
use numcore::{Element, Result};
pub use pad::{Padded, pad};

use crate::Array;

/// An example type with a rule that stacks examples to a batch, as in PyTorch's `default_collate`.
/// [`Loader::stack`](crate::Loader::stack) applies it.
///
/// Arrays of one shape `[…]` become `[B, …]`, numbers an array `[B]`, strings a list. Tuples and maps are stacked part
/// by part. Implement it for other types, or pass a function to [`Loader::collate`](crate::Loader::collate).
pub trait Stack: Sized {
    /// The type of a batch.
    type Batch;

    /// Stacks at least one example to a batch.
    fn stack(examples: Vec<Self>) -> Result<Self::Batch>;
}

impl Stack for Array {
    type Batch = Array;

    fn stack(examples: Vec<Self>) -> Result<Array> {
        Array::stack(&examples)
    }
}

impl Stack for String {
    type Batch = Vec<String>;

    fn stack(examples: Vec<Self>) -> Result<Vec<String>> {
        Ok(examples)
    }
}

macro_rules! stack_numbers {
    ($($number:ty),*) => {$(
        impl Stack for $number {
            type Batch = Array;

            fn stack(examples: Vec<Self>) -> Result<Array> {
                Ok(numbers(examples))
            }
        }
    )*};
}

stack_numbers!(f32, f64, i32, i64, u32, u8, bool);

fn numbers<E: Element>(examples: Vec<E>) -> Array {
    Array::from_vec(examples)
}

impl<A: Stack, B: Stack> Stack for (A, B) {
    type Batch = (A::Batch, B::Batch);

    fn stack(examples: Vec<Self>) -> Result<Self::Batch> {
        let (a, b) = examples.into_iter().unzip();
        Ok((A::stack(a)?, B::stack(b)?))
    }
}

impl<A: Stack, B: Stack, C: Stack> Stack for (A, B, C) {
    type Batch = (A::Batch, B::Batch, C::Batch);

    fn stack(examples: Vec<Self>) -> Result<Self::Batch> {
        let (a, rest): (Vec<A>, Vec<(B, C)>) = examples.into_iter().map(|(a, b, c)| (a, (b, c))).unzip();
        let (b, c) = rest.into_iter().unzip();
        Ok((A::stack(a)?, B::stack(b)?, C::stack(c)?))
    }
}

impl<T: Stack> Stack for BTreeMap<String, T> {
    type Batch = BTreeMap<String, T::Batch>;

    fn stack(examples: Vec<Self>) -> Result<Self::Batch> {
        let mut columns = BTreeMap::<String, Vec<T>>::new();
        let rows = examples.len();
        for (name, value) in examples.into_iter().flatten() {
            columns.entry(name).or_default().push(value);
        }
        if let Some((name, values)) = columns.iter().find(|(_, values)| values.len() != rows) {
            let why = format!("{} of {rows} examples of the batch have a field `{name}`", values.len());
            return Err(numcore::Error::lengths("stack", &[values.len(), rows], why));
        }
        columns.into_iter().map(|(name, values)| Ok((name, T::stack(values)?))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_stacked_by_themselves() {
        let row = |i: i64| (Array::from_vec(vec![i, i + 1]), i, format!("example {i}"));
        let (arrays, numbers, names) = Stack::stack(vec![row(3), row(7)]).unwrap();
        assert_eq!((arrays.dims(), arrays.to_vec::<i64>().unwrap()), (&[2, 2][..], vec![3, 4, 7, 8]));
        assert_eq!(numbers.to_vec::<i64>().unwrap(), [3, 7]);
        assert_eq!(names, ["example 3", "example 7"]);
    }

    #[test]
    fn maps_must_have_one_set_of_names() {
        let row = |names: &[&str]| names.iter().map(|n| (n.to_string(), 1.5f32)).collect::<BTreeMap<_, _>>();
        let batch = Stack::stack(vec![row(&["x", "y"]), row(&["y", "x"])]).unwrap();
        assert_eq!(batch["x"].dims(), [2]);
        let error = Stack::stack(vec![row(&["x", "y"]), row(&["x"])]).unwrap_err().to_string();
        assert!(error.contains("1 of 2 examples of the batch have a field `y`"), "{error}");
    }
}
