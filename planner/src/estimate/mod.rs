//! An analytic estimate of a step: its time, what is exposed, and its memory.

mod bill;
mod bubble;
mod memory;
mod state;

use std::collections::BTreeSet;

use distributed::{pipeline::ScheduleKind, plan::Axis};
use numcore::Result;

pub use bill::{BillRow, Purpose, bill};
pub use memory::MemoryEstimate;

use bill::span;
use bubble::in_flight;
pub(crate) use memory::memory_of;
pub(crate) use state::Ties;

use crate::{ExchangeCosts, Machine, ModelCosts, OptimizerCosts, PartCosts, TrainingPlan};

/// An estimate of a step on the slowest pipeline rank. Seconds add up to [`step`](Estimate::step).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Estimate {
    /// Seconds of kernels in forward and backward passes.
    pub compute: f64,
    /// Seconds of exchanges in layers, of which nothing is hidden.
    pub layers: f64,
    /// Seconds of waits for other pipeline ranks.
    pub bubble: f64,
    /// Seconds of transfers between pipeline ranks that nothing hides.
    pub transfers: f64,
    /// Seconds of gathers of parameters that nothing hides.
    pub gathers: f64,
    /// Seconds of sums of gradients that nothing hides.
    pub gradients: f64,
    /// Seconds of the update.
    pub update: f64,
    /// The memory of the pipeline rank that needs most.
    pub memory: MemoryEstimate,
    /// Floating-point operations of the model in a step, of one rank, without what is recomputed.
    pub model_flops: f64,
}

/// Seconds of a stage, or of all stages of a rank, for a micro-batch.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StageSeconds {
    /// Forward, with its exchanges.
    pub(crate) f: f64,
    /// The whole backward, with its exchanges, as a schedule without split passes runs it.
    pub(crate) b: f64,
    /// The gradient of the input, with its exchanges.
    pub(crate) i: f64,
    /// The gradients of weights.
    pub(crate) w: f64,
    /// Exchanges in layers.
    layers: f64,
}

impl StageSeconds {
    /// The seconds of each stage.
    pub(crate) fn all(plan: &TrainingPlan, costs: &ModelCosts, machine: &Machine) -> Result<Vec<Self>> {
        let links = [Axis::Tensor, Axis::Context, Axis::Expert, Axis::Data].map(|axis| machine.link(span(plan, axis)));
        let link = |axis: Axis| match axis {
            Axis::Tensor => links[0],
            Axis::Context => links[1],
            Axis::Expert => links[2],
            _ => links[3],
        };
        let exchanges = |all: &[ExchangeCosts]| -> f64 {
            all.iter().map(|exchange| link(exchange.axis).seconds(exchange.calls as f64, exchange.sent as f64)).sum()
        };
        let part = |sum: StageSeconds, part: &PartCosts| {
            let (forward, backward) = (exchanges(&part.forward_exchanges), exchanges(&part.backward_exchanges));
            let [all, input, weights] =
                [part.backward.all, part.backward.input, part.backward.weights].map(|work| machine.seconds(&work));
            sum.plus(&StageSeconds {
                f: machine.seconds(&part.forward) + forward,
                b: all + backward,
                i: input + backward,
                w: weights,
                layers: forward + backward,
            })
        };
        let stage = |stage: usize| costs.stage(stage, plan.stages()).iter().fold(StageSeconds::default(), part);
        Ok((0..plan.stages()).map(stage).collect())
    }

    fn plus(self, other: &StageSeconds) -> Self {
        StageSeconds {
            f: self.f + other.f,
            b: self.b + other.b,
            i: self.i + other.i,
            w: self.w + other.w,
            layers: self.layers + other.layers,
        }
    }
}

/// The seconds of a transfer of a micro-batch between two pipeline ranks; the largest of them.
pub(crate) fn transfer_seconds(plan: &TrainingPlan, costs: &ModelCosts, machine: &Machine) -> Result<f64> {
    let output = |stage: usize| costs.stage(stage, plan.stages()).last().map_or(0, |part| part.output);
    let largest = (1..plan.stages()).map(|next| output(next - 1)).max().unwrap_or(0);
    let neighbours = plan.world() / plan.pipe + 1;
    Ok(if plan.pipe == 1 { 0.0 } else { machine.link(neighbours).seconds(1.0, largest as f64) })
}

impl Estimate {
    /// The seconds of a step.
    pub fn step(&self) -> f64 {
        let Estimate { compute, layers, bubble, transfers, gathers, gradients, update, .. } = self;
        compute + layers + bubble + transfers + gathers + gradients + update
    }

    /// The share of the peak of a machine that the model's own operations are.
    pub fn utilization(&self, machine: &Machine) -> f64 {
        self.model_flops / self.step() / machine.peak_flops
    }

    /// Estimates a step of a plan, whose pieces `costs` were measured for.
    ///
    /// # Errors
    /// Fails for a plan that [`TrainingPlan::check`] refuses.
    pub fn of(
        plan: &TrainingPlan,
        costs: &ModelCosts,
        optimizer: &OptimizerCosts,
        machine: &Machine,
    ) -> Result<Estimate> {
        plan.check()?;
        let (kind, placement) = (plan.kind()?, plan.placement()?);
        let (p, v, m) = (plan.pipe, plan.stages_per_rank, plan.micro_batches as f64);
        let stages = StageSeconds::all(plan, costs, machine)?;
        let of_rank =
            |rank: usize| placement.stages_on(rank).fold(StageSeconds::default(), |sum, k| sum.plus(&stages[k]));
        let ranks: Vec<StageSeconds> = (0..p).map(of_rank).collect();
        let slowest = (0..p).reduce(|a, b| if ranks[b].busy(kind) > ranks[a].busy(kind) { b } else { a }).unwrap_or(0);
        let rank = ranks[slowest];
        let idle = ranks.iter().map(|rank| rank.idle(kind, v)).sum::<f64>() - rank.idle(kind, v);

        // Two stages stay gathered. More of them take turns, for every group of micro-batches if chunks do: at most.
        let turns = match kind {
            _ if v <= 2 => 1,
            ScheduleKind::LoopedBfs => 2,
            _ => 2 * plan.micro_batches.div_ceil(p) as u64,
        };
        let gathers = |_| (plan.stages() > 1).then_some(turns);
        let ties = Ties::of(costs, plan.stages());
        let stages_of = (&placement, &ties);
        let bill = bill::bill_of(plan, costs, stages_of, slowest * (plan.world() / p), &gathers)?;
        let of = |purpose: Purpose| bill.iter().filter(move |row| row.purpose == purpose);
        let time = |row: &BillRow| machine.link(row.span).seconds(row.calls as f64, row.sent as f64);
        let one = transfer_seconds(plan, costs, machine)?;
        let transfers = match (p, machine.blocking_transfers) {
            (1, _) => 0.0,
            // Each rank is held up by what it sends while it receives as much, forward and backward.
            (_, true) => 2.0 * one * v as f64 * (m + (p - 1) as f64 / v as f64),
            // Micro-batches in flight limit how often one can begin: each takes a trip to the last stage and back.
            (_, false) => {
                let trip = ranks.iter().map(|rank| rank.trip(kind)).sum::<f64>() + 2.0 * one * (p * v - 1) as f64;
                let flying = in_flight(kind, plan.shape(), 0) as f64 / v as f64;
                let late = (trip / flying - rank.busy(kind)).max(0.0);
                late * (m - flying).max(0.0) + 2.0 * one * (p - 1) as f64
            }
        };
        let gathers: f64 = of(Purpose::Parameters).map(time).sum();
        let sums: f64 = of(Purpose::Gradients).map(time).sum();
        // Gathers travel beside passes, and sums beside backward passes; the first or last of them beside none.
        let backward = rank.busy(kind) - rank.f;
        let own = |rank: usize| placement.stages_on(rank).collect::<Vec<_>>();
        let of_rank = own(slowest).into_iter().map(|stage| costs.stage(stage, plan.stages()).len());
        let last = of_rank.sum::<usize>().max(1) as f64;
        let beside_sums = if plan.zero >= 2 { m * backward } else { backward };
        let beside_gathers = if plan.zero == 3 { m * rank.busy(kind) } else { rank.f };
        let exposed = |all: f64, hidden: f64| (all - hidden).max(if hidden > 0.0 { all / last } else { 0.0 }).min(all);

        // The rank that keeps most for backward, and those with an embedding, with a head, and with most work.
        let kept = |rank: usize| {
            let of_stage = |stage| costs.kept(stage, &placement, |part| part.saved);
            let saved = placement.stages_on(rank).map(of_stage).fold(0, u64::saturating_add);
            saved.saturating_mul(in_flight(kind, plan.shape(), rank) as u64)
        };
        let fullest = (0..p).max_by_key(|&rank| kept(rank)).unwrap_or(0);
        let mut memory = MemoryEstimate::default();
        for rank in BTreeSet::from([0, fullest, slowest, p - 1]) {
            let other = memory_of(plan, costs, optimizer, stages_of, rank)?;
            memory = if other.total() > memory.total() { other } else { memory };
        }
        Ok(Estimate {
            compute: m * (rank.busy(kind) - rank.layers),
            layers: m * rank.layers,
            bubble: idle,
            transfers,
            gathers: exposed(gathers, beside_gathers),
            gradients: if machine.late_gradients { sums } else { exposed(sums, beside_sums) },
            update: updated_elements(plan, costs, &own(slowest))? * optimizer.update / machine.memory_bandwidth,
            memory,
            model_flops: m * costs.model_flops() / p as f64,
        })
    }
}

/// The trained elements that a rank updates.
fn updated_elements(plan: &TrainingPlan, costs: &ModelCosts, stages: &[usize]) -> Result<f64> {
    let ranks = plan.parallel()?;
    let groups = [state::StateGroups::of(&ranks, 0), state::StateGroups::of_experts(&ranks, 0)];
    let mut elements = 0.0;
    for parts in stages.iter().map(|&stage| costs.stage(stage, plan.stages())) {
        for (experts, groups) in [false, true].into_iter().zip(&groups) {
            let trained = state::parameters(parts, experts).into_iter().filter(|p| p.trained).map(|p| p.elements());
            let shards = if plan.zero == 0 { 1 } else { groups.shard.ranks };
            elements += trained.sum::<u64>() as f64 / shards as f64;
        }
    }
    Ok(elements)
}
