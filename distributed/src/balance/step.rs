//! Training steps of uneven counts, which are measured and chosen.

use std::{
    ops::Range,
    time::{Duration, Instant},
};

use nn::{Module, set_counted_rows};
use numcore::{Error, Result, Runtime};
use parking_lot::Mutex;

use super::{BatchRanges, Cadence, CadenceOptions, CadenceWindow};
use crate::{
    combinations::Feature,
    comm::{Collectives, Communicator, abort_on_err},
    strategy::StepRanks,
    train::{Combines, NO_ROW, Step, StepInput, StepWork, TrainingMetrics, WeightedSum},
};

/// A training step to which fast ranks contribute more micro-batches than slow ones, in place of the number that its
/// configuration has (`accumulation`).
///
/// Ranks take batches by number, from one order that all of them know: a loader of the whole batches, a seed. What a rank computes
/// is measured until its last backward pass is over; with what the others measured it goes into a [`Cadence`], which all ranks
/// have alike. The step waits for the device twice, to measure.
///
/// ```
/// use distributed::{
///     balance::{Balanced, BatchRanges, CadenceOptions},
///     comm::{Communicator, Ranks},
///     train::{Loss, TrainStep},
/// };
/// use nn::{Forward, Init, Linear};
/// use numcore::{DType, NullRuntime, Tensor, ops::ReduceOps};
/// use optim::AdamWConfig;
/// # fn main() -> numcore::Result<()> {
/// Ranks::new(2).run(|_| Ok(NullRuntime::new()), |comm| {
///     let rt = comm.runtime();
///     let model = Linear::new(&Init::new(rt, 42), 4, 1)?;
///     let step = TrainStep::builder(&comm, &model).optimizer(AdamWConfig::default()).build()?;
///     let mut step = Balanced::new(step, CadenceOptions { anchor: 2, ..Default::default() })?;
///     let mut epoch = BatchRanges::new(100);
///     while let Some(_metrics) = step.step(&mut epoch, |batch| {
///         let x = autograd::Var::new(Tensor::full(rt, [8, 4], DType::F32, batch as f64)?);
///         Loss::sum(model.forward(&x)?.sum(&[], false)?, 8.0)
///     })? {}
///     assert_eq!(epoch.position(), 100);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
#[doc(alias("ElChe"))]
pub struct Balanced<S> {
    pub(super) inner: S,
    cadence: Cadence,
    /// Called through `get_mut`: the lock makes a step `Sync`.
    clock: Mutex<Box<dyn FnMut() -> Duration + Send>>,
}

impl<S> Balanced<S> {
    /// Balances a step among its shares of the examples: of ranks, or of replicas of a pipeline.
    ///
    /// # Errors
    /// On every rank: if options make no sense or differ, or a feature of the step
    /// [excludes](crate::combinations::COMBINATIONS) uneven micro-batches.
    #[track_caller]
    pub fn new<R: Runtime>(inner: S, options: CadenceOptions) -> Result<Self>
    where
        S: Step<R>,
    {
        let begun = Instant::now();
        Balanced::with_clock(inner, options, move || begun.elapsed())
    }

    /// Measures by another clock, which tells the time since some moment: for simulations.
    #[track_caller]
    pub fn with_clock<R: Runtime>(
        inner: S,
        options: CadenceOptions,
        clock: impl FnMut() -> Duration + Send + 'static,
    ) -> Result<Self>
    where
        S: Step<R>,
    {
        let StepRanks { everyone, share, .. } = inner.ranks();
        everyone.agree("how steps are balanced", format!("{options:?}").as_bytes())?;
        abort_on_err(everyone, inner.combines().features.and(Feature::Uneven).check("Balanced"))?;
        let cadence = Cadence::new(share.of, options)?;
        Ok(Balanced { inner, cadence, clock: Mutex::new(Box::new(clock)) })
    }

    /// One step of the next batches of an epoch, each of which `input` is given by its number on the ranks of one
    /// share; none when all are read. In the last step of an epoch a rank that is left without a batch is given the
    /// number before its place, of a batch that another rank reads too, and what it computes weighs nothing.
    ///
    /// # Errors
    /// As [`Step::step`].
    #[track_caller]
    pub fn step<R: Runtime, I: Into<StepInput<R>>>(
        &mut self,
        epoch: &mut BatchRanges,
        mut input: impl FnMut(u64) -> Result<I>,
    ) -> Result<Option<TrainingMetrics<R>>>
    where
        S: Step<R>,
    {
        let Some(ranges) = epoch.next(self.cadence.counts()) else { return Ok(None) };
        let everyone = self.inner.ranks().everyone.clone();
        let done = self.take(&ranges, &mut |number| input(number).map(Into::into));
        abort_on_err(&everyone, done).map(Some)
    }

    fn take<R: Runtime>(
        &mut self,
        ranges: &[Range<u64>],
        input: &mut dyn FnMut(u64) -> Result<StepInput<R>>,
    ) -> Result<TrainingMetrics<R>>
    where
        S: Step<R>,
    {
        let ranks = self.inner.ranks().clone();
        let (own, rt) = (ranges[ranks.share.index].clone(), ranks.everyone.runtime().clone());
        let len = |range: &Range<u64>| (range.end - range.start) as usize;
        let most = ranges.iter().map(len).max().unwrap_or(1).max(1);
        let clock = self.clock.get_mut();
        let (mut measured, begun) = (Duration::ZERO, clock());
        let metrics = match len(&own) {
            0 => {
                let before = set_counted_rows(NO_ROW);
                let mut again = |_| input(own.start.saturating_sub(1))?.weightless();
                let metrics = self.inner.step(StepWork::new(1, &mut again).of(most));
                set_counted_rows(before);
                metrics
            }
            count => {
                let mut next = |k: usize| input(own.start + k as u64);
                let mut computed = || {
                    rt.synchronize()?;
                    measured = clock().saturating_sub(begun);
                    Ok(())
                };
                self.inner.step(StepWork { computed: Some(&mut computed), ..StepWork::new(count, &mut next).of(most) })
            }
        }?;
        rt.synchronize()?;
        let exchanged = self.clock.get_mut()().saturating_sub(begun + measured);
        self.report(&ranks, [measured, exchanged], &ranges.iter().map(len).collect::<Vec<_>>())?;
        Ok(metrics)
    }

    /// Tells all ranks what was measured. A share took as long as the slowest of its ranks, an exchange as long as on
    /// the rank that came to it last.
    fn report<R: Runtime>(&mut self, ranks: &StepRanks<R>, own: [Duration; 2], batches: &[usize]) -> Result<()> {
        let mut bytes = [0; 24];
        let numbers = [ranks.share.index as f64, own[0].as_secs_f64(), own[1].as_secs_f64()];
        bytes.as_chunks_mut().0.iter_mut().zip(numbers).for_each(|(bytes, number)| *bytes = number.to_le_bytes());
        let mut seconds = vec![0.0; batches.len()];
        let mut exchange = f64::INFINITY;
        for all in ranks.everyone.exchange_equal(bytes)? {
            let [share, computed, exchanged] = std::array::from_fn(|k| f64::from_le_bytes(all.as_chunks().0[k]));
            if let Some(of_share) = seconds.get_mut(share as usize) {
                *of_share = f64::max(*of_share, computed);
            }
            exchange = exchange.min(exchanged);
        }
        self.cadence.report(CadenceWindow { seconds: &seconds, batches, exchange })
    }

    /// The counts, and what they follow from.
    pub fn cadence(&self) -> &Cadence {
        &self.cadence
    }

    /// The step that is balanced.
    pub fn inner(&self) -> &S {
        &self.inner
    }

    /// The step that is balanced, for schedules and checkpoints.
    pub fn inner_mut(&mut self) -> &mut S {
        &mut self.inner
    }
}

/// Ranks take whole batches in turn, of numbers from 0 among those that are left: as many in a step as there are.
/// Counts depend on what was measured, so a run that is resumed is no repetition of one that was not, but reads what
/// that would have read, once.
impl<R: Runtime, S: Step<R>> Step<R> for Balanced<S> {
    fn ranks(&self) -> &StepRanks<R> {
        self.inner.ranks()
    }

    fn accumulation(&self) -> usize {
        usize::MAX
    }

    fn global_step(&self) -> u64 {
        self.inner.global_step()
    }

    fn learning_rate(&self) -> f64 {
        self.inner.learning_rate()
    }

    fn step(&mut self, mut work: StepWork<'_, R>) -> Result<TrainingMetrics<R>> {
        let mut left = BatchRanges::new(work.most as u64);
        let metrics = Balanced::step(self, &mut left, |number| work.input(number as usize))?;
        metrics.ok_or_else(|| Error::argument("Balanced", "a step of no batches"))
    }

    fn evaluate(&mut self, input: StepInput<R>) -> Result<WeightedSum> {
        self.inner.evaluate(input)
    }

    fn combines(&self) -> Combines {
        let features = self.inner.combines().features.and(Feature::Uneven);
        Combines { features, in_turn: Some(self.cadence.counts().iter().sum()) }
    }

    fn modules(&self) -> Vec<&dyn Module<R>> {
        self.inner.modules()
    }
}
