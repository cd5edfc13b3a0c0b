//! Ranks as processes compared with ranks as threads, in one run: `mpirun -n 2 ranks [ROUNDS] --processes`.
//!
//! The first process runs the threads while the other waits; then both run the same program as processes.

use std::time::Instant;

use weftgrad::{
    distributed::{
        comm::{Collectives, Comm, Communicator, Ranks, ReduceOp},
        zero::{UnitOf, ZeroStage},
    },
    mpi,
    prelude::*,
};

use crate::training::{BUCKETS, Case, Measured, Way, rank};

const ALL_REDUCE: usize = 64 << 20;
const CASES: [Case; 2] =
    [Case::two("ddp", BUCKETS), Case::two("zero 3", Way::Zero(ZeroStage::Parameters, UnitOf::layers))];

pub(crate) fn run(rounds: usize) -> Result<()> {
    let mpi = mpi::init()?;
    if mpi.size() != 2 {
        let why = format!("two processes are compared with two threads; mpirun started {}", mpi.size());
        return Err(weftgrad::Error::argument("ranks", why));
    }
    mpi.run(|_| Ok(Cpu::with_threads(1)), |comm| compare(&comm, rounds))
}

fn compare(comm: &Comm<Cpu>, rounds: usize) -> Result<()> {
    let mut all: Vec<(String, Vec<f64>, Vec<f64>)> = vec![("all-reduce, 64 MiB".into(), Vec::new(), Vec::new())];
    all.extend(CASES.iter().map(|case| (case.name.into(), Vec::new(), Vec::new())));
    for _ in 0..rounds {
        all[0].1.push(on_threads(comm, all_reduce)?);
        all[0].2.push(slowest(comm, all_reduce(comm)?)?);
        for (case, (_, threads, processes)) in CASES.iter().zip(&mut all[1..]) {
            let step = |comm: &Comm<Cpu>| rank(comm.clone(), case, None).map(|m: Measured| m.step.as_secs_f64());
            threads.push(on_threads(comm, step)?);
            processes.push(slowest(comm, step(comm)?)?);
        }
    }
    if comm.rank() == 0 {
        println!("{:20} {:>12} {:>12} {:>8}", "medians", "threads ms", "mpi ms", "rate");
        for (name, mut threads, mut processes) in all {
            let median = |times: &mut Vec<f64>| {
                times.sort_by(f64::total_cmp);
                times[times.len() / 2] * 1e3
            };
            let (threads, processes) = (median(&mut threads), median(&mut processes));
            println!("{name:20} {threads:>12.2} {processes:>12.2} {:>7.1}%", 100.0 * threads / processes);
        }
    }
    Ok(())
}

/// The seconds of `program` on two threads of the first process; the other waits.
fn on_threads(comm: &Comm<Cpu>, program: impl Fn(&Comm<Cpu>) -> Result<f64> + Sync) -> Result<f64> {
    let mut seconds = 0.0;
    if comm.rank() == 0 {
        let all = Ranks::new(2).run(|_| Ok(Cpu::with_threads(1)), |threads| program(&threads))?;
        seconds = all.into_iter().fold(0.0, f64::max);
    }
    comm.barrier()?;
    Ok(seconds)
}

fn slowest(comm: &Comm<Cpu>, seconds: f64) -> Result<f64> {
    let all = comm.exchange(&seconds.to_le_bytes())?;
    let seconds = all.iter().filter_map(|s| s.as_slice().try_into().ok()).map(f64::from_le_bytes);
    Ok(seconds.fold(0.0, f64::max))
}

/// The seconds of one all-reduce.
fn all_reduce(comm: &Comm<Cpu>) -> Result<f64> {
    let ones = Tensor::ones(comm.runtime(), [ALL_REDUCE / 4], DType::F32)?;
    let mut x = ones.copy()?.try_mut().map_err(|_| weftgrad::Error::argument("ranks", "a copy is shared"))?;
    for _ in 0..2 {
        x = comm.all_reduce(x, ReduceOp::Max)?.wait()?;
    }
    comm.barrier()?;
    let begun = Instant::now();
    for _ in 0..5 {
        x = comm.all_reduce(x, ReduceOp::Max)?.wait()?;
    }
    Ok(begun.elapsed().as_secs_f64() / 5.0)
}
