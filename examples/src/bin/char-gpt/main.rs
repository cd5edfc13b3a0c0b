//! Trains a character-level GPT and prints a sample.
//!
//! Without `--text` it learns the workspace's own prose for 40 seconds. It trains as many steps as fit and prints their
//! number; `--steps` with that number trains the same model. `--text FILE` trains a larger model on a file. Ctrl-C
//! saves and ends; `--resume` continues as if never interrupted. `--ranks N`, or `--engine mpi` under `mpirun`, trains
//! on several ranks.
#![forbid(unsafe_code)]

mod command;
mod sample;

use std::process::ExitCode;

use weftgrad::{
    AnyRuntime,
    distributed::{
        comm::{Comm, Communicator},
        train::TrainStep,
    },
    nn::{BlockScaling, Gpt, Init, block_scaled},
    optim::{AdamWConfig, ParamGroups},
    prelude::*,
    train::{
        Checkpoints, Evaluate, Interval, NonFinite, Resume, StopReason, Throughput, Trainer,
        report::SvgCurves,
        sink::{Jsonl, Terminal, read_jsonl},
    },
};
use weftgrad_examples::{
    Outcome,
    options::{self, Interrupted},
    text::{self, Corpus, Part},
};

use crate::command::{Options, Settings};

/// The number of batches averaged in the validation loss.
const VALIDATION_BATCHES: usize = 20;
/// The name of the validation loss in records.
const VALIDATION: &str = "validation/loss";

/// The result of a run, with the sample that rank 0 wrote with the model.
struct Ended {
    reason: StopReason,
    step: u64,
    validation: Option<f64>,
    sample: String,
}

fn main() -> ExitCode {
    options::main(run)
}

fn run(options: &Options) -> Outcome<()> {
    let corpus = Corpus::read(options.text.as_deref())?;
    let settings = options.settings(&corpus)?;
    let parts = [corpus.part(Part::Train, settings.context)?, corpus.part(Part::Validation, settings.context)?];
    let ranks = options.joined.ranks(options.ranks)?;
    let dtype = settings.dtype()?;
    let ended = ranks.run(|comm| train(&comm, options, &settings, dtype, &corpus, parts))?;
    let (out, step) = (options.out.display(), ended.step);
    if ranks.is_rank_zero() {
        println!("checkpoint: {out}/checkpoints\nloss curve: {out}/curves.svg");
    }
    if ended.reason == StopReason::Interrupted {
        return Err(Interrupted(format!("stopped at step {step}; go on with --resume --out {out}")).into());
    }
    if ranks.is_rank_zero() {
        let loss = ended.validation.unwrap_or(f64::NAN);
        println!("\nvalidation loss {loss:.4} after {step} steps\n\n{}", ended.sample);
    }
    Ok(())
}

/// Trains on one rank: the same program on all of them.
fn train(
    comm: &Comm<AnyRuntime>,
    options: &Options,
    settings: &Settings,
    dtype: DType,
    corpus: &Corpus,
    [learned, held_out]: [&[u32]; 2],
) -> Result<Ended> {
    let (rt, leads) = (comm.runtime(), comm.rank() == 0);
    let model = Gpt::new(&Init::new(rt, settings.seed), settings.gpt())?;
    model.to_dtype(dtype)?;
    if settings.fp8 {
        block_scaled(&model, BlockScaling { powers_of_two: true }, |name| name.starts_with("blocks."))?;
    }
    if leads {
        println!("{}\n{}", describe(settings, &model, learned.len()), rt.capabilities().name);
    }
    let budget = options.budget(settings);
    let adamw = AdamWConfig { lr: settings.lr, betas: [0.9, 0.99], weight_decay: 0.1, ..Default::default() };
    let step = TrainStep::builder(comm, &model)
        .optimizer(ParamGroups::decay_matrices(adamw))
        .schedule(budget.schedule())
        .max_norm(1.0)
        .build()?;
    let batches = |tokens, stride| {
        Ok::<_, weftgrad::Error>(text::sequences(rt, tokens, settings.context, stride)?.batch(settings.batch))
    };
    // Sequences spread evenly over the held-out text.
    let spread = held_out.len() / (VALIDATION_BATCHES * settings.batch);
    let validation = Evaluate::on(batches(held_out, spread.max(1))?).limit_batches(VALIDATION_BATCHES as u64);
    let checkpoints =
        Checkpoints::in_folder(options.out.join("checkpoints")).every(Interval::Seconds(60.0)).keep(1).overwrite();
    let mut trainer = Trainer::new(&model, step, batches(learned, 1)?.shuffle(settings.seed))
        .until(budget.length())
        .with(budget)
        .with(validation.every(Interval::Steps(100)))
        .with(Throughput::new())
        .with(NonFinite::stop())
        .with(checkpoints)
        // After `Checkpoints`, which removes those of an earlier run: until then the old settings belong to them.
        .with(command::SaveSettings { settings, out: &options.out })
        .record_every(Interval::Steps(1))
        .resume(if options.resume { Resume::Required } else { Resume::No });
    if leads {
        let out = &options.out;
        let jsonl = if options.resume { Jsonl::in_folder(out)? } else { Jsonl::replacing(out)? };
        // Curves of a resumed run begin at its first step.
        let before = if options.resume { read_jsonl(jsonl.path())? } else { Vec::new() };
        let curves = SvgCurves::in_folder(out).records(&before);
        let numbers = ["loss", "throughput/tokens_per_second", VALIDATION];
        trainer = trainer.sink(Terminal::new().show(numbers).announce([VALIDATION])).sink(jsonl).sink(curves);
    }
    let report = trainer.run(text::loss)?;
    if let (true, Some(step)) = (leads, report.resumed) {
        println!("resumed at step {step}");
    }
    let writes = leads && report.reason != StopReason::Interrupted;
    let sample = if writes { sample::text(&model, rt, settings, corpus, options.sampling)? } else { String::new() };
    let validation = report.evaluated.get(VALIDATION).copied();
    Ok(Ended { reason: report.reason, step: report.progress.step, validation, sample })
}

/// The run in a line.
fn describe(settings: &Settings, model: &Gpt<AnyRuntime>, characters: usize) -> String {
    let Settings { layers, width, heads, batch, context, dtype, .. } = settings;
    let fp8 = if settings.fp8 { ", linear layers of blocks by 8-bit operands" } else { "" };
    format!(
        "GPT of {} parameters ({dtype}{fp8}): {layers} layers × {width}, {heads} heads; batches of {batch} × {context}; vocabulary {}; {characters} characters to train on",
        model.num_parameters().total,
        settings.gpt().vocab,
    )
}
