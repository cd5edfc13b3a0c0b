//! The loops of a launch: axes merged over all operands, and tiles of the last two that fit a block.

use numcore::{MAX_RANK, Shape};
use smallvec::SmallVec;

/// The bytes of a column of a tile where an operand is column-major: a whole cache line. Rows stay long, for writing.
const LINE: usize = 64;
/// The number of which the columns of a tile are a multiple, if there are several tiles: whole vectors.
const LANES: usize = 16;

/// An operand of a launch: the address of its first element, its element size, and its strides along each axis in
/// bytes.
#[derive(Clone, Copy)]
pub(crate) struct Moving {
    pub base: *mut u8,
    /// Bytes of an element.
    pub size: usize,
    pub strides: [isize; MAX_RANK],
}

// SAFETY: it holds an address alone; kernels that read or write through it state why that is sound.
unsafe impl Send for Moving {}
// SAFETY: it holds an address alone; kernels that read or write through it state why that is sound.
unsafe impl Sync for Moving {}

/// Nested loops over the positions of a launch, and their division into tiles.
#[derive(Clone)]
pub(crate) struct LoopPlan {
    /// Sizes of the axes, outermost first; at least two, the last two of which are rows and columns.
    pub sizes: SmallVec<[usize; MAX_RANK]>,
    pub operands: SmallVec<[Moving; 6]>,
    pub tile: Tile,
}

/// Rows and columns of a tile.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Tile {
    pub rows: usize,
    pub columns: usize,
}

/// A tile of a plan. The caller computes the offset of each operand from `index`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    /// The row-major position on the outer axes.
    pub outer: usize,
    pub row: usize,
    pub column: usize,
    pub size: Tile,
}

impl LoopPlan {
    /// A plan without loops yet, which [`arrange`](LoopPlan::arrange) adds.
    pub(crate) fn of(operands: SmallVec<[Moving; 6]>) -> LoopPlan {
        LoopPlan { sizes: SmallVec::new(), operands, tile: Tile { rows: 1, columns: 1 } }
    }

    /// A plan of all positions of `shape`, in row-major order, with adjacent axes merged where every operand allows it.
    pub(crate) fn rows(shape: &Shape, operands: SmallVec<[Moving; 6]>) -> LoopPlan {
        let order: SmallVec<[usize; MAX_RANK]> = (0..shape.rank()).collect();
        let mut plan = LoopPlan::of(operands);
        plan.arrange(shape, &order, |_| ());
        plan
    }

    /// Takes the axes of `shape` in `order`. Adjacent axes of one kind are merged where every operand allows it.
    /// Returns the kinds of the axes that remain.
    pub(crate) fn arrange<K: PartialEq>(
        &mut self,
        shape: &Shape,
        order: &[usize],
        kind: impl Fn(usize) -> K,
    ) -> SmallVec<[K; MAX_RANK]> {
        let from: SmallVec<[Moving; 6]> = self.operands.clone();
        let mut kinds: SmallVec<[K; MAX_RANK]> = SmallVec::new();
        for &axis in order.iter().filter(|&&a| shape[a] != 1) {
            let size = shape[axis] as isize;
            let n = self.sizes.len();
            let joins = |(o, f): (&Moving, &Moving)| o.strides[n - 1] == f.strides[axis] * size;
            let merge = n > 0 && kinds[n - 1] == kind(axis) && self.operands.iter().zip(&from).all(joins);
            let at = if merge { n - 1 } else { n };
            if merge {
                self.sizes[at] *= shape[axis];
            } else {
                self.sizes.push(shape[axis]);
                kinds.push(kind(axis));
            }
            self.operands.iter_mut().zip(&from).for_each(|(o, f)| o.strides[at] = f.strides[axis]);
        }
        self.pad();
        kinds
    }

    /// Adds axes of size 1 in front, until there are two.
    fn pad(&mut self) {
        while self.sizes.len() < 2 {
            self.sizes.insert(0, 1);
            self.operands.iter_mut().for_each(|o| {
                o.strides.copy_within(0..MAX_RANK - 1, 1);
                o.strides[0] = 0;
            });
        }
    }

    pub(crate) fn rows_len(&self) -> usize {
        self.sizes[self.sizes.len() - 2]
    }

    pub(crate) fn columns(&self) -> usize {
        self.sizes[self.sizes.len() - 1]
    }

    pub(crate) fn outer(&self) -> usize {
        self.sizes[..self.sizes.len() - 2].iter().product()
    }

    /// Strides of an operand along rows and columns.
    pub(crate) fn strides(&self, operand: &Moving) -> (isize, isize) {
        let n = self.sizes.len();
        (operand.strides[n - 2], operand.strides[n - 1])
    }

    /// Cuts tiles of at most `block` elements: a cache line high where an operand is column-major, whole rows
    /// otherwise.
    pub(in crate::pointwise) fn cut(&mut self, block: usize) {
        let (rows, columns) = (self.rows_len(), self.columns());
        let across = |o: &&Moving| {
            let (row, column) = self.strides(o);
            row.unsigned_abs() == o.size && column.unsigned_abs() > o.size
        };
        match self.operands.iter().find(across).map(|o| (LINE / o.size).max(LANES)) {
            Some(line) if rows >= line / 2 && columns >= line / 2 => {
                let rows = rows.min(line).min(block / LANES);
                self.tile = Tile { rows, columns: columns.min(block / rows / LANES * LANES) };
            }
            _ => self.cut_rows(block),
        }
    }

    /// Forms tiles of at most `block` elements: several whole rows, or a part of one.
    pub(in crate::pointwise) fn cut_rows(&mut self, block: usize) {
        let (rows, columns) = (self.rows_len(), self.columns());
        self.tile = if columns > block / 2 {
            let pieces = columns.div_ceil(block);
            Tile { rows: 1, columns: columns.div_ceil(pieces).next_multiple_of(LANES).min(columns) }
        } else {
            Tile { rows: rows.min(block / columns), columns }
        };
    }

    /// Tells whether a whole tile of an operand is contiguous.
    pub(crate) fn is_contiguous(&self, operand: &Moving) -> bool {
        let (row, column) = self.strides(operand);
        let whole = self.tile.columns == self.columns() && row == column * self.columns() as isize;
        column == operand.size as isize && (self.tile.rows == 1 || whole)
    }

    /// The number of tiles down and across.
    fn grid(&self) -> (usize, usize) {
        (self.rows_len().div_ceil(self.tile.rows), self.columns().div_ceil(self.tile.columns))
    }

    pub(crate) fn tiles(&self) -> usize {
        let (down, across) = self.grid();
        self.outer() * down * across
    }

    pub(crate) fn place(&self, tile: usize) -> Place {
        let (down, across) = self.grid();
        let (rest, column) = if across == 1 { (tile, 0) } else { (tile / across, tile % across * self.tile.columns) };
        let (outer, row) = if down == 1 { (rest, 0) } else { (rest / down, rest % down * self.tile.rows) };
        let size = Tile {
            rows: self.tile.rows.min(self.rows_len() - row),
            columns: self.tile.columns.min(self.columns() - column),
        };
        Place { outer, row, column, size }
    }

    /// The address of an operand's first element of a tile.
    #[inline(always)]
    pub(crate) fn address(&self, operand: &Moving, place: &Place) -> *mut u8 {
        let n = self.sizes.len();
        let mut at = place.row as isize * operand.strides[n - 2] + place.column as isize * operand.strides[n - 1];
        let mut outer = place.outer;
        for i in (0..n - 2).rev() {
            at += (outer % self.sizes[i]) as isize * operand.strides[i];
            outer /= self.sizes[i];
        }
        operand.base.wrapping_offset(at)
    }
}
