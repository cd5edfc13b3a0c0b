//! Frozen parameters: what they cost, checkpoints, and ranks that do not freeze the same ones.

use crate::{
    pipeline_common::{rows, stage_weights, two_stages},
    prelude::*,
};

#[test]
fn data_parallelism_spends_nothing_on_them() {
    Ranks::new(2)
        .run(cpu, |comm| {
            let counted = Arc::new(CountingCommunicator::new(comm.clone()));
            let (rt, init) = (comm.runtime(), Init::new(comm.runtime(), 0));
            let linear = |width, height| Linear::new(&init, width, height).map(Linear::without_bias);
            let model = vec![linear(64, 256)?, linear(256, 256)?, linear(256, 64)?];
            model.freeze_where(|name| name.starts_with("1."));
            let before = [MemoryCategory::Gradients, MemoryCategory::Optimizer].map(|u| rt.memory().of(u).live);
            let (comm, config) = (counted.clone() as Comm<Cpu>, TrainingConfig::default());
            let mut trainer = bucketed(&comm, &model, config, BucketOptions::default())?;
            let trained = 2 * 64 * 256 * 4;
            let after = [MemoryCategory::Gradients, MemoryCategory::Optimizer].map(|u| rt.memory().of(u).live);
            assert_eq!([after[0] - before[0], after[1] - before[1]], [trained, 2 * trained]);
            for _ in 0..2 {
                counted.reset();
                let x = Var::new(Tensor::normal(rt, [4, 64], DType::F32, 0.0, 1.0, 3)?);
                let y = model.iter().try_fold(x, |x, layer| layer.forward(&x)?.tanh())?;
                trainer.step(|_| Ok(Loss::mean(y.square()?.sum_all()?)))?;
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
    let mut trainer = simple(&rt, &model, config()).unwrap();
    for step in 0..4 {
        freeze(&model, step);
        trainer.step(|_| model.loss(&rt, step, &(0..EXAMPLES).collect::<Vec<_>>())).unwrap();
    }
    weights(&model).unwrap()
}

/// Whether a trainer that loads was made when parameters were frozen already, or still trained.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Made {
    Frozen,
    Trained,
}

#[test]
fn checkpoints_pass_between_strategies() {
    let one = Trace { weights: vec![alone()], ..Default::default() };
    for from in STAGES {
        let scratch = Scratch::new(&format!("frozen-{from:?}"));
        let folder = scratch.folder();
        let run = |how: ZeroStage, n: usize, steps: std::ops::Range<usize>, made: Made| {
            everywhere(n, |comm| {
                let model = Mlp::new(&Init::new(comm.runtime(), steps.start as u64).dtype(DType::F64))?;
                if made == Made::Frozen {
                    freeze(&model, steps.start);
                }
                let mut trainer = Any::new(&comm, &model, how, config())?;
                freeze(&model, steps.start);
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
        run(from, 2, 0..2, Made::Frozen);
        for (to, n) in STAGES.into_iter().flat_map(|to| [(to, 1), (to, 2), (to, 3)]) {
            for made in [Made::Frozen, Made::Trained] {
                let off = difference(&run(to, n, 2..4, made), &one);
                assert!(off <= 1e-11, "{from:?} to {to:?} on {n}, {made:?}: {off:e}");
            }
        }
    }
}

/// An optimizer that has the frozen parameters too, of types without and with master copies.
#[test]
fn an_optimizer_of_frozen_parameters_goes_on_from_a_checkpoint() {
    for dtype in [DType::F64, DType::BF16] {
        let scratch = Scratch::new("frozen-with");
        let folder = scratch.folder();
        let run = |n: usize, steps: std::ops::Range<usize>| {
            everywhere(n, |comm| {
                let model = Mlp::new(&Init::new(comm.runtime(), steps.start as u64).dtype(dtype))?;
                freeze(&model, steps.start);
                let leaves: Vec<_> = model.parameters().iter().map(|p| p.leaf()).collect();
                let adamw = AdamWConfig { lr: 1e-2, weight_decay: 0.1, ..Default::default() };
                let optimizer = AdamW::over(adamw, leaves)?;
                let options = BucketOptions::default();
                let mut trainer =
                    TrainStep::builder(&comm, &model).optimizer(optimizer).config(config()).buckets(options).build()?;
                assert_eq!(trainer.load(&folder)?.is_some(), steps.start > 0);
                for step in steps.clone() {
                    freeze(&model, step);
                    trainer.step(|_| model.loss(comm.runtime(), step, &own(&comm)))?;
                }
                if steps.end == 2 {
                    trainer.save(&folder, &CheckpointNotes::new())?;
                }
                Ok(Trace { weights: vec![weights(&model)?], ..Default::default() })
            })
        };
        let whole = run(2, 0..4);
        run(2, 0..2);
        assert!(run(2, 2..4) == whole, "{dtype}");
    }
}

/// Master copies follow values that were loaded while a parameter was frozen: what trains it later goes on from those.
#[test]
fn one_that_was_frozen_when_it_was_loaded_can_be_trained_later() {
    for (how, n) in STAGES.into_iter().flat_map(|how| [(how, 1), (how, 2)]) {
        let scratch = Scratch::new("unfrozen");
        let folder = scratch.folder();
        let largest = |a: &[f64], b: &[f64]| a.iter().zip(b).fold(0.0, |most: f64, (a, b)| most.max((a - b).abs()));
        everywhere(n, |comm| {
            let made = |seed: u64| -> Result<(Mlp<Cpu>, Any)> {
                let model = Mlp::new(&Init::new(comm.runtime(), seed).dtype(DType::BF16))?;
                let trainer = Any::new(&comm, &model, how, config())?;
                freeze(&model, 0);
                Ok((model, trainer))
            };
            let (model, trainer) = made(0)?;
            trainer.save(&folder)?;
            let saved = trainer.weights(&model)?;
            let (model, mut trainer) = made(7)?;
            let before = trainer.weights(&model)?;
            trainer.load(&folder)?;
            assert_eq!(trainer.weights(&model)?, saved);
            model.unfreeze_where(|_| true);
            trainer.step(&model, &comm, 0)?;
            let trained = trainer.weights(&model)?;
            // AdamW moves a weight by about its rate.
            let off = largest(&trained, &saved);
            assert!(largest(&before, &saved) > 0.3 && off < 0.03, "{how:?} on {n}: {off}");
            Ok(Trace::default())
        });
    }
}

#[test]
fn ranks_that_freeze_different_ones_disagree() {
    for how in STAGES {
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
            refused(outcomes.unwrap(), &["ranks disagree", "`b.bias` frozen"]);
        }
    }
}

/// Vectors, which are a group of the optimizer, and a matrix; the matrix and one vector are trained from step 2 on.
fn unfreeze(model: &Mlp<Cpu>, step: usize) {
    let frozen = |name: &str| name.ends_with("bias") || name == "b.weight";
    model.freeze_where(|name| frozen(name) && (step < 2 || (name != "b.weight" && name != "c.bias")));
    if step >= 2 {
        model.unfreeze_where(|name| name == "b.weight" || name == "c.bias");
    }
}

/// One rank, whose trainer was made before anything was frozen.
fn unfrozen_alone() -> Trace {
    let rt = Cpu::with_threads(1);
    let model = Mlp::new(&Init::new(&rt, 0).dtype(DType::F64)).unwrap();
    let mut trainer = simple(&rt, &model, config()).unwrap();
    for step in 0..6 {
        unfreeze(&model, step);
        trainer.step(|_| model.loss(&rt, step, &(0..EXAMPLES).collect::<Vec<_>>())).unwrap();
    }
    Trace { weights: vec![weights(&model).unwrap()], ..Default::default() }
}

#[test]
fn what_was_frozen_from_the_start_is_trained_once_it_is_not() {
    let one = unfrozen_alone();
    for (how, n) in STAGES.into_iter().flat_map(|how| [(how, 1), (how, 2), (how, 3)]) {
        let scratch = Scratch::new("unfrozen");
        let folder = scratch.folder();
        let run = |steps: std::ops::Range<usize>, made: usize| {
            everywhere(n, |comm| {
                let model = Mlp::new(&Init::new(comm.runtime(), steps.start as u64).dtype(DType::F64))?;
                unfreeze(&model, made);
                let mut trainer = Any::new(&comm, &model, how, config())?;
                unfreeze(&model, steps.start);
                assert_eq!(trainer.load(&folder)?.is_some(), steps.start > 0);
                for step in steps.clone() {
                    unfreeze(&model, step);
                    trainer.step(&model, &comm, step)?;
                    if step == 3 && steps.start == 0 {
                        trainer.save(&folder)?;
                    }
                }
                Ok(Trace { weights: vec![trainer.weights(&model)?], ..Default::default() })
            })
        };
        for (steps, made) in [(0..6, 0), (4..6, 0), (4..6, 2)] {
            let off = difference(&run(steps.clone(), made), &one);
            assert!(off <= 1e-11, "{how:?} on {n}, {steps:?}, {made}: {off:e}");
        }
    }
}

#[test]
fn a_later_stage_that_was_frozen_from_the_start_finds_its_state() {
    let scratch = Scratch::new("thawed-stage");
    let folder = scratch.folder();
    let run = |steps: Range<usize>| {
        let rt = Cpu::with_threads(1);
        let mut trainer = two_stages(&rt, |stages| stages[1].freeze_where(|name| name.ends_with("weight")));
        trainer.pipeline().expect("stages").stages()[&1].unfreeze_where(|_| true);
        assert_eq!(trainer.load(&folder).unwrap().is_some(), steps.start > 0);
        for step in steps.clone() {
            let x = rows(&rt, step as u64, 2);
            trainer.step(|_| MicroBatches::split(from_ref(&x), from_ref(&x), 2)).unwrap();
        }
        if steps.end == 2 {
            trainer.save(&folder, &CheckpointNotes::new()).unwrap();
        }
        stage_weights(trainer.pipeline().expect("stages").stages().values())
    };
    let whole = run(0..4);
    run(0..2);
    assert_eq!(run(2..4), whole);
}

#[test]
fn ranks_that_unfreeze_different_ones_disagree() {
    for how in STAGES {
        let outcomes = Ranks::new(2).outcomes(cpu, |comm| {
            let model = Mlp::new(&Init::new(comm.runtime(), 0))?;
            freeze(&model, 0);
            let mut trainer = Any::new(&comm, &model, how, config())?;
            trainer.step_with(|_| model.loss(comm.runtime(), 0, &own(&comm)))?;
            model.unfreeze_where(|name| name == "b.weight" && comm.rank() == 0);
            trainer.step(&model, &comm, 1).map(|_| ())
        });
        for outcome in outcomes.unwrap() {
            let error = outcome.unwrap_err().to_string();
            assert!(error.contains("ranks disagree") || error.contains("are trained from now on"), "{how:?}: {error}");
        }
    }
}

/// An optimizer with groups that were made by hand does not know of further parameters.
#[test]
fn an_optimizer_that_knows_no_group_says_so() {
    let rt = Cpu::with_threads(1);
    let model = Mlp::new(&Init::new(&rt, 0)).unwrap();
    freeze(&model, 0);
    let named = model.named_parameters();
    let of = |layer: &str| {
        let own = named.iter().filter(move |(name, p)| name.starts_with(layer) && p.requires_grad());
        own.map(|(_, p)| p.leaf()).collect::<Vec<_>>()
    };
    let optimizer = AdamW::in_groups(AdamWConfig::default()).group(of("a"), |_| {}).unwrap();
    let optimizer = optimizer.group([of("b"), of("c")].concat(), |_| {}).unwrap();
    let comm = NoOpCommunicator::new(&rt);
    let mut trainer = TrainStep::builder(&comm, &model).optimizer(optimizer).build().unwrap();
    let mut step = || trainer.step(|_| model.loss(&rt, 0, &[0])).map(|_| ());
    step().unwrap();
    model.unfreeze_where(|name| name == "b.weight");
    let error = step().unwrap_err().to_string();
    assert!(error.contains("`b.weight`: none of the 2 groups of"), "{error}");
}
