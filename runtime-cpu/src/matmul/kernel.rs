//! The innermost loops: strips of rows against panels of columns, the sums of a tile in registers from the first step to the last.

use super::{
    epilogue::Epilogue,
    factor::{Columns, LaidOut, Left, Lines, Matrix, Strip, Windows, lay_out},
    register::{Register, Registers},
};
use crate::{Simd, simd::prefetch};

/// Rows of a strip and registers of a full panel's row where there are 32 registers: 24 sums, three of the panel's and one of the
/// strip's; a step takes 11 loads for 24 products, so two load ports suffice.
const WIDE: (usize, usize) = (8, 3);
/// Where there are 16: 12 sums, two of the panel's and two of the strip's.
const NARROW: (usize, usize) = (6, 2);
/// Rows of a last strip that has no more. (As a full one, some of its rows computed for nothing, 12 rows took 1.07 times as long.)
const SHORT: usize = 4;
/// Numbers of the largest tile.
const TILE: usize = WIDE.0 * WIDE.1 * 16;
/// Rows that are laid out at once: a page is visited for four cache lines, not for half a one.
const BLOCK: usize = 64;

/// Products of registers in a round of a tile's loop: two steps where a step has 24 of them, four where it has 12. (With half as many
/// either is 5 % slower; with four steps of 24 a product is 1 % slower.)
const ROUND: usize = 48;

/// A block of the product: all its rows against columns that lie packed, along a part of the sum.
pub(super) struct Block<'a, T> {
    pub rows: usize,
    pub depth: usize,
    pub columns: usize,
    pub a: Left<'a, T>,
    pub b: Panels<T>,
    pub out: Matrix<*mut T>,
    pub scale: T,
    pub epilogue: Epilogue<T>,
}

/// A right operand as [`super::pack`] packs it, of whose steps a block uses some.
#[derive(Clone, Copy)]
pub(super) struct Panels<T> {
    pub at: *const T,
    /// Steps of a packed panel.
    pub depth: usize,
    /// The first step that is used.
    pub from: usize,
}

impl<T> Panels<T> {
    /// The panel that begins at column `j` and is so wide.
    #[inline(always)]
    fn panel(self, j: usize, width: usize) -> *const T {
        self.at.wrapping_add(j * self.depth + self.from * width)
    }
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
            Simd::Avx512 | Simd::Avx512Bf16 | Simd::Amx => (WIDE, T::Avx512::LANES),
            #[cfg(target_arch = "x86_64")]
            Simd::Avx2 => (NARROW, T::Avx2::LANES),
            _ => (NARROW, T::Baseline::LANES),
        };
        Shape { rows, registers, lanes }
    }

    /// Columns of the panel that begins where `left` columns are left: of a full one, or of as many registers as are needed.
    #[inline(always)]
    pub(super) fn panel(self, left: usize) -> usize {
        let (registers, most) = (left.div_ceil(self.lanes), self.registers);
        // Two of two instead of a full one and one, whose few sums would wait for each other.
        (if registers == most + 1 && most > 2 { 2 } else { registers.min(most) }) * self.lanes
    }

    /// Full panels at the beginning of so many columns.
    pub(super) fn full_panels(self, columns: usize) -> usize {
        let width = self.registers * self.lanes;
        let panels = columns / width;
        // The last of them may be cut otherwise, for what follows it.
        if panels > 0 && self.panel(columns - (panels - 1) * width) < width { panels - 1 } else { panels }
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
            Simd::Avx512 | Simd::Avx512Bf16 | Simd::Amx => avx512(block, strips),
            #[cfg(target_arch = "x86_64")]
            Simd::Avx2 => avx2(block, strips),
            _ => block.run::<T::Baseline, { NARROW.0 }, { NARROW.1 }>(strips),
        }
    }
}

/// # Safety
/// As for [`run`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,avx512f,avx512vl,avx512bw,avx512dq")]
unsafe fn avx512<T: Registers>(block: &Block<'_, T>, strips: &mut [T]) {
    // SAFETY: the caller's promise.
    unsafe { block.run::<T::Avx512, { WIDE.0 }, { WIDE.1 }>(strips) }
}

/// # Safety
/// As for [`run`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn avx2<T: Registers>(block: &Block<'_, T>, strips: &mut [T]) {
    // SAFETY: the caller's promise.
    unsafe { block.run::<T::Avx2, { NARROW.0 }, { NARROW.1 }>(strips) }
}

impl<T: Registers> Block<'_, T> {
    /// Strip after strip: one stays in the first cache while the panels pass.
    ///
    /// # Safety
    /// As for [`run`].
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
                Left::Turned(a) => {
                    for i in (0..self.rows).step_by(ROWS) {
                        self.panels::<R, ROWS, WIDTH>(i, Columns::<T, ROWS>(a.part(i, 0).at, a.column));
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

    /// One strip against every panel. Whole tiles go by themselves: with all that others need decided between two of them, short sums
    /// take 1.1 times as long.
    ///
    /// # Safety
    /// As for [`run`].
    #[inline(always)]
    unsafe fn panels<R: Register<T>, const ROWS: usize, const WIDTH: usize>(&self, i: usize, strip: impl Strip<T>) {
        let (shape, width) = (Shape { rows: ROWS, registers: WIDTH, lanes: R::LANES }, WIDTH * R::LANES);
        let are_whole = i + ROWS <= self.rows && self.out.column == 1;
        let end = if are_whole { shape.full_panels(self.columns) * width } else { 0 };
        let plus = self.epilogue.has_plus();
        for j in (0..end).step_by(width) {
            let tile = Tile { depth: self.depth, strip, b: self.b.panel(j, width) };
            let (out, epilogue) = (self.out.part(i, j), self.epilogue.part(i, j));
            if plus {
                epilogue.ask_for(ROWS, width);
            }
            // SAFETY: the caller's promise: this panel is the block's, and so is this tile of the output.
            unsafe {
                tile.sum::<R, ROWS, WIDTH>(out.at, out.row, self.scale, epilogue.add);
                if plus {
                    epilogue.onto::<R>(out, (ROWS, width));
                }
            }
        }
        // SAFETY: the caller's promise.
        unsafe {
            match self.rows - i {
                ..=SHORT => self.others::<R, SHORT, WIDTH>(i, end, strip),
                _ => self.others::<R, ROWS, WIDTH>(i, end, strip),
            }
        }
    }

    /// One strip against the panels from column `j` on, whose tiles may lack rows or columns.
    ///
    /// # Safety
    /// As for [`run`].
    #[inline(always)]
    unsafe fn others<R: Register<T>, const ROWS: usize, const WIDTH: usize>(
        &self,
        i: usize,
        mut j: usize,
        strip: impl Strip<T>,
    ) {
        let rows = ROWS.min(self.rows - i);
        let shape = Shape { rows: ROWS, registers: WIDTH, lanes: R::LANES };
        while j < self.columns {
            let left = self.columns - j;
            let width = shape.panel(left);
            let tile = Tile { depth: self.depth, strip, b: self.b.panel(j, width) };
            let out = self.out.part(i, j);
            let whole = rows == ROWS && left >= width && out.column == 1;
            let epilogue = self.epilogue.part(i, j);
            epilogue.ask_for(rows, width);
            // SAFETY: the caller's promise: this panel is the block's, and so is this tile of the output, or the one on the stack.
            unsafe {
                let mut aside = std::mem::MaybeUninit::<[T; TILE]>::uninit();
                let (at, row) =
                    if whole { (out.at, out.row) } else { (aside.as_mut_ptr().cast::<T>(), width as isize) };
                let (scale, add) = if whole { (self.scale, self.epilogue.add) } else { (T::ONE, false) };
                match width / R::LANES {
                    1 => tile.sum::<R, ROWS, 1>(at, row, scale, add),
                    2 if WIDTH > 2 => tile.sum::<R, ROWS, 2>(at, row, scale, add),
                    _ => tile.sum::<R, ROWS, WIDTH>(at, row, scale, add),
                }
                if !whole {
                    scatter(at, width, (rows, left.min(width)), out, self);
                }
                epilogue.onto::<R>(out, (rows, left.min(width)));
            }
            j += width;
        }
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
    ///
    /// # Safety
    /// As for [`run`].
    #[inline(always)]
    unsafe fn sum<R: Register<T>, const ROWS: usize, const WIDTH: usize>(
        &self,
        out: *mut T,
        out_row: isize,
        scale: T,
        add: bool,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            let mut sums = [[R::splat(T::ZERO); WIDTH]; ROWS];
            for i in 0..ROWS {
                prefetch(out.wrapping_offset(i as isize * out_row), WIDTH * R::LANES);
            }
            // Loops, not `for_each`: a closure of this size is not inlined, and so compiled without this level's instructions.
            let unroll = const { ROUND / (ROWS * WIDTH) };
            let (mut k, whole) = (0, self.depth / unroll * unroll);
            while k < whole {
                for step in 0..unroll {
                    self.step(k + step, &mut sums);
                }
                k += unroll;
            }
            for k in whole..self.depth {
                self.step(k, &mut sums);
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

    /// The products of one step.
    ///
    /// # Safety
    /// As for [`run`].
    #[inline(always)]
    unsafe fn step<R: Register<T>, const ROWS: usize, const WIDTH: usize>(
        &self,
        k: usize,
        sums: &mut [[R; WIDTH]; ROWS],
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            let b = self.b.add(k * WIDTH * R::LANES);
            let row: [R; WIDTH] = std::array::from_fn(|v| R::load(b.add(v * R::LANES)));
            for (i, sums) in sums.iter_mut().enumerate() {
                let x = R::splat(*self.strip.at(i, k));
                for (sum, b) in sums.iter_mut().zip(row) {
                    *sum = x.mul_add(b, *sum);
                }
            }
        }
    }
}

/// From a tile on the stack to the part of it that there is.
///
/// # Safety
/// As for [`run`].
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
                *to = if block.epilogue.add { x.add(*to) } else { x };
            }
        }
    }
}
