//! [`Trial`]: a run of a search, its folder, and the files in it.

use std::{
    ffi::OsStr,
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    str::FromStr,
};

use numcore::{Error, ErrorKind, Result, Within, safetensors::replace_file};
use serde_json::{Value as Json, json};
use toml::{Table, Value};
use watch::sink::read_jsonl;

use super::space::field;

/// A run with one choice of values. It trains up to [`budget`](Trial::budget), from where its last rung ended.
#[derive(Debug)]
pub struct Trial {
    /// The number of the trial, from 0.
    pub number: u32,
    /// The total number of steps to reach, those of earlier rungs included.
    pub budget: u64,
    /// The trial's own folder: for checkpoints, from which a later rung goes on, and for `metrics.jsonl`.
    pub folder: PathBuf,
    /// The varied fields and their values as text, in the order of the names.
    pub fields: Vec<(String, String)>,
    pub(super) config: Table,
    pub(super) claim: Option<File>,
}

impl Trial {
    /// The value of a field of the trial's configuration, varied or not: `trial.value::<f64>("optimizer.lr")`.
    ///
    /// # Errors
    /// Fails if the configuration has no such field, or its value is no `T`.
    #[track_caller]
    pub fn value<T: FromStr>(&self, name: &str) -> Result<T> {
        let text = shown(field(&self.config, name).at_caller()?);
        let why = || format!("is {text}, which is no {}", std::any::type_name::<T>());
        text.parse().map_err(|_| Error::format(format!("Trial: `{name}`"), why())).at_caller()
    }

    /// The trial's configuration in TOML, with the values of the search.
    pub fn config(&self) -> String {
        self.config.to_string()
    }

    /// The path of the file with the trial's configuration.
    pub fn config_path(&self) -> PathBuf {
        self.folder.join("config.toml")
    }

    /// The error of a trial that was interrupted. It ends the search, and is not recorded: the next start of the search
    /// goes on with this trial.
    pub fn interrupted(&self) -> Error {
        Error::io(&self.folder, io::Error::new(io::ErrorKind::Interrupted, "the trial was interrupted"))
    }

    /// Makes the command `program --config FILE`, to which further arguments may be added. Its input is the locked file
    /// of the trial. So on Unix no other process takes the trial while the command runs, even if this one dies.
    ///
    /// # Errors
    /// Fails if the handle of that file cannot be copied.
    #[track_caller]
    pub fn command(&self, program: impl AsRef<OsStr>) -> Result<Command> {
        let claim = self.claim.as_ref().map(File::try_clone).transpose();
        let mut command = Command::new(program);
        command.arg("--config").arg(self.config_path());
        let claim = claim.map_err(|e| Error::io(&self.folder, e)).at_caller()?;
        command.stdin(claim.map_or_else(Stdio::null, Stdio::from));
        Ok(command)
    }

    /// The last value of this name in `metrics.jsonl` of the trial's folder.
    ///
    /// # Errors
    /// Fails without that file, or if no record in it has the name.
    #[track_caller]
    pub fn last_recorded(&self, metric: &str) -> Result<f64> {
        let path = self.metrics();
        let last = self.curve(metric).at_caller()?.last().map(|&(_, value)| value);
        last.ok_or_else(|| Error::format(path.display().to_string(), format!("has no value `{metric}`"))).at_caller()
    }

    /// Steps and values of this name in `metrics.jsonl`.
    pub(super) fn curve(&self, metric: &str) -> Result<Vec<(f64, f64)>> {
        let records = read_jsonl(self.metrics())?;
        let of = |(step, (name, value)): (u64, (&str, f64))| (name == metric).then_some((step as f64, value));
        Ok(records.iter().flat_map(|r| r.scalars().map(|s| (r.step, s))).filter_map(of).collect())
    }

    fn metrics(&self) -> PathBuf {
        self.folder.join("metrics.jsonl")
    }

    /// Takes the trial for this process; false if another one has it. A lock of the operating system ends with the last
    /// process that has the file, so that of a dead process is free.
    pub(super) fn take(&mut self) -> Result<bool> {
        self.claim = lock(&self.folder, false)?;
        Ok(self.claim.is_some())
    }

    /// The result of a rung: a value, or the text of the error; none if there is none yet.
    pub(super) fn outcome(&self, rung: usize) -> Result<Option<Outcome>> {
        let path = self.outcome_path(rung);
        let text = match fs::read_to_string(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            text => text.map_err(|e| Error::io(&path, e))?,
        };
        let json: Json = serde_json::from_str(&text).unwrap_or_default();
        let outcome = match (&json["value"], &json["error"]) {
            (_, Json::String(error)) => Some(Err(error.clone())),
            (Json::String(word), _) => word.parse().ok().map(Ok),
            (number, _) => number.as_f64().map(Ok),
        };
        outcome
            .map(Some)
            .ok_or_else(|| Error::format(path.display().to_string(), "is no result: remove it to run the rung again"))
    }

    /// Runs a rung of a trial that was taken, and writes its result, all or nothing. Does nothing if another process
    /// wrote one before the trial was taken.
    pub(super) fn run(&self, rung: usize, f: impl FnOnce(&Trial) -> Result<f64>) -> Result<()> {
        if self.outcome(rung)?.is_some() {
            return Ok(());
        }
        replace_file(self.config_path(), self.config().as_bytes())?;
        let outcome = match f(self) {
            Err(e) if is_interrupt(&e) => return Err(e),
            outcome => outcome.map_err(|e| e.to_string()),
        };
        replace_file(self.outcome_path(rung), format!("{}\n", self.to_json(&outcome)).as_bytes())
    }

    fn outcome_path(&self, rung: usize) -> PathBuf {
        self.folder.join(format!("rung-{rung}.json"))
    }

    /// The result as an object. NaN and infinities, which JSON lacks, are the strings of `metrics.jsonl`.
    pub(super) fn to_json(&self, outcome: &Outcome) -> Json {
        let varied = self
            .fields
            .iter()
            .filter_map(|(name, _)| Some((name.clone(), serde_json::to_value(field(&self.config, name).ok()?).ok()?)));
        let fields: serde_json::Map<String, Json> = varied.collect();
        let (key, result) = match outcome {
            Ok(value) if value.is_finite() => ("value", json!(value)),
            Ok(value) if value.is_nan() => ("value", json!("NaN")),
            Ok(value) => ("value", json!(if *value > 0.0 { "Infinity" } else { "-Infinity" })),
            Err(error) => ("error", json!(error)),
        };
        json!({ "trial": self.number, "budget": self.budget, key: result, "fields": fields })
    }
}

/// The result of a trial in a rung: the metric's value, or the text of the error.
pub(super) type Outcome = std::result::Result<f64, String>;

/// Locks a folder, which is made if need be; none if another process has it and this one does not wait.
pub(super) fn lock(folder: &Path, waits: bool) -> Result<Option<File>> {
    fs::create_dir_all(folder).map_err(|e| Error::io(folder, e))?;
    let path = folder.join("lock");
    let opened = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
    let mut file = opened.map_err(|e| Error::io(&path, e))?;
    let locked = if waits { file.lock().map_err(TryLockError::Error) } else { file.try_lock() };
    match locked {
        Err(TryLockError::WouldBlock) => return Ok(None),
        Err(TryLockError::Error(e)) => return Err(Error::io(&path, e)),
        Ok(()) => {}
    }
    // For people: the lock itself is the operating system's.
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let holder = format!("process {} on `{}`\n", std::process::id(), host.trim());
    file.set_len(0).and_then(|()| file.write_all(holder.as_bytes())).map_err(|e| Error::io(&path, e))?;
    Ok(Some(file))
}

fn is_interrupt(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Io { source, .. } if source.kind() == io::ErrorKind::Interrupted)
}

/// A value as text; a string without quotation marks.
pub(super) fn shown(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), Into::into)
}
