//! Training through every schedule against one rank that sees the joined batch.
//!
//! What bounds the difference. Both compute the same sums in another order. A computation of K roundings in a row differs from the
//! exact one by at most γ·Σ|terms| with γ = λ·√K·u, u = 2⁻²⁴, but for a probability of 2·K·exp(−λ²/2) (Higham and Mary, *A New Approach
//! to Probabilistic Rounding Error Analysis*, 2019, theorem 2.4): λ = 7 makes that 10⁻⁷ here, and what does not happen in one run
//! does not happen in the next, for nothing here is random. K counts the additions on the longest path from an input through
//! forward and backward into a gradient: widths of all matrix products there and back, and the examples a gradient is summed
//! over. Layers here do not amplify (weights below 1/√width, tanh, norms to unit variance), so Σ|terms| is at most as large as gradients
//! get: the gradients of a step differ by 2·γ·G, G the norm of all of them. An update with rate η and momentum ½ differs by at most
//! 2·η times the sum over the steps, and each update rounds the weight itself.

use crate::{pipeline_common::*, prelude::*};

const STEPS: usize = 2;
const LR: f64 = 0.05;
const U: f64 = 1.0 / (1 << 24) as f64;

/// Losses of the steps, norms of the gradients before clipping, and the weights in the end.
#[derive(Clone, Debug, PartialEq)]
struct Trained {
    losses: Vec<f64>,
    norms: Vec<f64>,
    weights: BTreeMap<String, Vec<f32>>,
}

/// A model that can be whole or in stages, its data and its loss.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Model {
    Mlp,
    Gpt,
}

const GPT: GptConfig = GptConfig {
    vocab: 11,
    context: 6,
    layers: 4,
    heads: 2,
    width: 8,
    bias: true,
    dropout: 0.0,
    activation: Activation::Gelu,
    tied_head: true,
};

impl Model {
    fn whole(self, rt: &Cpu, stages: usize) -> Box<dyn Forward<Cpu>> {
        match self {
            Model::Mlp => Box::new(mlp(rt, stages)),
            Model::Gpt => Box::new(Gpt::new(&Init::new(rt, 5), GPT).unwrap()),
        }
    }

    fn staged(self, comm: &Comm<Cpu>, checked: &Checked) -> PipelineModel<Cpu> {
        let (rt, count) = (comm.runtime(), checked.schedule().stages());
        let stages: Vec<Box<dyn Stage<Cpu>>> = match self {
            Model::Mlp => mlp_stages(rt, count, count),
            Model::Gpt => {
                let cut = Gpt::new(&Init::new(rt, 5), GPT).unwrap().split(count).unwrap();
                cut.into_iter().map(|stage| Box::new(stage) as _).collect()
            }
        };
        PipelineModel::on(comm.rank(), checked.clone(), stages).loss(move |y, t| self.loss(y, t))
    }

    /// All examples of a step.
    fn batch(self, rt: &Cpu, step: usize, micros: usize) -> (Tensor<Cpu>, Tensor<Cpu>) {
        match self {
            Model::Mlp => (rows(rt, 100 + step as u64, micros), rows(rt, 200 + step as u64, micros)),
            Model::Gpt => {
                let token = |k: usize| ((k * k + 3 * step + k / 5) % GPT.vocab) as i64;
                let tokens: Vec<i64> = (0..micros * ROWS * (GPT.context + 1)).map(token).collect();
                let all = Tensor::from_slice(rt, [micros * ROWS, GPT.context + 1], &tokens).unwrap();
                (all.narrow(1, 0, GPT.context).unwrap(), all.narrow(1, 1, GPT.context).unwrap())
            }
        }
    }

    fn loss(self, outputs: &[Var<Cpu>], targets: &[Var<Cpu>]) -> Result<Loss<Cpu>> {
        match self {
            Model::Mlp => squares(outputs, targets),
            Model::Gpt => {
                let options = CrossEntropyOptions { reduction: Reduction::Sum, ..Default::default() };
                let weight = targets[0].dims().iter().product::<usize>() as f64;
                Loss::sum(cross_entropy_with(&outputs[0], &targets[0], None, options)?, weight)
            }
        }
    }

    /// K of the module's documentation.
    fn terms(self, stages: usize, micros: usize) -> f64 {
        let examples = micros * ROWS;
        let terms = match self {
            Model::Mlp => 2 * stages * (WIDTH + 4) + examples + WIDTH,
            Model::Gpt => {
                let GptConfig { vocab, context, layers, width, .. } = GPT;
                // Per block: two norms, queries to heads to projection, two linear layers; there and back.
                let block = 2 * (2 * width) + 4 * width + 2 * context + 5 * width + 20;
                2 * layers * block + 2 * (width + vocab) + 2 * examples * context
            }
        };
        terms as f64
    }
}

fn config(accumulation: usize, max_norm: Option<f64>) -> TrainingConfig {
    TrainingConfig { accumulation, max_norm, ..TrainingConfig::default() }
}

fn sgd(leaves: Vec<Arc<Leaf<Cpu>>>) -> Result<Box<dyn Optimizer<Cpu>>> {
    let sgd = Sgd::in_groups(SgdConfig { lr: LR, momentum: 0.5, ..Default::default() });
    Ok(Box::new(if leaves.is_empty() { sgd } else { sgd.group(leaves, |_| {})? }))
}

fn reference(model: Model, stages: usize, micros: usize, max_norm: Option<f64>) -> Trained {
    let rt = cpu(0).unwrap();
    let whole = model.whole(&rt, stages);
    let leaves = whole.parameters().iter().map(|p| p.leaf()).collect();
    let alone: Comm<Cpu> = Arc::new(NoOpCommunicator::new(&rt));
    let (optimizer, options) = (sgd(leaves).unwrap(), BucketOptions::default());
    let mut trainer = TrainStep::builder(&alone, &whole)
        .optimizer(optimizer)
        .config(config(1, max_norm))
        .buckets(options)
        .build()
        .unwrap();
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for step in 0..STEPS {
        let (x, y) = model.batch(&rt, step, micros);
        let loss = |_| model.loss(&[whole.forward(&Var::new(x.clone()))?], &[Var::new(y.clone())]);
        let metrics = trainer.step(loss).unwrap();
        losses.push(metrics.loss().unwrap());
        norms.extend(metrics.grad_norm().unwrap());
    }
    let weights = whole.state_dict().unwrap().into_iter().map(|(n, v)| (n, v.to_vec::<f32>().unwrap())).collect();
    Trained { losses, norms, weights }
}

/// A world of `replicas` pipelines; each takes its part of every micro-batch's examples, in `runs` runs of the pipeline.
fn piped(model: Model, checked: &Checked, replicas: usize, runs: usize, max_norm: Option<f64>) -> Trained {
    piped_with(model, checked, (replicas, replicas), runs, max_norm)
}

/// As [`piped`], where no more than `have` of the replicas have examples of their own: the others take those of the first, which weigh nothing.
fn piped_with(
    model: Model,
    checked: &Checked,
    (replicas, have): (usize, usize),
    runs: usize,
    max_norm: Option<f64>,
) -> Trained {
    let p = checked.schedule().placement().ranks();
    let m = checked.schedule().micro_batches();
    let ranks = world(p * replicas, |comm| {
        let staged = model.staged(&comm, checked);
        let mut trainer =
            TrainStep::builder(&comm, staged).optimizer_with(sgd).config(config(runs, max_norm)).build()?;
        let (mut losses, mut norms) = (Vec::new(), Vec::new());
        for step in 0..STEPS {
            let (x, y) = model.batch(comm.runtime(), step, m * runs * have);
            let part = |k| {
                let (replica, weightless) = (comm.rank() / p % have, comm.rank() / p >= have);
                let at = (replica * runs + k) * m * ROWS;
                // What does not count may be infinite.
                let y = if weightless && y.dtype().is_float() { y.mul(f64::INFINITY)? } else { y.clone() };
                let batch = MicroBatches::split(&[x.narrow(0, at, m * ROWS)?], &[y.narrow(0, at, m * ROWS)?], m)?;
                Ok(MicroBatches { weightless, ..batch })
            };
            let metrics = trainer.step(part)?;
            assert_eq!(metrics.global_step(), step as u64 + 1);
            losses.push(metrics.loss()?);
            norms.extend(metrics.grad_norm()?);
        }
        Ok((losses, norms, stage_weights(trainer.pipeline().expect("stages").stages().values())))
    });
    let (losses, norms) = (ranks[0].0.clone(), ranks[0].1.clone());
    let mut all: BTreeMap<String, Vec<f32>> = BTreeMap::new();
    for (other, other_norms, weights) in ranks {
        assert!(other == losses && other_norms == norms, "every rank is told the same");
        for (name, value) in weights {
            let first = all.entry(name.clone()).or_insert_with(|| value.clone());
            assert!(*first == value, "copies of {name} differ");
        }
    }
    Trained { losses, norms, weights: all }
}

/// Within the bound of the module's documentation; gives how much of it was used.
fn close(what: &str, got: &Trained, want: &Trained, terms: f64, max_norm: f64) -> f64 {
    let gamma = 2.0 * 7.0 * terms.sqrt() * U;
    for (got, want) in got.losses.iter().chain(&got.norms).zip(want.losses.iter().chain(&want.norms)) {
        assert!((got - want).abs() <= gamma * want.abs().max(1.0), "{what}: {got} and not {want}, bound {gamma}");
    }
    assert_eq!(got.losses.len() + got.norms.len(), want.losses.len() + want.norms.len());
    assert!(got.weights.keys().eq(want.weights.keys()), "{what}: {:?}", got.weights.keys());
    let mut worst = 0.0_f64;
    for (name, want) in &want.weights {
        for (got, want) in got.weights[name].iter().zip(want) {
            let rounding = 2.0 * STEPS as f64 * U * f64::from(want.abs());
            let bound = 2.0 * LR * STEPS as f64 * gamma * max_norm + rounding;
            let differs = f64::from((got - want).abs());
            assert!(differs <= bound, "{what}: {name} is {got} and not {want}, bound {bound:e}");
            worst = worst.max(differs / bound);
        }
    }
    worst
}

/// The norm bounds the largest gradient, and is clipped to nothing smaller.
const NO_CLIP: f64 = 1e9;

#[test]
fn every_schedule_trains_as_one_rank_with_the_joined_batch() {
    let sizes = &[(1, 2), (2, 4), (3, 6), (4, 8), (5, 10), (8, 16)][..];
    for (model, sizes) in [(Model::Mlp, sizes), (Model::Gpt, &sizes[1..3])] {
        let mut ran = Vec::new();
        for (p, v, m) in sizes.iter().flat_map(|&(p, m)| [(p, 1, m), (p, 2, m)]) {
            let want = reference(model, p * v, m, Some(NO_CLIP));
            let largest = want.norms.iter().copied().fold(0.0, f64::max);
            let mut first: Option<Trained> = None;
            for (kind, checked) in kinds_once(p, v, m) {
                let what = format!("{model:?}, {kind} p {p} v {v} m {m}");
                let got = piped(model, &checked, 1, 1, Some(NO_CLIP));
                let used = close(&what, &got, &want, model.terms(p * v, m), largest);
                assert!(used < 0.2, "{what}: {used} of a bound that is meant to have room");
                // LoopedBFS adds micro-batches up from the last to the first; all others go the other way.
                if kind != ScheduleKind::LoopedBfs {
                    let first = first.get_or_insert_with(|| got.clone());
                    assert!(got.weights == first.weights, "{what}: not bit for bit the other schedules'");
                }
                ran.push((kind, p));
            }
        }
        if model == Model::Mlp {
            require_every_kind(&ran);
        }
    }
}

/// One schedule of these sizes.
fn of(kind: ScheduleKind, p: usize, v: usize, m: usize) -> Checked {
    checked(kind, p, v, m).unwrap()
}

#[test]
fn replicas_and_accumulated_runs_train_as_one_rank() {
    let cases = [
        (ScheduleKind::OneFOneB, 2, 1, 2, 2, 1),
        (ScheduleKind::ZbH1, 2, 1, 2, 2, 2),
        (ScheduleKind::Interleaved, 2, 2, 2, 2, 1),
        (ScheduleKind::DualPipeV, 2, 2, 4, 2, 1),
        (ScheduleKind::Zbv, 2, 2, 3, 3, 1),
        (ScheduleKind::GPipe, 4, 1, 2, 2, 1),
        (ScheduleKind::OneFOneB, 1, 1, 2, 4, 1),
        (ScheduleKind::OneFOneB, 1, 1, 2, 1, 3),
        (ScheduleKind::LoopedBfs, 2, 2, 2, 1, 2),
    ];
    for (kind, p, v, m, replicas, runs) in cases {
        for model in [Model::Mlp, Model::Gpt] {
            let (checked, examples) = (of(kind, p, v, m), m * replicas * runs);
            let want = reference(model, p * v, examples, Some(NO_CLIP));
            let what = format!("{model:?}, {kind} p {p} v {v} m {m}, {replicas} replicas, {runs} runs");
            let got = piped(model, &checked, replicas, runs, Some(NO_CLIP));
            close(&what, &got, &want, model.terms(p * v, examples), want.norms.iter().copied().fold(0.0, f64::max));
        }
    }
}

#[test]
fn a_replica_without_examples_takes_part_and_weighs_nothing() {
    for (kind, model) in [(ScheduleKind::OneFOneB, Model::Mlp), (ScheduleKind::ZbH1, Model::Gpt)] {
        let (checked, want) = (of(kind, 2, 1, 2), reference(model, 2, 2, Some(NO_CLIP)));
        let got = piped_with(model, &checked, (2, 1), 1, Some(NO_CLIP));
        let largest = want.norms.iter().copied().fold(0.0, f64::max);
        close(&format!("{kind}"), &got, &want, model.terms(2, 2), largest);
    }
}

#[test]
fn clipping_is_by_the_norm_of_all_gradients() {
    for model in [Model::Mlp, Model::Gpt] {
        let free = reference(model, 4, 4, Some(NO_CLIP));
        let max = free.norms.iter().copied().fold(f64::MAX, f64::min) / 3.0;
        let want = reference(model, 4, 4, Some(max));
        assert!(want.weights != free.weights);
        for (kind, p, v, replicas) in
            [(ScheduleKind::OneFOneB, 4, 1, 1), (ScheduleKind::DualPipeV, 2, 2, 1), (ScheduleKind::OneFOneB, 1, 1, 1)]
        {
            let checked = of(kind, p, v, 4);
            let got = piped(model, &checked, replicas, 1, Some(max));
            let stages = checked.schedule().stages();
            let want = if stages == 4 { want.clone() } else { reference(model, stages, 4, Some(max)) };
            close(&format!("{model:?}, {kind}"), &got, &want, model.terms(4, 4), max);
        }
        let halves = piped(model, &of(ScheduleKind::ZbH1, 2, 1, 2), 2, 1, Some(max));
        let want = reference(model, 2, 4, Some(max));
        close(&format!("{model:?}, replicas"), &halves, &want, model.terms(2, 4), max);
    }
}

#[test]
fn a_step_that_overflows_is_left_out_by_all() {
    let checked = of(ScheduleKind::ZbH1, 3, 1, 3);
    let ranks = world(3, |comm| {
        let staged = Model::Mlp.staged(&comm, &checked);
        let scaler = LossScaler::starting_at(1e30)?;
        let config = TrainingConfig { loss_scaling: Some(scaler), ..config(1, Some(1.0)) };
        let mut trainer = TrainStep::builder(&comm, staged).optimizer_with(sgd).config(config).build()?;
        let before = stage_weights(trainer.pipeline().expect("stages").stages().values());
        let (x, y) = Model::Mlp.batch(comm.runtime(), 0, 3);
        // 1e30 times a difference of 1e10 is beyond f32.
        let y = y.mul(1e10)?;
        let batch = || MicroBatches::split(from_ref(&x), from_ref(&y), 3);
        let mut stepped = Vec::new();
        for _ in 0..3 {
            stepped.push(trainer.step(|_| batch())?.stepped());
        }
        let after = stage_weights(trainer.pipeline().expect("stages").stages().values());
        Ok((stepped, trainer.global_step(), before == after))
    });
    // Halving 1e30 twice is far from enough.
    assert!(ranks.iter().all(|rank| *rank == (vec![false; 3], 0, true)), "{ranks:?}");
}

#[test]
fn a_loss_scale_that_fits_changes_nothing() {
    let checked = of(ScheduleKind::OneFOneB, 2, 1, 2);
    let train = |scale: Option<f64>| {
        world(2, |comm| {
            let staged = Model::Gpt.staged(&comm, &checked);
            let loss_scaling = scale.map(LossScaler::starting_at).transpose()?;
            let config = TrainingConfig { loss_scaling, ..config(1, Some(0.5)) };
            let mut trainer = TrainStep::builder(&comm, staged).optimizer_with(sgd).config(config).build()?;
            let (x, y) = Model::Gpt.batch(comm.runtime(), 0, 2);
            let metrics = trainer.step(|_| MicroBatches::split(from_ref(&x), from_ref(&y), 2))?;
            Ok((
                metrics.stepped(),
                metrics.grad_norm()?,
                stage_weights(trainer.pipeline().expect("stages").stages().values()),
            ))
        })
    };
    // A power of two is exact.
    assert!(train(Some(1024.0)) == train(None));
}

#[test]
fn ties_that_cannot_be_are_refused_on_every_rank() {
    let cases: [(&str, &[&str], &str); 3] = [
        ("nobody", &["nobody.weight"], "no stage has a parameter of this name"),
        ("different shapes", &["0.weight", "2.bias"], "stage 0's copy is f32 [12, 12] trained, stage 1's is f32 [12]"),
        ("twice in one stage", &["0.weight", "2.weight", "4.weight"], "two copies"),
    ];
    for (what, names, told) in cases {
        let checked = of(ScheduleKind::OneFOneB, 2, 1, 2);
        let outcomes = Ranks::new(2).timeout(TIMEOUT).outcomes(cpu, |comm| {
            let stages = mlp_stages(comm.runtime(), 3, 2);
            let staged = PipelineModel::on(comm.rank(), checked.clone(), stages).loss(squares);
            let staged = staged.ties(vec![Tie::new(names.iter().copied())]);
            pipelined(&comm, staged, TrainingConfig::default()).map(|_| ())
        });
        for outcome in outcomes.unwrap() {
            let error = outcome.expect_err(what).to_string();
            assert!(error.contains(told), "{what}: {error}");
        }
    }
}

#[test]
fn a_world_that_is_no_number_of_pipelines_is_refused_on_every_rank() {
    let checked = of(ScheduleKind::OneFOneB, 2, 1, 2);
    let outcomes = Ranks::new(3).timeout(TIMEOUT).outcomes(cpu, |comm| {
        pipelined(&comm, PipelineModel::new(checked.clone(), Vec::new()), TrainingConfig::default()).map(|_| ())
    });
    for outcome in outcomes.unwrap() {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains("the schedule is for 2 ranks: 3 ranks are no whole number"), "{error}");
    }
}
