//! The loop over ranks of different speeds, which take whole batches in turn.

use adaptive::balance::{BalanceOptions, BalancePolicy, Balanced};

use crate::{common::*, prelude::*, worlds::elastic};

type Balancing = Balanced<TrainStep<Cpu>>;

/// Batches of 2 of 37 examples: 19 of them, of which the last has one.
fn batches(rt: &Cpu) -> data::Loader<Rows> {
    loader(rt).batch(2)
}

/// A step whose rank takes `speed` seconds for a batch, and the clock that says so.
fn balanced(comm: &Comm<Cpu>, model: &Mlp<Cpu>, speed: u64, options: BalanceOptions) -> Result<(Balancing, impl Fn())> {
    let clock = Arc::new(AtomicU64::new(0));
    let now = clock.clone();
    let step =
        Balanced::with_clock(ddp(comm, model, 1)?, options, move || Duration::from_secs(now.load(Ordering::Relaxed)))?;
    let tick = move || {
        clock.fetch_add(speed, Ordering::Relaxed);
    };
    Ok((step, tick))
}

/// What was read: the first inputs of all examples, in bits.
type Read = Mutex<Vec<u64>>;

fn read_of(batch: &data::Batch<Rows>) -> Result<Vec<u64>> {
    Ok(batch.data.to_vec::<f64>()?.chunks(4).map(|row| row[0].to_bits()).collect())
}

/// Every example so many times.
fn require_each(read: &Read, times: usize, what: &str) {
    let mut read = read.lock().unwrap().clone();
    read.sort_unstable();
    let mut all: Vec<u64> = examples(37).iter().flat_map(|row| vec![row[0].to_bits(); times]).collect();
    all.sort_unstable();
    assert_eq!(read, all, "{what}");
}

#[test]
fn every_example_is_read_once_in_each_epoch_and_where_a_run_goes_on() {
    let speeds = [1, 3, 1];
    for ranks in [1, 2, 3] {
        let (read, folder) = (Read::default(), Scratch::new("balanced"));
        let program = |comm: &Comm<Cpu>, length: Length| {
            let model = Mlp::new(comm.runtime(), 0.0)?;
            let options = BalanceOptions { max_anchor: 1, ..Default::default() };
            let (step, tick) = balanced(comm, &model, speeds[comm.rank()], options)?;
            let report = Trainer::new(&model, step, batches(comm.runtime()))
                .until(length)
                .with(Evaluate::on(held_out(comm.runtime())).every(Interval::Epochs(1.0)))
                .with(Checkpoints::in_folder(&folder.0).ignore_signals())
                .resume(Resume::IfThere)
                .run(|model, batch| {
                    tick();
                    if autograd::is_grad_enabled() {
                        read.lock().unwrap().extend(read_of(batch)?);
                    }
                    loss(model, batch)
                })?;
            let counts = report.step.balancer().counts().to_vec();
            Ok((report.progress.tokens, report.evaluated["validation/loss"].to_bits(), counts))
        };
        // It stops within an epoch, and another run goes on from there.
        on_ranks(ranks, |comm| program(comm, Length::Steps(4))).unwrap();
        let (tokens, _, counts) = on_ranks(ranks, |comm| program(comm, Length::Epochs(3.0))).unwrap();
        assert_eq!(tokens, 3.0 * 37.0, "{ranks} ranks");
        assert_eq!(counts, [&[1][..], &[3, 1], &[3, 1, 3]][ranks - 1], "{ranks} ranks");
        require_each(&read, 3, &format!("{ranks} ranks"));
    }
}

#[test]
fn even_steps_are_those_of_one_rank_that_accumulates() {
    let train = |comm: &Comm<Cpu>, step: &mut dyn FnMut(&Mlp<Cpu>) -> Result<Vec<f64>>| {
        let model = Mlp::new(comm.runtime(), 0.0)?;
        step(&model)
    };
    for ranks in [2, 3, 5] {
        let all = on_ranks(ranks, |comm| {
            train(comm, &mut |model| {
                let options = BalanceOptions { policy: BalancePolicy::Sync, ..Default::default() };
                let (step, _) = balanced(comm, model, 1, options)?;
                Trainer::new(model, step, batches(comm.runtime())).until(Length::Steps(9)).run(loss)?;
                weights(model)
            })
        });
        let one = on_ranks(1, |comm| {
            train(comm, &mut |model| {
                let loader = batches(comm.runtime()).workers(0);
                Trainer::new(model, ddp(comm, model, ranks)?, loader).until(Length::Steps(9)).run(loss)?;
                weights(model)
            })
        });
        let off = all.unwrap().iter().zip(&one.unwrap()).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(off < 1e-12, "{ranks} ranks: {off:e}");
    }
}

#[test]
fn what_a_rank_without_a_batch_records_counts_for_nothing() {
    for ranks in [1, 2, 3, 5] {
        let memory = Memory::default();
        on_ranks(ranks, |comm| {
            let model = Mlp::new(comm.runtime(), 0.0)?;
            let options = BalanceOptions { policy: BalancePolicy::Sync, ..Default::default() };
            let (step, _) = balanced(comm, &model, 1, options)?;
            Trainer::new(&model, step, batches(comm.runtime()))
                .until(Length::Epochs(1.0))
                .record_every(Interval::Epochs(1.0))
                .sink(memory.clone())
                .run(|model, batch| {
                    let rows = batch.data.to_vec::<f64>()?;
                    let sum: f64 = rows.chunks(4).take(batch.count).map(|row| row[3]).sum();
                    record_scalar("target", sum / batch.count as f64);
                    loss(model, batch)
                })?;
            Ok(())
        })
        .unwrap();
        let expected = examples(37).iter().map(|row| row[3]).sum::<f64>() / 37.0;
        let [(_, mean)] = memory.of("target")[..] else { panic!("{ranks} ranks: {:?}", memory.of("target")) };
        assert!((mean - expected).abs() < 1e-12, "{ranks} ranks: {mean}, {expected}");
    }
}

#[test]
fn an_elastic_run_balances_in_each_world() {
    let outcomes = elastic(3, 1, |world| {
        let comm = world.comm()?;
        let model = Mlp::new(comm.runtime(), 0.0)?;
        let options = BalanceOptions { max_anchor: 1, ..Default::default() };
        let (step, tick) = balanced(&comm, &model, [1, 3, 1][comm.rank()], options)?;
        let (generation, rank, taken) = (world.generation(), comm.rank(), std::cell::Cell::new(0));
        let report = Trainer::new(&model, step, batches(comm.runtime()))
            .until(Length::Epochs(4.0))
            .elastic(world, Interval::Steps(1))
            .run(|model, batch| {
                tick();
                taken.set(taken.get() + 1);
                if (generation, rank, taken.get()) == (0, 2, 9) {
                    return Err(Error::argument("the machine", "is gone"));
                }
                loss(model, batch)
            })?;
        Ok((comm.size(), report.progress.tokens, report.step.balancer().counts().to_vec()))
    });
    let done: Vec<_> = outcomes.into_iter().flatten().collect();
    assert_eq!(done, vec![(2, 4.0 * 37.0, vec![3, 1]); 2]);
}
