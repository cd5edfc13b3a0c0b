//! Checkpoints: exact resumption, any other number of ranks and any other strategy, and whatever can happen to files.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use crate::common::{Mlp, Task, config, cpu, own, single, weights};
use distributed::{
    buckets::BucketOptions,
    checkpoint::{CheckpointReader, Folder},
    comm::{Comm, Communicator, Ranks},
    train::{BucketedTrainer, Notes, SimpleTrainer, TrainingConfig, TrainingMetrics},
    zero::{UnitOf, ZeroOptions, ZeroStage, ZeroTrainer},
};
use nn::{Gpt, Init};
use numcore::{DType, Error, Result, rng::Philox};
use optim::LossScaler;
use runtime_cpu::Cpu;

/// A folder that is removed when the test ends.
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("weftgrad-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        Scratch(path)
    }

    pub fn folder(&self) -> Folder {
        Folder::new(&self.0)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Ways to train.
#[derive(Clone, Copy, Debug, PartialEq)]
enum How {
    Buckets,
    Zero(ZeroStage),
}

const HOWS: [How; 4] =
    [How::Buckets, How::Zero(ZeroStage::State), How::Zero(ZeroStage::Gradients), How::Zero(ZeroStage::Parameters)];

/// Both trainers, as one.
enum Any {
    Buckets(Box<BucketedTrainer<Cpu>>),
    Zero(Box<ZeroTrainer<Cpu>>),
}

impl Any {
    fn new<M: Task>(comm: &Comm<Cpu>, model: &M, how: How, config: TrainingConfig) -> Result<Self> {
        Ok(match how {
            How::Buckets => {
                Any::Buckets(Box::new(BucketedTrainer::new(comm, model, config, BucketOptions::default())?))
            }
            How::Zero(stage) => {
                let options = ZeroOptions { stage, units: UnitOf::children(), ..Default::default() };
                Any::Zero(Box::new(ZeroTrainer::new(comm, model, config, options)?))
            }
        })
    }

    fn step<M: Task>(&mut self, model: &M, comm: &Comm<Cpu>, step: usize) -> Result<TrainingMetrics<Cpu>> {
        let loss = |_| model.loss(comm.runtime(), step, &own(comm));
        match self {
            Any::Buckets(t) => t.step(loss),
            Any::Zero(t) => t.step(loss),
        }
    }

    fn save(&self, folder: &Folder) -> Result<()> {
        let notes = Notes::from([("made by".into(), "a test".into())]);
        match self {
            Any::Buckets(t) => t.save(folder, &notes),
            Any::Zero(t) => t.save(folder, &notes),
        }
    }

    fn load(&mut self, folder: &Folder) -> Result<Option<distributed::checkpoint::Manifest>> {
        match self {
            Any::Buckets(t) => t.load(folder),
            Any::Zero(t) => t.load(folder),
        }
    }

    fn weights<M: Task>(&self, model: &M) -> Result<Vec<f64>> {
        match self {
            Any::Buckets(_) => weights(model),
            Any::Zero(t) => {
                let _scope = t.strategy().gather_full_params()?;
                weights(model)
            }
        }
    }
}

/// Trains from step `from` to `to`; loads before if `from` is not 0, saves at the end if `save`.
fn run<M: Task>(
    comm: &Comm<Cpu>,
    how: How,
    dtype: DType,
    folder: &Folder,
    from: usize,
    to: usize,
    save: bool,
) -> Result<Vec<f64>> {
    let seed = if from == 0 { 0 } else { 77 };
    let model = M::new(&Init::new(comm.runtime(), seed).dtype(dtype))?;
    let mut trainer = Any::new(comm, &model, how, config())?;
    if from > 0 {
        let manifest = trainer.load(folder)?.expect("a checkpoint");
        assert_eq!(manifest.notes()["made by"], "a test");
    }
    let mut trace = Vec::new();
    for step in from..to {
        let metrics = trainer.step(&model, comm, step)?;
        assert_eq!(metrics.global_step(), step as u64 + 1);
        trace.push(metrics.loss()?);
    }
    if save {
        trainer.save(folder)?;
    }
    trace.extend(trainer.weights(&model)?);
    Ok(trace)
}

fn tail(steps: usize, all: &[f64]) -> &[f64] {
    &all[steps..]
}

#[test]
fn what_follows_is_what_would_have_followed() {
    for how in HOWS {
        for dtype in [DType::F32, DType::BF16] {
            for n in [1, 3, 4] {
                let scratch = Scratch::new("resume");
                let folder = scratch.folder();
                let ranks = Ranks::new(n);
                ranks.run(cpu, |c| run::<Gpt<Cpu>>(&c, how, dtype, &folder, 0, 2, true)).unwrap();
                let whole = ranks.run(cpu, |c| run::<Gpt<Cpu>>(&c, how, dtype, &folder, 0, 4, false)).unwrap();
                let resumed = ranks.run(cpu, |c| run::<Gpt<Cpu>>(&c, how, dtype, &folder, 2, 4, false)).unwrap();
                for (whole, resumed) in whole.iter().zip(&resumed) {
                    assert!(tail(2, whole) == &resumed[..], "{how:?} {dtype} on {n}");
                }
            }
        }
    }
}

#[test]
fn any_strategy_goes_on_from_any_other_at_any_size() {
    let one = single::<Mlp<Cpu>>(DType::F64, config()).unwrap();
    for from in HOWS {
        for (saved, loaded) in [(4, 2), (2, 4), (1, 3), (5, 1), (3, 8)] {
            let scratch = Scratch::new("reshard");
            let folder = scratch.folder();
            Ranks::new(saved).run(cpu, |c| run::<Mlp<Cpu>>(&c, from, DType::F64, &folder, 0, 2, true)).unwrap();
            for to in HOWS {
                let all = Ranks::new(loaded).run(cpu, |c| run::<Mlp<Cpu>>(&c, to, DType::F64, &folder, 2, 4, false));
                for got in all.unwrap_or_else(|e| panic!("{from:?} on {saved} to {to:?} on {loaded}: {e}")) {
                    let expected = [&one.losses[2..4], &one.weights[3][..]].concat();
                    let off = got.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                    assert!(off < 1e-11, "{from:?} on {saved} to {to:?} on {loaded}: {off:e}");
                }
            }
        }
    }
}

#[test]
fn a_checkpoint_can_be_read_without_a_trainer() {
    let scratch = Scratch::new("export");
    let folder = scratch.folder();
    let how = How::Zero(ZeroStage::Parameters);
    let trained = Ranks::new(3).run(cpu, |c| run::<Mlp<Cpu>>(&c, how, DType::F64, &folder, 0, 1, true)).unwrap();
    let mut reader = CheckpointReader::open(folder.step(1)).unwrap();
    assert_eq!(reader.manifest().ranks(), 3);
    assert_eq!(reader.manifest().names().filter(|n| n.starts_with("parameter/")).count(), 6);
    let weight = reader.tensor(&Cpu::with_threads(1), "parameter/a.weight").unwrap();
    assert_eq!(weight.dims(), [9, 5]);
    assert_eq!(weight.to_vec::<f64>().unwrap(), trained[0][1..46]);
    assert!(reader.tensor(&Cpu::with_threads(1), "parameter/z").unwrap_err().to_string().contains("parameter/z"));
}

#[test]
fn scaler_and_counts_go_on() {
    let scratch = Scratch::new("scaler");
    let folder = scratch.folder();
    let mut scaler = LossScaler::starting_at(64.0).unwrap();
    scaler.interval = 2;
    let scaled = TrainingConfig { loss_scaling: Some(scaler), ..config() };
    let rt = Cpu::with_threads(1);
    let model = Mlp::new(&Init::new(&rt, 0)).unwrap();
    let all: Vec<usize> = (0..5).collect();
    let mut first = SimpleTrainer::new(&rt, &model, scaled.clone()).unwrap();
    for step in 0..3 {
        first.step(|_| model.loss(&rt, step, &all)).unwrap();
    }
    first.inner().save(&folder, &Notes::new()).unwrap();
    let mut second = SimpleTrainer::new(&rt, &Mlp::new(&Init::new(&rt, 1)).unwrap(), scaled).unwrap();
    second.inner().load(&folder).unwrap().unwrap();
    assert_eq!(second.global_step(), 3);
    assert_eq!(second.inner().scaler().cloned(), first.inner().scaler().cloned());
    assert_eq!(second.inner().scaler().unwrap().factor(), 128.0);
}

/// Saves with four ranks, spoils the files, and tries to load with three: what each rank says, and whether it changed nothing.
fn spoiled(name: &str, spoil: impl Fn(&Path)) -> Vec<Error> {
    let scratch = Scratch::new(name);
    let folder = scratch.folder();
    let how = How::Zero(ZeroStage::Gradients);
    Ranks::new(4).run(cpu, |c| run::<Mlp<Cpu>>(&c, how, DType::F32, &folder, 0, 1, true)).unwrap();
    spoil(&folder.step(1));
    let outcomes = Ranks::new(3).outcomes(cpu, |comm| {
        let model = Mlp::new(&Init::new(comm.runtime(), 5))?;
        let mut trainer = Any::new(&comm, &model, how, config())?;
        let before = weights(&model)?;
        let error = folder_load(&mut trainer, &folder);
        assert_eq!(weights(&model)?, before, "{name}");
        trainer.step(&model, &comm, 0)?;
        error.map_or(Ok(()), Err)
    });
    outcomes.unwrap().into_iter().map(|o| o.expect_err(name)).collect()
}

fn folder_load(trainer: &mut Any, folder: &Folder) -> Option<Error> {
    trainer.load(folder).map(|m| assert!(m.is_none())).err()
}

fn edit(path: &Path, f: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).unwrap();
    f(&mut bytes);
    fs::write(path, bytes).unwrap();
}

#[test]
fn spoiled_files_are_named_on_every_rank() {
    type Spoil = fn(&Path);
    let cases: [(&str, Spoil, &str); 6] = [
        ("flipped", |p| edit(&p.join("rank-00000.safetensors"), |b| *b.last_mut().unwrap() ^= 1), "checksum"),
        ("truncated", |p| edit(&p.join("rank-00001.safetensors"), |b| b.truncate(b.len() - 9)), "rank-00001"),
        ("missing", |p| fs::remove_file(p.join("rank-00000.safetensors")).unwrap(), "rank-00000"),
        (
            "swapped",
            |p| assert!(fs::copy(p.join("rank-00000.safetensors"), p.join("rank-00001.safetensors")).unwrap() > 0),
            "rank-00001",
        ),
        ("foreign", |p| fs::write(p.join("manifest.json"), "{\"a\": 1}").unwrap(), "no version"),
        (
            "future",
            |p| {
                edit(&p.join("manifest.json"), |b| {
                    *b = String::from_utf8_lossy(b).replace("\"version\":1", "\"version\":9").into_bytes()
                })
            },
            "version 9",
        ),
    ];
    for (name, spoil, told) in cases {
        for e in spoiled(name, spoil) {
            assert!(e.to_string().contains(told), "{name}: {e}");
        }
    }
}

#[test]
fn tensors_that_are_missing_unexpected_or_of_another_shape_are_named() {
    let scratch = Scratch::new("strict");
    let folder = scratch.folder();
    let how = How::Buckets;
    Ranks::new(2).run(cpu, |c| run::<Mlp<Cpu>>(&c, how, DType::F32, &folder, 0, 1, true)).unwrap();
    let other = |dtype, how| {
        let outcomes = Ranks::new(2).outcomes(cpu, |comm| {
            let model = Gpt::new(&Init::new(comm.runtime(), 5).dtype(dtype), Default::default())?;
            Any::new(&comm, &model, how, config())?.load(&folder).map(|_| ())
        });
        outcomes.unwrap().into_iter().map(|o| o.unwrap_err().to_string()).collect::<Vec<_>>()
    };
    assert!(other(DType::F32, how).iter().all(|e| e.contains("parameter/wte.weight") && e.contains("missing")));
    let outcomes = Ranks::new(2).outcomes(cpu, |comm| {
        let model = Mlp::new(&Init::new(comm.runtime(), 5).dtype(DType::F64))?;
        Any::new(&comm, &model, how, config())?.load(&folder).map(|_| ())
    });
    for e in outcomes.unwrap() {
        let e = e.unwrap_err().to_string();
        assert!(e.contains("parameter/a.weight") && e.contains("f64 [9, 5] here and f32 [9, 5] there"), "{e}");
    }
    // SGD without momentum keeps no state: what AdamW saved would be dropped.
    let outcomes = Ranks::new(2).outcomes(cpu, |comm| {
        let model = Mlp::new(&Init::new(comm.runtime(), 5))?;
        let sgd = optim::ParamGroups::new(optim::SgdConfig::default());
        let mut trainer = ZeroTrainer::with(&comm, &model, sgd, config(), ZeroOptions::default())?;
        trainer.load(&folder).map(|_| ())
    });
    for e in outcomes.unwrap() {
        let e = e.unwrap_err().to_string();
        assert!(e.contains("state/exp_avg/a.weight") && e.contains("nothing here takes it"), "{e}");
    }
}

#[test]
fn a_save_that_fails_leaves_the_last_one() {
    let scratch = Scratch::new("failed");
    let folder = scratch.folder();
    let outcomes = Ranks::new(2).outcomes(cpu, |comm| {
        let model = Mlp::new(&Init::new(comm.runtime(), 0))?;
        let mut trainer = Any::new(&comm, &model, How::Buckets, config())?;
        trainer.step(&model, &comm, 0)?;
        trainer.save(&folder)?;
        trainer.step(&model, &comm, 1)?;
        // Where rank 1 would write lies a folder.
        if comm.rank() == 0 {
            fs::create_dir_all(scratch.0.join("unfinished-0000000002")).unwrap();
            fs::write(scratch.0.join("unfinished-0000000002").join("left over"), "x").unwrap();
        }
        trainer.save(&folder)?;
        trainer.step(&model, &comm, 2)?;
        if comm.rank() == 0 {
            fs::write(scratch.0.join("unfinished-0000000003"), "a file in the way").unwrap();
        }
        trainer.save(&folder)
    });
    for outcome in outcomes.unwrap() {
        let e = outcome.unwrap_err().to_string();
        assert!(e.contains("unfinished-0000000003"), "{e}");
    }
    assert_eq!((folder.steps().unwrap(), folder.latest().unwrap()), (vec![1, 2], Some(2)));
    folder.prune(1).unwrap();
    assert_eq!(folder.steps().unwrap(), [2]);
    assert_eq!(Folder::new(scratch.0.join("nowhere")).latest().unwrap(), None);
}

const FOLDER: &str = "WEFTGRAD_TEST_FOLDER";

/// What the test below starts and kills: two ranks that save after every step.
#[test]
fn saves_until_it_is_killed() {
    let Ok(folder) = std::env::var(FOLDER) else { return };
    let folder = Folder::new(folder);
    let program = |comm: Comm<Cpu>| {
        let model = Mlp::new(&Init::new(comm.runtime(), 0))?;
        let mut trainer = Any::new(&comm, &model, How::Zero(ZeroStage::Parameters), config())?;
        trainer.load(&folder)?;
        loop {
            let done = trainer.step(&model, &comm, 0)?.global_step();
            trainer.save(&folder)?;
            if done % 2 == 0 {
                // The same step again: it replaces what is there.
                trainer.save(&folder)?;
            }
            if comm.rank() == 0 {
                folder.prune(2)?;
            }
        }
    };
    Ranks::new(2).run(cpu, program).map(|_: Vec<()>| ()).unwrap();
}

#[test]
fn a_killed_save_leaves_a_checkpoint_that_loads() {
    let scratch = Scratch::new("killed");
    let folder = scratch.folder();
    // One step does not depend on the others' interruptions: the run goes on from where it was.
    let expected = {
        let rt = Cpu::with_threads(1);
        let model = Mlp::new(&Init::new(&rt, 0)).unwrap();
        let comm: Comm<Cpu> = std::sync::Arc::new(distributed::comm::NoOpCommunicator::new(&rt));
        let mut trainer = Any::new(&comm, &model, How::Zero(ZeroStage::Parameters), config()).unwrap();
        let mut all = vec![weights(&model).unwrap()];
        for _ in 0..400 {
            trainer.step(&model, &comm, 0).unwrap();
            all.push(trainer.weights(&model).unwrap());
        }
        all
    };
    let (mut random, mut last) = (Philox::new(11, 0), 0);
    for _ in 0..12 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "checkpoints::saves_until_it_is_killed"])
            .env(FOLDER, &scratch.0)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(30 + random.below(120)));
        child.kill().unwrap();
        child.wait().unwrap();
        let Some(step) = folder.latest().unwrap() else { continue };
        assert!(step >= last, "step {step} after {last}");
        last = step;
        let loaded = Ranks::new(3).run(cpu, |comm| {
            let model = Mlp::new(&Init::new(comm.runtime(), 9))?;
            let mut trainer = Any::new(&comm, &model, How::Buckets, config())?;
            trainer.load(&folder)?;
            weights(&model)
        });
        let expected = &expected[(step as usize).min(400)];
        for got in loaded.unwrap() {
            let off = got.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(step > 400 || off < 1e-2, "step {step}: {off}");
        }
    }
    assert!(last > 0, "no save was ever complete");
}
