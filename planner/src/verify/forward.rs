//! Search of the first op call whose output differs.

use std::collections::{BTreeMap, BTreeSet};

use distributed::plan::{Axis, ParallelPlan};

use super::{
    Cause, Difference, StepPart,
    call::{CallOutput, CallRecord, aligned},
    compare::Comparison,
    record::RankRecord,
    rows::RowSearch,
};

/// Axes of which each rank may have a part of a sum.
const SUMMED: [&[Axis]; 4] =
    [&[Axis::Tensor], &[Axis::Context], &[Axis::Data, Axis::Shard], &[Axis::Data, Axis::Shard, Axis::Context]];

/// A call of one rank, and the calls of the plan's ranks that do the same.
struct Matched<'a> {
    /// The call for each share of the examples.
    reference: Vec<&'a CallRecord>,
    /// The calls by rank.
    ranks: BTreeMap<usize, &'a CallRecord>,
    /// The module of the next call that reads a parameter, of which this call may be a part.
    next: &'a str,
}

impl Comparison<'_> {
    /// The first op call of a forward pass whose outputs the plan's ranks do not have. None if there is none, or calls
    /// were not recorded, as in a pipeline.
    pub(super) fn first_call(&self, step: usize) -> Option<Difference> {
        let Comparison { reference, records, .. } = *self;
        reference.calls.iter().enumerate().find_map(|(micro, shares)| {
            let first = shares.first()?;
            let next = |i: usize| first[i..].iter().find(|call| !call.parameters.is_empty());
            let mut calls: Vec<Matched<'_>> = (0..first.len())
                .map(|i| Matched {
                    reference: vec![&first[i]],
                    ranks: BTreeMap::new(),
                    next: next(i).map_or("", |call| &call.module),
                })
                .collect();
            for share in &shares[1..] {
                for (i, j) in aligned(first, share) {
                    calls[i].reference.push(&share[j]);
                }
            }
            for record in records {
                let Some(pass) = record.calls.get(micro).and_then(|shares| shares.first()) else { continue };
                for (i, j) in aligned(first, pass) {
                    calls[i].ranks.insert(record.rank, &pass[j]);
                }
            }
            // A call of some shares alone has rows that the others lack.
            calls.retain(|call| call.reference.len() == shares.len());
            calls.iter().find_map(|call| call.difference(self, step))
        })
    }
}

/// Removes the calls of experts that are shared out among ranks: their rows come from other ranks, and one rank has
/// calls for more experts. The call before them takes the rows of the first expert, which is another on each rank.
pub(super) fn remove_experts(reference: &mut RankRecord, records: &mut [RankRecord]) {
    let of = |record: &RankRecord| -> Vec<String> {
        let names = record.parameters.iter().filter(|(_, parameter)| parameter.is_expert);
        names.filter_map(|(name, _)| Some(name.rsplit_once('.')?.0.to_string())).collect()
    };
    let modules: BTreeSet<String> = records.iter().flat_map(of).collect();
    let passes = records.iter_mut().chain([reference]).flat_map(|record| record.calls.iter_mut().flatten());
    for calls in passes {
        let of_experts: Vec<bool> = calls.iter().map(|call| modules.contains(&call.module)).collect();
        let mut number = 0;
        calls.retain(|_| {
            number += 1;
            !of_experts[number - 1] && !of_experts.get(number).copied().unwrap_or(false)
        });
    }
}

impl Matched<'_> {
    fn difference(&self, of: &Comparison<'_>, step: usize) -> Option<Difference> {
        let Comparison { plan, reference, allowed, .. } = *of;
        let call = self.reference.first()?;
        let (ranks, cause) = (0..call.outputs.len()).find_map(|k| {
            let outputs: Vec<&CallOutput> = self.reference.iter().map(|call| &call.outputs[k]).collect();
            let rows = RowSearch::of(&outputs, allowed.output)?;
            let own: BTreeMap<usize, &CallOutput> = self
                .ranks
                .iter()
                .map(|(&rank, call)| (rank, &call.outputs[k]))
                .filter(|(_, o)| rows.may_hold(o))
                .collect();
            let (missing, twice) = unlike(plan, &rows, &own);
            if !missing.is_empty() {
                let cause = self.cause(&missing, &rows, reference, &own);
                return Some((missing, cause));
            }
            (!twice.is_empty()).then_some((twice, Cause::DataReadTwice))
        })?;
        let sizes: Vec<Axis> = Axis::ALL.into_iter().filter(|axis| plan.size(*axis) > 1).collect();
        let axis = if let [axis] = sizes[..] { Some(axis) } else { None };
        let module = if cause == Cause::BatchStatistics { self.next } else { &call.module };
        let (module, what) = (module.into(), call.what());
        Some(Difference { module, what, ranks, axis, ..Difference::of(step, StepPart::Forward, "", cause) })
    }

    fn cause(
        &self,
        missing: &[usize],
        rows: &RowSearch<'_>,
        reference: &RankRecord,
        own: &BTreeMap<usize, &CallOutput>,
    ) -> Cause {
        let Some(call) = self.reference.first() else { return Cause::LayerCut };
        let is_piece = missing.iter().any(|rank| own.get(rank).is_some_and(|output| output.width < rows.width()));
        let has_statistics = || {
            let inside = |name: &String| name.strip_prefix(self.next).is_some_and(|rest| rest.starts_with('.'));
            reference.steps.first().is_some_and(|step| step.buffers.keys().any(inside))
        };
        match call.op {
            _ if call.draws && call.parameters.is_empty() => Cause::RandomValues,
            op if op.contains("batch_norm") => Cause::BatchStatistics,
            _ if has_statistics() => Cause::BatchStatistics,
            op if op.contains("norm") && is_piece => Cause::PieceStatistics,
            _ => Cause::LayerCut,
        }
    }
}

/// The ranks with an output of which rows are not found, and those with rows that another rank has too while some row
/// has none.
fn unlike(plan: &ParallelPlan, rows: &RowSearch<'_>, own: &BTreeMap<usize, &CallOutput>) -> (Vec<usize>, Vec<usize>) {
    // Ranks along tensor have the same rows, or pieces of them.
    let mut taken: BTreeMap<usize, BTreeSet<_>> = BTreeMap::new();
    let (mut missing, mut found, mut twice) = (Vec::new(), BTreeMap::<usize, Vec<_>>::new(), Vec::new());
    for (&rank, output) in own {
        let tensor = plan.coordinate(Axis::Tensor, rank);
        match rows.find(output, taken.entry(tensor).or_default()) {
            Some(part) => {
                let of = found.entry(tensor).or_default();
                of.extend(part.rows.iter().map(|row| (part.columns, *row, rank)));
            }
            None if SUMMED.iter().any(|axes| is_part(plan, rows, own, rank, axes)) => {}
            None => missing.push(rank),
        }
    }
    for places in found.values() {
        let distinct: BTreeSet<_> = places.iter().map(|(columns, row, _)| (*columns, *row)).collect();
        if places.len() == rows.len() && distinct.len() < places.len() {
            let mut ranks: Vec<usize> = places.iter().map(|(.., rank)| *rank).collect();
            ranks.dedup();
            twice = ranks;
        }
    }
    (missing, twice)
}

/// Tells whether a rank's output is a part of a sum over the ranks along some axes.
fn is_part(
    plan: &ParallelPlan,
    rows: &RowSearch<'_>,
    own: &BTreeMap<usize, &CallOutput>,
    rank: usize,
    axes: &[Axis],
) -> bool {
    let others: Vec<Axis> = Axis::ALL.into_iter().filter(|axis| !axes.contains(axis)).collect();
    let alike = |other: &usize| others.iter().all(|a| plan.coordinate(*a, *other) == plan.coordinate(*a, rank));
    let group: Vec<&CallOutput> = own.iter().filter(|(other, _)| alike(other)).map(|(_, output)| *output).collect();
    let Some((first, rest)) = group.split_first().filter(|(_, rest)| !rest.is_empty()) else { return false };
    let sum = first.plus(rest.iter().copied());
    sum.is_some_and(|sum| rows.find(&sum, &mut BTreeSet::new()).is_some())
}
