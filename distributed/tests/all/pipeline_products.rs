//! Pipelines times replicas, each stage by any strategy, against one rank that sees the joined batch.
//!
//! In `f64`: both sides compute the same sums of a few hundred terms in another order, each a few times 10⁻¹⁶ off, and AdamW divides by
//! the root of a second moment, which may be a thousand times smaller than the largest gradient. 10⁻¹¹ of the largest value leaves room for
//! that and for nothing else: a gradient that counts twice, or a norm of the wrong parts, is off by more than a tenth.

use std::{collections::BTreeMap, sync::Arc};

use crate::{
    common::{WORLDS, config},
    pipeline_common::{ROWS, TIMEOUT, WIDTH, cpu, own},
    zero::options,
};
use autograd::Var;
use distributed::{
    buckets::Unused,
    comm::{Comm, NoOpCommunicator, Ranks},
    pipeline::{
        Checked, GptStage, Kind, Limits, Lowering, MicroBatches, PipelineOptions, PipelineTrainer, Stage, Staged,
        StagedTrainer, ZeroPipelineTrainer, balanced, check, lower, split,
    },
    train::{Loss, SimpleTrainer, StageStrategy},
    zero::{UnitOf, ZeroOptions, ZeroStage},
};
use nn::{
    Forward, Gpt, GptConfig, Init, Linear, ModuleExt, Sequential, Tanh,
    loss::{CrossEntropyOptions, Reduction, cross_entropy_with, mse},
};
use numcore::{DType, Result, Runtime, Tensor, Use, ops::ViewOps};
use runtime_cpu::Cpu;

const STEPS: usize = 3;
const BOUND: f64 = 1e-11;
const GPT: GptConfig =
    GptConfig { vocab: 11, context: 6, layers: 3, heads: 2, width: 8, bias: true, dropout: 0.0, tied_head: true };

/// How each stage is trained over its replicas.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum How {
    Replicas,
    Zero(ZeroStage),
    /// Stage 3, gathered as a stage of the pipeline is used, not as its layers are.
    Gathered,
}

pub const HOWS: [How; 5] = [
    How::Replicas,
    How::Zero(ZeroStage::State),
    How::Zero(ZeroStage::Gradients),
    How::Zero(ZeroStage::Parameters),
    How::Gathered,
];

impl How {
    pub fn checked(self, kind: Kind, p: usize, v: usize, m: usize) -> Option<Checked> {
        let schedule = kind.generate(p, v, m).ok()?;
        let lowering = Lowering { sharded: self == How::Gathered, ..Lowering::default() };
        Some(check(lower(&schedule, &lowering).unwrap(), Limits::default()).unwrap())
    }

    fn zero(self) -> Option<ZeroOptions> {
        match self {
            How::Replicas => None,
            How::Zero(stage) => Some(options(stage, UnitOf::layers())),
            How::Gathered => Some(options(ZeroStage::Parameters, UnitOf::layers())),
        }
    }
}

/// A model that can be whole or in stages, with its data.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Model {
    Mlp,
    Gpt,
}

impl Model {
    pub fn whole(self, rt: &Cpu, layers: usize) -> Box<dyn Forward<Cpu>> {
        let init = Init::new(rt, 5).dtype(DType::F64);
        match self {
            Model::Mlp => Box::new(mlp(&init, layers)),
            Model::Gpt => Box::new(Gpt::new(&init, GPT).unwrap()),
        }
    }

    /// This rank's stages of `layers` layers in all. Replicas start from other values than the first, whose count.
    pub fn staged(self, comm: &Comm<Cpu>, checked: &Checked, layers: usize) -> Staged<Cpu> {
        let (count, p) = (checked.schedule().stages(), checked.schedule().placement().ranks());
        let init = Init::new(comm.runtime(), 5 + (comm.rank() / p) as u64).dtype(DType::F64);
        let (stages, ties): (Vec<Box<dyn Stage<Cpu>>>, _) = match self {
            Model::Mlp => {
                let layers = mlp(&init, layers).into_layers();
                let cuts = balanced(&layers, count).unwrap();
                (split(layers, &cuts).unwrap(), Vec::new())
            }
            Model::Gpt => {
                let cut = GptStage::cut(&init, GPT, count).unwrap();
                (cut.into_iter().map(|stage| Box::new(stage) as _).collect(), GptStage::<Cpu>::ties(&GPT))
            }
        };
        let loss = move |y: &[Var<Cpu>], t: &[Var<Cpu>]| self.loss(&y[0], &t[0]);
        Staged { stages: own(checked, comm.rank() % p, stages), loss: Some(Box::new(loss)), ties }
    }

    /// All examples of a step.
    pub fn batch(self, rt: &Cpu, step: usize, micros: usize) -> Result<(Tensor<Cpu>, Tensor<Cpu>)> {
        match self {
            Model::Mlp => {
                let rows = |seed| Tensor::normal(rt, [micros * ROWS, WIDTH], DType::F64, 0.0, 1.0, seed + step as u64);
                Ok((rows(100)?, rows(200)?))
            }
            Model::Gpt => {
                let token = |k: usize| ((k * k + 3 * step + k / 5) % GPT.vocab) as i64;
                let tokens: Vec<i64> = (0..micros * ROWS * (GPT.context + 1)).map(token).collect();
                let all = Tensor::from_slice(rt, [micros * ROWS, GPT.context + 1], &tokens)?;
                Ok((all.narrow(1, 0, GPT.context)?, all.narrow(1, 1, GPT.context)?))
            }
        }
    }

    pub fn loss(self, y: &Var<Cpu>, target: &Var<Cpu>) -> Result<Loss<Cpu>> {
        let weight = target.dims().iter().product::<usize>() as f64;
        match self {
            Model::Mlp => Loss::sum(mse(y, target, Reduction::Sum)?, weight),
            Model::Gpt => {
                let options = CrossEntropyOptions { reduction: Reduction::Sum, ..Default::default() };
                Loss::sum(cross_entropy_with(y, target, None, options)?, weight)
            }
        }
    }
}

fn mlp(init: &Init<Cpu>, layers: usize) -> Sequential<Cpu> {
    let linear = |_| Linear::new(init, WIDTH, WIDTH).unwrap();
    (0..layers).map(linear).fold(Sequential::new(), |model, layer| model.push(layer).push(Tanh))
}

/// Values by name.
pub type Values = BTreeMap<String, Vec<f64>>;

/// What a run tells: losses, norms, weights after every step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Told {
    pub losses: Vec<f64>,
    pub norms: Vec<f64>,
    pub weights: Vec<Values>,
}

pub fn values(state: Vec<(String, Tensor<Cpu>)>) -> Result<Values> {
    state.into_iter().map(|(name, value)| Ok((name, value.to_vec::<f64>()?))).collect()
}

pub fn reference(model: Model, layers: usize, micros: usize, steps: usize) -> Told {
    let rt = cpu(0).unwrap();
    let whole = model.whole(&rt, layers);
    let mut trainer = SimpleTrainer::new(&rt, &whole, config()).unwrap();
    let mut told = Told::default();
    for step in 0..steps {
        let (x, y) = model.batch(&rt, step, micros).unwrap();
        let loss = |_| model.loss(&whole.forward(&Var::new(x.clone()))?, &Var::new(y.clone()));
        let metrics = trainer.step(loss).unwrap();
        told.losses.push(metrics.loss().unwrap());
        told.norms.extend(metrics.grad_norm().unwrap());
        told.weights.push(values(whole.state_dict().unwrap()).unwrap());
    }
    told
}

/// Takes some steps; every rank is told what it has of the model after each.
pub fn steps<S: StageStrategy<Cpu>, G>(
    comm: &Comm<Cpu>,
    model: Model,
    trainer: &mut StagedTrainer<Cpu, S>,
    steps: std::ops::Range<usize>,
    scope: impl Fn(&StagedTrainer<Cpu, S>) -> Result<G>,
) -> Result<Told> {
    let schedule = trainer.pipeline().schedule();
    let (p, m) = (schedule.placement().ranks(), schedule.micro_batches());
    let mut told = Told::default();
    for step in steps {
        let (x, y) = model.batch(comm.runtime(), step, m * comm.size() / p)?;
        let at = comm.rank() / p * m * ROWS;
        let part = |_| MicroBatches::split(&[x.narrow(0, at, m * ROWS)?], &[y.narrow(0, at, m * ROWS)?], m);
        let metrics = trainer.step(part)?;
        assert_eq!(metrics.global_step(), step as u64 + 1);
        told.losses.push(metrics.loss()?);
        told.norms.extend(metrics.grad_norm()?);
        let _scope = scope(trainer)?;
        let mut here = Values::new();
        for stage in trainer.pipeline().stages().values() {
            for (name, value) in values(stage.state_dict()?)? {
                // Both copies may be here.
                assert!(here.get(&name).is_none_or(|other| *other == value), "copies of {name} differ");
                here.insert(name, value);
            }
        }
        told.weights.push(here);
    }
    Ok(told)
}

/// One rank's part of a training run.
fn trained(comm: &Comm<Cpu>, model: Model, layers: usize, checked: &Checked, how: How) -> Result<Told> {
    let (staged, options) = (model.staged(comm, checked, layers), PipelineOptions::default());
    match how.zero() {
        None => {
            let mut trainer = PipelineTrainer::new(comm, checked.clone(), staged, config(), options)?;
            steps(comm, model, &mut trainer, 0..STEPS, |_| Ok(()))
        }
        Some(zero) => {
            let mut trainer = ZeroPipelineTrainer::new(comm, checked.clone(), staged, config(), options, zero)?;
            steps(comm, model, &mut trainer, 0..STEPS, |t| t.gather_full_params())
        }
    }
}

pub fn everywhere<T: Send>(n: usize, program: impl Fn(Comm<Cpu>) -> Result<T> + Sync) -> Result<Vec<T>> {
    if n == 1 {
        return Ok(vec![program(Arc::new(NoOpCommunicator::new(&cpu(0)?)))?]);
    }
    Ranks::new(n).timeout(TIMEOUT).run(cpu, program)
}

/// What all ranks have together: they are told the same, and have the same bits of what several have.
pub fn joined(ranks: Vec<Told>) -> Told {
    let mut all = Told { weights: vec![Values::new(); ranks[0].weights.len()], ..ranks[0].clone() };
    for rank in ranks {
        assert!(rank.losses == all.losses && rank.norms == all.norms, "every rank is told the same");
        for (all, here) in all.weights.iter_mut().zip(rank.weights) {
            for (name, value) in here {
                let first = all.entry(name.clone()).or_insert_with(|| value.clone());
                assert!(*first == value, "copies of {name} differ");
            }
        }
    }
    all
}

/// The largest difference, relative to the largest value of each kind.
pub fn difference(got: &Told, want: &Told) -> f64 {
    let lists = |told: &Told| {
        let mut lists = vec![told.losses.clone(), told.norms.clone()];
        lists.extend(told.weights.iter().flat_map(|of| of.values().cloned()));
        lists
    };
    assert_eq!(got.weights.len(), want.weights.len());
    for (got, want) in got.weights.iter().zip(&want.weights) {
        assert!(got.keys().eq(want.keys()), "{:?}", got.keys());
    }
    let of = |(got, want): (&Vec<f64>, &Vec<f64>)| {
        assert_eq!(got.len(), want.len());
        let largest = want.iter().fold(f64::MIN_POSITIVE, |most, v| most.max(v.abs()));
        let worst = got.iter().zip(want).fold(0.0_f64, |most, (a, b)| most.max((a - b).abs()));
        assert!(!got.iter().any(|v| v.is_nan()));
        worst / largest
    };
    lists(got).iter().zip(&lists(want)).map(of).fold(0.0, f64::max)
}

/// Trains this product by these strategies and schedules; gives how many runs that were.
fn product(model: Model, p: usize, replicas: usize, kinds: &[Kind], hows: &[How]) -> usize {
    let mut runs = 0;
    for v in [1, 2] {
        let m = 2 * p;
        let want = reference(model, p * v, m * replicas, STEPS);
        for &how in hows {
            for (kind, checked) in kinds.iter().filter_map(|&kind| Some((kind, how.checked(kind, p, v, m)?))) {
                let what = format!("{model:?}, {kind}, pipe {p} x {replicas} replicas, {v} stages each, {how:?}");
                let ranks = everywhere(p * replicas, |comm| trained(&comm, model, p * v, &checked, how));
                let off = difference(&joined(ranks.unwrap_or_else(|e| panic!("{what}: {e}"))), &want);
                assert!(off <= BOUND, "{what}: {off:e}");
                runs += 1;
            }
        }
    }
    runs
}

/// A plain one, one with I and W apart, one with stages in turn, one folded.
const SOME: [Kind; 4] = [Kind::OneFOneB, Kind::ZbH1, Kind::Interleaved, Kind::Zbv];

#[test]
fn an_mlp_trains_as_on_one_rank() {
    let runs: usize = [(2, 2), (2, 4), (4, 2)].map(|(p, n)| product(Model::Mlp, p, n, &SOME, &HOWS)).into_iter().sum();
    assert_eq!(runs, 3 * 5 * HOWS.len());
}

#[test]
fn a_gpt_with_a_shared_table_trains_as_on_one_rank() {
    let runs: usize = [(2, 2), (2, 4), (4, 2)].map(|(p, n)| product(Model::Gpt, p, n, &SOME, &HOWS)).into_iter().sum();
    assert_eq!(runs, 3 * 5 * HOWS.len());
}

#[test]
fn a_pipeline_alone_and_replicas_alone() {
    for n in WORLDS {
        assert!(product(Model::Gpt, n, 1, &[Kind::OneFOneB, Kind::DualPipeV], &[How::Replicas, How::Gathered]) >= 4);
        assert!(product(Model::Gpt, 1, n, &[Kind::GPipe, Kind::LoopedBfs], &HOWS) >= 2 * HOWS.len());
    }
}

/// Two layers of equal size a stage, so that formulas need no allowance for padding.
fn layers(comm: &Comm<Cpu>, checked: &Checked) -> Result<Staged<Cpu>> {
    let init = Init::new(comm.runtime(), 0);
    let count = checked.schedule().stages();
    let linear = |_| Linear::new(&init, 128, 128).map(Linear::without_bias);
    let layers = (0..2 * count).map(linear).collect::<Result<Vec<_>>>()?.into_iter();
    let layers: Vec<Box<dyn Forward<Cpu>>> = layers.map(|layer| Box::new(layer) as _).collect();
    let cuts: Vec<usize> = (1..count).map(|k| 2 * k).collect();
    let p = checked.schedule().placement().ranks();
    let stages = own(checked, comm.rank() % p, split(layers, &cuts)?);
    let loss = |y: &[Var<Cpu>], t: &[Var<Cpu>]| Ok(Loss::mean(mse(&y[0], &t[0], Reduction::Mean)?));
    Ok(Staged { stages, loss: Some(Box::new(loss)), ties: Vec::new() })
}

/// Two steps, then bytes of parameters, gradients and state on this rank.
fn bytes<S: StageStrategy<Cpu>>(comm: &Comm<Cpu>, mut trainer: StagedTrainer<Cpu, S>) -> Result<usize> {
    let (rt, m) = (comm.runtime(), trainer.pipeline().schedule().micro_batches());
    for _ in 0..2 {
        let x = Tensor::normal(rt, [m, 128], DType::F32, 0.0, 1.0, 1)?;
        trainer.step(|_| MicroBatches::split(std::slice::from_ref(&x), std::slice::from_ref(&x), m))?;
    }
    let memory = rt.memory();
    assert_eq!(memory.of(Use::Communication).live, 0, "nothing stays gathered");
    Ok([Use::Parameters, Use::Gradients, Use::Optimizer].map(|u| memory.of(u).live).into_iter().sum())
}

#[test]
fn memory_is_that_of_the_table_for_a_stage() {
    // Bytes of a parameter of the rank's stages: AdamW, all in f32, N replicas.
    let formula = |how: How, n: f64| match how {
        How::Replicas => 16.0,
        How::Zero(ZeroStage::State) => 8.0 + 8.0 / n,
        How::Zero(ZeroStage::Gradients) => 4.0 + 12.0 / n,
        How::Zero(ZeroStage::Parameters) | How::Gathered => 16.0 / n,
    };
    for (p, v, kind) in [(2, 1, Kind::OneFOneB), (2, 2, Kind::Zbv), (3, 1, Kind::ZbH1)] {
        for n in [1, 2, 3, 4] {
            for how in HOWS {
                let checked = how.checked(kind, p, v, 2 * p).unwrap();
                let measured = everywhere(p * n, |comm| {
                    let (staged, options) = (layers(&comm, &checked)?, PipelineOptions::default());
                    let config = distributed::train::TrainingConfig::default();
                    match how.zero() {
                        None => bytes(&comm, PipelineTrainer::new(&comm, checked.clone(), staged, config, options)?),
                        Some(zero) => bytes(
                            &comm,
                            ZeroPipelineTrainer::new(&comm, checked.clone(), staged, config, options, zero)?,
                        ),
                    }
                });
                let expected = formula(how, n as f64) * (v * 2 * 128 * 128) as f64;
                for bytes in measured.unwrap() {
                    let off = bytes as f64 / expected - 1.0;
                    assert!(off.abs() <= 0.02, "{kind} {p} x {n}, {how:?}: {bytes} bytes, {expected} by the table");
                }
            }
        }
    }
}

#[test]
fn unused_parameters_cannot_be_allowed() {
    let checked = How::Replicas.checked(Kind::OneFOneB, 2, 1, 2).unwrap();
    let outcomes = Ranks::new(2).timeout(TIMEOUT).outcomes(cpu, |comm| {
        let (staged, options) = (Model::Gpt.staged(&comm, &checked, 2), PipelineOptions::default());
        let zero = ZeroOptions { unused: Unused::Allow, ..Default::default() };
        ZeroPipelineTrainer::new(&comm, checked.clone(), staged, config(), options, zero).map(|_| ())
    });
    for outcome in outcomes.unwrap() {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains("unused parameters cannot be allowed in a pipeline"), "{error}");
    }
}
