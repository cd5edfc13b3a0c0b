//! One builder for every kind of training step.

use std::sync::Arc;

use nn::{Module, ModuleExt};
use numcore::{Error, Result, Runtime, Tensor};
use optim::{IntoOptimizer, LossScaler, LrSchedule, Optimizer, OptimizerFn, Shards};
use parking_lot::Mutex;

use super::{BufferSync, GradientObserver, HyperParameters, TrainStep, TrainingConfig};
use crate::{
    buckets::{BucketOptions, BucketReducer},
    comm::Comm,
    ddp::{BucketedTrainer, DataParallel, MakeReducer},
    expert_parallel::{ExpertParallel, ExpertTrainer, ZeroExpertTrainer, expert_leaves},
    mesh::{AsMesh, Mesh},
    zero::{Sharded, ZeroOptions, ZeroTrainer},
};

/// What a training step is made of: see [`TrainStep::builder`].
///
/// What [`build`](TrainStepBuilder::build) makes follows from the types of what it was given:
///
/// | model | without `zero` | with `zero` |
/// |---|---|---|
/// | `&model` | [`BucketedTrainer`] | [`ZeroTrainer`] |
/// | `&model`, [`experts`](TrainStepBuilder::experts) | [`ExpertTrainer`] | [`ZeroExpertTrainer`] |
/// | [`PipelineModel`] | [`PipelineTrainer`] | [`ZeroPipelineTrainer`] |
/// | [`PipelineModel`], [`experts`](TrainStepBuilder::experts) | [`ExpertPipelineTrainer`] | [`ZeroExpertPipelineTrainer`] |
///
/// [`PipelineModel`]: crate::pipeline::PipelineModel
/// [`PipelineTrainer`]: crate::pipeline::PipelineTrainer
/// [`ZeroPipelineTrainer`]: crate::pipeline::ZeroPipelineTrainer
/// [`ExpertPipelineTrainer`]: crate::pipeline::ExpertPipelineTrainer
/// [`ZeroExpertPipelineTrainer`]: crate::pipeline::ZeroExpertPipelineTrainer
#[must_use = "`build` makes the step"]
pub struct TrainStepBuilder<R: Runtime, M, O = NoOptimizer, Z = BucketOptions> {
    pub(super) mesh: Mesh<R>,
    pub(super) model: M,
    pub(super) optimizer: O,
    /// How gradients are exchanged, or what is sharded.
    pub(super) spread: Z,
    pub(super) parts: StepParts<R>,
}

/// What a step of any kind has.
pub(crate) struct StepParts<R: Runtime> {
    pub(crate) config: TrainingConfig,
    pub(crate) schedule: Option<Arc<dyn LrSchedule>>,
    pub(crate) observer: Option<GradientObserver<R>>,
    reducer: Option<MakeReducer<R>>,
    /// Whether buckets were spoken of, which a sharded step has none of.
    buckets: bool,
}

impl<R: Runtime> StepParts<R> {
    /// An error if the step was told how to exchange whole gradients, which sharded ones are not.
    pub(super) fn check_sharded(&self) -> Result<()> {
        let field = match (self.reducer.is_some(), self.buckets) {
            (true, _) => "reducer",
            (_, true) => "buckets",
            _ => return Ok(()),
        };
        let why = format!(
            "`{field}` and `zero` exclude each other: a sharded step sums its units itself, by `ZeroOptions`; leave one out"
        );
        Err(Error::config("TrainStep::builder", field, why))
    }
}

/// How a step spreads a model whose experts are shared out among ranks: they and the rest, each in the same way.
pub struct WithExperts<Z>(pub(super) Z);

/// A builder that was given no optimizer yet.
pub struct NoOptimizer;

impl<R: Runtime> TrainStep<R, DataParallel<R>> {
    /// What a training step is made of, beginning with the ranks and the model: a [`Mesh`], or a communicator, which is a mesh of one axis;
    /// a model, or a [`PipelineModel`](crate::pipeline::PipelineModel).
    ///
    /// ```
    /// # use distributed::{comm::NoOpCommunicator, train::{BufferSync, TrainStep}, zero::ZeroStage};
    /// # use nn::{Init, Linear};
    /// # use numcore::NullRuntime;
    /// # use optim::{AdamWConfig, WarmupCosine};
    /// # fn main() -> numcore::Result<()> {
    /// # let rt = NullRuntime::new();
    /// # let (mesh, model) = (NoOpCommunicator::new(&rt), Linear::new(&Init::new(&rt, 0), 4, 1)?);
    /// let step = TrainStep::builder(&mesh, &model)
    ///     .optimizer(AdamWConfig { lr: 3e-4, ..Default::default() })
    ///     .schedule(|base, step| base / (1.0 + step as f64))
    ///     .zero(ZeroStage::Parameters)
    ///     .accumulation(4)
    ///     .max_norm(1.0)
    ///     .on_gradient(|name, grad| {
    ///         println!("{name}: {}", grad.shape());
    ///         Ok(())
    ///     })
    ///     .build()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn builder<M>(mesh: &impl AsMesh<R>, model: M) -> TrainStepBuilder<R, M> {
        let parts = StepParts {
            config: TrainingConfig::default(),
            schedule: None,
            observer: None,
            reducer: None,
            buckets: false,
        };
        let (mesh, spread) = (mesh.as_mesh(), BucketOptions::default());
        TrainStepBuilder { mesh, model, optimizer: NoOptimizer, spread, parts }
    }
}

impl<R: Runtime, M, O, Z> TrainStepBuilder<R, M, O, Z> {
    /// The optimizer: a configuration, which gets all parameters that are trained, [`ParamGroups`](optim::ParamGroups) of them, or, where
    /// nothing is sharded and the model is whole, an optimizer that was made already.
    pub fn optimizer<P>(self, optimizer: P) -> TrainStepBuilder<R, M, P, Z> {
        let TrainStepBuilder { mesh, model, spread, parts, .. } = self;
        TrainStepBuilder { mesh, model, optimizer, spread, parts }
    }

    /// A function that makes the optimizer of the parameters that are trained: of all; in a pipeline, of one stage's after another's; with
    /// [`experts`](TrainStepBuilder::experts), of those of the experts, then of the rest.
    pub fn optimizer_with<F>(self, make: F) -> TrainStepBuilder<R, M, OptimizerFn<F>, Z> {
        self.optimizer(OptimizerFn(make))
    }

    /// A learning-rate schedule, in place of the optimizer's own.
    pub fn schedule(mut self, schedule: impl LrSchedule + 'static) -> Self {
        self.parts.schedule = Some(Arc::new(schedule));
        self
    }

    /// Micro-batches in a step: see [`TrainingConfig::accumulation`].
    pub fn accumulation(mut self, micro_batches: usize) -> Self {
        self.parts.config.accumulation = micro_batches;
        self
    }

    /// The largest norm of all gradients together: see [`TrainingConfig::max_norm`].
    #[doc(alias("max_grad_norm"))]
    #[doc(alias("clip_grad_norm"))]
    pub fn max_norm(mut self, norm: f64) -> Self {
        self.parts.config.max_norm = Some(norm);
        self
    }

    /// Dynamic loss scaling: see [`TrainingConfig::loss_scaling`].
    #[doc(alias("GradScaler"))]
    pub fn loss_scaling(mut self, scaler: LossScaler) -> Self {
        self.parts.config.loss_scaling = Some(scaler);
        self
    }

    /// Leaves out updates whose gradients are not finite: see [`TrainingConfig::skip_non_finite`].
    pub fn skip_non_finite(mut self) -> Self {
        self.parts.config.skip_non_finite = true;
        self
    }

    /// What becomes of buffers that every rank changes by itself.
    pub fn buffers(mut self, sync: BufferSync) -> Self {
        self.parts.config.buffers = sync;
        self
    }

    /// What becomes of the optimizer's hyper-parameters in checkpoints: they are the configuration's alone, unless this asks for something else.
    #[doc(alias("param_groups"))]
    pub fn hyper_parameters(mut self, what: HyperParameters) -> Self {
        self.parts.config.hyper_parameters = what;
        self
    }

    /// The whole configuration at once, in place of what was said of it before.
    pub fn config(mut self, config: TrainingConfig) -> Self {
        self.parts.config = config;
        self
    }

    /// Looks at each parameter's gradient the moment it is final in a backward pass of this rank: before it is summed over ranks, with
    /// what earlier micro-batches of the step have left in its memory, and times the loss scale if there is one. With main gradients
    /// ([`ZeroOptions::main_gradients`], [`BucketOptions::main_gradients`]) a half-precision parameter's is that of this micro-batch alone, in
    /// the parameter's type. Of a parameter that is cut over a tensor axis it is the gradient of this rank's piece. An error ends the step.
    ///
    /// Costs a copy of every gradient.
    #[doc(alias("register_hook"))]
    pub fn on_gradient(mut self, look: impl FnMut(&str, &Tensor<R>) -> Result<()> + Send + 'static) -> Self {
        self.parts.observer = Some(Mutex::new(Box::new(look)));
        self
    }
}

impl<R: Runtime, M, O> TrainStepBuilder<R, M, O> {
    /// How gradients are exchanged where nothing is sharded. Those of a pipeline's stages travel as they are, in buckets of any limits.
    pub fn buckets(mut self, options: BucketOptions) -> Self {
        self.parts.buckets = true;
        TrainStepBuilder { spread: options, ..self }
    }

    /// Shards state, gradients and parameters: a [`ZeroStage`](crate::zero::ZeroStage), or all [`ZeroOptions`]. They are cut along the
    /// mesh's shard axis, with replicas along its data axis; a mesh without a shard axis, such as a communicator, is sharded along data.
    #[doc(alias("FullyShardedDataParallel"))]
    pub fn zero(self, options: impl Into<ZeroOptions>) -> TrainStepBuilder<R, M, O, ZeroOptions> {
        let TrainStepBuilder { mesh, model, optimizer, parts, .. } = self;
        TrainStepBuilder { mesh, model, optimizer, spread: options.into(), parts }
    }
}

impl<'m, R: Runtime, M: ?Sized, O, Z> TrainStepBuilder<R, &'m M, O, Z> {
    /// Trains experts that a plan has shared out along the mesh's expert axis ([`TensorPlan::experts`](nn::parallel::TensorPlan::experts)): their
    /// gradients are summed over the ranks that have the same ones, and [`zero`](TrainStepBuilder::zero) shards them over those. Comes after what
    /// was said of buckets or of `zero`.
    #[doc(alias("MoE"))]
    pub fn experts(self) -> TrainStepBuilder<R, &'m M, O, WithExperts<Z>> {
        let TrainStepBuilder { mesh, model, optimizer, spread, parts } = self;
        TrainStepBuilder { mesh, model, optimizer, spread: WithExperts(spread), parts }
    }
}

impl<R: Runtime, M: ?Sized, O> TrainStepBuilder<R, &M, O> {
    /// Sums buckets of gradients by a reducer of one's own, made over the ranks, in place of what [`BucketOptions`] ask for.
    #[doc(alias("register_comm_hook"))]
    pub fn reducer<B: BucketReducer<R> + 'static>(
        mut self,
        make: impl FnOnce(&Comm<R>) -> Result<B> + 'static,
    ) -> Self {
        self.parts.reducer = Some(Box::new(|comm| Ok(Box::new(make(comm)?))));
        self
    }

    /// The step. Every rank calls it.
    ///
    /// # Errors
    /// On every rank, unless all have the same model, optimizer and options.
    #[track_caller]
    pub fn build(self) -> Result<BucketedTrainer<R>>
    where
        M: Module<R>,
        O: IntoOptimizer<R>,
    {
        let TrainStepBuilder { mesh, model, optimizer, spread, parts } = self;
        let optimizer = made(optimizer, model, parts.schedule)?;
        let strategy = DataParallel::reduced_by(&mesh, model, optimizer, spread, parts.reducer)?;
        TrainStep::observed(strategy, parts.config, parts.observer)
    }
}

/// The optimizer of the parameters of a model that are trained.
fn made<R: Runtime>(
    optimizer: impl IntoOptimizer<R>,
    model: &(impl Module<R> + ?Sized),
    schedule: Option<Arc<dyn LrSchedule>>,
) -> Result<Box<dyn Optimizer<R>>> {
    let trained = model.parameters().into_iter().map(|p| p.leaf()).filter(|leaf| leaf.requires_grad());
    let mut optimizer = optimizer.into_optimizer(trained.collect())?;
    if let Some(schedule) = schedule {
        optimizer.set_schedule(schedule);
    }
    Ok(optimizer)
}

impl<R: Runtime, M: ?Sized, O> TrainStepBuilder<R, &M, O, WithExperts<BucketOptions>> {
    /// The step. Every rank calls it.
    ///
    /// # Errors
    /// On every rank, unless all have the same model, optimizer and options, and the experts are shared out over the mesh; and for a reducer of
    /// one's own or sums in canonical order, which do not know of experts.
    #[track_caller]
    pub fn build(self) -> Result<ExpertTrainer<R>>
    where
        M: Module<R>,
        O: IntoOptimizer<R> + Clone,
    {
        let TrainStepBuilder { mesh, model, optimizer, spread: WithExperts(options), parts } = self;
        let refused = [("reducer", parts.reducer.is_some()), ("buckets", options.canonical)];
        if let Some((field, _)) = refused.into_iter().find(|(_, asked)| *asked) {
            let why = "experts are summed in buckets of their own, as they are or narrowed: leave out a reducer of one's own, \
                       and `BucketOptions::canonical`, whose chunks of the batch meet in the experts";
            return Err(Error::config("TrainStep::builder", field, why));
        }
        let means = options.compression.sends_means();
        let strategy = ExpertParallel::new(&mesh, model, means, |mesh, part| {
            let optimizer = made(optimizer.clone(), part, parts.schedule.clone())?;
            DataParallel::new(mesh, part, optimizer, options.clone())
        })?;
        let step = TrainStep::observed(strategy, parts.config, parts.observer)?;
        Ok(TrainStep { shared: expert_leaves(model), ..step })
    }
}

impl<R: Runtime, M: ?Sized, O> TrainStepBuilder<R, &M, O, WithExperts<ZeroOptions>> {
    /// The step. Every rank calls it.
    ///
    /// # Errors
    /// On every rank, unless all have the same model, optimizer and options, and the experts are shared out over the mesh.
    #[track_caller]
    pub fn build(self) -> Result<ZeroExpertTrainer<R>>
    where
        M: Module<R>,
        O: Shards<R> + 'static,
    {
        let TrainStepBuilder { mesh, model, optimizer, spread: WithExperts(options), parts } = self;
        parts.check_sharded()?;
        let optimizer: Arc<dyn Shards<R>> = Arc::new(optimizer);
        let strategy = ExpertParallel::new(&mesh, model, false, |mesh, part| {
            Sharded::scheduled(mesh, part, optimizer.clone(), parts.schedule.clone(), options.clone())
        })?;
        let step = TrainStep::observed(strategy, parts.config, parts.observer)?;
        Ok(TrainStep { shared: expert_leaves(model), ..step })
    }
}

impl<R: Runtime, M: ?Sized, O> TrainStepBuilder<R, &M, O, ZeroOptions> {
    /// The step. Every rank calls it.
    ///
    /// # Errors
    /// On every rank, unless all have the same model, optimizer and options.
    #[track_caller]
    pub fn build(self) -> Result<ZeroTrainer<R>>
    where
        M: Module<R>,
        O: Shards<R> + 'static,
    {
        let TrainStepBuilder { mesh, model, optimizer, spread, parts } = self;
        parts.check_sharded()?;
        let strategy = Sharded::scheduled(&mesh, model, Arc::new(optimizer), parts.schedule, spread)?;
        TrainStep::observed(strategy, parts.config, parts.observer)
    }
}
