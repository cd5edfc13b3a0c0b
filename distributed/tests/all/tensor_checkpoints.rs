//! Checkpoints of models that are cut: saved by ranks in any arrangement, loaded by ranks in any other, to the bit.

use crate::{
    job,
    prelude::*,
    tensor_common::{TensorCase, pieces},
};

pub const STEPS: usize = 2;

/// An arrangement of ranks.
pub type Axes = &'static [(Axis, usize)];

const CUTS: [(Axes, Option<ZeroStage>); 9] = [
    (&[(Axis::Data, 1)], None),
    (&[(Axis::Tensor, 4)], None),
    (&[(Axis::Tensor, 8)], Some(ZeroStage::Parameters)),
    (&[(Axis::Data, 2), (Axis::Shard, 2), (Axis::Tensor, 2)], Some(ZeroStage::Parameters)),
    (&[(Axis::Shard, 3), (Axis::Tensor, 2)], Some(ZeroStage::Optimizer)),
    (&[(Axis::Data, 2), (Axis::Tensor, 2)], None),
    (&[(Axis::Shard, 2), (Axis::Tensor, 4)], Some(ZeroStage::Gradients)),
    (&[(Axis::Data, 2), (Axis::Context, 2)], None),
    (&[(Axis::Data, 2), (Axis::Shard, 2), (Axis::Context, 2)], Some(ZeroStage::Parameters)),
];

fn folder(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("weftgrad-tensor-{}-{name}", job::id()))
}

/// Loads what is in `from`, or trains, and saves into `to`.
pub fn go_on(case: &TensorCase, axes: Axes, from: Option<&PathBuf>, to: &PathBuf) {
    let plan = ParallelPlan::of(axes.to_vec()).unwrap();
    let (source, target) = (from.map(Folder::new), Folder::new(to));
    let run = Ranks::new(plan.world()).run(cpu, |comm| {
        let mesh = Mesh::new(&comm, plan.clone())?;
        let model = case.build(&mesh)?;
        let builder = TrainStep::builder(&mesh, &model).optimizer(adamw()).max_norm(0.5);
        let mut step = builder.zero(case.zero.unwrap_or(ZeroStage::None)).build()?;
        match &source {
            Some(source) => assert!(step.load(source)?.is_some()),
            None => {
                for k in 0..STEPS {
                    case.step(&mut step, &model, mesh.batch(), k)?;
                }
            }
        }
        step.save(&target, &BTreeMap::new())
    });
    run.unwrap_or_else(|error| panic!("{axes:?}: {error}"));
}

/// Every tensor of a checkpoint, whole, as bytes.
pub fn contents(folder: &PathBuf) -> BTreeMap<String, Vec<u8>> {
    let rt = cpu(0).unwrap();
    let mut reader = CheckpointReader::open(Folder::new(folder).step(STEPS as u64)).unwrap();
    let names: Vec<String> = reader.manifest().names().map(String::from).collect();
    names.into_iter().map(|name| (name.clone(), reader.tensor(&rt, &name).unwrap().to_bytes().unwrap())).collect()
}

/// The pairs of cuts, of which one loads what the other saved: each loads its own, and those of two others.
pub fn goes_on(from: usize, by: usize, cuts: usize) -> bool {
    matches!((by + cuts - from) % cuts, 0 | 2 | 5)
}

#[test]
fn what_any_cut_saves_any_other_loads_to_the_bit() {
    let case = TensorCase { dtype: DType::F32, ..TensorCase::new(8) };
    for (k, (axes, zero)) in CUTS.into_iter().enumerate() {
        let saved = folder(&format!("saved-{k}"));
        go_on(&TensorCase { zero, ..case.clone() }, axes, None, &saved);
        let first = contents(&saved);
        assert!(first.keys().any(|name| name.starts_with("state/exp_avg_sq/blocks.1.fc2")), "{:?}", first.keys());
        for (other, (axes, zero)) in CUTS.into_iter().enumerate().filter(|(other, _)| goes_on(k, *other, CUTS.len())) {
            let again = folder(&format!("again-{k}-{other}"));
            go_on(&TensorCase { zero, ..case.clone() }, axes, Some(&saved), &again);
            assert!(contents(&again) == first, "{k} loaded by {axes:?} {zero:?}");
            std::fs::remove_dir_all(again).unwrap();
        }
        std::fs::remove_dir_all(saved).unwrap();
    }
}

#[test]
fn parameters_alone_are_loaded_into_pieces() {
    let case = TensorCase::new(2);
    let saved = folder("parameters");
    go_on(&case, &[(Axis::Data, 1)], None, &saved);
    let outcomes = Ranks::new(2).run(cpu, |comm| {
        let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Tensor, 2)])?)?;
        let model = Gpt::new(&Init::new(comm.runtime(), 99).dtype(case.dtype), case.model)?;
        mesh.parallelize(&model, &Gpt::<Cpu>::tensor_plan())?;
        let mut reader = CheckpointReader::open(Folder::new(&saved).step(STEPS as u64))?;
        let whole: BTreeMap<String, Vec<f64>> = model
            .named_parameters()
            .into_iter()
            .map(|(name, _)| {
                let value = reader.tensor(comm.runtime(), &format!("parameter/{name}"))?.to_dtype(DType::F64)?;
                Ok((name, value.to_vec::<f64>()?))
            })
            .collect::<numcore::Result<_>>()?;
        reader.load_parameters(&model, |name| Some(name.into()))?;
        for (name, placement, values) in pieces(&model)? {
            for run in placement.runs(0..values.len()) {
                let (here, there) = (run.local..run.local + run.len, run.logical..run.logical + run.len);
                assert_eq!(values[here], whole[&name][there], "{name}");
            }
        }
        Ok(())
    });
    outcomes.unwrap();
    std::fs::remove_dir_all(saved).unwrap();
}
