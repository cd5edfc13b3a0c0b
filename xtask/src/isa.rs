//! The stage `isa`: suites whose results depend on kernels, at every instruction set that the CPU has. The widest ran
//! in the stage `test`; a test that passes at one level alone would be found on another machine only.

use std::process::{Command, Stdio};

use crate::{repo, stages};

/// Caps the level of a process.
const CAP: &str = "WEFTGRAD_MAX_CPU_ISA";

/// Test programs, and the tests to run from each: all of them if the list is empty. The conformance suite, and the
/// tests of independence from the number of ranks.
const SUITES: &[(&str, &[&str])] = &[("cpu", &[]), ("all", &["canonical"])];

pub(crate) fn run() -> Result<(), String> {
    let levels = levels()?;
    let absent: Vec<&str> = levels.iter().filter(|(_, has)| !has).map(|(name, _)| name.as_str()).collect();
    let present: Vec<&str> = levels.iter().filter(|(_, has)| *has).map(|(name, _)| name.as_str()).collect();
    println!("instruction sets of this processor: {}; absent, and so not tested: {}", list(&present), list(&absent));
    let narrower = present.split_last().map_or(&[][..], |(_, rest)| rest);
    narrower.iter().rev().try_for_each(|level| SUITES.iter().try_for_each(|suite| run_suite(suite, level)))
}

fn run_suite((program, filters): &(&str, &[&str]), level: &str) -> Result<(), String> {
    let selection = stages::tests_args(&["--test", program]);
    stages::run_cargo(&[&selection[..], &["--"], filters].concat(), &[(CAP, level)])
}

/// The levels as the runtime's own test prints them, narrowest first, and whether the CPU has each.
fn levels() -> Result<Vec<(String, bool)>, String> {
    let args = [&stages::tests_args(&["--test", "isa"])[..], &["--", "--nocapture", "levels"]].concat();
    let output = Command::new("cargo").args(&args).current_dir(repo::root()).stderr(Stdio::inherit()).output();
    let output = output.map_err(|error| format!("`cargo {}` could not be started: {error}", args.join(" ")))?;
    let levels = parse(&String::from_utf8_lossy(&output.stdout));
    if levels.is_empty() { Err(format!("`cargo {}` printed no level", args.join(" "))) } else { Ok(levels) }
}

fn parse(text: &str) -> Vec<(String, bool)> {
    // The test's own name may stand before the first of them on its line.
    let level = |line: &str| {
        let mut words = line.split_once("isa ")?.1.split_whitespace();
        Some((words.next()?.to_string(), words.next()? == "yes"))
    };
    text.lines().filter_map(level).collect()
}

fn list(names: &[&str]) -> String {
    if names.is_empty() { "none".into() } else { names.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_read() {
        let text = "running 1 test\ntest levels ... isa baseline yes\nisa avx2 yes\nisa amx no\nok\n";
        let levels = parse(text);
        assert_eq!(
            levels.iter().map(|(n, has)| (n.as_str(), *has)).collect::<Vec<_>>(),
            [("baseline", true), ("avx2", true), ("amx", false)]
        );
    }
}
