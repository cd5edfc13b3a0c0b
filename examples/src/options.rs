//! The command line of the examples: common options, parsers of numbers, and exit codes.

use std::{error::Error, fmt, process::ExitCode};

use clap::{Args, CommandFactory, FromArgMatches, Parser};
use weftgrad::{AnyRuntime, DType, Device, Result};

use crate::Outcome;

/// The exit code after Ctrl-C ended a program early: 130, as shells expect.
const INTERRUPTED: u8 = 130;

/// The device of an example.
#[derive(Args, Clone, Copy, Debug)]
pub struct On {
    /// Device: cpu, or, if built in, wgpu:N or cuda:N.
    #[arg(long, default_value_t)]
    pub device: Device,
}

/// The device of an example, and its number of threads.
#[derive(Args, Clone, Copy, Debug)]
pub struct OnThreads {
    #[command(flatten)]
    on: On,
    /// Threads [default: all].
    #[arg(long, value_parser = positive)]
    threads: Option<usize>,
}

impl OnThreads {
    /// The runtime.
    pub fn open(&self) -> Result<AnyRuntime> {
        self.on.device.open_with(self.threads)
    }
}

/// An error of a program that Ctrl-C ended, with the state of its work.
#[derive(Debug)]
pub struct Interrupted(pub String);

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for Interrupted {}

/// Reads the options and runs the program. The exit code is 0, 1 after an error, 2 for wrong options, or 130 after
/// Ctrl-C ([`Interrupted`]). Errors go to standard error.
pub fn main<O: Parser>(program: impl FnOnce(&O) -> Outcome<()>) -> ExitCode {
    let options = options::<O>();
    let Err(error) = program(&options) else { return ExitCode::SUCCESS };
    eprintln!("{}: {error}", O::command().get_name());
    if error.is::<Interrupted>() { ExitCode::from(INTERRUPTED) } else { ExitCode::FAILURE }
}

/// Reads the command line. Negative numbers are values, so that an option can refuse them with a reason.
fn options<O: Parser>() -> O {
    let matches = command::<O>().get_matches();
    O::from_arg_matches(&matches).unwrap_or_else(|error| error.exit())
}

fn command<O: CommandFactory>() -> clap::Command {
    O::command().mut_args(|arg| {
        let takes_values = arg.get_action().takes_values();
        arg.allow_negative_numbers(takes_values)
    })
}

/// The runtime of `--device`, or the CPU, for examples without another option.
pub fn device(about: &'static str) -> Result<AnyRuntime> {
    #[derive(Parser)]
    struct Only {
        #[command(flatten)]
        on: On,
    }
    let matches = command::<Only>().about(about).get_matches();
    let only = Only::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    only.on.device.open()
}

/// Parses a count: a whole number above 0.
pub fn positive(text: &str) -> std::result::Result<usize, String> {
    text.parse().ok().filter(|n| *n > 0).ok_or_else(|| "must be a whole number above 0".into())
}

/// Parses a learning rate or a time: a finite number above 0.
pub fn above_0(text: &str) -> std::result::Result<f64, String> {
    let number = text.parse().ok().filter(|x: &f64| x.is_finite() && *x > 0.0);
    number.ok_or_else(|| "must be a finite number above 0".into())
}

/// Parses a temperature: a finite number from 0 on.
pub fn from_0(text: &str) -> std::result::Result<f64, String> {
    let number = text.parse().ok().filter(|x: &f64| x.is_finite() && *x >= 0.0);
    number.ok_or_else(|| "must be a finite number, 0 or above".into())
}

/// Parses a dtype of parameters.
pub fn float(text: &str) -> std::result::Result<DType, String> {
    DType::from_name(text).filter(|d| d.is_float()).ok_or_else(|| "must be f32, f64, bf16 or f16".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Parser)]
    #[command(name = "example")]
    struct Options {
        #[arg(long, default_value_t = 1e-3, value_parser = above_0)]
        lr: f64,
        #[arg(long, default_value = "8", value_parser = positive)]
        batch: usize,
        #[arg(long)]
        resume: bool,
        #[command(flatten)]
        on: OnThreads,
    }

    fn parse(line: &str) -> std::result::Result<Options, String> {
        let words = ["example"].into_iter().chain(line.split_whitespace());
        let matches = command::<Options>().try_get_matches_from(words).map_err(|e| e.to_string())?;
        Options::from_arg_matches(&matches).map_err(|e| e.to_string())
    }

    #[test]
    fn numbers_that_mean_something_are_taken() {
        let options = parse("--lr 0.5 --batch 3 --resume --threads 2 --device cpu").unwrap();
        assert_eq!((options.lr, options.batch, options.resume), (0.5, 3, true));
        assert!(options.on.open().is_ok());
        assert_eq!(parse("").unwrap().batch, 8);
    }

    #[test]
    fn others_are_refused_with_the_rule() {
        for (line, rule) in [
            ("--lr -1", "must be a finite number above 0"),
            ("--lr nan", "must be a finite number above 0"),
            ("--lr inf", "must be a finite number above 0"),
            ("--lr 0", "must be a finite number above 0"),
            ("--lr fast", "must be a finite number above 0"),
            ("--batch 0", "must be a whole number above 0"),
            ("--batch -4", "must be a whole number above 0"),
            ("--batch 2.5", "must be a whole number above 0"),
            ("--threads 0", "must be a whole number above 0"),
            ("--device abacus", "none of cpu, wgpu[:N] and cuda[:N]"),
        ] {
            let error = parse(line).unwrap_err();
            let option = line.split_once(' ').unwrap().0;
            assert!(error.contains(rule) && error.contains(option), "{line}: {error}");
        }
        assert_eq!(from_0("0"), Ok(0.0));
        assert!(from_0("-0.1").is_err() && from_0("NaN").is_err());
        assert_eq!(float("bf16"), Ok(DType::BF16));
        assert!(float("i64").is_err());
    }

    #[test]
    fn help_names_every_option() {
        let help = command::<Options>().try_get_matches_from(["example", "--help"]).unwrap_err().to_string();
        for option in ["--lr", "--batch", "--resume", "--device", "--threads"] {
            assert!(help.contains(option), "{help}");
        }
    }
}
