//! Whatever happens on one rank ends as an error on all, before the deadline.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use comm::{Collectives, Comm, Communicator, Fault, FaultyCommunicator, Ranks, ReduceOp};
use numcore::{DType, Error, ErrorKind, Result, Runtime, Shape, Tensor, TensorMut};
use runtime_cpu::Cpu;

use crate::collectives::ring;

pub const TIMEOUT: Duration = Duration::from_millis(400);

pub fn cpu(_: usize) -> Result<Cpu> {
    Ok(Cpu::with_threads(1))
}

fn memory(comm: &Comm<Cpu>, numel: usize, dtype: DType) -> Result<TensorMut<Cpu>> {
    TensorMut::zeros(comm.runtime(), Shape::new(&[numel])?, dtype)
}

/// Calls of each kind; `send` is a ring of transfers.
const KINDS: [&str; 9] =
    ["all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "barrier", "exchange", "send"];
/// Other forms of them.
const FORMS: [&str; 5] =
    ["reduce_scatter_parts", "reduce_scatter_in_place", "all_gather_parts", "all_gather_in_place", "all_to_all_parts"];

/// What ranks must agree on beside the kind.
#[derive(Clone, Copy)]
pub struct Terms {
    op: ReduceOp,
    root: usize,
    dtype: DType,
    numel: usize,
}

pub const TERMS: Terms = Terms { op: ReduceOp::Sum, root: 0, dtype: DType::F32, numel: 100 };

pub fn call(comm: &Comm<Cpu>, kind: &str, terms: Terms) -> Result<()> {
    let Terms { op, root, dtype, numel } = terms;
    let n = comm.size();
    let (part, x) =
        (Tensor::zeros(comm.runtime(), [numel], dtype)?, Tensor::zeros(comm.runtime(), [numel * n], dtype)?);
    let (one, all) = (|| memory(comm, numel, dtype), || memory(comm, numel * n, dtype));
    let parts = vec![numel; n];
    let work = match kind {
        "all_reduce" => comm.all_reduce(one()?, op)?,
        "reduce" => comm.reduce(one()?, op, root)?,
        "broadcast" => comm.broadcast(one()?, root)?,
        "reduce_scatter" => comm.reduce_scatter(&x, one()?, op)?,
        "reduce_scatter_parts" => comm.reduce_scatter_parts(&x, &parts, one()?, op)?,
        "reduce_scatter_in_place" => comm.reduce_scatter_in_place(all()?, op)?,
        "all_gather" => comm.all_gather(&part, all()?)?,
        "all_gather_parts" => comm.all_gather_parts(&part, &parts, all()?)?,
        "all_gather_in_place" => comm.all_gather_in_place(all()?)?,
        "all_to_all" => comm.all_to_all(&x, all()?)?,
        "all_to_all_parts" => comm.all_to_all_parts(&x, &parts, all()?, &parts)?,
        "send" => {
            let (sent, got) = ring(comm, &part, one()?)?;
            return got.wait().map(|_| ()).and(sent.wait());
        }
        "barrier" => return comm.barrier(),
        _ => return comm.exchange(b"abc").map(|_| ()),
    };
    work.wait().map(|_| ())
}

/// Another collective than this kind.
fn another(kind: &str) -> &'static str {
    if kind == "barrier" { "broadcast" } else { "barrier" }
}

/// Whether an error says what every rank had called last, a call of this kind among it. Nobody waits for a rank that is late to send: it
/// may have called nothing.
fn tells_calls(kind: &str, e: &Error) -> bool {
    let text = e.to_string();
    let name = if kind == "exchange" { "all_gather" } else { kind };
    let called = |calls: &str| calls.starts_with('#') || kind == "send" && calls.starts_with("none");
    text.split_once("\nlast calls:\n  rank 0: ").is_some_and(|(_, calls)| called(calls) && calls.contains(name))
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
        // Transfers that are started together are two calls.
        let pairs = kind == "send" && !comm.guarantees().independent_transfers;
        // One that is left out of the last pair is missed, and meets nothing else.
        let second = if pairs && fault != Fault::Skip { 2 } else { 1 };
        let comm: Comm<Cpu> = if faulty { Arc::new(FaultyCommunicator::new(comm, second, fault)) } else { comm };
        call(&comm, kind, TERMS)?;
        // A rank that left out a transfer takes this one for it.
        call(&comm, kind, Terms { numel: 101, ..TERMS })?;
        // A rank that left a call out disagrees here at the latest.
        call(&comm, another(kind), TERMS)
    })
}

#[test]
fn a_panic_on_one_rank_is_named_on_all() {
    for kind in KINDS {
        for (rank, e) in with_fault(kind, Fault::Panic).into_iter().enumerate() {
            let ErrorKind::Peer { peer: 1, cause, .. } = e.kind() else { panic!("{kind}: {e}") };
            assert!(cause.contains("a panic on purpose"), "{kind}: {e}");
            assert_eq!(e.rank(), Some(rank));
            assert!(rank == 1 || tells_calls(kind, &e), "{kind}: {e}");
        }
    }
}

#[test]
fn an_error_on_one_rank_is_named_on_all() {
    for kind in KINDS {
        for (rank, e) in with_fault(kind, Fault::Error).into_iter().enumerate() {
            assert!(e.to_string().contains("an error on purpose") && e.to_string().contains("rank 1"), "{kind}: {e}");
            assert!(rank == 1 || tells_calls(kind, &e), "{kind}: {e}");
        }
    }
}

#[test]
fn a_call_left_out_is_a_disagreement() {
    for kind in KINDS {
        for e in with_fault(kind, Fault::Skip) {
            assert!(matches!(e.kind(), ErrorKind::Mismatch { .. }) && tells_calls(kind, &e), "{kind}: {e}");
        }
    }
}

#[test]
fn a_rank_that_never_arrives_is_named_when_the_time_is_up() {
    for kind in KINDS {
        for (rank, e) in with_fault(kind, Fault::Delay(2 * TIMEOUT)).into_iter().enumerate() {
            let ErrorKind::Timeout { missing, .. } = e.kind() else { panic!("{kind}, rank {rank}: {e}") };
            assert_eq!(missing, &[1]);
            assert!(tells_calls(kind, &e), "{kind}: {e}");
        }
    }
}

/// What every rank says when rank 2 of three makes another call.
fn mismatch(
    what: &str,
    same: impl Fn(&Comm<Cpu>) -> Result<()> + Sync,
    other: impl Fn(&Comm<Cpu>) -> Result<()> + Sync,
) -> Vec<String> {
    let told = |e: Error| {
        let ErrorKind::Mismatch { why, .. } = e.kind() else { panic!("{what}: {e}") };
        let (sides, calls) = why.split_once("\nlast calls:").unwrap_or_else(|| panic!("{what}: {e}"));
        assert!(sides.contains("rank 2") && calls.contains("faults.rs:"), "{what}: {e}");
        sides.to_string()
    };
    // Who is done with a ring before the others meets them here.
    let program =
        |comm: Comm<Cpu>| if comm.rank() == 2 { other(&comm) } else { same(&comm).and_then(|()| comm.barrier()) };
    errors(3, program).into_iter().map(told).collect()
}

#[test]
fn different_calls_are_shown_side_by_side() {
    let op = ("Max", Terms { op: ReduceOp::Max, ..TERMS });
    let root = ("root 1", Terms { root: 1, ..TERMS });
    let dtype = ("f64", Terms { dtype: DType::F64, ..TERMS });
    let same_size = ("i32", Terms { dtype: DType::I32, ..TERMS });
    let numel = ("101", Terms { numel: 101, ..TERMS });
    for kind in KINDS.iter().chain(&FORMS).filter(|kind| !["barrier", "exchange"].contains(kind)) {
        let reduces = kind.contains("reduce").then_some(op);
        let rooted = ["reduce", "broadcast"].contains(kind).then_some(root);
        for (told, other) in [dtype, same_size, numel].into_iter().chain(reduces).chain(rooted) {
            for sides in mismatch(kind, |comm| call(comm, kind, TERMS), |comm| call(comm, kind, other)) {
                assert!(
                    sides.contains(told) && sides.contains("100") | sides.contains("f32[]"),
                    "{kind}, {told}: {sides}"
                );
            }
        }
    }
}

#[test]
fn different_collectives_are_shown_side_by_side() {
    for kind in KINDS.iter().chain(&FORMS).filter(|&&kind| kind != "send") {
        let name = kind.trim_end_matches("_parts").trim_end_matches("_in_place");
        for sides in mismatch(kind, |c| call(c, kind, TERMS), |c| call(c, another(kind), TERMS)) {
            let name = if name == "exchange" { "all_gather" } else { name };
            assert!(sides.contains(name) && sides.contains(another(kind)), "{kind}: {sides}");
        }
    }
    // A transfer that never meets its other side is only late: what there was instead is among the last calls.
    for e in errors(3, |comm| call(&comm, if comm.rank() == 2 { "barrier" } else { "send" }, TERMS)) {
        assert!(matches!(e.kind(), ErrorKind::Timeout { .. }) && tells_calls("barrier", &e), "{e}");
    }
}

#[test]
fn a_part_in_place_does_not_meet_one_beside_its_output() {
    // Of any place in the program: one rank's part would be lost.
    for kind in ["all_gather", "reduce_scatter"] {
        let form = |rank| if rank == 0 { kind.into() } else { format!("{kind}_in_place") };
        let ranks = Ranks::new(2).timeout(TIMEOUT).any_place();
        for outcome in ranks.outcomes(cpu, |comm| call(&comm, &form(comm.rank()), TERMS)).unwrap() {
            let text = outcome.unwrap_err().to_string();
            assert!(text.contains("ranks disagree") && text.contains("f32[100, 100] in place at"), "{text}");
        }
        // Equal parts, given and not, are the same call.
        let form = |rank| if rank == 0 { kind.into() } else { format!("{kind}_parts") };
        ranks.run(cpu, |comm| call(&comm, &form(comm.rank()), TERMS)).unwrap();
    }
}

#[test]
fn the_same_call_from_another_place_is_told_apart() {
    type Ask = fn(&Comm<Cpu>) -> Result<()>;
    let pairs: [(Ask, Ask); 2] = [
        (|comm| comm.barrier(), |comm| comm.barrier()),
        (|comm| comm.split(Some(0), 0).map(|_| ()), |comm| comm.split(Some(0), 0).map(|_| ())),
    ];
    for (here, there) in pairs {
        let program = |comm: Comm<Cpu>| if comm.rank() == 0 { here(&comm) } else { there(&comm) };
        for e in errors(2, program) {
            let text = e.to_string();
            assert!(text.contains("one place in the program") && text.contains("faults.rs:"), "{text}");
        }
        assert!(Ranks::new(2).any_place().run(cpu, program).is_ok());
    }
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
        let calls =
            text.split_once("\nlast calls:\n  rank 0: ").and_then(|(_, calls)| calls.split_once("\n  rank 1: "));
        assert!(calls.is_some_and(|(left, stayed)| !left.contains("barrier") && stayed.contains("barrier")), "{text}");
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
        assert!(again.contains("rank 0 failed") && again.contains("enough, at "), "{again}");
        assert!(again.contains("\nlast calls:"), "{again}");
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
        let (at, fault) = Fault::seeded(seed, 11);
        let program = |comm: Comm<Cpu>| {
            let faulty = comm.rank() == 2;
            let comm: Comm<Cpu> = if faulty { Arc::new(FaultyCommunicator::new(comm, at, fault)) } else { comm };
            for kind in KINDS {
                call(&comm, kind, Terms { numel: 20_000, ..TERMS })?;
            }
            let half = comm.split(Some(comm.rank() % 2), 0)?;
            half.map_or(Ok(()), |half| call(&half, "all_reduce", TERMS))
        };
        let outcomes = Ranks::new(4).timeout(TIMEOUT).outcomes(cpu, program).unwrap();
        let failed = outcomes.iter().filter(|o| o.is_err()).count();
        let harmless = matches!(fault, Fault::Delay(_));
        assert!(if harmless { failed == 0 } else { failed >= 1 }, "seed {seed}, {fault:?} at {at}: {failed} failed");
    }
}

#[test]
fn a_poll_tells_what_failed_on_another_rank() {
    let outcomes = Ranks::new(2).outcomes(cpu, |comm| {
        comm.barrier()?;
        if comm.rank() == 1 {
            comm.poll()?;
            comm.abort("the disk is full");
        }
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(20) {
            comm.poll()?;
            std::thread::yield_now();
        }
        Ok(())
    });
    for outcome in outcomes.unwrap() {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains("the disk is full"), "{error}");
    }
}
