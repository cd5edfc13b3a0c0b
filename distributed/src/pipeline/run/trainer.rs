//! Training through a pipeline, and several replicas of it.

use std::sync::Arc;

use autograd::Leaf;
use nn::ModuleExt;
use numcore::{DType, Result, Runtime, Tensor};
use optim::Optimizer;

use super::{
    Groups, LossFn, MicroBatches, Pipeline, PipelineOptions, PipelineOutput, Stage, StageGradients, Tie,
    gradients::StageOptimizers,
};
use crate::{
    comm::{Collectives, Comm},
    ddp::Ddp,
    pipeline::Checked,
    train::{Loss, Summed, TrainingConfig, TrainingMetrics, Updates},
};

/// Trains a model cut into stages: micro-batches through the pipeline, sums over replicas, clipping by the norm of all gradients
/// on all ranks, an optimizer for each stage.
///
/// Parameters and buffers are those of the first replica from the start. [`TrainingConfig::accumulation`] counts runs of the pipeline in
/// a step, each of as many micro-batches as the schedule has.
pub struct PipelineTrainer<R: Runtime> {
    groups: Groups<R>,
    pipeline: Pipeline<R>,
    stages: Stages<R>,
    updates: Updates,
    last: Option<PipelineOutput<R>>,
}

/// What is trained of this rank's stages.
struct Stages<R: Runtime> {
    gradients: StageGradients<R>,
    optimizers: StageOptimizers<R>,
    /// What norms are summed in: the widest any rank needs.
    wide: DType,
    /// Of a rank without parameters.
    learning_rate: f64,
}

/// The parts of a model that a rank runs, and how it finds its loss.
pub struct Staged<R: Runtime> {
    /// This rank's stages, by number.
    pub stages: Vec<(usize, Box<dyn Stage<R>>)>,
    /// Looked at on the rank of the last stage.
    pub loss: Option<Box<LossFn<R>>>,
    /// Parameters of which several stages have a copy. The same on every rank.
    pub ties: Vec<Tie>,
}

impl<R: Runtime> PipelineTrainer<R> {
    /// Trains with AdamW as `config` says. The world is one or more replicas of the schedule's ranks: see [`Groups`]. Blocks.
    pub fn new(
        world: &Comm<R>,
        checked: Checked,
        model: Staged<R>,
        config: TrainingConfig,
        options: PipelineOptions,
    ) -> Result<Self> {
        let optimizer = config.clone();
        Self::with(world, checked, model, config, options, |_, leaves| optimizer.adamw(leaves))
    }

    /// Trains with any optimizer: `optimizer` makes one for a stage's parameters, of which there may be none. `config`'s learning
    /// rate and decay are not looked at.
    pub fn with(
        world: &Comm<R>,
        checked: Checked,
        model: Staged<R>,
        config: TrainingConfig,
        options: PipelineOptions,
        optimizer: impl FnMut(usize, Vec<Arc<Leaf<R>>>) -> Result<Box<dyn Optimizer<R>>>,
    ) -> Result<Self> {
        let built = Self::build(world, checked, model, config, options, optimizer);
        // The others would wait for this rank's part of the next agreement until the time is up.
        built.inspect_err(|error| world.abort(&error.to_string())).map_err(|error| error.on_rank(world.rank()))
    }

    fn build(
        world: &Comm<R>,
        checked: Checked,
        model: Staged<R>,
        config: TrainingConfig,
        options: PipelineOptions,
        mut optimizer: impl FnMut(usize, Vec<Arc<Leaf<R>>>) -> Result<Box<dyn Optimizer<R>>>,
    ) -> Result<Self> {
        config.check()?;
        world.agree("the training configuration", format!("{config:?}").as_bytes())?;
        let groups = Groups::new(world, checked.schedule().placement().ranks())?;
        let pipeline = Pipeline::new(&groups.pipe, checked, model.stages, model.loss, options)?;
        for stage in pipeline.stages().values() {
            let replicas = Ddp::new(&groups.data, stage)?;
            replicas.sync_params()?;
            replicas.sync_buffers()?;
        }
        let leaves = |stage: &dyn Stage<R>| stage.parameters().iter().map(|p| p.leaf()).collect::<Vec<_>>();
        let make = || {
            let one = |(stage, module)| Ok((stage, optimizer(stage, leaves(module))?));
            pipeline.stages().iter().map(|(&stage, module)| (stage, &**module)).map(one).collect()
        };
        let (gradients, optimizers) = StageGradients::new(&groups, &pipeline, &model.ties, make)?;
        let is_f64 =
            pipeline.stages().values().flat_map(|stage| leaves(&**stage)).any(|leaf| leaf.spec().dtype == DType::F64);
        let wide = world.exchange(&[is_f64.into()])?.iter().any(|flag| flag == &[1]);
        let wide = if wide { DType::F64 } else { DType::F32 };
        let stages = Stages { gradients, optimizers, wide, learning_rate: config.learning_rate };
        Ok(PipelineTrainer { groups, pipeline, stages, updates: Updates::new(config), last: None })
    }

    /// One step: `batch(k)` gives this replica's micro-batches of the `k`-th run. The update is that of one rank with all micro-batches
    /// of all replicas.
    pub fn step(&mut self, batch: impl FnMut(usize) -> Result<MicroBatches<R>>) -> Result<TrainingMetrics<R>> {
        let done = self.accumulate(batch).and_then(|losses| self.update(&losses));
        let world = &self.groups.world;
        done.inspect_err(|error| world.abort(&error.to_string())).map_err(|error| error.on_rank(world.rank()))
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

    /// The pipeline, to evaluate.
    pub fn pipeline_mut(&mut self) -> &mut Pipeline<R> {
        &mut self.pipeline
    }

    /// The optimizers of this rank's stages, for schedules and checkpoints.
    pub fn optimizers_mut(&mut self) -> &mut StageOptimizers<R> {
        &mut self.stages.optimizers
    }

    fn accumulate(&mut self, mut batch: impl FnMut(usize) -> Result<MicroBatches<R>>) -> Result<Vec<Loss<R>>> {
        self.stages.gradients.zero();
        self.pipeline.set_loss_scale(self.updates.loss_scale());
        let (mut losses, runs) = (Vec::new(), self.updates.config.accumulation);
        for k in 0..runs {
            self.stages.gradients.begin(k + 1 == runs);
            let output = self.pipeline.run(batch(k)?, &mut self.stages.gradients)?;
            losses.extend(output.losses().iter().map(|loss| Loss { sum: loss.sum.clone(), weight: loss.weight }));
            self.last = Some(output);
        }
        Ok(losses)
    }

    fn update(&mut self, losses: &[Loss<R>]) -> Result<TrainingMetrics<R>> {
        self.stages.gradients.finish()?;
        self.updates.apply(&mut self.stages, &self.groups.world, losses)
    }
}

impl<R: Runtime> Summed<R> for Stages<R> {
    fn norm(&self) -> Result<Tensor<R>> {
        self.gradients.norm(self.wide)
    }

    fn is_finite(&self) -> Result<bool> {
        self.gradients.all_finite()
    }

    fn update(&mut self, scale: &Tensor<R>) -> Result<()> {
        self.gradients.multiply_by(scale)?;
        for (&stage, optimizer) in &mut self.optimizers {
            self.gradients.of(stage).map_or(Ok(()), |gradients| optimizer.step(gradients))?;
        }
        Ok(())
    }

    fn learning_rate(&self) -> f64 {
        self.optimizers.values().find_map(|o| o.lrs().first().copied()).unwrap_or(self.learning_rate)
    }
}
