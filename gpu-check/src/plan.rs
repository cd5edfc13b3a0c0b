//! The plan of a run, in order: parts, each of them items, each item a separate process.

use std::time::Duration;

use weftgrad::{Cpu, Cuda, Runtime};

use crate::{
    args::Args, bench, copies, goldens, graph, ladder, losses, nccl, parity, profile, report::Found, sanitize, suite,
    torch,
};

/// A kind of item.
pub(crate) struct Part {
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
    /// The items that `--only` leaves: of small cases, or of all.
    pub(crate) fn items(&self, args: &Args) -> Vec<String> {
        let wanted = |item: &String| args.only.is_empty() || args.only.iter().any(|text| item.contains(text));
        (self.items)(args.quick).into_iter().filter(wanted).collect()
    }

    pub(crate) fn limit(&self) -> Duration {
        Duration::from_secs(self.limit)
    }
}

const fn checks(name: &'static str, about: &'static str, items: fn(bool) -> Vec<String>) -> Part {
    Part { name, about, beside: true, limit: 60, gpu_only: false, items }
}

const fn times(name: &'static str, about: &'static str, limit: u64, items: fn(bool) -> Vec<String>) -> Part {
    Part { name, about, beside: false, limit, gpu_only: false, items }
}

/// The most informative parts come first, as time may run out.
#[rustfmt::skip]
pub(crate) const PARTS: &[Part] = &[
    checks("ladder", "a little of everything: memory, kernels, products, queues", |_| ladder::items()),
    checks("parity", "a GPT's loss and every gradient against the processor", |_| words(&["gpt step"])),
    Part { limit: 240, ..checks("suite", "the conformance suite, a section an item", |_| suite::items()) },
    checks("goldens", "PyTorch's values and training runs, a group an item", |_| goldens::items()),
    Part { gpu_only: true, ..checks("graph", "a captured step computes what the step does", |_| words(&["gpt step", "gpt step with adamw", "gpttinybf16"])) },
    Part { gpu_only: true, ..checks("losses", "five losses of GPT-2 at its full size against the processor's", |_| losses::items()) },
    Part { gpu_only: true, ..checks("memory", "eight gigabytes in one piece and in many", |quick| if quick { Vec::new() } else { words(&["large"]) }) },
    Part { gpu_only: true, ..checks("nccl", "NCCL with one rank: every collective, a captured step, a group, an abort", |_| words(&["one rank"])) },
    times("copies", "the bandwidth of copies, alone and beside kernels", 60, |_| words(&["bandwidth", "overlap"])),
    times("bench", "the benchmark cases", 60, bench::items),
    Part { gpu_only: true, ..times("captured", "training steps of the benchmark, captured", 60, bench::captured_items) },
    Part { gpu_only: true, ..times("choices", "GPT-2 with products whose algorithm is timed, values recomputed in backward, attention by warpgroups", 60, bench::choices) },
    Part { gpu_only: true, ..times("profile", "where the GPU's time in a training step goes, kernel by kernel", 60, profile::items) },
    Part { gpu_only: true, ..times("torch", "PyTorch on the same cases, GPT-2 first: eager, and compiled with its loss, as far as time goes", 600, |_| words(&["times"])) },
    // Last: a tool slows an item down up to a hundredfold.
    Part { gpu_only: true, ..times("sanitize", "hand-written kernels under compute-sanitizer", 120, |_| sanitize::items()) },
];

fn words(items: &[&str]) -> Vec<String> {
    items.iter().map(|i| i.to_string()).collect()
}

/// Runs one item here.
pub(crate) fn run(args: &Args, part: &str, item: &str) -> Result<Found, String> {
    match (part, args.device.as_str()) {
        ("torch", _) => torch::run(args),
        ("sanitize", _) => sanitize::run(args, item),
        ("nccl" | "profile" | "choices" | "graph" | "captured", "cpu" | "wgpu") => {
            Err(format!("`{part}` is of CUDA alone"))
        }
        (_, "cpu") => on(&Cpu::new(), args, part, item),
        #[cfg(feature = "wgpu")]
        (_, "wgpu") => {
            let wgpu = weftgrad::Wgpu::new(0).map_err(|e| e.to_string())?;
            Ok(on(&wgpu, args, part, item)?.with("adapter", wgpu.capabilities().name.to_string()))
        }
        _ => on_gpu(&gpu(args)?, args, part, item),
    }
}

fn on_gpu(cuda: &Cuda, args: &Args, part: &str, item: &str) -> Result<Found, String> {
    let words = |e: weftgrad::Error| e.to_string();
    match part {
        "nccl" => nccl::run(cuda, &args.device).map_err(words),
        "profile" => profile::run(cuda, item),
        "choices" => bench::run_choice(cuda, item),
        "captured" => bench::run_captured(cuda, item),
        "graph" => graph::run(cuda, item).map_err(words),
        _ => on(cuda, args, part, item),
    }
}

/// Runs the items whose kernels are the library's, on a device that only lists these, and prints how each item ended.
#[cfg(feature = "emulate")]
pub(crate) fn kernels(listing: &Cuda, args: &Args) {
    for part in args.parts().filter(|part| !["sanitize", "nccl", "copies", "profile", "torch"].contains(&part.name)) {
        // An item that fails has read zeros; its kernels are listed all the same.
        for item in part.items(args) {
            let done = on_gpu(listing, args, part.name, &item);
            println!("{}/{item}: {}", part.name, done.map_or_else(|why| why, |_| "listed".into()));
        }
    }
}

fn gpu(args: &Args) -> Result<Cuda, String> {
    #[cfg(feature = "emulate")]
    if args.device == "emulated" {
        return emulated_gpu::open(std::env::temp_dir().join("weftgrad-emulated")).map_err(|e| e.to_string());
    }
    let _ = args;
    Cuda::new(0).map_err(|e| e.to_string())
}

fn on<R: Runtime>(rt: &R, args: &Args, part: &str, item: &str) -> Result<Found, String> {
    let words = |e: weftgrad::Error| e.to_string();
    match part {
        "ladder" => ladder::run(rt, item).map_err(words),
        "memory" => ladder::large(rt).map_err(words),
        "suite" => suite::run(rt, item),
        "goldens" => goldens::run(rt, item),
        "parity" => parity::run(rt).map_err(words),
        "losses" => losses::run(rt, item),
        "copies" => copies::run(rt, item, args.quick).map_err(words),
        "bench" => bench::run(rt, item),
        _ => Err(format!("`{part}` is no part")),
    }
}
