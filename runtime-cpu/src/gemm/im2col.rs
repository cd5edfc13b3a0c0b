//! GEMM whose B operand is an im2col view: its columns are packed from the image itself, a few micro-panels at a time.
//! (Read in place, vectors span two cache lines each, and windows past the end of an image row are computed for
//! nothing: no faster. As the A operand, each micro-panel read all weights, and the output had to be transposed.)

use std::cell::RefCell;

use super::{
    epilogue::Epilogue,
    loops::{CacheLine, KC, workspace},
    macro_kernel::{self, BMicroPanels, Blocking, MacroKernel},
    matrix::Matrix,
    pack_a::AOperand,
    vector::Vectors,
};
use crate::{Simd, simd::multiversion};

/// Bytes that are packed at once: micro-panels that stay in L2 together with the image.
const PACKED_BYTES: usize = 128 << 10;
/// Elements of one copy.
const COPY: usize = 16;
/// Elements behind an image that may be read. Their values do not matter.
pub(crate) const OVERREAD: usize = COPY - 1;
/// The number of columns of the widest micro-panel, and so the most runs of one.
const MAX_PANEL: usize = 48;

/// An im2col view of an image: element `(k, j)` is `rows[k] + columns[j]` elements from `at`.
///
/// Rows are channels times kernel taps; every channel has the same taps, and channels are `plane` elements apart.
/// Columns are output positions, in ascending order.
#[derive(Clone, Copy)]
#[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "the AMX path alone looks at channels"))]
pub(crate) struct Im2col<'a, T> {
    pub at: *const T,
    /// Elements between channels.
    pub plane: usize,
    /// Taps of the kernel in one channel.
    pub taps: usize,
    pub rows: &'a [usize],
    pub columns: &'a [usize],
}

#[cfg(target_arch = "x86_64")]
impl<'a, T> Im2col<'a, T> {
    /// This im2col view over elements of another type, in the same memory.
    pub(super) fn cast<U>(self) -> Im2col<'a, U> {
        let Im2col { at, plane, taps, rows, columns } = self;
        Im2col { at: at.cast(), plane, taps, rows, columns }
    }

    pub(super) fn channels(&self) -> usize {
        self.rows.len() / self.taps
    }
}

thread_local! {
    /// Packed micro-panels. They stay allocated, so that a GEMM allocates nothing.
    static PANELS: RefCell<Vec<CacheLine>> = const { RefCell::new(Vec::new()) };
}

/// Computes `out = a · image` with the epilogue, for `a: [m, k]` with unit column stride and an im2col view of `k`
/// rows.
///
/// # Safety
/// `a` is valid for `[m, k]` elements, `out` and the epilogue's matrices for a column for each of the view's. The view
/// is valid, and so are [`OVERREAD`] elements behind its last one. `out` overlaps none of them, and no other thread
/// accesses it during the call.
pub(super) unsafe fn gemm_im2col<T: Vectors>(
    simd: Simd,
    m: usize,
    out: Matrix<*mut T>,
    a: Matrix<*const T>,
    image: Im2col<'_, T>,
    epilogue: Epilogue<T>,
) {
    debug_assert_eq!(a.column, 1);
    let blocking = Blocking::of::<T>(simd);
    let (panel, k) = (blocking.nv * blocking.lanes, image.rows.len());
    let most = (PACKED_BYTES / size_of::<T>() / k.clamp(1, KC) / panel).max(1) * panel;
    PANELS.with_borrow_mut(|memory| {
        let packed = workspace::<T>(memory, most * k.min(KC) + OVERREAD);
        for (i, columns) in image.columns.chunks(most).enumerate() {
            let j = i * most;
            for (i, rows) in image.rows.chunks(KC).enumerate() {
                let (from, kc) = (i * KC, rows.len());
                let kernel = MacroKernel {
                    m,
                    kc,
                    n: columns.len(),
                    a: AOperand::Strided(a.offset(0, from)),
                    b: BMicroPanels { at: packed.as_ptr(), kc, from: 0 },
                    out: out.offset(0, j),
                    alpha: T::ONE,
                    epilogue: epilogue.offset(0, j).for_k_block(from == 0, from + kc == k),
                };
                pack_im2col(simd, blocking, Im2col { rows, columns, ..image }, packed);
                // SAFETY: the caller guarantees `a` and `out`; `packed` is packed by the line before. `a` has unit
                // column stride and needs no workspace for packing.
                unsafe { macro_kernel::run(simd, &kernel, &mut []) };
            }
        }
    });
}

multiversion! {
    /// Packs columns of an im2col view into micro-panels. Elements behind a panel's columns may have any value. The
    /// view must be valid, as [`gemm_im2col`] requires, and `to` has [`OVERREAD`] elements behind the panels.
    fn pack_im2col<T: (Vectors)>(blocking: Blocking, image: Im2col<'_, T>, to: &mut [T]) {
        let (mut columns, mut to) = (image.columns, to);
        while !columns.is_empty() {
            let width = blocking.panel_width(columns.len());
            let mut runs = [(0, 0); MAX_PANEL];
            let runs = contiguous_runs(&columns[..width.min(columns.len())], &mut runs);
            for (k, row) in image.rows.iter().enumerate() {
                let from = image.at.wrapping_add(*row);
                let row = &mut to[k * width..][..width + OVERREAD];
                for &(j, column) in runs {
                    let row = row[j..][..COPY].as_mut_ptr().cast::<[T; COPY]>();
                    // SAFETY: the view and `OVERREAD` elements behind it are valid to read, and `row` has `COPY`
                    // elements. Elements written behind this run are overwritten by the runs, rows and panels that
                    // follow.
                    unsafe { row.write(from.wrapping_add(column).cast::<[T; COPY]>().read()) };
                }
            }
            to = &mut to[width * image.rows.len()..];
            columns = &columns[width.min(columns.len())..];
        }
    }
}

/// Cuts a micro-panel's columns into runs that are contiguous in the image. A run is its start in the panel's row, and
/// its column offset.
#[inline(always)]
fn contiguous_runs<'a>(columns: &[usize], runs: &'a mut [(usize, usize); MAX_PANEL]) -> &'a [(usize, usize)] {
    let mut count = 0;
    let mut next = 0;
    for (j, &column) in columns.iter().enumerate() {
        let follows = j > 0 && column == columns[j - 1] + 1;
        if !follows || j == next {
            runs[count] = (j, column);
            (count, next) = (count + 1, j + COPY);
        }
    }
    &runs[..count]
}
