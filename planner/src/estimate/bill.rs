//! The exchanges of a training step: what for, among whom, how often, and how many bytes.

use distributed::{
    buckets::{BucketLimits, BucketPlan, BucketSpec},
    pipeline::{Action, StagePlacement, UnitAction, UnitOp},
    plan::Axis,
    zero::ZeroStage,
};
use numcore::{ALIGN, Error, Result};

use super::state::{StateGroup, StateGroups, Ties, buffers, parameters};
use crate::{ModelCosts, ParameterCosts, TrainingPlan};

/// The purpose of an exchange, which decides when it happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Purpose {
    /// An exchange of layers, in the passes of every micro-batch.
    Layers,
    /// Values and gradients between pipeline stages.
    Stages,
    /// A gather of sharded parameters.
    Parameters,
    /// A sum of gradients.
    Gradients,
    /// The sum of losses and their weights.
    Losses,
}

/// Exchanges of one kind and purpose in a step, of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BillRow {
    /// The purpose.
    pub purpose: Purpose,
    /// The axes of several ranks along which the group lies.
    pub axes: Vec<Axis>,
    /// The number of ranks from the group's first to its last, both included.
    pub span: usize,
    /// The kind of collective ([`Collective::name`](distributed::comm::Collective::name)).
    pub kind: &'static str,
    /// The number of calls.
    pub calls: u64,
    /// The bytes of the whole values.
    pub payload: u64,
    /// The bytes that the rank sends.
    pub sent: u64,
}

/// The rows of a bill.
#[derive(Default)]
struct Rows(Vec<BillRow>);

impl Rows {
    fn add(&mut self, purpose: Purpose, group: &StateGroup, kind: &'static str, [calls, payload, sent]: [u64; 3]) {
        if group.ranks == 1 || calls == 0 {
            return;
        }
        let same = |row: &&mut BillRow| row.purpose == purpose && row.kind == kind && row.axes == group.axes;
        if let Some(row) = self.0.iter_mut().find(same) {
            (row.calls, row.payload, row.sent) = (row.calls + calls, row.payload + payload, row.sent + sent);
            return;
        }
        self.0.push(BillRow { purpose, axes: group.axes.clone(), span: group.span, kind, calls, payload, sent });
    }

    fn all_reduce(&mut self, purpose: Purpose, group: &StateGroup, elements: u64, size: usize) {
        let n = group.ranks as u64;
        let sent = 2 * (n - 1) * elements / n * size as u64;
        self.add(purpose, group, "all_reduce", [1, elements * size as u64, sent]);
    }

    /// Exchanges of a shard: `times` gathers, or sums to shards.
    fn shards(&mut self, purpose: Purpose, group: &StateGroup, kind: &'static str, bytes: u64, times: u64) {
        let n = group.ranks as u64;
        self.add(purpose, group, kind, [times, times * bytes, times * (bytes / n * (n - 1))]);
    }

    /// The exchanges of a stage's parameters that the ranks of some groups have. A stage of a pipeline gathers sharded
    /// parameters `gathers` times.
    fn state(&mut self, step: &Step<'_>, groups: &StateGroups, of: &[&ParameterCosts], gathers: Option<u64>) {
        let (plan, stage, sharded) = (step.plan, step.zero, step.zero != ZeroStage::None);
        let (passes, shards) = (plan.micro_batches as u64, if sharded { groups.shard.ranks } else { 1 });
        if !sharded {
            self.buckets(plan, &groups.all, of);
        }
        let all = buffers(of, sharded.then_some(step.ties), shards, plan.main_gradients);
        // The root stays gathered from its first use in a step to the end. Backward begins with the unit that forward
        // ended with.
        let last = all.iter().map(|buffer| buffer.unit).max();
        let gathers_of = |unit| match unit {
            0 => 1,
            unit if Some(unit) == last => passes,
            _ => 2 * passes,
        };
        for buffer in all {
            let Some(dtype) = buffer.gradient else {
                if stage.shards_parameters() {
                    let times = gathers.unwrap_or(gathers_of(buffer.unit));
                    self.shards(Purpose::Parameters, &groups.shard, "all_gather", buffer.values(), times);
                }
                continue;
            };
            let partial = buffer.partial_of(if sharded { groups.index } else { 0 }, shards);
            if partial > 0 {
                self.all_reduce(Purpose::Gradients, &along(plan, Axis::Tensor), partial, dtype.size());
            }
            if !sharded {
                continue;
            }
            let times = match stage {
                ZeroStage::Parameters => gathers.unwrap_or(gathers_of(buffer.unit)),
                // After the update.
                _ => 1,
            };
            self.shards(Purpose::Parameters, &groups.shard, "all_gather", buffer.values(), times);
            let sums = if stage.shards_gradients() { passes } else { 1 };
            self.shards(Purpose::Gradients, &groups.shard, "reduce_scatter", buffer.gradients(), sums);
            if let Some(replicas) = &groups.replicas {
                for _ in 0..sums {
                    self.all_reduce(Purpose::Gradients, replicas, buffer.elements / shards as u64, dtype.size());
                }
            }
        }
    }

    /// The sum of the gradients of a parameter's copies in several stages, of which `stage` has the first of this rank.
    fn tied(
        &mut self,
        step: &Step<'_>,
        groups: &StateGroups,
        placement: &StagePlacement,
        stage: usize,
        of: &[&ParameterCosts],
    ) {
        let pipe = along(step.plan, Axis::Pipe);
        for parameter in of.iter().filter(|parameter| parameter.trained) {
            let stages = step.ties.stages(parameter);
            let mut holders: Vec<usize> = stages.iter().filter_map(|&k| placement.rank_of(k)).collect();
            holders.sort_unstable();
            holders.dedup();
            let ([first, .., last], Some(gaps)) = (&holders[..], pipe.ranks.checked_sub(1)) else { continue };
            if stages.iter().find(|&&k| placement.together(k, stage)) != Some(&stage) {
                continue;
            }
            let span = (last - first) * (pipe.span - 1) / gaps + 1;
            let group = StateGroup { ranks: holders.len(), span, ..pipe.clone() };
            let shards = if step.zero == ZeroStage::None { 1 } else { groups.shard.ranks };
            let sharded = (shards > 1).then_some(step.ties);
            let elements = match sharded {
                None => parameter.elements(),
                Some(_) => buffers(&[parameter], sharded, shards, step.plan.main_gradients)[0].elements / shards as u64,
            };
            self.all_reduce(Purpose::Gradients, &group, elements, parameter.gradient(step.plan.main_gradients).size());
        }
    }

    /// The buckets of gradients that are not sharded.
    fn buckets(&mut self, plan: &TrainingPlan, group: &StateGroup, of: &[&ParameterCosts]) {
        let spec = |p: &&ParameterCosts| {
            let dtype = p.gradient(plan.main_gradients);
            BucketSpec { numel: p.elements() as usize, dtype, buffer: p.dtype as usize }
        };
        // Gradients become final in the reverse order of the model.
        let trained: Vec<&ParameterCosts> = of.iter().copied().filter(|p| p.trained).rev().collect();
        let specs: Vec<BucketSpec> = trained.iter().map(spec).collect();
        // Gradients have the places of their parameters.
        let padded = |k: &usize| specs[*k].numel.next_multiple_of(ALIGN / trained[*k].dtype.size());
        for bucket in BucketPlan::new(&specs, &BucketLimits::of(&specs)).buckets() {
            let elements: usize = bucket.iter().map(padded).sum();
            self.all_reduce(
                Purpose::Gradients,
                group,
                elements as u64,
                bucket.first().map_or(4, |&k| specs[k].dtype.size()),
            );
        }
    }
}

/// The group along one axis.
fn along(plan: &TrainingPlan, axis: Axis) -> StateGroup {
    let sizes = plan.axes();
    let stride = match axis {
        Axis::Pipe => plan.world() / plan.pipe,
        Axis::Expert => plan.tensor,
        _ => sizes[axis as usize..4].iter().map(|(_, size)| size).product(),
    };
    let ranks = plan.axes().iter().find(|(other, _)| *other == axis).map_or(1, |(_, size)| *size);
    StateGroup { axes: vec![axis], ranks, span: (ranks - 1) * stride + 1 }
}

/// The number of ranks from the first to the last along an axis, both included.
pub(super) fn span(plan: &TrainingPlan, axis: Axis) -> usize {
    along(plan, axis).span
}

/// A step for which rows are made.
struct Step<'a> {
    plan: &'a TrainingPlan,
    zero: ZeroStage,
    ties: &'a Ties,
}

/// The exchanges of world rank `rank` in a step, as
/// [`CountingCommunicator`](distributed::comm::CountingCommunicator) counts them from the third step on. Clipped norms
/// and other decisions are left out. So are layers that exchange along data. A parameter's copies in several stages are
/// billed along pipe, though ranks without a copy take no part. Shards are those of elementwise rules; Muon, LAMB and
/// Adafactor have others.
///
/// # Errors
/// Fails for a plan that [`TrainingPlan::check`] refuses.
pub fn bill(plan: &TrainingPlan, costs: &ModelCosts, rank: usize) -> Result<Vec<BillRow>> {
    plan.check()?;
    if rank >= plan.world() {
        return Err(Error::range("bill", "rank", rank, format!("below {}", plan.world())));
    }
    let placement = plan.placement()?;
    let ties = Ties::of(costs, plan.stages());
    if plan.zero < 3 || plan.stages() == 1 {
        return bill_of(plan, costs, (&placement, &ties), rank, &|_| None);
    }
    let checked = plan.checked()?;
    let pipe = plan.parallel()?.coordinate(Axis::Pipe, rank);
    let gathers = |stage: usize| {
        let unshard = Action::Unit(UnitAction { stage, op: UnitOp::Unshard });
        Some(checked.schedule().rows()[pipe].iter().filter(|action| **action == unshard).count() as u64)
    };
    bill_of(plan, costs, (&placement, &ties), rank, &gathers)
}

/// The [`bill`] of a plan that was checked, whose stages are placed and gathered so many times.
pub(crate) fn bill_of(
    plan: &TrainingPlan,
    costs: &ModelCosts,
    (placement, ties): (&StagePlacement, &Ties),
    rank: usize,
    gathers: &dyn Fn(usize) -> Option<u64>,
) -> Result<Vec<BillRow>> {
    let (ranks, stages) = (plan.parallel()?, placement.stages());
    let step = Step { plan, zero: plan.zero_stage()?, ties };
    let (of_all, of_experts) = (StateGroups::of(&ranks, rank), StateGroups::of_experts(&ranks, rank));
    let (pipe, m) = (along(plan, Axis::Pipe), plan.micro_batches as u64);
    // A transfer is between neighbours.
    let pipe = StateGroup { span: (pipe.span - 1) / (pipe.ranks.max(2) - 1) + 1, ..pipe };
    let mut rows = Rows::default();
    for stage in placement.stages_on(ranks.coordinate(Axis::Pipe, rank)) {
        let parts = costs.stage(stage, stages);
        for part in parts {
            for exchange in part.forward_exchanges.iter().chain(&part.backward_exchanges) {
                let amounts = [exchange.calls, exchange.payload, exchange.sent].map(|amount| m.saturating_mul(amount));
                rows.add(Purpose::Layers, &along(plan, exchange.axis), exchange.kind, amounts);
            }
        }
        let ends = [parts.first().map_or(0, |part| part.input), parts.last().map_or(0, |part| part.output)];
        let others = [stage.checked_sub(1), Some(stage + 1).filter(|next| *next < stages)];
        for (_, bytes) in others
            .into_iter()
            .zip(ends)
            .filter(|(other, _)| other.is_some_and(|other| !placement.together(stage, other)))
        {
            let all = m.saturating_mul(bytes);
            rows.add(Purpose::Stages, &pipe, "send", [m, all, all]);
            rows.add(Purpose::Stages, &pipe, "recv", [m, all, 0]);
        }
        let whole = parameters(parts, false);
        rows.state(&step, &of_all, &whole, gathers(stage));
        rows.tied(&step, &of_all, placement, stage, &whole);
        rows.state(&step, &of_experts, &parameters(parts, true), gathers(stage));
    }
    let readers = ranks.world() / plan.tensor;
    let axes = [Axis::Pipe, Axis::Data, Axis::Shard, Axis::Context];
    let axes = axes.into_iter().filter(|axis| ranks.size(*axis) > 1).collect();
    let losses = StateGroup { axes, ranks: readers, span: plan.world() - plan.tensor + 1 };
    rows.all_reduce(Purpose::Losses, &losses, 2, size_of::<f64>());
    Ok(rows.0)
}
