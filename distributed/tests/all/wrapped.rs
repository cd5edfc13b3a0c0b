//! Steps in wrappers: what these do around a model that is whole they do around a pipeline.

use adaptive::balance::BalancePolicy;
use distributed::{
    pipeline::{balanced, split},
    train::Step,
};

use crate::{
    pipeline_common::{TIMEOUT, checked, squares},
    prelude::*,
};

const WIDTH: usize = 4;
const MICROS: usize = 2;

type Numbers = BTreeMap<String, Vec<f64>>;

/// A model in two stages, as the rank of one replica has it. If `tied`, the stages share a weight.
fn staged(comm: &Comm<Cpu>, tied: bool) -> Result<PipelineModel<Cpu>> {
    let init = Init::new(comm.runtime(), 5).dtype(DType::F64);
    let linear = |_| Linear::new(&init, WIDTH, WIDTH);
    let layers = (0..4).map(linear).collect::<Result<Vec<_>>>()?.into_iter();
    let layers = layers.fold(Sequential::new(), |model, layer| model.push(layer).push(Tanh)).into_layers();
    let cuts = balanced(&layers, 2)?;
    let checked = checked(ScheduleKind::OneFOneB, 2, 1, MICROS).unwrap();
    let model = PipelineModel::on(comm.rank(), checked, split(layers, &cuts)?).loss(squares);
    Ok(if tied { model.ties(vec![Tie::new(["0.weight", "4.weight"])]) } else { model })
}

fn step(comm: &Comm<Cpu>, zero: ZeroStage, tied: bool) -> Result<TrainStep<Cpu>> {
    let sgd = SgdConfig { lr: 0.05, ..Default::default() };
    TrainStep::builder(comm, staged(comm, tied)?).optimizer(sgd).accumulation(8).zero(zero).build()
}

/// The batch of a number.
fn batch(comm: &Comm<Cpu>, number: u64) -> Result<MicroBatches<Cpu>> {
    let x = Tensor::uniform(comm.runtime(), [MICROS * 3, WIDTH], DType::F64, -1.0, 1.0, number)?;
    MicroBatches::split(from_ref(&x), from_ref(&x), MICROS)
}

fn weights(step: &impl Step<Cpu>) -> Result<Numbers> {
    let states = step.modules().into_iter().map(|stage| stage.state_dict()).collect::<Result<Vec<_>>>()?;
    states.into_iter().flatten().map(|(name, value)| Ok((name, value.to_f64s()?))).collect()
}

fn assert_close(own: &Numbers, other: &Numbers) {
    assert!(own.keys().eq(other.keys()) && !own.is_empty());
    for (name, values) in own {
        let off = values.iter().zip(&other[name]).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(off < 1e-12, "{name}: {off:e}");
    }
}

/// Two machines of two stages each, that meet after so many steps.
fn local(
    comm: &Comm<Cpu>,
    rule: impl OuterRule<Cpu> + 'static,
    options: LocalUpdates,
    tied: bool,
) -> Result<LocalSteps<Cpu, TrainStep<Cpu>>> {
    let group = |color: usize| -> Result<Comm<Cpu>> { Ok(comm.split(Some(color), comm.rank())?.expect("a group")) };
    let (machine, alike) = (group(comm.rank() / 2)?, group(10 + comm.rank() % 2)?);
    let inner = step(&machine, ZeroStage::Optimizer, tied)?;
    Ok(LocalSteps::new(&alike, &Vec::<Linear<Cpu>>::new(), inner, rule, options)?.among(comm))
}

fn every(steps: u64) -> LocalUpdates {
    LocalUpdates { every: Some(steps), ..Default::default() }
}

fn take(comm: &Comm<Cpu>, step: &mut impl Step<Cpu>, k: u64) -> Result<Option<u64>> {
    let mut input = |i: usize| Ok(batch(comm, 100 * k + 10 * (comm.rank() as u64 / 2) + i as u64)?.into());
    let metrics = step.step(distributed::train::StepWork::new(2, &mut input))?;
    assert_eq!(metrics.weight()?, 24.0, "of both machines");
    Ok(metrics.synchronization().map(|synchronization| synchronization.number))
}

/// Gradient descent whose ranks bring their weights together after every step is that of one sum of gradients.
#[test]
fn pipelines_that_meet_in_every_step_are_one_of_two_replicas() {
    let outcome = Ranks::new(4).timeout(TIMEOUT).run(cpu, |comm| {
        for tied in [false, true] {
            let mut apart = local(&comm, LocalSgd, every(1), tied)?;
            let mut replicas = step(&comm, ZeroStage::None, tied)?;
            for k in 0..3 {
                assert_eq!(take(&comm, &mut apart, k)?, Some(k + 1));
                take(&comm, &mut replicas, k)?;
            }
            assert_close(&weights(&apart)?, &weights(&replicas)?);
        }
        Ok(())
    });
    outcome.unwrap();
}

#[test]
fn pipelines_that_meet_go_on_from_a_checkpoint_between_meetings() {
    for tied in [false, true] {
        let scratch = Scratch::new("wrapped-local");
        let folder = scratch.folder();
        let outcome = Ranks::new(4).timeout(TIMEOUT).run(cpu, |comm| {
            let mut whole = local(&comm, DiLoCo::default(), every(3), tied)?;
            for k in 0..4 {
                assert_eq!(take(&comm, &mut whole, k)?, (k == 2).then_some(1));
            }
            whole.save(&folder, &Default::default())?;
            let mut resumed = local(&comm, DiLoCo::default(), every(3), tied)?;
            assert!(resumed.load(&folder)?.is_some());
            for k in 4..7 {
                assert_eq!(take(&comm, &mut whole, k)?, take(&comm, &mut resumed, k)?);
            }
            assert_eq!(weights(&whole)?, weights(&resumed)?);
            weights(&whole)
        });
        let ranks = outcome.unwrap();
        // A rank of the first stage, and one of the second.
        assert_eq!(tied, ranks[0]["0.weight"] == ranks[1]["4.weight"]);
    }
}

/// The second replica is three times as slow: it takes fewer batches, each batch is read by one replica, and steps are
/// those of one replica with all of them.
#[test]
fn replicas_of_pipelines_are_balanced() {
    let options =
        BalanceOptions { policy: BalancePolicy::FollowSpeeds, anchor: 1, max_anchor: 1, ..Default::default() };
    let steps = Ranks::new(4).timeout(TIMEOUT).run(cpu, |comm| {
        let (replica, time) = (comm.rank() as u64 / 2, Arc::new(AtomicU64::new(0)));
        let now = time.clone();
        let clock = move || Duration::from_micros(now.load(Ordering::Relaxed));
        let mut step = Balanced::with_clock(step(&comm, ZeroStage::Optimizer, false)?, options.clone(), clock)?;
        let (mut epoch, mut read, mut counts) = (BatchRanges::new(24), Vec::new(), Vec::new());
        loop {
            let next = step.balancer().counts().to_vec();
            let metrics = step.step(&mut epoch, |number| {
                time.fetch_add(1000 * (1 + 2 * replica), Ordering::Relaxed);
                read.push(number);
                batch(&comm, number)
            })?;
            let Some(metrics) = metrics else { break };
            counts.push((next, metrics.weight()?));
        }
        Ok((weights(&step)?, read, counts))
    });
    let ranks = steps.unwrap();
    let counts = &ranks[0].2;
    assert!(
        counts.iter().any(|(count, _)| count[0] > count[1]) && ranks.iter().all(|rank| &rank.2 == counts),
        "{counts:?}"
    );
    let weight: f64 = counts.iter().map(|(_, weight)| weight).sum();
    assert_eq!(weight, 24.0 * 6.0, "each batch counts once");

    let one = Ranks::new(2).timeout(TIMEOUT).run(cpu, |comm| {
        let (mut step, mut first) = (step(&comm, ZeroStage::None, false)?, 0);
        for (_, weight) in counts {
            let taken = (weight / 6.0) as usize;
            step.step_with(taken, |k| batch(&comm, first + k as u64))?;
            first += taken as u64;
        }
        weights(&step)
    });
    for (rank, (own, ..)) in ranks.iter().enumerate() {
        assert_close(own, &one.as_ref().unwrap()[rank % 2]);
    }
}

/// Copies of a parameter in two stages would come together at different times.
#[test]
fn stages_that_share_a_parameter_do_not_meet_in_fragments() {
    let outcomes = Ranks::new(4)
        .timeout(TIMEOUT)
        .outcomes(cpu, |comm| local(&comm, LocalSgd, LocalUpdates { fragments: 2, ..every(2) }, true).map(drop));
    refused(outcomes.unwrap(), &["parameters that stages share and weights that differ between ranks exclude"]);
}

/// A replica without a micro-batch gives one that weighs nothing: its stages compute.
#[test]
fn pipelines_are_not_idle() {
    let outcomes = Ranks::new(2).timeout(TIMEOUT).outcomes(cpu, |comm| {
        let mut step = step(&comm, ZeroStage::None, false)?;
        step.step_uneven(0, 2, |_| batch(&comm, 0)).map(drop)
    });
    refused(outcomes.unwrap(), &["a pipeline exclude each other", "`weightless`"]);
}
