//! Training on uneven machines and slow links. The first comparison measures the gain of balanced micro-batch counts if
//! one rank is slow. The second measures the gain of local steps between ranks on a slow link. Ranks are threads or
//! processes. The slow rank and the slow link are simulated, and at the end all ranks must have equal weights.
#![forbid(unsafe_code)]

use std::{
    cell::Cell,
    process::ExitCode,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use clap::Parser;
use weftgrad::{
    AnyRuntime, Error,
    adaptive::{
        balance::{BalanceOptions, Balanced, BatchRanges},
        local_updates::{DiLoCo, LocalSteps, LocalUpdates},
    },
    autograd::no_grad,
    data::{Batch, Loader},
    distributed::{
        comm::{Collectives, Comm, Communicator, Link, NoOpCommunicator, SlowCommunicator},
        train::{Loss, TrainStep},
    },
    nn::{Gpt, GptConfig, Init},
    optim::{AdamWConfig, ParamGroups},
    prelude::*,
};
use weftgrad_examples::{
    Outcome,
    options::{self, above_0, from_0, positive},
    ranks::Joined,
    text::{self, Corpus, Part, Sequences},
};

/// Measure the gain of balancing for uneven ranks, and of local steps for ranks on a slow link.
#[derive(Debug, Parser)]
#[command(name = "heterogeneous", version)]
struct Options {
    /// Ranks, of which the last is slow in the first comparison.
    #[arg(long, default_value = "2", value_parser = positive)]
    ranks: usize,
    /// Factor by which the slow rank is slower.
    #[arg(long, default_value = "2.5", value_parser = above_0)]
    slow: f64,
    /// Bandwidth of the link in megabits per second, each way, in the second comparison.
    #[arg(long, default_value = "1000", value_parser = above_0)]
    link: f64,
    /// Steps of the slow rank in the first comparison, and of every rank in the second.
    #[arg(long, default_value = "40", value_parser = positive)]
    steps: usize,
    /// Local steps between two synchronizations of the ranks.
    #[arg(long, default_value = "10", value_parser = positive)]
    every: usize,
    /// Sequences of a micro-batch.
    #[arg(long, default_value = "4", value_parser = positive)]
    batch: usize,
    /// Tokens of a sequence.
    #[arg(long, default_value = "64", value_parser = positive)]
    context: usize,
    /// Layers of the model.
    #[arg(long, default_value = "2", value_parser = positive)]
    layers: usize,
    /// Channels of the model.
    #[arg(long, default_value = "64", value_parser = positive)]
    width: usize,
    /// The inner learning rate.
    #[arg(long, default_value = "1e-3", value_parser = above_0)]
    lr: f64,
    /// DiLoCo's outer learning rate.
    #[arg(long, default_value = "0.7", value_parser = above_0)]
    outer_lr: f64,
    /// DiLoCo's outer momentum, below 1: smaller in runs of few synchronizations, where the paper's has no time to
    /// settle.
    #[arg(long, default_value = "0.9", value_parser = from_0)]
    outer_momentum: f64,
    #[command(flatten)]
    joined: Joined,
}

fn main() -> ExitCode {
    options::main(run)
}

/// The result of one way of training.
struct Measured {
    /// Tokens per second of all ranks together.
    rate: f64,
    /// The validation loss of the final weights.
    loss: f64,
    /// The number of micro-batches of each rank in the last step.
    counts: Vec<usize>,
}

/// The model and the data of one rank.
struct Task<'a> {
    options: &'a Options,
    model: Gpt<AnyRuntime>,
    rt: AnyRuntime,
    corpus: &'a Corpus,
}

fn run(options: &Options) -> Outcome<()> {
    let ranks = options.joined.ranks(options.ranks)?;
    let corpus = Corpus::read(None)?;
    let task = |comm: &Comm<AnyRuntime>| Task::new(comm.runtime(), options, &corpus);
    let say = |line: String| {
        if ranks.is_rank_zero() {
            println!("{line}");
        }
    };
    say(format!("one rank takes {} times as long:", options.slow));
    for (name, most) in [("even", Some(0)), ("balanced", None)] {
        let Measured { rate, loss, counts } = ranks.run(|comm| task(&comm)?.uneven(&comm, most))?;
        say(format!("{name:12} {rate:>10.0} tokens/s {loss:>10.4}  {counts:?}"));
    }
    say(format!("ranks joined by {} Mb/s:", options.link));
    for way in [Way::Synchronous, Way::DiLoCo, Way::Unconnected] {
        let Measured { rate, loss, .. } = ranks.run(|comm| task(&comm)?.joined(&comm, way))?;
        say(format!("{:12} {rate:>10.0} tokens/s {loss:>10.4}", format!("{way:?}").to_lowercase()));
    }
    Ok(())
}

/// The synchronization of ranks on a slow link.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    /// Gradients are summed in every step.
    Synchronous,
    /// Ranks take local steps and synchronize after every `every` of them.
    DiLoCo,
    /// Ranks synchronize only at the end: the upper bound of the speed.
    Unconnected,
}

impl<'a> Task<'a> {
    fn new(rt: &AnyRuntime, options: &'a Options, corpus: &'a Corpus) -> Result<Self> {
        let Options { context, layers, width, .. } = *options;
        let config =
            GptConfig { vocab: corpus.characters.len(), context, layers, heads: 4, width, ..Default::default() };
        Ok(Task { options, model: Gpt::new(&Init::new(rt, 42), config)?, rt: rt.clone(), corpus })
    }

    /// Batches of a part of the text.
    fn loader(&self, part: Part, batch: usize) -> Result<Loader<Sequences>> {
        let context = self.options.context;
        let tokens =
            self.corpus.part(part, context).map_err(|why| Error::argument("heterogeneous", why.to_string()))?;
        Ok(text::sequences(&self.rt, tokens, context, context / 2 + 1)?.batch(batch).shuffle(7))
    }

    fn optimizer(&self) -> ParamGroups<AdamWConfig> {
        ParamGroups::decay_matrices(AdamWConfig { lr: self.options.lr, ..Default::default() })
    }

    /// Trains ranks of which the last is slow. `max_difference` bounds the difference of their counts of micro-batches.
    fn uneven(&self, comm: &Comm<AnyRuntime>, max_difference: Option<usize>) -> Result<Measured> {
        let step = TrainStep::builder(comm, &self.model).optimizer(self.optimizer()).max_norm(1.0).build()?;
        let balancer = BalanceOptions { anchor: 4, max_anchor: 4, max_difference, ..Default::default() };
        let mut step = Balanced::new(step, balancer)?;
        let is_slow = comm.rank() + 1 == comm.size();
        let (mut batches, mut next) = (self.loader(Part::Train, self.options.batch)?.endless(Default::default())?, 0);
        let (mut read, trained) = (0, Cell::new((0.0, Duration::ZERO, None::<Instant>)));
        let mut epoch = BatchRanges::new(u64::MAX / 2);
        let mut begun = (Instant::now(), 0.0);
        let mut tokens = 0.0;
        // The first steps find the counts.
        for k in 0..self.options.steps / 4 + 4 {
            if k == 4 {
                begun = (Instant::now(), tokens);
            }
            let metrics = step.step(&mut epoch, |number| {
                while next < number {
                    batches.next().transpose()?;
                    next += 1;
                }
                let batch = batches.next().ok_or_else(|| Error::state("the text", "has ended"))??;
                next += 1;
                read += 1;
                self.slowed(is_slow, &trained, || text::loss(&self.model, &batch))
            })?;
            if let Some(metrics) = metrics {
                tokens += metrics.weight()?;
            }
        }
        let rate = (tokens - begun.1) / begun.0.elapsed().as_secs_f64();
        require_equal(comm, &self.model)?;
        Ok(Measured { rate, loss: self.validation()?, counts: step.balancer().counts().to_vec() })
    }

    /// Computes a loss. On a slow rank, also sleeps for `slow − 1` times the mean time of the passes so far.
    fn slowed(
        &self,
        is_slow: bool,
        passes: &Cell<(f64, Duration, Option<Instant>)>,
        loss: impl FnOnce() -> Result<Loss<AnyRuntime>>,
    ) -> Result<Loss<AnyRuntime>> {
        let begun = Instant::now();
        let loss = loss()?;
        let (count, sum, _) = passes.get();
        // A backward pass takes about twice as long as a forward pass.
        let (count, sum) = (count + 1.0, sum + 3 * begun.elapsed());
        passes.set((count, sum, None));
        if is_slow && self.options.slow > 1.0 {
            thread::sleep(sum.mul_f64((self.options.slow - 1.0) / count));
        }
        Ok(loss)
    }

    /// Trains ranks on a slow link; each reads its share of every batch.
    fn joined(&self, comm: &Comm<AnyRuntime>, way: Way) -> Result<Measured> {
        let link = Link { latency: Duration::from_micros(100), bandwidth: self.options.link * 1e6 / 8.0 };
        let slow: Comm<AnyRuntime> = Arc::new(SlowCommunicator::new(comm.clone(), link)?);
        let seconds = match way {
            Way::Synchronous => {
                let builder = TrainStep::builder(&slow, &self.model).optimizer(self.optimizer()).max_norm(1.0);
                let mut step = builder.build()?;
                self.loop_over(comm, |batch| step.step(|_| text::loss(&self.model, batch)).map(drop))?
            }
            Way::DiLoCo | Way::Unconnected => {
                let every = if way == Way::DiLoCo { Some(self.options.every as u64) } else { None };
                let mut step = self.local(&slow, every)?;
                let seconds = self.loop_over(comm, |batch| step.step(|_| text::loss(&self.model, batch)).map(drop))?;
                step.synchronize()?;
                seconds
            }
        };
        require_equal(comm, &self.model)?;
        let tokens = self.options.steps * self.options.batch * self.options.context * comm.size();
        Ok(Measured { rate: tokens as f64 / seconds, loss: self.validation()?, counts: Vec::new() })
    }

    /// Local steps of this rank, synchronized with the others after every `every` steps.
    fn local(
        &self,
        comm: &Comm<AnyRuntime>,
        every: Option<u64>,
    ) -> Result<LocalSteps<AnyRuntime, TrainStep<AnyRuntime>>> {
        let alone = NoOpCommunicator::new(comm.runtime());
        let inner = TrainStep::builder(&alone, &self.model).optimizer(self.optimizer()).max_norm(1.0).build()?;
        let rule = DiLoCo { lr: self.options.outer_lr, momentum: self.options.outer_momentum, ..Default::default() };
        LocalSteps::new(comm, &self.model, inner, rule, LocalUpdates { every, ..Default::default() })
    }

    /// Takes the steps and returns their time in seconds.
    fn loop_over(&self, comm: &Comm<AnyRuntime>, mut step: impl FnMut(&Batch<Sequences>) -> Result<()>) -> Result<f64> {
        let share = self.loader(Part::Train, self.options.batch * comm.size())?.rank(comm.rank(), comm.size());
        let batches = share.endless(Default::default())?;
        comm.barrier()?;
        let begun = Instant::now();
        for batch in batches.take(self.options.steps) {
            step(&batch?)?;
        }
        comm.barrier()?;
        Ok(begun.elapsed().as_secs_f64())
    }

    /// The mean loss of the held-out text.
    fn validation(&self) -> Result<f64> {
        let (mut sum, mut weight) = (0.0, 0.0);
        for batch in self.loader(Part::Validation, self.options.batch)?.limit(16).epoch(0)? {
            let loss = no_grad(|| text::loss(&self.model, &batch?))?;
            sum += loss.total().item()?;
            weight += loss.weight();
        }
        Ok(sum / weight)
    }
}

/// Fails unless all ranks have bitwise equal weights.
fn require_equal(comm: &Comm<AnyRuntime>, model: &Gpt<AnyRuntime>) -> Result<()> {
    for (name, parameter) in model.named_parameters() {
        comm.agree(&format!("`{name}` after training"), &parameter.value()?.to_bytes()?)?;
    }
    Ok(())
}
