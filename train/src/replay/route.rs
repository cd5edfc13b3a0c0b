//! The way from a checkpoint to a step, by the log of a run.

use std::path::PathBuf;

use distributed::checkpoint::{CheckpointReader, Folder};
use numcore::{Error, Result};

use super::log::{LogLine, RunLog, StepLine};
use crate::{Length, resume::log_place};

/// The steps that lead to a state, or to a step.
pub(super) struct Route {
    /// The checkpoint that the first leg goes on from; none if it begins from scratch.
    pub from: Option<(PathBuf, u64)>,
    /// Steps of worlds of equal size and length, in order.
    pub legs: Vec<Leg>,
}

pub(super) struct Leg {
    pub ranks: usize,
    pub until: Length,
    pub steps: Vec<StepLine>,
}

/// A log whose lines each lead from a state to a state. Hashes are those of their steps.
struct Lines {
    lines: Vec<(u64, LogLine)>,
}

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
        let from = loop {
            match &log.lines[k].1 {
                LogLine::Step(_) => {
                    taken.push(k);
                    k -= 1;
                }
                LogLine::World(world) => match (&world.from, world.after.and_then(|place| log.line_to(place))) {
                    (Some(from), _) => {
                        let there = CheckpointReader::open(Folder::new(from).step(world.step)).is_ok();
                        let how = || format!("that of step {}, in {}", world.step, from.display());
                        break Some((from.clone(), world.step))
                            .filter(|_| there)
                            .ok_or_else(|| gone(how()))
                            .map(Some)?;
                    }
                    (None, Some(before)) if before < k => k = before,
                    (None, _) if world.step == 0 => break None,
                    (None, _) => return Err(gone(format!("that of step {}, from which ranks went on", world.step))),
                },
                LogLine::Back => return Err(gone("the one, to which the run went back".into())),
                LogLine::State { .. } => return Err(Error::internal("StepReplay", "a hash is no state")),
            }
            if let Some((_, at)) = checkpoints.iter().find(|(line, _)| *line == k) {
                break Some((folder.path().to_path_buf(), *at));
            }
        };
        taken.reverse();
        let mut legs: Vec<Leg> = Vec::new();
        for (k, line) in taken.into_iter().filter_map(|k| Some((k, log.step(k)?.clone()))) {
            let (ranks, until) = log.world(k).unwrap_or((1, Length::Steps(0)));
            match legs.last_mut().filter(|leg| (leg.ranks, leg.until) == (ranks, until)) {
                Some(leg) => leg.steps.push(line),
                None => legs.push(Leg { ranks, until, steps: vec![line] }),
            }
        }
        Ok(Route { from, legs })
    }
}

impl Lines {
    fn read(folder: &Folder) -> Result<Self> {
        let mut all: Vec<(u64, LogLine)> = Vec::new();
        for (end, line) in RunLog::read(folder.path())? {
            let Some((to, last)) = all.last_mut() else {
                if !matches!(line, LogLine::World(_)) {
                    return Err(Error::format(folder.path().display().to_string(), "its log begins without ranks"));
                }
                all.push((end, line));
                continue;
            };
            match (line, last) {
                (LogLine::State { hash }, LogLine::Step(of)) => (of.hash, *to) = (Some(hash), end),
                (LogLine::State { .. }, _) => {}
                (line, _) => all.push((end, line)),
            }
        }
        Ok(Lines { lines: all })
    }

    fn step(&self, k: usize) -> Option<&StepLine> {
        match &self.lines.get(k)?.1 {
            LogLine::Step(line) => Some(line),
            _ => None,
        }
    }

    /// The number of ranks and the length of the run in the world of a line.
    fn world(&self, k: usize) -> Option<(usize, Length)> {
        self.lines[..k].iter().rev().find_map(|(_, line)| match line {
            LogLine::World(world) => Some((world.ranks, world.until)),
            _ => None,
        })
    }

    /// The last line that is whole at a place.
    fn line_to(&self, place: u64) -> Option<usize> {
        self.lines.partition_point(|(end, _)| *end <= place).checked_sub(1)
    }

    /// All checkpoints in the folder that can still be read: the lines that led to their states, and their steps.
    fn checkpoints(&self, folder: &Folder) -> Result<Vec<(usize, u64)>> {
        let of = |step: u64| {
            let reader = CheckpointReader::open(folder.step(step)).ok()?;
            Some((self.line_to(log_place(reader.manifest().notes())?)?, step))
        };
        Ok(folder.steps()?.into_iter().filter_map(of).collect())
    }
}
