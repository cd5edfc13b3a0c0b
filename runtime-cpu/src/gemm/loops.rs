//! GEMM on one thread: the loops around the macro-kernel, after Goto and van de Geijn, *Anatomy of high-performance
//! matrix multiplication* (2008).
//!
//! **Invariant**: a sum is divided into blocks of [`KC`] products, counted from its beginning, for all sizes, strides
//! and instruction sets. Within a block products are added in order, each by an FMA. So an element of the output has
//! the same bits for every partition of the output.

use std::cell::RefCell;

use super::{
    epilogue::Epilogue,
    gemv,
    macro_kernel::{self, BMicroPanels, Blocking, MacroKernel},
    matrix::{GemmSize, Matrix},
    pack_a::AOperand,
    pack_b::pack_b,
    vector::Vectors,
    widen::widen,
};
use crate::{Simd, element::Stored, machine::Machine};

/// Products of a sum between two visits to the output: the depth of packed panels. (With 256 the output of long sums is
/// read and written twice as often; 512 was up to 5 % faster where k is 1024 or more.)
pub(crate) const KC: usize = 512;

/// A cache line. Packed memory is aligned to it, since a vector load that spans two lines costs twice.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(crate) struct CacheLine {
    _words: [u64; 8],
}

thread_local! {
    /// Packed B and packed A. It stays allocated, so that a GEMM allocates nothing.
    static WORKSPACE: RefCell<[Vec<CacheLine>; 2]> = const { RefCell::new([Vec::new(), Vec::new()]) };
}

/// Computes `out = alpha · a · b` with the epilogue, for `a: [m, k]`, `b: [k, n]`. Half-precision operands are upcast
/// while they are packed; their output is `f32`.
///
/// # Safety
/// `a`, `b`, `out` and the epilogue's matrices are valid for their sizes. `out` overlaps none of them, and no other
/// thread accesses it during the call.
pub(crate) unsafe fn gemm<S: Stored<Lane: Vectors>>(
    simd: Simd,
    size: GemmSize,
    out: Matrix<*mut S::Lane>,
    a: Matrix<*const S>,
    b: Matrix<*const S>,
    alpha: S::Lane,
    epilogue: Epilogue<S::Lane>,
) {
    if S::IS_LANE && gemv::takes(size, out, a.cast(), b.cast()) {
        // SAFETY: the caller guarantees valid operands and an output of its own. The casts change no type.
        let done = unsafe { gemv::gemv(simd, size, out, a.cast(), b.cast(), alpha, epilogue) };
        let rest = GemmSize { n: size.n - done, ..size };
        if rest.n == 0 {
            return;
        }
        // SAFETY: the columns that are left, of the same operands.
        return unsafe {
            let (out, b, epilogue) = (out.offset(0, done), b.offset(0, done), epilogue.offset(0, done));
            blocks(simd, rest, out, Left::new(a), b, alpha, epilogue)
        };
    }
    // Vectors are stored along rows of the output. Fewer columns than a vector has lanes would leave most of a B
    // micro-panel empty.
    if out.column != 1 && out.row == 1 || size.n < Blocking::of::<S::Lane>(simd).lanes && size.n < size.m {
        // SAFETY: the transposed matrices are the same memory, which the caller guarantees to be valid and unshared.
        return unsafe {
            let (left, right) = (Left::new(b.transposed()), a.transposed());
            blocks(simd, size.transposed(), out.transposed(), left, right, alpha, epilogue.transposed())
        };
    }
    // SAFETY: the caller guarantees valid operands and an output of its own.
    unsafe { blocks(simd, size, out, Left::new(a), b, alpha, epilogue) }
}

/// GEMM like [`gemm`], for any A operand, and without exchanging A and B.
///
/// # Safety
/// As for [`gemm`]: valid operands, and an output that overlaps none and that no other thread accesses.
pub(crate) unsafe fn gemm_operand<T: Vectors>(
    simd: Simd,
    size: GemmSize,
    out: Matrix<*mut T>,
    a: AOperand<'_, T>,
    b: Matrix<*const T>,
    alpha: T,
    epilogue: Epilogue<T>,
) {
    // SAFETY: the caller guarantees valid operands and an output of its own.
    unsafe { blocks::<T>(simd, size, out, Left::Lanes(a), b, alpha, epilogue) }
}

/// The A operand of elements that are stored as `S`.
#[derive(Clone, Copy)]
enum Left<'a, S: Stored> {
    /// Elements of the type they are multiplied in.
    Lanes(AOperand<'a, S::Lane>),
    /// Elements that are upcast, some rows at a time.
    Narrow(Matrix<*const S>),
}

impl<S: Stored> Left<'_, S> {
    fn new(a: Matrix<*const S>) -> Self {
        if S::IS_LANE { Left::Lanes(AOperand::Strided(a.cast())) } else { Left::Narrow(a) }
    }
}

/// The loops over blocks: columns, then depth, then, where A is upcast, rows.
///
/// # Safety
/// As for [`gemm`]: valid operands, and an output that overlaps none and that no other thread accesses.
unsafe fn blocks<S: Stored<Lane: Vectors>>(
    simd: Simd,
    GemmSize { m, k, n }: GemmSize,
    out: Matrix<*mut S::Lane>,
    a: Left<'_, S>,
    b: Matrix<*const S>,
    alpha: S::Lane,
    epilogue: Epilogue<S::Lane>,
) {
    let blocking = Blocking::of::<S::Lane>(simd);
    let panel = blocking.nv * blocking.lanes;
    // Packed B takes three quarters of L2; rows of A and the output pass through the rest.
    let packed = Machine::get().l2 / 4 * 3;
    let most = packed / size_of::<S::Lane>() / KC / panel * panel;
    // Blocks of equal width: reading all rows for a narrow last block is not worth it.
    let nc = n.div_ceil(n.div_ceil(most).max(1)).next_multiple_of(panel).min(n.next_multiple_of(blocking.lanes));
    let mc = if matches!(a, Left::Lanes(_)) { m.max(1) } else { blocking.mc() };
    WORKSPACE.with_borrow_mut(|[packed_b, packed_a]| {
        let packed_b = workspace::<S::Lane>(packed_b, nc * k.min(KC));
        let packed_a = workspace::<S::Lane>(packed_a, blocking.packed_a_len(k.min(KC)));
        for j in (0..n).step_by(nc) {
            // With k = 0 the output is still written.
            for from in (0..k.max(1)).step_by(KC) {
                let (kc, nc) = (KC.min(k - from), nc.min(n - j));
                // SAFETY: the caller guarantees `b`.
                unsafe { pack_b(simd, blocking, b.offset(from, j), (kc, nc), packed_b) };
                for i in (0..m).step_by(mc) {
                    let m = mc.min(m - i);
                    let (a, packed_a) = match a {
                        Left::Lanes(a) => (a.offset(i, from), &mut *packed_a),
                        Left::Narrow(a) => {
                            let (at, row) = (packed_a.as_mut_ptr(), kc as isize);
                            // SAFETY: the caller guarantees `a`, and the workspace has room for these rows.
                            unsafe { widen(simd, a.offset(i, from), (m, kc), (at, kc)) };
                            (AOperand::Strided(Matrix { at: at.cast_const(), row, column: 1 }), &mut [][..])
                        }
                    };
                    let kernel = MacroKernel {
                        m,
                        kc,
                        n: nc,
                        a,
                        b: BMicroPanels { at: packed_b.as_ptr(), kc, from: 0 },
                        out: out.offset(i, j),
                        alpha,
                        epilogue: epilogue.offset(i, j).for_k_block(from == 0, from + kc == k),
                    };
                    // SAFETY: the caller guarantees valid operands and an output of its own. B is packed above, and
                    // rows that were upcast have unit column stride and need no workspace.
                    unsafe { macro_kernel::run(simd, &kernel, packed_a) };
                }
            }
        }
    });
}

/// The first `elements` elements of `memory`, which grows as needed.
pub(crate) fn workspace<T: Vectors>(memory: &mut Vec<CacheLine>, elements: usize) -> &mut [T] {
    let count = (elements * size_of::<T>()).div_ceil(size_of::<CacheLine>());
    if memory.len() < count {
        memory.resize(count, CacheLine { _words: [0; 8] });
    }
    // SAFETY: `memory` has `elements * size_of::<T>()` initialised bytes, aligned to a cache line; every bit pattern is
    // a `T`.
    unsafe { std::slice::from_raw_parts_mut(memory.as_mut_ptr().cast(), elements) }
}
