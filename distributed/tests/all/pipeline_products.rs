//! Pipelines times replicas, each stage by any strategy: what is agreed on, evaluated, refused, and told of faults.

use crate::{
    pipeline_common::{TIMEOUT, WIDTH, squares},
    prelude::*,
};

const FOUR: [(Axis, usize); 2] = [(Axis::Pipe, 2), (Axis::Data, 2)];

/// Along the axes of a mesh neighbours may be apart by other strides than in the world of a plan.
#[test]
fn ranks_may_lie_in_another_order() {
    for (p, pipelines, shards, kind) in
        [(2, 4, 2, ScheduleKind::ZbH1), (2, 2, 2, ScheduleKind::Zbv), (1, 4, 2, ScheduleKind::GPipe)]
    {
        let v = if kind == ScheduleKind::Zbv { 2 } else { 1 };
        let way = Way { examples: 4 * pipelines, ..Way::gpt(2).staged(kind, v) };
        let way = way.over(&[(Axis::Pipe, p), (Axis::Data, pipelines / shards), (Axis::Shard, shards)]);
        for way in way.strategies().into_iter().skip(2) {
            let told = Ranks::new(p * pipelines).timeout(TIMEOUT).run(cpu, |world| {
                let rank = world.rank();
                let turned = world.split(Some(0), rank % p * pipelines + rank / p)?.unwrap();
                let mesh = Mesh::new(&turned, ParallelPlan::of(way.axes.clone())?)?;
                Training::new(&way, &mesh)?.steps(0..way.steps)
            });
            let off = distance(&assembled(told.unwrap_or_else(|e| panic!("{way:?}: {e}"))), &way.alone());
            assert!(off <= CLOSE, "{way:?}: {off:e}");
        }
    }
}

#[test]
fn worlds_and_schedules_that_do_not_fit_are_refused_on_every_rank() {
    let build = |mesh: &dyn Fn() -> Result<Mesh<Cpu>>, kind| {
        let checked = Way::layers(2).staged(kind, 1).checked(2).expect("a schedule");
        let stages = Way::layers(2).staged(kind, 1).stages_of(&mesh()?, &checked)?;
        TrainStep::builder(&mesh()?, PipelineModel::on(mesh()?.world().rank() % 2, checked, stages).loss(squares))
            .optimizer(adamw())
            .build()
            .map(drop)
    };
    let one = ScheduleKind::OneFOneB;
    let uneven = Ranks::new(3).timeout(TIMEOUT).outcomes(cpu, |comm| build(&|| Ok(comm.as_mesh()), one));
    refused(uneven.unwrap(), &["the schedule is for 2 ranks: 3 ranks are no whole number"]);
    let shards = Way::layers(2).over(&[(Axis::Shard, 2)]).outcomes(|mesh| build(&|| Ok(mesh.clone()), one));
    refused(shards, &["for 2 ranks", "pipe 1 × data 1 × shard 2"]);
    let differ = Ranks::new(4)
        .timeout(TIMEOUT)
        .outcomes(cpu, |comm| build(&|| Ok(comm.as_mesh()), if comm.rank() < 2 { one } else { ScheduleKind::GPipe }));
    refused(differ.unwrap(), &["the pipeline's schedule of rank 0 differs from that of rank 2, 3"]);
}

/// Losses of micro-batches with their weights, gradients of inputs, and a loss.
type Seen = (Vec<(f64, f64)>, Vec<f64>, f64);

/// A step; then, if so, the losses of an evaluation; then the gradients of a step's inputs, and its loss.
fn seen(way: &Way, mesh: &Mesh<Cpu>, evaluate: bool) -> Result<Seen> {
    let options = PipelineOptions { input_gradients: true, ..Default::default() };
    let model = way.stages_on(mesh)?.0.options(options);
    let mut step = TrainStep::builder(mesh, model).optimizer(adamw()).max_norm(0.5).zero(way.zero.clone()).build()?;
    let part = |number: usize| {
        let (x, y) = way.batch(mesh.world().runtime(), number, &part(way, mesh))?;
        MicroBatches::split(&[x.value()?], &[y.value()?], 4)
    };
    step.step(|_| part(0))?;
    let mut losses = Vec::new();
    if evaluate {
        let output = step.evaluate_stages(part(7)?)?;
        assert!(output.input_gradients().is_empty());
        losses = step.pipeline().expect("stages").losses(&output)?;
    }
    let loss = step.step(|_| part(1))?.loss()?;
    let of_inputs = step.last_run().map_or(&[][..], |run| run.input_gradients());
    let of_inputs = of_inputs.iter().map(|of| of[0].to_vec::<f64>()).collect::<Result<Vec<_>>>()?.concat();
    Ok((losses, of_inputs, loss))
}

/// Consecutive examples.
fn part(way: &Way, mesh: &Mesh<Cpu>) -> Vec<usize> {
    let own = way.examples / mesh.batch().size();
    (mesh.batch().rank() * own..(mesh.batch().rank() + 1) * own).collect()
}

#[test]
fn evaluation_and_the_gradients_of_inputs_by_every_strategy() {
    for (kind, v) in [(ScheduleKind::OneFOneB, 1), (ScheduleKind::Zbv, 2)] {
        let way = Way::layers(2 * v).staged(kind, v).over(&FOUR);
        let (rt, one) = (cpu(0).unwrap(), way.reference());
        // One rank: a step, then the losses of a batch, and the gradients of the inputs of another one.
        let mesh = NoOpCommunicator::new(&rt).as_mesh();
        let mut training = Training::new(&one, &mesh).unwrap();
        training.take(0).unwrap();
        let batch = |number, examples: &[usize]| way.batch(&rt, number, examples).unwrap();
        let wanted = |k: usize| {
            let (x, y) = batch(7, &[k]);
            squares(&[training.output(&x).unwrap()], &[y]).unwrap().total().item().unwrap()
        };
        let (x, y) = batch(1, &(0..8).collect::<Vec<_>>());
        let x = Var::leaf("x", x.value().unwrap()).unwrap();
        let loss = squares(&[training.output(&x).unwrap()], &[y]).unwrap();
        let gradient = loss.total().backward().unwrap().of(&x).unwrap().to_vec::<f64>().unwrap();
        for way in way.strategies() {
            let run = |evaluate| way.ranks(|mesh| seen(&way, mesh, evaluate)).unwrap();
            for (rank, (own, same)) in run(true).into_iter().zip(run(false)).enumerate() {
                let (losses, of_inputs, loss) = own;
                assert!(loss == same.2 && of_inputs == same.1, "an evaluation changes nothing: {way:?}");
                // Replicas are the second axis: ranks 0 and 1 have the first stage.
                let (stage, first) = (rank / 2, rank % 2 * 4);
                assert!(losses.len() == 4 || losses.is_empty());
                for (k, (sum, weight)) in losses.iter().enumerate() {
                    let wanted = wanted(k + rank % 2 * 4);
                    assert!((sum - wanted).abs() <= CLOSE * wanted.abs(), "{way:?}: {sum} {wanted}");
                    assert_eq!(*weight, 1.0);
                }
                let expected = if stage == 0 { &gradient[first * WIDTH..][..4 * WIDTH] } else { &[] };
                assert_eq!(of_inputs.len(), expected.len());
                assert!(of_inputs.iter().zip(expected).all(|(a, b)| (a - b).abs() <= CLOSE), "{way:?}");
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
    for way in Way::layers(2).staged(ScheduleKind::OneFOneB, 1).over(&FOUR).strategies() {
        let outcomes = way.outcomes(|mesh| {
            let checked = way.checked(2).unwrap();
            let mut stages = way.stages_of(mesh, &checked)?;
            let layer = Linear::new(&Init::new(mesh.world().runtime(), 0).dtype(DType::F64), 3, 3)?;
            let last = stages.remove(1);
            stages.push(Box::new(Superfluous(last, layer)));
            let model = PipelineModel::on(mesh.axis(Axis::Pipe).rank(), checked, stages).loss(squares);
            let mut step = TrainStep::builder(mesh, model).optimizer(adamw()).zero(way.zero.clone()).build()?;
            let (x, y) = way.batch(mesh.world().runtime(), 0, &part(&way, mesh))?;
            step.step(|_| MicroBatches::split(&[x.value()?], &[y.value()?], 4)).map(drop)
        });
        refused(outcomes, &["superfluous.weight", "superfluous.bias"]);
    }
}

#[test]
fn seeded_faults_of_the_communicator_never_hang() {
    let mut turns = Turns::one_of(3);
    let way = |kind, v| Way { steps: 3, ..Way::gpt(2).staged(kind, v).over(&FOUR) };
    let three = |kind| Way { steps: 3, ..Way::layers(3).staged(kind, 1).over(&[(Axis::Pipe, 3)]) };
    for way in [
        way(ScheduleKind::ZbH1, 1),
        way(ScheduleKind::OneFOneB, 1).zero(ZeroStage::Parameters),
        way(ScheduleKind::Zbv, 2).gathered(),
        way(ScheduleKind::Interleaved, 2),
        way(ScheduleKind::DualPipeV, 2),
        three(ScheduleKind::OneFOneB),
        three(ScheduleKind::ZbH1),
    ] {
        let ranks = ParallelPlan::of(way.axes.clone()).unwrap().world();
        for seed in (0..20).filter(|_| turns.come()) {
            let (at, fault) = Fault::seeded(seed, 50);
            let harmless = matches!(fault, Fault::Delay(_));
            // What must end well has all the time of a busy machine; for what is left out somebody waits until the time is up.
            let timeout = if harmless { TIMEOUT } else { Duration::from_millis(500) };
            let outcomes = Ranks::new(ranks).timeout(timeout).outcomes(cpu, |comm| {
                let faulty = comm.rank() == ranks / 2;
                let comm: Comm<Cpu> = if faulty { Arc::new(FaultyCommunicator::new(comm, at, fault)) } else { comm };
                let mesh = Mesh::new(&comm, ParallelPlan::of(way.axes.clone())?)?;
                Training::new(&way, &mesh)?.steps(0..way.steps)?;
                comm.barrier()
            });
            let failed = outcomes.unwrap().iter().filter(|outcome| outcome.is_err()).count();
            assert_eq!(failed > 0, !harmless, "{way:?}, seed {seed}, {fault:?} at {at}: {failed}");
        }
    }
}

/// Stages that share a matrix, and mixtures whose experts are shared out: the stages alone.
#[test]
fn ties_beside_experts() {
    for (kind, v) in [(ScheduleKind::OneFOneB, 1), (ScheduleKind::Interleaved, 2)] {
        let mut way = Way::mixture(4).staged(kind, v);
        way.tied = &["wte.weight", "head.weight"];
        let alone = way.clone().over(&[(Axis::Pipe, 2)]).outcome();
        for axes in
            [&[(Axis::Data, 2), (Axis::Expert, 2)][..], &[(Axis::Shard, 2), (Axis::Expert, 2)], &[(Axis::Context, 2)]]
        {
            let zero = if axes[0].0 == Axis::Shard { ZeroStage::Gradients } else { ZeroStage::None };
            way.clone().zero(zero).over(&[&[(Axis::Pipe, 2)], axes].concat()).same_as(&alone);
        }
        let [wte, head] = ["wte.weight", "head.weight"]
            .map(|name| &alone.pieces.iter().find(|(own, ..)| own == name).expect("weights").3);
        assert_eq!(wte, head);
    }
}
