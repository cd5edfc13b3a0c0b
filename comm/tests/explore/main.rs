//! Two or three ranks meet in thousands of orders of events, each decided by a scheduler: no order hangs, every rank gets a result or an
//! error that says why, all workers end, and all memory comes back.
//!
//! The communicators are compiled once more here, over another `sync`. Schedules are drawn from fixed seeds; what a failure prints can be
//! run again with `shuttle::replay`.
#![allow(missing_docs)]

#[path = "../../src/lib.rs"]
#[allow(dead_code, unused_imports, unreachable_pub, reason = "only what threads meet through is explored")]
mod comm;
mod scenarios;
mod sync;

use std::time::Duration;

use comm::{Comm, Places, Quorum, Ranks, ThreadRendezvous, ThreadSeat};
use numcore::{Result, Runtime};
use runtime_cpu::Cpu;
use shuttle::{
    Config, MaxSteps, Runner,
    scheduler::{PctScheduler, RandomScheduler},
};
use sync::mpsc;

/// Whether deadlines may pass.
#[derive(Clone, Copy, PartialEq)]
enum Time {
    Stands,
    Passes,
}

/// Runs `program` on `n` ranks in many orders of events and lets `check` see what came of each.
///
/// Random orders find what happens often; those of Burckhardt et al. (*A Randomized Scheduler with Probabilistic Guarantees of Finding Bugs*,
/// 2010) what takes a few switches at the right places.
fn explore<T: Send + 'static>(n: usize, time: Time, program: fn(Comm<Cpu>) -> Result<T>, check: fn(Vec<Result<T>>)) {
    let schedule = move || {
        sync::begin(time == Time::Passes);
        let runtimes: Vec<Cpu> = (0..n).map(|_| Cpu::with_threads(1)).collect();
        let ranks = Ranks::new(n).timeout(Duration::from_secs(1)).any_place();
        let outcomes = ranks.outcomes(|rank| Ok(runtimes[rank].clone()), program);
        sync::end();
        let outcomes = outcomes.unwrap_or_else(|e| panic!("{e}"));
        check(outcomes);
        for (rank, rt) in runtimes.iter().enumerate() {
            assert_eq!(rt.memory().total.live, 0, "memory of rank {rank} did not come back");
        }
    };
    in_many_orders(schedule);
}

/// Lets `program` run with the seats of three ranks and a channel between its threads, in many orders of events.
fn explore_rendezvous(
    time: Time,
    program: impl Fn(ThreadRendezvous<Cpu>, Vec<ThreadSeat<Cpu>>, mpsc::Sender<()>, mpsc::Receiver<()>)
    + Copy
    + Send
    + Sync
    + 'static,
) {
    in_many_orders(move || {
        sync::begin(time == Time::Passes);
        let runtimes: Vec<Cpu> = (0..3).map(|_| Cpu::with_threads(1)).collect();
        let (quorum, second) = (Quorum::default(), Duration::from_secs(1));
        let made = ThreadRendezvous::at_places(runtimes.clone(), quorum, second, Places::Any);
        let (rendezvous, seats) = made.unwrap_or_else(|e| panic!("{e}"));
        let (sends, listens) = mpsc::channel();
        program(rendezvous, seats, sends, listens);
        sync::end();
        for (rank, rt) in runtimes.iter().enumerate() {
            assert_eq!(rt.memory().total.live, 0, "memory of rank {rank} did not come back");
        }
    });
}

fn in_many_orders(schedule: impl Fn() + Copy + Send + Sync + 'static) {
    let config = || {
        let mut config = Config::new();
        // Kernels of a debug build.
        config.stack_size = 1 << 20;
        config.max_steps = MaxSteps::FailAfter(100_000);
        config
    };
    Runner::new(RandomScheduler::new_from_seed(1, RANDOM), config()).run(schedule);
    Runner::new(PctScheduler::new_from_seed(2, 3, PRIORITIES), config()).run(schedule);
}

/// Schedules of each kind: a few seconds for all scenarios.
const RANDOM: usize = 300;
const PRIORITIES: usize = 300;
