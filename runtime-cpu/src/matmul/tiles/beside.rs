//! Work of the vector units between products of tiles: the processor does both at once where neither waits for the other, and no more than
//! some hundred instructions of one lie between two of the other. So a strip is packed while the one before it is multiplied, sums are stored
//! while the next are added up, and attention's scores become factors while those of the next strip are added up. (One after the other, a
//! product of 1024³ took 1.2 times as long to pack and 1.07 to store, attention forward over 4096 positions 1.25 times. Packing attention's operands
//! so, too, took 1.05 times as long.)
//!
//! Whoever multiplies is compiled with the instructions of what it does beside, so that the usual piece becomes part of its text: a call, with what it
//! saves and clears, is as long as a piece. (With calls products took 1.07 to 1.3 times as long.) What is unusual is called.

/// Work in pieces of some tens of instructions.
pub(crate) trait Work {
    /// Pieces that are left.
    fn left(&self) -> usize;

    /// Does one of them.
    ///
    /// # Safety
    /// There is one; the processor has the instructions.
    unsafe fn advance(&mut self);

    /// Does what is left.
    ///
    /// # Safety
    /// The processor has the instructions.
    unsafe fn finish(&mut self) {
        while self.left() > 0 {
            // SAFETY: the caller's promise.
            unsafe { self.advance() };
        }
    }
}

/// Work that is spread evenly over so many parts of products.
pub(crate) struct Beside<W> {
    work: Option<W>,
    pieces: usize,
    parts: usize,
    due: usize,
}

impl<W: Work> Beside<W> {
    pub(crate) fn nothing() -> Self {
        Beside::new(None, 1)
    }

    pub(crate) fn new(work: Option<W>, parts: usize) -> Self {
        let pieces = work.as_ref().map_or(0, W::left);
        Beside { work, pieces, parts: parts.max(1), due: 0 }
    }

    /// What comes after a part.
    ///
    /// # Safety
    /// The processor has the work's instructions.
    #[inline]
    pub(crate) unsafe fn go_on(&mut self) {
        self.due += self.pieces;
        while self.due >= self.parts {
            self.due -= self.parts;
            if let Some(work) = self.work.as_mut().filter(|work| work.left() > 0) {
                // SAFETY: the caller's promise; there is one.
                unsafe { work.advance() };
            }
        }
    }

    /// What is left when there is nothing to be multiplied.
    ///
    /// # Safety
    /// As for [`go_on`](Beside::go_on).
    pub(crate) unsafe fn finish(&mut self) {
        (self.pieces, self.due) = (0, 0);
        if let Some(work) = &mut self.work {
            // SAFETY: the caller's promise.
            unsafe { work.finish() };
        }
        self.work = None;
    }
}
