//! What was found: printed line by line, kept for the file.

use std::time::Duration;

use serde_json::{Value, json};
use weftgrad::Runtime;

/// Checks and times, in the order they ran.
pub struct Report {
    machine: Value,
    checks: Vec<Value>,
    times: Vec<Value>,
    failed: usize,
}

impl Report {
    pub fn new<R: Runtime>(rt: &R) -> Report {
        let about = rt.capabilities();
        println!("{} ({})", about.name, rt.device());
        let machine = json!({
            "framework": "weftgrad",
            "version": env!("CARGO_PKG_VERSION"),
            "device": rt.device().to_string(),
            "name": about.name,
            "processors": about.parallelism,
            "memory": about.max_binding,
        });
        Report { machine, checks: Vec::new(), times: Vec::new(), failed: 0 }
    }

    /// A group of checks: how many ran, and a line for each that failed.
    pub fn checks(&mut self, part: &str, name: &str, count: usize, failures: Vec<String>, took: Duration) {
        println!("{part:8} {name:28} {count:6} checks {:5} failed {:8.1} s", failures.len(), took.as_secs_f64());
        failures.iter().for_each(|line| println!("         FAIL {line}"));
        self.failed += failures.len();
        self.checks.push(json!({
            "part": part, "name": name, "checks": count, "failures": failures, "seconds": took.as_secs_f64(),
        }));
    }

    /// A time per call, and what it means in operations or bytes per second.
    pub fn time(&mut self, case: &str, [min, median]: [f64; 2], rate: Option<(f64, &str)>, loss: Option<f64>) {
        let shown = rate.map_or(String::new(), |(rate, unit)| format!("{rate:10.1} {unit}"));
        let loss_shown = loss.map_or(String::new(), |l| format!("   loss {l:.4}"));
        println!("bench    {case:28} {min:12.4} {median:12.4} ms {shown}{loss_shown}");
        let (rate, unit) = rate.unzip();
        self.times.push(json!({
            "case": case, "min_ms": min, "median_ms": median, "rate": rate, "unit": unit, "loss": loss,
        }));
    }

    /// Something that could not be run is a failure.
    pub fn broken(&mut self, part: &str, name: &str, why: String) {
        self.checks(part, name, 1, vec![why], Duration::ZERO);
    }

    pub fn passed(&self) -> bool {
        self.failed == 0
    }

    pub fn write(&self, path: &str) -> Result<(), String> {
        let all = json!({ "machine": self.machine, "checks": self.checks, "cases": self.times, "failed": self.failed });
        std::fs::write(path, format!("{all:#}\n")).map_err(|e| format!("{path}: {e}"))?;
        println!("{}: {} failed; written to {path}", if self.passed() { "passed" } else { "FAILED" }, self.failed);
        Ok(())
    }
}
