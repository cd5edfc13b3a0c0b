//! Training GPT-mini for a few steps, with each strategy.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use weftgrad::{
    MemoryCategory,
    distributed::{
        buckets::{BucketLimits, BucketOptions},
        comm::{Collectives, Comm, Communicator, CountingCommunicator, Link, Ranks, SlowCommunicator, Traffic},
        mesh::{AsMesh, Mesh},
        plan::{Axis, ParallelPlan},
        train::{Loss, TrainStep},
        zero::{UnitOf, ZeroOptions, ZeroStage},
    },
    nn::{Gpt, GptConfig, Init, parallel::VocabularyLoss},
    optim::{AdamWConfig, ParamGroups},
    prelude::*,
};

/// The number of sequences of each rank, and their length.
const BATCH: [usize; 2] = [8, 256];
const WARM_UP: u32 = 2;
const TIMED: u32 = 3;

/// A measured training: its ranks, threads, batch and strategy.
#[derive(Clone)]
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) ranks: usize,
    pub(crate) threads: usize,
    /// The global batch size, in sequences.
    pub(crate) batch: usize,
    pub(crate) way: Way,
}

/// The strategy that distributes the work over ranks.
#[derive(Clone)]
pub(crate) enum Way {
    /// Data parallelism with gradients in buckets of these sizes, or of sizes that follow from the model.
    Ddp(Option<BucketLimits>),
    /// ZeRO: the state that is sharded, and the units.
    Zero(ZeroStage, fn() -> UnitOf),
    /// Tensor parallelism over all ranks, which see the same examples. With `sequence`, activations between layers are
    /// cut along the sequence, and exchanged in `pieces` pieces.
    Tensor { sequence: bool, pieces: usize },
}

/// Data parallelism with the default buckets.
pub(crate) const BUCKETS: Way = Way::Ddp(None);

impl Case {
    pub(crate) const fn one(name: &'static str, threads: usize) -> Self {
        Case { name, ranks: 1, threads, batch: threads * BATCH[0], way: BUCKETS }
    }

    pub(crate) const fn two(name: &'static str, way: Way) -> Self {
        Case { name, ranks: 2, threads: 1, batch: 2 * BATCH[0], way }
    }

    /// Tokens a second per thread.
    pub(crate) fn rate(&self, step: Duration) -> f64 {
        (self.batch * BATCH[1]) as f64 / (self.ranks * self.threads) as f64 / step.as_secs_f64()
    }
}

/// The time of a step on the slowest rank, and its communication.
pub(crate) struct Measured {
    pub(crate) step: Duration,
    pub(crate) exposed: Duration,
    pub(crate) peak: usize,
    pub(crate) loss: f64,
    /// The costs by bucket or unit.
    pub(crate) parts: BTreeMap<String, Part>,
}

/// The cost of a bucket or unit in a step.
pub(crate) struct Part {
    /// The time for which the step waited for it.
    pub(crate) exposed: Duration,
    /// The time that its transfers took on the link.
    pub(crate) on_link: Duration,
}

/// Runs each case once per round, in turn. Returns each case's measurements, fastest first.
pub(crate) fn rounds(cases: &[Case], rounds: usize, link: Option<Link>) -> Result<Vec<Vec<Measured>>> {
    let mut all: Vec<Vec<Measured>> = cases.iter().map(|_| Vec::new()).collect();
    for _ in 0..rounds {
        for (case, measured) in cases.iter().zip(&mut all) {
            measured.push(train(case, link)?);
        }
    }
    all.iter_mut().for_each(|measured| measured.sort_by_key(|m| m.step));
    Ok(all)
}

fn train(case: &Case, link: Option<Link>) -> Result<Measured> {
    let ranks = Ranks::new(case.ranks).run(|_| Ok(Cpu::with_threads(case.threads)), |comm| rank(comm, case, link))?;
    let slowest = ranks.into_iter().max_by_key(|m| m.step);
    slowest.ok_or_else(|| weftgrad::Error::argument("ranks", "no rank"))
}

pub(crate) fn rank(comm: Comm<Cpu>, case: &Case, link: Option<Link>) -> Result<Measured> {
    let link = link.filter(|_| case.ranks > 1);
    let comm = match link {
        Some(link) => Arc::new(SlowCommunicator::new(comm, link)?),
        None => comm,
    };
    let counted = Arc::new(CountingCommunicator::new(comm));
    let comm: Comm<Cpu> = counted.clone();
    let model = Gpt::new(&Init::new(comm.runtime(), 1), GptConfig::default())?;
    let mesh = match case.way {
        Way::Tensor { sequence, pieces } => {
            let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Tensor, case.ranks)])?)?;
            let plan = Gpt::<Cpu>::tensor_plan().sequence_parallel(sequence).exchange_in_pieces(pieces);
            mesh.parallelize(&model, &plan)?;
            mesh
        }
        _ => comm.as_mesh(),
    };
    let step = TrainStep::builder(&mesh, &model).optimizer(ParamGroups::decay_matrices(AdamWConfig::default()));
    match &case.way {
        Way::Ddp(limits) => {
            let options = BucketOptions { limits: limits.clone(), ..Default::default() };
            let mut trainer = step.buckets(options).build()?;
            steps(&mut trainer, &counted, link, &model, case)
        }
        Way::Tensor { .. } => steps(&mut step.build()?, &counted, link, &model, case),
        Way::Zero(stage, units) => {
            let options = ZeroOptions { stage: *stage, units: units(), ..Default::default() };
            let mut trainer = step.zero(options).build()?;
            steps(&mut trainer, &counted, link, &model, case)
        }
    }
}

/// Runs a few warm-up steps, then the timed ones.
fn steps(
    trainer: &mut TrainStep<Cpu>,
    counted: &CountingCommunicator<Cpu>,
    link: Option<Link>,
    model: &Gpt<Cpu>,
    case: &Case,
) -> Result<Measured> {
    let (rt, sharing) = (counted.runtime(), trainer.comm());
    let own = case.batch / sharing.size();
    let first = sharing.rank() * own * (BATCH[1] + 1);
    let text: Vec<i64> = (0..own * (BATCH[1] + 1)).map(|i| ((first + i) * 7919 % 256) as i64).collect();
    let text = Tensor::from_slice(rt, [own, BATCH[1] + 1], &text)?;
    let x = Var::new(text.narrow(1, 0, BATCH[1])?.contiguous()?);
    let y = Var::new(text.narrow(1, 1, BATCH[1])?.contiguous()?);
    let loss = |_| Ok(Loss::mean(model.next_token_loss(&x, &y, &VocabularyLoss::default())?));
    for _ in 0..WARM_UP {
        trainer.step(loss)?.loss()?;
    }
    counted.barrier()?;
    counted.reset();
    rt.reset_peak();
    let (begun, mut last) = (Instant::now(), 0.0);
    for _ in 0..TIMED {
        last = trainer.step(loss)?.loss()?;
    }
    let (step, exposed) = (begun.elapsed() / TIMED, counted.total().exposed / TIMED);
    let part = |traffic: Traffic| Part {
        exposed: traffic.exposed / TIMED,
        on_link: link.map_or(Duration::ZERO, |link| link.time(traffic.calls, traffic.sent)) / TIMED,
    };
    let named = counted.by_name().into_iter();
    let parts = named.map(|(of, t)| (of.map_or("all else".into(), |of| of.to_string()), part(t))).collect();
    let peak = rt.memory().total.peak - rt.memory().of(MemoryCategory::Communication).live;
    Ok(Measured { step, exposed, peak, loss: last, parts })
}
