//! Rungs of the ladder and sections of the suite under NVIDIA's `compute-sanitizer`. It shows faults that an emulator
//! cannot, such as races between the threads of a warp.

use std::{
    env, fs,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use crate::{args::Args, report::Found, supervise::wait};

const TOOLS: [&str; 4] = ["memcheck", "racecheck", "initcheck", "synccheck"];
/// Items with many hand-written kernels at small sizes.
const ITEMS: [&str; 5] =
    ["ladder/attention", "ladder/norms", "ladder/cross-entropy", "suite/scans and sorts", "suite/index"];
/// Where the program is, if the search path does not have it.
const PLACES: [&str; 2] = ["compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer"];
/// What it ends with if it found something.
const FOUND: i32 = 86;

pub(crate) fn items() -> Vec<String> {
    TOOLS.iter().flat_map(|tool| ITEMS.iter().map(move |item| format!("{tool} {item}"))).collect()
}

/// Runs an item in a process that the tool watches. The process is ended with this item.
pub(crate) fn run(args: &Args, item: &str) -> Result<Found, String> {
    let (tool, checked) = item.split_once(' ').ok_or_else(|| format!("no item {item}"))?;
    let is_there = |place: &&&str| {
        Command::new(place).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
    };
    let Some(sanitizer) = PLACES.iter().find(is_there) else {
        return Err("compute-sanitizer is not here; it comes with the CUDA toolkit".into());
    };
    let words = |e: std::io::Error| e.to_string();
    let at = |end: &str| env::temp_dir().join(format!("weftgrad-sanitized-{}.{end}", std::process::id()));
    let (result, log) = (at("json"), at("log"));
    let mut command = Command::new(sanitizer);
    command.args(["--tool", tool, "--error-exitcode", &FOUND.to_string(), "--print-limit", "20"]);
    command.arg("--log-file").arg(&log).arg(env::current_exe().map_err(words)?);
    // Else what a kernel writes beyond a block is in another one's memory, and goes unseen.
    command.env("WEFTGRAD_CUDA_BLOCKS", "apart");
    command.args(["--device", "cuda", "--item", checked]).arg(&result);
    // Ends before this process is ended.
    let limit = Duration::from_secs_f64((args.minutes * 60.0 - 5.0).max(1.0));
    let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().map_err(words)?;
    let ended = wait(child, Instant::now() + limit)?;
    let text = fs::read(&log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    let _ = (fs::remove_file(&result), fs::remove_file(&log));
    let said: Vec<String> = text.lines().filter(|line| line.starts_with("=========")).map(String::from).collect();
    let failures = match ended {
        Some(status) if status.success() => Vec::new(),
        Some(status) => said.iter().take(20).cloned().chain([format!("ended with {status}")]).collect(),
        None => vec![format!("not done after {} s", limit.as_secs())],
    };
    Ok(Found::checks(1, failures).with("said", said.last().cloned()))
}
