//! Pipelines times replicas: memory and traffic of a rank are those of its stages, by the formulas of the strategies.

use distributed::pipeline::split;

use crate::{pipeline_common::TIMEOUT, prelude::*};

/// A strategy: a stage of ZeRO, and whether stages of the pipeline are gathered whole.
type How = (ZeroStage, bool);

const HOWS: [How; 5] = [
    (ZeroStage::None, false),
    (ZeroStage::Optimizer, false),
    (ZeroStage::Gradients, false),
    (ZeroStage::Parameters, false),
    (ZeroStage::Parameters, true),
];

fn schedule(kind: ScheduleKind, (p, v): (usize, usize), (stage, gathered): How) -> Checked {
    let way = Way::layers(2 * p * v).staged(kind, v).micros(2 * p);
    let way = if gathered { way.gathered() } else { way.zero(stage) };
    way.checked(p).unwrap()
}

/// Two layers of equal size a stage, so that formulas need no allowance for padding.
fn layers(comm: &Comm<Cpu>, checked: &Checked) -> Result<PipelineModel<Cpu>> {
    let init = Init::new(comm.runtime(), 0);
    let count = checked.schedule().stages();
    let linear = |_| Linear::new(&init, 128, 128).map(Linear::without_bias);
    let layers = (0..2 * count).map(linear).collect::<Result<Vec<_>>>()?.into_iter();
    let layers: Vec<Box<dyn Forward<Cpu>>> = layers.map(|layer| Box::new(layer) as _).collect();
    let cuts: Vec<usize> = (1..count).map(|k| 2 * k).collect();
    let staged = PipelineModel::on(comm.rank(), checked.clone(), split(layers, &cuts)?);
    Ok(staged.loss(|y, t| Ok(Loss::mean(mse(&y[0], &t[0], Reduction::Mean)?))))
}

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
    let formula = |stage: ZeroStage, n: f64| match stage {
        ZeroStage::None => 16.0,
        ZeroStage::Optimizer => 8.0 + 8.0 / n,
        ZeroStage::Gradients => 4.0 + 12.0 / n,
        ZeroStage::Parameters => 16.0 / n,
    };
    let mut turns = Turns::one_of(3);
    for (p, v, kind) in [(2, 1, ScheduleKind::OneFOneB), (2, 2, ScheduleKind::Zbv), (3, 1, ScheduleKind::ZbH1)] {
        for n in [1, 2, 3, 4] {
            for how in HOWS.into_iter().filter(|_| turns.come()) {
                let checked = schedule(kind, (p, v), how);
                let measured = Ranks::new(p * n).timeout(TIMEOUT).run(cpu, |comm| {
                    let builder = TrainStep::builder(&comm, layers(&comm, &checked)?).optimizer(adamw());
                    bytes(&comm, builder.zero(how.0).build()?)
                });
                let expected = formula(how.0, n as f64) * (v * 2 * 128 * 128) as f64;
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
    let counts = Ranks::new(p * n).timeout(TIMEOUT).run(cpu, |comm| {
        let counting = Arc::new(CountingCommunicator::new(comm));
        let comm = counting.clone() as Comm<Cpu>;
        third(&counting, TrainStep::builder(&comm, layers(&comm, checked)?).optimizer(adamw()).zero(how.0).build()?)?;
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
                let checked = schedule(kind, (p, v), how);
                for (rank, counts) in counted(how, &checked, n).into_iter().enumerate() {
                    let what = format!("{kind}, {v} stages each, {how:?}, rank {rank} of {p} x {n}");
                    let layers = 2 * v as u64;
                    let calls = |kind| counts.get(kind).map_or(0, |traffic| traffic.calls);
                    let bytes = |kind| counts.get(kind).map_or(0, |traffic| traffic.payload);
                    let gathers = checked.row(rank % p).iter();
                    let gathers = gathers.filter(|action| action.to_string().ends_with("UNSHARD")).count() as u64;
                    let (scattered, gathered) = match how {
                        (ZeroStage::None, _) => (0, 0),
                        (ZeroStage::Optimizer, _) => (layers, layers),
                        (ZeroStage::Gradients, _) => (m * layers, layers),
                        (ZeroStage::Parameters, false) => (m * layers, calls("all_gather")),
                        (ZeroStage::Parameters, true) => (m * layers, 2 * gathers),
                    };
                    assert_eq!((calls("reduce_scatter"), calls("all_gather")), (scattered, gathered), "{what}");
                    assert_eq!((bytes("reduce_scatter"), bytes("all_gather")), (scattered * layer, gathered * layer));
                    if how == (ZeroStage::Parameters, false) {
                        // There and back, but for layers that are still here.
                        assert!((m * layers..=2 * m * layers).contains(&gathered), "{what}: {gathered}");
                    }
                    // Sum and weight of the losses, and whole gradients, each once.
                    let whole = if how.0 == ZeroStage::None { layers * layer } else { 0 };
                    assert_eq!(bytes("all_reduce"), whole + 16, "{what}");
                }
            }
        }
    }
}
