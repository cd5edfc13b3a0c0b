//! Simulation of a step on one replica: the schedule's own passes, in time and in memory. Other replicas do the same.

use distributed::pipeline::{Action, Compute, Costs, Pass, Schedule, SendMode, Simulation, Span, StageCosts, Timeline};
use numcore::{Error, Result};

use crate::{
    Estimate, Machine, MemoryEstimate, ModelCosts, OptimizerCosts, TrainingPlan,
    estimate::{StageSeconds, Ties, memory_of, transfer_seconds},
};

/// Ticks of a second: simulations are in nanoseconds.
const TICKS: f64 = 1e9;

/// A step of a plan whose passes were simulated one by one.
#[derive(Clone, Debug)]
pub struct SimulatedStep {
    /// The estimate, in which computation, bubbles, transfers and memory are those of the simulation.
    pub estimate: Estimate,
    schedule: Schedule,
    costs: Costs,
    sends: SendMode,
    /// The memory of each pipeline rank without activations.
    held: Vec<MemoryEstimate>,
    /// The bytes of each stage's micro-batch that wait for the second part of a split backward pass.
    deferred: Vec<u64>,
}

impl SimulatedStep {
    /// Simulates a plan. All ranks that have the same stages do the same, so a replica stands for all.
    ///
    /// # Errors
    /// Fails for a plan that [`TrainingPlan::check`] refuses.
    pub fn of(plan: &TrainingPlan, costs: &ModelCosts, optimizer: &OptimizerCosts, machine: &Machine) -> Result<Self> {
        let estimate = Estimate::of(plan, costs, optimizer, machine)?;
        let (passes, placement) = (plan.passes()?, plan.placement()?);
        let sends = if machine.blocking_transfers { SendMode::Synchronous } else { SendMode::Overlapped };
        let stages = StageSeconds::all(plan, costs, machine)?;
        let ticks = |seconds: f64| ((seconds * TICKS).round() as u64).max(1);
        let stage = |(number, seconds): (usize, &StageSeconds)| StageCosts {
            f: ticks(seconds.f),
            b: ticks(seconds.b),
            i: ticks(seconds.i),
            w: ticks(seconds.w),
            activations: costs.kept(number, &placement, |part| part.saved),
        };
        let all = stages.iter().enumerate().map(stage).collect();
        let comm = (transfer_seconds(plan, costs, machine)? * TICKS).round() as u64;
        let ticks = Costs { comm, ..Costs::of(all) };
        // Without messages in the rows, each result is sent as soon as it is made.
        let schedule = match sends {
            SendMode::Overlapped => passes,
            SendMode::Synchronous => passes.lower(distributed::pipeline::Lowering::default())?,
        };
        let ties = Ties::of(costs, plan.stages());
        let held = |rank| {
            Ok(MemoryEstimate { activations: 0, ..memory_of(plan, costs, optimizer, (&placement, &ties), rank)? })
        };
        let held = (0..plan.pipe).map(held).collect::<Result<Vec<_>>>()?;
        // Transfers are exposed as far as the passes would end earlier without them.
        let simulation = schedule.simulate(&ticks, sends)?;
        let makespan = simulation.makespan() as f64 / TICKS;
        let work_of = |(row, spans): (&Vec<Action>, &Vec<Span>)| -> u64 {
            let computes = row.iter().zip(spans).filter(|(action, _)| action.is_compute());
            computes.map(|(_, span)| span.end - span.start).sum()
        };
        let work = schedule.rows().iter().zip(simulation.spans()).map(work_of).max().unwrap_or(0) as f64 / TICKS;
        let passes = match comm {
            0 => makespan,
            _ => schedule.simulate(&Costs { comm: 0, ..ticks.clone() }, sends)?.makespan() as f64 / TICKS,
        };
        let deferred = (0..plan.stages()).map(|stage| costs.waiting(stage, &placement)).collect();
        let estimate = Estimate {
            compute: work - estimate.layers,
            bubble: passes - work,
            transfers: makespan - passes,
            ..estimate
        };
        let mut step = SimulatedStep { estimate, schedule, costs: ticks, sends, held, deferred };
        let full = |rank: usize| MemoryEstimate { activations: step.peak(rank), ..step.held[rank] };
        step.estimate.memory = (0..plan.pipe).map(full).max_by_key(MemoryEstimate::total).unwrap_or_default();
        Ok(step)
    }

    /// The bytes by which a pass changes the activations that its rank holds: at its start for a forward pass, and
    /// otherwise at its end.
    fn change(&self, pass: &Compute) -> i64 {
        let signed = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
        let saved = self.costs.stage(pass.stage).map_or(0, |costs| costs.activations);
        let deferred = self.deferred.get(pass.stage).map_or(0, |bytes| *bytes);
        let (saved, deferred) = (signed(saved), signed(deferred));
        match pass.pass {
            Pass::F => saved,
            Pass::B => -saved,
            Pass::I => deferred - saved,
            Pass::W => -deferred,
        }
    }

    /// The most bytes of activations that a pipeline rank holds at once.
    fn peak(&self, rank: usize) -> u64 {
        let passes = self.schedule.rows()[rank].iter().flat_map(Action::computes);
        let (mut live, mut peak) = (0, 0);
        for pass in passes {
            live = i64::saturating_add(live, self.change(&pass));
            peak = peak.max(live);
        }
        peak as u64
    }

    /// The simulation of the passes, in nanoseconds.
    pub fn simulation(&self) -> Result<Simulation<'_>> {
        self.schedule.simulate(&self.costs, self.sends)
    }

    /// The passes of every pipeline rank, in nanoseconds: [`Timeline::to_svg`] draws them.
    pub fn timeline(&self) -> Result<Timeline> {
        Ok(Timeline::from(&self.simulation()?))
    }

    /// The bytes that a pipeline rank holds over time: pairs of seconds and bytes, one for each change.
    ///
    /// # Errors
    /// Fails if there is no such rank.
    pub fn memory_over_time(&self, rank: usize) -> Result<Vec<(f64, u64)>> {
        let simulation = self.simulation()?;
        let (Some(row), Some(held)) = (self.schedule.rows().get(rank), self.held.get(rank)) else {
            return Err(Error::range(
                "SimulatedStep::memory_over_time",
                "rank",
                rank,
                format!("below {}", self.held.len()),
            ));
        };
        let mut live = held.total();
        let mut changes = vec![(0.0, live)];
        for (action, span) in row.iter().zip(&simulation.spans()[rank]) {
            for pass in action.computes() {
                live = live.saturating_add_signed(self.change(&pass));
                let at = if pass.pass == Pass::F { span.start } else { span.end };
                changes.push((at as f64 / TICKS, live));
            }
        }
        Ok(changes)
    }
}
