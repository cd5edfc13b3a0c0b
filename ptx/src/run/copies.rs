//! Asynchronous copies to shared memory. Until its thread has waited for a copy, nobody may touch the destination.

use super::{
    LaunchState,
    trap::{Trapped, lanes},
    warp::Warp,
};
use crate::{
    instruction::OperandAddress,
    registers::{LANES, RegisterSlot},
};

/// The bytes of a copy.
const SIZE: usize = 16;

/// The copies of a warp's threads that have been begun and not awaited.
#[derive(Default)]
pub(super) struct PendingCopies {
    copies: Vec<Copy>,
    /// The number of groups that each thread has ended.
    groups: [u32; LANES],
}

/// A copy: its thread's lane and group, and its bytes, which were read when it began.
struct Copy {
    lane: usize,
    group: u32,
    to: u64,
    bytes: [u8; SIZE],
}

impl PendingCopies {
    pub(super) fn commit(&mut self, active: u32) {
        lanes(active).for_each(|lane| self.groups[lane] += 1);
    }

    /// The first lane of a mask with a copy that it has not waited for.
    pub(super) fn under_way(&self, mask: u32) -> Option<usize> {
        self.copies.iter().map(|copy| copy.lane).find(|lane| mask >> lane & 1 == 1)
    }
}

impl Warp {
    pub(super) fn start_copy(
        &mut self,
        launch: &mut LaunchState<'_>,
        to: &OperandAddress,
        from: &OperandAddress,
        bytes: RegisterSlot,
        active: u32,
    ) -> Trapped<()> {
        let targets = self.registers.addresses(to.base, to.offset);
        let sources = self.registers.addresses(from.base, from.offset);
        for lane in lanes(active) {
            let now = self.stamp(lane);
            launch.shared.write(lane, targets[lane], SIZE, now.under_way())?;
            // The first bytes come from memory, and zeros follow.
            let wanted = (self.registers.bits(bytes, lane) as usize).min(SIZE);
            let mut copied = [0; SIZE];
            if wanted > 0 {
                let source = launch.global.aligned(lane, sources[lane], SIZE, wanted)?;
                launch.global.note_read(lane, sources[lane], wanted, now)?;
                copied.iter_mut().zip(source).for_each(|(to, from)| *to = from.get());
            }
            let group = self.copies.groups[lane];
            self.copies.copies.push(Copy { lane, group, to: targets[lane], bytes: copied });
        }
        Ok(())
    }

    /// Lets all but the last `left` groups of the active lanes arrive.
    pub(super) fn await_copies(&mut self, launch: &mut LaunchState<'_>, left: u32, active: u32) {
        let groups = self.copies.groups;
        let arrived = |copy: &Copy| active >> copy.lane & 1 == 1 && copy.group + left < groups[copy.lane];
        for copy in self.copies.copies.iter().filter(|copy| arrived(copy)) {
            launch.shared.arrive(copy.to, &copy.bytes, self.stamp(copy.lane));
        }
        self.copies.copies.retain(|copy| !arrived(copy));
    }
}
