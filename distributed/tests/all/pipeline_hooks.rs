//! What a run asks of its caller: gathers, frees and reductions of stages, in the order of the row.

use crate::pipeline_common::shape;
use std::collections::{BTreeMap, BTreeSet};

use crate::pipeline_common::*;
use autograd::BackwardHook;
use distributed::{
    buckets::BucketOptions,
    comm::{Collectives, Comm, ReduceOp},
    ddp::DataParallel,
    pipeline::{
        Action, Compute, Limits, Lowering, MicroBatches, Pipeline, PipelineGroups, ScheduleKind, Stage, StageHooks,
        UnitOp,
    },
    strategy::{BackwardPass, Strategy},
};
use nn::ModuleExt;
use numcore::{Error, Result, Tensor, ops::ViewOps};
use optim::{FlatGradients, Optimizer, Sgd, SgdConfig};
use runtime_cpu::Cpu;

/// Gathers and frees, and knows when a stage is used while it is not gathered.
struct Gathering {
    gathered: BTreeSet<usize>,
    reduced: Vec<usize>,
    gradients: BTreeMap<usize, FlatGradients<Cpu>>,
}

impl StageHooks<Cpu> for Gathering {
    fn gradients(&mut self, pass: Compute, _: bool) -> Result<&mut dyn BackwardHook<Cpu>> {
        assert!(self.gathered.contains(&pass.stage) && !self.reduced.contains(&pass.stage));
        self.gradients.gradients(pass, false)
    }

    fn reduce_grad(&mut self, stage: usize) -> Result<()> {
        self.gradients[&stage].require_all()?;
        self.reduced.push(stage);
        Ok(())
    }

    fn unshard(&mut self, stage: usize) -> Result<()> {
        assert!(self.gathered.insert(stage));
        Ok(())
    }

    fn reshard(&mut self, stage: usize) -> Result<()> {
        assert!(self.gathered.remove(&stage));
        Ok(())
    }
}

#[test]
fn units_are_called_in_the_order_of_the_row() {
    for (kind, p, v) in [(ScheduleKind::LoopedBfs, 2, 3), (ScheduleKind::DualPipeV, 2, 2), (ScheduleKind::ZbH1, 3, 1)] {
        let schedule = kind.generate(shape(p, v, 6)).unwrap();
        let lowered = schedule.lower(Lowering { sharded: true, ..Default::default() }).unwrap();
        let checked = lowered.check(Limits::default()).unwrap();
        world(p, |comm| {
            let mut pipeline = pipeline(&comm, &checked, mlp_stages(comm.runtime(), p * v, p * v))?;
            let (_, gradients) = optimizers(&pipeline, 0.0)?;
            let mut hooks = Gathering { gathered: BTreeSet::new(), reduced: Vec::new(), gradients };
            let batch = MicroBatches::split(&[rows(comm.runtime(), 1, 6)], &[rows(comm.runtime(), 2, 6)], 6)?;
            pipeline.run(batch, &mut hooks)?;
            let reductions = checked.row(comm.rank()).iter().filter_map(|action| match action {
                Action::Unit(unit) if unit.op == UnitOp::ReduceGrad => Some(unit.stage),
                _ => None,
            });
            assert!(hooks.gathered.is_empty() && reductions.eq(hooks.reduced));
            Ok(())
        });
    }
}

/// Buckets as the hooks of stages: they are sent during a stage's last backward pass.
struct Bucketed(BTreeMap<usize, DataParallel<Cpu>>);

impl StageHooks<Cpu> for Bucketed {
    fn gradients(&mut self, pass: Compute, last: bool) -> Result<&mut dyn BackwardHook<Cpu>> {
        let buckets = self.0.get_mut(&pass.stage).ok_or_else(|| Error::argument("test", "no such stage"))?;
        let last = if last { BackwardPass::Last(None) } else { BackwardPass::Earlier };
        buckets.begin(pass.stage, last)?;
        Ok(buckets)
    }
}

fn sgd(stage: &dyn Stage<Cpu>) -> Result<Box<dyn Optimizer<Cpu>>> {
    let leaves: Vec<_> = stage.parameters().iter().map(|p| p.leaf()).collect();
    Ok(Box::new(Sgd::over(SgdConfig::default(), leaves)?))
}

/// The gradients of this rank's parameters by name.
fn summed<'a>(pipeline: &Pipeline<Cpu>, mut of: impl FnMut(usize) -> &'a FlatGradients<Cpu>) -> Result<Numbers> {
    let mut numbers = Numbers::new();
    for (&stage, module) in pipeline.stages() {
        let gradients = of(stage);
        for (name, p) in module.named_parameters() {
            numbers.insert(name, gradients.get(&p.leaf())?.unwrap().to_vec::<f32>()?);
        }
    }
    Ok(numbers)
}

#[test]
fn buckets_and_plain_sums_give_the_same_over_replicas() {
    for kind in [ScheduleKind::OneFOneB, ScheduleKind::ZbH1, ScheduleKind::GPipe] {
        let checked = checked(kind, 2, 1, 4).unwrap();
        let batch = |comm: &Comm<Cpu>| {
            let replica = comm.rank() / 2;
            let (x, y) = (rows(comm.runtime(), 1, 8), rows(comm.runtime(), 2, 8));
            let own = |t: &Tensor<Cpu>| t.narrow(0, replica * 4 * ROWS, 4 * ROWS);
            MicroBatches::split(&[own(&x)?], &[own(&y)?], 4)
        };
        let plain = world(4, |comm| {
            let groups = PipelineGroups::new(&comm, 2)?;
            let mut pipeline = pipeline(&groups.pipe, &checked, mlp_stages(comm.runtime(), 2, 2))?;
            let (_, mut gradients) = optimizers(&pipeline, 0.0)?;
            pipeline.run(batch(&comm)?, &mut gradients)?;
            for flat in gradients.values_mut().flat_map(|of| of.flats_mut()) {
                let sum = groups.data.all_reduce(flat.lend_whole()?, ReduceOp::Sum)?;
                flat.restore(sum.wait()?)?;
            }
            summed(&pipeline, |stage| &gradients[&stage])
        });
        let bucketed = world(4, |comm| {
            let groups = PipelineGroups::new(&comm, 2)?;
            let mut pipeline = pipeline(&groups.pipe, &checked, mlp_stages(comm.runtime(), 2, 2))?;
            let mut hooks = BTreeMap::new();
            for (&stage, module) in pipeline.stages() {
                let options = BucketOptions::default();
                hooks.insert(stage, DataParallel::new(&groups.data, &**module, sgd(&**module)?, options)?);
            }
            let mut hooks = Bucketed(hooks);
            pipeline.run(batch(&comm)?, &mut hooks)?;
            hooks.0.values_mut().try_for_each(DataParallel::finish)?;
            summed(&pipeline, |stage| hooks.0[&stage].gradients())
        });
        assert_eq!(plain, bucketed, "{kind}");
        assert_eq!(plain[0], plain[2], "replicas agree");
    }
}
