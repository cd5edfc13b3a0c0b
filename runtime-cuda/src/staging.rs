//! Copies between host and device through page-locked memory, in chunks, on a separate stream.
//!
//! An upload is copied to a landing buffer on the device; the queue's stream then moves it to its destination. The bus
//! transfer needs no memory that queued work still uses, so a batch is transferred while the step before it is
//! computed. (A copy straight to the destination would have to wait for all work queued so far: that memory may have
//! just been freed and still be read. The move costs a fiftieth of the bus transfer.) Events order the two streams in
//! both directions.

use std::sync::Arc;

use crate::{
    driver::{CudaStream, Driver, DriverFailure, Fallible, Mark},
    memory::Memory,
};

/// Bytes of a chunk.
const PIECE: usize = 2 << 20;
const PIECES: usize = 4;

/// Page-locked memory of one queue, allocated at first use, and the stream of its copies.
pub(crate) struct Staging {
    driver: Arc<dyn Driver>,
    memory: Arc<Memory>,
    /// The stream of the queue's kernels.
    work: CudaStream,
    copies: CudaStream,
    /// A mark that is recorded in the queue before a download.
    ready: Mark,
    pieces: Vec<StagingBuffer>,
    next: usize,
}

struct StagingBuffer {
    memory: *mut u8,
    /// A mark that is reached when the bus transfer of `memory` is done.
    travelled: Mark,
    /// The address of the landing buffer of uploads, and the mark that is reached when the queue has moved its content
    /// on.
    landing: Option<(u64, Mark)>,
    used: bool,
}

// SAFETY: a chunk is plain memory that the queue owns; nothing ties it to a thread.
unsafe impl Send for Staging {}

impl Staging {
    pub(crate) fn new(memory: Arc<Memory>, driver: Arc<dyn Driver>, work: CudaStream) -> Fallible<Staging> {
        let copies = driver.stream()?;
        let ready = driver.mark().inspect_err(|_| driver.destroy_stream(copies))?;
        Ok(Staging { driver, memory, work, copies, ready, pieces: Vec::new(), next: 0 })
    }

    /// Returns the index of the next chunk, once its bus transfer is complete.
    fn piece(&mut self) -> Fallible<usize> {
        if self.pieces.len() < PIECES {
            let memory = self.driver.alloc_host(PIECE)?;
            let travelled = self.driver.mark().inspect_err(|_| {
                // SAFETY: just allocated and not used.
                unsafe { self.driver.free_host(memory) }
            })?;
            self.pieces.push(StagingBuffer { memory, travelled, landing: None, used: false });
            return Ok(self.pieces.len() - 1);
        }
        self.next = (self.next + 1) % PIECES;
        let piece = &self.pieces[self.next];
        if piece.used {
            self.driver.await_mark(piece.travelled)?;
        }
        Ok(self.next)
    }

    /// Returns the landing buffer of an upload through chunk `at`. The copy stream first waits until the queue has
    /// moved the previous content.
    fn landing(&mut self, at: usize) -> Fallible<(u64, Mark)> {
        if let Some((address, moved)) = self.pieces[at].landing {
            self.driver.wait(self.copies, moved)?;
            return Ok((address, moved));
        }
        let moved = self.driver.mark()?;
        let address =
            self.memory.driver_alloc(PIECE).and_then(|a| a.ok_or_else(|| DriverFailure::new("out of memory")));
        let address = address.inspect_err(|_| self.driver.destroy_mark(moved))?;
        self.pieces[at].landing = Some((address, moved));
        Ok((address, moved))
    }

    /// Queues a copy to the device; `from` may change as soon as this returns.
    ///
    /// # Safety
    /// `to` has space for `from`.
    pub(crate) unsafe fn upload(&mut self, from: &[u8], to: u64) -> Fallible<()> {
        for (i, bytes) in from.chunks(PIECE).enumerate() {
            let at = self.piece()?;
            let (landing, moved) = self.landing(at)?;
            let (driver, piece) = (&self.driver, &mut self.pieces[at]);
            // SAFETY: a chunk is this long, and its bus transfer is complete.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), piece.memory, bytes.len()) };
            // SAFETY: a landing buffer is as long as a chunk; the chunk is not written before its mark is passed.
            unsafe { driver.copy_in(self.copies, landing, piece.memory, bytes.len())? };
            driver.record(piece.travelled, self.copies)?;
            piece.used = true;
            driver.wait(self.work, piece.travelled)?;
            // SAFETY: the caller's promise; the landing is not written before its mark is passed.
            unsafe { driver.copy(self.work, to + (i * PIECE) as u64, landing, bytes.len())? };
            driver.record(moved, self.work)?;
        }
        Ok(())
    }

    /// Copies the result of the work queued so far to the host, and blocks until the copy is complete.
    ///
    /// # Safety
    /// `from` has as many bytes as `to`.
    pub(crate) unsafe fn download(&mut self, from: u64, to: &mut [u8]) -> Fallible<()> {
        self.driver.record(self.ready, self.work)?;
        self.driver.wait(self.copies, self.ready)?;
        let mut waiting: Option<(usize, &mut [u8])> = None;
        for (i, bytes) in to.chunks_mut(PIECE).enumerate() {
            let at = self.piece()?;
            let piece = &mut self.pieces[at];
            // SAFETY: the caller guarantees `to`; a chunk is this long.
            unsafe { self.driver.copy_out(self.copies, piece.memory, from + (i * PIECE) as u64, bytes.len())? };
            self.driver.record(piece.travelled, self.copies)?;
            piece.used = true;
            if let Some((before, bytes)) = waiting.replace((at, bytes)) {
                self.arrived(before, bytes)?;
            }
        }
        waiting.map_or(Ok(()), |(at, bytes)| self.arrived(at, bytes))
    }

    /// Waits until nothing uses the chunks any more, after a copy that failed half-way.
    pub(crate) fn drain(&self) {
        // A failure here is reported by the next call.
        let _ = self.driver.synchronize(self.copies);
        let _ = self.driver.synchronize(self.work);
    }

    fn arrived(&self, at: usize, to: &mut [u8]) -> Fallible<()> {
        let piece = &self.pieces[at];
        self.driver.await_mark(piece.travelled)?;
        // SAFETY: the device has filled this many bytes of the chunk.
        unsafe { std::ptr::copy_nonoverlapping(piece.memory, to.as_mut_ptr(), to.len()) };
        Ok(())
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // After a failure the device uses none of the memory either.
        let _ = self.driver.synchronize(self.copies);
        let landings = self.pieces.iter().filter_map(|piece| piece.landing);
        let (landings, moved): (Vec<u64>, Vec<Mark>) = landings.unzip();
        // SAFETY: allocated here; copies are done, and the queue moves their content on.
        unsafe { self.memory.driver_free(&landings) };
        moved.into_iter().for_each(|mark| self.driver.destroy_mark(mark));
        for piece in self.pieces.drain(..) {
            // SAFETY: allocated here; the bus is done with it.
            unsafe { self.driver.free_host(piece.memory) };
            self.driver.destroy_mark(piece.travelled);
        }
        self.driver.destroy_mark(self.ready);
        self.driver.destroy_stream(self.copies);
    }
}
