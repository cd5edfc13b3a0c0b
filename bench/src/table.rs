//! The table for human readers: every case, its median time, and a checked result where there is one.

use weftgrad::{Cpu, Runtime};

use weftgrad_bench::{cases, timing};

use crate::serve;

/// Times each case for `rounds` rounds and prints minimum and median.
pub(crate) fn print(cpu: Cpu, names: &[String], rounds: usize, json: bool) -> Result<(), String> {
    let machine = format!("{}, {} threads", cpu.capabilities().name, cpu.threads());
    let mut rows = Vec::new();
    if !json {
        println!("{machine}\n{:32} {:>12} {:>12} {:>12}", "case", "min ms", "median ms", "loss");
    }
    for name in names {
        let words: Vec<&str> = name.split_whitespace().collect();
        let mut case = cases::build(&cpu, &words)?;
        let mut times = Vec::new();
        for _ in 0..rounds {
            times.push(timing::per_call(&mut case).map_err(|e| format!("{name}: {e}"))? / 1e6);
        }
        times.sort_by(f64::total_cmp);
        let (min, median, loss) = (times[0], times[times.len() / 2], case.loss.get());
        if json {
            rows.push(serde_json::json!({ "case": name, "min_ms": min, "median_ms": median, "loss": loss }));
        } else {
            let loss = loss.map_or(String::new(), |l| format!("{l:.4}"));
            println!("{name:32} {min:12.4} {median:12.4} {loss:>12}");
        }
    }
    if json {
        let report =
            serde_json::json!({ "machine": machine, "cases": rows, "peak_rss_kib": serve::peak_resident_kib() });
        println!("{report:#}");
    }
    Ok(())
}
