//! A training step of ranks that make local updates.

use std::{panic::Location, sync::Arc};

use autograd::Leaf;
use nn::{Module, ModuleExt, Param};
use numcore::{DType, Error, Result, Runtime, Tensor, Within};

use super::{
    LocalUpdates, OuterRule,
    as_step::{makes_weights_equal, ranks_of, with_local},
    fragment::{Distances, OuterFragment, fragments},
    totals::sums,
};
use distributed::{
    checkpoint::names::Buffers,
    combinations::Feature,
    comm::{Collectives, Comm, Communicator, Label, abort_on_err, memory},
    strategy::{BufferSync, StepRanks},
    train::{Step, StepInput, StepWork, Synchronization, TrainingMetrics},
};

/// Trains a model on ranks that each take steps of their own and synchronize their weights by [a rule](super).
///
/// The inner step is made over the ranks of one machine, or a [`NoOpCommunicator`](distributed::comm::NoOpCommunicator)
/// for a single rank. `comm` joins the ranks of all machines that have the same parameters.
///
/// ```
/// use adaptive::local_updates::{DiLoCo, LocalSteps, LocalUpdates};
/// use distributed::{
///     comm::{Communicator, NoOpCommunicator, Ranks},
///     train::{Loss, TrainStep},
/// };
/// use nn::{Forward, Init, Linear};
/// use numcore::{DType, NullRuntime, Tensor, ops::ReduceOps};
/// use optim::AdamWConfig;
/// # fn main() -> numcore::Result<()> {
/// Ranks::new(2).run(|_| Ok(NullRuntime::new()), |comm| {
///     let rt = comm.runtime();
///     let model = Linear::new(&Init::new(rt, 42), 4, 1)?;
///     let inner = TrainStep::builder(&NoOpCommunicator::new(rt), &model).optimizer(AdamWConfig::default()).build()?;
///     let synchronizations = LocalUpdates { every: Some(2), ..Default::default() };
///     let mut step = LocalSteps::new(&comm, &model, inner, DiLoCo::default(), synchronizations)?;
///     let x = autograd::Var::new(Tensor::zeros(rt, [8, 4], DType::F32)?);
///     for _ in 0..4 {
///         step.step(|_| Loss::sum(model.forward(&x)?.sum_all()?, 8.0))?;
///     }
///     assert_eq!(step.synchronizations(), 2);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
pub struct LocalSteps<R: Runtime, S: Step<R>> {
    pub(super) inner: S,
    /// The ranks that synchronize.
    pub(super) comm: Comm<R>,
    pub(super) ranks: StepRanks<R>,
    pub(super) rule: Box<dyn OuterRule<R>>,
    pub(super) options: LocalUpdates,
    pub(super) fragments: Vec<OuterFragment<R>>,
    /// Parameters that are in no fragment.
    frozen: Vec<Arc<Leaf<R>>>,
    pub(super) buffers: Buffers<R>,
    /// The total weight of this rank's losses of the last step; `rate` is the learning rate of that step.
    weight: f64,
    rate: f64,
    /// This rank's own weights, while other values are in their place.
    pub(super) own: Option<Vec<Tensor<R>>>,
    /// The number of steps taken, which sets the times of synchronizations.
    pub(super) steps: u64,
    pub(super) synchronizations: u64,
    /// The last step after which all ranks had equal weights.
    pub(super) last_equal: u64,
    pub(super) last: Option<Synchronization>,
    /// The number of ranks that saved the checkpoint being loaded, and the fragments whose sums were in flight then.
    pub(super) saved: Option<super::checkpoint::SavedRanks>,
}

impl<R: Runtime, S: Step<R>> LocalSteps<R, S> {
    /// Makes the step, and gives every rank the parameters of rank 0. Every rank calls it, after its inner step was
    /// made.
    ///
    /// # Errors
    /// On every rank, unless all ranks have the same model, rule and options, and these are valid. An inner step that
    /// trains parameters in half precision is an error too.
    #[track_caller]
    pub fn new(
        comm: &Comm<R>,
        model: &(impl Module<R> + ?Sized),
        inner: S,
        rule: impl OuterRule<R> + 'static,
        options: LocalUpdates,
    ) -> Result<Self> {
        options.check().and_then(|()| rule.check()).map_err(|error| error.on_rank(comm.world_rank()))?;
        let (comm, inside) = (Label::next(comm).over(comm), inner.ranks().clone());
        let (mut named, mut buffers) = (model.named_parameters(), model.named_buffers());
        for stage in inner.modules() {
            named.extend(stage.named_parameters());
            buffers.extend(stage.named_buffers());
        }
        let (shares, lines) = ((inside.share.index, inside.share.of), described(&named));
        comm.agree(
            "the model and the synchronization of ranks",
            format!("{options:?} {rule:?} {shares:?}\n{lines}").as_bytes(),
        )?;
        let is_half = |p: &Param<R>| p.requires_grad() && !matches!(p.dtype(), DType::F32 | DType::F64);
        let half = named.iter().any(|(_, parameter)| is_half(parameter));
        let features = with_local(inner.properties().features, &options, &rule).and_if(half, Feature::HalfParameters);
        // Ranks of one inner step may have different parameters.
        abort_on_err(&inside.everyone, features.check("LocalSteps"))?;
        let shards = features.has(Feature::ZeroParameters);
        let is_absent = |p: &Param<R>| p.requires_grad() && !p.leaf().is_resident() && !shards;
        if let Some((name, _)) = named.iter().find(|(_, parameter)| is_absent(parameter)) {
            let why = "is not in memory, and ranks synchronize whole weights: train it in memory, or in shards";
            return abort_on_err(&inside.everyone, Err(Error::state(name.clone(), why)));
        }
        // A frozen parameter that is read on demand, as from four bits, has the same values on all ranks.
        for (name, parameter) in named.iter().filter(|(_, p)| p.leaf().is_resident() || shards) {
            let leaf = parameter.leaf();
            let own = leaf.value()?;
            let first = comm.broadcast(memory(&own)?, 0).within(name)?.wait()?.freeze()?;
            if leaf.is_resident() || first.to_bytes()? != own.to_bytes()? {
                leaf.set(first)?;
            }
        }
        // Only the first of the inner step's ranks that have the same parameters saves them.
        let is_first = inside.share.index == 0 && inside.losses.rank().is_multiple_of(inside.context_ranks.max(1));
        let has_first = |p: &Param<R>| p.placed().map_or(inside.counts_examples, |placed| placed.is_first_replica());
        let saves = |p: &Param<R>| is_first && has_first(p);
        let copies = inner.properties().copies;
        let fragments = fragments(&comm, &named, options.fragments, rule.states(), &copies, saves)?;
        let buffers = Buffers(buffers);
        buffers.sync(&comm, BufferSync::Broadcast)?;
        let leaves = named.iter().map(|(_, parameter)| parameter.leaf());
        Ok(LocalSteps {
            ranks: ranks_of(&comm, inside),
            frozen: leaves.filter(|leaf| !leaf.requires_grad()).collect(),
            rate: inner.learning_rate(),
            rule: Box::new(rule),
            weight: 0.0,
            own: None,
            inner,
            comm,
            options,
            fragments,
            buffers,
            steps: 0,
            synchronizations: 0,
            last_equal: 0,
            last: None,
            saved: None,
        })
    }

    /// Sets the communicator of all ranks that train, if an inner step has several ranks. It joins the ranks of all
    /// inner steps, which agree on checkpoints and on the end of a run.
    pub fn among(mut self, everyone: &Comm<R>) -> Self {
        self.ranks.everyone = everyone.clone();
        self
    }

    /// Runs the inner step once, and then a synchronization of weights if one is due. `micro_batch(k)` computes the
    /// loss of this rank's `k`-th micro-batch.
    ///
    /// All ranks call it, or [`idle`](LocalSteps::idle), equally often, unless [`every`](LocalUpdates::every) is
    /// `None`. The metrics (loss, weight, gradient norm) cover the ranks of the inner step alone. If the losses of the
    /// inner step's ranks weigh 0 in total, there is no update, and the loss in the metrics is 0.
    ///
    /// # Errors
    /// Fails as [`Step::step`]. A failed synchronization is an error on every rank and ends the communicator; the
    /// update of the inner step remains.
    #[track_caller]
    pub fn step<I: Into<StepInput<R>>>(
        &mut self,
        micro_batch: impl FnMut(usize) -> Result<I>,
    ) -> Result<TrainingMetrics<R>> {
        let line = Location::caller();
        self.step_with(self.inner.accumulation(), micro_batch).map_err(|error| error.at(line))
    }

    /// Runs a [`step`](LocalSteps::step) of fewer micro-batches than configured.
    #[track_caller]
    pub fn step_with<I: Into<StepInput<R>>>(
        &mut self,
        micro_batches: usize,
        mut micro_batch: impl FnMut(usize) -> Result<I>,
    ) -> Result<TrainingMetrics<R>> {
        self.take(StepWork::new(micro_batches, &mut |k| micro_batch(k).map(Into::into)))
    }

    /// Joins a step without examples of this rank. If no rank of the inner step has examples, the step updates nothing.
    /// A synchronization that is due runs as usual, and weighs this rank by its losses since the last one.
    ///
    /// # Errors
    /// Fails as [`step`](LocalSteps::step), and if the inner step cannot be [idle](Feature::Idle).
    #[track_caller]
    pub fn idle(&mut self) -> Result<TrainingMetrics<R>> {
        let line = Location::caller();
        let mut none = |_| Err(Error::internal("LocalSteps", "a micro-batch was requested from an idle rank"));
        self.take(StepWork::idle(self.inner.accumulation(), &mut none)).map_err(|error| error.at(line))
    }

    pub(super) fn take(&mut self, work: StepWork<'_, R>) -> Result<TrainingMetrics<R>> {
        if let Some(leaf) = self.frozen.iter().find(|leaf| leaf.requires_grad()) {
            let features = self.properties().features.and(Feature::Unfreezing);
            abort_on_err(&self.comm, features.check("LocalSteps").within(leaf.name()))?;
        }
        let metrics = self.inner.step(work.skips_if_empty());
        self.after(metrics)
    }

    /// Ends a step of this rank: synchronizes if a fragment is due.
    fn after(&mut self, metrics: Result<TrainingMetrics<R>>) -> Result<TrainingMetrics<R>> {
        let metrics = abort_on_err(&self.comm, metrics)?;
        (self.weight, self.rate) = (metrics.own_weight(), metrics.learning_rate());
        if metrics.stepped() {
            self.fragments.iter_mut().for_each(|fragment| fragment.weight += self.weight);
        }
        self.steps += 1;
        let before = self.synchronizations;
        let outcome = self.synchronize_if_due();
        abort_on_err(&self.comm, outcome)?;
        let synchronization = self.last.filter(|_| self.synchronizations > before);
        Ok(metrics.with_synchronization(synchronization))
    }

    /// Synchronizes all parameters with the other ranks now. Sums in flight are applied before. Every rank calls it.
    ///
    /// # Errors
    /// On every rank, if the weights of one rank are not finite, or one has failed. No weights have changed then.
    #[track_caller]
    pub fn synchronize(&mut self) -> Result<Synchronization> {
        let outcome = self.apply_in_flight().and_then(|()| self.synchronize_all());
        abort_on_err(&self.comm, outcome)
    }

    /// The total weight of the losses of the last step on all ranks. Every rank calls it.
    #[track_caller]
    pub fn weight_of_all(&self) -> Result<f64> {
        let inside = self.inner.ranks();
        let own = sums(&inside.losses, &[self.weight])?[0];
        // Ranks that have parts of the same sequences each report the weight of the whole sequences.
        Ok(sums(&self.comm, &[own])?[0] / inside.context_ranks.max(1) as f64)
    }

    /// The number of steps taken, including those that this rank skipped because its gradients were not finite. It is
    /// equal on all ranks, unless they synchronize by hand alone.
    pub fn global_step(&self) -> u64 {
        self.steps
    }

    /// The number of synchronizations so far. Each fragment counts separately.
    pub fn synchronizations(&self) -> u64 {
        self.synchronizations
    }

    /// The last synchronization; none before the first.
    pub fn last_synchronization(&self) -> Option<Synchronization> {
        self.last
    }

    /// Tells whether all ranks have equal weights after a synchronization. They have not if there are several
    /// fragments, or if ranks keep a share of their own weights.
    pub fn makes_weights_equal(&self) -> bool {
        makes_weights_equal(&self.options, &*self.rule)
    }

    /// The ranks that train.
    pub fn ranks(&self) -> &StepRanks<R> {
        &self.ranks
    }

    /// The ranks that synchronize.
    pub fn comm(&self) -> &Comm<R> {
        &self.comm
    }

    /// The step of this rank.
    pub fn inner(&self) -> &S {
        &self.inner
    }

    /// The step of this rank as a mutable reference, for schedules.
    pub fn inner_mut(&mut self) -> &mut S {
        &mut self.inner
    }

    fn synchronize_if_due(&mut self) -> Result<()> {
        if self.steps <= self.options.warmup {
            return self.synchronize_all().map(drop);
        }
        let (delay, due) = (self.options.delay, self.options.due(self.steps));
        if let Some(k) = due {
            self.begin(&[k])?;
        }
        let arrived = self.steps.checked_sub(delay).and_then(|begun| self.options.due(begun));
        match arrived.filter(|&k| self.fragments[k].is_in_flight()) {
            Some(k) => self.end(&[k], if delay == 0 { 0.0 } else { self.options.keep }).map(drop),
            None => Ok(()),
        }
    }

    fn synchronize_all(&mut self) -> Result<Synchronization> {
        let all: Vec<usize> = (0..self.fragments.len()).collect();
        self.begin(&all)?;
        self.end(&all, 0.0)
    }

    /// Starts to sum fragments, weighted by the loss weight of each rank.
    fn begin(&mut self, which: &[usize]) -> Result<()> {
        // The weight of a machine is that of all its ranks: each synchronizes with other machines separately, to the
        // same result.
        let weights: Vec<f64> = which.iter().map(|&k| self.fragments[k].weight).collect();
        let own = sums(&self.inner.ranks().losses, &weights)?;
        let totals = sums(&self.comm, &own)?;
        // Ranks that skipped steps have other rates, and a rule needs one for all.
        let rate = self
            .comm
            .exchange_equal(self.rate.to_le_bytes())?
            .first()
            .map_or(self.rate, |first| f64::from_le_bytes(*first));
        for ((&k, own), total) in which.iter().zip(own).zip(totals) {
            let share = if total > 0.0 { own / total } else { 1.0 / self.comm.size() as f64 };
            self.fragments[k].begin(&self.comm, share, rate)?;
        }
        Ok(())
    }

    /// Applies sums that were started. A rank keeps the share `keep` of its own difference from the global weights.
    fn end(&mut self, which: &[usize], keep: f64) -> Result<Synchronization> {
        let keep = if self.rule.keep() == 0.0 { keep } else { self.rule.keep() };
        let (mut applied, mut all) = (Vec::new(), Distances::default());
        for &k in which {
            let (fragment, distances) = self.fragments[k].next(&self.comm, &*self.rule, keep)?;
            applied.push((k, fragment));
            all = all.add(distances);
        }
        let farthest = self.max_distance(all)?;
        if which.contains(&0) {
            self.buffers.sync(&self.comm, self.options.buffers)?;
        }
        // No weight has changed until here, and nothing is exchanged from here on.
        for (k, next) in applied {
            self.fragments[k].take(next)?;
        }
        self.synchronizations += 1;
        if keep == 0.0 && which.len() == self.fragments.len() {
            self.last_equal = self.steps;
        }
        let divergence = if farthest == 0.0 { 0.0 } else { (farthest / all.norm).sqrt() };
        let synchronization = Synchronization { number: self.synchronizations, fragment: which[0], divergence };
        self.last = Some(synchronization);
        Ok(synchronization)
    }

    /// The largest of the ranks' distances; an error on every rank if the weights of one are not finite, or the rule's
    /// result is not.
    fn max_distance(&self, own: Distances) -> Result<f64> {
        let mut bytes = [0; 10];
        bytes[..2].copy_from_slice(&[own.own, own.norm].map(|square| u8::from(!square.is_finite())));
        bytes[2..].copy_from_slice(&own.from_global.to_le_bytes());
        let all = self.comm.exchange_equal(bytes)?;
        let non_finite: Vec<String> = (0..all.len())
            .filter(|&rank| all[rank][0] != 0)
            .map(|rank| self.comm.members()[rank].to_string())
            .collect();
        let why = match (non_finite.is_empty(), all.iter().all(|[_, made, ..]| *made == 0)) {
            (true, true) => {
                let distance = |bytes: &[u8; 10]| f64::from_le_bytes(std::array::from_fn(|i| bytes[2 + i]));
                return Ok(all.iter().map(distance).fold(0.0, f64::max));
            }
            (true, false) => format!("{:?} made weights that are not finite: lower its rates", self.rule),
            (false, _) => format!(
                "the weights of rank {} are not finite: leave out steps whose gradients are not (`skip_non_finite`), or go back to a checkpoint",
                non_finite.join(", ")
            ),
        };
        Err(Error::anomaly("a synchronization of ranks", why).on_rank(self.comm.world_rank()))
    }

    /// Applies the sums in flight.
    fn apply_in_flight(&mut self) -> Result<()> {
        let in_flight: Vec<usize> = (0..self.fragments.len()).filter(|&k| self.fragments[k].is_in_flight()).collect();
        if in_flight.is_empty() { Ok(()) } else { self.end(&in_flight, self.options.keep).map(drop) }
    }
}

/// A model in a line for each parameter.
fn described<R: Runtime>(named: &[(String, Param<R>)]) -> String {
    let line = |(name, p): &(String, Param<R>)| format!("{name} {} {} {}\n", p.dtype(), p.shape(), p.requires_grad());
    named.iter().map(line).collect()
}
