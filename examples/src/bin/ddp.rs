//! A character-level GPT on several ranks, each with its part of every batch, compared with the same training on one
//! rank: the losses are equal. Ranks are threads of this process, or processes under mpirun.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use weftgrad::{
    AnyRuntime,
    distributed::{
        comm::{Comm, Communicator},
        train::TrainStep,
    },
    nn::{Gpt, GptConfig, Init},
    optim::{AdamWConfig, ParamGroups},
    prelude::*,
    train::{Interval, Length, Trainer, sink::MemorySink},
};
use weftgrad_examples::{
    Outcome,
    options::{self, positive},
    ranks::Joined,
    text::{self, Corpus, Part},
};

/// Train a small GPT data-parallel and compare its first 500 losses with those of one rank.
#[derive(Debug, Parser)]
#[command(name = "ddp", version)]
struct Options {
    /// Ranks.
    #[arg(long, default_value = "4", value_parser = positive)]
    ranks: usize,
    /// Steps.
    #[arg(long, default_value = "20", value_parser = positive)]
    steps: usize,
    /// Sequences in a step, of all ranks together.
    #[arg(long, default_value = "8", value_parser = positive)]
    batch: usize,
    #[command(flatten)]
    joined: Joined,
}

const CONTEXT: usize = 32;
/// The number of steps whose losses are compared. Sums over ranks are rounded in another order than one rank's, and
/// training amplifies any difference. As measured, it grows from 1e-7 of the loss to 1e-6 after 500 steps (1e-4 with
/// three sequences a step) and to 1e-2 after 5000.
const CHECKED: usize = 500;

fn main() -> ExitCode {
    options::main(run)
}

fn run(options: &Options) -> Outcome<()> {
    let corpus = Corpus::read(None)?;
    let tokens = corpus.part(Part::Train, CONTEXT)?;
    let ranks = options.joined.ranks(options.ranks)?;
    let rank = |comm: Comm<AnyRuntime>| losses(&comm, options, corpus.characters.len(), tokens);
    let many = ranks.run(rank)?;
    if !ranks.is_rank_zero() {
        return Ok(());
    }
    let one = ranks.run_alone(rank)?;
    println!("step   1 rank     {} ranks    difference", ranks.size());
    for (step, (a, b)) in one.iter().zip(&many).enumerate() {
        println!("{step:4}   {a:.6}   {b:.6}   {:.1e}", (a - b).abs());
    }
    if options.steps > CHECKED {
        println!("only the first {CHECKED} steps are checked: a difference of rounding grows from step to step");
    }
    if [one.len(), many.len()] != [options.steps; 2] {
        return Err(format!("there are {} and {} losses of {} steps", one.len(), many.len(), options.steps).into());
    }
    match one.iter().zip(&many).take(CHECKED).all(|(a, b)| (a - b).abs() < 1e-3 * a.abs()) {
        true => Ok(()),
        false => Err("the losses differ by more than rounding".into()),
    }
}

/// Trains on this communicator; returns the losses on rank 0.
fn losses(comm: &Comm<AnyRuntime>, options: &Options, vocab: usize, tokens: &[u32]) -> Result<Vec<f64>> {
    let config = GptConfig { vocab, context: CONTEXT, layers: 2, heads: 4, width: 64, ..Default::default() };
    let model = Gpt::new(&Init::new(comm.runtime(), 1), config)?;
    let adamw = ParamGroups::decay_matrices(AdamWConfig { lr: 2e-3, ..Default::default() });
    let step = TrainStep::builder(comm, &model).optimizer(adamw).max_norm(1.0).build()?;
    // The global batches; the trainer gives each rank its share.
    let batches = text::sequences(comm.runtime(), tokens, CONTEXT, 1)?.batch(options.batch).shuffle(1);
    let losses = MemorySink::new();
    Trainer::new(&model, step, batches)
        .until(Length::Steps(options.steps as u64))
        .record_every(Interval::Steps(1))
        .sink(losses.clone())
        .run(text::loss)?;
    Ok(losses.scalars("loss").into_iter().map(|(_, loss)| loss).collect())
}
