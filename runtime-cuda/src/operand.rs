//! Operands of kernels as addresses. The safety of everything here rests on the contract of `numcore::Runtime`.

use numcore::{DType, Layout, MAX_RANK, View, ViewMut};

use crate::{
    Cuda,
    axes::{MemoryRef, Steps},
    memory::CudaBuffer,
};

/// An operand of a kernel.
#[derive(Clone, Copy)]
pub(crate) struct Operand {
    /// The address of the first element.
    pub address: u64,
    pub layout: Layout,
    pub dtype: DType,
}

impl Operand {
    pub(crate) fn of(buffer: &CudaBuffer, layout: Layout, dtype: DType) -> Operand {
        Operand { address: buffer.address() + (layout.offset() * dtype.size()) as u64, layout, dtype }
    }

    pub(crate) fn steps(&self) -> Steps {
        let mut steps = [0; MAX_RANK];
        steps.iter_mut().zip(self.layout.strides()).for_each(|(to, s)| *to = *s);
        steps
    }

    pub(crate) fn place(&self) -> MemoryRef {
        MemoryRef { address: self.address, size: self.dtype.size() }
    }

    pub(crate) fn dims(&self) -> &[usize] {
        self.layout.dims()
    }

    pub(crate) fn numel(&self) -> usize {
        self.layout.numel()
    }
}

impl From<View<'_, Cuda>> for Operand {
    fn from(v: View<'_, Cuda>) -> Operand {
        Operand::of(v.buffer(), *v.layout(), v.dtype())
    }
}

impl From<&ViewMut<'_, Cuda>> for Operand {
    fn from(v: &ViewMut<'_, Cuda>) -> Operand {
        Operand::of(v.buffer(), *v.layout(), v.dtype())
    }
}
