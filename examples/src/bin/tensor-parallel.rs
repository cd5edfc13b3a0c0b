//! Measures tensor parallelism: bytes of parameters, gradients and optimizer state on each rank, peak memory, and bytes
//! sent in a step. A GPT is on one rank, split over ranks, or split along the sequence too.
#![forbid(unsafe_code)]

use std::{process::ExitCode, sync::Arc};

use clap::Parser;
use weftgrad::{
    AnyRuntime, MemoryCategory,
    distributed::{
        comm::{Comm, Communicator, CountingCommunicator},
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

/// Measure the memory and the traffic of a model that is split over ranks.
#[derive(Debug, Parser)]
#[command(name = "tensor-parallel", version)]
struct Options {
    /// Ranks, all along the tensor axis: a divisor of the model's 8 heads, of its width and of 64 tokens.
    #[arg(long, default_value = "4", value_parser = positive)]
    ranks: usize,
    /// Channels of the model; a multiple of its 8 heads.
    #[arg(long, default_value = "128", value_parser = positive)]
    width: usize,
    /// Blocks of the model.
    #[arg(long, default_value = "4", value_parser = positive)]
    layers: usize,
    #[command(flatten)]
    joined: Joined,
}

/// The split of the model over ranks.
#[derive(Clone, Copy)]
enum Cut {
    Whole,
    Layers,
    Sequence,
}

/// Bytes on a rank after a step by category, the peak within the step, and the bytes it sent.
struct Measured {
    live: [usize; 3],
    peak: usize,
    sent: u64,
    loss: f64,
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
    say(format!(
        "{:9} {:>12} {:>12} {:>12} {:>12} {:>12} {:>10}",
        "", "parameters", "gradients", "optimizer", "peak", "sent", "loss"
    ));
    for (name, cut) in [("whole", Cut::Whole), ("layers", Cut::Layers), ("sequence", Cut::Sequence)] {
        let Measured { live: [p, g, o], peak, sent, loss } = ranks.run(|comm| measure(comm, options, cut))?;
        say(format!("{name:9} {p:>12} {g:>12} {o:>12} {peak:>12} {sent:>12} {loss:>10.5}"));
    }
    Ok(())
}

fn measure(comm: Comm<AnyRuntime>, options: &Options, cut: Cut) -> Result<Measured> {
    let counting = Arc::new(CountingCommunicator::new(comm));
    let comm: Comm<AnyRuntime> = counting.clone();
    let rt = comm.runtime();
    // Unsplit: ranks share the batch instead.
    let axis = if matches!(cut, Cut::Whole) { Axis::Data } else { Axis::Tensor };
    let mesh = Mesh::new(&comm, ParallelPlan::of([(axis, comm.size())])?)?;
    let config = GptConfig {
        vocab: 256,
        context: 64,
        layers: options.layers,
        heads: 8,
        width: options.width,
        ..Default::default()
    };
    let model = Gpt::new(&Init::new(rt, 1).lazily(), config)?;
    if axis == Axis::Tensor {
        let plan = Gpt::<AnyRuntime>::tensor_plan().sequence_parallel(matches!(cut, Cut::Sequence));
        mesh.parallelize(&model, &plan)?;
    }
    let optimizer = ParamGroups::decay_matrices(AdamWConfig::default());
    let mut step = TrainStep::builder(&mesh, &model).optimizer(optimizer).max_norm(1.0).build()?;
    let tokens = Var::new(Tensor::arange(rt, 0i64, 1i64, 64, DType::I64)?.reshape([1, 64])?);
    let loss = |_| Ok(Loss::mean(model.next_token_loss(&tokens, &tokens, &VocabularyLoss::default())?));
    step.step(loss)?;
    rt.reset_peak();
    counting.reset();
    let loss = step.step(loss)?.loss()?;
    let stats = rt.memory();
    let live =
        [MemoryCategory::Parameters, MemoryCategory::Gradients, MemoryCategory::Optimizer].map(|u| stats.of(u).live);
    Ok(Measured { live, peak: stats.total.peak, sent: counting.total().sent, loss })
}
