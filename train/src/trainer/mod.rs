//! The loop over training steps: [`Trainer`].

mod before_step;
mod builder;
mod cycle;
mod distributed_config;
mod elastic;
mod engine;
mod evaluating;
mod follow_up;
mod saving;
mod setup;
mod start;

pub use builder::{TrainHandle, Trained, TrainedTensor, TrainerBuilder};
pub use distributed_config::{
    DistributedBackend, DistributedRole, DistributedTrainConfig, EngineKind, LaunchedProcess,
};
pub use setup::{TrainConfig, TrainSetup};

use std::{collections::BTreeMap, fmt};

use data::{Batch, Loader};
use distributed::{
    elastic::ElasticWorld,
    train::{Step, StepInput},
};
use nn::ModuleExt;
use numcore::{Result, Runtime};

use self::elastic::Commits;
use crate::{
    BestValue, Callback, Interval, Length, Progress, Resume, Sink, StopReason, resume::Callbacks, trainer::cycle::Cycle,
};

/// Loops over the steps of a training run: reads batches, takes steps, calls [callbacks](Callback) at every event, agrees with the other ranks
/// on what they request, and gives [sinks](Sink) what was measured.
///
/// One **step** is one update. Whatever the number of ranks, a run is this text; with one rank nothing is exchanged.
///
/// ```
/// use data::{Array, Loader, Rows};
/// use distributed::{comm::NoOpCommunicator, train::{Loss, TrainStep}};
/// use nn::{Forward, Init, Linear};
/// use optim::AdamWConfig;
/// use train::{Evaluate, Interval, Length, Trainer};
/// # use autograd::Var;
/// # use numcore::ops::{PointwiseOps, ReduceOps};
/// # fn main() -> numcore::Result<()> {
/// # let cpu = runtime_cpu::Cpu::with_threads(1);
/// let comm = NoOpCommunicator::new(&cpu);
/// let model = Linear::new(&Init::new(&cpu, 0), 2, 1)?;
/// let step = TrainStep::builder(&comm, &model).optimizer(AdamWConfig { lr: 0.05, ..Default::default() }).build()?;
/// let values = |n: usize| (0..2 * n).map(|i| i as f32 / 100.0).collect();
/// let loader = |n| Ok::<_, numcore::Error>(Loader::new(Rows::new(Array::new([n, 2], values(n))?)?).batch(4).stack().on(&cpu));
///
/// let report = Trainer::new(&model, step, loader(16)?.shuffle(1))
///     .until(Length::Epochs(5.0))
///     .with(Evaluate::on(loader(10)?).every(Interval::Steps(10)))
///     .run(|model, batch| {
///         let error = model.forward(&Var::new(batch.data.clone()))?.sub(2.0)?;
///         Loss::sum(error.square()?.sum(&[], false)?, batch.count as f64)
///     })?;
/// assert_eq!(report.progress.step, 20);
/// assert!(report.evaluated["validation/loss"] < 4.0);
/// # Ok(())
/// # }
/// ```
#[must_use = "`run` trains"]
pub struct Trainer<'a, R: Runtime, M, S, B> {
    model: &'a M,
    step: S,
    loader: Loader<B>,
    length: Length,
    callbacks: Callbacks<'a, R, M, B>,
    sinks: Vec<Box<dyn Sink + 'a>>,
    record_every: Interval,
    resume: Resume,
    weighting: Weighting,
    fast_dev_run: Option<u64>,
    elastic: Option<Commits<'a, R>>,
}

/// What a step's gradient is the mean over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Weighting {
    /// Over everything that losses are sums over, on all ranks together: an example, or a token, counts as much as any other, whatever rank
    /// and micro-batch it is in.
    #[default]
    ByWeight,
    /// Over ranks and micro-batches: each counts as much as any other, however many examples it has. The mean of the workers' means. What losses weigh is
    /// then no number of tokens or examples, so no length and no interval can be in tokens.
    ByWorker,
}

/// What a run came to.
#[non_exhaustive]
pub struct RunReport<S> {
    /// The training step, with optimizer and gradients.
    pub step: S,
    /// Why it ended.
    pub reason: StopReason,
    /// How far it came.
    pub progress: Progress,
    /// The step it was resumed at, if it was.
    pub resumed: Option<u64>,
    /// The loss of the last step: NaN where training has failed; none if the run took no step.
    pub loss: Option<f64>,
    /// The last values of evaluations, by name.
    pub evaluated: BTreeMap<String, f64>,
    /// Of each value that [`Checkpoints`](crate::Checkpoints) or [`EarlyStop`](crate::EarlyStop) looked at the best one, by name: that of the weights that
    /// [`restore_best`](crate::Checkpoints::restore_best) puts back.
    pub best: BTreeMap<String, BestValue>,
}

impl<S> fmt::Debug for RunReport<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} after {:?}", self.reason, self.progress)
    }
}

impl<'a, R: Runtime, M, S, B> Trainer<'a, R, M, S, B> {
    /// A loop over the steps of a model with the batches of a loader: once through them, unless [`until`](Trainer::until) says otherwise. Of each
    /// batch a rank reads its share; the loader's own [rank](Loader::rank) is replaced.
    pub fn new(model: &'a M, step: S, loader: Loader<B>) -> Self {
        Trainer {
            model,
            step,
            loader,
            length: Length::Epochs(1.0),
            callbacks: Vec::new(),
            sinks: Vec::new(),
            record_every: Interval::Steps(10),
            resume: Resume::No,
            weighting: Weighting::default(),
            fast_dev_run: None,
            elastic: None,
        }
    }

    /// How long the run is.
    pub fn until(mut self, length: Length) -> Self {
        self.length = length;
        self
    }

    /// Adds a callback: an evaluation, a policy of checkpoints, one of your own. They are called in the order in which they were added.
    pub fn with(mut self, callback: impl Callback<R, M, B> + 'a) -> Self {
        self.callbacks.push(Box::new(callback));
        self
    }

    /// Gives what is measured to a sink, on rank 0.
    pub fn sink(mut self, sink: impl Sink + 'a) -> Self {
        self.sinks.push(Box::new(sink));
        self
    }

    /// How often loss, learning rate and recorded scalars go to sinks; at first every 10 steps. What evaluations measure is given at once.
    pub fn record_every(mut self, interval: Interval) -> Self {
        self.record_every = interval;
        self
    }

    /// From where the run goes on.
    pub fn resume(mut self, resume: Resume) -> Self {
        self.resume = resume;
        self
    }

    /// What a step's gradient is the mean over; at first [by weight](Weighting::ByWeight).
    pub fn weighting(mut self, weighting: Weighting) -> Self {
        self.weighting = weighting;
        self
    }

    /// Lets ranks leave and join: the run goes on from what the world has [committed](ElasticWorld::commit), and commits every so often, right before each checkpoint, and at
    /// its beginning. Comes within the program of [`Elastic::run`](distributed::elastic::Elastic::run), to which every error goes: one that names another rank, and
    /// the one that says that ranks wait to be taken in, make all ranks meet again.
    ///
    /// Ranks that train by themselves commit where they meet, all of their parameters at once: what is due before that waits for the next meeting.
    ///
    /// A checkpoint that is saved again when the run [goes back](crate::Control::go_back) has no commit of its own: if a rank is lost before the next commit, the steps that
    /// led there are taken again. A commit waits until the checkpoint before is in place. After a failure nothing but what was committed, and the checkpoints that were in
    /// place, is used.
    pub fn elastic(mut self, world: &'a mut ElasticWorld<R>, every: Interval) -> Self {
        self.elastic = Some(Commits { world, every, owed: false });
        self
    }

    /// Tries whether everything works: so many steps, one batch in each evaluation, which runs at the end; nothing is saved, nothing is given to sinks, and no
    /// checkpoint is looked for.
    pub fn fast_dev_run(mut self, steps: u64) -> Self {
        self.fast_dev_run = Some(steps.max(1));
        self
    }
}

impl<'a, R, M, S, B> Trainer<'a, R, M, S, B>
where
    R: Runtime,
    M: nn::Module<R>,
    S: Step<R>,
    B: Send + 'static,
{
    /// Ends every epoch after so many batches.
    pub fn limit_batches(mut self, batches: u64) -> Self {
        self.loader = self.loader.limit(batches);
        self
    }

    /// Trains on the first batches alone, so many, the same in every epoch: a model that learns at all learns them by heart.
    pub fn overfit_batches(mut self, batches: u64) -> Self {
        self.loader = self.loader.overfit(batches);
        self
    }

    /// Trains: `loss` computes what a micro-batch becomes, a [`Loss`](distributed::train::Loss), or a pipeline's
    /// [`MicroBatches`](distributed::pipeline::MicroBatches). Every rank calls it.
    ///
    /// A rank whose share of a batch is empty is given one row that does not count: what `loss` makes of it weighs nothing.
    ///
    /// # Errors
    /// On every rank what fails on one, with its words. The last checkpoint is there.
    pub fn run<I: Into<StepInput<R>>>(self, mut loss: impl FnMut(&M, &Batch<B>) -> Result<I>) -> Result<RunReport<S>> {
        let mut buffers: Vec<_> = self.model.named_buffers().into_iter().map(|(_, buffer)| buffer).collect();
        let in_step = self.step.modules().into_iter().flat_map(|module| module.named_buffers());
        buffers.extend(in_step.map(|(_, buffer)| buffer));
        Cycle::new(self, |model: &M, batch: &Batch<B>| loss(model, batch).map(Into::into), buffers)?.run()
    }
}
