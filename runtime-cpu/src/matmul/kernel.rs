//! The innermost loops: strips of rows against panels of columns, the sums of a tile in registers from the first step to the last.

use super::register::{Registers, Register};
use crate::Simd;

/// Registers in a row of a full panel. With them and [`WIDE`] rows a tile has 24 sums: of the 32 registers of AVX-512 three hold the
/// panel's row and one the strip's number; a step takes 11 loads for 24 products, so two load ports suffice.
const PANEL: usize = 3;
/// Rows of a strip where there are 32 registers, and where there are 16.
const WIDE: usize = 8;
const NARROW: usize = 4;
/// Numbers of the largest tile.
const TILE: usize = WIDE * PANEL * 16;

/// A matrix in memory: its first number, and the distances from one row and from one column to the next.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<T> {
    pub at: T,
    pub row: isize,
    pub column: isize,
}

macro_rules! parts {
    ($($pointer:ty),*) => {$(
        impl<T> Matrix<$pointer> {
            /// The part that begins there.
            pub(super) fn part(self, i: usize, j: usize) -> Self {
                Matrix { at: self.at.wrapping_offset(i as isize * self.row + j as isize * self.column), ..self }
            }
        }
    )*};
}
parts!(*const T, *mut T);

impl<T> Matrix<T> {
    /// Rows as columns.
    pub(super) fn turned(self) -> Self {
        Matrix { row: self.column, column: self.row, ..self }
    }
}

/// A block of the product: all its rows against columns that lie packed, along a part of the sum.
pub(super) struct Block<T> {
    pub rows: usize,
    pub depth: usize,
    pub columns: usize,
    pub a: Matrix<*const T>,
    /// `b` in panels ([`super::pack`]).
    pub b: *const T,
    pub out: Matrix<*mut T>,
    pub scale: T,
    pub add: bool,
}

/// How this level cuts: rows of a strip, columns of a register.
pub(super) fn cut<T: Registers>(simd: Simd) -> (usize, usize) {
    match simd {
        #[cfg(target_arch = "x86_64")]
        Simd::Avx512 => (WIDE, T::Avx512::LANES),
        #[cfg(target_arch = "x86_64")]
        Simd::Avx2 => (NARROW, T::Avx2::LANES),
        _ => (NARROW, T::Baseline::LANES),
    }
}

/// Columns of the panel that begins where `left` columns are left: of a full one, or of as many registers as are needed.
pub(super) fn panel(left: usize, lanes: usize) -> usize {
    left.next_multiple_of(lanes).min(PANEL * lanes)
}

/// Computes a block. `strip` is room for one strip of rows.
///
/// # Safety
/// The matrices lie in their operands, `b` is packed for this level, and nothing else sees the output meanwhile.
pub(super) unsafe fn run<T: Registers>(simd: Simd, block: &Block<T>, strip: &mut [T]) {
    // SAFETY: the caller's promise; a runtime is only built with a level that this processor has.
    unsafe {
        match simd {
            #[cfg(target_arch = "x86_64")]
            Simd::Avx512 => avx512(block, strip),
            #[cfg(target_arch = "x86_64")]
            Simd::Avx2 => avx2(block, strip),
            _ => strips::<T, T::Baseline, NARROW>(block, strip),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,avx512f,avx512vl,avx512bw,avx512dq")]
unsafe fn avx512<T: Registers>(block: &Block<T>, strip: &mut [T]) {
    // SAFETY: the caller's promise.
    unsafe { strips::<T, T::Avx512, WIDE>(block, strip) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn avx2<T: Registers>(block: &Block<T>, strip: &mut [T]) {
    // SAFETY: the caller's promise.
    unsafe { strips::<T, T::Avx2, NARROW>(block, strip) }
}

#[inline(always)]
unsafe fn strips<T: Registers, R: Register<T>, const ROWS: usize>(block: &Block<T>, strip: &mut [T]) {
    for i in (0..block.rows).step_by(ROWS) {
        let rows = ROWS.min(block.rows - i);
        let a = block.a.part(i, 0);
        // SAFETY: the caller's promise: these rows are the block's.
        unsafe {
            if rows == ROWS && a.column == 1 {
                panels::<T, R, ROWS, false>(block, i, rows, a.at, a.row);
            } else {
                lay_out::<T, ROWS>(a, rows, block.depth, strip);
                panels::<T, R, ROWS, true>(block, i, rows, strip.as_ptr(), 1);
            }
        }
    }
}

/// The numbers of a strip in the order they are read: all rows of a step side by side, zeros where there is no row.
#[inline(always)]
unsafe fn lay_out<T: Registers, const ROWS: usize>(a: Matrix<*const T>, rows: usize, depth: usize, strip: &mut [T]) {
    let steps = strip[..depth * ROWS].as_chunks_mut::<ROWS>().0.iter_mut().enumerate();
    if rows == ROWS && a.row == 1 {
        for (k, step) in steps {
            // SAFETY: these numbers are the block's.
            *step = unsafe { a.part(0, k).at.cast::<[T; ROWS]>().read() };
        }
    } else {
        for (k, step) in steps {
            for (i, x) in step.iter_mut().enumerate() {
                // SAFETY: as above.
                *x = if i < rows { unsafe { *a.part(i, k).at } } else { T::ZERO };
            }
        }
    }
}

/// One strip against every panel.
#[inline(always)]
unsafe fn panels<T: Registers, R: Register<T>, const ROWS: usize, const DENSE: bool>(
    block: &Block<T>,
    i: usize,
    rows: usize,
    a: *const T,
    a_row: isize,
) {
    let mut j = 0;
    while j < block.columns {
        let left = block.columns - j;
        let width = panel(left, R::LANES);
        let tile = Tile { depth: block.depth, a, a_row, b: block.b.wrapping_add(j * block.depth) };
        let out = block.out.part(i, j);
        let whole = rows == ROWS && left >= width && out.column == 1;
        // SAFETY: the caller's promise: this panel is the block's, and so is this tile of the output, or the one on the stack.
        unsafe {
            let mut aside = std::mem::MaybeUninit::<[T; TILE]>::uninit();
            let (at, row) = if whole { (out.at, out.row) } else { (aside.as_mut_ptr().cast::<T>(), width as isize) };
            let (scale, add) = if whole { (block.scale, block.add) } else { (T::ONE, false) };
            match width / R::LANES {
                3 => tile.sum::<R, ROWS, 3, DENSE>(at, row, scale, add),
                2 => tile.sum::<R, ROWS, 2, DENSE>(at, row, scale, add),
                _ => tile.sum::<R, ROWS, 1, DENSE>(at, row, scale, add),
            }
            if !whole {
                scatter(at, width, (rows, left.min(width)), out, block);
            }
        }
        j += width;
    }
}

/// One tile: a strip's rows times a panel's columns.
struct Tile<T> {
    depth: usize,
    a: *const T,
    a_row: isize,
    b: *const T,
}

impl<T: Registers> Tile<T> {
    /// `out = scale · a · b (+ out)`. A dense strip has its rows side by side; otherwise a row's numbers are neighbours.
    #[inline(always)]
    unsafe fn sum<R: Register<T>, const ROWS: usize, const WIDTH: usize, const DENSE: bool>(
        &self,
        out: *mut T,
        out_row: isize,
        scale: T,
        add: bool,
    ) {
        let lines: [*const T; ROWS] = std::array::from_fn(|i| self.a.wrapping_offset(i as isize * self.a_row));
        // SAFETY: the caller's promise.
        unsafe {
            let mut sums = [[R::splat(T::ZERO); WIDTH]; ROWS];
            for k in 0..self.depth {
                let b = self.b.add(k * WIDTH * R::LANES);
                let row: [R; WIDTH] = std::array::from_fn(|v| R::load(b.add(v * R::LANES)));
                for (i, sums) in sums.iter_mut().enumerate() {
                    let x = R::splat(if DENSE { *self.a.add(k * ROWS + i) } else { *lines[i].add(k) });
                    for (sum, b) in sums.iter_mut().zip(row) {
                        *sum = x.mul_add(b, *sum);
                    }
                }
            }
            let scale = R::splat(scale);
            for (i, sums) in sums.into_iter().enumerate() {
                for (v, sum) in sums.into_iter().enumerate() {
                    let at = out.offset(i as isize * out_row).add(v * R::LANES);
                    let x = sum.mul(scale);
                    if add { x.add(R::load(at)) } else { x }.store(at);
                }
            }
        }
    }
}

/// From a tile on the stack to the part of it that there is.
unsafe fn scatter<T: Registers>(
    tile: *const T,
    line: usize,
    (rows, columns): (usize, usize),
    out: Matrix<*mut T>,
    block: &Block<T>,
) {
    for i in 0..rows {
        for j in 0..columns {
            let to = out.part(i, j).at;
            // SAFETY: the caller's promise.
            unsafe {
                let x = (*tile.add(i * line + j)).mul(block.scale);
                *to = if block.add { x.add(*to) } else { x };
            }
        }
    }
}
