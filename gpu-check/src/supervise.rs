//! Runs items in separate processes: one that crashes, hangs or breaks the device's context affects no other.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::{
    args::Args,
    plan::Part,
    report::{Entry, Report, Status},
};

/// The least remaining time in which an item is begun.
const LEAST: Duration = Duration::from_secs(2);

/// Runs every part in order. Items of parts that only check run in parallel.
pub(crate) fn run(args: &Args) -> Report {
    let end = Instant::now() + Duration::from_secs_f64(args.minutes * 60.0);
    let report = Mutex::new(Report::new(&args.device, &args.out));
    // Parts that only check are one pool: the last long item of one does not keep the next waiting.
    let units = |beside: bool| -> Vec<(&'static Part, String)> {
        let parts = args.parts().filter(|p| p.beside == beside);
        parts.flat_map(|p| p.items(args).into_iter().map(move |item| (p, item))).collect()
    };
    all(&units(true), args.jobs.get(), args, end, &report);
    all(&units(false), 1, args, end, &report);
    let mut report = report.into_inner().unwrap_or_else(|e| e.into_inner());
    report.end();
    report
}

fn lock(report: &Mutex<Report>) -> std::sync::MutexGuard<'_, Report> {
    report.lock().unwrap_or_else(|e| e.into_inner())
}

fn all(units: &[(&'static Part, String)], jobs: usize, args: &Args, end: Instant, report: &Mutex<Report>) {
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some((part, item)) = units.get(next.fetch_add(1, Ordering::Relaxed)) {
            let mut entry = one(part, item, args, end, false);
            let is_wrong = matches!(entry.status, Status::Failed | Status::Crashed);
            if args.device == "cuda" && part.beside && is_wrong {
                let again = one(part, item, args, end, true);
                entry.found["blocking"] = match again.status {
                    Status::Passed => json!(["it passes"]),
                    Status::NotRun => Value::Null,
                    _ => again.found["failures"].clone(),
                };
            }
            lock(report).push(entry);
        }
    };
    thread::scope(|scope| (0..jobs.min(units.len())).for_each(|_| drop(scope.spawn(work))));
}

/// Runs an item. With `blocking` the host waits for each launch, so that an error is reported by the launch that caused
/// it.
fn one(part: &'static Part, item: &str, args: &Args, end: Instant, blocking: bool) -> Entry {
    let (start, left) = (Instant::now(), end.saturating_duration_since(Instant::now()));
    let entry = |status, found| Entry { part: part.name, item: item.into(), status, took: start.elapsed(), found };
    if left < LEAST {
        return entry(Status::NotRun, json!({ "failures": ["the time was over before"] }));
    }
    let files = Files::of(part, item);
    let limit = part.limit().min(left);
    let ended = files.start(args, part, item, limit, blocking).and_then(|child| wait(child, start + limit));
    let found = files.found();
    match ended {
        Err(why) => entry(Status::Crashed, json!({ "failures": [why] })),
        // Partial findings of an item that ran out of time are kept.
        Ok(None) => entry(Status::TimedOut, with(found, format!("not done after {} s", limit.as_secs()), &files)),
        Ok(Some(status)) if !status.success() => entry(Status::Crashed, with(found, status.to_string(), &files)),
        Ok(Some(_)) if found.is_null() => entry(Status::Crashed, with(found, "it left nothing".into(), &files)),
        Ok(Some(_)) => {
            let status = match found["failures"].as_array().is_some_and(|f| !f.is_empty()) {
                true => Status::Failed,
                // Parts that do not only check measure.
                false if part.beside && found["checks"] == 0 => Status::Unsupported,
                false => Status::Passed,
            };
            entry(status, found)
        }
    }
}

/// Waits for the exit of a child; `None` after the deadline, when it has been killed.
pub(crate) fn wait(mut child: Child, deadline: Instant) -> Result<Option<ExitStatus>, String> {
    loop {
        if let Some(status) = child.try_wait().map_err(|e| e.to_string())? {
            return Ok(Some(status));
        }
        if Instant::now() > deadline {
            let _ = child.kill();
            let _ = child.wait();
            return Ok(None);
        }
        thread::sleep(Duration::from_millis(20));
    }
}

fn with(mut found: Value, why: String, files: &Files) -> Value {
    if found.is_null() {
        found = json!({ "checks": 0, "failures": [], "numbers": {} });
    }
    let mut failures = vec![Value::from(why)];
    failures.extend(files.last_words().into_iter().map(Value::from));
    failures.extend(found["failures"].as_array().cloned().unwrap_or_default());
    found["failures"] = failures.into();
    found
}

/// The files that an item's process writes.
struct Files {
    result: PathBuf,
    log: PathBuf,
}

impl Files {
    fn of(part: &Part, item: &str) -> Files {
        let plain: String = item.chars().map(|c| if c.is_alphanumeric() { c } else { '-' }).collect();
        let at =
            |end: &str| env::temp_dir().join(format!("weftgrad-{}-{}-{plain}{end}", std::process::id(), part.name));
        Files { result: at(".json"), log: at(".log") }
    }

    fn start(&self, args: &Args, part: &Part, item: &str, limit: Duration, blocking: bool) -> Result<Child, String> {
        let words = |e: std::io::Error| e.to_string();
        let log = fs::File::create(&self.log).map_err(words)?;
        let mut command = Command::new(env::current_exe().map_err(words)?);
        command.args(["--device", &args.device, "--item", &format!("{}/{item}", part.name)]).arg(&self.result);
        command.args(["--minutes", &format!("{}", limit.as_secs_f64() / 60.0)]);
        command.args(args.quick.then_some("--quick"));
        if blocking {
            command.env("CUDA_LAUNCH_BLOCKING", "1");
        }
        command.stdin(Stdio::null()).stdout(log.try_clone().map_err(words)?).stderr(log);
        command.spawn().map_err(words)
    }

    fn found(&self) -> Value {
        let text = fs::read_to_string(&self.result).unwrap_or_default();
        serde_json::from_str(&text).unwrap_or_default()
    }

    /// The last lines of the child's output.
    fn last_words(&self) -> Vec<String> {
        let text = fs::read(&self.log).map(|b| String::from_utf8_lossy(&b).into_owned()).unwrap_or_default();
        let lines: Vec<&str> = text.lines().filter(|l| !l.trim().is_empty()).collect();
        lines[lines.len().saturating_sub(8)..].iter().map(|l| l.to_string()).collect()
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        for path in [&self.result, &self.log] {
            let _ = fs::remove_file(Path::new(path));
        }
    }
}
