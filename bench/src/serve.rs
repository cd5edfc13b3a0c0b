//! The server: one case per line, its data kept between calls.

use std::{
    collections::HashMap,
    io::{self, BufRead, Write},
};

use weftgrad::{Cpu, MemoryCategory, MemoryStats, Runtime};

use weftgrad_bench::{
    cases::{Case, build},
    timing,
};

/// Answers every line of stdin with `<nanoseconds per call> <amount>`; `nan 0` for a case that is unknown or failed.
pub(crate) fn serve(cpu: Cpu) -> io::Result<()> {
    let mut cases: HashMap<String, Case> = HashMap::new();
    let (stdin, mut stdout) = (io::stdin().lock(), io::stdout().lock());
    for line in stdin.lines() {
        let line = line?;
        let words: Vec<&str> = line.split_whitespace().collect();
        let answer = match words.as_slice() {
            [] => continue,
            ["rss"] => peak_resident_kib(),
            ["account", what] => account_kib(&cpu.memory(), what),
            ["clear"] => {
                cases.clear();
                Some(0.0)
            }
            ["loss", case @ ..] => cases.get(&case.join(" ")).and_then(|c| c.loss.get()),
            _ => time(&cpu, &mut cases, &words),
        };
        writeln!(stdout, "{} 0", answer.map_or("nan".into(), |x| x.to_string()))?;
        stdout.flush()?;
    }
    Ok(())
}

fn time(cpu: &Cpu, cases: &mut HashMap<String, Case>, words: &[&str]) -> Option<f64> {
    let key = words.join(" ");
    if !cases.contains_key(&key) {
        let case = build(cpu, words).inspect_err(|e| eprintln!("{key}: {e}")).ok()?;
        cases.insert(key.clone(), case);
    }
    timing::per_call(cases.get_mut(&key)?).inspect_err(|e| eprintln!("{key}: {e}")).ok()
}

/// The peak of live KiB in a category of the runtime's account, or of all together (`total`), or the KiB kept for reuse
/// (`reserved`).
fn account_kib(account: &MemoryStats, what: &str) -> Option<f64> {
    let kib = |bytes: usize| bytes as f64 / 1024.0;
    match what {
        "total" => Some(kib(account.total.peak)),
        "reserved" => Some(kib(account.reserved)),
        _ => MemoryCategory::ALL
            .into_iter()
            .find(|u| format!("{u:?}").eq_ignore_ascii_case(what))
            .map(|u| kib(account.of(u).peak)),
    }
}

/// The most memory that this process ever had resident, in KiB, as the kernel counts it.
pub(crate) fn peak_resident_kib() -> Option<f64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|l| l.starts_with("VmHWM"))?;
    line.split_whitespace().nth(1)?.parse().ok()
}
