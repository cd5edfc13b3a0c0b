//! Trains a GPT cut into stages, on threads or processes, by any pipeline schedule. Prints the schedule and draws the
//! timeline of every rank.
#![forbid(unsafe_code)]

use std::{path::PathBuf, process::ExitCode, slice::from_ref, time::Duration};

use clap::Parser;
use weftgrad::{
    AnyRuntime,
    data::{Batch, Last},
    distributed::{
        comm::Comm,
        pipeline::{
            Checked, Limits, Lowering, MicroBatches, PipeShape, PipelineModel, PipelineOptions, ScheduleKind, Timeline,
        },
        train::{Loss, TrainStep},
        zero::ZeroStage,
    },
    nn::{
        Gpt, GptConfig, Init,
        loss::{CrossEntropyOptions, Reduction, cross_entropy_with},
    },
    optim::{AdamWConfig, ParamGroups},
    prelude::*,
    train::{Interval, Length, ModelInStep, Trainer, sink::Terminal},
    watch::recorder::RunTimeline,
};
use weftgrad_examples::{
    Outcome,
    options::{self, positive},
    ranks::Joined,
    text::{self, Corpus, Part, Sequences},
};

/// Train a small character model through a pipeline of threads.
#[derive(Debug, Parser)]
#[command(name = "pipeline", version)]
struct Options {
    /// Ranks of the pipeline, a thread each.
    #[arg(long, default_value = "2", value_parser = positive)]
    ranks: usize,
    /// Replicas of the pipeline, each with its own part of a step's text.
    #[arg(long, default_value = "1", value_parser = positive)]
    replicas: usize,
    /// ZeRO stage over the replicas: 0 shards nothing, 1 optimizer state, 2 gradients too, 3 parameters too.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=3))]
    zero: u8,
    /// GPipe, 1F1B, Interleaved1F1B, LoopedBFS, ZB-H1, ZB-H2, InterleavedZeroBubble, ZBV or DualPipeV.
    #[arg(long, default_value = "1F1B")]
    schedule: ScheduleKind,
    /// Micro-batches in a step.
    #[arg(long, default_value = "4", value_parser = positive)]
    micro_batches: usize,
    /// Steps to train.
    #[arg(long, default_value = "60", value_parser = positive)]
    steps: usize,
    /// Folder of the timeline's picture and trace.
    #[arg(long, default_value = "pipeline-out", value_name = "DIR")]
    out: PathBuf,
    #[command(flatten)]
    joined: Joined,
}

/// Sequences in a micro-batch, and characters in a sequence.
const ROWS: usize = 4;
const CONTEXT: usize = 32;

fn main() -> ExitCode {
    options::main(run)
}

fn run(options: &Options) -> Outcome<()> {
    let checked = schedule(options)?;
    let needed = options.ranks * options.replicas;
    let ranks = options.joined.ranks(needed)?;
    if ranks.size() != needed {
        return Err(format!(
            "{} replicas of {} ranks are not {} processes",
            options.replicas,
            options.ranks,
            ranks.size()
        )
        .into());
    }
    for rank in (0..options.ranks).filter(|_| ranks.is_rank_zero()) {
        let row: Vec<String> = checked.row(rank).iter().map(ToString::to_string).collect();
        println!("rank {rank}: {}", row.join(" "));
    }
    let corpus = Corpus::read(None)?;
    let (vocabulary, text) = (corpus.characters.len(), corpus.part(Part::Train, CONTEXT)?);
    let timeline = ranks.run(|comm| train(comm, &checked, options, vocabulary, text))?;
    if !ranks.is_rank_zero() {
        return Ok(());
    }
    std::fs::create_dir_all(&options.out)?;
    let [picture, trace] = ["timeline.svg", "timeline.json"].map(|name| options.out.join(name));
    std::fs::write(&picture, timeline.to_svg())?;
    std::fs::write(&trace, RunTimeline::from(&timeline).to_chrome_json())?;
    println!("timeline of the last step: {} and {}", picture.display(), trace.display());
    Ok(())
}

fn schedule(options: &Options) -> Result<Checked> {
    let stages_per_rank = match options.schedule {
        ScheduleKind::GPipe | ScheduleKind::OneFOneB | ScheduleKind::ZbH1 | ScheduleKind::ZbH2 => 1,
        _ => 2,
    };
    let shape = PipeShape { ranks: options.ranks, stages_per_rank, micro_batches: options.micro_batches };
    let lowering = Lowering { sharded: options.zero == 3, ..Lowering::default() };
    options.schedule.generate(shape)?.lower(lowering)?.check(Limits::default())
}

/// Trains on one rank: the same program on all of them. Returns the last step's timeline of this rank's replica.
fn train(comm: Comm<AnyRuntime>, checked: &Checked, options: &Options, vocab: usize, text: &[u32]) -> Result<Timeline> {
    let config =
        GptConfig { vocab, context: CONTEXT, layers: 4, heads: 4, width: 64, tied_head: true, ..Default::default() };
    // Every rank makes the complete model from the same seed and keeps its stages.
    let stages = Gpt::new(&Init::new(comm.runtime(), 1), config)?.split(checked.schedule().stages())?;
    let model = PipelineModel::on(comm.rank(), checked.clone(), stages)
        .loss(loss)
        .options(PipelineOptions { measured: true, ..Default::default() });
    let adamw = ParamGroups::decay_matrices(AdamWConfig { lr: 3e-3, ..Default::default() });
    let stage = options.zero.checked_sub(1).map_or(ZeroStage::None, |stage| ZeroStage::ALL[usize::from(stage)]);
    let step = TrainStep::builder(&comm, model).optimizer(adamw).max_norm(1.0).zero(stage).build()?;
    let micros = options.micro_batches;
    let batch = micros * ROWS * options.replicas;
    let batches = text::sequences(comm.runtime(), text, CONTEXT, 1)?.batch(batch).shuffle(7).last(Last::Drop);
    let report = Trainer::new(&ModelInStep, step, batches)
        .until(Length::Steps(options.steps as u64))
        .record_every(Interval::Steps(10))
        .sink(Terminal::lines_to(std::io::stdout()).every(Duration::ZERO).show(["loss"]))
        .run(|_, batch: &Batch<Sequences>| {
            MicroBatches::split(from_ref(&batch.data.0), from_ref(&batch.data.1), micros)
        })?;
    let trained = report.step;
    match (trained.pipeline(), trained.last_run()) {
        (Some(pipeline), Some(last)) => pipeline.timeline(last),
        _ => Ok(Timeline::default()),
    }
}

/// The sum over all characters: the trainer divides it by their number in the complete step.
fn loss(outputs: &[Var<AnyRuntime>], targets: &[Var<AnyRuntime>]) -> Result<Loss<AnyRuntime>> {
    let options = CrossEntropyOptions { reduction: Reduction::Sum, ..Default::default() };
    let characters = targets[0].dims().iter().product::<usize>();
    Loss::sum(cross_entropy_with(&outputs[0], &targets[0], options)?, characters as f64)
}
