//! The log of a run: what it does not compute, as a line of JSON for each step.

use std::{
    fs::{self, File, OpenOptions},
    io::{Read, Write},
    path::{Path, PathBuf},
    time::Duration,
};

use data::State;
use numcore::{Error, Result};
use serde_json::{Value, json};

/// The file in a folder of checkpoints.
const FILE: &str = "replay.jsonl";

/// A line of a log.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum LogLine {
    World(WorldLine),
    Step(StepLine),
    /// A hash of the state of all ranks, after the step of the line before.
    State {
        hash: u64,
    },
}

/// Ranks begin, or go on from a state, or back to one.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct WorldLine {
    pub ranks: usize,
    /// The number of updates so far.
    pub step: u64,
    pub at: State,
    /// The folder that the state came from, if it is another than the log's.
    pub from: Option<PathBuf>,
    /// True if the ranks went back to the state, with another place in the data.
    pub back: bool,
}

/// A step is about to be taken.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct StepLine {
    /// The number that the update will have.
    pub step: u64,
    pub at: State,
    /// The duration of the run, which intervals of time are checked against.
    pub elapsed: Duration,
    /// The shares of ranks by measured speed.
    pub shares: Option<Vec<f64>>,
    /// The hash of the state after it, if it was kept.
    pub hash: Option<u64>,
}

/// The log that a run writes.
pub(crate) struct RunLog {
    path: PathBuf,
    file: File,
}

impl RunLog {
    /// Opens the log in a folder, for a world that begins. A run from scratch replaces the log of an earlier one.
    pub(crate) fn begin(folder: &Path, from_scratch: bool, world: WorldLine) -> Result<Self> {
        let path = folder.join(FILE);
        let open = || {
            fs::create_dir_all(folder)?;
            // Each line goes to the end, whoever else writes.
            let mut file = OpenOptions::new().read(true).append(true).create(true).open(&path)?;
            // A line that a killed process left incomplete is dropped.
            let mut text = Vec::new();
            file.read_to_end(&mut text)?;
            let whole = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1) as u64;
            file.set_len(if from_scratch { 0 } else { whole })?;
            Ok(file)
        };
        let file = open().map_err(|e| Error::io(&path, e))?;
        let mut log = RunLog { path, file };
        log.write(&LogLine::World(world))?;
        Ok(log)
    }

    /// Tells whether a folder has a log.
    pub(crate) fn is_in(folder: &Path) -> bool {
        folder.join(FILE).is_file()
    }

    pub(crate) fn write(&mut self, line: &LogLine) -> Result<()> {
        let text = format!("{}\n", line.to_json());
        self.file.write_all(text.as_bytes()).map_err(|e| Error::io(&self.path, e))
    }

    /// Reads the log in a folder. A last line that is incomplete is left out.
    pub(crate) fn read(folder: &Path) -> Result<Vec<LogLine>> {
        let path = folder.join(FILE);
        let text = fs::read_to_string(&path).map_err(|e| Error::io(&path, e))?;
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        let line = |(number, text): (usize, &str)| {
            let line = serde_json::from_str(text).ok().and_then(|value: Value| LogLine::of_json(&value));
            let why = || format!("line {} is no line of a run's log: `{text}`", number + 1);
            line.ok_or_else(|| Error::format(path.display().to_string(), why()))
        };
        whole.lines().enumerate().map(line).collect()
    }
}

impl LogLine {
    fn to_json(&self) -> Value {
        match self {
            LogLine::World(WorldLine { ranks, step, at, from, back }) => {
                let from = from.as_ref().map(|path| path.to_string_lossy());
                json!({ "ranks": ranks, "step": step, "at": at.to_string(), "from": from, "back": back })
            }
            LogLine::Step(StepLine { step, at, elapsed, shares, .. }) => {
                let mut line = json!({ "step": step, "at": at.to_string(), "ns": elapsed.as_nanos() as u64 });
                if let Some(shares) = shares {
                    line["shares"] = json!(shares);
                }
                line
            }
            LogLine::State { hash } => json!({ "hash": format!("{hash:016x}") }),
        }
    }

    fn of_json(line: &Value) -> Option<Self> {
        if let Some(hash) = line["hash"].as_str() {
            return Some(LogLine::State { hash: u64::from_str_radix(hash, 16).ok()? });
        }
        let step = line["step"].as_u64()?;
        let at = || line["at"].as_str()?.parse().ok();
        if let Some(ranks) = line["ranks"].as_u64() {
            let from = line["from"].as_str().map(PathBuf::from);
            let (ranks, back) = (usize::try_from(ranks).ok()?, line["back"].as_bool()?);
            return Some(LogLine::World(WorldLine { ranks, step, at: at()?, from, back }));
        }
        let shares = match &line["shares"] {
            Value::Null => None,
            shares => Some(shares.as_array()?.iter().map(Value::as_f64).collect::<Option<_>>()?),
        };
        let elapsed = Duration::from_nanos(line["ns"].as_u64()?);
        Some(LogLine::Step(StepLine { step, at: at()?, elapsed, shares, hash: None }))
    }
}
