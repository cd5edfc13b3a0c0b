//! Register allocation: the result of a step gets a register, which is free again after its last reader.

use smallvec::SmallVec;

use super::kernel::{Slot, Slots, Step};
use crate::pointwise::execute::StepFn;

/// A location before register allocation: the result of a step is identified by its own number.
#[derive(Clone, Copy, PartialEq)]
pub(in crate::pointwise) enum Location {
    Result(u32),
    Slot(Slot),
}

/// A step between such locations.
pub(in crate::pointwise) struct Draft {
    pub f: StepFn,
    pub to: Location,
    pub args: SmallVec<[Location; 3]>,
}

/// The steps with slot indices, the slots with their registers, and the slot of the value that is kept.
pub(in crate::pointwise) fn assign(
    steps: &[Draft],
    results: u32,
    kept: Location,
    slots: Slots,
) -> (Vec<Step>, Slots, u16) {
    let mut last = vec![0; results as usize];
    for (t, step) in steps.iter().enumerate() {
        step.args.iter().for_each(|a| mark(&mut last, *a, t));
    }
    mark(&mut last, kept, usize::MAX);
    let mut registers = Registers { of: vec![0; results as usize], free: Vec::new(), count: 0 };
    let mut located: Vec<(StepFn, Slot, SmallVec<[Slot; 3]>)> = Vec::with_capacity(steps.len());
    for (t, step) in steps.iter().enumerate() {
        let to = registers.take(step.to);
        located.push((step.f, to, step.args.iter().map(|a| registers.slot(*a)).collect()));
        registers.release(&step.args, step.to, |r| last[r as usize] <= t);
    }
    let slots = Slots { registers: registers.count, ..slots };
    let steps = located.iter().map(|(f, to, args)| numbered(*f, *to, args, &slots)).collect();
    (steps, slots, slots.number(registers.slot(kept)))
}

/// A step by the elements of its slots; operands it does not take name its destination, which always exists.
fn numbered(f: StepFn, to: Slot, args: &[Slot], slots: &Slots) -> Step {
    let to = slots.number(to);
    let mut numbers = [to; 3];
    numbers.iter_mut().zip(args).for_each(|(n, a)| *n = slots.number(*a));
    Step { f, to, args: numbers }
}

fn mark(last: &mut [usize], location: Location, at: usize) {
    if let Location::Result(r) = location {
        last[r as usize] = at;
    }
}

struct Registers {
    of: Vec<u16>,
    free: Vec<u16>,
    count: u16,
}

impl Registers {
    fn take(&mut self, location: Location) -> Slot {
        if let Location::Result(r) = location {
            self.of[r as usize] = self.free.pop().unwrap_or_else(|| {
                self.count += 1;
                self.count - 1
            });
        }
        self.slot(location)
    }

    fn slot(&self, location: Location) -> Slot {
        match location {
            Location::Result(r) => Slot::Register(self.of[r as usize]),
            Location::Slot(slot) => slot,
        }
    }

    /// Frees the registers of arguments (each once) and of an unused result.
    fn release(&mut self, args: &[Location], to: Location, dead: impl Fn(u32) -> bool) {
        for (i, location) in args.iter().chain([&to]).enumerate() {
            if let Location::Result(r) = location
                && dead(*r)
                && !args[..i.min(args.len())].contains(location)
            {
                self.free.push(self.of[*r as usize]);
            }
        }
    }
}
