//! Memory: one pool per queue. Freed blocks are kept by size class and handed out again, so a training step in its steady state
//! asks the driver for nothing, and can be captured.
//!
//! Blocks are stream-ordered: all work of a queue runs in order, so a block that was freed may be given to later work of the same
//! queue at once, while earlier work still reads it. Used on another queue, memory must come back (by an event that is waited
//! for) before it is dropped.

use std::{fmt, sync::Arc};

use numcore::{Bytes, DeviceId, ErrorKind, MemoryStats, Result, Use};
use parking_lot::Mutex;

use crate::{
    driver::{Driver, Stream},
    engine::backend,
};

/// Every block starts at a multiple of this.
const ALIGN: usize = 256;
/// Size classes between one power of two and the next: at most an eighth of a block is waste.
const STEPS: usize = 8;
const CLASSES: usize = STEPS * usize::BITS as usize;
/// How many classes above its own a request may take a free block from.
const SLACK: usize = 2;

/// A queue's memory: free blocks and the account.
pub(crate) struct Memory {
    driver: Arc<dyn Driver>,
    device: DeviceId,
    stream: Stream,
    state: Mutex<State>,
}

struct State {
    free: Vec<Vec<u64>>,
    stats: MemoryStats,
    /// While work is captured: nothing may be asked of the driver, and what is freed belongs to the recording.
    capture: Option<Arc<Held>>,
}

/// Blocks that a recording writes to whenever it is launched: no one else may have them while it lives.
pub(crate) struct Held(Mutex<Option<Vec<Block>>>);

impl Held {
    /// Keeps a block; gives it back once the recording is gone.
    fn keep(&self, block: Block) -> Option<Block> {
        match &mut *self.0.lock() {
            Some(blocks) => {
                blocks.push(block);
                None
            }
            None => Some(block),
        }
    }

    /// A kept block of one of these classes.
    fn take(&self, classes: std::ops::Range<usize>) -> Option<Block> {
        let mut blocks = self.0.lock();
        let blocks = blocks.as_mut()?;
        let at = blocks.iter().rposition(|b| classes.contains(&b.class))?;
        Some(blocks.swap_remove(at))
    }
}

#[derive(Clone, Copy)]
struct Block {
    address: u64,
    class: usize,
}

/// A piece of device memory; it returns to its queue's pool on drop.
pub struct Buffer {
    block: Option<Block>,
    bytes: usize,
    use_: Use,
    memory: Arc<Memory>,
    /// The recording during which it was allocated.
    held: Option<Arc<Held>>,
}

impl Buffer {
    /// Where it starts on the device; never dereferenced on the host.
    pub(crate) fn address(&self) -> u64 {
        self.block.map_or(ALIGN as u64, |b| b.address)
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes)", self.bytes)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let mut state = self.memory.state.lock();
        state.stats.by_use[self.use_ as usize].live -= self.bytes;
        state.stats.total.live -= self.bytes;
        let Some(block) = self.block else { return };
        let holder = state.capture.as_ref().or(self.held.as_ref());
        let block = if let Some(held) = holder { held.keep(block) } else { Some(block) };
        if let Some(block) = block {
            state.free[block.class].push(block.address);
        }
    }
}

impl Memory {
    pub(crate) fn new(driver: Arc<dyn Driver>, device: DeviceId, stream: Stream) -> Arc<Memory> {
        let free = (0..CLASSES).map(|_| Vec::new()).collect();
        let state = State { free, stats: MemoryStats::default(), capture: None };
        Arc::new(Memory { driver, device, stream, state: Mutex::new(state) })
    }

    pub(crate) fn stats(&self) -> MemoryStats {
        self.state.lock().stats.clone()
    }

    pub(crate) fn reset_peak(&self) {
        let stats = &mut self.state.lock().stats;
        stats.by_use.iter_mut().chain([&mut stats.total]).for_each(|b| b.peak = b.live);
    }

    /// From here on work is captured.
    pub(crate) fn begin_capture(&self) -> Arc<Held> {
        let held = Arc::new(Held(Mutex::new(Some(Vec::new()))));
        self.state.lock().capture = Some(held.clone());
        held
    }

    /// Work is not captured any more; what was freed since stays with the recording.
    pub(crate) fn end_capture(&self) {
        self.state.lock().capture = None;
    }

    /// The recording is gone: its blocks return, for later work of the queue it ran on.
    pub(crate) fn release_held(&self, held: &Held) {
        let blocks = held.0.lock().take().unwrap_or_default();
        let mut state = self.state.lock();
        blocks.into_iter().for_each(|b| state.free[b.class].push(b.address));
    }

    /// `bytes` bytes, booked under `use_`. Their contents are arbitrary.
    pub(crate) fn alloc(self: &Arc<Self>, bytes: usize, use_: Use) -> Result<Buffer> {
        let mut state = self.state.lock();
        let block = if bytes == 0 { None } else { Some(self.take(&mut state, bytes)?) };
        let stats = &mut state.stats;
        stats.allocations += 1;
        [&mut stats.by_use[use_ as usize], &mut stats.total].into_iter().for_each(|account| book(account, bytes));
        let held = state.capture.clone();
        drop(state);
        Ok(Buffer { block, bytes, use_, memory: self.clone(), held })
    }

    fn take(&self, state: &mut State, bytes: usize) -> Result<Block> {
        let class = class_of(bytes).ok_or_else(|| self.exhausted(state, bytes))?;
        let near = class..(class + 1 + SLACK).min(CLASSES);
        if let Some(block) = state.capture.as_ref().and_then(|held| held.take(near.clone())) {
            return Ok(block);
        }
        if let Some(block) = near.into_iter().find_map(|c| Some(Block { address: state.free[c].pop()?, class: c })) {
            return Ok(block);
        }
        if state.capture.is_some() {
            let why = format!(
                "a captured step asks for {bytes} bytes that its pool does not hold; run it a few times before it is captured"
            );
            return Err(ErrorKind::Unsupported { op: "capture", device: self.device, why }.into());
        }
        let size = size_of_class(class);
        let fresh = |memory: &Memory| memory.driver.alloc(size).map_err(|e| backend("alloc", memory.device, e));
        let mut address = fresh(self)?;
        if address.is_none() {
            self.release(state);
            address = fresh(self)?;
        }
        let address = address.ok_or_else(|| self.exhausted(state, bytes))?;
        state.stats.reserved += size;
        Ok(Block { address, class })
    }

    /// Gives every free block back to the driver, once nothing uses it any more.
    fn release(&self, state: &mut State) {
        // If the queue has failed, nothing of it runs any more.
        let _ = self.driver.synchronize(self.stream);
        for (class, list) in state.free.iter_mut().enumerate() {
            for address in list.drain(..) {
                state.stats.reserved -= size_of_class(class);
                // SAFETY: the pool owned the block, and its queue has passed.
                unsafe { self.driver.free(address) };
            }
        }
    }

    fn exhausted(&self, state: &State, requested: usize) -> numcore::Error {
        ErrorKind::OutOfMemory { device: self.device, requested, live: state.stats.total.live }.into()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let mut state = std::mem::replace(
            self.state.get_mut(),
            State { free: Vec::new(), stats: MemoryStats::default(), capture: None },
        );
        self.release(&mut state);
        self.driver.destroy_stream(self.stream);
    }
}

fn book(account: &mut Bytes, bytes: usize) {
    account.live += bytes;
    account.peak = account.peak.max(account.live);
}

/// The smallest class that holds `bytes`; `None` beyond what an address can reach.
fn class_of(bytes: usize) -> Option<usize> {
    let units = bytes.checked_add(ALIGN - 1)? / ALIGN;
    if units <= STEPS {
        return Some(units.saturating_sub(1));
    }
    // Between 2^e and 2^(e+1) units there are STEPS classes.
    let e = (units - 1).ilog2() as usize;
    let step = 1usize << (e - STEPS.ilog2() as usize);
    let class = STEPS * (e - 2) + (units - (1 << e)).div_ceil(step) - 1;
    (size_of_class(class) <= isize::MAX as usize).then_some(class)
}

/// Bytes of a class's blocks.
fn size_of_class(class: usize) -> usize {
    if class < STEPS {
        return (class + 1) * ALIGN;
    }
    let (e, k) = (class / STEPS + 2, class % STEPS + 1);
    let units = (1usize << e).saturating_add(k << (e - STEPS.ilog2() as usize));
    units.saturating_mul(ALIGN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_hold_what_they_are_for_and_waste_little() {
        for bytes in (1..20_000).chain((14..45).flat_map(|e| [(1 << e) - 1, 1 << e, (1 << e) + 1, 3 << e])) {
            let class = class_of(bytes).unwrap();
            assert!(size_of_class(class) >= bytes, "{bytes}");
            assert!(class == 0 || size_of_class(class - 1) < bytes, "{bytes}: class {class} is not the smallest");
            assert!(size_of_class(class) <= bytes + bytes / 8 + ALIGN, "{bytes}");
        }
        assert_eq!(class_of(usize::MAX), None);
    }
}
