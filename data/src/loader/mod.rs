//! [`Loader`]: batches of a dataset, made ahead by worker threads, in an order that depends on a seed and the epoch
//! alone.

mod batches;
mod plan;
mod state;
mod workers;

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

pub use batches::{Batch, Batches};
use numcore::{Error, Result, Runtime, Within, rng::Philox};
pub use plan::{Last, Share};
use plan::{Plan, Rows};
pub use state::State;
pub(crate) use workers::{Workers, caught};

use crate::{
    Dataset, Stack, ToDevice,
    order::{FirstPositions, Order, SequentialOrder, Shuffled},
    random::keyed,
};

/// The number of rows that padding may fill up to, whatever the number of examples. A batch that no memory holds is an
/// error.
const LARGEST_PADDED: u64 = 1 << 20;

/// The largest number of batches ahead. Room for them is allocated at once.
pub(crate) const MOST_AHEAD: usize = 1 << 12;

/// Makes the data of a batch from the rows of its request.
type Make<B> = Arc<dyn Fn(&Request<'_>) -> Result<B> + Send + Sync>;

/// The number of rows of each share of a batch, by the number of the batch's rows.
type Sizes = Arc<dyn Fn(usize) -> Vec<usize> + Send + Sync>;

/// Batches of a dataset: PyTorch's `DataLoader` and `DistributedSampler`. [`rank`](Loader::rank) selects one rank's
/// share. [`Last`] selects the treatment of an incomplete last batch. [`Batches::state`] and [`resume`](Loader::resume)
/// continue a run at any number of ranks.
///
/// The examples of a batch are a function of seed, epoch and step. The numbers of ranks, workers and batches ahead
/// change no batch, nor does the point of a resumption. [`batch`](Loader::batch) sets the **global** batch, of which
/// every rank reads its share.
///
/// ```
/// use data::{InMemory, Loader};
/// # fn main() -> numcore::Result<()> {
/// let loader = Loader::new(InMemory::new(vec![0.5f32; 10])).batch(4).shuffle(7).workers(2).stack();
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
    /// The sizes of uneven shares.
    sizes: Option<Sizes>,
    workers: usize,
    ahead: usize,
    /// The number of examples of the dataset: the bound of the indices of an order.
    len: u64,
}

/// The task of a worker: the rows and the epoch of one batch.
pub(crate) struct Request<'a> {
    pub rows: &'a Rows,
    pub epoch: u64,
    /// True once the batch is no longer wanted.
    pub stop: &'a AtomicBool,
}

impl<E: Send + 'static> Loader<Vec<E>> {
    /// Loads lists of one example each, in the dataset's order, with one worker that is 2 batches ahead.
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
            sizes: None,
            workers: 1,
            ahead: 2,
            len,
        }
    }

    /// Passes each example through `f` with a random generator of its own. The key of the generator is seed, example
    /// and [reading](Order::readings) of the example: for most orders, the epoch. No number of workers or ranks changes
    /// such augmentation, and it differs where a mixture repeats an example. Two `augment` steps draw different numbers
    /// only if their seeds differ.
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

    /// Passes each example through `f`, with its reading and its index.
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
                return Err(Error::lengths(op, &[given, rows], why));
            }
            let Rows { indices, readings, .. } = request.rows;
            let one = |(k, example): (usize, E)| {
                let reading = readings.as_ref().map_or(request.epoch, |readings| readings[k]);
                f(example, reading, indices[k]).map_err(|e| request.located(e, indices[k]))
            };
            examples.into_iter().enumerate().map(one).collect()
        })
    }

    /// Stacks the examples of a batch by the rules of [`Stack`].
    pub fn stack(self) -> Loader<E::Batch>
    where
        E: Stack,
        E::Batch: Send + 'static,
    {
        self.collate(E::stack)
    }
}

impl<B: Send + 'static> Loader<B> {
    /// Passes the batch through `f`, in the worker that makes it, after all steps so far. The first step receives the
    /// list of examples: its `f` is PyTorch's `collate_fn`.
    pub fn collate<T: Send + 'static>(self, f: impl Fn(B) -> Result<T> + Send + Sync + 'static) -> Loader<T> {
        self.then(move |batch, _| f(batch))
    }

    /// Copies batches to the device of `rt` as soon as they are made, ahead of use. The copies run on the queue of
    /// `rt`, so later work on that queue sees them complete.
    pub fn on<R: Runtime>(self, rt: &R) -> Loader<B::OnDevice>
    where
        B: ToDevice<R>,
        B::OnDevice: Send + 'static,
    {
        let rt = rt.clone();
        self.collate(move |batch| batch.to_device(&rt))
    }

    /// Sets the global batch size: the number of examples in a batch of all ranks together; 1 by default. (PyTorch's
    /// `batch_size` is per rank.) A training step that accumulates reads several batches.
    pub fn batch(mut self, examples: usize) -> Self {
        self.batch = examples as u64;
        self
    }

    /// Reads the examples in another random order in every epoch.
    pub fn shuffle(self, seed: u64) -> Self {
        let order = Shuffled::new(self.len, seed);
        self.order(order)
    }

    /// Reads the examples in a custom order: a [`Mixture`](crate::order::Mixture),
    /// [`LengthBuckets`](crate::order::LengthBuckets).
    pub fn order(mut self, order: impl Order + 'static) -> Self {
        self.order = Arc::new(order);
        self
    }

    /// Ends every epoch after `batches` batches. Call it after the methods that set the order and the batch size.
    pub fn limit(mut self, batches: u64) -> Self {
        self.order = Arc::new(FirstPositions::new(self.order, batches.saturating_mul(self.batch)));
        self
    }

    /// Gives the first `batches` batches of epoch 0 in every epoch: a model that learns at all learns these by heart.
    /// Call it after the methods that set the order and the batch size.
    pub fn overfit(mut self, batches: u64) -> Self {
        self.order = Arc::new(FirstPositions::of_epoch_0(self.order, batches.saturating_mul(self.batch)));
        self
    }

    /// Sets the treatment of an incomplete last batch; [`Last::Keep`] by default.
    pub fn last(mut self, last: Last) -> Self {
        self.last = last;
        self
    }

    /// Replaces [`Last::Pad`] by [`Last::Keep`]: every row counts, except the stand-in row on a rank whose share is
    /// empty.
    pub fn unpadded(self) -> Self {
        let last = if self.last == Last::Pad { Last::Keep } else { self.last };
        self.last(last)
    }

    /// Reads the share of rank `rank` of `ranks`; by default there is one rank.
    pub fn rank(mut self, rank: usize, ranks: usize) -> Self {
        (self.rank, self.ranks, self.sizes) = (rank, ranks, None);
        self
    }

    /// Reads share `rank` of shares of unequal sizes, for ranks of different speeds. `sizes` returns the number of rows
    /// of each share, for the number of rows of a batch. Shares are contiguous. Each batch has the examples that it has
    /// at even shares.
    ///
    /// ```
    /// use data::{InMemory, Loader};
    /// # fn main() -> numcore::Result<()> {
    /// let loader = Loader::new(InMemory::new(vec![0.0; 8])).batch(4).stack().uneven(1, |rows| vec![rows - 1, 1]);
    /// assert_eq!(loader.epoch(0)?.next().transpose()?.map(|batch| (batch.count, batch.total)), Some((1, 4)));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The batch is an error if the sizes do not add up to its rows, or there are no more than `rank`.
    pub fn uneven(self, rank: usize, sizes: impl Fn(usize) -> Vec<usize> + Send + Sync + 'static) -> Self {
        Loader { rank, ranks: rank + 1, sizes: Some(Arc::new(sizes)), ..self }
    }

    /// Sets the rows of a batch that a rank reads; [`Share::Contiguous`] by default.
    pub fn share(mut self, share: Share) -> Self {
        self.share = share;
        self
    }

    /// Sets the number of threads that make batches; 1 by default. With 0 the caller's own thread makes each batch on
    /// demand.
    pub fn workers(mut self, threads: usize) -> Self {
        self.workers = threads;
        self
    }

    /// Sets the number of finished batches that each worker keeps ready, as PyTorch's `prefetch_factor`; 2 by default.
    /// More than 4096 count as 4096. With 0 and any workers, [`epoch`](Loader::epoch) fails.
    pub fn ahead(mut self, batches: usize) -> Self {
        self.ahead = batches.min(crate::loader::MOST_AHEAD);
        self
    }

    /// The number of examples in a batch of all ranks together, set by [`batch`](Loader::batch).
    pub fn batch_size(&self) -> usize {
        self.batch as usize
    }

    /// The number of batches in an epoch. Training steps that accumulate are fewer.
    ///
    /// # Errors
    /// Fails if `rank` is not below `ranks`, the batch has 0 examples, or `ahead` is 0 while there are workers. With
    /// [`Last::Pad`] it also fails if the batch is larger than both an epoch and 2²⁰.
    #[track_caller]
    pub fn steps(&self) -> Result<u64> {
        Ok(self.plan().at_caller()?.steps_from(0))
    }

    /// The number of positions in an epoch, up to which [`State::position`] counts.
    pub fn positions(&self) -> u64 {
        self.order.len()
    }

    /// Reads the batches of an epoch.
    ///
    /// # Errors
    /// Fails as [`steps`](Loader::steps) does, or if no thread can be started.
    #[track_caller]
    pub fn epoch(&self, epoch: u64) -> Result<Batches<B>> {
        self.resume(State { epoch, position: 0 })
    }

    /// Reads the rest of an epoch from a state of [`Batches::state`], at any number of ranks, workers and batches
    /// ahead.
    ///
    /// # Errors
    /// Fails if the state's position is past the end of an epoch; otherwise as [`epoch`](Loader::epoch).
    #[track_caller]
    pub fn resume(&self, state: State) -> Result<Batches<B>> {
        let plan = self.plan().at_caller()?.from(state).at_caller()?.one_epoch();
        Batches::start(plan, Arc::clone(&self.make), self.workers, self.ahead).at_caller()
    }

    /// Reads epoch after epoch without end, from a state on. Workers begin an epoch while the previous one is still
    /// read.
    ///
    /// # Errors
    /// Fails if an epoch has no step; otherwise as [`resume`](Loader::resume).
    #[track_caller]
    pub fn endless(&self, state: State) -> Result<Batches<B>> {
        let plan = self.plan().at_caller()?.from(state).at_caller()?;
        if plan.steps_from(0) == 0 {
            let why =
                format!("an epoch of {} has no batch of {}, so there is nothing to go on with", self.len, self.batch);
            return Err(Error::config("Loader", "batch", why)).at_caller();
        }
        Batches::start(plan, Arc::clone(&self.make), self.workers, self.ahead).at_caller()
    }

    /// A line for the notes of a checkpoint: the state, and a description of the order.
    pub fn note(&self, state: State) -> String {
        format!("{state} of {}", self.order.describe())
    }

    /// Reads the state from a line that [`note`](Loader::note) wrote.
    ///
    /// # Errors
    /// Fails if the line is no such note, or describes another order than this loader's.
    #[track_caller]
    pub fn state_of(&self, note: &str) -> Result<State> {
        let wrong = |why: String| Error::format("Loader::state_of", format!("`{note}` {why}"));
        let (state, order) =
            note.split_once(" of ").ok_or_else(|| wrong("is no note of a loader".into())).at_caller()?;
        if order != self.order.describe() {
            return Err(wrong(format!("is of another order than this loader's, `{}`", self.order.describe())))
                .at_caller();
        }
        state.parse().map_err(|_| wrong("is no note of a loader".into())).at_caller()
    }

    /// Appends a step to those that make a batch.
    fn then<T: Send + 'static>(self, f: impl Fn(B, &Request<'_>) -> Result<T> + Send + Sync + 'static) -> Loader<T> {
        let Loader { make, order, batch, last, rank, ranks, share, sizes, workers, ahead, len } = self;
        let make = Arc::new(move |request: &Request<'_>| {
            let batch = make(request)?;
            f(batch, request)
        });
        Loader { make, order, batch, last, rank, ranks, share, sizes, workers, ahead, len }
    }

    fn plan(&self) -> Result<Plan> {
        let wrong = |field, why: String| Err(Error::config("Loader", field, why));
        if self.rank >= self.ranks {
            return Err(Error::range("Loader", "rank", self.rank, format!("in 0..{}", self.ranks)));
        }
        if self.batch == 0 {
            return wrong("batch", "a batch of 0 examples ends no epoch; give `batch` at least 1".into());
        }
        if self.last == Last::Pad && self.batch > self.order.len().max(LARGEST_PADDED) {
            let why = format!(
                "batches of {} examples are padded from {} with nearly nothing else",
                self.batch,
                self.order.len()
            );
            return wrong("batch", why);
        }
        if self.ahead == 0 && self.workers > 0 {
            let why = "workers that may be 0 batches ahead make none; use `workers(0)` to make batches on demand";
            return wrong("ahead", why.into());
        }
        let Loader { batch, last, rank, ranks, share, .. } = *self;
        Ok(Plan::new(Arc::clone(&self.order), batch, last, share, (rank, ranks)).uneven(self.sizes.clone()))
    }
}

impl<B> Clone for Loader<B> {
    fn clone(&self) -> Self {
        let Loader { make, order, sizes, .. } = self;
        Loader { make: Arc::clone(make), order: Arc::clone(order), sizes: sizes.clone(), ..*self }
    }
}

impl Request<'_> {
    /// Reads the examples of the request's rows.
    fn read<D: Dataset>(&self, dataset: &D) -> Result<Vec<D::Example>> {
        let mut examples = Vec::with_capacity(self.rows.indices.len());
        for &index in &self.rows.indices {
            if self.stop.load(Ordering::Relaxed) {
                return Err(Error::usage("Loader", "the batch was dropped: its reader has ended"));
            }
            examples.push(dataset.get(index as usize).map_err(|e| self.located(e, index))?);
        }
        Ok(examples)
    }

    /// The error, with the index and the epoch of its example.
    fn located(&self, error: Error, index: u64) -> Error {
        error.with_operands(|| format!("example {index} of epoch {}", self.epoch))
    }
}
