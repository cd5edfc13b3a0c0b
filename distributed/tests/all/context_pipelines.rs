//! Pipelines whose sequences are cut over ranks train as one rank does: by every schedule, every strategy and every exchange.

use crate::{
    pipeline_common::TIMEOUT,
    pipeline_staged::{HOWS, How},
    prelude::*,
    tensor_common::apart,
    tensor_pipeline_common::StagedCase,
};

/// `f64` sums in another order, amplified by AdamW's division by a small second moment.
const CLOSE: f64 = 1e-11;

const FOUR: &[(Axis, usize)] = &[(Axis::Pipe, 2), (Axis::Context, 2)];

/// Stages of a model of so many heads, whose sequences two ranks can cut, and two others further.
fn staged(heads: usize, kind: ScheduleKind, v: usize, how: How) -> StagedCase {
    let mut staged = StagedCase::new(heads, kind, v, how);
    (staged.case.model.context, staged.case.model.tied_head) = (8, true);
    staged
}

fn same(staged: &StagedCase, axes: &[(Axis, usize)]) {
    let off = apart(&staged.on(axes), &staged.case.alone());
    assert!(off <= CLOSE, "{axes:?} {staged:?}: {off:e}");
}

#[test]
fn every_schedule_runs_on_parts_of_sequences() {
    const EXCHANGES: [ContextExchange; 3] =
        [ContextExchange::AllGather, ContextExchange::Ring, ContextExchange::Ulysses];
    for (k, &kind) in ScheduleKind::ALL.iter().enumerate() {
        let v = if kind.generate(crate::pipeline_common::shape(2, 1, 4)).is_ok() { 1 } else { 2 };
        let mut staged = staged(2, kind, v, How::Replicas);
        (staged.case.exchange, staged.case.model.tied_head) = (EXCHANGES[k % 3], k % 2 == 0);
        same(&staged, FOUR);
    }
}

#[test]
fn every_strategy_trains_parts_of_sequences() {
    for how in HOWS {
        same(&staged(2, ScheduleKind::Zbv, 2, how), &[(Axis::Pipe, 2), (Axis::Data, 2), (Axis::Context, 2)]);
    }
    for stage in ZeroStage::ALL {
        let mut staged = staged(2, ScheduleKind::OneFOneB, 1, How::Zero(stage));
        (staged.case.steps, staged.case.max_norm) = (10, 0.05);
        same(&staged, &[(Axis::Pipe, 2), (Axis::Shard, 2), (Axis::Context, 2)]);
    }
}

#[test]
fn parts_of_sequences_beside_pieces_of_layers() {
    for sequence in [false, true] {
        for how in [How::Replicas, How::Zero(ZeroStage::Parameters)] {
            let mut staged = staged(2, ScheduleKind::ZbH1, 1, how);
            staged.case.sequence = sequence;
            same(&staged, &[(Axis::Pipe, 2), (Axis::Context, 2), (Axis::Tensor, 2)]);
        }
    }
}

#[test]
fn accumulated_and_frozen_parameters_train_alike() {
    for frozen in [&[][..], &["blocks.0.ln1", "wte"], &["blocks.0", "wpe"]] {
        let mut staged = staged(2, ScheduleKind::OneFOneB, 1, How::Zero(ZeroStage::Gradients));
        (staged.micros, staged.case.accumulation, staged.case.frozen) = (2, 2, frozen);
        same(&staged, &[(Axis::Pipe, 2), (Axis::Data, 2), (Axis::Context, 2)]);
    }
}

#[test]
fn masks_do_not_depend_on_the_cut() {
    let mut staged = staged(2, ScheduleKind::OneFOneB, 1, How::Replicas);
    staged.case.model.dropout = 0.3;
    let off = apart(&staged.on(FOUR), &staged.on(&[(Axis::Pipe, 2)]));
    assert!(off <= CLOSE, "{off:e}");
}

#[test]
fn a_step_weighs_what_whole_sequences_do() {
    let staged = staged(2, ScheduleKind::OneFOneB, 1, How::Replicas);
    let weights = Ranks::new(4).timeout(TIMEOUT).run(cpu, |comm| {
        let mesh = Mesh::new(&comm, ParallelPlan::of(FOUR.to_vec())?)?;
        let mut step = TrainStep::builder(&mesh, staged.model(&mesh)?).optimizer(adamw()).build()?;
        staged.step(&mut step, &mesh, 0)?.weight()
    });
    assert_eq!(weights.unwrap(), vec![8.0 * 8.0; 4]);
}

/// A stage that takes what it is given as it is.
#[derive(Module)]
#[module(crate = "::nn")]
struct Plain<R: Runtime>(Block<R>);

impl<R: Runtime> Stage<R> for Plain<R> {
    fn forward_values(&self, inputs: &[Var<R>]) -> Result<Vec<Var<R>>> {
        Ok(vec![self.0.forward(&inputs[0])?])
    }
}

#[test]
fn stages_that_are_not_cut_are_refused() {
    let staged = staged(2, ScheduleKind::OneFOneB, 1, How::Replicas);
    let refused = |f: &(dyn Fn(&Mesh<Cpu>) -> Result<()> + Sync)| {
        let run = |comm| f(&Mesh::new(&comm, ParallelPlan::of(FOUR.to_vec())?)?);
        let outcomes = Ranks::new(4).timeout(TIMEOUT).outcomes(cpu, run).unwrap();
        outcomes.into_iter().map(|outcome| outcome.unwrap_err().to_string()).collect::<Vec<_>>()
    };
    let checked = || staged.how.checked(staged.kind, 2, 1, 4).unwrap();
    let whole = refused(&|mesh| {
        let init = Init::new(mesh.world().runtime(), 7);
        let stages = Gpt::new(&init, staged.case.model)?.split(2)?;
        let model = PipelineModel::on(mesh.axis(Axis::Pipe).rank(), checked(), stages)
            .loss(|y, _| Loss::sum(y[0].clone(), 1.0));
        TrainStep::builder(mesh, model).optimizer(adamw()).build().map(drop)
    });
    assert!(whole.iter().all(|error| error.contains("not cut") || error.contains("rank")), "{whole:?}");
    assert!(whole.iter().any(|error| error.contains("sequences that are not cut")), "{whole:?}");
    let uncut = refused(&|mesh| {
        let init = Init::new(mesh.world().runtime(), 7);
        let blocks = Gpt::new(&init, staged.case.model)?.blocks.into_iter().map(Plain);
        let model = PipelineModel::on(mesh.axis(Axis::Pipe).rank(), checked(), blocks);
        model.context_parallel(mesh, ContextExchange::AllGather).map(drop)
    });
    assert!(uncut.iter().all(|error| error.contains("ContextSlot::cuts")), "{uncut:?}");
}
