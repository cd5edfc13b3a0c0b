//! Training steps of uneven counts, which are measured and chosen.

use std::{
    ops::Range,
    time::{Duration, Instant},
};

use nn::set_counted_rows;
use numcore::{Error, Result, Runtime};
use parking_lot::Mutex;

use super::{BatchRanges, Cadence, CadenceOptions, CadenceWindow};
use crate::{
    comm::{Collectives, Comm, Communicator, abort_on_err},
    train::{Loss, NO_ROW, Strategy, TrainStep, TrainingMetrics},
};

/// A training step to which fast ranks contribute more micro-batches than slow ones.
///
/// Ranks take batches by number, from one order that all of them know: a loader of the whole batches, a seed. What a rank computes
/// is measured until its last backward pass is over; with what the others measured it goes into a [`Cadence`], which all ranks
/// have alike. The step waits for the device twice, to measure.
///
/// ```
/// use distributed::{
///     balance::{BalancedStep, BatchRanges, CadenceOptions},
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
///     let mut step = BalancedStep::new(step, CadenceOptions { anchor: 2, ..Default::default() })?;
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
pub struct BalancedStep<R: Runtime, S: Strategy<R>> {
    step: TrainStep<R, S>,
    cadence: Cadence,
    /// Called through `get_mut`: the lock makes a step `Sync`.
    clock: Mutex<Box<dyn FnMut() -> Duration + Send>>,
}

impl<R: Runtime, S: Strategy<R>> BalancedStep<R, S> {
    /// Balances a step among its ranks, each of which has a share of the examples to itself.
    ///
    /// # Errors
    /// On every rank: if options make no sense or differ, ranks have pieces of layers or of sequences, or the strategy exchanges something in every pass
    /// ([`Strategy::may_differ_in_passes`]).
    #[track_caller]
    pub fn new(step: TrainStep<R, S>, options: CadenceOptions) -> Result<Self> {
        let begun = Instant::now();
        BalancedStep::with_clock(step, options, move || begun.elapsed())
    }

    /// Measures by another clock, which tells the time since some moment: for simulations.
    #[track_caller]
    pub fn with_clock(
        step: TrainStep<R, S>,
        options: CadenceOptions,
        clock: impl FnMut() -> Duration + Send + 'static,
    ) -> Result<Self> {
        let strategy = step.strategy();
        let comm = strategy.comm();
        comm.agree("how steps are balanced", format!("{options:?}").as_bytes())?;
        let wrong = |why: &str| Err(Error::argument("BalancedStep", why).on_rank(comm.world_rank()));
        if strategy.share().1 != comm.size() || strategy.everyone().size() != comm.size() {
            return wrong(
                "ranks that have pieces of layers or of sequences compute the same examples: balance ranks along data and shard alone",
            );
        }
        if !strategy.may_differ_in_passes() {
            return wrong(
                "the strategy exchanges in every pass: take ZeRO stage 1, stage 2 with `reduce_once`, or none, and no canonical order or \
                 experts over ranks",
            );
        }
        let cadence = Cadence::new(comm.size(), options)?;
        Ok(BalancedStep { step, cadence, clock: Mutex::new(Box::new(clock)) })
    }

    /// One step of the next batches of an epoch, each of which `loss` is given by its number on one rank; none when all are read. In the last
    /// step of an epoch a rank that is left without a batch is given the number before its place, of a batch that another rank reads too, and what it
    /// computes weighs nothing.
    ///
    /// # Errors
    /// As [`TrainStep::step`].
    #[track_caller]
    pub fn step(
        &mut self,
        epoch: &mut BatchRanges,
        loss: impl FnMut(u64) -> Result<Loss<R>>,
    ) -> Result<Option<TrainingMetrics<R>>> {
        let Some(ranges) = epoch.next(self.cadence.counts()) else { return Ok(None) };
        let comm = self.step.strategy().comm().clone();
        let done = self.take(&comm, &ranges, loss);
        abort_on_err(&comm, done).map(Some)
    }

    fn take(
        &mut self,
        comm: &Comm<R>,
        ranges: &[Range<u64>],
        mut loss: impl FnMut(u64) -> Result<Loss<R>>,
    ) -> Result<TrainingMetrics<R>> {
        let (own, rt) = (ranges[comm.rank()].clone(), comm.runtime().clone());
        let len = |range: &Range<u64>| (range.end - range.start) as usize;
        let most = ranges.iter().map(len).max().unwrap_or(1).max(1);
        let clock = self.clock.get_mut();
        let (mut computed, begun) = (Duration::ZERO, clock());
        let metrics = match len(&own) {
            0 => {
                let before = set_counted_rows(NO_ROW);
                let metrics = self.step.step_uneven(1, most, |_| loss(own.start.saturating_sub(1))?.weightless());
                set_counted_rows(before);
                metrics
            }
            count => self.step.step_observed(count, most, |k| loss(own.start + k as u64), &mut || {
                rt.synchronize()?;
                computed = clock().saturating_sub(begun);
                Ok(())
            }),
        }?;
        rt.synchronize()?;
        let exchanged = self.clock.get_mut()().saturating_sub(begun + computed);
        self.report(comm, [computed, exchanged], &ranges.iter().map(len).collect::<Vec<_>>())?;
        Ok(metrics)
    }

    /// Tells all ranks what was measured. An exchange took as long as on the rank that came to it last.
    fn report(&mut self, comm: &Comm<R>, own: [Duration; 2], batches: &[usize]) -> Result<()> {
        let mut bytes = [0; 16];
        let (computed, exchanged) = bytes.split_at_mut(8);
        computed.copy_from_slice(&own[0].as_secs_f64().to_le_bytes());
        exchanged.copy_from_slice(&own[1].as_secs_f64().to_le_bytes());
        let number = |bytes: &[u8]| f64::from_le_bytes(std::array::from_fn(|i| bytes[i]));
        let all = comm.exchange_equal(bytes)?;
        let seconds: Vec<f64> = all.iter().map(|bytes| number(&bytes[..8])).collect();
        let exchange = all.iter().map(|bytes| number(&bytes[8..])).fold(f64::INFINITY, f64::min);
        self.cadence.report(CadenceWindow { seconds: &seconds, batches, exchange })
    }

    /// The counts, and what they follow from.
    pub fn cadence(&self) -> &Cadence {
        &self.cadence
    }

    /// The step that is balanced.
    pub fn inner(&self) -> &TrainStep<R, S> {
        &self.step
    }

    /// The step that is balanced, for schedules and checkpoints.
    pub fn inner_mut(&mut self) -> &mut TrainStep<R, S> {
        &mut self.step
    }
}
