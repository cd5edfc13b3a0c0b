//! The loop over ranks that train by themselves and meet.

use adaptive::local_updates::{DiLoCo, ElasticAveraging, LocalSgd, LocalSteps, LocalUpdates, OuterRule, SlowMo};
use distributed::comm::{Collectives, NoOpCommunicator};
use train::{DivergenceGuard, RunReport};

use crate::{common::*, prelude::*, worlds::elastic};

type Local = LocalSteps<Cpu, TrainStep<Cpu>>;

fn local(
    comm: &Comm<Cpu>,
    model: &Mlp<Cpu>,
    rule: impl OuterRule<Cpu> + 'static,
    options: LocalUpdates,
) -> Result<Local> {
    let inner = TrainStep::builder(&NoOpCommunicator::new(comm.runtime()), model).optimizer(adamw()).build()?;
    LocalSteps::new(comm, model, inner, rule, options)
}

fn run_to(comm: &Comm<Cpu>, folder: &Scratch, until: u64, memory: &Memory) -> Result<()> {
    autograd::manual_seed(until);
    let model = Mlp::new(comm.runtime(), 0.3)?;
    let options = LocalUpdates { every: Some(4), fragments: 2, delay: 1, ..Default::default() };
    let step = local(comm, &model, SlowMo::default(), options)?;
    if std::fs::read_dir(&folder.0).is_err() {
        autograd::manual_seed(9);
    }
    let report = Trainer::new(&model, step, loader(comm.runtime()))
        .until(Length::Steps(until))
        .record_every(Interval::Steps(1))
        .with(Evaluate::on(held_out(comm.runtime())).every(Interval::Steps(4)).skip_end())
        .with(WeightAveraging::new(0.9))
        .with(DivergenceGuard::above(1e9))
        .with(Checkpoints::in_folder(&folder.0).keep(2).ignore_signals())
        .sink(memory.clone())
        .resume(Resume::IfThere)
        .run(loss)?;
    assert_eq!(report.progress.step, until);
    // Five steps in an epoch of 37 examples, whatever the rank read of them.
    assert_eq!(report.progress.tokens, (until / 5 * 37 + until % 5 * 8) as f64);
    Ok(())
}

#[test]
fn resumed_after_every_step_is_uninterrupted_to_the_bit() {
    for ranks in [1, 2, 3] {
        let (whole, memory) = (Scratch::new("local-whole"), Memory::default());
        on_ranks(ranks, |comm| run_to(comm, &whole, 9, &memory)).unwrap();
        let (parts, pieces) = (Scratch::new("local-parts"), Memory::default());
        for until in 1..=9 {
            on_ranks(ranks, |comm| run_to(comm, &parts, until, &pieces)).unwrap();
        }
        for name in ["loss", "validation/loss", "divergence"] {
            assert_eq!(memory.of(name), pieces.of(name), "{name} on {ranks} ranks");
        }
        assert_eq!(memory.of("divergence").len(), 4);
    }
}

#[test]
fn a_divergence_that_rises_ends_the_run() {
    let until = |threshold: f64| {
        let report = on_ranks(2, |comm| -> Result<RunReport<Local>> {
            let model = Mlp::new(comm.runtime(), 0.0)?;
            let options = LocalUpdates { every: Some(1), ..Default::default() };
            let step = local(comm, &model, ElasticAveraging { alpha: 0.1 }, options)?;
            Trainer::new(&model, step, loader(comm.runtime()))
                .until(Length::Steps(20))
                .with(DivergenceGuard::above(threshold))
                .run(loss)
        });
        let report = report.unwrap();
        (report.progress.step, report.reason)
    };
    let (step, reason) = until(1e-6);
    assert!((4..20).contains(&step), "{step}");
    assert!(matches!(&reason, StopReason::Requested(why) if why.contains("synchronize more often")), "{reason:?}");
    assert_eq!(until(1e3), (20, StopReason::Finished));
}

#[test]
fn a_share_without_examples_waits_for_the_meeting() {
    let memory = Memory::default();
    on_ranks(8, |comm| {
        let model = Mlp::new(comm.runtime(), 0.0)?;
        let options = LocalUpdates { every: Some(1), ..Default::default() };
        // The last of five batches has five examples.
        let trainer = Trainer::new(&model, local(comm, &model, LocalSgd, options)?, loader(comm.runtime()));
        let trainer = trainer.until(Length::Epochs(2.0)).with(NonFinite::stop()).sink(memory.clone());
        let report = trainer.run(loss)?;
        assert_eq!((report.progress.step, report.progress.tokens), (10, 74.0));
        let all = comm.exchange(&weights(&model)?.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<_>>())?;
        assert!(all.iter().all(|other| *other == all[0]));
        Ok(())
    })
    .unwrap();
}

#[test]
fn averages_of_weights_leave_no_trace_in_the_training() {
    let losses = |averaging: Option<fn() -> WeightAveraging<Cpu>>| {
        let memory = Memory::default();
        on_ranks(3, |comm| {
            let model = Mlp::new(comm.runtime(), 0.0)?;
            // Evaluated between two synchronizations, where ranks are apart.
            let step = local(comm, &model, SlowMo::default(), LocalUpdates { every: Some(4), ..Default::default() })?;
            let mut trainer = Trainer::new(&model, step, loader(comm.runtime())).until(Length::Steps(10));
            if let Some(averaging) = averaging {
                trainer = trainer.with(averaging());
            }
            let evaluate = Evaluate::on(held_out(comm.runtime())).every(Interval::Steps(3)).skip_end();
            trainer.with(evaluate).record_every(Interval::Steps(1)).sink(memory.clone()).run(loss).map(drop)
        })
        .unwrap();
        (memory.of("loss"), memory.of("validation/loss"))
    };
    let (with, without) = (losses(Some(|| WeightAveraging::new(0.7))), losses(None));
    assert_eq!(with.0, without.0);
    assert_ne!(with.1, without.1, "averages are other weights");
    assert_eq!(losses(Some(|| WeightAveraging::new(0.7).skip_evaluations())), without);
}

/// Of two machines of two ranks, also where these shard parameters.
#[test]
fn averages_leave_no_trace_on_machines_of_several_ranks() {
    for stage in [ZeroStage::None, ZeroStage::Optimizer, ZeroStage::Parameters] {
        let losses = |averaged: bool| {
            let memory = Memory::default();
            on_ranks(4, |comm| {
                let model = Mlp::new(comm.runtime(), 0.0)?;
                let group = |color: usize| {
                    comm.split(Some(color), comm.rank())?.ok_or_else(|| Error::internal("a test", "there is no group"))
                };
                let (inside, across) = (group(comm.rank() / 2)?, group(2 + comm.rank() % 2)?);
                let inner = TrainStep::builder(&inside, &model).optimizer(adamw()).zero(stage).build()?;
                let options = LocalUpdates { every: Some(4), ..Default::default() };
                let step = LocalSteps::new(&across, &model, inner, SlowMo::default(), options)?.among(comm);
                let mut trainer = Trainer::new(&model, step, loader(comm.runtime())).until(Length::Steps(7));
                if averaged {
                    trainer = trainer.with(WeightAveraging::new(0.7));
                }
                let evaluate = Evaluate::on(held_out(comm.runtime())).every(Interval::Steps(3)).skip_end();
                trainer.with(evaluate).record_every(Interval::Steps(1)).sink(memory.clone()).run(loss).map(drop)
            })
            .unwrap();
            memory.of("loss")
        };
        assert_eq!(losses(true), losses(false), "{stage:?}");
    }
}

#[test]
fn a_step_that_one_rank_leaves_out_counts_on_all() {
    let run = |averaged: bool| {
        let steps = on_ranks(3, |comm| {
            let model = Mlp::new(comm.runtime(), 0.0)?;
            let config = TrainingConfig { skip_non_finite: true, ..Default::default() };
            let alone = NoOpCommunicator::new(comm.runtime());
            let inner = TrainStep::builder(&alone, &model).optimizer(adamw()).config(config).build()?;
            let options = LocalUpdates { every: Some(1), ..Default::default() };
            let step = LocalSteps::new(comm, &model, inner, SlowMo::default(), options)?;
            let (rank, calls) = (comm.rank(), std::cell::Cell::new(0));
            let mut trainer = Trainer::new(&model, step, loader(comm.runtime())).until(Length::Steps(7));
            if averaged {
                trainer = trainer.with(WeightAveraging::new(0.0).use_at_end());
            }
            let report = trainer.run(|model: &Mlp<Cpu>, batch| {
                calls.set(calls.get() + 1);
                let own = loss(model, batch)?;
                match rank == 1 && [3, 7].contains(&calls.get()) {
                    true => Loss::sum(own.total().mul(f64::NAN)?, own.weight()),
                    false => Ok(own),
                }
            })?;
            Ok((report.progress.step, calls.get(), weights(&model)?))
        });
        steps.unwrap()
    };
    let (plain, averaged) = (run(false), run(true));
    assert_eq!((plain.0, plain.1), (7, 7));
    // Averages without a memory are the weights after the last synchronization.
    assert_eq!(averaged, plain);
}

/// Trains to step 6, in a world from which rank 1 may be lost while step 4 is taken: the last world, and the weights.
fn trained(world: &mut ElasticWorld<Cpu>, options: &LocalUpdates, loses: bool) -> Result<(usize, Vec<f64>)> {
    autograd::manual_seed(7);
    let comm = world.comm()?;
    let model = Mlp::new(comm.runtime(), 0.3)?;
    let step = local(&comm, &model, DiLoCo::default(), options.clone())?;
    let (generation, rank, taken) = (world.generation(), comm.rank(), std::cell::Cell::new(0));
    let from = (generation > 0).then_some(2);
    let report = Trainer::new(&model, step, loader(comm.runtime()).workers(0))
        .until(Length::Steps(6))
        .elastic(world, Interval::Steps(1))
        .run(|model, batch| {
            taken.set(taken.get() + 1);
            if loses && (generation, rank, taken.get()) == (0, 1, 4) {
                return Err(Error::argument("the machine", "is gone"));
            }
            loss(model, batch)
        })?;
    assert_eq!(report.resumed, from);
    Ok((comm.size(), weights(&model)?))
}

#[test]
fn elastic_runs_commit_where_ranks_have_met() {
    let options = LocalUpdates { every: Some(2), ..Default::default() };
    let run = |ranks: usize, options: &LocalUpdates| elastic(ranks, 1, |world| trained(world, options, true));
    for ranks in [3, 4] {
        let done: Vec<_> = run(ranks, &options).into_iter().flatten().collect();
        // It went on from the synchronization of step 2, with the batches that came after it.
        let folder = Scratch::new("local-elastic");
        let fresh = |ranks: usize, until: u64| {
            let program = |comm: &Comm<Cpu>| {
                autograd::manual_seed(7);
                let model = Mlp::new(comm.runtime(), 0.3)?;
                let step = local(comm, &model, DiLoCo::default(), options.clone())?;
                Trainer::new(&model, step, loader(comm.runtime()).workers(0))
                    .until(Length::Steps(until))
                    .with(Checkpoints::in_folder(&folder.0).ignore_signals())
                    .resume(Resume::IfThere)
                    .run(loss)?;
                weights(&model)
            };
            on_ranks(ranks, program).unwrap()
        };
        fresh(ranks, 2);
        let expected = (ranks - 1, fresh(ranks - 1, 6));
        assert_eq!(done, vec![expected; ranks - 1]);
    }
    let in_turn = LocalUpdates { every: Some(2), fragments: 2, ..Default::default() };
    for refused in run(2, &in_turn) {
        assert!(refused.unwrap_err().to_string().contains("weights that differ between ranks"));
    }
}
