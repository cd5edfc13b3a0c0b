//! Device memory as a launch sees it: regions that the caller lends, and the history of each unit.

use std::{cell::Cell, collections::HashMap};

use super::{
    history::{History, Stamp},
    trap::{Trapped, trap},
};
use crate::{
    declarations::VARIABLES,
    error::{FaultKind, Space},
};

/// A piece of device memory that may be read and written.
#[derive(Clone, Copy, Debug)]
pub struct MemoryRegion<'a> {
    /// The address of its first byte.
    pub start: u64,
    /// The bytes.
    pub bytes: &'a [Cell<u8>],
}

/// The memory of a device.
pub trait LaunchMemory {
    /// The live piece of memory that contains an address.
    fn region(&self, address: u64) -> Option<MemoryRegion<'_>>;
}

/// The units whose history lies together.
const PAGE: u64 = 1024;

/// The device memory of one launch.
pub(super) struct GlobalMemory<'a> {
    memory: &'a dyn LaunchMemory,
    variables: MemoryRegion<'a>,
    regions: Vec<MemoryRegion<'a>>,
    /// The region of the last access.
    last: MemoryRegion<'a>,
    /// The logarithm of the bytes of a unit.
    shift: u32,
    pages: HashMap<u64, usize>,
    histories: Vec<[History; PAGE as usize]>,
    /// The page of the last access, and its place in `histories`.
    last_page: (u64, usize),
}

impl<'a> GlobalMemory<'a> {
    pub(super) fn new(memory: &'a dyn LaunchMemory, variables: &'a [Cell<u8>], unit: usize) -> GlobalMemory<'a> {
        let variables = MemoryRegion { start: VARIABLES, bytes: variables };
        GlobalMemory {
            memory,
            variables,
            regions: Vec::new(),
            last: variables,
            shift: unit.trailing_zeros(),
            pages: HashMap::new(),
            histories: Vec::new(),
            last_page: (u64::MAX, 0),
        }
    }

    /// The bytes of an access, which must be aligned to them and inside of live memory.
    #[inline]
    pub(super) fn bytes(&mut self, lane: usize, address: u64, bytes: usize) -> Trapped<&'a [Cell<u8>]> {
        self.aligned(lane, address, bytes, bytes)
    }

    /// The first `bytes` bytes of an access that must be aligned to `size` bytes.
    #[inline]
    pub(super) fn aligned(&mut self, lane: usize, address: u64, size: usize, bytes: usize) -> Trapped<&'a [Cell<u8>]> {
        if !address.is_multiple_of(size as u64) {
            return trap(lane, FaultKind::Misaligned { space: Space::Global, address, bytes: size });
        }
        if let Some(found) = within(self.last, address, bytes) {
            return Ok(found);
        }
        self.other_region(lane, address, bytes)
    }

    #[cold]
    fn other_region(&mut self, lane: usize, address: u64, bytes: usize) -> Trapped<&'a [Cell<u8>]> {
        let known = self.regions.iter().chain([&self.variables]).find(|region| within(**region, address, 1).is_some());
        let region = match known {
            Some(region) => Some(*region),
            None => self.memory.region(address).inspect(|region| self.regions.push(*region)),
        };
        self.last = region.unwrap_or(self.last);
        let outside = FaultKind::OutOfBounds { space: Space::Global, address, bytes };
        region.and_then(|region| within(region, address, bytes)).map_or_else(|| trap(lane, outside), Ok)
    }

    /// Notes an access of `bytes` bytes with the rule of its kind.
    #[inline]
    pub(super) fn note(
        &mut self,
        lane: usize,
        address: u64,
        bytes: usize,
        writes: bool,
        rule: impl Fn(&mut History) -> Result<(), String>,
    ) -> Trapped<()> {
        if address >= VARIABLES {
            return if writes { trap(lane, FaultKind::ReadOnly { address }) } else { Ok(()) };
        }
        let first = address >> self.shift;
        for unit in first..first + bytes.div_ceil(1 << self.shift) as u64 {
            if let Err(earlier) = rule(self.history(unit)) {
                let address = unit << self.shift;
                return trap(lane, FaultKind::Race { space: Space::Global, address, writes, earlier });
            }
        }
        Ok(())
    }

    #[inline]
    pub(super) fn note_read(&mut self, lane: usize, address: u64, bytes: usize, now: Stamp) -> Trapped<()> {
        self.note(lane, address, bytes, false, |history| history.note_read(now))
    }

    #[inline]
    pub(super) fn note_write(&mut self, lane: usize, address: u64, bytes: usize, now: Stamp) -> Trapped<()> {
        self.note(lane, address, bytes, true, |history| history.note_write(now))
    }

    #[inline]
    fn history(&mut self, unit: u64) -> &mut History {
        let page = unit / PAGE;
        if self.last_page.0 != page {
            let next = self.histories.len();
            let at = *self.pages.entry(page).or_insert(next);
            if at == next {
                self.histories.push([History::default(); PAGE as usize]);
            }
            self.last_page = (page, at);
        }
        &mut self.histories[self.last_page.1][(unit % PAGE) as usize]
    }
}

#[inline]
fn within(region: MemoryRegion<'_>, address: u64, bytes: usize) -> Option<&[Cell<u8>]> {
    let at = address.wrapping_sub(region.start);
    let inside = at <= region.bytes.len() as u64;
    inside.then(|| region.bytes[at as usize..].get(..bytes)).flatten()
}
