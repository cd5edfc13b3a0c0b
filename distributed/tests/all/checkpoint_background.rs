//! Checkpoints that a thread writes while training goes on: what is saved, and what becomes of a save that fails or is killed.

use std::{fs, sync::Condvar, thread};

use distributed::checkpoint::SnapshotWriter;

use crate::prelude::*;

/// Opens when it is dropped, also by a test that fails.
struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl Drop for Gate {
    fn drop(&mut self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_all();
    }
}

/// A folder into which this rank's file is written only once the gate is open.
fn gated(path: PathBuf) -> (Folder, Gate) {
    let gate = Arc::new((Mutex::new(false), Condvar::new()));
    let own = gate.clone();
    let folder = Folder::new(path).watched(move |change| {
        if change == "write a rank's file" {
            drop(own.1.wait_while(own.0.lock().unwrap(), |open| !*open).unwrap());
        }
        Ok(())
    });
    (folder, Gate(gate))
}

/// Saves twice at once, and the same beside a step that is taken before a byte is written.
fn save_beside<T, C: Checkpointed<Cpu>>(
    comm: &Comm<Cpu>,
    scratch: &Path,
    training: &mut T,
    state: impl Fn(&mut T) -> &mut C,
    mut train: impl FnMut(&mut T, usize) -> Result<()>,
) -> Result<()> {
    let mut writer = SnapshotWriter::new(comm)?;
    train(training, 0)?;
    for k in 1..3 {
        Folder::new(scratch.join("at-once")).save(comm, k as u64, state(training), &CheckpointNotes::new())?;
        let (folder, gate) = gated(scratch.join("beside"));
        writer.save(&folder, k as u64, state(training), &CheckpointNotes::new())?;
        train(training, k)?;
        assert!(writer.is_writing());
        drop(gate);
    }
    writer.finish()
}

/// Every file of the checkpoint of a step.
fn files(path: &Path, step: u64) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(Folder::new(path).step(step)).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    paths.map(|path| (path.file_name().unwrap().to_str().unwrap().into(), fs::read(path).unwrap())).collect()
}

/// What both ways of saving have written is equal, byte by byte.
fn compare(what: &str, scratch: &Scratch) {
    let of = |way: &str| [1, 2].map(|step| files(&scratch.0.join(way), step));
    let (at_once, beside) = (of("at-once"), of("beside"));
    assert!(at_once == beside, "{what}");
    assert!(at_once[0] != at_once[1], "{what}: a step changed nothing");
}

#[test]
fn every_strategy_saves_beside_a_step_what_it_saves_at_once() {
    use Axis::{Context, Data, Expert, Pipe, Shard, Tensor};
    let gpt =
        |axes: &[(Axis, usize)], stage: ZeroStage| Way { dtype: DType::BF16, ..Way::gpt(2).zero(stage).over(axes) };
    let staged = |way: Way, kind, v| Way { dtype: DType::F64, ..way.staged(kind, v) };
    let pipes = [(Pipe, 2), (Data, 2)];
    let ways = [
        gpt(&[(Data, 1)], ZeroStage::None),
        gpt(&[(Data, 3)], ZeroStage::None),
        gpt(&[(Shard, 2)], ZeroStage::Optimizer),
        gpt(&[(Shard, 3)], ZeroStage::Gradients),
        gpt(&[(Shard, 4)], ZeroStage::Parameters),
        gpt(&[(Data, 2), (Shard, 2)], ZeroStage::Parameters),
        gpt(&[(Data, 2), (Tensor, 2)], ZeroStage::None),
        gpt(&[(Shard, 2), (Tensor, 2)], ZeroStage::Parameters),
        gpt(&[(Data, 2), (Context, 2)], ZeroStage::None),
        Way::mixture(4).over(&[(Data, 2), (Expert, 2)]),
        Way::mixture(4).zero(ZeroStage::Parameters).over(&[(Shard, 4), (Expert, 2)]),
        staged(gpt(&[(Pipe, 2)], ZeroStage::None), ScheduleKind::OneFOneB, 1),
        staged(gpt(&pipes, ZeroStage::Gradients), ScheduleKind::OneFOneB, 1),
        // The first and the last stage, with both copies of the table, on one rank.
        staged(gpt(&pipes, ZeroStage::Parameters), ScheduleKind::Zbv, 2).gathered(),
    ];
    for mut way in ways {
        way.gpt.tied_head = way.stages.is_some();
        let scratch = Scratch::new("background");
        way.each(|training| {
            let comm = training.mesh.world().clone();
            save_beside(
                &comm,
                &scratch.0,
                training,
                |training| &mut training.step,
                |training, k| training.take(k).map(drop),
            )
        });
        compare(&format!("{way:?}"), &scratch);
    }
}

#[test]
fn local_updates_are_saved_beside_a_step_as_at_once() {
    let scratch = Scratch::new("background");
    let run = Ranks::new(3).run(cpu, |comm| {
        let (rt, options) = (comm.runtime(), LocalUpdates { every: Some(2), ..LocalUpdates::default() });
        let model = Mlp::new(&Init::new(rt, 3))?;
        let inner = TrainStep::builder(&NoOpCommunicator::new(rt), &model).optimizer(adamw()).build()?;
        let mut step = LocalSteps::new(&comm, &model, inner, DiLoCo::default(), options)?;
        save_beside(
            &comm,
            &scratch.0,
            &mut step,
            |step| step,
            |step, k| step.step(|_| model.loss(rt, k, &own(&comm))).map(drop),
        )
    });
    run.unwrap();
    compare("local updates", &scratch);
}

/// Data parallelism, with a step taken.
fn trained(comm: &Comm<Cpu>) -> Result<(Mlp<Cpu>, TrainStep<Cpu>)> {
    let model = Mlp::new(&Init::new(comm.runtime(), 0))?;
    let mut step = bucketed(comm, &model, config(), GradientSums::default())?;
    step.step(|_| model.loss(comm.runtime(), 0, &own(comm)))?;
    Ok((model, step))
}

/// Saves steps 1 and 2.
fn saves(comm: &Comm<Cpu>, folder: &Folder) -> Result<()> {
    let (model, mut step) = trained(comm)?;
    let mut writer = step.snapshot_writer()?;
    step.save_in_background(&mut writer, folder, &CheckpointNotes::new())?;
    step.step(|_| model.loss(comm.runtime(), 1, &own(comm)))?;
    step.save_in_background(&mut writer, folder, &CheckpointNotes::new())?;
    writer.finish()
}

#[test]
fn a_save_that_takes_longer_than_a_call_may_is_waited_for() {
    let (call, slow) = (Duration::from_secs(3), Duration::from_secs(4));
    let changes = [(0, "make a folder"), (1, "write a rank's file"), (0, "write the manifest")];
    thread::scope(|scope| {
        for (rank, change) in changes {
            scope.spawn(move || {
                let scratch = Scratch::new(&format!("background-slow-{}", change.len()));
                let saved = Ranks::new(2).timeout(call).run(cpu, |comm| {
                    let own = comm.rank();
                    let folder = scratch.folder().watched(move |made| {
                        thread::sleep(if (own, made) == (rank, change) { slow } else { Duration::ZERO });
                        Ok(())
                    });
                    let (_, step) = trained(&comm)?;
                    let mut writer = step.snapshot_writer()?;
                    step.save_in_background(&mut writer, &folder, &CheckpointNotes::new())?;
                    writer.finish()
                });
                saved.unwrap_or_else(|error| panic!("rank {rank}, {change}: {error}"));
                assert_eq!(scratch.folder().latest().unwrap(), Some(1));
            });
        }
    });
}

#[test]
fn a_rank_that_begins_to_save_late_is_waited_for() {
    let (call, scratch) = (Duration::from_secs(3), Scratch::new("late"));
    let saved = Ranks::new(2).timeout(call).run(cpu, |comm| {
        let (_model, step) = trained(&comm)?;
        let mut writer = step.snapshot_writer()?;
        if comm.rank() == 1 {
            thread::sleep(call + call / 3);
        }
        step.save_in_background(&mut writer, &scratch.folder(), &CheckpointNotes::new())?;
        writer.finish()
    });
    saved.unwrap();
    assert_eq!(scratch.folder().latest().unwrap(), Some(1));
}

/// Changes of two ranks that save one step.
const CHANGES: usize = 6;
const FOLDER: &str = "WEFTGRAD_TEST_BACKGROUND_FOLDER";
const AT: &str = "WEFTGRAD_TEST_BACKGROUND_AT";

/// What the test below starts: it ends itself before a change.
#[test]
fn saves_in_the_background_until_it_ends_itself() {
    let (Ok(folder), Ok(at)) = (std::env::var(FOLDER), std::env::var(AT)) else { return };
    let (at, made) = (at.parse::<usize>().unwrap(), AtomicUsize::new(0));
    let folder = Folder::new(folder).watched(move |_| {
        if made.fetch_add(1, Ordering::SeqCst) == at {
            std::process::abort();
        }
        Ok(())
    });
    Ranks::new(2).run(cpu, |comm| saves(&comm, &folder)).unwrap();
}

#[test]
fn a_thread_that_is_killed_before_any_change_leaves_the_last_checkpoint() {
    for at in 0..=2 * CHANGES {
        let scratch = Scratch::new("background-killed");
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "checkpoint_background::saves_in_the_background_until_it_ends_itself"])
            .envs([(FOLDER, scratch.0.to_str().unwrap()), (AT, &at.to_string())])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        assert_eq!(child.unwrap().success(), at == 2 * CHANGES, "{at}");
        let last = [None, Some(1), Some(2)][at / CHANGES];
        assert_eq!(scratch.folder().latest().unwrap(), last, "{at}");
        let loaded = Ranks::new(1).run(cpu, |comm| {
            let (_, mut step) = trained(&comm)?;
            let there = step.load(&scratch.folder())?.is_some();
            Ok(there.then(|| step.global_step()))
        });
        assert_eq!(loaded.unwrap(), [last], "{at}");
    }
}

#[test]
fn what_fails_in_the_thread_the_next_call_tells_on_all_ranks() {
    for at in 0..CHANGES {
        let scratch = Scratch::new("background-full");
        let made = AtomicUsize::new(0);
        // The second save fails, of three.
        let folder =
            scratch.folder().watched(move |change| match made.fetch_add(1, Ordering::SeqCst) == CHANGES + at {
                true => Err(Error::argument("save", format!("no space to {change}"))),
                false => Ok(()),
            });
        Ranks::new(2)
            .run(cpu, |comm| {
                let (model, mut step) = trained(&comm)?;
                let mut writer = step.snapshot_writer()?;
                let notes = CheckpointNotes::new();
                step.save_in_background(&mut writer, &folder, &notes)?;
                step.step(|_| model.loss(comm.runtime(), 1, &own(&comm)))?;
                step.save_in_background(&mut writer, &folder, &notes)?;
                step.step(|_| model.loss(comm.runtime(), 2, &own(&comm)))?;
                let error = step.save_in_background(&mut writer, &folder, &notes).expect_err("the disk is full");
                assert!(error.to_string().contains("no space to"), "{error}");
                assert_eq!(folder.latest()?, Some(1), "{at}");
                // It is returned once, and training and saving go on.
                writer.finish()?;
                step.step(|_| model.loss(comm.runtime(), 3, &own(&comm)))?;
                step.save_in_background(&mut writer, &folder, &notes)?;
                writer.finish()?;
                assert_eq!(folder.latest()?, Some(4), "{at}");
                Ok(())
            })
            .unwrap_or_else(|error| panic!("{at}: {error}"));
        CheckpointReader::open(scratch.folder().step(4)).unwrap();
    }
}

/// A step that rank 1 cannot copy.
struct Uncopied<'a>(&'a TrainStep<Cpu>, bool);

impl Checkpointed<Cpu> for Uncopied<'_> {
    fn parts(&self) -> Result<Vec<CheckpointPart<Cpu>>> {
        if self.1 { Err(Error::argument("test", "no memory on the host")) } else { self.0.parts() }
    }
    fn numbers(&self) -> BTreeMap<String, u64> {
        self.0.numbers()
    }
    fn wanted(&self) -> Result<Vec<Wanted>> {
        self.0.wanted()
    }
    fn check_restore(&mut self, _: &BTreeMap<String, u64>) -> Result<()> {
        Ok(())
    }
    fn restore(&mut self, _: &mut dyn FnMut(&Wanted) -> Result<Tensor<Cpu>>, _: &BTreeMap<String, u64>) -> Result<()> {
        Ok(())
    }
}

#[test]
fn what_one_rank_cannot_copy_no_rank_saves() {
    let scratch = Scratch::new("background-copy");
    let folder = scratch.folder();
    let run = Ranks::new(2).run(cpu, |comm| {
        let (_, step) = trained(&comm)?;
        let mut writer = step.snapshot_writer()?;
        let notes = CheckpointNotes::new();
        let error = writer.save(&folder, 1, &Uncopied(&step, comm.rank() == 1), &notes).expect_err("rank 1 has none");
        assert!(error.to_string().contains("no memory on the host"), "{error}");
        writer.finish()?;
        assert_eq!(folder.latest()?, None);
        writer.save(&folder, 1, &Uncopied(&step, false), &notes)?;
        writer.finish()?;
        assert_eq!(folder.latest()?, Some(1));
        Ok(())
    });
    run.unwrap();
}

#[test]
fn where_transfers_wait_for_each_other_nothing_is_left_to_the_thread() {
    let scratch = Scratch::new("background-in-order");
    let folder = scratch.folder();
    let run = Ranks::new(2).run(cpu, |comm| {
        let comm: Comm<Cpu> = Arc::new(InOrderCommunicator::new(comm)?);
        let (_, step) = trained(&comm)?;
        let mut writer = step.snapshot_writer()?;
        step.save_in_background(&mut writer, &folder, &CheckpointNotes::new())?;
        assert!(!writer.is_writing());
        assert_eq!(folder.latest()?, Some(1));
        Ok(())
    });
    run.unwrap();
}
