//! The parameters of a stage as ranks hold them: in buffers, whole or in shards.

use std::ops::Range;

use distributed::plan::{Axis, ParallelPlan};
use numcore::{ALIGN, DType};

use crate::{ModelCosts, ParameterCosts, PartCosts};

/// A group of ranks that exchange gradients or parameters.
#[derive(Clone, Debug)]
pub(crate) struct StateGroup {
    pub(super) axes: Vec<Axis>,
    pub(crate) ranks: usize,
    pub(super) span: usize,
}

/// The groups of ranks that have the same parameters, whole or in shards.
#[derive(Clone, Debug)]
pub(crate) struct StateGroups {
    /// The ranks over which gradients are summed.
    pub(super) all: StateGroup,
    /// The ranks that hold the shards of one replica.
    pub(crate) shard: StateGroup,
    /// The ranks that hold equal shards, if there are several.
    pub(super) replicas: Option<StateGroup>,
    /// The number of this rank's shard.
    pub(super) index: usize,
}

impl StateGroups {
    /// The groups of parameters that all ranks of a stage have, for world rank `rank`.
    pub(crate) fn of(plan: &ParallelPlan, rank: usize) -> Self {
        let axes = [Axis::Data, Axis::Shard, Axis::Context];
        let places = axes.map(|axis| plan.coordinate(axis, rank));
        Self::along(axes.map(|axis| (axis, plan.size(axis))), places, plan.size(Axis::Tensor))
    }

    /// The groups of experts' parameters: ranks with other experts lie between neighbours.
    pub(crate) fn of_experts(plan: &ParallelPlan, rank: usize) -> Self {
        let axes = [Axis::Data, Axis::Shard, Axis::Context];
        let reader = axes.iter().fold(0, |place, &axis| place * plan.size(axis) + plan.coordinate(axis, rank));
        let experts = plan.of_experts();
        let places = axes.map(|axis| experts.coordinate(axis, reader));
        let stride = plan.size(Axis::Tensor) * plan.size(Axis::Expert);
        Self::along(axes.map(|axis| (axis, experts.size(axis))), places, stride)
    }

    /// The groups of [`Sharded`](distributed::zero::Sharded) over ranks along these axes, whose innermost neighbours
    /// are `stride` ranks apart.
    fn along(sizes: [(Axis, usize); 3], places: [usize; 3], stride: usize) -> Self {
        let group = |here: Range<usize>| {
            let inner: usize = sizes[here.end..].iter().map(|(_, size)| size).product();
            let ranks: usize = sizes[here.clone()].iter().map(|(_, size)| size).product();
            let axes = sizes[here].iter().filter(|(_, size)| *size > 1).map(|(axis, _)| *axis).collect();
            StateGroup { axes, ranks, span: (ranks - 1) * inner * stride + 1 }
        };
        let [(_, data), (_, shard), _] = sizes;
        let whole = shard == 1 || data == 1;
        let first = usize::from(!whole);
        let index = (first..3).fold(0, |index, k| index * sizes[k].1 + places[k]);
        StateGroups { all: group(0..3), shard: group(first..3), replicas: (!whole).then(|| group(0..1)), index }
    }
}

/// Parameters of one unit and element type, which lie in one buffer.
#[derive(Clone, Debug)]
pub(crate) struct StateBuffer {
    /// The number of elements, with padding.
    pub(crate) elements: u64,
    pub(crate) dtype: DType,
    /// The number of the unit.
    pub(crate) unit: usize,
    /// The element type of gradients; none if the parameters are frozen.
    pub(crate) gradient: Option<DType>,
    /// The elements of whose gradients ranks along tensor have parts.
    partial: Vec<Range<u64>>,
}

impl StateBuffer {
    pub(crate) fn values(&self) -> u64 {
        self.elements * self.dtype.size() as u64
    }

    pub(crate) fn gradients(&self) -> u64 {
        self.gradient.map_or(0, |dtype| self.elements * dtype.size() as u64)
    }

    /// The elements of shard `index` of `of` whose gradients are parts of sums along tensor.
    pub(super) fn partial_of(&self, index: usize, of: usize) -> u64 {
        let len = self.elements / of as u64;
        let (start, end) = (index as u64 * len, (index as u64 + 1) * len);
        let within = |range: &Range<u64>| range.end.min(end).saturating_sub(range.start.max(start));
        self.partial.iter().map(within).sum()
    }
}

/// The parameters of a stage, in order, that experts have or that others have. A tied parameter is there once.
pub(crate) fn parameters(stage: &[PartCosts], experts: bool) -> Vec<&ParameterCosts> {
    let all = || stage.iter().flat_map(|part| &part.parameters);
    let mut last = None;
    let is_new = |parameter: &&ParameterCosts| {
        // Numbers ascend, but for those of copies.
        if last.is_none_or(|last| parameter.origin > last) {
            last = Some(parameter.origin);
            return true;
        }
        let before = all().take_while(|other| !std::ptr::eq(*other, *parameter));
        !before.into_iter().any(|other| other.origin == parameter.origin)
    };
    all().filter(is_new).filter(|parameter| parameter.expert == experts).collect()
}

/// Parameters of which several stages have a copy, by origin, with those stages.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ties(Vec<(usize, Vec<usize>)>);

impl Ties {
    pub(crate) fn of(costs: &ModelCosts, stages: usize) -> Self {
        let (mut last, mut found) = (None, Vec::<(usize, Vec<usize>)>::new());
        let origins =
            |stage: usize| costs.stage(stage, stages).iter().flat_map(|part| &part.parameters).map(|p| p.origin);
        for stage in 1..stages {
            last = last.max(origins(stage - 1).max());
            // Numbers ascend, but for those of copies.
            for origin in origins(stage).filter(|origin| Some(*origin) <= last) {
                match found.iter_mut().find(|(known, _)| *known == origin) {
                    Some((_, of)) => of.push(stage),
                    None => {
                        let first = (0..stage).find(|&before| origins(before).any(|other| other == origin));
                        found.extend(first.map(|first| (origin, vec![first, stage])));
                    }
                }
            }
        }
        found.iter_mut().for_each(|(_, of)| of.dedup());
        Ties(found)
    }

    /// The unit that ZeRO gathers a parameter with: copies are units of their own.
    fn unit(&self, parameter: &ParameterCosts) -> usize {
        if self.stages(parameter).is_empty() { parameter.unit } else { usize::MAX - parameter.origin }
    }

    /// The stages that have copies of a parameter; none if it is in one stage alone.
    pub(super) fn stages(&self, parameter: &ParameterCosts) -> &[usize] {
        self.0.iter().find(|(origin, _)| *origin == parameter.origin).map_or(&[], |(_, stages)| stages)
    }
}

/// The buffers of ZeRO's units, or one for each element type where nothing is sharded.
pub(crate) fn buffers(
    of: &[&ParameterCosts],
    units: Option<&Ties>,
    ranks: usize,
    main_gradients: bool,
) -> Vec<StateBuffer> {
    let mut found: Vec<StateBuffer> = Vec::new();
    for parameter in of {
        let (dtype, unit) = (parameter.dtype, units.map_or(0, |ties| ties.unit(parameter)));
        let gradient = parameter.trained.then(|| parameter.gradient(main_gradients));
        let same = |other: &&mut StateBuffer| (other.unit, other.dtype, other.gradient) == (unit, dtype, gradient);
        // Parameters of a unit follow each other.
        let at = found.iter_mut().rev().find(same);
        let buffer = match at {
            Some(buffer) => buffer,
            None => {
                found.push(StateBuffer { elements: 0, dtype, unit, gradient, partial: Vec::new() });
                let last = found.len() - 1;
                &mut found[last]
            }
        };
        if parameter.partial && parameter.trained {
            buffer.partial.push(buffer.elements..buffer.elements + parameter.elements());
        }
        buffer.elements += parameter.elements().next_multiple_of((ALIGN / dtype.size()) as u64);
    }
    for buffer in &mut found {
        buffer.elements = buffer.elements.next_multiple_of((ranks * ALIGN / buffer.dtype.size()) as u64);
    }
    found
}
