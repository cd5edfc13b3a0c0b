//! Calls in the order they were started: what waits for what.

use std::{sync::Arc, time::Duration};

use crate::collectives::{cpu, host, memory, tensor, value};
use comm::{Collectives, Comm, Communicator, InOrderCommunicator, Ranks, ReduceOp};
use numcore::{DType, ErrorKind, Result};
use runtime_cpu::Cpu;

fn in_order(comm: Comm<Cpu>) -> Result<Comm<Cpu>> {
    Ok(Arc::new(InOrderCommunicator::new(comm)?))
}

/// Each of two ranks receives from the other, then sends.
fn crossed(comm: &Comm<Cpu>) -> Result<Vec<f64>> {
    let (peer, x) = (1 - comm.rank(), tensor(comm, 10, DType::F32)?);
    let arrives = comm.recv(memory(&x)?, peer)?;
    let leaves = comm.send(&x, peer)?;
    let got = arrives.wait()?;
    leaves.wait()?;
    host(got)
}

#[test]
fn a_transfer_waits_for_what_was_started_before_it() {
    assert!(Ranks::new(2).run(cpu, |comm| crossed(&comm)).is_ok(), "transfers of threads are independent");
    let ranks = Ranks::new(2).timeout(Duration::from_millis(300));
    for outcome in ranks.outcomes(cpu, |comm| crossed(&in_order(comm)?)).unwrap() {
        let error = outcome.unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Timeout { .. }), "{error}");
    }
}

#[test]
fn what_is_started_together_runs_together() {
    let program = |comm: Comm<Cpu>| {
        let comm = in_order(comm)?;
        assert!(!comm.guarantees().independent_transfers);
        let (n, rank) = (comm.size(), comm.rank());
        let x = tensor(&comm, 10, DType::F32)?;
        let got = comm.send_recv(&x, (rank + 1) % n, memory(&x)?, (rank + n - 1) % n)?.wait()?;
        host(got)
    };
    for n in [2, 3, 5] {
        for (rank, got) in Ranks::new(n).run(cpu, program).unwrap().into_iter().enumerate() {
            let expected: Vec<f64> = (0..10).map(|i| value((rank + n - 1) % n, i)).collect();
            assert_eq!(got, expected, "rank {rank} of {n}");
        }
    }
}

#[test]
fn groups_share_the_queue_and_end_with_it() {
    let program = |comm: Comm<Cpu>| {
        let comm = in_order(comm)?;
        let half = comm.split(Some(comm.rank() % 2), 0)?.expect("every rank has a color");
        let (whole, part) = (tensor(&comm, 4, DType::F64)?, tensor(&comm, 4, DType::F64)?);
        let part = half.all_reduce(memory(&part)?, ReduceOp::Sum)?;
        let whole = comm.all_reduce(memory(&whole)?, ReduceOp::Sum)?;
        drop((half, comm));
        Ok((host(whole.wait()?)?, host(part.wait()?)?))
    };
    for (rank, (whole, part)) in Ranks::new(4).run(cpu, program).unwrap().into_iter().enumerate() {
        for i in 0..4 {
            assert_eq!(whole[i], (0..4).map(|r| value(r, i)).sum::<f64>());
            assert_eq!(part[i], value(rank % 2, i) + value(rank % 2 + 2, i));
        }
    }
}
