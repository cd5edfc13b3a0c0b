//! What happens to a sum when it is stored: the output's old value, a bias, a residual, all while the tile is in cache. (As passes of their
//! own, bias and residual took 3 to 5 % of a decoder's training step.)

use super::{
    factor::Matrix,
    register::{Register, Registers},
};
use crate::simd::prefetch;

/// What is added to a product.
#[derive(Clone, Copy)]
pub(crate) struct Epilogue<T> {
    /// What is there.
    pub add: bool,
    /// Matrices of the product's shape, one after the other, once its sums are complete.
    pub plus: [Option<Matrix<*const T>>; 2],
}

// SAFETY: addresses alone; whoever reads through them says why that is sound.
unsafe impl<T: Send> Send for Epilogue<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Epilogue<T> {}

impl<T> Epilogue<T> {
    /// The product alone, or added to what is there.
    pub(crate) fn adding(add: bool) -> Self {
        Epilogue { add, plus: [None, None] }
    }

    /// Whether the product is all that is added to what is there.
    pub(super) fn only_adds(&self) -> bool {
        self.add && !self.has_plus()
    }

    /// Whether there are matrices to add.
    pub(super) fn has_plus(&self) -> bool {
        self.plus.iter().any(Option::is_some)
    }

    /// Of the part of the output that begins there.
    pub(super) fn part(self, i: usize, j: usize) -> Self {
        Epilogue { plus: self.plus.map(|x| x.map(|x| x.part(i, j))), ..self }
    }

    /// Rows as columns.
    pub(super) fn turned(self) -> Self {
        Epilogue { plus: self.plus.map(|x| x.map(Matrix::turned)), ..self }
    }

    /// Of numbers of another type.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn cast<U>(self) -> Epilogue<U> {
        Epilogue { add: self.add, plus: self.plus.map(|x| x.map(Matrix::<*const T>::cast)) }
    }

    /// Of a part of the sum: later parts are added to the first, and the last completes it.
    pub(super) fn of_part(self, first: bool, last: bool) -> Self {
        Epilogue { add: self.add || !first, plus: if last { self.plus } else { [None, None] } }
    }
}

impl<T: Registers> Epilogue<T> {
    /// Asks for a tile of what is far away: a residual, whose rows nothing foresees.
    #[inline(always)]
    pub(super) fn ask_for(self, rows: usize, columns: usize) {
        for x in self.plus.into_iter().flatten().filter(|x| x.row != 0) {
            (0..rows).for_each(|i| prefetch(x.part(i, 0).at, columns));
        }
    }

    /// Adds the matrices to a tile of the output that is stored: rows and columns from their first ones on.
    ///
    /// # Safety
    /// So many numbers lie in the output, which nothing else sees, and in each matrix; the processor has the registers.
    #[inline(always)]
    pub(super) unsafe fn onto<R: Register<T>>(self, out: Matrix<*mut T>, (rows, columns): (usize, usize)) {
        for x in self.plus.into_iter().flatten() {
            let by_register = out.column == 1 && matches!(x.column, 0 | 1);
            let whole = if by_register { columns / R::LANES * R::LANES } else { 0 };
            for i in 0..rows {
                let (to, from) = (out.part(i, 0), x.part(i, 0));
                // SAFETY: the caller's promise.
                unsafe {
                    for j in (0..whole).step_by(R::LANES) {
                        let x = if from.column == 1 { R::load(from.at.add(j)) } else { R::splat(*from.at) };
                        R::load(to.at.add(j)).add(x).store(to.at.add(j));
                    }
                    for j in whole..columns {
                        let to = to.part(0, j).at;
                        *to = (*to).add(*from.part(0, j).at);
                    }
                }
            }
        }
    }
}
