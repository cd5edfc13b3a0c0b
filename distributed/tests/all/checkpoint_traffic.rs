//! What ranks tell each other when they save and load: nobody but rank 0 gets tables, and loading exchanges digests and flags.

use std::fs;

use crate::{checkpoint_common::*, prelude::*};

/// Many small parameters: tables are long, values are few.
fn model(rt: &Cpu, layers: usize) -> Result<Sequential<Cpu>> {
    let init = Init::new(rt, 0).dtype(DType::F64);
    (0..layers).try_fold(Sequential::new(), |model, _| Ok(model.push(Linear::new(&init, 2, 2)?)))
}

/// Bytes that each rank sends when `n` ranks save and when they load, and the length of the manifest.
fn traffic(n: usize, layers: usize, how: ZeroStage) -> (Vec<[u64; 2]>, u64) {
    let scratch = Scratch::new(&format!("traffic-{n}-{layers}-{how:?}").replace(['(', ')'], "-"));
    let folder = scratch.folder();
    let sent = Ranks::new(n).run(cpu, |comm| {
        let counting = Arc::new(CountingCommunicator::new(comm));
        let comm: Comm<Cpu> = counting.clone();
        let model = model(comm.runtime(), layers)?;
        let mut trainer = Any::over(&comm, &model, how, crate::common::config())?;
        counting.reset();
        trainer.save(&folder)?;
        let saving = counting.total().sent;
        counting.reset();
        trainer.load(&folder)?;
        let loading = counting.total().sent;
        Ok([saving, loading])
    });
    let length = fs::metadata(folder.step(0).join("manifest.json")).unwrap().len();
    (sent.unwrap(), length)
}

#[test]
fn tables_go_to_rank_0_alone() {
    for n in [2, 3, 5, 8] {
        for how in [ZeroStage::None, STAGES[2]] {
            let (few, short) = traffic(n, 2, how);
            let (many, long) = traffic(n, 40, how);
            let sum = |all: &[[u64; 2]], k: usize| all.iter().map(|of| of[k]).sum::<u64>();
            // Everything but the tables is the same for any model.
            let grown = sum(&many, 0) - sum(&few, 0);
            assert!(
                grown <= (long - short) * 5 / 4,
                "{n} ranks, {how:?}: tables of {grown} bytes, a manifest of {}",
                long - short
            );
            assert!(many[0][0] <= few[0][0] + 64 * n as u64, "rank 0 sends nobody a table: {many:?}");
        }
    }
}

#[test]
fn loading_exchanges_a_digest_and_a_flag_for_each_name() {
    for n in [2, 3, 5, 8] {
        let (few, _) = traffic(n, 2, ZeroStage::None);
        let (many, long) = traffic(n, 40, ZeroStage::None);
        for (few, many) in few.iter().zip(&many) {
            // A weight and a bias a layer, each with two states and a count: an all-reduce of one byte for each name.
            let names = 38 * 2 * 4;
            let due = 2 * (n as u64 - 1) * names / n as u64;
            assert!(many[1] - few[1] <= due + 2, "{n} ranks: {} bytes more for {names} names more", many[1] - few[1]);
            assert!(many[1] < long, "{n} ranks: {} bytes, the manifest has {long}", many[1]);
        }
    }
}

/// Replicas of shards save as many bytes as each other.
#[test]
fn replicas_share_the_saving() {
    for stage in [ZeroStage::Optimizer, ZeroStage::Parameters] {
        let bytes = Ranks::new(6).run(cpu, |comm| {
            let model = model(comm.runtime(), 30)?;
            let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Data, 2), (Axis::Shard, 3)])?)?;
            let mut step = TrainStep::builder(&mesh, &model).optimizer(adamw()).zero(stage).build()?;
            step.step(|_| {
                Loss::sum(model.forward(&Var::new(Tensor::ones(comm.runtime(), [1, 2], DType::F64)?))?.sum_all()?, 1.0)
            })?;
            let bytes = |parts: Vec<CheckpointPart<Cpu>>| parts.iter().map(|part| part.row.numel() * 8).sum::<usize>();
            Ok([bytes(step.parts()?), bytes(step.parameter_parts()?)])
        });
        let bytes = bytes.unwrap();
        // Weights and biases of 6 numbers a layer, each with two states.
        assert_eq!([0, 1].map(|k| bytes.iter().map(|own| own[k]).sum::<usize>()), [30 * 6 * 3 * 8, 30 * 6 * 8]);
        let differ = |rank: usize| (0..2).any(|k| bytes[rank][k].abs_diff(bytes[rank + 3][k]) > 4 * 8);
        assert!(!(0..3).any(differ), "{stage:?}: {bytes:?}");
    }
}
