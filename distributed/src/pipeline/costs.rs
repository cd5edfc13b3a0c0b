//! What things take: ticks, and bytes.

use super::action::{Action, Compute, Pass};

/// Ticks per action. A tick is whatever the caller counts in (measured: nanoseconds); whole numbers keep simulations exact.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Costs {
    /// Per stage; the last entry holds for all further stages.
    pub stages: Vec<Passes>,
    /// From the send of a message to its arrival on the other rank.
    pub comm: u64,
    /// What an overlapped pair takes less than its two passes (at most the shorter of them).
    pub overlap_saves: u64,
    /// What a gather, its release or a gradient reduction occupies the rank for (0: hidden entirely).
    pub unit: u64,
    /// Bytes of a micro-batch's activations, per stage, from its F to its B or W; the last entry holds for all further stages.
    pub activations: Vec<u64>,
}

/// Ticks of each pass of one stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Passes {
    /// Forward.
    pub f: u64,
    /// Whole backward.
    pub b: u64,
    /// Input gradient.
    pub i: u64,
    /// Weight gradients.
    pub w: u64,
}

impl Costs {
    /// The same for every stage, B = I + W; messages, overlap and units are free, activations not counted.
    pub fn uniform(f: u64, i: u64, w: u64) -> Self {
        let stages = vec![Passes { f, b: i.saturating_add(w), i, w }];
        Costs { stages, comm: 0, overlap_saves: 0, unit: 0, activations: Vec::new() }
    }

    /// The same, with messages that take `comm`.
    pub fn with_comm(self, comm: u64) -> Self {
        Costs { comm, ..self }
    }

    /// Everything takes one step: the columns of a CSV file.
    pub(super) fn steps() -> Self {
        let stages = vec![Passes { f: 1, b: 1, i: 1, w: 1 }];
        Costs { stages, comm: 1, overlap_saves: 1, unit: 1, activations: Vec::new() }
    }

    /// What a pass takes.
    pub fn pass(&self, compute: Compute) -> u64 {
        let passes = self.stages.get(compute.stage).or(self.stages.last());
        passes.map_or(0, |passes| match compute.pass {
            Pass::F => passes.f,
            Pass::B => passes.b,
            Pass::I => passes.i,
            Pass::W => passes.w,
        })
    }

    /// How long an action occupies its rank, messages aside.
    pub fn occupies(&self, action: Action) -> u64 {
        match action {
            Action::Compute(compute) => self.pass(compute),
            Action::Overlap(forward, backward) => {
                let (f, b) = (self.pass(forward), self.pass(backward));
                f.saturating_add(b) - self.overlap_saves.min(f).min(b)
            }
            Action::Message(_) => 0,
            Action::Unit(_) => self.unit,
        }
    }
}

impl Default for Costs {
    /// F = I = W = 1.
    fn default() -> Self {
        Costs::uniform(1, 1, 1)
    }
}
