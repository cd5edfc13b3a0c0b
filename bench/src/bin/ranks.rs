//! Many ranks beside one, in one run: what an all-reduce moves, and what a training step costs with each strategy.
//!
//! `ranks [ROUNDS]`: rounds alternate between the cases; the median is printed, with its ratio to one rank of one thread that computes the
//! same per rank.
#![forbid(unsafe_code)]

use std::{
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant},
};

use weftgrad::{
    Use,
    distributed::{
        comm::{Collectives, Comm, Communicator, CountingCommunicator, Ranks, ReduceOp},
        train::{BucketedTrainer, Loss, Strategy, Trainer, TrainingConfig},
        zero::{ZeroOptions, ZeroStage, ZeroTrainer},
    },
    nn::{Gpt, GptConfig, Init},
    prelude::*,
};

const ALL_REDUCE: usize = 64 << 20;
/// Sequences and their length, on each rank.
const BATCH: [usize; 2] = [8, 256];

/// Who trains, and how.
#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    ranks: usize,
    threads: usize,
    /// Sequences in all.
    batch: usize,
    stage: Option<ZeroStage>,
}

const CASES: [Case; 6] = [
    Case { name: "1 rank × 1 thread", ranks: 1, threads: 1, batch: BATCH[0], stage: None },
    Case { name: "1 rank × 2 threads", ranks: 1, threads: 2, batch: 2 * BATCH[0], stage: None },
    Case { name: "ddp, 2 ranks", ranks: 2, threads: 1, batch: 2 * BATCH[0], stage: None },
    Case { name: "zero 1, 2 ranks", ranks: 2, threads: 1, batch: 2 * BATCH[0], stage: Some(ZeroStage::State) },
    Case { name: "zero 2, 2 ranks", ranks: 2, threads: 1, batch: 2 * BATCH[0], stage: Some(ZeroStage::Gradients) },
    Case { name: "zero 3, 2 ranks", ranks: 2, threads: 1, batch: 2 * BATCH[0], stage: Some(ZeroStage::Parameters) },
];

/// What one run of a case gave.
struct Measured {
    step: Duration,
    exposed: Duration,
    peak: usize,
    loss: f64,
}

fn main() -> ExitCode {
    let rounds = std::env::args().nth(1).map_or(Ok(5), |n| n.parse());
    let Ok(rounds @ 1..) = rounds else {
        eprintln!("usage: ranks [ROUNDS]");
        return ExitCode::from(2);
    };
    match run(rounds) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("ranks: {e}");
            ExitCode::FAILURE
        }
    }
}

fn run(rounds: usize) -> Result<()> {
    println!("{}", Cpu::new().capabilities().name);
    let mut moved: Vec<f64> = (0..rounds).map(|_| all_reduce()).collect::<Result<_>>()?;
    moved.sort_by(f64::total_cmp);
    println!("all-reduce of 64 MiB between two threads: {:.1} GB/s (median of {rounds})\n", moved[rounds / 2] / 1e9);
    let mut all: Vec<Vec<Measured>> = CASES.iter().map(|_| Vec::new()).collect();
    for _ in 0..rounds {
        for (case, measured) in CASES.iter().zip(&mut all) {
            measured.push(train(case)?);
        }
    }
    println!("{:20} {:>12} {:>14} {:>12} {:>12} {:>9}", "", "ms a step", "per rank", "exposed ms", "peak MiB", "loss");
    let mut one = 0.0;
    for (case, measured) in CASES.iter().zip(&mut all) {
        measured.sort_by_key(|m| m.step);
        let m = &measured[rounds / 2];
        let seconds = m.step.as_secs_f64();
        let per_rank = (case.batch * BATCH[1]) as f64 / (case.ranks * case.threads) as f64 / seconds;
        one = if one == 0.0 { per_rank } else { one };
        let (exposed, peak) = (m.exposed.as_secs_f64() * 1e3, m.peak as f64 / f64::from(1 << 20));
        let ratio = format!("{:.3}×", per_rank / one);
        println!("{:20} {:>12.1} {ratio:>14} {exposed:>12.1} {peak:>12.1} {:>9.4}", case.name, seconds * 1e3, m.loss);
    }
    Ok(())
}

/// Bytes a second, counted once.
fn all_reduce() -> Result<f64> {
    let rates = Ranks::new(2).run(
        |_| Ok(Cpu::with_threads(1)),
        |comm| {
            let ones = Tensor::ones(comm.runtime(), [ALL_REDUCE / 4], DType::F32)?;
            let mut x = ones.copy()?.try_mut().map_err(|_| weftgrad::Error::argument("ranks", "a copy is shared"))?;
            for _ in 0..2 {
                x = comm.all_reduce(x, ReduceOp::Max)?.wait()?;
            }
            let begun = Instant::now();
            for _ in 0..5 {
                x = comm.all_reduce(x, ReduceOp::Max)?.wait()?;
            }
            Ok(5.0 * ALL_REDUCE as f64 / begun.elapsed().as_secs_f64())
        },
    )?;
    Ok(rates.into_iter().fold(f64::INFINITY, f64::min))
}

fn train(case: &Case) -> Result<Measured> {
    let ranks = Ranks::new(case.ranks).run(|_| Ok(Cpu::with_threads(case.threads)), |comm| rank(comm, case))?;
    let slowest = ranks.into_iter().max_by_key(|m| m.step);
    slowest.ok_or_else(|| weftgrad::Error::argument("ranks", "no rank"))
}

fn rank(comm: Comm<Cpu>, case: &Case) -> Result<Measured> {
    let counted = Arc::new(CountingCommunicator::new(comm));
    let comm: Comm<Cpu> = counted.clone();
    let model = Gpt::new(&Init::new(comm.runtime(), 1), GptConfig::default())?;
    let training = TrainingConfig::default();
    match case.stage {
        None => {
            let mut trainer = BucketedTrainer::new(&comm, &model, training, Default::default())?;
            steps(&mut trainer, &counted, &model, case)
        }
        Some(stage) => {
            let mut trainer = ZeroTrainer::new(&comm, &model, training, ZeroOptions { stage, ..Default::default() })?;
            steps(&mut trainer, &counted, &model, case)
        }
    }
}

/// Two steps to warm up, then three that are timed.
fn steps<S: Strategy<Cpu>>(
    trainer: &mut Trainer<Cpu, S>,
    counted: &CountingCommunicator<Cpu>,
    model: &Gpt<Cpu>,
    case: &Case,
) -> Result<Measured> {
    let (rt, own) = (counted.runtime(), case.batch / case.ranks);
    let first = counted.rank() * own * (BATCH[1] + 1);
    let text: Vec<i64> = (0..own * (BATCH[1] + 1)).map(|i| ((first + i) * 7919 % 256) as i64).collect();
    let text = Tensor::from_slice(rt, [own, BATCH[1] + 1], &text)?;
    let x = Var::new(text.narrow(1, 0, BATCH[1])?.contiguous()?);
    let y = Var::new(text.narrow(1, 1, BATCH[1])?.reshape([own * BATCH[1]])?);
    let loss = |_| Ok(Loss::mean(model.forward(&x)?.flatten(0, 1)?.cross_entropy(&y, None, Default::default())?));
    for _ in 0..2 {
        trainer.step(loss)?.loss()?;
    }
    counted.barrier()?;
    counted.reset();
    rt.reset_peak();
    let (begun, mut last) = (Instant::now(), 0.0);
    for _ in 0..3 {
        last = trainer.step(loss)?.loss()?;
    }
    let (step, exposed) = (begun.elapsed() / 3, counted.total().exposed / 3);
    let peak = rt.memory().total.peak - rt.memory().of(Use::Communication).live;
    Ok(Measured { step, exposed, peak, loss: last })
}
