//! Checkpoints: whatever can happen to files, and to a program while it saves.

use std::{fs, thread};

use crate::{checkpoint_common::*, prelude::*};

/// Saves with four ranks, spoils the files, and tries to load with three: what each rank says, and whether it changed nothing.
fn spoiled(name: &str, spoil: impl Fn(&Path)) -> Vec<Error> {
    let scratch = Scratch::new(name);
    let folder = scratch.folder();
    let how = ZeroStage::Gradients;
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

fn replace(path: &Path, from: &str, to: &str) {
    edit(path, |b| {
        let text = String::from_utf8(std::mem::take(b)).unwrap();
        assert!(text.contains(from), "{text}");
        *b = text.replace(from, to).into_bytes();
    });
}

#[test]
fn spoiled_files_are_named_on_every_rank() {
    type Spoil = fn(&Path);
    let cases: [(&str, Spoil, &str); 8] = [
        ("flipped", |p| edit(&p.join("rank-00000.safetensors"), |b| *b.last_mut().unwrap() ^= 1), "checksum"),
        ("truncated", |p| edit(&p.join("rank-00001.safetensors"), |b| b.truncate(b.len() - 9)), "rank-00001"),
        ("missing", |p| fs::remove_file(p.join("rank-00000.safetensors")).unwrap(), "rank-00000"),
        (
            "swapped",
            |p| assert!(fs::copy(p.join("rank-00000.safetensors"), p.join("rank-00001.safetensors")).unwrap() > 0),
            "rank-00001",
        ),
        ("foreign", |p| fs::write(p.join("manifest.json"), "{\"a\": 1}").unwrap(), "no version"),
        ("cut off", |p| edit(&p.join("manifest.json"), |b| b.truncate(b.len() / 2)), "not JSON"),
        // A number that nothing else speaks of.
        (
            "altered",
            |p| replace(&p.join("manifest.json"), "\"trainer/steps\":1", "\"trainer/steps\":9"),
            "its checksum differs",
        ),
        ("future", |p| replace(&p.join("manifest.json"), "\"version\":1", "\"version\":9"), "version 9"),
    ];
    for (name, spoil, told) in cases {
        for e in spoiled(name, spoil) {
            assert!(e.to_string().contains(told), "{name}: {e}");
        }
    }
}

#[test]
fn what_no_manifest_names_is_not_read() {
    let scratch = Scratch::new("extra");
    let folder = scratch.folder();
    let how = ZeroStage::Gradients;
    let run = |from, to| {
        Ranks::new(2).run(cpu, |c| run::<Mlp<Cpu>>(&c, how, DType::F32, &folder, from, to, from == 0)).unwrap()
    };
    let whole = run(0, 1);
    fs::copy(folder.step(1).join("rank-00000.safetensors"), folder.step(1).join("rank-00007.safetensors")).unwrap();
    fs::write(folder.step(1).join("notes.txt"), "of mine").unwrap();
    fs::write(scratch.0.join("step-0000000007"), "a file").unwrap();
    fs::create_dir(scratch.0.join("step-0000000008")).unwrap();
    fs::create_dir(scratch.0.join("step-of-mine")).unwrap();
    assert_eq!((folder.steps().unwrap(), folder.latest().unwrap()), (vec![1], Some(1)));
    // No losses: the weights that were saved.
    assert_eq!(run(1, 1)[0], whole[0][1..]);
}

#[test]
fn a_save_does_not_meet_a_load() {
    let scratch = Scratch::new("crossed");
    let folder = scratch.folder();
    let outcomes = Ranks::new(2).outcomes(cpu, |comm| {
        let model = Mlp::new(&Init::new(comm.runtime(), 0))?;
        let mut trainer = Any::new(&comm, &model, ZeroStage::None, config())?;
        if comm.rank() == 0 { trainer.save(&folder) } else { trainer.load(&folder).map(|_| ()) }
    });
    refused(outcomes.unwrap(), &["writer.rs", "reader.rs"]);
}

#[test]
fn ranks_load_what_rank_0_has_once_they_see_it() {
    let [first, second] = ["seen-first", "seen-later"].map(Scratch::new);
    Ranks::new(2).run(cpu, |c| run::<Mlp<Cpu>>(&c, ZeroStage::None, DType::F32, &first.folder(), 0, 1, true)).unwrap();
    let copy = |step: u64, to: &Path| {
        fs::create_dir_all(to).unwrap();
        for file in fs::read_dir(first.folder().step(step)).unwrap() {
            fs::copy(file.as_ref().unwrap().path(), to.join(file.unwrap().file_name())).unwrap();
        }
    };
    let load = |patience| {
        let loaded = Ranks::new(2).timeout(patience).outcomes(cpu, |comm| {
            let model = Mlp::new(&Init::new(comm.runtime(), 5))?;
            let mut trainer = bucketed(&comm, &model, config(), GradientSums::default())?;
            [&first, &second][comm.rank()].folder().load_latest(&comm, &mut trainer)?;
            Ok(trainer.global_step())
        });
        loaded.unwrap()
    };
    // Rank 0 cannot look into its folder, and says so to rank 1, which could into its own.
    fs::write(first.0.with_extension("file"), "").unwrap();
    let unread = Ranks::new(2).outcomes(cpu, |comm| {
        let folders = [Folder::new(first.0.with_extension("file")), second.folder()];
        // The error itself, as a rank that ended with it would tell the other.
        Ok(folders[comm.rank()].latest_of_all(&comm).map(drop).unwrap_err().to_string())
    });
    fs::remove_file(first.0.with_extension("file")).unwrap();
    assert!(unread.unwrap().into_iter().all(|error| error.unwrap().contains("Not a directory")));
    // Rank 1 has an older one, which it calls the latest, and sees the new one after a while.
    copy(1, &second.folder().step(0));
    let stale = load(Duration::from_millis(400));
    let unseen = "rank 0 has a checkpoint of step 1, which this rank did not see";
    assert!(stale.into_iter().all(|rank| rank.unwrap_err().to_string().contains(unseen)));
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(100));
            copy(1, &second.0.join("arrives"));
            fs::rename(second.0.join("arrives"), second.folder().step(1)).unwrap();
        });
        assert!(load(Duration::from_secs(60)).into_iter().all(|rank| rank.unwrap() == 1));
    });
}

#[test]
fn tensors_that_are_missing_unexpected_or_of_another_shape_are_named() {
    let scratch = Scratch::new("strict");
    let folder = scratch.folder();
    let how = ZeroStage::None;
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
    refused(outcomes.unwrap(), &["parameter/a.weight", "f64 [9, 5] here and f32 [9, 5] there"]);
    // SGD without momentum keeps no state: what AdamW saved would be dropped.
    let outcomes = Ranks::new(2).outcomes(cpu, |comm| {
        let model = Mlp::new(&Init::new(comm.runtime(), 5))?;
        let sgd = optim::ParamGroups::new(optim::SgdConfig::default());
        let mut trainer =
            TrainStep::builder(&comm, &model).optimizer(sgd).config(config()).zero(ZeroOptions::default()).build()?;
        trainer.load(&folder).map(|_| ())
    });
    refused(outcomes.unwrap(), &["state/exp_avg/a.weight", "nothing restores it"]);
}

#[test]
fn a_save_that_fails_leaves_the_last_one() {
    let scratch = Scratch::new("failed");
    let folder = scratch.folder();
    let outcomes = Ranks::new(2).outcomes(cpu, |comm| {
        let model = Mlp::new(&Init::new(comm.runtime(), 0))?;
        let mut trainer = Any::new(&comm, &model, ZeroStage::None, config())?;
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
    refused(outcomes.unwrap(), &["unfinished-0000000003"]);
    assert_eq!((folder.steps().unwrap(), folder.latest().unwrap()), (vec![1, 2], Some(2)));
    folder.prune(1).unwrap();
    assert_eq!(folder.steps().unwrap(), [2]);
    assert_eq!(Folder::new(scratch.0.join("nowhere")).latest().unwrap(), None);
    // What a save that was cut short has left goes when a run begins.
    fs::remove_file(scratch.0.join("unfinished-0000000003")).unwrap();
    let [left, stranded] =
        ["unfinished-0000000009-a-save", "stranded-0000000009-a-run"].map(|name| scratch.0.join(name));
    [&left, &stranded].into_iter().for_each(|path| fs::create_dir(path).unwrap());
    folder.remove_orphaned().unwrap();
    assert!(!left.exists() && !stranded.exists() && folder.steps().unwrap() == [2]);
}

/// A rank that was given up while it saved, and wakes when those that went on save the same step, changes nothing of what they publish.
#[test]
fn a_rank_that_wakes_late_changes_no_later_checkpoint() {
    let scratch = Scratch::new("late");
    let [stalls, wakes, ends] = std::array::from_fn(|_| Arc::new(Barrier::new(2)));
    let save = |folder: &Folder, seed: u64| {
        Ranks::new(1).run(cpu, |comm| {
            let model = Mlp::new(&Init::new(comm.runtime(), seed))?;
            let trainer = Any::new(&comm, &model, ZeroStage::None, config())?;
            trainer.save(folder)?;
            trainer.weights(&model)
        })
    };
    let late = scratch.folder().watched({
        let (stalls, wakes) = (stalls.clone(), wakes.clone());
        move |change| {
            if change == "write a rank's file" {
                stalls.wait();
                wakes.wait();
            }
            Ok(())
        }
    });
    let later = scratch.folder().watched({
        let (wakes, ends) = (wakes.clone(), ends.clone());
        move |change| {
            // All that there is to publish was written.
            if change == "write the manifest" {
                wakes.wait();
                ends.wait();
            }
            Ok(())
        }
    });
    let weights = thread::scope(|scope| {
        let late = scope.spawn(|| {
            let saved = save(&late, 1);
            ends.wait();
            saved
        });
        stalls.wait();
        let weights = save(&later, 2).unwrap();
        assert!(late.join().unwrap().is_err(), "its folder was removed");
        weights
    });
    let loaded = Ranks::new(1).run(cpu, |comm| {
        let model = Mlp::new(&Init::new(comm.runtime(), 9))?;
        let mut trainer = Any::new(&comm, &model, ZeroStage::None, config())?;
        trainer.load(&scratch.folder())?;
        trainer.weights(&model)
    });
    assert_eq!(loaded.unwrap(), weights);
    let left = fs::read_dir(&scratch.0).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(left.into_iter().all(|name| !name.to_string_lossy().starts_with("unfinished")));
}

#[test]
fn a_save_that_wakes_after_a_later_one_does_not_become_the_latest() {
    let scratch = Scratch::new("woken");
    let save = |folder: &Folder, step: u64| {
        Ranks::new(2).run(cpu, |comm| {
            let model = Mlp::new(&Init::new(comm.runtime(), 5))?;
            let trainer = bucketed(&comm, &model, config(), GradientSums::default())?;
            folder.save(&comm, step, &trainer, &CheckpointNotes::new())
        })
    };
    save(&scratch.folder(), 1).unwrap();
    // Another save, of ranks that have gone on, is made while this one stands.
    let (path, made) = (scratch.0.clone(), Arc::new(AtomicBool::new(false)));
    let late = scratch.folder().watched(move |change| {
        if change == "write a rank's file" && !made.swap(true, Ordering::SeqCst) {
            save(&Folder::new(&path), 3)?;
        }
        Ok(())
    });
    let error = save(&late, 2).unwrap_err().to_string();
    assert!(error.contains("while step 2 was saved, another save made step 3 the latest"), "{error}");
    assert_eq!(scratch.folder().latest().unwrap(), Some(3));
}
