//! Shuffles: each lane reads a register of another.

use super::{
    trap::{Trapped, lanes, trap},
    warp::Warp,
};
use crate::{
    error::FaultKind,
    instruction::{Shuffle, ShuffleMode},
};

impl Warp {
    pub(super) fn shuffle(&mut self, shuffle: &Shuffle, active: u32) -> Trapped<()> {
        let registers = &self.registers;
        let (values, distances) = (registers.word(shuffle.value), registers.word(shuffle.distance));
        let (clamps, members) = (registers.word(shuffle.clamp), registers.word(shuffle.members));
        let mut results = *registers.word(shuffle.result);
        let mut found = 0;
        for lane in lanes(active) {
            if members[lane] & self.all != active {
                let needed = members[lane];
                return trap(lane, FaultKind::InactiveLanes { instruction: "shfl.sync", needed, active });
            }
            let (in_range, from) = source(shuffle.mode, lane as u32, distances[lane] & 31, clamps[lane]);
            let from = if in_range { from } else { lane as u32 };
            if active >> from & 1 == 0 {
                return trap(lane, FaultKind::ShuffleFromInactive { lane: from });
            }
            results[lane] = values[from as usize];
            found |= u32::from(in_range) << lane;
        }
        *self.registers.word_mut(shuffle.result) = results;
        if let Some(row) = shuffle.found {
            self.registers.set_mask(row, active, found);
        }
        Ok(())
    }
}

/// The lane that is read, and whether it is in the segment that `clamp` gives: the rule of the PTX manual (`shfl.sync`).
fn source(mode: ShuffleMode, lane: u32, distance: u32, clamp: u32) -> (bool, u32) {
    let (segment, clamp) = (clamp >> 8 & 31, clamp & 31);
    let last = lane & segment | clamp & !segment;
    let first = lane & segment;
    match mode {
        ShuffleMode::Up => (lane as i32 - distance as i32 >= last as i32, lane.wrapping_sub(distance) & 31),
        ShuffleMode::Down => (lane + distance <= last, lane + distance),
        ShuffleMode::Butterfly => (lane ^ distance <= last, lane ^ distance),
        ShuffleMode::Index => {
            let from = first | distance & !segment;
            (from <= last, from)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_bound_the_lanes() {
        // Whole warps.
        assert_eq!(source(ShuffleMode::Up, 5, 2, 0), (true, 3));
        assert!(!source(ShuffleMode::Up, 1, 2, 0).0);
        assert_eq!(source(ShuffleMode::Down, 5, 2, 31), (true, 7));
        assert!(!source(ShuffleMode::Down, 30, 2, 31).0);
        assert_eq!(source(ShuffleMode::Butterfly, 5, 16, 31), (true, 21));
        assert_eq!(source(ShuffleMode::Index, 5, 9, 31), (true, 9));
        // Segments of eight lanes: c = ((32 - 8) << 8) | 31.
        let clamp = 24 << 8 | 31;
        assert_eq!(source(ShuffleMode::Index, 13, 2, clamp), (true, 10));
        assert!(!source(ShuffleMode::Down, 14, 2, clamp).0);
        assert!(!source(ShuffleMode::Up, 9, 2, 24 << 8).0);
        assert_eq!(source(ShuffleMode::Up, 11, 2, 24 << 8), (true, 9));
    }
}
