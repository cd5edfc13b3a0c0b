//! Comparison of weights and buffers.

use std::collections::BTreeSet;

use distributed::plan::{Axis, ParallelPlan};

use super::{
    Cause, Difference, StepPart,
    compare::{AllowedDistances, is_above, norm, norm_of_all, parted, piece, relative},
    record::RankRecord,
};

/// The first parameter whose initial values are not those of one rank.
pub(super) fn initial_difference(
    plan: &ParallelPlan,
    reference: &RankRecord,
    records: &[RankRecord],
    bounds: AllowedDistances,
) -> Option<Difference> {
    let off = |record: &RankRecord, name: &str| {
        let parameter = record.parameters.get(name)?;
        let own = piece(reference.initial.get(record.saved_name(name))?, &parameter.placement)?;
        Some(relative(record.initial.get(name)?, &own, 0.0))
    };
    let found = differing(records, bounds.value, &off)?;
    let axis = records.iter().any(|record| record.parameters.get(&found.name).is_some_and(|p| !p.placement.is_whole()));
    let axis = axis.then_some(Axis::Tensor).filter(|axis| plan.size(*axis) > 1);
    Some(found.difference(0, StepPart::InitialWeights, axis, Cause::InitialValues))
}

/// The first parameter whose update is not that of one rank.
pub(super) fn update_difference(
    plan: &ParallelPlan,
    step: usize,
    reference: &RankRecord,
    records: &[RankRecord],
    bounds: AllowedDistances,
) -> Option<Difference> {
    let (now, floor) = (&reference.steps[step], bounds.noise * norm_of_all(&reference.steps[step].gradients));
    let before = step.checked_sub(1).map_or(&reference.initial, |step| &reference.steps[step].weights);
    let off = |record: &RankRecord, name: &str| {
        let (parameter, saved) = (record.parameters.get(name)?, record.saved_name(name));
        // A gradient of rounding alone, such as that of a bias of attention's keys, becomes an update of any sign.
        if norm(now.gradients.get(saved)?) <= floor && bounds.update > 0.0 {
            return None;
        }
        let (after, before) = (piece(now.weights.get(saved)?, &parameter.placement)?, before.get(saved)?);
        let moved: Vec<f64> = after.iter().zip(piece(before, &parameter.placement)?).map(|(a, b)| a - b).collect();
        let own = record.steps[step].weights.get(name)?;
        let apart: Vec<f64> = own.iter().zip(&after).map(|(a, b)| a - b).collect();
        let rounding = bounds.rounding * norm(&after);
        Some(if norm(&apart) <= rounding { 0.0 } else { norm(&apart) / norm(&moved).max(f64::MIN_POSITIVE) })
    };
    let found = differing(records, bounds.update, &off)?;
    // Ranks with the same piece, of which one went another way.
    let value = |rank: usize| records.get(rank).and_then(|record| record.steps[step].weights.get(&found.name));
    let placement = |rank: usize| records.get(rank).and_then(|r| r.parameters.get(&found.name)).map(|p| &p.placement);
    let disagrees = |axis: &Axis| {
        let along = |rank: &usize| plan.group(*axis, *rank);
        let differs = |a: usize, b: usize| match (value(a), value(b)) {
            (Some(x), Some(y)) => placement(a) == placement(b) && is_above(relative(x, y, 0.0), bounds.value * 1e-2),
            _ => false,
        };
        found.ranks.iter().any(|rank| along(rank).into_iter().any(|other| differs(*rank, other)))
    };
    let axis = Axis::ALL.into_iter().find(disagrees);
    let cause = if axis.is_some() { Cause::NotSummed } else { Cause::UpdateDiffers };
    Some(found.difference(step, StepPart::Update, axis, cause))
}

/// The first buffer that is not that of one rank.
pub(super) fn buffer_difference(
    step: usize,
    reference: &RankRecord,
    records: &[RankRecord],
    bounds: AllowedDistances,
) -> Option<Difference> {
    let one = &reference.steps[step].buffers;
    for (name, whole) in one {
        let off = |record: &RankRecord| {
            let own = record.steps[step].buffers.get(name).filter(|own| own.len() == whole.len());
            own.map_or(0.0, |own| relative(own, whole, bounds.floor))
        };
        // Statistics follow weights, whose updates may be rounding that a rule enlarges.
        let bound = bounds.value.max(bounds.update);
        let wrong: Vec<&RankRecord> = records.iter().filter(|record| is_above(off(record), bound)).collect();
        if let Some(first) = wrong.first() {
            let ranks = wrong.iter().map(|record| record.rank).collect();
            let found = Differing { name: name.clone(), ranks, distance: off(first) };
            return Some(found.difference(step, StepPart::Buffer, None, Cause::BufferOfOneRank));
        }
    }
    None
}

/// The first parameter that only one of the two runs has, after tied copies are counted as one.
pub(super) fn missing_parameter(reference: &RankRecord, records: &[RankRecord]) -> Option<Difference> {
    let names = |record: &RankRecord| -> BTreeSet<String> {
        record.parameters.keys().map(|name| record.saved_name(name).to_string()).collect()
    };
    let (one, many) = (names(reference), records.iter().flat_map(names).collect::<BTreeSet<_>>());
    let name = one.symmetric_difference(&many).next()?.clone();
    let found = Differing { name, ranks: Vec::new(), distance: f64::INFINITY };
    Some(Difference { distance: None, ..found.difference(0, StepPart::InitialWeights, None, Cause::OtherNames) })
}

/// A parameter or buffer that differs on some ranks.
struct Differing {
    name: String,
    ranks: Vec<usize>,
    distance: f64,
}

impl Differing {
    fn difference(self, step: usize, stage: StepPart, axis: Option<Axis>, cause: Cause) -> Difference {
        let ((module, what), Differing { ranks, distance, .. }) = (parted(&self.name), self);
        let distance = Some(distance);
        Difference { step: step as u64, stage, module, what, ranks, axis, distance, cause }
    }
}

/// The first parameter, in the order of a rank's model, that is farther off than the bound; it has the largest distance.
fn differing(records: &[RankRecord], bound: f64, off: &impl Fn(&RankRecord, &str) -> Option<f64>) -> Option<Differing> {
    let mut first: Option<(usize, Differing)> = None;
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
                    let found = Differing { name: name.clone(), ranks: vec![record.rank], distance };
                    first = Some((parameter.order, found));
                }
            }
        }
    }
    first.map(|(_, found)| found)
}
