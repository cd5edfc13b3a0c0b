//! Stages of any kind: several values of several types, inputs whose gradients are wanted, evaluation, dropout, callbacks, memory.

use std::{
    cell::Cell,
    collections::{BTreeMap, BTreeSet},
    slice::from_ref,
    sync::Arc,
};

use crate::pipeline_common::*;
use autograd::{BackwardHook, Function, Gradients, Var, apply_function, checkpoint};
use distributed::{
    buckets::{BucketOptions, Buckets},
    comm::Comm,
    pipeline::{
        Action, Checked, Costs, Groups, Kind, Layers, Limits, Lowering, MicroBatches, Pipeline, PipelineOptions,
        Schedule, Sends, Stage, StageGradients, StageHooks, Tie, UnitOp, check, lower, simulate,
    },
    train::Loss,
};
use nn::{Dropout, Embedding, Forward, Init, Linear, Module, ModuleExt, Param, Tanh, Visitor};
use numcore::{
    DType, Error, Result, Runtime, Tensor,
    ops::{Apply, Backprop, PointwiseOps, ReduceOps, ViewOps},
};
use optim::{FlatGradients, Optimizer, Sgd, SgdConfig};
use runtime_cpu::Cpu;

const V: usize = 7;
const C: usize = 4;

/// The parts of a model that hands around more than one value:
/// (tokens, features) → (hidden, tokens, mask, level, unread, empty) → (hidden, level, turned) → output.
#[derive(Module)]
struct Part<R: Runtime> {
    table: Embedding<R>,
    linear: Linear<R>,
    #[module(skip)]
    number: usize,
}

impl Part<Cpu> {
    fn all(rt: &Cpu) -> Vec<Self> {
        let init = Init::new(rt, 3);
        let part = |number| Part {
            table: Embedding::new(&init, V, C).unwrap(),
            linear: Linear::new(&init, C, C).unwrap(),
            number,
        };
        (0..3).map(part).collect()
    }
}

impl Stage<Cpu> for Part<Cpu> {
    fn forward(&self, inputs: &[Var<Cpu>]) -> Result<Vec<Var<Cpu>>> {
        match (self.number, inputs) {
            (0, [tokens, features]) => {
                let hidden = self.table.forward(tokens)?.add(&self.linear.forward(features)?)?;
                let (mask, level) = (hidden.gt(0.0)?, hidden.sum(&[-1], false)?);
                let empty = Var::new(Tensor::zeros(hidden.runtime(), [0, 2], DType::U8)?);
                Ok(vec![hidden.clone(), tokens.clone(), mask, level, hidden.mul(2.0)?, empty])
            }
            (1, [hidden, tokens, mask, level, _, empty]) if empty.dims() == [0, 2] => {
                let zero = Var::new(Tensor::zeros(hidden.runtime(), [1], DType::F32)?);
                let hidden =
                    self.linear.forward(&hidden.where_cond(mask, &zero)?)?.add(&self.table.forward(tokens)?)?;
                // A view, which is sent as a row. One with a gradient would come back in another layout, and be summed in another order.
                Ok(vec![hidden.clone(), level.clone(), hidden.detach().transpose(0, 2)?])
            }
            (2, [hidden, level, fixed]) => {
                let hidden = self.linear.forward(&hidden.add(&fixed.transpose(0, 2)?)?)?;
                Ok(vec![hidden.mul(&level.unsqueeze(-1)?)?.tanh()?, level.clone()])
            }
            _ => Err(Error::argument("part", format!("{} values into part {}", inputs.len(), self.number))),
        }
    }
}

fn part_loss(outputs: &[Var<Cpu>], targets: &[Var<Cpu>]) -> Result<Loss<Cpu>> {
    let difference = outputs[0].sub(&targets[0])?.square()?.sum(&[], false)?;
    Loss::sum(difference.add(&outputs[1].sum(&[], false)?)?, 1.0)
}

fn part_batch(rt: &Cpu, m: usize) -> MicroBatches<Cpu> {
    let tokens: Vec<i64> = (0..m * 6).map(|k| ((k * k + 1) % V) as i64).collect();
    let tokens = Tensor::from_slice(rt, [m * 2, 3], &tokens).unwrap();
    let features = Tensor::uniform(rt, [m * 2, 3, C], DType::F32, -1.0, 1.0, 8).unwrap();
    let targets = Tensor::uniform(rt, [m * 2, 3, C], DType::F32, -1.0, 1.0, 9).unwrap();
    MicroBatches::split(&[tokens, features], &[targets], m).unwrap()
}

type Numbers = BTreeMap<String, Vec<f32>>;

/// Gradients of the parameters and of the features of each micro-batch, on one rank without stages' boundaries.
fn parts_alone(m: usize, order: &[usize]) -> (Vec<f32>, Numbers, Vec<Vec<f32>>) {
    let rt = cpu(0).unwrap();
    let (parts, batch) = (Part::all(&rt), part_batch(&rt, m));
    let mut gradients = Gradients::new();
    let (mut losses, mut of_features) = (vec![0.0; m], vec![Vec::new(); m]);
    for &micro in order {
        let features = Var::leaf("features", batch.inputs[micro][1].clone()).unwrap();
        let inputs = vec![Var::new(batch.inputs[micro][0].clone()), features.clone()];
        let outputs = parts.iter().try_fold(inputs, |x, part| part.forward(&x)).unwrap();
        let loss = part_loss(&outputs, &[Var::new(batch.targets[micro][0].clone())]).unwrap();
        autograd::backward_with_hooks(loss.total(), &mut gradients).unwrap();
        losses[micro] = loss.total().item().unwrap() as f32;
        of_features[micro] = gradients.of(&features).unwrap().to_vec::<f32>().unwrap();
    }
    (losses, named(parts.iter().map(|part| part as &dyn Stage<Cpu>).enumerate(), &gradients), of_features)
}

fn named<'a>(stages: impl Iterator<Item = (usize, &'a dyn Stage<Cpu>)>, gradients: &Gradients<Cpu>) -> Numbers {
    let of = |(stage, module): (usize, &dyn Stage<Cpu>)| {
        let named = module.named_parameters().into_iter();
        let value = |p: Param<Cpu>| gradients.get(&p.leaf()).map_or(Vec::new(), |g| g.to_vec::<f32>().unwrap());
        named.map(|(name, p)| (format!("{stage}.{name}"), value(p))).collect::<Vec<_>>()
    };
    stages.flat_map(of).collect()
}

/// The order in which micro-batches' gradients are added up.
fn order(checked: &Checked) -> Vec<usize> {
    let passes = checked.schedule().actions().flat_map(|(_, _, action)| action.computes());
    passes.filter(|c| c.stage == 0 && c.pass.makes_weight_gradient()).map(|c| c.micro).collect()
}

#[test]
fn several_values_of_several_types_and_the_inputs_gradients() {
    // Three stages on three ranks, and on one: B alone, and I with W.
    let mut runs = 0;
    for (p, v) in [(3, 1), (1, 3)] {
        for (kind, checked) in kinds(p, v, 5) {
            let (losses, want, features) = parts_alone(5, &order(&checked));
            let ranks = world(p, |comm| {
                let parts = Part::all(comm.runtime()).into_iter().map(|part| Box::new(part) as _).collect();
                let options = PipelineOptions { input_gradients: true, ..Default::default() };
                let stages = own(&checked, comm.rank(), parts);
                let mut pipeline = Pipeline::new(&comm, checked.clone(), stages, boxed(part_loss), options)?;
                let mut hooks: BTreeMap<usize, Gradients<Cpu>> =
                    pipeline.stages().keys().map(|&stage| (stage, Gradients::new())).collect();
                let output = pipeline.run(part_batch(comm.runtime(), 5), &mut hooks)?;
                let first = comm.rank() == 0;
                assert_eq!(output.input_gradients().len(), if first { 5 } else { 0 });
                let of_inputs =
                    output.input_gradients().iter().map(|of| of[0].to_vec::<f32>()).collect::<Result<Vec<_>>>()?;
                let mut numbers = Numbers::new();
                for (&stage, module) in pipeline.stages() {
                    numbers.extend(named([(stage, &**module)].into_iter(), &hooks[&stage]));
                }
                let told = pipeline.losses(&output)?.into_iter().map(|(sum, _)| sum as f32).collect::<Vec<_>>();
                Ok((told, numbers, of_inputs))
            });
            assert!(ranks.iter().all(|(told, ..)| *told == losses), "{kind}");
            assert_eq!(ranks[0].2, features, "{kind}");
            let got: Numbers = ranks.into_iter().flat_map(|(_, numbers, _)| numbers).collect();
            assert_eq!(got, want, "{kind}");
            runs += 1;
        }
    }
    assert!(runs >= 8, "{runs}");
}

#[test]
fn evaluation_is_the_model_and_records_nothing() {
    for (p, v, m) in [(1, 1, 2), (2, 1, 4), (2, 2, 4), (3, 2, 6), (4, 1, 8)] {
        for (kind, checked) in kinds(p, v, m) {
            let rt = cpu(0).unwrap();
            let x = rows(&rt, 1, m);
            let model = mlp(&rt, p * v);
            // Part by part: products of other sizes may add in another order.
            let part = |k| model.forward(&Var::new(x.narrow(0, k * ROWS, ROWS)?))?.value()?.to_vec::<f32>();
            let want = (0..m).map(part).collect::<Result<Vec<_>>>().unwrap().concat();
            let last = checked.schedule().placement().rank_of(p * v - 1).unwrap();
            let ranks = world(p, |comm| {
                let rt = comm.runtime();
                let mut pipeline = pipeline(&comm, &checked, mlp_stages(rt, p * v, p * v))?;
                let (_, mut gradients) = optimizers(&pipeline, 0.0)?;
                let (x, y) = (rows(rt, 1, m), rows(rt, 2, m));
                let batch = || MicroBatches::split(from_ref(&x), from_ref(&y), m);
                // Before, between and after: with its own shapes, which are not those trained with.
                let few = MicroBatches::split(&[x.narrow(0, 0, m)?], &[y.narrow(0, 0, m)?], m)?;
                let first = pipeline.run(batch()?, &mut gradients)?;
                let live = rt.memory().total.live;
                let small = pipeline.evaluate(few)?;
                drop(small);
                assert_eq!(rt.memory().total.live, live, "an evaluation leaves nothing");
                let again = pipeline.run(batch()?, &mut gradients)?;
                assert_eq!(pipeline.losses(&first)?, pipeline.losses(&again)?);
                let mut fresh = self::pipeline(&comm, &checked, mlp_stages(rt, p * v, p * v))?;
                let output = fresh.evaluate(batch()?)?;
                assert_eq!((output.peak_live(), output.outputs().len()), (1, if comm.rank() == last { m } else { 0 }));
                assert_eq!(fresh.losses(&output)?, pipeline.losses(&first)?);
                let values = output.outputs().iter().map(|of| of[0].to_vec::<f32>()).collect::<Result<Vec<_>>>()?;
                Ok(values.concat())
            });
            assert!(ranks[last] == want, "{kind} {p} {v} {m}");
        }
    }
}

#[test]
fn a_schedule_of_forwards_alone_needs_no_loss() {
    let placement = Kind::Zbv.generate(2, 2, 3).unwrap().placement().clone();
    let schedule = Schedule::forward_only(&placement, 3).unwrap();
    let lowered = lower(&schedule, &Lowering { sharded: true, ..Default::default() }).unwrap();
    let limits = Limits { live: Some(1), ..Default::default() };
    let checked = check(lowered, limits).unwrap();
    assert!(checked.is_forward_only());
    let simulated = simulate(checked.schedule(), &Costs::default(), Sends::Synchronous).unwrap();
    assert!(simulated.ranks().iter().all(|rank| rank.peak_live == 1));
    let ranks = world(2, |comm| {
        let stages = own(&checked, comm.rank(), mlp_stages(comm.runtime(), 4, 4));
        let mut pipeline = Pipeline::new(&comm, checked.clone(), stages, None, PipelineOptions::default())?;
        let x = rows(comm.runtime(), 4, 3);
        let batch = MicroBatches { targets: Vec::new(), ..MicroBatches::split(&[x], &[], 3)? };
        let output = pipeline.run(batch, &mut BTreeMap::<usize, Gradients<Cpu>>::new())?;
        assert!(output.losses().is_empty());
        Ok(output.outputs().len())
    });
    assert_eq!(ranks, [3, 0]);
    assert!(Schedule::forward_only(&placement, 0).is_err());
}

/// Layers with dropout between them.
fn dropping(rt: &Cpu, stages: usize) -> Vec<Box<dyn Stage<Cpu>>> {
    let init = Init::new(rt, 2);
    let stage = |k| {
        let linear = Linear::new(&init, WIDTH, WIDTH).unwrap();
        Box::new(Layers::new(2 * k, vec![Box::new(linear), Box::new(Dropout::new(0.5).unwrap())])) as _
    };
    (0..stages).map(stage).collect()
}

#[test]
fn random_numbers_do_not_depend_on_the_schedule() {
    let train = |checked: &Checked, p: usize| {
        let ranks = world(p, |comm| {
            autograd::manual_seed(11);
            let mut pipeline = pipeline(&comm, checked, dropping(comm.runtime(), 4))?;
            let (_, mut gradients) = optimizers(&pipeline, 0.0)?;
            let mut losses = Vec::new();
            for _ in 0..2 {
                let batch = MicroBatches::split(&[rows(comm.runtime(), 1, 8)], &[rows(comm.runtime(), 2, 8)], 8)?;
                let output = pipeline.run(batch, &mut gradients)?;
                losses.push(pipeline.losses(&output)?);
            }
            Ok(losses)
        });
        assert!(ranks.iter().all(|losses| *losses == ranks[0]));
        ranks[0].clone()
    };
    let mut seen = Vec::new();
    for (p, v) in [(1, 4), (2, 2), (4, 1)] {
        seen.extend(kinds(p, v, 8).map(|(kind, checked)| (kind, train(&checked, p))));
    }
    let first = seen[0].1.clone();
    assert!(first[0] != first[1], "every run drops anew");
    assert!(seen.iter().all(|(_, losses)| *losses == first), "{:?}", seen.iter().map(|(k, _)| k).collect::<Vec<_>>());
}

/// A layer that keeps nothing and runs again in backward.
struct Again(Arc<Linear<Cpu>>);

impl Module<Cpu> for Again {
    fn visit(&self, name: &str, visitor: &mut dyn Visitor<Cpu>) {
        self.0.visit(name, visitor);
    }
}

impl Stage<Cpu> for Again {
    fn forward(&self, inputs: &[Var<Cpu>]) -> Result<Vec<Var<Cpu>>> {
        let layer = self.0.clone();
        checkpoint(&[&inputs[0]], move |x| Ok(vec![layer.forward(&x[0])?.tanh()?]))
    }
}

#[test]
fn checkpointed_stages_have_the_same_gradients() {
    for (kind, p, v) in [(Kind::OneFOneB, 3, 1), (Kind::ZbH1, 3, 1), (Kind::Zbv, 2, 2)] {
        let checked = checked(kind, p, v, 6).unwrap();
        let gradients = |again: bool| {
            let ranks = world(p, |comm| {
                let init = Init::new(comm.runtime(), 4);
                let stage = |k| -> Result<Box<dyn Stage<Cpu>>> {
                    let linear = Linear::new(&init, WIDTH, WIDTH)?;
                    Ok(if again {
                        Box::new(Again(Arc::new(linear)))
                    } else {
                        Box::new(Layers::new(k, vec![Box::new(linear), Box::new(Tanh)]))
                    })
                };
                let stages = (0..p * v).map(stage).collect::<Result<_>>()?;
                let mut pipeline = pipeline(&comm, &checked, stages)?;
                let (_, mut gradients) = optimizers(&pipeline, 0.0)?;
                let batch = MicroBatches::split(&[rows(comm.runtime(), 1, 6)], &[rows(comm.runtime(), 2, 6)], 6)?;
                pipeline.run(batch, &mut gradients)?;
                let mut values = BTreeMap::new();
                for (&stage, module) in pipeline.stages() {
                    for (k, p) in module.parameters().iter().enumerate() {
                        values.insert((stage, k), gradients[&stage].get(&p.leaf())?.unwrap().to_vec::<f32>()?);
                    }
                }
                Ok(values)
            });
            ranks.into_iter().flatten().collect::<BTreeMap<_, _>>()
        };
        assert!(gradients(true) == gradients(false), "{kind}");
    }
}

thread_local! {
    static LIVE: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

/// The identity, counting how many of its calls are still on a tape of this thread, and the most there were.
struct Counted;

impl Counted {
    fn new() -> Arc<Self> {
        let (live, peak) = LIVE.get();
        LIVE.set((live + 1, peak.max(live + 1)));
        Arc::new(Counted)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let (live, peak) = LIVE.get();
        LIVE.set((live - 1, peak));
    }
}

impl Function<Cpu> for Counted {
    fn name(&self) -> &'static str {
        "counted"
    }

    fn forward(&self, ins: &[Tensor<Cpu>]) -> Result<Vec<Tensor<Cpu>>> {
        Ok(vec![ins[0].mul(1.0)?])
    }

    fn backward(&self, cx: &mut dyn Backprop<Var<Cpu>>) -> Result<()> {
        match cx.upstream(0)? {
            Some(gradient) => cx.give_value(0, &gradient),
            None => Ok(()),
        }
    }
}

/// `x · scale`, where `scale` goes through [`Counted`]: a part of the graph that leads to no input, so only W frees it.
struct Scaled(Param<Cpu>);

impl Module<Cpu> for Scaled {
    fn visit(&self, name: &str, visitor: &mut dyn Visitor<Cpu>) {
        visitor.enter(name);
        visitor.parameter("scale", &self.0);
        visitor.leave();
    }
}

impl Stage<Cpu> for Scaled {
    fn forward(&self, inputs: &[Var<Cpu>]) -> Result<Vec<Var<Cpu>>> {
        let scale = apply_function(Counted::new(), &[&self.0.var()])?;
        Ok(vec![inputs[0].mul(&scale[0])?])
    }
}

#[test]
fn activations_live_as_long_as_a_simulation_says() {
    for (p, v, m) in [(1, 1, 4), (2, 1, 6), (2, 2, 6), (3, 1, 9), (4, 1, 8), (4, 2, 8)] {
        for (kind, checked) in kinds(p, v, m) {
            let simulated = simulate(checked.schedule(), &Costs::default(), Sends::Overlapped).unwrap();
            let want: Vec<usize> = simulated.ranks().iter().map(|rank| rank.peak_live).collect();
            let got = world(p, |comm| {
                LIVE.set((0, 0));
                let rt = comm.runtime();
                let scaled = |_| Scaled(Param::new(Tensor::ones(rt, [1], DType::F32).unwrap()).unwrap());
                let stages = (0..p * v).map(scaled).map(|stage| Box::new(stage) as _).collect();
                let mut pipeline = pipeline(&comm, &checked, stages)?;
                let (_, mut gradients) = optimizers(&pipeline, 0.0)?;
                let batch = MicroBatches::split(&[rows(rt, 1, m)], &[rows(rt, 2, m)], m)?;
                let output = pipeline.run(batch, &mut gradients)?;
                let (left, peak) = LIVE.get();
                assert_eq!((left, output.peak_live()), (0, peak));
                Ok(peak)
            });
            assert_eq!(got, want, "{kind} {p} {v} {m}");
        }
    }
}

#[test]
fn a_measured_run_is_a_timeline() {
    let checked = checked(Kind::DualPipeV, 2, 2, 4).unwrap();
    let timelines = world(2, |comm| {
        let options = PipelineOptions { measured: true, ..Default::default() };
        let stages = own(&checked, comm.rank(), mlp_stages(comm.runtime(), 4, 4));
        let mut pipeline = Pipeline::new(&comm, checked.clone(), stages, boxed(squares), options)?;
        let (_, mut gradients) = optimizers(&pipeline, 0.0)?;
        let batch = MicroBatches::split(&[rows(comm.runtime(), 1, 4)], &[rows(comm.runtime(), 2, 4)], 4)?;
        let output = pipeline.run(batch, &mut gradients)?;
        pipeline.timeline(&output)
    });
    let timeline = &timelines[0];
    assert_eq!(timeline, &timelines[1]);
    for (rank, events) in timeline.ranks.iter().enumerate() {
        assert!(events.iter().map(|event| &event.action).eq(checked.row(rank)));
        assert!(events.iter().all(|event| event.start <= event.end));
        assert!(events.is_sorted_by_key(|event| event.start));
    }
    assert!(timeline.to_svg().contains("rank 1") && timeline.to_chrome_trace().contains("0REDUCE_GRAD"));
}

/// Gathers and frees, and knows when a stage is used while it is not gathered.
struct Gathering {
    gathered: BTreeSet<usize>,
    reduced: Vec<usize>,
    gradients: BTreeMap<usize, FlatGradients<Cpu>>,
}

impl StageHooks<Cpu> for Gathering {
    fn gradients(&mut self, stage: usize, _: bool) -> Result<&mut dyn BackwardHook<Cpu>> {
        assert!(self.gathered.contains(&stage) && !self.reduced.contains(&stage));
        self.gradients.gradients(stage, false)
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
    for (kind, p, v) in [(Kind::LoopedBfs, 2, 3), (Kind::DualPipeV, 2, 2), (Kind::ZbH1, 3, 1)] {
        let schedule = kind.generate(p, v, 6).unwrap();
        let lowered = lower(&schedule, &Lowering { sharded: true, ..Default::default() }).unwrap();
        let checked = check(lowered, Limits::default()).unwrap();
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

/// Buckets as the hooks of stages: they are sent during a stage's last sweep.
struct Bucketed(BTreeMap<usize, Buckets<Cpu>>);

impl StageHooks<Cpu> for Bucketed {
    fn gradients(&mut self, stage: usize, last: bool) -> Result<&mut dyn BackwardHook<Cpu>> {
        let buckets = self.0.get_mut(&stage).ok_or_else(|| Error::argument("test", "no such stage"))?;
        buckets.begin(last)?;
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
    for kind in [Kind::OneFOneB, Kind::ZbH1, Kind::GPipe] {
        let checked = checked(kind, 2, 1, 4).unwrap();
        let batch = |comm: &Comm<Cpu>| {
            let replica = comm.rank() / 2;
            let (x, y) = (rows(comm.runtime(), 1, 8), rows(comm.runtime(), 2, 8));
            let own = |t: &Tensor<Cpu>| t.narrow(0, replica * 4 * ROWS, 4 * ROWS);
            MicroBatches::split(&[own(&x)?], &[own(&y)?], 4)
        };
        let plain = world(4, |comm| {
            let groups = Groups::new(&comm, 2)?;
            let mut pipeline = pipeline(&groups.pipe, &checked, mlp_stages(comm.runtime(), 2, 2))?;
            let make = || pipeline.stages().iter().map(|(&stage, module)| Ok((stage, sgd(&**module)?))).collect();
            let (mut gradients, _optimizers) = StageGradients::new(&groups, &pipeline, &[] as &[Tie], make)?;
            gradients.begin(true);
            pipeline.run(batch(&comm)?, &mut gradients)?;
            gradients.finish()?;
            summed(&pipeline, |stage| gradients.of(stage).unwrap())
        });
        let bucketed = world(4, |comm| {
            let groups = Groups::new(&comm, 2)?;
            let mut pipeline = pipeline(&groups.pipe, &checked, mlp_stages(comm.runtime(), 2, 2))?;
            let (mut hooks, mut kept) = (BTreeMap::new(), Vec::new());
            for (&stage, module) in pipeline.stages() {
                let mut optimizer = sgd(&**module)?;
                let buckets = Buckets::new(&groups.data, &mut *optimizer, &|_| 0, BucketOptions::default())?;
                hooks.insert(stage, buckets);
                kept.push(optimizer);
            }
            let mut hooks = Bucketed(hooks);
            pipeline.run(batch(&comm)?, &mut hooks)?;
            hooks.0.values_mut().try_for_each(Buckets::finish)?;
            summed(&pipeline, |stage| hooks.0[&stage].gradients())
        });
        assert_eq!(plain, bucketed, "{kind}");
        assert_eq!(plain[0], plain[2], "replicas agree");
    }
}
