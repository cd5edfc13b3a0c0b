//! Runs a folder of reference values: `golden DIR [--device cpu|wgpu] [--threads N] [--views] [GROUP…]`.
//!
//! One line per failing or skipped case, then `N passed, N failed, N skipped`. The exit status is 0 when none failed, 1
//! when one did, 2 when nothing could be run: a file is missing or corrupt, or the arguments are invalid.

use std::{path::PathBuf, process::ExitCode};

use clap::Parser;
use conformance::golden::{Case, Options, Outcome, Placement, load, run_case};
use numcore::{Error, Result, Runtime};
use runtime_cpu::Cpu;

fn main() -> ExitCode {
    // A panic is a failing case, reported as such.
    std::panic::set_hook(Box::new(|_| {}));
    match Arguments::parse().run() {
        Ok(tally) if tally.failed == 0 => ExitCode::SUCCESS,
        Ok(_) => ExitCode::from(1),
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::from(2)
        }
    }
}

/// Runs a folder of reference values.
#[derive(Parser)]
struct Arguments {
    /// The folder of reference values.
    folder: PathBuf,
    /// The groups to run; all of them without one.
    groups: Vec<String>,
    /// The device: `cpu`, or `wgpu` if the program was built for it.
    #[arg(long, default_value = "cpu")]
    device: String,
    /// The number of threads of the CPU.
    #[arg(long)]
    threads: Option<usize>,
    /// Runs each case on views of its operands too.
    #[arg(long)]
    views: bool,
}

impl Arguments {
    fn run(&self) -> Result<Tally> {
        let cases = load(&self.folder, &self.groups)?;
        match self.device.as_str() {
            "cpu" => Ok(self.run_on(&self.threads.map_or_else(Cpu::new, Cpu::with_threads), &cases)),
            #[cfg(feature = "wgpu")]
            "wgpu" => Ok(self.run_on(&runtime_wgpu::Wgpu::new(0)?, &cases)),
            other => Err(Error::format("golden", format!("`{other}` is not a device this program was built for"))),
        }
    }

    fn run_on<R: Runtime>(&self, rt: &R, cases: &[Case]) -> Tally {
        let placements: &[Placement] = if self.views { &Placement::ALL } else { &[Placement::Dense] };
        let mut tally = Tally::default();
        for case in cases {
            tally.count(
                case,
                worst(placements.iter().map(|&p| (p, run_case(rt, case, Options { placement: p, dtype: None })))),
            );
        }
        println!("{} passed, {} failed, {} skipped", tally.passed, tally.failed, tally.skipped);
        tally
    }
}

/// The outcome of a case over all placements: it passes if it does for every layout of its inputs.
fn worst(outcomes: impl Iterator<Item = (Placement, Outcome)>) -> Outcome {
    let mut last = Outcome::Passed;
    for (placement, outcome) in outcomes {
        match outcome {
            Outcome::Failed(lines) if placement == Placement::Dense => return Outcome::Failed(lines),
            Outcome::Failed(mut lines) => {
                lines.push(format!("inputs {placement:?}"));
                return Outcome::Failed(lines);
            }
            other => last = other,
        }
    }
    last
}

#[derive(Default)]
struct Tally {
    passed: usize,
    failed: usize,
    skipped: usize,
}

impl Tally {
    fn count(&mut self, case: &Case, outcome: Outcome) {
        match outcome {
            Outcome::Passed => self.passed += 1,
            Outcome::Skipped(why) => {
                self.skipped += 1;
                println!("SKIP {} {}: {why}", case.id, case.op);
            }
            Outcome::Failed(lines) => {
                self.failed += 1;
                println!("FAIL {} {}: {}", case.id, case.op, lines.join("; "));
            }
        }
    }
}
