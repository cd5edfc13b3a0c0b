//! What is NCCL's alone.

use std::{sync::Arc, time::Duration};

use comm::{Collectives, Comm, ErrorTiming, NoOpCommunicator, ReduceOp, SumOrder};
use engine_nccl::Nccl;
use numcore::{DType, ErrorKind, Result, Tensor};
use runtime_cpu::Cpu;

use crate::{
    Ranks,
    collectives::{WORLDS, combined, cpu, host, memory, ring, tensor, value},
    start::over,
};

/// Values whose sum depends on the order of additions.
fn rough(comm: &Comm<Cpu>, numel: usize) -> Result<Tensor<Cpu>> {
    Tensor::normal(comm.runtime(), [numel], DType::F32, 0.0, 1.0, 7 + comm.rank() as u64)
}

#[test]
fn sums_have_the_bits_of_threads_in_chunks_of_any_size() {
    let program = |comm: Comm<Cpu>| {
        let x = rough(&comm, 10_001)?;
        comm.all_reduce(memory(&x)?, ReduceOp::Sum)?.wait()?.freeze()?.to_vec::<f32>()
    };
    for n in WORLDS {
        let threads = Ranks::new(n).threads();
        let expected = threads.run(cpu, program).unwrap();
        for chunk in [1 << 8, 1 << 12, 1 << 24] {
            let nccl = Nccl::emulated().chunk(chunk);
            assert_eq!(threads.run(cpu, over(&nccl, cpu, program)).unwrap(), expected, "{n}, {chunk}");
        }
    }
}

#[test]
fn native_sums_are_the_librarys_own() {
    for n in WORLDS {
        let (ranks, nccl) = (Ranks::new(n).threads(), Nccl::emulated().native_sums(true));
        let program = |comm: Comm<Cpu>| {
            let (n, rank) = (comm.size(), comm.rank());
            let mut all = Vec::new();
            for dtype in DType::ALL.into_iter().filter(|d| !d.is_storage()) {
                let x = tensor(&comm, 6 * n, dtype)?;
                all.push((dtype, host(comm.all_reduce(memory(&x)?, ReduceOp::Sum)?.wait()?)?));
                // The library would divide whole numbers without their remainder, which no other engine does.
                match comm.all_reduce(memory(&x)?, ReduceOp::Avg) {
                    Ok(mean) => assert!(dtype.is_float() && mean.wait()?.dtype() == dtype),
                    Err(error) => assert!(!dtype.is_float() && error.to_string().contains("average"), "{error}"),
                }
            }
            let x = tensor(&comm, 6 * n, DType::F32)?;
            let part = || tensor(&comm, 6, DType::F32).and_then(|part| memory(&part));
            let own = comm.reduce_scatter(&x, part()?, ReduceOp::Max)?.wait()?;
            let in_place = comm.reduce_scatter_in_place(memory(&x)?, ReduceOp::Max)?.wait()?;
            let to_last = comm.reduce(memory(&x)?, ReduceOp::Avg, n - 1)?.wait()?;
            let (own, in_place, to_last) = (host(own)?, host(in_place)?, host(to_last)?);
            assert_eq!(own, in_place[6 * rank..][..6]);
            Ok((all, own, (rank == n - 1).then_some(to_last)))
        };
        for (rank, (all, own, to_last)) in ranks.run(cpu, over(&nccl, cpu, program)).unwrap().into_iter().enumerate() {
            for (dtype, sums) in all {
                let expected = |i| combined(ReduceOp::Sum, n, i, dtype == DType::Bool);
                assert_eq!(sums, (0..6 * n).map(expected).collect::<Vec<_>>(), "{dtype}");
            }
            assert_eq!(own, (0..6).map(|i| combined(ReduceOp::Max, n, 6 * rank + i, false)).collect::<Vec<_>>());
            if let Some(means) = to_last {
                let expected = |i| f64::from(combined(ReduceOp::Sum, n, i, false) as f32 / n as f32);
                assert_eq!(means, (0..6 * n).map(expected).collect::<Vec<_>>());
            }
        }
    }
}

#[test]
fn what_is_promised_follows_from_who_adds_up() {
    for native in [false, true] {
        let nccl = Nccl::emulated().native_sums(native);
        let program = |comm: Comm<Cpu>| Ok(comm.guarantees());
        for promised in Ranks::new(2).threads().run(cpu, over(&nccl, cpu, program)).unwrap() {
            let order = if native { SumOrder::Fixed } else { SumOrder::RankOrder };
            assert_eq!((promised.order, promised.by_layout, promised.nan_wins), (order, native, !native));
            assert_eq!((promised.independent_transfers, promised.errors), (false, ErrorTiming::AfterWait));
        }
    }
}

#[test]
fn an_error_of_the_library_is_told_to_all_with_its_words() {
    // Wherever it comes: in a collective, a transfer, a split's group.
    for after in 0..12 {
        let (ranks, nccl) = (Ranks::new(3).timeout(Duration::from_secs(20)), Nccl::emulated_failing_after(after));
        let program = |comm: Comm<Cpu>| {
            for _ in 0..3 {
                let x = tensor(&comm, 100, DType::F32)?;
                comm.all_reduce(memory(&x)?, ReduceOp::Sum)?.wait()?;
                let (sent, got) = ring(&comm, &x, memory(&x)?)?;
                sent.wait()?;
                got.wait()?;
                let part = comm.split(Some(0), comm.rank())?.expect("all have a color");
                part.broadcast(memory(&x)?, 1)?.wait()?;
            }
            comm.barrier()
        };
        for outcome in ranks.threads().outcomes(cpu, over(&nccl, cpu, program)).unwrap() {
            let error = outcome.unwrap_err().to_string();
            assert!(error.contains("network error (ncclResult_t 6)"), "{after}: {error}");
        }
    }
}

#[test]
fn ranks_with_other_options_are_refused_on_all() {
    let outcomes = Ranks::new(3).threads().outcomes(cpu, |control| {
        let nccl = Nccl::emulated().chunk(1 << (10 + control.rank() / 2));
        nccl.communicator(&control, control.runtime()).map(|_| ())
    });
    for (rank, outcome) in outcomes.unwrap().into_iter().enumerate() {
        let error = outcome.unwrap_err();
        let text = error.to_string();
        assert!(text.contains("rank 2 with") && text.contains("chunk(2048)"), "{text}");
        assert_eq!(error.rank(), Some(rank));
    }
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let ranks = Ranks::new(3).timeout(Duration::from_millis(200)).threads();
    let nccl = Nccl::emulated();
    let outcomes = ranks.outcomes(cpu, |control| {
        if control.rank() == 1 {
            std::thread::sleep(Duration::from_millis(600));
        }
        nccl.communicator(&control, control.runtime()).map(|_| ())
    });
    for outcome in outcomes.unwrap() {
        let error = outcome.unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Timeout { missing, .. } if missing == &[1]), "{error}");
    }
}

#[test]
fn without_the_library_an_error_has_the_names_that_were_tried() {
    // A machine that has it is as good: what is loaded has a version.
    match Nccl::load() {
        Ok(nccl) => assert!(nccl.version().starts_with("2."), "{nccl:?}"),
        Err(error) => {
            let text = error.to_string();
            assert!(
                text.contains("libnccl.so.2: ")
                    && text.contains("libnccl.so: ")
                    && text.contains("WEFTGRAD_NCCL_LIBRARY"),
                "{text}"
            );
        }
    }
}

#[test]
fn a_world_of_one_needs_no_other_rank() {
    let control: Comm<Cpu> = Arc::new(NoOpCommunicator::new(&Cpu::with_threads(1)));
    let comm = Nccl::emulated().communicator(&control, control.runtime()).unwrap();
    let x = tensor(&comm, 10, DType::F32).unwrap();
    let got = comm.all_reduce(memory(&x).unwrap(), ReduceOp::Avg).unwrap().done().unwrap();
    assert_eq!(host(got).unwrap(), (0..10).map(|i| value(0, i)).collect::<Vec<_>>());
}
