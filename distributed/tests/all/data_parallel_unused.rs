//! Data parallelism where ranks differ: parameters that are unused or frozen, ranks that run out, gradients that
//! overflow.

use crate::{data_parallel::small, prelude::*};

/// A model of which ranks use different parts.
#[derive(Module)]
#[module(crate = "::nn")]
pub struct Branches<R: Runtime> {
    pub both: Linear<R>,
    pub left: Linear<R>,
    pub right: Linear<R>,
    pub never: Linear<R>,
}

impl Branches<Cpu> {
    pub fn new(rt: &Cpu) -> Result<Self> {
        let layer = |seed| Linear::new(&Init::new(rt, seed).dtype(DType::F64), 3, 3);
        Ok(Branches { both: layer(1)?, left: layer(2)?, right: layer(3)?, never: layer(4)? })
    }

    pub fn loss(&self, comm: &Comm<Cpu>) -> Result<Loss<Cpu>> {
        let x = Var::new(Tensor::normal(comm.runtime(), [2, 3], DType::F64, 0.0, 1.0, 9)?);
        let branch = if comm.rank() == 0 { &self.left } else { &self.right };
        Ok(Loss::mean(branch.forward(&self.both.forward(&x)?)?.square()?.sum_all()?))
    }
}

/// Some steps on one rank: one batch through the left branch, two through the right, over three.
pub fn branches_alone(steps: usize) -> Vec<f64> {
    let rt = Cpu::with_threads(1);
    let (model, comm) = (Branches::new(&rt).unwrap(), Arc::new(NoOpCommunicator::new(&rt)) as Comm<Cpu>);
    let config = TrainingConfig { accumulation: 3, ..config() };
    let options = BucketOptions { unused: Unused::Allow, ..small() };
    let mut trainer = bucketed(&comm, &model, config, options).unwrap();
    let x = Var::new(Tensor::normal(&rt, [2, 3], DType::F64, 0.0, 1.0, 9).unwrap());
    for _ in 0..steps {
        let micro = |k| {
            let branch = if k == 0 { &model.left } else { &model.right };
            Ok(Loss::mean(branch.forward(&model.both.forward(&x)?)?.square()?.sum_all()?))
        };
        trainer.step(micro).unwrap();
    }
    weights(&model).unwrap()
}

#[test]
fn parameters_unused_here_or_everywhere_are_allowed_on_request_or_named_before_the_update() {
    let one = branches_alone(2);
    for how in STAGES {
        let program = |unused: Unused| {
            move |comm: Comm<Cpu>| {
                let model = Branches::new(comm.runtime())?;
                let before = weights(&model)?;
                let mut trainer = Any::unused(&comm, &model, how, config(), unused)?;
                for _ in 0..2 {
                    let stepped = trainer.step_with(|_| model.loss(&comm));
                    // Where parameters are sharded nobody can be asked for the others' parts after a failure.
                    let looked_at = stepped.is_err() && how != ZeroStage::Parameters;
                    assert!(!looked_at || weights(&model)? == before, "{how:?}: updated");
                    stepped?;
                }
                trainer.weights(&model).map(|after| (before, after))
            }
        };
        let ranks = Ranks::new(3).run(cpu, program(Unused::Allow)).unwrap();
        assert!(ranks.iter().all(|(_, after)| *after == ranks[0].1), "{how:?}");
        for (before, after) in ranks {
            close(&after, &one, 1e-12, &format!("{how:?}"));
            let changed: Vec<bool> = (0..4).map(|k| after[12 * k..][..12] != before[12 * k..][..12]).collect();
            assert_eq!(changed, [true, true, true, false], "{how:?}");
        }
        let sharded = how == ZeroStage::Parameters;
        let outcomes = Ranks::new(3).outcomes(cpu, program(Unused::Error)).unwrap();
        let errors: Vec<Error> = outcomes.into_iter().map(|outcome| outcome.unwrap_err()).collect();
        let named = |error: &Error| matches!(error.kind(), ErrorKind::MissingGradient { names } if names.iter().any(|name| &**name == "never.weight"));
        assert!(sharded || errors.iter().any(named), "{how:?}: {errors:?}");
        for error in errors {
            // Found where it begins: the branches' units are asked for at once.
            let words: &[&str] = if sharded { &["unit `left`", "unit `right`"] } else { &["never.weight"] };
            assert!(words.iter().all(|word| error.to_string().contains(word)), "{how:?}: {error}");
            let kind = matches!(error.kind(), ErrorKind::MissingGradient { .. } | ErrorKind::Peer { .. });
            assert!(sharded || kind, "{how:?}: {error}");
        }
    }
}

/// One rank; in step `s` it has the first example of ranks `s` to `n`, those that have not run out.
fn those_left(n: usize, without: usize) -> Trace {
    let rt = Cpu::with_threads(1);
    let model = Mlp::new(&Init::new(&rt, 0).dtype(DType::F64)).unwrap();
    let mut trainer = simple(&rt, &model, config()).unwrap();
    let mut trace = Trace::default();
    for step in 0..n - without {
        let left: Vec<usize> = (step + without..n).collect();
        trace.losses.push(trainer.step(|_| model.loss(&rt, step, &left)).unwrap().loss().unwrap());
    }
    trace.weights.push(weights(&model).unwrap());
    trace
}

/// Every strategy, with parameters that may be unused and with those that may not.
fn uneven() -> impl Iterator<Item = (ZeroStage, Unused)> {
    STAGES.into_iter().flat_map(|how| [(how, Unused::Error), (how, Unused::Allow)])
}

#[test]
fn ranks_that_run_out_or_have_no_batch_take_part_until_all_are_done() {
    for (n, without) in [(2, 0), (3, 0), (5, 0), (1, 1), (2, 1), (3, 1), (5, 1)] {
        let one = those_left(n, without);
        for (how, unused) in uneven() {
            let many = everywhere(n, |comm| {
                let model = Mlp::new(&Init::new(comm.runtime(), 0).dtype(DType::F64))?;
                let mut trainer = Any::unused(&comm, &model, how, config(), unused)?;
                let mut trace = Trace::default();
                // Rank r has r + 1 batches of one example, or r. Where every parameter needs a gradient its last one
                // runs again, for nothing.
                let (batches, mut calls) = (comm.rank() + 1 - without, 0);
                // What runs for nothing is not even finite.
                let loss = |&step: &usize| {
                    calls += 1;
                    let own = model.loss(comm.runtime(), step, &[comm.rank()])?;
                    let factor = if calls > batches { f64::INFINITY } else { 1.0 };
                    Loss::sum(own.total().mul(factor)?, own.weight())
                };
                trainer.run(0..batches, loss, |loss| {
                    assert_eq!(nn::counted_rows(7), 7, "rows do not count after a step");
                    trace.losses.push(loss);
                })?;
                trace.weights.push(trainer.weights(&model)?);
                Ok(trace)
            });
            assert!(difference(&many, &one) < 1e-11, "{n}, {without}, {how:?}, {unused:?}: {many:?} {one:?}");
        }
    }
}

/// What weighs nothing uses nothing: a parameter that no other example used stays.
#[test]
fn what_weighs_nothing_uses_no_parameter() {
    for how in STAGES {
        everywhere(2, |comm| {
            let model = Branches::new(comm.runtime())?;
            let mut trainer = Any::unused(&comm, &model, how, config(), Unused::Allow)?;
            let right = |trainer: &Any| -> Result<Vec<f64>> { Ok(trainer.weights(&model)?[24..36].to_vec()) };
            let before = right(&trainer)?;
            // Rank 0 goes left, rank 1 right.
            trainer.step_with(|_| match comm.rank() {
                0 => model.loss(&comm),
                _ => model.loss(&comm)?.weightless(),
            })?;
            assert_eq!(right(&trainer)?, before, "{how:?}");
            Ok(Trace::default())
        });
    }
}

#[test]
fn a_step_that_weighs_nothing_is_an_error_and_changes_nothing() {
    for how in STAGES {
        let outcomes = Ranks::new(2).outcomes(cpu, |comm| {
            let model = Mlp::new(&Init::new(comm.runtime(), 0))?;
            let before = weights(&model)?;
            let mut trainer = Any::new(&comm, &model, how, config())?;
            let step = trainer.step_with(|_| Loss::sum(loss_sum(&model, &comm)?.mul(0.0)?, 0.0));
            // Where parameters are sharded nobody can be asked for the others' parts after a failure.
            assert!(how == ZeroStage::Parameters || weights(&model)? == before);
            step.map(|_| ())
        });
        refused(outcomes.unwrap(), &["weight of the losses of all ranks and micro-batches is 0"]);
    }
}

/// Only a rank whose losses weigh nothing may use nothing.
#[test]
fn a_loss_that_counts_and_uses_no_parameter_is_an_error() {
    // Where parameters are sharded, a rank that reads none calls nothing that the others call.
    for how in [ZeroStage::None, ZeroStage::Optimizer, ZeroStage::Gradients] {
        let outcomes = Ranks::new(2).outcomes(cpu, |comm| {
            let model = Mlp::new(&Init::new(comm.runtime(), 0))?;
            let mut trainer = Any::new(&comm, &model, how, config())?;
            let apart = || Var::leaf("apart", Tensor::ones(comm.runtime(), [], DType::F32)?);
            let step = trainer.step_with(|_| match comm.rank() {
                0 => model.loss(comm.runtime(), 0, &[0]),
                _ => Ok(Loss::mean(apart()?)),
            });
            step.map(drop)
        });
        refused(outcomes.unwrap(), &["a.weight", "c.bias"]);
    }
}

#[test]
fn a_gradient_that_is_not_finite_is_found_where_it_arises() {
    let options = BucketOptions { check_finite: true, ..small() };
    let outcomes = Ranks::new(3).outcomes(cpu, |comm| {
        let model = Mlp::new(&Init::new(comm.runtime(), 0))?;
        let mut trainer = bucketed(&comm, &model, config(), options.clone())?;
        trainer.step(|_| {
            let loss = model.loss(comm.runtime(), 0, &own(&comm))?;
            let nan = model.b.bias.as_ref().expect("a bias").var().mul(f64::NAN)?.sum_all()?;
            let loss = if comm.rank() == 1 { Loss::sum(loss.total().add(&nan)?, loss.weight())? } else { loss };
            Ok(loss)
        })?;
        Ok(())
    });
    refused(outcomes.unwrap(), &["b.bias", "not finite on rank 1, in bucket 1"]);
}

#[test]
fn a_gradient_of_f64_may_be_larger_than_an_f32() {
    everywhere(2, |comm| {
        let options = BucketOptions { check_finite: true, ..small() };
        let model = Linear::new(&Init::new(comm.runtime(), 0).dtype(DType::F64), 1, 1)?;
        let plain = TrainingConfig { max_norm: None, ..config() };
        let mut trainer = bucketed(&comm, &model, plain, options)?;
        let x = Var::new(Tensor::full(comm.runtime(), [1, 1], DType::F64, 1e39)?);
        trainer.step(|_| Ok(Loss::mean(model.forward(&x)?.sum_all()?)))?;
        Ok(Trace { weights: vec![weights(&model)?], ..Default::default() })
    });
}

fn loss_sum(model: &Mlp<Cpu>, comm: &Comm<Cpu>) -> Result<Var<Cpu>> {
    let x = Var::new(Tensor::normal(comm.runtime(), [4, 5], DType::F32, 0.0, 1.0, 1)?);
    model.forward(&x)?.square()?.sum_all()
}
