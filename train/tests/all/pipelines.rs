//! The loop over a pipeline, whose stages may be cut along tensor: the losses, evaluations and checkpoints of one rank.

use data::Last;
use distributed::{
    mesh::AsMesh,
    pipeline::{Limits, Lowering, MicroBatches, PipeShape, PipelineModel, ScheduleKind, Tie, split},
    train::StepInput,
};
use nn::Sequential;
use numcore::ops::Apply;
use optim::SgdConfig;
use train::ModelInStep;

use crate::{common::*, prelude::*};

/// Two layers, whole or as two stages.
fn layers(rt: &Cpu) -> (Linear<Cpu>, Linear<Cpu>) {
    let init = Init::new(rt, 5).dtype(DType::F64);
    (Linear::new(&init, 3, 8).unwrap(), Linear::new(&init, 8, 1).unwrap())
}

#[derive(Module)]
#[module(crate = "::nn")]
struct First<R: Runtime>(Linear<R>);

impl<R: Runtime> Forward<R> for First<R> {
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        self.0.forward(x)?.tanh()
    }
}

fn parts(batch: &Rows) -> Result<(Rows, Rows)> {
    Ok((batch.narrow(1, 0, 3)?.contiguous()?, batch.narrow(1, 3, 1)?.contiguous()?))
}

fn squares(y: &[Var<Cpu>], t: &[Var<Cpu>]) -> Result<Loss<Cpu>> {
    let error = y[0].sub(&t[0])?.square()?;
    Loss::sum(error.sum_all()?, error.spec().shape.numel() as f64)
}

fn sgd() -> SgdConfig {
    SgdConfig { lr: 0.05, ..Default::default() }
}

fn pipeline(comm: &Comm<Cpu>, tensor: bool) -> Result<TrainStep<Cpu>> {
    let (mesh, model) = stages(comm, tensor)?;
    TrainStep::builder(&mesh, model).optimizer(sgd()).build()
}

/// The stages on a communicator, or on a mesh with two ranks along tensor: the layer of the first stage is cut along its outputs, that of
/// the second along its inputs.
fn stages(comm: &Comm<Cpu>, tensor: bool) -> Result<(Mesh<Cpu>, PipelineModel<Cpu>)> {
    let shape = PipeShape { ranks: 2, stages_per_rank: 1, micro_batches: 2 };
    let checked = ScheduleKind::OneFOneB.generate(shape)?.lower(Lowering::default())?.check(Limits::default())?;
    let (a, b) = layers(comm.runtime());
    let stages = split(Sequential::new().push(First(a)).push(b).into_layers(), &[1])?;
    let axes = [(Axis::Pipe, 2), (Axis::Data, comm.size() / 4), (Axis::Tensor, 2)];
    let mesh = if tensor { Mesh::new(comm, ParallelPlan::of(axes)?)? } else { comm.as_mesh() };
    let rank = if tensor { mesh.axis(Axis::Pipe).rank() } else { comm.rank() % 2 };
    let model = PipelineModel::on(rank, checked, stages).loss(squares);
    let plan = TensorPlan::new().column("0.0").row("1");
    let model = if tensor { model.parallelize(&mesh, &plan)? } else { model };
    Ok((mesh, model))
}

/// Losses and values of evaluations up to some steps, started again for each.
fn piped((ranks, tensor): (usize, bool), untils: &[u64]) -> [Vec<(u64, f64)>; 2] {
    let (memory, scratch) = (Memory::default(), Scratch::new("piped"));
    for &until in untils {
        Ranks::new(ranks)
            .run(cpu, |comm| {
                let split = |batch: &data::Batch<Rows>| {
                    let (x, y) = parts(&batch.data)?;
                    MicroBatches::split(&[x], &[y], 2)
                };
                let evaluate =
                    Evaluate::on(held_out(comm.runtime()).batch(4).last(Last::Drop)).every(Interval::Steps(4));
                Trainer::new(&ModelInStep, pipeline(&comm, tensor)?, loader(comm.runtime()).last(Last::Drop))
                    .until(Length::Steps(until))
                    .record_every(Interval::Steps(1))
                    .with(evaluate.skip_end())
                    .with(Checkpoints::in_folder(&scratch.0).ignore_signals())
                    .sink(memory.clone())
                    .resume(Resume::IfThere)
                    .run(|_, batch| split(batch))
                    .map(|_| ())
            })
            .unwrap();
    }
    [memory.of("loss"), memory.of("validation/loss")]
}

type Weights = std::collections::BTreeMap<String, Vec<f64>>;

/// Four steps, evaluated one by one: the values, and the weights that are left. The first is the worst, and is restored
/// if `restores`; the averages are left if not, if there are some.
fn ended<M: Module<Cpu>>(
    rt: &Cpu,
    model: &M,
    step: TrainStep<Cpu>,
    [averages, restores]: [bool; 2],
    folder: &Scratch,
    loss: impl FnMut(&M, &data::Batch<Rows>) -> Result<StepInput<Cpu>>,
) -> Result<(Vec<(u64, f64)>, Weights)> {
    let memory = Memory::default();
    let evaluate = Evaluate::on(held_out(rt).batch(4).last(Last::Drop)).every(Interval::Steps(1));
    let mut trainer = Trainer::new(model, step, loader(rt).last(Last::Drop)).until(Length::Steps(4)).with(evaluate);
    if averages {
        let averaging = WeightAveraging::new(0.7);
        trainer = trainer.with(if restores { averaging } else { averaging.use_at_end() });
    }
    if restores {
        let checkpoints = Checkpoints::in_folder(&folder.0).ignore_signals();
        trainer = trainer.with(checkpoints.best(Monitor::max("validation/loss")).restore_best());
    }
    let step = trainer.sink(memory.clone()).run(loss)?.step;
    let modules = std::iter::once(model as &dyn Module<Cpu>).chain(step.modules());
    let values = modules.flat_map(|module| module.named_parameters());
    let values = values.map(|(name, p)| Ok((name, p.value()?.to_vec::<f64>()?))).collect::<Result<_>>()?;
    Ok((memory.of("validation/loss"), values))
}

#[test]
fn a_pipeline_ends_with_the_best_weights_or_averages_of_one_rank() {
    let one = one();
    let (rt, mut all) = (one.runtime(), Vec::new());
    let loss = |model: &Sequential<Cpu>, batch: &data::Batch<Rows>| {
        let (x, y) = parts(&batch.data)?;
        let sum = model.forward(&Var::new(x))?.sub(&Var::new(y))?.square()?.sum_all()?;
        Ok(Loss::sum(sum, batch.rows as f64)?.into())
    };
    for (ends, tied) in
        [[false, false], [false, true], [true, false], [true, true]].map(|ends| [(ends, false), (ends, true)]).concat()
    {
        let model = whole(rt, tied);
        let step = TrainStep::builder(&one, &model).optimizer(sgd()).build().unwrap();
        let (values, left) = ended(rt, &model, step, ends, &Scratch::new("ended"), loss).unwrap();
        let worlds = if tied { &[(2, false), (4, false)][..] } else { &[(2, false), (4, false), (4, true)] };
        for &(ranks, tensor) in worlds {
            let folder = Scratch::new("ended-piped");
            let outcome = Ranks::new(ranks).run(cpu, |comm| {
                let split = |_: &ModelInStep, batch: &data::Batch<Rows>| {
                    let (x, y) = parts(&batch.data)?;
                    Ok(MicroBatches::split(&[x], &[y], 2)?.into())
                };
                let step = if tied { shared(&comm)? } else { pipeline(&comm, tensor)? };
                ended(comm.runtime(), &ModelInStep, step, ends, &folder, split)
            });
            for (own_values, own) in outcome.unwrap() {
                let off = |a: &[f64], b: &[f64]| a.iter().zip(b).fold(0.0f64, |most, (a, b)| most.max((a - b).abs()));
                let second = |of: &[(u64, f64)]| of.iter().map(|(_, value)| *value).collect::<Vec<_>>();
                let both = [second(&own_values), second(&values)];
                assert!(own_values.is_empty() || off(&both[0], &both[1]) < 1e-12, "{ends:?} on {ranks}: {both:?}");
                for (name, values) in own.iter().filter(|_| !tensor) {
                    let name = if tied && name == "2.0.weight" { "1.0.weight" } else { name };
                    assert!(off(values, &left[name]) < 1e-12, "{ends:?} on {ranks}, {name}, tied {tied}");
                }
                assert!(!own.is_empty());
            }
        }
        all.push(left);
    }
    assert!((1..all.len()).all(|k| all[..k].iter().all(|other| *other != all[k])), "each end is another");
}

/// The model on one rank; if `tied`, with a layer more, and a weight that two layers share.
fn whole(rt: &Cpu, tied: bool) -> Sequential<Cpu> {
    let (a, b) = layers(rt);
    if !tied {
        return Sequential::new().push(First(a)).push(b);
    }
    let [first, second] = twins(rt);
    let second = Linear { weight: first.weight.clone(), ..second };
    Sequential::new().push(First(a)).push(First(first)).push(First(second)).push(b)
}

/// Two layers with the same weight at first.
fn twins(rt: &Cpu) -> [Linear<Cpu>; 2] {
    [7, 7].map(|seed| Linear::new(&Init::new(rt, seed).dtype(DType::F64), 8, 8).unwrap())
}

/// A pipeline of the model in which both stages have a copy of a weight.
fn shared(comm: &Comm<Cpu>) -> Result<TrainStep<Cpu>> {
    let shape = PipeShape { ranks: 2, stages_per_rank: 1, micro_batches: 2 };
    let checked = ScheduleKind::OneFOneB.generate(shape)?.lower(Lowering::default())?.check(Limits::default())?;
    let ((a, b), [first, second]) = (layers(comm.runtime()), twins(comm.runtime()));
    let layers = Sequential::new().push(First(a)).push(First(first)).push(First(second)).push(b).into_layers();
    let model = PipelineModel::on(comm.rank() % 2, checked, split(layers, &[2])?).loss(squares);
    let model = model.ties(vec![Tie::new(["1.0.weight", "2.0.weight"])]);
    TrainStep::builder(comm, model).optimizer(sgd()).build()
}

#[test]
fn it_is_the_loop_of_one_rank_and_goes_on_to_the_bit() {
    let one = one();
    let (a, b) = layers(one.runtime());
    let model = Sequential::new().push(First(a)).push(b);
    let memory = Memory::default();
    let step = TrainStep::builder(&one, &model).optimizer(sgd()).build().unwrap();
    let loss = |model: &Sequential<Cpu>, batch: &data::Batch<Rows>| {
        let (x, y) = parts(&batch.data)?;
        let sum = model.forward(&Var::new(x))?.sub(&Var::new(y))?.square()?.sum_all()?;
        Loss::sum(sum, batch.rows as f64)
    };
    let evaluate = Evaluate::on(held_out(one.runtime()).batch(4).last(Last::Drop)).every(Interval::Steps(4)).skip_end();
    let trainer = Trainer::new(&model, step, loader(one.runtime()).last(Last::Drop)).until(Length::Steps(8));
    trainer.with(evaluate).record_every(Interval::Steps(1)).sink(memory.clone()).run(loss).unwrap();
    for ranks in [(2, false), (4, false), (4, true), (8, true)] {
        let [losses, values] = piped(ranks, &[8]);
        let expected = [memory.of("loss"), memory.of("validation/loss")];
        for (found, expected) in [&losses, &values].into_iter().zip(&expected) {
            assert_eq!(found.len(), expected.len());
            for ((step, found), (_, expected)) in found.iter().zip(expected) {
                assert!(
                    (found - expected).abs() < 1e-12 * expected,
                    "{ranks:?} ranks, step {step}: {found} {expected}"
                );
            }
        }
        let again = piped(ranks, &[3, 5, 8]);
        assert_same(&again[0], &losses, "losses");
        assert_same(&again[1], &values, "evaluations");
    }
}

#[test]
fn a_loop_of_ones_own_takes_stages_in_place_of_a_model() {
    let whole = |layer_pair: (Linear<Cpu>, Linear<Cpu>)| Sequential::new().push(First(layer_pair.0)).push(layer_pair.1);
    let one = one();
    let model = whole(layers(one.runtime()));
    let mut trainer = Trainer::setup(&one, &model, sgd()).unwrap();
    let batches = trainer.epoch(&loader(one.runtime()).last(Last::Drop), 0).unwrap();
    let expected = batches.map(|batch| {
        let metrics = trainer.step(&batch?, |model, batch| {
            let (x, y) = parts(&batch.data)?;
            let sum = model.forward(&Var::new(x))?.sub(&Var::new(y))?.square()?.sum_all()?;
            Loss::sum(sum, batch.rows as f64)
        });
        metrics?.loss()
    });
    let expected = expected.collect::<Result<Vec<f64>>>().unwrap();
    for (ranks, tensor) in [(2, false), (4, false), (4, true)] {
        let losses = on_ranks(ranks, |comm| {
            let (mesh, model) = stages(comm, tensor)?;
            let mut trainer = Trainer::setup(&mesh, model, sgd())?;
            let batches = trainer.epoch(&loader(comm.runtime()).last(Last::Drop), 0)?;
            let step = |batch: Result<Batch<Rows>>| {
                let metrics = trainer.step(&batch?, |_, batch| {
                    let (x, y) = parts(&batch.data)?;
                    MicroBatches::split(&[x], &[y], 2)
                });
                metrics?.loss()
            };
            batches.map(step).collect::<Result<Vec<f64>>>()
        });
        for (found, expected) in losses.unwrap().iter().zip(&expected) {
            assert!((found - expected).abs() < 1e-12 * expected, "{ranks} ranks: {found} {expected}");
        }
    }
}
