//! What a product takes: matrices with any strides, windows of images, and how the strips of the left operand are read.

use super::register::Registers;
use crate::simd::prefetch;

/// A matrix in memory: its first number, and the distances from one row and from one column to the next.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<T> {
    pub at: T,
    pub row: isize,
    pub column: isize,
}

macro_rules! parts {
    ($($pointer:ty as $other:ty),*) => {$(
        impl<T> Matrix<$pointer> {
            /// The part that begins there.
            pub(crate) fn part(self, i: usize, j: usize) -> Self {
                Matrix { at: self.at.wrapping_offset(i as isize * self.row + j as isize * self.column), ..self }
            }

            /// The same memory, as numbers of another type.
            #[cfg(target_arch = "x86_64")]
            pub(super) fn cast<U>(self) -> Matrix<$other> {
                Matrix { at: self.at.cast(), row: self.row, column: self.column }
            }
        }
    )*};
}
parts!(*const T as *const U, *mut T as *mut U);

impl<T> Matrix<T> {
    /// Rows as columns.
    pub(crate) fn turned(self) -> Self {
        Matrix { row: self.column, column: self.row, ..self }
    }
}

/// The left operand of a product.
#[derive(Clone, Copy)]
pub(crate) enum Left<'a, T> {
    /// A matrix.
    Strided(Matrix<*const T>),
    /// A matrix whose columns' numbers are neighbours, read where it is; for blocks that lie in cache. There are whole strips of its rows.
    Turned(Matrix<*const T>),
    /// Its number `(i, k)` lies `rows[i] + steps[k]` numbers from `at`: windows of an image, read where they are.
    Gathered { at: *const T, rows: &'a [usize], steps: &'a [usize] },
}

impl<T> Left<'_, T> {
    /// The part that begins there.
    pub(super) fn part(self, i: usize, k: usize) -> Self {
        match self {
            Left::Strided(a) => Left::Strided(a.part(i, k)),
            Left::Turned(a) => Left::Turned(a.part(i, k)),
            Left::Gathered { at, rows, steps } => Left::Gathered { at, rows: &rows[i..], steps: &steps[k..] },
        }
    }
}

/// Where the numbers of a strip are.
pub(super) trait Strip<T>: Copy {
    /// That of row `i` and step `k`.
    fn at(&self, i: usize, k: usize) -> *const T;
}

/// A row's numbers are neighbours.
#[derive(Clone, Copy)]
pub(super) struct Lines<T, const ROWS: usize>(pub [*const T; ROWS]);

/// All rows of a step side by side.
#[derive(Clone, Copy)]
pub(super) struct LaidOut<T, const ROWS: usize>(pub *const T);

/// The same, with a distance from one step to the next.
#[derive(Clone, Copy)]
pub(super) struct Columns<T, const ROWS: usize>(pub *const T, pub isize);

/// The same distances in every row.
#[derive(Clone, Copy)]
pub(super) struct Windows<'a, T, const ROWS: usize>(pub [*const T; ROWS], pub &'a [usize]);

impl<T: Copy, const ROWS: usize> Strip<T> for Lines<T, ROWS> {
    #[inline(always)]
    fn at(&self, i: usize, k: usize) -> *const T {
        self.0[i].wrapping_add(k)
    }
}

impl<T: Copy, const ROWS: usize> Strip<T> for LaidOut<T, ROWS> {
    #[inline(always)]
    fn at(&self, i: usize, k: usize) -> *const T {
        self.0.wrapping_add(k * ROWS + i)
    }
}

impl<T: Copy, const ROWS: usize> Strip<T> for Columns<T, ROWS> {
    #[inline(always)]
    fn at(&self, i: usize, k: usize) -> *const T {
        self.0.wrapping_offset(k as isize * self.1).wrapping_add(i)
    }
}

impl<T: Copy, const ROWS: usize> Strip<T> for Windows<'_, T, ROWS> {
    #[inline(always)]
    fn at(&self, i: usize, k: usize) -> *const T {
        self.0[i].wrapping_add(self.1[k])
    }
}

/// Steps between asking for numbers and reading them: the layers between have swept them out of near caches, and a product visits many
/// short stretches, which hardware does not foresee.
const AHEAD: usize = 16;

/// Rows in the order tiles read them: strip after strip, all rows of a step side by side, zeros where there is no row.
///
/// # Safety
/// These rows, and so many steps of each, lie in one operand.
#[inline(always)]
pub(super) unsafe fn lay_out<T: Registers, const ROWS: usize>(
    a: Matrix<*const T>,
    rows: usize,
    depth: usize,
    strips: &mut [T],
) {
    let whole = if a.row == 1 { rows / ROWS * ROWS } else { 0 };
    for k in 0..depth {
        let from = a.part(0, k);
        prefetch(a.part(0, k + AHEAD).at, rows);
        // SAFETY: the caller's promise; a strip has `depth` steps of so many rows.
        unsafe {
            let to = strips.as_mut_ptr().add(k * ROWS);
            for i in (0..whole).step_by(ROWS) {
                to.add(i * depth).copy_from_nonoverlapping(from.at.add(i), ROWS);
            }
        }
    }
    for i in whole..rows.next_multiple_of(ROWS) {
        let strip = &mut strips[i / ROWS * ROWS * depth..][..ROWS * depth];
        for (k, step) in strip.chunks_exact_mut(ROWS).enumerate() {
            // SAFETY: as above.
            step[i % ROWS] = if i < rows { unsafe { *a.part(i, k).at } } else { T::ZERO };
        }
    }
}
