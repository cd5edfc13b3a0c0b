//! Whatever happens on one rank ends as an error on all, before the deadline.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use distributed::comm::{Collectives, Comm, Communicator, Fault, FaultyCommunicator, Ranks, ReduceOp};
use numcore::{DType, Error, ErrorKind, Result, Runtime, Shape, Tensor, TensorMut};
use runtime_cpu::Cpu;

const TIMEOUT: Duration = Duration::from_millis(400);

fn cpu(_: usize) -> Result<Cpu> {
    Ok(Cpu::with_threads(1))
}

fn memory(comm: &Comm<Cpu>, numel: usize, dtype: DType) -> Result<TensorMut<Cpu>> {
    TensorMut::zeros(comm.runtime(), Shape::new(&[numel])?, dtype)
}

/// Calls of each kind.
const KINDS: [&str; 8] =
    ["all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "barrier", "exchange"];

fn call(comm: &Comm<Cpu>, kind: &str, numel: usize, dtype: DType) -> Result<()> {
    let n = comm.size();
    let x = Tensor::zeros(comm.runtime(), [numel * n], dtype)?;
    let part = Tensor::zeros(comm.runtime(), [numel], dtype)?;
    let work = match kind {
        "all_reduce" => comm.all_reduce(memory(comm, numel, dtype)?, ReduceOp::Sum)?,
        "reduce" => comm.reduce(memory(comm, numel, dtype)?, ReduceOp::Max, 0)?,
        "broadcast" => comm.broadcast(memory(comm, numel, dtype)?, 0)?,
        "reduce_scatter" => comm.reduce_scatter(&x, memory(comm, numel, dtype)?, ReduceOp::Sum)?,
        "all_gather" => comm.all_gather(&part, memory(comm, numel * n, dtype)?)?,
        "all_to_all" => comm.all_to_all(&x, memory(comm, numel * n, dtype)?)?,
        "barrier" => return comm.barrier(),
        _ => return comm.exchange(b"abc").map(|_| ()),
    };
    work.wait().map(|_| ())
}

fn errors(n: usize, program: impl Fn(Comm<Cpu>) -> Result<()> + Sync) -> Vec<Error> {
    errors_within(TIMEOUT, n, program)
}

fn errors_within(timeout: Duration, n: usize, program: impl Fn(Comm<Cpu>) -> Result<()> + Sync) -> Vec<Error> {
    let begun = Instant::now();
    let outcomes = Ranks::new(n).timeout(timeout).outcomes(cpu, program).unwrap();
    // Far more than the timeout: only a hang gets here.
    assert!(begun.elapsed() < 50 * TIMEOUT);
    outcomes.into_iter().enumerate().map(|(r, o)| o.err().unwrap_or_else(|| panic!("rank {r} saw nothing"))).collect()
}

/// Rank 1 of three has the fault in its second call.
fn with_fault(kind: &str, fault: Fault) -> Vec<Error> {
    // Only a delay ends by the deadline. A panic may print its backtrace for longer than that.
    let timeout = if matches!(fault, Fault::Delay(_)) { TIMEOUT } else { 20 * TIMEOUT };
    errors_within(timeout, 3, |comm| {
        let faulty = comm.rank() == 1;
        let comm: Comm<Cpu> = if faulty { Arc::new(FaultyCommunicator::new(comm, 1, fault)) } else { comm };
        call(&comm, kind, 100, DType::F32)?;
        call(&comm, kind, 100, DType::F32)?;
        // A rank that left a call out disagrees here at the latest.
        call(&comm, if kind == "barrier" { "broadcast" } else { "barrier" }, 1, DType::F32)
    })
}

#[test]
fn a_panic_on_one_rank_is_named_on_all() {
    for kind in KINDS {
        for (rank, e) in with_fault(kind, Fault::Panic).into_iter().enumerate() {
            let ErrorKind::Peer { peer: 1, cause, .. } = e.kind() else { panic!("{kind}: {e}") };
            assert!(cause.contains("a panic on purpose"), "{kind}: {e}");
            assert_eq!(e.rank(), Some(rank));
        }
    }
}

#[test]
fn an_error_on_one_rank_is_named_on_all() {
    for kind in KINDS {
        for e in with_fault(kind, Fault::Error) {
            assert!(e.to_string().contains("an error on purpose") && e.to_string().contains("rank 1"), "{kind}: {e}");
        }
    }
}

#[test]
fn a_call_left_out_is_a_disagreement() {
    for kind in KINDS {
        for e in with_fault(kind, Fault::Skip) {
            assert!(matches!(e.kind(), ErrorKind::Mismatch { .. }), "{kind}: {e}");
        }
    }
}

#[test]
fn a_rank_that_never_arrives_is_named_when_the_time_is_up() {
    for kind in KINDS {
        for (rank, e) in with_fault(kind, Fault::Delay(3 * TIMEOUT)).into_iter().enumerate() {
            let ErrorKind::Timeout { missing, calls, .. } = e.kind() else { panic!("{kind}, rank {rank}: {e}") };
            assert_eq!(missing, &[1]);
            let name = if kind == "exchange" { "all_gather" } else { kind };
            assert!(calls.contains("last calls") && calls.contains(name), "{e}");
        }
    }
}

#[test]
fn different_calls_are_shown_side_by_side() {
    type Change = fn(&Comm<Cpu>) -> Result<()>;
    let same: Change = |comm| comm.reduce(memory(comm, 8, DType::F32)?, ReduceOp::Sum, 0)?.wait().map(|_| ());
    let cases: [(&str, Change); 5] = [
        ("all_reduce", |comm| comm.all_reduce(memory(comm, 8, DType::F32)?, ReduceOp::Sum)?.wait().map(|_| ())),
        ("root 1", |comm| comm.reduce(memory(comm, 8, DType::F32)?, ReduceOp::Sum, 1)?.wait().map(|_| ())),
        ("Max", |comm| comm.reduce(memory(comm, 8, DType::F32)?, ReduceOp::Max, 0)?.wait().map(|_| ())),
        ("f64", |comm| comm.reduce(memory(comm, 8, DType::F64)?, ReduceOp::Sum, 0)?.wait().map(|_| ())),
        ("[9]", |comm| comm.reduce(memory(comm, 9, DType::F32)?, ReduceOp::Sum, 0)?.wait().map(|_| ())),
    ];
    for (told, other) in cases {
        for e in errors(3, |comm| if comm.rank() == 2 { other(&comm) } else { same(&comm) }) {
            let ErrorKind::Mismatch { why, .. } = e.kind() else { panic!("{told}: {e}") };
            assert!(why.contains("reduce(Sum, root 0) f32[8] at") && why.contains(told), "{told}: {why}");
            assert!(why.contains("faults.rs:") && why.contains("rank 2"), "{why}");
        }
    }
}

#[test]
fn the_same_call_from_another_place_is_told_apart() {
    let here = |comm: &Comm<Cpu>| comm.barrier();
    let there = |comm: &Comm<Cpu>| comm.barrier();
    let program = |comm: Comm<Cpu>| if comm.rank() == 0 { here(&comm) } else { there(&comm) };
    for e in errors(2, program) {
        assert!(e.to_string().contains("one place in the program"), "{e}");
    }
    assert!(Ranks::new(2).any_place().run(cpu, program).is_ok());
}

#[test]
fn parts_that_do_not_meet_are_an_error_on_all() {
    for e in errors(2, |comm| {
        let send = if comm.rank() == 0 { [1, 3] } else { [2, 2] };
        let recv = if comm.rank() == 0 { [1, 2] } else { [2, 2] };
        let x = Tensor::zeros(comm.runtime(), [4], DType::F32)?;
        let out = memory(&comm, recv.iter().sum(), DType::F32)?;
        comm.all_to_all_parts(&x, &send, out, &recv)?.wait().map(|_| ())
    }) {
        assert!(e.to_string().contains("rank 0 sends 3 elements to rank 1, which expects 2"), "{e}");
    }
}

#[test]
fn transfers_that_do_not_fit_are_an_error_on_both() {
    for e in errors(2, |comm| match comm.rank() {
        0 => comm.send(&Tensor::zeros(comm.runtime(), [3], DType::F32)?, 1)?.wait(),
        _ => comm.recv(memory(&comm, 4, DType::F32)?, 0)?.wait().map(|_| ()),
    }) {
        assert!(e.to_string().contains("f32[3]") && e.to_string().contains("f32[4]"), "{e}");
    }
}

#[test]
fn a_rank_that_leaves_is_not_waited_for() {
    let begun = Instant::now();
    let program = |comm: Comm<Cpu>| if comm.rank() == 0 { Ok(()) } else { comm.barrier() };
    let outcomes = Ranks::new(3).timeout(Duration::from_secs(60)).outcomes(cpu, program).unwrap();
    assert!(begun.elapsed() < Duration::from_secs(30) && outcomes[0].is_ok());
    for outcome in &outcomes[1..] {
        let text = outcome.as_ref().unwrap_err().to_string();
        assert!(text.contains("rank 0 failed") && text.contains("it left while"), "{text}");
    }
}

#[test]
fn afterwards_the_communicator_says_why_and_memory_is_back() {
    let program = |comm: Comm<Cpu>| {
        let before = comm.runtime().memory().total.live;
        let x = memory(&comm, 1000, DType::F32)?;
        if comm.rank() == 0 {
            comm.abort("enough");
            drop(x);
        } else {
            let first = comm.all_reduce(x, ReduceOp::Sum).and_then(|w| w.wait()).err().map(|e| e.to_string());
            assert!(first.as_ref().is_some_and(|e| e.contains("enough")), "{first:?}");
        }
        let again = comm.barrier().unwrap_err().to_string();
        assert!(again.contains("rank 0 failed") && again.contains("enough"), "{again}");
        assert_eq!(comm.runtime().memory().total.live, before);
        Ok(())
    };
    Ranks::new(4).run(cpu, program).unwrap();
}

#[test]
fn misuse_is_refused_before_anything_is_sent() {
    let program = |comm: Comm<Cpu>| {
        let x = || Tensor::zeros(comm.runtime(), [4], DType::F32);
        let m = |n| memory(&comm, n, DType::F32);
        let refused = [
            comm.broadcast(m(4)?, 7).is_err(),
            comm.send(&x()?, comm.rank()).is_err(),
            comm.all_gather(&x()?, m(9)?).is_err(),
            comm.reduce_scatter(&x()?, m(4)?, ReduceOp::Sum).is_err(),
            comm.reduce_scatter_parts(&x()?, &[4], m(4)?, ReduceOp::Sum).is_err(),
            comm.all_gather(&x()?, memory(&comm, 8, DType::F64)?).is_err(),
            comm.all_reduce(memory(&comm, 4, DType::I32)?, ReduceOp::Avg).is_err(),
        ];
        assert_eq!(refused, [true; 7]);
        comm.barrier()
    };
    Ranks::new(2).run(cpu, program).unwrap();
}

#[test]
fn seeded_faults_never_hang() {
    for seed in 0..40 {
        let (at, fault) = Fault::seeded(seed, 10);
        let program = |comm: Comm<Cpu>| {
            let faulty = comm.rank() == 2;
            let comm: Comm<Cpu> = if faulty { Arc::new(FaultyCommunicator::new(comm, at, fault)) } else { comm };
            for kind in KINDS {
                call(&comm, kind, 20_000, DType::F32)?;
            }
            let half = comm.split(Some(comm.rank() % 2), 0)?;
            half.map_or(Ok(()), |half| call(&half, "all_reduce", 30, DType::F32))
        };
        let outcomes = Ranks::new(4).timeout(TIMEOUT).outcomes(cpu, program).unwrap();
        let failed = outcomes.iter().filter(|o| o.is_err()).count();
        let harmless = matches!(fault, Fault::Delay(_));
        assert!(if harmless { failed == 0 } else { failed >= 1 }, "seed {seed}, {fault:?} at {at}: {failed} failed");
    }
}
