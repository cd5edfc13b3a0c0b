//! Errors name ranks of the world, whatever group a call was made in, and a world's outcome is the error of the rank where it began.

use crate::{
    pipeline_common::{checked, mlp_stages, pipeline},
    pipeline_faults::{FaultyStage, StageFault, batch, errors as faults, hooks},
    prelude::*,
};

const TIMEOUT: Duration = Duration::from_secs(20);

/// A group that is not the world, of 4 or 8 ranks.
type Split = fn(&Comm<Cpu>) -> Result<Comm<Cpu>>;

fn group(comm: &Comm<Cpu>, color: usize, key: usize) -> Result<Comm<Cpu>> {
    comm.split(Some(color), key)?.ok_or_else(|| Error::argument("test", "no group"))
}

/// By parity; by parity in reversed order; halves of halves, reversed; replicas of a pipeline of two.
const SPLITS: [Split; 4] = [
    |comm| group(comm, comm.rank() % 2, 0),
    |comm| group(comm, comm.rank() % 2, comm.size() - comm.rank()),
    |comm| {
        let half = group(comm, comm.rank() / (comm.size() / 2), 0)?;
        group(&half, half.rank() % 2, half.size() - half.rank())
    },
    |comm| Ok(PipelineGroups::new(comm, 2)?.pipe),
];

/// Every rank's error, in worlds of 4 and 8 ranks split in every way; rank `n - 2` is at fault.
fn errors(program: impl Fn(Comm<Cpu>, bool) -> Result<()> + Sync) -> Vec<(usize, Vec<Error>)> {
    let of = |(n, split): (usize, Split)| {
        let of_all = faults(n, |comm| {
            let group = split(&comm)?;
            program(group, comm.rank() == n - 2)?;
            comm.barrier()
        });
        (n, of_all)
    };
    worlds().map(of).collect()
}

/// Worlds whose groups have at least two ranks.
fn worlds() -> impl Iterator<Item = (usize, Split)> {
    let nested = 2;
    let fits = move |n| (0..SPLITS.len()).filter(move |&s| n == 8 || s != nested).map(move |s| (n, SPLITS[s]));
    [4, 8].into_iter().flat_map(fits)
}

/// Everyone's error names `peer`, and its own rank.
fn named(n: usize, errors: &[Error], peer: usize) {
    for (rank, error) in errors.iter().enumerate() {
        assert_eq!(error.rank(), Some(rank), "{n} ranks: {error}");
        if let ErrorKind::Peer { peer: named, .. } = error.kind() {
            assert_eq!(*named, peer, "{n} ranks, rank {rank}: {error}");
        } else {
            assert_eq!(rank, peer, "{n} ranks: only the rank itself has its own error: {error}");
        }
    }
}

#[test]
fn members_of_a_group_are_known_by_their_world_ranks() {
    let seen = Ranks::new(8).run(cpu, |comm| {
        assert_eq!(comm.members(), [0, 1, 2, 3, 4, 5, 6, 7]);
        let groups = SPLITS.iter().map(|split| split(&comm)).collect::<Result<Vec<_>>>()?;
        for group in &groups {
            assert_eq!((group.world_rank(), group.members()[group.rank()]), (comm.rank(), comm.rank()));
            assert_eq!(group.members().len(), group.size());
        }
        Ok(groups.iter().map(|group| group.members().to_vec()).collect::<Vec<_>>())
    });
    let seen = seen.unwrap();
    assert_eq!(seen[3], [vec![1, 3, 5, 7], vec![7, 5, 3, 1], vec![3, 1], vec![2, 3]]);
    assert_eq!(seen[6], [vec![0, 2, 4, 6], vec![6, 4, 2, 0], vec![6, 4], vec![6, 7]]);
    assert_eq!(NoOpCommunicator::new(&cpu(0).unwrap()).members(), [0]);
}

#[test]
fn an_abort_in_a_group_names_the_rank_of_the_world() {
    let program = |group: Comm<Cpu>, faulty: bool| {
        if faulty {
            group.abort("enough");
        }
        group.barrier()
    };
    for (n, errors) in errors(program) {
        named(n, &errors, n - 2);
    }
}

#[test]
fn a_rank_that_fails_or_panics_beside_its_group_is_named() {
    for panics in [false, true] {
        let program = |group: Comm<Cpu>, faulty: bool| match (faulty, panics) {
            (true, true) => panic!("a panic on purpose"),
            (true, false) => Err(Error::argument("test", "an error on purpose").on_rank(group.world_rank())),
            _ => group.barrier(),
        };
        for (n, errors) in errors(program) {
            named(n, &errors, n - 2);
        }
    }
}

#[test]
fn calls_that_differ_are_told_with_ranks_of_the_world() {
    let program = |group: Comm<Cpu>, faulty: bool| {
        let x = TensorMut::zeros(group.runtime(), [if faulty { 7 } else { 5 }].into(), DType::F32)?;
        group.broadcast(x, 1)?.wait().map(|_| ())
    };
    for (n, errors) in errors(program) {
        for error in errors {
            let ErrorKind::Mismatch { why, .. } = error.kind() else { panic!("{error}") };
            let (sides, calls) = why.split_once("\nlast calls:").unwrap();
            let side = sides.split("rank ").find(|side| side.contains("f32[7]")).unwrap();
            assert!(side.starts_with(&format!("{} ", n - 2)), "{n} ranks: {sides}");
            // Roots too: which rank 1 of the group is.
            let roots: Vec<&str> = sides.split("(root ").skip(1).map(|s| &s[..1]).collect();
            assert!(roots.len() == 2 && roots[0] == roots[1], "{sides}");
            let line = calls.lines().find(|l| l.starts_with(&format!("  rank {}:", n - 2))).unwrap();
            assert!(line.contains(" of ranks [") && line.contains(&format!("(root {})", roots[0])), "{line}");
        }
    }
}

#[test]
fn parts_and_transfers_that_do_not_fit_are_told_with_ranks_of_the_world() {
    let outcomes = Ranks::new(4).timeout(TIMEOUT).outcomes(cpu, |comm| {
        let group = group(&comm, comm.rank() % 2, 0)?;
        let x = Tensor::zeros(group.runtime(), [4], DType::F32)?;
        let recv = if comm.rank() == 1 { [1, 2] } else { [2, 2] };
        let send = if comm.rank() == 1 { [1, 3] } else { [2, 2] };
        let out = TensorMut::zeros(group.runtime(), [recv.iter().sum()].into(), DType::F32)?;
        group.all_to_all_parts(&x, &send, out, &recv)?.wait()?;
        comm.barrier()
    });
    refused(outcomes.unwrap(), &["rank 1 sends 3 elements to rank 3, which expects 2"]);
    let outcomes = Ranks::new(4).timeout(TIMEOUT).outcomes(cpu, |comm| {
        let group = group(&comm, comm.rank() % 2, 0)?;
        let numel = if comm.rank() == 3 { 4 } else { 3 };
        match group.rank() {
            0 => group.send(&Tensor::zeros(group.runtime(), [3], DType::F32)?, 1)?.wait()?,
            _ => drop(group.recv(TensorMut::zeros(group.runtime(), [numel].into(), DType::F32)?, 0)?.wait()?),
        }
        comm.barrier()
    });
    refused(outcomes.unwrap(), &["send(to 3) f32[3]", "recv(from 1) f32[4]"]);
}

#[test]
fn a_rank_that_is_late_or_has_left_is_named_by_its_rank_in_the_world() {
    for (n, split) in worlds() {
        // The late rank calls once the others have ended, however long that takes on a busy machine.
        let ended = Barrier::new(n);
        let late = Ranks::new(n).timeout(Duration::from_secs(1)).outcomes(cpu, |comm| {
            let group = split(&comm);
            let meet = || group.map(|group| (group.members().contains(&(n - 2)), group.barrier()));
            if comm.rank() == n - 2 {
                ended.wait();
                return meet();
            }
            let met = meet();
            ended.wait();
            met
        });
        for (rank, outcome) in late.unwrap().into_iter().enumerate() {
            let (waits, outcome) = outcome.unwrap();
            // Other groups may have met before the time was up.
            let Err(error) = outcome else {
                assert!(!waits, "rank {rank} of {n} saw nothing");
                continue;
            };
            let ErrorKind::Timeout { missing, .. } = error.kind() else { panic!("{error}") };
            assert_eq!(missing, &[n - 2], "{error}");
        }
    }
    let outcomes = Ranks::new(4).timeout(TIMEOUT).outcomes(cpu, |comm| {
        let group = group(&comm, comm.rank() % 2, 0)?;
        if comm.rank() == 2 { Ok(()) } else { group.barrier().and_then(|()| comm.barrier()) }
    });
    for (rank, outcome) in outcomes.unwrap().into_iter().enumerate().filter(|(rank, _)| *rank != 2) {
        let error = outcome.unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Peer { peer: 2, .. }), "rank {rank}: {error}");
    }
}

#[test]
fn disagreements_name_ranks_of_the_world() {
    let program = |group: Comm<Cpu>, faulty: bool| group.agree("the model", &[faulty.into()]);
    for (n, errors) in errors(program) {
        let told = errors.iter().find(|e| matches!(e.kind(), ErrorKind::Mismatch { op: "agree", .. })).unwrap();
        let text = told.to_string();
        assert!([" ", ","].iter().any(|end| text.contains(&format!("rank {}{end}", n - 2))), "{text}");
        assert!(told.rank().is_some_and(|rank| rank % 2 == 0 || n - 1 == rank), "{text}");
    }
    // Whom the schedule does not fit, and a root that a group has not.
    let outcomes = Ranks::new(4).timeout(TIMEOUT).outcomes(cpu, |comm| {
        let group = group(&comm, comm.rank() % 2, 0)?;
        let refused = group.broadcast(TensorMut::zeros(group.runtime(), [1].into(), DType::F32)?, 2).unwrap_err();
        assert_eq!(refused.rank(), Some(comm.rank()));
        let mesh = Mesh::new(&comm, ParallelPlan::new(4, [(Axis::Data, 2), (Axis::Pipe, 2)])?)?;
        PipelineGroups::new(&mesh, 4).map(|_| ())
    });
    refused(outcomes.unwrap(), &["the schedule is for 4 ranks"]);
}

#[test]
fn a_stage_that_fails_in_one_replica_is_named_on_all_ranks_of_all_replicas() {
    let checked = checked(ScheduleKind::OneFOneB, 2, 1, 4).unwrap();
    for (n, fault, at) in [(4, StageFault::Error, 2), (8, StageFault::Panic, 0), (6, StageFault::Shape, 1)] {
        for stage in [0, 1] {
            let own = n - 2 + stage;
            let program = |comm: Comm<Cpu>| {
                let groups = PipelineGroups::new(&comm, 2)?;
                let mut stages = mlp_stages(comm.runtime(), 2, 2);
                if comm.rank() == own {
                    let inner = stages.remove(stage);
                    stages.insert(stage, Box::new(FaultyStage { inner, fault, at, calls: Default::default() }));
                }
                let mut pipeline = pipeline(&groups.pipe, &checked, stages)?;
                let mut hooks = hooks(&pipeline);
                for _ in 0..2 {
                    pipeline.run(batch(&comm, 4)?, &mut hooks)?;
                }
                comm.barrier()
            };
            let errors = faults(n, program);
            named(n, &errors, own);
            // The world's outcome is the error of the rank where it began.
            let error = Ranks::new(n).timeout(TIMEOUT).run(cpu, program).unwrap_err();
            assert_eq!(error.rank(), Some(own), "{error}");
        }
    }
}

/// Nothing to save but a file of its own.
struct Nothing;

impl Checkpointed<Cpu> for Nothing {
    fn parts(&self) -> Result<Vec<CheckpointPart<Cpu>>> {
        Ok(Vec::new())
    }
    fn numbers(&self) -> BTreeMap<String, u64> {
        BTreeMap::new()
    }
    fn wanted(&self) -> Result<Vec<Wanted>> {
        Ok(Vec::new())
    }
    fn check_restore(&mut self, _: &BTreeMap<String, u64>) -> Result<()> {
        Ok(())
    }
    fn restore(&mut self, _: &mut dyn FnMut(&Wanted) -> Result<Tensor<Cpu>>, _: &BTreeMap<String, u64>) -> Result<()> {
        Ok(())
    }
}

#[test]
fn what_a_group_finds_is_told_outside_of_it_with_the_rank_where_it_began() {
    let scratch = Scratch::new("world-ranks");
    // Ranks 1 and 3 save together, and rank 3 cannot; ranks 0 and 2 wait in the world.
    let program = |comm: Comm<Cpu>| -> Result<()> {
        let group = group(&comm, comm.rank() % 2, 0)?;
        if comm.rank() % 2 == 1 {
            let full = move || Err(Error::argument("test", "the disk is full"));
            let of = comm.rank();
            let folder = scratch.folder().watched(move |_| if of == 3 { full() } else { Ok(()) });
            folder.save(&group, 1, &Nothing, &BTreeMap::new())?;
        }
        comm.barrier()
    };
    let errors = faults(4, program);
    named(4, &errors, 3);
    assert!(errors.iter().all(|e| e.to_string().matches("the disk is full").count() == 1), "{errors:?}");
    let error = Ranks::new(4).timeout(TIMEOUT).run(cpu, program).unwrap_err();
    assert!(error.rank() == Some(3) && error.to_string().contains("the disk is full"), "{error}");
}

/// The group goes before the world hears of the error, so those who wait in it meet a rank that has left: they are told why it has.
#[test]
fn a_rank_that_leaves_a_group_by_an_error_is_named_with_it() {
    let program = |comm: Comm<Cpu>| -> Result<()> {
        let group = group(&comm, 0, comm.rank())?;
        if comm.rank() == 2 {
            return Err(Error::argument("test", "no more of it"));
        }
        group.barrier()
    };
    let errors = faults(3, program);
    assert!(errors.iter().all(|e| e.to_string().matches("no more of it").count() == 1), "{errors:?}");
    let others = errors[..2].iter().map(Error::to_string);
    assert!(others.into_iter().all(|e| e.contains("rank 2 failed") && e.contains("last calls:")), "{errors:?}");
}
