//! The way from a checkpoint to a step, by the log of a run.

use std::{collections::BTreeMap, path::PathBuf};

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
    /// Hashes of states by step.
    pub hashes: BTreeMap<u64, u64>,
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
    hashes: Vec<(usize, u64, u64)>,
}

impl Route {
    /// The shortest way to the last time that the run took `step`.
    pub(super) fn to(folder: &Folder, step: u64) -> Result<Self> {
        let log = Worlds::read(folder)?;
        let Some(last) = log.steps.iter().rposition(|(_, line)| line.step == step) else {
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
        // A step that was taken again, by a later world, counts as that world took it.
        let worlds: BTreeMap<u64, usize> = taken.iter().map(|&k| (log.steps[k].1.step, log.steps[k].0)).collect();
        let hashes = log.hashes.iter().filter(|(world, step, _)| worlds.get(step) == Some(world));
        Ok(Route { from, legs, hashes: hashes.map(|&(_, step, hash)| (step, hash)).collect() })
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
        let mut all = Worlds { worlds: Vec::new(), steps: Vec::new(), hashes: Vec::new() };
        for line in RunLog::read(folder.path())? {
            let world = all.worlds.len().wrapping_sub(1);
            match line {
                LogLine::World(world) => all.worlds.push(world),
                _ if all.worlds.is_empty() => {
                    return Err(Error::format(folder.path().display().to_string(), "its log begins without ranks"));
                }
                LogLine::Step(line) => all.steps.push((world, line)),
                LogLine::State { step, hash } => all.hashes.push((world, step, hash)),
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
        let earlier = k.checked_sub(1).filter(|&before| self.steps[before].0 == *world);
        match earlier.map(|before| (before, &self.steps[before].1)) {
            // A step that was left out has the number of the next.
            Some((before, of)) if of.step <= line.step && line.step <= of.step + 1 => return Before::Step(before),
            Some((_, of)) => {
                return Before::Unknown(format!("after step {} the run went back to {}", of.step, line.step - 1));
            }
            None => {}
        }
        let begun = &self.worlds[*world];
        if begun.step == 0 {
            return Before::Scratch;
        }
        // The last time that an earlier world came to this state.
        let leads = |&j: &usize| {
            let (of, taken) = &self.steps[j];
            let next = self.steps.get(j + 1).filter(|(world, _)| world == of);
            taken.step == begun.step && next.is_none_or(|(_, next)| (next.step, next.at) == (line.step, line.at))
        };
        let found = (0..k).rev().find(leads);
        let none =
            || Before::Unknown(format!("the checkpoint of step {}, from which ranks went on, is gone", begun.step));
        found.map_or_else(none, Before::Step)
    }
}
