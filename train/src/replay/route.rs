//! The way from a checkpoint to a step, by the log of a run.

use std::path::PathBuf;

use data::State;
use distributed::checkpoint::{CheckpointReader, Folder};
use numcore::{Error, Result};

use super::log::{LogLine, RunLog, StepLine, WorldLine};
use crate::resume::data_state;

/// The steps that lead to a state, or to a step.
pub(super) struct Route {
    /// The checkpoint that the first leg goes on from; none if it begins from scratch.
    pub from: Option<(PathBuf, u64)>,
    /// Steps of worlds of equal size, in order.
    pub legs: Vec<Leg>,
}

pub(super) struct Leg {
    pub ranks: usize,
    pub steps: Vec<StepLine>,
}

/// The log of a run by worlds.
struct Worlds {
    worlds: Vec<WorldLine>,
    /// All steps, with the numbers of their worlds.
    steps: Vec<(usize, StepLine)>,
}

impl Route {
    /// The shortest way to a time that the run took `step`: the last one, or the one of this number.
    pub(super) fn to(folder: &Folder, step: u64, attempt: Option<usize>) -> Result<Self> {
        let log = Worlds::read(folder)?;
        let times: Vec<usize> = (0..log.steps.len()).filter(|&k| log.steps[k].1.step == step).collect();
        if let Some(attempt) = attempt.filter(|&attempt| !times.is_empty() && attempt >= times.len()) {
            let allowed = format!("below {}, the number of times that the run took step {step}", times.len());
            return Err(Error::range("StepReplay", "attempt", attempt, allowed));
        }
        let Some(last) = attempt.map_or(times.last(), |attempt| times.get(attempt)).copied() else {
            let known: Vec<u64> = log.steps.iter().map(|(_, line)| line.step).collect();
            let range = known.iter().min().zip(known.iter().max());
            let allowed =
                range.map_or("a step of the run, which took none".into(), |(a, b)| format!("a step from {a} to {b}"));
            return Err(Error::range("StepReplay", "step", step, allowed));
        };
        let checkpoints = log.checkpoints(folder)?;
        let (mut k, mut taken) = (last, vec![last]);
        let from = loop {
            let line = &log.steps[k].1;
            let state = (line.step.saturating_sub(1), line.at);
            if let Some((path, _)) = checkpoints.iter().find(|(_, found)| *found == state) {
                break Some((path.clone(), state.0));
            }
            match log.before(k) {
                Before::Step(before) => taken.push(before),
                Before::Scratch => break None,
                Before::Unknown(why) => {
                    let why =
                        format!("no checkpoint leads to step {step}: {why}; keep more of them (`Checkpoints::keep`)");
                    return Err(Error::argument("StepReplay", why));
                }
            }
            k = taken[taken.len() - 1];
        };
        taken.reverse();
        let mut legs: Vec<Leg> = Vec::new();
        for &k in &taken {
            let (world, line) = &log.steps[k];
            let ranks = log.worlds[*world].ranks;
            match legs.last_mut().filter(|leg| leg.ranks == ranks) {
                Some(leg) => leg.steps.push(line.clone()),
                None => legs.push(Leg { ranks, steps: vec![line.clone()] }),
            }
        }
        Ok(Route { from, legs })
    }
}

/// The step that led to the state before another.
enum Before {
    Step(usize),
    /// The state is that of a run from scratch.
    Scratch,
    Unknown(String),
}

impl Worlds {
    fn read(folder: &Folder) -> Result<Self> {
        let mut all = Worlds { worlds: Vec::new(), steps: Vec::new() };
        for line in RunLog::read(folder.path())? {
            let world = all.worlds.len().wrapping_sub(1);
            match line {
                LogLine::World(world) => all.worlds.push(world),
                _ if all.worlds.is_empty() => {
                    return Err(Error::format(folder.path().display().to_string(), "its log begins without ranks"));
                }
                LogLine::Step(line) => all.steps.push((world, line)),
                LogLine::State { hash } => {
                    if let Some((_, line)) = all.steps.last_mut().filter(|(of, _)| *of == world) {
                        line.hash = Some(hash);
                    }
                }
            }
        }
        Ok(all)
    }

    /// The states of all checkpoints that can still be read, with the folders they are in.
    fn checkpoints(&self, folder: &Folder) -> Result<Vec<(PathBuf, (u64, State))>> {
        let mut all = Vec::new();
        let others = self.worlds.iter().filter_map(|world| Some((Folder::new(world.from.as_ref()?), world.step)));
        let own = folder.steps()?.into_iter().map(|step| (folder.clone(), step));
        for (folder, step) in own.chain(others) {
            let Ok(reader) = CheckpointReader::open(folder.step(step)) else { continue };
            if let Some(at) = data_state(reader.manifest().notes()) {
                all.push((folder.path().to_path_buf(), (step, at)));
            }
        }
        Ok(all)
    }

    fn before(&self, k: usize) -> Before {
        let (world, line) = &self.steps[k];
        if let Some(before) = k.checked_sub(1).filter(|&before| self.steps[before].0 == *world) {
            return Before::Step(before);
        }
        let begun = &self.worlds[*world];
        let gone = |how| Before::Unknown(format!("the checkpoint of step {}, {how}, is gone", begun.step));
        match begun {
            WorldLine { back: true, .. } => return gone("to which the run went back"),
            WorldLine { step: 0, .. } => return Before::Scratch,
            _ => {}
        }
        // The last time that an earlier world came to this state. Its last step leads to the next place if it was made,
        // or left out and counted for nothing.
        let leads = |&j: &usize| {
            let (of, taken) = &self.steps[j];
            match self.steps.get(j + 1).filter(|(world, _)| world == of) {
                Some((_, next)) => (next.step, next.at) == (line.step, line.at),
                None => taken.step == begun.step || taken.step == begun.step + 1 && taken.at != line.at,
            }
        };
        let found = (0..k).rev().find(leads);
        found.map_or_else(|| gone("from which ranks went on"), Before::Step)
    }
}
