//! Which checkpoints are saved, which stay, and what becomes of failures.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use data::Batch;
use distributed::checkpoint::Folder;
use numcore::{Error, Result};
use runtime_cpu::Cpu;
use train::{Checkpoints, Evaluate, Interval, Length, Monitor, Trainer};

use crate::common::*;

/// Values of an evaluation after every step: the second is the best.
const VALUES: [f64; 6] = [3.0, 1.0, 2.0, 2.5, 1.5, 4.0];

fn run(ranks: usize, checkpoints: impl Fn() -> Checkpoints<Cpu> + Sync, memory: &Memory) -> Result<u64> {
    on_ranks(ranks, |comm| {
        let model = Mlp::new(comm.runtime(), 0.0)?;
        let calls = AtomicUsize::new(0);
        let value = |_: &Mlp<Cpu>, _: &Batch<Rows>| Ok((VALUES[calls.fetch_add(1, Ordering::SeqCst) / 4], 1.0));
        let evaluate = Evaluate::on(held_out(comm.runtime())).every(Interval::Steps(1)).measure("value", value);
        let trainer = Trainer::new(&model, ddp(comm, &model, 1)?, loader(comm.runtime())).until(Length::Steps(6));
        let report = trainer
            .with(evaluate.without_loss())
            .with(checkpoints().on_signal(false))
            .sink(memory.clone())
            .run(loss)?;
        Ok(report.progress.step)
    })
}

#[test]
fn the_last_ones_and_the_best_stay() {
    for ranks in [1, 2, 3] {
        for in_thread in [true, false] {
            let scratch = Scratch::new("keep");
            let policy = || {
                let checkpoints = Checkpoints::in_folder(&scratch.0).every(Interval::Steps(1)).keep(2);
                checkpoints.best("validation/value").in_thread(in_thread)
            };
            run(ranks, policy, &Memory::default()).unwrap();
            let folder = Folder::new(&scratch.0);
            assert_eq!(folder.steps().unwrap(), [2, 5, 6], "{ranks} ranks, in a thread: {in_thread}");
            assert_eq!(folder.marked("best").unwrap(), Some(2));
            assert_eq!(folder.latest().unwrap(), Some(6));
        }
    }
}

#[test]
fn what_is_best_alone_is_saved() {
    let scratch = Scratch::new("best");
    let policy = || Checkpoints::in_folder(&scratch.0).best(Monitor::max("validation/value")).at_end(false);
    run(1, policy, &Memory::default()).unwrap();
    assert_eq!(Folder::new(&scratch.0).steps().unwrap(), [1, 6]);
}

#[test]
fn without_an_interval_the_end_is_saved() {
    let scratch = Scratch::new("end");
    run(2, || Checkpoints::in_folder(&scratch.0), &Memory::default()).unwrap();
    assert_eq!(Folder::new(&scratch.0).steps().unwrap(), [6]);
}

/// A folder whose `nth` change on any rank fails.
fn failing(scratch: &Scratch, nth: usize) -> impl Fn() -> Checkpoints<Cpu> + Sync {
    let (path, changes) = (scratch.0.clone(), Arc::new(AtomicUsize::new(0)));
    move || {
        let changes = changes.clone();
        let folder = Folder::new(&path).watched(move |change| match changes.fetch_add(1, Ordering::SeqCst) {
            n if n == nth => Err(Error::argument("test", format!("no space left to {change}"))),
            _ => Ok(()),
        });
        Checkpoints::at(folder).every(Interval::Steps(2))
    }
}

#[test]
fn a_save_that_fails_ends_the_run_and_leaves_the_last_good_one() {
    // One rank makes five changes in a save: the second save fails.
    for in_thread in [true, false] {
        for nth in 5..10 {
            let scratch = Scratch::new("fails");
            let policy = failing(&scratch, nth);
            let error = run(1, || policy().in_thread(in_thread), &Memory::default()).unwrap_err().to_string();
            assert!(error.contains("no space left to"), "{error}");
            assert_eq!(Folder::new(&scratch.0).latest().unwrap(), Some(2), "change {nth}");
        }
    }
}

#[test]
fn a_save_that_fails_on_one_rank_ends_all() {
    let scratch = Scratch::new("fails-on-one");
    let policy = failing(&scratch, 1);
    let error = run(3, policy, &Memory::default()).unwrap_err().to_string();
    assert!(error.contains("no space left to write a rank's file"), "{error}");
}

#[test]
fn a_failure_can_be_reported_instead() {
    for (ranks, in_thread) in [(1, false), (2, false), (1, true), (2, true), (3, true)] {
        let (scratch, memory) = (Scratch::new("reported"), Memory::default());
        let policy = failing(&scratch, 1);
        let steps = run(ranks, || policy().in_thread(in_thread).report_failures(), &memory).unwrap();
        assert_eq!(steps, 6);
        assert_eq!(Folder::new(&scratch.0).steps().unwrap(), [4, 6]);
        assert!(memory.text("checkpoint/failure").unwrap().contains("no space left"));
    }
}

#[test]
fn keeping_none_is_refused() {
    let scratch = Scratch::new("none");
    let error = run(1, || Checkpoints::in_folder(&scratch.0).keep(0), &Memory::default()).unwrap_err().to_string();
    assert!(error.contains("at least one checkpoint stays"), "{error}");
}
