//! Search of the first op call whose output differs.

use std::collections::{BTreeMap, BTreeSet};

use distributed::plan::{Axis, ParallelPlan};

use super::{
    Cause, Difference, StepPart,
    call::{CallOutput, CallRecord, aligned},
    compare::Comparison,
    passes::PassPlace,
    record::RankRecord,
    rows::{ColumnPiece, RowSearch},
};

/// Axes of which each rank may have a part of a sum.
const SUMMED: [&[Axis]; 4] =
    [&[Axis::Tensor], &[Axis::Context], &[Axis::Data, Axis::Shard], &[Axis::Data, Axis::Shard, Axis::Context]];

/// A call of one rank, and the calls of the plan's ranks that do the same.
struct Matched<'a> {
    /// The call for each share of the examples.
    reference: Vec<&'a CallRecord>,
    /// The calls by rank, one for each of its passes.
    ranks: BTreeMap<usize, Vec<&'a CallRecord>>,
    /// The last call of the stage before a rank's, with its rank, where one rank does nothing like it.
    handed: BTreeMap<usize, (usize, &'a CallRecord)>,
    /// The module of the next call that reads a parameter, of which this call may be a part.
    next: &'a str,
}

impl Comparison<'_> {
    /// The first op call of a forward pass whose outputs the plan's ranks do not have.
    pub(super) fn first_call(&self, step: usize) -> Option<Difference> {
        let mut passes = self.reference.passes.values().map(|pass| pass.iter().collect::<Vec<_>>());
        let first = passes.next()?;
        let next = |i: usize| first[i..].iter().find(|call| !call.parameters.is_empty());
        let mut calls: Vec<Matched<'_>> = (0..first.len())
            .map(|i| Matched {
                reference: vec![first[i]],
                ranks: BTreeMap::new(),
                handed: BTreeMap::new(),
                next: next(i).map_or("", |call| &call.module),
            })
            .collect();
        for pass in passes {
            for (i, j) in aligned(&first, &pass) {
                calls[i].reference.push(pass[j]);
            }
        }
        for (ranks, pass) in self.whole_passes() {
            let mut unpaired = 0;
            for (i, j) in aligned(&first, &pass) {
                calls[i].ranks.entry(ranks[j]).or_default().push(pass[j]);
                if let Some(k) = (unpaired..j).rev().find(|&k| ranks[k] != ranks[j]) {
                    calls[i].handed.insert(ranks[j], (ranks[k], pass[k]));
                }
                unpaired = j + 1;
            }
        }
        // A call of some passes alone has rows that the others lack.
        calls.retain(|call| call.reference.len() == self.reference.passes.len());
        let differs = |i: usize| {
            let found = calls[i].difference(self, step)?;
            Some(calls[i].handed_over(&found, i.checked_sub(1).map(|before| &calls[before]), self).unwrap_or(found))
        };
        (0..calls.len()).find_map(differs)
    }

    /// The passes of the plan's ranks through the whole model, with the rank of each call: those of a pipeline's stages
    /// as one.
    fn whole_passes(&self) -> impl Iterator<Item = (Vec<usize>, Vec<&CallRecord>)> {
        let mut by_stage = BTreeMap::new();
        for record in self.records {
            let first = self.plan.group(Axis::Pipe, record.rank)[0];
            by_stage.extend(record.passes.iter().map(|(place, calls)| ((first, *place), (record.rank, calls))));
        }
        let mut whole = BTreeMap::<_, (Vec<usize>, Vec<&CallRecord>)>::new();
        for ((first, PassPlace { input, micro_batch, .. }), (rank, calls)) in by_stage {
            let (ranks, all) = whole.entry((first, input, micro_batch)).or_default();
            ranks.extend(calls.iter().map(|_| rank));
            all.extend(calls);
        }
        whole.into_values()
    }
}

/// Joins the calls of experts that are shared out among ranks. One rank has a call for each of them, in an order of its
/// own, with rows of many ranks. Calls that take the rows of an expert are removed, as each rank has others.
pub(super) fn join_experts(reference: &mut RankRecord, records: &mut [RankRecord]) {
    let of = |record: &RankRecord| -> Vec<String> {
        let names = record.parameters.iter().filter(|(_, parameter)| parameter.is_expert);
        names.filter_map(|(name, _)| Some(name.rsplit_once('.')?.0.to_string())).collect()
    };
    let modules: BTreeSet<String> = records.iter().flat_map(of).collect();
    for calls in records.iter_mut().chain([reference]).flat_map(|record| record.passes.values_mut()) {
        let is_expert: Vec<bool> = calls.iter().map(|call| modules.contains(&call.module)).collect();
        let begins = |k: &usize| is_expert.get(k + 1) == Some(&true) && !is_expert[*k];
        let takes_rows = |k: &usize| begins(k) && calls[*k].parameters.is_empty();
        let rows: Vec<usize> = (0..calls.len()).filter(takes_rows).collect();
        let of_rows: BTreeSet<&'static str> = rows.iter().map(|k| calls[*k].op).collect();
        let mut joined: Vec<(CallRecord, Vec<CallRecord>)> = Vec::with_capacity(calls.len());
        for (k, call) in calls.drain(..).enumerate() {
            let takes_rows = is_expert[k] && call.parameters.is_empty() && of_rows.contains(call.op);
            if takes_rows || rows.contains(&k) {
                continue;
            }
            let is_of = |(other, _): &&mut (CallRecord, _)| other.module == call.module;
            let mut before = joined.iter_mut().rev().take_while(is_of).filter(|_| is_expert[k]);
            match before.find(|(other, _)| other.is_like(&call)) {
                Some((_, others)) => others.push(call),
                None => joined.push((call, Vec::new())),
            }
        }
        let join = |(mut first, others): (CallRecord, Vec<CallRecord>)| {
            first.join(&others);
            first
        };
        *calls = joined.into_iter().map(join).collect();
    }
}

impl Matched<'_> {
    fn difference(&self, of: &Comparison<'_>, step: usize) -> Option<Difference> {
        let Comparison { plan, reference, allowed, .. } = *of;
        let call = self.reference.first()?;
        let (ranks, cause) = (0..call.outputs.len()).find_map(|k| {
            let outputs: Vec<&CallOutput> = self.reference.iter().map(|call| &call.outputs[k]).collect();
            let rows = RowSearch::of(&outputs, allowed.output_at(step))?;
            let own = self.outputs(k, &rows, CallOutput::joined);
            let (missing, twice) = unlike(plan, &rows, &own);
            // Sums over the examples of a pass depend on how examples are cut into passes; sums over all passes do not.
            if !missing.is_empty() && self.is_equal_in_sum(of, step, k, &outputs) {
                return None;
            }
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

    /// The difference of calls that a stage before makes and one rank does not. None if their values are those of the
    /// call `before` this one: then this one differs by itself.
    fn handed_over(&self, found: &Difference, before: Option<&Matched<'_>>, of: &Comparison<'_>) -> Option<Difference> {
        let given: Vec<_> = found.ranks.iter().map(|rank| self.handed.get(rank)).collect::<Option<_>>()?;
        let (_, call) = given.first()?;
        let outputs: Vec<&CallOutput> = before?.reference.iter().filter_map(|call| call.outputs.first()).collect();
        let rows = RowSearch::of(&outputs, of.allowed.output_at(found.step as usize))?;
        let is_like = |output: &CallOutput| rows.find(output, &mut BTreeSet::new()).is_some();
        if given.iter().any(|(_, call)| call.outputs.first().is_some_and(is_like)) {
            return None;
        }
        let ranks: BTreeSet<usize> = given.iter().map(|(rank, _)| *rank).collect();
        let (module, what, ranks) = (call.module.clone(), call.what(), ranks.into_iter().collect());
        Some(Difference { module, what, ranks, ..found.clone() })
    }

    /// An output of each rank that `rows` may hold, made of those of its passes.
    fn outputs(
        &self,
        k: usize,
        rows: &RowSearch<'_>,
        of_passes: fn(&[&CallOutput]) -> Option<CallOutput>,
    ) -> BTreeMap<usize, CallOutput> {
        let output = |(&rank, calls): (&usize, &Vec<&CallRecord>)| {
            let passes: Vec<&CallOutput> = calls.iter().map(|call| &call.outputs[k]).collect();
            Some((rank, of_passes(&passes).filter(|output| rows.may_hold(output))?))
        };
        self.ranks.iter().filter_map(output).collect()
    }

    /// Tells whether the ranks' sums of an output over all passes are those of one rank.
    fn is_equal_in_sum(&self, of: &Comparison<'_>, step: usize, k: usize, outputs: &[&CallOutput]) -> bool {
        let Some(sum) = CallOutput::summed(outputs) else { return false };
        let Some(rows) = RowSearch::of(&[&sum], of.allowed.output_at(step)) else { return false };
        let own = self.outputs(k, &rows, CallOutput::summed);
        own.len() == self.ranks.len() && unlike(of.plan, &rows, &own).0.is_empty()
    }

    fn cause(
        &self,
        missing: &[usize],
        rows: &RowSearch<'_>,
        reference: &RankRecord,
        own: &BTreeMap<usize, CallOutput>,
    ) -> Cause {
        let Some(call) = self.reference.first() else { return Cause::LayerCut };
        let is_piece = missing.iter().any(|rank| own.get(rank).is_some_and(|output| output.width < rows.width()));
        let has_statistics = || {
            let inside = |name: &String| name.strip_prefix(self.next).is_some_and(|rest| rest.starts_with('.'));
            reference.buffers.iter().any(inside)
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

/// The rows of ranks that together have those of one rank.
#[derive(Default)]
struct Shares {
    ranks: Vec<usize>,
    places: BTreeSet<(ColumnPiece, usize)>,
    count: usize,
    /// True if a rank has a row more often than one rank does, as the look-up in a piece of a table may: no share.
    repeats: bool,
}

/// The ranks with an output of which rows are not found, and those with rows that another rank has too while some row
/// has none.
fn unlike(plan: &ParallelPlan, rows: &RowSearch<'_>, own: &BTreeMap<usize, CallOutput>) -> (Vec<usize>, Vec<usize>) {
    // Ranks along tensor have the same rows, or pieces of them.
    let mut taken: BTreeMap<usize, BTreeSet<_>> = BTreeMap::new();
    let (mut missing, mut shares) = (Vec::new(), BTreeMap::<usize, Shares>::new());
    for (&rank, output) in own {
        let tensor = plan.coordinate(Axis::Tensor, rank);
        match rows.find(output, taken.entry(tensor).or_default()) {
            Some(part) => {
                let Shares { ranks, places, count, repeats } = shares.entry(tensor).or_default();
                let own: BTreeSet<_> = part.rows.iter().map(|row| (part.columns, *row)).collect();
                *repeats |= own.len() < part.rows.len();
                *count += part.rows.len();
                places.extend(own);
                ranks.push(rank);
            }
            None if SUMMED.iter().any(|axes| is_part(plan, rows, own, rank, axes)) => {}
            None => missing.push(rank),
        }
    }
    let is_twice = |of: &Shares| of.count == rows.len() && of.places.len() < of.count && !of.repeats;
    let twice = shares.into_values().filter(is_twice).map(|of| of.ranks).next_back().unwrap_or_default();
    (missing, twice)
}

/// Tells whether a rank's output is a part of a sum over the ranks along some axes.
fn is_part(
    plan: &ParallelPlan,
    rows: &RowSearch<'_>,
    own: &BTreeMap<usize, CallOutput>,
    rank: usize,
    axes: &[Axis],
) -> bool {
    let others: Vec<Axis> = Axis::ALL.into_iter().filter(|axis| !axes.contains(axis)).collect();
    let alike = |other: &usize| others.iter().all(|a| plan.coordinate(*a, *other) == plan.coordinate(*a, rank));
    let group: Vec<&CallOutput> = own.iter().filter(|(other, _)| alike(other)).map(|(_, output)| output).collect();
    let sum = if group.len() > 1 { CallOutput::summed(&group) } else { None };
    sum.is_some_and(|sum| rows.find(&sum, &mut BTreeSet::new()).is_some())
}
