//! Finetunes a chat model on a JSON Lines file of conversations, on several ranks. It trains adapters and freezes the
//! model. The result is a folder that `generate --adapter` and peft load.
#![forbid(unsafe_code)]

use std::{fs, path::PathBuf, process::ExitCode};

use clap::Parser;
use weftgrad::{
    AnyRuntime,
    data::{
        Stack, ToDevice,
        pack::{PackedBatch, PackedRow},
        sources::Tokenizer,
    },
    distributed::{
        comm::{Comm, Communicator},
        sampler::shard_batches,
        train::{Loss, TrainStep},
    },
    fused::{CrossEntropyOptions, Reduction},
    models::{
        ChatTemplate, Conversation, Decoder, DecoderInputs, Lora, LoraConfig, LoraTargets, Pretrained, SaveOptions,
        pack_examples,
    },
    nn::Init,
    optim::{AdamWConfig, ParamGroups},
    prelude::*,
};
use weftgrad_examples::{
    Outcome,
    options::{self, positive},
    ranks::Joined,
};

/// Train an adapter on conversations.
#[derive(Debug, Parser)]
#[command(name = "finetune", version)]
struct Options {
    /// The folder of a chat model.
    folder: PathBuf,
    /// The conversations, a JSON object with `messages` on each line.
    #[arg(long)]
    data: PathBuf,
    /// Folder to write the adapter to.
    #[arg(long)]
    out: PathBuf,
    /// Ranks.
    #[arg(long, default_value = "2", value_parser = positive)]
    ranks: usize,
    /// Steps.
    #[arg(long, default_value = "50", value_parser = positive)]
    steps: usize,
    /// Rows in a step, of all ranks together.
    #[arg(long, default_value = "4", value_parser = positive)]
    batch: usize,
    /// Tokens in a row.
    #[arg(long, default_value = "512", value_parser = positive)]
    context: usize,
    /// The rank of the adapters' matrices; their alpha is twice that.
    #[arg(long, default_value = "8", value_parser = positive)]
    rank: usize,
    /// The learning rate; that of the B matrices is 16 times as large (LoRA+).
    #[arg(long, default_value = "1e-4")]
    lr: f64,
    #[command(flatten)]
    joined: Joined,
}

fn main() -> ExitCode {
    options::main(run)
}

fn run(options: &Options) -> Outcome<()> {
    let rows = rows(options)?;
    let ranks = options.joined.ranks(options.ranks)?;
    let losses = ranks.run(|comm: Comm<AnyRuntime>| train(&comm, options, &rows))?;
    if ranks.is_rank_zero() {
        println!("{} rows; loss {:.4} at first, {:.4} at last", rows.len(), losses[0], losses[losses.len() - 1]);
        println!("the adapter is in {}", options.out.display());
    }
    Ok(())
}

/// The conversations as packed rows.
fn rows(options: &Options) -> Outcome<Vec<PackedRow>> {
    let tokenizer = Tokenizer::open(options.folder.join("tokenizer.json"))?;
    let template = ChatTemplate::of_folder(&options.folder)?;
    let mut examples = Vec::new();
    for (at, line) in fs::read_to_string(&options.data)?.lines().enumerate().filter(|(_, line)| !line.trim().is_empty())
    {
        let example = Conversation::from_json(line).and_then(|talk| template.encode(&tokenizer, &talk));
        examples.push(example.map_err(|e| format!("{}, line {}: {e}", options.data.display(), at + 1))?);
    }
    let rows = pack_examples(&examples, options.context)?;
    if rows.is_empty() {
        return Err(format!("{} has no conversation", options.data.display()).into());
    }
    Ok(rows)
}

/// Trains on this communicator and returns the losses; rank 0 writes the adapter.
fn train(comm: &Comm<AnyRuntime>, options: &Options, rows: &[PackedRow]) -> Result<Vec<f64>> {
    let init = Init::new(comm.runtime(), 1);
    // The loss is of the next token alone.
    let model = Decoder::from_pretrained(&options.folder, &init)?.without_mtp();
    let config = LoraConfig {
        rank: options.rank,
        alpha: 2.0 * options.rank as f64,
        target_modules: LoraTargets::AllLinear,
        base_model_name_or_path: Some(options.folder.display().to_string()),
        ..LoraConfig::default()
    };
    let lora = Lora::new(&model, &init, config)?;
    let adamw = ParamGroups::new(AdamWConfig { lr: options.lr, weight_decay: 0.0, ..Default::default() })
        .group(|name, _| name.contains("lora_B"), |config| config.lr *= 16.0);
    // Steps over the adapters alone: no bucket holds the model.
    let mut trainer = TrainStep::builder(comm, &lora).optimizer(adamw).max_norm(1.0).build()?;
    let own = shard_batches(options.batch, comm.rank(), comm.size());
    let mut losses = Vec::new();
    for step in 0..options.steps {
        let picked = own.iter().map(|i| rows[(step * options.batch + i) % rows.len()].clone()).collect();
        let batch = PackedRow::stack(picked)?;
        let weight = batch.weights.to_vec::<f32>()?.iter().map(|&w| f64::from(w)).sum();
        let batch = batch.to_device(comm.runtime())?;
        losses.push(trainer.step(|_| loss(&model, &batch, weight))?.loss()?);
    }
    lora.save_with(&options.out, &SaveOptions { writes: comm.rank() == 0, ..Default::default() })?;
    Ok(losses)
}

/// The summed loss of the trained tokens of a batch; `weight` is their number.
fn loss(model: &Decoder<AnyRuntime>, batch: &PackedBatch<Tensor<AnyRuntime>>, weight: f64) -> Result<Loss<AnyRuntime>> {
    let (positions, segments) = (Var::new(batch.positions.clone()), Var::new(batch.segments.clone()));
    let inputs = DecoderInputs { positions: Some(&positions), segments: Some(&segments), cache: None };
    let logits = model.forward_with(&Var::new(batch.tokens.clone()), inputs)?;
    let targets = batch.targets.where_cond(&batch.weights.gt(0.0)?, -100.0)?;
    let sum = CrossEntropyOptions { reduction: Reduction::Sum, ..Default::default() };
    Loss::sum(logits.cross_entropy_with(&Var::new(targets), sum)?, weight)
}
