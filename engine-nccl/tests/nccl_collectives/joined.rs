//! Processes, one for each GPU, that meet at an address: the unique id travels over their connections, the control plane.

use comm::{Collectives, Comm, Communicator, ReduceOp};
use engine_nccl::Nccl;
use numcore::{DType, ErrorKind, Result, Tensor};
use runtime_cpu::Cpu;

use crate::{
    Ranks,
    collectives::{cpu, memory},
    processes,
    start::over,
};

/// What a program gives on each rank, each of which joins by itself, as a process does.
fn outcomes<T: Send>(n: usize, program: impl Fn(Comm<Cpu>) -> Result<T> + Sync) -> Vec<Result<T>> {
    processes::outcomes(&Ranks::new(n), cpu, over(&Nccl::emulated(), cpu, program)).unwrap()
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
        let expected = Ranks::new(n).threads().run(cpu, |comm| steps(&comm, |_| Ok(()))).unwrap();
        let all: Result<Vec<_>> = outcomes(n, |comm| steps(&comm, |_| Ok(()))).into_iter().collect();
        assert_eq!(all.unwrap(), expected, "{n} ranks");
    }
}

#[test]
fn a_rank_that_fails_ends_all_with_its_words() {
    let ends = || Err(numcore::Error::argument("loader", "the file ends here"));
    let program = |comm: Comm<Cpu>| steps(&comm, |step| if (comm.rank(), step) == (1, 3) { ends() } else { Ok(()) });
    for (rank, outcome) in outcomes(3, program).into_iter().enumerate() {
        let error = outcome.unwrap_err();
        let is_of_another = matches!(error.kind(), ErrorKind::Peer { peer: 1, .. });
        let has_words = error.to_string().contains("the file ends here");
        assert!(has_words && is_of_another == (rank != 1), "rank {rank}: {error}");
    }
}
