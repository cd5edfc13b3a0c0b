//! Work of the vector units between products of tiles: the processor does both at once where neither waits for the other, and no more than
//! some hundred instructions of one lie between two of the other. So a strip is packed while the one before it is multiplied, and attention's
//! scores become factors while those of the next strip are added up. (One after the other, a product of 1024³ took 1.2 times as long, attention
//! forward over 4096 positions 1.25 times. Packing attention's operands so, too, took 1.05 times as long.)

/// Work in pieces of some tens of instructions.
pub(crate) trait Work {
    /// Pieces that are left.
    fn left(&self) -> usize;

    /// Does one of them.
    ///
    /// # Safety
    /// There is one; the processor has the instructions.
    unsafe fn advance(&mut self);
}

/// Work that is spread evenly over so many parts of products.
pub(crate) struct Beside<W> {
    work: Option<W>,
    pieces: usize,
    parts: usize,
    due: usize,
}

impl<W: Work> Beside<W> {
    pub(crate) fn new(work: Option<W>, parts: usize) -> Self {
        let pieces = work.as_ref().map_or(0, W::left);
        Beside { work, pieces, parts, due: 0 }
    }

    /// What comes after a part.
    ///
    /// # Safety
    /// The processor has the work's instructions.
    #[inline]
    pub(crate) unsafe fn go_on(&mut self) {
        let Some(work) = &mut self.work else { return };
        self.due += self.pieces;
        while self.due >= self.parts {
            self.due -= self.parts;
            // SAFETY: the caller's promise; as many parts as there are pieces, or less, have been due.
            unsafe { work.advance() };
        }
    }

    /// What is left when there is nothing to be multiplied.
    ///
    /// # Safety
    /// As for [`go_on`](Beside::go_on).
    pub(crate) unsafe fn finish(self) {
        let Some(mut work) = self.work else { return };
        while work.left() > 0 {
            // SAFETY: the caller's promise; there is a piece.
            unsafe { work.advance() };
        }
    }
}
