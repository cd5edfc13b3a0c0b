//! Pretrained decoders in the stages of pipelines: what they compute, and how they train, is what the whole model does.

use std::{collections::BTreeMap, slice::from_ref};

use autograd::Var;
use distributed::{
    checkpoint::{CheckpointReader, Folder},
    comm::{Comm, Communicator, Ranks},
    context_parallel::ContextExchange,
    mesh::{AsMesh, Mesh},
    pipeline::{Checked, Limits, Lowering, MicroBatches, PipeShape, PipelineModel, ScheduleKind},
    plan::{Axis, ParallelPlan},
    train::{Loss, TrainStep},
    zero::ZeroStage,
};
use models::{Decoder, DecoderInputs, Lora, LoraConfig, LoraTargets, Pretrained};
use nn::{
    Init, ModuleExt, Stage,
    parallel::{VocabularyLoss, set_scores},
};
use numcore::{
    Result, Runtime, Tensor,
    fused::{CrossEntropyOptions, Reduction},
};
use optim::SgdConfig;
use runtime_cpu::Cpu;

use crate::common::*;

fn summed() -> VocabularyLoss {
    let cross_entropy = CrossEntropyOptions { reduction: Reduction::Sum, ..Default::default() };
    VocabularyLoss { cross_entropy, ..Default::default() }
}

/// Four sequences of eight tokens each, and the tokens that follow.
fn batch(rt: &Cpu) -> [Tensor<Cpu>; 2] {
    [0, 1].map(|from| {
        let ids: Vec<i64> = (0..32).map(|k| (k * k + 5 * k / 3 + from * 7) % 40).collect();
        Tensor::from_slice(rt, [4, 8], &ids).unwrap()
    })
}

fn run(stages: &[Decoder<Cpu>], inputs: Vec<V>) -> Result<Vec<V>> {
    stages.iter().try_fold(inputs, |values, stage| stage.forward_values(&values))
}

#[test]
fn stages_compute_what_the_model_computes() {
    let [ids, _] = batch(&cpu()).map(Var::new);
    let numbers = |rows: &[i64]| Var::new(Tensor::from_slice(&cpu(), [1, 8], rows).unwrap());
    let row = Var::new(numcore::ops::ViewOps::narrow(&ids.value().unwrap(), 0, 1, 1).unwrap());
    let (positions, segments) = (numbers(&[0, 1, 2, 0, 1, 2, 3, 4]), numbers(&[0, 0, 0, 1, 1, 1, 1, 1]));
    for name in all_decoders() {
        let model = decoder(name);
        let packed = DecoderInputs { positions: Some(&positions), segments: Some(&segments), cache: None };
        let whole = [
            nn::Forward::forward(&model, &ids).unwrap().value().unwrap(),
            model.forward_with(&row, packed).unwrap().value().unwrap(),
        ];
        for count in 1..=model.config().layers + 2 {
            let names = |module: &dyn nn::Module<Cpu>| module.named_parameters().into_iter().map(|(name, _)| name);
            let stages = decoder(name).split(count).unwrap();
            let mut named: Vec<_> = stages.iter().flat_map(|stage| names(stage)).collect();
            if model.config().tied && count > 1 {
                assert_eq!(named.pop().unwrap(), "embed_tokens.weight", "the last stage's copy");
            }
            assert!(named.into_iter().eq(names(&model)), "{name} in {count}");
            let plain = run(&stages, vec![ids.clone()]).unwrap();
            let packed = run(&stages, vec![row.clone(), positions.clone(), segments.clone()]).unwrap();
            for (got, want) in [plain, packed].iter().zip(&whole) {
                assert_eq!(got.len(), 1);
                close(&format!("{name} in {count}"), &got[0].value().unwrap(), want, 0.0);
            }
        }
    }
}

#[test]
fn stages_say_what_they_cannot() {
    let stages = decoder("llama").split(2).unwrap();
    let [ids, _] = batch(&cpu()).map(Var::new);
    let x = stages[0].forward_values(from_ref(&ids)).unwrap();
    let state = |result: Result<()>| result.unwrap_err().to_string();
    for (error, has) in [
        (state(nn::Forward::forward(&stages[0], &ids).map(drop)), "no projection to logits"),
        (state(nn::Forward::forward(&stages[1], &x[0]).map(drop)), "no embeddings"),
        (state(stages[0].forward_values(&x).map(drop)), "tokens must be [B, T]"),
        (state(stages[1].forward_values(from_ref(&ids)).map(drop)), "a later stage takes [B, T, C]"),
        (state(stages[0].forward_values(&[ids.clone(), ids.clone()]).map(drop)), "number of values is 2"),
        (state(stages[0].save_pretrained(Scratch::new().0.join("stage"))), "is a stage"),
        (state(decoder("llama").split(0).map(drop)), "number of stages is 0"),
        (state(save_of_a_stage()), "q_proj`: is of a stage that this rank does not have"),
    ] {
        assert!(error.contains(has), "{error}");
    }
}

/// Saves the adapters of a model of which this rank has the last stage alone.
fn save_of_a_stage() -> Result<()> {
    let (model, folder) = (decoder("llama"), Scratch::new());
    let targets = LoraTargets::Names(vec!["q_proj".into()]);
    let lora = Lora::new(&model, &init(), LoraConfig { target_modules: targets, ..LoraConfig::default() })?;
    let mut stages = model.split(2)?;
    lora.save(&folder.0)?;
    stages.remove(0);
    lora.save(&folder.0)
}

/// How a model is trained: the axes of the ranks, and what is sharded.
struct Case {
    name: &'static str,
    axes: &'static [(Axis, usize)],
    zero: Option<ZeroStage>,
    lora: bool,
    scores: bool,
    kind: ScheduleKind,
}

impl Case {
    const fn of(name: &'static str, axes: &'static [(Axis, usize)], zero: Option<ZeroStage>) -> Self {
        Case { name, axes, zero, lora: false, scores: false, kind: ScheduleKind::OneFOneB }
    }

    /// The stages of a rank.
    fn stages_per_rank(&self) -> usize {
        if matches!(self.kind, ScheduleKind::Zbv | ScheduleKind::InterleavedZeroBubble) { 2 } else { 1 }
    }

    fn micro_batches(&self) -> usize {
        if matches!(self.kind, ScheduleKind::ZbH2 | ScheduleKind::Zbv) { 4 } else { 2 }
    }

    fn checked(&self, ranks: usize) -> Result<Checked> {
        let (stages_per_rank, micro_batches) = (self.stages_per_rank(), self.micro_batches());
        let shape = PipeShape { ranks, stages_per_rank, micro_batches };
        self.kind.generate(shape)?.lower(Lowering::default())?.check(Limits::default())
    }

    /// Read lazily.
    fn model(&self, rt: &Cpu) -> Result<Decoder<Cpu>> {
        let init = Init::new(rt, 3).lazily();
        let model = Decoder::from_pretrained(reference(self.name), &init)?;
        if self.scores {
            set_scores(&model, |_| learned_scores(&init, model.config().heads))?;
        }
        Ok(model)
    }

    fn adapted(&self, model: &Decoder<Cpu>) -> Result<Option<Lora<Cpu>>> {
        let targets = LoraTargets::Names(["q_proj", "down_proj"].map(Into::into).into());
        let config = LoraConfig { target_modules: targets, rank: 2, ..LoraConfig::default() };
        let init = Init::new(model.parts.start()?.tokens.weight.leaf().runtime(), 9).lazily();
        self.lora.then(|| Lora::new(model, &init, config)).transpose()
    }

    fn sgd() -> SgdConfig {
        SgdConfig { lr: 0.1, momentum: 0.5, ..Default::default() }
    }

    /// Losses and norms of three steps on one rank, and the parameters after them.
    fn alone(&self) -> (Vec<f64>, Vec<(String, Tensor<Cpu>)>) {
        let rt = cpu();
        let model = self.model(&rt).unwrap();
        let _lora = self.adapted(&model).unwrap();
        let comm = distributed::comm::NoOpCommunicator::new(&rt);
        let mut step =
            TrainStep::builder(&comm.as_mesh(), &model).optimizer(Case::sgd()).max_norm(0.5).build().unwrap();
        let ([x, y], mut seen) = (batch(&rt).map(Var::new), Vec::new());
        for _ in 0..3 {
            let metrics = step.step(|_| {
                let logits = nn::Forward::forward(&model, &x)?;
                Loss::sum(model.next_token_loss(&logits, &y, &summed())?, 32.0)
            });
            let metrics = metrics.unwrap();
            seen.extend([metrics.loss().unwrap(), metrics.grad_norm().unwrap().unwrap()]);
        }
        (seen, model.state_dict().unwrap())
    }

    /// The same in stages; saves a checkpoint.
    fn staged(&self, comm: &Comm<Cpu>, folder: &Folder) -> Result<Vec<f64>> {
        let mesh = Mesh::new(comm, ParallelPlan::of(self.axes.to_vec())?)?;
        let (rt, pipe) = (comm.runtime(), mesh.axis(Axis::Pipe));
        let model = self.model(rt)?;
        let _lora = self.adapted(&model)?;
        let all = model.num_parameters().total;
        let buffers = model.named_buffers().into_iter().map(|(_, b)| b.spec().shape.numel() * b.spec().dtype.size());
        let buffers: usize = buffers.sum();
        let (stages, loss) = model.split_with_loss(pipe.size() * self.stages_per_rank(), summed())?;
        assert_eq!(rt.memory().total.live, buffers, "no parameter was read yet");
        let own = stages[pipe.rank()].num_parameters().total;
        assert!(own < all);
        let plan = Decoder::<Cpu>::tensor_plan();
        let model = PipelineModel::on(pipe.rank(), self.checked(pipe.size())?, stages)
            .loss(move |y, t| Loss::sum(loss.of(&y[0], &t[0])?, t[0].dims().iter().product::<usize>() as f64))
            .parallelize(&mesh, &plan)?
            .context_parallel(&mesh, ContextExchange::AllGather)?;
        let builder = TrainStep::builder(&mesh, model).optimizer(Case::sgd()).max_norm(0.5);
        let rows = 4 / mesh.batch().size();
        let inputs = batch(rt).map(|t| numcore::ops::ViewOps::narrow(&t, 0, mesh.batch().rank() * rows, rows).unwrap());
        let mut step = builder.zero(self.zero.unwrap_or(ZeroStage::None)).build()?;
        let mut seen = Vec::new();
        for _ in 0..3 {
            let metrics = step.step(|_| MicroBatches::split(&inputs[..1], &inputs[1..], self.micro_batches()))?;
            seen.extend([metrics.loss()?, metrics.grad_norm()?.unwrap_or(0.0)]);
        }
        step.save(folder, &BTreeMap::new())?;
        Ok(seen)
    }

    fn check(&self) {
        let (seen, weights) = self.alone();
        let scratch = Scratch::new();
        let ranks = self.axes.iter().map(|(_, size)| size).product();
        let run = Ranks::new(ranks).run(|_| Ok(cpu()), |comm| self.staged(&comm, &Folder::new(&scratch.0)));
        for got in run.unwrap_or_else(|error| panic!("{} {:?}: {error}", self.name, self.axes)) {
            for (a, b) in got.iter().zip(&seen) {
                assert!((a - b).abs() <= 1e-5 * b.abs(), "{} {:?}: {got:?} and {seen:?}", self.name, self.axes);
            }
        }
        // The checkpoint is the whole model's.
        let whole = self.model(&cpu()).unwrap();
        let _lora = self.adapted(&whole).unwrap();
        let folder = Folder::new(&scratch.0);
        let mut reader = CheckpointReader::open(folder.step(folder.latest().unwrap().unwrap())).unwrap();
        reader.load_parameters(&whole, |name| Some(name.to_owned())).unwrap();
        let before = self.model(&cpu()).unwrap();
        let _lora = self.adapted(&before).unwrap();
        let mut trained = 0;
        for ((name, a), (b, old)) in
            whole.state_dict().unwrap().iter().zip(weights.iter().map(|(_, t)| t).zip(before.state_dict().unwrap()))
        {
            close(name, a, b, 1e-5);
            trained += usize::from(a.to_bytes().unwrap() != old.1.to_bytes().unwrap());
        }
        assert!(trained >= 4, "{} {:?} trained {trained}", self.name, self.axes);
    }
}

const TWO: &[(Axis, usize)] = &[(Axis::Pipe, 2)];
const REPLICAS: &[(Axis, usize)] = &[(Axis::Pipe, 2), (Axis::Data, 2)];
const TENSOR: &[(Axis, usize)] = &[(Axis::Pipe, 2), (Axis::Tensor, 2)];
const SHARDS: &[(Axis, usize)] = &[(Axis::Pipe, 2), (Axis::Shard, 2)];
const CONTEXT: &[(Axis, usize)] = &[(Axis::Pipe, 2), (Axis::Context, 2)];
const ALL: &[(Axis, usize)] = &[(Axis::Pipe, 2), (Axis::Shard, 2), (Axis::Tensor, 2)];

#[test]
fn a_pretrained_llama_trains_in_stages() {
    for zero in [None, Some(ZeroStage::Parameters)] {
        Case::of("llama", TWO, zero).check();
        Case::of("llama", SHARDS, zero.or(Some(ZeroStage::Optimizer))).check();
        Case::of("llama", ALL, zero.or(Some(ZeroStage::Gradients))).check();
    }
    Case::of("llama", REPLICAS, None).check();
    Case::of("llama", TENSOR, None).check();
    Case::of("llama", CONTEXT, None).check();
}

#[test]
fn every_family_trains_in_stages() {
    for name in all_decoders() {
        Case::of(name, TWO, None).check();
    }
    Case::of("qwen2", ALL, Some(ZeroStage::Parameters)).check();
    Case::of("gpt2", SHARDS, Some(ZeroStage::Gradients)).check();
}

#[test]
fn adapters_train_in_stages() {
    Case { lora: true, ..Case::of("llama", TWO, None) }.check();
    Case { lora: true, ..Case::of("qwen3", SHARDS, Some(ZeroStage::Parameters)) }.check();
}

/// Learned arguments of scores are parameters of their stages. Their gradients come with those of inputs or later, where
/// a schedule splits them.
#[test]
fn programs_of_scores_train_in_stages() {
    let case = |name, axes, zero, kind| Case { scores: true, kind, ..Case::of(name, axes, zero) }.check();
    for kind in [ScheduleKind::OneFOneB, ScheduleKind::ZbH1, ScheduleKind::ZbH2, ScheduleKind::Zbv] {
        case("llama", TWO, None, kind);
        case("llama", TENSOR, None, kind);
    }
    case("gpt2", TENSOR, None, ScheduleKind::InterleavedZeroBubble);
    case("llama", CONTEXT, None, ScheduleKind::ZbH1);
    case("llama", ALL, Some(ZeroStage::Gradients), ScheduleKind::ZbH1);
    case("deepseek_v3", TENSOR, None, ScheduleKind::ZbH1);
}
