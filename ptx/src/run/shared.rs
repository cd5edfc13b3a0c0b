//! The shared memory of a block: its bytes, and the history of each unit.

use super::{
    history::{History, Stamp},
    trap::{Trapped, trap},
};
use crate::{
    error::{FaultKind, Space},
    registers::LANES,
};

/// The shared memory that the blocks of a launch use in turn. The stamps of an earlier block count as none.
pub(super) struct SharedMemory {
    bytes: Vec<u8>,
    histories: Vec<History>,
    shift: u32,
    /// The lanes of each warp whose writes were not handed over to products.
    unfenced: [u32; 32],
}

impl SharedMemory {
    pub(super) fn new(bytes: usize, unit: usize) -> SharedMemory {
        let shift = unit.trailing_zeros();
        SharedMemory {
            bytes: vec![0; bytes],
            histories: vec![History::default(); bytes.div_ceil(unit)],
            shift,
            unfenced: [0; 32],
        }
    }

    /// Forgets writes that an earlier block did not hand over.
    pub(super) fn begin(&mut self) {
        self.unfenced = [0; 32];
    }

    /// Hands over the writes of these lanes of the warp whose first thread is `first`.
    pub(super) fn fence(&mut self, first: u32, lanes: u32) {
        self.unfenced[first as usize / LANES] &= !lanes;
    }

    /// The first thread whose writes were not handed over.
    pub(super) fn unfenced(&self) -> Option<u32> {
        let warp = self.unfenced.iter().position(|lanes| *lanes != 0)?;
        Some((warp * LANES) as u32 + self.unfenced[warp].trailing_zeros())
    }

    fn note_unfenced(&mut self, now: Stamp) {
        if let Some(thread) = now.single_thread() {
            self.unfenced[thread as usize / LANES] |= 1 << (thread % LANES as u32);
        }
    }

    /// Checks and notes a read; returns the bytes.
    #[inline]
    pub(super) fn read(&mut self, lane: usize, address: u64, bytes: usize, now: Stamp) -> Trapped<&[u8]> {
        self.check(lane, address, bytes)?;
        for unit in self.units(address, bytes) {
            let history = &mut self.histories[unit];
            if history.write.is_none() || history.write.block() != now.block() {
                return trap(lane, FaultKind::Uninitialized { address: (unit as u64) << self.shift });
            }
            if let Err(earlier) = history.note_read(now) {
                return race(lane, (unit as u64) << self.shift, false, earlier);
            }
        }
        Ok(&self.bytes[address as usize..address as usize + bytes])
    }

    /// Checks and notes a write; returns the bytes to be written.
    #[inline]
    pub(super) fn write(&mut self, lane: usize, address: u64, bytes: usize, now: Stamp) -> Trapped<&mut [u8]> {
        self.check(lane, address, bytes)?;
        for unit in self.units(address, bytes) {
            let history = &mut self.histories[unit];
            if history.write.block() != now.block() {
                *history = History::default();
            }
            if let Err(earlier) = history.note_write(now) {
                return race(lane, (unit as u64) << self.shift, true, earlier);
            }
        }
        self.note_unfenced(now);
        Ok(&mut self.bytes[address as usize..address as usize + bytes])
    }

    /// Puts bytes that a copy has brought where it was begun.
    pub(super) fn arrive(&mut self, address: u64, bytes: &[u8], now: Stamp) {
        for unit in self.units(address, bytes.len()) {
            self.histories[unit].write = now;
        }
        self.note_unfenced(now);
        self.bytes[address as usize..address as usize + bytes.len()].copy_from_slice(bytes);
    }

    #[inline]
    fn check(&self, lane: usize, address: u64, bytes: usize) -> Trapped<()> {
        let space = Space::Shared;
        if !address.is_multiple_of(bytes as u64) {
            return trap(lane, FaultKind::Misaligned { space, address, bytes });
        }
        if address.saturating_add(bytes as u64) > self.bytes.len() as u64 {
            return trap(lane, FaultKind::OutOfBounds { space, address, bytes });
        }
        Ok(())
    }

    #[inline]
    fn units(&self, address: u64, bytes: usize) -> std::ops::Range<usize> {
        let first = (address >> self.shift) as usize;
        first..first + (bytes >> self.shift)
    }
}

fn race<T>(lane: usize, address: u64, writes: bool, earlier: String) -> Trapped<T> {
    trap(lane, FaultKind::Race { space: Space::Shared, address, writes, earlier })
}
