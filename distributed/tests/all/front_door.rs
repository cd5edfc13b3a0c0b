//! The builder of training steps on one rank, schedules, looking at gradients, errors of one's own.

use std::{error::Error as _, fmt, io};

use distributed::{
    compat::{ZeroStage1, ZeroStage2, ZeroStage3},
    pipeline::split,
};

use crate::{pipeline_common::shape, prelude::*};

type Metrics = TrainingMetrics<Cpu>;
type Builder<'a> = TrainStepBuilder<'a, Cpu>;

fn step(mut step: TrainStep<Cpu>, model: &Mlp<Cpu>) -> Result<Metrics> {
    let (rt, all) = (step.comm().runtime().clone(), (0..EXAMPLES).collect::<Vec<_>>());
    step.step(|_| model.loss(&rt, 0, &all))
}

/// The model in two stages on one rank.
fn staged(rt: &Cpu) -> Result<PipelineModel<Cpu>> {
    let kind = ScheduleKind::Interleaved;
    let checked = kind.generate(shape(1, 2, 4))?.lower(Lowering::default())?.check(Limits::default())?;
    let init = Init::new(rt, 0);
    let layers: Vec<Box<dyn Forward<Cpu>>> =
        vec![Box::new(Linear::new(&init, 4, 8)?), Box::new(Linear::new(&init, 8, 1)?)];
    let loss = |y: &[autograd::Var<Cpu>], target: &[autograd::Var<Cpu>]| {
        Ok(Loss::mean(nn::loss::mse(&y[0], &target[0], Default::default())?))
    };
    Ok(PipelineModel::on(0, checked, split(layers, &[1])?).loss(loss))
}

fn batch(rt: &Cpu) -> Result<MicroBatches<Cpu>> {
    let values = |width, seed| Tensor::normal(rt, [8, width], DType::F32, 0.0, 1.0, seed);
    MicroBatches::split(&[values(4, 1)?], &[values(1, 2)?], 4)
}

#[test]
fn every_kind_of_step_runs_on_the_no_op_communicator() {
    let rt = cpu(0).unwrap();
    let comm = NoOpCommunicator::new(&rt);
    let run = |with: &dyn Fn(Builder<'_>, &Mlp<Cpu>) -> Result<Metrics>| {
        let model = Mlp::new(&Init::new(&rt, 0)).unwrap();
        let metrics = with(TrainStep::builder(&comm, &model).optimizer(adamw()).max_norm(1.0), &model).unwrap();
        assert_eq!(metrics.global_step(), 1);
        (metrics.loss().unwrap(), weights(&model).unwrap_or_default())
    };
    let simple = run(&|builder, model| {
        let built: TrainStep<Cpu> = builder.build()?;
        step(built, model)
    });
    for sharded in [
        run(&|builder, model| step(builder.zero(ZeroStage1).build()?, model)),
        run(&|builder, model| step(builder.zero(ZeroStage2).build()?, model)),
    ] {
        assert!(sharded == simple, "{sharded:?}, alone {simple:?}");
    }
    // At stage 3 the parameters are gone with the step.
    let third = run(&|builder, model| step(builder.zero(ZeroStage3).build()?, model));
    assert_eq!(third.0, simple.0);

    let builder = |rt| TrainStep::builder(&comm, staged(rt).unwrap()).optimizer(adamw()).max_norm(1.0);
    let mut losses = vec![builder(&rt).build().unwrap().step(|_| batch(&rt)).unwrap().loss().unwrap()];
    for stage in ZeroStage::ALL {
        let mut trainer = builder(&rt).zero(stage).build().unwrap();
        losses.push(trainer.step(|_| batch(&rt)).unwrap().loss().unwrap());
    }
    assert!(losses.iter().all(|loss| *loss == losses[0] && loss.is_finite()), "{losses:?}");
}

#[test]
fn a_schedule_is_every_kinds() {
    let rt = cpu(0).unwrap();
    let comm = NoOpCommunicator::new(&rt);
    let falling = |base: f64, step: u64| base / (step + 1) as f64;
    let rates = |mut take: Box<dyn FnMut() -> Result<Metrics>>| -> Vec<f64> {
        (0..3).map(|_| take().unwrap().learning_rate()).collect()
    };
    let expected = [1e-2, 1e-2 / 2.0, 1e-2 / 3.0];
    for stage in [ZeroStage::None, ZeroStage::Optimizer, ZeroStage::Parameters] {
        let model = Mlp::new(&Init::new(&rt, 0)).unwrap();
        let rt = rt.clone();
        // The optimizer has a schedule too: the step's is in its place.
        let groups = adamw().scheduled(|_: f64, _: u64| 7.0);
        let builder = TrainStep::builder(&comm, &model).optimizer(groups).schedule(falling);
        let mut step = builder.zero(stage).build().unwrap();
        let take = move || step.step(|_| model.loss(&rt, 0, &[0, 1, 2]));
        assert_eq!(rates(Box::new(take)), expected, "{stage:?}");
    }
    let (adamw, rt) = (AdamWConfig { lr: 1e-2, ..Default::default() }, rt.clone());
    let mut piped = TrainStep::builder(&comm, staged(&rt).unwrap()).optimizer(adamw).schedule(falling).build().unwrap();
    assert_eq!(rates(Box::new(move || piped.step(|_| batch(&rt)))), expected);
}

/// The gradients that a step shows, by parameter: for each all that were shown.
type Seen = Arc<Mutex<BTreeMap<String, Vec<Vec<f64>>>>>;

fn look(seen: &Seen) -> impl FnMut(&str, &Tensor<Cpu>) -> Result<()> + Send + 'static {
    let seen = seen.clone();
    move |name, grad| {
        let values = grad.to_dtype(DType::F64)?.to_vec::<f64>()?;
        seen.lock().unwrap().entry(name.to_string()).or_default().push(values);
        Ok(())
    }
}

#[test]
fn gradients_can_be_looked_at_before_they_are_summed() {
    // `y = w·x` and its sum: the gradient of `w` is this rank's `x`.
    let program = |comm: Comm<Cpu>, stage: ZeroStage| {
        let (rt, seen) = (comm.runtime().clone(), Seen::default());
        let model = Linear::new(&Init::new(&rt, 0), 2, 1)?.without_bias();
        let x = |k: usize| Tensor::from_slice(&rt, [1, 2], &[1.0f32 + comm.rank() as f32, k as f32]);
        let sgd = SgdConfig { lr: 0.0, ..Default::default() };
        let builder = TrainStep::builder(&comm, &model).optimizer(sgd).accumulation(2).on_gradient(look(&seen));
        let loss = |k: usize| Ok(Loss::mean(model.forward(&autograd::Var::new(x(k + 1)?))?.sum(&[0, 1])?));
        builder.zero(stage).build()?.step(loss)?;
        let seen = seen.lock().unwrap().clone();
        Ok(seen)
    };
    for stage in [ZeroStage::None, ZeroStage::Optimizer, ZeroStage::Parameters] {
        for (rank, seen) in Ranks::new(2).run(cpu, |comm| program(comm, stage)).unwrap().into_iter().enumerate() {
            let first = 1.0 + rank as f64;
            // Where gradients are not reduced after each micro-batch, the second adds to the first.
            let second = if stage == ZeroStage::Parameters { [first, 2.0] } else { [2.0 * first, 3.0] };
            assert_eq!(seen["weight"], [vec![first, 1.0], second.to_vec()], "{stage:?}, rank {rank}");
            assert_eq!(seen.len(), 1);
        }
    }
}

#[test]
fn gradients_of_a_pipeline_can_be_looked_at() {
    let (rt, seen) = (cpu(0).unwrap(), Seen::default());
    let comm = NoOpCommunicator::new(&rt);
    let sgd = |leaves: Vec<_>| Ok(Box::new(Sgd::over(SgdConfig::default(), leaves)?) as _);
    let builder = TrainStep::builder(&comm, staged(&rt).unwrap()).optimizer_with(sgd).on_gradient(look(&seen));
    let mut trainer: TrainStep<Cpu> = builder.build().unwrap();
    trainer.step(|_| batch(&rt)).unwrap();
    let seen = seen.lock().unwrap().clone();
    assert_eq!(seen.keys().collect::<Vec<_>>(), ["0.bias", "0.weight", "1.bias", "1.weight"]);
    for (name, shown) in seen {
        assert_eq!(shown.len(), 4, "{name}: once a micro-batch");
        assert!(shown[0] != shown[3] && shown.concat().iter().all(|x| x.is_finite()), "{name}: {shown:?}");
    }
}

/// An error that no library knows.
#[derive(Debug, PartialEq)]
struct OutOfCoffee(u32);

impl fmt::Display for OutOfCoffee {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} cups short", self.0)
    }
}

impl std::error::Error for OutOfCoffee {}

#[test]
fn errors_of_ones_own_come_out_of_a_step_as_they_went_in() {
    let read = || -> io::Result<()> { Err(io::Error::from(io::ErrorKind::UnexpectedEof)) };
    let outcomes = Ranks::new(2).outcomes(cpu, |comm| {
        let model = Mlp::new(&Init::new(comm.runtime(), 0))?;
        let mut trainer = TrainStep::builder(&comm, &model).optimizer(adamw()).build()?;
        let fails = comm.rank() == 1;
        trainer.step(|_| {
            if fails {
                return Err(Error::other(OutOfCoffee(3)));
            }
            model.loss(comm.runtime(), 0, &[0])
        })?;
        Ok(())
    });
    let [peer, own] = <[_; 2]>::try_from(outcomes.unwrap()).unwrap().map(Result::unwrap_err);
    assert_eq!(own.source().and_then(|e| e.downcast_ref()), Some(&OutOfCoffee(3)));
    assert_eq!(own.to_string(), "rank 1: 3 cups short");
    assert!(
        matches!(peer.kind(), ErrorKind::Peer { peer: 1, .. }) && peer.to_string().contains("3 cups short"),
        "{peer}"
    );

    let rt = cpu(0).unwrap();
    let model = Mlp::new(&Init::new(&rt, 0)).unwrap();
    let builder = TrainStep::builder(&NoOpCommunicator::new(&rt), &model).optimizer(adamw());
    let error = builder
        .build()
        .unwrap()
        .run(
            [0, 1],
            |_| {
                read()?;
                model.loss(&rt, 0, &[0])
            },
            |_| Ok(()),
        )
        .unwrap_err();
    let source = error.source().and_then(|e| e.downcast_ref::<io::Error>()).unwrap();
    assert_eq!(source.kind(), io::ErrorKind::UnexpectedEof);
    let builder = TrainStep::builder(&NoOpCommunicator::new(&rt), &model).optimizer(adamw());
    let stopped = |_: &str, _: &Tensor<Cpu>| Err(Error::other(OutOfCoffee(1)));
    let error = builder.on_gradient(stopped).build().unwrap().step(|_| model.loss(&rt, 0, &[0])).unwrap_err();
    assert_eq!(error.source().and_then(|e| e.downcast_ref()), Some(&OutOfCoffee(1)));
}

#[test]
fn a_communicator_is_a_mesh_of_one_axis() {
    Ranks::new(4)
        .run(cpu, |comm| {
            let mesh = comm.as_mesh();
            assert_eq!(mesh.plan(), &ParallelPlan::of([(Axis::Data, 4)])?);
            assert_eq!([mesh.batch().size(), mesh.axis(Axis::Data).size(), mesh.axis(Axis::Shard).size()], [4, 4, 1]);
            // Shards along the shard axis if there is one, otherwise along data.
            for (axes, expected) in [([(Axis::Data, 2), (Axis::Shard, 2)], 2), ([(Axis::Data, 4), (Axis::Shard, 1)], 4)]
            {
                let mesh = Mesh::new(&comm, ParallelPlan::of(axes)?)?;
                let model = Linear::new(&Init::new(comm.runtime(), 0), 64, 64)?;
                let before = comm.runtime().memory().of(MemoryCategory::Optimizer).live;
                let builder = TrainStep::builder(&mesh, &model).optimizer(adamw());
                let step = builder.zero(ZeroStage::Optimizer).build()?;
                let state = comm.runtime().memory().of(MemoryCategory::Optimizer).live - before;
                let whole = 2 * 4 * model.num_parameters().total;
                assert!((whole / expected..whole / expected + 4096).contains(&state), "{axes:?}: {state} of {whole}");
                drop(step);
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn what_is_refused_has_a_kind() {
    let rt = cpu(0).unwrap();
    let (comm, model) = (NoOpCommunicator::new(&rt), Mlp::new(&Init::new(&rt, 0)).unwrap());
    let field = |error: Error| match error.kind() {
        ErrorKind::Config { field, .. } => *field,
        _ => panic!("{error}"),
    };
    let builder = || TrainStep::builder(&comm, &model).optimizer(adamw());
    assert_eq!(field(builder().accumulation(0).build().map(|_| ()).unwrap_err()), "accumulation");
    assert_eq!(field(builder().max_norm(-1.0).build().map(|_| ()).unwrap_err()), "max_norm");
    assert_eq!(field(ParallelPlan::new(3, [(Axis::Data, 2)]).unwrap_err()), "axes");
    let canonical = BucketOptions { canonical: true, ..Default::default() };
    let builder = TrainStep::builder(&comm, staged(&rt).unwrap()).optimizer(adamw());
    assert_eq!(field(builder.buckets(canonical).build().map(|_| ()).unwrap_err()), "canonical order");
    let schedule = ScheduleKind::Zbv.generate(shape(2, 1, 2)).unwrap_err();
    assert!(matches!(schedule.kind(), ErrorKind::Schedule { .. }), "{schedule}");
}

#[test]
fn a_rank_that_waits_in_vain_says_at_which_step_of_the_callers() {
    let ranks = Ranks::new(2).timeout(std::time::Duration::from_millis(200));
    let outcomes = ranks.outcomes(cpu, |comm| {
        let model = Mlp::new(&Init::new(comm.runtime(), 0))?;
        let mut trainer = TrainStep::builder(&comm, &model).optimizer(adamw()).build()?;
        if comm.rank() == 1 {
            return Ok(());
        }
        trainer.step(|_| model.loss(comm.runtime(), 0, &[0])).map(|_| ())
    });
    let error = outcomes.unwrap().swap_remove(0).unwrap_err();
    assert!(error.location().is_some_and(|at| at.file().ends_with("front_door.rs")), "{error}");
}

#[test]
fn an_error_within_a_step_says_at_which_line_of_the_callers_it_was() {
    let rt = cpu(0).unwrap();
    let (comm, layer) = (NoOpCommunicator::new(&rt), Linear::new(&Init::new(&rt, 0), 4, 1).unwrap());
    let step = || TrainStep::builder(&comm, &layer).optimizer(adamw()).build().unwrap();
    let ones = |width: usize| autograd::Var::new(Tensor::ones(&rt, [2, width], DType::F32).unwrap());
    let loss = |width: usize, weight: f64| Loss::sum(layer.forward(&ones(width))?.sum_all()?, weight);
    let inside = line!() - 1;
    let errors = [
        // In the closure, a layer; in the step itself, what the losses weigh.
        (inside, step().step(|_| loss(5, 2.0)).map(drop).unwrap_err()),
        (inside, step().run([5], |&width| loss(width, 2.0), |_| Ok(())).unwrap_err()),
        (line!(), step().step(|_| loss(4, 0.0)).map(drop).unwrap_err()),
        (line!(), step().run([4], |&width| loss(width, 0.0), |_| Ok(())).unwrap_err()),
    ];
    for (line, error) in errors {
        let at = error.location().map(|at| (at.file(), at.line()));
        assert_eq!(at, Some((file!(), line)), "{error}");
    }
}

/// What a sharded step would not look at is refused, not dropped.
#[test]
fn sharded_steps_have_no_buckets() {
    let rt = cpu(0).unwrap();
    let (alone, model) = (NoOpCommunicator::new(&rt), Mlp::new(&Init::new(&rt, 1)).unwrap());
    let builder = || TrainStep::builder(&alone, &model).optimizer(AdamWConfig::default());
    let said = |step: Result<()>| step.unwrap_err().to_string();
    let buckets = said(builder().buckets(BucketOptions::default()).zero(ZeroStage::Parameters).build().map(drop));
    assert!(buckets.contains("buckets") && buckets.contains("ZeRO"), "{buckets}");
    let reducer = builder()
        .reducer(|comm| Ok(AllReduce::new(comm, GradCompression::Own)))
        .zero(ZeroStage::Gradients)
        .build()
        .map(drop);
    assert!(said(reducer).contains("reducer"));
    // Muon is for matrices alone, and an optimizer that was made already has whole parameters.
    let muon = said(builder().optimizer(MuonConfig::default()).zero(ZeroStage::Optimizer).build().map(drop));
    assert!(muon.contains("`a.bias` has shape") && muon.contains("only matrices"), "{muon}");
    let made = Sgd::new(&model, SgdConfig::default()).unwrap();
    let made = said(builder().optimizer(made).zero(ZeroStage::Gradients).build().map(drop));
    assert!(made.contains("an optimizer that the program builds") && made.contains("a configuration"), "{made}");
    assert!(builder().zero(ZeroStage::Parameters).build().is_ok());
    // Options of shards, where nothing is sharded.
    let none = ZeroOptions { main_gradients: true, ..ZeroStage::None.into() };
    assert!(said(builder().zero(none).build().map(drop)).contains("`ZeroStage::None` shards nothing"));
}
