//! Pipelines times replicas: memory and traffic of a rank are those of its stages, by the formulas of the strategies.

use crate::{pipeline_staged::*, prelude::*};

/// Two steps, then bytes of parameters, gradients and state on this rank.
fn bytes(comm: &Comm<Cpu>, mut trainer: TrainStep<Cpu>) -> Result<usize> {
    let (rt, m) = (comm.runtime(), trainer.pipeline().expect("stages").schedule().micro_batches());
    for _ in 0..2 {
        let x = Tensor::normal(rt, [m, 128], DType::F32, 0.0, 1.0, 1)?;
        trainer.step(|_| MicroBatches::split(from_ref(&x), from_ref(&x), m))?;
    }
    let memory = rt.memory();
    assert_eq!(memory.of(MemoryCategory::Communication).live, 0, "nothing stays gathered");
    Ok([MemoryCategory::Parameters, MemoryCategory::Gradients, MemoryCategory::Optimizer]
        .map(|u| memory.of(u).live)
        .into_iter()
        .sum())
}

#[test]
fn memory_is_that_of_the_table_for_a_stage() {
    // Bytes of a parameter of the rank's stages: AdamW, all in f32, N replicas.
    let formula = |how: How, n: f64| match how {
        How::Replicas | How::Zero(ZeroStage::None) => 16.0,
        How::Zero(ZeroStage::Optimizer) => 8.0 + 8.0 / n,
        How::Zero(ZeroStage::Gradients) => 4.0 + 12.0 / n,
        How::Zero(ZeroStage::Parameters) | How::Gathered => 16.0 / n,
    };
    let mut turns = Turns::one_of(3);
    for (p, v, kind) in [(2, 1, ScheduleKind::OneFOneB), (2, 2, ScheduleKind::Zbv), (3, 1, ScheduleKind::ZbH1)] {
        for n in [1, 2, 3, 4] {
            for how in HOWS.into_iter().filter(|_| turns.come()) {
                let checked = how.checked(kind, p, v, 2 * p).unwrap();
                let measured = ranks_of(p * n, |comm| {
                    let (staged, config) = (layers(&comm, &checked)?, TrainingConfig::default());
                    match how.zero() {
                        None => bytes(&comm, pipelined(&comm, staged, config)?),
                        Some(zero) => bytes(&comm, sharded_pipeline(&comm, staged, config, zero)?),
                    }
                });
                let expected = formula(how, n as f64) * (v * 2 * 128 * 128) as f64;
                for bytes in measured.unwrap() {
                    let off = bytes as f64 / expected - 1.0;
                    assert!(off.abs() <= 0.02, "{kind} {p} x {n}, {how:?}: {bytes} bytes, {expected} by the table");
                }
            }
        }
    }
}

/// Collectives of the third step on a rank, the first without preparations.
fn counted(how: How, checked: &Checked, n: usize) -> Vec<BTreeMap<&'static str, Traffic>> {
    fn third(comm: &CountingCommunicator<Cpu>, mut trainer: TrainStep<Cpu>) -> Result<()> {
        let m = trainer.pipeline().expect("stages").schedule().micro_batches();
        for _ in 0..3 {
            comm.reset();
            let x = Tensor::normal(comm.runtime(), [m, 128], DType::F32, 0.0, 1.0, 1)?;
            trainer.step(|_| MicroBatches::split(from_ref(&x), from_ref(&x), m))?;
        }
        Ok(())
    }
    let p = checked.schedule().placement().ranks();
    let counts = ranks_of(p * n, |comm| {
        let counting = Arc::new(CountingCommunicator::new(comm));
        let comm = counting.clone() as Comm<Cpu>;
        let (staged, config) = (layers(&comm, checked)?, TrainingConfig::default());
        match how.zero() {
            None => third(&counting, pipelined(&comm, staged, config)?)?,
            Some(zero) => third(&counting, sharded_pipeline(&comm, staged, config, zero)?)?,
        }
        Ok(counting.counts())
    });
    counts.unwrap()
}

#[test]
fn traffic_over_the_replicas_is_that_of_the_formulas() {
    let (layer, mut turns) = (128 * 128 * 4, Turns::one_of(3));
    for (p, v, kind) in [
        (2, 1, ScheduleKind::OneFOneB),
        (2, 1, ScheduleKind::ZbH1),
        (2, 3, ScheduleKind::LoopedBfs),
        (2, 2, ScheduleKind::Zbv),
    ] {
        let m = 2 * p as u64;
        for n in [2, 4] {
            for how in HOWS.into_iter().filter(|_| turns.come()) {
                let checked = how.checked(kind, p, v, 2 * p).unwrap();
                for (rank, counts) in counted(how, &checked, n).into_iter().enumerate() {
                    let what = format!("{kind}, {v} stages each, {how:?}, rank {rank} of {p} x {n}");
                    let layers = 2 * v as u64;
                    let calls = |kind| counts.get(kind).map_or(0, |traffic| traffic.calls);
                    let bytes = |kind| counts.get(kind).map_or(0, |traffic| traffic.payload);
                    let gathers = checked.row(rank % p).iter();
                    let gathers = gathers.filter(|action| action.to_string().ends_with("UNSHARD")).count() as u64;
                    let (scattered, gathered) = match how {
                        How::Replicas | How::Zero(ZeroStage::None) => (0, 0),
                        How::Zero(ZeroStage::Optimizer) => (layers, layers),
                        How::Zero(ZeroStage::Gradients) => (m * layers, layers),
                        How::Zero(ZeroStage::Parameters) => (m * layers, calls("all_gather")),
                        How::Gathered => (m * layers, 2 * gathers),
                    };
                    assert_eq!((calls("reduce_scatter"), calls("all_gather")), (scattered, gathered), "{what}");
                    assert_eq!((bytes("reduce_scatter"), bytes("all_gather")), (scattered * layer, gathered * layer));
                    if how == How::Zero(ZeroStage::Parameters) {
                        // There and back, but for layers that are still here.
                        assert!((m * layers..=2 * m * layers).contains(&gathered), "{what}: {gathered}");
                    }
                    // Sum and weight of the losses, and whole gradients, each once.
                    let whole = if how == How::Replicas { layers * layer } else { 0 };
                    assert_eq!(bytes("all_reduce"), whole + 16, "{what}");
                }
            }
        }
    }
}
