//! Measures ZeRO: bytes of parameters, gradients and optimizer state on each rank, for data parallelism and stages 1,
//! 2, 3.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use weftgrad::{
    AnyRuntime, MemoryCategory,
    distributed::{
        comm::{Comm, Communicator},
        train::{Loss, TrainStep},
        zero::ZeroStage,
    },
    nn::{Gpt, GptConfig, Init},
    optim::{AdamWConfig, ParamGroups},
    prelude::*,
};
use weftgrad_examples::{
    Outcome,
    options::{self, positive},
    ranks::Joined,
};

/// Measure the memory of sharded training.
#[derive(Debug, Parser)]
#[command(name = "zero", version)]
struct Options {
    /// Ranks.
    #[arg(long, default_value = "4", value_parser = positive)]
    ranks: usize,
    /// Channels of the model; a multiple of its 4 heads.
    #[arg(long, default_value = "128", value_parser = positive)]
    width: usize,
    /// Blocks of the model.
    #[arg(long, default_value = "4", value_parser = positive)]
    layers: usize,
    #[command(flatten)]
    joined: Joined,
}

/// Bytes on a rank after a step by category, and the peak within the step.
struct Measured {
    parameters: usize,
    live: [usize; 3],
    peak: usize,
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
        "{:8} {:>12} {:>12} {:>12} {:>12} {:>12} {:>10}",
        "", "parameters", "gradients", "optimizer", "peak", "bytes/param", "loss"
    ));
    for stage in [ZeroStage::None, ZeroStage::Optimizer, ZeroStage::Gradients, ZeroStage::Parameters] {
        let rank = |comm: Comm<AnyRuntime>| measure(&comm, options, stage);
        let m = ranks.run(rank)?;
        let name = if stage == ZeroStage::None { "ddp".into() } else { format!("stage {}", stage.number()) };
        let [p, g, o] = m.live;
        let each = (p + g + o) as f64 / m.parameters as f64;
        say(format!("{name:8} {p:>12} {g:>12} {o:>12} {:>12} {each:>12.2} {:>10.5}", m.peak, m.loss));
    }
    Ok(())
}

/// Takes two steps, and measures the memory after the second and its peak within it.
fn measure(comm: &Comm<AnyRuntime>, options: &Options, stage: ZeroStage) -> Result<Measured> {
    let rt = comm.runtime();
    let config = GptConfig {
        vocab: 128,
        context: 16,
        layers: options.layers,
        heads: 4,
        width: options.width,
        ..Default::default()
    };
    // Values are drawn when they are read: in stage 3 no rank ever holds the complete model.
    let init = if stage == ZeroStage::None { Init::new(rt, 1) } else { Init::new(rt, 1).lazily() };
    let model = Gpt::new(&init, config)?;
    let tokens = Var::new(Tensor::arange(rt, 0i64, 1i64, 16, DType::I64)?.reshape([1, 16])?);
    let loss = |_| {
        let logits = model.forward(&tokens)?.flatten(0, 1)?;
        Ok(Loss::mean(logits.cross_entropy(&tokens.flatten(0, 1)?)?))
    };
    let adamw = ParamGroups::decay_matrices(AdamWConfig::default());
    let mut step = TrainStep::builder(comm, &model).optimizer(adamw).zero(stage).build()?;
    step.step(loss)?;
    rt.reset_peak();
    let loss = step.step(loss)?.loss()?;
    let stats = rt.memory();
    let live =
        [MemoryCategory::Parameters, MemoryCategory::Gradients, MemoryCategory::Optimizer].map(|u| stats.of(u).live);
    Ok(Measured { parameters: model.num_parameters().total, live, peak: stats.total.peak, loss })
}
