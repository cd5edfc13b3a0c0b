//! Every collective in every type, and of megabytes.

use crate::collectives::*;
use comm::{Collectives, Comm, Communicator, Ranks, ReduceOp, Work};
use numcore::{
    DType, Result, Tensor, TensorMut,
    ops::{PointwiseOps, ReduceOps, ViewOps},
};
use runtime_cpu::Cpu;

#[test]
fn halves_are_combined_in_f32() {
    // One more than these is the same again; one rounding at the end makes 7 more of it.
    for (dtype, big) in [(DType::F16, 2048.0), (DType::BF16, 256.0)] {
        let sums = Ranks::new(8).run(cpu, |comm| {
            let own = if comm.rank() == 0 { big } else { 1.0 };
            let x = |numel| Tensor::full(comm.runtime(), [numel], dtype, own);
            let mut sums = host(comm.all_reduce(memory(&x(3)?)?, ReduceOp::Sum)?.wait()?)?;
            // What others than the root have of it is arbitrary.
            for root in 0..8 {
                let sum = comm.reduce(memory(&x(1)?)?, ReduceOp::Sum, root)?.wait()?;
                sums.extend(if root == comm.rank() { host(sum)? } else { vec![] });
            }
            let part = comm.reduce_scatter(&x(8)?, empty(&comm, 1, dtype)?, ReduceOp::Sum)?.wait()?;
            sums.extend(host(part)?);
            let all = host(comm.reduce_scatter_in_place(memory(&x(8)?)?, ReduceOp::Sum)?.wait()?)?;
            sums.push(all[comm.rank()]);
            Ok(sums)
        });
        assert_eq!(sums.unwrap(), vec![vec![held(big + 7.0, dtype); 6]; 8]);
        assert_ne!(held(big + 7.0, dtype), big);
    }
}

/// Elements of a part below.
const K: usize = 5;

/// What a rank gets of every collective but `all_reduce`.
fn one_of_each(comm: &Comm<Cpu>, dtype: DType) -> Result<Vec<(&'static str, Vec<f64>)>> {
    let (n, rank) = (comm.size(), comm.rank());
    let (x, part, parts) = (tensor(comm, K * n, dtype)?, tensor(comm, K, dtype)?, vec![K; n]);
    let (one, all) = (|| empty(comm, K, dtype), || empty(comm, K * n, dtype));
    let done = |work: Work<TensorMut<Cpu>>| host(work.wait()?);
    let sum = ReduceOp::Sum;
    let mut got = vec![
        ("broadcast", done(comm.broadcast(memory(&part)?, n - 1)?)?),
        ("reduce", done(comm.reduce(memory(&part)?, sum, n - 1)?)?),
        ("reduce_scatter", done(comm.reduce_scatter(&x, one()?, sum)?)?),
        ("reduce_scatter", done(comm.reduce_scatter_parts(&x, &parts, one()?, sum)?)?),
        ("reduce_scatter", done(comm.reduce_scatter_in_place(memory(&x)?, sum)?)?[K * rank..][..K].to_vec()),
        ("all_gather", done(comm.all_gather(&part, all()?)?)?),
        ("all_gather", done(comm.all_gather_parts(&part, &parts, all()?)?)?),
        ("all_gather in place", done(comm.all_gather_in_place(memory(&x)?)?)?),
        ("all_to_all", done(comm.all_to_all(&x, all()?)?)?),
        ("all_to_all", done(comm.all_to_all_parts(&x, &parts, all()?, &parts)?)?),
    ];
    if rank != n - 1 {
        got.remove(1);
    }
    if n > 1 {
        let (sent, arrives) = ring(comm, &part, one()?)?;
        got.push(("recv", done(arrives)?));
        sent.wait()?;
    }
    Ok(got)
}

/// Collectives that only move bytes take the types that are not computed in.
#[test]
fn eight_bit_floats_are_moved() {
    for (n, ranks) in worlds(|comm| {
        let own = Tensor::full(comm.runtime(), [K], DType::F8E5M2, comm.rank())?;
        let refused = comm.reduce(memory(&own)?, ReduceOp::Max, 0).unwrap_err().to_string();
        assert!(refused.contains("f8e5m2") && refused.contains("cast it first"), "{refused}");
        comm.all_gather(&own, empty(&comm, K * comm.size(), DType::F8E5M2)?)?.wait()?.freeze()?.to_f64s()
    }) {
        let expected: Vec<f64> = (0..n).flat_map(|rank| [rank as f64; K]).collect();
        assert!(ranks.iter().all(|got| *got == expected), "{ranks:?}");
    }
}

#[test]
fn every_collective_in_every_type() {
    for (n, ranks) in worlds(|comm| {
        let computed = DType::ALL.into_iter().filter(|d| !d.is_storage());
        computed.map(|d| Ok((d, one_of_each(&comm, d)?))).collect::<Result<Vec<_>>>()
    }) {
        for (rank, types) in ranks.into_iter().enumerate() {
            for (dtype, got) in types {
                let truth = dtype == DType::Bool;
                let value = |r, i| if truth { f64::from(value(r, i) != 0.0) } else { value(r, i) };
                let combined = |i| held(combined(ReduceOp::Sum, n, i, truth), dtype);
                for (name, values) in got {
                    let expected = |i: usize| match name {
                        "broadcast" => value(n - 1, i),
                        "reduce" => combined(i),
                        "reduce_scatter" => combined(K * rank + i),
                        "all_gather" => value(i / K, i % K),
                        "all_gather in place" => value(i / K, i),
                        "all_to_all" => value(i / K, K * rank + i % K),
                        _ => value((rank + n - 1) % n, i),
                    };
                    let whole = name.starts_with("all_");
                    let expected: Vec<f64> = (0..if whole { K * n } else { K }).map(expected).collect();
                    assert_eq!(values, expected, "{name} of {dtype} on rank {rank} of {n}");
                }
            }
        }
    }
}

#[test]
fn megabytes_are_as_bytes() {
    const NUMEL: usize = 1_500_003;
    let sums = Ranks::new(3).run(cpu, |comm| {
        let index = Tensor::arange(comm.runtime(), 0, 1, NUMEL, DType::F32)?;
        let sum = comm.all_reduce(memory(&index.add(comm.rank() as f64)?)?, ReduceOp::Sum)?;
        let all = comm.all_gather(&index, empty(&comm, 3 * NUMEL, DType::F32)?)?.wait()?.freeze()?;
        let off = |a: &Tensor<Cpu>, b: &Tensor<Cpu>| a.sub(b)?.square()?.sum_all()?.item();
        let mut wrong = vec![off(&sum.wait()?.freeze()?, &index.mul(3.0)?.add(3.0)?)?];
        for rank in 0..3 {
            wrong.push(off(&all.narrow(0, rank * NUMEL, NUMEL)?, &index)?);
        }
        Ok(wrong)
    });
    // Every sum is below 2^24: exact.
    assert_eq!(sums.unwrap(), vec![vec![0.0; 4]; 3]);
}
