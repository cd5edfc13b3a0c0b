//! What is done about numbers that are not finite, ranks that drift apart, and how speed is measured.

use train::{Throughput, Weighting};

use crate::{common::*, prelude::*};

/// The loss, times infinity in one batch.
fn broken_at(
    step: u64,
) -> impl Fn(&Mlp<runtime_cpu::Cpu>, &data::Batch<Rows>) -> Result<distributed::train::Loss<runtime_cpu::Cpu>> {
    move |model, batch| {
        let own = loss(model, batch)?;
        let factor = if batch.epoch == 0 && batch.step == step { f64::INFINITY } else { 1.0 };
        distributed::train::Loss::sum(own.total().mul(factor)?, own.weight())
    }
}

#[test]
fn a_loss_that_is_not_finite_ends_the_run_with_its_step() {
    for (ranks, gradients_alone) in [(1, false), (3, false), (1, true), (3, true)] {
        let error = on_ranks(ranks, |comm| {
            let model = Mlp::new(comm.runtime(), 0.0)?;
            let trainer = Trainer::new(&model, ddp(comm, &model, 1)?, loader(comm.runtime())).with(NonFinite::stop());
            let run = trainer.run(|model, batch| {
                if !gradients_alone {
                    return broken_at(2)(model, batch);
                }
                // The square root has no slope at 0.
                let own = loss(model, batch)?;
                let nothing = if batch.step == 2 { own.total().mul(0.0)?.sqrt()? } else { own.total().mul(0.0)? };
                Loss::sum(own.total().add(&nothing)?, own.weight())
            });
            run.map(|_| ())
        });
        let error = error.unwrap_err().to_string();
        assert!(error.contains("the loss of step 3 is") && error.contains("norm of the gradients NaN"), "{error}");
        assert_eq!(error.contains("is NaN") || error.contains("is inf"), !gradients_alone, "{error}");
    }
}

/// Events and positions after each step of a run that meets infinity in its fourth batch and goes back.
#[test]
fn going_back_leaves_out_what_led_there() {
    for ranks in [1, 2, 3] {
        let (scratch, memory) = (Scratch::new("back"), Memory::default());
        let weights = on_ranks(ranks, |comm| {
            let model = Mlp::new(comm.runtime(), 0.0)?;
            let trainer = Trainer::new(&model, ddp(comm, &model, 1)?, loader(comm.runtime())).until(Length::Steps(7));
            let report = trainer
                .record_every(Interval::Steps(1))
                .with(Checkpoints::in_folder(&scratch.0).every(Interval::Steps(2)).ignore_signals())
                .with(NonFinite::go_back(1))
                .with(Throughput::new())
                .sink(memory.clone())
                .run(broken_at(3))?;
            assert_eq!(report.progress.epochs(), 1.0 + 4.0 * 8.0 / 37.0);
            weights(&model)
        });
        assert!(weights.unwrap().iter().all(|x| x.is_finite()));
        let steps: Vec<u64> = memory.of("loss").into_iter().map(|(step, _)| step).collect();
        // Batch 3 was in step 4, which is taken again with what comes next: 2 steps are back, 8 batches were read.
        assert_eq!(steps, [1, 2, 3, 4, 3, 4, 5, 6, 7], "{ranks} ranks");
        assert_eq!(memory.of("went_back"), [(4, 1.0)]);
        let speeds = memory.of("throughput/tokens_per_second");
        assert!(speeds.len() == 9 && speeds.iter().all(|(_, speed)| *speed > 0.0), "{speeds:?}");
    }
}

#[test]
fn going_back_more_often_than_allowed_or_to_nothing_is_an_error() {
    let (comm, scratch) = (one(), Scratch::new("back-again"));
    let run = |policy: bool| {
        let model = Mlp::new(comm.runtime(), 0.0).unwrap();
        let mut trainer = Trainer::new(&model, ddp(&comm, &model, 1).unwrap(), loader(comm.runtime()));
        if policy {
            trainer = trainer.with(Checkpoints::in_folder(&scratch.0).every(Interval::Steps(1)).ignore_signals());
        }
        trainer.with(NonFinite::go_back(2)).run(|model, batch| {
            let own = loss(model, batch)?;
            let factor = if batch.step > 1 { f64::NAN } else { 1.0 };
            distributed::train::Loss::sum(own.total().mul(factor)?, own.weight())
        })
    };
    assert!(run(true).unwrap_err().to_string().contains("after going back 2 times"));
    assert!(run(false).unwrap_err().to_string().contains("there is no checkpoint to go back to"));
}

#[test]
fn updates_that_are_not_finite_are_left_out_on_all_ranks() {
    for ranks in [1, 3] {
        let steps = on_ranks(ranks, |comm| {
            let model = Mlp::new(comm.runtime(), 0.0)?;
            let step =
                distributed::train::TrainStep::builder(comm, &model).optimizer(adamw()).skip_non_finite().build()?;
            let report =
                Trainer::new(&model, step, loader(comm.runtime())).with(NonFinite::stop()).run(broken_at(2))?;
            assert!(weights(&model)?.iter().all(|x| x.is_finite()));
            Ok(report.progress.step)
        });
        assert_eq!(steps.unwrap(), 4, "five batches, one left out");
    }
}

#[test]
fn a_run_whose_updates_are_all_left_out_ends() {
    let comm = one();
    let model = Mlp::new(comm.runtime(), 0.0).unwrap();
    let step =
        distributed::train::TrainStep::builder(&comm, &model).optimizer(adamw()).skip_non_finite().build().unwrap();
    let trainer = Trainer::new(&model, step, loader(comm.runtime())).until(Length::Steps(10));
    let mut calls = 0;
    let error = trainer.run(|model, batch| {
        calls += 1;
        let own = loss(model, batch)?;
        // One step in between is taken.
        let factor = if calls == 60 { 1.0 } else { f64::NAN };
        distributed::train::Loss::sum(own.total().mul(factor)?, own.weight())
    });
    assert!(error.unwrap_err().to_string().contains("the last 100 steps were not finite"));
    assert_eq!(calls, 160);
}

/// Changes a parameter on one rank.
struct Drifts(usize);

impl<R: Runtime, B> Callback<R, Mlp<R>, B> for Drifts {
    fn on(&mut self, event: &Event<'_, R>, run: &mut Run<'_, R, Mlp<R>, B>) -> Result<()> {
        if matches!(event, Event::StepEnd(_)) && run.progress().step == 3 && run.comm().rank() == self.0 {
            let bias = run.model().b.bias.as_ref().map(|bias| bias.leaf());
            if let Some(leaf) = bias {
                let value = leaf.value()?.add(f64::EPSILON)?;
                leaf.set(value)?;
            }
        }
        Ok(())
    }
}

#[test]
fn ranks_that_drift_apart_are_told_with_the_first_parameter_that_differs() {
    for ranks in [2, 3, 5] {
        let run = |drifts: bool| {
            let outcomes = Ranks::new(ranks).outcomes(cpu, |comm| {
                let model = Mlp::new(comm.runtime(), 0.0)?;
                let mut trainer = Trainer::new(&model, ddp(&comm, &model, 1)?, loader(comm.runtime()));
                trainer = trainer.until(Length::Steps(9));
                if drifts {
                    trainer = trainer.with(Drifts(ranks - 1));
                }
                trainer.with(EqualWeights::every(Interval::Steps(4)).with_buffers()).run(loss).map(|_| ())
            });
            outcomes.unwrap()
        };
        assert!(run(false).into_iter().all(|outcome| outcome.is_ok()));
        for outcome in run(true) {
            let error = outcome.unwrap_err().to_string();
            let last = ranks - 1;
            assert!(
                error.contains(&format!("after step 4 `b.bias` differs between rank {last} and rank 0")),
                "{error}"
            );
        }
    }
}

#[test]
fn speed_is_counted_over_all_ranks() {
    let memory = Memory::default();
    on_ranks(2, |comm| {
        let model = Mlp::new(comm.runtime(), 0.0)?;
        let (peak, parameters) = (1e9, model.num_parameters().total as f64);
        // Each time that it is asked, a second more was waited.
        let mut waited = 5;
        let throughput = Throughput::new().peak_flops(peak).exchange(move || {
            waited += 1;
            Duration::from_secs(waited)
        });
        Trainer::new(&model, ddp(comm, &model, 1)?, loader(comm.runtime()))
            .until(Length::Steps(6))
            .record_every(Interval::Steps(2))
            .with(throughput)
            .sink(memory.clone())
            .run(|model, batch| {
                distributed::train::Loss::sum(loss(model, batch)?.total().clone(), batch.count as f64)
            })?;
        if comm.rank() == 0 {
            let (tokens, mfu) = (memory.of("throughput/tokens_per_second"), memory.of("throughput/mfu"));
            assert_eq!(tokens.len(), 3);
            for ((_, tokens), (_, mfu)) in tokens.iter().zip(mfu) {
                assert!((mfu - tokens * 6.0 * parameters / (peak * 2.0)).abs() < 1e-12 * mfu && mfu > 0.0);
            }
            // Sixteen examples in two steps, and thirteen in those that end the epoch.
            let each = memory.of("throughput/steps_per_second");
            for ((_, waited), (_, per_second)) in memory.of("throughput/exchange_wait").iter().zip(&each) {
                assert!((waited / per_second - 1.0).abs() < 1e-9, "a second in each step: {waited} {per_second}");
            }
            assert!(memory.of("throughput/data_wait").iter().all(|(_, waited)| *waited > 0.0));
            let per_step: Vec<f64> = tokens.iter().zip(each).map(|((_, t), (_, s))| t / s).collect();
            for (found, expected) in per_step.iter().zip([8.0, 8.0, 6.5]) {
                assert!((found - expected).abs() < 1e-9, "{per_step:?}");
            }
            assert!(memory.of("memory/peak_bytes")[0].1 > 0.0);
            assert!(memory.of("rank/0/peak_bytes").is_empty(), "values of ranks are recorded where they are asked for");
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn the_lag_of_ranks_is_how_much_less_than_others_they_wait_within_steps() {
    for ranks in [1, 2, 3, 5] {
        let memory = Memory::default();
        on_ranks(ranks, |comm| {
            let model = Mlp::new(comm.runtime(), 0.0)?;
            // Rank r waits r seconds in a step, and a day between steps: at every second call.
            let (mut calls, mut waited, rank) = (0, Duration::ZERO, comm.rank());
            let throughput = Throughput::new().by_rank().exchange(move || {
                calls += 1;
                waited += Duration::from_secs(if calls % 2 == 0 { rank as u64 } else { 86_400 });
                waited
            });
            Trainer::new(&model, ddp(comm, &model, 1)?, loader(comm.runtime()))
                .until(Length::Steps(5))
                .record_every(Interval::Steps(2))
                .with(throughput)
                .sink(memory.clone())
                .run(loss)
        })
        .unwrap();
        for rank in 0..ranks {
            let of = |name: &str| memory.of(&format!("rank/{rank}/{name}"));
            let lag = (ranks - 1 - rank) as f64;
            assert_eq!(of("lag_seconds"), [(2, lag), (4, lag), (5, lag)], "rank {rank} of {ranks}");
            assert!(of("peak_bytes").iter().all(|(_, bytes)| *bytes > 0.0) && of("data_wait").len() == 3);
            assert_eq!(of("host_bytes").len(), if cfg!(target_os = "linux") { 3 } else { 0 });
        }
        assert!(memory.of(&format!("rank/{ranks}/lag_seconds")).is_empty());
    }
}

#[test]
fn workers_can_count_alike_whatever_they_have() {
    // 5 examples on 2 ranks: 3 and 2. By weight, a mean over five; by micro-batch, the mean of two means.
    let first = |ranks: usize, weighting: Weighting| {
        let memory = Memory::default();
        let trained = on_ranks(ranks, |comm| {
            let model = Mlp::new(comm.runtime(), 0.0)?;
            let trainer = Trainer::new(&model, ddp(comm, &model, 1)?, loader(comm.runtime()).batch(5));
            let each = Rc::new(RefCell::new(Vec::new()));
            let seen = each.clone();
            trainer
                .until(Length::Steps(1))
                .weighting(weighting)
                .record_every(Interval::Steps(1))
                .sink(memory.clone())
                .run(move |model, batch| {
                    let own = loss(model, batch)?;
                    seen.borrow_mut().push(own.total().item()? / own.weight());
                    Ok(own)
                })?;
            let first = each.borrow()[0];
            distributed::comm::Partial::new(first).combine_on(&**comm, distributed::comm::ReduceOp::Avg)
        });
        (memory.of("loss")[0].1, trained.unwrap())
    };
    let (whole, _) = first(1, Weighting::ByWeight);
    let (by_weight, mean_of_means) = first(2, Weighting::ByWeight);
    let (by_worker, _) = first(2, Weighting::PerMicroBatch);
    assert!((by_weight - whole).abs() < 1e-12 * whole);
    assert!((by_worker - mean_of_means).abs() < 1e-12 * whole);
    assert!((by_worker - by_weight).abs() > 1e-6 * whole);
}

#[test]
fn a_share_whose_tokens_are_all_masked_counts_for_nothing() {
    let memory = Memory::default();
    let own = on_ranks(2, |comm| {
        let model = Mlp::new(comm.runtime(), 0.0)?;
        let (rank, mut mean) = (comm.rank(), 0.0);
        let trainer = Trainer::new(&model, ddp(comm, &model, 1)?, loader(comm.runtime())).until(Length::Steps(1));
        let trainer = trainer.weighting(Weighting::PerMicroBatch).record_every(Interval::Steps(1)).sink(memory.clone());
        trainer.run(|model, batch| {
            let own = loss(model, batch)?;
            mean = own.total().item()? / own.weight();
            if rank == 0 { Ok(own) } else { distributed::train::Loss::sum(own.total().mul(f64::NAN)?, 0.0) }
        })?;
        assert!(weights(&model)?.iter().all(|x| x.is_finite()));
        Ok(mean)
    });
    assert_eq!(memory.of("loss"), [(1, own.unwrap())]);
}

#[test]
fn steps_that_are_undone_count_no_tokens() {
    let (comm, scratch) = (one(), Scratch::new("undone"));
    let model = Mlp::new(comm.runtime(), 0.0).unwrap();
    let report = Trainer::new(&model, ddp(&comm, &model, 1).unwrap(), loader(comm.runtime()))
        .until(Length::Steps(5))
        .record_every(Interval::Never)
        .with(Checkpoints::in_folder(&scratch.0).every(Interval::Steps(2)).ignore_signals())
        .with(NonFinite::go_back(1))
        .run(broken_at(3));
    // Of the 53 examples that were read, two steps of 8 were undone.
    assert_eq!(report.unwrap().progress.tokens, 37.0);
}

/// Fails at a step that is taken for the second time.
struct FailsAgain(u64, u32);

impl<R: Runtime, M, B> Callback<R, M, B> for FailsAgain {
    fn on(&mut self, event: &Event<'_, R>, run: &mut Run<'_, R, M, B>) -> Result<()> {
        self.1 += u32::from(matches!(event, Event::StepEnd(_)) && run.progress().step == self.0);
        if self.1 == 2 { Err(numcore::Error::other("out of memory")) } else { Ok(()) }
    }
}

#[test]
fn a_run_that_went_back_and_is_killed_goes_on_after_what_led_there() {
    for ranks in [1, 2] {
        let scratch = Scratch::new("back-killed");
        let run = |fails_at: u64| {
            on_ranks(ranks, |comm| {
                let model = Mlp::new(comm.runtime(), 0.0)?;
                let report = Trainer::new(&model, ddp(comm, &model, 1)?, loader(comm.runtime()))
                    .until(Length::Steps(7))
                    .with(Checkpoints::in_folder(&scratch.0).every(Interval::Steps(2)).ignore_signals())
                    .with(NonFinite::go_back(1))
                    .with(FailsAgain(fails_at, 0))
                    .resume(Resume::IfThere)
                    .run(broken_at(3))?;
                Ok((report.resumed, report.progress.epochs(), weights(&model)?))
            })
        };
        assert!(run(3).unwrap_err().to_string().contains("out of memory"));
        let (resumed, epochs, parts) = run(0).unwrap();
        assert_eq!((resumed, epochs), (Some(2), 1.0 + 4.0 * 8.0 / 37.0), "{ranks} ranks");
        std::fs::remove_dir_all(&scratch.0).unwrap();
        assert_eq!(run(0).unwrap(), (None, epochs, parts), "{ranks} ranks");
    }
}

#[test]
fn how_often_a_run_went_back_is_kept() {
    let (comm, scratch) = (one(), Scratch::new("back-count"));
    let run = |fails_at: u64| {
        let model = Mlp::new(comm.runtime(), 0.0)?;
        let trainer = Trainer::new(&model, ddp(&comm, &model, 1)?, loader(comm.runtime())).resume(Resume::IfThere);
        trainer
            .until(Length::Steps(7))
            .with(Checkpoints::in_folder(&scratch.0).every(Interval::Steps(2)).ignore_signals())
            .with(NonFinite::go_back(1))
            .with(FailsAgain(fails_at, 0))
            .run(|model, batch| {
                let own = loss(model, batch)?;
                let factor = if batch.epoch == 0 && batch.step >= 3 { f64::NAN } else { 1.0 };
                distributed::train::Loss::sum(own.total().mul(factor)?, own.weight())
            })
    };
    // The fourth batch and the fifth are bad: the second time is one too many, whoever counts.
    let error = run(3).unwrap_err().to_string();
    assert!(error.contains("after going back 1 times") || error.contains("out of memory"), "{error}");
    let error = run(0).unwrap_err().to_string();
    assert!(error.contains("after going back 1 times"), "{error}");
}

#[test]
fn by_worker_nothing_counts_tokens() {
    let comm = one();
    let model = Mlp::new(comm.runtime(), 0.0).unwrap();
    let trainer = || Trainer::new(&model, ddp(&comm, &model, 1).unwrap(), loader(comm.runtime()));
    let by_length = trainer().until(Length::Tokens(30));
    let by_record = trainer().until(Length::Steps(1)).record_every(Interval::Tokens(30));
    for trainer in [by_length, by_record] {
        let error = trainer.weighting(Weighting::PerMicroBatch).run(loss).unwrap_err().to_string();
        assert!(error.contains("tokens are not counted"), "{error}");
    }
}
