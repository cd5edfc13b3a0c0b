//! Checkpoints of models whose experts are shared out: saved by ranks in any arrangement, loaded by ranks in any other, to the bit.

use crate::{expert_common::ExpertCase, job, prelude::*, tensor_checkpoints::goes_on};

const STEPS: usize = 2;

/// An arrangement of ranks.
type Axes = &'static [(Axis, usize)];

const CUTS: [(Axes, Option<ZeroStage>); 9] = [
    (&[(Axis::Data, 1)], None),
    (&[(Axis::Data, 4), (Axis::Expert, 4)], None),
    (&[(Axis::Data, 4), (Axis::Expert, 2)], None),
    (&[(Axis::Data, 2), (Axis::Shard, 4), (Axis::Expert, 2)], Some(ZeroStage::Parameters)),
    (&[(Axis::Shard, 3), (Axis::Expert, 1)], Some(ZeroStage::Optimizer)),
    (&[(Axis::Data, 6), (Axis::Expert, 2)], Some(ZeroStage::Gradients)),
    (&[(Axis::Data, 2), (Axis::Tensor, 2), (Axis::Expert, 2)], Some(ZeroStage::Parameters)),
    (&[(Axis::Data, 2), (Axis::Context, 2), (Axis::Expert, 4)], None),
    (&[(Axis::Shard, 2), (Axis::Context, 2), (Axis::Expert, 2)], Some(ZeroStage::Parameters)),
];

fn folder(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("weftgrad-expert-{}-{name}", job::id()))
}

/// Loads what is in `from`, or trains, takes `more` steps, and saves into `to`; gives the losses of the last.
fn go_on(case: &ExpertCase, axes: Axes, from: Option<&PathBuf>, more: usize, to: &PathBuf) -> Vec<f64> {
    let plan = ParallelPlan::of(axes.to_vec()).unwrap();
    let (source, target) = (from.map(Folder::new), Folder::new(to));
    let run = Ranks::new(plan.world()).run(cpu, |comm| {
        let mesh = Mesh::new(&comm, plan.clone())?;
        let model = case.build(&mesh)?;
        let builder = TrainStep::builder(&mesh, &model).optimizer(adamw()).max_norm(0.5);
        let mut step = builder.zero(case.zero.unwrap_or(ZeroStage::None)).experts().build()?;
        if let Some(source) = &source {
            assert!(step.load(source)?.is_some());
        }
        let mut losses = Vec::new();
        for k in 0..more {
            losses.push(case.step(&mut step, &model, mesh.batch(), k)?.loss()?);
        }
        step.save(&target, &BTreeMap::new())?;
        Ok(losses)
    });
    run.unwrap_or_else(|error| panic!("{axes:?}: {error}")).remove(0)
}

/// Every tensor of a checkpoint, whole, as bytes.
fn contents(folder: &PathBuf) -> BTreeMap<String, Vec<u8>> {
    let rt = cpu(0).unwrap();
    let mut reader = CheckpointReader::open(Folder::new(folder).step(STEPS as u64)).unwrap();
    let names: Vec<String> = reader.manifest().names().map(String::from).collect();
    names.into_iter().map(|name| (name.clone(), reader.tensor(&rt, &name).unwrap().to_bytes().unwrap())).collect()
}

#[test]
fn what_any_cut_saves_any_other_loads_to_the_bit() {
    let case = ExpertCase { dtype: DType::F32, frozen: &["blocks.0.mlp.experts.down_proj"], ..ExpertCase::new(4) };
    for (k, (axes, zero)) in CUTS.into_iter().enumerate() {
        let saved = folder(&format!("saved-{k}"));
        go_on(&ExpertCase { zero, ..case.clone() }, axes, None, STEPS, &saved);
        let first = contents(&saved);
        assert!(
            first.keys().any(|name| name == "state/exp_avg_sq/blocks.1.mlp.experts.down_proj"),
            "{:?}",
            first.keys()
        );
        for (other, (axes, zero)) in CUTS.into_iter().enumerate().filter(|(other, _)| goes_on(k, *other, CUTS.len())) {
            let again = folder(&format!("again-{k}-{other}"));
            go_on(&ExpertCase { zero, ..case.clone() }, axes, Some(&saved), 0, &again);
            assert!(contents(&again) == first, "{k} loaded by {axes:?} {zero:?}");
            std::fs::remove_dir_all(again).unwrap();
        }
        std::fs::remove_dir_all(saved).unwrap();
    }
}

#[test]
fn what_follows_a_checkpoint_is_what_follows_on_one_rank() {
    let case = ExpertCase { router: [0.1, 0.01], ..ExpertCase::new(4) };
    let (saved, scratch) = (folder("follows"), folder("follows-on"));
    go_on(&case, CUTS[2].0, None, STEPS, &saved);
    let mut all = Vec::new();
    for (axes, zero) in CUTS {
        all.push(go_on(&ExpertCase { zero, ..case.clone() }, axes, Some(&saved), 3, &scratch));
        std::fs::remove_dir_all(&scratch).unwrap();
    }
    std::fs::remove_dir_all(saved).unwrap();
    for losses in &all {
        let off = losses.iter().zip(&all[0]).fold(0.0, |m: f64, (a, b)| m.max((a - b).abs() / b.abs()));
        assert!(off <= 1e-11, "{all:?}");
    }
}

#[test]
fn hyper_parameters_that_are_restored_are_those_of_experts_too() {
    for zero in [None, Some(ZeroStage::Optimizer)] {
        let saved = folder(&format!("hyper-{}", zero.is_some()));
        let groups = |lr: f64, what| {
            let plan = ParallelPlan::of([(Axis::Data, 2), (Axis::Expert, 2)]).unwrap();
            let ranks = Ranks::new(2).run(cpu, |comm| {
                let mesh = Mesh::new(&comm, plan.clone())?;
                let model = ExpertCase::new(4).build(&mesh)?;
                let builder = TrainStep::builder(&mesh, &model).optimizer(AdamWConfig { lr, ..Default::default() });
                let builder = builder.hyper_parameters(what);
                let mut step = builder.zero(zero.unwrap_or(ZeroStage::None)).experts().build()?;
                match what {
                    HyperParameters::Restored => assert!(step.load(&Folder::new(&saved))?.is_some()),
                    _ => step.save(&Folder::new(&saved), &BTreeMap::new())?,
                }
                step.strategy().hyper_parameters()
            });
            ranks.unwrap()
        };
        let first = groups(0.5, HyperParameters::Saved);
        assert!(first[0].len() == 2 && first[0][1].parameters.iter().all(|name| name.contains("experts")));
        assert!(groups(7.0, HyperParameters::Restored) == first, "{zero:?}");
        std::fs::remove_dir_all(saved).unwrap();
    }
}
