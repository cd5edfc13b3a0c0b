//! Resuming: what follows is what would have followed.

use std::io;

use numcore::ErrorKind;
use optim::AdamWConfig;
use train::{CallbackState, Progress};

use crate::{common::*, prelude::*};

const STEPS: u64 = 12;

/// How a run trains.
#[derive(Clone, Copy, Debug)]
struct How {
    zero: Option<ZeroStage>,
    accumulation: usize,
}

/// Runs up to a step, from the last checkpoint if there is one: losses and values of evaluations to a memory.
fn run_to(comm: &Comm<Cpu>, how: How, folder: &Scratch, until: u64, memory: &Memory) -> Result<()> {
    // A process that is started anew has drawn other random values before.
    autograd::manual_seed(until);
    let model = Mlp::new(comm.runtime(), 0.3)?;
    match how.zero {
        None => go_on(comm, &model, ddp(comm, &model, how.accumulation)?, folder, until, memory),
        Some(stage) => go_on(comm, &model, zero(comm, &model, stage, how.accumulation)?, folder, until, memory),
    }
}

fn go_on<S: Step<Cpu>>(
    comm: &Comm<Cpu>,
    model: &Mlp<Cpu>,
    step: S,
    folder: &Scratch,
    until: u64,
    memory: &Memory,
) -> Result<()> {
    if step.global_step() == 0 && std::fs::read_dir(&folder.0).is_err() {
        autograd::manual_seed(9);
    }
    let mut trainer = Trainer::new(model, step, loader(comm.runtime()));
    // A run that ends before its first evaluation has nothing to stop it.
    if until >= 3 {
        trainer = trainer.with(EarlyStop::on("validation/loss").patience(100));
    }
    let report = trainer
        .until(Length::Steps(until))
        .record_every(Interval::Steps(1))
        .with(Evaluate::on(held_out(comm.runtime())).every(Interval::Steps(3)).skip_end())
        .with(WeightAveraging::new(0.9).warmup())
        .with(Checkpoints::in_folder(&folder.0).keep(2).ignore_signals())
        .sink(memory.clone())
        .resume(Resume::IfThere)
        .run(loss)?;
    assert_eq!(report.progress.step, until);
    Ok(())
}

#[test]
fn resumed_after_every_step_is_uninterrupted_to_the_bit() {
    let hows = [
        How { zero: None, accumulation: 1 },
        How { zero: None, accumulation: 2 },
        How { zero: Some(ZeroStage::Optimizer), accumulation: 2 },
        How { zero: Some(ZeroStage::Gradients), accumulation: 1 },
        How { zero: Some(ZeroStage::Parameters), accumulation: 2 },
    ];
    for how in hows {
        for ranks in [1, 2, 3] {
            let (whole, scratch) = (Memory::default(), Scratch::new("whole"));
            on_ranks(ranks, |comm| run_to(comm, how, &scratch, STEPS, &whole)).unwrap();
            let (parts, scratch) = (Memory::default(), Scratch::new("parts"));
            for until in 1..=STEPS {
                on_ranks(ranks, |comm| run_to(comm, how, &scratch, until, &parts)).unwrap();
            }
            let what = format!("{how:?} on {ranks} ranks");
            assert_eq!(whole.of("loss").len() as u64, STEPS, "{what}");
            assert_same(&parts.of("loss"), &whole.of("loss"), &what);
            assert_same(&parts.of("validation/loss"), &whole.of("validation/loss"), &what);
        }
    }
}

/// Losses of a run in parts: each part goes on to a step, on a number of ranks. `in_order` sums a step's four chunks of
/// two examples in canonical order.
fn moved(parts: &[(usize, u64)], in_order: bool) -> Vec<(u64, f64)> {
    let (memory, scratch) = (Memory::default(), Scratch::new("moved"));
    for &(ranks, until) in parts {
        on_ranks(ranks, |comm| {
            let (model, mut data) = (Mlp::new(comm.runtime(), 0.0)?, loader(comm.runtime()));
            if in_order {
                data = data.batch(2 * ranks).last(data::Last::Drop).limit(16 / ranks as u64);
            }
            let step = if in_order { canonical(comm, &model, 4 / ranks)? } else { ddp(comm, &model, 1)? };
            Trainer::new(&model, step, data)
                .until(Length::Steps(until))
                .record_every(Interval::Steps(1))
                .with(Checkpoints::in_folder(&scratch.0).ignore_signals())
                .sink(memory.clone())
                .resume(Resume::IfThere)
                .run(loss)?;
            Ok(())
        })
        .unwrap();
    }
    memory.of("loss")
}

#[test]
fn another_number_of_ranks_goes_on_with_the_same_batches() {
    let expected = moved(&[(1, STEPS)], false);
    for (from, to) in [(1, 2), (2, 1), (3, 2), (2, 5), (8, 3)] {
        for ((step, loss), (_, expected)) in moved(&[(from, 6), (to, STEPS)], false).into_iter().zip(&expected) {
            assert!((loss - expected).abs() < 1e-10 * expected, "{from} to {to} ranks, step {step}: {loss} {expected}");
        }
    }
}

#[test]
fn in_canonical_order_any_number_of_ranks_goes_on_to_the_bit() {
    let whole = moved(&[(1, 10)], true);
    assert_eq!(whole.len(), 10);
    for parts in [[(1, 3), (2, 6), (4, 10)], [(4, 1), (1, 5), (2, 10)], [(2, 2), (4, 4), (1, 10)]] {
        assert_same(&moved(&parts, true), &whole, &format!("{parts:?}"));
    }
}

#[test]
fn without_a_checkpoint_it_begins_or_says_so() {
    let (comm, scratch) = (one(), Scratch::new("none"));
    let model = Mlp::new(comm.runtime(), 0.0).unwrap();
    let run = |resume| {
        let trainer = Trainer::new(&model, ddp(&comm, &model, 1).unwrap(), loader(comm.runtime())).resume(resume);
        let checkpoints = Checkpoints::in_folder(&scratch.0).ignore_signals().skip_end();
        trainer.until(Length::Steps(1)).with(checkpoints).run(loss)
    };
    assert_eq!(run(Resume::IfThere).unwrap().resumed, None);
    for resume in [Resume::Required, Resume::From(scratch.0.join("other"))] {
        let error = run(resume).map(|_| ()).unwrap_err();
        let not_found = |error: &Error| matches!(error.kind(), ErrorKind::Io { source, .. } if source.kind() == io::ErrorKind::NotFound);
        assert!(not_found(&error) && error.to_string().contains("no checkpoint to resume from"), "{error}");
    }
}

#[test]
fn hyper_parameters_are_those_of_the_run_before_where_that_is_asked_for() {
    use distributed::train::{HyperParameters, TrainStep};
    let run = |ranks: usize, folder: &Scratch, lr: f64, what: HyperParameters, until: u64| {
        let losses = Memory::default();
        let told = on_ranks(ranks, |comm| {
            let (model, adamw) = (Mlp::new(comm.runtime(), 0.0)?, AdamWConfig { lr, ..adamw() });
            let step = TrainStep::builder(comm, &model).optimizer(adamw).hyper_parameters(what);
            let memory = if comm.rank() == 0 { losses.clone() } else { Memory::default() };
            go_on(comm, &model, step.build()?, folder, until, &memory)
        });
        told.map(|()| losses.of("loss"))
    };
    let (whole, parts) = (Scratch::new("hyper-whole"), Scratch::new("hyper-parts"));
    let expected = run(2, &whole, 0.02, HyperParameters::Configured, 6).unwrap();
    run(2, &parts, 0.02, HyperParameters::Saved, 3).unwrap();
    assert_eq!(run(2, &parts, 0.5, HyperParameters::Restored, 6).unwrap(), expected[3..]);
    let error = run(2, &whole, 0.02, HyperParameters::Restored, 9).unwrap_err().to_string();
    assert!(error.contains("hyper-parameters"), "{error}");
}

#[test]
fn other_data_is_refused() {
    let (comm, scratch) = (one(), Scratch::new("data"));
    let model = Mlp::new(comm.runtime(), 0.0).unwrap();
    let run = |seed: u64| {
        let data = loader(comm.runtime()).shuffle(seed);
        let trainer = Trainer::new(&model, ddp(&comm, &model, 1).unwrap(), data).resume(Resume::IfThere);
        let checkpoints = Checkpoints::in_folder(&scratch.0).ignore_signals();
        trainer.until(Length::Steps(2)).with(checkpoints).run(loss)
    };
    run(1).unwrap();
    let error = run(2).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("is of another order than this loader's"), "{error}");
    // Before anything was changed: a model of other weights keeps them.
    let other = Mlp::new(comm.runtime(), 0.0).unwrap();
    let before = weights(&other).unwrap();
    let trainer = Trainer::new(&other, ddp(&comm, &other, 1).unwrap(), loader(comm.runtime()).shuffle(2));
    let checkpoints = Checkpoints::in_folder(&scratch.0).ignore_signals();
    trainer.with(checkpoints).resume(Resume::Required).run(loss).map(|_| ()).unwrap_err();
    assert_eq!(weights(&other).unwrap(), before);
    assert_eq!(run(1).unwrap().resumed, Some(2));
}

/// Keeps nothing, and remembers what it was given back.
struct KeepsNothing(std::rc::Rc<std::cell::RefCell<Vec<usize>>>);

impl<M, B> train::Callback<Cpu, M, B> for KeepsNothing {
    fn on(&mut self, _: &train::Event<'_, Cpu>, _: &mut train::Run<'_, Cpu, M, B>) -> Result<()> {
        Ok(())
    }

    fn name(&self) -> &str {
        "keeps-nothing"
    }

    fn restore(&mut self, state: &CallbackState) -> Result<()> {
        self.0.borrow_mut().push(state.len());
        Ok(())
    }
}

#[test]
fn a_callback_that_kept_nothing_is_told_so() {
    let (comm, scratch, told) = (one(), Scratch::new("keeps-nothing"), std::rc::Rc::default());
    let model = Mlp::new(comm.runtime(), 0.0).unwrap();
    for (with, until) in [(false, 1), (true, 2), (true, 3)] {
        let mut trainer = Trainer::new(&model, ddp(&comm, &model, 1).unwrap(), loader(comm.runtime()));
        if with {
            trainer = trainer.with(KeepsNothing(std::rc::Rc::clone(&told)));
        }
        let checkpoints = Checkpoints::in_folder(&scratch.0).ignore_signals();
        trainer.until(Length::Steps(until)).with(checkpoints).resume(Resume::IfThere).run(loss).unwrap();
    }
    // The first time it was not there when the checkpoint was saved.
    assert_eq!(*told.borrow(), [0]);
}

/// When runs of one folder began, with the numbers that callbacks of one name kept; and the clock before the last step.
#[derive(Default)]
struct Begun {
    at: Vec<(u64, Progress)>,
    clock: Duration,
}

/// Keeps a number. Each step before the third takes time.
struct Keeps(u64, Rc<RefCell<Begun>>);

impl<M, B> Callback<Cpu, M, B> for Keeps {
    fn on(&mut self, event: &Event<'_, Cpu>, run: &mut Run<'_, Cpu, M, B>) -> Result<()> {
        let mut begun = self.1.borrow_mut();
        match event {
            Event::Begin => begun.at.push((self.0, *run.progress())),
            Event::StepBegin if self.0 == 1 => sleep(Duration::from_millis(60 >> (2 * run.progress().step))),
            Event::StepEnd(_) if self.0 == 1 => {
                // Intervals of time are checked from the beginning of one step to that of the next.
                let at = |elapsed| Progress { elapsed, ..Progress::default() };
                let (from, to) = (at(begun.clock), at(run.progress().elapsed));
                begun.clock = to.elapsed;
                let every = Interval::Seconds(from.elapsed.as_secs_f64());
                assert_eq!(run.is_due(&every), every.is_due(&from, &to, run.length()), "{from:?} {to:?}");
            }
            _ => {}
        }
        Ok(())
    }

    fn name(&self) -> &str {
        "keeps"
    }

    fn state(&self) -> CallbackState {
        CallbackState::from([("kept".into(), self.0.to_string())])
    }

    fn restore(&mut self, state: &CallbackState) -> Result<()> {
        self.0 = train::parsed(state, "kept")?;
        Ok(())
    }
}

#[test]
fn a_run_begins_where_it_ended() {
    let (scratch, memory, begun) = (Scratch::new("begins"), Memory::default(), Rc::<RefCell<Begun>>::default());
    let run = |until: u64, kept: [u64; 2]| {
        let comm = one();
        let model = Mlp::new(comm.runtime(), 0.0).unwrap();
        let trainer = Trainer::new(&model, ddp(&comm, &model, 1).unwrap(), loader(comm.runtime()));
        let trainer = kept.into_iter().fold(trainer, |trainer, kept| trainer.with(Keeps(kept, Rc::clone(&begun))));
        let evaluate = Evaluate::on(held_out(comm.runtime())).every(Interval::Never).at_start();
        trainer
            .until(Length::Steps(until))
            .record_every(Interval::Never)
            .with(evaluate)
            // It needs no value in a run without a step.
            .with(EarlyStop::on("validation/loss"))
            .with(Checkpoints::in_folder(&scratch.0).ignore_signals())
            .sink(memory.clone())
            .resume(Resume::IfThere)
            .run(loss)
            .unwrap()
    };
    let first = run(2, [1, 2]);
    let again = run(2, [8, 9]);
    assert_eq!(begun.borrow().at[2..], [(1, first.progress), (2, first.progress)]);
    assert_eq!((again.resumed, again.evaluated, again.loss), (Some(2), first.evaluated, None));
    assert!(again.progress.elapsed >= first.progress.elapsed, "its clock goes on");
    run(3, [8, 9]);
    assert_eq!(memory.of("validation/loss").into_iter().map(|(step, _)| step).collect::<Vec<_>>(), [0, 2, 3]);
}

#[test]
fn a_run_that_was_stopped_early_stops_again() {
    for ranks in [1, 2] {
        let scratch = Scratch::new("stopped");
        let run = |patience: u64| {
            on_ranks(ranks, |comm| {
                let model = Mlp::new(comm.runtime(), 0.0)?;
                let worst = |_: &(), _: &data::Batch<Rows>| Ok((1.0, 1.0));
                let evaluate = Evaluate::on(held_out(comm.runtime())).every(Interval::Steps(1)).measure("value", worst);
                let report = Trainer::new(&model, ddp(comm, &model, 1)?, loader(comm.runtime()))
                    .until(Length::Steps(9))
                    .with(evaluate)
                    .with(EarlyStop::on("validation/value").patience(patience))
                    .with(Checkpoints::in_folder(&scratch.0).ignore_signals())
                    .resume(Resume::IfThere)
                    .run(loss)?;
                Ok((report.progress.step, report.reason))
            })
            .unwrap()
        };
        let stopped = run(2);
        assert_eq!(stopped.0, 3, "{ranks} ranks");
        assert_eq!(run(2), stopped, "{ranks} ranks");
        assert_eq!(run(4).0, 5, "{ranks} ranks");
    }
}

#[test]
fn where_no_larger_batch_is_left_the_next_epoch_begins() {
    let (comm, scratch) = (one(), Scratch::new("larger"));
    let ended = |batch: usize| {
        let model = Mlp::new(comm.runtime(), 0.0).unwrap();
        let data = loader(comm.runtime()).batch(batch).last(data::Last::Drop);
        let trainer = Trainer::new(&model, ddp(&comm, &model, 1).unwrap(), data).until(Length::Steps(6));
        let checkpoints = Checkpoints::in_folder(&scratch.0).ignore_signals();
        let progress = trainer.with(checkpoints).resume(Resume::IfThere).run(loss).unwrap().progress;
        (progress.step, progress.epoch, progress.position)
    };
    assert_eq!(ended(5), (6, 0, 30));
    // 7 of 37 are left.
    assert_eq!(ended(8), (6, 1, 0));
}

/// A test of rates: ranks find one rate, and the run ends when its loss diverges.
#[test]
fn all_ranks_find_one_learning_rate() {
    for ranks in [1, 3] {
        let found = Ranks::new(ranks).run(cpu, |comm| {
            let model = Mlp::new(comm.runtime(), 0.0)?;
            let step = TrainStep::builder(&comm, &model)
                .optimizer(optim::SgdConfig { lr: 1e-3, ..Default::default() })
                .schedule(optim::ExponentialLr { gamma: 2.0 })
                .build()?;
            let range = train::LrRange::default();
            let trainer = Trainer::new(&model, step, loader(comm.runtime())).until(Length::Steps(60));
            let report = trainer.with(range.clone()).run(loss)?;
            Ok((report.progress.step, range.steepest(), range.curve()))
        });
        let found = found.unwrap();
        assert!(found.iter().all(|rank| *rank == found[0]), "{found:?}");
        let (steps, steepest, curve) = &found[0];
        assert!(*steps < 60 && steepest.is_some_and(|rate| rate > 1e-3), "{found:?}");
        assert!(curve.windows(2).all(|pair| pair[1].0 == 2.0 * pair[0].0), "{curve:?}");
    }
}

/// The curve is that of the steps that were taken: one with gradients that are not finite is left out, at whose rate the
/// next is taken; a loss that is not finite ends the test.
#[test]
fn a_step_that_is_left_out_is_no_point_of_a_test_of_rates() {
    for ranks in [1, 3] {
        let found = Ranks::new(ranks).run(cpu, |comm| {
            let model = Mlp::new(comm.runtime(), 0.0)?;
            let step = TrainStep::builder(&comm, &model)
                .optimizer(optim::SgdConfig { lr: 1e-3, ..Default::default() })
                .schedule(optim::ExponentialLr { gamma: 2.0 })
                .skip_non_finite()
                .build()?;
            let (range, mut calls, last) = (train::LrRange::default(), 0, comm.rank() + 1 == comm.size());
            let trainer = Trainer::new(&model, step, loader(comm.runtime())).until(Length::Steps(60));
            let report = trainer.with(range.clone()).run(|model: &Mlp<Cpu>, batch| {
                calls += 1;
                let own = loss(model, batch)?;
                // Of the root of 0 the gradient is not finite; the value is.
                let total = match calls {
                    1 | 3 if last => own.total().add(&own.total().mul(0.0)?.sqrt()?)?,
                    6 if last => own.total().mul(f64::NAN)?,
                    _ => own.total().clone(),
                };
                distributed::train::Loss::sum(total, own.weight())
            })?;
            Ok((report.progress.step, report.reason, calls, range.curve()))
        });
        for (steps, reason, calls, curve) in found.unwrap() {
            let rates: Vec<f64> = curve.iter().map(|point| point.0).collect();
            assert_eq!((steps, calls, &rates[..]), (3, 6, &[1e-3, 2e-3, 4e-3][..]), "{ranks} ranks: {curve:?}");
            assert!(matches!(&reason, StopReason::Requested(why) if why.contains("diverged")), "{reason:?}");
        }
    }
}

/// Rates of a run whose value never gets better, and of one that is resumed after each step.
#[test]
fn rates_fall_on_a_plateau_on_all_ranks_and_over_a_resumption() {
    for ranks in [1, 2, 3] {
        let run = |untils: &[u64]| {
            let (memory, scratch) = (Memory::default(), Scratch::new("plateau"));
            for &until in untils {
                on_ranks(ranks, |comm| {
                    let model = Mlp::new(comm.runtime(), 0.0)?;
                    let worst = |_: &(), _: &data::Batch<Rows>| Ok((1.0, 1.0));
                    let evaluate =
                        Evaluate::on(held_out(comm.runtime())).every(Interval::Steps(1)).measure("value", worst);
                    let plateau = train::ReduceOnPlateau::on("validation/value").factor(0.5).patience(1);
                    let step = TrainStep::builder(comm, &model)
                        .optimizer(AdamWConfig { lr: 0.25, ..Default::default() })
                        .schedule(plateau.schedule(optim::ConstantLr))
                        .build()?;
                    Trainer::new(&model, step, loader(comm.runtime()))
                        .until(Length::Steps(until))
                        .record_every(Interval::Steps(1))
                        .with(evaluate)
                        .with(plateau)
                        .with(Checkpoints::in_folder(&scratch.0).ignore_signals())
                        .sink(memory.clone())
                        .resume(Resume::IfThere)
                        .run(loss)
                })
                .unwrap();
            }
            memory.of("learning_rate").into_iter().map(|(_, rate)| rate).collect::<Vec<_>>()
        };
        let whole = run(&[6]);
        assert_eq!(whole, [0.25, 0.25, 0.25, 0.125, 0.125, 0.0625], "{ranks} ranks");
        assert_eq!(run(&[1, 2, 3, 4, 5, 6]), whole, "{ranks} ranks");
    }
}
