//! Measures expert parallelism: bytes of parameters, gradients and optimizer state on each rank, peak memory, and bytes
//! sent in a step. The model has mixtures of experts. Each rank holds all experts, some of them, or, with ZeRO, shards
//! of all or some.
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
        zero::ZeroStage,
    },
    fused::{CrossEntropyOptions, Reduction},
    nn::{
        Embedding, Init, Linear, RmsNorm,
        moe::{MixtureOfExperts, MoeConfig},
        parallel::TensorPlan,
    },
    optim::{AdamWConfig, ParamGroups},
    prelude::*,
};
use weftgrad_examples::{
    Outcome,
    options::{self, positive},
    ranks::Joined,
};

/// Measure the memory and the traffic of a model whose experts are distributed over ranks.
#[derive(Debug, Parser)]
#[command(name = "experts", version)]
struct Options {
    /// Ranks, over which the experts are distributed: a divisor of the number of experts.
    #[arg(long, default_value = "4", value_parser = positive)]
    ranks: usize,
    /// Experts of each mixture, of which every token uses two.
    #[arg(long, default_value = "8", value_parser = positive)]
    experts: usize,
    /// Channels of the model.
    #[arg(long, default_value = "128", value_parser = positive)]
    width: usize,
    /// Mixtures of the model.
    #[arg(long, default_value = "4", value_parser = positive)]
    layers: usize,
    #[command(flatten)]
    joined: Joined,
}

/// The size of the vocabulary of bytes, and the number of tokens of a rank.
const VOCAB: usize = 256;
const TOKENS: usize = 64;

/// A model that predicts the next byte from the last one alone: mixtures of experts, one after another.
#[derive(Module)]
struct Model<R: Runtime> {
    embedding: Embedding<R>,
    norms: Vec<RmsNorm<R>>,
    mixtures: Vec<MixtureOfExperts<R>>,
    head: Linear<R>,
}

impl<R: Runtime> Model<R> {
    fn new(init: &Init<R>, options: &Options) -> Result<Self> {
        let width = options.width;
        let config = MoeConfig::new(width, 2 * width, options.experts, 2.min(options.experts));
        Ok(Model {
            embedding: Embedding::new(init, VOCAB, width)?,
            norms: (0..options.layers).map(|_| RmsNorm::new(init, width)).collect::<Result<_>>()?,
            mixtures: (0..options.layers)
                .map(|_| MixtureOfExperts::new(init, config.clone()))
                .collect::<Result<_>>()?,
            head: Linear::new(init, width, VOCAB)?,
        })
    }

    /// The summed cross-entropy of the next tokens, with a hundredth of the balance loss of every mixture.
    fn loss(&self, tokens: &Var<R>, next: &Var<R>) -> Result<Loss<R>> {
        let (mut x, mut balance) = (self.embedding.forward(tokens)?, Vec::new());
        for (norm, mixture) in self.norms.iter().zip(&self.mixtures) {
            let out = mixture.forward_routed(&norm.forward(&x)?)?;
            x = x.add(&out.y)?;
            balance.push(out.routing.balance_loss()?);
        }
        let options = CrossEntropyOptions { reduction: Reduction::Sum, ..Default::default() };
        let mut loss = self.head.forward(&x)?.cross_entropy_with(next, options)?;
        for balance in balance {
            loss = loss.add(&balance.mul(0.01)?)?;
        }
        Loss::sum(loss, TOKENS as f64)
    }
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
        "{:11} {:>12} {:>12} {:>12} {:>12} {:>12} {:>10}",
        "experts", "parameters", "gradients", "optimizer", "peak", "sent", "loss"
    ));
    let all = options.ranks;
    let half = if all.is_multiple_of(2) { all / 2 } else { all };
    for (name, expert_ranks, zero) in [
        ("all", 1, ZeroStage::None),
        ("shared out", all, ZeroStage::None),
        ("zero", 1, ZeroStage::Parameters),
        ("both", half, ZeroStage::Parameters),
    ] {
        let Measured { live: [p, g, o], peak, sent, loss } =
            ranks.run(|comm| measure(comm, options, expert_ranks, zero))?;
        say(format!("{name:11} {p:>12} {g:>12} {o:>12} {peak:>12} {sent:>12} {loss:>10.5}"));
    }
    Ok(())
}

fn measure(comm: Comm<AnyRuntime>, options: &Options, expert_ranks: usize, zero: ZeroStage) -> Result<Measured> {
    let counting = Arc::new(CountingCommunicator::new(comm));
    let comm: Comm<AnyRuntime> = counting.clone();
    let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Data, comm.size()), (Axis::Expert, expert_ranks)])?)?;
    let model = Model::new(&Init::new(comm.runtime(), 1).lazily(), options)?;
    mesh.parallelize(&model, &TensorPlan::new().experts("mixtures.*.experts"))?;
    let optimizer = ParamGroups::decay_matrices(AdamWConfig::default());
    let mut step = TrainStep::builder(&mesh, &model).optimizer(optimizer).max_norm(1.0).zero(zero).experts().build()?;
    let rt = mesh.world().runtime();
    // Ranks have different tokens.
    let first = (mesh.batch().rank() * TOKENS) as i64;
    let tokens = |from: i64| {
        let all: Vec<i64> = (from..from + TOKENS as i64).map(|i| i * 7 % VOCAB as i64).collect();
        Tensor::from_slice(rt, [1, TOKENS], &all).map(Var::new)
    };
    let (tokens, next) = (tokens(first)?, tokens(first + 1)?);
    step.step(|_| model.loss(&tokens, &next))?;
    rt.reset_peak();
    counting.reset();
    let loss = step.step(|_| model.loss(&tokens, &next))?.loss()?;
    let stats = rt.memory();
    let live =
        [MemoryCategory::Parameters, MemoryCategory::Gradients, MemoryCategory::Optimizer].map(|u| stats.of(u).live);
    Ok(Measured { live, peak: stats.total.peak, sent: counting.total().sent, loss })
}
