//! Costs of actions, in ticks and bytes.

use super::action::{Action, Compute, Pass};

/// Ticks per action. The caller chooses the unit of a tick (nanoseconds for measured costs); integers keep simulations
/// exact.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Costs {
    /// Costs of each stage; the last entry holds for all further stages.
    pub stages: Vec<StageCosts>,
    /// Ticks from the send of a message to its arrival on the other rank.
    pub comm: u64,
    /// Ticks that an overlapped pair saves over its two passes, at most those of the shorter one.
    pub overlap_saves: u64,
    /// Ticks for which a gather, its release or a gradient reduction occupies the rank (0: hidden entirely).
    pub unit: u64,
}

/// Costs of one stage: ticks of each pass, and bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StageCosts {
    /// Ticks of a forward.
    pub f: u64,
    /// Ticks of a complete backward.
    pub b: u64,
    /// Ticks of the input gradient.
    pub i: u64,
    /// Ticks of the weight gradients.
    pub w: u64,
    /// Bytes of a micro-batch's activations, from its F to its B or W.
    pub activations: u64,
}

impl StageCosts {
    /// Costs with B = I + W and activations of 0 bytes.
    pub fn new(f: u64, i: u64, w: u64) -> Self {
        StageCosts { f, b: i.saturating_add(w), i, w, activations: 0 }
    }

    /// These costs, with `activations` bytes of activations.
    pub fn with_activations(self, activations: u64) -> Self {
        StageCosts { activations, ..self }
    }
}

impl Costs {
    /// Equal costs for every stage, as in [`StageCosts::new`]; messages, overlap and units are free.
    pub fn uniform(f: u64, i: u64, w: u64) -> Self {
        Costs::of(vec![StageCosts::new(f, i, w)])
    }

    /// Costs of different stages; messages, overlap and units are free.
    pub fn of(stages: Vec<StageCosts>) -> Self {
        Costs { stages, comm: 0, overlap_saves: 0, unit: 0 }
    }

    /// These costs, with messages of `comm` ticks.
    pub fn with_comm(self, comm: u64) -> Self {
        Costs { comm, ..self }
    }

    /// One tick for everything: the columns of a CSV file.
    pub(super) fn steps() -> Self {
        let stages = vec![StageCosts { b: 1, ..StageCosts::new(1, 1, 1) }];
        Costs { stages, comm: 1, overlap_saves: 1, unit: 1 }
    }

    /// The costs of a stage; `None` if there is no entry.
    pub fn stage(&self, stage: usize) -> Option<&StageCosts> {
        self.stages.get(stage).or(self.stages.last())
    }

    /// The ticks of a pass.
    pub fn pass(&self, compute: Compute) -> u64 {
        self.stage(compute.stage).map_or(0, |stage| match compute.pass {
            Pass::F => stage.f,
            Pass::B => stage.b,
            Pass::I => stage.i,
            Pass::W => stage.w,
        })
    }

    /// The ticks for which an action occupies its rank; 0 for messages.
    pub(crate) fn occupies(&self, action: Action) -> u64 {
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
    /// Costs of one tick for F, I and W on every stage.
    fn default() -> Self {
        Costs::uniform(1, 1, 1)
    }
}
