//! Every collective against the same thing done on the host, at every world size.

use std::sync::Arc;

use comm::{
    Collectives, Comm, Communicator, CountingCommunicator, NoOpCommunicator, Partial, Ranks, ReduceOp, Work,
    engine::Portable,
};
use numcore::{
    DType, Result, Shape, Tensor, TensorMut,
    ops::{Op, PointwiseOps, ViewOps},
};
use runtime_cpu::Cpu;

pub const WORLDS: [usize; 6] = [1, 2, 3, 4, 5, 8];

pub fn cpu(_: usize) -> Result<Cpu> {
    Ok(Cpu::with_threads(1))
}

pub fn worlds<T: Portable>(program: impl Fn(Comm<Cpu>) -> Result<T> + Sync) -> Vec<(usize, Vec<T>)> {
    let run = |n| (n, Ranks::new(n).run(cpu, &program).unwrap_or_else(|e| panic!("{n}: {e}")));
    WORLDS.into_iter().map(run).collect()
}

/// Small whole numbers, exact in every type, different on every rank.
pub fn value(rank: usize, i: usize) -> f64 {
    ((i * 7 + rank * 3 + 1) % 5) as f64
}

pub fn tensor(comm: &Comm<Cpu>, numel: usize, dtype: DType) -> Result<Tensor<Cpu>> {
    let values: Vec<f64> = (0..numel).map(|i| value(comm.rank(), i)).collect();
    Tensor::from_slice(comm.runtime(), [numel], &values)?.to_dtype(dtype)
}

pub fn memory(x: &Tensor<Cpu>) -> Result<TensorMut<Cpu>> {
    let mut memory = TensorMut::alloc(x.runtime(), *x.shape(), x.dtype())?;
    memory.accumulate(&Op::identity(), &[x])?;
    Ok(memory)
}

pub fn empty(comm: &Comm<Cpu>, numel: usize, dtype: DType) -> Result<TensorMut<Cpu>> {
    TensorMut::alloc(comm.runtime(), Shape::new(&[numel])?, dtype)
}

pub fn host(x: TensorMut<Cpu>) -> Result<Vec<f64>> {
    x.freeze()?.to_dtype(DType::F64)?.to_vec()
}

pub fn combined(op: ReduceOp, n: usize, i: usize, truth: bool) -> f64 {
    let values = (0..n).map(|r| if truth { f64::from(value(r, i) != 0.0) } else { value(r, i) });
    let all = match op {
        ReduceOp::Sum => values.sum::<f64>(),
        ReduceOp::Avg => values.sum::<f64>() / n as f64,
        ReduceOp::Prod => values.product(),
        ReduceOp::Min => values.fold(f64::INFINITY, f64::min),
        ReduceOp::Max => values.fold(0.0, f64::max),
    };
    if truth { all.min(1.0) } else { all }
}

/// As `dtype` holds it.
pub fn held(x: f64, dtype: DType) -> f64 {
    match dtype {
        DType::F16 => half::f16::from_f64(x).to_f64(),
        DType::BF16 => half::bf16::from_f64(x).to_f64(),
        DType::F32 => f64::from(x as f32),
        DType::U8 => f64::from(x as u64 as u8),
        _ => x,
    }
}

/// Starts a transfer to the next rank of a ring, and one from the last. On an engine with one queue they are started together: otherwise every rank
/// would wait for the next to receive.
#[track_caller]
pub fn ring(comm: &Comm<Cpu>, x: &Tensor<Cpu>, out: TensorMut<Cpu>) -> Result<(Work<()>, Work<TensorMut<Cpu>>)> {
    let (n, rank) = (comm.size(), comm.rank());
    let (next, last) = ((rank + 1) % n, (rank + n - 1) % n);
    match comm.guarantees().independent_transfers {
        true => Ok((comm.send(x, next)?, comm.recv(out, last)?)),
        false => Ok((Work::ready(()), comm.send_recv(x, next, out, last)?)),
    }
}

#[test]
fn all_reduce_in_every_type_by_every_reduction() {
    for (n, ranks) in worlds(|comm| {
        let mut results = Vec::new();
        for dtype in DType::ALL {
            for op in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Prod, ReduceOp::Min, ReduceOp::Max] {
                let x = memory(&tensor(&comm, 77, dtype)?)?;
                match comm.all_reduce(x, op) {
                    Ok(work) => results.push((dtype, op, host(work.wait()?)?)),
                    Err(e) => assert!(op == ReduceOp::Avg && !dtype.is_float() || dtype.is_storage(), "{e}"),
                }
            }
        }
        Ok(results)
    }) {
        for (rank, results) in ranks.into_iter().enumerate() {
            for (dtype, op, got) in results {
                for (i, got) in got.into_iter().enumerate() {
                    let expected = held(combined(op, n, i, dtype == DType::Bool), dtype);
                    assert_eq!(got, expected, "{dtype} {op:?}, element {i} on rank {rank} of {n}");
                }
            }
        }
    }
}

#[test]
fn large_tensors_are_shared_out_among_workers() {
    for (n, ranks) in worlds(|comm| {
        let x = memory(&tensor(&comm, 50_001, DType::F32)?)?;
        let sums = host(comm.all_reduce(x, ReduceOp::Sum)?.wait()?)?;
        let y = memory(&tensor(&comm, 50_001, DType::I32)?)?;
        let root = comm.size() - 1;
        let sent = host(comm.broadcast(y, root)?.wait()?)?;
        let z = comm.reduce(memory(&tensor(&comm, 50_001, DType::F64)?)?, ReduceOp::Max, root)?.wait()?;
        Ok((sums, sent, if comm.rank() == root { host(z)? } else { vec![] }))
    }) {
        for (rank, (sums, sent, most)) in ranks.into_iter().enumerate() {
            for i in 0..50_001 {
                assert_eq!(sums[i], combined(ReduceOp::Sum, n, i, false), "{i} on {rank} of {n}");
                assert_eq!(sent[i], value(n - 1, i), "{i} on {rank} of {n}");
            }
            assert!(most.iter().enumerate().all(|(i, &m)| m == combined(ReduceOp::Max, n, i, false)));
            assert_eq!(most.is_empty(), rank != n - 1);
        }
    }
}

#[test]
fn many_ranks_go_through_memory_of_the_engine() {
    let n = 19;
    let all = Ranks::new(n).run(cpu, |comm| {
        let x = memory(&tensor(&comm, 10, DType::BF16)?)?;
        let means = comm.all_reduce(x, ReduceOp::Avg)?;
        let part = comm.reduce_scatter(&tensor(&comm, n, DType::F32)?, empty(&comm, 1, DType::F32)?, ReduceOp::Sum)?;
        let sent = comm.broadcast(memory(&tensor(&comm, 9, DType::U8)?)?, 18)?;
        Ok((host(means.wait()?)?, host(part.wait()?)?, host(sent.wait()?)?))
    });
    for (rank, (means, part, sent)) in all.unwrap().into_iter().enumerate() {
        for (i, mean) in means.into_iter().enumerate() {
            let expected = combined(ReduceOp::Sum, n, i, false) as f32 / n as f32;
            assert_eq!(mean, held(f64::from(expected), DType::BF16));
        }
        assert_eq!(part, [combined(ReduceOp::Sum, n, rank, false)]);
        assert_eq!(sent, (0..9).map(|i| value(18, i)).collect::<Vec<_>>());
    }
}

#[test]
fn parts_are_scattered_and_gathered_evenly_and_unevenly() {
    for (n, ranks) in worlds(|comm| {
        let (n, rank) = (comm.size(), comm.rank());
        let uneven: Vec<usize> = (0..n).map(|r| (r * 5 + 2) % 4).collect();
        let total: usize = uneven.iter().sum();
        let (x, y) = (tensor(&comm, 6 * n, DType::F32)?, tensor(&comm, total, DType::F64)?);
        let even = comm.reduce_scatter(&x, empty(&comm, 6, DType::F32)?, ReduceOp::Sum)?;
        let odd = comm.reduce_scatter_parts(&y, &uneven, empty(&comm, uneven[rank], DType::F64)?, ReduceOp::Avg)?;
        let (even, odd) = (even.wait()?.freeze()?, odd.wait()?.freeze()?);
        let all = comm.all_gather(&even, empty(&comm, 6 * n, DType::F32)?)?;
        let all_odd = comm.all_gather_parts(&odd, &uneven, empty(&comm, total, DType::F64)?)?;
        let in_place = comm.reduce_scatter_in_place(memory(&tensor(&comm, 6 * n, DType::I64)?)?, ReduceOp::Sum)?;
        let in_place = comm.all_gather_in_place(in_place.wait()?)?;
        Ok((host(all.wait()?)?, host(all_odd.wait()?)?, host(in_place.wait()?)?))
    }) {
        for (all, odd, in_place) in ranks {
            assert_eq!(all, (0..6 * n).map(|i| combined(ReduceOp::Sum, n, i, false)).collect::<Vec<_>>());
            assert_eq!(in_place, all);
            assert!(odd.iter().enumerate().all(|(i, &x)| x == combined(ReduceOp::Avg, n, i, false)), "{n}: {odd:?}");
        }
    }
}

#[test]
fn all_to_all_is_a_transpose() {
    for (n, ranks) in worlds(|comm| {
        let (n, rank) = (comm.size(), comm.rank());
        let x: Vec<i64> = (0..n as i64).map(|to| 100 * rank as i64 + to).collect();
        let x = Tensor::from_slice(comm.runtime(), [n], &x)?;
        let even = host(comm.all_to_all(&x, empty(&comm, n, DType::I64)?)?.wait()?)?;
        // Rank i sends i + 2j elements to rank j.
        let send: Vec<usize> = (0..n).map(|j| rank + 2 * j).collect();
        let recv: Vec<usize> = (0..n).map(|i| i + 2 * rank).collect();
        let x = tensor(&comm, send.iter().sum(), DType::F32)?;
        let out = empty(&comm, recv.iter().sum(), DType::F32)?;
        Ok((even, host(comm.all_to_all_parts(&x, &send, out, &recv)?.wait()?)?))
    }) {
        for (rank, (even, odd)) in ranks.into_iter().enumerate() {
            assert_eq!(even, (0..n).map(|from| (100 * from + rank) as f64).collect::<Vec<_>>());
            let part = |i: usize| {
                let start: usize = (0..rank).map(|j| i + 2 * j).sum();
                (start..start + i + 2 * rank).map(move |k| value(i, k))
            };
            assert_eq!(odd, (0..n).flat_map(part).collect::<Vec<_>>());
        }
    }
}

#[test]
fn strided_values_are_sent_as_what_they_are() {
    let got = Ranks::new(2).run(cpu, |comm| {
        let x = Tensor::from_slice(comm.runtime(), [2, 3], &[1f32, 2.0, 3.0, 4.0, 5.0, 6.0])?.t()?;
        host(comm.all_gather(&x, empty(&comm, 12, DType::F32)?)?.wait()?)
    });
    assert_eq!(got.unwrap()[0], [1.0, 4.0, 2.0, 5.0, 3.0, 6.0, 1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
}

#[test]
fn transfers_are_in_order_for_each_pair() {
    let transfers = |comm: Comm<Cpu>| -> Result<Vec<f64>> {
        let (n, rank) = (comm.size(), comm.rank());
        if n == 1 {
            return Ok(vec![]);
        }
        let mut started = Vec::new();
        for k in 0..5 {
            let x = Tensor::full(comm.runtime(), [4], DType::F32, (10 * rank + k) as f64)?;
            started.push(ring(&comm, &x, empty(&comm, 4, DType::F32)?)?);
        }
        let arrived = |(sent, got): (Work<()>, Work<TensorMut<Cpu>>)| {
            let got = host(got.wait()?)?[3];
            sent.wait().map(|()| got)
        };
        started.into_iter().map(arrived).collect()
    };
    for (n, ranks) in worlds(transfers) {
        for (rank, got) in ranks.into_iter().enumerate().filter(|_| n > 1) {
            let from = (rank + n - 1) % n;
            assert_eq!(got, (0..5).map(|k| (10 * from + k) as f64).collect::<Vec<_>>());
        }
    }
}

#[test]
fn groups_are_split_by_color_and_ordered_by_key() {
    for (n, ranks) in worlds(|comm| {
        let rank = comm.rank();
        // Rank 3 stays out; the others make two groups, each in descending order.
        let color = (rank != 3).then_some(rank % 2);
        let Some(group) = comm.split(color, 100 - rank)? else { return Ok(None) };
        let own = Tensor::from_slice(comm.runtime(), [1], &[rank as i64])?;
        let members = host(group.all_gather(&own, empty(&comm, group.size(), DType::I64)?)?.wait()?)?;
        group.barrier()?;
        assert!(group.split(None, 0)?.is_none());
        Ok(Some((group.rank(), members)))
    }) {
        for (rank, group) in ranks.into_iter().enumerate() {
            let Some((at, members)) = group else {
                assert_eq!(rank, 3);
                continue;
            };
            let expected: Vec<f64> = (0..n).rev().filter(|r| *r != 3 && r % 2 == rank % 2).map(|r| r as f64).collect();
            assert_eq!((members[at], &members), (rank as f64, &expected));
        }
    }
}

#[test]
fn bytes_are_exchanged_and_agreed_on() {
    for (n, ranks) in worlds(|comm| {
        let own = vec![comm.rank() as u8; comm.rank() * 3];
        let all = comm.exchange(&own)?;
        comm.agree("the plan", b"same")?;
        Ok(all)
    }) {
        assert!(ranks.into_iter().all(|all| all == (0..n).map(|r| vec![r as u8; r * 3]).collect::<Vec<_>>()));
    }
    let differ = |comm: Comm<Cpu>| comm.agree("the plan", &[u8::from(comm.rank() == 2)]);
    for outcome in Ranks::new(4).outcomes(cpu, differ).unwrap() {
        let text = outcome.unwrap_err().to_string();
        assert!(text.contains("the plan of rank 0 differs from that of rank 2"), "{text}");
    }
}

#[test]
fn parts_of_a_value_are_combined_before_they_are_read() {
    for (n, ranks) in worlds(|comm| {
        let part = Partial::new(Tensor::full(comm.runtime(), [1], DType::F32, comm.rank() as f64)?);
        let number = Partial::new(comm.rank() as f64).map(|x| x * 2.0);
        Ok((part.combine(&comm, ReduceOp::Sum)?.item()?, number.combine_on(&comm, ReduceOp::Max)?))
    }) {
        assert!(ranks.iter().all(|&r| r == ((n * (n - 1) / 2) as f64, 2.0 * (n - 1) as f64)));
    }
}

#[test]
fn a_world_of_one_gives_back_what_it_got() {
    let comm: Comm<Cpu> = Arc::new(NoOpCommunicator::new(&Cpu::with_threads(1)));
    let x = tensor(&comm, 6, DType::F32).unwrap();
    let same = host(comm.all_reduce(memory(&x).unwrap(), ReduceOp::Avg).unwrap().wait().unwrap()).unwrap();
    let out = TensorMut::alloc(comm.runtime(), Shape::new(&[2, 3]).unwrap(), DType::F32).unwrap();
    let gathered = comm.all_gather(&x, out).unwrap().wait().unwrap();
    assert_eq!(gathered.shape().dims(), [2, 3]);
    assert_eq!(host(gathered).unwrap(), same);
    let mem = || memory(&x).unwrap();
    let out = || empty(&comm, 6, DType::F32).unwrap();
    for (name, work) in [
        ("reduce", comm.reduce(mem(), ReduceOp::Max, 0)),
        ("broadcast", comm.broadcast(mem(), 0)),
        ("reduce_scatter", comm.reduce_scatter(&x, out(), ReduceOp::Avg)),
        ("reduce_scatter_in_place", comm.reduce_scatter_in_place(mem(), ReduceOp::Sum)),
        ("all_gather_in_place", comm.all_gather_in_place(mem())),
        ("all_to_all", comm.all_to_all(&x, out())),
        ("all_to_all_parts", comm.all_to_all_parts(&x, &[6], out(), &[6])),
    ] {
        assert_eq!(host(work.unwrap().wait().unwrap()).unwrap(), same, "{name}");
    }
    comm.barrier().unwrap();
    assert!(comm.send(&x, 0).is_err() && comm.recv(mem(), 0).is_err() && comm.broadcast(mem(), 1).is_err());
    assert_eq!(comm.split(Some(7), 0).unwrap().unwrap().size(), 1);
    assert_eq!(comm.exchange(b"ab").unwrap(), [b"ab"]);
}

#[test]
fn what_is_exchanged_is_counted() {
    for (n, ranks) in worlds(|comm| {
        let n = comm.size();
        let counted = CountingCommunicator::new(comm.clone());
        let x = tensor(&comm, 24 * n, DType::F32)?;
        let _ = counted.all_reduce(memory(&x)?, ReduceOp::Sum)?.wait()?;
        let shard = counted.reduce_scatter(&x, empty(&comm, 24, DType::F32)?, ReduceOp::Sum)?.wait()?.freeze()?;
        let _ = counted.all_gather(&shard, empty(&comm, 24 * n, DType::F32)?)?.wait()?;
        Ok((counted.of("all_reduce"), counted.of("reduce_scatter"), counted.of("all_gather"), counted.total().calls))
    }) {
        let bytes = (24 * n * 4) as u64;
        let share = bytes * (n as u64 - 1) / n as u64;
        for (reduced, scattered, gathered, calls) in ranks {
            assert_eq!((reduced.payload, reduced.sent), (bytes, 2 * share));
            assert_eq!((scattered.payload, scattered.sent), (bytes, share));
            assert_eq!((gathered.payload, gathered.sent), (bytes, share));
            assert_eq!(calls, 3);
        }
    }
}

#[test]
fn a_call_that_cannot_be_made_says_at_which_line_it_was() -> Result<()> {
    let rt = cpu(0)?;
    let comm = NoOpCommunicator::new(&rt);
    let x = Tensor::ones(&rt, [3], DType::F32)?;
    let errors = [
        (line!(), comm.broadcast(memory(&x)?, 3).map(drop).unwrap_err()),
        (line!(), comm.send(&x, 0).map(drop).unwrap_err()),
        (line!(), comm.all_gather(&x, memory(&x.narrow(0, 0, 2)?)?).map(drop).unwrap_err()),
        (line!(), comm.reduce_scatter_parts(&x, &[2], memory(&x)?, ReduceOp::Sum).map(drop).unwrap_err()),
    ];
    for (line, error) in errors {
        assert_eq!(error.location().map(|at| (at.file(), at.line())), Some((file!(), line)), "{error}");
    }
    Ok(())
}
