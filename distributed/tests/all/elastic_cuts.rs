//! Elastic runs of models that are cut over ranks: those that are left cut the model otherwise, and go on, to the bit, as a fresh run of that cut from the commit.

use crate::{prelude::*, worlds::elastic};

const RANKS: usize = 4;
/// Steps of a run; ranks are lost before the third.
const LENGTH: u64 = 4;
const LOST_AT: u64 = 2;

/// Loses these of four ranks. `cut` says how so many ranks cut the model.
fn go_on_without(name: &str, lost: &[usize], cut: impl Fn(usize) -> Way + Sync) {
    let scratch = Scratch::new(name);
    let [changing, fresh] = ["changing", "fresh"].map(|which| Folder::new(scratch.0.join(which)));
    let notes = CheckpointNotes::new();
    let outcomes = elastic(RANKS, 2, |world| {
        let comm = world.comm()?;
        let way = cut(comm.size());
        let mut training = on(&way, &comm)?;
        let begun = world.restore(&mut training.step)?.map_or(0, |restored| restored.step);
        world.commit(begun, &training.step, &notes)?;
        for k in begun..LENGTH {
            if (world.generation(), k) == (0, LOST_AT) && lost.contains(&comm.rank()) {
                return Err(Error::argument("the machine", "is gone"));
            }
            training.take(k as usize)?;
            world.commit(k + 1, &training.step, &notes)?;
        }
        changing.save(&comm, LENGTH, &training.step, &notes)?;
        Ok((comm.size(), begun))
    });
    let left = RANKS - lost.len();
    let done: Vec<_> = outcomes.iter().flatten().copied().collect();
    assert_eq!(done, vec![(left, LOST_AT); left], "{name}: {outcomes:?}");
    let run = |ranks: usize, from: u64, to: u64| {
        let program = |comm: Comm<Cpu>| {
            let way = cut(comm.size());
            let mut training = on(&way, &comm)?;
            if from > 0 {
                fresh.load(&comm, from, &mut training.step)?;
            }
            (from..to).try_for_each(|k| training.take(k as usize).map(drop))?;
            fresh.save(&comm, to, &training.step, &notes)
        };
        Ranks::new(ranks).run(cpu, program).unwrap_or_else(|error| panic!("{name}: {error}"));
    };
    run(RANKS, 0, LOST_AT);
    run(left, LOST_AT, LENGTH);
    assert!(contents(&changing) == contents(&fresh), "{name}");
}

fn on<'w>(way: &'w Way, comm: &Comm<Cpu>) -> Result<Training<'w>> {
    Training::new(way, &Mesh::new(comm, ParallelPlan::of(way.axes.clone())?)?)
}

#[test]
fn models_that_are_cut_along_a_tensor_axis() {
    for (stage, along) in [(ZeroStage::None, Axis::Data), (ZeroStage::Parameters, Axis::Shard)] {
        go_on_without(&format!("elastic-tensor-{stage:?}"), &[1], |n| {
            let axes = if n == RANKS { vec![(along, 2), (Axis::Tensor, 2)] } else { vec![(along, n)] };
            Way::gpt(2).zero(stage).over(&axes)
        });
    }
}

#[test]
fn experts_that_are_shared_out() {
    let over = |n: usize| [(Axis::Data, n), (Axis::Expert, if n == RANKS { 4 } else { 1 })];
    go_on_without("elastic-experts", &[2], |n| Way::mixture(4).over(&over(n)));
}

#[test]
fn stages_of_pipelines() {
    for stage in [ZeroStage::None, ZeroStage::Parameters] {
        go_on_without(&format!("elastic-stages-{stage:?}"), &[1, 2], |n| {
            let way = Way { examples: 16, ..Way::layers(4).staged(ScheduleKind::OneFOneB, 1).zero(stage) };
            way.micros(16 / n).over(&[(Axis::Pipe, 2), (Axis::Data, n / 2)])
        });
    }
}
