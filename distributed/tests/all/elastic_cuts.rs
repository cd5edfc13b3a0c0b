//! Elastic runs of models that are cut over ranks: those that are left cut the model otherwise, and go on, to the bit, as a fresh run of that cut from the commit.

use crate::{
    expert_common::{ExpertCase, MoeGpt},
    pipeline_staged::{How, Model, steps},
    prelude::*,
    tensor_common::TensorCase,
};

const RANKS: usize = 4;
/// Steps of a run; ranks are lost before the third.
const LENGTH: u64 = 4;
const LOST_AT: u64 = 2;

/// A training step with what it trains.
trait Training {
    fn state(&mut self) -> &mut dyn Checkpointed<Cpu>;
    fn step(&mut self, k: u64) -> Result<()>;
}

struct Tensors(TensorCase, Mesh<Cpu>, Gpt<Cpu>, TrainStep<Cpu>);

impl Training for Tensors {
    fn state(&mut self) -> &mut dyn Checkpointed<Cpu> {
        &mut self.3
    }

    fn step(&mut self, k: u64) -> Result<()> {
        self.0.step(&mut self.3, &self.2, self.1.batch(), k as usize).map(drop)
    }
}

struct Experts(ExpertCase, Mesh<Cpu>, MoeGpt<Cpu>, TrainStep<Cpu>);

impl Training for Experts {
    fn state(&mut self) -> &mut dyn Checkpointed<Cpu> {
        &mut self.3
    }

    fn step(&mut self, k: u64) -> Result<()> {
        self.0.step(&mut self.3, &self.2, self.1.batch(), k as usize).map(drop)
    }
}

struct Stages<G>(Comm<Cpu>, TrainStep<Cpu>, fn(&TrainStep<Cpu>) -> Result<G>);

impl<G> Training for Stages<G> {
    fn state(&mut self) -> &mut dyn Checkpointed<Cpu> {
        &mut self.1
    }

    fn step(&mut self, k: u64) -> Result<()> {
        steps(&self.0, Model::Mlp, &mut self.1, k as usize..k as usize + 1, self.2).map(drop)
    }
}

/// Every tensor of the last checkpoint, whole, as bytes.
fn contents(folder: &Folder) -> BTreeMap<String, Vec<u8>> {
    let rt = cpu(0).unwrap();
    let mut reader = CheckpointReader::open(folder.step(LENGTH)).unwrap();
    let names: Vec<String> = reader.manifest().names().map(String::from).collect();
    names.into_iter().map(|name| (name.clone(), reader.tensor(&rt, &name).unwrap().to_bytes().unwrap())).collect()
}

/// Loses these of four ranks. `make` cuts the model for as many ranks as there are.
fn go_on_without(name: &str, lost: &[usize], make: impl Fn(&Comm<Cpu>) -> Result<Box<dyn Training>> + Sync) {
    let scratch = Scratch::new(name);
    let [elastic, fresh] = ["elastic", "fresh"].map(|which| Folder::new(scratch.0.join(which)));
    let notes = CheckpointNotes::new();
    let runtimes = (0..RANKS).map(|_| Cpu::with_threads(1)).collect();
    let (_meeting, seats) = ThreadRendezvous::new(runtimes, Quorum::default(), Duration::from_secs(60)).unwrap();
    let outcomes = Elastic::on_threads(
        seats,
        |elastic| elastic.copies(2),
        |world| {
            let comm = world.comm()?;
            let mut training = make(&comm)?;
            let begun = world.restore(training.state())?.map_or(0, |restored| restored.step);
            world.commit(begun, training.state(), &notes)?;
            for k in begun..LENGTH {
                if (world.generation(), k) == (0, LOST_AT) && lost.contains(&comm.rank()) {
                    return Err(Error::argument("the machine", "is gone"));
                }
                training.step(k)?;
                world.commit(k + 1, training.state(), &notes)?;
            }
            elastic.save(&comm, LENGTH, training.state(), &notes)?;
            Ok((comm.size(), begun))
        },
    );
    let left = RANKS - lost.len();
    let done: Vec<_> = outcomes.iter().flatten().copied().collect();
    assert_eq!(done, vec![(left, LOST_AT); left], "{name}: {outcomes:?}");
    let run = |ranks: usize, from: u64, to: u64| {
        let program = |comm: Comm<Cpu>| {
            let mut training = make(&comm)?;
            if from > 0 {
                fresh.load(&comm, from, training.state())?;
            }
            (from..to).try_for_each(|k| training.step(k))?;
            fresh.save(&comm, to, training.state(), &notes)
        };
        Ranks::new(ranks).run(cpu, program).unwrap_or_else(|error| panic!("{name}: {error}"));
    };
    run(RANKS, 0, LOST_AT);
    run(left, LOST_AT, LENGTH);
    assert!(contents(&elastic) == contents(&fresh), "{name}");
}

#[test]
fn models_that_are_cut_along_a_tensor_axis() {
    for zero in [None, Some(ZeroStage::Parameters)] {
        go_on_without(&format!("elastic-tensor-{zero:?}"), &[1], |comm| {
            let along = if zero.is_some() { Axis::Shard } else { Axis::Data };
            let axes =
                if comm.size() == RANKS { vec![(along, 2), (Axis::Tensor, 2)] } else { vec![(along, comm.size())] };
            let (case, mesh) = (TensorCase::new(2), Mesh::new(comm, ParallelPlan::of(axes)?)?);
            let model = case.build(&mesh)?;
            let builder = TrainStep::builder(&mesh, &model).optimizer(adamw()).max_norm(0.5);
            Ok(match zero {
                None => {
                    let step = builder.build()?;
                    Box::new(Tensors(case, mesh, model, step))
                }
                Some(stage) => {
                    let step = builder.zero(stage).build()?;
                    Box::new(Tensors(case, mesh, model, step))
                }
            })
        });
    }
}

#[test]
fn experts_that_are_shared_out() {
    go_on_without("elastic-experts", &[2], |comm| {
        let n = comm.size();
        let axes = [(Axis::Data, n), (Axis::Expert, if n == RANKS { 4 } else { 1 })];
        let (case, mesh) = (ExpertCase::new(4), Mesh::new(comm, ParallelPlan::of(axes)?)?);
        let model = case.build(&mesh)?;
        let step = TrainStep::builder(&mesh, &model).optimizer(adamw()).max_norm(0.5).experts().build()?;
        Ok(Box::new(Experts(case, mesh, model, step)))
    });
}

#[test]
fn stages_of_pipelines() {
    for how in [How::Replicas, How::Zero(ZeroStage::Parameters)] {
        go_on_without(&format!("elastic-stages-{}", how == How::Replicas), &[1, 2], |comm| {
            let replicas = comm.size() / 2;
            let checked = how.checked(ScheduleKind::OneFOneB, 2, 1, 8 / replicas);
            let checked = checked.ok_or_else(|| Error::argument("the test", "has no such schedule"))?;
            let stages = Model::Mlp.staged(comm, &checked, 4);
            Ok(match how.zero() {
                None => Box::new(Stages(comm.clone(), pipelined(comm, stages, config())?, |_| Ok(()))),
                Some(zero) => {
                    let step = sharded_pipeline(comm, stages, config(), zero)?;
                    Box::new(Stages(comm.clone(), step, |step| step.gather_full_params()))
                }
            })
        });
    }
}
