//! Ranks as threads: what the engine holds while groups come and go, which devices it takes, and how queues are ordered around a call.

use std::{
    process::{Command, Stdio},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use crate::collectives::{WORLDS, cpu};
use comm::{Collectives, Comm, Communicator, CountingCommunicator, Partial, Ranks, ReduceOp, ThreadCommunicator, Work};
use numcore::{
    DType, NullEvent, NullRuntime, Result, Runtime, Tensor, TensorMut,
    ops::{Op, PointwiseOps},
};
use runtime_cpu::Cpu;

fn memory<R: Runtime>(rt: &R, numel: usize) -> Result<TensorMut<R>> {
    TensorMut::zeros(rt, [numel].into(), DType::F32)
}

/// Splits again and again, of the world and of groups, some left at once and some after a call whose result is waited for later.
fn many_splits(comm: &Comm<Cpu>) -> Result<()> {
    let mut kept: Option<Comm<Cpu>> = None;
    for k in 0..100 {
        let group = comm.split(Some(comm.rank() % 2), 0)?;
        let inner = group.as_ref().map(|g| g.split((k % 3 > 0).then_some(g.rank() / 2), 1)).transpose()?.flatten();
        let work = inner.as_ref().map(|g| g.all_reduce(memory(g.runtime(), 1 << 15)?, ReduceOp::Sum)).transpose()?;
        // Memory in flight outlives its group.
        drop(inner);
        work.map(Work::wait).transpose()?;
        if let Some(old) = kept.replace(group.unwrap_or_else(|| comm.clone())) {
            old.barrier()?;
        }
    }
    Ok(())
}

#[cfg(target_os = "linux")]
#[test]
fn workers_of_groups_that_are_over_end() {
    const CHILD: &str = "WEFTGRAD_COUNT_THREADS";
    if std::env::var_os(CHILD).is_none() {
        // Threads are counted in a process where no other test runs.
        let name = "thread_engine::workers_of_groups_that_are_over_end";
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", name, "--nocapture"]).env(CHILD, "1").stdin(Stdio::null());
        let output = child.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
        return;
    }
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
    let ranks = Ranks::new(4).timeout(Duration::from_secs(60));
    ranks
        .run(cpu, |comm| {
            comm.barrier()?;
            // Four ranks, a worker each, and those of one group of each rank.
            let few = threads() + 4;
            many_splits(&comm)?;
            let begun = Instant::now();
            while threads() > few && begun.elapsed() < Duration::from_secs(20) {
                std::thread::sleep(Duration::from_millis(5));
            }
            assert!(threads() <= few, "{} threads after 100 splits, {few} expected", threads());
            comm.barrier()
        })
        .unwrap();
}

#[test]
fn any_color_makes_a_group_and_none_stays_out() {
    for color in [0, 1, usize::MAX - 1, usize::MAX] {
        let sizes = Ranks::new(3).timeout(Duration::from_secs(20)).run(cpu, |comm| {
            let group = comm.split((comm.rank() != 1).then_some(color), usize::MAX - comm.rank())?;
            group.as_ref().map_or(Ok(()), |group| group.barrier())?;
            Ok(group.map(|group| (group.rank(), group.members().to_vec())))
        });
        assert_eq!(sizes.unwrap(), [Some((1, vec![2, 0])), None, Some((0, vec![2, 0]))]);
    }
}

#[test]
fn ranks_on_different_devices_are_refused_by_name() {
    let devices = |indices: &[u32]| indices.iter().map(|&i| NullRuntime::on_device(i)).collect::<Vec<_>>();
    let world = |indices: &[u32]| ThreadCommunicator::world(devices(indices), Duration::from_secs(1));
    assert!(world(&[1, 1, 1]).is_ok());
    let text = world(&[0, 0, 3]).unwrap_err().to_string();
    assert!(text.contains("rank 0 is on null, rank 2 on null:3") && text.contains("one device"), "{text}");
    let text = Ranks::new(2).run(|r| Ok(NullRuntime::on_device(r as u32)), |_| Ok(())).unwrap_err().to_string();
    assert!(text.contains("rank 1 on null:1"), "{text}");
}

/// After a call every rank's queue must be ordered after all that every rank had launched before it, and after what the engine launched.
fn ordered(
    n: usize,
    numel: usize,
    call: impl Fn(&Comm<NullRuntime>, usize) -> Result<Option<Work<TensorMut<NullRuntime>>>> + Sync,
) {
    let before: Arc<Mutex<Vec<NullEvent>>> = Arc::default();
    let ranks = Ranks::new(n).timeout(Duration::from_secs(20));
    ranks
        .run(
            |_| Ok(NullRuntime::new()),
            |comm| {
                let rt = comm.runtime();
                let x = Tensor::zeros(rt, [3], DType::F32)?;
                for _ in 0..=comm.rank() {
                    x.square()?;
                }
                before.lock().unwrap().push(rt.record()?);
                let launched = rt.launches();
                let Some(work) = call(&comm, numel)? else { return comm.barrier() };
                work.wait()?;
                let known = before.lock().unwrap().clone();
                assert_eq!(known.len(), n);
                assert!(
                    known.iter().all(|event| rt.is_ordered_after(event)),
                    "rank {} of {n}, {numel} elements",
                    comm.rank()
                );
                assert!(rt.launches() >= launched);
                comm.barrier()
            },
        )
        .unwrap();
}

#[test]
fn queues_are_ordered_around_collectives() {
    for n in WORLDS.into_iter().filter(|&n| n > 1) {
        for numel in [8 * n, n << 15] {
            ordered(n, numel, |comm, numel| Ok(Some(comm.all_reduce(memory(comm.runtime(), numel)?, ReduceOp::Sum)?)));
            ordered(n, numel, |comm, numel| Ok(Some(comm.broadcast(memory(comm.runtime(), numel)?, 1)?)));
            ordered(n, numel, |comm, numel| {
                let x = memory(comm.runtime(), numel / comm.size())?.freeze()?;
                Ok(Some(comm.all_gather(&x, memory(comm.runtime(), numel)?)?))
            });
            ordered(n, numel, |comm, numel| {
                Ok(Some(comm.reduce_scatter_in_place(memory(comm.runtime(), numel)?, ReduceOp::Sum)?))
            });
        }
    }
}

#[test]
fn a_receiver_is_ordered_after_the_copy_and_a_sender_too() {
    let sent: Arc<Mutex<Option<NullEvent>>> = Arc::default();
    let ranks = Ranks::new(2).timeout(Duration::from_secs(20));
    ranks
        .run(
            |_| Ok(NullRuntime::new()),
            |comm| {
                let rt = comm.runtime();
                if comm.rank() == 0 {
                    let mut x = memory(rt, 100)?;
                    x.reset();
                    x.accumulate(&Op::identity(), &[&Tensor::ones(rt, [100], DType::F32)?])?;
                    *sent.lock().unwrap() = Some(rt.record()?);
                    comm.send(&x.freeze()?, 1)?.wait()?;
                } else {
                    comm.recv(memory(rt, 100)?, 0)?.wait()?;
                    let event = sent.lock().unwrap().clone();
                    assert!(event.is_some_and(|event| rt.is_ordered_after(&event)));
                }
                comm.barrier()
            },
        )
        .unwrap();
}

#[test]
fn numbers_and_empty_texts_are_exchanged_in_one_call() {
    let calls = Ranks::new(3).run(cpu, |comm| {
        let counting = CountingCommunicator::new(comm);
        Partial::new(1.0).combine_on(&counting, ReduceOp::Sum)?;
        let number = counting.of("all_gather").calls;
        counting.reset();
        assert_eq!(counting.exchange(b"")?, vec![Vec::<u8>::new(); 3]);
        let empty = counting.of("all_gather").calls;
        counting.reset();
        let own: &[u8] = if counting.rank() == 1 { b"a" } else { b"" };
        assert_eq!(counting.exchange(own)?, [b"".to_vec(), b"a".to_vec(), b"".to_vec()]);
        Ok([number, empty, counting.of("all_gather").calls])
    });
    assert_eq!(calls.unwrap(), [[1, 1, 2]; 3]);
}

#[test]
fn nan_wins_in_numbers_on_the_host_too() {
    for (n, op) in [(2, ReduceOp::Min), (3, ReduceOp::Max), (5, ReduceOp::Sum), (5, ReduceOp::Prod), (4, ReduceOp::Avg)]
    {
        for nan in 0..n {
            let of = |rank: usize| if rank == nan { f64::NAN } else { rank as f64 };
            let seen = Ranks::new(n).run(cpu, |comm| Partial::new(of(comm.rank())).combine_on(&comm, op)).unwrap();
            assert!(seen.iter().all(|v| v.is_nan()), "{op:?}, NaN on rank {nan} of {n}: {seen:?}");
        }
    }
    let infinite = [f64::INFINITY, f64::NEG_INFINITY, 0.0];
    let of = |op| Ranks::new(3).run(cpu, |comm| Partial::new(infinite[comm.rank()]).combine_on(&comm, op)).unwrap()[0];
    assert_eq!((of(ReduceOp::Min), of(ReduceOp::Max)), (f64::NEG_INFINITY, f64::INFINITY));
}
