//! Training through a pipeline, and several replicas of it.

use std::{collections::BTreeMap, panic::Location, sync::Arc};

use nn::Module;
use numcore::{Error, Result, Runtime};
use optim::{IntoOptimizer, LossScaler, LrSchedule, Optimizer, Shards};

use super::{
    MicroBatches, Pipeline, PipelineGroups, PipelineModel, PipelineOutput, Stage, Tie, local_stages::LocalStages,
    pipeline::fingerprint, tie::Tied,
};
use crate::{
    buckets::{BucketOptions, GradCompression, Unused},
    comm::{Collectives, Comm, Communicator, abort_on_err},
    ddp::{DataParallel, leaves},
    mesh::Mesh,
    train::{Loss, StageStrategy, StepParts, TrainingMetrics, Updates, at_call},
    zero::{FullParameters, Sharded, UnitOf, ZeroOptions},
};

/// The training step of a model cut into stages: micro-batches through the pipeline, each stage's gradients summed over its replicas by a strategy
/// of its own, clipping by the norm of all gradients on all ranks. [`TrainStep::builder`](crate::train::TrainStep::builder) makes it of a
/// [`PipelineModel`]. It is a type beside [`TrainStep`](crate::train::TrainStep) because a step takes micro-batches where that one takes
/// losses: the stages and the loss are the model's.
///
/// Parameters and buffers are those of the first replica from the start. [`TrainingConfig::accumulation`](crate::train::TrainingConfig::accumulation) counts runs of the pipeline in
/// a step, each of as many micro-batches as the schedule has.
pub struct PipelineTrainStep<R: Runtime, S> {
    pub(super) groups: PipelineGroups<R>,
    pipeline: Pipeline<R>,
    pub(super) stages: LocalStages<R, S>,
    pub(super) updates: Updates,
    last: Option<PipelineOutput<R>>,
}

/// Trains a pipeline whose replicas each have everything of their stages.
pub type PipelineTrainer<R> = PipelineTrainStep<R, DataParallel<R>>;

/// Trains a pipeline and shards the state, gradients and parameters of every stage over its replicas, as far as [`ZeroOptions`] say.
///
/// - Stage 1 costs nothing: what is exchanged in a step is what [`PipelineTrainer`] exchanges.
/// - Stage 2 reduces gradients to shards after every micro-batch, so it exchanges them as many times as there are micro-batches; with
///   [`reduce_once`](ZeroOptions::reduce_once) once a step, and they are whole until then.
/// - Stage 3 gathers parameters as a stage's layers read them, in every pass; with a schedule that was
///   [lowered for it](crate::pipeline::Lowering::sharded) once for all passes that follow one another, a pipeline stage at a time. Then it
///   pays where a rank has more stages than the two that are gathered at once. What
///   [`gathered_until_backward`](ZeroOptions::gathered_until_backward) keeps is the first backward pass's alone, of several that follow one another.
pub type ZeroPipelineTrainer<R> = PipelineTrainStep<R, Sharded<R>>;

impl<R: Runtime> PipelineTrainer<R> {
    pub(crate) fn replicated(
        mesh: &Mesh<R>,
        model: PipelineModel<R>,
        optimizer: &(impl IntoOptimizer<R> + Clone),
        options: &BucketOptions,
        parts: StepParts<R>,
    ) -> Result<Self> {
        let schedule = parts.schedule.clone();
        abort_on_err(mesh.world(), buckets_of_stages(options))?;
        Self::build(mesh, model, parts, |stage, mesh| {
            DataParallel::new(mesh, stage, optimizer_of(stage, optimizer, schedule.as_ref())?, options.clone())
        })
    }
}

impl<R: Runtime> ZeroPipelineTrainer<R> {
    pub(crate) fn sharded(
        mesh: &Mesh<R>,
        model: PipelineModel<R>,
        optimizer: Arc<dyn Shards<R>>,
        zero: ZeroOptions,
        parts: StepParts<R>,
    ) -> Result<Self> {
        let (zero, schedule) = (for_stages(mesh.world(), &model.ties, zero)?, parts.schedule.clone());
        Self::build(mesh, model, parts, |stage, mesh| {
            Sharded::scheduled(mesh, stage, optimizer.clone(), schedule.clone(), zero.clone())
        })
    }

    /// All parameters of this rank's stages, for evaluation and export: they are gathered now, and released when the scopes end.
    pub fn gather_full_params(&self) -> Result<Vec<FullParameters<R>>> {
        self.stages.parts.values().map(Sharded::gather_full_params).collect()
    }
}

/// The optimizer of the parameters of a stage, or of a part of one, that are trained.
pub(super) fn optimizer_of<R: Runtime>(
    part: &(impl Module<R> + ?Sized),
    optimizer: &(impl IntoOptimizer<R> + Clone),
    schedule: Option<&Arc<dyn LrSchedule>>,
) -> Result<Box<dyn Optimizer<R>>> {
    let trained = leaves(part).into_iter().filter(|leaf| leaf.requires_grad());
    let mut optimizer = optimizer.clone().into_optimizer(trained.collect())?;
    schedule.into_iter().for_each(|schedule| optimizer.set_schedule(schedule.clone()));
    Ok(optimizer)
}

/// An error if the buckets of a pipeline's stages cannot be exchanged so.
pub(super) fn buckets_of_stages(options: &BucketOptions) -> Result<()> {
    let refuse = |field, why| Err(Error::config("PipelineTrainer", field, why));
    if options.unused == Unused::Allow {
        return refuse("unused", "unused parameters cannot be allowed in a pipeline; freeze them, or leave them out");
    }
    if options.canonical {
        return refuse(
            "canonical",
            "a pipeline's passes follow one another in the order of its schedule; leave `canonical` out",
        );
    }
    if options.compression != GradCompression::Own {
        return refuse("compression", "gradients of a pipeline's stages travel as they are; leave `compression` out");
    }
    Ok(())
}

/// What holds of every stage: each tied parameter is a unit of its own, because only so it is cut alike in all stages.
pub(super) fn for_stages<R: Runtime>(world: &Comm<R>, ties: &[Tie], zero: ZeroOptions) -> Result<ZeroOptions> {
    if zero.unused == Unused::Allow {
        let why = "unused parameters cannot be allowed in a pipeline: only the ranks of a stage would know of them, and copies of a \
                   tied parameter would part; freeze them, or leave them out";
        return Err(Error::config("ZeroPipelineTrainer", "unused", why).on_rank(world.world_rank()));
    }
    let (tied, units): (Vec<String>, _) = (ties.iter().flat_map(Tie::names).cloned().collect(), zero.units);
    let units = UnitOf::new(move |name| if tied.iter().any(|own| own == name) { name.into() } else { units.of(name) });
    Ok(ZeroOptions { units, ..zero })
}

impl<R: Runtime, S: StageStrategy<R>> PipelineTrainStep<R, S> {
    pub(super) fn build(
        mesh: &Mesh<R>,
        model: PipelineModel<R>,
        parts: StepParts<R>,
        mut strategy: impl FnMut(&dyn Stage<R>, &Mesh<R>) -> Result<S>,
    ) -> Result<Self> {
        let (world, StepParts { config, observer, .. }) = (mesh.world(), parts);
        let build = || {
            config.check()?;
            world.agree("the training configuration", format!("{config:?}").as_bytes())?;
            world.agree("the pipeline's schedule", &fingerprint(&model))?;
            world.agree("the list of tied parameters", format!("{:?}", model.ties).as_bytes())?;
            let groups = PipelineGroups::new(mesh, model.checked.schedule().placement().ranks())?;
            let (ties, replicas) = (model.ties.clone(), groups.stage_mesh(mesh));
            let pipeline = Pipeline::new(&groups.pipe, model)?;
            // Before strategies take the values over, which are the first replica's then.
            let ties = Tied::all(&groups.pipe, &ties, pipeline.stages())?;
            let mut parts = BTreeMap::new();
            for (&number, stage) in pipeline.stages() {
                parts.insert(number, strategy(&**stage, &replicas)?);
            }
            let stages = LocalStages::new(&groups.pipe, parts, ties, observer);
            let updates = Updates::new(config);
            updates.check_hyper(&stages)?;
            Ok(PipelineTrainStep { groups, pipeline, stages, updates, last: None })
        };
        abort_on_err(world, build())
    }

    /// One step: `batch(k)` gives this replica's micro-batches of the `k`-th run. The update is that of one rank with all micro-batches
    /// of all replicas.
    #[track_caller]
    pub fn step(&mut self, batch: impl FnMut(usize) -> Result<MicroBatches<R>>) -> Result<TrainingMetrics<R>> {
        let (line, runs) = (Location::caller(), self.updates.config.accumulation);
        let done = self.accumulate(runs, batch).and_then(|losses| self.update(&losses));
        abort_on_err(&self.groups.world, done).map_err(|error| at_call(error, line))
    }

    /// One step of `runs` runs of the pipeline, as many on all ranks, in place of the configured number: the last step of an epoch, which takes what is left.
    ///
    /// # Errors
    /// As [`step`](PipelineTrainStep::step); and if the number is 0, or more than configured.
    #[track_caller]
    pub fn step_with(
        &mut self,
        runs: usize,
        batch: impl FnMut(usize) -> Result<MicroBatches<R>>,
    ) -> Result<TrainingMetrics<R>> {
        let (line, most) = (Location::caller(), self.updates.config.accumulation);
        if runs == 0 || runs > most {
            let why =
                format!("a step has 1 to {most} runs of the pipeline by its configuration, it was asked for {runs}");
            return abort_on_err(&self.groups.world, Err(Error::argument("PipelineTrainStep::step_with", why)));
        }
        let done = self.accumulate(runs, batch).and_then(|losses| self.update(&losses));
        abort_on_err(&self.groups.world, done).map_err(|error| at_call(error, line))
    }

    /// Runs of the pipeline in a step.
    pub fn accumulation(&self) -> usize {
        self.updates.config.accumulation
    }

    /// The groups of this rank: all ranks, those of its replica, and those that have the same stages.
    pub fn groups(&self) -> &PipelineGroups<R> {
        &self.groups
    }

    /// Forwards alone: see [`Pipeline::evaluate`]. Each replica evaluates its own micro-batches; where parameters are sharded, replicas
    /// must evaluate together.
    pub fn evaluate(&mut self, batch: MicroBatches<R>) -> Result<PipelineOutput<R>> {
        self.pipeline.evaluate_with(batch, &mut self.stages)
    }

    /// Whether what this rank measures of its examples counts: ranks along tensor measure the same, and the first of them counts.
    pub fn counts_examples(&self) -> bool {
        self.groups.tensor_rank == 0
    }

    /// Updates so far.
    pub fn global_step(&self) -> u64 {
        self.updates.steps
    }

    /// What the last run of the pipeline left on this rank: losses, and measurements for a
    /// [timeline](Pipeline::timeline).
    pub fn last_run(&self) -> Option<&PipelineOutput<R>> {
        self.last.as_ref()
    }

    /// The pipeline.
    pub fn pipeline(&self) -> &Pipeline<R> {
        &self.pipeline
    }

    /// The strategies of this rank's stages, by number: with their optimizers.
    pub fn strategies(&self) -> &BTreeMap<usize, S> {
        &self.stages.parts
    }

    /// The strategies, for schedules.
    pub fn strategies_mut(&mut self) -> &mut BTreeMap<usize, S> {
        &mut self.stages.parts
    }

    /// The loss scaler, if there is one.
    pub fn scaler(&mut self) -> Option<&mut LossScaler> {
        self.updates.scaler.as_mut()
    }

    fn accumulate(
        &mut self,
        runs: usize,
        mut batch: impl FnMut(usize) -> Result<MicroBatches<R>>,
    ) -> Result<Vec<Loss<R>>> {
        self.stages.prepare()?;
        self.pipeline.set_loss_scale(self.updates.loss_scale());
        let mut losses = Vec::new();
        for k in 0..runs {
            self.stages.begin(k + 1 == runs);
            let output = self.pipeline.run(batch(k)?, &mut self.stages)?;
            for loss in output.losses() {
                losses.push(loss.told()?);
            }
            self.last = Some(output);
        }
        Ok(losses)
    }

    fn update(&mut self, losses: &[Loss<R>]) -> Result<TrainingMetrics<R>> {
        self.stages.finish()?;
        let mut metrics = self.updates.apply(&mut self.stages, &self.groups.losses, &self.groups.world, losses)?;
        metrics.alike = self.groups.context_ranks;
        let how = self.updates.config.buffers;
        self.stages.parts.values().try_for_each(|part| part.sync_buffers(how))?;
        Ok(metrics)
    }
}
