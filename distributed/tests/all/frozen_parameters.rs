//! Frozen parameters: what they cost, checkpoints, and ranks that do not freeze the same ones.

use std::sync::Arc;

use crate::checkpoint_common::{Any, HOWS, How, Scratch};
use crate::common::{EXAMPLES, Mlp, Task, Trace, config, cpu, difference, everywhere, own, weights};
use autograd::Var;
use distributed::{
    buckets::BucketOptions,
    comm::{Comm, Communicator, CountingCommunicator, Ranks},
    train::{BucketedTrainer, Loss, SimpleTrainer, TrainingConfig},
};
use nn::{Forward, Init, Linear, ModuleExt};
use numcore::{
    DType, Runtime, Tensor, Use,
    ops::{PointwiseOps, ReduceOps},
};
use runtime_cpu::Cpu;

#[test]
fn data_parallelism_spends_nothing_on_them() {
    Ranks::new(2)
        .run(cpu, |comm| {
            let counted = Arc::new(CountingCommunicator::new(comm.clone()));
            let (rt, init) = (comm.runtime(), Init::new(comm.runtime(), 0));
            let linear = |width, height| Linear::new(&init, width, height).map(Linear::without_bias);
            let model = vec![linear(64, 256)?, linear(256, 256)?, linear(256, 64)?];
            model.freeze_where(|name| name.starts_with("1."));
            let before = [Use::Gradients, Use::Optimizer].map(|u| rt.memory().of(u).live);
            let (comm, config) = (counted.clone() as Comm<Cpu>, TrainingConfig::default());
            let mut trainer = BucketedTrainer::new(&comm, &model, config, BucketOptions::default())?;
            let trained = 2 * 64 * 256 * 4;
            let after = [Use::Gradients, Use::Optimizer].map(|u| rt.memory().of(u).live);
            assert_eq!([after[0] - before[0], after[1] - before[1]], [trained, 2 * trained]);
            for _ in 0..2 {
                counted.reset();
                let x = Var::new(Tensor::normal(rt, [4, 64], DType::F32, 0.0, 1.0, 3)?);
                let y = model.iter().try_fold(x, |x, layer| layer.forward(&x)?.tanh())?;
                trainer.step(|_| Ok(Loss::mean(y.square()?.sum(&[], false)?)))?;
                // The loss and its weight come with the gradients.
                assert_eq!(counted.of("all_reduce").payload, trained as u64 + 16);
            }
            Ok(())
        })
        .unwrap();
}

/// A model with a frozen matrix; another parameter is frozen after the first step.
fn freeze(model: &Mlp<Cpu>, steps: usize) {
    model.freeze_where(|name| name == "b.weight" || (steps > 0 && name == "a.bias"));
}

fn alone() -> Vec<f64> {
    let rt = Cpu::with_threads(1);
    let model = Mlp::new(&Init::new(&rt, 0).dtype(DType::F64)).unwrap();
    freeze(&model, 0);
    let mut trainer = SimpleTrainer::new(&rt, &model, config()).unwrap();
    for step in 0..4 {
        freeze(&model, step);
        trainer.step(|_| model.loss(&rt, step, &(0..EXAMPLES).collect::<Vec<_>>())).unwrap();
    }
    weights(&model).unwrap()
}

#[test]
fn checkpoints_pass_between_strategies() {
    let one = Trace { weights: vec![alone()], ..Default::default() };
    for from in HOWS {
        let scratch = Scratch::new(&format!("frozen-{from:?}"));
        let folder = scratch.folder();
        let run = |how: How, n: usize, steps: std::ops::Range<usize>| {
            everywhere(n, |comm| {
                let model = Mlp::new(&Init::new(comm.runtime(), steps.start as u64).dtype(DType::F64))?;
                freeze(&model, steps.start);
                let mut trainer = Any::new(&comm, &model, how, config())?;
                assert_eq!(trainer.load(&folder)?.is_some(), steps.start > 0);
                for step in steps.clone() {
                    freeze(&model, step);
                    trainer.step(&model, &comm, step)?;
                }
                if steps.start == 0 {
                    trainer.save(&folder)?;
                }
                Ok(Trace { weights: vec![trainer.weights(&model)?], ..Default::default() })
            })
        };
        run(from, 2, 0..2);
        for (to, n) in HOWS.into_iter().flat_map(|to| [(to, 1), (to, 2), (to, 3)]) {
            let off = difference(&run(to, n, 2..4), &one);
            assert!(off <= 1e-11, "{from:?} to {to:?} on {n}: {off:e}");
        }
    }
}

#[test]
fn ranks_that_freeze_different_ones_disagree() {
    for how in HOWS {
        // The first step after it, or a later one.
        for (n, before) in [(2, 0), (2, 2), (3, 1)] {
            let outcomes = Ranks::new(n).outcomes(cpu, |comm| {
                let model = Mlp::new(&Init::new(comm.runtime(), 0))?;
                let mut trainer = Any::new(&comm, &model, how, config())?;
                (0..before).try_for_each(|step| trainer.step(&model, &comm, step).map(|_| ()))?;
                if comm.rank() == 1 {
                    model.freeze_where(|name| name == "b.bias");
                }
                trainer.step(&model, &comm, before).map(|_| ())
            });
            for outcome in outcomes.unwrap() {
                let error = outcome.unwrap_err().to_string();
                assert!(error.contains("ranks disagree") && error.contains("`b.bias` frozen"), "{how:?}: {error}");
            }
        }
    }
}

#[test]
fn one_that_was_frozen_from_the_start_cannot_be_trained_later() {
    for (how, all) in HOWS.into_iter().flat_map(|how| [(how, true), (how, false)]) {
        let outcomes = Ranks::new(2).outcomes(cpu, |comm| {
            let model = Mlp::new(&Init::new(comm.runtime(), 0))?;
            freeze(&model, 0);
            let mut trainer = Any::new(&comm, &model, how, config())?;
            trainer.step_with(|_| model.loss(comm.runtime(), 0, &own(&comm)))?;
            if all || comm.rank() == 0 {
                model.unfreeze_where(|name| name == "b.weight");
            }
            trainer.step(&model, &comm, 1).map(|_| ())
        });
        for outcome in outcomes.unwrap() {
            let error = outcome.unwrap_err().to_string();
            assert!(
                error.contains("b.weight") && error.contains("frozen when the trainer was made"),
                "{how:?}: {error}"
            );
        }
    }
}
