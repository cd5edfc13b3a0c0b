//! Trains a character-level GPT on any number of ranks along any axes, configured by a TOML file: `train-gpt --config FILE`. `--show`
//! prints the complete configuration, as a file to begin with.
//!
//! The folder of a run has its checkpoints (the last and the best), `metrics.jsonl`, TensorBoard's events, curves and a
//! report. Ctrl-C saves and ends. A start with `--resume` continues the run as if never interrupted.
#![forbid(unsafe_code)]

mod config;
mod verify;

use std::{path::PathBuf, process::ExitCode, slice::from_ref};

use clap::Parser;
use config::{Config, Together};
use weftgrad::{
    AnyRuntime,
    adaptive::{
        balance::Balanced,
        local_updates::{DiLoCo, LocalSteps, LocalUpdates},
    },
    data::{Last, Loader, sources::Characters},
    distributed::{
        comm::Comm,
        mesh::Mesh,
        pipeline::{MicroBatches, PipelineModel},
        plan::{Axis, ParallelPlan},
        train::{Loss, Step, StepInput, StepModel, TrainStep},
        zero::ZeroStage,
    },
    fused::{CrossEntropyOptions, Reduction},
    models::{Decoder, Pretrained},
    nn::parallel::VocabularyLoss,
    optim::{AdamWConfig, WarmupCosine},
    prelude::*,
    train::{
        Checkpoints, Evaluate, Interval, Length, NonFinite, Resume, StopReason, Throughput, Trainer,
        report::{HtmlReport, Report, SvgCurves},
        sink::{Jsonl, TensorBoard, Terminal, read_jsonl},
    },
};
use weftgrad_examples::{
    Outcome, config as files,
    options::{self, Interrupted},
    ranks::Joined,
    text::{self, Sequences},
};

/// Trains a character-level GPT by a configuration file.
#[derive(Debug, Parser)]
struct Options {
    /// The configuration, in TOML [default: the one that `--show` prints].
    #[arg(long)]
    config: Option<PathBuf>,
    /// Prints the configuration and ends.
    #[arg(long)]
    show: bool,
    /// Continues from the last checkpoint in the run's folder.
    #[arg(long)]
    resume: bool,
    /// Compares two steps on the configured ranks, as threads, with those of one rank, and ends.
    #[arg(long)]
    verify: bool,
    #[command(flatten)]
    joined: Joined,
}

fn main() -> ExitCode {
    options::main(run)
}

fn run(options: &Options) -> Outcome<()> {
    let config: Config = options.config.as_deref().map_or_else(|| Ok(Config::default()), files::read)?;
    config.check()?;
    if options.show {
        print!("{}", files::show(&config)?);
        return Ok(());
    }
    let text = text::read(Some(config.text.as_path()).filter(|path| !path.as_os_str().is_empty()))?;
    if options.verify {
        let report = verify::verify(&config, &text)?;
        println!("{report}");
        return if report.is_equal() { Ok(()) } else { Err("the plan does not train the model of one rank".into()) };
    }
    let ranks = options.joined.ranks(config.ranks)?;
    let Ended { reason, step, loss } = ranks.run(|comm| train(&comm, &config, &text, options.resume))?;
    if reason == StopReason::Interrupted {
        return Err(Interrupted(format!("stopped at step {step}; go on with --resume")).into());
    }
    if ranks.is_rank_zero() {
        let loss = loss.map_or("none".into(), |loss| format!("{loss:.4}"));
        println!("validation loss {loss}; {} has the checkpoints and report.html", config.out.display());
    }
    Ok(())
}

fn train(comm: &Comm<AnyRuntime>, config: &Config, text: &str, resume: bool) -> Result<Ended> {
    let rt = comm.runtime();
    let characters = Characters::of(text);
    let tokens = characters.encode(text)?;
    let (learned, held_out) = tokens.split_at((tokens.len() as f64 * (1.0 - config.data.validation)) as usize);
    let loader = |part: &[u32]| -> Result<Loader<Sequences>> {
        let loader = text::sequences(rt, part, config.model.context, config.model.context)?;
        let (batch, last) = match config.mesh.pipeline {
            1 => (config.data.batch / config.run.accumulation, Last::Keep),
            // A run of the schedule takes all micro-batches, which are of one size.
            _ => (config.data.batch, Last::Drop),
        };
        Ok(loader.batch(batch).last(last).workers(config.data.workers))
    };
    let data = (loader(learned)?.shuffle(config.seed), loader(held_out)?);
    let mesh = Mesh::new(comm, config.plan(comm.size())?)?;
    let inner = match config.run.together {
        // Replicas take steps of their own.
        Together::Local => {
            let plan = mesh.plan();
            let axes = [Axis::Pipe, Axis::Shard, Axis::Context, Axis::Tensor];
            let group = mesh.group(&axes)?;
            Mesh::new(&group, ParallelPlan::of(axes.map(|axis| (axis, plan.size(axis))))?)?
        }
        _ => mesh.clone(),
    };
    let (model, step) = step_of(&inner, config, characters.len())?;
    let step: Box<dyn Step<AnyRuntime>> = match config.run.together {
        Together::Sums => Box::new(step),
        Together::Balanced => Box::new(Balanced::new(step, Default::default())?),
        Together::Local => {
            let synchronizations = LocalUpdates { every: Some(config.run.every), ..Default::default() };
            let replicas = mesh.axis(Axis::Data);
            Box::new(LocalSteps::new(replicas, &model, step, DiLoCo::default(), synchronizations)?.among(comm))
        }
    };
    fit(&model, step, data, config, resume)
}

/// The model, which is none for stages that the step has itself, and the training step.
fn step_of(
    mesh: &Mesh<AnyRuntime>,
    config: &Config,
    vocab: usize,
) -> Result<(Option<Decoder<AnyRuntime>>, TrainStep<AnyRuntime>)> {
    let (model, stages) = model(mesh, config, vocab)?;
    let adamw =
        AdamWConfig { lr: config.optimizer.lr, weight_decay: config.optimizer.weight_decay, ..Default::default() };
    let accumulation = if stages.is_some() { 1 } else { config.run.accumulation };
    let builder = TrainStep::builder(mesh, stages.map_or_else(|| StepModel::from(&model), StepModel::from))
        .optimizer(adamw)
        .schedule(WarmupCosine { warmup: config.optimizer.warmup, total: config.run.steps, end: 0.1 })
        .accumulation(accumulation)
        .max_norm(config.optimizer.max_norm)
        .zero(config.zero().unwrap_or(ZeroStage::None));
    let step = if config.mesh.experts > 1 { builder.experts() } else { builder }.build()?;
    Ok((model, step))
}

/// A model that a rank trains as a whole, or its stages of a pipeline.
type Parts = (Option<Decoder<AnyRuntime>>, Option<PipelineModel<AnyRuntime>>);

/// The model, cut over the ranks of a mesh.
fn model(mesh: &Mesh<AnyRuntime>, config: &Config, vocab: usize) -> Result<Parts> {
    let init = nn::Init::new(mesh.world().runtime(), config.seed).lazily();
    let model = Decoder::from_fields(&init, &config.decoder(vocab))?;
    let plan = Decoder::<AnyRuntime>::tensor_plan().sequence_parallel(config.mesh.sequence);
    // Ranks that take different numbers of micro-batches cannot count the tokens of experts together.
    let plan = match config.run.together {
        Together::Balanced if config.mesh.experts == 1 => plan.without("layers.*.mlp.experts"),
        _ => plan,
    };
    let Some(checked) = config.schedule()? else {
        mesh.parallelize(&model, &plan)?;
        mesh.context_parallel(&model, config.mesh.exchange.into())?;
        return Ok((Some(model), None));
    };
    let (stages, loss) = model.split_with_loss(checked.schedule().stages(), sum_of_tokens())?;
    let stages = PipelineModel::on(mesh.axis(Axis::Pipe).rank(), checked, stages)
        .loss(move |y, t| Loss::sum(loss.of(&y[0], &t[0])?, t[0].spec().shape.numel() as f64))
        .parallelize(mesh, &plan)?
        .context_parallel(mesh, config.mesh.exchange.into())?;
    Ok((None, Some(stages)))
}

fn sum_of_tokens() -> VocabularyLoss {
    let cross_entropy = CrossEntropyOptions { reduction: Reduction::Sum, ..Default::default() };
    VocabularyLoss { cross_entropy, ..Default::default() }
}

/// The loss of a rank's share of a batch, or the micro-batches of its pipeline.
fn input(
    model: &Option<Decoder<AnyRuntime>>,
    (x, y): &Sequences,
    micro_batches: usize,
) -> Result<StepInput<AnyRuntime>> {
    let Some(model) = model else {
        return Ok(MicroBatches::split(from_ref(x), from_ref(y), micro_batches)?.into());
    };
    let logits = model.forward(&Var::new(x.clone()))?;
    let loss = model.next_token_loss(&logits, &Var::new(y.clone()), &sum_of_tokens())?;
    Ok(Loss::sum(loss, y.shape().numel() as f64)?.into())
}

/// The result of a run.
struct Ended {
    reason: StopReason,
    step: u64,
    /// The last validation loss, if one was measured.
    loss: Option<f64>,
}

/// Trains to the end, or until a signal comes.
fn fit(
    model: &Option<Decoder<AnyRuntime>>,
    step: Box<dyn Step<AnyRuntime>>,
    (learned, held_out): (Loader<Sequences>, Loader<Sequences>),
    config: &Config,
    resume: bool,
) -> Result<Ended> {
    let leads = step.ranks().everyone.rank() == 0;
    let mut trainer = Trainer::new(model, step, learned)
        .until(Length::Steps(config.run.steps))
        .with(Evaluate::on(held_out).every(Interval::Steps(config.run.evaluate_every)))
        .with(Throughput::new())
        .with(NonFinite::stop())
        .with(
            Checkpoints::in_folder(config.out.join("checkpoints"))
                .every(Interval::Steps(config.run.save_every))
                .keep(config.run.keep)
                .best("validation/loss"),
        )
        .resume(if resume { Resume::IfThere } else { Resume::No });
    if leads {
        let goes_on = resume && config.out.join("checkpoints").is_dir();
        let jsonl = if goes_on { Jsonl::in_folder(&config.out)? } else { Jsonl::replacing(&config.out)? };
        // Curves of a resumed run begin at its first step.
        let before = if goes_on { read_jsonl(jsonl.path())? } else { Vec::new() };
        let report = Report::new("train-gpt").configuration([("configuration", format!("{config:#?}"))]);
        trainer = trainer
            .sink(Terminal::new().steps(config.run.steps).announce(["validation/loss"]))
            .sink(jsonl)
            .sink(TensorBoard::in_folder(&config.out)?)
            .sink(SvgCurves::in_folder(&config.out).records(&before))
            .sink(HtmlReport::at(config.out.join("report.html"), report.records(&before)));
    }
    let report = trainer.run(|model, batch| input(model, &batch.data, config.run.accumulation))?;
    let loss = report.evaluated.get("validation/loss").copied();
    Ok(Ended { reason: report.reason, step: report.progress.step, loss })
}
