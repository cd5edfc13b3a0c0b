//! `weftgrad-sweep`: runs a command for each trial of a search of hyperparameters.
#![forbid(unsafe_code)]

use std::{fs, path::PathBuf, process::ExitCode};

use clap::Parser;
use numcore::{Error, Result};
use train::search::{Halving, Search, SearchSpace, Trial};

/// Runs `COMMAND --config FILE` for each trial, whose metric is the last one of its name in metrics.jsonl.
///
/// A command that ends with status 130, or by a signal, was interrupted: the search ends, and the next start goes on.
/// Any other failure is recorded, and the search goes on. Start it several times with the same arguments for several
/// trials at a time.
#[derive(Parser)]
#[command(version, name = "weftgrad-sweep")]
struct Options {
    /// The configuration, with a table [search].
    #[arg(long)]
    space: PathBuf,
    /// The folder of the search.
    #[arg(long)]
    folder: PathBuf,
    /// Random trials; without it, all combinations of the values.
    #[arg(long)]
    trials: Option<u32>,
    /// The seed of random trials.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// The value to compare.
    #[arg(long, default_value = "validation/loss")]
    metric: String,
    /// The greatest value is the best.
    #[arg(long)]
    maximize: bool,
    /// The budget of the first rung of successive halving; its last one is that of the configuration.
    #[arg(long, requires = "budget_field")]
    first_budget: Option<u64>,
    /// One trial in so many goes on to the next rung.
    #[arg(long, default_value_t = 3)]
    factor: u64,
    /// The field of the configuration that has the budget: run.steps.
    #[arg(long)]
    budget_field: Option<String>,
    /// The field of the configuration that gets the folder of the trial: out.
    #[arg(long)]
    folder_field: String,
    /// The command, with its arguments.
    #[arg(last = true, required = true)]
    command: Vec<String>,
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<()> {
    let text = fs::read_to_string(&options.space).map_err(|e| Error::io(&options.space, e))?;
    let mut space = SearchSpace::from_toml(&text)?.folder_field(&options.folder_field)?;
    if let Some(field) = &options.budget_field {
        space = space.budget_field(field)?;
    }
    let mut search = match options.trials {
        Some(trials) => Search::random(&options.folder, space, trials, options.seed),
        None => Search::grid(&options.folder, space),
    };
    search = search.metric(&options.metric);
    if options.maximize {
        search = search.maximize();
    }
    if let Some(first_budget) = options.first_budget {
        search = search.halving(Halving { factor: options.factor, first_budget });
    }
    let report = search.run(|trial| measure(trial, options))?;
    println!("{report}{}", options.folder.join("report.html").display());
    Ok(())
}

/// Runs the command of a trial, and reads its metric.
fn measure(trial: &Trial, options: &Options) -> Result<f64> {
    let fields: Vec<String> = trial.fields.iter().map(|(name, value)| format!("{name} = {value}")).collect();
    println!("trial {} up to {}: {}", trial.number, trial.budget, fields.join(", "));
    let (program, arguments) = options.command.split_first().map_or(("", &[][..]), |(first, rest)| (first, rest));
    let status = trial.command(program)?.args(arguments).status().map_err(|e| Error::io(program, e))?;
    match status.code() {
        Some(0) => trial.last_recorded(&options.metric),
        None | Some(130) => Err(trial.interrupted()),
        Some(_) => Err(Error::format(program, format!("ended with {status}"))),
    }
}
