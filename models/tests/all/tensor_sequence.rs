//! Decoders cut over ranks whose values between layers are cut along the sequence: steps are those of one rank, also of
//! adapters over weights in four bits.

use autograd::{Var, no_grad};
use distributed::{
    comm::{Comm, Ranks},
    context_parallel::ContextExchange,
    mesh::Mesh,
    pipeline::{Limits, Lowering, MicroBatches, PipeShape, PipelineModel, ScheduleKind},
    plan::{Axis, ParallelPlan},
    train::{Loss, TrainStep},
    zero::ZeroStage,
};
use models::{
    ConfigFields, Decoder, DecoderConfig, DecoderInputs, DecoderMixtures, Lora, LoraConfig, LoraTargets,
    QuantizeConfig, quantize,
};
use nn::{Init, Module, ModuleExt, Param, Stage, moe::MoeConfig, parallel::VocabularyLoss};
use numcore::{
    DType, Result, Tensor,
    fused::{CrossEntropyOptions, Reduction},
    ops::ViewOps,
};
use optim::AdamWConfig;
use runtime_cpu::Cpu;

use crate::common::*;

#[derive(Clone, Copy, Debug)]
struct Case {
    family: &'static str,
    axes: &'static [(Axis, usize)],
    zero: ZeroStage,
    /// Whether rows are packed from several documents.
    packed: bool,
    /// Whether adapters are trained, over weights in four bits.
    adapters: bool,
}

const fn case(family: &'static str, axes: &'static [(Axis, usize)]) -> Case {
    Case { family, axes, zero: ZeroStage::None, packed: false, adapters: false }
}

impl Case {
    fn size(&self, axis: Axis) -> usize {
        self.axes.iter().find(|(of, _)| *of == axis).map_or(1, |(_, size)| *size)
    }

    /// Tokens of a row: three on each rank.
    fn tokens(&self) -> usize {
        3 * self.size(Axis::Tensor) * self.size(Axis::Context)
    }

    /// Twelve heads, of which ranks may share those of keys.
    fn model(&self, comm: &Comm<Cpu>) -> Result<Decoder<Cpu>> {
        let config = DecoderConfig::read(&ConfigFields::open(&reference(self.family))?)?;
        // Fused projections have whole heads of keys on each rank.
        let shared = if self.family == "phi3" { 4 } else { 2 };
        let kv_heads = if self.family == "gpt2" { 12 } else { [12, 4, 4, 3, shared][self.size(Axis::Tensor)] };
        let is_latent = config.options.latent.is_some();
        let (kv_heads, head_dim) = if is_latent { (12, config.head_dim) } else { (kv_heads, 2) };
        // A mixture needs all of a sequence.
        let mixtures = config.mixtures.clone().map(|DecoderMixtures { mixture, .. }| DecoderMixtures {
            mixture: MoeConfig { width: 24, ..mixture },
            layers: vec![false; config.layers],
        });
        let mut options = config.options.clone();
        // Four bits are two to a byte, which cuts keep together.
        options.latent.iter_mut().for_each(|latent| latent.rank = 8);
        options.mtp_layers = 0;
        let sizes = DecoderConfig {
            vocab: 41,
            width: 24,
            heads: 12,
            kv_heads,
            head_dim,
            hidden: 24,
            mixtures,
            options,
            ..config
        };
        Decoder::new(&Init::new(comm.runtime(), 5).dtype(DType::F64).lazily(), sizes)
    }

    /// Tokens and targets of these rows; where they are packed, positions and documents too.
    fn rows(&self, rt: &Cpu, step: usize, rows: std::ops::Range<usize>) -> Result<[Tensor<Cpu>; 4]> {
        let t = self.tokens();
        let of = |value: &dyn Fn(usize) -> usize| {
            let all: Vec<i64> = (rows.start * t..rows.end * t).map(|i| value(i) as i64).collect();
            Tensor::from_slice(rt, [rows.len(), t], &all)
        };
        let second = |i: usize| i % t >= t / 3;
        Ok([
            of(&|i| (i * 7 + i / 3 + step * 5) % 41)?,
            of(&|i| (i * 5 + i / 2 + step) % 41)?,
            of(&|i| if second(i) { i % t - t / 3 } else { i % t })?,
            of(&|i| usize::from(second(i)))?,
        ])
    }

    /// Losses and norms of three steps, and the loss of an evaluation after them.
    fn train(&self, comm: &Comm<Cpu>, axes: &[(Axis, usize)]) -> Result<Vec<f64>> {
        let mesh = Mesh::new(comm, ParallelPlan::of(axes.to_vec())?)?;
        let (rt, pipe, each) = (comm.runtime(), mesh.axis(Axis::Pipe), 4 / mesh.batch().size());
        let own = mesh.batch().rank() * each..(mesh.batch().rank() + 1) * each;
        let plan = Decoder::<Cpu>::tensor_plan().sequence_parallel(true);
        let cross_entropy = CrossEntropyOptions { reduction: Reduction::Sum, ..Default::default() };
        let summed = VocabularyLoss { cross_entropy, ..Default::default() };
        let weight = (each * self.tokens()) as f64;
        let model = self.model(comm)?;
        let lora = self.adapters.then(|| adapted(&model, &Init::new(rt, 8).dtype(DType::F64))).transpose()?;
        let adamw = AdamWConfig { lr: 0.02, ..Default::default() };
        let mut seen = Vec::new();
        if pipe.size() > 1 {
            let shape = PipeShape { ranks: 2, stages_per_rank: 1, micro_batches: 2 };
            let checked = ScheduleKind::OneFOneB.generate(shape)?.lower(Lowering::default())?;
            let (stages, loss) = model.split_with_loss(2, summed)?;
            let frozen = four_bits(&stages[pipe.rank()]);
            let model = PipelineModel::on(pipe.rank(), checked.check(Limits::default())?, stages)
                .loss(move |y, t| Loss::sum(loss.of(&y[0], &t[0])?, weight / 2.0))
                .parallelize(&mesh, &plan)?
                .context_parallel(&mesh, ContextExchange::AllGather)?;
            let mut step = TrainStep::builder(&mesh, model).optimizer(adamw).max_norm(0.3).zero(self.zero).build()?;
            for k in 0..3 {
                let [x, y, positions, segments] = self.rows(rt, k, own.clone())?;
                let inputs = if self.packed { vec![x, positions, segments] } else { vec![x] };
                let metrics = step.step(|_| MicroBatches::split(&inputs, std::slice::from_ref(&y), 2))?;
                seen.extend([metrics.loss()?, metrics.grad_norm()?.unwrap_or(0.0)]);
                assert!(frozen.iter().all(|weight| !self.adapters || !weight.leaf().is_resident()), "dequantised");
            }
            return Ok(seen);
        }
        mesh.parallelize(&model, &plan)?;
        mesh.context_parallel(&model, ContextExchange::AllGather)?;
        let trained: &dyn Module<Cpu> = lora.as_ref().map_or(&model, |lora| lora);
        let mut step = TrainStep::builder(&mesh, trained).optimizer(adamw).max_norm(0.3).zero(self.zero).build()?;
        for k in 0..4 {
            let [x, y, positions, segments] = self.rows(rt, k, own.clone())?.map(Var::new);
            let inputs = if self.packed { vec![x, positions, segments] } else { vec![x] };
            let loss = || model.next_token_loss(&model.forward_values(&inputs)?[0], &y, &summed);
            if k == 3 {
                let sum = no_grad(loss)?.value()?;
                seen.push(sum.to_f64s()?[0]);
                break;
            }
            let metrics = step.step(|_| Loss::sum(loss()?, weight))?;
            seen.extend([metrics.loss()?, metrics.grad_norm()?.unwrap_or(0.0)]);
        }
        Ok(seen)
    }

    fn check(&self) {
        let run = |axes: &[(Axis, usize)]| {
            let ranks = axes.iter().map(|(_, size)| size).product();
            Ranks::new(ranks)
                .run(|_| Ok(cpu()), |comm| self.train(&comm, axes))
                .unwrap_or_else(|e| panic!("{self:?}: {e}"))
        };
        let one = run(&[(Axis::Data, 1)]).remove(0);
        // An evaluation's loss is a rank's own, where examples or sequences are shared out.
        let alike = if self.axes.len() == 1 { 7 } else { 6 };
        for (rank, seen) in run(self.axes).into_iter().enumerate() {
            for (k, (a, b)) in seen.iter().zip(&one).take(alike).enumerate() {
                assert!((a - b).abs() <= 1e-11 * b.abs(), "{self:?}, rank {rank}, {k}: {seen:?} and {one:?}");
            }
        }
    }
}

/// Stores the layers of a model in four bits, and puts an adapter into each.
fn adapted(model: &Decoder<Cpu>, init: &Init<Cpu>) -> Result<Lora<Cpu>> {
    quantize(model, &QuantizeConfig::default())?;
    let target_modules = LoraTargets::AllLinear;
    let lora = Lora::new(model, init, LoraConfig { target_modules, rank: 3, ..LoraConfig::default() })?;
    // B begins with zeros, behind which nothing shows.
    for (name, parameter) in lora.named_parameters().iter().filter(|(name, _)| name.contains("lora_B")) {
        let shape = parameter.shape();
        let values = (0..shape.numel()).map(|i| ((i + name.len()) % 7) as f64 * 0.01 - 0.03);
        parameter.set(Tensor::from_slice(init.runtime(), shape, &values.collect::<Vec<_>>())?)?;
    }
    Ok(lora)
}

/// The frozen weights of layers with adapters.
fn four_bits(stage: &Decoder<Cpu>) -> Vec<Param<Cpu>> {
    let named = stage.named_parameters();
    named.into_iter().filter(|(name, p)| name.contains("_proj.weight") && !p.requires_grad()).map(|(_, p)| p).collect()
}

#[test]
fn every_family_trains_as_on_one_rank() {
    for family in ["gpt2", "llama", "qwen2", "qwen3", "olmo2", "phi3", "smollm3", "gemma2", "gemma3", "deepseek_v3"] {
        for axes in [&[(Axis::Tensor, 2)], &[(Axis::Tensor, 3)], &[(Axis::Tensor, 4)]] {
            case(family, axes).check();
        }
    }
}

#[test]
fn so_it_does_in_stages_and_beside_other_axes() {
    case("llama", &[(Axis::Pipe, 2), (Axis::Tensor, 2)]).check();
    case("qwen3", &[(Axis::Pipe, 2), (Axis::Tensor, 3)]).check();
    case("gpt2", &[(Axis::Pipe, 2), (Axis::Tensor, 4)]).check();
    case("gemma2", &[(Axis::Pipe, 2), (Axis::Tensor, 2)]).check();
    case("deepseek_v3_plain", &[(Axis::Pipe, 2), (Axis::Tensor, 3)]).check();
    case("deepseek_v3", &[(Axis::Context, 2), (Axis::Tensor, 2)]).check();
    case("llama", &[(Axis::Context, 2), (Axis::Tensor, 2)]).check();
    case("gpt2", &[(Axis::Context, 2), (Axis::Tensor, 3)]).check();
    case("llama", &[(Axis::Pipe, 2), (Axis::Context, 2), (Axis::Tensor, 2)]).check();
    let sharded = case("qwen2", &[(Axis::Shard, 2), (Axis::Tensor, 3)]);
    Case { zero: ZeroStage::Parameters, ..sharded }.check();
}

#[test]
fn so_it_does_on_packed_rows() {
    Case { packed: true, ..case("llama", &[(Axis::Tensor, 3)]) }.check();
    Case { packed: true, ..case("gpt2", &[(Axis::Pipe, 2), (Axis::Tensor, 2)]) }.check();
}

#[test]
fn so_do_adapters_over_weights_in_four_bits() {
    let adapters = |family, axes| Case { adapters: true, ..case(family, axes) };
    adapters("gpt2", &[(Axis::Tensor, 2)]).check();
    adapters("llama", &[(Axis::Tensor, 3)]).check();
    adapters("qwen3", &[(Axis::Tensor, 4)]).check();
    adapters("phi3", &[(Axis::Tensor, 2)]).check();
    adapters("deepseek_v3", &[(Axis::Tensor, 2)]).check();
    adapters("llama", &[(Axis::Pipe, 2), (Axis::Tensor, 2)]).check();
    adapters("qwen2", &[(Axis::Pipe, 2), (Axis::Tensor, 3)]).check();
    Case { zero: ZeroStage::Parameters, ..adapters("llama", &[(Axis::Shard, 2), (Axis::Tensor, 2)]) }.check();
}

#[test]
fn what_a_cut_sequence_cannot_do_is_an_error() {
    let outcome = Ranks::new(2).run(
        |_| Ok(cpu()),
        |comm| {
            let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Tensor, 2)])?)?;
            let plan = Decoder::<Cpu>::tensor_plan().sequence_parallel(true);
            let case = case("llama", &[(Axis::Tensor, 2)]);
            let model = case.model(&comm)?;
            mesh.parallelize(&model, &plan)?;
            let [x, ..] = case.rows(comm.runtime(), 0, 0..1)?.map(Var::new);
            let mut cache = model.cache(8, vec![0]);
            let inputs = DecoderInputs { cache: Some(&mut cache), ..Default::default() };
            let cached = no_grad(|| model.forward_with(&x, inputs)).map(drop).unwrap_err().to_string();
            let odd = model.forward_with(&x.narrow(1, 0, 5)?, DecoderInputs::default()).map(drop).unwrap_err();
            let mixture = Decoder::new(
                &Init::new(comm.runtime(), 0).lazily(),
                DecoderConfig::read(&ConfigFields::open(&reference("mixtral"))?)?,
            )?;
            let mixture = mesh.parallelize(&mixture, &plan).unwrap_err().to_string();
            Ok([cached, odd.to_string(), mixture])
        },
    );
    for [cached, odd, mixture] in outcome.unwrap() {
        assert!(cached.contains("a plan without `sequence_parallel`"), "{cached}");
        assert!(odd.contains("5 tokens cannot be shared out among 2 ranks: pad them to 6"), "{odd}");
        assert!(mixture.contains("layers.0.mlp.gate.weight"), "{mixture}");
    }
}
