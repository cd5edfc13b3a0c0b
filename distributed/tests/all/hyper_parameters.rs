//! Hyper-parameters in checkpoints: saved by any strategy at any cut, and taken over by any other where that is asked for.

use crate::prelude::*;

/// What the run that saves is configured with.
fn saving() -> ParamGroups<AdamWConfig> {
    let config = AdamWConfig { lr: 1e-2, betas: [0.8, 0.97], eps: 1e-4, weight_decay: 0.2, ..Default::default() };
    ParamGroups::new(config).group(|_, spec| spec.shape.rank() < 2, |c| c.weight_decay = 0.0)
}

/// Of other values, and of other groups, none of which has parameters that differ above.
fn going_on() -> ParamGroups<AdamWConfig> {
    ParamGroups::new(AdamWConfig { lr: 3.0, ..Default::default() })
        .group(|name, _| name.contains("fc1"), |c| c.eps = 1.0)
        .group(|_, spec| spec.shape.rank() < 2, |c| c.lr = 2.0)
        .group(|_, _| false, |c| c.lr = 7.0)
}

/// Arrangements of ranks: in stages or whole, sharded or not.
fn cuts() -> [Way; 6] {
    use Axis::{Data, Pipe, Shard, Tensor};
    let way = |axes: &[(Axis, usize)], stage: ZeroStage| {
        let mut way = Way::gpt(2).staged(ScheduleKind::OneFOneB, 1).zero(stage).over(axes);
        way.gpt.tied_head = true;
        if way.size(Pipe) == 1 { Way { stages: None, ..way } } else { way }
    };
    [
        way(&[(Data, 2)], ZeroStage::None),
        way(&[(Data, 2), (Shard, 2)], ZeroStage::Parameters),
        way(&[(Shard, 3)], ZeroStage::Optimizer),
        way(&[(Pipe, 2), (Tensor, 2)], ZeroStage::None),
        way(&[(Pipe, 2), (Data, 2)], ZeroStage::Gradients),
        way(&[(Tensor, 2)], ZeroStage::None),
    ]
}

/// Loads what comes before these steps, trains them, and saves.
fn steps(
    way: &Way,
    optimizer: ParamGroups<AdamWConfig>,
    what: HyperParameters,
    steps: Range<usize>,
    folder: &Folder,
) -> RunOutcome {
    let from = (steps.start > 0).then_some(folder);
    let outcome = way.ranks(|mesh| {
        Training::with(way, mesh, |builder| builder.optimizer(optimizer.clone()).hyper_parameters(what))?.go_on(
            from,
            steps.clone(),
            Some(folder),
        )
    });
    assembled(outcome.unwrap_or_else(|error| panic!("{way:?}: {error}")))
}

#[test]
fn any_strategy_takes_over_what_any_other_has_saved() {
    let (whole, cuts) = (Scratch::new("hyper-whole"), cuts());
    let mut expected = steps(&cuts[0].reference(), saving(), HyperParameters::Configured, 0..4, &whole.folder());
    expected.losses.drain(..2);
    expected.norms.drain(..2);
    for (k, from) in cuts.iter().enumerate() {
        let saved = Scratch::new("hyper-saved");
        steps(from, saving(), HyperParameters::Saved, 0..2, &saved.folder());
        // From each, to every other one in the course of all.
        for to in [&cuts[(k + 1) % cuts.len()], &cuts[(k + 3) % cuts.len()]] {
            let copy = Scratch::new("hyper-copy");
            copy_tree(&saved.0, &copy.0);
            let got = steps(to, going_on(), HyperParameters::Restored, 2..4, &copy.folder());
            let off = distance(&got, &expected);
            assert!(off < 1e-12, "from {from:?} to {to:?}: {off:e}");
        }
    }
}

/// Numbers that rules change themselves are state, although hyper-parameters are the configuration's.
#[test]
fn numbers_that_rules_adapt_are_resumed_at_any_cut() {
    for rule in [Rule::Prodigy, Rule::Lbfgs] {
        let cuts = cuts().map(|way| Way { rule, ..way });
        for (k, from) in cuts.iter().enumerate() {
            let saved = Scratch::new("hyper-adapted");
            let mut whole = from.go_on(None, 0..5, None);
            whole.losses.drain(..3);
            whole.norms.drain(..3);
            from.go_on(None, 0..3, Some(&saved.folder()));
            let again = distance(&from.go_on(Some(&saved.folder()), 3..5, None), &whole);
            assert_eq!(again, 0.0, "{from:?}");
            let to = &cuts[(k + 1) % cuts.len()];
            let off = distance(&to.go_on(Some(&saved.folder()), 3..5, None), &whole);
            assert!(off < CLOSE, "from {from:?} to {to:?}: {off:e}");
        }
    }
}

fn copy_tree(from: &std::path::Path, to: &std::path::Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => copy_tree(&entry.path(), &target),
            false => drop(std::fs::copy(entry.path(), target).unwrap()),
        }
    }
}

#[test]
fn the_configuration_wins_unless_asked() {
    let whole = Scratch::new("hyper-configured");
    steps(&Way::gpt(2), saving(), HyperParameters::Saved, 0..2, &whole.folder());
    let copies = [HyperParameters::Configured, HyperParameters::Saved, HyperParameters::Restored].map(|what| {
        let copy = Scratch::new("hyper-configured-copy");
        copy_tree(&whole.0, &copy.0);
        let sharded = Way::gpt(2).zero(ZeroStage::Parameters).over(&[(Axis::Shard, 2)]);
        steps(&sharded, going_on(), what, 2..3, &copy.folder())
    });
    assert_eq!(distance(&copies[0], &copies[1]), 0.0, "hyper-parameters that are saved are not taken over");
    assert!(distance(&copies[0], &copies[2]) > 0.1, "those that are asked for are");
}

/// A model of one rank, with its step.
fn alone(
    folder: &Folder,
    optimizer: Box<dyn optim::Optimizer<Cpu>>,
    model: &Mlp<Cpu>,
    what: HyperParameters,
    load: bool,
) -> Result<Vec<f64>> {
    let comm = NoOpCommunicator::new(&cpu(0)?);
    let mut step = TrainStep::builder(&comm.as_mesh(), model).optimizer(optimizer).hyper_parameters(what).build()?;
    if load {
        step.load(folder)?;
    }
    step.step(|_| model.loss(&cpu(0)?, 0, &[0, 1, 2]))?;
    step.save(folder, &BTreeMap::new())?;
    Ok(data_parallel(&step).optimizer().lrs())
}

fn mlp() -> Mlp<Cpu> {
    let model = Mlp::new(&Init::new(&cpu(0).unwrap(), 0)).unwrap();
    // Gives parameters their names, which optimizers in groups need.
    assert_eq!(model.named_parameters().len(), 6);
    model
}

#[test]
fn a_checkpoint_without_them_says_so() {
    let scratch = Scratch::new("hyper-none");
    let folder = scratch.folder();
    let (model, adamw) = (mlp(), AdamWConfig::default());
    let make = |model: &Mlp<Cpu>| Box::new(AdamW::new(model, adamw.clone()).unwrap());
    alone(&folder, make(&model), &model, HyperParameters::Configured, false).unwrap();
    let error = alone(&folder, make(&model), &model, HyperParameters::Restored, true).unwrap_err().to_string();
    assert!(
        error.contains("of the optimizer are not in the checkpoint") && error.contains("HyperParameters::Saved"),
        "{error}"
    );
}

#[test]
fn parameters_of_one_group_cannot_have_different_ones() {
    let scratch = Scratch::new("hyper-differ");
    let folder = scratch.folder();
    let model = mlp();
    let group = |linear: &Linear<Cpu>| [linear.weight.leaf(), linear.bias.as_ref().unwrap().leaf()];
    let groups = |model: &Mlp<Cpu>| {
        let all = AdamW::in_groups(AdamWConfig::default()).group(group(&model.a), |c| c.lr = 0.5);
        let all = all.and_then(|all| all.group(group(&model.b), |c| c.lr = 0.25));
        Box::new(all.and_then(|all| all.group(group(&model.c), |_| ())).unwrap())
    };
    alone(&folder, groups(&model), &model, HyperParameters::Saved, false).unwrap();
    let one = Box::new(AdamW::new(&model, AdamWConfig::default()).unwrap());
    let error = alone(&folder, one, &model, HyperParameters::Restored, true).unwrap_err().to_string();
    assert!(error.contains("b.bias") && error.contains("a.bias") && error.contains("`lr` [0.25] and [0.5]"), "{error}");
    // A rule that has others refuses them by name.
    let sgd = Box::new(Sgd::new(&model, SgdConfig { ..Default::default() }).unwrap());
    let error = alone(&folder, sgd, &model, HyperParameters::Restored, true).unwrap_err().to_string();
    assert!(error.contains("state/exp_avg") || error.contains("betas"), "{error}");
}

#[test]
fn a_schedule_starts_from_the_rate_that_was_saved() {
    let scratch = Scratch::new("hyper-schedule");
    let folder = scratch.folder();
    let model = mlp();
    let optimizer = |model: &Mlp<Cpu>, lr: f64| -> Box<dyn optim::Optimizer<Cpu>> {
        let matrices = Muon::over(
            MuonConfig { lr: 2.0 * lr, ..Default::default() },
            [model.a.weight.leaf(), model.b.weight.leaf()],
        );
        let rest =
            [model.a.bias.as_ref(), model.b.bias.as_ref(), model.c.bias.as_ref()].map(|bias| bias.unwrap().leaf());
        let rest = rest.into_iter().chain([model.c.weight.leaf()]);
        let rest = AdamW::over(AdamWConfig { lr, ..Default::default() }, rest).unwrap();
        let rest = rest.scheduled(|base: f64, step: u64| base / (1.0 + step as f64));
        Box::new(Combined::new(vec![Box::new(matrices.unwrap()), Box::new(rest)]).unwrap())
    };
    alone(&folder, optimizer(&model, 0.125), &model, HyperParameters::Saved, false).unwrap();
    let lrs = alone(&folder, optimizer(&model, 9.0), &model, HyperParameters::Restored, true).unwrap();
    assert_eq!(lrs, [0.25, 0.125 / 3.0]);
}

#[test]
fn those_that_are_restored_are_those_of_experts_too() {
    for stage in [ZeroStage::None, ZeroStage::Optimizer] {
        let (scratch, way) = (Scratch::new("hyper-experts"), Way::mixture(4).zero(stage));
        let way = way.over(&[(Axis::Data, 2), (Axis::Expert, 2)]);
        let groups = |lr: f64, what| {
            let ranks = way.ranks(|mesh| {
                let adamw = AdamWConfig { lr, ..Default::default() };
                let mut training =
                    Training::with(&way, mesh, |builder| builder.optimizer(adamw).hyper_parameters(what))?;
                match what {
                    HyperParameters::Restored => assert!(training.step.load(&scratch.folder())?.is_some()),
                    _ => training.step.save(&scratch.folder(), &BTreeMap::new())?,
                }
                training.step.strategy().hyper_parameters()
            });
            ranks.unwrap()
        };
        let first = groups(0.5, HyperParameters::Saved);
        assert!(first[0].len() == 2 && first[0][1].parameters.iter().all(|name| name.contains("experts")));
        assert!(groups(7.0, HyperParameters::Restored) == first, "{stage:?}");
    }
}
