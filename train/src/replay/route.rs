//! The way from a checkpoint to a step, by the log of a run.

use std::path::PathBuf;

use distributed::checkpoint::{CheckpointReader, Folder};
use numcore::{Error, Result};

use super::log::{LogLine, LogPlace, RunLog, StepLine};
use crate::Length;

/// The steps that lead to a state, or to a step.
pub(super) struct Route {
    /// The checkpoint that the first leg goes on from; none if it begins from scratch.
    pub from: Option<(PathBuf, u64)>,
    /// The steps of each world, in order.
    pub legs: Vec<Leg>,
}

pub(super) struct Leg {
    pub ranks: usize,
    pub until: Length,
    pub steps: Vec<StepLine>,
}

/// A log whose lines each lead from a state to a state. Hashes are those of their steps.
struct Lines {
    lines: Vec<LogLine>,
    /// The line that led to the state at each place.
    places: Vec<(LogPlace, usize)>,
}

/// A checkpoint in the folder of the log: its place in a log, and its step.
type Kept = (Option<LogPlace>, u64);

impl Route {
    /// The shortest way to a time that the run took `step`: the last one, or the one of this number.
    pub(super) fn to(folder: &Folder, step: u64, attempt: Option<usize>) -> Result<Self> {
        let log = Lines::read(folder)?;
        let all = || (0..log.lines.len()).filter_map(|k| log.step(k).map(|line| (k, line.step)));
        let times: Vec<usize> = all().filter(|(_, of)| *of == step).map(|(k, _)| k).collect();
        if let Some(attempt) = attempt.filter(|&attempt| !times.is_empty() && attempt >= times.len()) {
            let allowed = format!("below {}, the number of times that the run took step {step}", times.len());
            return Err(Error::range("StepReplay", "attempt", attempt, allowed));
        }
        let Some(last) = attempt.map_or(times.last(), |attempt| times.get(attempt)).copied() else {
            let range = all().map(|(_, step)| step).min().zip(all().map(|(_, step)| step).max());
            let allowed =
                range.map_or("a step of the run, which took none".into(), |(a, b)| format!("a step from {a} to {b}"));
            return Err(Error::range("StepReplay", "step", step, allowed));
        };
        let checkpoints = log.checkpoints(folder)?;
        let gone = |how: String| {
            let why =
                format!("no checkpoint leads to step {step}: {how}, is gone; keep more of them (`Checkpoints::keep`)");
            Error::argument("StepReplay", why)
        };
        // The state before a line is that after another one.
        let (mut k, mut taken) = (last, Vec::new());
        let own = |step: u64| Some((folder.path().to_path_buf(), step));
        let from = loop {
            match &log.lines[k] {
                LogLine::Step(_) => {
                    taken.push(k);
                    k -= 1;
                }
                LogLine::World(world) => {
                    let (step, before) = (world.step, world.after.and_then(|place| log.line_to(place)));
                    let is_of = |(place, at): &Kept| (*place, *at) == (world.after, step);
                    let other = world
                        .from
                        .as_ref()
                        .filter(|from| CheckpointReader::open(Folder::new(*from).step(step)).is_ok());
                    match (other, before.filter(|before| *before < k)) {
                        (Some(other), _) => break Some((other.clone(), step)),
                        _ if world.from.is_none() && step > 0 && checkpoints.iter().any(is_of) => break own(step),
                        (_, Some(before)) => k = before,
                        _ if step == 0 => break None,
                        _ => return Err(gone(format!("that of step {step}, from which ranks went on"))),
                    }
                }
                LogLine::Back => return Err(gone("the one, to which the run went back".into())),
                LogLine::State { .. } => return Err(Error::internal("StepReplay", "a hash is no state")),
            }
            let leads_here = |(place, _): &&Kept| place.is_some_and(|place| log.line_to(place) == Some(k));
            if let Some((_, at)) = checkpoints.iter().find(leads_here) {
                break own(*at);
            }
        };
        taken.reverse();
        let mut legs: Vec<(usize, Leg)> = Vec::new();
        for (k, line) in taken.into_iter().filter_map(|k| Some((k, log.step(k)?.clone()))) {
            let Some((world, ranks, until)) = log.world(k) else { continue };
            match legs.last_mut().filter(|(of, _)| *of == world) {
                Some((_, leg)) => leg.steps.push(line),
                None => legs.push((world, Leg { ranks, until, steps: vec![line] })),
            }
        }
        Ok(Route { from, legs: legs.into_iter().map(|(_, leg)| leg).collect() })
    }
}

impl Lines {
    fn read(folder: &Folder) -> Result<Self> {
        let mut all = Lines { lines: Vec::new(), places: Vec::new() };
        for (place, line) in RunLog::read(folder.path())? {
            match (line, all.lines.last_mut()) {
                (LogLine::State { hash }, Some(LogLine::Step(of))) => of.hash = Some(hash),
                (LogLine::State { .. }, Some(_)) => {}
                (line, _) => all.lines.push(line),
            }
            all.places.push((place, all.lines.len() - 1));
        }
        match all.lines.first() {
            Some(LogLine::World(_)) | None => Ok(all),
            _ => Err(Error::format(folder.path().display().to_string(), "its log begins without ranks")),
        }
    }

    fn step(&self, k: usize) -> Option<&StepLine> {
        match self.lines.get(k)? {
            LogLine::Step(line) => Some(line),
            _ => None,
        }
    }

    /// The world of a line: the number of its own line, its ranks, and the length of the run.
    fn world(&self, k: usize) -> Option<(usize, usize, Length)> {
        self.lines[..k].iter().enumerate().rev().find_map(|(at, line)| match line {
            LogLine::World(world) => Some((at, world.ranks, world.until)),
            _ => None,
        })
    }

    /// The line that led to the state at a place, if that is one of this log.
    fn line_to(&self, place: LogPlace) -> Option<usize> {
        self.places.iter().find(|(known, _)| *known == place).map(|(_, line)| *line)
    }

    /// All checkpoints in the folder that can still be read.
    fn checkpoints(&self, folder: &Folder) -> Result<Vec<Kept>> {
        let of = |step: u64| {
            let reader = CheckpointReader::open(folder.step(step)).ok()?;
            Some((LogPlace::of(reader.manifest().notes()), step))
        };
        Ok(folder.steps()?.into_iter().filter_map(of).collect())
    }
}
