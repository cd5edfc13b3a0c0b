//! Work of the vector units between products of tiles: the processor does both at once where neither waits for the other, and no more than
//! some hundred instructions of one lie between two of the other. So a strip's sums become factors while those of the next strip are added up.
//! (One after the other took 1.4 times as long.)

use super::SIDE;
use crate::matmul::{Matrix, Pieces, Tile, Tiles};

/// Work in pieces of some tens of instructions.
pub(super) trait Work {
    /// Pieces that are left.
    fn left(&self) -> usize;

    /// Does one of them.
    ///
    /// # Safety
    /// There is one; the processor has the instructions.
    unsafe fn advance(&mut self);
}

impl<W: Work> Work for Option<W> {
    fn left(&self) -> usize {
        self.as_ref().map_or(0, W::left)
    }

    unsafe fn advance(&mut self) {
        if let Some(work) = self {
            // SAFETY: the caller's promise.
            unsafe { work.advance() };
        }
    }
}

/// One after the other.
impl<W: Work, const N: usize> Work for [W; N] {
    fn left(&self) -> usize {
        self.iter().map(W::left).sum()
    }

    unsafe fn advance(&mut self) {
        if let Some(work) = self.iter_mut().find(|work| work.left() > 0) {
            // SAFETY: the caller's promise; it has a piece.
            unsafe { work.advance() };
        }
    }
}

/// One after the other.
impl<V: Work, W: Work> Work for (V, W) {
    fn left(&self) -> usize {
        self.0.left() + self.1.left()
    }

    unsafe fn advance(&mut self) {
        // SAFETY: the caller's promise; who has a piece does it.
        unsafe {
            match self.0.left() {
                0 => self.1.advance(),
                _ => self.0.advance(),
            }
        }
    }
}

/// Strips of a left operand that go into tiles, `[rows / 32, steps, P, 2]`.
pub(super) struct Pack<'a, T, const P: usize> {
    amx: &'a Tiles<P>,
    from: Matrix<*const T>,
    rows: usize,
    depth: usize,
    to: *mut Tile,
    /// Steps of a strip there is room for.
    steps: usize,
    done: usize,
}

impl<'a, T: Pieces<P>, const P: usize> Pack<'a, T, P> {
    /// # Safety
    /// The numbers lie in their operand; there is room, which nothing else sees until it is packed.
    pub(super) unsafe fn new(
        amx: &'a Tiles<P>,
        from: Matrix<*const T>,
        (rows, depth): (usize, usize),
        (to, steps): (*mut Tile, usize),
    ) -> Self {
        Pack { amx, from, rows, depth, to, steps, done: 0 }
    }

    /// Rows of a piece: those that must be transposed go by squares.
    fn tall(&self) -> usize {
        if self.from.column == 1 { SIDE / 2 } else { SIDE }
    }
}

impl<T: Pieces<P>, const P: usize> Work for Pack<'_, T, P> {
    fn left(&self) -> usize {
        self.rows.div_ceil(self.tall()) * self.depth.div_ceil(SIDE) - self.done
    }

    unsafe fn advance(&mut self) {
        let (steps, tall) = (self.depth.div_ceil(SIDE), self.tall());
        let (row, step) = (self.done / steps * tall, self.done % steps);
        let sizes = (tall.min(self.rows - row), SIDE.min(self.depth - step * SIDE));
        self.done += 1;
        // SAFETY: what `new` was promised.
        unsafe {
            let to = self.to.add((row / SIDE * self.steps + step) * Tiles::<P>::STEP + row % SIDE / (SIDE / 2));
            self.amx.left(self.from.part(row, step * SIDE), sizes, to);
        }
    }
}

/// Work that is spread evenly over so many parts of products.
pub(super) struct Beside<W> {
    work: W,
    pieces: usize,
    parts: usize,
    due: usize,
}

impl<W: Work> Beside<W> {
    pub(super) fn new(work: W, parts: usize) -> Self {
        Beside { pieces: work.left(), work, parts, due: 0 }
    }

    /// What comes after a part.
    ///
    /// # Safety
    /// The processor has the work's instructions.
    #[inline]
    pub(super) unsafe fn go_on(&mut self) {
        self.due += self.pieces;
        while self.due >= self.parts {
            self.due -= self.parts;
            // SAFETY: the caller's promise; all pieces are due after the last part.
            unsafe { self.work.advance() };
        }
    }

    /// What is left when there is nothing to be multiplied.
    ///
    /// # Safety
    /// As for [`go_on`](Beside::go_on).
    pub(super) unsafe fn finish(mut self) {
        while self.work.left() > 0 {
            // SAFETY: the caller's promise; there is a piece.
            unsafe { self.work.advance() };
        }
    }
}
