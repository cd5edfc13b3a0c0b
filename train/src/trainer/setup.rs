//! Training by a custom loop, with one line per step: [`Trainer::setup`].

use adaptive::balance::SpeedShares;
use data::{Batch, Batches, Loader, State};
use distributed::{
    RankDevices,
    buckets::BucketOptions,
    comm::{Collectives, Comm, Communicator},
    mesh::AsMesh,
    pipeline::PipelineModel,
    train::{Step, StepInput, StepModel, TrainStep, TrainingConfig, TrainingMetrics},
    zero::{ZeroOptions, ZeroStage},
};
use nn::{Module, ModuleExt, set_counted_rows};
use numcore::{Error, NullRuntime, Result, Runtime, Within};
use optim::IntoOptimizer;

use super::{
    DistributedTrainConfig, Policy, PolicyStep, Shares, Trainer, Weighting,
    engine::{counted_input, take_step},
    shares::{measured_step, own_batches, summary},
};
use crate::ModelInStep;

/// The configuration of training, beside model and optimizer. Each strategy is a value of a field, and no choice
/// changes a type or a loop.
///
/// ```
/// use distributed::{train::TrainingConfig, zero::ZeroStage};
/// use train::compat::TrainConfig;
///
/// let config = TrainConfig {
///     step: TrainingConfig { max_norm: Some(1.0), ..Default::default() },
///     zero: ZeroStage::Parameters.into(),
///     ..Default::default()
/// };
/// assert!(!config.experts);
/// ```
#[derive(Clone, Debug)]
pub struct TrainConfig {
    /// The options of the training step: micro-batches, clipping, loss scaling, buffers.
    pub step: TrainingConfig,
    /// The sharding of state, gradients and parameters: a [`ZeroStage`] with `.into()`, or all options.
    /// By default nothing is sharded.
    pub zero: ZeroOptions,
    /// The exchange of gradients where nothing is sharded; none for the default buckets.
    pub buckets: Option<BucketOptions>,
    /// The policy by which ranks exchange gradients or weights.
    pub policy: Policy,
    /// The shares of each batch that ranks read.
    pub shares: Shares,
    /// True for experts that a plan has shared out along the mesh's expert axis.
    #[doc(alias("MoE"))]
    pub experts: bool,
    /// The averaging of a step's gradient: by example or by micro-batch.
    pub weighting: Weighting,
    /// The expected ranks; none for as many as the communicator has.
    pub distributed: Option<DistributedTrainConfig>,
    /// The number of steps after which [`reached_max_steps`](TrainSetup::reached_max_steps) is true; none for never.
    pub max_steps: Option<u64>,
}

impl Default for TrainConfig {
    /// Plain data parallelism, with even shares on equal devices.
    fn default() -> Self {
        TrainConfig {
            step: TrainingConfig::default(),
            zero: ZeroStage::None.into(),
            buckets: None,
            experts: false,
            policy: Policy::Sync,
            shares: Shares::default(),
            weighting: Weighting::ByWeight,
            distributed: None,
            max_steps: None,
        }
    }
}

/// The model of a custom loop: `&model`, or a [`PipelineModel`], which the training step then owns.
pub struct SetupModel<'m, R: Runtime, M: ?Sized> {
    model: &'m M,
    of_step: StepModel<'m, R>,
}

impl<'m, R: Runtime, M: Module<R> + ?Sized> From<&'m M> for SetupModel<'m, R, M> {
    fn from(model: &'m M) -> Self {
        SetupModel { model, of_step: model.into() }
    }
}

impl<R: Runtime> From<PipelineModel<R>> for SetupModel<'_, R, ModelInStep> {
    fn from(stages: PipelineModel<R>) -> Self {
        SetupModel { model: &ModelInStep, of_step: stages.into() }
    }
}

/// A model with its training step, for a custom loop: [`Trainer::setup`] makes it.
#[doc(alias("DistributedCudaTrainer"))]
pub struct TrainSetup<'m, R: Runtime, M: ?Sized> {
    model: &'m M,
    step: PolicyStep<R>,
    config: TrainConfig,
    devices: RankDevices,
    shares: Option<SpeedShares>,
}

impl Trainer<'_, NullRuntime, (), (), ()> {
    /// Sets up a custom loop that trains on any number of ranks. Rank 0's weights are copied to all ranks, the model is
    /// put into training mode, and [`step`](TrainSetup::step) is a line.
    ///
    /// `mesh` is a communicator, a [`Mesh`](distributed::mesh::Mesh), or a runtime to train on one rank. `model` is
    /// `&model`, or a [`PipelineModel`], whose loop gives [`MicroBatches`](distributed::pipeline::MicroBatches) in
    /// place of losses.
    ///
    /// ```
    /// use data::{Array, Loader, Rows};
    /// use distributed::{comm::NoOpCommunicator, train::Loss};
    /// use nn::{Forward, Init, Linear};
    /// use optim::AdamWConfig;
    /// use train::Trainer;
    /// # use std::sync::Arc;
    /// # use autograd::Var;
    /// # use numcore::ops::{PointwiseOps, ReduceOps};
    /// # fn main() -> numcore::Result<()> {
    /// # let cpu = runtime_cpu::Cpu::with_threads(1);
    /// # let comm: distributed::comm::Comm<_> = Arc::new(NoOpCommunicator::new(&cpu));
    /// # let loader = Loader::new(Rows::new(Array::new([8, 2], vec![0.5f32; 16])?)?).batch(4).stack().on(&cpu);
    /// let model = Linear::new(&Init::new(&cpu, 0), 2, 1)?;
    /// let mut trainer = Trainer::setup(&comm, &model, AdamWConfig::default())?;
    /// for epoch in 0..3 {
    ///     for batch in trainer.epoch(&loader, epoch)? {
    ///         trainer.step(&batch?, |model, batch| {
    ///             let error = model.forward(&Var::new(batch.data.clone()))?.sub(2.0)?;
    ///             Loss::sum(error.square()?.sum_all()?, batch.count as f64)
    ///         })?;
    ///     }
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// An error on every rank if models or optimizers differ between ranks.
    #[track_caller]
    pub fn setup<'m, R: Runtime, M: Module<R> + ?Sized + 'm>(
        mesh: &impl AsMesh<R>,
        model: impl Into<SetupModel<'m, R, M>>,
        optimizer: impl IntoOptimizer<R>,
    ) -> Result<TrainSetup<'m, R, M>> {
        Trainer::setup_with(mesh, model, optimizer, TrainConfig::default())
    }

    /// Sets up training as [`setup`](Trainer::setup) does, with a configuration.
    ///
    /// # Errors
    /// The errors of [`setup`](Trainer::setup), and an error if the configuration contradicts itself or the mesh, or
    /// two of its features [exclude](distributed::combinations::COMBINATIONS) each other.
    #[track_caller]
    pub fn setup_with<'m, R: Runtime, M: Module<R> + ?Sized + 'm>(
        mesh: &impl AsMesh<R>,
        model: impl Into<SetupModel<'m, R, M>>,
        optimizer: impl IntoOptimizer<R>,
        config: TrainConfig,
    ) -> Result<TrainSetup<'m, R, M>> {
        let (mesh, SetupModel { model, of_step }) = (mesh.as_mesh(), model.into());
        config.distributed.iter().try_for_each(|distributed| distributed.check_world(mesh.world().size()))?;
        let TrainConfig { policy, shares, weighting, .. } = &config;
        let choices = format!("policy: {policy:?}\nshares: {shares:?}\nweighting: {weighting:?}");
        mesh.world().agree("the configuration of training", choices.as_bytes())?;
        model.train();
        let step = config.policy.step(&mesh, model, |mesh| {
            let builder = TrainStep::builder(mesh, of_step).optimizer(optimizer).config(config.step.clone());
            let builder = builder.zero(config.zero.clone());
            let builder = if config.experts { builder.experts() } else { builder };
            config.buckets.iter().fold(builder, |builder, buckets| builder.buckets(buckets.clone())).build()
        })?;
        step.modules().into_iter().for_each(|stage| stage.train());
        let devices = RankDevices::of(mesh.world())?;
        let shares = config.shares.of(&step, &devices, config.weighting)?;
        Ok(TrainSetup { model, step, config, devices, shares })
    }

    /// Sets up training of a head: a model around another, with a loss and a way to predict, which owns the inner
    /// model. As everything that owns modules is a [`Module`], this is [`setup`](Trainer::setup) by another name;
    /// [`setup_with`](Trainer::setup_with) takes the head with a configuration.
    ///
    /// # Errors
    /// The errors of [`setup`](Trainer::setup).
    #[doc(alias("HeadReplica"))]
    #[track_caller]
    pub fn head<'m, R: Runtime, M: Module<R> + ?Sized>(
        mesh: &impl AsMesh<R>,
        head: &'m M,
        optimizer: impl IntoOptimizer<R>,
    ) -> Result<TrainSetup<'m, R, M>> {
        Trainer::setup(mesh, head, optimizer)
    }
}

impl<'m, R: Runtime, M: Module<R> + ?Sized> TrainSetup<'m, R, M> {
    /// The batches of an epoch, of which this rank reads its share. Shares that follow measured speeds are those known
    /// when the epoch begins.
    ///
    /// # Errors
    /// An error if the loader's options are invalid.
    #[track_caller]
    pub fn epoch<B: Send + 'static>(&self, loader: &Loader<B>, epoch: u64) -> Result<Batches<B>> {
        let own = own_batches(loader.clone(), &self.step, self.shares.as_ref());
        own.resume(State { epoch, position: 0 }).at_caller()
    }

    /// Takes a step over one batch, on all ranks together.
    ///
    /// # Errors
    /// An error on any rank is an error on all ranks. It is an error too if a step takes several batches, by
    /// accumulation or by policy: [`step_from`](TrainSetup::step_from) takes them from an epoch.
    #[doc(alias("train_batch"))]
    #[track_caller]
    pub fn step<B, I: Into<StepInput<R>>>(
        &mut self,
        batch: &Batch<B>,
        loss: impl Fn(&M, &Batch<B>) -> Result<I>,
    ) -> Result<TrainingMetrics<R>> {
        let accumulation = self.step.accumulation();
        if accumulation != 1 {
            let several = if accumulation == usize::MAX { "several".into() } else { accumulation.to_string() };
            let why = format!(
                "a step here is one batch, and `accumulation` is {several}: take the batches from an epoch with `step_from`, or train with `with_loader`"
            );
            return Err(Error::config("TrainSetup::step", "accumulation", why));
        }
        let (model, weighting, before) = (self.model, self.config.weighting, set_counted_rows(None));
        let mut input = |_| Ok((counted_input(batch, weighting, || loss(model, batch))?, batch.count));
        let metrics = measured_step(&mut self.step, self.shares.as_mut(), (1, None), &mut input).at_caller();
        set_counted_rows(before);
        metrics
    }

    /// Takes a step over the next batches of an [`epoch`](TrainSetup::epoch), on all ranks together: as many as a step
    /// takes, or as are left. None when all are read.
    ///
    /// ```
    /// # use adaptive::balance::BalanceOptions;
    /// # use data::{Array, Loader, Rows};
    /// # use distributed::train::Loss;
    /// # use nn::{Forward, Init, Linear};
    /// # use optim::AdamWConfig;
    /// # use train::{Trainer, compat::{Policy, TrainConfig}};
    /// # use autograd::Var;
    /// # use numcore::ops::{PointwiseOps, ReduceOps};
    /// # fn main() -> numcore::Result<()> {
    /// # let cpu = runtime_cpu::Cpu::with_threads(1);
    /// # let loader = Loader::new(Rows::new(Array::new([8, 2], vec![0.5f32; 16])?)?).batch(4).stack().on(&cpu);
    /// # let model = Linear::new(&Init::new(&cpu, 0), 2, 1)?;
    /// let config = TrainConfig { policy: Policy::Cadence(BalanceOptions::default()), ..Default::default() };
    /// let mut trainer = Trainer::setup_with(&cpu, &model, AdamWConfig::default(), config)?;
    /// let mut batches = trainer.epoch(&loader, 0)?;
    /// while let Some(_metrics) = trainer.step_from(&mut batches, |model, batch| {
    ///     let error = model.forward(&Var::new(batch.data.clone()))?.sub(2.0)?;
    ///     Loss::sum(error.square()?.sum_all()?, batch.count as f64)
    /// })? {}
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// An error on any rank is an error on all ranks.
    #[track_caller]
    pub fn step_from<B: Send + 'static, I: Into<StepInput<R>>>(
        &mut self,
        batches: &mut Batches<B>,
        loss: impl Fn(&M, &Batch<B>) -> Result<I>,
    ) -> Result<Option<TrainingMetrics<R>>> {
        if batches.left_in_epoch() == 0 {
            return Ok(None);
        }
        let (before, mut loss) = (set_counted_rows(None), |batch: &Batch<B>| loss(self.model, batch).map(Into::into));
        let metrics = take_step(&mut self.step, batches, self.config.weighting, self.shares.as_mut(), None, &mut loss)
            .at_caller();
        set_counted_rows(before);
        metrics.map(|(metrics, _)| Some(metrics))
    }

    /// The communicator of all ranks.
    pub fn comm(&self) -> &Comm<R> {
        &self.step.ranks().everyone
    }

    /// Tells whether this rank is rank 0, which prints for all.
    #[doc(alias("is_coordinator"))]
    pub fn is_rank_zero(&self) -> bool {
        self.comm().rank() == 0
    }

    /// The devices of all ranks.
    pub fn devices(&self) -> &RankDevices {
        &self.devices
    }

    /// A summary of the devices of all ranks, for the start of a run, with the [shares](Shares) of ranks where they
    /// follow speeds.
    pub fn summary(&self) -> String {
        summary(&self.devices, self.shares.as_ref())
    }

    /// The configuration of the ranks; none where none was given.
    pub fn dist_config(&self) -> Option<&DistributedTrainConfig> {
        self.config.distributed.as_ref()
    }

    /// Tells whether [`max_steps`](TrainConfig::max_steps) steps were taken: a loop ends then, on all ranks at once.
    pub fn reached_max_steps(&self) -> bool {
        self.config.max_steps.is_some_and(|most| self.step.global_step() >= most)
    }

    /// The training step, with optimizer and gradients. With a [`Policy`] it is the step within.
    pub fn train_step(&mut self) -> &mut TrainStep<R> {
        self.step.inner_mut()
    }
}

impl<'m, R: Runtime, M> TrainSetup<'m, R, M> {
    /// Makes a [`Trainer`], the loop with callbacks and sinks, in place of a custom loop.
    pub fn with_loader<B>(self, loader: Loader<B>) -> Trainer<'m, R, M, PolicyStep<R>, B> {
        let TrainConfig { weighting, shares, .. } = self.config;
        Trainer::new(self.model, self.step, loader).weighting(weighting).shares(shares)
    }
}
