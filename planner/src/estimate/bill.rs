//! The exchanges of a training step: what for, among whom, how often, and how many bytes.

use distributed::{
    buckets::{BucketLimits, BucketPlan, BucketSpec},
    pipeline::StagePlacement,
    plan::{Axis, ParallelPlan},
    zero::{UnitOf, ZeroStage},
};
use numcore::{ALIGN, DType, Result};

use crate::{ModelCosts, ParameterCosts, PartCosts, TrainingPlan};

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

/// A group of ranks that exchange gradients or parameters.
#[derive(Clone, Debug)]
pub(crate) struct StateGroup {
    axes: Vec<Axis>,
    pub(crate) ranks: usize,
    span: usize,
}

/// The groups of ranks that have the same parameters, whole or in shards.
#[derive(Clone, Debug)]
pub(crate) struct StateGroups {
    /// The ranks over which gradients are summed.
    all: StateGroup,
    /// The ranks that hold the shards of one replica.
    pub(crate) shard: StateGroup,
    /// The ranks that hold equal shards, if there are several.
    replicas: Option<StateGroup>,
}

impl StateGroups {
    /// The groups of parameters that all ranks of a stage have.
    pub(crate) fn of(plan: &ParallelPlan) -> Self {
        Self::along(
            [Axis::Data, Axis::Shard, Axis::Context].map(|axis| (axis, plan.size(axis))),
            plan.size(Axis::Tensor),
        )
    }

    /// The groups of experts' parameters: ranks with other experts lie between neighbours.
    pub(crate) fn of_experts(plan: &ParallelPlan) -> Self {
        let experts = plan.of_experts();
        let axes = [Axis::Data, Axis::Shard, Axis::Context].map(|axis| (axis, experts.size(axis)));
        Self::along(axes, plan.size(Axis::Tensor) * plan.size(Axis::Expert))
    }

    /// The groups of [`Sharded`](distributed::zero::Sharded) over ranks along these axes, whose innermost neighbours
    /// are `stride` ranks apart.
    fn along(sizes: [(Axis, usize); 3], stride: usize) -> Self {
        let group = |here: std::ops::Range<usize>| {
            let inner: usize = sizes[here.end..].iter().map(|(_, size)| size).product();
            let ranks: usize = sizes[here.clone()].iter().map(|(_, size)| size).product();
            let axes = sizes[here].iter().filter(|(_, size)| *size > 1).map(|(axis, _)| *axis).collect();
            StateGroup { axes, ranks, span: (ranks - 1) * inner * stride + 1 }
        };
        let [(_, data), (_, shard), _] = sizes;
        match shard == 1 || data == 1 {
            true => StateGroups { all: group(0..3), shard: group(0..3), replicas: None },
            false => StateGroups { all: group(0..3), shard: group(1..3), replicas: Some(group(0..1)) },
        }
    }
}

/// Parameters of one unit and element type, which lie in one buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StateBuffer {
    /// The number of elements, with padding.
    pub(crate) elements: u64,
    pub(crate) dtype: DType,
    /// The element type of gradients; none if the parameters are frozen.
    pub(crate) gradient: Option<DType>,
}

impl StateBuffer {
    pub(crate) fn values(&self) -> u64 {
        self.elements * self.dtype.size() as u64
    }

    pub(crate) fn gradients(&self) -> u64 {
        self.gradient.map_or(0, |dtype| self.elements * dtype.size() as u64)
    }
}

/// The parameters of a stage, in order, that experts have or that others have. A tied parameter is there once.
pub(crate) fn parameters(stage: &[PartCosts], experts: bool) -> Vec<&ParameterCosts> {
    let mut seen = Vec::new();
    let all = stage.iter().flat_map(|part| &part.parameters).filter(|parameter| parameter.expert == experts);
    all.filter(|parameter| {
        let new = !seen.contains(&parameter.origin);
        seen.push(parameter.origin);
        new
    })
    .collect()
}

/// The buffers of ZeRO's units, or one for each element type where nothing is sharded.
pub(crate) fn buffers(
    parameters: &[&ParameterCosts],
    units: Option<&UnitOf>,
    ranks: usize,
    main_gradients: bool,
) -> Vec<StateBuffer> {
    let mut found: Vec<((String, DType, bool), u64)> = Vec::new();
    for parameter in parameters {
        let unit = units.map_or(String::new(), |units| units.of(&parameter.name));
        let key = (unit, parameter.dtype, parameter.trained);
        let elements = parameter.elements().next_multiple_of((ALIGN / parameter.dtype.size()) as u64);
        // Parameters of a unit follow each other.
        match found.iter_mut().rev().find(|(known, _)| *known == key) {
            Some((_, all)) => *all += elements,
            None => found.push((key, elements)),
        }
    }
    let buffer = |((_, dtype, trained), elements): ((String, DType, bool), u64)| StateBuffer {
        elements: elements.next_multiple_of((ranks * ALIGN / dtype.size()) as u64),
        dtype,
        gradient: trained.then(|| if main_gradients && dtype.is_half() { DType::F32 } else { dtype }),
    };
    found.into_iter().map(buffer).collect()
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

    fn all_reduce(&mut self, group: &StateGroup, elements: u64, size: usize) {
        let n = group.ranks as u64;
        let sent = 2 * (n - 1) * elements / n * size as u64;
        self.add(Purpose::Gradients, group, "all_reduce", [1, elements * size as u64, sent]);
    }

    /// Exchanges of a shard: `times` gathers, or sums to shards.
    fn shards(&mut self, purpose: Purpose, group: &StateGroup, kind: &'static str, bytes: u64, times: u64) {
        let n = group.ranks as u64;
        self.add(purpose, group, kind, [times, times * bytes, times * (bytes / n * (n - 1))]);
    }

    /// The exchanges of parameters that the ranks of some groups have.
    fn state(&mut self, plan: &TrainingPlan, stage: ZeroStage, groups: &StateGroups, of: &[&ParameterCosts]) {
        if stage == ZeroStage::None {
            return self.buckets(plan, &groups.all, of);
        }
        let passes = plan.micro_batches as u64;
        for buffer in buffers(of, Some(&UnitOf::layers()), groups.shard.ranks, plan.main_gradients) {
            let gathers = match stage {
                ZeroStage::Parameters => 2 * passes,
                // After an update, which frozen parameters do not have.
                _ => u64::from(buffer.gradient.is_some()),
            };
            self.shards(Purpose::Parameters, &groups.shard, "all_gather", buffer.values(), gathers);
            let sums = if stage.shards_gradients() { passes } else { 1 };
            let Some(dtype) = buffer.gradient else { continue };
            self.shards(Purpose::Gradients, &groups.shard, "reduce_scatter", buffer.gradients(), sums);
            if let Some(replicas) = &groups.replicas {
                for _ in 0..sums {
                    self.all_reduce(replicas, buffer.elements / groups.shard.ranks as u64, dtype.size());
                }
            }
        }
    }

    /// The buckets of gradients that are not sharded.
    fn buckets(&mut self, plan: &TrainingPlan, group: &StateGroup, of: &[&ParameterCosts]) {
        let spec = |p: &&ParameterCosts| {
            let dtype = p.gradient(plan.main_gradients);
            let numel = (p.elements() as usize).next_multiple_of(ALIGN / dtype.size());
            BucketSpec { numel, dtype, buffer: p.dtype as usize }
        };
        // Gradients become final in the reverse order of the model.
        let specs: Vec<BucketSpec> = of.iter().filter(|p| p.trained).rev().map(spec).collect();
        for bucket in BucketPlan::new(&specs, &BucketLimits::of(&specs)).buckets() {
            let elements: usize = bucket.iter().map(|&k| specs[k].numel).sum();
            self.all_reduce(group, elements as u64, bucket.first().map_or(4, |&k| specs[k].dtype.size()));
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

/// The exchanges of the pipeline rank `rank` in a step.
pub(crate) fn bill(
    plan: &TrainingPlan,
    costs: &ModelCosts,
    placement: &StagePlacement,
    rank: usize,
) -> Result<Vec<BillRow>> {
    let (ranks, zero, stages) = (plan.parallel()?, plan.zero_stage()?, placement.stages());
    let (of_all, of_experts) = (StateGroups::of(&ranks), StateGroups::of_experts(&ranks));
    let (pipe, m) = (along(plan, Axis::Pipe), plan.micro_batches as u64);
    // A transfer is between neighbours.
    let pipe = StateGroup { span: (pipe.span - 1) / (pipe.ranks.max(2) - 1) + 1, ..pipe };
    let mut rows = Rows::default();
    for stage in placement.stages_on(rank) {
        let parts = costs.stage(stage, stages);
        for part in parts {
            for exchange in part.forward_exchanges.iter().chain(&part.backward_exchanges) {
                let amounts = [exchange.calls, exchange.payload, exchange.sent].map(|amount| m * amount);
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
            rows.add(Purpose::Stages, &pipe, "send", [m, m * bytes, m * bytes]);
            rows.add(Purpose::Stages, &pipe, "recv", [m, m * bytes, 0]);
        }
        rows.state(plan, zero, &of_all, &parameters(parts, false));
        rows.state(plan, zero, &of_experts, &parameters(parts, true));
    }
    Ok(rows.0)
}
