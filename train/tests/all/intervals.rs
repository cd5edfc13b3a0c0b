//! Lengths and intervals in a run: when callbacks are told what.

use crate::{common::*, prelude::*};

/// Remembers all events.
#[derive(Clone, Default)]
struct Log(Rc<RefCell<Vec<String>>>);

impl<R: Runtime, M, B> Callback<R, M, B> for Log {
    fn on(&mut self, event: &Event<'_, R>, run: &mut Run<'_, R, M, B>) -> Result<()> {
        let at = run.progress();
        let said = match event {
            Event::Begin => "begin".into(),
            Event::EpochBegin => format!("epoch {} begins", at.epoch),
            Event::StepBegin => return Ok(()),
            Event::StepEnd(metrics) => {
                assert_eq!(metrics.global_step(), at.step);
                format!("step {} at {}+{}", at.step, at.epoch, at.position)
            }
            Event::Ending(reason) => format!("ending: {reason:?}"),
            Event::EpochEnd => format!("epoch {} ended", at.epoch - 1),
            Event::End(reason) => format!("end: {reason:?}"),
            _ => "other".into(),
        };
        self.0.borrow_mut().push(said);
        Ok(())
    }
}

/// The steps at whose end an interval was due.
struct Due(Interval, Rc<RefCell<Vec<u64>>>);

impl<R: Runtime, M, B> Callback<R, M, B> for Due {
    fn on(&mut self, event: &Event<'_, R>, run: &mut Run<'_, R, M, B>) -> Result<()> {
        if let Event::StepEnd(_) = event
            && run.is_due(&self.0)
        {
            self.1.borrow_mut().push(run.progress().step);
        }
        Ok(())
    }

    fn counts_tokens(&self) -> bool {
        true
    }
}

#[test]
fn events_come_in_order() {
    let (log, memory) = (Log::default(), Memory::default());
    let comm = one();
    let model = Mlp::new(comm.runtime(), 0.0).unwrap();
    let trainer = Trainer::new(&model, ddp(&comm, &model, 2).unwrap(), loader(comm.runtime()));
    let trainer = trainer.until(Length::Epochs(2.0)).record_every(Interval::Steps(5)).sink(memory.clone());
    trainer.with(log.clone()).run(loss).unwrap();
    // Five batches in an epoch, two in a step: the last step of an epoch takes what is left.
    let expected = [
        "begin",
        "epoch 0 begins",
        "step 1 at 0+16",
        "step 2 at 0+32",
        "step 3 at 1+0",
        "epoch 0 ended",
        "epoch 1 begins",
        "step 4 at 1+16",
        "step 5 at 1+32",
        "step 6 at 2+0",
        "ending: Finished",
        "epoch 1 ended",
        "end: Finished",
    ];
    assert_eq!(*log.0.borrow(), expected);
    // The last step is recorded too, and a record is of the epoch that its step was in.
    let records = memory.0.lock().unwrap();
    let told: Vec<_> = records.iter().map(|record| (record.step, record.epoch, record.fraction)).collect();
    assert_eq!(told, [(5, 1, Some((1.0 + 32.0 / 37.0) / 2.0)), (6, 1, Some(1.0))]);
}

#[test]
fn every_kind_of_interval_is_due_alike_at_every_world_size() {
    let kinds = [
        (Interval::Steps(4), vec![4, 8, 12]),
        (Interval::Epochs(1.0), vec![5, 10]),
        (Interval::Epochs(0.5), vec![3, 5, 8, 10, 13]),
        (Interval::Tokens(37), vec![5, 10]),
        (Interval::Tokens(20), vec![3, 6, 8, 11]),
        (Interval::Fraction(0.5), vec![7, 13]),
        (Interval::Never, vec![]),
    ];
    for ranks in WORLDS {
        let due = on_ranks(ranks, |comm| {
            let model = Mlp::new(comm.runtime(), 0.0)?;
            let mut trainer =
                Trainer::new(&model, ddp(comm, &model, 1)?, loader(comm.runtime())).until(Length::Steps(13));
            let seen: Vec<_> = kinds.iter().map(|_| Rc::new(RefCell::new(Vec::new()))).collect();
            for ((interval, _), seen) in kinds.iter().zip(&seen) {
                trainer = trainer.with(Due(*interval, seen.clone()));
            }
            trainer.run(|model, batch| {
                distributed::train::Loss::sum(loss(model, batch)?.total().clone(), batch.count as f64)
            })?;
            Ok(seen.iter().map(|seen| seen.borrow().clone()).collect::<Vec<_>>())
        });
        let expected: Vec<Vec<u64>> = kinds.iter().map(|(_, due)| due.clone()).collect();
        assert_eq!(due.unwrap(), expected, "{ranks} ranks");
    }
}

#[test]
fn a_run_is_as_long_as_was_asked_for_at_every_world_size() {
    let lengths = [
        (Length::Steps(7), 7),
        (Length::Epochs(1.0), 5),
        (Length::Epochs(1.5), 8),
        (Length::Tokens(50), 7),
        (Length::Steps(0), 0),
        (Length::Seconds(0.0), 0),
    ];
    for ranks in WORLDS {
        for (length, steps) in lengths {
            let report = on_ranks(ranks, |comm| {
                let model = Mlp::new(comm.runtime(), 0.0)?;
                let trainer = Trainer::new(&model, ddp(comm, &model, 1)?, loader(comm.runtime())).until(length);
                let report = trainer.run(|model, batch| {
                    distributed::train::Loss::sum(loss(model, batch)?.total().clone(), batch.count as f64)
                })?;
                Ok((report.progress, report.reason))
            });
            let (progress, reason) = report.unwrap();
            assert_eq!((progress.step, reason), (steps, StopReason::Finished), "{length:?} on {ranks} ranks");
            let examples = (steps / 5 * 37 + steps % 5 * 8) as f64;
            assert_eq!(progress.tokens, examples, "{length:?} on {ranks} ranks");
        }
    }
}

#[test]
fn a_run_of_seconds_ends_on_all_ranks_at_one_step() {
    let steps = distributed::comm::Ranks::new(3).run(cpu, |comm| {
        let model = Mlp::new(comm.runtime(), 0.0)?;
        let trainer = Trainer::new(&model, ddp(&comm, &model, 1)?, loader(comm.runtime())).until(Length::Seconds(0.05));
        Ok(trainer.run(loss)?.progress)
    });
    let steps = steps.unwrap();
    assert!(steps[0].step > 0 && steps[0].elapsed.as_secs_f64() >= 0.05);
    assert!(steps.iter().all(|other| *other == steps[0]), "{steps:?}");
}

#[test]
fn limits_overfitting_and_dry_runs() {
    let comm = one();
    let model = Mlp::new(comm.runtime(), 0.0).unwrap();
    let trained = |limit: fn(Tested<'_>) -> Tested<'_>| {
        let mut seen = Vec::new();
        let step = ddp(&comm, &model, 1).unwrap();
        let trainer = limit(Trainer::new(&model, step, loader(comm.runtime())).until(Length::Epochs(2.0)));
        let report = trainer.run(|model, batch| {
            seen.push((batch.epoch, batch.data.to_vec::<f64>()?));
            loss(model, batch)
        });
        (report.unwrap().progress.step, seen)
    };
    let (steps, seen) = trained(|trainer| trainer.limit_batches(2));
    assert_eq!(steps, 4);
    assert_ne!(seen[0].1, seen[2].1);
    let (steps, seen) = trained(|trainer| trainer.overfit_batches(2));
    assert_eq!(steps, 4);
    assert_eq!([&seen[0].1, &seen[1].1], [&seen[2].1, &seen[3].1]);
}

#[test]
fn a_dry_run_looks_for_nothing_and_leaves_nothing() {
    let (comm, scratch, memory) = (one(), Scratch::new("dry"), Memory::default());
    let run = |is_dry: bool, fails_at: u64| {
        let model = Mlp::new(comm.runtime(), 0.0)?;
        let batches = std::cell::Cell::new(0);
        let count = |_: &(), _: &Batch<Rows>| {
            batches.set(batches.get() + 1);
            Ok((0.0, 1.0))
        };
        let mut trainer = Trainer::new(&model, ddp(&comm, &model, 1)?, loader(comm.runtime())).until(Length::Steps(2));
        trainer = trainer.with(Evaluate::on(held_out(comm.runtime())).every(Interval::Never).measure("x", count));
        trainer = trainer.with(Checkpoints::in_folder(&scratch.0).ignore_signals()).resume(Resume::IfThere);
        if is_dry {
            trainer = trainer.fast_dev_run(3).record_every(Interval::Steps(1)).sink(memory.clone());
        }
        let report = trainer.run(|model, batch| match batch.step == fails_at {
            true => Err(Error::other("no such token")),
            false => loss(model, batch),
        })?;
        Ok::<_, Error>((report.resumed, report.progress.step, batches.get()))
    };
    let steps = || Folder::new(&scratch.0).steps().unwrap();
    // One of four batches is evaluated.
    assert_eq!(run(true, u64::MAX).unwrap(), (None, 3, 1));
    assert!(run(true, 1).unwrap_err().to_string().contains("no such token"));
    assert!(steps().is_empty() && memory.0.lock().unwrap().is_empty());
    assert_eq!(run(false, u64::MAX).unwrap(), (None, 2, 4));
    assert_eq!((run(true, u64::MAX).unwrap(), steps()), ((None, 3, 1), vec![2]));
}

#[test]
fn what_makes_no_sense_is_an_error_before_the_first_step() {
    let comm = one();
    let model = Mlp::new(comm.runtime(), 0.0).unwrap();
    let run = |change: fn(Tested<'_>) -> Tested<'_>| {
        let trainer = change(Trainer::new(&model, ddp(&comm, &model, 1).unwrap(), loader(comm.runtime())));
        trainer
            .run(|_, _| -> Result<distributed::train::Loss<_>> { panic!("a step was taken") })
            .unwrap_err()
            .to_string()
    };
    assert!(run(|t| t.until(Length::Epochs(f64::NAN))).contains("a run cannot last"));
    assert!(run(|t| t.record_every(Interval::Steps(0))).contains("record_every: nothing can happen every"));
    let resume = run(|t| t.resume(train::Resume::IfThere));
    assert!(resume.contains("add `Checkpoints`"), "{resume}");
}
