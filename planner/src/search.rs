//! The search for the best plan.

use std::collections::BTreeMap;

use distributed::{mesh::Mesh, pipeline::ScheduleKind};
use numcore::{Error, NullRuntime, Result};

use crate::{Estimate, Machine, ModelCosts, OptimizerCosts, PlannedModel, Recompute, SimulatedStep, TrainingPlan};

/// A search over all plans of a number of ranks, for one global batch.
#[derive(Clone, Debug)]
pub struct PlanSearch {
    /// The number of ranks.
    pub ranks: usize,
    /// The number of sequences in a step.
    pub global_batch: usize,
    /// The largest micro-batch.
    pub most_micro_batch: usize,
    /// The largest number of pieces of a layer. By default the ranks of a node, since layers exchange most.
    pub most_tensor: Option<usize>,
    /// The largest number of parts of a sequence; 1 for models that cannot be cut so.
    pub most_context: usize,
    /// The largest number of ranks that have all experts together; 1 without experts.
    pub most_expert: usize,
    /// The largest number of stages on a pipeline rank.
    pub most_stages_per_rank: usize,
    /// True if gradients of half-precision parameters are added up in `f32`.
    pub main_gradients: bool,
    /// The number of plans to return.
    pub keep: usize,
}

/// The most stages on a rank that are tried: more than models have layers.
const MOST_STAGES: usize = 1 << 10;

/// A plan with its costs.
#[derive(Clone, Debug)]
pub struct FoundPlan {
    /// The plan.
    pub plan: TrainingPlan,
    /// The estimate, of which passes and memory were simulated.
    pub estimate: Estimate,
}

/// The result of a search.
#[derive(Clone, Debug, Default)]
pub struct FoundPlans {
    /// The best plans, the fastest first; a search finds at least one.
    pub best: Vec<FoundPlan>,
    /// The number of plans that were estimated.
    pub estimated: usize,
    /// The number of those that need more memory than there is.
    pub too_large: usize,
    /// The first error of each cut of the model that is impossible.
    pub refused: Vec<String>,
}

/// The part of a plan that a measurement depends on: pieces along tensor, context and expert, the micro-batch, and what
/// is recomputed.
type Cut = (usize, usize, usize, usize, Recompute);

impl PlanSearch {
    /// A search with micro-batches of up to 8 sequences, and no context and expert axes. Ranks have up to 4 stages, and
    /// 10 plans are returned.
    pub fn new(ranks: usize, global_batch: usize) -> Self {
        PlanSearch {
            ranks,
            global_batch,
            most_micro_batch: 8,
            most_tensor: None,
            most_context: 1,
            most_expert: 1,
            most_stages_per_rank: 4,
            main_gradients: false,
            keep: 10,
        }
    }

    /// Estimates all plans that fit, and simulates the best. `make` makes the model as for [`ModelCosts::measure`], for
    /// the pieces and the micro-batch of the plan that it is given. A model that it cannot make is left out.
    ///
    /// # Errors
    /// Fails if no plan fits, and says why.
    pub fn run(
        &self,
        machine: &Machine,
        optimizer: &OptimizerCosts,
        make: impl Fn(&TrainingPlan, &Mesh<NullRuntime>) -> Result<PlannedModel>,
    ) -> Result<FoundPlans> {
        let mut found = FoundPlans::default();
        let mut candidates: Vec<FoundPlan> = Vec::new();
        let mut smallest: Option<(u64, TrainingPlan)> = None;
        let mut fits = |found: &mut FoundPlans, estimate: &Estimate, plan: &TrainingPlan| {
            let bytes = estimate.memory.total();
            let fits = bytes as f64 <= machine.memory;
            if !fits {
                found.too_large += 1;
                if smallest.as_ref().is_none_or(|(least, _)| bytes < *least) {
                    smallest = Some((bytes, plan.clone()));
                }
            }
            fits
        };
        for (cut, plans) in self.by_cut(machine)? {
            let Some(first) = plans.first() else { continue };
            let costs = match ModelCosts::measure(first, machine.recomputes, |mesh| make(first, mesh)) {
                Ok(costs) => costs,
                Err(error) => {
                    let (tensor, context, expert, ..) = cut;
                    found.refused.push(format!("tensor {tensor}, context {context}, expert {expert}: {error}"));
                    continue;
                }
            };
            for plan in plans.into_iter().filter(|plan| plan.stages() <= costs.parts.len()) {
                let estimate = Estimate::of(&plan, &costs, optimizer, machine)?;
                found.estimated += 1;
                if fits(&mut found, &estimate, &plan) {
                    candidates.push(FoundPlan { plan, estimate });
                }
            }
        }
        sort(&mut candidates);
        // Simulations put plans in another order, so twice as many are simulated as are kept.
        let keep = self.keep.max(1);
        for (number, FoundPlan { plan, .. }) in candidates.into_iter().enumerate() {
            if number >= 2 * keep && found.best.len() >= keep {
                break;
            }
            // Costs of the few best are measured again, rather than kept of all.
            let costs = ModelCosts::measure(&plan, machine.recomputes, |mesh| make(&plan, mesh))?;
            let estimate = SimulatedStep::of(&plan, &costs, optimizer, machine)?.estimate;
            if fits(&mut found, &estimate, &plan) {
                found.best.push(FoundPlan { plan, estimate });
            }
        }
        if found.best.is_empty() {
            return Err(self.nothing_fits(&found, smallest, machine));
        }
        sort(&mut found.best);
        found.best.truncate(keep);
        Ok(found)
    }

    fn nothing_fits(&self, found: &FoundPlans, smallest: Option<(u64, TrainingPlan)>, machine: &Machine) -> Error {
        let why = match (smallest, found.refused.first()) {
            (Some((bytes, plan)), _) => format!(
                "no plan of {} ranks fits into {:.1} GB: the smallest needs {:.1} GB, {plan}",
                self.ranks,
                machine.memory / 1e9,
                bytes as f64 / 1e9
            ),
            (None, Some(refused)) => format!("the model cannot be cut for {} ranks: {refused}", self.ranks),
            (None, None) => {
                format!("{} sequences cannot be shared out among {} ranks", self.global_batch, self.ranks)
            }
        };
        Error::config("PlanSearch", "plans", why)
    }

    /// All plans, by what has to be measured for them.
    fn by_cut(&self, machine: &Machine) -> Result<BTreeMap<Cut, Vec<TrainingPlan>>> {
        if self.ranks == 0 || self.global_batch == 0 {
            let why = format!("{} ranks and {} sequences; both must be at least 1", self.ranks, self.global_batch);
            return Err(Error::config("PlanSearch", "ranks", why));
        }
        let mut all: BTreeMap<Cut, Vec<TrainingPlan>> = BTreeMap::new();
        for base in self.arrangements(machine).into_iter().flat_map(|plan| self.batches(plan)) {
            for recompute in Recompute::ALL {
                let cut = (base.tensor, base.context, base.expert, base.micro_batch, recompute);
                self.add(&TrainingPlan { recompute, ..base.clone() }, machine, all.entry(cut).or_default());
            }
        }
        Ok(all)
    }

    /// The arrangements of ranks along all axes, with replicas along data.
    fn arrangements(&self, machine: &Machine) -> Vec<TrainingPlan> {
        let mut all = Vec::new();
        for tensor in divisors(self.ranks, self.most_tensor.unwrap_or(machine.ranks_per_node)) {
            for context in divisors(self.ranks / tensor, self.most_context) {
                for pipe in divisors(self.ranks / tensor / context, usize::MAX) {
                    let data = self.ranks / tensor / context / pipe;
                    let plan = TrainingPlan { tensor, context, pipe, data, ..TrainingPlan::default() };
                    let experts = divisors(data * context, self.most_expert).into_iter();
                    all.extend(experts.map(|expert| TrainingPlan { expert, ..plan.clone() }));
                }
            }
        }
        all
    }

    /// An arrangement with each micro-batch; none if its ranks cannot share out the batch.
    fn batches(&self, plan: TrainingPlan) -> Vec<TrainingPlan> {
        if !self.global_batch.is_multiple_of(plan.data) {
            return Vec::new();
        }
        let own = self.global_batch / plan.data;
        let of = |micro_batch: usize| TrainingPlan {
            micro_batch,
            micro_batches: own / micro_batch,
            sequence_parallel: plan.tensor > 1,
            main_gradients: self.main_gradients,
            ..plan.clone()
        };
        divisors(own, self.most_micro_batch).into_iter().map(of).collect()
    }

    /// Adds the plans of one cut: schedules, and what is sharded over whom.
    fn add(&self, base: &TrainingPlan, machine: &Machine, plans: &mut Vec<TrainingPlan>) {
        let mut schedules = Vec::new();
        if base.pipe == 1 {
            schedules.push((base.schedule.clone(), 1));
        } else {
            for kind in ScheduleKind::ALL {
                for v in 1..=self.most_stages_per_rank.min(MOST_STAGES) {
                    let plan = TrainingPlan { stages_per_rank: v, ..base.clone() };
                    if kind.check(plan.shape()).is_ok() {
                        schedules.push((kind.to_string(), v));
                    }
                }
            }
        }
        // Shards of a node's ranks, with replicas on other nodes, beside shards over all.
        let in_node = machine.ranks_per_node / (base.tensor * base.context).min(machine.ranks_per_node);
        let hybrid = (1 < in_node && in_node < base.data && base.data.is_multiple_of(in_node)).then_some(in_node);
        for (schedule, stages_per_rank) in schedules {
            let plan = TrainingPlan { schedule, stages_per_rank, ..base.clone() };
            for zero in 0..=3 {
                if zero > 0 && base.data * base.context == 1 {
                    continue;
                }
                plans.push(TrainingPlan { zero, ..plan.clone() });
                if let Some(shard) = hybrid.filter(|_| zero > 0) {
                    plans.push(TrainingPlan { zero, shard, data: base.data / shard, ..plan.clone() });
                }
            }
        }
    }
}

/// Sorts by the time of a step; equal ones by their text, so that every run finds the same.
fn sort(plans: &mut [FoundPlan]) {
    plans.sort_by(|a, b| {
        let by_time = a.estimate.step().total_cmp(&b.estimate.step());
        by_time.then_with(|| a.plan.to_string().cmp(&b.plan.to_string()))
    });
}

/// The divisors of `n` up to `most`, in ascending order.
fn divisors(n: usize, most: usize) -> Vec<usize> {
    let small: Vec<usize> = (1..=n.isqrt()).filter(|&d| n.is_multiple_of(d)).collect();
    let large = small.iter().rev().map(|d| n / d).filter(|&d| d > n.isqrt());
    small.iter().copied().chain(large).filter(|&d| d <= most).collect()
}
