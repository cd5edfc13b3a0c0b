//! Checkpoints: a save that ends just before any one of its changes to the file system.

use crate::{checkpoint_common::*, prelude::*};

/// Every change that two ranks make who save step 1, step 1 again and step 2 and then remove step 1; and what is the last checkpoint
/// before each.
const CHANGES: [(&str, &str); 22] = [
    ("make a folder", ""),
    ("write a rank's file", ""),
    ("write a rank's file", ""),
    ("write the manifest", ""),
    ("write `latest`", ""),
    ("move it into place", ""),
    ("make a folder", "first"),
    ("write a rank's file", "first"),
    ("write a rank's file", "first"),
    ("write the manifest", "first"),
    ("write `latest`", "first"),
    ("move the old one away", "first"),
    ("write `latest`", "first"),
    ("move it into place", "first"),
    ("remove the old one", "again"),
    ("make a folder", "again"),
    ("write a rank's file", "again"),
    ("write a rank's file", "again"),
    ("write the manifest", "again"),
    ("write `latest`", "again"),
    ("move it into place", "again"),
    ("take a checkpoint away", "second"),
];

fn notes(said: &str) -> CheckpointNotes {
    CheckpointNotes::from([("said".into(), said.into())])
}

/// The saves of the table.
fn saves(comm: &Comm<Cpu>, folder: &Folder) -> Result<Vec<Vec<f64>>> {
    let model = Mlp::new(&Init::new(comm.runtime(), 0))?;
    let mut trainer = Any::new(comm, &model, ZeroStage::Parameters, config())?;
    trainer.step(&model, comm, 0)?;
    trainer.save_with(folder, notes("first"))?;
    trainer.save_with(folder, notes("again"))?;
    let first = trainer.weights(&model)?;
    trainer.step(&model, comm, 1)?;
    trainer.save_with(folder, notes("second"))?;
    if comm.rank() == 0 {
        folder.prune(1)?;
    }
    Ok(vec![first, trainer.weights(&model)?])
}

/// What loads on one rank, and what it said; a save after it is the last one then.
fn loaded(folder: &Folder) -> (String, Vec<f64>) {
    let loaded = Ranks::new(1).run(cpu, |comm| {
        let model = Mlp::new(&Init::new(comm.runtime(), 9))?;
        let mut trainer = Any::new(&comm, &model, ZeroStage::None, config())?;
        let said = trainer.load(folder)?.map_or(String::new(), |m| m.notes()["said"].clone());
        let weights = trainer.weights(&model)?;
        for _ in 0..2 {
            let step = trainer.step(&model, &comm, 0)?.global_step();
            trainer.save_with(folder, notes("later"))?;
            assert_eq!(folder.latest()?, Some(step));
        }
        Ok((said, weights))
    });
    loaded.unwrap().swap_remove(0)
}

const FOLDER: &str = "WEFTGRAD_TEST_KILLED_FOLDER";
const AT: &str = "WEFTGRAD_TEST_KILLED_AT";

/// What the test below starts: it ends itself before a change.
#[test]
fn saves_until_it_ends_itself() {
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
fn a_save_that_is_killed_before_any_change_leaves_the_last_one() {
    let (scratch, changes) = (Scratch::new("changes"), Arc::new(Mutex::new(Vec::new())));
    let seen = changes.clone();
    let folder = scratch.folder().watched(move |change| {
        seen.lock().unwrap().push(change);
        Ok(())
    });
    let expected = Ranks::new(2).run(cpu, |comm| saves(&comm, &folder)).unwrap().swap_remove(0);
    let names: Vec<&str> = CHANGES.iter().map(|(name, _)| *name).chain(["remove a checkpoint"]).collect();
    assert_eq!(*changes.lock().unwrap(), names);
    assert_eq!(folder.steps().unwrap(), [2]);
    for (at, last) in CHANGES.iter().map(|(_, last)| *last).chain(["second"]).enumerate() {
        let scratch = Scratch::new("ended");
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "checkpoint_kills::saves_until_it_ends_itself"])
            .envs([(FOLDER, scratch.0.to_str().unwrap()), (AT, &at.to_string())])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        assert!(!child.unwrap().success(), "it did not end before change {at}");
        let (said, weights) = loaded(&scratch.folder());
        assert_eq!(said, last, "before {} ({at})", names[at]);
        scratch.folder().remove_orphaned().unwrap();
        for entry in std::fs::read_dir(&scratch.0).unwrap() {
            let path = entry.unwrap().path();
            let is_removed = path.file_name().unwrap().to_string_lossy().starts_with("removed-");
            let is_whole = path.join("manifest.json").is_file() && !is_removed;
            assert!(path.ends_with("latest") || is_whole, "{path:?} is left ({at})");
        }
        let of = ["first", "again", "second"].iter().position(|&s| s == said);
        assert!(of.is_none_or(|k| weights == expected[k.saturating_sub(1)]), "before {} ({at})", names[at]);
    }
}

/// A run that went back and saves step 2 once more: until it is in its place, the step before it is the last, not the one it replaces.
#[test]
fn what_a_run_went_back_from_is_not_the_last_one() {
    for at in 0..9 {
        let scratch = Scratch::new("back");
        let folder = scratch.folder();
        let ended = Ranks::new(2).outcomes(cpu, |comm| {
            let model = Mlp::new(&Init::new(comm.runtime(), 0))?;
            let run = |saves: &[(&Folder, &str)]| {
                let mut trainer = Any::new(&comm, &model, ZeroStage::None, config())?;
                saves.iter().try_for_each(|(folder, said)| {
                    trainer.step(&model, &comm, 0)?;
                    trainer.save_with(folder, notes(said))
                })
            };
            run(&[(&folder, "old"), (&folder, "old")])?;
            let made = AtomicUsize::new(0);
            let stopping = folder.clone().watched(move |change| match made.fetch_add(1, Ordering::SeqCst) == at {
                true => Err(Error::argument("save", format!("no space to {change}"))),
                false => Ok(()),
            });
            run(&[(&folder, "new"), (&stopping, "new")])
        });
        // Rank 0 makes all changes but one; what it cannot do is an error on both.
        for outcome in ended.unwrap() {
            assert_eq!(outcome.is_err_and(|e| e.to_string().contains("no space to")), at < 8, "{at}");
        }
        let done = at >= 7;
        assert_eq!(folder.latest().unwrap(), Some(if done { 2 } else { 1 }), "{at}");
        assert_eq!(loaded(&folder).0, "new", "{at}");
    }
}

/// A save that replaced step 1 ended before the old one was removed. What is removed later takes both away, wherever it ends.
#[test]
fn what_was_replaced_does_not_come_back() {
    // The old one's manifest and folder, the new one's manifest and folder.
    for at in 0..5 {
        let scratch = Scratch::new("came-back");
        let folder = scratch.folder();
        let ended = folder.clone().watched(|change| match change {
            "remove the old one" => Err(Error::argument("save", "ended")),
            _ => Ok(()),
        });
        let saved = Ranks::new(1).outcomes(cpu, |comm| {
            let model = Mlp::new(&Init::new(comm.runtime(), 0))?;
            let mut trainer = Any::new(&comm, &model, ZeroStage::None, config())?;
            trainer.step(&model, &comm, 0)?;
            trainer.save_with(&folder, notes("old"))?;
            trainer.save_with(&ended, notes("new"))
        });
        assert!(saved.unwrap().swap_remove(0).is_err());
        let later = Ranks::new(1).run(cpu, |comm| {
            let model = Mlp::new(&Init::new(comm.runtime(), 0))?;
            let mut trainer = Any::new(&comm, &model, ZeroStage::None, config())?;
            assert_eq!(trainer.load(&folder)?.map(|m| m.notes()["said"].clone()), Some("new".into()));
            trainer.step(&model, &comm, 1)?;
            trainer.save_with(&folder, notes("later"))
        });
        later.unwrap();
        let made = AtomicUsize::new(0);
        let stopping = folder.clone().watched(move |change| match made.fetch_add(1, Ordering::SeqCst) == at {
            true => Err(Error::argument("prune", format!("ended before: {change}"))),
            false => Ok(()),
        });
        assert_eq!(stopping.prune(1).is_err(), at < 4, "{at}");
        // What there still is of step 1 is the new one.
        let steps = folder.steps().unwrap();
        assert_eq!(steps, if at < 3 { vec![1, 2] } else { vec![2] }, "{at}");
        if steps.contains(&1) {
            let reader = CheckpointReader::open(folder.step(1)).unwrap();
            assert_eq!(reader.manifest().notes()["said"], "new", "{at}");
        }
        folder.prune(1).unwrap();
        assert_eq!((folder.steps().unwrap(), folder.latest().unwrap()), (vec![2], Some(2)), "{at}");
    }
}
