//! The benchmark cases, one per item, and the throughput that follows from their times.

use std::time::{Duration, Instant};

use weftgrad::{Cuda, Runtime, autograd::with_recomputation};
use weftgrad_bench::{
    cases::{Case, build, build_captured},
    timing,
};

use crate::report::Found;

const ROUNDS: usize = 5;
/// The time that a case runs before it is timed.
const WARM: Duration = Duration::from_millis(300);

/// The amount of work of a call, from which a case's throughput follows.
#[derive(Clone, Copy)]
enum Amount {
    /// Floating-point operations of a call.
    Operations(f64),
    /// Bytes of memory read and written by a call.
    Bytes(f64),
    /// Tokens of a call.
    Tokens(f64),
    None,
}

const GIB: f64 = (1u64 << 30) as f64;

/// Cases for a GPU, large enough to be measured.
#[rustfmt::skip]
const FULL: &[(&str, Amount)] = &[
    // The most requested cases come first.
    ("gpt2 16 1024", Amount::Tokens(16384.0)),
    ("gptbf16", Amount::Tokens(2048.0)),
    ("attnbf16fb 16 12 1024 64", Amount::None),
    ("xentfb 16384 50257", Amount::None),
    ("xentfb 16384 50304", Amount::None),
    ("xentbf16fb 16384 50257", Amount::None),
    ("xentbf16fb 16384 50304", Amount::None),
    ("colsumbf16 16384 768", Amount::Bytes(25.2e6)),
    ("colsumbf16 16384 3072", Amount::Bytes(100.7e6)),
    ("linearbf16 16384 768 768", Amount::Operations(19.33e9)),
    ("linearbf16fb 16384 3072 768", Amount::Operations(231.9e9)),
    ("layernormbf16fb 16384 768", Amount::None),
    ("gemmbf16 16384 768 2304", Amount::Operations(57.98e9)),
    ("gemmbf16 16384 768 3072", Amount::Operations(77.31e9)),
    ("gemmbf16 16384 768 50257", Amount::Operations(1264.8e9)),
    ("gemmbf16 16384 768 50304", Amount::Operations(1265.9e9)),
    ("gemmbf16nt 16384 768 3072", Amount::Operations(77.31e9)),
    ("gemmbf16tn 768 16384 3072", Amount::Operations(77.31e9)),
    ("gemmbf16tn 768 16384 50257", Amount::Operations(1264.8e9)),
    ("copy 268435456", Amount::Bytes(2.0 * GIB)),
    ("add 268435456", Amount::Bytes(3.0 * GIB)),
    ("gelu 268435456", Amount::Bytes(2.0 * GIB)),
    ("sum 268435456", Amount::Bytes(GIB)),
    ("gemm 4096 4096 4096", Amount::Operations(137.4e9)),
    ("gemmbf16 4096 4096 4096", Amount::Operations(137.4e9)),
    ("gemmbf16 8192 8192 8192", Amount::Operations(1099.5e9)),
    ("gemmf16 8192 8192 8192", Amount::Operations(1099.5e9)),
    ("gemmbf16 8192 768 3072", Amount::Operations(38.65e9)),
    ("gemmbf16 8192 768 50257", Amount::Operations(632.3e9)),
    ("softmax 32768 1024", Amount::Bytes(0.25 * GIB)),
    ("softmaxbf16 32768 1024", Amount::Bytes(0.125 * GIB)),
    ("layernorm 32768 1024", Amount::Bytes(0.25 * GIB)),
    ("layernormfb 32768 1024", Amount::None),
    ("rmsnormfb 32768 1024", Amount::None),
    ("xentfb 8192 50257", Amount::None),
    ("emb 50257 768 65536", Amount::None),
    ("attn 8 12 1024 64", Amount::None),
    ("attnfb 8 12 1024 64", Amount::None),
    ("adamw 134217728", Amount::Bytes(28.0 * 0.125 * GIB)),
    ("tinyadd", Amount::None),
    ("chain", Amount::None),
    ("mlp", Amount::None),
    ("cnn", Amount::None),
    ("gpt", Amount::Tokens(2048.0)),
    ("gpt2 8 1024", Amount::Tokens(8192.0)),
];

/// Cases that end within seconds anywhere, which only show that the program works.
const QUICK: &[(&str, Amount)] = &[
    ("copy 1048576", Amount::Bytes(8.4e6)),
    ("sum 1048576", Amount::Bytes(4.2e6)),
    ("gemm 256 256 256", Amount::Operations(33.6e6)),
    ("softmax 256 256", Amount::Bytes(0.5e6)),
    ("layernormfb 256 256", Amount::None),
    ("xentfb 64 1000", Amount::None),
    ("attnfb 1 2 64 32", Amount::None),
    ("mlp", Amount::None),
    ("gpttinybf16", Amount::Tokens(32.0)),
];

/// Training steps that are also timed as captured steps.
const CAPTURED: &[&str] = &["gpt2 16 1024", "gptbf16", "mlp"];
const CAPTURED_QUICK: &[&str] = &["gpttinybf16"];

fn table(quick: bool) -> &'static [(&'static str, Amount)] {
    if quick { QUICK } else { FULL }
}

pub(crate) fn items(quick: bool) -> Vec<String> {
    table(quick).iter().map(|(case, _)| case.to_string()).collect()
}

pub(crate) fn captured_items(quick: bool) -> Vec<String> {
    let cases = if quick { CAPTURED_QUICK } else { CAPTURED };
    cases.iter().map(|case| case.to_string()).collect()
}

pub(crate) fn run<R: Runtime>(rt: &R, case: &str) -> Result<Found, String> {
    let words: Vec<&str> = case.split_whitespace().collect();
    timed(build(rt, &words)?, case)
}

/// Times a case with its step captured.
pub(crate) fn run_captured(rt: &Cuda, case: &str) -> Result<Found, String> {
    let words: Vec<&str> = case.split_whitespace().collect();
    timed(build_captured(rt, &words)?, case)
}

/// Items that time GPT-2's step under options other than the defaults.
pub(crate) fn choices(quick: bool) -> Vec<String> {
    let case = if quick { "gpttinybf16" } else { "gpt2 16 1024" };
    let attention = if quick { "attnbf16fb 1 2 64 64" } else { "attnbf16fb 16 12 1024 64" };
    let steps = ["tuned", "recomputed", "warpgroups"].iter().map(|choice| format!("{choice}: {case}"));
    steps.chain([format!("warpgroups: {attention}")]).collect()
}

pub(crate) fn run_choice(rt: &Cuda, item: &str) -> Result<Found, String> {
    match item.split_once(": ") {
        Some(("tuned", case)) => run(&rt.clone().with_tuned_products(true), case),
        Some(("warpgroups", case)) => run(&rt.clone().with_warpgroups(true), case),
        Some(("recomputed", case)) => with_recomputation(true, || run(rt, case)),
        _ => Err(format!("`{item}` is no choice")),
    }
}

fn timed(built: Case, case: &str) -> Result<Found, String> {
    let times = measure(built)?;
    let found = Found::default().with("min_ms", times.least).with("median_ms", times.median);
    let found = found.with("spread_percent", times.spread).with("loss", times.loss);
    let amount = FULL.iter().chain(QUICK).find(|(name, _)| *name == case).map_or(Amount::None, |(_, amount)| *amount);
    let (rate, unit) = amount.per_second(times.median).unzip();
    Ok(found.with("rate", rate).with("unit", unit))
}

/// The times of a case in milliseconds.
struct Times {
    least: f64,
    /// The median of the faster of two series.
    median: f64,
    /// The percentage by which the other series was slower. Two runs may differ by this much without a reason.
    spread: f64,
    loss: Option<f64>,
}

fn measure(mut built: Case) -> Result<Times, String> {
    // Clocks of an idle GPU are low, and rise while it works.
    let begun = Instant::now();
    while begun.elapsed() < WARM {
        timing::per_call(&mut built).map_err(|e| e.to_string())?;
    }
    let mut series = || {
        let times = (0..ROUNDS).map(|_| timing::per_call(&mut built).map(|ns| ns / 1e6));
        let mut times = times.collect::<weftgrad::Result<Vec<f64>>>().map_err(|e| e.to_string())?;
        times.sort_by(f64::total_cmp);
        Ok::<_, String>((times[0], times[times.len() / 2]))
    };
    let (first, second) = (series()?, series()?);
    let loss = built.loss.get();
    if let Some(loss) = loss.filter(|l| !l.is_finite()) {
        return Err(format!("the loss is {loss}"));
    }
    let (median, slower) = (first.1.min(second.1), first.1.max(second.1));
    Ok(Times { least: first.0.min(second.0), median, spread: (slower / median - 1.0) * 100.0, loss })
}

impl Amount {
    fn per_second(self, milliseconds: f64) -> Option<(f64, &'static str)> {
        let rate = |amount: f64, unit: f64| amount / (milliseconds * 1e-3) / unit;
        match self {
            Amount::Operations(n) => Some((rate(n, 1e12), "TFLOP/s")),
            Amount::Bytes(n) => Some((rate(n, 1e9), "GB/s")),
            Amount::Tokens(n) => Some((rate(n, 1.0), "tok/s")),
            Amount::None => None,
        }
    }
}
