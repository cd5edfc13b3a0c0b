//! The memory of a rank under a plan.

use distributed::{pipeline::StagePlacement, zero::ZeroStage};
use numcore::Result;

use super::{
    bubble::{in_flight, splits},
    state::{StateGroups, Ties, buffers, parameters},
};
use crate::{ModelCosts, OptimizerCosts, PartCosts, TrainingPlan};

/// Bytes that one rank holds at most, by their use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryEstimate {
    /// Values of parameters, and of gathered units of ZeRO stage 3.
    pub parameters: u64,
    /// Gradients.
    pub gradients: u64,
    /// State of the optimizer, with master copies.
    pub optimizer: u64,
    /// Values that are kept for backward, of all micro-batches in flight.
    pub activations: u64,
    /// Values of the part that is computed, and messages between stages, for a moment.
    pub transient: u64,
}

impl MemoryEstimate {
    /// All bytes.
    pub fn total(&self) -> u64 {
        let parts = [self.parameters, self.gradients, self.optimizer, self.activations, self.transient];
        parts.into_iter().fold(0, u64::saturating_add)
    }
}

/// The memory of pipeline rank `rank`.
pub(crate) fn memory_of(
    plan: &TrainingPlan,
    costs: &ModelCosts,
    optimizer: &OptimizerCosts,
    (placement, ties): (&StagePlacement, &Ties),
    rank: usize,
) -> Result<MemoryEstimate> {
    let stages: Vec<usize> = placement.stages_on(rank).collect();
    let (ranks, zero, kind) = (plan.parallel()?, plan.zero_stage()?, plan.kind()?);
    let groups = [StateGroups::of(&ranks, 0), StateGroups::of_experts(&ranks, 0)];
    let units = (zero != ZeroStage::None).then_some(ties);
    let mut memory = MemoryEstimate::default();
    let (mut saved, mut messages, mut root, mut layers, mut whole) =
        (0, 0, [0, 0], [const { Vec::new() }; 2], Vec::new());
    let mut sums = 0;
    for &stage in &stages {
        let parts = costs.stage(stage, plan.stages());
        let mut values = 0;
        // Where backward passes are split, some micro-batches wait for their second part.
        let waits = splits(kind) && stage > 0;
        let kept = |part: &PartCosts| if waits { part.saved.max(part.deferred) } else { part.saved };
        saved += costs.kept(stage, placement, kept);
        memory.transient = parts.iter().map(|part| part.transient).fold(memory.transient, u64::max);
        messages = messages.max(costs.messages(stage, placement));
        for (experts, groups) in [false, true].into_iter().zip(&groups) {
            let shards = if zero == ZeroStage::None { 1 } else { groups.shard.ranks };
            for buffer in buffers(&parameters(parts, experts), units, shards, plan.main_gradients) {
                let share = |sharded: bool, bytes: u64| if sharded { bytes / shards as u64 } else { bytes };
                memory.parameters += share(zero.shards_parameters(), buffer.values());
                memory.gradients += share(zero.shards_gradients(), buffer.gradients());
                if buffer.gradient.is_some() {
                    memory.optimizer += (buffer.elements as f64 * optimizer.state) as u64 / shards as u64;
                }
                values += buffer.values();
                // The root stays whole beside other units, its values and its gradients.
                for (k, bytes) in [buffer.values(), buffer.gradients()].into_iter().enumerate() {
                    match buffer.unit {
                        0 => root[k] += bytes,
                        _ => layers[k].push(bytes),
                    }
                }
                sums = sums.max(buffer.gradients() / shards as u64);
            }
        }
        whole.push(values);
    }
    layers.iter_mut().for_each(|of| of.sort_unstable_by_key(|&bytes| std::cmp::Reverse(bytes)));
    let largest = |of: usize, rank: usize| layers[of].get(rank).copied().unwrap_or(0);
    if zero.shards_parameters() {
        // The unit that is read, and the one that arrives; in a pipeline, the same of stages.
        whole.sort_unstable();
        let stages = whole.iter().rev().take(2).sum::<u64>();
        memory.parameters += if plan.stages() > 1 { stages } else { root[0] + largest(0, 0) + largest(0, 1) };
    }
    if zero.shards_gradients() {
        // One unit's gradients, or two, when what the last part had kept is free.
        let last = stages.iter().flat_map(|&stage| costs.stage(stage, plan.stages())).next_back();
        memory.gradients += root[1] + largest(1, 0);
        memory.gradients += largest(1, 1).saturating_sub(last.map_or(0, |part| part.saved));
        // Sums of a micro-batch arrive beside those of the ones before it.
        memory.gradients += if plan.micro_batches > 1 { sums } else { 0 };
    }
    memory.transient += messages;
    let held = in_flight(kind, plan.shape(), rank) as u64;
    memory.activations = saved.saturating_mul(held) / stages.len().max(1) as u64;
    Ok(memory)
}
