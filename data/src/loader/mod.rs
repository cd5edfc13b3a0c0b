//! [`Loader`]: batches of a dataset, made ahead by worker threads, in an order that depends on a seed and the epoch alone.

mod batches;
mod plan;
mod state;
mod workers;

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

pub use batches::{Batch, Batches};
use numcore::{Error, Result, Runtime, rng::Philox};
pub use plan::{Last, Share};
use plan::{Plan, Rows};
pub use state::State;
pub(crate) use workers::{Workers, caught};

use crate::{
    Dataset, Stack, ToDevice,
    order::{FirstPositions, Order, SequentialOrder, Shuffled},
    random::keyed,
};

/// Rows that padding may fill up to, whatever the number of examples: a batch that no memory holds is an error.
const LARGEST_PADDED: u64 = 1 << 20;

/// Batches ahead that no memory holds more of: room for them is made at once.
pub(crate) const MOST_AHEAD: usize = 1 << 12;

/// Makes the value of a batch out of the examples it reads.
type Make<B> = Arc<dyn Fn(&Request<'_>) -> Result<B> + Send + Sync>;

/// Batches of a dataset: PyTorch's `DataLoader` and `DistributedSampler`. [`rank`](Loader::rank) makes it read one rank's share, [`Last`] says what becomes of a
/// batch that is not whole, [`Batches::state`] and [`resume`](Loader::resume) go on at any number of ranks.
///
/// Which examples a batch holds is a function of seed, epoch and step. Numbers of ranks and workers, how far workers are ahead, and where a run was
/// resumed change no batch. [`batch`](Loader::batch) is the **global** batch, of which every rank reads its share.
///
/// ```
/// use data::{InMemory, Loader};
/// # fn main() -> numcore::Result<()> {
/// let loader = Loader::new(InMemory::new((0..10).map(f64::from).collect::<Vec<_>>())).batch(4).shuffle(7).workers(2).stack();
/// let mut seen = 0;
/// for batch in loader.epoch(0)? {
///     let batch = batch?;
///     seen += batch.data.dims()[0];
/// }
/// assert_eq!(seen, 10);
/// # Ok(())
/// # }
/// ```
#[doc(alias("DataLoader"))]
#[doc(alias("DistributedSampler"))]
pub struct Loader<B> {
    make: Make<B>,
    order: Arc<dyn Order>,
    batch: u64,
    last: Last,
    rank: usize,
    ranks: usize,
    share: Share,
    workers: usize,
    ahead: usize,
    /// Examples of the dataset: what an order may name.
    len: u64,
}

/// What a worker is asked for.
pub(crate) struct Request<'a> {
    pub rows: &'a Rows,
    pub epoch: u64,
    /// Set when nobody wants the batch any more.
    pub stop: &'a AtomicBool,
}

impl<E: Send + 'static> Loader<Vec<E>> {
    /// Batches of one example, in the dataset's order, as lists of examples.
    pub fn new(dataset: impl Dataset<Example = E> + 'static) -> Self {
        let len = dataset.len() as u64;
        Loader {
            make: Arc::new(move |request| request.read(&dataset)),
            order: Arc::new(SequentialOrder::new(len)),
            batch: 1,
            last: Last::Keep,
            rank: 0,
            ranks: 1,
            share: Share::Contiguous,
            workers: 1,
            ahead: 2,
            len,
        }
    }

    /// Passes each example through `f` with a random generator of its own, keyed by seed, example and which [reading](Order::readings) of the example it is, the
    /// epoch for most orders: augmentation that no number of workers or ranks changes, and that differs where a mixture repeats an example. Two of these steps
    /// draw different numbers where their seeds differ.
    pub fn augment<T: Send + 'static>(
        self,
        seed: u64,
        f: impl Fn(E, &mut Philox) -> Result<T> + Send + Sync + 'static,
    ) -> Loader<Vec<T>> {
        self.one_by_one("Loader::augment", move |example, reading, index| f(example, &mut keyed(seed, reading, index)))
    }

    /// Passes each example through `f`.
    pub fn map<T: Send + 'static>(self, f: impl Fn(E) -> Result<T> + Send + Sync + 'static) -> Loader<Vec<T>> {
        self.one_by_one("Loader::map", move |example, _, _| f(example))
    }

    /// Passes each example through `f`, with which reading of it this is and its number.
    fn one_by_one<T: Send + 'static>(
        self,
        op: &'static str,
        f: impl Fn(E, u64, u64) -> Result<T> + Send + Sync + 'static,
    ) -> Loader<Vec<T>> {
        self.then(move |examples, request| {
            let (given, rows) = (examples.len(), request.rows.indices.len());
            if given != rows {
                let why =
                    format!("{given} values where the batch has {rows} examples: change their number after this step");
                return Err(Error::argument(op, why));
            }
            let Rows { indices, readings, .. } = request.rows;
            let one = |(k, example): (usize, E)| {
                let reading = readings.as_ref().map_or(request.epoch, |readings| readings[k]);
                f(example, reading, indices[k]).map_err(|e| request.located(e, indices[k]))
            };
            examples.into_iter().enumerate().map(one).collect()
        })
    }

    /// Puts examples beside each other, as [`Stack`] says.
    pub fn stack(self) -> Loader<E::Batch>
    where
        E: Stack,
        E::Batch: Send + 'static,
    {
        self.collate(E::stack)
    }
}

impl<B: Send + 'static> Loader<B> {
    /// Passes what a batch has so far through `f`, in the worker that makes it: at first the list of examples, so `f` is PyTorch's
    /// `collate_fn`.
    pub fn collate<T: Send + 'static>(self, f: impl Fn(B) -> Result<T> + Send + Sync + 'static) -> Loader<T> {
        self.then(move |batch, _| f(batch))
    }

    /// Copies batches to the device of `rt` as soon as they are made: ahead of use. The copies are work of the queue of `rt`, so what is computed with them
    /// comes after them.
    pub fn on<R: Runtime>(self, rt: &R) -> Loader<B::OnDevice>
    where
        B: ToDevice<R>,
        B::OnDevice: Send + 'static,
    {
        let rt = rt.clone();
        self.collate(move |batch| batch.to_device(&rt))
    }

    /// The number of examples in a step of all ranks together. (PyTorch's `batch_size` is one rank's.)
    pub fn batch(mut self, examples: usize) -> Self {
        self.batch = examples as u64;
        self
    }

    /// Another random order in every epoch.
    pub fn shuffle(self, seed: u64) -> Self {
        let order = Shuffled::new(self.len, seed);
        self.order(order)
    }

    /// An order of one's own: a [`Mixture`](crate::order::Mixture), [`LengthBuckets`](crate::order::LengthBuckets).
    pub fn order(mut self, order: impl Order + 'static) -> Self {
        self.order = Arc::new(order);
        self
    }

    /// Ends every epoch after `batches` batches. Call it after what decides the order and the size of batches.
    pub fn limit(mut self, batches: u64) -> Self {
        self.order = Arc::new(FirstPositions::new(self.order, batches.saturating_mul(self.batch)));
        self
    }

    /// Gives the first `batches` batches of epoch 0 in every epoch: a model that learns at all learns these by heart. Call it after what decides the
    /// order and the size of batches.
    pub fn overfit(mut self, batches: u64) -> Self {
        self.order = Arc::new(FirstPositions::of_epoch_0(self.order, batches.saturating_mul(self.batch)));
        self
    }

    /// What becomes of a last batch that is not whole; at first it is [kept](Last::Keep).
    pub fn last(mut self, last: Last) -> Self {
        self.last = last;
        self
    }

    /// Keeps the last batch as it is where it would be [padded](Last::Pad): every row counts, except the one that
    /// stands in on a rank whose share is empty.
    pub fn unpadded(self) -> Self {
        let last = if self.last == Last::Pad { Last::Keep } else { self.last };
        self.last(last)
    }

    /// Reads the share of one rank of several. At first there is one rank.
    pub fn rank(mut self, rank: usize, ranks: usize) -> Self {
        (self.rank, self.ranks) = (rank, ranks);
        self
    }

    /// Which rows of a batch a rank reads; at first [those side by side](Share::Contiguous).
    pub fn share(mut self, share: Share) -> Self {
        self.share = share;
        self
    }

    /// Threads that make batches; at first 1. With 0 the caller's own thread makes each batch when it is asked for.
    pub fn workers(mut self, threads: usize) -> Self {
        self.workers = threads;
        self
    }

    /// How many batches each worker is ahead: finished and not yet taken. At first 2.
    pub fn ahead(mut self, batches: usize) -> Self {
        self.ahead = batches.min(crate::loader::MOST_AHEAD);
        self
    }

    /// The number of examples in a step of all ranks together: what [`batch`](Loader::batch) set.
    pub fn batch_size(&self) -> usize {
        self.batch as usize
    }

    /// Steps in an epoch.
    ///
    /// # Errors
    /// If the loader's numbers make no sense.
    pub fn steps(&self) -> Result<u64> {
        Ok(self.plan()?.steps_from(0))
    }

    /// Positions in an epoch: what [`State::position`] counts up to.
    pub fn positions(&self) -> u64 {
        self.order.len()
    }

    /// The batches of an epoch.
    ///
    /// # Errors
    /// If the loader's numbers make no sense, or no thread can be started.
    pub fn epoch(&self, epoch: u64) -> Result<Batches<B>> {
        self.resume(State { epoch, position: 0 })
    }

    /// The rest of an epoch, from a state that [`Batches::state`] gave, at any number of ranks, workers and batches ahead.
    ///
    /// # Errors
    /// If the epoch has fewer examples; otherwise as [`epoch`](Loader::epoch).
    pub fn resume(&self, state: State) -> Result<Batches<B>> {
        let plan = self.plan()?.from(state)?.one_epoch();
        Batches::start(plan, Arc::clone(&self.make), self.workers, self.ahead)
    }

    /// Epoch after epoch without end, from a state on. Workers begin an epoch while the one before is still read.
    ///
    /// # Errors
    /// If an epoch has no step; otherwise as [`resume`](Loader::resume).
    pub fn endless(&self, state: State) -> Result<Batches<B>> {
        let plan = self.plan()?.from(state)?;
        if plan.steps_from(0) == 0 {
            let why =
                format!("an epoch of {} has no batch of {}, so there is nothing to go on with", self.len, self.batch);
            return Err(Error::argument("Loader", why));
        }
        Batches::start(plan, Arc::clone(&self.make), self.workers, self.ahead)
    }

    /// A line for the notes of a checkpoint: the state, and the order it is of.
    pub fn note(&self, state: State) -> String {
        format!("{state} of {}", self.order.describe())
    }

    /// The state that [`note`](Loader::note) wrote.
    ///
    /// # Errors
    /// If it is no note, or of another order.
    pub fn state_of(&self, note: &str) -> Result<State> {
        let wrong = |why: String| Error::argument("Loader::state_of", format!("`{note}` {why}"));
        let (state, order) = note.split_once(" of ").ok_or_else(|| wrong("is no note of a loader".into()))?;
        if order != self.order.describe() {
            return Err(wrong(format!("is of another order than this loader's, `{}`", self.order.describe())));
        }
        state.parse().map_err(|_| wrong("is no note of a loader".into()))
    }

    /// Another step after those that make a batch.
    fn then<T: Send + 'static>(self, f: impl Fn(B, &Request<'_>) -> Result<T> + Send + Sync + 'static) -> Loader<T> {
        let Loader { make, order, batch, last, rank, ranks, share, workers, ahead, len } = self;
        let make = Arc::new(move |request: &Request<'_>| {
            let batch = make(request)?;
            f(batch, request)
        });
        Loader { make, order, batch, last, rank, ranks, share, workers, ahead, len }
    }

    fn plan(&self) -> Result<Plan> {
        let wrong = |why: String| Err(Error::argument("Loader", why));
        if self.rank >= self.ranks {
            return wrong(format!("there is no rank {} among {}", self.rank, self.ranks));
        }
        if self.batch == 0 {
            return wrong("a batch of 0 examples ends no epoch; give `batch` at least 1".into());
        }
        if self.last == Last::Pad && self.batch > self.order.len().max(LARGEST_PADDED) {
            return wrong(format!(
                "batches of {} examples are padded from {} with nearly nothing else",
                self.batch,
                self.order.len()
            ));
        }
        if self.ahead == 0 && self.workers > 0 {
            return wrong(
                "workers that may be 0 batches ahead make none; use `workers(0)` to make batches on demand".into(),
            );
        }
        let Loader { batch, last, rank, ranks, share, .. } = *self;
        Ok(Plan::new(Arc::clone(&self.order), batch, last, share, (rank, ranks)))
    }
}

impl<B> Clone for Loader<B> {
    fn clone(&self) -> Self {
        let Loader { make, order, .. } = self;
        Loader { make: Arc::clone(make), order: Arc::clone(order), ..*self }
    }
}

impl Request<'_> {
    /// The examples of the request's rows.
    fn read<D: Dataset>(&self, dataset: &D) -> Result<Vec<D::Example>> {
        let mut examples = Vec::with_capacity(self.rows.indices.len());
        for &index in &self.rows.indices {
            if self.stop.load(Ordering::Relaxed) {
                return Err(Error::argument("Loader", "the batch was given up: nobody reads it any more"));
            }
            examples.push(dataset.get(index as usize).map_err(|e| self.located(e, index))?);
        }
        Ok(examples)
    }

    /// The error, saying which example it came from.
    fn located(&self, error: Error, index: u64) -> Error {
        error.with_operands(|| format!("example {index} of epoch {}", self.epoch))
    }
}
