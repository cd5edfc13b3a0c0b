//! Ranks that train by themselves and meet: against data parallelism, the formulas of the papers, and themselves
//! without a break.

use distributed::strategy::BatchShare;

use crate::prelude::*;

pub const EXAMPLES: usize = 13;
pub const SGD: f64 = 0.05;

pub fn model(rt: &Cpu) -> Result<Mlp<Cpu>> {
    Mlp::new(&Init::new(rt, 3).dtype(DType::F64))
}

pub fn sgd(rt: &Cpu, model: &Mlp<Cpu>) -> Result<TrainStep<Cpu>> {
    let config = SgdConfig { lr: SGD, momentum: 0.9, weight_decay: 0.01, ..Default::default() };
    TrainStep::builder(&NoOpCommunicator::new(rt), model).optimizer(config).build()
}

pub fn adam(rt: &Cpu, model: &Mlp<Cpu>) -> Result<TrainStep<Cpu>> {
    TrainStep::builder(&NoOpCommunicator::new(rt), model).optimizer(adamw()).build()
}

pub fn every(steps: u64) -> LocalUpdates {
    LocalUpdates { every: Some(steps), ..LocalUpdates::default() }
}

/// The weights after some steps of each rank on its share of the examples.
pub fn train(
    comm: &Comm<Cpu>,
    rule: impl OuterRule<Cpu> + 'static,
    options: LocalUpdates,
    steps: usize,
    share: impl Fn(usize, usize) -> Vec<usize>,
) -> Result<Vec<f64>> {
    let (rt, model) = (comm.runtime(), model(comm.runtime())?);
    let mut step = LocalSteps::new(comm, &model, adam(rt, &model)?, rule, options)?;
    for k in 0..steps {
        step.step(|_| model.loss(rt, k, &share(comm.rank(), comm.size())))?;
    }
    weights(&model)
}

pub fn own(rank: usize, ranks: usize) -> Vec<usize> {
    shard_batches(EXAMPLES, rank, ranks)
}

#[test]
fn on_one_rank_a_mean_changes_nothing() {
    let alone = Ranks::new(1).run(cpu, |comm| train(&comm, LocalSgd, every(1000), 6, own)).unwrap();
    let plain = DiLoCo { lr: 1.0, momentum: 0.0, nesterov: false };
    let streamed = LocalUpdates { every: Some(4), fragments: 2, ..LocalUpdates::default() };
    let met = Ranks::new(1).run(cpu, |comm| {
        Ok([
            train(&comm, LocalSgd, every(2), 6, own)?,
            train(&comm, plain, every(3), 6, own)?,
            train(&comm, ElasticAveraging::default(), every(1), 6, own)?,
            train(&comm, LocalSgd, streamed.clone(), 6, own)?,
        ])
    });
    for other in &met.unwrap()[0] {
        assert!(*other == alone[0], "to the bit");
    }
}

#[test]
fn equal_data_on_all_ranks_is_one_rank() {
    let all = |_: usize, _: usize| (0..EXAMPLES).collect();
    let one = Ranks::new(1).run(cpu, |comm| train(&comm, LocalSgd, every(1000), 6, all)).unwrap();
    for n in [2, 3, 4, 5] {
        for steps in [1, 2, 3] {
            let met = Ranks::new(n).run(cpu, |comm| train(&comm, LocalSgd, every(steps), 6, all)).unwrap();
            met.iter().for_each(|met| close(met, &one[0], 1e-12, &format!("{n} ranks, {steps}")));
        }
    }
}

/// A training on one of some ranks, which gives the weights.
type Training = Box<dyn Fn(&Comm<Cpu>) -> Result<Vec<f64>>>;

/// What makes a training by one rule.
type Rule = fn() -> Training;

/// What a rule makes of global weights, the mean, and its state.
type Formula = fn(&mut [f64], &[f64], &mut [f64]) -> f64;

/// Ranks by themselves, which meet by a formula, `delay` steps after the mean: the weights of all of them, after some
/// steps.
fn by_formula(n: usize, formula: Formula, every: usize, delay: usize, steps: usize) -> Result<Vec<Vec<f64>>> {
    let rt = cpu(0)?;
    let models: Vec<Mlp<Cpu>> = (0..n).map(|_| model(&rt)).collect::<Result<_>>()?;
    let mut trainers: Vec<_> = models.iter().map(|model| adam(&rt, model)).collect::<Result<_>>()?;
    let mut global = weights(&models[0])?;
    let (mut state, mut mean) = (vec![0.0; global.len()], Vec::new());
    for k in 0..steps {
        for (r, trainer) in trainers.iter_mut().enumerate() {
            trainer.step(|_| models[r].loss(&rt, k, &own(r, n)))?;
        }
        let local: Vec<Vec<f64>> = models.iter().map(weights).collect::<Result<_>>()?;
        if (k + 1) % every == 0 {
            let share = |r: usize| own(r, n).len() as f64 / EXAMPLES as f64;
            mean = (0..global.len()).map(|i| (0..n).map(|r| share(r) * local[r][i]).sum::<f64>()).collect();
        }
        if !mean.is_empty() && (k + 1 - delay).is_multiple_of(every) {
            let keep = formula(&mut global, &mean, &mut state);
            for (model, local) in models.iter().zip(&local) {
                let value: Vec<f64> = global.iter().zip(local).map(|(x, own)| x + keep * (own - x)).collect();
                put(&rt, model, &value)?;
            }
        }
    }
    models.iter().map(weights).collect()
}

fn put(rt: &Cpu, model: &Mlp<Cpu>, values: &[f64]) -> Result<()> {
    let mut at = 0;
    for parameter in model.parameters() {
        let shape = parameter.shape();
        parameter.leaf().set(Tensor::from_slice(rt, shape, &values[at..at + shape.numel()])?)?;
        at += shape.numel();
    }
    Ok(())
}

#[test]
fn rules_are_the_formulas() {
    let averaging: Formula = |x, mean, _| {
        x.copy_from_slice(mean);
        0.0
    };
    let elastic: Formula = |x, mean, _| {
        x.copy_from_slice(mean);
        0.7
    };
    let slow: Formula = |x, mean, u| {
        for i in 0..x.len() {
            u[i] = 0.6 * u[i] + (x[i] - mean[i]) / 0.01;
            x[i] -= 0.8 * 0.01 * u[i];
        }
        0.0
    };
    let nesterov: Formula = |x, mean, v| {
        for i in 0..x.len() {
            let g = x[i] - mean[i];
            v[i] = 0.9 * v[i] + g;
            x[i] -= 0.7 * (g + 0.9 * v[i]);
        }
        0.0
    };
    let heavy: Formula = |x, mean, v| {
        for i in 0..x.len() {
            v[i] = 0.5 * v[i] + x[i] - mean[i];
            x[i] -= 0.7 * v[i];
        }
        0.0
    };
    let met = |n: usize, rule: Rule| Ranks::new(n).run(cpu, |comm| rule()(&comm)).unwrap();
    for n in [1, 2, 3, 5] {
        let cases: [(&str, usize, Formula, Rule); 6] = [
            ("averaging", 0, averaging, || Box::new(|c| train(c, LocalSgd, every(2), 6, own))),
            ("elastic", 0, elastic, || Box::new(|c| train(c, ElasticAveraging { alpha: 0.3 }, every(2), 6, own))),
            ("slow", 0, slow, || Box::new(|c| train(c, SlowMo { lr: 0.8, momentum: 0.6 }, every(2), 6, own))),
            ("nesterov", 0, nesterov, || Box::new(|c| train(c, DiLoCo::default(), every(2), 6, own))),
            ("heavy", 0, heavy, || {
                Box::new(|c| {
                    train(c, DiLoCo { momentum: 0.5, nesterov: false, ..Default::default() }, every(2), 6, own)
                })
            }),
            ("delayed", 1, elastic, || {
                let options = LocalUpdates { every: Some(2), delay: 1, keep: 0.7, ..Default::default() };
                Box::new(move |c| train(c, LocalSgd, options.clone(), 6, own))
            }),
        ];
        for (name, delay, formula, rule) in cases {
            let expected = by_formula(n, formula, 2, delay, 6).unwrap();
            for (met, expected) in met(n, rule).iter().zip(&expected) {
                let within = if delay == 0 { 1e-10 } else { 1e-12 };
                close(met, expected, within, &format!("{name} on {n}"));
            }
        }
    }
}

#[test]
fn one_fragment_without_delay_is_the_whole_and_more_meet_in_turn() {
    let streams =
        |fragments, delay, keep| LocalUpdates { every: Some(6), fragments, delay, keep, ..Default::default() };
    Ranks::new(3)
        .run(cpu, |comm| {
            let whole = train(&comm, DiLoCo::default(), every(6), 12, own)?;
            assert!(train(&comm, DiLoCo::default(), streams(1, 0, 0.0), 12, own)? == whole);
            // After the last fragment has met, the first has gone on by itself.
            let before = train(&comm, LocalSgd, every(1000), 2, own)?;
            let first = train(&comm, LocalSgd, streams(3, 0, 0.0), 2, own)?;
            let second = train(&comm, LocalSgd, streams(3, 0, 0.0), 4, own)?;
            let ranks: Vec<Vec<u8>> = comm.exchange(&bytes(&first))?;
            let met = |i: usize| ranks.iter().all(|rank| rank[8 * i..8 * i + 8] == ranks[0][8 * i..8 * i + 8]);
            let count = (0..first.len()).filter(|&i| met(i)).count();
            assert!(count > 0 && count < first.len(), "a part has met: {count} of {}", first.len());
            assert!((0..first.len()).all(|i| met(i) || first[i] == before[i]), "the rest is as it was");
            let then: Vec<Vec<u8>> = comm.exchange(&bytes(&second))?;
            let apart = (0..first.len())
                .filter(|&i| met(i) && then.iter().any(|r| r[8 * i..8 * i + 8] != then[0][8 * i..8 * i + 8]));
            assert!(apart.count() > 0);
            Ok(())
        })
        .unwrap();
}

fn bytes(values: &[f64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

#[test]
fn a_meeting_by_hand_ends_a_sum_under_way_first() {
    let (n, keep) = (3, 0.5);
    let options = LocalUpdates { every: Some(2), delay: 1, keep, ..Default::default() };
    let ranks = Ranks::new(n).run(cpu, |comm| {
        let (rt, model) = (comm.runtime(), model(comm.runtime())?);
        let mut step = LocalSteps::new(&comm, &model, adam(rt, &model)?, LocalSgd, options.clone())?;
        for k in 0..2 {
            step.step(|_| model.loss(rt, k, &own(comm.rank(), n)))?;
        }
        let before = weights(&model)?;
        step.synchronize()?;
        Ok((before, weights(&model)?))
    });
    let ranks = ranks.unwrap();
    let share = |r: usize| own(r, n).len() as f64 / EXAMPLES as f64;
    let mean = |of: &dyn Fn(usize) -> f64, i: usize| (0..n).map(|r| of(r) * ranks[r].0[i]).sum::<f64>();
    // A part of its own stays with each rank, and no step has weighed anything since.
    let even = |_: usize| 1.0 / n as f64;
    let met = |i: usize| mean(&share, i) + keep * (mean(&even, i) - mean(&share, i));
    let expected: Vec<f64> = (0..ranks[0].0.len()).map(met).collect();
    ranks.iter().for_each(|(_, after)| close(after, &expected, 1e-12, "met"));
}

#[test]
fn ranks_that_keep_a_part_of_their_own_are_not_together() {
    fn lost(comm: &Comm<Cpu>, rule: impl OuterRule<Cpu> + 'static) -> Result<bool> {
        let (rt, model) = (comm.runtime(), model(comm.runtime())?);
        let mut step = LocalSteps::new(comm, &model, adam(rt, &model)?, rule, every(1))?;
        step.step(|_| model.loss(rt, 0, &own(comm.rank(), comm.size())))?;
        Ok(lost_at_resize(&step).is_some())
    }
    let told = Ranks::new(2).run(cpu, |comm| Ok([lost(&comm, LocalSgd)?, lost(&comm, ElasticAveraging::default())?]));
    assert_eq!(told.unwrap(), [[false, true]; 2]);
}

#[test]
fn uneven_numbers_of_steps_count_by_what_they_weighed() {
    let by_hand = LocalUpdates { every: None, ..LocalUpdates::default() };
    let all = Ranks::new(3).run(cpu, |comm| {
        let (rt, model) = (comm.runtime(), model(comm.runtime())?);
        let mut step = LocalSteps::new(&comm, &model, adam(rt, &model)?, LocalSgd, by_hand.clone())?;
        for k in 0..=comm.rank() {
            step.step(|_| model.loss(rt, k, &[0, 1]))?;
        }
        let before = weights(&model)?;
        let synchronization = step.synchronize()?;
        assert!(synchronization.divergence > 0.0 && step.last_synchronization() == Some(synchronization));
        Ok((before, weights(&model)?))
    });
    let all = all.unwrap();
    let mean: Vec<f64> =
        (0..all[0].0.len()).map(|i| (0..3).map(|r| (r + 1) as f64 / 6.0 * all[r].0[i]).sum()).collect();
    all.iter().for_each(|(_, after)| close(after, &mean, 1e-14, "by weight"));
}

/// A batch of a rank in a step, and whether its gradients overflow.
fn spoiled(model: &Mlp<Cpu>, rt: &Cpu, rank: usize, k: usize) -> Result<Loss<Cpu>> {
    let loss = model.loss(rt, k, &own(rank, 2))?;
    let spoil = if (rank, k) == (1, 2) { f64::INFINITY } else { 1.0 };
    Loss::sum(loss.total().mul(spoil)?, loss.weight())
}

#[test]
fn a_step_that_one_rank_leaves_out_weighs_nothing_and_all_meet_with_one_rate() {
    let trainer = |rt: &Cpu, model: &Mlp<Cpu>| {
        let falling = |lr: f64, step: u64| lr / (1 + step) as f64;
        let builder = TrainStep::builder(&NoOpCommunicator::new(rt), model)
            .optimizer(SgdConfig { lr: SGD, ..Default::default() });
        builder.schedule(falling).skip_non_finite().build()
    };
    let rt = cpu(0).unwrap();
    let models = [model(&rt).unwrap(), model(&rt).unwrap()];
    let mut trainers = models.each_ref().map(|model| trainer(&rt, model).unwrap());
    let mut global = weights(&models[0]).unwrap();
    let mut u = vec![0.0; global.len()];
    for synchronization in 0..2 {
        let (mut weighed, mut rate) = ([0.0; 2], 0.0);
        for (r, trainer) in (0..2).zip(&mut trainers) {
            for k in 2 * synchronization..2 * synchronization + 2 {
                let metrics = trainer.step(|_| spoiled(&models[r], &rt, r, k)).unwrap();
                weighed[r] += if metrics.stepped() { metrics.weight().unwrap() } else { 0.0 };
                rate = if r == 0 { metrics.learning_rate() } else { rate };
            }
        }
        let local = models.each_ref().map(|model| weights(model).unwrap());
        for i in 0..global.len() {
            let mean = (0..2).map(|r| weighed[r] / (weighed[0] + weighed[1]) * local[r][i]).sum::<f64>();
            u[i] = 0.6 * u[i] + (global[i] - mean) / rate;
            global[i] -= 0.8 * rate * u[i];
        }
        models.iter().for_each(|model| put(&rt, model, &global).unwrap());
    }
    let met = Ranks::new(2).run(cpu, |comm| {
        let (rt, model) = (comm.runtime(), model(comm.runtime())?);
        let rule = SlowMo { lr: 0.8, momentum: 0.6 };
        let mut step = LocalSteps::new(&comm, &model, trainer(rt, &model)?, rule, every(2))?;
        for k in 0..4 {
            let stepped = step.step(|_| spoiled(&model, rt, comm.rank(), k))?.stepped();
            assert_eq!(stepped, (comm.rank(), k) != (1, 2));
        }
        weights(&model)
    });
    met.unwrap().iter().for_each(|met| close(met, &global, 1e-12, "a step left out"));
}

/// The weights of a run on two machines of two ranks that shard at this stage, saved in the middle and resumed by
/// others.
fn on_machines(stage: ZeroStage, delay: u64, keep: f64) -> Vec<f64> {
    let scratch = Scratch::new("local-updates-sharded-machines");
    let all = Ranks::new(4).run(cpu, |comm| {
        let (rt, whole) = (comm.runtime(), || Error::internal("a test", "no group"));
        let inside = comm.split(Some(comm.rank() / 2), comm.rank())?.ok_or_else(whole)?;
        let across = comm.split(Some(comm.rank() % 2), comm.rank())?.ok_or_else(whole)?;
        let mut last = Vec::new();
        for part in [0..3, 3..8] {
            // Of other weights than the other machine's: those of the first are everybody's.
            let model = Mlp::new(&Init::new(rt, comm.rank() as u64 / 2).dtype(DType::F64))?;
            model.freeze_where(nn::under("b"));
            let inner = TrainStep::builder(&inside, &model).optimizer(adamw()).zero(stage).build()?;
            let options = LocalUpdates { delay, keep, ..every(2) };
            let mut step = LocalSteps::new(&across, &model, inner, DiLoCo::default(), options)?.among(&comm);
            step.load(&scratch.folder())?;
            for k in part {
                step.step(|_| model.loss(rt, k, &own(comm.rank(), 4)))?;
            }
            step.save(&scratch.folder(), &Default::default())?;
            step.synchronize()?;
            last = weights(&model)?;
        }
        Ok(last)
    });
    let all = all.unwrap();
    all.iter().for_each(|rank| assert!(*rank == all[0], "{stage:?}: all ranks have met"));
    all[0].clone()
}

#[test]
fn machines_may_shard_parameters() {
    for (delay, keep) in [(0, 0.0), (1, 0.0), (1, 0.4)] {
        let plain = on_machines(ZeroStage::Optimizer, delay, keep);
        for stage in [ZeroStage::Gradients, ZeroStage::Parameters] {
            close(&on_machines(stage, delay, keep), &plain, CLOSE, &format!("{stage:?} {delay} {keep}"));
        }
    }
}

#[test]
fn machines_of_several_ranks_meet() {
    let scratch = Scratch::new("local-updates-machines");
    let all = Ranks::new(4).run(cpu, |comm| {
        let (rt, whole) = (comm.runtime(), || Error::internal("a test", "no group"));
        let inside = comm.split(Some(comm.rank() / 2), comm.rank())?.ok_or_else(whole)?;
        let across = comm.split(Some(comm.rank() % 2), comm.rank())?.ok_or_else(whole)?;
        let model = model(rt)?;
        let inner = TrainStep::builder(&inside, &model).optimizer(adamw()).zero(ZeroStage::Optimizer).build()?;
        let mut step = LocalSteps::new(&across, &model, inner, LocalSgd, every(2))?;
        assert_eq!(step.ranks().share, BatchShare { index: comm.rank(), of: 4 });
        for k in 0..4 {
            step.step(|_| model.loss(rt, k, &own(comm.rank(), 4)))?;
        }
        // One rank saves each element that the machines share.
        let step = step.among(&comm);
        let parts = step.parts()?.into_iter().filter(|part| part.name == "parameter/a.bias");
        let elements: usize = parts.map(|part| part.row.numel()).sum();
        let of_all = comm.exchange_equal((elements as u64).to_le_bytes())?.into_iter().map(u64::from_le_bytes);
        assert_eq!(of_all.sum::<u64>(), 9);
        step.save(&scratch.folder(), &Default::default())?;
        weights(&model)
    });
    let all = all.unwrap();
    all.iter().for_each(|rank| assert!(*rank == all[0], "all ranks have met"));
}
