//! Operands as kernels see them: an address, an element type, sizes and strides.

use numcore::{DType, Layout, View, ViewMut};

use crate::{Cpu, CpuBuffer, element::Stored};

/// A view whose buffer is known to be in memory: the address of the buffer, and the layout of the elements in it.
#[derive(Clone, Copy)]
pub(crate) struct Operand {
    pub start: *mut u8,
    pub layout: Layout,
    pub dtype: DType,
}

// SAFETY: it holds an address with a shape; kernels that read or write through it state why that is sound.
unsafe impl Send for Operand {}
// SAFETY: it holds an address alone; kernels that read or write through it state why that is sound.
unsafe impl Sync for Operand {}

impl From<View<'_, Cpu>> for Operand {
    fn from(v: View<'_, Cpu>) -> Self {
        Operand { start: v.buffer().ptr(), layout: *v.layout(), dtype: v.dtype() }
    }
}

impl From<&ViewMut<'_, Cpu>> for Operand {
    fn from(v: &ViewMut<'_, Cpu>) -> Self {
        Operand { start: v.buffer().ptr(), layout: *v.layout(), dtype: v.dtype() }
    }
}

impl Operand {
    /// An operand in scratch memory of a kernel.
    pub(crate) fn of(buffer: &CpuBuffer, layout: Layout, dtype: DType) -> Self {
        Operand { start: buffer.ptr(), layout, dtype }
    }

    /// The address of the first element.
    pub(crate) fn ptr(&self) -> *mut u8 {
        self.start.wrapping_add(self.layout.offset() * self.dtype.size())
    }

    /// The bytes of a contiguous operand.
    pub(crate) fn bytes(&self) -> usize {
        self.layout.numel() * self.dtype.size()
    }

    /// The first element, as `T`, which must be the stored form of its type.
    pub(crate) fn base<T: Stored>(&self) -> Base<T> {
        debug_assert_eq!(size_of::<T>(), self.dtype.size());
        Base(self.ptr().cast())
    }
}

/// The address of an operand's first element, to be shared among the threads of a kernel. Offsets are in elements.
#[derive(Clone, Copy)]
pub(crate) struct Base<T>(*mut T);

// SAFETY: it holds an address alone; kernels that read or write through it state why that is sound.
unsafe impl<T: Send> Send for Base<T> {}
// SAFETY: it holds an address alone; kernels that read or write through it state why that is sound.
unsafe impl<T: Sync> Sync for Base<T> {}

impl<T: Copy> Base<T> {
    pub(crate) fn new(ptr: *mut T) -> Self {
        Base(ptr)
    }

    /// The address `offset` elements further on.
    #[inline(always)]
    pub(crate) fn at(self, offset: isize) -> *mut T {
        self.0.wrapping_offset(offset)
    }

    /// The element at `offset`.
    ///
    /// # Safety
    /// The operand is valid for reads at `offset`, and nothing writes the element meanwhile.
    #[inline(always)]
    pub(crate) unsafe fn get(self, offset: isize) -> T {
        // SAFETY: the caller guarantees a valid element; views are aligned to their element type.
        unsafe { *self.at(offset) }
    }

    /// Writes the element at `offset`.
    ///
    /// # Safety
    /// The output is valid for writes at `offset`, and no other thread accesses the element meanwhile.
    #[inline(always)]
    pub(crate) unsafe fn set(self, offset: isize, value: T) {
        // SAFETY: the caller guarantees a valid element that no other thread accesses.
        unsafe { *self.at(offset) = value }
    }

    /// The `len` elements from `offset` on.
    ///
    /// # Safety
    /// The operand is valid for reads of these elements, and nothing writes them while the slice lives.
    #[inline(always)]
    pub(crate) unsafe fn slice<'a>(self, offset: isize, len: usize) -> &'a [T] {
        // SAFETY: the caller guarantees `len` elements from `offset` on, for as long as the slice lives.
        unsafe { std::slice::from_raw_parts(self.at(offset), len) }
    }

    /// The `len` elements from `offset` on, for writing.
    ///
    /// # Safety
    /// The output is valid for writes of these elements, and no other thread accesses them while the slice lives.
    #[inline(always)]
    pub(crate) unsafe fn slice_mut<'a>(self, offset: isize, len: usize) -> &'a mut [T] {
        // SAFETY: the caller guarantees `len` elements from `offset` on, for as long as the slice lives.
        unsafe { std::slice::from_raw_parts_mut(self.at(offset), len) }
    }
}
