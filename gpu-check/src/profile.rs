//! A profile of a training step: the time that the GPU spends in each kernel.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use weftgrad::{
    Cuda, Runtime,
    trace::{Detail, Recording, RecordingOptions, SpanKind},
};
use weftgrad_bench::cases::build;

use crate::report::Found;

/// The number of recorded steps, after as many that are not recorded.
const STEPS: usize = 3;

pub(crate) fn items(quick: bool) -> Vec<String> {
    let cases: &[&str] = if quick { &["mlp"] } else { &["gpt2 16 1024", "gptbf16"] };
    cases.iter().map(|case| case.to_string()).collect()
}

/// Measures each kernel of a case: milliseconds and calls per step, and its share of the time. The longest kernel comes
/// first.
pub(crate) fn run(rt: &Cuda, case: &str) -> Result<Found, String> {
    let words: Vec<&str> = case.split_whitespace().collect();
    let mut built = build(rt, &words)?;
    let error = |e: weftgrad::Error| e.to_string();
    let mut steps = || (0..STEPS).try_for_each(|_| (built.run)()).and_then(|()| rt.synchronize());
    steps().map_err(error)?;
    let options = RecordingOptions { detail: Detail::Operations, ..Default::default() };
    let recording = Recording::start(options).map_err(error)?;
    steps().map_err(error)?;
    let trace = recording.stop();
    let mut kernels: BTreeMap<String, (u64, usize)> = BTreeMap::new();
    for span in trace.threads.iter().flat_map(|thread| &thread.spans).filter(|span| span.kind == SpanKind::Kernel) {
        let of = span.of.as_deref().unwrap_or_default();
        let (time, calls) = kernels.entry(format!("{} {of}", span.name)).or_default();
        (*time, *calls) = (*time + (span.end - span.start), *calls + 1);
    }
    let total: u64 = kernels.values().map(|(time, _)| time).sum();
    let mut rows: Vec<_> = kernels.into_iter().collect();
    rows.sort_by_key(|(_, (time, _))| std::cmp::Reverse(*time));
    let row = |(name, (time, calls)): (String, (u64, usize))| {
        let ms = time as f64 / 1e6 / STEPS as f64;
        json!({ "kernel": name, "ms": ms, "calls": calls as f64 / STEPS as f64, "share": time as f64 / total.max(1) as f64 })
    };
    let rows: Vec<Value> = rows.into_iter().map(row).collect();
    let failures = if rows.is_empty() { vec!["no kernel was recorded".to_string()] } else { Vec::new() };
    let whole = trace.length as f64 / 1e6 / STEPS as f64;
    let found = Found::checks(1, failures).with("step_ms", whole).with("kernels_ms", total as f64 / 1e6 / STEPS as f64);
    Ok(found.with("longest", rows.first().map(|row| row["kernel"].clone())).with("kernels", rows))
}
