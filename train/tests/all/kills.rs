//! Runs that are killed at any instant, and go on as if nothing had happened.

use std::{
    collections::BTreeMap,
    fs,
    io::Write,
    path::Path,
    process::{Child, Command, Stdio},
};

use numcore::rng::Philox;

use crate::{common::*, prelude::*};

const FOLDER: &str = "WEFTGRAD_TEST_TRAIN_FOLDER";
const RANKS: &str = "WEFTGRAD_TEST_TRAIN_RANKS";
const CHANGE: &str = "WEFTGRAD_TEST_TRAIN_CHANGE";
const STEPS: &str = "WEFTGRAD_TEST_TRAIN_STEPS";
/// How many seeds are tried: more than a dozen where that is asked for.
const SEEDS: &str = "WEFTGRAD_TEST_TRAIN_SEEDS";
/// Steps of a run that is killed.
const LENGTH: u64 = 24;

/// Appends losses to a file, to the bit. What a killed process wrote last may be cut off.
pub struct Lines(pub fs::File);

impl Sink for Lines {
    fn write(&mut self, record: &Record) -> Result<()> {
        for (name, value) in &record.values {
            if let (true, Value::Scalar(value)) = (name.ends_with("loss"), value) {
                // In one call: half a line would spoil the next one, too.
                self.0.write_all(format!("{name} {} {:016x}.\n", record.step, value.to_bits()).as_bytes())?;
            }
        }
        Ok(())
    }
}

/// What the lines of all processes of a run say, which must not contradict each other.
pub fn told(folder: &Path) -> BTreeMap<(String, u64), String> {
    let mut all: BTreeMap<(String, u64), String> = BTreeMap::new();
    for line in fs::read_to_string(folder.join("losses")).unwrap_or_default().lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let [name, step, bits] = words[..] else { continue };
        let (Ok(step), true) = (step.parse(), bits.ends_with('.')) else { continue };
        let before = all.insert((name.into(), step), bits.into());
        assert!(
            before.as_deref().is_none_or(|before| before == bits),
            "{name} of step {step} is {bits} and was {before:?}"
        );
    }
    all
}

fn number(name: &str) -> Option<usize> {
    std::env::var(name).ok()?.parse().ok()
}

/// What the tests below start.
#[test]
fn child() {
    let Ok(path) = std::env::var(FOLDER) else { return };
    let (ranks, change, steps) = (number(RANKS).unwrap(), number(CHANGE), number(STEPS).unwrap());
    let changes = AtomicUsize::new(0);
    let folder = Folder::new(Path::new(&path).join("checkpoints")).watched(move |_| {
        if Some(changes.fetch_add(1, Ordering::SeqCst)) == change {
            std::process::abort();
        }
        Ok(())
    });
    let reason = on_ranks(ranks, |comm| {
        autograd::manual_seed(7);
        let model = Mlp::new(comm.runtime(), 0.3)?;
        let lines = fs::OpenOptions::new().append(true).create(true).open(Path::new(&path).join("losses"))?;
        let report = Trainer::new(&model, ddp(comm, &model, 1)?, loader(comm.runtime()))
            .until(Length::Steps(steps as u64))
            .record_every(Interval::Steps(1))
            .with(Evaluate::on(held_out(comm.runtime())).every(Interval::Steps(5)))
            .with(Checkpoints::at(folder.clone()).every(Interval::Steps(3)).keep(2).best("validation/loss"))
            .sink(Lines(lines))
            .resume(Resume::IfThere)
            .run(|model, batch| {
                if steps > LENGTH as usize {
                    sleep(Duration::from_millis(2));
                }
                loss(model, batch)
            })?;
        Ok(report.reason)
    });
    let reason = reason.unwrap();
    assert_eq!(reason == StopReason::Interrupted, steps > LENGTH as usize, "{reason:?}");
    // What ended that run does not end the next one of the process.
    let (comm, next) = (one(), Scratch::new("next"));
    let model = Mlp::new(comm.runtime(), 0.0).unwrap();
    let trainer = Trainer::new(&model, ddp(&comm, &model, 1).unwrap(), loader(comm.runtime())).until(Length::Steps(2));
    let report = trainer.with(Checkpoints::in_folder(&next.0)).run(loss).unwrap();
    assert_eq!((report.reason, report.progress.step), (StopReason::Finished, 2));
}

fn start(folder: &Path, ranks: usize, change: Option<usize>, steps: u64) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "kills::child", "--test-threads", "1"]).env(FOLDER, folder).env(RANKS, ranks.to_string());
    command.env(STEPS, steps.to_string()).stdout(Stdio::null()).stderr(Stdio::null());
    if let Some(change) = change {
        command.env(CHANGE, change.to_string());
    }
    command.spawn().unwrap()
}

#[test]
fn a_run_that_is_killed_at_any_instant_goes_on_to_the_bit() {
    let whole: Vec<_> = [1, 2, 3]
        .map(|ranks| {
            let scratch = Scratch::new("killed-whole");
            fs::create_dir_all(&scratch.0).unwrap();
            assert!(start(&scratch.0, ranks, None, LENGTH).wait().unwrap().success());
            told(&scratch.0)
        })
        .into();
    assert_eq!(whole[0].keys().filter(|(name, _)| name == "loss").count() as u64, LENGTH);
    for seed in 0..number(SEEDS).unwrap_or(12) {
        let (scratch, ranks) = (Scratch::new("killed"), seed % 3 + 1);
        fs::create_dir_all(&scratch.0).unwrap();
        let mut random = Philox::new(seed as u64, 0);
        for _ in 0..3 {
            // Half of them within a save: right before one of its changes to the file system.
            let change = (seed % 2 == 0).then(|| random.below(40) as usize);
            let mut child = start(&scratch.0, ranks, change, LENGTH);
            if change.is_none() {
                sleep(Duration::from_millis(random.below(150)));
                child.kill().unwrap();
            }
            child.wait().unwrap();
        }
        assert!(start(&scratch.0, ranks, None, LENGTH).wait().unwrap().success(), "seed {seed}");
        assert_eq!(told(&scratch.0), whole[ranks - 1], "seed {seed}");
        let folder = Folder::new(scratch.0.join("checkpoints"));
        assert_eq!(folder.latest().unwrap(), Some(LENGTH), "seed {seed}");
        assert!(folder.steps().unwrap().len() <= 3, "seed {seed}: {:?}", folder.steps());
    }
}

#[cfg(unix)]
#[test]
fn asked_to_end_it_saves_within_one_step() {
    for (signal, ranks) in [("-TERM", 1), ("-TERM", 3), ("-INT", 2)] {
        let scratch = Scratch::new("asked");
        fs::create_dir_all(&scratch.0).unwrap();
        let mut child = start(&scratch.0, ranks, None, 1_000_000);
        let last = || told(&scratch.0).keys().filter(|(name, _)| name == "loss").map(|(_, step)| *step).max();
        while last() < Some(4) {
            assert!(child.try_wait().unwrap().is_none(), "it ended by itself");
            sleep(Duration::from_millis(5));
        }
        let before = last().unwrap();
        assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success());
        assert!(child.wait().unwrap().success(), "{signal} on {ranks} ranks");
        let saved = Folder::new(scratch.0.join("checkpoints")).latest().unwrap().unwrap();
        // The last step that was taken is the one that was saved.
        assert_eq!(Some(saved), last());
        assert!(saved >= before);
    }
}
