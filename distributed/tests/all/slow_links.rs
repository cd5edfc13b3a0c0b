//! A slow network changes when values arrive, and nothing else; and who waits for what can be told by name.

use distributed::comm::{Link, SlowCommunicator};

use crate::{data_parallel::small, prelude::*, zero_stages::options};

/// Longer than any test.
const NEVER: Duration = Duration::from_secs(100_000);

fn slow(comm: Comm<Cpu>, latency: Duration, bandwidth: f64) -> Result<Comm<Cpu>> {
    Ok(Arc::new(SlowCommunicator::new(comm, Link { latency, bandwidth })?))
}

fn zeros(comm: &Comm<Cpu>, numel: usize) -> Result<TensorMut<Cpu>> {
    TensorMut::zeros(comm.runtime(), [numel].into(), DType::F32)
}

fn train(trainer: &mut TrainStep<Cpu>, model: &Mlp<Cpu>, comm: &Comm<Cpu>) -> Result<Trace> {
    let mut trace = Trace::default();
    for step in 0..STEPS {
        let metrics = trainer.step(|_| model.loss(comm.runtime(), step, &own(comm)))?;
        trace.losses.push(metrics.loss()?);
        trace.weights.push(weights(model)?);
    }
    Ok(trace)
}

#[test]
fn values_are_those_of_a_fast_network() {
    let run = |link: Option<Link>| {
        let ranks = Ranks::new(3).run(cpu, |comm| {
            let comm = link.map_or(Ok(comm.clone()), |l| slow(comm, l.latency, l.bandwidth))?;
            let model = Mlp::new(&Init::new(comm.runtime(), 0))?;
            train(&mut bucketed(&comm, &model, config(), small())?, &model, &comm)
        });
        ranks.unwrap()
    };
    assert_eq!(run(Some(Link { latency: Duration::from_micros(300), bandwidth: 1e6 })), run(None));
}

#[test]
fn a_call_takes_its_time_on_the_link_that_all_groups_share() {
    let latency = Duration::from_millis(4);
    let took = Ranks::new(2).run(cpu, |comm| {
        let comm = slow(comm, latency, 1e6)?;
        let group = comm.split(Some(0), comm.rank())?.unwrap();
        comm.barrier()?;
        let begun = Instant::now();
        let first = comm.all_reduce(zeros(&comm, 1000)?, ReduceOp::Sum)?;
        let second = group.all_reduce(zeros(&group, 500)?, ReduceOp::Sum)?;
        second.wait()?;
        assert!(first.is_done());
        first.wait()?;
        Ok(begun.elapsed())
    });
    // Two latencies, and 4000 and 2000 bytes at a megabyte a second: no less, however fast the machine is.
    assert!(took.unwrap().into_iter().all(|t| t >= 2 * latency + Duration::from_millis(6)));
}

#[test]
fn a_call_is_not_done_before_its_time() {
    let done = Ranks::new(2).timeout(2 * NEVER).run(cpu, |comm| {
        let far = slow(comm.clone(), NEVER, 1e9)?;
        let work = far.all_reduce(zeros(&far, 4)?, ReduceOp::Sum)?;
        comm.barrier()?;
        Ok(work.is_done())
    });
    assert_eq!(done.unwrap(), [false, false]);
}

#[test]
fn an_error_comes_at_once() {
    let outcomes = Ranks::new(2).timeout(2 * NEVER).outcomes(cpu, |comm| {
        if comm.rank() == 1 {
            comm.abort("out of ideas");
        }
        let far = slow(comm, NEVER, 1e9)?;
        far.all_reduce(zeros(&far, 4)?, ReduceOp::Sum)?.wait().map(|_| ())
    });
    for outcome in outcomes.unwrap() {
        assert!(outcome.unwrap_err().to_string().contains("out of ideas"));
    }
}

#[test]
fn what_takes_longer_than_a_call_may_is_an_error_on_all() {
    let outcomes = Ranks::new(2).outcomes(cpu, |comm| {
        // A slip of nine digits: 1.25 in place of 1.25e9 bytes a second.
        let comm = if comm.rank() == 0 { slow(comm, Duration::ZERO, 1.25)? } else { comm };
        comm.all_reduce(zeros(&comm, 1000)?, ReduceOp::Sum)?.wait().map(|_| ())
    });
    refused(outcomes.unwrap(), &["4000 bytes", "60s", "1.25"]);
}

#[test]
fn a_link_that_carries_nothing_is_refused() {
    for bandwidth in [0.0, -1.0, f64::NAN] {
        let refused = Ranks::new(1).run(cpu, |comm| slow(comm, Duration::ZERO, bandwidth).map(|_| ()));
        assert!(refused.unwrap_err().to_string().contains("bandwidth"));
    }
    let free = Ranks::new(2).run(cpu, |comm| slow(comm, Duration::ZERO, f64::INFINITY)?.barrier());
    assert!(free.is_ok());
}

/// What a rank sums while it trained.
struct Counted {
    by_name: Vec<(Option<String>, Traffic)>,
    total: Traffic,
}

impl Counted {
    fn names(&self) -> Vec<&str> {
        self.by_name.iter().filter_map(|(name, _)| name.as_deref()).collect()
    }
}

/// What each of two ranks sums, with what `program` gave.
fn counted<T: Send>(program: impl Fn(&Comm<Cpu>, &Mlp<Cpu>) -> Result<T> + Sync) -> Vec<(Counted, T)> {
    let ranks = Ranks::new(2).run(cpu, |comm| {
        let counted = Arc::new(CountingCommunicator::new(comm));
        let comm: Comm<Cpu> = counted.clone();
        let model = Mlp::new(&Init::new(comm.runtime(), 0))?;
        let value = program(&comm, &model)?;
        let by_name = counted.by_name().into_iter().map(|(of, traffic)| (of.map(|of| of.to_string()), traffic));
        Ok((Counted { by_name: by_name.collect(), total: counted.total() }, value))
    });
    ranks.unwrap()
}

#[test]
fn buckets_are_counted_by_name() {
    let power = GradientSums { options: small(), power: Some(PowerSgd { min_rate: 0.0, ..Default::default() }) };
    let canonical = BucketOptions { canonical: true, ..small() };
    for options in [small().into(), power, canonical.into()] {
        let ranks = counted(|comm, model| {
            let training = TrainingConfig { max_norm: None, ..config() };
            let mut trainer = bucketed(comm, model, training, options.clone())?;
            train(&mut trainer, model, comm)?;
            Ok(data_parallel(&trainer).num_buckets())
        });
        for (rank, buckets) in ranks {
            assert!(buckets > 1);
            assert_eq!(rank.names(), (0..buckets).map(|k| format!("bucket {k}")).collect::<Vec<_>>());
            let calls = rank.by_name.iter().map(|(_, t)| t.calls).sum::<u64>();
            let sent = rank.by_name.iter().map(|(_, t)| t.sent).sum::<u64>();
            assert_eq!((calls, sent), (rank.total.calls, rank.total.sent));
            for (_, traffic) in rank.by_name.iter().filter(|(name, _)| name.is_some()) {
                assert!(traffic.calls >= STEPS as u64 && traffic.sent > 0);
            }
        }
    }
}

#[test]
fn units_are_counted_by_name() {
    for (units, expected) in
        [(UnitOf::children(), vec!["unit `a`", "unit `b`", "unit `c`"]), (UnitOf::whole(), vec!["the root unit"])]
    {
        for stage in ZeroStage::ALL {
            let ranks = counted(|comm, model| {
                let mut trainer = sharded(comm, model, config(), options(stage, units.clone()))?;
                for step in 0..STEPS {
                    trainer.step(|_| model.loss(comm.runtime(), step, &own(comm)))?;
                }
                Ok(())
            });
            for (rank, ()) in ranks {
                assert_eq!(rank.names(), expected);
                assert!(rank.by_name.iter().all(|(_, t)| t.calls >= 2 * STEPS as u64 - 1));
            }
        }
    }
}
