//! Jobs of processes that meet in a folder: this program starts itself as each of their ranks.
#![allow(missing_docs)]

use std::{
    env,
    path::Path,
    process::{self, Child, Command, Stdio},
    time::Duration,
};

use engine_process::{
    SharedFolder,
    comm::{Collectives, Comm, Communicator, ReduceOp},
};
use numcore::{DType, Error, ErrorKind, Result, Tensor, TensorMut};
use runtime_cpu::Cpu;

use common::Folder;

#[allow(dead_code, reason = "other programs use the rest")]
#[path = "../../data/tests/common/mod.rs"]
mod common;

/// What a rank is told to do, and where to meet the others.
const ROLE: &str = "WEFTGRAD_TEST_ROLE";
const FOLDER: &str = "WEFTGRAD_TEST_FOLDER";
/// The rank that something happens to.
const LOST: usize = 1;
const TIMEOUT: Duration = Duration::from_secs(2);

/// Not a test of its own: the program of a rank, which other tests start.
#[test]
fn rank() {
    let (Ok(role), Ok(folder)) = (env::var(ROLE), env::var(FOLDER)) else { return };
    // Longer than the test would be let run: a killed process is noticed before.
    let timeout = if role == "killed" { 1000 * TIMEOUT } else { TIMEOUT };
    let processes = SharedFolder::new(folder).join().unwrap().timeout(timeout);
    let outcome = processes.run(|_| Ok(Cpu::with_threads(1)), |comm| program(&comm, &role));
    match outcome {
        Ok(sums) => println!("\nsums {sums:?}"),
        Err(error) => println!("\n{} {error}", name(error.kind())),
    }
    process::exit(0);
}

fn name(kind: &ErrorKind) -> String {
    match kind {
        ErrorKind::Timeout { missing, .. } => format!("timeout {missing:?}"),
        ErrorKind::Peer { peer, .. } => format!("peer {peer}"),
        _ => "own".into(),
    }
}

/// What the steps summed up.
fn program(comm: &Comm<Cpu>, role: &str) -> Result<Vec<f32>> {
    (0..5)
        .map(|step| {
            if step == 3 && comm.rank() == LOST {
                match role {
                    "killed" => process::abort(),
                    "error" => return Err(Error::argument("loader", "the file ends here")),
                    _ => {}
                }
            }
            let x = Tensor::full(comm.runtime(), [1000], DType::F32, (step * 10 + comm.rank()) as f64)?;
            let x: TensorMut<Cpu> = x.try_mut().expect("nobody else has it");
            let sum = comm.all_reduce(x, ReduceOp::Sum)?.wait()?.freeze()?;
            Ok(sum.to_vec::<f32>()?[999])
        })
        .collect()
}

/// What each rank of a job has said.
fn job(folder: &Path, size: usize, role: &str) -> Vec<String> {
    let start = |rank: usize| {
        Command::new(env::current_exe().unwrap())
            .args(["--exact", "rank", "--nocapture"])
            .env(ROLE, role)
            .env(FOLDER, folder)
            .envs([("RANK", rank), ("WORLD_SIZE", size), ("LOCAL_RANK", rank)].map(|(name, n)| (name, n.to_string())))
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    };
    let ranks: Vec<Child> = (0..size).map(start).collect();
    ranks.into_iter().map(|rank| String::from_utf8(rank.wait_with_output().unwrap().stdout).unwrap()).collect()
}

fn sums(size: usize) -> String {
    let sum = |step: usize| (0..size).map(|rank| (step * 10 + rank) as f32).sum::<f32>();
    format!("sums {:?}", (0..5).map(sum).collect::<Vec<f32>>())
}

#[test]
fn jobs_follow_each_other_in_a_folder() {
    let folder = Folder::new("again");
    for size in [3, 1, 2] {
        for said in job(folder.as_ref(), size, "") {
            assert!(said.contains(&sums(size)), "{said}");
        }
    }
}

#[test]
fn a_rank_that_is_killed_is_named_and_the_next_job_runs() {
    let folder = Folder::new("killed");
    let said = job(folder.as_ref(), 3, "killed");
    for rank in [0, 2] {
        let named = format!("rank {LOST} has ended without leaving the job");
        assert!(said[rank].contains(&named), "{}", said[rank]);
    }
    for said in job(folder.as_ref(), 3, "") {
        assert!(said.contains(&sums(3)), "{said}");
    }
}

#[test]
fn an_error_of_one_rank_reaches_the_others_in_its_words() {
    let folder = Folder::new("error");
    for (rank, said) in job(folder.as_ref(), 3, "error").iter().enumerate() {
        let kind = if rank == LOST { "own".into() } else { format!("peer {LOST}") };
        assert!(said.contains(&kind) && said.contains("the file ends here"), "{said}");
    }
}
