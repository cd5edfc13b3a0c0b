//! Reading batches, and the time spent waiting for them.

use std::{
    sync::atomic::AtomicBool,
    time::{Duration, Instant},
};

use numcore::{
    Error, Result, Within,
    trace::{self, SpanKind},
};

use super::{
    Make, Request, State,
    plan::{Plan, Rows},
    workers::{Workers, caught},
};

/// A batch on this rank, with its position in the run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch<B> {
    /// The examples, or the result of the loader's steps on them.
    pub data: B,
    /// The epoch.
    pub epoch: u64,
    /// The number of the batch in its epoch, from 0. Batches of a [stream](crate::stream) count from its start or
    /// resumption.
    pub step: u64,
    /// The number of rows that count: the first ones. Others fill the batch up and must have loss weight 0.
    pub count: usize,
    /// The number of rows on this rank.
    pub rows: usize,
    /// The number of rows that count in this batch on all ranks together: the divisor of its summed loss.
    pub total: usize,
}

impl<B> Batch<B> {
    /// Loss weights, one per row: 1 for rows that count, 0 for others.
    pub fn weights(&self) -> Vec<f32> {
        (0..self.rows).map(|row| if row < self.count { 1.0 } else { 0.0 }).collect()
    }

    /// The batch with `data` passed through `f`.
    pub fn map<T>(self, f: impl FnOnce(B) -> T) -> Batch<T> {
        let Batch { data, epoch, step, count, rows, total } = self;
        Batch { data: f(data), epoch, step, count, rows, total }
    }
}

/// The batches of an epoch, or of endless epochs, in order. An error takes the place of its batch, and the next batch
/// comes after it. A panic of a dataset, an order or a step of the loader is such an error.
///
/// Dropping this ends the threads that make batches.
pub struct Batches<B> {
    source: Source<B>,
    plan: Plan,
    taken: u64,
    state: State,
    waited: Duration,
    last_wait: Duration,
}

enum Source<B> {
    /// The thread of the caller.
    Caller(Make<B>),
    Workers(Workers<Result<Batch<B>>>),
}

impl<B: Send + 'static> Batches<B> {
    pub(super) fn start(plan: Plan, make: Make<B>, workers: usize, ahead: usize) -> Result<Self> {
        let source = match workers {
            0 => Source::Caller(make),
            _ => {
                let plan = plan.clone();
                Source::Workers(Workers::start(workers, ahead, move |k, stop| made(&plan, &make, k, stop))?)
            }
        };
        let state = plan.at(0).unwrap_or(plan.start());
        Ok(Batches { source, plan, taken: 0, state, waited: Duration::ZERO, last_wait: Duration::ZERO })
    }

    /// The state at which the next batch begins: save it in checkpoints. [`Loader::resume`](super::Loader::resume) and
    /// [`Loader::endless`](super::Loader::endless) continue from it.
    pub fn state(&self) -> State {
        self.state
    }

    /// The state after the next `batches` batches; `None` if no batch begins there.
    pub fn state_after(&self, batches: u64) -> Option<State> {
        self.plan.at(self.taken.checked_add(batches)?)
    }

    /// Skips batches that another rank reads. Without workers they are not made.
    ///
    /// ```
    /// use data::{InMemory, Loader};
    /// # fn main() -> numcore::Result<()> {
    /// for workers in [0, 2] {
    ///     let examples = InMemory::new((0..10).map(f64::from).collect::<Vec<_>>());
    ///     let mut batches = Loader::new(examples).batch(2).workers(workers).stack().epoch(0)?;
    ///     batches.pass(3)?;
    ///     assert_eq!(batches.left_in_epoch(), 2);
    ///     assert_eq!(batches.next().transpose()?.map(|batch| batch.step), Some(3));
    ///     assert!(batches.pass(2).is_err());
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Fails if fewer batches are left.
    #[track_caller]
    pub fn pass(&mut self, batches: u64) -> Result<()> {
        for _ in 0..batches {
            let at = self.plan.at(self.taken);
            let ends =
                || Error::range("Batches::pass", "number of batches", batches, "at most those before the data ends");
            let at = at.ok_or_else(ends).at_caller()?;
            if let Source::Workers(workers) = &mut self.source {
                drop(workers.next());
            }
            self.taken += 1;
            self.state = self.plan.after(at);
        }
        Ok(())
    }

    /// The number of batches left in the epoch of the next batch.
    pub fn left_in_epoch(&self) -> u64 {
        self.plan.steps_from(self.state.position)
    }

    /// The total time of all calls of `next`: the time spent waiting for data.
    pub fn waited(&self) -> Duration {
        self.waited
    }

    /// The time of the last call of `next`: the `data_wait` of a step.
    pub fn last_wait(&self) -> Duration {
        self.last_wait
    }
}

fn made<B>(plan: &Plan, make: &Make<B>, k: u64, stop: &AtomicBool) -> Option<Result<Batch<B>>> {
    let at = plan.at(k)?;
    Some(caught(|| {
        let _span = trace::span(SpanKind::Data, "make batch");
        let rows = plan.rows(at)?;
        let data = make(&Request { rows: &rows, epoch: at.epoch, stop })?;
        let Rows { indices, count, total, .. } = rows;
        Ok(Batch { data, epoch: at.epoch, step: plan.step(at), count, rows: indices.len(), total })
    }))
}

impl<B: Send + 'static> Iterator for Batches<B> {
    type Item = Result<Batch<B>>;

    fn next(&mut self) -> Option<Self::Item> {
        let at = self.plan.at(self.taken)?;
        let begun = Instant::now();
        let _span = trace::span(SpanKind::Data, "wait for batch");
        let batch = match &mut self.source {
            Source::Caller(make) => made(&self.plan, make, self.taken, &AtomicBool::new(false)),
            Source::Workers(workers) => workers.next(),
        };
        self.last_wait = begun.elapsed();
        self.waited += self.last_wait;
        self.taken += 1;
        self.state = self.plan.after(at);
        batch
    }
}

impl<B> std::fmt::Debug for Batches<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Batches({})", self.state)
    }
}
