//! Pipelines times replicas, each stage by any strategy, against one rank that sees the joined batch.
//!
//! In `f64`: both sides compute the same sums of a few hundred terms in another order, each a few times 10⁻¹⁶ off, and AdamW divides by
//! the root of a second moment, which may be a thousand times smaller than the largest gradient. 10⁻¹¹ of the largest value leaves room for
//! that and for nothing else: a gradient that counts twice, or a norm of the wrong parts, is off by more than a tenth.

use crate::{
    pipeline_common::{ROWS, TIMEOUT, WIDTH, shape},
    pipeline_staged::*,
    prelude::*,
};

const STEPS: usize = 2;
const BOUND: f64 = 1e-11;

/// One rank's part of a training run.
fn trained(
    comm: &Comm<Cpu>,
    model: Model,
    layers: usize,
    checked: &Checked,
    how: How,
    config: &TrainingConfig,
) -> Result<Told> {
    let (staged, config) = (model.staged(comm, checked, layers), config.clone());
    let runs = config.accumulation;
    match how.zero() {
        None => {
            let mut trainer = pipelined(comm, staged, config)?;
            steps_of(runs, comm, model, &mut trainer, 0..STEPS, |_| Ok(()))
        }
        Some(zero) => {
            let mut trainer = sharded_pipeline(comm, staged, config, zero)?;
            steps_of(runs, comm, model, &mut trainer, 0..STEPS, |t| t.gather_full_params())
        }
    }
}

/// Trains this product by these strategies and schedules; gives the kind and ranks of each run.
fn product(
    model: Model,
    p: usize,
    replicas: usize,
    kinds: &[ScheduleKind],
    hows: &[How],
) -> Vec<(ScheduleKind, usize)> {
    let mut ran = Vec::new();
    for v in [1, 2] {
        let m = 2 * p;
        let want = reference(model, p * v, m * replicas, STEPS);
        for &how in hows {
            // What takes any number of stages per rank, with two: with one it is a schedule of another name.
            let once = |kind: ScheduleKind| v == 2 || kind.generate(shape(p, 2, m)).is_err();
            let checked = |&kind: &ScheduleKind| Some((kind, how.checked(kind, p, v, m).filter(|_| once(kind))?));
            for (kind, checked) in kinds.iter().filter_map(checked) {
                let what = format!("{model:?}, {kind}, pipe {p} x {replicas} replicas, {v} stages each, {how:?}");
                let ranks = ranks_of(p * replicas, |comm| trained(&comm, model, p * v, &checked, how, &config()));
                let off = far(&joined(ranks.unwrap_or_else(|e| panic!("{what}: {e}"))), &want);
                assert!(off <= BOUND, "{what}: {off:e}");
                ran.push((kind, p));
            }
        }
    }
    ran
}

/// A plain one, one with I and W apart, one with stages in turn, one folded.
const SOME: [ScheduleKind; 4] =
    [ScheduleKind::OneFOneB, ScheduleKind::ZbH1, ScheduleKind::Interleaved, ScheduleKind::Zbv];

#[test]
fn an_mlp_trains_as_on_one_rank() {
    let ran = [(2, 2), (4, 2)].map(|(p, n)| product(Model::Mlp, p, n, &SOME, &HOWS));
    assert_eq!(ran.concat().len(), 2 * 4 * HOWS.len());
}

#[test]
fn a_gpt_with_a_shared_table_trains_as_on_one_rank() {
    let ran = [(2, 2, &HOWS[..]), (2, 4, &HOWS[3..])].map(|(p, n, hows)| product(Model::Gpt, p, n, &SOME, hows));
    assert_eq!(ran.concat().len(), 4 * (HOWS.len() + 2));
}

#[test]
fn every_schedule_with_sharded_stages_trains_as_one_rank() {
    let replicas = |p| if p < 4 { 2 } else { 1 };
    let every = |model, p, how| product(model, p, replicas(p), ScheduleKind::ALL, &[how]);
    let sharded = [2, 3, 8].map(|p| every(Model::Mlp, p, How::Zero(ZeroStage::Parameters))).concat();
    for ran in [sharded, every(Model::Gpt, 3, How::Gathered)] {
        assert!(ScheduleKind::ALL.iter().all(|kind| ran.iter().any(|(ran, _)| ran == kind)), "{ran:?}");
    }
}

#[test]
fn replicas_alone() {
    for (n, how) in half(&WORLDS, &HOWS) {
        assert_eq!(product(Model::Gpt, 1, n, &[ScheduleKind::GPipe, ScheduleKind::LoopedBfs], &[how]).len(), 2);
    }
}

/// A mesh of `p` stages in which `shards` ranks share each replica of a stage. Along its axes neighbours are apart by other strides than
/// in `world`, whose rank `r` is rank `r % p` of pipeline `r / p` there too.
fn mesh(world: &Comm<Cpu>, p: usize, shards: usize) -> Result<Mesh<Cpu>> {
    let (rank, pipelines) = (world.rank(), world.size() / p);
    let turned = world.split(Some(0), rank % p * pipelines + rank / p)?.unwrap();
    let axes = [(Axis::Pipe, p), (Axis::Data, pipelines / shards), (Axis::Shard, shards)];
    Mesh::new(&turned, ParallelPlan::new(world.size(), axes)?)
}

#[test]
fn replicas_of_shards_train_as_on_one_rank() {
    let (meshes, kinds) = ([(2, 4, 2), (2, 2, 1), (2, 2, 2), (1, 4, 2)], [ScheduleKind::ZbH1, ScheduleKind::Zbv]);
    for ((p, pipelines, shards), kind) in half(&meshes, &kinds) {
        let v = if kind == ScheduleKind::Zbv { 2 } else { 1 };
        let want = reference(Model::Gpt, p * v, 2 * p * pipelines, STEPS);
        for how in &HOWS[1..] {
            let Some(checked) = how.checked(kind, p, v, 2 * p) else { continue };
            let ranks = ranks_of(p * pipelines, |comm| {
                let (mesh, staged) = (mesh(&comm, p, shards)?, Model::Gpt.staged(&comm, &checked, p * v));
                let zero = how.zero().unwrap();
                let mut trainer =
                    TrainStep::builder(&mesh, staged).optimizer(adamw()).config(config()).zero(zero).build()?;
                steps(&comm, Model::Gpt, &mut trainer, 0..STEPS, |t| t.gather_full_params())
            });
            let what = format!("{kind}, pipe {p} x {pipelines} pipelines, {shards} shards, {how:?}");
            let off = far(&joined(ranks.unwrap_or_else(|e| panic!("{what}: {e}"))), &want);
            assert!(off <= BOUND, "{what}: {off:e}");
        }
    }
}

#[test]
fn a_mesh_with_another_pipe_axis_is_refused() {
    let checked = How::Replicas.checked(ScheduleKind::OneFOneB, 2, 1, 2).unwrap();
    let outcomes = Ranks::new(2).timeout(TIMEOUT).outcomes(cpu, |comm| {
        let mesh = Mesh::new(&comm, ParallelPlan::new(2, [(Axis::Shard, 2)])?)?;
        let staged = Model::Gpt.staged(&comm, &checked, 2);
        TrainStep::builder(&mesh, staged)
            .optimizer(adamw())
            .config(config())
            .zero(ZeroOptions::default())
            .build()
            .map(|_| ())
    });
    for outcome in outcomes.unwrap() {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains("for 2 ranks") && error.contains("pipe 1 × data 1 × shard 2"), "{error}");
    }
}

#[test]
fn unused_parameters_cannot_be_allowed() {
    let checked = How::Replicas.checked(ScheduleKind::OneFOneB, 2, 1, 2).unwrap();
    let outcomes = Ranks::new(2).timeout(TIMEOUT).outcomes(cpu, |comm| {
        let staged = Model::Gpt.staged(&comm, &checked, 2);
        let zero = ZeroOptions { unused: Unused::Allow, ..Default::default() };
        sharded_pipeline(&comm, staged, config(), zero).map(|_| ())
    });
    for outcome in outcomes.unwrap() {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains("unused parameters and a pipeline exclude each other"), "{error}");
    }
}

#[test]
fn strategies_that_add_in_one_order_do_not_differ_by_a_bit() {
    // Stage 1 adds micro-batches, then ranks; stages 2 and 3 ranks, then micro-batches. A norm is of other parts: without clipping.
    let groups: [&[How]; 2] = [
        &[How::Replicas, How::Zero(ZeroStage::Optimizer)],
        &[How::Zero(ZeroStage::Gradients), How::Zero(ZeroStage::Parameters), How::Gathered],
    ];
    for model in [Model::Mlp, Model::Gpt, Model::Half] {
        for (kind, p, v, n) in [(ScheduleKind::OneFOneB, 2, 1, 3), (ScheduleKind::Zbv, 2, 2, 2)] {
            let told = groups.map(|hows| {
                let mut told = hows.iter().map(|&how| {
                    let checked = how.checked(kind, p, v, 4).unwrap();
                    let free = TrainingConfig { max_norm: None, ..config() };
                    joined(ranks_of(p * n, |comm| trained(&comm, model, p * v, &checked, how, &free)).unwrap())
                });
                let first = told.next().unwrap();
                assert!(told.all(|other| other == first), "{model:?}, {kind}, {hows:?}");
                first
            });
            assert!(model == Model::Half || far(&told[0], &told[1]) <= BOUND);
        }
    }
}

#[test]
fn several_runs_of_a_step_are_one_batch() {
    for (kind, p, v, n) in [(ScheduleKind::ZbH1, 2, 1, 2), (ScheduleKind::Zbv, 2, 2, 3)] {
        let want = reference(Model::Gpt, p * v, 2 * 4 * n, STEPS);
        for how in HOWS {
            let checked = how.checked(kind, p, v, 4).unwrap();
            let twice = TrainingConfig { accumulation: 2, ..config() };
            let ranks = ranks_of(p * n, |comm| trained(&comm, Model::Gpt, p * v, &checked, how, &twice));
            let off = far(&joined(ranks.unwrap_or_else(|e| panic!("{kind}, {how:?}: {e}"))), &want);
            assert!(off <= BOUND, "{kind}, {how:?}: {off:e}");
        }
    }
}

#[test]
fn replicas_with_different_schedules_are_refused() {
    let outcomes = Ranks::new(4).timeout(TIMEOUT).outcomes(cpu, |comm| {
        let kind = if comm.rank() < 2 { ScheduleKind::OneFOneB } else { ScheduleKind::GPipe };
        let checked = How::Replicas.checked(kind, 2, 1, 4).unwrap();
        let staged = Model::Mlp.staged(&comm, &checked, 2);
        pipelined(&comm, staged, config()).map(|_| ())
    });
    for outcome in outcomes.unwrap() {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains("the pipeline's schedule of rank 0 is not that of rank 2, 3"), "{error}");
    }
}

/// What a rank saw: the losses of an evaluation, and the gradients of a step's inputs and its loss.
struct Seen {
    losses: Vec<(f64, f64)>,
    of_inputs: Vec<f64>,
    loss: f64,
}

/// A step, an evaluation, a step with the gradients of the inputs.
fn looked_at(comm: &Comm<Cpu>, staged: PipelineModel<Cpu>, how: How, evaluate: bool) -> Result<Seen> {
    match how.zero() {
        None => seen(comm, pipelined(comm, staged, config())?, evaluate),
        Some(zero) => seen(comm, sharded_pipeline(comm, staged, config(), zero)?, evaluate),
    }
}

fn seen(comm: &Comm<Cpu>, mut trainer: TrainStep<Cpu>, evaluate: bool) -> Result<Seen> {
    let schedule = trainer.pipeline().expect("stages").schedule();
    let (p, m) = (schedule.placement().ranks(), schedule.micro_batches());
    let part = |step: usize| {
        let (x, y) = Model::Mlp.batch(comm.runtime(), step, m * comm.size() / p)?;
        let at = comm.rank() / p * m * ROWS;
        MicroBatches::split(&[x.narrow(0, at, m * ROWS)?], &[y.narrow(0, at, m * ROWS)?], m)
    };
    trainer.step(|_| part(0))?;
    let mut losses = Vec::new();
    if evaluate {
        let output = trainer.evaluate_stages(part(7)?)?;
        assert!(output.input_gradients().is_empty());
        losses = trainer.pipeline().expect("stages").losses(&output)?;
    }
    let loss = trainer.step(|_| part(1))?.loss()?;
    let of_inputs = trainer.last_run().map_or(&[][..], |run| run.input_gradients());
    let of_inputs = of_inputs.iter().map(|of| of[0].to_vec::<f64>()).collect::<Result<Vec<_>>>()?.concat();
    Ok(Seen { losses, of_inputs, loss })
}

#[test]
fn evaluation_and_the_gradients_of_inputs_by_every_strategy() {
    let (p, replicas) = (2, 2);
    for (kind, v, m) in [(ScheduleKind::OneFOneB, 1, 4), (ScheduleKind::Zbv, 2, 4)] {
        // One rank: a step, then the losses of a batch, and the gradients of the inputs of another one.
        let rt = cpu(0).unwrap();
        let whole = Model::Mlp.whole(&rt, p * v);
        let mut trainer = simple(&rt, &whole, config()).unwrap();
        let batch = |step| Model::Mlp.batch(&rt, step, m * replicas).unwrap();
        let loss = |x: &Var<Cpu>, y: Tensor<Cpu>| Model::Mlp.loss(&whole.forward(x)?, &Var::new(y));
        trainer.step(|_| loss(&Var::new(batch(0).0), batch(0).1)).unwrap();
        let micro = |t: Tensor<Cpu>, k: usize| t.narrow(0, k * ROWS, ROWS).unwrap();
        let wanted = |k| loss(&Var::new(micro(batch(7).0, k)), micro(batch(7).1, k)).unwrap().total().item().unwrap();
        let x = Var::leaf("x", batch(1).0).unwrap();
        let gradient =
            loss(&x, batch(1).1).unwrap().total().backward().unwrap().of(&x).unwrap().to_vec::<f64>().unwrap();
        for how in HOWS {
            let checked = how.checked(kind, p, v, m).unwrap();
            let run = |evaluate| {
                let ranks = ranks_of(p * replicas, |comm| {
                    let options = PipelineOptions { input_gradients: true, ..Default::default() };
                    let staged = Model::Mlp.staged(&comm, &checked, p * v).options(options);
                    looked_at(&comm, staged, how, evaluate)
                });
                ranks.unwrap_or_else(|e| panic!("{kind}, {how:?}: {e}"))
            };
            let (with, without) = (run(true), run(false));
            for (rank, (Seen { losses, of_inputs, loss }, same)) in with.iter().zip(&without).enumerate() {
                let changed = *loss != same.loss || *of_inputs != same.of_inputs;
                assert!(!changed, "an evaluation changes nothing: {kind}, {how:?}");
                let first = rank / p * m;
                assert_eq!(losses.len(), m);
                for (k, (sum, weight)) in losses.iter().enumerate() {
                    assert!((sum - wanted(first + k)).abs() <= BOUND * wanted(first + k).abs(), "{kind}, {how:?}");
                    assert_eq!(*weight, (ROWS * WIDTH) as f64);
                }
                let expected = if rank % p == 0 { &gradient[first * ROWS * WIDTH..][..m * ROWS * WIDTH] } else { &[] };
                assert_eq!(of_inputs.len(), expected.len());
                assert!(of_inputs.iter().zip(expected).all(|(a, b)| (a - b).abs() <= BOUND), "{kind}, {how:?}");
            }
        }
    }
}

/// A stage with a layer that it does not use.
struct Superfluous(Box<dyn Stage<Cpu>>, Linear<Cpu>);

impl Module<Cpu> for Superfluous {
    fn visit(&self, name: &str, visitor: &mut dyn Visitor<Cpu>) {
        self.0.visit(name, visitor);
        visitor.enter(name);
        self.1.visit("superfluous", visitor);
        visitor.leave();
    }
}

impl Stage<Cpu> for Superfluous {
    fn forward_values(&self, inputs: &[Var<Cpu>]) -> Result<Vec<Var<Cpu>>> {
        self.0.forward_values(inputs)
    }
}

#[test]
fn a_parameter_without_gradient_is_named_on_every_rank() {
    for how in HOWS {
        let checked = how.checked(ScheduleKind::OneFOneB, 2, 1, 4).unwrap();
        let outcomes = Ranks::new(4).timeout(TIMEOUT).outcomes(cpu, |comm| {
            let mut stages = Model::Mlp.stages(&comm, &checked, 2);
            let layer = Linear::new(&Init::new(comm.runtime(), 0).dtype(DType::F64), 3, 3)?;
            let last = stages.remove(1);
            stages.push(Box::new(Superfluous(last, layer)));
            let staged =
                PipelineModel::on(comm.rank(), checked.clone(), stages).loss(|y, t| Model::Mlp.loss(&y[0], &t[0]));
            looked_at(&comm, staged, how, false)
        });
        for outcome in outcomes.unwrap() {
            let error = outcome.map(|_| ()).unwrap_err().to_string();
            assert!(error.contains("superfluous.weight") && error.contains("superfluous.bias"), "{how:?}: {error}");
        }
    }
}

#[test]
fn seeded_faults_of_the_communicator_never_hang() {
    let mut turns = Turns::one_of(3);
    for (how, kind, v) in [
        (How::Replicas, ScheduleKind::ZbH1, 1),
        (How::Zero(ZeroStage::Parameters), ScheduleKind::OneFOneB, 1),
        (How::Gathered, ScheduleKind::Zbv, 2),
    ] {
        let checked = how.checked(kind, 2, v, 4).unwrap();
        for seed in (0..20).filter(|_| turns.come()) {
            let (at, fault) = Fault::seeded(seed, 50);
            let harmless = matches!(fault, Fault::Delay(_));
            // What must end well has all the time of a busy machine; for what is left out somebody waits until the time is up.
            let timeout = if harmless { TIMEOUT } else { Duration::from_millis(500) };
            let outcomes = Ranks::new(4).timeout(timeout).outcomes(cpu, |comm| {
                let faulty = comm.rank() == 2;
                let comm: Comm<Cpu> = if faulty { Arc::new(FaultyCommunicator::new(comm, at, fault)) } else { comm };
                trained(&comm, Model::Gpt, 2 * v, &checked, how, &config())?;
                comm.barrier()
            });
            let failed = outcomes.unwrap().iter().filter(|outcome| outcome.is_err()).count();
            assert_eq!(failed > 0, !harmless, "{how:?}, seed {seed}, {fault:?} at {at}: {failed}");
        }
    }
}
