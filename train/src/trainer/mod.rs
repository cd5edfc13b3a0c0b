//! The loop over training steps: [`Trainer`].

mod before_step;
mod builder;
mod distributed_config;
mod elastic;
mod engine;
mod evaluating;
mod follow_up;
mod policy;
mod replayed;
mod saving;
mod setup;
mod shares;
mod start;
mod step_log;
mod train_loop;

pub use builder::{TrainHandle, Trained, TrainedTensor, TrainerBuilder};
pub use distributed_config::{
    DistributedBackend, DistributedRole, DistributedTrainConfig, EngineKind, LaunchedProcess,
};
pub use policy::{Policy, PolicyStep};
pub use setup::{SetupModel, TrainConfig, TrainSetup};
pub use shares::Shares;

use std::{collections::BTreeMap, fmt};

use adaptive::elastic::ElasticWorld;
use data::{Batch, Loader};
use distributed::train::{Step, StepInput};
use nn::ModuleExt;
use numcore::{Result, Runtime};

use self::elastic::Commits;
use crate::{
    BestValue, Callback, Interval, Length, Progress, Resume, Sink, StopReason, resume::Callbacks,
    trainer::train_loop::TrainLoop,
};

/// Loops over the steps of a training run. It reads batches, takes steps, calls [callbacks](Callback) at every event,
/// synchronizes their requests over ranks, and sends measurements to [sinks](Sink).
///
/// One **step** is one update. The code of a run is equal for any number of ranks; with one rank nothing is exchanged.
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
/// let rows = |n| Rows::new(Array::new([n, 2], values(n))?);
/// let loader = |n| Ok::<_, numcore::Error>(Loader::new(rows(n)?).batch(4).stack().on(&cpu));
///
/// let report = Trainer::new(&model, step, loader(16)?.shuffle(1))
///     .until(Length::Epochs(5.0))
///     .with(Evaluate::on(loader(10)?).every(Interval::Steps(10)))
///     .run(|model, batch| {
///         let error = model.forward(&Var::new(batch.data.clone()))?.sub(2.0)?;
///         Loss::sum(error.square()?.sum_all()?, batch.count as f64)
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
    shares: Shares,
    fast_dev_run: Option<u64>,
    elastic: Option<Commits<'a, R>>,
    hash_state: Option<Interval>,
}

/// The averaging of a step's gradient: by example or by micro-batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Weighting {
    /// The mean over everything that losses are sums over, on all ranks together. An example, or a token, counts as
    /// much as any other, in any rank and micro-batch.
    #[default]
    ByWeight,
    /// The mean over ranks and micro-batches, each of which counts as much as any other, however many examples it has.
    /// With equal counts on all ranks it is the mean of the workers' means. Weights of losses are then no numbers of
    /// tokens or examples, so no length and no interval can be in tokens.
    #[doc(alias = "ByWorker")]
    PerMicroBatch,
}

/// The result of a run on this rank.
#[non_exhaustive]
pub struct RunReport<S> {
    /// The training step, with optimizer and gradients.
    pub step: S,
    /// The reason for which the run ended.
    pub reason: StopReason,
    /// The progress of the run at its end.
    pub progress: Progress,
    /// The step it was resumed at, if it was.
    pub resumed: Option<u64>,
    /// The loss of the last step: NaN where training has failed; none if the run took no step.
    pub loss: Option<f64>,
    /// The last values of evaluations, by name.
    pub evaluated: BTreeMap<String, f64>,
    /// The best values that [`Checkpoints`](crate::Checkpoints) or [`EarlyStop`](crate::EarlyStop) monitored, by name.
    /// They are values of the weights that [`restore_best`](crate::Checkpoints::restore_best) puts back.
    pub best: BTreeMap<String, BestValue>,
}

impl<S> fmt::Debug for RunReport<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} after {:?}", self.reason, self.progress)
    }
}

impl<'a, R: Runtime, M, S, B> Trainer<'a, R, M, S, B> {
    /// Makes a loop over the steps of a model with the batches of a loader: one epoch, unless [`until`](Trainer::until)
    /// sets another length. Each rank reads its share of each batch; the loader's own [rank](Loader::rank) is replaced.
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
            shares: Shares::default(),
            fast_dev_run: None,
            elastic: None,
            hash_state: None,
        }
    }

    /// Sets the length of the run.
    pub fn until(mut self, length: Length) -> Self {
        self.length = length;
        self
    }

    /// Adds a callback: an evaluation, a checkpoint policy, one of your own. Callbacks run in the order in which they
    /// were added.
    pub fn with(mut self, callback: impl Callback<R, M, B> + 'a) -> Self {
        self.callbacks.push(Box::new(callback));
        self
    }

    /// Sends the measurements to a sink, on rank 0.
    pub fn sink(mut self, sink: impl Sink + 'a) -> Self {
        self.sinks.push(Box::new(sink));
        self
    }

    /// Sets the interval at which loss, learning rate and recorded scalars go to sinks; at first every 10 steps.
    /// Evaluations send their values at once.
    pub fn record_every(mut self, interval: Interval) -> Self {
        self.record_every = interval;
        self
    }

    /// Sets the checkpoint from which the run goes on.
    pub fn resume(mut self, resume: Resume) -> Self {
        self.resume = resume;
        self
    }

    /// Sets the averaging of a step's gradient, by example or by micro-batch; the default is
    /// [by weight](Weighting::ByWeight).
    pub fn weighting(mut self, weighting: Weighting) -> Self {
        self.weighting = weighting;
        self
    }

    /// Sets the shares of each batch that ranks read. By default they follow measured speeds
    /// [where devices differ](Shares::WhereDevicesDiffer).
    pub fn shares(mut self, shares: Shares) -> Self {
        self.shares = shares;
        self
    }

    /// Lets ranks leave and join. The run goes on from the world's last [commit](ElasticWorld::commit). It commits at
    /// its beginning, at the interval `every`, and right before each checkpoint.
    ///
    /// The run belongs within the program of [`Elastic::run`](adaptive::elastic::Elastic::run), to which every error
    /// goes. Two errors make all ranks form a new world: one that names another rank, and the one that announces
    /// waiting ranks.
    ///
    /// Ranks that train by themselves commit where they synchronize, all of their parameters at once. A commit that is
    /// due before that waits for the next synchronization.
    ///
    /// A checkpoint that is saved again when the run [goes back](crate::Control::go_back) has no commit of its own. If
    /// a rank is lost before the next commit, the steps that led there are taken again. A commit waits until the
    /// checkpoint before is in place. After a failure only the commit, and the checkpoints that were in place, are
    /// used.
    pub fn elastic(mut self, world: &'a mut ElasticWorld<R>, every: Interval) -> Self {
        self.elastic = Some(Commits { world, every, owed: false });
        self
    }

    /// Keeps a hash of the state in the log of the run at an interval: of parameters, optimizer, and the tensors of
    /// callbacks. A [`StepReplay`](crate::StepReplay) compares it. Each costs one pass over this rank's part of the
    /// memory. The log is beside the checkpoints, so the run must save some.
    pub fn hash_state(mut self, every: Interval) -> Self {
        self.hash_state = Some(every);
        self
    }

    /// Sets a dry run of `steps` steps that checks that everything works. Each evaluation has one batch and runs at the
    /// end. Nothing is saved, nothing goes to sinks, and no checkpoint is looked for.
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
    /// Ends every epoch after `batches` batches.
    pub fn limit_batches(mut self, batches: u64) -> Self {
        self.loader = self.loader.limit(batches);
        self
    }

    /// Trains on the first `batches` batches alone, equal in every epoch: a model that can learn at all memorizes them.
    pub fn overfit_batches(mut self, batches: u64) -> Self {
        self.loader = self.loader.overfit(batches);
        self
    }

    /// Trains: `loss` computes the loss of a micro-batch, a [`Loss`](distributed::train::Loss), or a pipeline's
    /// [`MicroBatches`](distributed::pipeline::MicroBatches). Every rank calls it.
    ///
    /// A rank whose share of a batch is empty gets one row that does not count: the `loss` of that row has weight 0.
    ///
    /// # Errors
    /// An error on any rank ends the run with that error on all ranks. The last checkpoint stays.
    pub fn run<I: Into<StepInput<R>>>(self, mut loss: impl FnMut(&M, &Batch<B>) -> Result<I>) -> Result<RunReport<S>> {
        let mut buffers: Vec<_> = self.model.named_buffers().into_iter().map(|(_, buffer)| buffer).collect();
        let in_step = self.step.modules().into_iter().flat_map(|module| module.named_buffers());
        buffers.extend(in_step.map(|(_, buffer)| buffer));
        TrainLoop::new(self, |model: &M, batch: &Batch<B>| loss(model, batch).map(Into::into), buffers)?.run()
    }
}
