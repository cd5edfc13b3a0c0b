//! Runs a folder of reference values: `golden DIR [--device cpu|wgpu] [--threads N] [--views] [GROUP…]`.
//!
//! One line per failing or skipped case, then `N passed, N failed, N skipped`. The exit status is 0 when none failed, 1
//! when one did, 2 when nothing could be run: a file is missing or corrupt, or the arguments are invalid.

use std::process::ExitCode;

use conformance::golden::{Case, Options, Outcome, Placement, load, run_case};
use numcore::{Error, Result, Runtime};
use runtime_cpu::Cpu;

const USAGE: &str = "usage: golden DIR [--device cpu|wgpu] [--threads N] [--views] [GROUP...]";

fn main() -> ExitCode {
    // A panic is a failing case, reported as such.
    std::panic::set_hook(Box::new(|_| {}));
    match arguments(std::env::args().skip(1)).and_then(|a| a.run()) {
        Ok(tally) if tally.failed == 0 => ExitCode::SUCCESS,
        Ok(_) => ExitCode::from(1),
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::from(2)
        }
    }
}

#[derive(Default)]
struct Arguments {
    folder: Option<String>,
    device: Option<String>,
    threads: Option<usize>,
    views: bool,
    groups: Vec<String>,
}

fn arguments(mut given: impl Iterator<Item = String>) -> Result<Arguments> {
    let bad = |why: String| Error::format("golden", format!("{why}; {USAGE}"));
    let mut found = Arguments::default();
    while let Some(argument) = given.next() {
        let mut value = || given.next().ok_or_else(|| bad(format!("`{argument}` needs a value")));
        match argument.as_str() {
            "--device" => found.device = Some(value()?),
            "--threads" => found.threads = Some(value()?.parse().map_err(|_| bad("threads must be a count".into()))?),
            "--views" => found.views = true,
            option if option.starts_with("--") => return Err(bad(format!("`{option}` is not an option"))),
            _ if found.folder.is_none() => found.folder = Some(argument),
            _ => found.groups.push(argument),
        }
    }
    if found.folder.is_none() {
        return Err(bad("no folder is given".into()));
    }
    Ok(found)
}

impl Arguments {
    fn run(&self) -> Result<Tally> {
        let cases = load(self.folder.as_deref().unwrap_or("."), &self.groups)?;
        match self.device.as_deref().unwrap_or("cpu") {
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
