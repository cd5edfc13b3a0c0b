//! In which order a step's consequences come, and that none is lost.

use crate::{common::*, prelude::*};

type TestRun<'r, 'x> = &'r mut Run<'x, Cpu, Mlp<Cpu>, Rows>;

/// Tells what happens, and asks for something where it is told to.
struct EventLog<F>(Rc<RefCell<Vec<String>>>, F);

impl<F: FnMut(&str, TestRun<'_, '_>)> Callback<Cpu, Mlp<Cpu>, Rows> for EventLog<F> {
    fn on(&mut self, event: &Event<'_, Cpu>, run: TestRun<'_, '_>) -> Result<()> {
        let said = match event {
            Event::Begin => "begin".into(),
            Event::StepEnd(_) => format!("step {}", run.progress().step),
            Event::Evaluated(_) => format!("evaluated at {}", run.progress().step),
            Event::Ending(_) => format!("ending at {}", run.progress().step),
            Event::EpochEnd => format!("epoch ended at {}", run.progress().step),
            Event::Save { snapshot, .. } => format!("saves {}", snapshot.step),
            Event::Skipped => format!("skipped at {}", run.progress().step),
            Event::WentBack => format!("back at {}", run.progress().step),
            Event::End(_) => "end".into(),
            _ => return Ok(()),
        };
        (self.1)(&said, run);
        self.0.borrow_mut().push(said);
        Ok(())
    }
}

/// What happens in a run that `change` describes, steps left out; `ask` is called in every event.
fn told(
    ask: impl FnMut(&str, TestRun<'_, '_>),
    change: impl for<'t> Fn(Tested<'t>) -> Tested<'t>,
) -> Result<Vec<String>> {
    let (comm, events) = (one(), Rc::new(RefCell::new(Vec::new())));
    let model = Mlp::new(comm.runtime(), 0.0)?;
    let trainer = Trainer::new(&model, ddp(&comm, &model, 1)?, loader(comm.runtime()));
    change(trainer).with(EventLog(events.clone(), ask)).run(|model, batch| {
        let own = loss(model, batch)?;
        let factor = if batch.epoch == 0 && batch.step == 3 { f64::INFINITY } else { 1.0 };
        Loss::sum(own.total().mul(factor)?, own.weight())
    })?;
    let events = events.borrow().iter().filter(|said| !said.starts_with("step")).cloned().collect();
    Ok(events)
}

fn validation(every: Interval) -> Evaluate<'static, Mlp<Cpu>, Rows> {
    Evaluate::on(held_out(&Cpu::with_threads(1))).every(every)
}

#[test]
fn a_run_that_goes_back_at_its_last_step_ends_once_and_evaluates_no_broken_weights() {
    let (scratch, memory) = (Scratch::new("back-at-end"), Memory::default());
    let events = told(
        |_, _| (),
        |trainer| {
            trainer
                .until(Length::Steps(4))
                .with(Checkpoints::in_folder(&scratch.0).every(Interval::Steps(2)).ignore_signals())
                .with(NonFinite::go_back(1))
                .with(validation(Interval::Steps(4)).limit_batches(3))
                .with(validation(Interval::Steps(3)).limit_batches(1).skip_end().name("other"))
                .sink(memory.clone())
        },
    );
    let expected = [
        "begin",
        "saves 2",
        "evaluated at 3",
        "back at 2",
        "saves 2",
        "evaluated at 3",
        "epoch ended at 3",
        "evaluated at 4",
        "ending at 4",
        "saves 4",
        "end",
    ];
    assert_eq!(events.unwrap(), expected);
    let values = memory.of("validation/loss");
    assert!(values.len() == 1 && values[0].1.is_finite(), "{values:?}");
    assert_eq!(values[0].0, 4, "what was due when the run went back is due no more");
}

#[test]
fn a_run_that_goes_back_while_it_ends_ends_anew() {
    let events = |stops: bool| {
        let (scratch, mut clock) = (Scratch::new("back-while-ending"), None);
        let ask = |said: &str, run: TestRun<'_, '_>| match said {
            "step 3" if stops && clock.is_none() => run.control().stop("enough"),
            "evaluated at 3" | "evaluated at 4" if clock.is_none() => {
                clock = Some(run.progress().elapsed);
                run.control().go_back();
            }
            "back at 2" => assert!(clock.is_some_and(|clock| clock <= run.progress().elapsed), "time does not go back"),
            _ => {}
        };
        let events = told(ask, |trainer| {
            let checkpoints = Checkpoints::in_folder(&scratch.0).every(Interval::Steps(2)).ignore_signals();
            trainer.until(Length::Steps(4)).limit_batches(3).with(checkpoints).with(validation(Interval::Never))
        });
        events.unwrap().into_iter().filter(|said| !said.starts_with("epoch")).collect::<Vec<_>>()
    };
    let to = |step: u64| [format!("ending at {step}"), format!("evaluated at {step}")];
    let [begin, end, back, saves_2, saves_4] = ["begin", "end", "back at 2", "saves 2", "saves 4"].map(String::from);
    let before =
        |step: u64| [vec![begin.clone(), saves_2.clone()], to(step).to_vec(), vec![back.clone(), saves_2.clone()]];
    assert_eq!(events(false), [before(4).concat(), to(4).to_vec(), vec![saves_4, end.clone()]].concat());
    assert_eq!(events(true), [before(3).concat(), to(2).to_vec(), vec![end.clone()]].concat());
}

#[test]
fn what_is_asked_for_while_the_run_ends_is_done() {
    let ask = |said: &str, run: TestRun<'_, '_>| match said {
        "evaluated at 2" if run.evaluated("asked").is_none() => {
            run.evaluation_value("asked", 1.0);
            run.control().stop("enough");
        }
        "ending at 2" => run.control().evaluate(),
        _ => {}
    };
    let events = told(ask, |trainer| trainer.with(validation(Interval::Steps(2)).skip_end())).unwrap();
    assert_eq!(events, ["begin", "evaluated at 2", "ending at 2", "evaluated at 2", "end"]);
}

#[test]
fn an_epoch_that_is_left_out_is_an_epoch_and_can_be_the_last() {
    // At the end of an epoch nothing of it is left to skip.
    for (batches, skips) in [(5, true), (2, false)] {
        let (scratch, mut due) = (Scratch::new("skipped"), Vec::new());
        let ask = |said: &str, run: TestRun<'_, '_>| {
            if ["step 2", "step 4"].contains(&said) {
                run.control().skip_epoch();
            }
            if said.starts_with("skipped") || said.starts_with("epoch") {
                let intervals = [Interval::Steps(1), Interval::Seconds(1e-9)];
                due.push((said.to_string(), intervals.map(|interval| run.is_due(&interval))));
            }
        };
        let events = told(ask, |trainer| {
            let checkpoints = Checkpoints::in_folder(&scratch.0).every(Interval::Epochs(1.0)).ignore_signals();
            let trainer = trainer.until(Length::Epochs(2.0)).limit_batches(batches).with(checkpoints.skip_end());
            trainer.with(validation(Interval::Epochs(1.0)).skip_end())
        });
        let epoch = |step: u64, skipped: bool| {
            let all = ["skipped", "evaluated", "ending", "epoch ended", "saves"];
            let all =
                all.into_iter().filter(|what| (skipped || *what != "skipped") && (step == 4 || *what != "ending"));
            all.map(|what| format!("{what} at {step}").replace("saves at", "saves")).collect::<Vec<_>>()
        };
        let expected = [vec!["begin".into()], epoch(2, skips), epoch(4, skips), vec!["end".into()]].concat();
        assert_eq!(events.unwrap(), expected);
        // The skipped batches complete no interval of steps, nor of time, which stands still; the step before them has.
        assert_eq!(due.len(), if skips { 4 } else { 2 });
        due.iter().for_each(|(said, due)| assert_eq!(*due, [said.starts_with("epoch"); 2], "{said}"));
    }
}

#[test]
fn what_is_asked_for_at_the_end_of_an_epoch_is_done_at_once() {
    let scratch = Scratch::new("epoch-end");
    let ask = |said: &str, run: TestRun<'_, '_>| {
        if said == "epoch ended at 3" {
            run.control().stop("one epoch is enough");
            run.control().save();
        }
    };
    let events = told(ask, |trainer| {
        let checkpoints = Checkpoints::in_folder(&scratch.0).ignore_signals().skip_end();
        trainer.until(Length::Steps(9)).limit_batches(3).with(checkpoints)
    });
    assert_eq!(events.unwrap(), ["begin", "epoch ended at 3", "ending at 3", "saves 3", "end"]);
    assert_eq!(Folder::new(&scratch.0).steps().unwrap(), [3]);
}

#[test]
fn a_run_that_is_stopped_at_its_beginning_takes_no_step() {
    let mut steps = 0;
    let ask = |said: &str, run: TestRun<'_, '_>| {
        steps += usize::from(said.starts_with("step"));
        if said == "begin" {
            run.control().stop("there is nothing to do");
        }
    };
    let events = told(ask, |trainer| trainer.until(Length::Steps(9))).unwrap();
    assert_eq!((events, steps), (vec!["begin".into(), "ending at 0".into(), "end".into()], 0));
}

#[test]
fn what_would_never_be_done_is_refused() {
    let scratch = Scratch::new("refused");
    for at in ["saves 2", "end"] {
        let ask = |said: &str, run: TestRun<'_, '_>| {
            if said == at {
                run.control().save();
            }
        };
        let path = scratch.0.join(&at[..3]);
        let checkpoints = || Checkpoints::in_folder(&path).ignore_signals().every(Interval::Steps(2));
        let error = told(ask, |trainer| trainer.until(Length::Steps(2)).with(checkpoints())).unwrap_err().to_string();
        assert!(error.contains("nothing can be requested of a run"), "{at}: {error}");
    }
    let ask = |said: &str, run: TestRun<'_, '_>| {
        if said.starts_with("evaluated") {
            run.control().evaluate();
        }
    };
    let error =
        told(ask, |trainer| trainer.until(Length::Steps(1)).with(validation(Interval::Steps(1)).limit_batches(1)));
    assert!(error.unwrap_err().to_string().contains("1000 times after one step"));
}

#[test]
fn seconds_that_pass_in_a_step_are_not_lost_where_evaluations_run() {
    struct Due(Rc<RefCell<Vec<u64>>>);
    impl Callback<Cpu, Mlp<Cpu>, Rows> for Due {
        fn on(&mut self, event: &Event<'_, Cpu>, run: TestRun<'_, '_>) -> Result<()> {
            if matches!(event, Event::StepBegin) {
                // Longer than the interval, so it is completed in every step.
                sleep(Duration::from_millis(25));
            }
            if matches!(event, Event::StepEnd(_)) && run.is_due(&Interval::Seconds(0.02)) {
                self.0.borrow_mut().push(run.progress().step);
            }
            Ok(())
        }
    }
    let due = Rc::new(RefCell::new(Vec::new()));
    told(
        |_, _| (),
        |trainer| {
            let data = validation(Interval::Steps(1)).limit_batches(1);
            trainer.until(Length::Steps(3)).with(Due(due.clone())).with(data)
        },
    )
    .unwrap();
    // The clock is read at the end of a step, so what passes in one is seen by the next.
    assert_eq!(*due.borrow(), [2, 3]);
}

#[test]
fn an_evaluation_at_the_start_is_one_like_any_other() {
    let memory = Memory::default();
    let before = autograd::random_state();
    let events = told(
        |said, _| {
            if said == "evaluated at 0" {
                assert_eq!(autograd::random_state(), before);
            }
        },
        |trainer| {
            let draws = |_: &(), _: &data::Batch<Rows>| {
                autograd::manual_seed(77);
                Ok((1.0, 1.0))
            };
            let evaluate = validation(Interval::Never).at_start().skip_end().measure("x", draws);
            trainer.until(Length::Steps(1)).with(evaluate).sink(memory.clone())
        },
    );
    assert_eq!(events.unwrap(), ["begin", "evaluated at 0", "ending at 1", "end"]);
    assert_eq!(memory.of("validation/x"), [(0, 1.0)]);
}

/// Values of evaluations of a run that is interrupted after some steps, and goes on; and the step it ended at.
fn interrupted(ranks: usize, after: &[u64]) -> (Vec<(u64, f64)>, u64) {
    let (scratch, memory, mut ended) = (Scratch::new("interrupted"), Memory::default(), 0);
    for part in 0..=after.len() {
        ended = on_ranks(ranks, |comm| {
            let model = Mlp::new(comm.runtime(), 0.0)?;
            let at = after.get(part).copied();
            let ask = move |said: &str, run: TestRun<'_, '_>| {
                if at.is_some_and(|at| said == format!("step {at}")) {
                    run.control().interrupt();
                }
            };
            let report = Trainer::new(&model, ddp(comm, &model, 1)?, loader(comm.runtime()))
                .until(Length::Steps(10))
                .with(EventLog(Rc::default(), ask))
                .with(Evaluate::on(held_out(comm.runtime())).every(Interval::Steps(2)))
                .with(EarlyStop::on(train::Monitor::max("validation/loss")).patience(3))
                .with(Checkpoints::in_folder(&scratch.0).ignore_signals())
                .sink(memory.clone())
                .resume(Resume::IfThere)
                .run(loss)?;
            if let Some(at) = at {
                assert!(
                    memory.of("validation/loss").iter().all(|(step, _)| *step < at),
                    "it evaluated before it ended"
                );
            }
            Ok(report.progress.step)
        })
        .unwrap();
    }
    (memory.of("validation/loss"), ended)
}

#[test]
fn an_interrupted_run_saves_before_it_evaluates_and_goes_on_as_if_it_had_not_been() {
    for ranks in [1, 2] {
        let (whole, ended) = interrupted(ranks, &[]);
        assert!(whole.len() > 2);
        for after in [[3].as_slice(), &[4], &[2, 4, 5]] {
            let (values, other) = interrupted(ranks, after);
            assert_same(&values, &whole, &format!("{ranks} ranks, interrupted after {after:?}"));
            assert_eq!(other, ended);
        }
    }
}
