//! The macro-kernel and the micro-kernel: A micro-panels against packed B micro-panels, with the accumulators of a
//! micro-tile in registers.

use super::{
    epilogue::{Epilogue, Old},
    matrix::Matrix,
    pack_a::{AMicroPanel, AOperand, ColumnPanel, GatheredPanel, PackedA, RowPanel, pack_a},
    vector::{Vector, Vectors},
};
use crate::{Simd, simd::prefetch};

/// MR, and vectors in a row of a full B micro-panel (NR / lanes), where there are 32 vector registers: 24 accumulators,
/// three vectors of B and one of A. A rank-1 update takes 11 loads for 24 FMAs, so two load ports suffice.
const MICRO_TILE_32: (usize, usize) = (8, 3);
/// The micro-tile for 16 vector registers: 12 accumulators, two vectors of B and two of A.
const MICRO_TILE_16: (usize, usize) = (6, 2);
/// MR of a last A micro-panel with no more rows. (As a full one, some of whose rows are computed for nothing, 12 rows
/// took 1.07 times as long.)
const MR_EDGE: usize = 4;
/// Elements of the largest micro-tile.
const MAX_MICRO_TILE: usize = MICRO_TILE_32.0 * MICRO_TILE_32.1 * 16;
/// Rows of A that are packed at once: each page is read for four cache lines instead of half of one.
const MC: usize = 64;

/// FMAs of one round of the micro-kernel's loop: two rank-1 updates of 24, or four of 12. (With 24 either is 5 %
/// slower; with four of 24 it is 1 % slower.)
const UNROLL_FMAS: usize = 48;

/// The number of rank-1 updates by which packed B is prefetched ahead, from L2 into L1. (Without, 2048³ takes 1.1 times
/// as long on Cascade Lake; 4 to 8 are alike.)
const B_AHEAD: usize = 8;

/// A call of the macro-kernel: all `m` rows of A against `n` packed columns of B, along `kc` products of each sum.
pub(super) struct MacroKernel<'a, T> {
    pub m: usize,
    pub kc: usize,
    pub n: usize,
    pub a: AOperand<'a, T>,
    pub b: BMicroPanels<T>,
    pub out: Matrix<*mut T>,
    pub alpha: T,
    pub epilogue: Epilogue<T>,
}

/// B as [`pack_b`](super::pack_b::pack_b) packs it, of which the macro-kernel uses `kc` rows from `from` on.
#[derive(Clone, Copy)]
pub(super) struct BMicroPanels<T> {
    pub at: *const T,
    /// Rows of a packed micro-panel.
    pub kc: usize,
    /// The first row that is used.
    pub from: usize,
}

impl<T> BMicroPanels<T> {
    /// The micro-panel of `width` columns that begins at column `j`.
    #[inline(always)]
    fn panel(self, j: usize, width: usize) -> *const T {
        self.at.wrapping_add(j * self.kc + self.from * width)
    }
}

/// The block sizes of an instruction set's GEMM.
#[derive(Clone, Copy)]
pub(super) struct Blocking {
    /// Rows of an A micro-panel.
    pub mr: usize,
    /// Vectors in a row of a full B micro-panel.
    pub nv: usize,
    /// Elements of a vector.
    pub lanes: usize,
}

impl Blocking {
    pub(super) fn of<T: Vectors>(simd: Simd) -> Blocking {
        let ((mr, nv), lanes) = match simd {
            #[cfg(target_arch = "x86_64")]
            Simd::Avx512 | Simd::Avx512Bf16 | Simd::Amx => (MICRO_TILE_32, T::Avx512::LANES),
            #[cfg(target_arch = "x86_64")]
            Simd::Avx2 => (MICRO_TILE_16, T::Avx2::LANES),
            _ => (MICRO_TILE_16, T::Baseline::LANES),
        };
        Blocking { mr, nv, lanes }
    }

    /// The number of columns of the next B micro-panel if `left` columns are left: a full one, or as many vectors as
    /// are needed.
    #[inline(always)]
    pub(super) fn panel_width(self, left: usize) -> usize {
        let (nv, most) = (left.div_ceil(self.lanes), self.nv);
        // Two panels of two vectors, instead of a full one and one vector, whose few accumulators would wait for each
        // other.
        (if nv == most + 1 && most > 2 { 2 } else { nv.min(most) }) * self.lanes
    }

    /// The number of full B micro-panels at the beginning of `n` columns.
    pub(super) fn full_panels(self, n: usize) -> usize {
        let width = self.nv * self.lanes;
        let panels = n / width;
        // The last of them may be narrower, because of the columns that follow it.
        if panels > 0 && self.panel_width(n - (panels - 1) * width) < width { panels - 1 } else { panels }
    }

    /// The rows of A that are packed at once.
    pub(super) fn mc(self) -> usize {
        MC.next_multiple_of(self.mr)
    }

    /// Elements of the rows of A that are packed at once.
    pub(super) fn packed_a_len(self, kc: usize) -> usize {
        self.mc() * kc
    }
}

/// Runs the macro-kernel. `packed_a` is workspace for packed A, of [`Blocking::packed_a_len`] elements.
///
/// # Safety
/// `a` is valid for `[m, kc]` elements, `out` and the epilogue's matrices for `[m, n]`, and `b` is packed with the
/// [`Blocking`] of `simd`. No other thread accesses `out` during the call.
pub(super) unsafe fn run<T: Vectors>(simd: Simd, kernel: &MacroKernel<'_, T>, packed_a: &mut [T]) {
    // SAFETY: the caller guarantees valid operands; a runtime is only built with a `Simd` that this CPU supports.
    unsafe {
        match simd {
            #[cfg(target_arch = "x86_64")]
            Simd::Avx512 | Simd::Avx512Bf16 | Simd::Amx => avx512(kernel, packed_a),
            #[cfg(target_arch = "x86_64")]
            Simd::Avx2 => avx2(kernel, packed_a),
            _ => kernel.run::<T::Baseline, { MICRO_TILE_16.0 }, { MICRO_TILE_16.1 }>(packed_a),
        }
    }
}

/// # Safety
/// As for [`run`], on a CPU with AVX-512.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,avx512f,avx512vl,avx512bw,avx512dq")]
unsafe fn avx512<T: Vectors>(kernel: &MacroKernel<'_, T>, packed_a: &mut [T]) {
    // SAFETY: the caller guarantees operands valid for the kernel's sizes, and AVX-512.
    unsafe { kernel.run::<T::Avx512, { MICRO_TILE_32.0 }, { MICRO_TILE_32.1 }>(packed_a) }
}

/// # Safety
/// As for [`run`], on a CPU with AVX2 and FMA.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn avx2<T: Vectors>(kernel: &MacroKernel<'_, T>, packed_a: &mut [T]) {
    // SAFETY: the caller guarantees operands valid for the kernel's sizes, and AVX2 with FMA.
    unsafe { kernel.run::<T::Avx2, { MICRO_TILE_16.0 }, { MICRO_TILE_16.1 }>(packed_a) }
}

impl<T: Vectors> MacroKernel<'_, T> {
    /// The loop over A micro-panels: one stays in L1 while the B micro-panels stream past it.
    ///
    /// # Safety
    /// As for [`run`]; the CPU supports the vector `R`.
    #[inline(always)]
    unsafe fn run<R: Vector<T>, const MR: usize, const NV: usize>(&self, packed_a: &mut [T]) {
        let last = |i: usize, r: usize| (i + r).min(self.m - 1);
        // SAFETY: rows below `m` are `a`'s, which the caller guarantees to be valid. A partial micro-panel reads its
        // last row again.
        unsafe {
            match self.a {
                AOperand::Strided(a) if a.column == 1 => {
                    for i in (0..self.m).step_by(MR) {
                        let rows = std::array::from_fn(|r| a.offset(last(i, r), 0).at);
                        self.micro_panel::<R, MR, NV>(i, RowPanel::<T, MR>(rows));
                    }
                }
                AOperand::Transposed(a) => {
                    for i in (0..self.m).step_by(MR) {
                        self.micro_panel::<R, MR, NV>(i, ColumnPanel::<T, MR>(a.offset(i, 0).at, a.column));
                    }
                }
                AOperand::Gathered { at, rows, columns } => {
                    for i in (0..self.m).step_by(MR) {
                        let rows = std::array::from_fn(|r| at.wrapping_add(rows[last(i, r)]));
                        self.micro_panel::<R, MR, NV>(i, GatheredPanel::<T, MR>(rows, &columns[..self.kc]));
                    }
                }
                AOperand::Strided(a) => {
                    let mc = MC.next_multiple_of(MR);
                    for top in (0..self.m).step_by(mc) {
                        let mc = mc.min(self.m - top);
                        pack_a::<T, MR>(a.offset(top, 0), mc, self.kc, packed_a);
                        for i in (0..mc).step_by(MR) {
                            let panel = packed_a[i * self.kc..].as_ptr();
                            self.micro_panel::<R, MR, NV>(top + i, PackedA::<T, MR>(panel));
                        }
                    }
                }
            }
        }
    }

    /// Multiplies one A micro-panel by every B micro-panel. Full micro-tiles have a loop of their own: with the
    /// decisions for edges between two of them, short sums take 1.1 times as long.
    ///
    /// # Safety
    /// As for [`run`]; the CPU supports the vector `R`, and `a` is valid for `kc` columns.
    #[inline(always)]
    unsafe fn micro_panel<R: Vector<T>, const MR: usize, const NV: usize>(&self, i: usize, a: impl AMicroPanel<T>) {
        let (blocking, width) = (Blocking { mr: MR, nv: NV, lanes: R::LANES }, NV * R::LANES);
        let are_whole = i + MR <= self.m && self.out.column == 1;
        let continued = self.epilogue.old == Old::Continued;
        let end = if are_whole && !continued { blocking.full_panels(self.n) * width } else { 0 };
        let has_addends = self.epilogue.has_addends();
        for j in (0..end).step_by(width) {
            let tile = MicroTile { kc: self.kc, a, b: self.b.panel(j, width) };
            let (out, epilogue) = (self.out.offset(i, j), self.epilogue.offset(i, j));
            if has_addends {
                epilogue.prefetch(MR, width);
            }
            // SAFETY: the micro-panel of B and the micro-tile of the output are within `[kc, n]` and `[m, n]`, which
            // the caller guarantees.
            unsafe {
                tile.run::<R, MR, NV, false>(out.at, out.row, self.alpha, epilogue.old == Old::Added);
                if has_addends {
                    epilogue.add_to::<R>(out, (MR, width));
                }
            }
        }
        // SAFETY: the caller guarantees valid operands; the edge's micro-tiles are those from column `end` on.
        unsafe {
            match (self.m - i <= MR_EDGE, continued) {
                (true, false) => self.edge_panels::<R, MR_EDGE, NV, false>(i, end, a),
                (false, false) => self.edge_panels::<R, MR, NV, false>(i, end, a),
                (true, true) => self.edge_panels::<R, MR_EDGE, NV, true>(i, end, a),
                (false, true) => self.edge_panels::<R, MR, NV, true>(i, end, a),
            }
        }
    }

    /// Multiplies one A micro-panel by the B micro-panels from column `j` on. Their micro-tiles may lack rows or
    /// columns.
    ///
    /// # Safety
    /// As for [`run`]; the CPU supports the vector `R`, and `a` is valid for `kc` columns.
    #[inline(always)]
    unsafe fn edge_panels<R: Vector<T>, const MR: usize, const NV: usize, const CONTINUED: bool>(
        &self,
        i: usize,
        mut j: usize,
        a: impl AMicroPanel<T>,
    ) {
        let m = MR.min(self.m - i);
        let blocking = Blocking { mr: MR, nv: NV, lanes: R::LANES };
        while j < self.n {
            let left = self.n - j;
            let width = blocking.panel_width(left);
            let tile = MicroTile { kc: self.kc, a, b: self.b.panel(j, width) };
            let out = self.out.offset(i, j);
            let whole = m == MR && left >= width && out.column == 1;
            let epilogue = self.epilogue.offset(i, j);
            epilogue.prefetch(m, width);
            // SAFETY: the micro-tile is within the output, which the caller guarantees, or it is `edge_tile`, which
            // holds the largest one.
            unsafe {
                let mut edge_tile = std::mem::MaybeUninit::<[T; MAX_MICRO_TILE]>::uninit();
                let (at, row) =
                    if whole { (out.at, out.row) } else { (edge_tile.as_mut_ptr().cast::<T>(), width as isize) };
                if CONTINUED && !whole {
                    load_edge(at, (MR, width), out, (m, left.min(width)));
                }
                let (alpha, add) = if whole { (self.alpha, self.epilogue.old == Old::Added) } else { (T::ONE, false) };
                match width / R::LANES {
                    1 => tile.run::<R, MR, 1, CONTINUED>(at, row, alpha, add),
                    2 if NV > 2 => tile.run::<R, MR, 2, CONTINUED>(at, row, alpha, add),
                    _ => tile.run::<R, MR, NV, CONTINUED>(at, row, alpha, add),
                }
                if !whole {
                    store_edge(at, width, (m, left.min(width)), out, self);
                }
                epilogue.add_to::<R>(out, (m, left.min(width)));
            }
            j += width;
        }
    }
}

/// A micro-tile: an A micro-panel times a B micro-panel.
struct MicroTile<T, S> {
    kc: usize,
    a: S,
    b: *const T,
}

impl<T: Vectors, S: AMicroPanel<T>> MicroTile<T, S> {
    /// The micro-kernel: `out = alpha · a · b (+ out)`. Whether sums continue from the old `out` is known when it is
    /// compiled: otherwise accumulators are not kept in registers, and a GEMM takes 1.6 times as long.
    ///
    /// # Safety
    /// Both micro-panels are valid for `kc` products of each sum, and `out` for `MR` rows of `NV` vectors; the CPU
    /// supports the vector `R`.
    #[inline(always)]
    unsafe fn run<R: Vector<T>, const MR: usize, const NV: usize, const CONTINUED: bool>(
        &self,
        out: *mut T,
        out_row: isize,
        alpha: T,
        add: bool,
    ) {
        // SAFETY: the caller guarantees that the micro-panels and the micro-tile are valid.
        unsafe {
            let mut acc = [[R::splat(T::ZERO); NV]; MR];
            for i in 0..MR {
                prefetch(out.wrapping_offset(i as isize * out_row), NV * R::LANES);
            }
            if CONTINUED {
                for (i, row) in acc.iter_mut().enumerate() {
                    for (v, acc) in row.iter_mut().enumerate() {
                        *acc = R::load(out.offset(i as isize * out_row).add(v * R::LANES));
                    }
                }
            }
            // Loops, not `for_each`: a closure of this size is not inlined, and then compiled without the vector's
            // instructions.
            let unroll = const { UNROLL_FMAS / (MR * NV) };
            let (mut k, whole) = (0, self.kc / unroll * unroll);
            while k < whole {
                for step in 0..unroll {
                    self.rank1_update(k + step, &mut acc);
                }
                k += unroll;
            }
            for k in whole..self.kc {
                self.rank1_update(k, &mut acc);
            }
            let alpha = R::splat(alpha);
            for (i, row) in acc.into_iter().enumerate() {
                for (v, acc) in row.into_iter().enumerate() {
                    let at = out.offset(i as isize * out_row).add(v * R::LANES);
                    let x = acc.mul(alpha);
                    if add { x.add(R::load(at)) } else { x }.store(at);
                }
            }
        }
    }

    /// Adds column `k` of A times row `k` of B to the accumulators.
    ///
    /// # Safety
    /// `k < kc`, and the micro-panels are valid for `kc`; the CPU supports the vector `R`.
    #[inline(always)]
    unsafe fn rank1_update<R: Vector<T>, const MR: usize, const NV: usize>(&self, k: usize, acc: &mut [[R; NV]; MR]) {
        // SAFETY: the caller guarantees `k` within both micro-panels.
        unsafe {
            let b = self.b.add(k * NV * R::LANES);
            prefetch(b.wrapping_add(B_AHEAD * NV * R::LANES), NV * R::LANES);
            let row: [R; NV] = std::array::from_fn(|v| R::load(b.add(v * R::LANES)));
            for (i, acc) in acc.iter_mut().enumerate() {
                let x = R::splat(*self.a.at(i, k));
                for (acc, b) in acc.iter_mut().zip(row) {
                    *acc = x.mul_add(b, *acc);
                }
            }
        }
    }
}

/// Copies the `[m, n]` elements that exist from the output to a micro-tile of zeros on the stack.
///
/// # Safety
/// `tile` is valid for the rows and columns of `size`, and `out` for `[m, n]` elements, which are not more.
unsafe fn load_edge<T: Vectors>(tile: *mut T, size: (usize, usize), out: Matrix<*mut T>, (m, n): (usize, usize)) {
    let (rows, width) = size;
    for i in 0..rows {
        for j in 0..width {
            // SAFETY: row `i` and column `j` of the micro-tile, and of the output where it has them; the caller
            // guarantees both.
            unsafe { *tile.add(i * width + j) = if i < m && j < n { *out.offset(i, j).at } else { T::ZERO } };
        }
    }
}

/// Copies the `[m, n]` elements that exist from a micro-tile on the stack to the output.
///
/// # Safety
/// `tile` is valid for `m` rows of `n` elements, `row_stride` apart, and `out` for `[m, n]` elements.
unsafe fn store_edge<T: Vectors>(
    tile: *const T,
    row_stride: usize,
    (m, n): (usize, usize),
    out: Matrix<*mut T>,
    kernel: &MacroKernel<'_, T>,
) {
    for i in 0..m {
        for j in 0..n {
            let to = out.offset(i, j).at;
            // SAFETY: row `i < m` and column `j < n` of both, which the caller guarantees.
            unsafe {
                let x = (*tile.add(i * row_stride + j)).mul(kernel.alpha);
                *to = if kernel.epilogue.old == Old::Added { x.add(*to) } else { x };
            }
        }
    }
}
