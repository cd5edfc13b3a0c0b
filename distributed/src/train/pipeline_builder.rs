//! What the builder of training steps makes of pipelines.

use std::sync::Arc;

use numcore::{Result, Runtime};
use optim::{IntoOptimizer, Shards};

use super::{TrainStepBuilder, WithExperts};
use crate::{
    buckets::BucketOptions,
    pipeline::{ExpertPipelineTrainer, PipelineModel, PipelineTrainer, ZeroExpertPipelineTrainer, ZeroPipelineTrainer},
    zero::ZeroOptions,
};

impl<R: Runtime, O, Z> TrainStepBuilder<R, PipelineModel<R>, O, Z> {
    /// Trains experts of stages that a plan has shared out along the mesh's expert axis
    /// ([`PipelineModel::parallelize`], [`TensorPlan::experts`](nn::parallel::TensorPlan::experts)), among the replicas of each stage: their gradients
    /// are summed over the ranks that have the same ones. Comes after what was said of buckets or of `zero`.
    #[doc(alias("MoE"))]
    pub fn experts(self) -> TrainStepBuilder<R, PipelineModel<R>, O, WithExperts<Z>> {
        let TrainStepBuilder { mesh, model, optimizer, spread, parts } = self;
        TrainStepBuilder { mesh, model, optimizer, spread: WithExperts(spread), parts }
    }
}

impl<R: Runtime, O> TrainStepBuilder<R, PipelineModel<R>, O> {
    /// The step of a pipeline: one or more replicas of it, as [`PipelineGroups`](crate::pipeline::PipelineGroups) has them. Every rank calls
    /// it.
    ///
    /// # Errors
    /// On every rank, unless the ranks are as many as the schedule's, or a multiple, and all have the same schedule, ties and options.
    #[track_caller]
    pub fn build(self) -> Result<PipelineTrainer<R>>
    where
        O: IntoOptimizer<R> + Clone,
    {
        let TrainStepBuilder { mesh, model, optimizer, spread, parts } = self;
        PipelineTrainer::replicated(&mesh, model, &optimizer, &spread, parts)
    }
}

impl<R: Runtime, O> TrainStepBuilder<R, PipelineModel<R>, O, ZeroOptions> {
    /// The step of a pipeline whose stages are sharded over their replicas. Every rank calls it.
    ///
    /// # Errors
    /// On every rank, as without `zero`, and when unused parameters are allowed.
    #[track_caller]
    pub fn build(self) -> Result<ZeroPipelineTrainer<R>>
    where
        O: Shards<R> + 'static,
    {
        let TrainStepBuilder { mesh, model, optimizer, spread, parts } = self;
        parts.check_sharded()?;
        ZeroPipelineTrainer::sharded(&mesh, model, Arc::new(optimizer), spread, parts)
    }
}

impl<R: Runtime, O> TrainStepBuilder<R, PipelineModel<R>, O, WithExperts<BucketOptions>> {
    /// The step of a pipeline whose replicas share out the experts of their stages. Every rank calls it.
    ///
    /// # Errors
    /// On every rank, as without `experts`, and unless some stage has experts that are shared out over the mesh, if it has ranks for them.
    #[track_caller]
    pub fn build(self) -> Result<ExpertPipelineTrainer<R>>
    where
        O: IntoOptimizer<R> + Clone,
    {
        let TrainStepBuilder { mesh, model, optimizer, spread: WithExperts(options), parts } = self;
        ExpertPipelineTrainer::replicated_experts(&mesh, model, &optimizer, &options, parts)
    }
}

impl<R: Runtime, O> TrainStepBuilder<R, PipelineModel<R>, O, WithExperts<ZeroOptions>> {
    /// The step of a pipeline whose replicas share out the experts of their stages, sharded. Every rank calls it.
    ///
    /// # Errors
    /// On every rank, as without `zero`, and when unused parameters are allowed.
    #[track_caller]
    pub fn build(self) -> Result<ZeroExpertPipelineTrainer<R>>
    where
        O: Shards<R> + 'static,
    {
        let TrainStepBuilder { mesh, model, optimizer, spread: WithExperts(options), parts } = self;
        parts.check_sharded()?;
        ZeroExpertPipelineTrainer::sharded_experts(&mesh, model, Arc::new(optimizer), options, parts)
    }
}
