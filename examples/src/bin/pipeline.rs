//! A GPT cut into stages, trained on threads by any pipeline schedule; prints the schedule and draws what every rank did when.
#![forbid(unsafe_code)]

use std::{path::PathBuf, process::ExitCode};

use clap::Parser;
use weftgrad::{
    distributed::{
        comm::{Comm, NoOpCommunicator, Ranks},
        pipeline::{
            Checked, GptStage, Kind, Limits, Lowering, MicroBatches, PipelineOptions, PipelineTrainer, Stage, Staged,
            Timeline, check, lower,
        },
        train::{Loss, TrainingConfig},
    },
    nn::{
        GptConfig, Init,
        loss::{CrossEntropyOptions, Reduction, cross_entropy_with},
    },
    prelude::*,
    rng::Philox,
};

/// Train a small character model through a pipeline of threads.
#[derive(Debug, Parser)]
#[command(name = "pipeline", version)]
struct Options {
    /// Ranks of the pipeline, a thread each.
    #[arg(long, default_value_t = 2)]
    ranks: usize,
    /// GPipe, 1F1B, Interleaved1F1B, LoopedBFS, ZB-H1, ZB-H2, ZBV or DualPipeV.
    #[arg(long, default_value = "1F1B")]
    schedule: Kind,
    /// Micro-batches in a step.
    #[arg(long, default_value_t = 4)]
    micro_batches: usize,
    /// Steps to train.
    #[arg(long, default_value_t = 60)]
    steps: u32,
    /// Folder of the timeline's picture and trace.
    #[arg(long, default_value = "pipeline-out", value_name = "DIR")]
    out: PathBuf,
}

const TEXT: &str = include_str!("../../../ARCHITECTURE.md");
/// Sequences in a micro-batch, and characters in a sequence.
const ROWS: usize = 4;
const CONTEXT: usize = 32;

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("pipeline: {e}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> std::result::Result<(), Box<dyn std::error::Error>> {
    let checked = schedule(options)?;
    for rank in 0..options.ranks {
        let row: Vec<String> = checked.row(rank).iter().map(ToString::to_string).collect();
        println!("rank {rank}: {}", row.join(" "));
    }
    let cpu = || Cpu::with_threads(1);
    // Transfers need somebody to meet: a single rank has all stages, and does without.
    let timeline = match options.ranks {
        1 => train(std::sync::Arc::new(NoOpCommunicator::new(&cpu())), &checked, options)?,
        ranks => Ranks::new(ranks).run(|_| Ok(cpu()), |comm| train(comm, &checked, options))?.swap_remove(0),
    };
    std::fs::create_dir_all(&options.out)?;
    let [picture, trace] = ["timeline.svg", "timeline.json"].map(|name| options.out.join(name));
    std::fs::write(&picture, timeline.to_svg())?;
    std::fs::write(&trace, timeline.to_chrome_trace())?;
    println!("timeline of the last step: {} and {}", picture.display(), trace.display());
    Ok(())
}

fn schedule(options: &Options) -> Result<Checked> {
    let stages_per_rank = match options.schedule {
        Kind::GPipe | Kind::OneFOneB | Kind::ZbH1 | Kind::ZbH2 => 1,
        Kind::Interleaved | Kind::LoopedBfs | Kind::Zbv | Kind::DualPipeV => 2,
    };
    let passes = options.schedule.generate(options.ranks, stages_per_rank, options.micro_batches)?;
    check(lower(&passes, &Lowering::default())?, Limits::default())
}

/// One rank's program: the same on all of them.
fn train(comm: Comm<Cpu>, checked: &Checked, options: &Options) -> Result<Timeline> {
    let corpus = Corpus::new();
    let config = GptConfig {
        vocab: corpus.vocabulary,
        context: CONTEXT,
        layers: 4,
        heads: 4,
        width: 64,
        tied_head: true,
        ..Default::default()
    };
    let schedule = checked.schedule();
    // Every rank makes the whole model from the same seed and keeps its stages.
    let stages = GptStage::cut(&Init::new(comm.runtime(), 1), config, schedule.stages())?.into_iter().enumerate();
    let here = stages.filter(|(stage, _)| schedule.placement().rank_of(*stage) == Some(comm.rank()));
    let stages = here.map(|(stage, part)| (stage, Box::new(part) as Box<dyn Stage<Cpu>>)).collect();
    let model = Staged { stages, loss: Some(Box::new(loss)), ties: GptStage::<Cpu>::ties(&config) };
    let training = TrainingConfig { learning_rate: 3e-3, max_norm: Some(1.0), ..Default::default() };
    let measured = PipelineOptions { measured: true, ..Default::default() };
    let mut trainer = PipelineTrainer::new(&comm, checked.clone(), model, training, measured)?;
    for step in 0..options.steps {
        let metrics = trainer.step(|_| corpus.batch(comm.runtime(), schedule.micro_batches(), step))?;
        if comm.rank() == 0 && (step % 10 == 0 || step + 1 == options.steps) {
            println!("step {step}: loss {:.4}", metrics.loss()?);
        }
    }
    trainer.last_run().map_or_else(|| Ok(Timeline::default()), |last| trainer.pipeline().timeline(last))
}

/// The sum over all characters: the trainer divides by how many there are in the whole step.
fn loss(outputs: &[Var<Cpu>], targets: &[Var<Cpu>]) -> Result<Loss<Cpu>> {
    let options = CrossEntropyOptions { reduction: Reduction::Sum, ..Default::default() };
    let characters = targets[0].dims().iter().product::<usize>();
    Loss::sum(cross_entropy_with(&outputs[0], &targets[0], None, options)?, characters as f64)
}

/// A text as numbers of its vocabulary.
struct Corpus {
    vocabulary: usize,
    tokens: Vec<i64>,
}

impl Corpus {
    fn new() -> Self {
        let mut vocabulary: Vec<char> = TEXT.chars().collect();
        vocabulary.sort_unstable();
        vocabulary.dedup();
        let tokens = TEXT.chars().filter_map(|c| vocabulary.binary_search(&c).ok()).map(|i| i as i64).collect();
        Corpus { vocabulary: vocabulary.len(), tokens }
    }

    /// A step's characters, and those that follow each.
    fn batch(&self, cpu: &Cpu, micro_batches: usize, step: u32) -> Result<MicroBatches<Cpu>> {
        let mut random = Philox::new(7, step);
        let starts = (self.tokens.len() - CONTEXT) as u64;
        let rows = micro_batches * ROWS;
        let sequences: Vec<i64> = (0..rows)
            .flat_map(|_| {
                let at = random.below(starts) as usize;
                self.tokens[at..=at + CONTEXT].to_vec()
            })
            .collect();
        let all = Tensor::from_slice(cpu, [rows, CONTEXT + 1], &sequences)?;
        MicroBatches::split(&[all.narrow(1, 0, CONTEXT)?], &[all.narrow(1, 1, CONTEXT)?], micro_batches)
    }
}
