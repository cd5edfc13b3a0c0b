//! Measures context parallelism of a GPT with long sequences: peak bytes of activations on a rank, bytes sent, and time
//! of a step. Sequences are unsplit on each rank, or split over ranks that exchange keys and values in each of the
//! available ways.
#![forbid(unsafe_code)]

use std::{process::ExitCode, sync::Arc, time::Instant};

use clap::Parser;
use weftgrad::{
    AnyRuntime, MemoryCategory,
    distributed::{
        comm::{Collectives, Comm, Communicator, CountingCommunicator},
        context_parallel::ContextExchange,
        mesh::Mesh,
        plan::{Axis, ParallelPlan},
        train::{Loss, TrainStep},
    },
    nn::{Gpt, GptConfig, Init, parallel::VocabularyLoss},
    optim::{AdamWConfig, ParamGroups},
    prelude::*,
};
use weftgrad_examples::{
    Outcome,
    options::{self, positive},
    ranks::Joined,
};

/// Measure the memory, the traffic and the time of sequences that are split over ranks.
#[derive(Debug, Parser)]
#[command(name = "long-context", version)]
struct Options {
    /// Ranks, all along the context axis.
    #[arg(long, default_value = "4", value_parser = positive)]
    ranks: usize,
    /// Tokens of a sequence; a multiple of twice the ranks.
    #[arg(long, default_value = "1024", value_parser = positive)]
    tokens: usize,
    /// Channels of the model; a multiple of its 8 heads.
    #[arg(long, default_value = "128", value_parser = positive)]
    width: usize,
    /// Blocks of the model.
    #[arg(long, default_value = "4", value_parser = positive)]
    layers: usize,
    /// Steps to measure; the shortest time is shown.
    #[arg(long, default_value = "1", value_parser = positive)]
    steps: usize,
    #[command(flatten)]
    joined: Joined,
}

/// The exchange of keys and values between ranks that split a sequence; `None` for unsplit sequences.
type Cut = Option<ContextExchange>;

/// Peak bytes of activations on a rank within a step, bytes sent, the loss, and the seconds of the fastest step.
struct Measured {
    activations: usize,
    sent: u64,
    loss: f64,
    seconds: f64,
}

fn main() -> ExitCode {
    options::main(run)
}

fn run(options: &Options) -> Outcome<()> {
    let ranks = options.joined.ranks(options.ranks)?;
    let say = |line: String| {
        if ranks.is_rank_zero() {
            println!("{line}");
        }
    };
    say(format!("{:10} {:>12} {:>12} {:>10} {:>10}", "", "activations", "sent", "loss", "ms"));
    for (name, cut) in [
        ("whole", None),
        ("gather", Some(ContextExchange::AllGather)),
        ("ring", Some(ContextExchange::Ring)),
        ("ulysses", Some(ContextExchange::Ulysses)),
    ] {
        let Measured { activations, sent, loss, seconds } = ranks.run(|comm| measure(comm, options, cut))?;
        say(format!("{name:10} {activations:>12} {sent:>12} {loss:>10.5} {:>10.1}", 1e3 * seconds));
    }
    Ok(())
}

fn measure(comm: Comm<AnyRuntime>, options: &Options, cut: Cut) -> Result<Measured> {
    let counting = Arc::new(CountingCommunicator::new(comm));
    let comm: Comm<AnyRuntime> = counting.clone();
    let rt = comm.runtime();
    // Unsplit: each rank has a sequence of its own.
    let axis = if cut.is_some() { Axis::Context } else { Axis::Data };
    let mesh = Mesh::new(&comm, ParallelPlan::of([(axis, comm.size())])?)?;
    let Options { tokens, layers, width, .. } = *options;
    let config = GptConfig { vocab: 256, context: tokens, layers, heads: 8, width, ..Default::default() };
    let model = Gpt::new(&Init::new(rt, 1), config)?;
    if let Some(exchange) = cut {
        mesh.context_parallel(&model, exchange)?;
    }
    let optimizer = ParamGroups::decay_matrices(AdamWConfig::default());
    let mut step = TrainStep::builder(&mesh, &model).optimizer(optimizer).max_norm(1.0).build()?;
    let text = (0..tokens as i64).map(|i| (i * i + i / 7) % 256).collect::<Vec<_>>();
    let text = Var::new(Tensor::from_slice(rt, [1, tokens], &text)?);
    let loss = |_| Ok(Loss::mean(model.next_token_loss(&text, &text, &VocabularyLoss::default())?));
    step.step(loss)?;
    let mut measured = Measured { activations: 0, sent: 0, loss: 0.0, seconds: f64::INFINITY };
    for _ in 0..options.steps {
        comm.barrier()?;
        rt.reset_peak();
        counting.reset();
        let begun = Instant::now();
        measured.loss = step.step(loss)?.loss()?;
        measured.seconds = measured.seconds.min(begun.elapsed().as_secs_f64());
        measured.activations = rt.memory().of(MemoryCategory::Activations).peak;
        measured.sent = counting.total().sent;
    }
    Ok(measured)
}
