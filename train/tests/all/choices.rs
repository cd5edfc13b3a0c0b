//! What a configuration chooses, by each door: strategies, policies and shares give the results of one rank, or those
//! of the same choice made by hand.

use adaptive::{
    balance::{BalanceOptions, BalancePolicy, SpeedOptions, SpeedShares},
    local_updates::{DiLoCo, ElasticAveraging, LocalSgd, LocalSteps, LocalUpdates, OuterChoice, SlowMo},
};
use distributed::{buckets::BucketOptions, comm::NoOpCommunicator, mesh::AsMesh};
use train::{
    Shares, Weighting,
    compat::{Policy, TrainConfig},
};

use crate::{common::*, prelude::*};

/// The ways to train by a configuration.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Door {
    /// A loop of one's own, by `step`.
    Steps,
    /// A loop of one's own, by `step_from`.
    Epochs,
    /// A loop of one's own around a head.
    Loader,
    Builder,
}

const DOORS: [Door; 4] = [Door::Steps, Door::Epochs, Door::Loader, Door::Builder];

const STAGES: [ZeroStage; 4] = [ZeroStage::None, ZeroStage::Optimizer, ZeroStage::Gradients, ZeroStage::Parameters];

fn config(stage: ZeroStage, policy: Policy) -> TrainConfig {
    let zero = ZeroOptions { stage, units: UnitOf::children(), reduce_once: true, ..Default::default() };
    let step = TrainingConfig { max_norm: Some(0.5), ..Default::default() };
    TrainConfig { step, zero, policy, ..Default::default() }
}

/// Weights after two epochs, over a mesh.
fn trained(mesh: &impl AsMesh<Cpu>, door: Door, batch: usize, config: &TrainConfig) -> Result<Vec<f64>> {
    let rt = mesh.as_mesh().world().runtime().clone();
    let loader = loader(&rt).batch(batch);
    if door == Door::Builder {
        let built = Trainer::builder(|cpu: &Cpu| Mlp::new(cpu, 0.0), adamw, loss)
            .loader(|_: &Cpu| Ok(loader.clone()))
            .config(config.clone())
            .trainer(|trainer| trainer.until(Length::Epochs(2.0)))
            .run_on(mesh)?;
        let model = Mlp::new(&rt, 0.0)?;
        built.load_into(&model)?;
        return weights(&model);
    }
    let model = Mlp::new(&rt, 0.0)?;
    let mut trainer = Trainer::setup_with(mesh, &model, adamw(), config.clone())?;
    if door == Door::Loader {
        // Sharded parameters can be read while the step lives.
        let _report = trainer.with_loader(loader).until(Length::Epochs(2.0)).run(loss)?;
        return weights(&model);
    }
    for epoch in 0..2 {
        let mut batches = trainer.epoch(&loader, epoch)?;
        if door == Door::Epochs {
            while trainer.step_from(&mut batches, loss)?.is_some() {}
            continue;
        }
        for batch in batches {
            trainer.step(&batch?, loss)?;
        }
    }
    weights(&model)
}

/// Weights of one rank after two epochs in steps of so many micro-batches.
fn expected(batch: usize, accumulation: usize) -> Vec<f64> {
    on_ranks(1, |comm| {
        let model = Mlp::new(comm.runtime(), 0.0)?;
        let loader = loader(comm.runtime()).batch(batch);
        Trainer::new(&model, ddp(comm, &model, accumulation)?, loader).until(Length::Epochs(2.0)).run(loss)?;
        weights(&model)
    })
    .unwrap()
}

#[track_caller]
fn assert_near(found: &[f64], expected: &[f64], what: &str) {
    let off = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(found.len() == expected.len() && off <= 1e-11, "{what}: {off:e}");
}

#[test]
fn every_door_shards_as_one_rank_trains() {
    let expected = expected(8, 1);
    for ranks in [2, 3, 4] {
        for (stage, door) in STAGES.into_iter().flat_map(|stage| DOORS.map(|door| (stage, door))) {
            let found = on_ranks(ranks, |comm| trained(comm, door, 8, &config(stage, Policy::Sync)));
            assert_near(&found.unwrap(), &expected, &format!("{door:?}, {stage:?} on {ranks} ranks"));
        }
    }
}

#[test]
fn every_door_that_takes_several_batches_balances() {
    // One rank is known to be slow, and nothing is measured in so short a run.
    let speed = SpeedOptions { calibration: 1000, ..Default::default() };
    let hinted = BalanceOptions { speed_hint: Some((0, 2.0)), speed, ..Default::default() };
    let even = BalanceOptions { policy: BalancePolicy::Sync, ..Default::default() };
    for ranks in [2, 3, 4] {
        for (options, batches) in [(&even, ranks), (&hinted, 2 * ranks - 1)] {
            let (expected, policy) = (expected(2, batches), Policy::Cadence(options.clone()));
            for (stage, door) in STAGES[..3].iter().flat_map(|stage| DOORS[1..].iter().map(move |door| (stage, door))) {
                let found = on_ranks(ranks, |comm| trained(comm, *door, 2, &config(*stage, policy.clone())));
                assert_near(&found.unwrap(), &expected, &format!("{door:?}, {stage:?}, {batches} on {ranks} ranks"));
            }
        }
    }
}

#[test]
fn every_door_makes_local_updates_as_steps_made_by_hand() {
    let updates = LocalUpdates { every: Some(2), ..Default::default() };
    let rules = [
        OuterChoice::LocalSgd,
        OuterChoice::ElasticAveraging(ElasticAveraging { alpha: 0.5 }),
        OuterChoice::SlowMo(SlowMo::default()),
        OuterChoice::DiLoCo(DiLoCo::default()),
    ];
    for ranks in [2, 3, 4] {
        for (number, rule) in rules.into_iter().enumerate() {
            let by_hand = on_ranks(ranks, |comm| {
                let model = Mlp::new(comm.runtime(), 0.0)?;
                let inner = ddp(&(Arc::new(NoOpCommunicator::new(comm.runtime())) as Comm<Cpu>), &model, 1)?;
                let options = updates.clone();
                let step = match rule {
                    OuterChoice::LocalSgd => LocalSteps::new(comm, &model, inner, LocalSgd, options),
                    OuterChoice::ElasticAveraging(rule) => LocalSteps::new(comm, &model, inner, rule, options),
                    OuterChoice::SlowMo(rule) => LocalSteps::new(comm, &model, inner, rule, options),
                    OuterChoice::DiLoCo(rule) => LocalSteps::new(comm, &model, inner, rule, options),
                };
                Trainer::new(&model, step?, loader(comm.runtime())).until(Length::Epochs(2.0)).run(loss)?;
                weights(&model)
            });
            let by_hand = by_hand.unwrap();
            let stages = if number == 0 { &STAGES[..3] } else { &STAGES[..1] };
            for (&stage, door) in stages.iter().flat_map(|stage| DOORS.map(|door| (stage, door))) {
                let config = config(stage, Policy::Async(rule, updates.clone()));
                let found = on_ranks(ranks, |comm| trained(comm, door, 8, &config));
                assert_near(&found.unwrap(), &by_hand, &format!("{door:?}, {rule:?}, {stage:?} on {ranks} ranks"));
            }
        }
    }
}

#[test]
fn doors_take_a_mesh() {
    let expected = expected(8, 1);
    for stage in STAGES {
        let on_mesh = |comm: &Comm<Cpu>, door: Door, policy: &Policy| -> Result<Vec<f64>> {
            let mesh = Mesh::new(comm, ParallelPlan::of([(Axis::Data, 2), (Axis::Shard, 2)])?)?;
            trained(&mesh, door, 8, &config(stage, policy.clone()))
        };
        for door in DOORS {
            let found = on_ranks(4, |comm| on_mesh(comm, door, &Policy::Sync));
            assert_near(&found.unwrap(), &expected, &format!("{door:?}, {stage:?}"));
        }
        // Replicas of two ranks are ranks with twice the examples.
        let updates = LocalUpdates { every: Some(2), ..Default::default() };
        let local = Policy::Async(OuterChoice::SlowMo(SlowMo::default()), updates);
        let found = on_ranks(4, |comm| on_mesh(comm, Door::Steps, &local));
        let plain = config(ZeroStage::None, local);
        let two = on_ranks(2, |comm| trained(comm, Door::Steps, 8, &plain)).unwrap();
        assert_near(&found.unwrap(), &two, &format!("replicas, {stage:?}"));
    }
    let cut = on_ranks(4, |comm| {
        let mesh = Mesh::new(comm, ParallelPlan::of([(Axis::Data, 2), (Axis::Tensor, 2)])?)?;
        let model = Mlp::new(comm.runtime(), 0.0)?;
        mesh.parallelize(&model, &TensorPlan::new().column("a").row("b"))?;
        let mut trainer = Trainer::setup_with(&mesh, &model, adamw(), config(ZeroStage::Optimizer, Policy::Sync))?;
        let mut losses = Vec::new();
        for batch in trainer.epoch(&loader(comm.runtime()), 0)? {
            losses.push(trainer.step(&batch?, loss)?.loss()?);
        }
        Ok(losses)
    });
    let alone = on_ranks(1, |comm| {
        let model = Mlp::new(comm.runtime(), 0.0)?;
        let mut trainer = Trainer::setup_with(comm.runtime(), &model, adamw(), config(ZeroStage::None, Policy::Sync))?;
        let batches = trainer.epoch(&loader(comm.runtime()), 0)?;
        batches.map(|batch| trainer.step(&batch?, loss)?.loss()).collect::<Result<Vec<f64>>>()
    });
    assert_near(&cut.unwrap(), &alone.unwrap(), "a cut model");
}

#[test]
fn what_the_table_refuses_is_refused_by_every_door() {
    let uneven = Policy::Cadence(BalanceOptions::default());
    let canonical = Some(BucketOptions { canonical: true, ..Default::default() });
    let refused = [
        (config(ZeroStage::Parameters, uneven.clone()), ["uneven micro-batches", "exclude each other"]),
        (
            TrainConfig { buckets: canonical.clone(), ..config(ZeroStage::Optimizer, Policy::Sync) },
            ["buckets", "ZeRO stage 1"],
        ),
        (TrainConfig { buckets: canonical, policy: uneven, ..Default::default() }, ["uneven", "canonical"]),
    ];
    for (config, parts) in refused {
        for door in DOORS {
            let error = on_ranks(2, |comm| trained(comm, door, 8, &config)).unwrap_err().to_string();
            assert!(parts.iter().all(|part| error.contains(part)), "{door:?}: {error}");
        }
    }
    let several = config(ZeroStage::None, Policy::Cadence(BalanceOptions::default()));
    let error = on_ranks(2, |comm| trained(comm, Door::Steps, 8, &several)).unwrap_err().to_string();
    assert!(error.contains("`accumulation` is several") && error.contains("step_from"), "{error}");
    let differ = on_ranks(2, |comm| {
        let policy = if comm.rank() == 0 { Policy::Sync } else { Policy::Cadence(BalanceOptions::default()) };
        trained(comm, Door::Epochs, 8, &config(ZeroStage::None, policy))
    });
    assert!(differ.unwrap_err().to_string().contains("the configuration of training"));
}

/// Runs a program on ranks of different devices: CPUs of one, two, … threads.
fn on_different<T: Send>(ranks: usize, program: impl Fn(&Comm<Cpu>) -> Result<T> + Sync) -> Vec<T> {
    Ranks::new(ranks).run(|rank| Ok(Cpu::with_threads(rank + 1)), |comm| program(&comm)).unwrap()
}

/// A loss that takes so many milliseconds for an example.
fn slow(milliseconds: u64) -> impl Fn(&Mlp<Cpu>, &data::Batch<Rows>) -> Result<Loss<Cpu>> {
    move |model, batch| {
        sleep(Duration::from_millis(milliseconds * batch.count as u64));
        loss(model, batch)
    }
}

/// The numbers of examples that ranks read in an epoch, and the summary recorded.
fn read_by(ranks: usize, stage: ZeroStage, shares: Shares, weighting: Weighting) -> (Vec<usize>, Vec<f64>, Memory) {
    let memory = Memory::default();
    let all = on_different(ranks, |comm| {
        let model = Mlp::new(comm.runtime(), 0.0)?;
        let slow = slow([1, 12, 3, 3][comm.rank()]);
        let read = std::cell::Cell::new(0);
        let config = TrainConfig { weighting, shares: shares.clone(), ..config(stage, Policy::Sync) };
        let _report = Trainer::setup_with(comm, &model, adamw(), config)?
            .with_loader(loader(comm.runtime()).batch(12))
            .until(Length::Epochs(3.0))
            .record_every(Interval::Steps(6))
            .sink(memory.clone())
            .run(|model, batch| {
                read.set(read.get() + if batch.epoch == 2 { batch.count } else { 0 });
                slow(model, batch)
            })?;
        Ok((read.get(), weights(&model)?))
    });
    let weights = all[0].1.clone();
    (all.into_iter().map(|(read, _)| read).collect(), weights, memory)
}

#[test]
fn where_devices_differ_shares_follow_speeds() {
    let expected = on_ranks(1, |comm| {
        let model = Mlp::new(comm.runtime(), 0.0)?;
        let loader = loader(comm.runtime()).batch(12);
        Trainer::new(&model, ddp(comm, &model, 1)?, loader).until(Length::Epochs(3.0)).run(loss)?;
        weights(&model)
    });
    let expected = expected.unwrap();
    for (ranks, stage) in [2, 3, 4].into_iter().flat_map(|ranks| STAGES[..3].iter().map(move |stage| (ranks, *stage))) {
        let (read, weights, memory) = read_by(ranks, stage, Shares::default(), Weighting::ByWeight);
        assert_eq!(read.iter().sum::<usize>(), 37, "{read:?}");
        assert!(read[0] > 2 * read[1], "the first rank is 12 times as fast as the second: {read:?}");
        // The epoch has three batches with an example for each rank, and one of one example.
        assert!(read[1] >= 3, "{read:?}");
        assert_near(&weights, &expected, &format!("{stage:?} on {ranks} ranks"));
        let summary = memory.text("devices").unwrap();
        assert!(summary.contains("shares of a batch: ") && summary.matches(" %").count() == ranks);
    }
    for (shares, weighting, stage) in [
        (Shares::Even, Weighting::ByWeight, ZeroStage::None),
        (Shares::default(), Weighting::PerMicroBatch, ZeroStage::None),
        (Shares::default(), Weighting::ByWeight, ZeroStage::Parameters),
    ] {
        let (even, weights, memory) = read_by(2, stage, shares, weighting);
        assert_eq!(even, [19, 18], "{stage:?}, {weighting:?}");
        if weighting == Weighting::ByWeight {
            assert_near(&weights, &expected, "even shares");
        }
        let summary = memory.text("devices").unwrap();
        assert!(summary.contains("these differ") && !summary.contains("shares of a batch"), "{summary}");
    }
}

#[test]
fn given_shares_are_the_first_ones_on_any_devices() {
    let shares = |ratios: &[f64]| Shares::BySpeed(SpeedShares::of(ratios.to_vec()).unwrap());
    let expected = expected(8, 1);
    for ranks in [2, 3, 4] {
        for (stage, door) in STAGES.into_iter().flat_map(|stage| DOORS.map(|door| (stage, door))) {
            let config = TrainConfig { shares: shares(&[5.0, 1.0, 1.0, 1.0][..ranks]), ..config(stage, Policy::Sync) };
            let found = on_ranks(ranks, |comm| trained(comm, door, 8, &config));
            assert_near(&found.unwrap(), &expected, &format!("{door:?}, {stage:?} on {ranks} ranks"));
        }
    }
    on_ranks(2, |comm| {
        let model = Mlp::new(comm.runtime(), 0.0)?;
        let config = TrainConfig { shares: shares(&[3.0, 1.0]), ..Default::default() };
        let trainer = Trainer::setup_with(comm, &model, adamw(), config)?;
        assert!(trainer.summary().ends_with("shares of a batch: 75 %, 25 %"), "{}", trainer.summary());
        let first = trainer.epoch(&loader(comm.runtime()), 0)?.next().transpose()?;
        assert_eq!(first.map(|batch| (batch.count, batch.total)), Some(([6, 2][comm.rank()], 8)));
        Ok(())
    })
    .unwrap();
    let wrong = TrainConfig { shares: shares(&[3.0, 1.0]), ..Default::default() };
    let error = on_ranks(3, |comm| trained(comm, Door::Steps, 8, &wrong)).unwrap_err().to_string();
    assert!(error.contains("number of shares"), "{error}");
}
