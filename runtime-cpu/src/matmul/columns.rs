//! Products whose output has its columns in lines, as maps of an image are: made in rows aside and turned while in cache. (Number by
//! number such an output took a seventh of a convolution's time.)

use std::{cell::RefCell, ops::Range};

use super::{
    epilogue::Epilogue,
    factor::{Left, Matrix},
    packed::Packed,
    product::{Line, product_of, room},
    register::Registers,
};
use crate::{Simd, pointwise::turn};

/// Rows that are made aside at once: a multiple of every strip, and of the squares in which they are turned.
pub(crate) const ROWS: usize = 48;

thread_local! {
    /// Rows made aside; kept, so that a product allocates nothing.
    static ASIDE: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
}

/// A right operand: packed for many products, or to be packed for this one.
#[derive(Clone, Copy)]
pub(crate) enum Right<'a, T> {
    Packed(Packed<'a, T>),
    Strided(Matrix<*const T>),
}

/// `out = a · b` for `a: [m, k]`, `b: [k, n]`, where numbers of a column of `out` are neighbours.
///
/// # Safety
/// The matrices lie in their operands; the output overlaps neither, and nothing else sees it meanwhile.
pub(crate) unsafe fn product_in_columns<T: Registers>(
    simd: Simd,
    [m, k, n]: [usize; 3],
    out: Matrix<*mut T>,
    a: Left<'_, T>,
    b: Right<'_, T>,
) {
    debug_assert_eq!(out.row, 1);
    // What is packed stays in cache from one call to the next; else every call would pack it again.
    let most = if let Right::Packed(_) = b { ROWS } else { m };
    ASIDE.with_borrow_mut(|aside| {
        let aside = room::<T>(aside, most * n).as_mut_ptr();
        for top in (0..m).step_by(most.max(1)) {
            let rows: Range<usize> = top..m.min(top + most);
            let (a, made) = (a.part(rows.start, 0), Matrix { at: aside, row: n as isize, column: 1 });
            let to = (out.part(rows.start, 0).at.cast::<u8>(), out.column * size_of::<T>() as isize);
            let from = (aside.cast::<u8>(), (n * size_of::<T>()) as isize);
            // SAFETY: the caller's promise; the rows aside are this thread's, and there is room for them.
            unsafe {
                match b {
                    Right::Packed(b) => b.product(rows.len(), a, made),
                    Right::Strided(b) => {
                        product_of(simd, [rows.len(), k, n], made, a, b, T::ONE, Epilogue::adding(false))
                    }
                }
                turn::<T>(simd, to, from, (n, rows.len()));
            }
        }
    });
}
