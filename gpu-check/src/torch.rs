//! PyTorch's times on the benchmark cases, by the script that travels inside the program.

use std::{env, fs, process::Command, time::Duration};

use serde_json::Value;

use crate::{args::Args, bench, libraries, report::Found};

const SCRIPT: &str = include_str!("../torch_times.py");

/// Runs it until it ends or the time is over; it writes every row at once.
pub(crate) fn run(args: &Args) -> Result<Found, String> {
    let folder = env::temp_dir();
    let name = |end: &str| folder.join(format!("weftgrad-torch-{}.{end}", std::process::id()));
    let (script, out) = (name("py"), name("json"));
    fs::write(&script, SCRIPT).map_err(|e| format!("{}: {e}", script.display()))?;
    let device = if args.device == "cuda" { "cuda" } else { "cpu" };
    // Ends before this process is ended.
    let seconds = (Duration::from_secs_f64(args.minutes * 60.0).as_secs_f64() - 3.0).max(1.0);
    let mut command = Command::new("python3");
    command.arg(&script).arg("--out").arg(&out).args(["--device", device, "--seconds", &seconds.to_string()]);
    // A toolkit's cuDNN in place of PyTorch's own would choose another attention.
    command.env(libraries::PATH, env::var_os(libraries::GIVEN).unwrap_or_default());
    let status = command.args(bench::items(args.quick)).status().map_err(|e| format!("python3: {e}"))?;
    let text = fs::read_to_string(&out).unwrap_or_default();
    let all: Value = serde_json::from_str(&text).unwrap_or_default();
    let _ = (fs::remove_file(&script), fs::remove_file(&out));
    if all["cases"].as_array().is_none_or(Vec::is_empty) {
        return Err(format!("PyTorch timed nothing ({status}); is it installed?"));
    }
    Ok(Found::default().with("machine", all["machine"].clone()).with("cases", all["cases"].clone()))
}
