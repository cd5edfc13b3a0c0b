//! Kernel arguments: values one after another, each aligned for its type, and the offset of each.

use std::ffi::c_void;

use bytemuck::NoUninit;
use numcore::{DType, pointwise::Number};
use smallvec::SmallVec;

use crate::axes::magic;

/// The most bytes that the parameters of a kernel take together.
pub(crate) const LIMIT: usize = 4096;

/// The arguments of one launch, in order.
#[derive(Clone, Debug, Default)]
pub struct KernelArgs {
    words: SmallVec<[u64; 64]>,
    /// The word at which each value starts, and its size in bytes.
    places: SmallVec<[(u32, u32); 32]>,
    /// True if the kernel reports an index out of range in the queue's flag word.
    pub reports: bool,
}

impl KernelArgs {
    /// Appends a value of a type without padding.
    pub(crate) fn push<T: NoUninit>(&mut self, value: T) {
        self.bytes(bytemuck::bytes_of(&value));
    }

    /// Appends the bytes of one value, aligned to 8 bytes.
    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        let start = self.words.len();
        self.places.push((start as u32, bytes.len() as u32));
        self.words.resize(start + bytes.len().div_ceil(8), 0);
        bytemuck::cast_slice_mut::<u64, u8>(&mut self.words[start..])[..bytes.len()].copy_from_slice(bytes);
    }

    /// Appends the values of others as one: a structure of words of 64 bits.
    pub(crate) fn structure(&mut self, fields: &KernelArgs) {
        self.bytes(bytemuck::cast_slice(&fields.words));
    }

    /// Appends a count, a size or a position, in 64 bits if `wide`, else in 32.
    pub(crate) fn count(&mut self, n: usize, wide: bool) {
        if wide { self.push(n as u64) } else { self.push(n as u32) }
    }

    /// Appends the sizes of axes; if not `wide`, with the constants that replace a division by them.
    pub(crate) fn axes(&mut self, sizes: &[usize], wide: bool) {
        if wide {
            let all: SmallVec<[u64; 8]> = sizes.iter().map(|&d| d as u64).collect();
            return self.bytes(bytemuck::cast_slice(&all));
        }
        let mut all: SmallVec<[u32; 24]> = sizes.iter().map(|&d| d as u32).collect();
        all.extend(sizes.iter().map(|&d| magic(d as u32).0));
        all.extend(sizes.iter().map(|&d| magic(d as u32).1));
        self.bytes(bytemuck::cast_slice(&all));
    }

    /// Appends the strides of axes, in 64 bits if `wide`, else in 32.
    pub(crate) fn steps(&mut self, steps: &[isize], wide: bool) {
        if wide {
            let all: SmallVec<[i64; 8]> = steps.iter().map(|&s| s as i64).collect();
            return self.bytes(bytemuck::cast_slice(&all));
        }
        let all: SmallVec<[i32; 8]> = steps.iter().map(|&s| s as i32).collect();
        self.bytes(bytemuck::cast_slice(&all));
    }

    /// Appends a value that is equal for all elements, in the type in which `dtype` is computed.
    pub(crate) fn number(&mut self, value: Number, dtype: DType) {
        let value = value.computed_as(dtype);
        match dtype {
            _ if dtype.compute() == DType::F32 => self.push(value.to_f64() as f32),
            DType::F64 => self.push(value.to_f64()),
            DType::I32 => self.push(value.to_i64() as i32),
            DType::I64 => self.push(value.to_i64()),
            DType::U32 => self.push(value.to_i64() as u32),
            DType::U8 => self.push(value.to_i64() as u8),
            _ => self.push(u8::from(value.to_bool())),
        }
    }

    /// The bytes that the parameters take, rounded up to 8 for each.
    pub fn size(&self) -> usize {
        8 * self.words.len()
    }

    /// The bytes of each value.
    pub fn values(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        let bytes = bytemuck::cast_slice::<u64, u8>(&self.words);
        self.places.iter().map(|&(at, size)| &bytes[8 * at as usize..][..size as usize])
    }

    /// The addresses of all values, as a launch takes them. Valid until the next change.
    pub fn pointers(&mut self) -> SmallVec<[*mut c_void; 32]> {
        let base = self.words.as_mut_ptr();
        self.places.iter().map(|&(at, _)| base.wrapping_add(at as usize).cast()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_lie_where_pointers_say() {
        let mut args = KernelArgs::default();
        args.push(7u32);
        args.steps(&[-3, 4], false);
        args.push(2.5f64);
        args.number(Number::Float(1.1), DType::BF16);
        let at = args.pointers();
        // SAFETY: each pointer leads to a value of this type that was pushed above.
        unsafe {
            assert_eq!(*at[0].cast::<u32>(), 7);
            assert_eq!(*at[1].cast::<[i32; 2]>(), [-3, 4]);
            assert_eq!(*at[2].cast::<f64>(), 2.5);
            assert_eq!(*at[3].cast::<f32>(), 1.1f32);
        }
        assert_eq!(args.size(), 32);
        assert_eq!(args.values().map(<[u8]>::len).collect::<Vec<_>>(), [4, 8, 8, 4]);
    }
}
