//! Loads, stores and atomic operations, lane by lane.

use std::cell::Cell;

use super::{
    LaunchState,
    trap::{Trapped, lanes, trap},
    warp::Warp,
};
use crate::{
    error::{FaultKind, Space},
    instruction::{Atomic, MemoryAccess},
    registers::LANES,
};

impl Warp {
    pub(super) fn load(&mut self, launch: &mut LaunchState<'_>, access: &MemoryAccess, active: u32) -> Trapped<()> {
        match access.bytes {
            1 => self.load_elements::<1>(launch, access, active),
            2 => self.load_elements::<2>(launch, access, active),
            4 => self.load_elements::<4>(launch, access, active),
            _ => self.load_elements::<8>(launch, access, active),
        }
    }

    pub(super) fn store(&mut self, launch: &mut LaunchState<'_>, access: &MemoryAccess, active: u32) -> Trapped<()> {
        match access.bytes {
            1 => self.store_elements::<1>(launch, access, active),
            2 => self.store_elements::<2>(launch, access, active),
            4 => self.store_elements::<4>(launch, access, active),
            _ => self.store_elements::<8>(launch, access, active),
        }
    }

    fn load_elements<const N: usize>(
        &mut self,
        launch: &mut LaunchState<'_>,
        access: &MemoryAccess,
        active: u32,
    ) -> Trapped<()> {
        let addresses = self.registers.addresses(access.address.base, access.address.offset);
        let size = access.size();
        match access.space {
            Space::Global => {
                for lane in lanes(active) {
                    let bytes = launch.global.bytes(lane, addresses[lane], size)?;
                    launch.global.note_read(lane, addresses[lane], size, self.stamp(lane))?;
                    let read = |bytes: &[Cell<u8>; N]| -> [u8; N] { std::array::from_fn(|i| bytes[i].get()) };
                    self.fill(access, lane, bytes.as_chunks::<N>().0.iter().map(read));
                }
            }
            Space::Shared => {
                for lane in lanes(active) {
                    let bytes = launch.shared.read(lane, addresses[lane], size, self.stamp(lane))?;
                    self.fill(access, lane, bytes.as_chunks::<N>().0.iter().copied());
                }
            }
            Space::Parameters => {
                for lane in lanes(active) {
                    let at = checked(access, lane, addresses[lane], launch.parameters.len())?;
                    let bytes = &launch.parameters[at..at + size];
                    self.fill(access, lane, bytes.as_chunks::<N>().0.iter().copied());
                }
            }
            Space::Local => {
                for lane in lanes(active) {
                    let at = self.local_place(access, lane, addresses[lane])?;
                    let mut bytes = [0; 16];
                    bytes[..size].copy_from_slice(&self.local[at..at + size]);
                    self.fill(access, lane, bytes[..size].as_chunks::<N>().0.iter().copied());
                }
            }
        }
        Ok(())
    }

    fn store_elements<const N: usize>(
        &mut self,
        launch: &mut LaunchState<'_>,
        access: &MemoryAccess,
        active: u32,
    ) -> Trapped<()> {
        let addresses = self.registers.addresses(access.address.base, access.address.offset);
        let size = access.size();
        for lane in lanes(active) {
            let (address, now) = (addresses[lane], self.stamp(lane));
            match access.space {
                Space::Global => {
                    let to = launch.global.bytes(lane, address, size)?;
                    launch.global.note_write(lane, address, size, now)?;
                    for (to, from) in to.as_chunks::<N>().0.iter().zip(self.elements::<N>(access, lane)) {
                        to.iter().zip(from).for_each(|(to, byte)| to.set(byte));
                    }
                }
                Space::Shared => {
                    let to = launch.shared.write(lane, address, size, now)?;
                    let to = to.as_chunks_mut::<N>().0.iter_mut();
                    to.zip(self.elements::<N>(access, lane)).for_each(|(to, from)| *to = from);
                }
                Space::Parameters => return trap(lane, FaultKind::ReadOnly { address }),
                Space::Local => {
                    let at = self.local_place(access, lane, address)?;
                    let mut local = std::mem::take(&mut self.local);
                    let to = local[at..at + size].as_chunks_mut::<N>().0.iter_mut();
                    to.zip(self.elements::<N>(access, lane)).for_each(|(to, from)| *to = from);
                    self.local = local;
                }
            }
        }
        Ok(())
    }

    pub(super) fn atomic(&mut self, launch: &mut LaunchState<'_>, atomic: &Atomic, active: u32) -> Trapped<()> {
        let addresses = self.registers.addresses(atomic.address.base, atomic.address.offset);
        for lane in lanes(active) {
            let (address, now) = (addresses[lane], self.stamp(lane));
            let cells = launch.global.bytes(lane, address, 4)?;
            launch.global.note(lane, address, 4, true, |history| history.note_atomic(now))?;
            let old = u32::from_le_bytes(std::array::from_fn(|at| cells[at].get()));
            let new = (atomic.operation)(old, self.registers.bits(atomic.operand, lane) as u32);
            cells.iter().zip(new.to_le_bytes()).for_each(|(to, byte): (&Cell<u8>, u8)| to.set(byte));
            if let Some(result) = atomic.result {
                self.registers.set_bits(result, lane, old.into());
            }
        }
        Ok(())
    }

    /// Writes the elements of a load to a lane of its registers.
    #[inline(always)]
    fn fill<const N: usize>(&mut self, access: &MemoryAccess, lane: usize, elements: impl Iterator<Item = [u8; N]>) {
        for (slot, element) in access.registers.iter().zip(elements) {
            let mut bytes = [0; 8];
            bytes[..N].copy_from_slice(&element);
            let bits = u64::from_le_bytes(bytes);
            let unused = 64 - 8 * N as u32;
            let bits = if access.signed { ((bits << unused) as i64 >> unused) as u64 } else { bits };
            self.registers.set_bits(*slot, lane, bits);
        }
    }

    /// The elements of a store in a lane of its registers.
    #[inline(always)]
    fn elements<const N: usize>(&self, access: &MemoryAccess, lane: usize) -> impl Iterator<Item = [u8; N]> {
        access.registers.iter().map(move |slot| {
            let bits = self.registers.bits(*slot, lane).to_le_bytes();
            std::array::from_fn(|i| bits[i])
        })
    }

    /// The place of a lane's access among all local memory.
    fn local_place(&self, access: &MemoryAccess, lane: usize, address: u64) -> Trapped<usize> {
        let each = self.local.len() / LANES;
        checked(access, lane, address, each).map(|at| lane * each + at)
    }
}

/// The offset of an access in memory of `length` bytes.
fn checked(access: &MemoryAccess, lane: usize, address: u64, length: usize) -> Trapped<usize> {
    let (space, bytes) = (access.space, access.size());
    if !address.is_multiple_of(bytes as u64) {
        return trap(lane, FaultKind::Misaligned { space, address, bytes });
    }
    if address.saturating_add(bytes as u64) > length as u64 {
        return trap(lane, FaultKind::OutOfBounds { space, address, bytes });
    }
    Ok(address as usize)
}
