//! PyTorch's values, which travel inside the program.

use std::{collections::BTreeMap, fs, path::PathBuf, time::Instant};

use conformance::golden::{Options, Outcome, load, run_case};
use weftgrad::Runtime;

use crate::report::Report;

macro_rules! embedded {
    ($($file:literal),* $(,)?) => {
        const FILES: &[(&str, &[u8])] = &[$(($file, include_bytes!(concat!("../../conformance/goldens/", $file)))),*];
    };
}
embedded!(
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

/// Writes them where the suite can read them, and says where.
pub fn unpack() -> Result<PathBuf, String> {
    let folder = std::env::temp_dir().join(format!("weftgrad-goldens-{}", env!("CARGO_PKG_VERSION")));
    let io = |e: std::io::Error| format!("{}: {e}", folder.display());
    fs::create_dir_all(&folder).map_err(io)?;
    FILES.iter().try_for_each(|(name, bytes)| fs::write(folder.join(name), bytes)).map_err(io)?;
    Ok(folder)
}

/// Every case, group by group.
pub fn run<R: Runtime>(rt: &R, report: &mut Report) {
    let cases = match load(conformance::goldens(), &[]) {
        Ok(cases) => cases,
        Err(e) => return report.broken("goldens", "files", e.to_string()),
    };
    let mut groups: BTreeMap<&str, Vec<_>> = BTreeMap::new();
    cases.iter().for_each(|case| groups.entry(&case.group).or_default().push(case));
    for (group, cases) in groups {
        let start = Instant::now();
        let failure = |case: &&conformance::golden::Case| match run_case(rt, case, Options::default()) {
            Outcome::Failed(lines) => Some(format!("{} {}: {}", case.id, case.op, lines.join("; "))),
            _ => None,
        };
        let failures: Vec<String> = cases.iter().filter_map(failure).collect();
        report.checks("goldens", group, cases.len(), failures, start.elapsed());
    }
}
