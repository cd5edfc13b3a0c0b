//! The builder of training steps.

use std::sync::Arc;

use autograd::Leaf;
use nn::{Module, ModuleExt, Visitor};
use numcore::{Error, Result, Runtime, Tensor};
use optim::{IntoOptimizer, LossScaler, LrSchedule, Optimizer, OptimizerFn, OptimizerSource};
use parking_lot::Mutex;

use super::{BufferSync, HyperParameters, TrainStep, TrainingConfig, pipeline::Stages};
use crate::{
    buckets::{BucketOptions, BucketReducer},
    combinations::{Feature, Features},
    comm::{Collectives, Comm, abort_on_err},
    ddp::{DataParallel, ReducerSource},
    expert_parallel::{expert_leaves, has_experts, require_experts, with_experts},
    hooks::GradientObserver,
    mesh::{AsMesh, Mesh},
    pipeline::{Pipeline, PipelineGroups, PipelineModel, Stage},
    plan::Axis,
    strategy::{BatchShare, SetKind, StepRanks, Strategy, StrategyPart, StrategySet, Tie, Tied},
    zero::{Sharded, ZeroOptions, ZeroStage},
};

/// The builder of a training step: see [`TrainStep::builder`].
#[must_use = "`build` makes the step"]
pub struct TrainStepBuilder<'m, R: Runtime> {
    mesh: Mesh<R>,
    model: StepModel<'m, R>,
    optimizer: Option<OptimizerSource<R>>,
    config: TrainingConfig,
    buckets: Option<BucketOptions>,
    zero: ZeroOptions,
    experts: bool,
    schedule: Option<Arc<dyn LrSchedule>>,
    reducer: Option<ReducerSource<R>>,
    observer: Option<GradientObserver<R>>,
}

/// The model of a training step: `&model`, or a [`PipelineModel`].
pub enum StepModel<'m, R: Runtime> {
    /// A model without stages: every rank has all layers, or its pieces of them.
    Whole(Box<dyn Module<R> + 'm>),
    /// The pipeline stages of a rank.
    Stages(PipelineModel<R>),
}

impl<'m, R: Runtime, M: Module<R> + ?Sized> From<&'m M> for StepModel<'m, R> {
    fn from(model: &'m M) -> Self {
        StepModel::Whole(Box::new(Borrowed(model)))
    }
}

impl<R: Runtime> From<PipelineModel<R>> for StepModel<'_, R> {
    fn from(model: PipelineModel<R>) -> Self {
        StepModel::Stages(model)
    }
}

/// A model that its caller keeps.
struct Borrowed<'m, M: ?Sized>(&'m M);

impl<R: Runtime, M: Module<R> + ?Sized> Module<R> for Borrowed<'_, M> {
    fn visit(&self, name: &str, visitor: &mut dyn Visitor<R>) {
        self.0.visit(name, visitor);
    }
}

impl<R: Runtime> TrainStep<R> {
    /// The builder of a training step over `mesh`, for `model`.
    ///
    /// `mesh` is a [`Mesh`], a communicator (a mesh of one axis) or a runtime (a mesh of one rank). `model` is `&model`
    /// or a [`PipelineModel`]. The step's type is [`TrainStep`] for every choice.
    ///
    /// ```
    /// # use distributed::{train::TrainStep, zero::ZeroStage};
    /// # use nn::{Init, Linear};
    /// # use numcore::NullRuntime;
    /// # use optim::AdamWConfig;
    /// # fn main() -> numcore::Result<()> {
    /// # let rt = NullRuntime::new();
    /// # let model = Linear::new(&Init::new(&rt, 0), 4, 1)?;
    /// let step = TrainStep::builder(&rt, &model)
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
    pub fn builder<'m>(mesh: &impl AsMesh<R>, model: impl Into<StepModel<'m, R>>) -> TrainStepBuilder<'m, R> {
        TrainStepBuilder {
            mesh: mesh.as_mesh(),
            model: model.into(),
            optimizer: None,
            config: TrainingConfig::default(),
            buckets: None,
            zero: ZeroStage::None.into(),
            experts: false,
            schedule: None,
            reducer: None,
            observer: None,
        }
    }
}

impl<R: Runtime> TrainStepBuilder<'_, R> {
    /// The optimizer: a configuration, which gets all trained parameters, or [`ParamGroups`](optim::ParamGroups) of
    /// them. An unsharded model without stages may also have an optimizer that was made already.
    pub fn optimizer(self, optimizer: impl IntoOptimizer<R>) -> Self {
        Self { optimizer: Some(optimizer.into_source()), ..self }
    }

    /// A function that makes the optimizer of the trained parameters it is given. It is called once with all of them.
    /// In a pipeline it is called once a stage; with [`experts`](TrainStepBuilder::experts), for the experts first,
    /// then for the rest.
    pub fn optimizer_with(
        self,
        make: impl FnMut(Vec<Arc<Leaf<R>>>) -> Result<Box<dyn Optimizer<R>>> + 'static,
    ) -> Self {
        self.optimizer(OptimizerFn(make))
    }

    /// A learning-rate schedule that replaces the optimizer's own.
    pub fn schedule(mut self, schedule: impl LrSchedule + 'static) -> Self {
        self.schedule = Some(Arc::new(schedule));
        self
    }

    /// The number of micro-batches in a step: see [`TrainingConfig::accumulation`]. In a pipeline it is the number of
    /// runs, each of as many micro-batches as the schedule has.
    pub fn accumulation(mut self, micro_batches: usize) -> Self {
        self.config.accumulation = micro_batches;
        self
    }

    /// The largest global norm of gradients: see [`TrainingConfig::max_norm`].
    #[doc(alias("max_grad_norm"))]
    #[doc(alias("clip_grad_norm"))]
    pub fn max_norm(mut self, norm: f64) -> Self {
        self.config.max_norm = Some(norm);
        self
    }

    /// Dynamic loss scaling: see [`TrainingConfig::loss_scaling`].
    #[doc(alias("GradScaler"))]
    pub fn loss_scaling(mut self, scaler: LossScaler) -> Self {
        self.config.loss_scaling = Some(scaler);
        self
    }

    /// Skips updates whose gradients are not finite: see [`TrainingConfig::skip_non_finite`].
    pub fn skip_non_finite(mut self) -> Self {
        self.config.skip_non_finite = true;
        self
    }

    /// The synchronization of buffers that every rank changes by itself.
    pub fn buffers(mut self, sync: BufferSync) -> Self {
        self.config.buffers = sync;
        self
    }

    /// The treatment of the optimizer's hyper-parameters in checkpoints. By default they are the configuration's alone.
    #[doc(alias("param_groups"))]
    pub fn hyper_parameters(mut self, what: HyperParameters) -> Self {
        self.config.hyper_parameters = what;
        self
    }

    /// Replaces the whole configuration, including options set before.
    pub fn config(mut self, config: TrainingConfig) -> Self {
        self.config = config;
        self
    }

    /// Calls `look` with the name and the gradient of each parameter, the moment the gradient is final in a backward
    /// pass of this rank.
    ///
    /// The gradient is not yet summed over ranks. It includes the sums of earlier micro-batches in its memory, and the
    /// loss scale if there is one. With main gradients ([`ZeroOptions::main_gradients`],
    /// [`BucketOptions::main_gradients`]) the gradient of a half-precision parameter is that of this micro-batch alone,
    /// in the parameter's dtype. For a parameter that is cut along tensor it is the gradient of this rank's piece. An
    /// error ends the step.
    ///
    /// Costs a copy of every gradient.
    #[doc(alias("register_hook"))]
    pub fn on_gradient(mut self, mut look: impl FnMut(&str, &Tensor<R>) -> Result<()> + Send + 'static) -> Self {
        self.observer = Some(Mutex::new(Box::new(move |leaf, gradient| look(&leaf.name(), &gradient.value()?))));
        self
    }

    /// The exchange of gradients where nothing is sharded. Buckets of a pipeline's stages are sent in a stage's
    /// last backward pass or, if they are compressed, after the last pass of all.
    pub fn buckets(self, options: BucketOptions) -> Self {
        Self { buckets: Some(options), ..self }
    }

    /// Sums buckets of gradients by a custom reducer, in place of the one that [`BucketOptions`] name. Each stage of a
    /// pipeline has one, over its replicas, and so have experts, over the ranks that have the same experts.
    #[doc(alias("register_comm_hook"))]
    pub fn reducer<B: BucketReducer<R> + 'static>(mut self, make: impl Fn(&Comm<R>) -> Result<B> + 'static) -> Self {
        let make = Box::new(move |comm: &Comm<R>| Ok(Box::new(make(comm)?) as Box<dyn BucketReducer<R>>));
        self.reducer = Some(ReducerSource { make, has_state: B::has_state() });
        self
    }

    /// Shards state, gradients and parameters: a [`ZeroStage`], or all [`ZeroOptions`]. They are cut along the mesh's
    /// shard axis, with replicas along its data axis. A mesh without a shard axis, such as a communicator, is sharded
    /// along data.
    ///
    /// Stages of a pipeline are sharded over their replicas. ZeRO stage 2 then exchanges gradients after every
    /// micro-batch, or once a step with [`reduce_once`](ZeroOptions::reduce_once). ZeRO stage 3 gathers parameters in
    /// every pass. With a schedule that was [lowered for it](crate::pipeline::Lowering::sharded) it gathers them once
    /// for consecutive passes of a stage.
    #[doc(alias("FullyShardedDataParallel"))]
    pub fn zero(self, options: impl Into<ZeroOptions>) -> Self {
        Self { zero: options.into(), ..self }
    }

    /// Trains experts that a plan has shared out along the mesh's expert axis
    /// ([`TensorPlan::experts`](nn::parallel::TensorPlan::experts)). Their gradients are summed over the ranks that
    /// have the same experts, and [`zero`](TrainStepBuilder::zero) shards them over these ranks. In a pipeline the plan
    /// is that of its stages ([`PipelineModel::parallelize`]).
    #[doc(alias("MoE"))]
    pub fn experts(self) -> Self {
        Self { experts: true, ..self }
    }

    /// Makes the step. Every rank calls it.
    ///
    /// # Errors
    /// On every rank:
    ///
    /// - unless all ranks have the same model, optimizer and options;
    /// - if two of the features [exclude](crate::combinations::COMBINATIONS) each other;
    /// - if experts are not shared out over the mesh;
    /// - in a pipeline, unless the number of ranks is that of the schedule, or a multiple.
    #[track_caller]
    pub fn build(self) -> Result<TrainStep<R>> {
        let (world, is_pipeline) = (self.mesh.world().clone(), matches!(self.model, StepModel::Stages(_)));
        let built = self.check().and_then(|()| self.built());
        // Ranks of different stages do not wait for each other in the same calls.
        if is_pipeline { abort_on_err(&world, built) } else { built }
    }

    /// The requested features: two that exclude each other are refused before anything is made.
    fn features(&self) -> Features {
        let built = self.optimizer.as_ref().is_some_and(|optimizer| optimizer.shards().is_none());
        let buckets = self.buckets.clone().unwrap_or_default();
        let has_state = self.reducer.as_ref().is_some_and(|reducer| reducer.has_state);
        // Where each rank has all experts, theirs are parameters like others.
        let has_all = self.experts && self.mesh.plan().size(Axis::Expert) == 1;
        let is_tied = matches!(&self.model, StepModel::Stages(model) if !model.ties.is_empty());
        Features::default()
            .union(self.zero.features())
            .union(buckets.features())
            .and_if(self.buckets.is_some(), Feature::Buckets)
            .and_if(self.reducer.is_some(), Feature::Reducer)
            .and_if(has_state && (!has_all || is_tied), Feature::StatefulReducer)
            .and_if(self.experts, Feature::Experts)
            .and_if(matches!(self.model, StepModel::Stages(_)), Feature::Pipeline)
            .and_if(is_tied, Feature::Tied)
            .and_if(built, Feature::BuiltBefore)
    }

    fn check(&self) -> Result<()> {
        self.features().check("TrainStep::builder").map_err(|error| error.on_rank(self.mesh.world().world_rank()))
    }

    #[track_caller]
    fn built(self) -> Result<TrainStep<R>> {
        let TrainStepBuilder { mesh, model, optimizer, config, buckets, zero, experts, schedule, reducer, observer } =
            self;
        let no_optimizer = || {
            Error::config(
                "TrainStep::builder",
                "optimizer",
                "none was given: `.optimizer(AdamWConfig::default())` for one",
            )
        };
        let optimizer = optimizer.ok_or_else(no_optimizer)?;
        zero.check_unsharded()?;
        let mut make =
            StrategyMaker { optimizer, buckets: buckets.unwrap_or_default(), zero, experts, schedule, reducer };
        let step = match model {
            StepModel::Whole(model) => {
                if experts {
                    require_experts(&mesh, has_experts(&*model))?;
                }
                let step = TrainStep::of(make.strategy(&mesh, &*model)?, config)?;
                let leaves = model.parameters().into_iter().map(|p| p.leaf());
                let frozen = leaves.filter(|leaf| !leaf.requires_grad()).collect();
                TrainStep { frozen, shared: if experts { expert_leaves(&*model) } else { Default::default() }, ..step }
            }
            StepModel::Stages(model) => of_stages(&mesh, model, config, make)?,
        };
        Ok(TrainStep { observer, ..step })
    }
}

/// Makes the strategies of a model, or of its stages.
struct StrategyMaker<R: Runtime> {
    optimizer: OptimizerSource<R>,
    buckets: BucketOptions,
    zero: ZeroOptions,
    experts: bool,
    schedule: Option<Arc<dyn LrSchedule>>,
    reducer: Option<ReducerSource<R>>,
}

impl<R: Runtime> StrategyMaker<R> {
    /// The strategy of a model, or of a stage.
    #[track_caller]
    fn strategy(&mut self, mesh: &Mesh<R>, model: &dyn Module<R>) -> Result<Box<dyn Strategy<R>>> {
        if !self.experts {
            return self.for_parameters(mesh, model);
        }
        let means = self.buckets.compression.sends_means() || self.reducer.is_some();
        let means = self.zero.stage == ZeroStage::None && means;
        with_experts(mesh, model, means, &mut |mesh, part| self.for_parameters(mesh, part))
    }

    /// The strategy of parameters that the same ranks have.
    #[track_caller]
    fn for_parameters(&mut self, mesh: &Mesh<R>, part: &dyn Module<R>) -> Result<Box<dyn Strategy<R>>> {
        let schedule = self.schedule.clone();
        if let Some(shards) = self.optimizer.shards().filter(|_| self.zero.stage != ZeroStage::None) {
            return Ok(Box::new(Sharded::scheduled(mesh, part, shards.clone(), schedule, self.zero.clone())?));
        }
        let trained = part.parameters().into_iter().map(|p| p.leaf()).filter(|leaf| leaf.requires_grad());
        let mut optimizer = self.optimizer.optimizer(trained.collect())?;
        schedule.into_iter().for_each(|schedule| optimizer.set_schedule(schedule));
        let (options, reducer) = (self.buckets.clone(), self.reducer.as_ref());
        Ok(Box::new(DataParallel::reduced_by(mesh, part, optimizer, options, reducer)?))
    }
}

/// The step of a pipeline with one or more replicas, as [`PipelineGroups`] arranges them.
fn of_stages<R: Runtime>(
    mesh: &Mesh<R>,
    model: PipelineModel<R>,
    config: TrainingConfig,
    mut make: StrategyMaker<R>,
) -> Result<TrainStep<R>> {
    let world = mesh.world();
    world.agree("the pipeline's schedule", &model.fingerprint())?;
    world.agree("the list of tied parameters", format!("{:?}", model.ties).as_bytes())?;
    if make.experts {
        let here = model.stages.iter().any(|(_, stage)| has_experts(&**stage as &dyn Stage<R>));
        let all = mesh.axis(Axis::Pipe).exchange_equal([u8::from(here)])?;
        require_experts(mesh, all.iter().any(|[any]| *any == 1))?;
    }
    make.zero.units = make.zero.units.with_tied(model.ties.iter().flat_map(Tie::names).cloned());
    let groups = PipelineGroups::new(mesh, model.checked.schedule().placement().ranks())?;
    let (ties, replicas) = (model.ties.clone(), groups.stage_mesh(mesh));
    let features = Features::of([Feature::Pipeline])
        .and_if(!ties.is_empty(), Feature::Tied)
        .and_if(make.experts && mesh.plan().size(Axis::Expert) > 1, Feature::Experts);
    let pipeline = Pipeline::new(&groups.pipe, model)?;
    let stages: Vec<(usize, &dyn Module<R>)> =
        pipeline.stages().iter().map(|(&number, stage)| (number, &**stage as &dyn Module<R>)).collect();
    // Before strategies take the values over, which are the first replica's then.
    let ties = Tied::all(&groups.pipe, &ties, &stages)?;
    let mut parts = Vec::new();
    for &(_, stage) in &stages {
        parts.push((StrategyPart::new(make.strategy(&replicas, stage)?), stage));
    }
    let (numbers, pipe) = (stages.iter().map(|(number, _)| *number).collect(), groups.pipe.clone());
    let set = StrategySet::new(parts, SetKind::Stages { numbers, pipe, ties }, ranks_of(&groups), features);
    let copies = set.copies().into();
    let step = TrainStep::of(Box::new(set), config)?;
    Ok(TrainStep { stages: Some(Box::new(Stages { pipeline, copies, last: None })), ..step })
}

/// The ranks of a pipeline's step.
fn ranks_of<R: Runtime>(groups: &PipelineGroups<R>) -> StepRanks<R> {
    use crate::comm::Communicator;
    StepRanks {
        everyone: groups.world.clone(),
        losses: groups.losses.clone(),
        share: BatchShare { index: groups.data.rank(), of: groups.data.size() },
        counts_examples: groups.tensor_rank == 0,
        context_ranks: groups.context_ranks,
        random_stream: groups.random_stream,
    }
}
