//! Copies between host and device through page-locked memory, in pieces: one is filled while the other travels.

use std::sync::Arc;

use crate::driver::{Driver, Fallible, Mark, Stream};

/// Bytes of a piece.
const PIECE: usize = 4 << 20;
const PIECES: usize = 2;

/// Page-locked memory of one queue, allocated at its first use.
pub(crate) struct Staging {
    driver: Arc<dyn Driver>,
    pieces: Vec<Piece>,
    next: usize,
}

struct Piece {
    memory: *mut u8,
    /// Passed when the device is done with it.
    done: Mark,
    used: bool,
}

// SAFETY: a piece is plain memory of the queue's own; nothing ties it to a thread.
unsafe impl Send for Staging {}

impl Staging {
    pub(crate) fn new(driver: Arc<dyn Driver>) -> Staging {
        Staging { driver, pieces: Vec::new(), next: 0 }
    }

    /// The next piece, once the device has done with it.
    fn piece(&mut self) -> Fallible<usize> {
        if self.pieces.len() < PIECES {
            let memory = self.driver.alloc_host(PIECE)?;
            let done = self.driver.mark().inspect_err(|_| {
                // SAFETY: just allocated and not used.
                unsafe { self.driver.free_host(memory) }
            })?;
            self.pieces.push(Piece { memory, done, used: false });
            return Ok(self.pieces.len() - 1);
        }
        self.next = (self.next + 1) % PIECES;
        let piece = &self.pieces[self.next];
        if piece.used {
            self.driver.await_mark(piece.done)?;
        }
        Ok(self.next)
    }

    /// Queues a copy; `from` may change as soon as this returns.
    ///
    /// # Safety
    /// `to` has room for `from`.
    pub(crate) unsafe fn upload(&mut self, stream: Stream, from: &[u8], to: u64) -> Fallible<()> {
        for (i, bytes) in from.chunks(PIECE).enumerate() {
            let at = self.piece()?;
            let piece = &mut self.pieces[at];
            // SAFETY: a piece is this long, and the device is done with it.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), piece.memory, bytes.len()) };
            // SAFETY: the caller's promise; the piece is not written before its mark is passed.
            unsafe { self.driver.copy_in(stream, to + (i * PIECE) as u64, piece.memory, bytes.len())? };
            self.driver.record(piece.done, stream)?;
            piece.used = true;
        }
        Ok(())
    }

    /// Copies and blocks until it is done.
    ///
    /// # Safety
    /// `from` has as many bytes as `to`.
    pub(crate) unsafe fn download(&mut self, stream: Stream, from: u64, to: &mut [u8]) -> Fallible<()> {
        let mut waiting: Option<(usize, &mut [u8])> = None;
        for (i, bytes) in to.chunks_mut(PIECE).enumerate() {
            let at = self.piece()?;
            let piece = &mut self.pieces[at];
            // SAFETY: the caller's promise; a piece is this long.
            unsafe { self.driver.copy_out(stream, piece.memory, from + (i * PIECE) as u64, bytes.len())? };
            self.driver.record(piece.done, stream)?;
            piece.used = true;
            if let Some((before, bytes)) = waiting.replace((at, bytes)) {
                self.arrived(before, bytes)?;
            }
        }
        waiting.map_or(Ok(()), |(at, bytes)| self.arrived(at, bytes))
    }

    fn arrived(&self, at: usize, to: &mut [u8]) -> Fallible<()> {
        let piece = &self.pieces[at];
        self.driver.await_mark(piece.done)?;
        // SAFETY: the device has filled this many bytes of the piece.
        unsafe { std::ptr::copy_nonoverlapping(piece.memory, to.as_mut_ptr(), to.len()) };
        Ok(())
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        for piece in self.pieces.drain(..) {
            // After a failure the device does not use it either.
            let _ = self.driver.await_mark(piece.done);
            // SAFETY: allocated here; the device is done with it.
            unsafe { self.driver.free_host(piece.memory) };
            self.driver.destroy_mark(piece.done);
        }
    }
}
