//! What ranks do, and what must come of it.

use std::panic::resume_unwind;

use numcore::{DType, Error, ErrorKind, Result, Tensor, TensorMut};
use runtime_cpu::Cpu;

use crate::{
    Time,
    comm::{Collectives, Comm, Communicator, Membership, ReduceOp, Rendezvous, ThreadSeat, Work},
    explore, explore_rendezvous,
    sync::{self, mpsc},
};

/// So many elements that every rank's worker has a share.
const SHARED: usize = 1 << 15;

/// As many times this rank's number and 1.
fn memory(comm: &Comm<Cpu>, numel: usize) -> Result<TensorMut<Cpu>> {
    let own = Tensor::full(comm.runtime(), [numel], DType::F32, comm.rank() as f64 + 1.0)?;
    own.try_mut().map_err(|_| Error::argument("memory", "new memory has two holders"))
}

/// Waits for memory in which every element must be `expected`.
fn arrives(work: Work<TensorMut<Cpu>>, expected: f32) -> Result<()> {
    let values = work.wait()?.freeze()?.to_vec::<f32>()?;
    assert!(values.iter().all(|&v| v == expected), "{} in place of {expected}", values[0]);
    Ok(())
}

/// The sum of all ranks' memory.
fn total(comm: &Comm<Cpu>) -> f32 {
    (1..=comm.size()).map(|r| r as f32).sum()
}

fn all_reduce(comm: &Comm<Cpu>, numel: usize) -> Result<()> {
    arrives(comm.all_reduce(memory(comm, numel)?, ReduceOp::Sum)?, total(comm))
}

fn all_well<T>(outcomes: Vec<Result<T>>) {
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        assert!(outcome.is_ok(), "rank {rank}: {:?}", outcome.err());
    }
}

/// Either all well, or on every rank an error that `names` accepts.
fn all_or_none(outcomes: Vec<Result<()>>, names: fn(&ErrorKind) -> bool) {
    if outcomes.iter().any(Result::is_err) {
        every_error(outcomes, names);
    }
}

fn every_error(outcomes: Vec<Result<()>>, names: fn(&ErrorKind) -> bool) {
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        let Err(error) = outcome else { panic!("rank {rank} saw nothing") };
        assert!(names(error.kind()), "rank {rank}: {error}");
    }
}

#[test]
fn calls_in_flight_are_waited_for_in_any_order() {
    for n in [2, 3] {
        explore(
            n,
            Time::Stands,
            |comm| {
                let first = comm.all_reduce(memory(&comm, SHARED)?, ReduceOp::Sum)?;
                let second = comm.broadcast(memory(&comm, 5)?, 1)?;
                let (n, own) = (comm.size(), memory(&comm, 2)?);
                let third = comm.all_gather(&own.freeze()?, memory(&comm, 2 * n)?)?;
                arrives(second, 2.0)?;
                let _ = first.is_done();
                let gathered = third.wait()?.freeze()?.to_vec::<f32>()?;
                assert_eq!(gathered, (0..2 * n).map(|i| (i / 2 + 1) as f32).collect::<Vec<_>>());
                arrives(first, total(&comm))?;
                comm.barrier()?;
                let all = comm.exchange(&[comm.rank() as u8])?;
                assert!(all.iter().enumerate().all(|(r, told)| told == &[r as u8]));
                Ok(())
            },
            all_well,
        );
    }
}

#[test]
fn pairs_and_groups_meet_beside_each_other() {
    explore(
        3,
        Time::Stands,
        |comm| {
            let (rank, next, last) = (comm.rank(), (comm.rank() + 1) % 3, (comm.rank() + 2) % 3);
            let arriving = comm.recv(memory(&comm, 3)?, last)?;
            comm.send(&memory(&comm, 3)?.freeze()?, next)?.wait()?;
            arrives(arriving, last as f32 + 1.0)?;
            let Some(group) = comm.split((rank < 2).then_some(0), 2 - rank)? else { return comm.barrier() };
            assert_eq!((group.rank(), group.size()), (1 - rank, 2));
            all_reduce(&group, 4)?;
            comm.barrier()
        },
        all_well,
    );
}

#[test]
fn work_may_be_dropped() {
    explore(
        3,
        Time::Stands,
        |comm| {
            let work = comm.all_reduce(memory(&comm, SHARED)?, ReduceOp::Sum)?;
            if comm.rank() == 1 {
                drop(work);
            } else {
                arrives(work, total(&comm))?;
            }
            all_reduce(&comm, 3)
        },
        all_well,
    );
}

#[test]
fn a_panic_reaches_everybody() {
    explore(
        3,
        Time::Stands,
        |comm| {
            let work = comm.all_reduce(memory(&comm, SHARED)?, ReduceOp::Sum)?;
            if comm.rank() == 2 {
                // No panic hook: it would print a thousand times.
                resume_unwind(Box::new("on purpose"));
            }
            work.wait()?;
            comm.barrier()
        },
        |outcomes| {
            every_error(
                outcomes,
                |kind| matches!(kind, ErrorKind::Peer { peer: 2, cause, .. } if cause.contains("on purpose")),
            );
        },
    );
}

#[test]
fn a_rank_that_leaves_is_not_waited_for() {
    explore(
        2,
        Time::Stands,
        |comm| {
            all_reduce(&comm, 3)?;
            if comm.rank() == 0 { Ok(()) } else { comm.barrier() }
        },
        |outcomes| {
            assert!(outcomes[0].is_ok());
            let told = outcomes[1].as_ref().err().map(|e| e.to_string()).unwrap_or_default();
            assert!(told.contains("rank 0 failed") && told.contains("it left while"), "{told}");
        },
    );
}

#[test]
fn groups_end_while_what_they_started_is_in_flight() {
    explore(
        3,
        Time::Stands,
        |comm| {
            let mut works = Vec::new();
            for k in 0..2 {
                // Rank 0 stays out of the first group.
                let group = comm.split((k > 0 || comm.rank() > 0).then_some(7), comm.size() - comm.rank())?;
                let Some(group) = group else { continue };
                works.push((group.all_reduce(memory(&group, SHARED)?, ReduceOp::Sum)?, total(&group)));
            }
            works.into_iter().try_for_each(|(work, sum)| arrives(work, sum))
        },
        all_well,
    );
}

#[test]
fn a_rank_that_fails_beside_its_group_is_named_by_its_world_rank() {
    explore(
        3,
        Time::Stands,
        |comm| {
            let group = comm.split((comm.rank() > 0).then_some(0), 0)?;
            match comm.rank() {
                2 => Err(Error::argument("test", "on purpose")),
                1 => group.map_or(Ok(()), |group| group.barrier()),
                _ => comm.barrier(),
            }
        },
        |outcomes| {
            every_error(outcomes, |kind| matches!(kind, ErrorKind::Argument { .. } | ErrorKind::Peer { peer: 2, .. }));
        },
    );
}

#[test]
fn an_abort_ends_a_round_for_all_or_for_none() {
    explore(
        3,
        Time::Stands,
        |comm| {
            let work = comm.all_reduce(memory(&comm, SHARED)?, ReduceOp::Sum)?;
            if comm.rank() == 0 {
                comm.abort("enough");
            }
            arrives(work, total(&comm))
        },
        // Whoever calls after the abort never takes part; those before it then have no round to finish.
        |outcomes| {
            all_or_none(
                outcomes,
                |kind| matches!(kind, ErrorKind::Peer { peer: 0, cause, .. } if cause.starts_with("enough\nlast calls:")),
            )
        },
    );
}

#[test]
fn different_calls_are_told_to_all() {
    explore(
        3,
        Time::Stands,
        |comm| {
            let op = if comm.rank() == 1 { ReduceOp::Max } else { ReduceOp::Sum };
            comm.all_reduce(memory(&comm, 4)?, op)?.wait().map(|_| ())
        },
        |outcomes| every_error(outcomes, |kind| matches!(kind, ErrorKind::Mismatch { .. })),
    );
}

#[test]
fn a_deadline_that_passes_ends_a_round_for_all_or_for_none() {
    for n in [2, 3] {
        explore(
            n,
            Time::Passes,
            |comm| all_reduce(&comm, SHARED),
            |outcomes| {
                all_or_none(outcomes, |kind| matches!(kind, ErrorKind::Timeout { missing, .. } if !missing.is_empty()))
            },
        );
    }
}

#[test]
fn a_rank_that_never_calls_is_named() {
    explore(
        2,
        Time::Passes,
        |comm| {
            // A receive that nobody answers; the other rank waits for a call that never comes.
            if comm.rank() == 0 { comm.recv(memory(&comm, 2)?, 1)?.wait().map(|_| ()) } else { all_reduce(&comm, 2) }
        },
        |outcomes| {
            every_error(outcomes, |kind| matches!(kind, ErrorKind::Timeout { missing, .. } if missing.len() == 1))
        },
    );
}

/// Ranks that meet, with what a rank of the first world does that is not to be in the second one.
fn rendezvous(time: Time, lost: fn(ThreadSeat<Cpu>, &mpsc::Receiver<()>), check: fn(Vec<Result<(u64, usize)>>)) {
    explore_rendezvous(time, move |rendezvous, seats, ended, listens| {
        let mut seats = seats.into_iter();
        let (first, second, third) = (seats.next(), seats.next(), seats.next());
        let newcomer = rendezvous.join(Cpu::with_threads(1));
        let outcomes = sync::scope(|scope| {
            let going_on = [first, second].into_iter().flatten().map(|mut seat| {
                let run = move || {
                    let comm = seat.next_world()?.comm;
                    let _ = all_reduce(&comm, 3);
                    drop(comm);
                    let Membership { comm, generation, .. } = seat.next_world()?;
                    let _ = all_reduce(&comm, 3);
                    Ok((generation, comm.size()))
                };
                sync::spawn_in(scope, "goes on".into(), run)
            });
            let going_on: Vec<_> = going_on.collect();
            let lost = third.map(|seat| sync::spawn_in(scope, "is lost".into(), move || lost(seat, &listens)));
            let joined = sync::spawn_in(scope, "joins".into(), move || {
                let mut newcomer = newcomer;
                newcomer.next_world().map(|membership| (membership.generation, membership.comm.size()))
            });
            let mut outcomes: Vec<_> = going_on.into_iter().map(|t| t.unwrap().join().unwrap()).collect();
            drop(ended);
            lost.into_iter().for_each(|thread| thread.unwrap().join().unwrap());
            outcomes.push(joined.unwrap().join().unwrap());
            outcomes
        });
        check(outcomes);
    });
}

/// Those who say that they were in one world are as many as it had ranks, of those whose last world it was.
fn one_world_each(outcomes: &[Result<(u64, usize)>]) {
    for (generation, size) in outcomes.iter().flatten() {
        let there = outcomes.iter().flatten().filter(|(own, _)| own == generation);
        assert!(there.clone().all(|(_, own)| own == size), "{outcomes:?}");
        assert!(there.count() <= *size, "{outcomes:?}");
    }
}

#[test]
fn who_is_left_meets_again_with_who_has_come() {
    rendezvous(
        Time::Stands,
        |mut seat, _| drop(seat.next_world()),
        |outcomes| {
            one_world_each(&outcomes);
            // The newcomer may come too late; whoever was there before is in the second world.
            assert!(outcomes[..2].iter().all(Result::is_ok), "{outcomes:?}");
        },
    );
}

#[test]
fn who_neither_comes_nor_leaves_is_given_up() {
    rendezvous(
        Time::Passes,
        |seat, others_end| {
            let _ = others_end.recv();
            drop(seat);
        },
        |outcomes| {
            one_world_each(&outcomes);
            // Whoever comes after a deadline has passed is given up too, but never everybody.
            assert!(outcomes.iter().any(Result::is_ok), "{outcomes:?}");
        },
    );
}
