//! Tests of the time at which strategies send the gradients of a stage: in its last backward pass, before its row has
//! REDUCE_GRAD.

use std::{slice::from_ref, sync::Arc};

use autograd::BackwardHook;
use nn::{Init, Linear, Module, ModuleExt, Sequential, Tanh, loss::Reduction, loss::mse};
use numcore::{DType, Result, Tensor};
use optim::{AdamWConfig, Sgd, SgdConfig};
use runtime_cpu::Cpu;

use super::{Loss, pipeline::begin};
use crate::{
    buckets::{BucketLimits, BucketOptions},
    combinations::Features,
    comm::{Comm, Communicator, CountingCommunicator, Ranks},
    ddp::DataParallel,
    pipeline::{
        Checked, Compute, Limits, Lowering, MicroBatches, Pass, PipeShape, Pipeline, PipelineGroups, PipelineModel,
        ScheduleKind, Stage, StageHooks, split,
    },
    strategy::{ActiveRanks, BatchShare, SetKind, StepRanks, Strategy, StrategyPart, StrategySet},
    zero::{Sharded, ZeroStage},
};

const WIDTH: usize = 4;
const MICROS: usize = 4;

/// A request of a run to a stage's hooks, in the order of the row.
#[derive(Clone, Copy, Debug, PartialEq)]
enum HookCall {
    /// A backward pass; true if it is the stage's last of the run.
    Sweep(Compute, bool),
    ReduceGrad(usize),
    /// The end of the run, or of the step.
    Nothing,
}

/// The requests, and for each the number of sums that were started before the next request.
type SumsByCall = Vec<(HookCall, u64)>;

/// Strategies that record the requests of a run, and the number of sums started before each.
struct RecordingHooks {
    strategy: StrategySet<Cpu>,
    /// True if the current run is the step's last.
    is_last: bool,
    replicas: Arc<CountingCommunicator<Cpu>>,
    calls: Vec<(HookCall, u64)>,
}

impl RecordingHooks {
    fn note(&mut self, call: HookCall) {
        let sums = ["all_reduce", "reduce_scatter"].map(|kind| self.replicas.of(kind).calls);
        self.calls.push((call, sums.iter().sum()));
    }

    /// Takes the record out.
    fn take_record(&mut self) -> SumsByCall {
        let calls = std::mem::take(&mut self.calls);
        calls.windows(2).map(|pair| (pair[0].0, pair[1].1 - pair[0].1)).collect()
    }
}

impl StageHooks<Cpu> for RecordingHooks {
    fn gradients(&mut self, pass: Compute, last: bool) -> Result<&mut dyn BackwardHook<Cpu>> {
        self.note(HookCall::Sweep(pass, last));
        begin(&mut self.strategy, pass, last && self.is_last)?;
        Ok(&mut self.strategy)
    }

    fn reduce_grad(&mut self, stage: usize) -> Result<()> {
        self.note(HookCall::ReduceGrad(stage));
        Ok(())
    }

    fn unshard(&mut self, stage: usize) -> Result<()> {
        self.strategy.unshard(stage)
    }

    fn reshard(&mut self, stage: usize) -> Result<()> {
        self.strategy.reshard(stage)
    }
}

/// Trains two runs of a step on two replicas of two ranks. Returns the requests and sums of each run, by rank.
fn two_runs(
    checked: &Checked,
    strategy: impl Fn(&dyn Stage<Cpu>, &Comm<Cpu>) -> Result<Box<dyn Strategy<Cpu>>> + Sync,
) -> Vec<[SumsByCall; 2]> {
    let program = |comm: Comm<Cpu>| {
        let groups = PipelineGroups::new(&comm, 2)?;
        let replicas = Arc::new(CountingCommunicator::new(groups.data));
        let (rt, init) = (comm.runtime(), Init::new(comm.runtime(), 3));
        let count = checked.schedule().stages();
        let linear = |_| Linear::new(&init, WIDTH, WIDTH);
        let layers = (0..2 * count).map(linear).collect::<Result<Vec<_>>>()?.into_iter();
        let layers = layers.fold(Sequential::new(), |model, layer| model.push(layer).push(Tanh)).into_layers();
        let cuts: Vec<usize> = (1..count).map(|stage| 4 * stage).collect();
        let model = PipelineModel::on(comm.rank(), checked.clone(), split(layers, &cuts)?)
            .loss(|y, target| Ok(Loss::mean(mse(&y[0], &target[0], Reduction::Mean)?)));
        let mut pipeline = Pipeline::new(&groups.pipe, model)?;
        let mut parts: Vec<(_, &dyn Module<Cpu>)> = Vec::new();
        for stage in pipeline.stages().values() {
            parts.push((StrategyPart::new(strategy(&**stage, &(replicas.clone() as Comm<Cpu>))?), &**stage));
        }
        let together = SetKind::Stages {
            numbers: pipeline.stages().keys().copied().collect(),
            pipe: groups.pipe.clone(),
            ties: Vec::new(),
        };
        let ranks = StepRanks {
            everyone: groups.world.clone(),
            losses: groups.losses.clone(),
            share: BatchShare { index: comm.rank() / 2, of: 2 },
            counts_examples: true,
            context_ranks: 1,
            random_stream: comm.rank(),
        };
        let strategy = StrategySet::new(parts, together, ranks, Features::default());
        let mut watched = RecordingHooks { strategy, is_last: false, replicas, calls: Vec::new() };
        watched.strategy.prepare(ActiveRanks::All)?;
        let mut run = |last: bool| -> Result<SumsByCall> {
            watched.is_last = last;
            let x = Tensor::normal(rt, [MICROS, WIDTH], DType::F32, 0.0, 1.0, 1)?;
            pipeline.run(MicroBatches::split(from_ref(&x), from_ref(&x), MICROS)?, &mut watched)?;
            watched.note(HookCall::Nothing);
            if last {
                watched.strategy.finish()?;
                watched.note(HookCall::Nothing);
            }
            Ok(watched.take_record())
        };
        Ok([run(false)?, run(true)?])
    };
    Ranks::new(4).run(|_| Ok(Cpu::with_threads(1)), program).unwrap()
}

fn each_kind(test: impl Fn(ScheduleKind, &Checked)) {
    for (kind, v) in [
        (ScheduleKind::GPipe, 1),
        (ScheduleKind::OneFOneB, 1),
        (ScheduleKind::ZbH1, 1),
        (ScheduleKind::Interleaved, 2),
        (ScheduleKind::Zbv, 2),
        (ScheduleKind::DualPipeV, 2),
    ] {
        let lowered = kind
            .generate(PipeShape { ranks: 2, stages_per_rank: v, micro_batches: MICROS })
            .unwrap()
            .lower(Lowering::default())
            .unwrap();
        test(kind, &lowered.check(Limits::default()).unwrap());
    }
}

/// Checks that all sums of a stage are started in its last backward pass with weight gradients of the step. REDUCE_GRAD
/// must come next.
fn in_the_last_sweep(kind: ScheduleKind, checked: &Checked, ranks: Vec<[SumsByCall; 2]>, sums: u64) {
    for (rank, [first, second]) in ranks.into_iter().enumerate() {
        assert!(first.iter().all(|(_, sent)| *sent == 0), "{kind}, rank {rank}, before the last run: {first:?}");
        let mut stages = Vec::new();
        for (at, (call, sent)) in second.iter().enumerate() {
            let what = || format!("{kind}, rank {rank}, {call:?}: {sent} of {sums} sums in {second:?}");
            match call {
                HookCall::Sweep(pass, true) if pass.pass.makes_weight_gradient() => {
                    assert!(*sent == sums && second[at + 1].0 == HookCall::ReduceGrad(pass.stage), "{}", what());
                    stages.push(pass.stage);
                }
                _ => assert_eq!(*sent, 0, "{}", what()),
            }
        }
        stages.sort_unstable();
        assert!(checked.schedule().placement().stages_on(rank % 2).eq(stages), "{kind}, rank {rank}");
    }
}

#[test]
fn buckets_leave_in_the_sweep_before_reduce_grad() {
    each_kind(|kind, checked| {
        let ranks = two_runs(checked, |stage, replicas| {
            let limits = Some(BucketLimits { first: 1, others: 1 });
            let options = BucketOptions { limits, ..Default::default() };
            let leaves: Vec<_> = stage.parameters().iter().map(|p| p.leaf()).collect();
            let optimizer = Box::new(Sgd::over(SgdConfig::default(), leaves)?);
            Ok(Box::new(DataParallel::new(replicas, stage, optimizer, options)?))
        });
        // A stage has two layers, of a weight and a bias each: a bucket for each.
        in_the_last_sweep(kind, checked, ranks, 4);
    });
}

fn sharded(stage: ZeroStage) -> impl Fn(&dyn Stage<Cpu>, &Comm<Cpu>) -> Result<Box<dyn Strategy<Cpu>>> + Sync {
    move |module, replicas| Ok(Box::new(Sharded::new(replicas, module, AdamWConfig::default(), stage.into())?))
}

#[test]
fn units_whose_state_is_sharded_leave_as_buckets_do() {
    // Each layer is a unit.
    each_kind(|kind, checked| {
        in_the_last_sweep(kind, checked, two_runs(checked, sharded(ZeroStage::Optimizer)), 2);
    });
}

#[test]
fn units_whose_gradients_are_sharded_leave_in_every_sweep() {
    each_kind(|kind, checked| {
        for stage in [ZeroStage::Gradients, ZeroStage::Parameters] {
            for (call, sent) in two_runs(checked, sharded(stage)).into_iter().flatten().flatten() {
                let sums = match call {
                    HookCall::Sweep(Compute { pass: Pass::B | Pass::W, .. }, _) => 2,
                    _ => 0,
                };
                assert_eq!(sent, sums, "{kind}, {stage:?}, {call:?}");
            }
        }
    });
}
