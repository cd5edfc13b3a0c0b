//! An analytic estimate of a step: its time, what is exposed, and its memory.

mod bill;
mod bubble;
mod memory;

use distributed::pipeline::ScheduleKind;
use numcore::{KernelWork, Result};

pub use bill::{BillRow, Purpose};
pub use memory::MemoryEstimate;

use bubble::{PassSeconds, in_flight, splits};

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

/// What a pipeline rank does for a micro-batch.
#[derive(Clone, Copy, Debug, Default)]
struct RankSeconds {
    compute: f64,
    layers: f64,
    passes: PassSeconds,
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
        let kind = plan.kind()?;
        let placement = match plan.stages() {
            1 => ScheduleKind::OneFOneB
                .placement(distributed::pipeline::PipeShape { micro_batches: 1, ..plan.shape() })?,
            _ => kind.placement(plan.shape())?,
        };
        let (p, v, m) = (plan.pipe, plan.stages_per_rank, plan.micro_batches as f64);
        let seconds = |rank: usize| {
            placement
                .stages_on(rank)
                .flat_map(|stage| costs.stage(stage, plan.stages()))
                .fold(RankSeconds::default(), |sum, part| sum.with(plan, machine, part, splits(kind)))
        };
        let ranks: Vec<RankSeconds> = (0..p).map(seconds).collect();
        let busy = |rank: &RankSeconds| rank.passes.busy(kind);
        let slowest = (0..p).reduce(|a, b| if busy(&ranks[b]) > busy(&ranks[a]) { b } else { a }).unwrap_or(0);
        let rank = ranks[slowest];
        let idle = ranks.iter().map(|rank| rank.passes.idle(kind, v)).sum::<f64>() - rank.passes.idle(kind, v);

        let bill = bill::bill(plan, costs, &placement, slowest)?;
        let of = |purpose: Purpose| bill.iter().filter(move |row| row.purpose == purpose);
        let time = |row: &BillRow| machine.link(row.span).seconds(row.calls as f64, row.sent as f64);
        let sends: f64 = of(Purpose::Stages).filter(|row| row.kind == "send").map(time).sum();
        let transfers = match (p, machine.blocking_transfers) {
            (1, _) => 0.0,
            // Each is held up by what it sends, and by what it receives meanwhile.
            (_, true) => sends * (1.0 + (p - 1) as f64 / (v as f64 * m)),
            (_, false) => {
                let one = sends / m / (2 * v) as f64;
                let trip: f64 = ranks.iter().map(|rank| round_trip(&rank.passes, kind)).sum::<f64>()
                    + 2.0 * one * (p * v - 1) as f64;
                let micro_batches = in_flight(kind, plan.shape(), 0) as f64 / v as f64;
                let period = (trip / micro_batches - busy(&rank)).max(0.0);
                period * (m - micro_batches).max(0.0) + 2.0 * one * (p - 1) as f64
            }
        };
        let gathers: f64 = of(Purpose::Parameters).map(time).sum();
        let sums: f64 = of(Purpose::Gradients).map(time).sum();
        // Gathers travel beside passes, and sums beside backward passes; the first or last of them beside none.
        let hides = |share: f64| if machine.late_gradients { 0.0 } else { share };
        let backward = if splits(kind) { rank.passes.i + rank.passes.w } else { rank.passes.b };
        let last = costs.parts.len().max(1) as f64;
        let beside_sums = if plan.zero >= 2 { m * backward } else { backward };
        let beside_gathers = if plan.zero == 3 { m * busy(&rank) } else { rank.passes.f };
        let exposed =
            |all: f64, beside: f64| (all - hides(beside)).max(if beside > 0.0 { all / last } else { 0.0 }).min(all);

        let mut memory = MemoryEstimate::default();
        for rank in [0, slowest, p - 1] {
            let stages: Vec<usize> = placement.stages_on(rank).collect();
            let own = MemoryEstimate::of(plan, costs, optimizer, &stages, rank)?;
            if own.total() > memory.total() {
                memory = own;
            }
        }
        let updated = memory_of_update(plan, costs, &placement.stages_on(slowest).collect::<Vec<_>>())?;
        Ok(Estimate {
            compute: m * rank.compute,
            layers: m * rank.layers,
            bubble: idle,
            transfers,
            gathers: exposed(gathers, beside_gathers),
            gradients: exposed(sums, beside_sums),
            update: updated * optimizer.update / machine.memory_bandwidth,
            memory,
            model_flops: m * costs.model_flops() / p as f64,
        })
    }
}

/// The time of a micro-batch on a rank until the gradient of its input is sent on.
fn round_trip(passes: &PassSeconds, kind: ScheduleKind) -> f64 {
    passes.f + if splits(kind) { passes.i } else { passes.b }
}

/// The trained elements that a rank updates.
fn memory_of_update(plan: &TrainingPlan, costs: &ModelCosts, stages: &[usize]) -> Result<f64> {
    let ranks = plan.parallel()?;
    let groups = [bill::StateGroups::of(&ranks), bill::StateGroups::of_experts(&ranks)];
    let mut elements = 0.0;
    for parts in stages.iter().map(|&stage| costs.stage(stage, plan.stages())) {
        for (experts, groups) in [false, true].into_iter().zip(&groups) {
            let trained = bill::parameters(parts, experts).into_iter().filter(|p| p.trained).map(|p| p.elements());
            let shards = if plan.zero == 0 { 1 } else { groups.shard.ranks };
            elements += trained.sum::<u64>() as f64 / shards as f64;
        }
    }
    Ok(elements)
}

impl RankSeconds {
    fn with(self, plan: &TrainingPlan, machine: &Machine, part: &PartCosts, splits: bool) -> Self {
        let exchange = |all: &[ExchangeCosts]| -> f64 {
            all.iter().map(|x| machine.link(bill::span(plan, x.axis)).seconds(x.calls as f64, x.sent as f64)).sum()
        };
        let time = |work: &KernelWork| machine.seconds(work);
        let (f, b, i, w) =
            (time(&part.forward), time(&part.backward.all), time(&part.backward.input), time(&part.backward.weights));
        let [forward, backward] = [exchange(&part.forward_exchanges), exchange(&part.backward_exchanges)];
        let passes = PassSeconds {
            f: self.passes.f + f + forward,
            b: self.passes.b + b + backward,
            i: self.passes.i + i + backward,
            w: self.passes.w + w,
        };
        let compute = self.compute + f + if splits { i + w } else { b };
        RankSeconds { compute, layers: self.layers + forward + backward, passes }
    }
}
