//! What ranks must have in common when a trainer is made, and what they must not.

use autograd::set_random_stream;
use distributed::comm::all_ok_after;
use optim::{ConstantLr, Cosine};

use crate::prelude::*;

/// What is different about rank 1's optimizer.
const DIFFERENT: [&str; 6] = ["decay", "betas", "rule", "groups", "schedule", "order"];

fn optimizer(model: &Mlp<Cpu>, how: &str) -> Result<Box<dyn Optimizer<Cpu>>> {
    let mut leaves: Vec<_> = model.parameters().iter().map(|p| p.leaf()).collect();
    let mut own = AdamWConfig { weight_decay: 0.0, ..Default::default() };
    match how {
        "decay" => own.weight_decay = 0.1,
        "betas" => own.betas = [0.8, 0.999],
        "rule" => return Ok(Box::new(FlatOptimizer::over(LionConfig { lr: own.lr, ..Default::default() }, leaves)?)),
        "groups" => {
            let rest = leaves.split_off(3);
            return Ok(Box::new(AdamW::in_groups(own).group(leaves, |_| {})?.group(rest, |_| {})?));
        }
        "schedule" => return Ok(Box::new(AdamW::over(own, leaves)?.scheduled(Cosine { t_max: 10, eta_min: 0.0 }))),
        "order" => leaves.reverse(),
        _ => {}
    }
    Ok(Box::new(AdamW::over(own, leaves)?.scheduled(ConstantLr)))
}

fn shards(how: &str) -> ParamGroups<AdamWConfig> {
    let mut own = AdamWConfig { weight_decay: 0.0, ..Default::default() };
    match how {
        "decay" => own.weight_decay = 0.1,
        "betas" => own.betas = [0.8, 0.999],
        _ => {}
    }
    let member = if how == "groups" { "a." } else { "b." };
    let groups = ParamGroups::new(own).group(move |name, _| name.starts_with(member), |c| c.eps = 1e-7);
    if how == "schedule" { groups.scheduled(Cosine { t_max: 10, eta_min: 0.0 }) } else { groups }
}

#[test]
fn optimizers_must_be_the_same() {
    for what in DIFFERENT {
        for sharded in [false, true] {
            if sharded && ["rule", "order"].contains(&what) {
                continue;
            }
            let outcomes = Ranks::new(2).outcomes(cpu, |comm| {
                let model = Mlp::new(&Init::new(comm.runtime(), 0))?;
                let how = if comm.rank() == 1 { what } else { "" };
                let config = TrainingConfig::default();
                match sharded {
                    true => TrainStep::builder(&comm, &model)
                        .optimizer(shards(how))
                        .config(config)
                        .zero(ZeroOptions::default())
                        .build()
                        .map(|_| ()),
                    false => {
                        let (optimizer, options) = (optimizer(&model, how)?, BucketOptions::default());
                        TrainStep::builder(&comm, &model)
                            .optimizer(optimizer)
                            .config(config)
                            .buckets(options)
                            .build()
                            .map(|_| ())
                    }
                }
            });
            for outcome in outcomes.unwrap() {
                let error = outcome.unwrap_err();
                assert!(matches!(error.kind(), ErrorKind::Mismatch { .. }), "{what}, sharded: {sharded}: {error}");
            }
        }
    }
}

#[test]
fn an_optimizer_of_parameters_that_are_not_the_models_is_refused() {
    let rt = Cpu::with_threads(1);
    let comm = std::sync::Arc::new(distributed::comm::NoOpCommunicator::new(&rt)) as distributed::comm::Comm<Cpu>;
    let [model, other] = [0, 1].map(|seed| Mlp::new(&Init::new(&rt, seed)).unwrap());
    let optimizer = optimizer(&other, "").unwrap();
    let made = TrainStep::builder(&comm, &model).optimizer(optimizer).config(config()).build();
    let error = made.map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("a.weight") && error.contains("not in the model"), "{error}");
}

/// The mask that this thread draws next.
fn mask(rt: &Cpu) -> Result<Vec<f32>> {
    let dropout = Dropout::new(0.5)?;
    no_grad(|| dropout.forward(&Var::new(Tensor::ones(rt, [64], DType::F32)?)))?.value()?.to_vec()
}

#[test]
fn ranks_draw_different_masks_from_one_seed() {
    for how in STAGES {
        let scratch = Scratch::new(&format!("masks-{how:?}"));
        let folder = scratch.folder();
        let run = |n: usize, load: bool, seed: u64| {
            let masks = Ranks::new(n).run(cpu, |comm| {
                manual_seed(seed);
                let model = Mlp::new(&Init::new(comm.runtime(), 0))?;
                let mut trainer = Any::new(&comm, &model, how, config())?;
                if load {
                    trainer.load(&folder)?;
                } else {
                    mask(comm.runtime())?;
                    trainer.step_with(|_| model.loss(comm.runtime(), 0, &own(&comm)))?;
                    trainer.save_with(&folder, CheckpointNotes::new())?;
                }
                mask(comm.runtime())
            });
            masks.unwrap()
        };
        let differ = |masks: &[Vec<f32>]| (0..masks.len()).all(|i| (0..i).all(|j| masks[i] != masks[j]));
        let saved = run(2, false, 5);
        assert!(differ(&saved), "{how:?}");
        // Two ranks resume two with their masks. Of four, each has masks of its own, whatever the process's seed.
        assert_eq!(run(2, true, 5), saved, "{how:?}");
        let more = run(4, true, 5);
        assert!(differ(&more) && more[..2] == saved[..], "{how:?}");
        assert_eq!(run(4, true, 6), more, "{how:?}");
        assert_eq!(run(1, true, 6), saved[..1], "{how:?}");
    }
}

#[test]
fn ranks_in_one_stream_draw_the_same_masks() {
    let masks = Ranks::new(3).run(cpu, |comm| {
        let model = Mlp::new(&Init::new(comm.runtime(), 0))?;
        let _trainer = Any::new(&comm, &model, ZeroStage::None, config())?;
        set_random_stream(0);
        manual_seed(1);
        mask(comm.runtime())
    });
    let masks = masks.unwrap();
    assert!(masks.iter().all(|mask| *mask == masks[0]));
}

/// SGD with momentum for the last layer, AdamW for the rest.
fn combined(model: &Mlp<Cpu>, lr: f64) -> Result<Box<dyn Optimizer<Cpu>>> {
    let named = model.named_parameters();
    let (last, rest): (Vec<_>, Vec<_>) = named.into_iter().partition(|(name, _)| name.starts_with("c."));
    let leaves =
        |of: Vec<(String, _)>| of.into_iter().map(|(_, p): (String, nn::Param<Cpu>)| p.leaf()).collect::<Vec<_>>();
    let sgd = Sgd::over(SgdConfig { lr, momentum: 0.9, ..Default::default() }, leaves(last))?;
    let adamw = AdamW::over(AdamWConfig { lr, ..Default::default() }, leaves(rest))?;
    Ok(Box::new(Combined::new(vec![Box::new(adamw), Box::new(sgd)])?))
}

#[test]
fn combined_optimizers_keep_the_programs_hyper_parameters() {
    let scratch = Scratch::new("combined");
    let folder = scratch.folder();
    let run = |from: usize, to: usize, lr: f64| {
        everywhere(2, |comm| {
            let model = Mlp::new(&Init::new(comm.runtime(), from as u64).dtype(DType::F64))?;
            let optimizer = combined(&model, lr)?;
            let mut trainer = TrainStep::builder(&comm, &model).optimizer(optimizer).config(config()).build()?;
            if from > 0 {
                let manifest = trainer.load(&folder)?.expect("a checkpoint");
                assert!(manifest.names().any(|name| name == "state/momentum_buffer/c.weight"));
                assert!(!manifest.names().any(|name| name.contains("/0/") || name.contains("group")));
                assert_eq!(data_parallel(&trainer).optimizer().lrs(), [lr, lr]);
            }
            for step in from..to {
                trainer.step(|_| model.loss(comm.runtime(), step, &own(&comm)))?;
            }
            if from == 0 && to == 2 {
                trainer.save(&folder, &CheckpointNotes::new())?;
            }
            Ok(Trace { weights: vec![weights(&model)?], ..Default::default() })
        })
    };
    run(0, 2, 1e-2);
    // What follows is what would have followed, and another rate is the program's.
    assert_eq!(run(2, 4, 1e-2), run(0, 4, 1e-2));
    assert!(run(2, 4, 1e-3) != run(0, 4, 1e-2));
}

#[test]
fn a_trainer_that_is_dropped_leaves_the_model_where_parameters_are_whole() {
    for stage in [ZeroStage::Optimizer, ZeroStage::Gradients] {
        everywhere(2, |comm| {
            let model = Mlp::new(&Init::new(comm.runtime(), 0))?;
            let mut trainer = Any::new(&comm, &model, stage, config())?;
            trainer.step(&model, &comm, 0)?;
            drop(trainer);
            Ok(Trace { weights: vec![weights(&model)?], ..Default::default() })
        });
    }
}

#[test]
fn a_graph_from_before_an_update_or_a_load_is_stale_after_it() {
    for (how, n) in STAGES.into_iter().flat_map(|how| [(how, 1), (how, 2)]) {
        let scratch = Scratch::new("stale");
        let outcomes = Ranks::new(n).outcomes(cpu, |comm| {
            let model = Mlp::new(&Init::new(comm.runtime(), 0))?;
            let mut trainer = Any::new(&comm, &model, how, config())?;
            for loads in [false, true] {
                let before = model.loss(comm.runtime(), 0, &own(&comm))?;
                if loads {
                    trainer.load(&scratch.folder())?;
                } else {
                    trainer.step(&model, &comm, 1)?;
                    trainer.save(&scratch.folder())?;
                }
                let error = autograd::backward(before.total()).map(|_| ()).unwrap_err();
                assert!(matches!(error.kind(), ErrorKind::Stale { .. }), "{how:?} on {n}, {loads}: {error}");
            }
            Ok(())
        });
        outcomes.unwrap().into_iter().for_each(|outcome| outcome.unwrap());
    }
}

/// A thread tells other ranks that this one still works: what it panics of is the rank's own.
#[test]
fn a_panic_while_ranks_wait_for_work_names_its_rank() {
    let outcomes = Ranks::new(3).outcomes(cpu, |comm| {
        let faulty = comm.rank() == 1;
        let comm: Comm<Cpu> = if faulty { Arc::new(FaultyCommunicator::new(comm, 0, Fault::Panic)) } else { comm };
        all_ok_after(&comm, "a test", || Ok(()))
    });
    refused(outcomes.unwrap(), &["a panic on purpose"]);
}
