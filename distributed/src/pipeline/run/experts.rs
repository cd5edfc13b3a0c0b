//! Training through a pipeline whose stages have experts that are shared out among ranks.

use std::sync::Arc;

use numcore::{Error, Result, Runtime};
use optim::{IntoOptimizer, Shards};

use super::{
    PipelineModel, PipelineTrainStep, Stage,
    train_step::{buckets_of_stages, for_stages, optimizer_of},
};
use crate::{
    buckets::BucketOptions,
    comm::{Collectives, abort_on_err},
    ddp::DataParallel,
    expert_parallel::{ExpertParallel, has_experts},
    mesh::Mesh,
    plan::Axis,
    train::StepParts,
    zero::{FullParameters, Sharded, ZeroOptions},
};

/// Trains a pipeline whose replicas share out the experts of their stages, and each have all the rest of these.
/// [`TrainStep::builder`](crate::train::TrainStep::builder) makes it of a [`PipelineModel`] where [`experts`](crate::train::TrainStepBuilder::experts) is asked for.
///
/// Ranks that have different experts of a stage run its micro-batches together, the `k`-th of each replica at the same time: balance losses are
/// over these. What a stage adds to the loss, such as a balance loss, it hands on as a value beside its output, to be added where the loss is.
pub type ExpertPipelineTrainer<R> = PipelineTrainStep<R, ExpertParallel<R, DataParallel<R>>>;

/// Trains a pipeline like [`ExpertPipelineTrainer`], and shards each stage: its experts over the ranks that have the same ones, all else over its replicas.
pub type ZeroExpertPipelineTrainer<R> = PipelineTrainStep<R, ExpertParallel<R, Sharded<R>>>;

impl<R: Runtime> ExpertPipelineTrainer<R> {
    pub(crate) fn replicated_experts(
        mesh: &Mesh<R>,
        model: PipelineModel<R>,
        optimizer: &(impl IntoOptimizer<R> + Clone),
        options: &BucketOptions,
        parts: StepParts<R>,
    ) -> Result<Self> {
        let schedule = parts.schedule.clone();
        abort_on_err(mesh.world(), buckets_of_stages(options))?;
        abort_on_err(mesh.world(), require_experts(mesh, &model))?;
        Self::build(mesh, model, parts, |stage, mesh| {
            ExpertParallel::of_part(mesh, stage, false, |mesh, part| {
                let optimizer = optimizer_of(part, optimizer, schedule.as_ref())?;
                DataParallel::new(mesh, part, optimizer, options.clone())
            })
        })
    }
}

impl<R: Runtime> ZeroExpertPipelineTrainer<R> {
    pub(crate) fn sharded_experts(
        mesh: &Mesh<R>,
        model: PipelineModel<R>,
        optimizer: Arc<dyn Shards<R>>,
        zero: ZeroOptions,
        parts: StepParts<R>,
    ) -> Result<Self> {
        let (zero, schedule) = (for_stages(mesh.world(), &model.ties, zero)?, parts.schedule.clone());
        abort_on_err(mesh.world(), require_experts(mesh, &model))?;
        Self::build(mesh, model, parts, |stage, mesh| {
            ExpertParallel::of_part(mesh, stage, false, |mesh, part| {
                Sharded::scheduled(mesh, part, optimizer.clone(), schedule.clone(), zero.clone())
            })
        })
    }

    /// All parameters of this rank's stages, and of the experts that it has, for evaluation and export: they are gathered now, and released when the
    /// scopes end.
    pub fn gather_full_params(&self) -> Result<Vec<FullParameters<R>>> {
        let of_stage = |stage: &ExpertParallel<R, Sharded<R>>| {
            let parts = std::iter::once(stage.rest()).chain(stage.experts());
            parts.map(Sharded::gather_full_params).collect::<Result<Vec<_>>>()
        };
        let all: Vec<_> = self.stages.parts.values().map(of_stage).collect::<Result<_>>()?;
        Ok(all.into_iter().flatten().collect())
    }
}

/// An error if a mesh has ranks for experts, and no stage has any that are shared out over them. Every rank calls it.
fn require_experts<R: Runtime>(mesh: &Mesh<R>, model: &PipelineModel<R>) -> Result<()> {
    let size = mesh.plan().size(Axis::Expert);
    if size == 1 {
        return Ok(());
    }
    let own = model.stages.iter().any(|(_, stage)| has_experts(&**stage as &dyn Stage<R>));
    let all = mesh.axis(Axis::Pipe).exchange_equal([u8::from(own)])?;
    if all.iter().any(|[any]| *any == 1) {
        return Ok(());
    }
    let why = format!(
        "the mesh has {size} ranks along expert, and no stage has experts that are shared out over them: cut the stages by \
         `PipelineModel::parallelize` with a plan that names them (`TensorPlan::experts`)"
    );
    Err(Error::config("TrainStep::builder", "experts", why))
}
