//! Comparison of gradients, which are summed here over the ranks that have parts of them.

use std::collections::BTreeMap;

use distributed::plan::{Axis, ParallelPlan};
use numcore::placement::TensorPlacement;

use super::{
    Cause, Difference, StepPart,
    compare::{AllowedDistances, Comparison, is_above, norm, norm_of_all, piece, relative},
    observed::add_to,
    record::{NamedValues, RankRecord},
};

/// The gradient of a piece of a parameter, summed over the ranks that read other examples.
struct PieceGradient<'a> {
    placement: &'a TensorPlacement,
    /// The sums of each rank along tensor that has the piece.
    along_tensor: BTreeMap<usize, Vec<f64>>,
    is_partial: bool,
    ranks: Vec<usize>,
}

impl Comparison<'_> {
    /// The gradient that differs, in the parameter nearest to the loss.
    pub(super) fn gradient(&self, step: usize) -> Option<Difference> {
        let Comparison { plan, reference, records, allowed } = *self;
        let skipped = |record: &RankRecord| !record.steps[step].stepped;
        if skipped(reference) && records.iter().all(skipped) {
            return None;
        }
        let one = under_saved_names(reference, step);
        let (floor, many) = (allowed.floor * norm_of_all(&one), summed(plan, step, records));
        // Parameters that have a gradient on the plan's ranks alone.
        let known = reference.parameters.iter().filter(|(_, parameter)| parameter.trained);
        let none: NamedValues = known
            .map(|(name, parameter)| (reference.saved_name(name), parameter.placement.logical().numel()))
            .filter(|(name, _)| !one.contains_key(*name) && many.contains_key(name))
            .map(|(name, len)| (name.into(), vec![0.0; len]))
            .collect();
        let of = |name: &str, cause| Difference::of(step, StepPart::Gradient, name, cause);
        let mut wrong: Vec<Difference> = Vec::new();
        // The first that is wrong in the order of the backward pass is the origin of those that follow.
        let ready = reference.steps[step].ready.iter().map(|name| reference.saved_name(name));
        for (name, whole) in ready.filter_map(|name| one.get_key_value(name)).chain(&none) {
            let parts = many.get(name.as_str());
            if parts.is_none() && norm(whole) > floor {
                wrong.push(Difference { distance: Some(1.0), ..of(name, Cause::GradientDiffers) });
            }
            for part in parts.into_iter().flatten() {
                let Some(own) = piece(whole, part.placement) else { continue };
                let Some((axis, distance, cause)) = part.compared(plan, &own, floor, allowed) else { continue };
                let is_untied = is_untied(whole, name, &one, &many, floor, allowed);
                let cause = if is_untied { Cause::MissingTie } else { cause };
                let (ranks, distance) = (part.ranks.clone(), Some(distance));
                wrong.push(Difference { ranks, axis, distance, ..of(name, cause) });
            }
        }
        let told = wrong.iter().position(|found| found.cause != Cause::GradientDiffers);
        (!wrong.is_empty()).then(|| wrong.swap_remove(told.unwrap_or(0)))
    }
}

impl PieceGradient<'_> {
    /// The axis, the distance and the cause of a difference from the gradient of one rank.
    fn compared(
        &self,
        plan: &ParallelPlan,
        one: &[f64],
        floor: f64,
        allowed: AllowedDistances,
    ) -> Option<(Option<Axis>, f64, Cause)> {
        let sums = || self.along_tensor.values();
        let total = total(sums());
        let off = |sum: &[f64]| relative(sum, one, floor);
        let distance = match self.is_partial {
            true => off(&total),
            false => sums().map(|sum| off(sum)).fold(0.0, f64::max),
        };
        if !is_above(distance, allowed.value) {
            return None;
        }
        let loose = 10.0 * allowed.value;
        if !self.is_partial && self.along_tensor.len() > 1 && off(&total) <= loose {
            return Some((Some(Axis::Tensor), distance, Cause::PartialGradient));
        }
        let sum = if self.is_partial { &total } else { sums().find(|sum| is_above(off(sum), allowed.value))? };
        let factor = sum.iter().zip(one).map(|(a, b)| a * b).sum::<f64>() / norm(one).powi(2).max(f64::MIN_POSITIVE);
        let scaled: Vec<f64> = one.iter().map(|value| value * factor).collect();
        if norm(one) > floor && factor != 0.0 && relative(sum, &scaled, floor) <= loose {
            let is_size = |axis: &Axis| {
                let size = plan.size(*axis) as f64;
                size > 1.0 && [size, 1.0 / size].iter().any(|size| (factor / size - 1.0).abs() < 1e-3)
            };
            return Some((Axis::ALL.into_iter().find(is_size), distance, Cause::Scaled(factor)));
        }
        Some((None, distance, Cause::GradientDiffers))
    }
}

/// Tells whether a gradient is that of one rank if that of another parameter is added, which one rank does not have.
fn is_untied(
    whole: &[f64],
    name: &str,
    one: &NamedValues,
    many: &BTreeMap<&str, Vec<PieceGradient<'_>>>,
    floor: f64,
    allowed: AllowedDistances,
) -> bool {
    let sum_of = |parts: &[PieceGradient<'_>]| match parts {
        [part] if part.placement.is_whole() => part.along_tensor.values().next().cloned(),
        _ => None,
    };
    let Some(own) = many.get(name).and_then(|parts| sum_of(parts)) else { return false };
    let others = many.iter().filter(|(other, _)| !one.contains_key(**other));
    let mut sums = others.filter_map(|(_, parts)| sum_of(parts)).filter(|sum| sum.len() == own.len());
    sums.any(|sum| relative(&total([&own, &sum].into_iter()), whole, floor) <= 10.0 * allowed.value)
}

fn total<'a>(mut sums: impl Iterator<Item = &'a Vec<f64>>) -> Vec<f64> {
    let first = sums.next().cloned().unwrap_or_default();
    sums.fold(first, |mut all, sum| {
        all.iter_mut().zip(sum).for_each(|(a, b)| *a += b);
        all
    })
}

/// The gradients of one rank, those of copies of a parameter summed.
fn under_saved_names(record: &RankRecord, step: usize) -> NamedValues {
    let mut all = NamedValues::new();
    for (name, gradient) in &record.steps[step].gradients {
        add_to(&mut all, record.saved_name(name).into(), gradient);
    }
    all
}

/// The gradients of many ranks: of each parameter by name, its pieces.
fn summed<'a>(
    plan: &ParallelPlan,
    step: usize,
    records: &'a [RankRecord],
) -> BTreeMap<&'a str, Vec<PieceGradient<'a>>> {
    let mut all: BTreeMap<&str, Vec<PieceGradient<'_>>> = BTreeMap::new();
    for record in records {
        let tensor = plan.coordinate(Axis::Tensor, record.rank);
        let gradients = &record.steps[step].gradients;
        for (name, parameter) in record.parameters.iter().filter(|(_, parameter)| parameter.trained) {
            let parts = all.entry(record.saved_name(name)).or_default();
            let place = parts.iter().position(|part| *part.placement == parameter.placement);
            let place = place.unwrap_or_else(|| {
                parts.push(PieceGradient {
                    placement: &parameter.placement,
                    along_tensor: BTreeMap::new(),
                    is_partial: parameter.is_partial,
                    ranks: Vec::new(),
                });
                parts.len() - 1
            });
            let part = &mut parts[place];
            part.ranks.push(record.rank);
            // A rank without a gradient has none of the sum.
            match gradients.get(name) {
                Some(gradient) => add_to(&mut part.along_tensor, tensor, gradient),
                None => add_to(&mut part.along_tensor, tensor, &vec![0.0; parameter.placement.local().numel()]),
            }
        }
    }
    all
}
