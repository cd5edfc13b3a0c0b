//! `weftgrad-run`: starts the ranks of a program as processes, and ends them together.
#![forbid(unsafe_code)]

use std::{ffi::OsString, io, path::PathBuf, process::ExitCode};

use clap::Parser;
use launch::Job;

/// Starts a program as the ranks of one job, and ends all of them together.
///
/// Each process has RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in its environment, as under torchrun.
/// The exit status is 0, or that of the first rank that failed: 128 and the number of a signal that killed it.
#[derive(Parser)]
#[command(version, name = "weftgrad-run")]
struct Args {
    /// Ranks of this node.
    #[arg(short = 'n', long = "ranks-per-node", value_name = "N")]
    ranks: usize,
    /// Nodes, each of which runs this launcher.
    #[arg(long, default_value_t = 1, requires = "node_rank", requires = "endpoint")]
    nodes: usize,
    /// Number of this node, from 0.
    #[arg(long, value_name = "K", requires = "nodes")]
    node_rank: Option<usize>,
    /// Address at which all ranks meet, the same on all nodes: node 0, and a free port of it. [default: a free port of
    /// this machine alone]
    #[arg(long, value_name = "HOST:PORT")]
    endpoint: Option<String>,
    /// Name of the job, which keeps out ranks of another one at the same address. [default: the endpoint]
    #[arg(long = "job", value_name = "NAME")]
    name: Option<String>,
    /// Times to start all ranks again after one has failed; TORCHELASTIC_RESTART_COUNT counts them.
    #[arg(long, value_name = "R", default_value_t = 0)]
    max_restarts: usize,
    /// Ranks of this node that may go on when others fail, in a program that can, such as an elastic run [default: all]
    #[arg(long, value_name = "M")]
    min_ranks: Option<usize>,
    /// Fewest and most ranks of an elastic run, which others join. A rank that has failed is started to join, at most
    /// `--max-restarts` times; SIGUSR1 starts one more. The job ends once fewer than MIN run
    #[arg(long, value_name = "MIN:MAX", value_parser = range, conflicts_with = "min_ranks")]
    elastic: Option<(usize, usize)>,
    /// Folder for a file of lines of each rank, beside the terminal.
    #[arg(long, value_name = "DIR")]
    log_dir: Option<PathBuf>,
    /// Program and its arguments.
    #[arg(trailing_var_arg = true, required = true)]
    program: Vec<OsString>,
}

fn main() -> ExitCode {
    #[cfg(unix)]
    if let Some(error) = launch::become_rank() {
        eprintln!("weftgrad-run: {error}");
        return ExitCode::from(127);
    }
    let args = Args::parse();
    #[cfg(unix)]
    let ended = launch::run_below_init().unwrap_or_else(|| run(args));
    #[cfg(not(unix))]
    let ended = run(args);
    match ended {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            eprintln!("weftgrad-run: {error}");
            ExitCode::from(2)
        }
    }
}

fn run(args: Args) -> io::Result<u8> {
    let mut program = args.program.into_iter();
    let Some(name) = program.next() else { return Err(io::ErrorKind::InvalidInput.into()) };
    let mut job = Job::new(name, args.ranks).args(program).max_restarts(args.max_restarts);
    if let Some(endpoint) = args.endpoint {
        job = job.nodes(args.nodes, args.node_rank.unwrap_or(0), endpoint);
    }
    if let Some(name) = args.name {
        job = job.name(name);
    }
    if let Some(fewest) = args.min_ranks {
        job = job.min_ranks(fewest);
    }
    if let Some((min, max)) = args.elastic {
        job = job.elastic(min, max);
    }
    if let Some(folder) = args.log_dir {
        job = job.log_dir(folder);
    }
    job.through(std::env::current_exe()?).run()
}

fn range(text: &str) -> Result<(usize, usize), String> {
    let parts = text.split_once(':').and_then(|(min, max)| Some((min.parse().ok()?, max.parse().ok()?)));
    parts.ok_or_else(|| format!("`{text}` is no MIN:MAX: give two numbers of ranks, such as 2:4"))
}
