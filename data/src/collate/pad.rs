//! Padding of sequences to one length.

use numcore::{Element, Error, Result, Runtime, Tensor, Within};

use super::ToDevice;
use crate::Array;

/// Sequences padded to one length: values `[B, T]` and the mask of values that are no padding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Padded<A = Array> {
    /// The values and the padding `[B, T]`.
    pub values: A,
    /// The mask `[B, T]` of `bool`: true for a value of the sequence, false for padding.
    pub mask: A,
    /// The lengths of the sequences before padding.
    pub lengths: Vec<usize>,
}

/// Pads every sequence at its end with `filler`, to the length of the longest, rounded up to a multiple of `multiple`.
///
/// ```
/// # fn main() -> numcore::Result<()> {
/// let batch = data::pad(&[vec![5i64, 6, 7], vec![8]], 0, 4)?;
/// assert_eq!(batch.values.to_vec::<i64>()?, [5, 6, 7, 0, 8, 0, 0, 0]);
/// assert_eq!(batch.lengths, [3, 1]);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// Fails if `multiple` is 0, or the batch would have more bytes than memory can address.
#[track_caller]
pub fn pad<E: Element>(sequences: &[Vec<E>], filler: E, multiple: usize) -> Result<Padded> {
    if multiple == 0 {
        return Err(Error::range("pad", "multiple", multiple, "at least 1, which pads to the longest")).at_caller();
    }
    let lengths: Vec<usize> = sequences.iter().map(Vec::len).collect();
    let longest = lengths.iter().max().copied().unwrap_or(0);
    let bytes = |width: usize| width.checked_mul(sequences.len())?.checked_mul(size_of::<E>());
    let width = longest.checked_next_multiple_of(multiple);
    let fits = |&width: &usize| bytes(width).is_some_and(|bytes| isize::try_from(bytes).is_ok());
    let Some(width) = width.filter(fits) else {
        let allowed = format!("less, for memory to hold {} sequences padded to it", sequences.len());
        return Err(Error::range("pad", "multiple", multiple, allowed)).at_caller();
    };
    let mut values = Vec::with_capacity(sequences.len() * width);
    let mut mask = Vec::with_capacity(sequences.len() * width);
    for sequence in sequences {
        values.extend_from_slice(sequence);
        mask.resize(values.len(), true);
        values.resize(values.len() + width - sequence.len(), filler);
        mask.resize(values.len(), false);
    }
    let shape = [sequences.len(), width];
    Ok(Padded { values: Array::new(shape, values)?, mask: Array::new(shape, mask)?, lengths })
}

impl<R: Runtime> ToDevice<R> for Padded {
    type OnDevice = Padded<Tensor<R>>;

    fn to_device(self, rt: &R) -> Result<Self::OnDevice> {
        Ok(Padded { values: self.values.to_tensor(rt)?, mask: self.mask.to_tensor(rt)?, lengths: self.lengths })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_say_what_is_padding() {
        let batch = pad(&[vec![1.0f32, 2.0], vec![], vec![3.0]], -1.0, 1).unwrap();
        assert_eq!(batch.values.to_vec::<f32>().unwrap(), [1.0, 2.0, -1.0, -1.0, 3.0, -1.0]);
        assert_eq!(batch.mask.to_vec::<bool>().unwrap(), [true, true, false, false, true, false]);
    }

    #[test]
    fn nothing_pads_to_nothing() {
        assert_eq!(pad(&[Vec::<i64>::new()], 0, 8).unwrap().values.dims(), [1, 0]);
        assert_eq!(pad::<i64>(&[], 0, 8).unwrap().values.dims(), [0, 0]);
        assert!(pad(&[vec![1i64]], 0, 0).is_err());
        assert!(pad(&[vec![1i64]], 0, usize::MAX).is_err());
        assert!(pad(&[vec![1i64], vec![]], 0, usize::MAX / 9).is_err());
        assert!(pad(&[vec![1u8], vec![]], 0, 1 << 63).is_err());
    }
}
