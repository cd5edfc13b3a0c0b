//! Tensors as pickles describe them.

use std::sync::Arc;

use numcore::{DType, Shape};

/// The type of a storage's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StorageKind {
    Of(DType),
    /// Integers without a `DType`, of this size in bytes.
    Other(usize),
}

impl StorageKind {
    pub(super) fn dtype(self) -> Option<DType> {
        if let StorageKind::Of(dtype) = self { Some(dtype) } else { None }
    }

    pub(super) fn size(self) -> usize {
        match self {
            StorageKind::Of(dtype) => dtype.size(),
            StorageKind::Other(size) => size,
        }
    }
}

/// The storage of a tensor.
#[derive(Clone, Debug)]
pub(super) struct Storage {
    pub kind: StorageKind,
    pub key: Arc<str>,
    pub elements: usize,
}

/// A tensor as a view of a storage. Offset and strides are in elements.
#[derive(Clone, Debug)]
pub(super) struct PickledTensor {
    pub storage: Storage,
    pub offset: usize,
    pub shape: Shape,
    pub strides: Vec<usize>,
}

impl PickledTensor {
    /// The number of elements between the first and the last, both included.
    pub(super) fn span(&self) -> usize {
        if self.shape.numel() == 0 { 0 } else { self.at(self.shape.numel() - 1) + 1 }
    }

    /// The distance of an element, by its row-major index, from the first.
    pub(super) fn at(&self, mut index: usize) -> usize {
        let mut at = 0;
        for (&size, stride) in self.shape.iter().zip(&self.strides).rev() {
            at += index % size.max(1) * stride;
            index /= size.max(1);
        }
        at
    }

    pub(super) fn is_row_major(&self) -> bool {
        let mut due = 1;
        self.shape.iter().zip(&self.strides).rev().all(|(&size, &stride)| {
            let fits = size == 1 || stride == due;
            due *= size;
            fits
        })
    }
}
