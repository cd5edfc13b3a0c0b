//! `TrainStep::run` and `idle` where a step has several micro-batches: every batch counts once, and ranks may run out at any of them.

use crate::prelude::*;

fn two() -> TrainingConfig {
    TrainingConfig { accumulation: 2, ..config() }
}

/// A rank's batches: more on later ranks, an odd number on some.
fn batches(rank: usize) -> usize {
    2 * rank + 1
}

/// One rank that computes the batches of all `n`: in step `s` those with the numbers `2s` and `2s + 1`.
fn alone(n: usize) -> Trace {
    let rt = Cpu::with_threads(1);
    let model = Mlp::new(&Init::new(&rt, 0).dtype(DType::F64)).unwrap();
    let config = TrainingConfig { accumulation: 2 * n, ..config() };
    let mut trainer = simple(&rt, &model, config).unwrap();
    let mut trace = Trace::default();
    for step in 0..batches(n - 1).div_ceil(2) {
        let micro = |k: usize| {
            let (rank, batch) = (k % n, 2 * step + k / n);
            let loss = model.loss(&rt, batch, &[rank])?;
            if batch < batches(rank) { Ok(loss) } else { Loss::sum(loss.total().mul(0.0)?, 0.0) }
        };
        trace.losses.push(trainer.step(micro).unwrap().loss().unwrap());
    }
    trace.weights.push(weights(&model).unwrap());
    trace
}

/// The trainers, and one that adds in canonical order.
fn trainers() -> Vec<(ZeroStage, Unused, bool)> {
    let all = STAGES.into_iter().flat_map(|how| [(how, Unused::Error, false), (how, Unused::Allow, false)]);
    all.chain([(ZeroStage::None, Unused::Error, true), (ZeroStage::None, Unused::Allow, true)]).collect()
}

fn trainer(comm: &Comm<Cpu>, model: &Mlp<Cpu>, (how, unused, canonical): (ZeroStage, Unused, bool)) -> Result<Any> {
    if canonical {
        let options = BucketOptions { canonical, unused, ..Default::default() };
        return Ok(Any(bucketed(comm, model, two(), options)?));
    }
    Any::unused(comm, model, how, two(), unused)
}

#[test]
fn every_batch_is_computed_once() {
    let calls = AtomicUsize::new(0);
    Ranks::new(1)
        .run(cpu, |comm| {
            let model = Mlp::new(&Init::new(comm.runtime(), 0))?;
            let mut trainer = Any::new(&comm, &model, ZeroStage::None, two())?;
            let (mut seen, mut losses) = (Vec::new(), Vec::new());
            let loss = |&batch: &usize| {
                calls.fetch_add(1, Ordering::Relaxed);
                seen.push(batch);
                model.loss(comm.runtime(), batch, &[0])
            };
            trainer.run(0..5, loss, |loss| losses.push(loss))?;
            // Without `Unused::Allow` the last step's second micro-batch is its first one again, for nothing.
            assert_eq!((seen, losses.len()), (vec![0, 1, 2, 3, 4, 4], 3));
            Ok(())
        })
        .unwrap();
}

#[test]
fn ranks_that_run_out_take_part_in_every_micro_batch() {
    for n in [1, 2, 3] {
        let one = alone(n);
        for way in trainers() {
            let many = everywhere(n, |comm| {
                let model = Mlp::new(&Init::new(comm.runtime(), 0).dtype(DType::F64))?;
                let mut trainer = trainer(&comm, &model, way)?;
                let mut trace = Trace::default();
                let loss = |&batch: &usize| model.loss(comm.runtime(), batch, &[comm.rank()]);
                trainer.run(0..batches(comm.rank()), loss, |loss| trace.losses.push(loss))?;
                trace.weights.push(trainer.weights(&model)?);
                Ok(trace)
            });
            let off = difference(&many, &one);
            assert!(off <= 1e-11, "{n} ranks, {way:?}: {off:e}");
        }
    }
}

#[test]
fn a_rank_idles_through_a_whole_step() {
    let one = {
        let rt = Cpu::with_threads(1);
        let model = Mlp::new(&Init::new(&rt, 0).dtype(DType::F64)).unwrap();
        let mut trainer = simple(&rt, &model, two()).unwrap();
        model.freeze_where(|name| name == "b.weight");
        (0..2).for_each(|_| _ = trainer.step(|k| model.loss(&rt, k, &[0, 1])).unwrap());
        Trace { weights: vec![weights(&model).unwrap()], ..Default::default() }
    };
    let may_idle = |way: &(ZeroStage, Unused, bool)| way.1 == Unused::Allow || way.0 != ZeroStage::Parameters;
    for way in trainers().into_iter().filter(may_idle) {
        for n in [2, 3] {
            let many = everywhere(n, |comm| {
                let model = Mlp::new(&Init::new(comm.runtime(), 0).dtype(DType::F64))?;
                let mut trainer = trainer(&comm, &model, way)?;
                // A matrix, which would decay where it took part.
                model.freeze_where(|name| name == "b.weight");
                for step in 0..2 {
                    // Another rank works in each step.
                    match comm.rank() == step {
                        true => trainer.step_with(|k| model.loss(comm.runtime(), k, &[0, 1]))?,
                        false => trainer.idle()?,
                    };
                }
                Ok(Trace { weights: vec![trainer.weights(&model)?], ..Default::default() })
            });
            let off = difference(&many, &one);
            assert!(off <= 1e-11, "{n} ranks, {way:?}: {off:e}");
        }
    }
}

#[test]
fn an_error_of_the_observer_reaches_all_ranks() {
    let outcomes = Ranks::new(3).outcomes(cpu, |comm| {
        let model = Mlp::new(&Init::new(comm.runtime(), 0))?;
        let mut trainer = bucketed(&comm, &model, config(), BucketOptions::default())?;
        let stop = |_| match comm.rank() {
            1 => Err(Error::argument("an observer", "stop here")),
            _ => Ok(()),
        };
        let ran = trainer.run(0..9, |&batch: &usize| model.loss(comm.runtime(), batch, &[0]), stop);
        // The rank itself goes on: the others know why there is nothing to go on with.
        Ok([ran.unwrap_err().to_string(), comm.barrier().unwrap_err().to_string()])
    });
    for outcome in outcomes.unwrap() {
        let errors = outcome.unwrap();
        assert!(errors.iter().all(|error| error.contains("stop here")), "{errors:?}");
    }
}

#[test]
fn more_micro_batches_than_the_most_on_one_rank_are_an_error_of_all_ranks() {
    let outcomes = Ranks::new(3).outcomes(cpu, |comm| {
        let model = Mlp::new(&Init::new(comm.runtime(), 0))?;
        let mut trainer = bucketed(&comm, &model, config(), BucketOptions::default())?;
        let own = if comm.rank() == 1 { 3 } else { 1 };
        let ran = trainer.step_uneven(own, 2, |_| model.loss(comm.runtime(), 0, &[0]));
        // The rank itself goes on.
        Ok([ran.map(drop).unwrap_err().to_string(), comm.barrier().unwrap_err().to_string()])
    });
    for outcome in outcomes.unwrap() {
        let errors = outcome.unwrap();
        assert!(errors.iter().all(|error| error.contains("is 3, and must be at most 2")), "{errors:?}");
    }
}
