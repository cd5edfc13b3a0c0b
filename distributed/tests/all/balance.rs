//! Steps of uneven counts: against one rank with all of their batches, and by clocks that run as fast as a test says.

use adaptive::balance::BalancePolicy;

use crate::prelude::*;

fn model(rt: &Cpu) -> Result<Mlp<Cpu>> {
    Mlp::new(&Init::new(rt, 3).dtype(DType::F64))
}

/// The number of micro-batches of each rank: the third takes none.
fn counts(ranks: usize) -> Vec<usize> {
    (0..ranks).map(|rank| (1 + rank * 2) % 5).collect()
}

/// Steps on this rank's batches, the numbers of which follow those of the ranks before.
pub fn uneven(comm: &Comm<Cpu>, model: &Mlp<Cpu>, mut step: TrainStep<Cpu>) -> Result<(Vec<f64>, f64)> {
    let counts = counts(comm.size());
    let (first, most) = (counts[..comm.rank()].iter().sum::<usize>(), counts.iter().copied().max().unwrap_or(1));
    let mut norm = 0.0;
    for k in 0..3 {
        let own = counts[comm.rank()];
        let loss = |i: usize| {
            model.loss(comm.runtime(), k, &[(first + i) % EXAMPLES, (first + i + 1) % EXAMPLES][..1 + i % 2])
        };
        norm = step.step_uneven(own, most, loss)?.grad_norm()?.unwrap_or(0.0);
    }
    Ok((weights(model)?, norm))
}

#[test]
fn a_step_of_uneven_counts_is_that_of_one_rank() {
    for n in [1, 2, 3, 5] {
        let counts = counts(n);
        let rt = cpu(0).unwrap();
        let one = model(&rt).unwrap();
        let all = TrainingConfig { accumulation: counts.iter().sum(), ..config() };
        let mut step =
            TrainStep::builder(&NoOpCommunicator::new(&rt), &one).optimizer(adamw()).config(all).build().unwrap();
        // Rank after rank, as its batches are numbered.
        let batches: Vec<(usize, usize)> = (0..n).flat_map(|r| (0..counts[r]).map(move |i| (r, i))).collect();
        let mut norm = None;
        for k in 0..3 {
            let metrics = step.step(|j| {
                let (rank, i) = batches[j];
                let first = counts[..rank].iter().sum::<usize>();
                one.loss(&rt, k, &[(first + i) % EXAMPLES, (first + i + 1) % EXAMPLES][..1 + i % 2])
            });
            norm = metrics.unwrap().grad_norm().unwrap();
        }
        let expected = weights(&one).unwrap();
        let close = |(weights, own): &(Vec<f64>, f64), how: &str| {
            let off = weights.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(off < 1e-12 && (own - norm.unwrap()).abs() < 1e-12, "{how} on {n}: {off:e}");
        };
        let zero = |options: fn() -> ZeroOptions| {
            Ranks::new(n).run(cpu, move |comm| {
                let model = model(comm.runtime())?;
                let builder = TrainStep::builder(&comm, &model).optimizer(adamw()).config(config());
                uneven(&comm, &model, builder.zero(options()).build()?)
            })
        };
        let ddp = Ranks::new(n).run(cpu, |comm| {
            let model = model(comm.runtime())?;
            uneven(&comm, &model, TrainStep::builder(&comm, &model).optimizer(adamw()).config(config()).build()?)
        });
        ddp.unwrap().iter().for_each(|rank| close(rank, "buckets"));
        let state = zero(|| ZeroOptions { stage: ZeroStage::Optimizer, ..Default::default() });
        state.unwrap().iter().for_each(|rank| close(rank, "stage 1"));
        let once = zero(|| ZeroOptions { stage: ZeroStage::Gradients, reduce_once: true, ..Default::default() });
        once.unwrap().iter().for_each(|rank| close(rank, "stage 2"));
    }
}

#[test]
fn what_exchanges_in_every_pass_is_refused() {
    // The error of rank 0, which is not always the rank that is wrong.
    let refused = |make: fn(&Comm<Cpu>, &Mlp<Cpu>) -> Result<()>| {
        let outcomes = Ranks::new(2).outcomes(cpu, |comm| make(&comm, &model(comm.runtime())?));
        outcomes.unwrap().swap_remove(0).unwrap_err().to_string()
    };
    let stages = refused(|comm, model| {
        let step = TrainStep::builder(comm, model).optimizer(adamw()).zero(ZeroStage::Parameters).build()?;
        Balanced::new(step, BalanceOptions::default()).map(drop)
    });
    assert!(stages.contains("exchange in every pass"), "{stages}");
    let canonical = refused(|comm, model| {
        let buckets = BucketOptions { canonical: true, ..Default::default() };
        let mut step = TrainStep::builder(comm, model).optimizer(adamw()).buckets(buckets).build()?;
        step.step_uneven(1, 2, |_| model.loss(comm.runtime(), 0, &[0])).map(drop)
    });
    assert!(canonical.contains("no canonical order"), "{canonical}");
    let none = refused(|comm, model| {
        let mut step = TrainStep::builder(comm, model).optimizer(adamw()).build()?;
        step.step_uneven(comm.rank() + 1, 1, |_| model.loss(comm.runtime(), 0, &[0])).map(drop)
    });
    assert!(none.contains("must be at most 1"), "{none}");
    let differ = refused(|comm, model| {
        let step = TrainStep::builder(comm, model).optimizer(adamw()).build()?;
        Balanced::new(step, BalanceOptions { anchor: 1 + comm.rank(), ..Default::default() }).map(drop)
    });
    assert!(differ.contains("the balancing of steps"), "{differ}");
}

/// The last batch of an epoch has one reader that counts; the other ranks compute it for nothing.
#[test]
fn a_rank_without_a_batch_reads_the_one_before() {
    let rows = CountedRows { count: 2, rows: 3 };
    let read = Ranks::new(2).run(cpu, |comm| {
        let model = model(comm.runtime())?;
        let step = TrainStep::builder(&comm, &model).optimizer(adamw()).build()?;
        let mut step = Balanced::new(step, BalanceOptions::default())?;
        let (mut epoch, mut read) = (BatchRanges::new(1), Vec::new());
        let before = set_counted_rows(Some(rows));
        step.step(&mut epoch, |batch| {
            read.push(batch);
            model.loss(comm.runtime(), 0, &[0])
        })?;
        assert_eq!(set_counted_rows(before), Some(rows));
        Ok(read)
    });
    assert_eq!(read.unwrap(), [[0], [0]]);
}

/// An exchange takes as long as on the rank that came to it last: the others wait for that rank.
#[test]
fn what_one_rank_waits_for_is_no_slow_exchange() {
    let anchors = Ranks::new(2).run(cpu, |comm| {
        let model = model(comm.runtime())?;
        let (rank, mut calls, mut now) = (comm.rank() as u64, 0, 0);
        // The second of three calls is at the end of the computation, the third at the end of the exchange.
        let clock = move || {
            calls += 1;
            now += [300 * rank, 0, 100][calls % 3];
            Duration::from_millis(now)
        };
        let step = TrainStep::builder(&comm, &model).optimizer(adamw()).build()?;
        let options = BalanceOptions { policy: BalancePolicy::FollowSpeeds, max_anchor: 8, ..Default::default() };
        let mut step = Balanced::with_clock(step, options, clock)?;
        let mut epoch = BatchRanges::new(20);
        for _ in 0..6 {
            step.step(&mut epoch, |batch| model.loss(comm.runtime(), batch as usize, &[0]))?;
        }
        Ok(step.balancer().anchor())
    });
    assert_eq!(anchors.unwrap(), [1, 1]);
}

#[test]
fn ranks_of_different_speeds_arrive_together_and_read_every_batch_once() {
    const BATCHES: u64 = 400;
    let speeds = [100, 250, 100];
    let all = Ranks::new(3).run(cpu, |comm| {
        let rt = comm.runtime();
        let model = Linear::new(&Init::new(rt, 1), 2, 1)?;
        // A clock that goes on by what this rank takes for a batch.
        let clock = Arc::new(AtomicU64::new(0));
        let now = clock.clone();
        let step = TrainStep::builder(&comm, &model).optimizer(adamw()).build()?;
        let options = BalanceOptions { anchor: 4, max_anchor: 4, ..Default::default() };
        let time = move || Duration::from_millis(now.load(Ordering::Relaxed));
        let mut step = Balanced::with_clock(step, options, time)?;
        let (mut epoch, mut read) = (BatchRanges::new(BATCHES), Vec::new());
        let (mut longest, mut spent, mut steps) = (0, 0, 0);
        loop {
            let before = clock.load(Ordering::Relaxed);
            let metrics = step.step(&mut epoch, |batch| {
                clock.fetch_add(speeds[comm.rank()], Ordering::Relaxed);
                read.push(batch);
                use nn::Forward;
                use numcore::ops::ReduceOps;
                let x = autograd::Var::new(numcore::Tensor::full(rt, [1, 2], DType::F32, batch as f64 * 1e-3)?);
                distributed::train::Loss::sum(model.forward(&x)?.sum_all()?, 1.0)
            })?;
            if metrics.is_none() {
                break;
            }
            // A step takes as long as on the rank that takes longest. The first three find the counts.
            steps += 1;
            let own = clock.load(Ordering::Relaxed) - before;
            let step_time = comm.exchange_equal(own.to_le_bytes())?.into_iter().map(u64::from_le_bytes).max();
            if steps > 3 {
                longest += step_time.unwrap_or(0);
                spent += own;
            }
        }
        Ok((read, longest, spent, step.balancer().counts().to_vec()))
    });
    let all = all.unwrap();
    let mut read: Vec<u64> = all.iter().flat_map(|(read, ..)| read.clone()).collect();
    read.sort_unstable();
    assert_eq!(read, (0..BATCHES).collect::<Vec<_>>());
    assert!(all.iter().all(|(.., counts)| *counts == [10, 4, 10]), "{:?}", all[0].3);
    let (longest, busy) = (all[0].1, all.iter().map(|(_, _, spent, _)| spent).sum::<u64>());
    assert!(busy as f64 >= 0.95 * 3.0 * longest as f64, "{busy} of {}", 3 * longest);
}
