//! Processes, one for each GPU, that meet in a folder: the unique id travels through it, and it is the control plane.

use std::{path::PathBuf, process, thread, time::Duration};

use comm::{Collectives, Comm, Communicator, ReduceOp, engine::guarded};
use engine_nccl::Nccl;
use engine_process::{Launch, SharedFolder};
use numcore::{DType, ErrorKind, Result, Tensor};
use runtime_cpu::Cpu;

use crate::collectives::memory;

struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// What a program gives on each rank, each of which joins by itself, as a process does.
fn outcomes<T: Send>(name: &str, n: usize, program: impl Fn(Comm<Cpu>) -> Result<T> + Sync) -> Vec<Result<T>> {
    let (folder, nccl) =
        (std::env::temp_dir().join(format!("weftgrad-nccl-{name}-{n}-{}", process::id())), Nccl::emulated());
    let (folder, program) = (Folder(folder), &program);
    let rank = |rank| {
        let (folder, nccl) = (SharedFolder::new(&folder.0), nccl.clone());
        move || {
            let processes = folder.launch(Launch { rank, size: n, local_rank: rank }).join()?;
            let over = |control: Comm<Cpu>| {
                let comm = nccl.communicator(&control, &Cpu::with_threads(1))?;
                drop(control);
                guarded(&comm, program)
            };
            processes.timeout(Duration::from_secs(1)).run(|_| Ok(Cpu::with_threads(1)), over)
        }
    };
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..n).map(|r| scope.spawn(rank(r))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("programs are guarded")).collect()
    })
}

/// Some steps of data parallelism, and a split.
fn steps(comm: &Comm<Cpu>, each: impl Fn(usize) -> Result<()>) -> Result<Vec<f32>> {
    let half = comm.split(Some(comm.rank() % 2), 0)?.expect("a member");
    let mut x = Tensor::normal(comm.runtime(), [777], DType::F32, 0.0, 1.0, 3 + comm.rank() as u64)?;
    for step in 0..6 {
        each(step)?;
        let within = if step % 2 == 0 { comm } else { &half };
        x = within.all_reduce(memory(&x)?, ReduceOp::Avg)?.wait()?.freeze()?;
    }
    x.to_vec()
}

#[test]
fn sums_have_the_bits_of_threads() {
    for n in [1, 2, 4] {
        let expected = comm::Ranks::new(n).run(|_| Ok(Cpu::with_threads(1)), |comm| steps(&comm, |_| Ok(()))).unwrap();
        let all: Result<Vec<_>> = outcomes("sums", n, |comm| steps(&comm, |_| Ok(()))).into_iter().collect();
        assert_eq!(all.unwrap(), expected, "{n} ranks");
    }
}

#[test]
fn a_rank_that_fails_ends_all_with_its_words() {
    for (rank, outcome) in outcomes("fails", 3, |comm| {
        let own = comm.rank() == 1;
        let fails = |step| {
            if own && step == 3 { Err(numcore::Error::argument("loader", "the file ends here")) } else { Ok(()) }
        };
        steps(&comm, fails)
    })
    .into_iter()
    .enumerate()
    {
        let error = outcome.unwrap_err();
        let is_of_another = matches!(error.kind(), ErrorKind::Peer { peer: 1, .. });
        assert!(
            error.to_string().contains("the file ends here") && is_of_another == (rank != 1),
            "rank {rank}: {error}"
        );
    }
}

#[test]
fn a_rank_that_stays_away_is_named_at_the_deadline() {
    let outcomes = outcomes("away", 3, |comm| {
        let own = comm.rank() == 2;
        let stays = |step| {
            if own && step == 4 {
                thread::sleep(Duration::from_secs(3));
            }
            Ok(())
        };
        steps(&comm, stays)
    });
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        let error = outcome.unwrap_err();
        let ErrorKind::Timeout { missing, .. } = error.kind() else { panic!("rank {rank}: {error}") };
        assert_eq!(missing[..], [2], "rank {rank}: {error}");
    }
}
