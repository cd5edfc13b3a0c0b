//! Jobs of processes that meet at an address: this program starts itself as each of their ranks.
#![allow(missing_docs)]

use std::{
    env,
    net::{SocketAddr, TcpListener},
    process::{self, Child, Command, Stdio},
    thread,
    time::Duration,
};

use engine_process::{
    Tcp,
    comm::{Collectives, Comm, Communicator, Quorum, ReduceOp, Rendezvous},
};
use numcore::{DType, Error, ErrorKind, Result, Tensor, TensorMut};
use runtime_cpu::Cpu;

/// The variable that tells a rank its role.
const ROLE: &str = "WEFTGRAD_TEST_ROLE";
/// The rank that something happens to.
const LOST: usize = 1;
/// Longer than the test would be let run: a lost process is noticed before.
const TIMEOUT: Duration = Duration::from_secs(2000);
/// Long enough for a busy machine to run each process once.
const SILENCE: Duration = Duration::from_secs(4);

/// Not a test of its own: the program of a rank, which other tests start.
#[test]
fn rank() {
    let Ok(role) = env::var(ROLE) else { return };
    let processes = Tcp::from_env().unwrap().silence(SILENCE).join().unwrap().timeout(TIMEOUT);
    let outcome = match &role[..] {
        "elastic" => elastic(processes),
        _ => {
            let outcome = processes.run(|_| Ok(Cpu::with_threads(1)), |comm| program(&comm, &role));
            // The others may still read its last messages.
            drop(processes);
            outcome
        }
    };
    match outcome {
        Ok(sums) => println!("\nsums {sums:?}"),
        Err(error) => match error.kind() {
            ErrorKind::Peer { peer, .. } => println!("\npeer {peer} {error}"),
            _ => println!("\n{error}"),
        },
    }
    process::exit(0);
}

/// What the steps summed up.
fn program(comm: &Comm<Cpu>, role: &str) -> Result<Vec<f32>> {
    let step = |step: usize| {
        if step == 3 && comm.rank() == LOST {
            match role {
                "killed" => signal("KILL"),
                "stopped" => signal("STOP"),
                "failing" => return Err(Error::argument("loader", "the file ends here")),
                _ => {}
            }
        }
        sum(comm, step)
    };
    (0..5).map(step).collect()
}

fn sum(comm: &Comm<Cpu>, step: usize) -> Result<f32> {
    let x = Tensor::full(comm.runtime(), [100_000], DType::F32, (step * 10 + comm.rank()) as f64)?;
    let x: TensorMut<Cpu> = x.try_mut().expect("nobody else has it");
    let sum = comm.all_reduce(x, ReduceOp::Sum)?.wait()?.freeze()?;
    Ok(sum.to_vec::<f32>()?[99_999])
}

/// Goes on with the processes that are left.
fn elastic(processes: engine_process::Processes) -> Result<Vec<f32>> {
    let (processes, rt) = (std::sync::Arc::new(processes), Cpu::with_threads(1));
    let mut worlds = processes.rendezvous(rt, Quorum::default())?;
    let first = worlds.next_world()?.comm;
    // With the first sum all have come: one that is late would meet the others in their second world.
    let begun = sum(&first, 0);
    if first.rank() == LOST {
        signal("KILL");
    }
    let error = begun.and_then(|_| sum(&first, 1)).expect_err("one is dead");
    assert!(matches!(error.kind(), ErrorKind::Peer { peer: LOST, .. }), "{error}");
    let second = worlds.next_world()?.comm;
    Ok(vec![second.size() as f32, sum(&second, 1)?])
}

fn signal(name: &str) {
    let id = process::id().to_string();
    Command::new("kill").args(["-s", name, &id]).status().unwrap();
    // The signal may take a moment.
    thread::sleep(TIMEOUT);
}

fn free() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

/// What each rank of a job has said, but one that is lost.
fn job(size: usize, role: &str) -> Vec<String> {
    job_at(free(), size, role)
}

fn job_at(at: SocketAddr, size: usize, role: &str) -> Vec<String> {
    let start = |rank: usize| {
        Command::new(env::current_exe().unwrap())
            .args(["--exact", "rank", "--nocapture"])
            .env(ROLE, role)
            .envs([("RANK", rank), ("WORLD_SIZE", size), ("LOCAL_RANK", rank)].map(|(name, n)| (name, n.to_string())))
            .envs([("MASTER_ADDR", "127.0.0.1".into()), ("MASTER_PORT", at.port().to_string())])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    };
    let mut ranks: Vec<Child> = (0..size).map(start).collect();
    let mut lost = matches!(role, "killed" | "stopped" | "elastic").then(|| ranks.remove(LOST));
    let said = ranks.into_iter().map(|rank| String::from_utf8(rank.wait_with_output().unwrap().stdout).unwrap());
    let said = said.collect();
    if let Some(lost) = &mut lost {
        lost.kill().and_then(|()| lost.wait()).unwrap();
    }
    said
}

fn sums(size: usize) -> String {
    let sum = |step: usize| (0..size).map(|rank| (step * 10 + rank) as f32).sum::<f32>();
    format!("sums {:?}", (0..5).map(sum).collect::<Vec<f32>>())
}

#[test]
fn jobs_of_any_size_follow_each_other_at_an_address() {
    let at = free();
    for size in [3, 1, 2, 5] {
        let all = job_at(at, size, "");
        assert!(all.iter().all(|said| said.contains(&sums(size))), "{all:#?}");
    }
}

#[test]
#[cfg(unix)]
fn a_rank_that_is_killed_is_named_and_the_next_job_runs() {
    let at = free();
    for said in job_at(at, 3, "killed") {
        assert!(said.contains(&format!("peer {LOST}")) && said.contains("its process has ended"), "{said}");
    }
    for said in job_at(at, 3, "") {
        assert!(said.contains(&sums(3)), "{said}");
    }
}

#[test]
fn an_error_of_one_rank_reaches_the_others_in_its_words() {
    for (rank, said) in job(3, "failing").iter().enumerate() {
        let is_of_another = said.contains(&format!("peer {LOST}"));
        assert!(said.contains("the file ends here") && is_of_another == (rank != LOST), "{rank}: {said}");
    }
}

#[test]
#[cfg(unix)]
fn a_rank_that_is_stopped_is_named() {
    for said in job(3, "stopped") {
        assert!(said.contains(&format!("peer {LOST}")) && said.contains("nothing came for 4s"), "{said}");
    }
}

#[test]
#[cfg(unix)]
fn those_that_are_left_go_on() {
    for said in job(3, "elastic") {
        assert!(said.contains("sums [2.0, 21.0]"), "{said}");
    }
}
