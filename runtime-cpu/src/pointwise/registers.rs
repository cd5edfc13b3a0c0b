//! Registers for results: one is free again after its last reader.

use super::kernel::Slot;

/// A place before registers are given out: a result of a step has a number of its own.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Place {
    Result(u32),
    Slot(Slot),
}

/// Notes that step `at` reads a place.
pub(super) fn mark(last: &mut [usize], place: Place, at: usize) {
    if let Place::Result(r) = place {
        last[r as usize] = at;
    }
}

/// Which register each result has, and which are free.
pub(super) struct Registers {
    of: Vec<u16>,
    free: Vec<u16>,
    pub(super) count: u16,
}

impl Registers {
    pub(super) fn new(results: u32) -> Self {
        Registers { of: vec![0; results as usize], free: Vec::new(), count: 0 }
    }

    pub(super) fn take(&mut self, place: Place) -> Slot {
        if let Place::Result(r) = place {
            self.of[r as usize] = self.free.pop().unwrap_or_else(|| {
                self.count += 1;
                self.count - 1
            });
        }
        self.slot(place)
    }

    pub(super) fn slot(&self, place: Place) -> Slot {
        match place {
            Place::Result(r) => Slot::Register(self.of[r as usize]),
            Place::Slot(slot) => slot,
        }
    }

    /// Frees the registers of arguments (each once) and of a result nobody reads.
    pub(super) fn release(&mut self, args: &[Place], to: Place, dead: impl Fn(u32) -> bool) {
        for (i, place) in args.iter().chain([&to]).enumerate() {
            if let Place::Result(r) = place
                && dead(*r)
                && !args[..i.min(args.len())].contains(place)
            {
                self.free.push(self.of[*r as usize]);
            }
        }
    }
}
