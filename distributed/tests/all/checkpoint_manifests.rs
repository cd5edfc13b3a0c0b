//! Manifests that were changed by someone who knows the format: whatever they say, loading ends with an error or with what they say.

use std::{fs, panic::AssertUnwindSafe};

use serde_json::{Value, json};

use crate::{checkpoint_common::*, prelude::*};

fn manifest(folder: &Folder) -> Value {
    serde_json::from_slice(&fs::read(folder.step(1).join("manifest.json")).unwrap()).unwrap()
}

/// Writes a manifest with its checksum made right.
fn write(at: &Path, mut manifest: Value) {
    manifest.as_object_mut().unwrap().remove("checksum");
    let sum = crc32fast::hash(manifest.to_string().as_bytes());
    manifest["checksum"] = json!(sum);
    fs::write(at, manifest.to_string()).unwrap();
}

fn saved(name: &str) -> (Scratch, Folder) {
    let scratch = Scratch::new(name);
    let folder = scratch.folder();
    let how = ZeroStage::Gradients;
    Ranks::new(2).run(cpu, |c| run::<Mlp<Cpu>>(&c, how, DType::F32, &folder, 0, 1, true)).unwrap();
    (scratch, folder)
}

/// Loads with every way to read: a trainer on one rank, and each tensor by itself.
fn loads(folder: &Folder) -> Result<()> {
    let rt = Cpu::with_threads(1);
    let mut reader = CheckpointReader::open(folder.step(1))?;
    let names: Vec<String> = reader.manifest().names().map(String::from).collect();
    let read: Result<Vec<_>> = names.iter().map(|name| reader.tensor(&rt, name)).collect();
    let loaded = Ranks::new(1).run(cpu, |comm| {
        let model = Mlp::new(&Init::new(comm.runtime(), 5))?;
        let mut trainer = Any::new(&comm, &model, ZeroStage::None, config())?;
        let before = weights(&model)?;
        let loaded = trainer.load(folder).map(|_| ());
        Ok((loaded, weights(&model)? == before))
    });
    let (loaded, same) = loaded.unwrap().remove(0);
    assert!(loaded.is_ok() || same, "something changed, and yet: {loaded:?}");
    loaded.and(read.map(|_| ()))
}

#[test]
fn a_tensor_that_is_larger_than_the_files_is_an_error() {
    let (_scratch, folder) = saved("manifest-large");
    let whole = manifest(&folder);
    let key = whole["tensors"]["parameter/a.weight"]["regions"][0][1].clone();
    for (numel, name) in [(1u64 << 58, "parameter/a.weight"), (1 << 40, "parameter/a.weight"), (1 << 58, "rank/0/x")] {
        let mut changed = whole.clone();
        changed["tensors"][name] = json!({ "dtype": "f32", "shape": [numel], "regions": [[0, key, 0, numel, 7]] });
        write(&folder.step(1).join("manifest.json"), changed);
        let error = loads(&folder).unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
        let mut reader = CheckpointReader::open(folder.step(1)).map_err(|e| e.to_string());
        // As the region of another tensor it is refused already when the manifest is read.
        if let Ok(reader) = &mut reader {
            let error = reader.tensor(&Cpu::with_threads(1), name).unwrap_err().to_string();
            assert!(error.contains("the manifest says"), "{error}");
        }
    }
    // One tensor of a file in many places: together more than the file holds.
    let regions: Vec<Value> = (0..1000u64).map(|k| json!([0, key, k * 45, 45, 7])).collect();
    let mut changed = whole;
    changed["tensors"]["parameter/a.weight"] = json!({ "dtype": "f32", "shape": [45000], "regions": regions });
    write(&folder.step(1).join("manifest.json"), changed);
    let error = loads(&folder).unwrap_err().to_string();
    assert!(error.contains("in two places"), "{error}");
}

/// Changes one value somewhere in the tree.
fn mutate(value: &mut Value, random: &mut Philox) {
    let odd = [
        json!(0),
        json!(1),
        json!(-1),
        json!(u64::MAX),
        json!(1u64 << 63),
        json!(1u64 << 58),
        json!(2.5),
        json!(""),
        json!("f64"),
        json!(null),
        json!([]),
        json!({}),
        json!([[[]]]),
        json!("rank/0/x"),
        json!(i64::MIN),
        json!(45),
        json!("bool"),
    ];
    let pick = odd[random.below(odd.len() as u64) as usize].clone();
    match value {
        Value::Object(map) if !map.is_empty() && random.below(8) > 0 => {
            let key = map.keys().nth(random.below(map.len() as u64) as usize).unwrap().clone();
            match random.below(12) {
                0 => _ = map.remove(&key),
                1 => {
                    let moved = map.remove(&key).unwrap();
                    map.insert(format!("{key}x"), moved);
                }
                _ => mutate(&mut map[&key], random),
            }
        }
        Value::Array(list) if !list.is_empty() && random.below(8) > 0 => {
            let at = random.below(list.len() as u64) as usize;
            match random.below(12) {
                0 => _ = list.remove(at),
                1 => list.insert(at, list[at].clone()),
                _ => mutate(&mut list[at], random),
            }
        }
        other => *other = pick,
    }
}

#[test]
fn changed_manifests_end_in_errors_and_neither_panic_nor_abort() {
    let (_scratch, folder) = saved("manifest-fuzz");
    let whole = manifest(&folder);
    let mut random = Philox::new(12, 0);
    let mut errors = 0;
    for round in 0..400 {
        let mut changed = whole.clone();
        for _ in 0..=random.below(3) {
            mutate(&mut changed, &mut random);
        }
        if !changed.is_object() {
            continue;
        }
        write(&folder.step(1).join("manifest.json"), changed.clone());
        let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| loads(&folder).is_err()));
        errors += usize::from(outcome.unwrap_or_else(|_| panic!("round {round} panicked: {changed}")));
    }
    assert!(errors > 200, "{errors} of 400");
    write(&folder.step(1).join("manifest.json"), whole);
    loads(&folder).unwrap();
}

#[test]
fn numbers_that_nobody_takes_are_refused_as_tensors_are() {
    let (_scratch, folder) = saved("manifest-numbers");
    let whole = manifest(&folder);
    for (name, extra) in [("scaler/factor", true), ("updates/z", true), ("rank/7/seed", false)] {
        let mut changed = whole.clone();
        changed["numbers"][name] = json!(3);
        write(&folder.step(1).join("manifest.json"), changed);
        for n in [1, 3] {
            let outcomes = Ranks::new(n).outcomes(cpu, |comm| {
                let model = Mlp::new(&Init::new(comm.runtime(), 5))?;
                let mut trainer = Any::new(&comm, &model, ZeroStage::Optimizer, config())?;
                let before = trainer.weights(&model)?;
                let loaded = trainer.load(&folder).map(|_| ());
                assert_eq!(trainer.weights(&model)? == before, loaded.is_err());
                loaded
            });
            for (rank, outcome) in outcomes.unwrap().into_iter().enumerate() {
                assert_eq!(outcome.is_err(), extra, "{name} on {n} ranks: {outcome:?}");
                if let Err(error) = outcome {
                    assert_eq!(error.rank(), Some(rank));
                    assert!(error.to_string().contains(name) && error.to_string().contains("nothing restores it"));
                }
            }
        }
    }
}

/// A trainer that compresses, which keeps errors of each rank's own.
fn compressing(comm: &Comm<Cpu>, model: &Mlp<Cpu>) -> Result<TrainStep<Cpu>> {
    bucketed(comm, model, config(), PowerSgd { start_iter: 2, ..Default::default() })
}

#[test]
fn what_only_some_ranks_read_is_checked_before_anything_changes() {
    let scratch = Scratch::new("own-corrupted");
    let folder = scratch.folder();
    let train = |comm: &Comm<Cpu>, steps: usize| -> Result<(Mlp<Cpu>, TrainStep<Cpu>)> {
        let model = Mlp::new(&Init::new(comm.runtime(), 0))?;
        let mut trainer = compressing(comm, &model)?;
        for step in 0..steps {
            trainer.step(|_| model.loss(comm.runtime(), step, &crate::common::own(comm)))?;
        }
        Ok((model, trainer))
    };
    Ranks::new(4).run(cpu, |comm| train(&comm, 4)?.1.save(&folder, &Default::default())).unwrap();
    // The error of rank 3, which rank 1 of two takes over.
    let path = folder.step(4).join("manifest.json");
    let manifest: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let tensors = manifest["tensors"].as_object().unwrap();
    let (name, entry) = tensors.iter().find(|(name, _)| name.starts_with("rank/3/")).expect("an error of rank 3");
    let (rank, key) = (entry["regions"][0][0].as_u64().unwrap(), entry["regions"][0][1].as_str().unwrap());
    let file = folder.step(4).join(format!("rank-{rank:05}.safetensors"));
    let mut bytes = fs::read(&file).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let slots: Value = serde_json::from_slice(&bytes[8..header]).unwrap();
    let start = header + slots[key]["data_offsets"][0].as_u64().unwrap() as usize;
    bytes[start] ^= 1;
    fs::write(&file, bytes).unwrap();
    let outcomes = Ranks::new(2).outcomes(cpu, |comm| {
        let (model, mut trainer) = train(&comm, 1)?;
        let before = weights(&model)?;
        let loaded = trainer.load(&folder).map(|_| ());
        assert!(weights(&model)? == before && trainer.global_step() == 1, "something changed");
        loaded
    });
    let errors: Vec<Error> = outcomes.unwrap().into_iter().map(|o| o.unwrap_err()).collect();
    for error in errors {
        assert!(error.to_string().contains(name) && error.to_string().contains("checksum differs"), "{error}");
    }
}

#[test]
fn the_last_checkpoint_is_kept_even_where_it_is_not_the_highest_step() {
    let (scratch, folder) = saved("prune-last");
    let save = |step: u64| {
        let from = scratch.0.join("step-0000000001");
        let to = scratch.0.join(format!("step-{step:010}"));
        fs::create_dir_all(&to).unwrap();
        for entry in fs::read_dir(from).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    };
    [10, 15, 20].into_iter().for_each(save);
    fs::remove_dir_all(scratch.0.join("step-0000000001")).unwrap();
    // A run went back to 10 and saved 15 after 20 had been there.
    fs::write(scratch.0.join("latest"), "15\n20").unwrap();
    assert_eq!((folder.steps().unwrap(), folder.latest().unwrap()), (vec![10, 15, 20], Some(15)));
    folder.prune(1).unwrap();
    assert_eq!((folder.steps().unwrap(), folder.latest().unwrap()), (vec![15, 20], Some(15)));
    folder.prune(1).unwrap();
    assert_eq!(folder.latest().unwrap(), Some(15));
}
