//! What things take: ticks, and bytes.

use super::action::{Action, Compute, Pass};

/// Ticks per action. A tick is whatever the caller counts in (measured: nanoseconds); whole numbers keep simulations exact.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Costs {
    /// Of each stage; the last entry holds for all further stages.
    pub stages: Vec<StageCosts>,
    /// From the send of a message to its arrival on the other rank.
    pub comm: u64,
    /// What an overlapped pair takes less than its two passes (at most the shorter of them).
    pub overlap_saves: u64,
    /// What a gather, its release or a gradient reduction occupies the rank for (0: hidden entirely).
    pub unit: u64,
}

/// What one stage takes: ticks of each pass, and bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StageCosts {
    /// Forward.
    pub f: u64,
    /// Whole backward.
    pub b: u64,
    /// Input gradient.
    pub i: u64,
    /// Weight gradients.
    pub w: u64,
    /// Bytes of a micro-batch's activations, from its F to its B or W.
    pub activations: u64,
}

impl StageCosts {
    /// B = I + W; activations are not counted.
    pub fn new(f: u64, i: u64, w: u64) -> Self {
        StageCosts { f, b: i.saturating_add(w), i, w, activations: 0 }
    }

    /// These costs, with this many bytes of activations.
    pub fn with_activations(self, activations: u64) -> Self {
        StageCosts { activations, ..self }
    }
}

impl Costs {
    /// Equal costs for every stage, as [`StageCosts::new`] has them; messages, overlap and units are free.
    pub fn uniform(f: u64, i: u64, w: u64) -> Self {
        Costs::of(vec![StageCosts::new(f, i, w)])
    }

    /// Of stages that differ; messages, overlap and units are free.
    pub fn of(stages: Vec<StageCosts>) -> Self {
        Costs { stages, comm: 0, overlap_saves: 0, unit: 0 }
    }

    /// These costs, with messages that take `comm`.
    pub fn with_comm(self, comm: u64) -> Self {
        Costs { comm, ..self }
    }

    /// Everything takes one step: the columns of a CSV file.
    pub(super) fn steps() -> Self {
        let stages = vec![StageCosts { b: 1, ..StageCosts::new(1, 1, 1) }];
        Costs { stages, comm: 1, overlap_saves: 1, unit: 1 }
    }

    /// What a stage takes; `None` where there is no entry at all.
    pub fn stage(&self, stage: usize) -> Option<&StageCosts> {
        self.stages.get(stage).or(self.stages.last())
    }

    /// What a pass takes.
    pub fn pass(&self, compute: Compute) -> u64 {
        self.stage(compute.stage).map_or(0, |stage| match compute.pass {
            Pass::F => stage.f,
            Pass::B => stage.b,
            Pass::I => stage.i,
            Pass::W => stage.w,
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
