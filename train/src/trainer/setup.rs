//! Training by a custom loop, with one line per step: [`Trainer::setup`].

use data::{Batch, Batches, Loader, State};
use distributed::{
    RankDevices,
    comm::{Comm, Communicator},
    strategy::BatchShare,
    train::{Loss, TrainStep, TrainingConfig, TrainingMetrics},
};
use nn::{Module, ModuleExt, set_counted_rows};
use numcore::{Error, NullRuntime, Result, Runtime, Within};
use optim::IntoOptimizer;

use super::{DistributedTrainConfig, Trainer, Weighting};
use crate::padding::counted;

/// The configuration of training, beside model and optimizer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TrainConfig {
    /// The options of the training step: micro-batches, clipping, loss scaling, buffers.
    pub step: TrainingConfig,
    /// The averaging of a step's gradient: by example or by micro-batch.
    pub weighting: Weighting,
    /// The expected ranks; none for as many as the communicator has.
    pub distributed: Option<DistributedTrainConfig>,
    /// The number of steps after which [`reached_max_steps`](TrainSetup::reached_max_steps) is true; none for never.
    pub max_steps: Option<u64>,
}

/// A model with its training step, for a custom loop: [`Trainer::setup`] makes it.
#[doc(alias("DistributedCudaTrainer"))]
pub struct TrainSetup<'m, R: Runtime, M: ?Sized> {
    model: &'m M,
    step: TrainStep<R>,
    config: TrainConfig,
    devices: RankDevices,
}

impl Trainer<'_, NullRuntime, (), (), ()> {
    /// Sets up a custom loop that trains on any number of ranks. Rank 0's weights are copied to all ranks, the model is
    /// put into training mode, and [`step`](TrainSetup::step) is a line.
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
    pub fn setup<'m, R: Runtime, M: Module<R> + ?Sized>(
        comm: &Comm<R>,
        model: &'m M,
        optimizer: impl IntoOptimizer<R>,
    ) -> Result<TrainSetup<'m, R, M>> {
        Trainer::setup_with(comm, model, optimizer, TrainConfig::default())
    }

    /// Sets up training as [`setup`](Trainer::setup) does, with a configuration.
    ///
    /// # Errors
    /// The errors of [`setup`](Trainer::setup), and an error if the configuration contradicts itself or the
    /// communicator.
    #[track_caller]
    pub fn setup_with<'m, R: Runtime, M: Module<R> + ?Sized>(
        comm: &Comm<R>,
        model: &'m M,
        optimizer: impl IntoOptimizer<R>,
        config: TrainConfig,
    ) -> Result<TrainSetup<'m, R, M>> {
        config.distributed.iter().try_for_each(|distributed| distributed.check_world(comm.size()))?;
        model.train();
        let step = TrainStep::builder(comm, model).optimizer(optimizer).config(config.step.clone()).build()?;
        Ok(TrainSetup { model, step, config, devices: RankDevices::of(comm)? })
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
        comm: &Comm<R>,
        head: &'m M,
        optimizer: impl IntoOptimizer<R>,
    ) -> Result<TrainSetup<'m, R, M>> {
        Trainer::setup(comm, head, optimizer)
    }
}

impl<'m, R: Runtime, M: Module<R> + ?Sized> TrainSetup<'m, R, M> {
    /// The batches of an epoch, of which this rank reads its share.
    ///
    /// # Errors
    /// An error if the loader's options are invalid.
    #[track_caller]
    pub fn epoch<B: Send + 'static>(&self, loader: &Loader<B>, epoch: u64) -> Result<Batches<B>> {
        let BatchShare { index, of } = self.step.ranks().share;
        loader.clone().rank(index, of).resume(State { epoch, position: 0 }).at_caller()
    }

    /// Takes a step over one batch, on all ranks together.
    ///
    /// # Errors
    /// An error on any rank is an error on all ranks; also if the configuration has more than one micro-batch in a
    /// step.
    #[doc(alias("train_batch"))]
    #[track_caller]
    pub fn step<B>(
        &mut self,
        batch: &Batch<B>,
        loss: impl Fn(&M, &Batch<B>) -> Result<Loss<R>>,
    ) -> Result<TrainingMetrics<R>> {
        let accumulation = self.step.accumulation();
        if accumulation != 1 {
            let why = format!(
                "a step here is one batch, and `accumulation` is {accumulation}: give several to `train_step().step_with`, or train with `with_loader`"
            );
            return Err(Error::config("TrainSetup::step", "accumulation", why));
        }
        let (model, weighting) = (self.model, self.config.weighting);
        let before = set_counted_rows(counted(batch));
        let metrics = self.step.step_with(1, |_| match (loss(model, batch)?, weighting) {
            (own, _) if batch.count == 0 => own.weightless(),
            (own, Weighting::ByWeight) => Ok(own),
            (own, Weighting::PerMicroBatch) => own.into_mean(),
        });
        set_counted_rows(before);
        metrics
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

    /// The devices of all ranks: [printed](std::fmt::Display), a summary for the start of a run. Where they
    /// [differ](RankDevices::is_heterogeneous), ranks wait for the slowest in every step, unless a
    /// [`Balanced`](adaptive::balance::Balanced) gives the faster ranks more to do.
    pub fn devices(&self) -> &RankDevices {
        &self.devices
    }

    /// The configuration of the ranks; none where none was given.
    pub fn dist_config(&self) -> Option<&DistributedTrainConfig> {
        self.config.distributed.as_ref()
    }

    /// Tells whether [`max_steps`](TrainConfig::max_steps) steps were taken: a loop ends then, on all ranks at once.
    pub fn reached_max_steps(&self) -> bool {
        self.config.max_steps.is_some_and(|most| self.step.global_step() >= most)
    }

    /// The training step, with optimizer and gradients.
    pub fn train_step(&mut self) -> &mut TrainStep<R> {
        &mut self.step
    }
}

impl<'m, R: Runtime, M> TrainSetup<'m, R, M> {
    /// Makes a [`Trainer`], the loop with callbacks and sinks, in place of a custom loop.
    pub fn with_loader<B>(self, loader: Loader<B>) -> Trainer<'m, R, M, TrainStep<R>, B> {
        Trainer::new(self.model, self.step, loader).weighting(self.config.weighting)
    }
}
