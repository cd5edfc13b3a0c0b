//! Averages of weights: by their formula, alike for every strategy, and without a trace in the training.

use optim::ScheduleFreeAdamWConfig;

use crate::{common::*, prelude::*};

/// Remembers the weights after every step.
struct Weights(Rc<RefCell<Vec<Vec<f64>>>>);

impl<B> Callback<Cpu, Mlp<Cpu>, B> for Weights {
    fn on(&mut self, event: &Event<'_, Cpu>, run: &mut Run<'_, Cpu, Mlp<Cpu>, B>) -> Result<()> {
        if matches!(event, Event::StepEnd(_)) {
            self.0.borrow_mut().push(weights(run.model())?);
        }
        Ok(())
    }
}

/// The averages that are evaluated: some of the loop, or those of a schedule-free optimizer.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Averages {
    Loop,
    Optimizer,
}

impl Averages {
    const BOTH: [Averages; 2] = [Averages::Loop, Averages::Optimizer];

    fn callback(self) -> WeightAveraging<Cpu> {
        match self {
            Averages::Loop => WeightAveraging::new(0.7),
            Averages::Optimizer => WeightAveraging::of_optimizer(),
        }
    }

    fn step(self, comm: &Comm<Cpu>, model: &Mlp<Cpu>, zero: Option<ZeroOptions>) -> Result<TrainStep<Cpu>> {
        let builder = TrainStep::builder(comm, model);
        let builder = match self {
            Averages::Loop => builder.optimizer(adamw()),
            Averages::Optimizer => builder.optimizer(ScheduleFreeAdamWConfig { lr: 1e-2, ..Default::default() }),
        };
        let builder = builder.config(TrainingConfig { max_norm: Some(0.5), ..Default::default() });
        match zero {
            Some(options) => builder.zero(options).build(),
            None => builder.build(),
        }
    }
}

/// Values of evaluations after every second step, and losses.
fn run<S: Step<Cpu>>(
    comm: &Comm<Cpu>,
    model: &Mlp<Cpu>,
    step: S,
    averages: Option<Averages>,
    memory: &Memory,
) -> Result<()> {
    let mut trainer = Trainer::new(model, step, loader(comm.runtime())).until(Length::Steps(8));
    if let Some(averages) = averages {
        trainer = trainer.with(averages.callback());
    }
    let evaluate = Evaluate::on(held_out(comm.runtime())).every(Interval::Steps(2));
    trainer.with(evaluate).record_every(Interval::Steps(1)).sink(memory.clone()).run(loss).map(|_| ())
}

#[test]
fn it_is_the_formula_and_what_evaluations_see() {
    is_the_formula(WeightAveraging::new(0.7), |_| 0.7);
    is_the_formula(WeightAveraging::new(0.4).warmup(), |update| (0.4f64).min((1.0 + update) / (10.0 + update)));
}

fn is_the_formula(averaging: WeightAveraging<Cpu>, decay: impl Fn(f64) -> f64) {
    let (comm, memory) = (one(), Memory::default());
    let model = Mlp::new(comm.runtime(), 0.0).unwrap();
    let before = weights(&model).unwrap();
    let seen = Rc::new(RefCell::new(Vec::new()));
    Trainer::new(&model, ddp(&comm, &model, 1).unwrap(), loader(comm.runtime()))
        .until(Length::Steps(6))
        .with(Weights(seen.clone()))
        .with(averaging.use_at_end())
        .with(Evaluate::on(held_out(comm.runtime())).every(Interval::Never))
        .sink(memory.clone())
        .run(loss)
        .unwrap();
    let average = seen.borrow().iter().zip(1..).fold(before, |average, (weights, update)| {
        let take = 1.0 - decay(f64::from(update));
        average.iter().zip(weights).map(|(a, w)| a + (w - a) * take).collect()
    });
    let left = weights(&model).unwrap();
    assert!(left.iter().zip(&average).all(|(a, b)| (a - b).abs() < 1e-14), "{left:?} {average:?}");
    // The model has the averages now: what it gives is what the evaluation at the end gave.
    model.eval();
    let mut sum = 0.0;
    for batch in held_out(comm.runtime()).epoch(0).unwrap() {
        sum += loss(&model, &batch.unwrap()).unwrap().total().item().unwrap();
    }
    let (_, evaluated) = memory.of("validation/loss")[0];
    assert!((evaluated - sum / 23.0).abs() < 1e-12 * evaluated);
}

#[test]
fn every_strategy_evaluates_the_same_averages_and_trains_as_without() {
    for averages in Averages::BOTH {
        let plain = Memory::default();
        on_ranks(1, |comm| {
            let model = Mlp::new(comm.runtime(), 0.0)?;
            run(comm, &model, averages.step(comm, &model, None)?, Some(averages), &plain)
        })
        .unwrap();
        let stages =
            [None, Some((ZeroStage::Optimizer, 0)), Some((ZeroStage::Gradients, 0)), Some((ZeroStage::Parameters, 0))];
        // At last, one of two layers is kept whole.
        let stages = stages.into_iter().chain([Some((ZeroStage::Parameters, 10))]);
        for ranks in [1, 2, 3, 5] {
            for stage in stages.clone() {
                let trained = |averaged: bool| {
                    let memory = Memory::default();
                    on_ranks(ranks, |comm| {
                        let model = Mlp::new(comm.runtime(), 0.0)?;
                        let units = UnitOf::children();
                        let options = stage.map(|(stage, whole_up_to)| ZeroOptions {
                            stage,
                            whole_up_to,
                            units: units.clone(),
                            ..Default::default()
                        });
                        let step = averages.step(comm, &model, options)?;
                        run(comm, &model, step, averaged.then_some(averages), &memory)
                    })
                    .unwrap();
                    memory
                };
                let what = format!("{averages:?} {stage:?} on {ranks} ranks");
                let (with, without) = (trained(true), trained(false));
                assert_same(&with.of("loss"), &without.of("loss"), &what);
                let values = with.of("validation/loss");
                assert_eq!(values.len(), 4, "{what}");
                let weights = without.of("validation/loss");
                for (((step, value), (_, expected)), (_, other)) in
                    values.into_iter().zip(plain.of("validation/loss")).zip(weights)
                {
                    assert!((value - expected).abs() < 1e-10 * expected, "{what}, step {step}: {value} {expected}");
                    assert!((value - other).abs() > 1e-6 * other, "{what}, step {step}: the weights were evaluated");
                }
            }
        }
    }
}

#[test]
fn an_optimizer_without_averages_is_refused_before_the_run() {
    let error = on_ranks(2, |comm| {
        let model = Mlp::new(comm.runtime(), 0.0)?;
        run(comm, &model, ddp(comm, &model, 1)?, Some(Averages::Optimizer), &Memory::default())
    })
    .unwrap_err();
    assert!(error.to_string().contains("use a schedule-free rule"), "{error}");
}

#[test]
fn a_run_may_go_on_with_averages_that_a_checkpoint_lacks_and_without_those_it_has() {
    let scratch = Scratch::new("averages-otherwise");
    let seen = Rc::new(RefCell::new(Vec::new()));
    // Goes back once after its second step.
    struct GoesBack(u64);
    impl<M, B> Callback<Cpu, M, B> for GoesBack {
        fn on(&mut self, event: &Event<'_, Cpu>, run: &mut Run<'_, Cpu, M, B>) -> Result<()> {
            self.0 += u64::from(matches!(event, Event::StepEnd(_)));
            if matches!(event, Event::StepEnd(_)) && self.0 == 2 {
                run.control().go_back();
            }
            Ok(())
        }
    }
    let said = Memory::default();
    let run = |steps: u64, averaging: Option<WeightAveraging<Cpu>>, goes_back: bool| {
        said.0.lock().unwrap().clear();
        let comm = one();
        let model = Mlp::new(comm.runtime(), 0.0).unwrap();
        let trainer = Trainer::new(&model, ddp(&comm, &model, 1).unwrap(), loader(comm.runtime()));
        let trainer = trainer.until(Length::Steps(steps)).resume(Resume::IfThere).with(Weights(seen.clone()));
        let trainer = trainer.with(GoesBack(if goes_back { 0 } else { 2 }));
        let trainer = trainer.with(Checkpoints::in_folder(&scratch.0).ignore_signals()).sink(said.clone());
        let trainer = averaging.into_iter().fold(trainer, Trainer::with);
        trainer.run(loss).map(|_| weights(&model).unwrap())
    };
    let to = |steps: u64, averaging: Option<WeightAveraging<Cpu>>| run(steps, averaging, false);
    let before = to(2, None).unwrap();
    seen.borrow_mut().clear();
    // They are in the checkpoint of step 4, and begin with the weights of step 2, to which the run goes back.
    let left = run(4, Some(WeightAveraging::new(0.7).use_at_end()), true).unwrap();
    let next =
        |average: Vec<f64>, weights: &Vec<f64>| average.iter().zip(weights).map(|(a, w)| a + (w - a) * 0.3).collect();
    assert_eq!(seen.borrow().len(), 4);
    let average: Vec<f64> = seen.borrow().iter().skip(2).fold(before, next);
    assert!(left.iter().zip(&average).all(|(a, b)| (a - b).abs() < 1e-14), "{left:?} {average:?}");
    assert!(said.text("averages").unwrap().contains("without any"));
    to(5, None).unwrap();
    assert!(said.text("averages").unwrap().contains("are dropped"));
    // None are in the next checkpoint.
    to(6, None).unwrap();
    assert_eq!(said.text("averages"), None);
}

#[test]
fn a_decay_that_is_none_is_refused() {
    let comm = one();
    let model = Mlp::new(comm.runtime(), 0.0).unwrap();
    let trainer = Trainer::new(&model, ddp(&comm, &model, 1).unwrap(), loader(comm.runtime()));
    let error = trainer.with(WeightAveraging::new(1.0)).run(loss).unwrap_err().to_string();
    assert!(error.contains("the decay must be in [0, 1)"), "{error}");
}

#[test]
fn the_best_weights_are_those_that_were_evaluated() {
    Averages::BOTH.into_iter().for_each(the_best_weights_are_those_evaluated);
}

fn the_best_weights_are_those_evaluated(kind: Averages) {
    let stages = [ZeroStage::Optimizer, ZeroStage::Gradients, ZeroStage::Parameters].map(|stage| (2, Some(stage)));
    for (ranks, stage) in [(1, None), (2, None)].into_iter().chain(stages) {
        let scratch = [true, false].map(|_| Scratch::new("best-averages"));
        let left = |steps: u64, restores: bool, evaluates: bool| {
            on_ranks(ranks, |comm| {
                let (model, calls) = (Mlp::new(comm.runtime(), 0.0)?, std::cell::Cell::new(0));
                // Four batches in an evaluation: the second one gives the best value.
                let value = |_: &(), _: &data::Batch<Rows>| {
                    calls.set(calls.get() + 1);
                    Ok((if (5..9).contains(&calls.get()) { 1.0 } else { 2.0 }, 1.0))
                };
                let evaluate = Evaluate::on(held_out(comm.runtime())).every(Interval::Steps(1));
                let averages = kind.callback();
                let averages = match (restores, evaluates) {
                    (true, true) => averages,
                    (false, true) => averages.use_at_end(),
                    (_, false) => averages.skip_evaluations(),
                };
                let step = kind.step(comm, &model, stage.map(|stage| ZeroOptions { stage, ..Default::default() }))?;
                let mut trainer = Trainer::new(&model, step, loader(comm.runtime()))
                    .until(Length::Steps(steps))
                    .with(averages)
                    .with(evaluate.measure("value", value).without_loss());
                if restores {
                    let checkpoints = Checkpoints::in_folder(&scratch[usize::from(evaluates)].0);
                    let checkpoints = checkpoints.best("validation/value").ignore_signals();
                    trainer = trainer.with(checkpoints.restore_best());
                }
                let step = trainer.run(loss)?.step;
                let _all = step.gather_full_params()?;
                weights(&model)
            })
            .unwrap()
        };
        for evaluates in [true, false] {
            assert_eq!(
                left(5, true, evaluates),
                left(2, false, evaluates),
                "{ranks} ranks, {stage:?}, averages: {evaluates}"
            );
        }
    }
}

#[test]
fn a_run_ends_with_one_of_two_weights() {
    let (comm, scratch) = (one(), Scratch::new("two-ends"));
    let model = Mlp::new(comm.runtime(), 0.0).unwrap();
    let best = Checkpoints::in_folder(&scratch.0).best("validation/loss").ignore_signals().restore_best();
    let error = Trainer::new(&model, ddp(&comm, &model, 1).unwrap(), loader(comm.runtime()))
        .with(WeightAveraging::new(0.7).use_at_end())
        .with(Evaluate::on(held_out(comm.runtime())))
        .with(best)
        .run(loss)
        .unwrap_err()
        .to_string();
    assert!(error.contains("the best weights at the end and averages of weights at the end exclude"), "{error}");
}
