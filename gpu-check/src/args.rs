//! The command line.

use std::{num::NonZero, thread::available_parallelism};

use clap::{Parser, builder::PossibleValuesParser};

use crate::plan::{PARTS, Part};

/// Checks and times a GPU.
#[derive(Parser)]
#[command(after_help = parts())]
pub(crate) struct Args {
    #[arg(long, default_value = "cuda", value_parser = PossibleValuesParser::new(DEVICES))]
    pub device: String,
    /// The file that the findings are written to.
    #[arg(long, default_value = "gpu-check.json")]
    pub out: String,
    /// Fewer and smaller items.
    #[arg(long)]
    pub quick: bool,
    /// Items whose name contains this text alone; may be given several times.
    #[arg(long)]
    pub only: Vec<String>,
    /// Parts, in place of those that are usual for the device.
    #[arg(long, value_delimiter = ',', value_parser = named)]
    parts: Vec<&'static Part>,
    /// Parts that are left out.
    #[arg(long, value_delimiter = ',', value_parser = named)]
    skip: Vec<&'static Part>,
    /// The time that all items have together, in minutes.
    #[arg(long, default_value_t = 9.0)]
    pub minutes: f64,
    /// Items that may run at the same time, where they are not timed.
    #[arg(long, default_value_t = usual_jobs())]
    pub jobs: NonZero<usize>,
    /// Names the items, and runs none.
    #[arg(long)]
    pub list: bool,
    /// A compute capability and a driver's version of CUDA to compile kernels for, in place of a run: `90,13`.
    #[arg(long, value_parser = versions)]
    pub precompile: Option<(u32, u32)>,
    /// One item in this process, and the file of its findings: how the program calls itself.
    #[arg(long, num_args = 2, hide = true)]
    item: Vec<String>,
}

const DEVICES: &[&str] = &[
    "cuda",
    "cpu",
    #[cfg(feature = "emulate")]
    "emulated",
    #[cfg(feature = "wgpu")]
    "wgpu",
];

impl Args {
    /// The parts to run, in order.
    pub(crate) fn parts(&self) -> impl Iterator<Item = &'static Part> {
        let is_usual = |part: &Part| !part.gpu_only || self.device == "cuda";
        let among = |list: &[&Part], part: &Part| list.iter().any(|named| named.name == part.name);
        let chosen = move |part: &&Part| {
            !among(&self.skip, part) && if self.parts.is_empty() { is_usual(part) } else { among(&self.parts, part) }
        };
        PARTS.iter().filter(chosen)
    }

    /// The one item to run in this process, and the file of its findings.
    pub(crate) fn item(&self) -> Option<(&str, &str)> {
        let [item, result] = &self.item[..] else { return None };
        Some((item, result))
    }
}

fn parts() -> String {
    let parts: String = PARTS.iter().map(|p| format!("\n  {:9} {}", p.name, p.about)).collect();
    format!("Parts, in the order they run:{parts}")
}

fn usual_jobs() -> NonZero<usize> {
    let processors = available_parallelism().map_or(1, NonZero::get);
    NonZero::new(processors.saturating_sub(2).clamp(1, 14)).unwrap_or(NonZero::<usize>::MIN)
}

fn named(name: &str) -> Result<&'static Part, String> {
    PARTS.iter().find(|part| part.name == name).ok_or_else(|| "no such part".into())
}

/// Parses a compute capability and a driver's version of CUDA: `90,13`.
fn versions(text: &str) -> Result<(u32, u32), String> {
    let both = text.split_once(',').and_then(|(arch, cuda)| Some((arch.parse().ok()?, cuda.parse().ok()?)));
    both.ok_or_else(|| "give a compute capability and a version of CUDA, as in 90,13".into())
}
