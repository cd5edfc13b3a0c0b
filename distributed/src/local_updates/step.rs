//! A training step of ranks that train by themselves and meet.

use std::{panic::Location, sync::Arc};

use autograd::{Leaf, set_random_stream};
use nn::{Module, ModuleExt, Param};
use numcore::{DType, Error, Result, Runtime, Tensor, Within};

use super::{
    LocalUpdates, OuterRule,
    fragment::{Distances, OuterFragment, fragments},
};
use crate::{
    checkpoint::names::Buffers,
    comm::{Collectives, Comm, Communicator, Label, abort_on_err, memory},
    train::{Loss, Strategy, TrainStep, TrainingMetrics},
};

/// Trains a model on ranks that each take steps of their own and bring their weights together every so often: [the rules](super).
///
/// The inner step is made over the ranks of one machine, or a [`NoOpCommunicator`](crate::comm::NoOpCommunicator) for a rank alone; `comm` joins
/// those ranks of all machines that have the same parameters.
///
/// ```
/// use distributed::{
///     comm::{Communicator, NoOpCommunicator, Ranks},
///     local_updates::{DiLoCo, LocalTrainStep, LocalUpdates},
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
///     let meetings = LocalUpdates { every: Some(2), ..Default::default() };
///     let mut step = LocalTrainStep::new(&comm, &model, inner, DiLoCo::default(), meetings)?;
///     let x = autograd::Var::new(Tensor::zeros(rt, [8, 4], DType::F32)?);
///     for _ in 0..4 {
///         step.step(|_| Loss::sum(model.forward(&x)?.sum(&[], false)?, 8.0))?;
///     }
///     assert_eq!(step.meetings(), 2);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
pub struct LocalTrainStep<R: Runtime, S: Strategy<R>> {
    pub(super) inner: TrainStep<R, S>,
    pub(super) comm: Comm<R>,
    share: (usize, usize),
    pub(super) rule: Box<dyn OuterRule<R>>,
    pub(super) options: LocalUpdates,
    pub(super) fragments: Vec<OuterFragment<R>>,
    /// Parameters that are in no fragment.
    frozen: Vec<Arc<Leaf<R>>>,
    pub(super) buffers: Buffers<R>,
    /// What this rank's losses of the last step weighed, and the learning rate it was taken with.
    weight: f64,
    rate: f64,
    /// This rank's own weights, while others are in their place.
    pub(super) own: Option<Vec<Tensor<R>>>,
    /// Steps taken, which meetings are counted by.
    pub(super) steps: u64,
    pub(super) meetings: u64,
    /// After which step all ranks had the same weights, last.
    pub(super) together: u64,
    pub(super) last: Option<Meeting>,
    /// How many ranks saved the checkpoint that is being loaded, and whether sums of fragments were under way then.
    pub(super) saved: Option<super::checkpoint::SavedRanks>,
}

/// How far ranks had gone apart when they met.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Meeting {
    /// The number of the meeting, from 1.
    pub number: u64,
    /// The fragment that met, or the first of those that did.
    pub fragment: usize,
    /// The largest distance of a rank's weights from the new global ones, over the norm of these.
    pub divergence: f64,
}

impl<R: Runtime, S: Strategy<R>> LocalTrainStep<R, S> {
    /// Gives every rank the parameters of rank 0. Every rank calls it, after its inner step was made.
    ///
    /// # Errors
    /// On every rank, unless all have the same model, rule and options, and these make sense; and where the inner step shards parameters (ZeRO
    /// stage 3), of which a rank has none in whole, or trains parameters in half precision.
    #[track_caller]
    pub fn new(
        comm: &Comm<R>,
        model: &(impl Module<R> + ?Sized),
        mut inner: TrainStep<R, S>,
        rule: impl OuterRule<R> + 'static,
        options: LocalUpdates,
    ) -> Result<Self> {
        options.check().and_then(|()| rule.check()).map_err(|error| error.on_rank(comm.world_rank()))?;
        let comm = Label::next(comm).over(comm);
        let named = model.named_parameters();
        let line =
            |(name, p): &(String, Param<R>)| format!("{name} {} {} {}\n", p.dtype(), p.shape(), p.requires_grad());
        let lines: String = named.iter().map(line).collect();
        let inside = inner.strategy().share();
        comm.agree("the model and when ranks meet", format!("{options:?} {rule:?} {inside:?}\n{lines}").as_bytes())?;
        if let Some((name, _)) = named.iter().find(|(_, p)| !p.leaf().is_resident()) {
            let why = "is kept in shards by the inner step, and ranks bring whole weights together: take a lower stage of ZeRO";
            return Err(Error::state(name.clone(), why).on_rank(comm.world_rank()));
        }
        let is_half = |p: &Param<R>| p.requires_grad() && !matches!(p.dtype(), DType::F32 | DType::F64);
        if let Some((name, p)) = named.iter().find(|(_, p)| is_half(p)) {
            let why = format!(
                "is {}, and each meeting would round what ranks learned: keep trained parameters in f32 and compute in halves by `autocast`",
                p.dtype()
            );
            return Err(Error::state(name.clone(), why).on_rank(comm.world_rank()));
        }
        for (name, parameter) in &named {
            let leaf = parameter.leaf();
            let value = comm.broadcast(memory(&leaf.value()?)?, 0).within(name)?;
            leaf.set(value.wait()?.freeze()?)?;
        }
        let fragments = {
            let strategy = inner.strategy();
            let is_first = strategy.comm().rank() == 0;
            let saves = |p: &Param<R>| {
                is_first && p.placed().map_or(strategy.counts_examples(), |placed| placed.is_first_replica())
            };
            fragments(&comm, &named, options.fragments, rule.states(), saves)?
        };
        // Of all ranks, each draws random values of its own.
        let share = (comm.rank() * inside.1 + inside.0, comm.size() * inside.1);
        set_random_stream(share.0 as u32);
        let buffers = Buffers(model.named_buffers());
        buffers.sync(&comm, crate::train::BufferSync::Broadcast)?;
        let (rule, rate) = (Box::new(rule), inner.strategy().learning_rate());
        inner.updates.may_be_empty = true;
        let leaves = named.iter().map(|(_, parameter)| parameter.leaf());
        Ok(LocalTrainStep {
            weight: 0.0,
            rate,
            own: None,
            inner,
            comm,
            share,
            rule,
            options,
            fragments,
            frozen: leaves.filter(|leaf| !leaf.requires_grad()).collect(),
            buffers,
            steps: 0,
            meetings: 0,
            together: 0,
            last: None,
            saved: None,
        })
    }

    /// One step of this rank, and a meeting with the others where it is due. What it tells is this rank's own: loss, weight and norm. Where its losses weigh
    /// nothing, the rank has no examples in this step: its weights stay, and the loss it tells is 0.
    ///
    /// # Errors
    /// As [`TrainStep::step`]; and on every rank if a meeting fails, after which no weights have changed but by the step.
    #[track_caller]
    pub fn step(&mut self, micro_batch: impl FnMut(usize) -> Result<Loss<R>>) -> Result<TrainingMetrics<R>> {
        let line = Location::caller();
        self.step_with(self.inner.accumulation(), micro_batch).map_err(|error| error.at(line))
    }

    /// A [`step`](LocalTrainStep::step) of fewer micro-batches than configured.
    #[track_caller]
    pub fn step_with(
        &mut self,
        micro_batches: usize,
        mut micro_batch: impl FnMut(usize) -> Result<Loss<R>>,
    ) -> Result<TrainingMetrics<R>> {
        abort_on_err(&self.comm, self.require_frozen())?;
        let mut weight = 0.0;
        let metrics = self.inner.step_with(micro_batches, |k| {
            let loss = micro_batch(k)?;
            weight += loss.weight();
            Ok(loss)
        });
        self.after(metrics, weight)
    }

    /// A step of the others in which this rank has no examples. Its weights stay, and count in a meeting by what its losses have weighed since the last one.
    ///
    /// # Errors
    /// As [`step`](LocalTrainStep::step), and as [`TrainStep::idle`].
    #[track_caller]
    pub fn idle(&mut self) -> Result<TrainingMetrics<R>> {
        let line = Location::caller();
        let metrics = self.inner.idle();
        self.after(metrics, 0.0).map_err(|error| error.at(line))
    }

    /// An error if a parameter is trained by now that was frozen when meetings were laid out.
    fn require_frozen(&self) -> Result<()> {
        self.frozen.iter().find(|leaf| leaf.requires_grad()).map_or(Ok(()), |leaf| {
            let why = "was frozen when this step was made, so ranks would not bring it together: make another `LocalTrainStep` to train it";
            Err(Error::state(leaf.name().to_string(), why))
        })
    }

    /// After a step of this rank, whose losses weighed so much: meets with the others where it is due.
    fn after(&mut self, metrics: Result<TrainingMetrics<R>>, weight: f64) -> Result<TrainingMetrics<R>> {
        let metrics = abort_on_err(&self.comm, metrics)?;
        (self.weight, self.rate) = (weight, metrics.learning_rate());
        if metrics.stepped() {
            self.fragments.iter_mut().for_each(|fragment| fragment.weight += weight);
        }
        self.steps += 1;
        let met = self.meet_if_due();
        abort_on_err(&self.comm, met)?;
        Ok(metrics)
    }

    /// Meets with the other ranks now, with all parameters; sums that are under way are applied before. Every rank calls it.
    ///
    /// # Errors
    /// On every rank: if the weights of one are not finite, or one has failed; no weights have changed then.
    #[track_caller]
    pub fn meet(&mut self) -> Result<Meeting> {
        let met = self.arrive().and_then(|()| self.meet_all());
        abort_on_err(&self.comm, met)
    }

    /// What the losses of the last step weighed on all ranks. Every rank calls it.
    #[track_caller]
    pub fn weight_of_all(&self) -> Result<f64> {
        let inside = self.inner.strategy().comm();
        let own = sums(inside, &[self.weight])?[0];
        // Ranks that have parts of the same sequences each say what these weigh.
        let alike = inside.size() / self.inner.strategy().share().1.max(1);
        Ok(sums(&self.comm, &[own])?[0] / alike.max(1) as f64)
    }

    /// Steps taken, also those that this rank left out because its gradients were not finite: equal on all ranks, unless they meet by hand alone.
    pub fn global_step(&self) -> u64 {
        self.steps
    }

    /// Meetings so far: of each fragment one.
    pub fn meetings(&self) -> u64 {
        self.meetings
    }

    /// The last meeting, if ranks have met.
    pub fn last_meeting(&self) -> Option<Meeting> {
        self.last
    }

    /// Whether there are meetings after which all ranks have the same weights: not where fragments meet in turn, or ranks keep a share of their own.
    pub fn comes_together(&self) -> bool {
        let keep = if self.options.delay == 0 { 0.0 } else { self.options.keep };
        self.fragments.len() == 1 && keep == 0.0 && self.rule.keep() == 0.0
    }

    /// The ranks that meet.
    pub fn comm(&self) -> &Comm<R> {
        &self.comm
    }

    /// Which share of a batch this rank reads, of how many.
    pub fn share(&self) -> (usize, usize) {
        self.share
    }

    /// The step of this rank.
    pub fn inner(&self) -> &TrainStep<R, S> {
        &self.inner
    }

    /// The step of this rank, for schedules.
    pub fn inner_mut(&mut self) -> &mut TrainStep<R, S> {
        &mut self.inner
    }

    fn meet_if_due(&mut self) -> Result<()> {
        if self.steps <= self.options.warmup {
            return self.meet_all().map(drop);
        }
        let (delay, due) = (self.options.delay, self.options.due(self.steps));
        if let Some(k) = due {
            self.begin(&[k])?;
        }
        let arrived = self.steps.checked_sub(delay).and_then(|begun| self.options.due(begun));
        match arrived.filter(|&k| self.fragments[k].is_flying()) {
            Some(k) => self.end(&[k], if delay == 0 { 0.0 } else { self.options.keep }).map(drop),
            None => Ok(()),
        }
    }

    fn meet_all(&mut self) -> Result<Meeting> {
        let all: Vec<usize> = (0..self.fragments.len()).collect();
        self.begin(&all)?;
        self.end(&all, 0.0)
    }

    /// Starts to sum fragments, weighted by what the losses of each rank weighed.
    fn begin(&mut self, which: &[usize]) -> Result<()> {
        // Of a machine, what all of its ranks did: they meet those of other machines each by itself, and must come to the same.
        let weights: Vec<f64> = which.iter().map(|&k| self.fragments[k].weight).collect();
        let own = sums(self.inner.strategy().comm(), &weights)?;
        let totals = sums(&self.comm, &own)?;
        // Ranks that left out steps have other rates, and a rule has one for all.
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

    /// Applies sums that were started. A rank keeps a share of its own difference from the global weights.
    fn end(&mut self, which: &[usize], keep: f64) -> Result<Meeting> {
        let keep = if self.rule.keep() == 0.0 { keep } else { self.rule.keep() };
        let (mut met, mut all) = (Vec::new(), Distances::default());
        for &k in which {
            let (fragment, distances) = self.fragments[k].next(&self.comm, &*self.rule, keep)?;
            met.push((k, fragment));
            all = all.add(distances);
        }
        self.require_finite(all)?;
        if which.contains(&0) {
            self.buffers.sync(&self.comm, self.options.buffers)?;
        }
        // Nothing has changed until here, and nothing is exchanged from here on.
        for (k, next) in met {
            self.fragments[k].take(next)?;
        }
        self.meetings += 1;
        if keep == 0.0 && which.len() == self.fragments.len() {
            self.together = self.steps;
        }
        let apart =
            self.comm.exchange_equal(all.apart.to_le_bytes())?.into_iter().map(f64::from_le_bytes).fold(0.0, f64::max);
        let divergence = if apart == 0.0 { 0.0 } else { (apart / all.norm).sqrt() };
        let meeting = Meeting { number: self.meetings, fragment: which[0], divergence };
        self.last = Some(meeting);
        Ok(meeting)
    }

    /// An error on every rank if the weights of one are not finite, or the rule made them so.
    fn require_finite(&self, own: Distances) -> Result<()> {
        let [mine, made] = [own.own, own.norm].map(|square| u8::from(!square.is_finite()));
        let all = self.comm.exchange_equal([mine, made])?;
        let wrong: Vec<String> = (0..all.len())
            .filter(|&rank| all[rank][0] != 0)
            .map(|rank| self.comm.members()[rank].to_string())
            .collect();
        let why = match (wrong.is_empty(), all.iter().all(|[_, made]| *made == 0)) {
            (true, true) => return Ok(()),
            (true, false) => format!("{:?} made weights that are not finite: lower its rates", self.rule),
            (false, _) => format!(
                "the weights of rank {} are not finite: leave out steps whose gradients are not (`skip_non_finite`), or go back to a checkpoint",
                wrong.join(", ")
            ),
        };
        Err(Error::state("a meeting of ranks", why).on_rank(self.comm.world_rank()))
    }

    /// Applies the sums that are under way.
    fn arrive(&mut self) -> Result<()> {
        let flying: Vec<usize> = (0..self.fragments.len()).filter(|&k| self.fragments[k].is_flying()).collect();
        if flying.is_empty() { Ok(()) } else { self.end(&flying, self.options.keep).map(drop) }
    }
}

/// The sums of numbers that each rank has as many of.
fn sums<R: Runtime>(comm: &Comm<R>, own: &[f64]) -> Result<Vec<f64>> {
    if comm.size() == 1 {
        return Ok(own.to_vec());
    }
    let bytes: Vec<u8> = own.iter().flat_map(|number| number.to_le_bytes()).collect();
    let all = comm.exchange(&bytes)?;
    // Between ranks of a runtime without values nothing arrives, which reads as zeros there.
    let number = |rank: &[u8], k: usize| rank.chunks_exact(8).nth(k).map_or(0.0, number_of);
    Ok((0..own.len()).map(|k| all.iter().map(|rank| number(rank, k)).sum()).collect())
}

fn number_of(bytes: &[u8]) -> f64 {
    f64::from_le_bytes(std::array::from_fn(|i| bytes[i]))
}
