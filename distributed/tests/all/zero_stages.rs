//! ZeRO: sharded training is that of one rank.

use crate::{
    data_parallel_unused::{Branches, branches_alone},
    prelude::*,
};

pub fn options(stage: ZeroStage, units: UnitOf) -> ZeroOptions {
    ZeroOptions { stage, units, ..Default::default() }
}

#[test]
fn checkpointed_activations_gather_again() {
    let one = {
        let rt = Cpu::with_threads(1);
        let model = Mlp::new(&Init::new(&rt, 0).dtype(DType::F64)).unwrap();
        let mut trainer = simple(&rt, &model, config()).unwrap();
        (0..3).map(|s| trainer.step(|_| model.loss(&rt, s, &[0, 1, 2])).unwrap().loss().unwrap()).collect::<Vec<_>>()
    };
    for how in STAGES {
        let many = everywhere(3, |comm| {
            let model = Arc::new(Mlp::new(&Init::new(comm.runtime(), 0).dtype(DType::F64))?);
            let mut trainer = Any::new(&comm, &*model, how, config())?;
            let mut trace = Trace::default();
            for step in 0..3 {
                let metrics = trainer.step_with(|_| {
                    let (x, y) = model.batch(comm.runtime(), step, &[comm.rank()])?;
                    let hidden = autograd::checkpoint(|| model.b.forward(&model.a.forward(&x)?.tanh()?)?.gelu())?;
                    let sum = nn::loss::mse(&model.c.forward(&hidden)?, &y, numcore::fused::Reduction::Sum)?;
                    Loss::sum(sum, 3.0)
                })?;
                trace.losses.push(metrics.loss()?);
            }
            Ok(trace)
        });
        let off = many.losses.iter().zip(&one).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(off < 1e-12, "{how:?}: {off:e}");
    }
}

/// A rank has pieces of some of a unit's parameters, and leaves those that no rank has used.
#[test]
fn parameters_of_one_unit_are_used_or_not() {
    let one = branches_alone(2);
    for stage in ZeroStage::ALL {
        let trained = Ranks::new(3).run(cpu, |comm| {
            let model = Branches::new(comm.runtime())?;
            let options = ZeroOptions { stage, units: UnitOf::whole(), unused: Unused::Allow, ..Default::default() };
            let mut trainer = sharded(&comm, &model, config(), options)?;
            for _ in 0..2 {
                trainer.step(|_| model.loss(&comm))?;
            }
            let _scope = trainer.gather_full_params()?;
            weights(&model)
        });
        for weights in trained.unwrap() {
            close(&weights, &one, 1e-12, &format!("{stage:?}"));
        }
    }
}

#[test]
fn ranks_that_run_out_and_overflows_are_agreed_on() {
    for stage in ZeroStage::ALL {
        everywhere(3, |comm| {
            let model = Mlp::new(&Init::new(comm.runtime(), 0))?;
            let options = ZeroOptions { stage, units: UnitOf::children(), unused: Unused::Allow, ..Default::default() };
            let scaled = TrainingConfig { loss_scaling: Some(LossScaler::starting_at(8.0)?), ..config() };
            let mut trainer = sharded(&comm, &model, scaled, options)?;
            let mut trace = Trace::default();
            let mut at = 0;
            let batches: Vec<usize> = (0..=comm.rank()).collect();
            let loss = |&step: &usize| {
                let loss = model.loss(comm.runtime(), step, &[comm.rank()])?;
                let bad = step == 2;
                if bad { Loss::sum(loss.total().mul(f64::INFINITY)?, 1.0) } else { Ok(loss) }
            };
            trainer.run(batches, loss, |m| {
                assert_eq!(m.stepped(), at != 2);
                at += 1;
                Ok(())
            })?;
            assert_eq!(at, 3);
            let _scope = trainer.gather_full_params()?;
            trace.weights.push(weights(&model)?);
            Ok(trace)
        });
    }
}

#[test]
fn groups_have_their_own_numbers() {
    let sgd = || {
        ParamGroups::new(SgdConfig { lr: 1.0, ..Default::default() })
            .group(|name, _| name.starts_with("b."), |c| c.lr = 0.0)
    };
    for stage in ZeroStage::ALL {
        let program = |comm: Comm<Cpu>| {
            let model = Mlp::new(&Init::new(comm.runtime(), 0))?;
            let before: Vec<Vec<f32>> =
                [&model.a, &model.b].map(|l| l.weight.value()?.to_vec()).into_iter().collect::<Result<_>>()?;
            let options = options(stage, UnitOf::whole());
            let mut trainer = TrainStep::builder(&comm, &model).optimizer(sgd()).zero(options).build()?;
            let all: Vec<usize> = (0..EXAMPLES).collect();
            trainer.step(|_| model.loss(comm.runtime(), 0, &all))?;
            let _scope = trainer.gather_full_params()?;
            assert!(model.a.weight.value()?.to_vec::<f32>()? != before[0]);
            assert_eq!(model.b.weight.value()?.to_vec::<f32>()?, before[1]);
            comm.barrier()
        };
        Ranks::new(2).run(cpu, program).unwrap();
    }
}

#[test]
fn layers_unused_in_some_micro_batches_of_some_ranks() {
    // Rank 0 leaves the middle out of its second micro-batch, rank 1 of its first: after a backward pass each has completed other units.
    let loss = |model: &[Linear<Cpu>], rank: usize, micro: usize| {
        let (rt, seed) = (model[0].weight.leaf().runtime().clone(), 10 + (2 * rank + micro) as u64);
        let x = autograd::Var::new(Tensor::normal(&rt, [2, 3], DType::F64, 0.0, 1.0, seed)?);
        let skips = rank < 2 && rank != micro;
        let used = model.iter().enumerate().filter(|(k, _)| *k != 1 || !skips).map(|(_, layer)| layer);
        let y = used.into_iter().try_fold(x, |x, layer| layer.forward(&x)?.tanh())?;
        Loss::sum(y.square()?.sum_all()?, 2.0)
    };
    let model =
        |rt: &Cpu| (1..4).map(|s| Linear::new(&Init::new(rt, s).dtype(DType::F64), 3, 3)).collect::<Result<Vec<_>>>();
    let one = {
        let rt = Cpu::with_threads(1);
        let model = model(&rt).unwrap();
        let mut trainer = simple(&rt, &model, TrainingConfig { accumulation: 6, ..config() }).unwrap();
        let losses = (0..3).map(|_| trainer.step(|k| loss(&model, k / 2, k % 2)).unwrap().loss().unwrap()).collect();
        Trace { losses, weights: vec![weights(&model).unwrap()], ..Default::default() }
    };
    for stage in ZeroStage::ALL {
        let many = everywhere(3, |comm| {
            let model = model(comm.runtime())?;
            let options = ZeroOptions { stage, units: UnitOf::children(), unused: Unused::Allow, ..Default::default() };
            let config = TrainingConfig { accumulation: 2, ..config() };
            let mut trainer = sharded(&comm, &model, config, options)?;
            let step = |_| trainer.step(|k| loss(&model, comm.rank(), k))?.loss();
            let losses = (0..3).map(step).collect::<Result<_>>()?;
            let _scope = trainer.gather_full_params()?;
            Ok(Trace { losses, weights: vec![weights(&model)?], ..Default::default() })
        });
        let off = difference(&many, &one);
        assert!(off <= 1e-11, "stage {}: {off:e}", stage.number());
    }
}

#[test]
fn ranks_that_read_units_in_different_orders_disagree() {
    // All units are used on all ranks, and of one size: nothing but their names tells them apart.
    let outcomes = Ranks::new(2).outcomes(cpu, |comm| {
        let layer = |seed| Linear::new(&Init::new(comm.runtime(), seed), 3, 3);
        let mut model = vec![layer(1)?, layer(2)?];
        let mut trainer = sharded(&comm, &model, config(), options(ZeroStage::Parameters, UnitOf::children()))?;
        if comm.rank() == 1 {
            model.reverse();
        }
        let x = autograd::Var::new(Tensor::normal(comm.runtime(), [2, 3], DType::F32, 0.0, 1.0, 9)?);
        let y = |_| Ok(Loss::mean(model[1].forward(&model[0].forward(&x)?)?.square()?.sum_all()?));
        trainer.step(y).map(|_| ())
    });
    refused(outcomes.unwrap(), &["all_gather", "unit `0`", "unit `1`"]);
}

#[test]
fn an_unused_unit_is_named_where_parameters_are_sharded() {
    let outcomes = Ranks::new(3).outcomes(cpu, |comm| {
        let model = Branches::new(comm.runtime())?;
        let options = options(ZeroStage::Parameters, UnitOf::children());
        let mut trainer = sharded(&comm, &model, config(), options)?;
        let x = autograd::Var::new(Tensor::normal(comm.runtime(), [2, 3], DType::F64, 0.0, 1.0, 9)?);
        let loss = |_| Ok(Loss::mean(model.left.forward(&model.both.forward(&x)?)?.square()?.sum_all()?));
        trainer.step(loss).map(|_| ())
    });
    for outcome in outcomes.unwrap() {
        let e = outcome.unwrap_err().to_string();
        let named = e.split("\nlast calls").next().unwrap_or_default();
        assert!(named.contains("never.weight") && named.contains("right.bias") && !named.contains("left"), "{e}");
    }
}
