//! Training of SmolLM2 from a file of four bits, on many ranks: the losses are those of one rank and of transformers.
//!
//! It reads the folder of `conformance/against/real_models.py`:
//! `cargo run --release -p weftgrad-models --features text --example real_training -- FOLDER`

use std::{
    fs,
    path::{Path, PathBuf},
};

use autograd::Var;
use comm::{Comm, Communicator, Ranks};
use distributed::{
    mesh::Mesh,
    pipeline::{Limits, Lowering, MicroBatches, PipeShape, PipelineModel, ScheduleKind},
    plan::{Axis, ParallelPlan},
    train::{Loss, TrainStep},
    zero::ZeroStage,
};
use models::{Decoder, Lora, LoraConfig, LoraTargets, Pretrained, QuantizeConfig, quantize};
use nn::{Forward, Init, parallel::VocabularyLoss};
use numcore::{
    Error, Result, Tensor,
    fused::{CrossEntropyOptions, Reduction},
    ops::ViewOps,
    safetensors,
};
use optim::AdamWConfig;
use runtime_cpu::Cpu;
use serde_json::Value;

const STEPS: usize = 3;
/// The rows of a step, and the tokens of a row.
const ROWS: usize = 4;
const TOKENS: usize = 64;
const MICRO_BATCHES: usize = 2;
/// SmolLM2 has three heads of keys, so it is cut over three ranks.
const LAYOUTS: [(&str, Axis, usize); 4] = [
    ("one rank", Axis::Data, 1),
    ("ZeRO 3 on 2 ranks", Axis::Data, 2),
    ("tensor 3", Axis::Tensor, 3),
    ("2 stages", Axis::Pipe, 2),
];

/// The weights that a run trains, with its learning rate.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Trained {
    All,
    Adapters,
    AdaptersOverFourBits,
}

fn main() -> Result<()> {
    let Some(folder) = std::env::args().nth(1).map(PathBuf::from) else {
        return Err(Error::argument("real_training", "which folder has the model and what transformers computed?"));
    };
    let path = folder.join("facts.json");
    let text = fs::read(&path).map_err(|e| Error::io(&path, e))?;
    let facts: Value = serde_json::from_slice(&text).map_err(|e| Error::format("facts.json", e.to_string()))?;
    let theirs = facts["smollm2"]["training"].as_array().into_iter().flatten().filter_map(Value::as_f64).collect();
    for (trained, reference) in
        [(Trained::All, Some(theirs)), (Trained::Adapters, None), (Trained::AdaptersOverFourBits, None)]
    {
        let mut reference: Option<Vec<f64>> = reference;
        for (name, axis, size) in LAYOUTS {
            let run = |comm: Comm<Cpu>| losses(&comm, &folder, trained, (axis, size));
            let losses = Ranks::new(size).run(|_| Ok(Cpu::with_threads(1)), run)?.swap_remove(0);
            let reference = reference.get_or_insert_with(|| losses.clone());
            let distances: Vec<f64> = losses.iter().zip(&*reference).map(|(a, b)| (a / b - 1.0).abs()).collect();
            let apart = distances.iter().copied().fold(0.0, f64::max);
            let are_equal = distances.len() == STEPS && distances.iter().all(|distance| *distance <= 1e-5);
            let holds = are_equal && losses[STEPS - 1] < losses[0];
            println!("{} {trained:?}, {name}: {losses:.6?}, {apart:.1e} apart", if holds { "ok " } else { "NO " });
            if !holds {
                return Err(Error::state(
                    "real_training",
                    format!("{trained:?}, {name}: {losses:?}, not {reference:?}"),
                ));
            }
        }
    }
    Ok(())
}

/// The losses of some steps on a rank.
fn losses(comm: &Comm<Cpu>, folder: &Path, trained: Trained, (axis, size): (Axis, usize)) -> Result<Vec<f64>> {
    let mesh = Mesh::new(comm, ParallelPlan::of([(axis, size)])?)?;
    let init = Init::new(comm.runtime(), 1);
    let model = Decoder::from_pretrained(folder.join("smollm2.gguf"), &init.clone().lazily())?;
    if trained == Trained::AdaptersOverFourBits {
        quantize(&model, &QuantizeConfig::default())?;
    }
    let config = LoraConfig { rank: 8, target_modules: LoraTargets::AllLinear, ..LoraConfig::default() };
    let lora = (trained != Trained::All).then(|| Lora::new(&model, &init, config)).transpose()?;
    let adamw = AdamWConfig { lr: if lora.is_some() { 1e-3 } else { 1e-5 }, weight_decay: 0.0, ..Default::default() };
    let batch = rows(folder, comm, mesh.axis(Axis::Data))?;
    let weight = batch[0].shape().numel() as f64;
    if axis == Axis::Pipe {
        let stages = stages(&mesh, model)?;
        let mut step = TrainStep::builder(&mesh, stages).optimizer(adamw).build()?;
        let mut next = |_| step.step(|_| MicroBatches::split(&batch[..1], &batch[1..], MICRO_BATCHES))?.loss();
        return (0..STEPS).map(&mut next).collect();
    }
    mesh.parallelize(&model, &Decoder::<Cpu>::tensor_plan())?;
    let builder = match &lora {
        Some(lora) => TrainStep::builder(&mesh, lora),
        None => TrainStep::builder(&mesh, &model),
    };
    let zero = if axis == Axis::Data && size > 1 { ZeroStage::Parameters } else { ZeroStage::None };
    let mut step = builder.optimizer(adamw).zero(zero).build()?;
    let loss = || {
        let [tokens, targets] = batch.clone().map(Var::new);
        Loss::sum(model.next_token_loss(&model.forward(&tokens)?, &targets, &summed())?, weight)
    };
    (0..STEPS).map(|_| step.step(|_| loss())?.loss()).collect()
}

/// Tokens and next tokens of the rows of a rank, `[B, T]`.
fn rows(folder: &Path, comm: &Comm<Cpu>, batch: &Comm<Cpu>) -> Result<[Tensor<Cpu>; 2]> {
    let all = safetensors::load(folder.join("smollm2.safetensors"), comm.runtime())?;
    let corpus = all.into_iter().find(|(name, _)| name == "corpus").map(|(_, tensor)| tensor);
    let corpus = corpus.ok_or_else(|| Error::format("smollm2.safetensors", "it has no corpus"))?;
    let each = ROWS / batch.size();
    let own = corpus.narrow(0, batch.rank() * each, each)?;
    Ok([own.narrow(1, 0, TOKENS)?.contiguous()?, own.narrow(1, 1, TOKENS)?.contiguous()?])
}

fn stages(mesh: &Mesh<Cpu>, model: Decoder<Cpu>) -> Result<PipelineModel<Cpu>> {
    let pipe = mesh.axis(Axis::Pipe);
    let shape = PipeShape { ranks: pipe.size(), stages_per_rank: 1, micro_batches: MICRO_BATCHES };
    let schedule = ScheduleKind::OneFOneB.generate(shape)?.lower(Lowering::default())?.check(Limits::default())?;
    let (stages, loss) = model.split_with_loss(pipe.size(), summed())?;
    let model = PipelineModel::on(pipe.rank(), schedule, stages);
    Ok(model.loss(move |y, t| Loss::sum(loss.of(&y[0], &t[0])?, t[0].dims().iter().product::<usize>() as f64)))
}

fn summed() -> VocabularyLoss {
    let cross_entropy = CrossEntropyOptions { reduction: Reduction::Sum, ..Default::default() };
    VocabularyLoss { cross_entropy, ..Default::default() }
}
