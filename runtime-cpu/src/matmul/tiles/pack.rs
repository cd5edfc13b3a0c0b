//! Operands in tiles: 32 steps of 16 rows on the left; on the right 16 columns, two steps of a column side by side. What fills up a tile
//! is zero. Of numbers in pieces, the tiles of the first pieces come first.
//!
//! Lines of 32 numbers that lie side by side in memory become lines of tiles: steps of a row, and columns of a [pair](super::pairs) of steps. That is
//! how the left operand's tiles want rows, and the right one's columns; where an operand lies the other way, its tiles are turned afterwards.

use std::arch::x86_64::*;

use super::{
    SIDE, STEP, Tile, Work,
    lines::{across, along, line, pair, row, turn_tile},
    pairs::steps_of,
    pieces::Pieces,
};
use crate::matmul::Matrix;

/// Rows of a strip and columns of a panel: two tiles.
pub(super) const PAIR: usize = 2 * SIDE;

/// An operand that is packed line by line: a strip of the left one, or panels of the right one, `[panels, depth / 32, P, 2]` tiles.
pub(crate) struct Packing<T, const P: usize> {
    /// Rows are the left operand's rows, or the right one's columns; columns are steps.
    of: Matrix<*const T>,
    rows: usize,
    depth: usize,
    tiles: *mut Tile,
    /// Whether lines run along steps.
    along: bool,
    turn: bool,
    /// What is being packed: a row of a panel, or a step of it.
    panel: usize,
    row: usize,
    step: usize,
    run: Run<T>,
    /// Lines, and tiles to be turned.
    left: usize,
}

/// Lines that lie equally far apart, in memory and in tiles: where one lies is an addition, since the processor sees only so many instructions ahead
/// of the products between which it is packed.
#[derive(Clone, Copy)]
struct Run<T> {
    kind: Kind,
    from: *const T,
    from_step: isize,
    /// From a line to one that will be read later.
    ahead: isize,
    to: *mut __m512i,
    to_step: usize,
    left: usize,
}

#[derive(Clone, Copy)]
enum Kind {
    /// Steps of rows.
    Along,
    /// Pairs of steps of columns.
    Across,
    /// Lines that are not whole, or none.
    Careful,
    /// Tiles to be turned.
    Turn,
}

/// Numbers of a row that are asked for ahead. (Half of the time that packing took was spent waiting for memory: between products the processor
/// does not see far enough ahead. Of 128, 256 and 768 numbers this was the best by 2 %; in a later build a row's own steps were as fast not asked for.)
const AHEAD: isize = 128;

impl<T: Pieces<P>, const P: usize> Packing<T, P> {
    /// From a step of a pair to the other.
    const APART: isize = steps_of(0, P)[1] as isize;

    /// A strip of the left operand, of at most 32 rows.
    ///
    /// # Safety
    /// Until the last part is packed: the numbers lie in their operand, `to` has room that nothing else sees, and the processor has the instructions.
    pub(super) unsafe fn left(a: Matrix<*const T>, rows: usize, depth: usize, to: *mut Tile) -> Self {
        let across = a.column != 1 && a.row == 1;
        Packing::new(a, [rows, depth], to, !across, across)
    }

    /// Columns of the right operand.
    ///
    /// # Safety
    /// As for [`left`](Packing::left).
    pub(super) unsafe fn right(b: Matrix<*const T>, depth: usize, columns: usize, to: *mut Tile) -> Self {
        let along = b.row == 1;
        Packing::new(b.turned(), [columns, depth], to, along, along)
    }

    fn new(of: Matrix<*const T>, [rows, depth]: [usize; 2], tiles: *mut Tile, along: bool, turn: bool) -> Self {
        let run =
            Run { kind: Kind::Careful, from: of.at, from_step: 0, ahead: 0, to: tiles.cast(), to_step: 0, left: 0 };
        let mut packing = Packing { of, rows, depth, tiles, along, turn, panel: 0, row: 0, step: 0, run, left: 0 };
        let [panels, steps] = packing.sizes();
        packing.left = panels * steps * (packing.lines() + if turn { 2 * P } else { 0 });
        if packing.left > 0 {
            packing.begin();
        }
        packing
    }

    /// Panels, and steps of tiles.
    fn sizes(&self) -> [usize; 2] {
        [self.rows.div_ceil(PAIR), self.depth.div_ceil(STEP)]
    }

    /// Lines of a panel's step.
    fn lines(&self) -> usize {
        if self.along { PAIR } else { SIDE }
    }

    /// Whether a run is a row's steps, not a step's rows: neighbours in memory, where no tile waits to be turned.
    fn by_row(&self) -> bool {
        self.along && !self.turn
    }

    fn tile(&self) -> *mut Tile {
        self.tiles.wrapping_add((self.panel * self.sizes()[1] + self.step) * 2 * P)
    }

    /// The run of lines at this panel, row and step.
    fn begin(&mut self) {
        let (rows, steps) = (self.rows - self.panel * PAIR, self.depth - self.step * STEP);
        let here = self.of.part(self.panel * PAIR + self.row, self.step * STEP);
        let whole = rows >= PAIR && steps >= STEP;
        self.run = if self.by_row() {
            let whole = self.of.column == 1 && self.row < rows;
            let (kind, left) = match steps / STEP {
                count @ 1.. if whole => (Kind::Along, count),
                _ => (Kind::Careful, steps.div_ceil(STEP)),
            };
            let to = self.tile().cast::<__m512i>().wrapping_add(self.row);
            Run {
                kind,
                from: here.at,
                from_step: STEP as isize * self.of.column,
                ahead: AHEAD,
                to,
                to_step: 2 * P * SIDE,
                left,
            }
        } else if self.along {
            let kind = if whole && self.of.column == 1 { Kind::Along } else { Kind::Careful };
            Run {
                kind,
                from: here.at,
                from_step: self.of.row,
                ahead: STEP as isize,
                to: self.tile().cast(),
                to_step: 1,
                left: PAIR,
            }
        } else {
            let kind = if whole && self.of.row == 1 { Kind::Across } else { Kind::Careful };
            Run {
                kind,
                from: here.at,
                from_step: steps_of(1, P)[0] as isize * self.of.column,
                ahead: if self.sizes()[0] > 1 { PAIR as isize } else { STEP as isize * self.of.column },
                to: self.tile().cast(),
                to_step: 1,
                left: SIDE,
            }
        };
    }

    /// What comes after a run.
    #[inline(never)]
    fn next(&mut self) {
        let [panels, steps] = self.sizes();
        if self.by_row() {
            // What is left of a row is less than a step, and was begun carefully.
            let done = matches!(self.run.kind, Kind::Careful) || self.depth.is_multiple_of(STEP);
            self.step = if done { 0 } else { steps - 1 };
            self.row += usize::from(done);
            if self.row == PAIR {
                (self.row, self.panel) = (0, self.panel + 1);
            }
        } else if self.turn && !matches!(self.run.kind, Kind::Turn) {
            self.run = Run { kind: Kind::Turn, to: self.tile().cast(), to_step: SIDE, left: 2 * P, ..self.run };
            return;
        } else {
            let [inner, outer] =
                if self.along { [&mut self.step, &mut self.panel] } else { [&mut self.panel, &mut self.step] };
            *inner += 1;
            if *inner == if self.along { steps } else { panels } {
                (*inner, *outer) = (0, *outer + 1);
            }
        }
        if self.left > 0 {
            self.begin();
        }
    }

    /// The next line of a run of whole lines.
    ///
    /// # Safety
    /// As for [`Work::advance`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn line(&mut self) {
        let run = &mut self.run;
        // SAFETY: whoever made this promised room and numbers.
        unsafe {
            match run.kind {
                Kind::Across => across(run.from, Self::APART * self.of.column, run.ahead, run.to),
                _ => along(run.from, run.ahead, run.to),
            }
        }
        run.from = run.from.wrapping_offset(run.from_step);
        run.to = run.to.wrapping_add(run.to_step);
        run.left -= 1;
        self.left -= 1;
    }

    /// So many lines of the run, or tiles.
    ///
    /// # Safety
    /// As for [`Work::advance`].
    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn some(&mut self, count: usize) {
        // One by one, so that they stay in registers: a copy of the run lies in memory.
        let Run { kind, mut from, from_step, ahead, mut to, to_step, mut left } = self.run;
        for _ in 0..count {
            // SAFETY: whoever made this promised room and numbers.
            unsafe {
                match kind {
                    Kind::Along => along(from, ahead, to),
                    Kind::Across => across(from, Self::APART * self.of.column, ahead, to),
                    Kind::Turn => turn_tile(to.cast()),
                    Kind::Careful => self.careful(from, to, left),
                }
            }
            from = from.wrapping_offset(from_step);
            to = to.wrapping_add(to_step);
            left -= 1;
        }
        (self.run.from, self.run.to, self.run.left) = (from, to, left);
        self.left -= count;
    }

    /// A line of which some is not there, and zero, or whose numbers are no neighbours: with it so many of its run are left.
    ///
    /// # Safety
    /// As for [`Work::advance`].
    #[cold]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn careful(&self, from: *const T, to: *mut __m512i, left: usize) {
        let rows = self.rows - self.panel * PAIR;
        // SAFETY: whoever made this promised room and numbers.
        unsafe {
            if self.along {
                let (at, step) = match self.by_row() {
                    true => (self.row, self.sizes()[1] - left),
                    false => (PAIR - left, self.step),
                };
                let count = if at < rows { self.depth - step * STEP } else { 0 };
                row(T::row(line(from, self.of.column, count)), to);
            } else {
                let steps = steps_of(SIDE - left, P);
                let lines = steps.map(|step| {
                    let at = from.wrapping_offset((step - steps[0]) as isize * self.of.column);
                    line(at, self.of.row, if self.step * STEP + step < self.depth { rows } else { 0 })
                });
                pair(T::pair(lines), to);
            }
        }
    }
}

impl<T: Pieces<P>, const P: usize> Work for Packing<T, P> {
    fn left(&self) -> usize {
        self.left
    }

    /// # Safety
    /// As for [`Work::advance`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn advance(&mut self) {
        // SAFETY: the caller's promise.
        unsafe {
            match self.run.kind {
                Kind::Along | Kind::Across => self.line(),
                Kind::Careful | Kind::Turn => self.some(1),
            }
        }
        if self.run.left == 0 {
            self.next();
        }
    }

    /// # Safety
    /// As for [`Work::finish`].
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn finish(&mut self) {
        while self.left > 0 {
            // SAFETY: the caller's promise.
            unsafe { self.some(self.run.left) };
            self.next();
        }
    }
}
