//! A GPT in stages that are cut along tensor, trained by any strategy.

use crate::{
    pipeline_common::TIMEOUT,
    pipeline_staged::How,
    prelude::*,
    tensor_common::{TensorCase, TensorTrace, assembled, pieces},
};

/// A case of tensor parallelism in stages.
#[derive(Clone, Debug)]
pub struct StagedCase {
    pub case: TensorCase,
    pub kind: ScheduleKind,
    /// Stages on each rank.
    pub v: usize,
    pub micros: usize,
    pub how: How,
    /// What is asked of ZeRO beside its stage.
    pub adjust: fn(&mut ZeroOptions),
}

impl StagedCase {
    /// A model that `t` divides, of 8 examples a step.
    pub fn new(t: usize, kind: ScheduleKind, v: usize, how: How) -> Self {
        let mut case = TensorCase { sequences: 8, ..TensorCase::new(t) };
        case.model.layers = 2 * v;
        StagedCase { case, kind, v, micros: 4, how, adjust: |_| () }
    }

    /// This rank's stages. A head that is tied has its logits cut, or gathered.
    pub fn model(&self, mesh: &Mesh<Cpu>) -> Result<PipelineModel<Cpu>> {
        let case = &self.case;
        let pipe = mesh.axis(Axis::Pipe);
        let checked = self.how.checked(self.kind, pipe.size(), self.v, self.micros).unwrap();
        let init = Init::new(mesh.world().runtime(), 7).dtype(case.dtype).lazily();
        let (stages, loss) = Gpt::new(&init, case.model)?.split_with_loss(checked.schedule().stages(), case.loss)?;
        for stage in &stages {
            case.frozen.iter().for_each(|prefix| stage.freeze_where(nn::under(prefix)));
        }
        let loss = move |y: &[Var<Cpu>], t: &[Var<Cpu>]| {
            Loss::sum(loss.of(&y[0], &t[0])?, t[0].dims().iter().product::<usize>() as f64)
        };
        let model = PipelineModel::on(pipe.rank(), checked, stages).loss(loss);
        let model = model.parallelize(mesh, &case.plan())?;
        model.context_parallel(mesh, case.exchange)
    }

    /// Trains on the ranks of a mesh.
    pub fn train(&self, mesh: &Mesh<Cpu>) -> Result<TensorTrace> {
        manual_seed(3);
        let case = &self.case;
        let config =
            TrainingConfig { max_norm: Some(case.max_norm), accumulation: case.accumulation, ..Default::default() };
        let builder = TrainStep::builder(mesh, self.model(mesh)?).optimizer(adamw()).config(config);
        let mut zero = self.how.zero().unwrap_or(ZeroStage::None.into());
        (self.adjust)(&mut zero);
        let mut step = builder.zero(zero).build()?;
        let mut trace = self.steps(&mut step, mesh)?;
        let _all = step.gather_full_params()?;
        for stage in step.pipeline().expect("stages").stages().values() {
            trace.pieces.extend(pieces(&**stage)?);
        }
        Ok(trace)
    }

    fn steps(&self, trainer: &mut TrainStep<Cpu>, mesh: &Mesh<Cpu>) -> Result<TensorTrace> {
        let mut trace = TensorTrace::default();
        for step in 0..self.case.steps {
            let metrics = self.step(trainer, mesh, step)?;
            trace.losses.push(metrics.loss()?);
            trace.norms.extend(metrics.grad_norm()?);
        }
        Ok(trace)
    }

    /// A step of this replica's share of the examples.
    pub fn step(&self, trainer: &mut TrainStep<Cpu>, mesh: &Mesh<Cpu>, step: usize) -> Result<TrainingMetrics<Cpu>> {
        let (comm, case) = (mesh.batch(), &self.case);
        let own = shard_batches(case.sequences, comm.rank(), comm.size());
        let of_run = own.len() / case.accumulation;
        trainer.step(|k| {
            let (x, y) = case.batch(comm.runtime(), step, &own[k * of_run..][..of_run])?;
            MicroBatches::split(&[x.value()?], &[y.value()?], self.micros)
        })
    }

    /// What ranks make of it: the whole weights, and what all ranks agree on.
    pub fn on(&self, axes: &[(Axis, usize)]) -> TensorTrace {
        let plan = ParallelPlan::of(axes.to_vec()).unwrap();
        let ranks = Ranks::new(plan.world()).timeout(TIMEOUT);
        let traces = ranks.run(cpu, |comm| self.train(&Mesh::new(&comm, plan.clone())?));
        assembled(traces.unwrap_or_else(|error| panic!("{axes:?} {self:?}: {error}")))
    }
}
