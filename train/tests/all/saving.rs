//! Which checkpoints are saved, which stay, and what becomes of failures.

use distributed::comm::InOrderCommunicator;

use crate::{common::*, prelude::*};

/// Values of an evaluation after every step: the second is the best.
const VALUES: [f64; 6] = [3.0, 1.0, 2.0, 2.5, 1.5, 4.0];

fn run(ranks: usize, checkpoints: impl Fn() -> Checkpoints<Cpu> + Sync, memory: &Memory) -> Result<u64> {
    on_ranks(ranks, |comm| {
        let model = Mlp::new(comm.runtime(), 0.0)?;
        let calls = AtomicUsize::new(0);
        let value = |_: &(), _: &Batch<Rows>| Ok((VALUES[calls.fetch_add(1, Ordering::SeqCst) / 4], 1.0));
        let evaluate = Evaluate::on(held_out(comm.runtime())).every(Interval::Steps(1)).measure("value", value);
        let trainer = Trainer::new(&model, ddp(comm, &model, 1)?, loader(comm.runtime())).until(Length::Steps(6));
        let report = trainer
            .with(evaluate.without_loss())
            .with(checkpoints().ignore_signals())
            .sink(memory.clone())
            .run(loss)?;
        Ok(report.progress.step)
    })
}

/// Checkpoints that a thread writes, or for which the step waits.
fn written(checkpoints: Checkpoints<Cpu>, in_thread: bool) -> Checkpoints<Cpu> {
    if in_thread { checkpoints } else { checkpoints.blocking() }
}

#[test]
fn the_last_ones_and_the_best_stay() {
    for ranks in [1, 2, 3] {
        for in_thread in [true, false] {
            let scratch = Scratch::new("keep");
            let policy = || {
                let checkpoints = Checkpoints::in_folder(&scratch.0).every(Interval::Steps(1)).keep(2);
                written(checkpoints.best("validation/value"), in_thread)
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
    let policy = || Checkpoints::in_folder(&scratch.0).best(Monitor::max("validation/value")).skip_end();
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
            let error = run(1, || written(policy(), in_thread), &Memory::default()).unwrap_err().to_string();
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
        let steps = run(ranks, || written(policy(), in_thread).report_failures(), &memory).unwrap();
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

#[test]
fn checkpoints_of_another_run_are_left_alone() {
    let (scratch, other) = (Scratch::new("another"), Scratch::new("from"));
    let run = |folder: &Scratch, resume: Resume, dry: bool| {
        let comm = one();
        let model = Mlp::new(comm.runtime(), 0.0)?;
        let mut trainer = Trainer::new(&model, ddp(&comm, &model, 1)?, loader(comm.runtime())).until(Length::Steps(2));
        if dry {
            trainer = trainer.fast_dev_run(1).with(NonFinite::go_back(1));
        }
        let factor = if dry { f64::NAN } else { 1.0 };
        trainer.with(Checkpoints::in_folder(&folder.0).ignore_signals()).resume(resume).run(|model, batch| {
            let own = loss(model, batch)?;
            distributed::train::Loss::sum(numcore::ops::PointwiseOps::mul(own.total(), factor)?, own.weight())
        })
    };
    run(&scratch, Resume::No, false).unwrap();
    run(&other, Resume::No, false).unwrap();
    let log = || std::fs::read(scratch.0.join("replay.jsonl")).unwrap();
    let kept = log();
    for resume in [Resume::No, Resume::From(other.0.clone())] {
        let error = run(&scratch, resume, false).unwrap_err().to_string();
        assert!(error.contains("has checkpoints of another run, the last of step 2"), "{error}");
        assert_eq!(log(), kept);
    }
    for resume in [Resume::IfThere, Resume::From(scratch.0.clone())] {
        assert_eq!(run(&scratch, resume, false).unwrap().resumed, Some(2));
    }
    let error = run(&scratch, Resume::No, true).unwrap_err().to_string();
    assert!(error.contains("there is no checkpoint to go back to"), "{error}");
}

#[test]
fn a_failure_of_the_last_save_is_reported_too() {
    for (ranks, in_thread) in [(1, true), (1, false), (2, true)] {
        let (scratch, memory) = (Scratch::new("last-fails"), Memory::default());
        let policy = failing(&scratch, 1);
        run(ranks, || written(policy().every(Interval::Never), in_thread).report_failures(), &memory).unwrap();
        assert!(memory.text("checkpoint/failure").is_some_and(|text| text.contains("no space left")), "{ranks}");
    }
}

#[test]
fn a_checkpoint_that_could_not_be_written_is_not_the_best() {
    for in_thread in [true, false] {
        let (scratch, saves) = (Scratch::new("not-best"), Arc::new(AtomicUsize::new(0)));
        let policy = || {
            let saves = saves.clone();
            let folder = Folder::new(&scratch.0).watched(move |change| {
                match change == "make a folder" && saves.fetch_add(1, Ordering::SeqCst) == 1 {
                    true => Err(Error::argument("test", "no space left")),
                    false => Ok(()),
                }
            });
            written(Checkpoints::at(folder).best("validation/value").skip_end(), in_thread).report_failures()
        };
        run(1, policy, &Memory::default()).unwrap();
        let folder = Folder::new(&scratch.0);
        // The value of step 2, which is not there, would have been the best of all.
        assert_eq!(folder.steps().unwrap(), [1, 3, 5], "in a thread: {in_thread}");
        assert_eq!(folder.marked("best").unwrap(), Some(5));
    }
}

/// Does something when a step has ended.
struct After<F>(u64, F);

impl<F: FnMut(&mut Run<'_, Cpu, Mlp<Cpu>, Rows>) -> Result<()>> Callback<Cpu, Mlp<Cpu>, Rows> for After<F> {
    fn on(&mut self, event: &Event<'_, Cpu>, run: &mut Run<'_, Cpu, Mlp<Cpu>, Rows>) -> Result<()> {
        if matches!(event, Event::StepEnd(_)) && run.progress().step == self.0 { (self.1)(run) } else { Ok(()) }
    }
}

#[test]
fn each_folder_has_an_interval_of_its_own() {
    let (often, rarely) = (Scratch::new("often"), Scratch::new("rarely"));
    on_ranks(2, |comm| {
        let (model, mut went) = (Mlp::new(comm.runtime(), 0.0)?, false);
        let saves = |folder: &Scratch, steps| {
            Checkpoints::in_folder(&folder.0).every(Interval::Steps(steps)).skip_end().ignore_signals()
        };
        Trainer::new(&model, ddp(comm, &model, 1)?, loader(comm.runtime()))
            .until(Length::Steps(9))
            .with(saves(&often, 2))
            .with(saves(&rarely, 3))
            // To the checkpoint of step 4, which one of the folders has.
            .with(After(5, |run: &mut Run<'_, _, _, _>| {
                if !std::mem::replace(&mut went, true) {
                    run.control().go_back();
                }
                Ok(())
            }))
            .with(After(7, |run: &mut Run<'_, _, _, _>| {
                run.control().save();
                Ok(())
            }))
            .run(loss)
            .map(drop)
    })
    .unwrap();
    assert_eq!(Folder::new(&often.0).steps().unwrap(), [2, 4, 6, 7, 8]);
    assert_eq!(Folder::new(&rarely.0).steps().unwrap(), [3, 6, 7, 9]);
}

/// Remembers how many records there were when they were flushed.
struct Flushes(usize, Arc<Mutex<Vec<usize>>>);

impl Sink for Flushes {
    fn write(&mut self, _: &Record) -> Result<()> {
        self.0 += 1;
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        self.1.lock().unwrap().push(self.0);
        Ok(())
    }
}

#[test]
fn what_was_recorded_before_a_save_is_flushed() {
    let (scratch, flushed, comm) = (Scratch::new("flushed"), Arc::default(), one());
    let model = Mlp::new(comm.runtime(), 0.0).unwrap();
    Trainer::new(&model, ddp(&comm, &model, 1).unwrap(), loader(comm.runtime()))
        .until(Length::Steps(5))
        .record_every(Interval::Steps(1))
        .with(Checkpoints::in_folder(&scratch.0).every(Interval::Steps(2)).ignore_signals().skip_end())
        .sink(Flushes(0, Arc::clone(&flushed)))
        .run(loss)
        .unwrap();
    assert_eq!(*flushed.lock().unwrap(), [2, 4, 5]);
}

#[test]
fn a_save_is_written_to_its_end_when_the_run_ends_by_an_error() {
    for ranks in [1, 2] {
        let scratch = Scratch::new("in-flight");
        let error = on_ranks(ranks, |comm| {
            let model = Mlp::new(comm.runtime(), 0.0)?;
            let slow = Folder::new(&scratch.0).watched(|_| {
                std::thread::sleep(std::time::Duration::from_millis(60));
                Ok(())
            });
            let rank = comm.rank();
            Trainer::new(&model, ddp(comm, &model, 1)?, loader(comm.runtime()))
                .until(Length::Steps(9))
                .with(Checkpoints::at(slow).every(Interval::Steps(2)).ignore_signals())
                .with(After(3, |_: &mut Run<'_, _, _, _>| match rank + 1 == ranks {
                    true => Err(Error::other("the log is full")),
                    false => Ok(()),
                }))
                .run(loss)
        });
        assert!(error.unwrap_err().to_string().contains("the log is full"));
        assert_eq!(Folder::new(&scratch.0).latest().unwrap(), Some(2), "{ranks} ranks");
    }
}

#[test]
fn where_transfers_wait_for_each_other_no_thread_saves() {
    for in_order in [false, true] {
        let (scratch, threads) = (Scratch::new("in-order"), Arc::new(AtomicUsize::new(0)));
        on_ranks(2, |comm| {
            let comm: Comm<Cpu> =
                if in_order { Arc::new(InOrderCommunicator::new(comm.clone())?) } else { comm.clone() };
            let model = Mlp::new(comm.runtime(), 0.0)?;
            let seen = threads.clone();
            let folder = Folder::new(&scratch.0).watched(move |_| {
                let is_writer = std::thread::current().name() == Some("checkpoint");
                seen.fetch_add(usize::from(is_writer), Ordering::SeqCst);
                Ok(())
            });
            Trainer::new(&model, ddp(&comm, &model, 1)?, loader(comm.runtime()))
                .until(Length::Steps(4))
                .with(Checkpoints::at(folder).every(Interval::Steps(2)).ignore_signals())
                .run(loss)
        })
        .unwrap();
        assert_eq!(Folder::new(&scratch.0).steps().unwrap(), [2, 4]);
        assert_eq!(threads.load(Ordering::SeqCst) == 0, in_order);
    }
}

/// Weights after six steps of which the second was the best, by a policy; with early stopping after the fourth.
fn left(ranks: usize, folder: &Scratch, stops: bool, restores: bool) -> Result<(u64, Vec<f64>)> {
    on_ranks(ranks, |comm| {
        let model = Mlp::new(comm.runtime(), 0.0)?;
        let calls = AtomicUsize::new(0);
        let value = |_: &(), _: &Batch<Rows>| Ok((VALUES[calls.fetch_add(1, Ordering::SeqCst) / 4], 1.0));
        let evaluate = Evaluate::on(held_out(comm.runtime())).every(Interval::Steps(1)).measure("value", value);
        let policy = Checkpoints::in_folder(&folder.0).best("validation/value").ignore_signals();
        let mut trainer = Trainer::new(&model, ddp(comm, &model, 1)?, loader(comm.runtime())).until(Length::Steps(6));
        if stops {
            trainer = trainer.with(EarlyStop::on("validation/value").patience(2));
        }
        let policy = if restores { policy.restore_best() } else { policy };
        let trainer = trainer.with(evaluate.without_loss()).with(policy.overwrite());
        let step = trainer.run(loss)?.progress.step;
        Ok((step, weights(&model)?))
    })
}

#[test]
fn the_best_weights_can_be_those_that_are_left() {
    for ranks in [1, 3] {
        let scratch = Scratch::new("restore");
        let second = on_ranks(ranks, |comm| {
            let model = Mlp::new(comm.runtime(), 0.0)?;
            let trainer = Trainer::new(&model, ddp(comm, &model, 1)?, loader(comm.runtime()));
            trainer.until(Length::Steps(2)).run(loss)?;
            weights(&model)
        });
        let second = second.unwrap();
        assert_eq!(left(ranks, &scratch, true, true).unwrap(), (4, second.clone()), "{ranks} ranks");
        assert_eq!(left(ranks, &scratch, false, true).unwrap(), (6, second.clone()), "{ranks} ranks");
        assert_ne!(left(ranks, &scratch, true, false).unwrap().1, second);
        // From where a run would go on stays the last one.
        assert_eq!(Folder::new(&scratch.0).latest().unwrap(), Some(4));
    }
    let nothing = || Checkpoints::in_folder("nowhere").restore_best();
    let error = run(1, nothing, &Memory::default()).unwrap_err().to_string();
    assert!(error.contains("no value selects the best checkpoint"), "{error}");
}

#[test]
fn a_new_run_can_replace_the_checkpoints_of_another() {
    for ranks in [1, 2] {
        let scratch = Scratch::new("overwrite");
        run(ranks, || Checkpoints::in_folder(&scratch.0).every(Interval::Steps(2)), &Memory::default()).unwrap();
        assert_eq!(Folder::new(&scratch.0).steps().unwrap(), [2, 4, 6]);
        let policy = || Checkpoints::in_folder(&scratch.0).every(Interval::Steps(5)).overwrite();
        run(ranks, policy, &Memory::default()).unwrap();
        assert_eq!(Folder::new(&scratch.0).steps().unwrap(), [5, 6], "{ranks} ranks");
    }
}

#[test]
fn a_save_that_outlasts_the_other_ranks_patience_is_made_again() {
    let (scratch, slow) = (Scratch::new("outlasts"), Arc::new(AtomicUsize::new(0)));
    let outcomes = Ranks::new(2).timeout(Duration::from_secs(4)).outcomes(cpu, |comm| {
        let model = Mlp::new(comm.runtime(), 0.0)?;
        let (rank, changes) = (comm.rank(), slow.clone());
        // One change lasts longer than any rank waits for another.
        let folder = Folder::new(&scratch.0).watched(move |_| {
            if changes.fetch_add(1, Ordering::SeqCst) == 0 {
                std::thread::sleep(Duration::from_secs(6));
            }
            Ok(())
        });
        Trainer::new(&model, ddp(&comm, &model, 1)?, loader(comm.runtime()))
            .until(Length::Steps(9))
            .with(Checkpoints::at(folder).every(Interval::Steps(2)).ignore_signals())
            .with(After(3, |_: &mut Run<'_, _, _, _>| match rank {
                0 => Err(Error::other("the log is full")),
                _ => Ok(()),
            }))
            .run(loss)
            .map(|_| ())
    });
    for outcome in outcomes.unwrap() {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains("the log is full"), "{error}");
    }
    assert_eq!(Folder::new(&scratch.0).latest().unwrap(), Some(2));
}
