//! Calls in the order they were started: what waits for what.

use std::{sync::Arc, time::Duration};

use crate::collectives::{cpu, host, memory, tensor, value};
use comm::{
    Collectives, Comm, Communicator, CountingCommunicator, Fault, FaultyCommunicator, InOrderCommunicator, Link, Named,
    Ranks, ReduceOp, SlowCommunicator,
};
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
    let ranks = Ranks::new(2);
    let independent = ranks.run(cpu, |comm| Ok(comm.guarantees().independent_transfers)).unwrap()[0];
    let short = ranks.clone().timeout(Duration::from_millis(300));
    let mut outcomes = short.outcomes(cpu, |comm| crossed(&in_order(comm)?)).unwrap();
    if independent {
        ranks.run(cpu, |comm| crossed(&comm)).unwrap();
    } else {
        outcomes.extend(short.outcomes(cpu, |comm| crossed(&comm)).unwrap());
    }
    // On one queue neither comes to its send.
    for error in outcomes.into_iter().map(Result::unwrap_err) {
        let is_of_another = matches!(error.kind(), ErrorKind::Peer { .. });
        assert!(matches!(error.kind(), ErrorKind::Timeout { .. }) || is_of_another && !independent, "{error}");
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

#[test]
fn what_wraps_passes_on_what_was_started_together() {
    let program = |comm: Comm<Cpu>| {
        let link = Link { latency: Duration::ZERO, bandwidth: f64::INFINITY };
        let slow: Comm<Cpu> = Arc::new(SlowCommunicator::new(in_order(comm)?, link)?);
        let counted = Arc::new(CountingCommunicator::new(Named::over(&slow, "ring")));
        let comm: Comm<Cpu> = Arc::new(FaultyCommunicator::new(counted.clone(), u64::MAX, Fault::Error));
        let (n, rank) = (comm.size(), comm.rank());
        let x = tensor(&comm, 10, DType::F32)?;
        let got = comm.send_recv(&x, (rank + 1) % n, memory(&x)?, (rank + n - 1) % n)?.wait()?;
        assert_eq!((counted.of("send").calls, counted.of("recv").calls), (1, 1));
        host(got)
    };
    for (rank, got) in Ranks::new(3).timeout(Duration::from_secs(5)).run(cpu, program).unwrap().into_iter().enumerate()
    {
        assert_eq!(got[1], value((rank + 2) % 3, 1), "rank {rank}");
    }
}

#[test]
fn what_blocks_waits_for_the_queue() {
    // Rank 0 splits before it sends, rank 1 receives before it splits: on one queue neither can begin.
    let program = |comm: Comm<Cpu>| {
        let comm = in_order(comm)?;
        let x = tensor(&comm, 10, DType::F32)?;
        let arrives = (comm.rank() == 1).then(|| comm.recv(memory(&x)?, 0)).transpose()?;
        comm.split(Some(0), 0)?;
        if comm.rank() == 0 {
            comm.send(&x, 1)?.wait()?;
        }
        arrives.map(|work| work.wait().and_then(host)).transpose()
    };
    let ranks = Ranks::new(2).timeout(Duration::from_millis(300));
    assert!(ranks.outcomes(cpu, program).unwrap().iter().all(Result::is_err));
}

#[test]
fn a_panic_on_the_queue_reaches_every_rank() {
    let program = |comm: Comm<Cpu>| {
        let fault = if comm.rank() == 1 { 0 } else { u64::MAX };
        let comm = in_order(Arc::new(FaultyCommunicator::new(comm, fault, Fault::Panic)))?;
        let x = tensor(&comm, 10, DType::F32)?;
        host(comm.all_reduce(memory(&x)?, ReduceOp::Sum)?.wait()?)
    };
    for outcome in Ranks::new(3).outcomes(cpu, program).unwrap() {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains("a panic on purpose"), "{error}");
    }
}
