//! Losses of GPT-2 at its full size, of whole training steps on one batch. Kernels that are wrong only for long rows, a
//! large vocabulary or halves show here.

use weftgrad::Runtime;
use weftgrad_bench::cases::build;

use crate::report::Found;

/// Cases, and their losses on the CPU after the steps that a case takes to warm up. Weights in bf16 are rounded after
/// each update, so their losses are others.
const WANTED: [(&str, [f64; 5]); 2] = [
    ("gpt2 1 1024", [9.778113, 9.290243, 10.056463, 8.971571, 8.738895]),
    ("gpt2f32 1 1024", [9.783657, 9.331360, 9.582763, 9.072245, 8.954551]),
];
/// The largest difference, relative to the loss.
const TOLERANCE: f64 = 0.01;

pub(crate) fn items() -> Vec<String> {
    WANTED.iter().map(|(case, _)| case.to_string()).collect()
}

pub(crate) fn run<R: Runtime>(rt: &R, case: &str) -> Result<Found, String> {
    let (_, wanted) = WANTED.iter().find(|(name, _)| *name == case).ok_or_else(|| format!("no losses of `{case}`"))?;
    let mut built = build(rt, &case.split_whitespace().collect::<Vec<_>>())?;
    let mut losses = Vec::new();
    for _ in wanted {
        (built.run)().map_err(|e| e.to_string())?;
        losses.push(built.loss.get().unwrap_or(f64::NAN));
    }
    let failures = wanted.iter().zip(&losses).enumerate().filter_map(|(i, (want, got))| {
        // NaN is a failure.
        let is_near = (got - want).abs() <= TOLERANCE * want;
        (!is_near).then(|| format!("loss {i} is {got}, and {want} on the processor"))
    });
    Ok(Found::checks(losses.len(), failures.collect()).with("losses", losses))
}
