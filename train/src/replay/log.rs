//! The log of a run: what it does not compute, as a line of JSON for each step.

use std::{
    fmt,
    fs::{self, File, OpenOptions},
    io::{self, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
    time::Duration,
};

use data::State;
use distributed::train::CheckpointNotes;
use numcore::{Error, Result};
use serde_json::{Value, json};

use crate::{Length, hash::hash_of};

/// The file in a folder of checkpoints.
const FILE: &str = "replay.jsonl";

/// A line of a log.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum LogLine {
    World(WorldLine),
    Step(StepLine),
    /// The run went back to a checkpoint, with another place in the data.
    Back,
    /// A hash of the state of all ranks, after the step of the line before.
    State {
        hash: u64,
    },
}

/// Ranks begin, or go on from a state.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct WorldLine {
    pub ranks: usize,
    /// The number of updates so far.
    pub step: u64,
    pub until: Length,
    /// The folder that the state came from, if it is another than the log's.
    pub from: Option<PathBuf>,
    /// The place in a log after whose lines the state was made.
    pub after: Option<LogPlace>,
}

/// The end of a line in a log, in bytes, and a hash of the line, by which the places of two logs differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LogPlace {
    end: u64,
    line: u64,
}

impl fmt::Display for LogPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:016x}", self.end, self.line)
    }
}

impl LogPlace {
    /// The key of the place in the notes of a checkpoint.
    pub(crate) const NOTE: &str = "trainer/log";

    /// The place after whose lines the state of a checkpoint was made.
    pub(crate) fn of(notes: &CheckpointNotes) -> Option<Self> {
        Self::parse(notes.get(Self::NOTE)?)
    }

    fn parse(text: &str) -> Option<Self> {
        let (end, line) = text.split_once(' ')?;
        Some(LogPlace { end: end.parse().ok()?, line: u64::from_str_radix(line, 16).ok()? })
    }
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
    /// The numbers of batches that the ranks of each share take in turn, by measured speed.
    pub counts: Option<Vec<usize>>,
    /// The hash of the state after it, if it was kept.
    pub hash: Option<u64>,
}

/// The log that a run writes.
pub(crate) struct RunLog {
    path: PathBuf,
    file: File,
    /// The number that the lines of this world have.
    world: u64,
    /// The places before and after the last line.
    pub last: (LogPlace, LogPlace),
}

impl RunLog {
    /// Opens the log in a folder, for a world that begins. A run from scratch replaces the log of an earlier one.
    pub(crate) fn begin(folder: &Path, from_scratch: bool, world: WorldLine) -> Result<Self> {
        let path = folder.join(FILE);
        let open = || {
            fs::create_dir_all(folder)?;
            // Each line goes to the end, whoever else writes.
            let mut file = OpenOptions::new().read(true).append(true).create(true).open(&path)?;
            let whole = if from_scratch { 0 } else { whole_lines(&mut file)? };
            file.set_len(whole)?;
            Ok(file)
        };
        let file = open().map_err(|e| Error::io(&path, e))?;
        // A rank that others take for lost may still write; its lines have another number.
        let number = file.metadata().map_err(|e| Error::io(&path, e))?.len();
        let mut log = RunLog { path, file, world: number, last: Default::default() };
        log.write(&LogLine::World(world))?;
        Ok(log)
    }

    /// Tells whether a folder has a log.
    pub(crate) fn is_in(folder: &Path) -> bool {
        folder.join(FILE).is_file()
    }

    pub(crate) fn write(&mut self, line: &LogLine) -> Result<()> {
        let mut value = line.to_json();
        value["world"] = json!(self.world);
        let text = format!("{value}\n");
        let written = self.file.write_all(text.as_bytes()).and_then(|()| self.file.stream_position());
        let end = written.map_err(|e| Error::io(&self.path, e))?;
        self.last = (self.last.1, LogPlace { end, line: hash_of(text.as_bytes()) });
        Ok(())
    }

    /// Reads the log in a folder: the lines of each world until the next one begins, with the places after them. A last
    /// line that is incomplete is left out.
    pub(crate) fn read(folder: &Path) -> Result<Vec<(LogPlace, LogLine)>> {
        let path = folder.join(FILE);
        let text = fs::read_to_string(&path).map_err(|e| Error::io(&path, e))?;
        let (mut end, mut lines, mut world) = (0, Vec::new(), None);
        for (number, text) in text.split_inclusive('\n').filter(|line| line.ends_with('\n')).enumerate() {
            end += text.len() as u64;
            let parsed = || {
                let value: Value = serde_json::from_str(text).ok()?;
                Some((value["world"].as_u64()?, LogLine::of_json(&value)?))
            };
            let why = || format!("line {} is no line of a run's log: `{}`", number + 1, text.trim_end());
            let (of, line) = parsed().ok_or_else(|| Error::format(path.display().to_string(), why()))?;
            if matches!(line, LogLine::World(_)) {
                world = Some(of);
            }
            if world == Some(of) {
                lines.push((LogPlace { end, line: hash_of(text.as_bytes()) }, line));
            }
        }
        Ok(lines)
    }
}

/// The size of a log without the last line, if a killed process left that incomplete.
fn whole_lines(file: &mut File) -> io::Result<u64> {
    let size = file.seek(SeekFrom::End(0))?;
    let (mut from, mut tail) = (size, Vec::new());
    while from > 0 {
        let part = from.min(1 << 12);
        from -= part;
        file.seek(SeekFrom::Start(from))?;
        tail.clear();
        Read::by_ref(file).take(part).read_to_end(&mut tail)?;
        if let Some(end) = tail.iter().rposition(|byte| *byte == b'\n') {
            return Ok(from + end as u64 + 1);
        }
    }
    Ok(0)
}

impl LogLine {
    fn to_json(&self) -> Value {
        match self {
            LogLine::World(WorldLine { ranks, step, until, from, after }) => {
                let from = from.as_ref().map(|path| path.to_string_lossy());
                let (unit, most) = match until {
                    Length::Steps(n) => ("steps", json!(n)),
                    Length::Epochs(n) => ("epochs", json!(n)),
                    Length::Tokens(n) => ("tokens", json!(n)),
                    Length::Seconds(s) => ("seconds", json!(s)),
                };
                let after = after.map(|place| place.to_string());
                json!({ "ranks": ranks, "step": step, "until": { unit: most }, "from": from, "after": after })
            }
            LogLine::Back => json!({ "back": true }),
            LogLine::Step(StepLine { step, at, elapsed, shares, counts, .. }) => {
                let mut line = json!({ "step": step, "at": at.to_string(), "ns": elapsed.as_nanos() as u64 });
                if let Some(shares) = shares {
                    line["shares"] = json!(shares);
                }
                if let Some(counts) = counts {
                    line["counts"] = json!(counts);
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
        if line["back"].as_bool() == Some(true) {
            return Some(LogLine::Back);
        }
        let step = line["step"].as_u64()?;
        if let Some(ranks) = line["ranks"].as_u64() {
            let ranks = usize::try_from(ranks).ok()?;
            let (unit, most) = line["until"].as_object()?.iter().next()?;
            let until = match unit.as_str() {
                "steps" => Length::Steps(most.as_u64()?),
                "epochs" => Length::Epochs(most.as_f64()?),
                "tokens" => Length::Tokens(most.as_u64()?),
                "seconds" => Length::Seconds(most.as_f64()?),
                _ => return None,
            };
            let from = line["from"].as_str().map(PathBuf::from);
            let after = line["after"].as_str().and_then(LogPlace::parse);
            return Some(LogLine::World(WorldLine { ranks, step, until, from, after }));
        }
        let shares = list(&line["shares"], Value::as_f64)?;
        let counts = list(&line["counts"], |count| usize::try_from(count.as_u64()?).ok())?;
        let elapsed = Duration::from_nanos(line["ns"].as_u64()?);
        let at = line["at"].as_str()?.parse().ok()?;
        Some(LogLine::Step(StepLine { step, at, elapsed, shares, counts, hash: None }))
    }
}

/// A list that a line may lack; `None` if it is something else.
fn list<T>(value: &Value, of: impl Fn(&Value) -> Option<T>) -> Option<Option<Vec<T>>> {
    match value {
        Value::Null => Some(None),
        list => list.as_array()?.iter().map(of).collect::<Option<_>>().map(Some),
    }
}
