//! Memory of estimates, beside the peaks of ranks that train.

use distributed::comm::{Comm, Ranks};
use numcore::{MemoryCategory, MemoryStats, Runtime};
use planner::{Estimate, Machine, OptimizerCosts, SimulatedStep, TrainingPlan};

use crate::{common::*, plans::gpt_costs, volumes::build};

/// The memory of each rank in a step after the second: the least peak of three, as a message may come early.
fn peaks(plan: &TrainingPlan, config: GptConfig) -> Vec<MemoryStats> {
    let run = |comm: Comm<Cpu>| {
        let mut step = build(&Mesh::new(&comm, plan.parallel()?)?, plan, config)?;
        step()?;
        step()?;
        let peak = |_| {
            comm.runtime().synchronize()?;
            comm.runtime().reset_peak();
            step()?;
            Ok(comm.runtime().memory())
        };
        let peaks = (0..3).map(peak).collect::<Result<Vec<_>>>()?;
        Ok(peaks.into_iter().min_by_key(|memory| memory.total.peak).unwrap_or_default())
    };
    Ranks::new(plan.world()).run(|_| Ok(Cpu::with_threads(1)), run).unwrap()
}

/// A block in each stage, so that received inputs are a large share of what is kept.
#[test]
fn planner_memory_is_that_of_ranks_that_train() {
    let optimizer = OptimizerCosts::measure(AdamWConfig::default(), DType::F32, false).unwrap();
    for &kind in ScheduleKind::ALL {
        for (pipe, v) in [(2, 1), (4, 1), (2, 2), (4, 2)] {
            let plan = TrainingPlan {
                pipe,
                stages_per_rank: v,
                schedule: kind.to_string(),
                micro_batches: 8,
                micro_batch: 32,
                ..TrainingPlan::default()
            };
            if plan.check().is_err() {
                continue;
            }
            // Passes that are split keep parts of what they kept.
            let splits =
                plan.passes().unwrap().rows().iter().flatten().any(|action| {
                    action.computes().into_iter().any(|pass| pass.pass == distributed::pipeline::Pass::I)
                });
            let most = if splits { 0.055 } else { 0.04 };
            let config = GptConfig { layers: plan.stages(), width: 64, ..gpt() };
            let costs = gpt_costs(&plan, config, plan.stages(), |_| ());
            let step = SimulatedStep::of(&plan, &costs, &optimizer, &Machine::a100()).unwrap();
            for (rank, real) in peaks(&plan, config).into_iter().enumerate() {
                let real = real.total.peak;
                let over_time = step.memory_over_time(rank).unwrap();
                let told = over_time.iter().map(|(_, bytes)| *bytes).max().unwrap();
                let error = told as f64 / real as f64 - 1.0;
                assert!(error.abs() < most, "{plan}, rank {rank}: {told} of {real}, {:+.1} %", 100.0 * error);
            }
        }
    }
}

/// Units of ZeRO in a stage of one layer: there is no second layer, in values or in gradients.
#[test]
fn planner_memory_of_one_layer_has_no_second_one() {
    let optimizer = OptimizerCosts::measure(AdamWConfig::default(), DType::F32, false).unwrap();
    for (zero, pipe, micro_batches) in [(2, 1, 1), (3, 1, 1), (2, 1, 3), (2, 2, 4)] {
        let plan = TrainingPlan { zero, data: 2, pipe, micro_batches, micro_batch: 2, ..TrainingPlan::default() };
        let config = GptConfig { layers: pipe, width: 64, ..gpt() };
        let costs = gpt_costs(&plan, config, pipe, |_| ());
        let memory = Estimate::of(&plan, &costs, &optimizer, &Machine::a100()).unwrap().memory;
        let shards = if zero == 3 { memory.parameters } else { 0 };
        let bytes = |real: &MemoryStats| {
            let peak = |of| real.of(of).peak as u64;
            let shards = if zero == 3 { peak(MemoryCategory::Parameters) } else { 0 };
            shards + peak(MemoryCategory::Gradients) + peak(MemoryCategory::Communication)
        };
        let real = peaks(&plan, config).iter().map(bytes).max().unwrap();
        assert_eq!(shards + memory.gradients, real, "{plan}: {memory:?}");
    }
}
