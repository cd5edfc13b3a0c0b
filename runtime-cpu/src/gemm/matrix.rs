//! Matrices in memory, with any strides, and the sizes of a GEMM.

/// Sizes of one GEMM: `[m, k] · [k, n]`.
#[derive(Clone, Copy)]
pub(crate) struct GemmSize {
    pub m: usize,
    pub k: usize,
    pub n: usize,
}

impl GemmSize {
    /// Sizes of the transposed GEMM, `outᵀ = bᵀ · aᵀ`.
    pub(super) fn transposed(self) -> Self {
        GemmSize { m: self.n, k: self.k, n: self.m }
    }
}

/// A matrix in memory: a pointer to its first element, its row stride and its column stride, in elements.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<T> {
    pub at: T,
    pub row: isize,
    pub column: isize,
}

macro_rules! matrix_of {
    ($($pointer:ty as $other:ty),*) => {$(
        impl<T> Matrix<$pointer> {
            /// The submatrix from row `i` and column `j` on.
            pub(crate) fn offset(self, i: usize, j: usize) -> Self {
                Matrix { at: self.at.wrapping_offset(i as isize * self.row + j as isize * self.column), ..self }
            }

            /// This matrix over elements of another type, in the same memory.
            pub(super) fn cast<U>(self) -> Matrix<$other> {
                Matrix { at: self.at.cast(), row: self.row, column: self.column }
            }
        }
    )*};
}
matrix_of!(*const T as *const U, *mut T as *mut U);

impl<T> Matrix<T> {
    /// The transposed matrix: strides change places, no element moves.
    pub(crate) fn transposed(self) -> Self {
        Matrix { row: self.column, column: self.row, ..self }
    }
}
