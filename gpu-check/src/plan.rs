//! The plan of a run, in order: parts, each of them items, each item a separate process.

use std::time::Duration;

use weftgrad::{Cpu, Cuda, Runtime};

use crate::{args::Args, bench, copies, goldens, graph, parity, report::Found, suite, torch};

/// A kind of item.
pub struct Part {
    pub name: &'static str,
    pub about: &'static str,
    /// Whether its items may run in parallel, which makes times meaningless.
    pub beside: bool,
    /// The longest an item may take, in seconds.
    pub limit: u64,
    /// Whether the part is meant for GPUs; on other devices it runs only on request.
    pub gpu_only: bool,
    items: fn(bool) -> Vec<String>,
}

impl Part {
    pub fn items(&self, args: &Args) -> Vec<String> {
        let wanted = |item: &String| args.only.is_empty() || args.only.iter().any(|text| item.contains(text));
        (self.items)(args.quick).into_iter().filter(wanted).collect()
    }

    pub fn limit(&self) -> Duration {
        Duration::from_secs(self.limit)
    }
}

const fn checks(name: &'static str, about: &'static str, items: fn(bool) -> Vec<String>) -> Part {
    // Every kernel is new to a machine: compiling them is most of the time.
    Part { name, about, beside: true, limit: 240, gpu_only: false, items }
}

const fn times(name: &'static str, about: &'static str, limit: u64, items: fn(bool) -> Vec<String>) -> Part {
    Part { name, about, beside: false, limit, gpu_only: false, items }
}

/// The most informative parts come first, as time may run out.
#[rustfmt::skip]
pub const PARTS: &[Part] = &[
    Part { limit: 90, beside: false, ..checks("device", "it opens, holds values and gives them back", |_| words(&["open"])) },
    checks("parity", "a GPT's loss and every gradient against the processor", |_| words(&["gpt step"])),
    checks("suite", "the conformance suite, a section an item", |_| suite::items()),
    checks("goldens", "PyTorch's values and training runs, a group an item", |_| goldens::items()),
    Part { gpu_only: true, ..checks("graph", "a captured step computes what the step does", |_| words(&["gpt step"])) },
    times("copies", "the bandwidth of copies, alone and beside kernels", 60, |_| words(&["bandwidth", "overlap"])),
    times("bench", "the benchmark cases", 60, bench::items),
    Part { gpu_only: true, ..times("torch", "PyTorch on the same cases: eager, then compiled, as far as time goes", 600, |_| words(&["times"])) },
];

fn words(items: &[&str]) -> Vec<String> {
    items.iter().map(|i| i.to_string()).collect()
}

/// Runs one item here.
pub fn run(args: &Args, part: &str, item: &str) -> Result<Found, String> {
    let words = |e: weftgrad::Error| e.to_string();
    match (part, args.device.as_str()) {
        ("torch", _) => torch::run(args),
        ("graph", "cpu") => Err("the processor captures nothing".into()),
        ("graph", _) => graph::run(&gpu(args)?).map_err(words),
        (_, "cpu") => on(&Cpu::new(), args, part, item),
        _ => on(&gpu(args)?, args, part, item),
    }
}

fn gpu(args: &Args) -> Result<Cuda, String> {
    #[cfg(feature = "emulate")]
    if args.device == "emulated" {
        return Cuda::emulated(std::env::temp_dir().join("weftgrad-emulated")).map_err(|e| e.to_string());
    }
    let _ = args;
    Cuda::new(0).map_err(|e| e.to_string())
}

fn on<R: Runtime>(rt: &R, args: &Args, part: &str, item: &str) -> Result<Found, String> {
    let words = |e: weftgrad::Error| e.to_string();
    match part {
        "device" => copies::open(rt).map_err(words),
        "suite" => suite::run(rt, item),
        "goldens" => goldens::run(rt, item),
        "parity" => parity::run(rt).map_err(words),
        "copies" => copies::run(rt, item, args.quick).map_err(words),
        "bench" => bench::run(rt, item),
        _ => Err(format!("`{part}` is no part")),
    }
}
