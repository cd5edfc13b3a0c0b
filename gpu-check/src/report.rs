//! The findings: printed line by line, and written completely after every item, so that a crash of this program loses
//! nothing.

use std::{fs, path::Path, time::Duration};

use serde_json::{Value, json};

/// What one item found.
#[derive(Default)]
pub struct Found {
    pub checks: usize,
    /// A line for each check that failed.
    pub failures: Vec<String>,
    /// Measured values by name; times are in milliseconds.
    pub numbers: Vec<(String, Value)>,
}

impl Found {
    pub fn checks(checks: usize, failures: Vec<String>) -> Found {
        Found { checks, failures, numbers: Vec::new() }
    }

    pub fn with(mut self, name: &str, value: impl Into<Value>) -> Found {
        self.numbers.push((name.into(), value.into()));
        self
    }

    pub fn write(&self, path: &str) -> Result<(), String> {
        let numbers: serde_json::Map<String, Value> = self.numbers.iter().cloned().collect();
        let all = json!({ "checks": self.checks, "failures": self.failures, "numbers": numbers });
        fs::write(path, all.to_string()).map_err(|e| format!("{path}: {e}"))
    }
}

/// How an item ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Status {
    Passed,
    Failed,
    Crashed,
    TimedOut,
    NotRun,
}

impl Status {
    fn name(self) -> &'static str {
        match self {
            Status::Passed => "passed",
            Status::Failed => "FAILED",
            Status::Crashed => "CRASHED",
            Status::TimedOut => "TIMED OUT",
            Status::NotRun => "not run",
        }
    }
}

/// An item that ended, or was not begun.
pub struct Entry {
    pub part: &'static str,
    pub item: String,
    pub status: Status,
    pub took: Duration,
    pub found: Value,
}

/// All items so far, in the order they ended.
pub struct Report {
    about: Value,
    path: String,
    entries: Vec<Entry>,
}

impl Report {
    pub fn new(device: &str, path: &str) -> Report {
        let about = json!({ "framework": "weftgrad", "version": env!("CARGO_PKG_VERSION"), "device": device });
        Report { about, path: path.into(), entries: Vec::new() }
    }

    pub fn push(&mut self, entry: Entry) {
        println!("{}", entry.line());
        let failures = entry.found["failures"].as_array().into_iter().flatten();
        failures.take(20).for_each(|line| println!("    {}", line.as_str().unwrap_or_default()));
        self.entries.push(entry);
        if let Err(e) = self.write() {
            eprintln!("weftgrad-gpu-check: {e}");
        }
    }

    pub fn passed(&self) -> bool {
        self.entries.iter().all(|e| e.status == Status::Passed)
    }

    /// Written to a temporary file in the folder and renamed, so that every reader finds it complete.
    fn write(&self) -> Result<(), String> {
        let items: Vec<Value> = self.entries.iter().map(Entry::json).collect();
        let all =
            json!({ "about": self.about, "passed": self.passed(), "items": items, "comparison": self.comparison() });
        let beside = format!("{}.part", self.path);
        let done = fs::write(&beside, format!("{all:#}\n")).and_then(|()| fs::rename(&beside, Path::new(&self.path)));
        done.map_err(|e| format!("{}: {e}", self.path))
    }

    /// Our medians and PyTorch's.
    fn comparison(&self) -> Vec<Value> {
        let rows =
            self.entries.iter().filter(|e| e.part == "torch").filter_map(|e| e.found["numbers"]["cases"].as_array());
        let rows: Vec<&Value> = rows.flatten().collect();
        let theirs = |case: &str, how: &str| {
            rows.iter().find(|r| r["case"] == case && r["how"] == how).map_or(Value::Null, |r| r["median_ms"].clone())
        };
        let ours = self.entries.iter().filter(|e| e.part == "bench");
        let row = |e: &Entry| {
            let [eager, compiled] = ["eager", "compiled"].map(|how| theirs(&e.item, how));
            json!({ "case": e.item, "weftgrad": e.found["numbers"]["median_ms"], "eager": eager, "compiled": compiled })
        };
        ours.map(row).collect()
    }

    /// Prints the result of the run.
    pub fn summary(&self) {
        for row in self.comparison().iter().filter(|r| r["eager"].is_number()) {
            let ms = |name: &str| row[name].as_f64().map_or("-".to_string(), |t| format!("{t:.4}"));
            let case = row["case"].as_str().unwrap_or_default();
            let [ours, eager, compiled] = ["weftgrad", "eager", "compiled"].map(ms);
            println!("{case:32} {ours:>12} ms, PyTorch {eager:>12}, compiled {compiled:>12}");
        }
        let count = |status: Status| self.entries.iter().filter(|e| e.status == status).count();
        let all = [Status::Passed, Status::Failed, Status::Crashed, Status::TimedOut, Status::NotRun];
        let counts: Vec<String> = all.iter().map(|s| format!("{} {}", count(*s), s.name())).collect();
        println!("{}; written to {}", counts.join(", "), self.path);
    }
}

impl Entry {
    fn line(&self) -> String {
        let checks = self.found["checks"].as_u64().unwrap_or(0);
        let failed = self.found["failures"].as_array().map_or(0, Vec::len);
        let seconds = self.took.as_secs_f64();
        let numbers = self.found["numbers"].as_object().into_iter().flatten();
        let short = numbers.filter(|(_, v)| !v.is_array() && !v.is_null()).map(|(name, v)| match v.as_f64() {
            Some(x) => format!("{name} {x:.4}"),
            None => format!("{name} {}", v.as_str().unwrap_or_default()),
        });
        let tail = short.collect::<Vec<_>>().join(", ");
        let (part, item, status) = (self.part, &self.item, self.status.name());
        format!("{part:8} {item:28} {status:9} {checks:6} checks {failed:4} failed {seconds:7.1} s  {tail}")
    }

    fn json(&self) -> Value {
        let mut all = json!({
            "part": self.part, "item": self.item, "status": self.status.name(), "seconds": self.took.as_secs_f64(),
        });
        for name in ["checks", "failures", "numbers"] {
            all[name] = self.found[name].clone();
        }
        all
    }
}
