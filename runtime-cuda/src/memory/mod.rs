//! Memory: one pool per queue. Freed blocks are kept, merged with their neighbours and reused ([`segments`]). So a
//! training step in its steady state allocates nothing from the driver, and can be captured.
//!
//! Blocks are stream-ordered: all work of a queue runs in order. A freed block may be given at once to later work of
//! its queue, in part or with its neighbours, while earlier work still reads it. Where other queues have used a block,
//! its own queue first waits for them by an event; the buffer records these queues.
//!
//! The driver is never called under a pool's lock. It may wait for a capture of another thread, which drops buffers of
//! this queue meanwhile.

mod buffer;
mod device;
mod held;
mod segments;

use std::sync::Arc;

use numcore::{Error, ErrorKind, MemoryAccount, MemoryCategory, MemoryReport, MemoryStats, OtherQueues, Result};
use parking_lot::Mutex;

use crate::driver::{CudaStream, Fallible, backend};

pub use buffer::CudaBuffer;
pub(crate) use device::DeviceMemory;
use held::Dropped;
pub(crate) use held::HeldBlocks;
use segments::{DeviceBlock, Growth, Segments};

/// A queue's memory: its segments and the account of live bytes.
pub(crate) struct Memory {
    device: Arc<DeviceMemory>,
    stream: CudaStream,
    state: Mutex<PoolState>,
}

#[derive(Default)]
struct PoolState {
    account: MemoryAccount,
    segments: Segments,
    capture: Option<OpenCapture>,
}

/// State while work is captured. The driver may not allocate, and all blocks that the work uses belong to the recording
/// afterwards.
struct OpenCapture {
    held: Arc<HeldBlocks>,
    /// Blocks that were allocated or freed since the capture began.
    used: Vec<DeviceBlock>,
}

impl PoolState {
    fn sync_account(&mut self) {
        self.account.set_reserved(self.segments.reserved());
    }

    /// Removes the free segments, which go back to the driver; none while work is captured.
    fn drain(&mut self) -> Vec<u64> {
        let free = if self.capture.is_none() { self.segments.drain() } else { Vec::new() };
        self.sync_account();
        free
    }

    /// Returns an unused block to the pool, or to a recording. `held` is the recording in whose capture the block was
    /// allocated, which writes to it as long as it lives. A captured step may use a freed block again, as the step
    /// before it did. The pool's ranges are given to the recording when the capture ends.
    fn take_back(&mut self, memory: &Arc<Memory>, block: DeviceBlock, held: Option<Arc<HeldBlocks>>) {
        let mut free = Some(block);
        let dropped = |held| Dropped { block, memory: memory.clone(), held };
        match (&mut self.capture, held.filter(|held| held.is_alive())) {
            (Some(capture), Some(held)) if !Arc::ptr_eq(&capture.held, &held) => {
                if capture.held.keep(dropped(Some(held))) {
                    free = None;
                }
            }
            (Some(capture), _) => capture.used.push(block),
            (None, Some(held)) => {
                if held.keep(dropped(None)) {
                    free = None;
                }
            }
            (None, None) => {}
        }
        free.into_iter().for_each(|block| self.segments.give_back(block));
    }
}

impl Memory {
    pub(crate) fn new(device: Arc<DeviceMemory>, stream: CudaStream) -> Arc<Memory> {
        let segments = if device.apart { Segments::apart() } else { Segments::default() };
        let state = PoolState { segments, ..PoolState::default() };
        let memory = Arc::new(Memory { device, stream, state: Mutex::new(state) });
        memory.device.register(&memory);
        memory
    }

    pub(crate) fn stats(&self) -> MemoryStats {
        self.state.lock().account.stats().clone()
    }

    pub(crate) fn reset_peak(&self) {
        self.state.lock().account.reset_peak();
    }

    /// Gives every free segment back to the driver; none while work is captured.
    pub(crate) fn trim(&self) {
        let free = self.state.lock().drain();
        self.release(&free);
    }

    /// Begins a capture: blocks that work uses are noted until [`end_capture`](Memory::end_capture), for `held`.
    pub(crate) fn begin_capture(&self, held: Arc<HeldBlocks>) {
        self.state.lock().capture = Some(OpenCapture { held, used: Vec::new() });
    }

    /// Ends the capture. Blocks that its work used and that are free now stay with the recording; the others go there
    /// when they are dropped.
    pub(crate) fn end_capture(self: &Arc<Self>) {
        let mut state = self.state.lock();
        let Some(capture) = state.capture.take() else { return };
        for block in state.segments.take_ranges(capture.used) {
            capture.held.keep(Dropped { block, memory: self.clone(), held: None });
        }
    }

    /// The recording of the capture in progress, if there is one.
    fn capturing(&self) -> Option<Arc<HeldBlocks>> {
        self.state.lock().capture.as_ref().map(|capture| capture.held.clone())
    }

    /// Returns the blocks of a dropped recording to their pools. Blocks of other queues are free for work after that of
    /// the queue on which the recording ran.
    pub(crate) fn release_held(self: &Arc<Self>, held: &HeldBlocks) {
        for Dropped { block, memory, held } in held.release() {
            if !Arc::ptr_eq(self, &memory) {
                memory.follow(self, memory.capturing().is_some());
            }
            memory.state.lock().take_back(&memory, block, held);
        }
    }

    /// Allocates `bytes` bytes, booked under `use_`. Their contents are arbitrary.
    ///
    /// # Errors
    ///
    /// The device has too little memory, or a captured step needs more than its pool holds.
    pub(crate) fn alloc(self: &Arc<Self>, bytes: usize, use_: MemoryCategory) -> Result<CudaBuffer> {
        let mut state = self.state.lock();
        let mut block = if bytes == 0 { None } else { state.segments.take(bytes) };
        if block.is_none() && bytes > 0 {
            if state.capture.is_some() {
                return Err(self.not_held(bytes));
            }
            let growth = state.segments.grow(bytes);
            state.sync_account();
            drop(state);
            let growth = growth.ok_or_else(|| self.exhausted(bytes))?;
            let (segment, start) = self.segment(bytes, growth)?;
            state = self.state.lock();
            block = Some(state.segments.add(start, segment, bytes));
            state.sync_account();
        }
        state.account.book(bytes, use_);
        let capture = state.capture.as_mut();
        let held = capture.map(|capture| {
            capture.used.extend(block);
            capture.held.clone()
        });
        drop(state);
        block.iter().for_each(|block| self.device.driver.note_block(block.address, block.bytes));
        Ok(CudaBuffer::new(self, block, bytes, use_, held))
    }

    /// Allocates a segment from the driver: its bytes, and its address. Where memory is short it is no larger than the
    /// request.
    fn segment(&self, bytes: usize, growth: Growth) -> Result<(usize, u64)> {
        let failed = |e| backend("alloc", self.device.device, e);
        self.release(&growth.shed);
        if let Some(start) = self.device.driver.alloc(growth.segment).map_err(failed)? {
            return Ok((growth.segment, start));
        }
        let least = segments::least_segment(bytes).ok_or_else(|| self.exhausted(bytes))?.min(growth.segment);
        let start = self.driver_alloc(least).map_err(failed)?;
        Ok((least, start.ok_or_else(|| self.exhausted(bytes))?))
    }

    /// Allocates memory from the driver that is not the pool's. Where there is too little, this queue and then the
    /// device's other queues give back their free segments. `None` if that does not help.
    pub(crate) fn driver_alloc(&self, bytes: usize) -> Fallible<Option<u64>> {
        let fresh = || self.device.driver.alloc(bytes);
        if let Some(address) = fresh()? {
            return Ok(Some(address));
        }
        self.trim();
        if let Some(address) = fresh()? {
            return Ok(Some(address));
        }
        self.device.others(self).iter().for_each(|other| other.trim());
        fresh()
    }

    /// Makes later work of this queue wait for the work that is queued on another one. With `by_host` the host waits.
    fn follow(&self, other: &Memory, by_host: bool) {
        let driver = &self.device.driver;
        let by_event = || {
            let mark = driver.mark()?;
            let done = driver.record(mark, other.stream).and_then(|()| driver.wait(self.stream, mark));
            driver.destroy_mark(mark);
            done
        };
        // A captured stream can wait for nothing outside of its capture. On a failed device nothing runs any more.
        if by_host || by_event().is_err() {
            let _ = driver.synchronize(other.stream);
        }
    }

    /// Gives segments back to the driver, once nothing uses them any more.
    fn release(&self, segments: &[u64]) {
        // SAFETY: the pool owned them, and only work of its queue uses them: it was ordered after that of others.
        unsafe { self.driver_free(segments) };
    }

    /// Frees memory of the driver once all queues of the device are done. The driver waits for the device in any case,
    /// but holds locks meanwhile. A kernel of a collective call may then wait for that of a rank in another thread,
    /// which cannot be launched.
    ///
    /// # Safety
    /// The addresses are from the driver, and no work uses them but that of this queue.
    pub(crate) unsafe fn driver_free(&self, addresses: &[u64]) {
        if addresses.is_empty() {
            return;
        }
        let others = self.device.others(self);
        let all = others.iter().map(|other| &**other).chain([self]);
        // A wait for a captured stream would invalidate the capture.
        let streams: Vec<CudaStream> = all.filter(|own| own.capturing().is_none()).map(|own| own.stream).collect();
        // SAFETY: the caller's promise.
        unsafe { self.device.driver.free(&streams, addresses) };
    }

    fn not_held(&self, bytes: usize) -> numcore::Error {
        let why = format!(
            "a captured step asks for {bytes} bytes that its pool does not hold; run it a few times before it is captured"
        );
        Error::unsupported_on(self.device.device, "capture", why)
    }

    pub(crate) fn exhausted(&self, requested: usize) -> numcore::Error {
        let mut report = self.report();
        let others = self.device.others(self);
        let sum = |sum: OtherQueues, other: MemoryReport| OtherQueues {
            count: sum.count + 1,
            live: sum.live + other.stats.total.live,
            kept: sum.kept + other.kept,
        };
        report.others = Some(others.iter().map(|other| other.report()).fold(OtherQueues::default(), sum));
        report.device = self.device.driver.memory();
        ErrorKind::OutOfMemory { device: self.device.device, requested, report: Box::new(report) }.into()
    }

    /// A report on the pool of this queue.
    fn report(&self) -> MemoryReport {
        let state = self.state.lock();
        let (kept, largest_kept) = (state.segments.free(), state.segments.largest_free());
        MemoryReport { stats: state.account.stats().clone(), kept, largest_kept, ..MemoryReport::default() }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let free = self.state.get_mut().segments.drain();
        self.release(&free);
        self.device.driver.destroy_stream(self.stream);
    }
}
