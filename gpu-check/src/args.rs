//! The command line.

use crate::plan::{PARTS, Part};

/// The parsed command line.
pub struct Args {
    pub device: String,
    pub out: String,
    pub quick: bool,
    /// Runs only items whose name contains one of these; all if the list is empty.
    pub only: Vec<String>,
    pub parts: Vec<&'static Part>,
    pub minutes: f64,
    pub jobs: usize,
    pub list: bool,
    /// A compute capability and a driver's version of CUDA to compile kernels for, in place of a run.
    pub precompile: Option<(u32, u32)>,
    /// One item in this process, its findings in this file: how the program calls itself.
    pub item: Option<(String, String)>,
}

const DEVICES: &[&str] = if cfg!(feature = "emulate") { &["cuda", "cpu", "emulated"] } else { &["cuda", "cpu"] };

pub fn usage() -> String {
    let parts: String = PARTS.iter().map(|p| format!("\n  {:9} {}", p.name, p.about)).collect();
    format!(
        "\
usage: weftgrad-gpu-check [--device {}] [--parts A,B] [--skip A,B] [--only TEXT]... [--quick]
                          [--minutes M] [--jobs N] [--out FILE] [--list] [--precompile 90,13]

parts, in the order they run:{parts}",
        DEVICES.join("|")
    )
}

pub fn parse(mut words: impl Iterator<Item = String>) -> Result<Args, String> {
    let processors = std::thread::available_parallelism().map_or(1, |n| n.get());
    let mut args = Args {
        device: "cuda".into(),
        out: "gpu-check.json".into(),
        quick: false,
        only: Vec::new(),
        parts: Vec::new(),
        minutes: 9.0,
        jobs: processors.saturating_sub(2).clamp(1, 14),
        list: false,
        precompile: None,
        item: None,
    };
    let (mut parts, mut skip) = (None, Vec::new());
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or_else(|| format!("{word} needs a value\n{}", usage()));
        match word.as_str() {
            "--device" => args.device = value()?,
            "--out" => args.out = value()?,
            "--quick" => args.quick = true,
            "--list" => args.list = true,
            "--only" => args.only.push(value()?),
            "--parts" => parts = Some(named(&value()?)?),
            "--skip" => skip.extend(named(&value()?)?),
            "--minutes" => args.minutes = number(&value()?)?,
            "--jobs" => args.jobs = (number(&value()?)? as usize).max(1),
            "--precompile" => args.precompile = Some(versions(&value()?)?),
            "--item" => args.item = Some((value()?, value()?)),
            _ => return Err(format!("unknown option {word}\n{}", usage())),
        }
    }
    if !DEVICES.contains(&args.device.as_str()) {
        return Err(format!("`{}` is no device\n{}", args.device, usage()));
    }
    let usual = PARTS.iter().filter(|p| !p.gpu_only || args.device == "cuda").collect();
    args.parts = parts.unwrap_or(usual);
    args.parts.retain(|p| !skip.iter().any(|s| s.name == p.name));
    Ok(args)
}

fn named(list: &str) -> Result<Vec<&'static Part>, String> {
    let find = |name: &str| PARTS.iter().find(|p| p.name == name).ok_or(format!("`{name}` is no part\n{}", usage()));
    list.split(',').map(find).collect()
}

/// `90,13`.
fn versions(text: &str) -> Result<(u32, u32), String> {
    let both = text.split_once(',').and_then(|(arch, cuda)| Some((arch.parse().ok()?, cuda.parse().ok()?)));
    both.ok_or_else(|| format!("`{text}` is no compute capability and version of CUDA, as in 90,13"))
}

fn number(text: &str) -> Result<f64, String> {
    text.parse().map_err(|_| format!("`{text}` is no number\n{}", usage()))
}
