//! What policies of checkpoints and of stopping remember, of which value, and in which folder.

use std::sync::mpsc;

use distributed::checkpoint::Checkpointed;
use train::BestValue;

use crate::{common::*, prelude::*};

/// Callbacks of a run.
fn policies<F: for<'a> FnOnce(Tested<'a>) -> Tested<'a>>(with: F) -> F {
    with
}

/// A run of one rank whose evaluations give these values, one after each step, with some callbacks.
fn valued(
    values: &[f64],
    resume: Resume,
    with: impl for<'a> FnOnce(Tested<'a>) -> Tested<'a>,
) -> Result<(Report, Vec<f64>)> {
    let comm = one();
    let model = Mlp::new(comm.runtime(), 0.0)?;
    let mut values = values.iter().copied();
    let (steps, mut last) = (values.len() as u64, f64::NAN);
    let value = move |_: &(), batch: &Batch<Rows>| {
        last = if batch.step == 0 { values.next().unwrap_or(f64::NAN) } else { last };
        Ok((last, 1.0))
    };
    let evaluate = Evaluate::on(held_out(comm.runtime())).every(Interval::Steps(1)).limit_batches(1);
    let evaluate = evaluate.measure("value", value).without_loss();
    let trainer = Trainer::new(&model, ddp(&comm, &model, 1)?, loader(comm.runtime())).resume(resume.clone());
    let from = if resume == Resume::No { 0 } else { 3 };
    let report = with(trainer.until(Length::Steps(from + steps)).with(evaluate)).run(loss)?;
    Ok((report, weights(&model)?))
}

fn in_folder(folder: &Scratch) -> Checkpoints<Cpu> {
    Checkpoints::in_folder(&folder.0).ignore_signals()
}

#[test]
fn two_policies_in_one_folder_are_refused() {
    let scratch = Scratch::new("two-policies");
    let name = scratch.0.file_name().unwrap();
    for other in [scratch.0.clone(), scratch.0.join("../").join(name), scratch.0.join("x/..")] {
        let two = policies(|trainer| {
            let last = Checkpoints::in_folder(&other).every(Interval::Steps(1)).keep(1);
            trainer.with(in_folder(&scratch).best("validation/value")).with(last)
        });
        let error = valued(&[1.0], Resume::No, two).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("two callbacks save in") && error.contains(".every(..).keep(..).best(..)"), "{error}");
    }
}

#[test]
fn a_folder_is_that_of_one_run_at_a_time() {
    let scratch = Scratch::new("locked");
    let folder = |wait: u64| Folder::new(&scratch.0).lock_wait(Duration::from_millis(wait));
    let saves = |wait| Checkpoints::at(folder(wait)).ignore_signals().overwrite();
    let run = |wait| valued(&[1.0], Resume::No, |trainer| trainer.with(saves(wait))).map(|_| ());
    let held = Folder::new(&scratch.0).lock().unwrap();
    let error = run(0).unwrap_err().to_string();
    let process = format!("process {} on", std::process::id());
    assert!(error.contains(&process) && error.contains("saves checkpoints in"), "{error}");
    // The second comes when the first has left.
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| run(60_000).map_err(|error| error.to_string()));
        drop(held);
        waiting.join().unwrap().unwrap();
    });
    run(0).unwrap();
}

/// Says when the run is about to look into folders.
struct Attached(mpsc::Sender<()>);

impl<M, B> Callback<Cpu, M, B> for Attached {
    fn attach(&mut self, _: &mut dyn Checkpointed<Cpu>, _: &Comm<Cpu>) -> Result<()> {
        self.0.send(()).map_err(Error::other)
    }

    fn on(&mut self, _: &Event<'_, Cpu>, _: &mut Run<'_, Cpu, M, B>) -> Result<()> {
        Ok(())
    }
}

/// A run that has failed may save while another one waits for its folder: that one goes on from what it finds then.
#[test]
fn a_run_that_waited_for_a_folder_goes_on_from_what_was_saved_meanwhile() {
    let scratch = Scratch::new("lock-waits");
    let folder = || Folder::new(&scratch.0).lock_wait(Duration::from_secs(60));
    let run = |until: u64, attached: Option<Attached>| {
        let comm = one();
        let model = Mlp::new(comm.runtime(), 0.3)?;
        let trainer = Trainer::new(&model, ddp(&comm, &model, 1)?, loader(comm.runtime()));
        let trainer = trainer.until(Length::Steps(until)).resume(Resume::IfThere);
        let mut trainer = trainer.with(Checkpoints::at(folder()).ignore_signals());
        if let Some(attached) = attached {
            trainer = trainer.with(attached);
        }
        trainer.run(loss).map(|report| report.resumed)
    };
    run(2, None).unwrap();
    let held = folder().lock().unwrap();
    let (attached, waits) = mpsc::channel();
    let resumed = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| run(4, Some(Attached(attached))).map_err(|error| error.to_string()));
        waits.recv().unwrap();
        std::thread::sleep(Duration::from_millis(20));
        // As if by the other run.
        folder().clear().unwrap();
        drop(held);
        waiting.join().unwrap()
    });
    assert_eq!(resumed, Ok(None));
}

#[test]
fn ranks_wait_for_a_folder_together() {
    let scratch = Scratch::new("locked-ranks");
    let folder = |wait: u64| Folder::new(&scratch.0).lock_wait(Duration::from_secs(wait));
    let taken = |wait| on_ranks(3, |comm| Ok((comm.rank(), folder(wait).lock_of_all(comm)?.is_some())));
    let held = folder(0).lock().unwrap();
    let error = taken(0).unwrap_err().to_string();
    assert!(error.contains(&format!("process {} on", std::process::id())), "{error}");
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| taken(60).map_err(|error| error.to_string()));
        drop(held);
        assert_eq!(waiting.join().unwrap(), Ok((0, true)));
    });
}

#[test]
fn a_run_goes_on_from_the_newest_checkpoint_of_all_folders() {
    let (best, last) = (Scratch::new("newest-best"), Scratch::new("newest-last"));
    let both = |best: &Scratch, last: &Scratch| {
        let best = in_folder(best).best("validation/value").skip_end();
        let last = in_folder(last).every(Interval::Steps(1)).keep(2);
        policies(move |trainer| trainer.with(best).with(last))
    };
    valued(&[1.0, 2.0, 3.0], Resume::No, both(&best, &last)).unwrap();
    let steps = |folder: &Scratch| Folder::new(&folder.0).steps().unwrap();
    assert_eq!((steps(&best), steps(&last)), (vec![1], vec![2, 3]));
    let (report, _) = valued(&[4.0, 0.5], Resume::IfThere, both(&best, &last)).unwrap();
    assert_eq!((report.resumed, steps(&best), steps(&last)), (Some(3), vec![1, 5], vec![4, 5]));
}

#[test]
fn the_best_of_another_folder_is_not_the_best_here() {
    let (from, to) = (Scratch::new("best-from"), Scratch::new("best-to"));
    let policy = |folder: &Scratch| in_folder(folder).every(Interval::Steps(1)).best("validation/value").restore_best();
    valued(&[3.0, 1.0, 2.0], Resume::No, |trainer| trainer.with(policy(&from))).unwrap();
    let on = |values: &[f64], folder: &Scratch| {
        valued(values, Resume::From(from.0.clone()), |trainer| trainer.with(policy(folder))).unwrap().1
    };
    let fourth = on(&[7.0], &Scratch::new("best-fourth"));
    assert_eq!(on(&[7.0, 8.0, 9.0], &to), fourth);
    assert_eq!(Folder::new(&to.0).marked("best").unwrap(), Some(4));
    // In its own folder the second step stays the best.
    let (_, second) = valued(&[7.0], Resume::IfThere, |trainer| trainer.with(policy(&from))).unwrap();
    assert_ne!(second, fourth);
    assert_eq!(Folder::new(&from.0).marked("best").unwrap(), Some(2));
}

#[test]
fn what_was_best_of_one_value_says_nothing_of_another() {
    let scratch = Scratch::new("another-monitor");
    let with = |monitor: Monitor| {
        let (folder, stop) = (in_folder(&scratch), EarlyStop::on(monitor.clone()).patience(2));
        policies(move |trainer| trainer.with(folder.best(monitor)).with(stop))
    };
    valued(&[7.0, 6.5, 6.0], Resume::No, with(Monitor::min("validation/value"))).unwrap();
    let (report, _) = valued(&[0.1, 0.2, 0.3], Resume::IfThere, with(Monitor::max("validation/value"))).unwrap();
    assert_eq!((report.progress.step, report.reason), (6, train::StopReason::Finished));
    assert_eq!(Folder::new(&scratch.0).marked("best").unwrap(), Some(6));
}

/// Early stopping waits for more than a small improvement, which the checkpoint has all the same.
#[test]
fn the_best_value_is_that_of_the_checkpoint() {
    for stops_first in [true, false] {
        let scratch = Scratch::new("best-of-two");
        let (report, _) = valued(&[2.0, 1.9], Resume::No, |trainer| {
            let stop = EarlyStop::on(Monitor::min("validation/value").min_delta(0.5));
            let best = in_folder(&scratch).best("validation/value");
            if stops_first { trainer.with(stop).with(best) } else { trainer.with(best).with(stop) }
        })
        .unwrap();
        assert_eq!(report.best["validation/value"], BestValue { step: 2, value: 1.9 });
    }
}

#[test]
fn callbacks_are_told_apart_by_what_they_look_at() {
    let (scratch, other) = (Scratch::new("order"), Scratch::new("order-other"));
    let stop = || EarlyStop::on("validation/value").patience(2);
    let another = || EarlyStop::on(Monitor::max("validation/value").min_delta(0.5)).patience(100);
    let best = || in_folder(&scratch).best("validation/value");
    valued(&[2.0, 1.0, 3.0], Resume::No, |trainer| trainer.with(best()).with(stop())).unwrap();
    let (report, _) = valued(&[4.0, 5.0], Resume::IfThere, |trainer| {
        trainer.with(in_folder(&other)).with(another()).with(stop()).with(best())
    })
    .unwrap();
    assert_eq!(report.progress.step, 4, "one evaluation was waited for before");
    assert_eq!(report.best["validation/value"], BestValue { step: 2, value: 1.0 });
    assert!(report.loss.is_some_and(f64::is_finite));
    assert_eq!(Folder::new(&scratch.0).marked("best").unwrap(), Some(2));
}

#[test]
fn a_value_that_nothing_gives_is_an_error() {
    let scratch = Scratch::new("nothing-gives");
    let run = |evaluate: bool, steps: u64, is_dry: bool| {
        let comm = one();
        let model = Mlp::new(comm.runtime(), 0.0)?;
        let mut trainer =
            Trainer::new(&model, ddp(&comm, &model, 1)?, loader(comm.runtime())).until(Length::Steps(steps));
        if is_dry {
            trainer = trainer.fast_dev_run(steps);
        }
        if evaluate {
            trainer = trainer.with(Evaluate::on(held_out(comm.runtime())).every(Interval::Steps(3)).skip_end());
        }
        let policy = in_folder(&scratch).best("validation/loss").restore_best().overwrite();
        trainer.with(policy).run(loss).map(|_| ())
    };
    let error = run(false, 2, false).unwrap_err().to_string();
    assert!(error.contains("nothing in this run evaluates, so `validation/loss` has no value"), "{error}");
    assert!(Folder::new(&scratch.0).steps().unwrap().is_empty());
    let error = run(true, 2, false).unwrap_err().to_string();
    assert!(error.contains("no evaluation that gives `validation/loss` has run"), "{error}");
    run(true, 0, false).unwrap();
    run(true, 3, false).unwrap();
    run(true, 2, true).unwrap();
}

#[test]
fn a_run_without_a_best_checkpoint_says_so() {
    let (scratch, memory) = (Scratch::new("no-best"), Memory::default());
    let policy = in_folder(&scratch).best("validation/value").restore_best();
    valued(&[f64::NAN], Resume::No, |trainer| trainer.with(policy).sink(memory.clone())).unwrap();
    assert!(memory.text("checkpoint/best").is_some());
}
