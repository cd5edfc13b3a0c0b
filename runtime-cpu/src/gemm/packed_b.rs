//! GEMM with a B operand that is packed once and used by many: attention's blocks of keys and values.

use std::ops::Range;

use super::{
    epilogue::{Epilogue, Old},
    macro_kernel::{self, BMicroPanels, Blocking, MacroKernel},
    matrix::Matrix,
    pack_a::AOperand,
    pack_b::pack_b,
    vector::Vectors,
};
use crate::Simd;

/// A packed B operand of `[k, n]` elements.
#[derive(Clone, Copy)]
pub(crate) struct PackedB<'a, T> {
    simd: Simd,
    elements: &'a [T],
    k: usize,
    n: usize,
}

impl<'a, T: Vectors> PackedB<'a, T> {
    /// The most elements that `[k, n]` take when packed, for every instruction set.
    pub(crate) const fn len(k: usize, n: usize) -> usize {
        k * n.next_multiple_of(16)
    }

    /// Packs `[k, n]` elements of `b` into `to`, which has at least [`len`](PackedB::len) elements.
    ///
    /// # Safety
    /// `b` is valid for reads of `[k, n]` elements.
    pub(crate) unsafe fn new(
        simd: Simd,
        b: Matrix<*const T>,
        (k, n): (usize, usize),
        to: &'a mut [T],
    ) -> PackedB<'a, T> {
        // SAFETY: the caller guarantees `[k, n]` elements of `b`.
        unsafe { pack_b(simd, Blocking::of::<T>(simd), b, (k, n), to) };
        PackedB { simd, elements: to, k, n }
    }

    /// `[k, n]` elements that [`new`](PackedB::new) has packed.
    pub(crate) fn of_packed(simd: Simd, (k, n): (usize, usize), elements: &'a [T]) -> PackedB<'a, T> {
        assert!(elements.len() >= Self::len(k, n));
        PackedB { simd, elements, k, n }
    }

    /// Computes `out = alpha · a · b`, with this use of the old `out`, for `m` rows of `a`, the rows `k` of `b` and its first `n` columns.
    /// Column 0 of `a` is multiplied by row `k.start` of `b`. Columns up to the end of a micro-panel may be written,
    /// where `b` has them.
    ///
    /// # Safety
    /// `a` is valid for `m` rows of `k.len()` columns, and `out` for `m` rows of all columns of `b`. `out` overlaps
    /// neither operand, and no other thread accesses it during the call.
    pub(crate) unsafe fn gemm(
        self,
        (m, k, n): (usize, Range<usize>, usize),
        a: AOperand<'_, T>,
        out: Matrix<*mut T>,
        alpha: T,
        old: Old,
    ) {
        debug_assert!(k.end <= self.k && n <= self.n);
        let kernel = MacroKernel {
            m,
            kc: k.len(),
            n: self.whole_panels(n),
            a,
            b: BMicroPanels { at: self.elements.as_ptr(), kc: self.k, from: k.start },
            out,
            alpha,
            epilogue: Epilogue { old, addends: [None, None] },
        };
        // SAFETY: the caller guarantees `a` and `out`; `b` is packed for this `simd`. Attention's `a` is read in place
        // and needs no workspace.
        unsafe { macro_kernel::run(self.simd, &kernel, &mut []) };
    }

    /// The number `n`, rounded up to the end of its micro-panel. The starts of panels depend on the number of packed
    /// columns.
    fn whole_panels(&self, n: usize) -> usize {
        let blocking = Blocking::of::<T>(self.simd);
        let mut end = 0;
        while end < n {
            end += blocking.panel_width(self.n - end);
        }
        end.min(self.n)
    }
}
