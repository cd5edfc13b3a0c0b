//! The two sides of a matrix parameter, for rules that keep a Gram matrix of the gradients of each.

use numcore::{
    Result, Runtime, Shape, Tensor,
    ops::{MatmulOps, ViewOps},
};

/// The rows or the columns of a parameter that is a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Rows,
    Columns,
}

impl Side {
    /// The largest size of a side with a Gram matrix. Beyond it, the matrix would be larger than most parameters.
    const LARGEST: usize = 10_000;

    /// The sides of a parameter that have Gram matrices: none unless it is a matrix.
    pub(crate) fn of(shape: &Shape) -> impl Iterator<Item = Side> + use<> {
        let sizes = [Side::Rows, Side::Columns].map(|side| (side, side.size(shape)));
        sizes.into_iter().filter(|(_, size)| *size > 0).map(|(side, _)| side)
    }

    /// The shape of the side's square matrices, given that of a parameter; without elements if it has none.
    pub(crate) fn square(self, shape: &Shape) -> Shape {
        match self.size(shape) {
            0 => Shape::from([0]),
            size => Shape::from([size, size]),
        }
    }

    fn size(self, shape: &Shape) -> usize {
        let size = if shape.rank() == 2 { shape[self.axis()] } else { 0 };
        if size > Side::LARGEST { 0 } else { size }
    }

    /// The axis along which the side's elements are.
    pub(crate) fn axis(self) -> usize {
        self as usize
    }

    /// The products of the side's elements of `x: [A, B]` with each other: `[A, A]` or `[B, B]`.
    pub(crate) fn gram<R: Runtime>(self, x: &Tensor<R>) -> Result<Tensor<R>> {
        match self {
            Side::Rows => x.matmul(&x.t()?),
            Side::Columns => x.t()?.matmul(x),
        }
    }

    /// The side's elements of `x: [A, B]` in the basis of a matrix's columns: `matrixᵀ x` or `x matrix`.
    pub(crate) fn project<R: Runtime>(self, matrix: &Tensor<R>, x: &Tensor<R>) -> Result<Tensor<R>> {
        match self {
            Side::Rows => matrix.t()?.matmul(x),
            Side::Columns => x.matmul(matrix),
        }
    }
}
