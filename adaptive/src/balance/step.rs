//! Training steps with uneven numbers of micro-batches, chosen by measured speed.

use std::{
    ops::Range,
    time::{Duration, Instant},
};

use nn::{CountedRows, Module, set_counted_rows};
use numcore::{Error, Result, Runtime};
use parking_lot::Mutex;

use super::{
    BalanceOptions, BalanceWindow, BatchRanges, MicroBatchBalancer,
    shares::{measurements, require_ranks},
};
use distributed::{
    combinations::Feature,
    comm::{Collectives, Communicator, abort_on_err},
    strategy::StepRanks,
    train::{Step, StepInput, StepProperties, StepWork, TrainingMetrics, WeightedSum},
};

/// A training step to which fast ranks contribute more micro-batches than slow ones. Replaces the fixed number of its
/// configuration (`accumulation`).
///
/// Ranks take batches by number, from an order that all of them know: a loader of whole batches, a seed. A rank's
/// computing time is measured up to the end of its last backward pass. All ranks' times go into a
/// [`MicroBatchBalancer`], equal on all ranks. The step waits for the device twice, to measure.
///
/// ```
/// use adaptive::balance::{Balanced, BatchRanges, BalanceOptions};
/// use distributed::{
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
///     let mut step = Balanced::new(step, BalanceOptions { anchor: 2, ..Default::default() })?;
///     let mut epoch = BatchRanges::new(100);
///     while let Some(_metrics) = step.step(&mut epoch, |batch| {
///         let x = autograd::Var::new(Tensor::full(rt, [8, 4], DType::F32, batch as f64)?);
///         Loss::sum(model.forward(&x)?.sum_all()?, 8.0)
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
    balancer: MicroBatchBalancer,
    /// The clock, called through `get_mut`: the lock makes a step `Sync`.
    clock: Mutex<Box<dyn FnMut() -> Duration + Send>>,
}

impl<S> Balanced<S> {
    /// Balances a step among its shares of the examples: ranks, or replicas of a pipeline.
    ///
    /// # Errors
    /// On every rank, if options are invalid or differ between ranks, or a feature of the step
    /// [excludes](distributed::combinations::COMBINATIONS) uneven micro-batches.
    #[track_caller]
    pub fn new<R: Runtime>(inner: S, options: BalanceOptions) -> Result<Self>
    where
        S: Step<R>,
    {
        let begun = Instant::now();
        Balanced::with_clock(inner, options, move || begun.elapsed())
    }

    /// Balances a step by another clock, which returns the time since any fixed moment: for simulations.
    #[track_caller]
    pub fn with_clock<R: Runtime>(
        inner: S,
        options: BalanceOptions,
        clock: impl FnMut() -> Duration + Send + 'static,
    ) -> Result<Self>
    where
        S: Step<R>,
    {
        let StepRanks { everyone, share, .. } = inner.ranks();
        everyone.agree("the balancing of steps", format!("{options:?}").as_bytes())?;
        abort_on_err(everyone, inner.properties().features.and(Feature::Uneven).check("Balanced"))?;
        let balancer = MicroBatchBalancer::new(share.of, options)?;
        Ok(Balanced { inner, balancer, clock: Mutex::new(Box::new(clock)) })
    }

    /// Takes one step on the next batches of an epoch; none when all are read. The ranks of one share call `input` with
    /// the number of each of their batches. In the last step of an epoch, a rank may have no batch. It gets the number
    /// before its place, of a batch that another rank reads too, and its loss weighs nothing.
    ///
    /// # Errors
    /// The errors of [`Step::step`].
    #[track_caller]
    pub fn step<R: Runtime, I: Into<StepInput<R>>>(
        &mut self,
        epoch: &mut BatchRanges,
        mut input: impl FnMut(u64) -> Result<I>,
    ) -> Result<Option<TrainingMetrics<R>>>
    where
        S: Step<R>,
    {
        self.step_by(None, epoch, &mut |number| input(number).map(Into::into))
    }

    /// Takes one step by given counts, or those of the balancer.
    fn step_by<R: Runtime>(
        &mut self,
        counts: Option<&[usize]>,
        epoch: &mut BatchRanges,
        input: &mut dyn FnMut(u64) -> Result<StepInput<R>>,
    ) -> Result<Option<TrainingMetrics<R>>>
    where
        S: Step<R>,
    {
        let StepRanks { everyone, share, .. } = self.inner.ranks().clone();
        let counts = counts.unwrap_or(self.balancer.counts());
        abort_on_err(&everyone, require_ranks("Balanced", share.of, [counts.len()]))?;
        let Some(ranges) = epoch.next(counts) else { return Ok(None) };
        let done = self.take(&ranges, input);
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
                let before = set_counted_rows(Some(CountedRows::NONE));
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
                self.inner.step(StepWork::new(count, &mut next).of(most).after_backward(&mut computed))
            }
        }?;
        rt.synchronize()?;
        let exchanged = self.clock.get_mut()().saturating_sub(begun + measured);
        self.report(&ranks, [measured, exchanged], &ranges.iter().map(len).collect::<Vec<_>>())?;
        Ok(metrics)
    }

    /// Exchanges the measurements. The time of a share is that of its slowest rank. The time of an exchange is that on
    /// the rank that came to it last.
    fn report<R: Runtime>(&mut self, ranks: &StepRanks<R>, own: [Duration; 2], batches: &[usize]) -> Result<()> {
        let mut seconds = vec![0.0; batches.len()];
        let mut exchange = f64::INFINITY;
        for (share, [computed, exchanged]) in measurements(ranks, own.map(|time| time.as_secs_f64()))? {
            if let Some(of_share) = seconds.get_mut(share) {
                *of_share = f64::max(*of_share, computed);
            }
            exchange = exchange.min(exchanged);
        }
        self.balancer.report(BalanceWindow { seconds: &seconds, batches, exchange })
    }

    /// The counts of micro-batches, and the estimates behind them.
    pub fn balancer(&self) -> &MicroBatchBalancer {
        &self.balancer
    }

    /// The inner step.
    pub fn inner(&self) -> &S {
        &self.inner
    }

    /// The inner step, mutably: for schedules and checkpoints.
    pub fn inner_mut(&mut self) -> &mut S {
        &mut self.inner
    }
}

/// Ranks take whole batches in turn, numbered from 0 among the remaining ones. In a step they take as many as the
/// counts add up to, or as remain. Counts depend on measurements: a resumed run does not repeat the uninterrupted one,
/// but reads the same batches, once.
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
        let mut left = BatchRanges::new(work.most() as u64);
        let counts = work.given_counts().map(<[usize]>::to_vec);
        let metrics = self.step_by(counts.as_deref(), &mut left, &mut |number| work.input(number as usize))?;
        metrics.ok_or_else(|| Error::range("Balanced", "number of batches", 0, "at least 1"))
    }

    fn evaluate(&mut self, input: StepInput<R>) -> Result<WeightedSum> {
        self.inner.evaluate(input)
    }

    fn properties(&self) -> StepProperties {
        let inner = self.inner.properties();
        let features = inner.features.and(Feature::Uneven);
        StepProperties { features, in_turn: Some(self.balancer.counts().to_vec()), ..inner }
    }

    fn modules(&self) -> Vec<&dyn Module<R>> {
        self.inner.modules()
    }
}
