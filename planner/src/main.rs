//! `weftgrad-plan`: the best plan of training for a model and a machine.
#![forbid(unsafe_code)]

use std::{
    fmt::Write as _,
    fs,
    io::{self, Write as _},
    path::PathBuf,
    process::ExitCode,
};

use autograd::Var;
use clap::{Args, Parser, Subcommand};
use distributed::{comm::Ranks, context_parallel::ContextExchange, mesh::Mesh, train::Loss};
use models::{ConfigFields, Decoder, DecoderConfig};
use nn::{Init, parallel::VocabularyLoss};
use numcore::{
    DType, Error, NullRuntime, Result, Tensor,
    fused::{CrossEntropyOptions, Reduction},
};
use optim::AdamWConfig;
use planner::{
    Goodput, Machine, ModelCosts, OptimizerCosts, PlanSearch, PlannedModel, Reliability, SimulatedStep, TrainingPlan,
    bill, calibrate,
};
use runtime_cpu::Cpu;
use watch::recorder::RunTimeline;

/// Plans the training of a pretrained family's model on a machine, with AdamW.
#[derive(Parser)]
#[command(version, name = "weftgrad-plan")]
struct Program {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Finds the fastest plans that fit into memory.
    Search {
        #[command(flatten)]
        of: Model,
        /// Ranks.
        #[arg(long)]
        ranks: usize,
        /// Sequences in a step.
        #[arg(long)]
        batch: usize,
        /// Most parts of a sequence.
        #[arg(long, default_value_t = 1)]
        most_context: usize,
        /// Most ranks that have all experts together.
        #[arg(long, default_value_t = 1)]
        most_expert: usize,
        #[command(flatten)]
        out: Out,
    },
    /// Estimates and simulates one plan.
    Show {
        #[command(flatten)]
        of: Model,
        /// File of the plan.
        plan: PathBuf,
        #[command(flatten)]
        out: Out,
    },
    /// Measures this machine, with ranks as threads, and prints it as TOML.
    Calibrate {
        /// Ranks.
        #[arg(long, default_value_t = 2)]
        ranks: usize,
        /// GB of memory of a rank.
        #[arg(long, default_value_t = 8.0)]
        memory: f64,
    },
}

#[derive(Args)]
struct Model {
    /// Folder of a pretrained model, of which `config.json` alone is read.
    #[arg(long)]
    model: PathBuf,
    /// Tokens in a sequence.
    #[arg(long)]
    length: usize,
    /// V100, A100, H100, H200, H800, B200, or a TOML file.
    #[arg(long, default_value = "H100")]
    machine: String,
    /// Train in f32 rather than in bf16 with f32 gradients.
    #[arg(long)]
    f32: bool,
}

#[derive(Args)]
struct Out {
    /// File for the plan.
    #[arg(long)]
    plan_file: Option<PathBuf>,
    /// File for a picture of the passes.
    #[arg(long)]
    svg: Option<PathBuf>,
    /// File for the passes as a trace of Chrome.
    #[arg(long)]
    chrome: Option<PathBuf>,
    /// Hours between failures of one rank, for the goodput.
    #[arg(long)]
    hours_between_failures: Option<f64>,
    /// Seconds that training waits for a checkpoint.
    #[arg(long, default_value_t = 10.0)]
    save_seconds: f64,
    /// Seconds from a failure until training goes on.
    #[arg(long, default_value_t = 300.0)]
    restart_seconds: f64,
}

fn main() -> ExitCode {
    match run(Program::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("weftgrad-plan: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<()> {
    match command {
        Command::Calibrate { ranks, memory } => {
            let all = Ranks::new(ranks).run(|_| Ok(Cpu::with_threads(1)), |comm| calibrate(&comm, memory * 1e9))?;
            let first = all.first().ok_or_else(|| Error::config("weftgrad-plan", "ranks", "there are none"))?;
            print(&first.to_toml()?)
        }
        Command::Search { of, ranks, batch, most_context, most_expert, out } => {
            let (config, machine) = (of.config()?, of.machine()?);
            let search =
                PlanSearch { most_context, most_expert, main_gradients: !of.f32, ..PlanSearch::new(ranks, batch) };
            let found = search.run(&machine, &of.optimizer(!of.f32)?, |plan, mesh| of.planned(&config, plan, mesh))?;
            print(&found.table(&machine))?;
            of.write(&config, &found.best[0].plan, &machine, &out)
        }
        Command::Show { of, plan, out } => {
            let (config, machine) = (of.config()?, of.machine()?);
            let plan = TrainingPlan::from_toml(&read(&plan)?)?;
            of.write(&config, &plan, &machine, &out)
        }
    }
}

impl Model {
    fn dtype(&self) -> DType {
        if self.f32 { DType::F32 } else { DType::BF16 }
    }

    fn config(&self) -> Result<DecoderConfig> {
        DecoderConfig::read(&ConfigFields::open(&self.model)?)
    }

    fn machine(&self) -> Result<Machine> {
        match self.machine.ends_with(".toml") {
            true => Machine::from_toml(&read(&PathBuf::from(&self.machine))?),
            false => Machine::named(&self.machine),
        }
    }

    fn optimizer(&self, main_gradients: bool) -> Result<OptimizerCosts> {
        OptimizerCosts::measure(AdamWConfig::default(), self.dtype(), main_gradients)
    }

    /// The model on the ranks of a mesh, a layer in each part.
    fn planned(&self, config: &DecoderConfig, plan: &TrainingPlan, mesh: &Mesh<NullRuntime>) -> Result<PlannedModel> {
        let rt = mesh.world().runtime();
        let model = Decoder::new(&Init::new(rt, 0).dtype(self.dtype()), config.clone())?;
        let cut = Decoder::<NullRuntime>::tensor_plan().sequence_parallel(plan.sequence_parallel);
        mesh.parallelize(&model, &cut)?;
        if plan.context > 1 {
            mesh.context_parallel(&model, ContextExchange::Ring)?;
        }
        let cross_entropy = CrossEntropyOptions { reduction: Reduction::Sum, ..Default::default() };
        let loss = VocabularyLoss { cross_entropy, z_loss: 0.0 };
        let (parts, loss) = model.split_with_loss(config.layers, loss)?;
        let loss = move |y: &[Var<NullRuntime>], t: &[Var<NullRuntime>]| {
            Loss::sum(loss.of(&y[0], &t[0])?, t[0].dims().iter().product::<usize>() as f64)
        };
        let tokens = Tensor::zeros(rt, [plan.micro_batch, self.length], DType::I64)?;
        Ok(PlannedModel::new(parts, loss).micro_batch(vec![tokens.clone()], vec![tokens]))
    }

    /// Prints a plan with its costs, and writes the files that were asked for.
    fn write(&self, config: &DecoderConfig, plan: &TrainingPlan, machine: &Machine, out: &Out) -> Result<()> {
        let costs = ModelCosts::measure(plan, machine.recomputes, |mesh| self.planned(config, plan, mesh))?;
        let step = SimulatedStep::of(plan, &costs, &self.optimizer(plan.main_gradients)?, machine)?;
        let speed = plan.global_batch() as f64 / step.estimate.step();
        let share = 100.0 * step.estimate.utilization(machine);
        let mut text = format!("\n{plan}\n{speed:.1} sequences/s, {share:.1} % of the peak\n\n{}", step.estimate);
        text.push_str("exchanges of rank 0 in a step\n");
        for row in bill(plan, &costs, 0)? {
            let (purpose, gb) = (format!("{:?}", row.purpose), row.sent as f64 / 1e9);
            let _ = writeln!(text, "  {purpose:<11} {:<15} {:>9} calls {gb:>10.3} GB sent", row.kind, row.calls);
        }
        if let Some(hours) = out.hours_between_failures {
            let reliability =
                Reliability { rank_mtbf: hours * 3600.0, save: out.save_seconds, restart: out.restart_seconds };
            let goodput = Goodput::of(plan.world(), &reliability)?;
            let (share, minutes) = (100.0 * goodput.share, goodput.interval / 60.0);
            let _ = writeln!(text, "goodput {share:.1} %, with a checkpoint every {minutes:.1} minutes");
        }
        print(&text)?;
        save(out.plan_file.as_ref(), || plan.to_toml())?;
        save(out.svg.as_ref(), || Ok(step.timeline()?.to_svg()))?;
        save(out.chrome.as_ref(), || Ok(RunTimeline::from(&step.timeline()?).to_chrome_json()))
    }
}

fn print(text: &str) -> Result<()> {
    io::stdout().write_all(text.as_bytes()).map_err(|error| Error::io("the standard output", error))
}

fn save(path: Option<&PathBuf>, text: impl FnOnce() -> Result<String>) -> Result<()> {
    let Some(path) = path else { return Ok(()) };
    let text = text()?;
    fs::write(path, text).map_err(|error| Error::io(path.display().to_string(), error))
}

fn read(path: &PathBuf) -> Result<String> {
    fs::read_to_string(path).map_err(|error| Error::io(path.display().to_string(), error))
}
