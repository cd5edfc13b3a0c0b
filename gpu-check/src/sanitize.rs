//! Sections of the suite under NVIDIA's `compute-sanitizer`: what an emulator cannot show, such as races between the threads of a warp, and shared memory
//! that is read before it is written.

use std::{env, fs, process::Command};

use crate::report::Found;

const TOOLS: [&str; 3] = ["memcheck", "racecheck", "initcheck"];
/// The sections with the most hand-written kernels.
const SECTIONS: [&str; 4] = ["fused kernels", "sizes", "scans and sorts", "index"];
/// What the tool ends with if it found something.
const FOUND: i32 = 86;

pub fn items() -> Vec<String> {
    TOOLS.iter().flat_map(|tool| SECTIONS.iter().map(move |section| format!("{tool} {section}"))).collect()
}

/// Runs an item of the suite in a process that the tool watches.
pub fn run(item: &str) -> Result<Found, String> {
    let (tool, section) = item.split_once(' ').ok_or_else(|| format!("no item {item}"))?;
    let result = env::temp_dir().join(format!("weftgrad-sanitized-{}.json", std::process::id()));
    let program = env::current_exe().map_err(|e| e.to_string())?;
    let mut command = Command::new("compute-sanitizer");
    command.args(["--tool", tool, "--error-exitcode", &FOUND.to_string(), "--print-limit", "20"]).arg(program);
    let output = command.args(["--device", "cuda", "--item", &format!("suite/{section}")]).arg(&result).output();
    let _ = fs::remove_file(&result);
    let output = output.map_err(|e| format!("compute-sanitizer: {e}; it comes with the CUDA toolkit"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let said: Vec<String> = text.lines().filter(|line| line.starts_with("=========")).map(String::from).collect();
    let failures = match output.status.code() {
        Some(0) => Vec::new(),
        _ => said.iter().take(20).cloned().chain([format!("ended with {}", output.status)]).collect(),
    };
    Ok(Found::checks(1, failures).with("said", said.last().cloned()))
}
