//! Evaluations: exact over ranks, and without a trace in the training.

use crate::{common::*, prelude::*};

/// The largest target, which no mean hides, and how many targets there were.
fn counted(_: &(), batch: &Batch<Rows>) -> Result<(f64, f64)> {
    Ok((batch.data.narrow(1, 3, 1)?.contiguous()?.to_vec::<f64>()?.iter().sum(), batch.rows as f64))
}

/// Values of an evaluation of the model as it was made, on so many ranks.
fn evaluated(ranks: usize) -> Vec<f64> {
    on_ranks(ranks, |comm| {
        let model = Mlp::new(comm.runtime(), 0.5)?;
        let evaluate = Evaluate::on(held_out(comm.runtime())).at_start().skip_end().measure("target", counted);
        let trainer = Trainer::new(&model, ddp(comm, &model, 1)?, loader(comm.runtime())).until(Length::Steps(0));
        let report = trainer.with(evaluate).run(loss)?;
        Ok(vec![report.evaluated["validation/loss"], report.evaluated["validation/target"]])
    })
    .unwrap()
}

#[test]
fn every_example_counts_once_at_every_world_size() {
    let rt = Cpu::with_threads(1);
    let model = Mlp::new(&rt, 0.5).unwrap();
    nn::ModuleExt::eval(&model);
    let (mut sum, mut target) = (0.0, 0.0);
    for batch in held_out(&rt).batch(1).epoch(0).unwrap() {
        let batch = batch.unwrap();
        sum += loss(&model, &batch).unwrap().total().item().unwrap();
        target += counted(&(), &batch).unwrap().0;
    }
    for ranks in 1..=8 {
        let values = evaluated(ranks);
        for (value, expected) in values.into_iter().zip([sum / 23.0, target / 23.0]) {
            assert!((value - expected).abs() < 1e-12 * expected.abs(), "{ranks} ranks: {value} {expected}");
        }
    }
}

/// Padding rows are left out by the loop, of the training loss and of a loss of outputs, which runs the model once.
#[test]
fn losses_leave_padding_out() {
    for ranks in [1, 2, 3, 5, 8] {
        let expected = evaluated(ranks)[0];
        on_ranks(ranks, |comm| {
            let (rt, runs) = (comm.runtime(), std::cell::Cell::new(0));
            let model = Mlp::new(rt, 0.5)?;
            let part = |batch: &Batch<Rows>, from, width| batch.data.narrow(1, from, width)?.contiguous();
            let predict = |model: &Mlp<Cpu>, batch: &Batch<Rows>| {
                runs.set(runs.get() + 1);
                model.forward(&Var::new(part(batch, 0, 3)?))
            };
            let squares = |outputs: &Var<Cpu>, batch: &Batch<Rows>| {
                let sum = outputs.sub(&Var::new(part(batch, 3, 1)?))?.square()?.sum_all()?;
                Loss::sum(sum, batch.rows as f64)
            };
            let data = || held_out(rt).last(data::Last::Pad);
            let of_outputs = Evaluate::on(data()).name("outputs").predict(predict).loss(squares).at_start().skip_end();
            let trainer = Trainer::new(&model, ddp(comm, &model, 1)?, loader(rt)).until(Length::Steps(0));
            let trainer = trainer.with(Evaluate::on(data()).at_start().skip_end()).with(of_outputs);
            let report = trainer.run(loss)?;
            for name in ["validation/loss", "outputs/loss"] {
                let off = report.evaluated[name] - expected;
                assert!(off.abs() < 1e-12 * expected, "{ranks} ranks, {name}: {off:e}");
            }
            assert_eq!(runs.get(), 4, "once in each batch");
            Ok(())
        })
        .unwrap();
    }
}

/// Losses of ten steps with dropout.
fn losses(ranks: usize, evaluations: bool) -> Vec<(u64, f64)> {
    let memory = Memory::default();
    on_ranks(ranks, |comm| {
        autograd::manual_seed(4);
        let model = Mlp::new(comm.runtime(), 0.5)?;
        let mut trainer = Trainer::new(&model, ddp(comm, &model, 1)?, loader(comm.runtime()));
        if evaluations {
            // A model of its own, in training mode: its dropout draws random values.
            let other = Mlp::new(comm.runtime(), 0.5)?;
            let draws = move |_: &(), batch: &Batch<Rows>| {
                let before = autograd::random_state();
                let value = loss(&other, batch)?.total().item()?;
                assert_ne!(autograd::random_state(), before);
                Ok((value, 1.0))
            };
            trainer =
                trainer.with(Evaluate::on(held_out(comm.runtime())).every(Interval::Steps(3)).measure("x", draws));
        }
        trainer.until(Length::Steps(10)).record_every(Interval::Steps(1)).sink(memory.clone()).run(loss)?;
        nn::walk(&model, |_, entry| {
            if let nn::ModuleEntry::Mode(mode) = entry {
                assert!(mode.is_training());
            }
        });
        Ok(())
    })
    .unwrap();
    memory.of("loss")
}

#[test]
fn training_goes_on_as_if_nothing_was_evaluated() {
    for ranks in [1, 3] {
        let without = losses(ranks, false);
        assert_eq!(without.len(), 10);
        assert_same(&losses(ranks, true), &without, "evaluations change losses");
    }
}

#[test]
fn a_run_stops_when_nothing_gets_better_on_all_ranks_alike() {
    for ranks in [1, 2, 3] {
        let (memory, worse) = (Memory::default(), std::sync::atomic::AtomicUsize::new(0));
        let report = on_ranks(ranks, |comm| {
            let model = Mlp::new(comm.runtime(), 0.0)?;
            let rank = comm.rank();
            // Better twice, then not; only rank 0 sees it before values are reduced.
            let value = |_: &(), _: &Batch<Rows>| {
                let call = if rank == 0 { worse.fetch_add(1, std::sync::atomic::Ordering::SeqCst) / 4 } else { 0 };
                Ok((if rank == 0 { [3.0, 2.0, 2.0, 2.5, 9.0][call] } else { 0.0 }, 1.0))
            };
            let evaluate = Evaluate::on(held_out(comm.runtime())).every(Interval::Steps(1)).measure("value", value);
            let report = Trainer::new(&model, ddp(comm, &model, 1)?, loader(comm.runtime()))
                .with(evaluate.without_loss())
                .with(EarlyStop::on(Monitor::min("validation/value")).patience(2))
                .sink(memory.clone())
                .run(loss)?;
            Ok((report.progress.step, report.reason))
        });
        let (step, reason) = report.unwrap();
        assert_eq!(step, 4, "{ranks}");
        assert!(matches!(&reason, StopReason::Requested(why) if why.contains("in 2 evaluations")), "{reason:?}");
        assert_eq!(memory.of("validation/value").len(), 4);
    }
}

#[test]
fn a_name_that_no_evaluation_gives_is_an_error() {
    let comm = one();
    let model = Mlp::new(comm.runtime(), 0.0).unwrap();
    let trainer = Trainer::new(&model, ddp(&comm, &model, 1).unwrap(), loader(comm.runtime()));
    let evaluate = Evaluate::on(held_out(comm.runtime()));
    let error = trainer.with(evaluate).with(EarlyStop::on("validation/los")).run(loss).map(|_| ()).unwrap_err();
    assert!(
        error.to_string().contains("no evaluation gives `validation/los`; this one gave validation/loss"),
        "{error}"
    );
}

#[test]
fn metrics_are_counted_over_all_ranks_to_the_bit() {
    use train::metrics::{AreaUnderCurve, Mean, Metric};
    let scored = |ranks: usize| {
        on_ranks(ranks, |comm| {
            let model = Mlp::new(comm.runtime(), 0.0)?;
            // Whether the target is positive, by its first input.
            let runs = std::cell::Cell::new(0);
            let rows = |_: &Mlp<Cpu>, batch: &Batch<Rows>| {
                runs.set(runs.get() + 1);
                batch.data.to_vec::<f64>()
            };
            let auroc = |metric: &mut AreaUnderCurve, rows: &Vec<f64>, _: &Batch<Rows>| {
                let (scores, targets): (Vec<f64>, Vec<i64>) =
                    rows.chunks(4).map(|r| (r[0], i64::from(r[3] > 0.0))).unzip();
                metric.update(&scores, &targets)
            };
            let mean = |metric: &mut Mean, rows: &Vec<f64>, _: &Batch<Rows>| {
                rows.chunks(4).for_each(|row| metric.add(row[3]));
                Ok(())
            };
            // Nothing that a batch is padded with counts.
            let data = held_out(comm.runtime()).last(data::Last::Pad);
            let evaluate = Evaluate::on(data).at_start().skip_end().without_loss().predict(rows);
            let evaluate = evaluate.metric("auroc", AreaUnderCurve::roc(), auroc).metric("mean", Mean::new(), mean);
            let trainer = Trainer::new(&model, ddp(comm, &model, 1)?, loader(comm.runtime())).until(Length::Steps(0));
            let report = trainer.with(evaluate.metric("nothing", Mean::new(), |_, _, _| Ok(()))).run(loss)?;
            assert!(!report.evaluated.contains_key("validation/nothing"));
            assert_eq!(runs.get(), 4, "once in each batch, whatever is measured");
            Ok((report.evaluated["validation/auroc"].to_bits(), report.evaluated["validation/mean"]))
        })
        .unwrap()
    };
    let mut mean = Mean::new();
    examples(60).split_off(37).iter().for_each(|row| mean.add(row[3]));
    let one = scored(1);
    assert_eq!(one.1, mean.value().unwrap());
    for ranks in 2..=8 {
        assert_eq!(scored(ranks), one, "{ranks} ranks");
    }
}

#[test]
fn a_metric_is_of_one_evaluation() {
    use train::metrics::Mean;
    let (comm, memory, mut batches) = (one(), Memory::default(), 0.0);
    let model = Mlp::new(comm.runtime(), 0.0).unwrap();
    let count = |metric: &mut Mean, _: &(), _: &Batch<Rows>| {
        batches += 1.0;
        metric.add(batches);
        Ok(())
    };
    let evaluate = Evaluate::on(held_out(comm.runtime())).every(Interval::Steps(1)).without_loss();
    let trainer = Trainer::new(&model, ddp(&comm, &model, 1).unwrap(), loader(comm.runtime()));
    let trainer = trainer.until(Length::Steps(2)).with(evaluate.metric("batch", Mean::new(), count));
    let report = trainer.sink(memory.clone()).run(loss).unwrap();
    assert_eq!(memory.of("validation/batch"), [(1, 2.5), (2, 6.5)], "four batches in each");
    assert_eq!(report.evaluated["validation/batch"], 6.5);
}

#[test]
fn what_is_evaluated_rarely_can_be_monitored() {
    let run = |name: &str| {
        let comm = one();
        let model = Mlp::new(comm.runtime(), 0.0)?;
        let rare = Evaluate::on(held_out(comm.runtime())).every(Interval::Steps(3)).skip_end().name("rare");
        Trainer::new(&model, ddp(&comm, &model, 1)?, loader(comm.runtime()))
            .until(Length::Steps(6))
            .with(Evaluate::on(held_out(comm.runtime())).every(Interval::Steps(1)))
            .with(rare)
            .with(EarlyStop::on(name))
            .run(loss)
    };
    assert_eq!(run("rare/loss").unwrap().progress.step, 6);
    let error = run("rare/los").unwrap_err().to_string();
    assert!(error.contains("no evaluation gives `rare/los`"), "{error}");
}

#[test]
fn a_part_that_is_shared_is_in_training_mode_afterwards() {
    #[derive(nn::Module)]
    #[module(crate = "::nn")]
    struct Shares<R: numcore::Runtime> {
        body: Mlp<R>,
        drop: std::sync::Arc<nn::Dropout>,
        again: std::sync::Arc<nn::Dropout>,
    }
    let comm = one();
    let drop = std::sync::Arc::new(nn::Dropout::new(0.5).unwrap());
    let model = Shares { body: Mlp::new(comm.runtime(), 0.0).unwrap(), drop: drop.clone(), again: drop };
    let step = distributed::train::TrainStep::builder(&comm, &model).optimizer(adamw()).build().unwrap();
    Trainer::new(&model, step, loader(comm.runtime()))
        .until(Length::Steps(1))
        .with(Evaluate::on(held_out(comm.runtime())))
        .run(|model: &Shares<Cpu>, batch| loss(&model.body, batch))
        .unwrap();
    nn::walk(&model, |_, entry| {
        if let nn::ModuleEntry::Mode(mode) = entry {
            assert!(mode.is_training());
        }
    });
}

#[test]
fn what_is_recorded_without_a_loss_is_weighted_by_examples() {
    let value = |ranks: usize| {
        let memory = Memory::default();
        on_ranks(ranks, |comm| {
            let model = Mlp::new(comm.runtime(), 0.0)?;
            // A rank without examples predicts, too.
            let mean = |_: &Mlp<Cpu>, batch: &Batch<Rows>| {
                let (sum, rows) = counted(&(), batch)?;
                train::record_scalar("mean", if batch.count > 0 { sum / rows } else { f64::NAN });
                Ok(())
            };
            let evaluate = Evaluate::on(held_out(comm.runtime())).at_start().skip_end().without_loss();
            Trainer::new(&model, ddp(comm, &model, 1)?, loader(comm.runtime()))
                .until(Length::Steps(0))
                .with(evaluate.predict(mean).measure("x", |_, _| Ok((0.0, 1.0))))
                .sink(memory.clone())
                .run(loss)
        })
        .unwrap();
        memory.of("validation/mean")[0].1
    };
    let targets: Vec<f64> = examples(60).split_off(37).iter().map(|row| row[3]).collect();
    let expected = targets.iter().sum::<f64>() / targets.len() as f64;
    for ranks in [1, 2, 5, 8] {
        assert!((value(ranks) - expected).abs() < 1e-12, "{ranks} ranks");
    }
}

#[test]
fn an_evaluation_of_no_example_is_an_error() {
    let comm = one();
    let model = Mlp::new(comm.runtime(), 0.0).unwrap();
    let trainer = Trainer::new(&model, ddp(&comm, &model, 1).unwrap(), loader(comm.runtime()));
    let evaluate = Evaluate::on(held_out(comm.runtime()).batch(50).last(data::Last::Drop));
    let error = trainer.with(evaluate).run(loss).unwrap_err().to_string();
    assert!(error.contains("`validation` has seen 0 examples"), "{error}");
}

type Evaluation<'e> = Evaluate<'e, Mlp<Cpu>, Rows>;

#[test]
fn ranks_must_have_the_same_data() {
    let run = |other_training: bool, other_evaluation: fn(Evaluation<'_>) -> Evaluation<'_>| {
        let outcomes = distributed::comm::Ranks::new(2).outcomes(cpu, |comm| {
            let model = Mlp::new(comm.runtime(), 0.0)?;
            let (mut train, mut evaluate) = (loader(comm.runtime()), Evaluate::on(held_out(comm.runtime())));
            if comm.rank() == 1 {
                train = if other_training { train.shuffle(4) } else { train };
                evaluate = other_evaluation(evaluate);
            }
            let trainer = Trainer::new(&model, ddp(&comm, &model, 1)?, train).until(Length::Steps(1));
            trainer.with(evaluate).run(loss).map(|_| ())
        });
        outcomes.unwrap().swap_remove(0).unwrap_err().to_string()
    };
    let train = run(true, |evaluate| evaluate);
    assert!(train.contains("the data to train on of rank 0"), "{train}");
    let fewer: fn(Evaluation<'_>) -> Evaluation<'_> = |evaluate| evaluate.limit_batches(3);
    for other in [fewer, |_| Evaluate::on(held_out(&Cpu::with_threads(1)).batch(8))] {
        let evaluate = run(false, other);
        assert!(evaluate.contains("the data of `validation` of rank 0"), "{evaluate}");
    }
}

#[test]
fn what_is_measured_comes_after_what_is_predicted() {
    let comm = one();
    let model = Mlp::new(comm.runtime(), 0.0).unwrap();
    let evaluate = Evaluate::on(held_out(comm.runtime())).measure("x", |_, _| Ok((0.0, 1.0)));
    let trainer = Trainer::new(&model, ddp(&comm, &model, 1).unwrap(), loader(comm.runtime()));
    let error = trainer.with(evaluate.predict(|_, _| Ok(()))).run(loss).unwrap_err().to_string();
    assert!(error.contains("call `predict` first"), "{error}");
}

#[test]
fn two_of_one_name_are_refused() {
    let comm = one();
    let model = Mlp::new(comm.runtime(), 0.0).unwrap();
    let trainer = || Trainer::new(&model, ddp(&comm, &model, 1).unwrap(), loader(comm.runtime()));
    let evaluate = || Evaluate::on(held_out(comm.runtime()));
    let error = trainer().with(evaluate()).with(evaluate()).run(loss).unwrap_err().to_string();
    assert!(error.contains("two evaluations are called `validation`"), "{error}");
    let average = || train::WeightAveraging::new(0.9);
    let error = trainer().with(average()).with(average()).run(loss).unwrap_err().to_string();
    assert!(error.contains("two callbacks keep `ema/"), "{error}");
}

/// Layers that compute statistics over rows learn which rows of a padded batch count, in training and in evaluations.
#[test]
fn layers_know_the_rows_that_count() {
    // On 6 ranks, some have no row that counts in the last batches.
    for ranks in [1, 6] {
        let padded = AtomicUsize::new(0);
        on_ranks(ranks, |comm| {
            let model = Mlp::new(comm.runtime(), 0.0)?;
            let check = |batch: &Batch<Rows>| {
                padded.fetch_add(usize::from(batch.count < batch.rows), Ordering::Relaxed);
                assert_eq!(nn::counted_rows(batch.rows), batch.count);
            };
            let data = |loader: Loader<Rows>| loader.last(data::Last::Pad);
            let measure = |_: &Mlp<Cpu>, batch: &Batch<Rows>| {
                check(batch);
                Ok(())
            };
            let evaluate = Evaluate::on(data(held_out(comm.runtime())));
            let measured = Evaluate::on(data(held_out(comm.runtime()))).name("measured").predict(measure);
            let measured = measured.without_loss().measure("one", |_: &(), _: &Batch<Rows>| Ok((1.0, 1.0)));
            Trainer::new(&model, ddp(comm, &model, 1)?, data(loader(comm.runtime())))
                .with(evaluate)
                .with(measured)
                .run(|model, batch| {
                    check(batch);
                    loss(model, batch)
                })?;
            assert_eq!(nn::counted_rows(7), 7);
            Ok(())
        })
        .unwrap();
        assert!(padded.into_inner() >= 1, "{ranks} ranks");
    }
}
