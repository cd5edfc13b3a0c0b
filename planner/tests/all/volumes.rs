//! Bytes of a plan, and those that ranks exchange.

use std::collections::BTreeMap;

use distributed::comm::{Comm, CountingCommunicator, Ranks, Traffic};
use numcore::Runtime;
use planner::{BillRow, ModelCosts, Purpose, Rehearsal, TrainingPlan, bill};

use crate::{
    common::*,
    plans::{Mixture, gpt_costs, mixture_costs},
};

/// Counts by the world ranks of the group, and the kind of collective: calls, payload, bytes sent.
type Counts = BTreeMap<(Vec<usize>, &'static str), [u64; 3]>;

/// The traffic of the third step of a plan, by rank.
fn counted(plan: &TrainingPlan, build: impl Fn(&Mesh<Cpu>) -> Result<StepOf> + Sync) -> Vec<Counts> {
    let run = |comm: Comm<Cpu>| {
        let counting = std::sync::Arc::new(CountingCommunicator::new(comm));
        let world: Comm<Cpu> = counting.clone();
        let mut step = build(&Mesh::new(&world, plan.parallel()?)?)?;
        step()?;
        step()?;
        counting.reset();
        step()?;
        let numbers = |traffic: Traffic| [traffic.calls, traffic.payload, traffic.sent];
        let shared = counting.by_group().into_iter().filter(|((group, _), _)| group.len() > 1);
        Ok(shared.map(|((group, kind), traffic)| ((group.to_vec(), kind), numbers(traffic))).collect())
    };
    Ranks::new(plan.world()).run(|_| Ok(Cpu::with_threads(1)), run).unwrap()
}

type StepOf = Box<dyn FnMut() -> Result<()>>;

/// A step of a GPT on the ranks of a mesh.
pub fn build<R: Runtime>(mesh: &Mesh<R>, plan: &TrainingPlan, config: GptConfig) -> Result<StepOf> {
    let rt = mesh.world().runtime().clone();
    let cut = Gpt::<R>::tensor_plan().sequence_parallel(plan.sequence_parallel);
    let model = Gpt::new(&Init::new(&rt, 42), config)?;
    let tokens = Tensor::zeros(&rt, [plan.micro_batch, CONTEXT], DType::I64)?;
    if plan.stages() > 1 {
        let (stages, loss) = model.split_with_loss(plan.stages(), summed())?;
        let loss = move |y: &[Var<R>], t: &[Var<R>]| {
            Loss::sum(loss.of(&y[0], &t[0])?, t[0].dims().iter().product::<usize>() as f64)
        };
        let pipe = mesh.axis(Axis::Pipe).rank();
        let model = PipelineModel::on(pipe, plan.checked()?, stages).loss(loss).parallelize(mesh, &cut)?;
        let model = match plan.context {
            1 => model,
            _ => model.context_parallel(mesh, ContextExchange::Ring)?,
        };
        let mut step = plan.configure(TrainStep::builder(mesh, model).optimizer(adamw()))?.build()?;
        let m = plan.micro_batches;
        let tokens = Tensor::zeros(&rt, [m * plan.micro_batch, CONTEXT], DType::I64)?;
        return Ok(Box::new(move || {
            step.step(|_| MicroBatches::split(std::slice::from_ref(&tokens), std::slice::from_ref(&tokens), m))
                .map(drop)
        }));
    }
    mesh.parallelize(&model, &cut)?;
    if plan.context > 1 {
        mesh.context_parallel(&model, ContextExchange::Ring)?;
    }
    let mut step = plan.configure(TrainStep::builder(mesh, &model).optimizer(adamw()))?.build()?;
    Ok(Box::new(move || {
        step.step(|_| {
            let x = Var::new(tokens.clone());
            Loss::sum(model.next_token_loss(&x, &x, &summed())?, tokens.shape().numel() as f64)
        })
        .map(drop)
    }))
}

/// The bill of a rank, by the world ranks of each group.
fn billed(plan: &TrainingPlan, costs: &ModelCosts, rank: usize) -> Counts {
    let ranks = plan.parallel().unwrap();
    let mut counts = Counts::new();
    for BillRow { axes, kind, calls, payload, sent, .. } in bill(plan, costs, rank).unwrap() {
        let group: Vec<usize> =
            (0..plan.world()).filter(|&other| ranks.color(&axes, other) == ranks.color(&axes, rank)).collect();
        let count = counts.entry((group, kind)).or_default();
        *count = [count[0] + calls, count[1] + payload, count[2] + sent];
    }
    counts
}

/// Checks that the bill of each rank has the bytes that it exchanges.
fn assert_billed(plan: &TrainingPlan, costs: &ModelCosts, build: impl Fn(&Mesh<Cpu>) -> Result<StepOf> + Sync) {
    for (rank, counted) in counted(plan, build).into_iter().enumerate() {
        assert_eq!(counted, billed(plan, costs, rank), "{plan}, rank {rank}");
    }
}

fn assert_gpt_billed(plan: &TrainingPlan, layers: usize) {
    assert_billed_with(plan, GptConfig { layers, ..gpt() });
}

fn assert_billed_with(plan: &TrainingPlan, config: GptConfig) {
    let layers = config.layers;
    let costs = gpt_costs(plan, config, layers.max(plan.stages()), |_| ());
    assert_billed(plan, &costs, |mesh| build(mesh, plan, config));
}

fn base() -> TrainingPlan {
    TrainingPlan { micro_batch: 2, ..TrainingPlan::default() }
}

#[test]
fn planner_volumes_are_those_that_ranks_exchange() {
    for zero in 0..=3 {
        for micro_batches in [1, 3] {
            let base = TrainingPlan { zero, micro_batches, ..base() };
            for data in [2, 3, 5, 8] {
                assert_gpt_billed(&TrainingPlan { data, ..base.clone() }, 3);
            }
            assert_gpt_billed(&TrainingPlan { data: 2, shard: 2, ..base.clone() }, 3);
            assert_gpt_billed(&TrainingPlan { context: 4, ..base.clone() }, 2);
            assert_gpt_billed(&TrainingPlan { data: 2, shard: 2, context: 2, ..base.clone() }, 2);
            for sequence_parallel in [false, true] {
                let cut = TrainingPlan { tensor: 2, data: 2, sequence_parallel, ..base.clone() };
                assert_gpt_billed(&cut, 3);
                assert_gpt_billed(&TrainingPlan { tensor: 4, data: 1, ..cut }, 2);
            }
        }
    }
}

#[test]
fn planner_volumes_of_every_schedule_are_those_that_ranks_exchange() {
    for &kind in ScheduleKind::ALL {
        for (v, zero, data) in [1, 2, 4].into_iter().flat_map(|v| [(v, 0, 1), (v, 1, 2), (v, 2, 2), (v, 3, 2)]) {
            let plan = TrainingPlan {
                pipe: 2,
                data,
                zero,
                schedule: kind.to_string(),
                stages_per_rank: v,
                micro_batches: 6,
                ..base()
            };
            if plan.check().is_ok() {
                assert_gpt_billed(&plan, 2 * v);
            }
        }
    }
    let cut = TrainingPlan { pipe: 2, tensor: 2, sequence_parallel: true, zero: 1, micro_batches: 4, ..base() };
    assert_gpt_billed(&cut, 4);
    assert_gpt_billed(&TrainingPlan { pipe: 2, context: 2, data: 2, tensor: 1, ..cut }, 4);
}

/// The first and the last stage have copies of the table of tokens, whose gradients are summed.
#[test]
fn planner_volumes_of_tied_stages_are_those_that_ranks_exchange() {
    for (zero, data, v) in [(0, 1, 1), (0, 2, 2), (1, 2, 1), (2, 3, 1), (3, 2, 1), (3, 2, 2)] {
        for kind in ScheduleKind::ALL {
            let schedule = kind.to_string();
            let plan = TrainingPlan { pipe: 2, data, zero, schedule, stages_per_rank: v, micro_batches: 4, ..base() };
            if plan.check().is_ok() {
                assert_billed_with(&plan, GptConfig { layers: 2 * v, tied_head: true, ..gpt() });
            }
        }
    }
    let plan = TrainingPlan { pipe: 2, tensor: 2, micro_batches: 2, ..base() };
    assert_billed_with(&plan, GptConfig { tied_head: true, ..gpt() });
    // One rank has all copies.
    let schedule = ScheduleKind::LoopedBfs.to_string();
    let plan = TrainingPlan { stages_per_rank: 2, schedule, micro_batches: 2, ..base() };
    assert_billed_with(&plan, GptConfig { tied_head: true, ..gpt() });
    // Two of four ranks have one each.
    let plan = TrainingPlan { pipe: 4, micro_batches: 4, ..base() };
    let config = GptConfig { layers: 4, tied_head: true, ..gpt() };
    let costs = gpt_costs(&plan, config, 4, |_| ());
    let along_pipe = |rank: usize| {
        let rows = bill(&plan, &costs, rank).unwrap().into_iter();
        rows.filter(|row| row.purpose == Purpose::Gradients).map(|row| row.payload).collect::<Vec<_>>()
    };
    let table = (VOCAB * config.width * 4) as u64;
    assert_eq!([0, 1, 2, 3].map(along_pipe), [vec![table], vec![], vec![], vec![table]]);
}

/// Experts over ranks that have other experts, with copies of each.
#[test]
fn planner_volumes_of_experts_are_those_that_ranks_exchange() {
    let by_kind = |counts: &Counts| {
        let mut sums: BTreeMap<&str, [u64; 2]> = BTreeMap::new();
        for ((_, kind), [_, payload, sent]) in counts {
            let sum = sums.entry(*kind).or_default();
            *sum = [sum[0] + payload, sum[1] + sent];
        }
        sums
    };
    for zero in 0..=3 {
        for (data, shard, expert) in [(2, 1, 2), (4, 1, 2), (4, 1, 4), (2, 2, 2), (1, 4, 2), (2, 3, 2)] {
            let plan = TrainingPlan { data, shard, expert, zero, micro_batches: 2, ..base() };
            let build = |mesh: &Mesh<Cpu>| -> Result<StepOf> {
                let model = Mixture::on(mesh)?;
                let builder = TrainStep::builder(mesh, &model).optimizer(SgdConfig::default());
                let mut step = plan.configure(builder)?.experts().build()?;
                let x = Var::new(Mixture::tokens(mesh.world().runtime(), 16)?);
                Ok(Box::new(move || {
                    let loss = |_| {
                        Loss::sum(
                            nn::Stage::forward_values(&model, std::slice::from_ref(&x))?.remove(0).sum_all()?,
                            1.0,
                        )
                    };
                    step.step(loss).map(drop)
                }))
            };
            let costs = mixture_costs(&plan, 16);
            for (rank, counted) in counted(&plan, build).iter().enumerate() {
                let billed = billed(&plan, &costs, rank);
                assert_eq!(by_kind(counted), by_kind(&billed), "{plan}, rank {rank}: {counted:?} {billed:?}");
            }
        }
    }
}

/// The calls of a rank without the others are those of the rank among them.
#[test]
fn planner_rehearsals_make_the_calls_of_training() {
    let config = GptConfig { layers: 2, ..gpt() };
    for zero in 0..=3 {
        for (data, context, tensor) in [(2, 1, 1), (3, 1, 1), (2, 2, 1), (2, 1, 2), (1, 1, 4)] {
            let sequence_parallel = tensor == 4;
            let plan = TrainingPlan { data, context, tensor, sequence_parallel, zero, micro_batches: 2, ..base() };
            for (rank, counted) in counted(&plan, |mesh| build(mesh, &plan, config)).into_iter().enumerate() {
                let rehearsal = Rehearsal::of(&plan, rank, true, |mesh| build(mesh, &plan, config)).unwrap();
                let calls = rehearsal.exchanges.iter();
                let calls: Counts = calls.map(|(key, t)| (key.clone(), [t.calls, t.payload, t.sent])).collect();
                assert_eq!(calls, counted, "{plan}, rank {rank}");
            }
        }
    }
    let staged = TrainingPlan { pipe: 2, micro_batches: 2, ..base() };
    let error = Rehearsal::of(&staged, 0, true, |mesh| build(mesh, &staged, config)).unwrap_err();
    assert!(error.to_string().contains("SimulatedStep"), "{error}");
}

/// The peak of a rehearsal is that of the rank on a CPU, but for memory that kernels and engines need for themselves.
#[test]
fn planner_rehearsals_have_the_peak_of_training() {
    let config = GptConfig { layers: 3, width: 64, ..gpt() };
    for (zero, shard) in (0..=3).flat_map(|zero| [(zero, 1), (zero, 2)]) {
        let plan = TrainingPlan { data: 2, shard, zero, micro_batches: 2, micro_batch: 16, ..TrainingPlan::default() };
        let run = |comm: Comm<Cpu>| {
            let mut step = build(&Mesh::new(&comm, plan.parallel()?)?, &plan, config)?;
            step()?;
            step()?;
            comm.runtime().reset_peak();
            step()?;
            Ok(comm.runtime().memory().total.peak as f64)
        };
        let peaks = Ranks::new(plan.world()).run(|_| Ok(Cpu::with_threads(1)), run).unwrap();
        for (rank, peak) in peaks.into_iter().enumerate() {
            let rehearsal = Rehearsal::of(&plan, rank, true, |mesh| build(mesh, &plan, config)).unwrap();
            let error = rehearsal.peak as f64 / peak - 1.0;
            assert!(error.abs() < 0.02, "{plan}, rank {rank}: {} and {peak} bytes", rehearsal.peak);
        }
    }
}
