//! Training with PowerSGD: equal replicas at every world size, nearly the loss of training without, and exact resumption.

use crate::{
    powersgd::{compressed, errors, plain, with_unused},
    prelude::*,
};

fn train<M: Task>(
    comm: &Comm<Cpu>,
    dtype: DType,
    config: TrainingConfig,
    sums: impl Into<GradientSums>,
    steps: usize,
) -> Result<Trace> {
    let model = M::new(&Init::new(comm.runtime(), comm.rank() as u64).dtype(dtype))?;
    let micro = config.accumulation;
    let mut trainer = bucketed(comm, &model, config, sums)?;
    let mut trace = Trace::default();
    for step in 0..steps {
        let own = own(comm);
        let part = |k: usize| own.iter().copied().skip(k).step_by(micro).collect::<Vec<_>>();
        let metrics = trainer.step(|k| model.loss(comm.runtime(), step % STEPS, &part(k)))?;
        trace.losses.push(metrics.loss()?);
        trace.norms.extend(metrics.grad_norm()?);
        trace.weights.push(weights(&model)?);
    }
    Ok(trace)
}

#[test]
fn replicas_stay_equal_with_accumulation_and_clipping() {
    let config = TrainingConfig { accumulation: 2, ..config() };
    for dtype in [DType::F32, DType::F64, DType::BF16] {
        for n in WORLDS {
            let power = PowerSgd { rank: 2, start_iter: 1, ..Default::default() };
            let trace = everywhere(n, |comm| train::<Gpt<Cpu>>(&comm, dtype, config.clone(), compressed(power), 4));
            assert!(trace.weights.iter().flatten().all(|w| w.is_finite()));
        }
    }
}

#[test]
fn ranks_that_run_out_take_part() {
    for n in [2, 3, 5] {
        let trace = everywhere(n, |comm| {
            let model = Mlp::new(&Init::new(comm.runtime(), 0))?;
            let options = with_unused(PowerSgd::default());
            let mut trainer = bucketed(&comm, &model, config(), options)?;
            let mut trace = Trace::default();
            // Rank r has r + 1 batches of one example.
            let loss = |&step: &usize| model.loss(comm.runtime(), step, &[comm.rank()]);
            trainer.run(0..=comm.rank(), loss, |metrics| {
                trace.losses.push(metrics.loss()?);
                trace.weights.push(weights(&model)?);
                Ok(())
            })?;
            Ok(trace)
        });
        assert_eq!(trace.losses.len(), n);
        assert!(trace.weights.iter().flatten().all(|w| w.is_finite()));
    }
}

#[test]
fn what_is_sent_does_not_depend_on_buckets() {
    let with = |first, others| {
        let limits = Some(BucketLimits { first, others });
        let options = BucketOptions { limits, ..Default::default() };
        let options = GradientSums { options, power: Some(PowerSgd::default()) };
        everywhere(3, |comm| train::<Gpt<Cpu>>(&comm, DType::F32, plain(), options.clone(), STEPS))
    };
    let one = with(1 << 30, 1 << 30);
    assert_eq!(with(1, 1), one);
    assert_eq!(with(500, 1500), one);
}

/// The mean of the last losses.
fn reached(trace: &Trace) -> f64 {
    trace.losses[trace.losses.len() - STEPS..].iter().sum::<f64>() / STEPS as f64
}

#[test]
fn training_comes_to_nearly_the_same_loss() {
    const LONG: usize = 100;
    let train =
        |sums: GradientSums| everywhere(3, |comm| train::<Gpt<Cpu>>(&comm, DType::F32, plain(), sums.clone(), LONG));
    let exact = train(GradientSums::default());
    for rank in [1, 2] {
        let low = train(compressed(PowerSgd { rank, min_rate: 1.0, ..Default::default() }));
        let (start, low, exact) = (exact.losses[0], reached(&low), reached(&exact));
        assert!(exact < 0.6 * start && low <= 1.02 * exact, "rank {rank}: from {start} to {low}, {exact} without");
    }
}

#[test]
fn errors_are_booked_as_gradients() {
    let rt = Cpu::with_threads(1);
    let comm = std::sync::Arc::new(distributed::comm::NoOpCommunicator::new(&rt)) as Comm<Cpu>;
    let model = Mlp::new(&Init::new(&rt, 0)).unwrap();
    let mut trainer = bucketed(&comm, &model, plain(), compressed(PowerSgd::default())).unwrap();
    let before = rt.memory().of(MemoryCategory::Gradients).live;
    trainer.step(|_| model.loss(&rt, 0, &(0..EXAMPLES).collect::<Vec<_>>())).unwrap();
    assert_eq!(rt.memory().of(MemoryCategory::Gradients).live, before + 4 * (45 + 63 + 21));
}

/// Trains from step `from` to `to`; loads before if `from` is not 0, saves at the end if `save`. Gives the weights, and the errors.
fn resumed(comm: &Comm<Cpu>, folder: &Folder, from: usize, to: usize, save: bool) -> Result<(Vec<f64>, Vec<f64>)> {
    let model = Mlp::new(&Init::new(comm.runtime(), from as u64).dtype(DType::F64))?;
    let power = PowerSgd { rank: 1, start_iter: 1, ..Default::default() };
    let mut trainer = bucketed(comm, &model, config(), compressed(power))?;
    if from > 0 {
        trainer.load(folder)?.expect("a checkpoint");
    }
    let all_errors = |trainer: &TrainStep<Cpu>| {
        let mut all = Vec::new();
        for (name, _) in model.named_parameters() {
            all.extend(self::errors(comm, trainer, &name)?);
        }
        Ok::<_, numcore::Error>(all)
    };
    let loaded = all_errors(&trainer)?;
    for step in from..to {
        trainer.step(|_| model.loss(comm.runtime(), step, &own(comm)))?;
    }
    let left = if from == to { loaded } else { all_errors(&trainer)? };
    if save {
        trainer.save(folder, &CheckpointNotes::new())?;
    }
    Ok((weights(&model)?, left))
}

#[test]
fn what_follows_is_what_would_have_followed() {
    for n in [1, 3, 4] {
        let scratch = crate::checkpoint_common::Scratch::new("powersgd");
        let folder = scratch.folder();
        let ranks = Ranks::new(n);
        for (save, to) in [(0, 1), (0, 3)] {
            ranks.run(cpu, |c| resumed(&c, &folder, save, to, true)).unwrap();
            let whole = ranks.run(cpu, |c| resumed(&c, &folder, 0, 5, false)).unwrap();
            let rest = ranks.run(cpu, |c| resumed(&c, &folder, to, 5, false)).unwrap();
            assert!(whole == rest, "{n} from {to}");
        }
    }
}

#[test]
fn another_number_of_ranks_shares_the_errors_out() {
    for (saved, loaded) in [(4, 2), (2, 4), (5, 3), (3, 1)] {
        let scratch = crate::checkpoint_common::Scratch::new("powersgd-reshard");
        let folder = scratch.folder();
        let total = |all: &[(Vec<f64>, Vec<f64>)]| {
            (0..all[0].1.len()).map(|i| all.iter().map(|(_, e)| e[i]).sum::<f64>()).collect::<Vec<_>>()
        };
        let before = Ranks::new(saved).run(cpu, |c| resumed(&c, &folder, 0, 3, true)).unwrap();
        let after = Ranks::new(loaded).run(cpu, |c| resumed(&c, &folder, 3, 3, false)).unwrap();
        let (before, after) = (total(&before), total(&after));
        assert!(!before.is_empty() && before.iter().any(|e| e.abs() > 1e-4));
        assert!(before.iter().zip(&after).all(|(a, b)| (a - b).abs() < 1e-15), "{saved} to {loaded}");
    }
}

#[test]
fn compression_may_begin_and_end_at_a_checkpoint() {
    let scratch = crate::checkpoint_common::Scratch::new("powersgd-switch");
    let folder = scratch.folder();
    for (from, to, options) in
        [(0, 2, GradientSums::default()), (2, 4, compressed(PowerSgd::default())), (4, 6, GradientSums::default())]
    {
        let all = Ranks::new(2).run(cpu, |comm| {
            let model = Mlp::new(&Init::new(comm.runtime(), 0))?;
            let mut trainer = bucketed(&comm, &model, config(), options.clone())?;
            assert_eq!(trainer.load(&folder)?.is_some(), from > 0);
            for step in from..to {
                trainer.step(|_| model.loss(comm.runtime(), step % STEPS, &own(&comm)))?;
            }
            trainer.save(&folder, &CheckpointNotes::new())?;
            weights(&model)
        });
        let all = all.unwrap();
        assert!(all[0] == all[1]);
    }
}
