//! The epilogue of a GEMM: the output's old value, a bias and a residual are added while the tile is in cache. (As
//! separate passes, bias and residual took 3 to 5 % of a decoder's training step.)

use super::{
    matrix::Matrix,
    vector::{Vector, Vectors},
};
use crate::simd::prefetch;

/// The use of the output's old value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Old {
    /// It is overwritten.
    Overwritten,
    /// It is added to the sum.
    Added,
    /// The sum continues from it, so that a sum in parts has the bits of the whole. The factor is 1.
    Continued,
}

impl Old {
    /// The use of an old value that is added, or overwritten.
    pub(crate) fn added(yes: bool) -> Self {
        if yes { Old::Added } else { Old::Overwritten }
    }
}

/// The addends of the output `a · b`: bias and residual.
#[derive(Clone, Copy)]
pub(crate) struct Epilogue<T> {
    /// The use of the output's old value.
    pub old: Old,
    /// Matrices of the output's shape, added in order once the sums over `k` are complete.
    pub addends: [Option<Matrix<*const T>>; 2],
}

// SAFETY: it holds addresses alone; `add_to`, which reads through them, requires that they are valid.
unsafe impl<T: Send> Send for Epilogue<T> {}
// SAFETY: it holds addresses alone; `add_to`, which reads through them, requires that they are valid.
unsafe impl<T: Sync> Sync for Epilogue<T> {}

impl<T> Epilogue<T> {
    /// An epilogue without addends. With `add`, the output's old value is added.
    pub(crate) fn accumulate(add: bool) -> Self {
        Epilogue { old: Old::added(add), addends: [None, None] }
    }

    /// Tells whether nothing but the output's old value is added.
    pub(super) fn only_accumulates(&self) -> bool {
        self.old != Old::Overwritten && !self.has_addends()
    }

    /// Tells whether there are matrices to add.
    pub(super) fn has_addends(&self) -> bool {
        self.addends.iter().any(Option::is_some)
    }

    /// The epilogue of the submatrix from row `i` and column `j` on.
    pub(super) fn offset(self, i: usize, j: usize) -> Self {
        Epilogue { addends: self.addends.map(|x| x.map(|x| x.offset(i, j))), ..self }
    }

    /// The epilogue of the transposed output.
    pub(super) fn transposed(self) -> Self {
        Epilogue { addends: self.addends.map(|x| x.map(Matrix::transposed)), ..self }
    }

    /// This epilogue over elements of another type, in the same memory.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn cast<U>(self) -> Epilogue<U> {
        Epilogue { old: self.old, addends: self.addends.map(|x| x.map(Matrix::<*const T>::cast)) }
    }

    /// The epilogue of one block of `k`: later blocks are added to the first, and the last one completes the sum.
    pub(super) fn for_k_block(self, first: bool, last: bool) -> Self {
        let old = if first { self.old } else { Old::Added };
        Epilogue { old, addends: if last { self.addends } else { [None, None] } }
    }
}

impl<T: Vectors> Epilogue<T> {
    /// Prefetches a micro-tile of the addends: hardware prefetchers do not foresee the rows of a residual.
    #[inline(always)]
    pub(super) fn prefetch(self, rows: usize, columns: usize) {
        for x in self.addends.into_iter().flatten().filter(|x| x.row != 0) {
            (0..rows).for_each(|i| prefetch(x.offset(i, 0).at, columns));
        }
    }

    /// Adds the addends to the first rows and columns of an output that is stored.
    ///
    /// # Safety
    /// `out` and each addend are valid for `rows` and `columns`, no other thread accesses `out`, and the CPU supports
    /// the vector `R`.
    #[inline(always)]
    pub(super) unsafe fn add_to<R: Vector<T>>(self, out: Matrix<*mut T>, (rows, columns): (usize, usize)) {
        for x in self.addends.into_iter().flatten() {
            let by_vector = out.column == 1 && matches!(x.column, 0 | 1);
            let whole = if by_vector { columns / R::LANES * R::LANES } else { 0 };
            for i in 0..rows {
                let (to, from) = (out.offset(i, 0), x.offset(i, 0));
                // SAFETY: row `i` and column `j` are within `rows` and `columns`, for which the caller guarantees both
                // matrices.
                unsafe {
                    for j in (0..whole).step_by(R::LANES) {
                        let x = if from.column == 1 { R::load(from.at.add(j)) } else { R::splat(*from.at) };
                        R::load(to.at.add(j)).add(x).store(to.at.add(j));
                    }
                    for j in whole..columns {
                        let to = to.offset(0, j).at;
                        *to = (*to).add(*from.offset(0, j).at);
                    }
                }
            }
        }
    }
}
