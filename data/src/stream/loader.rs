//! Batches of a stream, made ahead by one thread.

use std::sync::{
    Arc, Mutex, PoisonError,
    atomic::{AtomicBool, Ordering},
};
use std::time::{Duration, Instant};

use numcore::{
    Error, Result, Runtime, Within,
    trace::{self, SpanKind},
};

use super::{Stream, StreamState};
use crate::{
    Batch, Stack, ToDevice,
    loader::{Workers, caught},
};

/// Reads this rank's share of the next batch; `None` at the end.
type Read<B> = Box<dyn FnMut(&AtomicBool) -> Option<Result<Batch<B>>> + Send>;

/// Opens a reader at a state. The mutex holds the state after its last batch.
type Open<B> = Arc<dyn Fn(&Share, Option<&StreamState>) -> Result<(Read<B>, Arc<Mutex<StreamState>>)> + Send + Sync>;

#[derive(Clone, Copy)]
struct Share {
    batch: usize,
    rank: usize,
    ranks: usize,
}

/// Batches of a [`Stream`]. One thread reads ahead. Every rank reads the entire stream and keeps a contiguous range of
/// each batch, so the number of ranks changes no batch. The last batch may be smaller; a rank whose share of it is
/// empty gets one row that does not count.
///
/// ```
/// use data::stream::{Replay, StreamLoader};
/// # fn main() -> numcore::Result<()> {
/// let loader = StreamLoader::new(|| Replay::new(|| Ok((0..10i64).map(Ok)))).batch(4).stack();
/// let mut batches = loader.start()?;
/// assert_eq!(batches.next().unwrap()?.data.to_vec::<i64>()?, [0, 1, 2, 3]);
/// let state = batches.state();
/// let mut resumed = loader.resume(&state)?;
/// assert_eq!(resumed.next().unwrap()?.data.to_vec::<i64>()?, [4, 5, 6, 7]);
/// # Ok(())
/// # }
/// ```
pub struct StreamLoader<B> {
    open: Open<B>,
    share: Share,
    ahead: usize,
}

impl<E: Send + 'static> StreamLoader<Vec<E>> {
    /// Loads lists of one example each from the stream that `open` makes.
    pub fn new<S>(open: impl Fn() -> Result<S> + Send + Sync + 'static) -> Self
    where
        S: Stream<Example = E> + 'static,
    {
        let open = move |share: &Share, from: Option<&StreamState>| {
            let mut stream = open()?;
            from.map_or(Ok(()), |state| stream.restore(state))?;
            let after = Arc::new(Mutex::new(stream.state()));
            let (share, state, mut step) = (*share, Arc::clone(&after), 0);
            let read: Read<Vec<E>> = Box::new(move |stop| {
                let batch = share.read(&mut stream, step, stop)?;
                step += 1;
                *state.lock().unwrap_or_else(PoisonError::into_inner) = stream.state();
                Some(batch)
            });
            Ok((read, after))
        };
        StreamLoader { open: Arc::new(open), share: Share { batch: 1, rank: 0, ranks: 1 }, ahead: 2 }
    }

    /// Stacks the examples of a batch by the rules of [`Stack`].
    pub fn stack(self) -> StreamLoader<E::Batch>
    where
        E: Stack,
        E::Batch: Send + 'static,
    {
        self.collate(E::stack)
    }

    /// Passes each example of the rank's share through `f`.
    pub fn map<T: Send + 'static>(self, f: impl Fn(E) -> Result<T> + Send + Sync + 'static) -> StreamLoader<Vec<T>> {
        self.collate(move |examples| examples.into_iter().map(&f).collect())
    }
}

impl<B: Send + 'static> StreamLoader<B> {
    /// Passes the batch through `f`, after all steps so far; the first step receives the list of examples.
    pub fn collate<T: Send + 'static>(self, f: impl Fn(B) -> Result<T> + Send + Sync + 'static) -> StreamLoader<T> {
        let StreamLoader { open, share, ahead } = self;
        let f = Arc::new(f);
        let open = move |share: &Share, from: Option<&StreamState>| {
            let ((mut read, state), f) = (open(share, from)?, Arc::clone(&f));
            let read: Read<T> = Box::new(move |stop| {
                Some(read(stop)?.and_then(|batch| {
                    let Batch { data, epoch, step, count, rows, total } = batch;
                    Ok(Batch { data: f(data)?, epoch, step, count, rows, total })
                }))
            });
            Ok((read, state))
        };
        StreamLoader { open: Arc::new(open), share, ahead }
    }

    /// Copies batches to the device of `rt` as soon as they are made.
    pub fn on<R: Runtime>(self, rt: &R) -> StreamLoader<B::OnDevice>
    where
        B: ToDevice<R>,
        B::OnDevice: Send + 'static,
    {
        let rt = rt.clone();
        self.collate(move |batch| batch.to_device(&rt))
    }

    /// Sets the global batch size: the number of examples in a batch of all ranks together; 1 by default. A training
    /// step that accumulates reads several batches.
    pub fn batch(mut self, examples: usize) -> Self {
        self.share.batch = examples;
        self
    }

    /// Keeps the share of rank `rank` of `ranks`; by default there is one rank.
    pub fn rank(mut self, rank: usize, ranks: usize) -> Self {
        (self.share.rank, self.share.ranks) = (rank, ranks);
        self
    }

    /// Sets the number of batches that the thread makes ahead, as PyTorch's `prefetch_factor`; 2 by default. More than
    /// 4096 count as 4096. With 0, [`start`](StreamLoader::start) fails.
    pub fn ahead(mut self, batches: usize) -> Self {
        self.ahead = batches.min(crate::loader::MOST_AHEAD);
        self
    }

    /// Reads the batches from the start of the stream.
    ///
    /// # Errors
    /// Fails if `batch` or `ahead` is 0, `rank` is not below `ranks`, or the stream cannot be opened. Also if no thread
    /// can be started.
    #[track_caller]
    pub fn start(&self) -> Result<StreamBatches<B>> {
        self.begin(None).at_caller()
    }

    /// Reads the batches from a state of [`StreamBatches::state`] on, at any number of ranks. Steps are counted from
    /// there.
    ///
    /// # Errors
    /// Fails if it is no state of the stream; otherwise as [`start`](StreamLoader::start).
    #[track_caller]
    pub fn resume(&self, state: &StreamState) -> Result<StreamBatches<B>> {
        self.begin(Some(state)).at_caller()
    }

    fn begin(&self, from: Option<&StreamState>) -> Result<StreamBatches<B>> {
        let Share { batch, rank, ranks } = self.share;
        let wrong = |field, why| Err(Error::config("StreamLoader", field, why));
        if rank >= ranks {
            return Err(Error::range("StreamLoader", "rank", rank, format!("in 0..{ranks}")));
        }
        if batch == 0 {
            return wrong("batch", "a batch of 0 examples ends no stream; give `batch` at least 1");
        }
        if self.ahead == 0 {
            return wrong("ahead", "a reader that may be 0 batches ahead reads none; give `ahead` at least 1");
        }
        let (read, after) = (self.open)(&self.share, from)?;
        let state = after.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let read = Mutex::new(read);
        let made = move |_: u64, stop: &AtomicBool| {
            // One thread reads, so the lock is free. A panic while it was held left the stream at some example, where
            // it continues.
            let batch =
                caught(|| (read.lock().unwrap_or_else(PoisonError::into_inner))(stop).transpose()).transpose()?;
            Some((batch, after.lock().unwrap_or_else(PoisonError::into_inner).clone()))
        };
        Ok(StreamBatches { workers: Workers::start(1, self.ahead, made)?, state, waited: Duration::ZERO })
    }
}

impl Share {
    /// Reads a batch and keeps this rank's rows.
    fn read<S: Stream>(&self, stream: &mut S, step: u64, stop: &AtomicBool) -> Option<Result<Batch<Vec<S::Example>>>> {
        let _span = trace::span(SpanKind::Data, "make batch");
        let mut examples = Vec::with_capacity(self.batch.min(1 << 16));
        let mut failed = None;
        let mut read = 0;
        while read < self.batch && !stop.load(Ordering::Relaxed) {
            let Some(example) = stream.next() else { break };
            read += 1;
            // After an error the rest of the batch is still read: the next batch begins where it would have.
            match example {
                Ok(example) => examples.push(example),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        if read == 0 {
            return None;
        }
        if let Some(error) = failed {
            return Some(Err(error.with_operands(|| format!("step {step}"))));
        }
        let (each, more) = (read / self.ranks, read % self.ranks);
        let (start, count) = (self.rank * each + self.rank.min(more), each + usize::from(self.rank < more));
        // A rank without a row is given the first, which does not count.
        let (start, rows) = if count == 0 { (0, 1) } else { (start, count) };
        let data: Vec<S::Example> = examples.into_iter().skip(start).take(rows).collect();
        Some(Ok(Batch { data, epoch: 0, step, count, rows, total: read }))
    }
}

/// The batches of a stream, in order. An error takes the place of its batch; a panic of the stream is such an error.
/// Dropping this ends the thread that reads.
pub struct StreamBatches<B> {
    workers: Workers<(Result<Batch<B>>, StreamState)>,
    state: StreamState,
    waited: Duration,
}

impl<B> StreamBatches<B> {
    /// The state at which the next batch begins: save it in checkpoints.
    pub fn state(&self) -> StreamState {
        self.state.clone()
    }

    /// The total time of all calls of `next`.
    pub fn waited(&self) -> Duration {
        self.waited
    }
}

impl<B: Send + 'static> Iterator for StreamBatches<B> {
    type Item = Result<Batch<B>>;

    fn next(&mut self) -> Option<Self::Item> {
        let begun = Instant::now();
        let _span = trace::span(SpanKind::Data, "wait for batch");
        let next = self.workers.next();
        self.waited += begun.elapsed();
        let (batch, state) = next?;
        self.state = state;
        Some(batch)
    }
}

impl<B> std::fmt::Debug for StreamBatches<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "StreamBatches({})", self.state)
    }
}
