//! What policies of checkpoints and of stopping remember, of which value, and in which folder.

use data::Batch;
use distributed::checkpoint::Folder;
use numcore::Result;
use runtime_cpu::Cpu;
use train::{BestValue, Checkpoints, EarlyStop, Evaluate, Interval, Length, Monitor, Resume, Trainer};

use crate::common::*;

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
    Checkpoints::in_folder(&folder.0).on_signal(false)
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
    let run = || valued(&[1.0], Resume::No, |trainer| trainer.with(in_folder(&scratch).overwrite(true))).map(|_| ());
    let held = Folder::new(&scratch.0).lock().unwrap();
    let error = run().unwrap_err().to_string();
    let process = format!("process {} on", std::process::id());
    assert!(error.contains(&process) && error.contains("saves checkpoints in"), "{error}");
    drop(held);
    // The second comes after the first.
    run().unwrap();
    run().unwrap();
}

#[test]
fn a_run_goes_on_from_the_newest_checkpoint_of_all_folders() {
    let (best, last) = (Scratch::new("newest-best"), Scratch::new("newest-last"));
    let both = |best: &Scratch, last: &Scratch| {
        let best = in_folder(best).best("validation/value").at_end(false);
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
    let policy =
        |folder: &Scratch| in_folder(folder).every(Interval::Steps(1)).best("validation/value").restore_best(true);
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
            trainer = trainer.with(Evaluate::on(held_out(comm.runtime())).every(Interval::Steps(3)).at_end(false));
        }
        let policy = in_folder(&scratch).best("validation/loss").restore_best(true).overwrite(true);
        trainer.with(policy).run(loss).map(|_| ())
    };
    let error = run(false, 2, false).unwrap_err().to_string();
    assert!(error.contains("nothing in this run evaluates, so `validation/loss` has no value"), "{error}");
    assert!(Folder::new(&scratch.0).steps().unwrap().is_empty());
    let error = run(true, 2, false).unwrap_err().to_string();
    assert!(error.contains("no evaluation that gives `validation/loss` has run"), "{error}");
    run(true, 3, false).unwrap();
    run(true, 2, true).unwrap();
}

#[test]
fn a_run_without_a_best_checkpoint_says_so() {
    let (scratch, memory) = (Scratch::new("no-best"), Memory::default());
    let policy = in_folder(&scratch).best("validation/value").restore_best(true);
    valued(&[f64::NAN], Resume::No, |trainer| trainer.with(policy).sink(memory.clone())).unwrap();
    assert!(memory.text("checkpoint/best").is_some());
}
