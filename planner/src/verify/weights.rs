//! Comparison of weights and buffers.

use std::collections::BTreeSet;

use distributed::plan::Axis;

use super::{
    Cause, Difference, StepPart,
    compare::{Comparison, is_above, norm, norm_of_all, piece, relative},
    record::RankRecord,
};

impl Comparison<'_> {
    /// The first parameter whose initial values are not those of one rank.
    pub(super) fn initial_weights(&self) -> Option<Difference> {
        let off = |record: &RankRecord, name: &str| {
            let parameter = record.parameters.get(name)?;
            let own = piece(self.reference.initial.get(record.saved_name(name))?, &parameter.placement)?;
            Some(relative(record.initial.get(name)?, &own, 0.0))
        };
        let found = differing(self.records, self.allowed.value, &off)?;
        let is_cut = |record: &RankRecord| record.parameters.get(&found.name).is_some_and(|p| !p.placement.is_whole());
        let axis = self.records.iter().any(is_cut).then_some(Axis::Tensor).filter(|axis| self.plan.size(*axis) > 1);
        Some(Difference { axis, ..found.difference(0, StepPart::InitialWeights, Cause::InitialValues) })
    }

    /// The first parameter whose update is not that of one rank.
    pub(super) fn update(&self, step: usize) -> Option<Difference> {
        let Comparison { plan, reference, records, allowed } = *self;
        let (now, noise) = (&reference.steps[step], allowed.noise * norm_of_all(&reference.steps[step].gradients));
        let before = step.checked_sub(1).map_or(&reference.initial, |step| &reference.steps[step].weights);
        let off = |record: &RankRecord, name: &str| {
            let (parameter, saved) = (record.parameters.get(name)?, record.saved_name(name));
            // A gradient of rounding alone, such as that of a bias of attention's keys, becomes an update of any sign.
            if norm(now.gradients.get(saved)?) <= noise && allowed.update > 0.0 {
                return None;
            }
            let here = |whole: &Vec<f64>| piece(whole, &parameter.placement);
            let (after, before) = (here(now.weights.get(saved)?)?, here(before.get(saved)?)?);
            let distance = |a: &[f64], b: &[f64]| norm(&a.iter().zip(b).map(|(a, b)| a - b).collect::<Vec<_>>());
            let (apart, moved) = (distance(record.steps[step].weights.get(name)?, &after), distance(&after, &before));
            Some(if apart <= allowed.rounding * norm(&after) { 0.0 } else { apart / moved.max(f64::MIN_POSITIVE) })
        };
        let found = differing(records, allowed.update, &off)?;
        // Ranks with the same piece, of which one went another way.
        let of = |rank: usize| {
            let record = records.get(rank)?;
            Some((&record.parameters.get(&found.name)?.placement, record.steps[step].weights.get(&found.name)?))
        };
        let differs = |a: usize, b: usize| match (of(a), of(b)) {
            (Some((at, x)), Some((place, y))) => at == place && is_above(relative(x, y, 0.0), allowed.value * 1e-2),
            _ => false,
        };
        let disagrees = |axis: &Axis| {
            found.ranks.iter().any(|&rank| plan.group(*axis, rank).into_iter().any(|other| differs(rank, other)))
        };
        let axis = Axis::ALL.into_iter().find(disagrees);
        let cause = if axis.is_some() { Cause::NotSummed } else { Cause::UpdateDiffers };
        Some(Difference { axis, ..found.difference(step, StepPart::Update, cause) })
    }

    /// The first buffer that is not that of one rank.
    pub(super) fn buffer(&self, step: usize) -> Option<Difference> {
        // Statistics follow weights, whose updates may be rounding that a rule enlarges.
        let bound = self.allowed.value.max(self.allowed.update);
        self.reference.steps[step].buffers.iter().find_map(|(name, whole)| {
            let own = |record: &RankRecord| {
                let own = record.steps[step].buffers.get(name).filter(|own| own.len() == whole.len())?;
                Some((record.rank, relative(own, whole, self.allowed.floor)))
            };
            let wrong = self.records.iter().filter_map(own).filter(|(_, distance)| is_above(*distance, bound));
            let (ranks, distances): (Vec<usize>, Vec<f64>) = wrong.unzip();
            let found = DifferingValue { name: name.clone(), ranks, distance: *distances.first()? };
            Some(found.difference(step, StepPart::Buffer, Cause::BufferOfOneRank))
        })
    }

    /// The buffers that [`buffer`](Comparison::buffer) does not compare: pieces, and those of one of the runs alone.
    pub(super) fn not_compared(&self) -> Vec<String> {
        let of = |record: &RankRecord| -> BTreeSet<(String, usize)> {
            let last = record.steps.last().into_iter();
            last.flat_map(|step| &step.buffers).map(|(name, values)| (name.clone(), values.len())).collect()
        };
        let (one, many) = (of(self.reference), self.records.iter().flat_map(of).collect());
        let names: BTreeSet<String> = one.symmetric_difference(&many).map(|(name, _)| name.clone()).collect();
        names.into_iter().collect()
    }

    /// The first parameter that only one of the two runs has, after tied copies are counted as one.
    pub(super) fn missing_parameter(&self) -> Option<Difference> {
        fn names(record: &RankRecord) -> BTreeSet<&str> {
            record.parameters.keys().map(|name| record.saved_name(name)).collect()
        }
        let (one, many) = (names(self.reference), self.records.iter().flat_map(names).collect());
        let name = one.symmetric_difference(&many).next()?;
        Some(Difference::of(0, StepPart::InitialWeights, name, Cause::OtherNames))
    }
}

/// A parameter or buffer that differs on some ranks.
struct DifferingValue {
    name: String,
    ranks: Vec<usize>,
    distance: f64,
}

impl DifferingValue {
    fn difference(self, step: usize, stage: StepPart, cause: Cause) -> Difference {
        let DifferingValue { name, ranks, distance } = self;
        Difference { ranks, distance: Some(distance), ..Difference::of(step, stage, &name, cause) }
    }
}

/// The first parameter, in the order of a rank's model, that is farther off than the bound; it has the largest
/// distance.
fn differing(
    records: &[RankRecord],
    bound: f64,
    off: &impl Fn(&RankRecord, &str) -> Option<f64>,
) -> Option<DifferingValue> {
    let mut first: Option<(usize, DifferingValue)> = None;
    for record in records {
        for (name, parameter) in &record.parameters {
            let Some(distance) = off(record, name).filter(|distance| is_above(*distance, bound)) else { continue };
            match &mut first {
                Some((_, found)) if found.name == *name => {
                    found.ranks.push(record.rank);
                    found.distance = found.distance.max(distance);
                }
                Some((order, _)) if *order <= parameter.order => {}
                _ => {
                    let found = DifferingValue { name: name.clone(), ranks: vec![record.rank], distance };
                    first = Some((parameter.order, found));
                }
            }
        }
    }
    first.map(|(_, found)| found)
}
