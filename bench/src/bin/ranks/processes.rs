//! Ranks as processes over each transport compared with ranks as threads, in one run of two processes.
//!
//! The first process runs the threads while the other waits; then both run the same program as processes.

use std::time::Instant;

#[cfg(feature = "mpi")]
use weftgrad::mpi;
use weftgrad::{
    distributed::{
        comm::{Collectives, Comm, Communicator, Ranks, ReduceOp},
        zero::{UnitOf, ZeroStage},
    },
    prelude::*,
    process::Tcp,
};

use crate::training::{BUCKETS, Case, Way, rank};

/// The bytes of each all-reduce, and how often it is called in a round.
const ALL_REDUCES: [(&str, usize, u32); 2] = [("all-reduce, 64 MiB", 64 << 20, 5), ("all-reduce, 4 KiB", 4 << 10, 500)];
const CASES: [Case; 2] =
    [Case::two("ddp", BUCKETS), Case::two("zero 3", Way::Zero(ZeroStage::Parameters, UnitOf::layers))];

/// Compares TCP, and MPI if `mpirun` has started this process, with threads.
pub(crate) fn run(rounds: usize, trains: bool) -> Result<()> {
    let cases = if trains { &CASES[..] } else { &[] };
    let tcp = Tcp::from_env()?.join()?;
    if tcp.size() != 2 {
        let why = format!("two processes are compared with two threads; the launcher started {}", tcp.size());
        return Err(weftgrad::Error::argument("ranks", why));
    }
    // The same without memory that processes of one host lend to each other.
    let sockets = Tcp::from_env()?.job("sockets").lends_memory(false).join()?;
    let (cpu, world) = (Cpu::with_threads(1), sockets.world(&Cpu::with_threads(1))?);
    tcp.run(
        |_| Ok(cpu),
        |comm| {
            let all = [("tcp", comm), ("sockets", world)];
            #[cfg(feature = "mpi")]
            {
                let mpi = mpi::init()?;
                if mpi.size() == 2 {
                    let [tcp, sockets] = all;
                    return mpi.run(
                        |_| Ok(Cpu::with_threads(1)),
                        |other| compare(&[tcp, sockets, ("mpi", other)], cases, rounds),
                    );
                }
            }
            compare(&all, cases, rounds)
        },
    )
}

/// A row of the table: the times of threads, then of each transport.
type Row = (&'static str, Vec<Vec<f64>>);

fn compare(transports: &[(&str, Comm<Cpu>)], cases: &[Case], rounds: usize) -> Result<()> {
    let first = &transports[0].1;
    let names = ALL_REDUCES.iter().map(|(name, ..)| *name).chain(cases.iter().map(|case| case.name));
    let mut all: Vec<Row> = names.map(|name| (name, vec![Vec::new(); 1 + transports.len()])).collect();
    for _ in 0..rounds {
        for (k, (_, times)) in all.iter_mut().enumerate() {
            let program = |comm: &Comm<Cpu>| match ALL_REDUCES.get(k) {
                Some(&(_, bytes, calls)) => all_reduce(comm, bytes, calls),
                None => rank(comm.clone(), &cases[k - ALL_REDUCES.len()], None).map(|m| m.step.as_secs_f64()),
            };
            times[0].push(on_threads(first, program)?);
            for ((_, comm), times) in transports.iter().zip(&mut times[1..]) {
                times.push(slowest(comm, program(comm)?)?);
            }
        }
    }
    if first.rank() == 0 {
        print!("{:20} {:>12}", "medians", "threads ms");
        transports.iter().for_each(|(name, _)| print!(" {:>12} {:>8}", format!("{name} ms"), "rate"));
        println!();
        for (name, mut times) in all {
            let medians = times.iter_mut().map(|times| {
                times.sort_by(f64::total_cmp);
                times[times.len() / 2] * 1e3
            });
            let medians: Vec<f64> = medians.collect();
            print!("{name:20} {:>12.3}", medians[0]);
            medians[1..].iter().for_each(|ms| print!(" {ms:>12.3} {:>7.1}%", 100.0 * medians[0] / ms));
            println!();
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

/// The seconds of one all-reduce, whose result is checked.
fn all_reduce(comm: &Comm<Cpu>, bytes: usize, calls: u32) -> Result<f64> {
    let own = Tensor::full(comm.runtime(), [bytes / 4], DType::F32, comm.rank() as f64)?;
    let mut x = own.copy()?.try_mut().map_err(|_| weftgrad::Error::argument("ranks", "a copy is shared"))?;
    for _ in 0..2 {
        x = comm.all_reduce(x, ReduceOp::Max)?.wait()?;
    }
    comm.barrier()?;
    let begun = Instant::now();
    for _ in 0..calls {
        x = comm.all_reduce(x, ReduceOp::Max)?.wait()?;
    }
    let seconds = begun.elapsed().as_secs_f64() / f64::from(calls);
    let most = (comm.size() - 1) as f32;
    if x.freeze()?.to_vec::<f32>()?.iter().any(|value| *value != most) {
        return Err(weftgrad::Error::argument("ranks", "an all-reduce has a wrong result"));
    }
    Ok(seconds)
}
