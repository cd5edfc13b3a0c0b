//! Local updates that are resumed from checkpoints, by as many ranks or another number.

use crate::{
    local_updates::{SGD, adam, every, model, own},
    prelude::*,
};

type Local = LocalSteps<Cpu, TrainStep<Cpu>>;

/// Steps from `from` to `to`, loaded if they do not begin the run, and saved if asked.
fn resumed(
    comm: &Comm<Cpu>,
    folder: &Folder,
    options: &LocalUpdates,
    steps: (usize, usize),
    save: bool,
) -> Result<Vec<f64>> {
    resumed_by(comm, folder, (DiLoCo::default(), options), steps, save)
}

fn resumed_by(
    comm: &Comm<Cpu>,
    folder: &Folder,
    (rule, options): (impl OuterRule<Cpu> + 'static, &LocalUpdates),
    (from, to): (usize, usize),
    save: bool,
) -> Result<Vec<f64>> {
    let (rt, model) = (comm.runtime(), model(comm.runtime())?);
    let mut step: Local = LocalSteps::new(comm, &model, adam(rt, &model)?, rule, options.clone())?;
    if from > 0 {
        folder.load_latest(comm, &mut step)?;
    }
    for k in from..to {
        step.step(|_| model.loss(rt, k, &own(comm.rank(), comm.size())))?;
    }
    if save {
        folder.save(comm, to as u64, &step, &Default::default())?;
    }
    weights(&model)
}

/// Runs of `rule` on 1 to 3 ranks, resumed in the middle of a round, and of a sum that is under way.
fn goes_on(rule: impl OuterRule<Cpu> + Clone + 'static, options: &LocalUpdates) {
    for n in [1, 2, 3] {
        let scratch = Scratch::new("local-updates");
        let folder = scratch.folder();
        let run = |steps: (usize, usize), save: bool| {
            Ranks::new(n).run(cpu, |c| resumed_by(&c, &folder, (rule.clone(), options), steps, save)).unwrap()
        };
        let whole = run((0, 13), false);
        for at in [3, 4, 7] {
            run((0, at), true);
            assert!(run((at, 13), false) == whole, "{rule:?}, {options:?}, {n} ranks, at {at}");
        }
    }
}

#[test]
fn a_run_that_is_resumed_between_meetings_goes_on_to_the_bit() {
    let streamed = LocalUpdates { every: Some(6), fragments: 2, delay: 2, keep: 0.25, ..Default::default() };
    goes_on(DiLoCo::default(), &every(4));
    goes_on(DiLoCo::default(), &streamed);
    goes_on(SlowMo::default(), &streamed);
}

#[test]
fn another_number_of_ranks_begins_with_the_global_weights() {
    let scratch = Scratch::new("local-updates-ranks");
    let folder = scratch.folder();
    Ranks::new(3).run(cpu, |c| resumed(&c, &folder, &every(4), (0, 6), true)).unwrap();
    let met = Ranks::new(3).run(cpu, |c| resumed(&c, &scratch.folder(), &every(4), (0, 4), false)).unwrap();
    for n in [1, 2, 5] {
        let all = Ranks::new(n).run(cpu, |c| resumed(&c, &folder, &every(4), (6, 6), false)).unwrap();
        assert!(all.iter().all(|rank| *rank == met[0]), "{n} ranks");
        Ranks::new(n).run(cpu, |c| resumed(&c, &folder, &every(4), (6, 12), false)).unwrap();
    }
    let together = Ranks::new(2).run(cpu, |comm| {
        let model = model(comm.runtime())?;
        let inner = adam(comm.runtime(), &model)?;
        let mut step: Local = LocalSteps::new(&comm, &model, inner, DiLoCo::default(), every(4))?;
        folder.load_latest(&comm, &mut step)?;
        Ok(lost_at_resize(&step))
    });
    assert_eq!(together.unwrap(), [None; 2]);
    // The parameters alone, for a model that is trained otherwise or not at all.
    let rt = cpu(0).unwrap();
    let other = model(&rt).unwrap();
    CheckpointReader::open(folder.step(6)).unwrap().load_parameters(&other, |name| Some(name.into())).unwrap();
    assert!(weights(&other).unwrap() == met[0]);
}

/// Loss weights of earlier ranks do not count for another number of ranks, which begin with the global weights.
#[test]
fn another_number_of_ranks_weighs_its_own_steps_alone() {
    let by_hand = LocalUpdates { every: None, ..LocalUpdates::default() };
    let scratch = [Scratch::new("local-updates-met"), Scratch::new("local-updates-apart")];
    let made = |comm: &Comm<Cpu>| -> Result<(Mlp<Cpu>, Local)> {
        let model = model(comm.runtime())?;
        let inner = TrainStep::builder(&NoOpCommunicator::new(comm.runtime()), &model);
        let inner = inner.optimizer(SgdConfig { lr: SGD, ..Default::default() }).build()?;
        let step = LocalSteps::new(comm, &model, inner, LocalSgd, by_hand.clone())?;
        Ok((model, step))
    };
    let saved = Ranks::new(3).run(cpu, |comm| {
        let (model, mut step) = made(&comm)?;
        for k in 0..3 {
            step.step(|_| model.loss(comm.runtime(), k, &own(comm.rank(), 3)))?;
            if k == 0 {
                step.synchronize()?;
                step.save(&scratch[0].folder(), &Default::default())?;
            }
        }
        step.save(&scratch[1].folder(), &Default::default())
    });
    saved.unwrap();
    let [met, apart] = scratch.each_ref().map(|scratch| {
        let ranks = Ranks::new(2).run(cpu, |comm| {
            let (model, mut step) = made(&comm)?;
            step.load(&scratch.folder())?;
            step.step(|_| model.loss(comm.runtime(), 9, &own(comm.rank(), 2)))?;
            step.synchronize()?;
            weights(&model)
        });
        ranks.unwrap()
    });
    assert!(met == apart);
}
