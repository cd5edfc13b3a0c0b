//! Memory of estimates, beside the peaks of ranks that train.

use distributed::comm::{Comm, Ranks};
use numcore::Runtime;
use planner::{Machine, OptimizerCosts, SimulatedStep, TrainingPlan};

use crate::{common::*, plans::gpt_costs, volumes::build};

/// The peak of each rank in a step after the second: the least of three, as a message may come early.
fn peaks(plan: &TrainingPlan, config: GptConfig) -> Vec<u64> {
    let run = |comm: Comm<Cpu>| {
        let mut step = build(&Mesh::new(&comm, plan.parallel()?)?, plan, config)?;
        step()?;
        step()?;
        let peak = |_| {
            comm.runtime().synchronize()?;
            comm.runtime().reset_peak();
            step()?;
            Ok(comm.runtime().memory().total.peak as u64)
        };
        let peaks = (0..3).map(peak).collect::<Result<Vec<_>>>()?;
        Ok(peaks.into_iter().min().unwrap_or(0))
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
                let over_time = step.memory_over_time(rank).unwrap();
                let told = over_time.iter().map(|(_, bytes)| *bytes).max().unwrap();
                let error = told as f64 / real as f64 - 1.0;
                assert!(error.abs() < most, "{plan}, rank {rank}: {told} of {real}, {:+.1} %", 100.0 * error);
            }
        }
    }
}
