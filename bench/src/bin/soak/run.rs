//! Runs a program, and checks its results.

use std::{
    fs,
    ops::Range,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use weftgrad::{
    MemoryCategory,
    distributed::{
        checkpoint::Folder,
        comm::{Collectives, Comm, Communicator, Fault, FaultyCommunicator, NoOpCommunicator, Ranks},
    },
    prelude::*,
};

use crate::{
    program::Program,
    train::{Run, Values},
};

/// Success, or a description of the failure.
pub(crate) type Verdict = std::result::Result<(), String>;

/// The time limit of a communication call: far longer than any call takes, and short enough to wait for the detection
/// of a fault.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The final state of a rank: losses, and the weights it can read.
#[derive(Clone, Debug, PartialEq)]
struct End {
    losses: Vec<f64>,
    weights: Values,
}

/// Runs a program and checks it; returns the violated condition, in words.
pub(crate) fn check(program: &Program) -> Verdict {
    let scratch = std::env::temp_dir().join(format!("weftgrad-soak-{}-{}", std::process::id(), program.seed));
    let _ = fs::remove_dir_all(&scratch);
    let outcome = checked(program, &scratch);
    let _ = fs::remove_dir_all(&scratch);
    outcome
}

fn checked(program: &Program, scratch: &Path) -> Verdict {
    let alone = single(program).map_err(|e| format!("on one rank: {e}"))?;
    let (folder, saved) = (Folder::new(scratch), AtomicUsize::new(0));
    let runtimes: Vec<Cpu> = (0..program.ranks).map(|_| Cpu::with_threads(1)).collect();
    let outcomes = Ranks::new(program.ranks)
        .timeout(TIMEOUT)
        .outcomes(|r| Ok(runtimes[r].clone()), |comm| rank(comm, program, &folder, &saved))
        .map_err(|e| e.to_string())?;
    runtimes.iter().enumerate().try_for_each(|(rank, rt)| empty(rank, rt))?;
    let failed = outcomes.iter().filter(|o| o.is_err()).count();
    let harmless = matches!(program.fault, None | Some((_, _, Fault::Delay(_))));
    if harmless && failed > 0 {
        let errors: Vec<String> = outcomes.iter().filter_map(|o| o.as_ref().err().map(ToString::to_string)).collect();
        return Err(format!("{failed} ranks failed: {}", errors.join("\n")));
    }
    // A fault may befall a call that was never made; one that occurs fails all ranks. A rank that skipped its last call
    // does not see that the others wait for it.
    let skipped = matches!(program.fault, Some((_, _, Fault::Skip)));
    if failed > 0 && failed + usize::from(skipped) < program.ranks {
        return Err(format!("a fault was seen by {failed} of {} ranks", program.ranks));
    }
    if failed == 0 {
        let ends: Vec<End> = outcomes.into_iter().filter_map(Result::ok).collect();
        agreed(program, &ends, &alone)?;
    }
    resumed(program, &folder, &alone, saved.into_inner())
}

/// Checks ranks that finished: they have equal losses, equal copies of weights, all weights together, and agree with
/// one rank.
fn agreed(program: &Program, ends: &[End], alone: &End) -> Verdict {
    let mut all = Values::new();
    for (rank, end) in ends.iter().enumerate() {
        if end.losses != ends[0].losses {
            return Err(format!("the losses of rank {rank} differ from those of rank 0"));
        }
        for (name, values) in &end.weights {
            let all = all.entry(name.clone()).or_insert_with(|| vec![f64::NAN; values.len()]);
            for (all, &value) in all.iter_mut().zip(values).filter(|(_, value)| !value.is_nan()) {
                if !all.is_nan() && *all != value {
                    return Err(format!("the copies of {name} differ, that of rank {rank} from one before it"));
                }
                *all = value;
            }
        }
    }
    near("losses", program.bound(), &ends[0].losses, &alone.losses)?;
    same("weights", program, &all, &alone.weights)
}

/// Checks that the last saved checkpoint exists, loads on one rank, and resumes to the result of an undisturbed run.
/// `saved` is the last step whose save returned on any rank.
fn resumed(program: &Program, folder: &Folder, alone: &End, saved: usize) -> Verdict {
    let latest = folder.latest().map_err(|e| e.to_string())?;
    let Some(step) = latest.map(|step| step as usize).filter(|&step| step >= saved) else {
        let lost = format!("the checkpoint of step {saved} was saved, and the last one there is {latest:?}");
        return if saved > 0 { Err(lost) } else { Ok(()) };
    };
    let (comm, one) = (nobody(), program.alone());
    let go_on = || {
        let mut run = Run::new(&comm, &one, 99)?;
        run.load(folder)?;
        steps(&mut run, step..program.steps)?;
        run.weights()
    };
    let weights = go_on().map_err(|e| format!("the checkpoint of step {step}: {e}"))?;
    same("weights after resuming", program, &weights, &alone.weights)
}

/// Checks that no memory is booked on a rank after all tensors were dropped, after any outcome; its communicator may
/// still be busy.
fn empty(rank: usize, rt: &Cpu) -> Verdict {
    let begun = Instant::now();
    loop {
        let left: usize = MemoryCategory::ALL.iter().map(|&u| rt.memory().of(u).live).sum();
        match left {
            0 => return Ok(()),
            _ if begun.elapsed() < TIMEOUT => thread::sleep(Duration::from_millis(1)),
            _ => return Err(format!("rank {rank} leaks {left} bytes")),
        }
    }
}

fn same(what: &str, program: &Program, got: &Values, expected: &Values) -> Verdict {
    if !got.keys().eq(expected.keys()) {
        return Err(format!("{what} are of {:?} in place of {:?}", got.keys(), expected.keys()));
    }
    got.iter().try_for_each(|(name, values)| near(&format!("{what}: {name}"), program.bound(), values, &expected[name]))
}

fn near(what: &str, bound: f64, got: &[f64], expected: &[f64]) -> Verdict {
    let off = got.iter().zip(expected).map(|(a, b)| (a - b).abs() / (1.0 + b.abs()));
    match got.len() == expected.len() && off.clone().all(|off| off <= bound) {
        true => Ok(()),
        false => Err(format!("{what} differ from one rank's by {:e}", off.fold(0.0, f64::max))),
    }
}

fn nobody() -> Comm<Cpu> {
    Arc::new(NoOpCommunicator::new(&Cpu::with_threads(1)))
}

fn single(program: &Program) -> Result<End> {
    let (comm, one) = (nobody(), program.alone());
    let mut run = Run::new(&comm, &one, 1)?;
    Ok(End { losses: steps(&mut run, 0..program.steps)?, weights: run.weights()? })
}

fn steps(run: &mut Run, which: Range<usize>) -> Result<Vec<f64>> {
    which.map(|step| run.step(step)).collect()
}

fn rank(comm: Comm<Cpu>, program: &Program, folder: &Folder, saved: &AtomicUsize) -> Result<End> {
    let comm: Comm<Cpu> = match program.fault {
        Some((rank, call, fault)) if rank == comm.rank() => Arc::new(FaultyCommunicator::new(comm, call, fault)),
        _ => comm,
    };
    // Replicas start from the values of rank 0.
    let mut run = Run::new(&comm, program, 1 + program.replica(comm.rank()) as u64)?;
    let mut losses = Vec::new();
    for step in 0..program.steps {
        losses.push(run.step(step)?);
        if program.saves.contains(&(step + 1)) {
            run.save(folder, step + 1)?;
            saved.fetch_max(step + 1, Ordering::SeqCst);
        }
    }
    let end = End { losses, weights: run.weights()? };
    comm.barrier()?;
    Ok(end)
}
