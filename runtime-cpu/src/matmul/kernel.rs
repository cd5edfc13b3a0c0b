//! The innermost loops: strips of rows against panels of columns, the sums of a tile in registers from the first step to the last.

use super::register::{Register, Registers};
use crate::Simd;

/// Rows of a strip and registers of a full panel's row where there are 32 registers: 24 sums, three of the panel's and one of the
/// strip's; a step takes 11 loads for 24 products, so two load ports suffice.
const WIDE: (usize, usize) = (8, 3);
/// Where there are 16: 12 sums, two of the panel's and two of the strip's.
const NARROW: (usize, usize) = (6, 2);
/// Numbers of the largest tile.
const TILE: usize = WIDE.0 * WIDE.1 * 16;
/// Rows that are laid out at once: a page is visited for four cache lines, not for half a one.
const BLOCK: usize = 64;

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

/// The left operand of a product.
#[derive(Clone, Copy)]
pub(crate) enum Left<'a, T> {
    /// A matrix.
    Strided(Matrix<*const T>),
    /// Its number `(i, k)` lies `rows[i] + steps[k]` numbers from `at`: windows of an image, read where they are.
    Gathered { at: *const T, rows: &'a [usize], steps: &'a [usize] },
}

impl<T> Left<'_, T> {
    /// The part that begins there.
    pub(super) fn part(self, i: usize, k: usize) -> Self {
        match self {
            Left::Strided(a) => Left::Strided(a.part(i, k)),
            Left::Gathered { at, rows, steps } => Left::Gathered { at, rows: &rows[i..], steps: &steps[k..] },
        }
    }
}

/// A block of the product: all its rows against columns that lie packed, along a part of the sum.
pub(super) struct Block<'a, T> {
    pub rows: usize,
    pub depth: usize,
    pub columns: usize,
    pub a: Left<'a, T>,
    /// `b` in panels ([`super::pack`]).
    pub b: *const T,
    pub out: Matrix<*mut T>,
    pub scale: T,
    pub add: bool,
}

/// How a level cuts a product.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    /// Rows of a strip.
    pub rows: usize,
    /// Registers of a full panel's row.
    pub registers: usize,
    /// Columns of a register.
    pub lanes: usize,
}

impl Shape {
    pub(super) fn of<T: Registers>(simd: Simd) -> Shape {
        let ((rows, registers), lanes) = match simd {
            #[cfg(target_arch = "x86_64")]
            Simd::Avx512 => (WIDE, T::Avx512::LANES),
            #[cfg(target_arch = "x86_64")]
            Simd::Avx2 => (NARROW, T::Avx2::LANES),
            _ => (NARROW, T::Baseline::LANES),
        };
        Shape { rows, registers, lanes }
    }

    /// Columns of the panel that begins where `left` columns are left: of a full one, or of as many registers as are needed.
    #[inline(always)]
    pub(super) fn panel(self, left: usize) -> usize {
        left.next_multiple_of(self.lanes).min(self.registers * self.lanes)
    }

    /// Numbers of the strips that are laid out at once.
    pub(super) fn strips(self, depth: usize) -> usize {
        BLOCK.next_multiple_of(self.rows) * depth
    }
}

/// Computes a block. `strips` is room for strips of rows ([`Shape::strips`]).
///
/// # Safety
/// The matrices lie in their operands, `b` is packed for this level, and nothing else sees the output meanwhile.
pub(super) unsafe fn run<T: Registers>(simd: Simd, block: &Block<'_, T>, strips: &mut [T]) {
    // SAFETY: the caller's promise; a runtime is only built with a level that this processor has.
    unsafe {
        match simd {
            #[cfg(target_arch = "x86_64")]
            Simd::Avx512 => avx512(block, strips),
            #[cfg(target_arch = "x86_64")]
            Simd::Avx2 => avx2(block, strips),
            _ => block.run::<T::Baseline, { NARROW.0 }, { NARROW.1 }>(strips),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,avx512f,avx512vl,avx512bw,avx512dq")]
unsafe fn avx512<T: Registers>(block: &Block<'_, T>, strips: &mut [T]) {
    // SAFETY: the caller's promise.
    unsafe { block.run::<T::Avx512, { WIDE.0 }, { WIDE.1 }>(strips) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn avx2<T: Registers>(block: &Block<'_, T>, strips: &mut [T]) {
    // SAFETY: the caller's promise.
    unsafe { block.run::<T::Avx2, { NARROW.0 }, { NARROW.1 }>(strips) }
}

impl<T: Registers> Block<'_, T> {
    /// Strip after strip: one stays in the first cache while the panels pass.
    #[inline(always)]
    unsafe fn run<R: Register<T>, const ROWS: usize, const WIDTH: usize>(&self, strips: &mut [T]) {
        let last = |i: usize, r: usize| (i + r).min(self.rows - 1);
        // SAFETY: the caller's promise: these rows are the block's. A strip that is not full reads its last row again.
        unsafe {
            match self.a {
                Left::Strided(a) if a.column == 1 => {
                    for i in (0..self.rows).step_by(ROWS) {
                        let lines = std::array::from_fn(|r| a.part(last(i, r), 0).at);
                        self.panels::<R, ROWS, WIDTH>(i, Lines::<T, ROWS>(lines));
                    }
                }
                Left::Gathered { at, rows, steps } => {
                    for i in (0..self.rows).step_by(ROWS) {
                        let lines = std::array::from_fn(|r| at.wrapping_add(rows[last(i, r)]));
                        self.panels::<R, ROWS, WIDTH>(i, Windows::<T, ROWS>(lines, &steps[..self.depth]));
                    }
                }
                Left::Strided(a) => {
                    let step = BLOCK.next_multiple_of(ROWS);
                    for top in (0..self.rows).step_by(step) {
                        let rows = step.min(self.rows - top);
                        lay_out::<T, ROWS>(a.part(top, 0), rows, self.depth, strips);
                        for i in (0..rows).step_by(ROWS) {
                            let strip = strips[i * self.depth..].as_ptr();
                            self.panels::<R, ROWS, WIDTH>(top + i, LaidOut::<T, ROWS>(strip));
                        }
                    }
                }
            }
        }
    }

    /// One strip against every panel.
    #[inline(always)]
    unsafe fn panels<R: Register<T>, const ROWS: usize, const WIDTH: usize>(&self, i: usize, strip: impl Strip<T>) {
        let rows = ROWS.min(self.rows - i);
        let shape = Shape { rows: ROWS, registers: WIDTH, lanes: R::LANES };
        let mut j = 0;
        while j < self.columns {
            let left = self.columns - j;
            let width = shape.panel(left);
            let tile = Tile { depth: self.depth, strip, b: self.b.wrapping_add(j * self.depth) };
            let out = self.out.part(i, j);
            let whole = rows == ROWS && left >= width && out.column == 1;
            // SAFETY: the caller's promise: this panel is the block's, and so is this tile of the output, or the one on the stack.
            unsafe {
                let mut aside = std::mem::MaybeUninit::<[T; TILE]>::uninit();
                let (at, row) =
                    if whole { (out.at, out.row) } else { (aside.as_mut_ptr().cast::<T>(), width as isize) };
                let (scale, add) = if whole { (self.scale, self.add) } else { (T::ONE, false) };
                match width / R::LANES {
                    1 => tile.sum::<R, ROWS, 1>(at, row, scale, add),
                    registers if registers < WIDTH => tile.sum::<R, ROWS, 2>(at, row, scale, add),
                    _ => tile.sum::<R, ROWS, WIDTH>(at, row, scale, add),
                }
                if !whole {
                    scatter(at, width, (rows, left.min(width)), out, self);
                }
            }
            j += width;
        }
    }
}

/// Rows in the order tiles read them: strip after strip, all rows of a step side by side, zeros where there is no row.
#[inline(always)]
unsafe fn lay_out<T: Registers, const ROWS: usize>(a: Matrix<*const T>, rows: usize, depth: usize, strips: &mut [T]) {
    for k in 0..depth {
        for i in (0..rows).step_by(ROWS) {
            let to = &mut strips[i * depth + k * ROWS..][..ROWS];
            let there = ROWS.min(rows - i);
            let from = a.part(i, k);
            if there == ROWS && a.row == 1 {
                // SAFETY: these numbers are the block's.
                unsafe { to.as_mut_ptr().copy_from_nonoverlapping(from.at, ROWS) };
                continue;
            }
            for (r, x) in to.iter_mut().enumerate() {
                // SAFETY: as above.
                *x = if r < there { unsafe { *from.part(r, 0).at } } else { T::ZERO };
            }
        }
    }
}

/// Where the numbers of a strip are.
trait Strip<T>: Copy {
    /// That of row `i` and step `k`.
    ///
    /// # Safety
    /// They are the strip's.
    unsafe fn at(&self, i: usize, k: usize) -> *const T;
}

/// A row's numbers are neighbours.
#[derive(Clone, Copy)]
struct Lines<T, const ROWS: usize>([*const T; ROWS]);

/// All rows of a step side by side.
#[derive(Clone, Copy)]
struct LaidOut<T, const ROWS: usize>(*const T);

/// The same distances in every row.
#[derive(Clone, Copy)]
struct Windows<'a, T, const ROWS: usize>([*const T; ROWS], &'a [usize]);

impl<T: Copy, const ROWS: usize> Strip<T> for Lines<T, ROWS> {
    #[inline(always)]
    unsafe fn at(&self, i: usize, k: usize) -> *const T {
        self.0[i].wrapping_add(k)
    }
}

impl<T: Copy, const ROWS: usize> Strip<T> for LaidOut<T, ROWS> {
    #[inline(always)]
    unsafe fn at(&self, i: usize, k: usize) -> *const T {
        self.0.wrapping_add(k * ROWS + i)
    }
}

impl<T: Copy, const ROWS: usize> Strip<T> for Windows<'_, T, ROWS> {
    #[inline(always)]
    unsafe fn at(&self, i: usize, k: usize) -> *const T {
        // SAFETY: the trait's contract: a step of the strip's.
        self.0[i].wrapping_add(unsafe { *self.1.get_unchecked(k) })
    }
}

/// One tile: a strip's rows times a panel's columns.
struct Tile<T, S> {
    depth: usize,
    strip: S,
    b: *const T,
}

impl<T: Registers, S: Strip<T>> Tile<T, S> {
    /// `out = scale · a · b (+ out)`.
    #[inline(always)]
    unsafe fn sum<R: Register<T>, const ROWS: usize, const WIDTH: usize>(
        &self,
        out: *mut T,
        out_row: isize,
        scale: T,
        add: bool,
    ) {
        for i in 0..ROWS {
            for v in 0..WIDTH {
                prefetch(out.wrapping_offset(i as isize * out_row).wrapping_add(v * R::LANES));
            }
        }
        // SAFETY: the caller's promise.
        unsafe {
            let mut sums = [[R::splat(T::ZERO); WIDTH]; ROWS];
            for k in 0..self.depth {
                let b = self.b.add(k * WIDTH * R::LANES);
                let row: [R; WIDTH] = std::array::from_fn(|v| R::load(b.add(v * R::LANES)));
                for (i, sums) in sums.iter_mut().enumerate() {
                    let x = R::splat(*self.strip.at(i, k));
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

/// Asks for a line that is written when a tile's sums are done: fetched only then, the output costs a tenth of the time.
#[inline(always)]
fn prefetch<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every processor of this kind has it, and it reads nothing, wherever it points.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.cast());
    }
}

/// From a tile on the stack to the part of it that there is.
unsafe fn scatter<T: Registers>(
    tile: *const T,
    line: usize,
    (rows, columns): (usize, usize),
    out: Matrix<*mut T>,
    block: &Block<'_, T>,
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
