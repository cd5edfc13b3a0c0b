//! Comparison of the results of each step.

use distributed::plan::{Axis, ParallelPlan};
use numcore::{DType, placement::TensorPlacement};

use super::{
    Cause, Difference, StepPart,
    record::{NamedValues, RankRecord},
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

    /// Of an output in a step: weights have the distances of the updates before it.
    pub(super) fn output_at(&self, step: usize) -> f64 {
        if step == 0 { self.output } else { self.output.max(self.update) }
    }
}

/// The records of one rank and of the ranks of a plan, and the distances that are allowed between them.
pub(super) struct Comparison<'a> {
    pub plan: &'a ParallelPlan,
    pub reference: &'a RankRecord,
    pub records: &'a [RankRecord],
    pub allowed: AllowedDistances,
}

impl Comparison<'_> {
    /// The first difference in the results, in the order in which a step computes them.
    pub(super) fn first_difference(&self) -> Option<Difference> {
        let of_step = |step| {
            self.loss(step)
                .or_else(|| self.gradient(step))
                .or_else(|| self.norm(step))
                .or_else(|| self.update(step))
                .or_else(|| self.buffer(step))
        };
        let steps = 0..self.reference.steps.len();
        self.initial_weights().or_else(|| steps.into_iter().find_map(of_step)).or_else(|| self.missing_parameter())
    }

    fn loss(&self, step: usize) -> Option<Difference> {
        let (one, AllowedDistances { value: bound, floor, .. }) = (self.reference.steps[step].loss, self.allowed);
        let losses: Vec<f64> = self.records.iter().map(|record| record.steps[step].loss).collect();
        let off = |loss: f64| relative(&[loss], &[one], floor);
        let ranks: Vec<usize> = (0..losses.len()).filter(|&rank| is_above(off(losses[rank]), bound)).collect();
        let loss = losses[*ranks.first()?];
        let disagrees =
            |axis: &Axis| (0..losses.len()).any(|rank| losses[self.plan.group(*axis, rank)[0]] != losses[rank]);
        let axis = Axis::ALL.into_iter().find(disagrees);
        // One rank of each share, on the stage that computes losses.
        let first =
            |rank: usize| [Axis::Tensor, Axis::Context].iter().all(|axis| self.plan.coordinate(*axis, rank) == 0);
        let shares = self.records.iter().filter(|record| first(record.rank));
        let means: Vec<f64> = shares.filter_map(|record| record.steps[step].own_loss).collect();
        let mean = means.iter().sum::<f64>() / means.len().max(1) as f64;
        // Means of shares weigh as much as others, whatever their numbers of tokens.
        let weights = [&self.records[ranks[0]], self.reference].map(|record| record.steps[step].weight);
        let is_mean = means.len() > 1
            && is_above(relative(&weights[..1], &weights[1..], 0.0), 1e-9)
            && !is_above(relative(&[loss], &[mean], floor), bound);
        let cause = match axis {
            Some(_) => Cause::NotSummed,
            None if is_mean => Cause::MeanOfMeans,
            None => Cause::LossDiffers,
        };
        let (what, distance) = (format!("{loss} in place of {one}"), Some(off(loss)));
        Some(Difference { what, ranks, axis, distance, ..Difference::of(step, StepPart::Loss, "", cause) })
    }

    fn norm(&self, step: usize) -> Option<Difference> {
        let one = self.reference.steps[step].norm?;
        let off = |norm: f64| relative(&[norm], &[one], self.allowed.floor);
        let norms = self.records.iter().filter_map(|record| Some((record.rank, record.steps[step].norm?)));
        let wrong: Vec<(usize, f64)> = norms.filter(|(_, norm)| is_above(off(*norm), self.allowed.value)).collect();
        let &(_, norm) = wrong.first()?;
        let (what, distance) = (format!("{norm} in place of {one}"), Some(off(norm)));
        let ranks = wrong.into_iter().map(|(rank, _)| rank).collect();
        Some(Difference { what, ranks, distance, ..Difference::of(step, StepPart::Norm, "", Cause::PartNorm) })
    }
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
