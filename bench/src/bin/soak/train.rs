//! Every way to train a task, as one.

use std::collections::BTreeMap;

use weftgrad::{
    distributed::{
        buckets::{BucketLimits, BucketOptions},
        checkpoint::{Checkpointed, Folder},
        comm::{Comm, Communicator},
        pipeline::{MicroBatches, PipelineOptions, PipelineTrainer, Staged, StagedTrainer, ZeroPipelineTrainer},
        plan::{Axis, Mesh, ParallelPlan},
        sampler::shard_batches,
        train::{BucketedTrainer, Notes, StageStrategy, Strategy, Trainer, TrainingConfig},
        zero::{FullParameters, Sharded, UnitOf, ZeroOptions, ZeroTrainer},
    },
    prelude::*,
};

use crate::program::{How, Program};

/// Values by name.
pub type Values = BTreeMap<String, Vec<f64>>;

/// A program's trainer, and its model.
pub trait Trains {
    /// One step, from 0; its loss.
    fn step(&mut self, step: usize) -> Result<f64>;
    /// Saves a checkpoint.
    fn save(&self, folder: &Folder) -> Result<()>;
    /// Goes on from the last one.
    fn load(&mut self, folder: &Folder) -> Result<()>;
    /// What this rank can have of the weights.
    fn weights(&self) -> Result<Values>;
}

/// The trainer of a program on this rank; values are drawn from `seed`, and then those of rank 0.
pub fn trainer(comm: &Comm<Cpu>, program: &Program, seed: u64) -> Result<Box<dyn Trains>> {
    let (config, rt) = (config(program), comm.runtime());
    let zero = |stage| ZeroOptions { stage, ..Default::default() };
    let whole = || program.task.whole(rt, seed);
    let at = At { comm: comm.clone(), program: program.clone() };
    Ok(match program.how {
        How::Buckets { first, others, wire } => {
            let (model, limits) = (whole()?, BucketLimits { first, others });
            let options = BucketOptions { limits, wire, ..Default::default() };
            let trainer = BucketedTrainer::new(comm, &model, config, options)?;
            Box::new(Whole { trainer, model, at, gather: |_| Ok(None) })
        }
        How::Zero { stage, whole: one, state } => {
            let (model, units) = (whole()?, if one { UnitOf::whole() } else { UnitOf::layers() });
            let trainer = ZeroTrainer::new(comm, &model, config, ZeroOptions { units, state, ..zero(stage) })?;
            Box::new(Whole { trainer, model, at, gather: |s| s.gather_full_params().map(Some) })
        }
        How::Hybrid { replicas, stage } => {
            let (model, shards) = (whole()?, program.ranks / replicas);
            let plan = ParallelPlan::new(program.ranks, [(Axis::Data, replicas), (Axis::Shard, shards)])?;
            let (lr, weight_decay) = (config.learning_rate, config.weight_decay);
            let optimizer = optim::ParamGroups::new(optim::AdamWConfig { lr, weight_decay, ..Default::default() });
            let optimizer = optimizer.group(|_, spec| spec.shape.rank() < 2, |c| c.weight_decay = 0.0);
            let strategy = Sharded::hybrid(&Mesh::new(comm, plan)?, &model, optimizer, zero(stage))?;
            let trainer = ZeroTrainer::over(strategy, config)?;
            Box::new(Whole { trainer, model, at, gather: |s| s.gather_full_params().map(Some) })
        }
        How::Pipeline { kind, p, v, micros, zero: sharded } => {
            let (checked, options) = (How::checked(kind, p, v, micros)?, PipelineOptions::default());
            let placement = checked.schedule().placement();
            let (stages, ties) = program.task.stages(rt, seed, checked.schedule().stages())?;
            let own = stages.into_iter().enumerate().filter(|(s, _)| placement.rank_of(*s) == Some(comm.rank() % p));
            let task = program.task.clone();
            let loss = move |y: &[Var<Cpu>], t: &[Var<Cpu>]| task.loss(&y[0], &t[0]);
            let model = Staged { stages: own.collect(), loss: Some(Box::new(loss)), ties };
            match sharded {
                None => {
                    let trainer = PipelineTrainer::new(comm, checked, model, config, options)?;
                    Box::new(InStages { trainer, at, gather: |_| Ok(Vec::new()) })
                }
                Some(stage) => {
                    let trainer = ZeroPipelineTrainer::new(comm, checked, model, config, options, zero(stage))?;
                    Box::new(InStages { trainer, at, gather: |t| t.gather_full_params() })
                }
            }
        }
    })
}

fn config(program: &Program) -> TrainingConfig {
    TrainingConfig {
        learning_rate: 1e-2,
        weight_decay: 0.1,
        accumulation: program.accumulation,
        max_norm: program.max_norm,
        ..Default::default()
    }
}

/// Makes all parameters be here for as long as what it gives lives.
type Gather<T, G> = fn(&T) -> Result<G>;

/// Where a program runs.
struct At {
    comm: Comm<Cpu>,
    program: Program,
}

impl At {
    fn batch(&self, step: usize) -> Result<(Tensor<Cpu>, Tensor<Cpu>)> {
        let Program { seed, examples, task, .. } = &self.program;
        task.batch(self.comm.runtime(), seed.wrapping_mul(1000) + step as u64, *examples)
    }
}

/// Every rank has the whole model, or shards of it.
struct Whole<S: Strategy<Cpu>> {
    trainer: Trainer<Cpu, S>,
    model: Box<dyn Forward<Cpu>>,
    at: At,
    gather: Gather<S, Option<FullParameters<Cpu>>>,
}

impl<S: Strategy<Cpu> + Checkpointed<Cpu>> Trains for Whole<S> {
    fn step(&mut self, step: usize) -> Result<f64> {
        let (x, y) = self.at.batch(step)?;
        let Whole { trainer, model, at: At { comm, program }, .. } = self;
        let own = shard_batches(program.examples, comm.rank(), comm.size());
        let metrics = trainer.step(|k| {
            let rows: Vec<i64> = own.iter().skip(k).step_by(program.accumulation).map(|&i| i as i64).collect();
            let rows = Tensor::from_vec(comm.runtime(), rows)?;
            let out = model.forward(&Var::new(x.index_select(0, &rows)?))?;
            program.task.loss(&out, &Var::new(y.index_select(0, &rows)?))
        })?;
        metrics.loss()
    }

    fn save(&self, folder: &Folder) -> Result<()> {
        self.trainer.save(folder, &Notes::new())
    }

    fn load(&mut self, folder: &Folder) -> Result<()> {
        self.trainer.load(folder).map(|_| ())
    }

    fn weights(&self) -> Result<Values> {
        let _scope = (self.gather)(self.trainer.strategy())?;
        values(self.model.state_dict()?)
    }
}

/// Every rank has its stages, whole or in shards.
struct InStages<S> {
    trainer: StagedTrainer<Cpu, S>,
    at: At,
    gather: Gather<StagedTrainer<Cpu, S>, Vec<FullParameters<Cpu>>>,
}

impl<S: StageStrategy<Cpu>> Trains for InStages<S> {
    fn step(&mut self, step: usize) -> Result<f64> {
        let (x, y) = self.at.batch(step)?;
        let At { comm, program } = &self.at;
        let schedule = self.trainer.pipeline().schedule();
        let (p, m, runs) = (schedule.placement().ranks(), schedule.micro_batches(), program.accumulation);
        let rows = program.examples / (program.ranks / p * runs);
        let metrics = self.trainer.step(|k| {
            let at = (comm.rank() / p * runs + k) * rows;
            MicroBatches::split(&[x.narrow(0, at, rows)?], &[y.narrow(0, at, rows)?], m)
        })?;
        metrics.loss()
    }

    fn save(&self, folder: &Folder) -> Result<()> {
        self.trainer.save(folder, &Notes::new())
    }

    fn load(&mut self, folder: &Folder) -> Result<()> {
        self.trainer.load(folder).map(|_| ())
    }

    fn weights(&self) -> Result<Values> {
        let _scope = (self.gather)(&self.trainer)?;
        let mut all = Values::new();
        for stage in self.trainer.pipeline().stages().values() {
            all.extend(values(stage.state_dict()?)?);
        }
        Ok(all)
    }
}

fn values(state: Vec<(String, Tensor<Cpu>)>) -> Result<Values> {
    state.into_iter().map(|(name, value)| Ok((name, value.to_vec::<f64>()?))).collect()
}
