//! Loading that cannot be: an error on every rank, before anything has changed on any, or nobody goes on.

use crate::prelude::*;

/// What rank 0 holds.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Held {
    Value,
    State,
}

/// What it got hold of, to be dropped later.
type Holder = (Option<Tensor<Cpu>>, Vec<CheckpointPart<Cpu>>);

fn hold(model: &Mlp<Cpu>, trainer: &Any, what: Held) -> Result<Holder> {
    if what == Held::Value {
        // Not of the first unit: those before it must stay as they are too.
        return Ok((Some(model.b.weight.value()?), Vec::new()));
    }
    let parts = trainer.0.strategy().parts()?;
    let states: Vec<CheckpointPart<Cpu>> = parts.into_iter().filter(|part| part.name.starts_with("state/")).collect();
    assert!(!states.is_empty());
    Ok((None, states))
}

fn saved(comm: &Comm<Cpu>, how: ZeroStage, folder: &Folder) -> Result<()> {
    let model = Mlp::new(&Init::new(comm.runtime(), 0))?;
    let mut trainer = Any::new(comm, &model, how, config())?;
    trainer.step(&model, comm, 0)?;
    trainer.save(folder)
}

#[test]
fn nothing_changes_on_any_rank() {
    for (how, what) in STAGES.into_iter().flat_map(|how| [(how, Held::Value), (how, Held::State)]) {
        // A value that was gathered for a reader is not what is written.
        if how == ZeroStage::Parameters && what == Held::Value {
            continue;
        }
        let scratch = Scratch::new("held");
        let folder = scratch.folder();
        let ranks = Ranks::new(2).run(cpu, |comm| {
            saved(&comm, how, &folder)?;
            let model = Mlp::new(&Init::new(comm.runtime(), 5))?;
            let mut trainer = Any::new(&comm, &model, how, config())?;
            let before = trainer.weights(&model)?;
            let held = if comm.rank() == 0 { Some(hold(&model, &trainer, what)?) } else { None };
            let error = trainer.load(&folder).map(|_| ()).expect_err("someone holds what is to be written").to_string();
            assert!(error.contains("hold") || error.contains("shared") || error.contains("shares"), "{error}");
            comm.barrier()?;
            drop(held);
            let after = trainer.weights(&model)?;
            assert!(after == before, "{how:?}, {what:?}: values have changed on rank {}", comm.rank());
            // The holder is gone, and the same trainer loads.
            assert!(trainer.load(&folder)?.is_some());
            let loaded = trainer.weights(&model)?;
            trainer.step(&model, &comm, 1)?;
            Ok((before, loaded, trainer.weights(&model)?))
        });
        let ranks = ranks.unwrap_or_else(|e| panic!("{how:?}, {what:?}: {e}"));
        assert!(ranks[0] == ranks[1] && ranks[0].0 != ranks[0].1, "{how:?}, {what:?}");
    }
}

#[test]
fn a_scale_that_is_no_number_is_found_before_anything_changes() {
    let scratch = Scratch::new("scale");
    let folder = scratch.folder();
    let rt = Cpu::with_threads(1);
    let all: Vec<usize> = (0..EXAMPLES).collect();
    let with = |scaler: LossScaler, seed: u64| {
        let model = Mlp::new(&Init::new(&rt, seed)).unwrap();
        let config = TrainingConfig { loss_scaling: Some(scaler), ..config() };
        let trainer = simple(&rt, &model, config).unwrap();
        (model, trainer)
    };
    let mut growing = LossScaler::starting_at(64.0).unwrap();
    (growing.growth, growing.interval) = (f64::INFINITY, 1);
    let (model, mut trainer) = with(growing, 0);
    trainer.step(|_| model.loss(&rt, 0, &all)).unwrap();
    trainer.save(&folder, &CheckpointNotes::new()).unwrap();
    let (model, mut trainer) = with(LossScaler::starting_at(64.0).unwrap(), 1);
    let before = weights(&model).unwrap();
    let error = trainer.load(&folder).unwrap_err().to_string();
    assert!(error.contains("factor is") && error.contains("must be positive and finite"), "{error}");
    assert!(weights(&model).unwrap() == before);
    assert_eq!(trainer.global_step(), 0);
}

/// A trainer whose rank 1 finds, once everything was checked, that it cannot take something over.
struct Breaks<'a>(&'a mut TrainStep<Cpu>, bool);

impl Checkpointed<Cpu> for Breaks<'_> {
    fn parts(&self) -> Result<Vec<CheckpointPart<Cpu>>> {
        self.0.parts()
    }
    fn numbers(&self) -> BTreeMap<String, u64> {
        self.0.numbers()
    }
    fn wanted(&self) -> Result<Vec<Wanted>> {
        self.0.wanted()
    }
    fn check_restore(&mut self, numbers: &BTreeMap<String, u64>) -> Result<()> {
        self.0.check_restore(numbers)
    }
    fn restore(
        &mut self,
        read: &mut dyn FnMut(&Wanted) -> Result<Tensor<Cpu>>,
        numbers: &BTreeMap<String, u64>,
    ) -> Result<()> {
        let broken = || Err(Error::argument("test", "a file has gone"));
        if self.1 { broken() } else { self.0.restore(read, numbers) }
    }
}

#[test]
fn what_fails_after_all_checks_ends_the_communicator() {
    let scratch = Scratch::new("breaks");
    let folder = scratch.folder();
    let began = Instant::now();
    let told = Ranks::new(2).outcomes(cpu, |comm| {
        saved(&comm, ZeroStage::None, &folder)?;
        let model = Mlp::new(&Init::new(comm.runtime(), 5))?;
        let mut trainer = bucketed(&comm, &model, config(), BucketOptions::default())?;
        let mut breaks = Breaks(&mut trainer, comm.rank() == 1);
        let error = folder.load(&comm, 1, &mut breaks).map(|_| ()).expect_err("rank 1 has not loaded");
        let step = trainer.step(|_| model.loss(comm.runtime(), 1, &[0])).map(|_| ()).expect_err("ranks differ");
        Ok([error.to_string(), step.to_string()])
    });
    for errors in told.unwrap() {
        assert!(errors.unwrap().iter().all(|error| error.contains("a file has gone")));
    }
    assert!(began.elapsed() < Duration::from_secs(30), "ranks waited for each other");
}
