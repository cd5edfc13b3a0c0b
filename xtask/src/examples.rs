//! The stage `examples`: each example program runs with sizes small enough for seconds, and refuses what makes no
//! sense.

use std::process::Command;

use crate::{
    repo,
    stages::{run_cargo, shown},
};

/// An example binary and the arguments of its smoke run.
struct Example {
    bin: &'static str,
    args: &'static [&'static str],
}

/// Arguments that an example refuses: it fails, and says this.
struct Refusal {
    example: Example,
    says: &'static str,
}

/// Where smoke runs write.
const SMOKE: &str = "target/smoke/char-gpt";

#[rustfmt::skip]
const TINY_GPT: &[&str] = &[
    "--steps", "3", "--layers", "1", "--width", "48", "--context", "32", "--batch", "4", "--sample", "40", "--out", SMOKE,
];

#[rustfmt::skip]
const TIMED_GPT: &[&str] = &[
    "--seconds", "0.5", "--layers", "1", "--width", "32", "--batch", "2", "--sample", "40", "--out", "target/smoke/timed",
];

#[rustfmt::skip]
const TINY_PIPELINE: &[&str] = &[
    "--ranks", "3", "--schedule", "ZB-H1", "--micro-batches", "6", "--steps", "2", "--out", "target/smoke/pipeline",
];

const EXAMPLES: &[Example] = &[
    Example { bin: "tensors", args: &[] },
    Example { bin: "tensors", args: &["--help"] },
    Example { bin: "custom-op", args: &[] },
    Example { bin: "mlp", args: &[] },
    Example { bin: "mnist", args: &["--images", "160", "--batch", "32", "--epochs", "1"] },
    Example { bin: "ddp", args: &["--ranks", "3", "--steps", "4"] },
    Example { bin: "zero", args: &["--ranks", "2", "--width", "32", "--layers", "2"] },
    Example { bin: "reshard", args: &["--out", "target/smoke/reshard"] },
    Example { bin: "soak", args: &["--seeds", "40"] },
    Example { bin: "char-gpt", args: TINY_GPT },
    Example { bin: "char-gpt", args: &["--resume", "--steps", "5", "--sample", "40", "--out", SMOKE] },
    Example { bin: "char-gpt", args: TIMED_GPT },
    Example { bin: "pipeline", args: TINY_PIPELINE },
];

const fn refusal(bin: &'static str, args: &'static [&'static str], says: &'static str) -> Refusal {
    Refusal { example: Example { bin, args }, says }
}

const COUNT: &str = "must be a whole number above 0";
const NUMBER: &str = "must be a finite number above 0";

/// One row for each rule of each program that has it; the rules themselves are tested in the examples' library.
#[rustfmt::skip]
const REFUSALS: &[Refusal] = &[
    refusal("tensors", &["--batch", "3"], "unexpected argument '--batch'"),
    refusal("mlp", &["--device", "abacus"], "none of cpu"),
    refusal("mnist", &["--images", "0"], COUNT),
    refusal("mnist", &["--batch", "0"], COUNT),
    refusal("mnist", &["--images", "100", "--batch", "1000"], "--batch 1000 is more than the 80 images"),
    refusal("mnist", &["--lr", "-1"], NUMBER),
    refusal("mnist", &["--threads", "0"], COUNT),
    refusal("char-gpt", &["--lr", "nan"], NUMBER),
    refusal("char-gpt", &["--steps", "5", "--seconds", "1"], "cannot be used with"),
    refusal("char-gpt", &["--resume", "--out", "target/smoke/none"], "no checkpoint to resume"),
    refusal("char-gpt", &["--resume", "--lr", "0.1", "--out", SMOKE], "leave those options out"),
    refusal("ddp", &["--ranks", "0"], COUNT),
    refusal("zero", &["--width", "0"], COUNT),
    refusal("zero", &["--width", "30"], "4 heads do not divide a width of 30"),
    refusal("reshard", &["--from", "0"], COUNT),
    refusal("pipeline", &["--micro-batches", "0"], COUNT),
];

/// Runs every example in turn.
pub fn run() -> Result<(), String> {
    EXAMPLES.iter().try_for_each(|example| run_cargo(&example.cargo_args(), &[]))?;
    REFUSALS.iter().try_for_each(Refusal::run)
}

impl Example {
    fn cargo_args(&self) -> Vec<&'static str> {
        [&["run", "--release", "--bin", self.bin, "--"], self.args].concat()
    }
}

impl Refusal {
    fn run(&self) -> Result<(), String> {
        let args = self.example.cargo_args();
        let line = shown(&args, &[]);
        println!("$ {line}  # is refused");
        let output = Command::new("cargo").args(&args).current_dir(repo::root()).output();
        let output = output.map_err(|error| format!("`{line}` could not be started: {error}"))?;
        self.check(&line, output.status.success(), &String::from_utf8_lossy(&output.stderr))
    }

    fn check(&self, line: &str, succeeded: bool, said: &str) -> Result<(), String> {
        match (succeeded, said.contains(self.says)) {
            (true, _) => Err(format!("`{line}` succeeded; it must be refused")),
            (false, false) => Err(format!("`{line}` does not say \"{}\" but:\n{said}", self.says)),
            (false, true) => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_example_runs_by_its_binary() {
        let example = Example { bin: "mlp", args: &["--steps", "3"] };
        assert_eq!(example.cargo_args().join(" "), "run --release --bin mlp -- --steps 3");
    }

    #[test]
    fn a_refusal_fails_and_says_why() {
        let row = refusal("mnist", &["--batch", "0"], COUNT);
        assert!(row.check("line", false, "error: must be a whole number above 0").is_ok());
        assert!(row.check("line", true, "error: must be a whole number above 0").is_err());
        assert!(row.check("line", false, "thread 'main' panicked").is_err_and(|e| e.contains("panicked")));
    }
}
