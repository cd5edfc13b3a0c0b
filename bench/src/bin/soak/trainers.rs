//! The trainer that a program describes.

use weftgrad::{
    distributed::{
        buckets::{BucketLimits, BucketOptions},
        checkpoint::Checkpointed,
        comm::{Comm, Communicator},
        mesh::{AsMesh, Mesh},
        pipeline::{MicroBatches, PipelineModel},
        plan::{Axis, ParallelPlan},
        sampler::shard_batches,
        strategy::BatchShare,
        train::{TrainStep, TrainingConfig, TrainingMetrics},
        zero::{FullParameters, StatePlace, UnitOf, ZeroOptions, ZeroStage},
    },
    nn::parallel::ContextSlot,
    optim::{AdamWConfig, ParamGroups},
    prelude::*,
};

use crate::{
    program::{How, Program, Stages, TensorCut},
    task::Batch,
};

/// A trainer of a model that is one module on every rank, or in stages.
pub(crate) trait Trains {
    /// Runs a step on this rank's part of all examples.
    fn train(&mut self, program: &Program, all: Batch) -> Result<TrainingMetrics<Cpu>>;
    /// The state that checkpoints contain.
    fn state(&mut self) -> &mut dyn Checkpointed<Cpu>;
    /// The modules of the model on this rank.
    fn modules(&self) -> Vec<&dyn Module<Cpu>>;
    /// Gathers all parameters on this rank, for the lifetime of the returned guard.
    fn gather(&self) -> Result<FullParameters>;
}

/// Builds the trainer of a program on this rank. Values are drawn from `seed`, and then replaced by those of rank 0.
pub(crate) fn trainer(comm: &Comm<Cpu>, program: &Program, seed: u64) -> Result<Box<dyn Trains>> {
    let (config, rt) = (config(program), comm.runtime());
    let adamw = ParamGroups::decay_matrices(AdamWConfig { lr: 1e-2, weight_decay: 0.1, ..Default::default() });
    let whole = || program.task.whole(rt, seed);
    Ok(match program.how {
        How::Buckets { first, others, compression, power } => {
            let ((model, context), limits) = (whole()?, Some(BucketLimits { first, others }));
            let options = BucketOptions { limits, compression, ..Default::default() };
            let step = TrainStep::builder(comm, &model).optimizer(adamw).config(config).buckets(options);
            let step = match power {
                Some(power) => step.reducer(move |comm| power.reducer(comm)),
                None => step,
            };
            Box::new(Whole { trainer: step.build()?, model, context })
        }
        How::Zero { stage, whole: one, state } => {
            let ((model, context), units) = (whole()?, if one { UnitOf::whole() } else { UnitOf::layers() });
            let mut options = ZeroOptions { units, state, ..stage.into() };
            // Sharded tensors are placed with the state.
            options.gradients = if stage.shards_gradients() { state } else { StatePlace::Device };
            options.parameters = if stage.shards_parameters() { state } else { StatePlace::Device };
            let step = TrainStep::builder(comm, &model).optimizer(adamw).config(config).zero(options);
            Box::new(Whole { trainer: step.build()?, model, context })
        }
        How::Hybrid { replicas, stage } => {
            let ((model, context), shards) = (whole()?, program.ranks / replicas);
            let plan = ParallelPlan::new(program.ranks, [(Axis::Data, replicas), (Axis::Shard, shards)])?;
            let step = TrainStep::builder(&Mesh::new(comm, plan)?, &model).optimizer(adamw).config(config).zero(stage);
            Box::new(Whole { trainer: step.build()?, model, context })
        }
        How::Tensor { cut, zero } | How::Context { cut, zero, .. } => {
            let (model, context) = whole()?;
            let parts = if let How::Context { context, .. } = program.how { context } else { 1 };
            let replicas = program.ranks / (cut.ranks * parts);
            let plan = [(Axis::Data, replicas), (Axis::Context, parts), (Axis::Tensor, cut.ranks)];
            let mesh = Mesh::new(comm, ParallelPlan::of(plan)?)?;
            if cut.ranks > 1 {
                mesh.parallelize(&*model, &program.task.tensor_plan(cut))?;
            }
            if let How::Context { exchange, .. } = program.how {
                mesh.context_parallel(&*model, exchange)?;
            }
            let step = TrainStep::builder(&mesh, &model).optimizer(adamw).config(config);
            let trainer = step.zero(zero.unwrap_or(ZeroStage::None)).build()?;
            Box::new(Whole { trainer, model, context })
        }
        How::Pipeline { stages, zero, .. } | How::ContextPipeline { stages, zero, .. } => {
            let (mesh, model) = staged(comm, program, stages, seed)?;
            let step = TrainStep::builder(&mesh, model).optimizer(adamw).config(config);
            Box::new(step.zero(zero.unwrap_or(ZeroStage::None)).build()?)
        }
        How::Experts { stages, zero, .. } if stages.p > 1 => {
            let (mesh, model) = staged(comm, program, stages, seed)?;
            let step = TrainStep::builder(&mesh, model).optimizer(adamw).config(config);
            Box::new(step.zero(zero.unwrap_or(ZeroStage::None)).experts().build()?)
        }
        How::Experts { experts, zero, .. } => {
            let (model, context) = whole()?;
            let plan = ParallelPlan::of([(Axis::Data, program.ranks), (Axis::Expert, experts)])?;
            let mesh = Mesh::new(comm, plan)?;
            mesh.parallelize(&*model, &program.task.tensor_plan(TensorCut::default()))?;
            let step = TrainStep::builder(&mesh, &model).optimizer(adamw).config(config);
            let trainer = step.zero(zero.unwrap_or(ZeroStage::None)).experts().build()?;
            Box::new(Whole { trainer, model, context })
        }
    })
}

/// Builds the stages of a program on this rank, cut by its strategy, and the mesh of ranks.
fn staged(comm: &Comm<Cpu>, program: &Program, pipeline: Stages, seed: u64) -> Result<(Mesh<Cpu>, PipelineModel<Cpu>)> {
    let (how, task) = (program.how, &program.task);
    let (tensor, context) = (how.tensor(), how.context());
    let checked = pipeline.checked()?;
    let (stages, loss) = task.stages(comm.runtime(), seed, checked.schedule().stages(), context > 1)?;
    let on = |rank: usize| PipelineModel::on(rank, checked, stages).loss(move |y, t| loss(&y[0], &t[0]));
    let experts = if let How::Experts { experts, .. } = how { experts } else { 1 };
    if tensor * context * experts == 1 {
        return Ok((comm.as_mesh(), on(comm.rank())));
    }
    let replicas = program.ranks / (pipeline.p * tensor * context);
    let axes = [(Axis::Pipe, pipeline.p), (Axis::Data, replicas), (Axis::Context, context), (Axis::Tensor, tensor)];
    let plan = ParallelPlan::of(axes.into_iter().chain([(Axis::Expert, experts)]))?;
    let mesh = Mesh::new(comm, plan)?;
    let mut model = on(mesh.axis(Axis::Pipe).rank());
    match how {
        How::Pipeline { cut, .. } => model = model.parallelize(&mesh, &task.tensor_plan(cut))?,
        How::ContextPipeline { exchange, cut, .. } => {
            if cut.ranks > 1 {
                model = model.parallelize(&mesh, &task.tensor_plan(cut))?;
            }
            model = model.context_parallel(&mesh, exchange)?;
        }
        _ => model = model.parallelize(&mesh, &task.tensor_plan(TensorCut::default()))?,
    }
    Ok((mesh, model))
}

fn config(program: &Program) -> TrainingConfig {
    TrainingConfig { accumulation: program.accumulation, max_norm: program.max_norm, ..Default::default() }
}

/// A trainer of a model as one module, which the trainer does not own.
struct Whole {
    trainer: TrainStep<Cpu>,
    model: Box<dyn Forward<Cpu>>,
    /// The slot for the ranks over which sequences are cut.
    context: ContextSlot<Cpu>,
}

impl Trains for Whole {
    fn train(&mut self, program: &Program, (x, y): Batch) -> Result<TrainingMetrics<Cpu>> {
        let comm = self.trainer.comm().clone();
        let BatchShare { index, of } = self.trainer.ranks().share;
        let own = shard_batches(program.examples, index, of);
        self.trainer.step(|k| {
            let rows: Vec<i64> = own.iter().skip(k).step_by(program.accumulation).map(|&i| i as i64).collect();
            let rows = Tensor::from_vec(comm.runtime(), rows)?;
            let out = self.model.forward(&Var::new(x.index_select(0, &rows)?))?;
            program.task.loss_of_part(&out, &Var::new(y.index_select(0, &rows)?), &self.context)
        })
    }

    fn state(&mut self) -> &mut dyn Checkpointed<Cpu> {
        &mut self.trainer
    }

    fn modules(&self) -> Vec<&dyn Module<Cpu>> {
        vec![&*self.model]
    }

    fn gather(&self) -> Result<FullParameters> {
        self.trainer.gather_full_params()
    }
}

impl Trains for TrainStep<Cpu> {
    fn train(&mut self, program: &Program, (x, y): Batch) -> Result<TrainingMetrics<Cpu>> {
        let (m, runs) = (self.pipeline().expect("stages").schedule().micro_batches(), program.accumulation);
        let BatchShare { index, of } = self.ranks().share;
        let rows = program.examples / (of * runs);
        self.step(|k| {
            let at = (index * runs + k) * rows;
            MicroBatches::split(&[x.narrow(0, at, rows)?], &[y.narrow(0, at, rows)?], m)
        })
    }

    fn state(&mut self) -> &mut dyn Checkpointed<Cpu> {
        self
    }

    fn modules(&self) -> Vec<&dyn Module<Cpu>> {
        self.pipeline().expect("stages").stages().values().map(|stage| &**stage as _).collect()
    }

    fn gather(&self) -> Result<FullParameters> {
        self.gather_full_params()
    }
}
