//! Comparison of the results of each step.

use distributed::plan::{Axis, ParallelPlan};
use numcore::{DType, placement::TensorPlacement};

use super::{
    Cause, Difference, StepPart,
    gradients::gradient_difference,
    record::{NamedValues, RankRecord},
    weights::{buffer_difference, initial_difference, missing_parameter, update_difference},
};

/// The allowed relative distances of the results of many ranks.
#[derive(Clone, Copy, Debug)]
pub(super) struct AllowedDistances {
    /// Of values and sums: the order of additions may differ.
    pub value: f64,
    /// Of the change of weights in an update: rules divide by small numbers.
    pub update: f64,
    /// Of an output of an op call, relative to its largest element.
    pub output: f64,
    /// The norm, relative to that of all gradients, to which distances of smaller gradients are relative.
    pub floor: f64,
    /// The norm, relative to that of all gradients, below which a gradient is rounding alone.
    pub noise: f64,
    /// The rounding of a weight, relative to the weights.
    pub rounding: f64,
}

impl AllowedDistances {
    /// The distances for the narrowest dtype of a model. The weights have the bits of one rank if `is_exact`.
    pub(super) fn of(reference: &RankRecord, is_exact: bool) -> Self {
        let allowed = |value, update, output, floor, noise, rounding| match is_exact {
            true => AllowedDistances { value, update: 0.0, output, floor, noise: 0.0, rounding: 0.0 },
            false => AllowedDistances { value, update, output, floor, noise, rounding },
        };
        match reference.narrowest {
            DType::F64 => allowed(1e-9, 1e-6, 1e-8, 1e-4, 1e-12, 1e-15),
            DType::F32 => allowed(1e-3, 3e-2, 1e-4, 1e-2, 1e-4, 5e-7),
            _ => allowed(5e-2, 3e-1, 5e-2, 1e-1, 1e-2, 8e-3),
        }
    }
}

/// The first difference in the results of a run, in the order in which a step computes them.
pub(super) fn first_difference(
    plan: &ParallelPlan,
    reference: &RankRecord,
    records: &[RankRecord],
    is_exact: bool,
) -> Option<Difference> {
    let bounds = AllowedDistances::of(reference, is_exact);
    let steps = || 0..reference.steps.len();
    let found = initial_difference(plan, reference, records, bounds).or_else(|| {
        steps().find_map(|step| {
            loss_difference(plan, step, reference, records, bounds)
                .or_else(|| gradient_difference(plan, step, reference, records, bounds))
                .or_else(|| norm_difference(step, reference, records, bounds))
                .or_else(|| update_difference(plan, step, reference, records, bounds))
                .or_else(|| buffer_difference(step, reference, records, bounds))
        })
    });
    found.or_else(|| missing_parameter(reference, records))
}

fn loss_difference(
    plan: &ParallelPlan,
    step: usize,
    reference: &RankRecord,
    records: &[RankRecord],
    bounds: AllowedDistances,
) -> Option<Difference> {
    let one = reference.steps[step].loss;
    let off = |loss: f64| relative(&[loss], &[one], bounds.floor);
    let differs = |record: &&RankRecord| is_above(off(record.steps[step].loss), bounds.value);
    let ranks: Vec<usize> = records.iter().filter(differs).map(|record| record.rank).collect();
    let loss = records.get(*ranks.first()?)?.steps[step].loss;
    let value = |rank: usize| records.get(rank).map_or(f64::NAN, |record| record.steps[step].loss);
    let disagrees = |axis: &Axis| (0..records.len()).any(|rank| value(plan.group(*axis, rank)[0]) != value(rank));
    let axis = Axis::ALL.into_iter().find(disagrees);
    // One rank of each share, on the stage that computes losses.
    let first =
        |record: &&RankRecord| [Axis::Tensor, Axis::Context].iter().all(|a| plan.coordinate(*a, record.rank) == 0);
    let means: Vec<f64> = records.iter().filter(first).filter_map(|record| record.steps[step].own_loss).collect();
    let mean = means.iter().sum::<f64>() / means.len().max(1) as f64;
    let is_mean = means.len() > 1 && !is_above(relative(&[loss], &[mean], bounds.floor), bounds.value.max(1e-12));
    Some(Difference {
        step: step as u64,
        stage: StepPart::Loss,
        module: String::new(),
        what: format!("{loss} in place of {one}"),
        ranks,
        axis,
        distance: Some(off(loss)),
        cause: match axis {
            Some(_) => Cause::NotSummed,
            None if is_mean => Cause::MeanOfMeans,
            None => Cause::LossDiffers,
        },
    })
}

fn norm_difference(
    step: usize,
    reference: &RankRecord,
    records: &[RankRecord],
    bounds: AllowedDistances,
) -> Option<Difference> {
    let one = reference.steps[step].norm?;
    let off = |record: &RankRecord| record.steps[step].norm.map_or(0.0, |norm| relative(&[norm], &[one], bounds.floor));
    let wrong: Vec<&RankRecord> = records.iter().filter(|record| is_above(off(record), bounds.value)).collect();
    let first = wrong.first()?;
    Some(Difference {
        step: step as u64,
        stage: StepPart::Norm,
        module: String::new(),
        what: format!("{} in place of {one}", first.steps[step].norm.unwrap_or(f64::NAN)),
        ranks: wrong.iter().map(|record| record.rank).collect(),
        axis: None,
        distance: Some(off(first)),
        cause: Cause::PartNorm,
    })
}

/// The distance of two vectors, relative to the second's norm, or to `floor` if that is larger. Equal infinities, and
/// elements that are both not a number, are equal.
pub(super) fn relative(a: &[f64], b: &[f64], floor: f64) -> f64 {
    if a.len() != b.len() {
        return f64::INFINITY;
    }
    let differs = |(a, b): &(&f64, &f64)| a != b && !(a.is_nan() && b.is_nan());
    let off: Vec<f64> = a.iter().zip(b).filter(differs).map(|(a, b)| a - b).collect();
    match norm(&off) {
        0.0 => 0.0,
        off if off.is_finite() => off / norm(b).max(floor).max(f64::MIN_POSITIVE),
        _ => f64::INFINITY,
    }
}

/// Tells whether a distance is above a bound, or not a number.
pub(super) fn is_above(distance: f64, bound: f64) -> bool {
    distance.is_nan() || distance > bound
}

pub(super) fn norm(values: &[f64]) -> f64 {
    values.iter().map(|value| value * value).sum::<f64>().sqrt()
}

/// The norm of all finite values.
pub(super) fn norm_of_all(values: &NamedValues) -> f64 {
    norm(&values.values().map(|values| norm(values)).filter(|norm| norm.is_finite()).collect::<Vec<_>>())
}

/// The elements of a piece of a whole tensor.
pub(super) fn piece(whole: &[f64], placement: &TensorPlacement) -> Option<Vec<f64>> {
    if placement.logical().numel() != whole.len() {
        return None;
    }
    let runs = placement.runs(0..placement.local().numel());
    Some(runs.flat_map(|run| whole[run.logical..run.logical + run.len].iter().copied()).collect())
}

/// The module and the parameter of a full name.
pub(super) fn parted(name: &str) -> (String, String) {
    name.rsplit_once('.').map_or_else(|| (String::new(), name.into()), |(module, own)| (module.into(), own.into()))
}
