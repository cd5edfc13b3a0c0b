//! The findings: printed line by line, and written completely after every item, so that a crash of this program loses
//! nothing.

use std::{fs, path::Path, process::Command, time::Duration};

use serde_json::{Value, json};

/// The findings of one item.
#[derive(Default)]
pub(crate) struct Found {
    pub checks: usize,
    /// A line for each check that failed.
    pub failures: Vec<String>,
    /// Measured values by name; times are in milliseconds unless the name has another unit.
    pub numbers: Vec<(String, Value)>,
}

impl Found {
    pub(crate) fn checks(checks: usize, failures: Vec<String>) -> Found {
        Found { checks, failures, numbers: Vec::new() }
    }

    pub(crate) fn with(mut self, name: &str, value: impl Into<Value>) -> Found {
        self.numbers.push((name.into(), value.into()));
        self
    }

    pub(crate) fn write(&self, path: &str) -> Result<(), String> {
        let numbers: serde_json::Map<String, Value> = self.numbers.iter().cloned().collect();
        let all = json!({ "checks": self.checks, "failures": self.failures, "numbers": numbers });
        fs::write(path, all.to_string()).map_err(|e| format!("{path}: {e}"))
    }
}

/// The outcome of an item.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Status {
    Passed,
    /// Nothing that it checks is supported by the device.
    Unsupported,
    Failed,
    Crashed,
    TimedOut,
    NotRun,
}

impl Status {
    fn name(self) -> &'static str {
        match self {
            Status::Passed => "passed",
            Status::Unsupported => "not supported",
            Status::Failed => "FAILED",
            Status::Crashed => "CRASHED",
            Status::TimedOut => "TIMED OUT",
            Status::NotRun => "not run",
        }
    }
}

/// An item that ended, or was not begun.
pub(crate) struct Entry {
    pub part: &'static str,
    pub item: String,
    pub status: Status,
    pub took: Duration,
    pub found: Value,
}

/// All items so far, in the order in which they ended.
pub(crate) struct Report {
    about: Value,
    path: String,
    entries: Vec<Entry>,
}

impl Report {
    pub(crate) fn new(device: &str, path: &str) -> Report {
        let about = json!({
            "framework": "weftgrad", "version": env!("CARGO_PKG_VERSION"), "device": device, "at_start": driver_says(device),
        });
        Report { about, path: path.into(), entries: Vec::new() }
    }

    /// Records the driver's report on the GPU after the run: it shows clocks that fell and memory errors.
    pub(crate) fn end(&mut self) {
        self.about["at_end"] = driver_says(self.about["device"].as_str().unwrap_or_default());
        if let Err(e) = self.write() {
            eprintln!("weftgrad-gpu-check: {e}");
        }
    }

    pub(crate) fn push(&mut self, entry: Entry) {
        println!("{}", entry.line());
        let failures = entry.found["failures"].as_array().into_iter().flatten();
        failures.take(20).for_each(|line| println!("    {}", line.as_str().unwrap_or_default()));
        self.entries.push(entry);
        if let Err(e) = self.write() {
            eprintln!("weftgrad-gpu-check: {e}");
        }
    }

    pub(crate) fn passed(&self) -> bool {
        self.entries.iter().all(|e| matches!(e.status, Status::Passed | Status::Unsupported))
    }

    /// Writes the report to a temporary file in the folder and renames it, so that every reader finds it complete.
    fn write(&self) -> Result<(), String> {
        let items: Vec<Value> = self.entries.iter().map(Entry::json).collect();
        let all =
            json!({ "about": self.about, "passed": self.passed(), "items": items, "comparison": self.comparison() });
        let beside = format!("{}.part", self.path);
        let done = fs::write(&beside, format!("{all:#}\n")).and_then(|()| fs::rename(&beside, Path::new(&self.path)));
        done.map_err(|e| format!("{}: {e}", self.path))
    }

    /// The medians of this framework next to PyTorch's.
    fn comparison(&self) -> Vec<Value> {
        let rows =
            self.entries.iter().filter(|e| e.part == "torch").filter_map(|e| e.found["numbers"]["cases"].as_array());
        let rows: Vec<&Value> = rows.flatten().collect();
        // The fastest of several ways to compile counts.
        let theirs = |case: &str, how: &str| {
            let is = |r: &&&Value| r["case"] == case && r["how"].as_str().is_some_and(|h| h.starts_with(how));
            let times = rows.iter().filter(is).filter_map(|r| r["median_ms"].as_f64());
            times.reduce(f64::min).map_or(Value::Null, Value::from)
        };
        let ours = self.entries.iter().filter(|e| ["bench", "captured"].contains(&e.part));
        let row = |e: &Entry| {
            // A captured step is compared with PyTorch's captured ones.
            let (case, ways) = match e.part {
                "captured" => (format!("{}, captured", e.item), ["captured", "compiled, CUDA graphs"]),
                _ => (e.item.clone(), ["eager", "compiled"]),
            };
            let [eager, compiled] = ways.map(|how| theirs(&e.item, how));
            json!({ "case": case, "weftgrad": e.found["numbers"]["median_ms"], "eager": eager, "compiled": compiled })
        };
        ours.map(row).collect()
    }

    /// Prints the result of the run: the comparison, and at most ten lines of failures and slow cases.
    pub(crate) fn summary(&self) {
        let rows = self.comparison();
        for row in rows.iter().filter(|r| r["eager"].is_number()) {
            let ms = |name: &str| row[name].as_f64().map_or("-".to_string(), |t| format!("{t:.4}"));
            let case = row["case"].as_str().unwrap_or_default();
            let [ours, eager, compiled] = ["weftgrad", "eager", "compiled"].map(ms);
            println!("{case:32} {ours:>12} ms, PyTorch {eager:>12}, compiled {compiled:>12}");
        }
        let wrong =
            self.entries.iter().filter(|e| !matches!(e.status, Status::Passed | Status::Unsupported | Status::NotRun));
        let wrong: Vec<String> = wrong.map(Entry::wrong).collect();
        wrong.iter().take(WRONG).for_each(|line| println!("{line}"));
        if wrong.len() > WRONG {
            println!("WRONG  and {} more items, in {}", wrong.len() - WRONG, self.path);
        }
        slow(&rows).into_iter().take(SLOW).for_each(|line| println!("{line}"));
        let count = |status: Status| self.entries.iter().filter(|e| e.status == status).count();
        let all =
            [Status::Passed, Status::Unsupported, Status::Failed, Status::Crashed, Status::TimedOut, Status::NotRun];
        let counts: Vec<String> = all.iter().map(|s| format!("{} {}", count(*s), s.name())).collect();
        println!("{}; written to {}", counts.join(", "), self.path);
    }
}

/// The most lines of failures, and of slow cases.
const WRONG: usize = 5;
const SLOW: usize = 3;

/// Cases that take longer than PyTorch's faster row, the worst first.
fn slow(rows: &[Value]) -> Vec<String> {
    let ratio = |row: &Value| {
        let theirs = ["eager", "compiled"].into_iter().filter_map(|how| row[how].as_f64()).reduce(f64::min)?;
        Some((row["weftgrad"].as_f64()? / theirs, row["case"].as_str()?.to_string()))
    };
    let mut all: Vec<(f64, String)> = rows.iter().filter_map(ratio).filter(|(ratio, _)| *ratio > 1.0).collect();
    all.sort_by(|a, b| b.0.total_cmp(&a.0));
    all.into_iter().map(|(ratio, case)| format!("SLOW   {case}: {ratio:.2} times PyTorch's time")).collect()
}

/// The report of `nvidia-smi` on the GPU.
fn driver_says(device: &str) -> Value {
    if device != "cuda" {
        return Value::Null;
    }
    let fields =
        "name,driver_version,clocks.sm,clocks.mem,temperature.gpu,power.draw,ecc.errors.uncorrected.volatile.total";
    let output = Command::new("nvidia-smi").args([&format!("--query-gpu={fields}"), "--format=csv,noheader"]).output();
    output.map_or(Value::Null, |o| String::from_utf8_lossy(&o.stdout).trim().into())
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
        format!("{part:8} {item:28} {status:13} {checks:6} checks {failed:4} failed {seconds:7.1} s  {tail}")
    }

    /// The item's failure, in a line.
    fn wrong(&self) -> String {
        let first =
            |of: &str| self.found[of].as_array().and_then(|f| f.first()).and_then(Value::as_str).map(String::from);
        let mut what = first("failures").unwrap_or_else(|| self.status.name().into());
        if let Some(blocking) = first("blocking") {
            what = format!("{what}; with launches that block: {blocking}");
        }
        let what: String = what.lines().next().unwrap_or_default().chars().take(200).collect();
        format!("WRONG  {}/{}: {what}", self.part, self.item)
    }

    fn json(&self) -> Value {
        let mut all = json!({
            "part": self.part, "item": self.item, "status": self.status.name(), "seconds": self.took.as_secs_f64(),
        });
        for name in ["checks", "failures", "blocking", "numbers"] {
            all[name] = self.found[name].clone();
        }
        all
    }
}
