//! Steps that are given losses in hand, or gradients: they are those of `step`, to the bit.

use crate::prelude::*;

#[derive(Clone, Copy, Debug)]
enum Given {
    Whole,
    Losses,
    Gradients,
}

const GIVEN: [Given; 3] = [Given::Whole, Given::Losses, Given::Gradients];

/// The bits of each step, and the weights at the end.
type Recorded = (Vec<[Option<u64>; 3]>, Vec<f64>);

/// The bits of a step: loss, its own part, norm.
fn bits(metrics: &TrainingMetrics<Cpu>) -> Result<[Option<u64>; 3]> {
    Ok([Some(metrics.loss()?), metrics.own_loss()?, metrics.grad_norm()?].map(|x| x.map(f64::to_bits)))
}

fn step(
    step: &mut TrainStep<Cpu>,
    given: Given,
    loss: impl Fn(usize) -> Result<Loss<Cpu>>,
) -> Result<TrainingMetrics<Cpu>> {
    let runs = step.accumulation();
    match given {
        Given::Whole => step.step(loss),
        Given::Losses => {
            for k in 0..runs - 1 {
                assert!(step.backward_and_step(loss(k)?)?.is_none());
            }
            Ok(step.backward_and_step(loss(runs - 1)?)?.expect("the last of the step"))
        }
        Given::Gradients => {
            let loss = loss(0)?;
            let gradients = backward(loss.total())?;
            step.step_from(&gradients, loss)
        }
    }
}

/// Four steps, given in each of these ways in turn, without ZeRO or with a stage of it.
fn trained(world: usize, stage: Option<ZeroStage>, runs: usize, given: &[Given]) -> Vec<Recorded> {
    compressed(world, stage, runs, given, GradCompression::Own)
}

/// As `trained`, with gradients that travel compressed where there is no ZeRO.
fn compressed(
    world: usize,
    stage: Option<ZeroStage>,
    runs: usize,
    given: &[Given],
    compression: GradCompression,
) -> Vec<Recorded> {
    Ranks::new(world)
        .run(cpu, |comm| {
            let model = Mlp::new(&Init::new(comm.runtime(), 0).dtype(DType::F64))?;
            let builder = TrainStep::builder(&comm, &model).optimizer(adamw()).max_norm(0.1).accumulation(runs);
            let examples = own(&comm);
            let rt = comm.runtime().clone();
            let one = |at: usize, k: usize| model.loss(&rt, at * runs + k, &examples);
            let way = |at: usize| given[at % given.len()];
            let Some(stage) = stage else {
                let buckets = BucketOptions { compression, ..Default::default() };
                let mut built = builder.loss_scaling(LossScaler::default()).buckets(buckets).build()?;
                let told = (0..4).map(|at| bits(&step(&mut built, way(at), |k| one(at, k))?));
                return Ok((told.collect::<Result<_>>()?, weights(&model)?));
            };
            let mut built = builder.zero(stage).build()?;
            let told = (0..4).map(|at| bits(&step(&mut built, way(at), |k| one(at, k))?));
            let told = told.collect::<Result<_>>()?;
            let whole = built.gather_full_params()?;
            let weights = weights(&model)?;
            whole.release()?;
            Ok((told, weights))
        })
        .unwrap()
}

#[test]
fn losses_and_gradients_in_hand_make_the_steps_of_step() {
    for world in WORLDS {
        for stage in [None, Some(ZeroStage::Optimizer), Some(ZeroStage::Gradients), Some(ZeroStage::Parameters)] {
            let whole = trained(world, stage, 1, &[Given::Whole]);
            for given in GIVEN {
                assert_eq!(trained(world, stage, 1, &[given]), whole, "{world} ranks, {stage:?}, {given:?}");
            }
            assert_eq!(trained(world, stage, 1, &GIVEN), whole, "{world} ranks, {stage:?}, in turn");
        }
    }
    for stage in [None, Some(ZeroStage::Optimizer), Some(ZeroStage::Gradients), Some(ZeroStage::Parameters)] {
        let whole = trained(2, stage, 3, &[Given::Whole]);
        assert_eq!(trained(2, stage, 3, &[Given::Losses, Given::Whole]), whole, "{stage:?}");
    }
    // Means of halves: a step divides by the weight of all its losses before they travel.
    let whole = compressed(2, None, 3, &[Given::Whole], GradCompression::F16);
    assert_eq!(compressed(2, None, 3, &[Given::Losses], GradCompression::F16), whole);
}

#[test]
fn one_rank_has_all_losses() {
    for (runs, given) in [(1, Given::Gradients), (3, Given::Losses), (3, Given::Whole)] {
        for [loss, own, _] in &trained(1, None, runs, &[given])[0].0 {
            let [loss, own] = [loss, own].map(|bits| f64::from_bits(bits.expect("a mean")));
            assert!((loss - own).abs() <= 1e-12 * loss, "{runs} of {given:?}: {loss}, of its own {own}");
        }
    }
}

#[test]
fn gradients_of_a_loss_that_weighs_nothing_do_not_count() {
    let trained = |spoiled: f64| {
        let ranks = Ranks::new(2).run(cpu, |comm| {
            let model = Mlp::new(&Init::new(comm.runtime(), 0).dtype(DType::F64))?;
            let mut step = TrainStep::builder(&comm, &model).optimizer(adamw()).build()?;
            let own = model.loss(comm.runtime(), 0, &[comm.rank()])?;
            let gradients = backward(own.total())?;
            let loss = if comm.rank() == 1 { own.weightless()? } else { own };
            let mut given = autograd::Gradients::new();
            for (leaf, gradient) in gradients.iter() {
                let factor = if comm.rank() == 1 { spoiled } else { 1.0 };
                given.set(leaf, gradient.mul(factor)?)?;
            }
            step.step_from(&given, loss)?;
            weights(&model)
        });
        ranks.unwrap().swap_remove(0)
    };
    assert_eq!(trained(f64::NAN), trained(0.0));
}

/// What four steps of two micro-batches told, and an evaluation after each.
type Evaluated = Vec<([Option<u64>; 3], u64)>;

/// Steps from one on: with a schedule, an evaluation after each step, and, where micro-batches are pushed, between them. A checkpoint is saved after the second.
fn evaluated(
    built: &mut TrainStep<Cpu>,
    given: Given,
    steps: std::ops::Range<usize>,
    loss: &dyn Fn(usize) -> Result<Loss<Cpu>>,
    folder: &Folder,
) -> Result<Evaluated> {
    let evaluate = || Ok::<_, Error>(no_grad(|| loss(99))?.total().item()?.to_bits());
    let (mut told, mut before) = (Vec::new(), evaluate()?);
    for at in steps {
        let metrics = match given {
            Given::Losses => {
                assert!(built.backward_and_step(loss(2 * at)?)?.is_none());
                assert_eq!(
                    evaluate()?,
                    before,
                    "an evaluation between micro-batches sees the weights of the step before"
                );
                built.backward_and_step(loss(2 * at + 1)?)?.expect("the last of the step")
            }
            _ => built.step(|k| loss(2 * at + k))?,
        };
        before = evaluate()?;
        told.push((bits(&metrics)?, before));
        if at == 1 {
            built.save(folder, &CheckpointNotes::new())?;
        }
    }
    Ok(told)
}

/// Four steps, and the last two again from the checkpoint, which is loaded within a step where micro-batches are pushed.
fn eventful(
    mut built: TrainStep<Cpu>,
    given: Given,
    loss: &dyn Fn(usize) -> Result<Loss<Cpu>>,
    folder: &Folder,
) -> Result<Evaluated> {
    let told = evaluated(&mut built, given, 0..4, loss, folder)?;
    if let Given::Losses = given {
        assert!(built.backward_and_step(loss(50)?)?.is_none());
    }
    assert!(built.load(folder)?.is_some());
    assert_eq!(evaluated(&mut built, given, 2..4, loss, folder)?, told[2..]);
    Ok(told)
}

#[test]
fn evaluations_schedules_and_checkpoints_come_between_pushes() {
    let trained = |world: usize, stage: Option<ZeroStage>, given: Given| {
        let scratch = Scratch::new("pushed");
        let told = Ranks::new(world).run(cpu, |comm| {
            let model = Mlp::new(&Init::new(comm.runtime(), 0).dtype(DType::F64))?;
            let builder = TrainStep::builder(&comm, &model).optimizer(adamw()).max_norm(0.1).accumulation(2);
            let builder = builder.schedule(|base, step| base / (1.0 + step as f64));
            let loss = |batch: usize| model.loss(comm.runtime(), batch, &own(&comm));
            let step = builder.zero(stage.unwrap_or(ZeroStage::None)).build()?;
            eventful(step, given, &loss, &scratch.folder())
        });
        told.unwrap()
    };
    for world in [1, 2, 3] {
        for stage in [None, Some(ZeroStage::Optimizer), Some(ZeroStage::Gradients), Some(ZeroStage::Parameters)] {
            let whole = trained(world, stage, Given::Whole);
            assert_eq!(trained(world, stage, Given::Losses), whole, "{world} ranks, {stage:?}");
        }
    }
}

#[test]
fn a_parameter_that_is_unfrozen_between_steps_is_trained_from_the_next_one_on() {
    let trained = |world: usize, stage: ZeroStage, runs: usize, given: Given| {
        let ranks = Ranks::new(world).run(cpu, |comm| {
            let model = Mlp::new(&Init::new(comm.runtime(), 0).dtype(DType::F64))?;
            model.freeze_where(|name| name.starts_with("b."));
            let builder = TrainStep::builder(&comm, &model).optimizer(adamw()).max_norm(0.1).accumulation(runs);
            // A frozen unit is trained as a whole.
            let options = ZeroOptions { stage, units: UnitOf::children(), ..Default::default() };
            let mut built = builder.zero(options).build()?;
            let loss = |batch: usize| model.loss(comm.runtime(), batch, &own(&comm));
            let mut told = Vec::new();
            for at in 0..4 {
                if at == 2 {
                    model.unfreeze_where(|_| true);
                }
                told.push(bits(&step(&mut built, given, |k| loss(at * runs + k))?)?);
            }
            let whole = built.gather_full_params()?;
            let weights = weights(&model)?;
            whole.release()?;
            Ok((told, weights))
        });
        ranks.unwrap()
    };
    for (world, runs) in [(1, 1), (2, 1), (2, 3), (3, 2)] {
        for stage in [ZeroStage::None, ZeroStage::Optimizer, ZeroStage::Gradients, ZeroStage::Parameters] {
            let whole = trained(world, stage, runs, Given::Whole);
            assert_eq!(trained(world, stage, runs, Given::Losses), whole, "{world} ranks, {runs} in a step, {stage:?}");
        }
    }
}

#[test]
fn a_step_begun_by_losses_is_finished_first() {
    Ranks::new(1)
        .run(cpu, |comm| {
            let model = Mlp::new(&Init::new(comm.runtime(), 0))?;
            let mut step = TrainStep::builder(&comm, &model).optimizer(adamw()).accumulation(2).build()?;
            let loss = || model.loss(comm.runtime(), 0, &[0, 1]);
            assert!(step.backward_and_step(loss()?)?.is_none());
            step.discard_pushed();
            step.step(|_| loss())?;
            assert!(step.backward_and_step(loss()?)?.is_none());
            let error = step.step(|_| loss()).unwrap_err().to_string();
            assert!(error.contains("1 of 2 micro-batches were given to `backward_and_step`"), "{error}");
            Ok(())
        })
        .unwrap();
}

#[test]
fn rates_owners_and_ranks_can_be_asked() {
    let told = Ranks::new(3)
        .run(cpu, |comm| {
            let model = Mlp::new(&Init::new(comm.runtime(), 0))?;
            let mut step = TrainStep::builder(&comm, &model).optimizer(adamw()).zero(ZeroStage::Optimizer).build()?;
            step.set_lr(0.25)?;
            assert_eq!(step.step(|_| model.loss(comm.runtime(), 0, &[0]))?.learning_rate(), 0.25);
            assert!(step.set_lr(f64::NAN).is_err());
            assert_eq!(step.comm().size(), 3);
            let model = Mlp::new(&Init::new(comm.runtime(), 0))?;
            let limits = BucketLimits { first: 1, others: 1 };
            let buckets = BucketOptions { limits: Some(limits), ..Default::default() };
            let bucketed = TrainStep::builder(&comm, &model).optimizer(adamw()).buckets(buckets).build()?;
            assert!(bucketed.num_buckets() > Some(1));
            let ddp = Ddp::new(&comm, &model)?;
            assert_eq!((ddp.world_size(), ddp.devices()?.is_heterogeneous()), (3, false));
            Ok((shards(&step).param_owners(), shards(&step).owned_params()))
        })
        .unwrap();
    let sizes = [45, 9, 63, 7, 21, 3];
    for (rank, (owners, own)) in told.iter().enumerate() {
        assert_eq!(owners, &told[0].0);
        let names = ["a.weight", "a.bias", "b.weight", "b.bias", "c.weight", "c.bias"];
        for ((name, of), (expected, size)) in owners.iter().zip(names.into_iter().zip(sizes)) {
            assert_eq!(name, expected);
            // Ranks have adjacent elements, in their order, each once.
            let end = of.iter().try_fold(0, |at, piece| (piece.elements.start == at).then_some(piece.elements.end));
            assert_eq!(end, Some(size), "{name}: {of:?}");
            assert_eq!(own.contains(name), of.iter().any(|piece| piece.rank == rank), "{name} on rank {rank}");
        }
        assert_eq!(owners.len(), 6);
    }
}

/// Steps go to other threads, and can be looked at from several.
#[test]
fn steps_are_send_and_sync() {
    fn is<T: Send + Sync>() {}
    is::<TrainStep<Cpu>>();
    is::<LocalSteps<Cpu, TrainStep<Cpu>>>();
    is::<Balanced<TrainStep<Cpu>>>();
    is::<Ddp<Cpu>>();
    is::<distributed::pipeline::Pipeline<Cpu>>();
    is::<Sharded<Cpu>>();
}
