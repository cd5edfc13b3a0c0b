//! What callbacks ask for: agreed on by all ranks, whoever asks.

use crate::{common::*, prelude::*};

/// What is asked of a run.
type Ask<R, M, B> = fn(&mut Run<'_, R, M, B>);

/// Asks for something after a step, on one rank.
struct Asks<R: Runtime, M, B> {
    rank: usize,
    step: u64,
    ask: Ask<R, M, B>,
    events: Rc<RefCell<Vec<String>>>,
}

impl<R: Runtime, M, B> Callback<R, M, B> for Asks<R, M, B> {
    fn on(&mut self, event: &Event<'_, R>, run: &mut Run<'_, R, M, B>) -> Result<()> {
        let step = run.progress().step;
        let event = match event {
            Event::StepEnd(_) if step == self.step && run.comm().rank() == self.rank => {
                (self.ask)(run);
                return Ok(());
            }
            Event::Evaluated(values) => format!("evaluated {} at {step}", values.len()),
            Event::Ending(reason) => format!("{reason:?} at {step}"),
            Event::EpochBegin => format!("epoch {} after {step}", run.progress().epoch),
            _ => return Ok(()),
        };
        self.events.borrow_mut().push(event);
        Ok(())
    }
}

type TestRun<'r, 'x> = &'r mut Run<'x, runtime_cpu::Cpu, Mlp<runtime_cpu::Cpu>, Rows>;

/// What every rank saw when one rank asked after step 3 of 8.
fn asked(ranks: usize, ask: fn(TestRun<'_, '_>)) -> Vec<String> {
    let seen = Ranks::new(ranks).run(cpu, |comm| {
        let model = Mlp::new(comm.runtime(), 0.0)?;
        let events = Rc::new(RefCell::new(Vec::new()));
        let callback = Asks { rank: ranks - 1, step: 3, ask, events: events.clone() };
        Trainer::new(&model, ddp(&comm, &model, 1)?, loader(comm.runtime()))
            .until(Length::Steps(8))
            .with(callback)
            .with(Evaluate::on(held_out(comm.runtime())).every(Interval::Never).skip_end())
            .run(loss)?;
        let events = events.borrow().clone();
        Ok(events)
    });
    let seen = seen.unwrap();
    assert!(seen.iter().all(|other| *other == seen[0]), "ranks saw different events: {seen:?}");
    seen[0].clone()
}

#[test]
fn what_one_rank_asks_for_all_do_at_the_same_step() {
    let whole = ["epoch 0 after 0", "epoch 1 after 5", "Finished at 8"];
    for ranks in WORLDS {
        assert_eq!(asked(ranks, |_| ()), whole, "{ranks}");
        let stopped = asked(ranks, |run| run.control().stop("enough"));
        assert_eq!(stopped, ["epoch 0 after 0", "Requested(\"enough\") at 3"], "{ranks}");
        let evaluated = asked(ranks, |run| run.control().evaluate());
        assert_eq!(evaluated, ["epoch 0 after 0", "evaluated 1 at 3", "epoch 1 after 5", "Finished at 8"], "{ranks}");
        let skipped = asked(ranks, |run| run.control().skip_epoch());
        assert_eq!(skipped, ["epoch 0 after 0", "epoch 1 after 3", "Finished at 8"], "{ranks}");
        let skipped = asked(ranks, |run| run.control().skip_batches(1));
        assert_eq!(skipped, ["epoch 0 after 0", "epoch 1 after 4", "Finished at 8"], "{ranks}");
        assert_eq!(asked(ranks, |run| run.control().interrupt())[1], "Interrupted at 3", "{ranks}");
    }
}

#[test]
fn the_reason_of_the_lowest_rank_is_told() {
    let reasons = Ranks::new(4).run(cpu, |comm| {
        struct Stops;
        impl<R: Runtime, M, B> Callback<R, M, B> for Stops {
            fn on(&mut self, event: &Event<'_, R>, run: &mut Run<'_, R, M, B>) -> Result<()> {
                let rank = run.comm().rank();
                if let (Event::StepEnd(_), 1..) = (event, rank) {
                    run.control().stop(format!("rank {rank} has had enough"));
                }
                Ok(())
            }
        }
        let model = Mlp::new(comm.runtime(), 0.0)?;
        let report = Trainer::new(&model, ddp(&comm, &model, 1)?, loader(comm.runtime())).with(Stops).run(loss)?;
        Ok((report.reason, report.progress.step))
    });
    let told = (StopReason::Requested("rank 1 has had enough".into()), 1);
    assert_eq!(reasons.unwrap(), vec![told; 4]);
}

/// Fails on one rank.
struct Broken(usize);

impl<R: Runtime, M, B> Callback<R, M, B> for Broken {
    fn on(&mut self, event: &Event<'_, R>, run: &mut Run<'_, R, M, B>) -> Result<()> {
        match event {
            Event::StepEnd(_) if run.progress().step == 2 && run.comm().rank() == self.0 => {
                Err(Error::other("the disk of the log is full"))
            }
            _ => Ok(()),
        }
    }
}

#[test]
fn a_broken_callback_on_one_rank_ends_all_with_its_words() {
    for ranks in WORLDS {
        let outcomes = Ranks::new(ranks).outcomes(cpu, |comm| {
            let model = Mlp::new(comm.runtime(), 0.0)?;
            let trainer = Trainer::new(&model, ddp(&comm, &model, 1)?, loader(comm.runtime())).until(Length::Steps(8));
            trainer.with(Broken(ranks - 1)).run(loss).map(|_| ())
        });
        for (rank, outcome) in outcomes.unwrap().into_iter().enumerate() {
            let error = outcome.unwrap_err();
            assert!(error.to_string().contains("the disk of the log is full"), "rank {rank} of {ranks}: {error}");
            assert!(error.to_string().contains(&format!("rank {}", ranks - 1)), "rank {rank} of {ranks}: {error}");
        }
    }
}

#[test]
fn ranks_that_were_told_different_things_say_so() {
    let outcomes = Ranks::new(2).outcomes(cpu, |comm| {
        let model = Mlp::new(comm.runtime(), 0.0)?;
        let length = Length::Steps(2 + comm.rank() as u64);
        Trainer::new(&model, ddp(&comm, &model, 1)?, loader(comm.runtime())).until(length).run(loss).map(|_| ())
    });
    for outcome in outcomes.unwrap() {
        let error = outcome.unwrap_err().to_string();
        let each = "rank 0 has `until: Steps(2)`, rank 1 `until: Steps(3)`";
        assert!(error.contains("the configuration of the trainer of rank 0") && error.contains(each), "{error}");
    }
}

/// Records a scalar after each step.
struct RecordsRank;

impl<R: Runtime, M, B> Callback<R, M, B> for RecordsRank {
    fn on(&mut self, event: &Event<'_, R>, run: &mut Run<'_, R, M, B>) -> Result<()> {
        if matches!(event, Event::StepEnd(_)) {
            record_scalar("rank", run.comm().rank() as f64);
        }
        Ok(())
    }
}

#[test]
fn recorded_scalars_are_weighted_means_over_micro_batches_and_ranks() {
    for ranks in WORLDS {
        let memory = Memory::default();
        on_ranks(ranks, |comm| {
            let model = Mlp::new(comm.runtime(), 0.0)?;
            Trainer::new(&model, ddp(comm, &model, 2)?, loader(comm.runtime()))
                .until(Length::Steps(3))
                .record_every(Interval::Steps(1))
                .with(RecordsRank)
                .sink(memory.clone())
                .run(|model, batch| {
                    // The mean over a batch: weighted, means of shares make the mean of the whole.
                    let rows = batch.data.to_vec::<f64>()?;
                    let sum: f64 = rows.chunks(4).take(batch.count).map(|row| row[3]).sum();
                    record_scalar("target", if batch.count > 0 { sum / batch.count as f64 } else { f64::NAN });
                    if comm.rank() == 0 {
                        record_scalar("first rank", 7.0);
                    }
                    loss(model, batch)
                })?;
            Ok(())
        })
        .unwrap();
        let mut expected = Vec::new();
        for batches in loader(&runtime_cpu::Cpu::with_threads(1)).epoch(0).unwrap().collect::<Vec<_>>().chunks(2) {
            let rows: Vec<f64> =
                batches.iter().flat_map(|b| b.as_ref().unwrap().data.to_vec::<f64>().unwrap()).collect();
            let targets: Vec<f64> = rows.chunks(4).map(|row| row[3]).collect();
            expected.push(targets.iter().sum::<f64>() / targets.len() as f64);
        }
        let means = memory.of("target");
        assert_eq!(means.len(), 3, "{ranks}");
        for ((step, mean), expected) in means.into_iter().zip(expected) {
            assert!((mean - expected).abs() < 1e-12, "step {step} on {ranks} ranks: {mean} {expected}");
        }
        assert_eq!(memory.of("first rank"), [(1, 7.0), (2, 7.0), (3, 7.0)]);
        let middle = (ranks as f64 - 1.0) / 2.0;
        assert_eq!(
            memory.of("rank"),
            [(1, middle), (2, middle), (3, middle)],
            "of no batch, so every rank counts once"
        );
    }
}

#[test]
fn batches_of_different_sizes_are_told_with_both() {
    let outcomes = Ranks::new(3).outcomes(cpu, |comm| {
        let model = Mlp::new(comm.runtime(), 0.0)?;
        let batch = if distributed::comm::Communicator::rank(&*comm) == 2 { 12 } else { 8 };
        Trainer::new(&model, ddp(&comm, &model, 1)?, loader(comm.runtime()).batch(batch)).run(loss).map(|_| ())
    });
    for outcome in outcomes.unwrap() {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains("rank 0 was given batches of 8 examples and rank 2 of 12"), "{error}");
    }
}

/// Sets a length after a step.
struct Sets(u64, Length);

impl<R: Runtime, M, B> Callback<R, M, B> for Sets {
    fn on(&mut self, event: &Event<'_, R>, run: &mut Run<'_, R, M, B>) -> Result<()> {
        match event {
            Event::StepEnd(_) if run.progress().step == self.0 => run.set_length(self.1),
            _ => Ok(()),
        }
    }
}

#[test]
fn a_callback_can_choose_the_length() {
    for ranks in [1, 3] {
        let ended = |sets: Sets| {
            on_ranks(ranks, |comm| {
                let model = Mlp::new(comm.runtime(), 0.0)?;
                let sets = Sets(sets.0, sets.1);
                let trainer = Trainer::new(&model, ddp(comm, &model, 1)?, loader(comm.runtime()));
                let report = trainer.until(Length::Seconds(1e9)).with(sets).run(loss)?;
                Ok((report.reason, report.progress.step))
            })
        };
        assert_eq!(ended(Sets(3, Length::Steps(7))).unwrap(), (StopReason::Finished, 7), "{ranks} ranks");
        assert_eq!(ended(Sets(4, Length::Steps(2))).unwrap(), (StopReason::Finished, 4), "{ranks} ranks");
        let error = ended(Sets(3, Length::Tokens(50))).unwrap_err().to_string();
        assert!(error.contains("must be given to `Trainer::until`"), "{error}");
        assert!(ended(Sets(3, Length::Epochs(f64::NAN))).is_err());
    }
}

/// Requests something while the evaluation at the end of a run is over, on the last rank; and remembers how endings are announced.
struct AtEnd(fn(TestRun<'_, '_>), Rc<RefCell<Vec<String>>>);

impl Callback<runtime_cpu::Cpu, Mlp<runtime_cpu::Cpu>, Rows> for AtEnd {
    fn on(&mut self, event: &Event<'_, runtime_cpu::Cpu>, run: TestRun<'_, '_>) -> Result<()> {
        match event {
            Event::Ending(reason) => self.1.borrow_mut().push(format!("{reason:?}")),
            Event::Evaluated(_) if run.comm().rank() + 1 == run.comm().size() => (self.0)(run),
            _ => {}
        }
        Ok(())
    }
}

#[test]
fn why_a_run_ends_stays_unless_a_signal_comes() {
    let ended = |ranks: usize, ask: fn(TestRun<'_, '_>)| {
        on_ranks(ranks, |comm| {
            let (model, endings) = (Mlp::new(comm.runtime(), 0.0)?, Rc::default());
            let report = Trainer::new(&model, ddp(comm, &model, 1)?, loader(comm.runtime()))
                .until(Length::Steps(3))
                .with(Evaluate::on(held_out(comm.runtime())).every(Interval::Never))
                .with(AtEnd(ask, Rc::clone(&endings)))
                .run(loss)?;
            let endings = endings.borrow().clone();
            Ok((report.reason, report.progress.step, endings))
        })
        .unwrap()
    };
    for ranks in [1, 3] {
        let asked = ended(ranks, |run| run.control().stop("good enough"));
        assert_eq!(asked, (StopReason::Finished, 3, vec!["Finished".into()]), "{ranks} ranks");
        let interrupted = ended(ranks, |run| run.control().interrupt());
        let endings = vec!["Finished".into(), "Interrupted".into()];
        assert_eq!(interrupted, (StopReason::Interrupted, 3, endings), "{ranks} ranks");
    }
}

/// Makes a run longer when it is about to end.
struct Extends(u64, Rc<RefCell<Vec<u64>>>);

impl<R: Runtime, M, B> Callback<R, M, B> for Extends {
    fn on(&mut self, event: &Event<'_, R>, run: &mut Run<'_, R, M, B>) -> Result<()> {
        match event {
            Event::Ending(_) => {
                self.1.borrow_mut().push(run.progress().step);
                run.set_length(Length::Steps(self.0))
            }
            _ => Ok(()),
        }
    }
}

#[test]
fn a_run_that_is_made_longer_at_its_end_ends_as_any_other() {
    for ranks in [1, 2] {
        let (step, endings) = on_ranks(ranks, |comm| {
            let (model, endings) = (Mlp::new(comm.runtime(), 0.0)?, Rc::default());
            let trainer = Trainer::new(&model, ddp(comm, &model, 1)?, loader(comm.runtime())).until(Length::Steps(2));
            let report = trainer.with(Extends(5, Rc::clone(&endings))).run(loss)?;
            let endings = endings.borrow().clone();
            Ok((report.progress.step, endings))
        })
        .unwrap();
        assert_eq!((step, endings), (5, vec![2, 5]), "{ranks} ranks");
    }
}

#[test]
fn lengths_that_differ_are_an_error() {
    let outcomes = Ranks::new(2).outcomes(cpu, |comm| {
        let model = Mlp::new(comm.runtime(), 0.0)?;
        let sets = Sets(3, Length::Steps(5 + comm.rank() as u64));
        let trainer = Trainer::new(&model, ddp(&comm, &model, 1)?, loader(comm.runtime())).until(Length::Steps(9));
        trainer.with(sets).run(loss).map(|_| ())
    });
    for outcome in outcomes.unwrap() {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains("the length of the run"), "{error}");
    }
}

#[test]
fn errors_name_the_caller_s_line() {
    let state = std::collections::BTreeMap::from([("count".to_string(), "many".to_string())]);
    let errors = [
        train::parsed::<u64>(&state, "count").map(|_| ()),
        train::parsed::<u64>(&state, "step").map(|_| ()),
        train::compat::DistributedTrainConfig { world_size: 0, ..Default::default() }.engine(None).map(|_| ()),
    ];
    for (k, error) in errors.into_iter().map(Result::unwrap_err).enumerate() {
        assert_eq!(error.location().map(|at| at.file()), Some(file!()), "{k}: {error}");
    }
}
