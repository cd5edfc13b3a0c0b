//! PyTorch's values, which travel inside the program.

use std::{fs, path::PathBuf};

use conformance::golden::{Options, Outcome, load, run_case};
use weftgrad::Runtime;

use crate::report::Found;

macro_rules! embedded {
    ($($file:literal),* $(,)?) => {
        const FILES: &[(&str, &[u8])] = &[$(($file, include_bytes!(concat!("../../conformance/goldens/", $file)))),*];
    };
}
embedded!(
    "func.json",
    "func.safetensors",
    "func_models.json",
    "func_models.safetensors",
    "loss.json",
    "loss.safetensors",
    "lr.json",
    "matmul.json",
    "matmul.safetensors",
    "nn.json",
    "nn.safetensors",
    "optim.json",
    "optim.safetensors",
    "pointwise.json",
    "pointwise.safetensors",
    "reduce.json",
    "reduce.safetensors",
    "shape.json",
    "shape.safetensors",
    "train.json",
    "train.safetensors",
);

/// Writes the values to a folder that the suite can read, and returns the folder.
pub(crate) fn unpack() -> Result<PathBuf, String> {
    let folder = std::env::temp_dir().join(format!("weftgrad-goldens-{}", env!("CARGO_PKG_VERSION")));
    let io = |e: std::io::Error| format!("{}: {e}", folder.display());
    fs::create_dir_all(&folder).map_err(io)?;
    FILES.iter().try_for_each(|(name, bytes)| fs::write(folder.join(name), bytes)).map_err(io)?;
    Ok(folder)
}

/// The groups of cases, by the names of their files.
pub(crate) fn items() -> Vec<String> {
    let names = FILES.iter().filter_map(|(name, _)| name.strip_suffix(".json"));
    names.map(String::from).collect()
}

/// Runs every case of a group.
pub(crate) fn run<R: Runtime>(rt: &R, group: &str) -> Result<Found, String> {
    let cases = load(conformance::goldens(), &[group.to_string()]).map_err(|e| e.to_string())?;
    let failure = |case: &conformance::golden::Case| match run_case(rt, case, Options::default()) {
        Outcome::Failed(lines) => Some(format!("{} {}: {}", case.id, case.op, lines.join("; "))),
        _ => None,
    };
    Ok(Found::checks(cases.len(), cases.iter().filter_map(failure).collect()))
}
