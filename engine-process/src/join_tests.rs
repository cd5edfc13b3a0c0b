//! Tests of newcomers to a running job, with threads as processes.

use std::{
    env, fs,
    net::SocketAddr,
    path::PathBuf,
    process,
    sync::{Arc, Barrier},
    thread,
    time::{Duration, Instant},
};

use comm::{Collectives, Comm, Communicator, Deadlines, Membership, Quorum, Rendezvous};
use numcore::{NullRuntime, Result};

use crate::{
    Processes, Tcp,
    rendezvous::{ProcessRendezvous, Word},
    tcp::OpenTransport,
    tests::{LONG, free, within},
};

/// The time that ranks of a job wait for each other.
const WHILE: Duration = Duration::from_secs(4);

/// The two addresses of a job, and the deadlines of its calls.
#[derive(Clone, Copy)]
struct Job([SocketAddr; 2], Deadlines);

type Worlds = ProcessRendezvous<NullRuntime>;

impl Job {
    fn new() -> Job {
        Job([free(), free()], Deadlines::default())
    }

    /// The folder of the files by which ranks say that they are in the run, if a test makes it.
    fn folder(self) -> PathBuf {
        env::temp_dir().join(format!("weftgrad-join-{}-{}", process::id(), self.0[1].port()))
    }

    /// A process of the job with a rank, or a newcomer.
    fn process(self, rank: Option<usize>, size: usize) -> Result<Worlds> {
        self.process_within(rank, size, LONG)
    }

    fn process_within(self, rank: Option<usize>, size: usize, most: Duration) -> Result<Worlds> {
        self.process_with(rank, size, most, WHILE)
    }

    /// A process with its time to join, and the time that ranks of the job wait for each other.
    fn process_with(self, rank: Option<usize>, size: usize, most: Duration, each: Duration) -> Result<Worlds> {
        let [at, join] = self.0;
        let get = |name: &str| match name {
            "MASTER_ADDR" => Some(at.ip().to_string()),
            "MASTER_PORT" => Some(at.port().to_string()),
            "WEFTGRAD_JOIN_ADDRESS" => Some(join.to_string()),
            "WEFTGRAD_NEWCOMER" => rank.is_none().then(|| "1".into()),
            "RANK" | "LOCAL_RANK" => Some(rank.unwrap_or(0).to_string()),
            "WORLD_SIZE" => Some(size.to_string()),
            "WEFTGRAD_MEMBER_FILE" if self.folder().exists() => {
                rank.map(|rank| self.folder().join(rank.to_string()).display().to_string())
            }
            _ => None,
        };
        let processes = Tcp::from_lookup(get)?.join_timeout(most).join()?.timeout(self.1);
        let quorum = Quorum { join_timeout: each, ..Quorum::default() };
        Arc::new(processes).rendezvous(NullRuntime::new(), quorum)
    }
}

/// Exchanges until a newcomer waits, as commits do.
fn until_one_waits(worlds: &Worlds, world: &Membership<NullRuntime>) -> Result<()> {
    let begun = Instant::now();
    while begun.elapsed() < LONG {
        let all = world.comm.exchange_equal([u8::from(worlds.newcomers() > 0)])?;
        if all.iter().any(|[waits]| *waits != 0) {
            return Ok(());
        }
        thread::sleep(Duration::from_millis(5));
    }
    panic!("nobody came");
}

/// Every process calls from here.
fn barrier(comm: &Comm<NullRuntime>) -> Result<()> {
    comm.barrier()
}

/// The rank of a process in a world, the world's size, its number, and the number of its newcomers.
fn place(world: &Membership<NullRuntime>) -> Result<[usize; 4]> {
    barrier(&world.comm)?;
    Ok([world.comm.rank(), world.comm.size(), world.generation as usize, world.newcomers])
}

#[test]
fn newcomers_are_in_the_next_world_behind_the_ranks_of_the_last() {
    for ranks in 1..4 {
        let (job, both) = (Job::new(), &Barrier::new(2 + ranks));
        let run = |rank| {
            let mut worlds = job.process(rank, ranks)?;
            let mut world = worlds.next_world()?;
            let mut places = Vec::new();
            if rank.is_some() {
                places.push(place(&world)?);
                worlds.committed();
                until_one_waits(&worlds, &world)?;
                world = worlds.next_world()?;
            }
            // The second one may be of the next world.
            while world.comm.size() < ranks + 2 {
                places.push(place(&world)?);
                until_one_waits(&worlds, &world)?;
                world = worlds.next_world()?;
            }
            assert!(world.committed);
            places.push(place(&world)?);
            both.wait();
            Ok(places)
        };
        let all: Vec<Result<Vec<[usize; 4]>>> = thread::scope(|scope| {
            let seats = (0..ranks).map(Some).chain([None, None]);
            let threads: Vec<_> = seats.map(|rank| scope.spawn(move || run(rank))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let mut last: Vec<usize> = Vec::new();
        for (seat, places) in all.into_iter().enumerate() {
            let places = places.unwrap_or_else(|error| panic!("{seat}: {error}"));
            let [rank, size, generation, newcomers] = *places.last().unwrap();
            assert!(size == ranks + 2 && generation + newcomers == 3, "{places:?}");
            assert!(seat >= ranks || places.iter().all(|place| place[0] == seat), "{places:?}");
            assert!(seat >= ranks || places[0] == [seat, ranks, 0, 0], "{places:?}");
            last.push(rank);
        }
        last.sort_unstable();
        assert_eq!(last, (0..ranks + 2).collect::<Vec<_>>());
    }
}

#[test]
fn calls_with_newcomers_are_the_first_of_their_kind_on_all_ranks() {
    let (call, first) = (WHILE / 4, LONG);
    let job = Job(Job::new().0, Deadlines { call, first });
    let all: Vec<Result<()>> = thread::scope(|scope| {
        let run = |rank: Option<usize>| {
            let mut worlds = job.process(rank, 2)?;
            let mut world = worlds.next_world()?;
            if rank.is_some() {
                (0..2).try_for_each(|_| barrier(&world.comm))?;
                until_one_waits(&worlds, &world)?;
                world = worlds.next_world()?;
            } else {
                thread::sleep(2 * call); // It compiles kernels.
            }
            barrier(&world.comm)
        };
        let threads = [Some(0), Some(1), None].map(|rank| scope.spawn(move || run(rank)));
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    all.into_iter().for_each(|outcome| outcome.unwrap());
}

#[test]
fn ranks_and_newcomers_are_lost_and_the_rest_go_on() {
    let (job, ends) = (Job::new(), &Barrier::new(2));
    let all: Vec<Result<[usize; 4]>> = thread::scope(|scope| {
        let rank = |rank: usize| {
            let mut worlds = job.process(Some(rank), 3)?;
            let world = worlds.next_world()?;
            until_one_waits(&worlds, &world)?;
            let world = worlds.next_world()?;
            assert_eq!(place(&world)?, [rank, 4, 1, 1]);
            // Rank 0 listens for newcomers: another does after it.
            if rank == 0 {
                return Ok([0; 4]);
            }
            world.comm.barrier().unwrap_err();
            let world = worlds.next_world()?;
            assert_eq!(place(&world)?, [rank - 1, 2, 2, 0]);
            until_one_waits(&worlds, &world)?;
            let world = worlds.next_world()?;
            let place = place(&world)?;
            ends.wait();
            Ok(place)
        };
        let mut threads: Vec<_> = (0..3).map(|of| scope.spawn(move || rank(of))).collect();
        threads.push(scope.spawn(|| {
            let mut worlds = job.process(None, 3)?;
            let place = place(&worlds.next_world()?)?;
            drop(worlds);
            let mut worlds = job.process(None, 3)?;
            assert_eq!(self::place(&worlds.next_world()?)?, [2, 3, 3, 1]);
            Ok(place)
        }));
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let all: Vec<[usize; 4]> = all.into_iter().map(|place| place.unwrap()).collect();
    assert_eq!(all, [[0; 4], [0, 3, 3, 1], [1, 3, 3, 1], [3, 4, 1, 1]]);
}

#[test]
fn one_that_does_not_come_to_a_meeting_is_left_out_of_it() {
    let job = Job::new();
    let all: Vec<Result<[usize; 4]>> = thread::scope(|scope| {
        let rank = |rank: usize| {
            let mut worlds = job.process(Some(rank), 3)?;
            let world = worlds.next_world()?;
            until_one_waits(&worlds, &world)?;
            if rank == 2 {
                // The others are in their meeting by then, or about to be.
                let _ = Word::default().tell(&worlds.processes.recover_within(&NullRuntime::new(), within(LONG))?);
                return Ok([0; 4]);
            }
            let world = worlds.next_world()?;
            if world.newcomers == 0 {
                assert_eq!(place(&world)?, [rank, 2, 1, 0]);
                until_one_waits(&worlds, &world)?;
                return place(&worlds.next_world()?);
            }
            place(&world)
        };
        let mut threads: Vec<_> = (0..3).map(|of| scope.spawn(move || rank(of))).collect();
        threads.push(scope.spawn(|| place(&job.process(None, 3)?.next_world()?)));
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let all: Vec<[usize; 4]> = all.into_iter().map(|place| place.unwrap()).collect();
    assert_eq!(all, [[0, 3, 2, 1], [1, 3, 2, 1], [0; 4], [2, 3, 2, 1]]);
}

/// Meets newcomers as rank 2 of three, once all have heard of them.
fn meet_by_hand(worlds: &Worlds) -> Result<OpenTransport> {
    let met = worlds.processes.recover_within(&NullRuntime::new(), within(LONG))?;
    Word::of(worlds.run, worlds.is_host).tell(&met)?;
    let at = worlds.processes.join_address.clone().expect("an address");
    Ok(at.meet((2, 3), None, LONG, &|| Ok(()))?.0)
}

/// Runs three ranks of a job, the last of which does `last` once a newcomer waits, and a newcomer.
fn with_a_newcomer<T: Send>(
    last: impl Fn(Worlds) -> Result<T> + Sync,
    others: impl Fn(Worlds) -> Result<T> + Sync,
    newcomer: impl Fn(Worlds) -> Result<T> + Sync,
) -> Vec<T> {
    let (job, last, others, newcomer) = (Job::new(), &last, &others, &newcomer);
    let rank = |rank: Option<usize>| {
        let mut worlds = job.process(rank, 3)?;
        if rank.is_none() {
            return newcomer(worlds);
        }
        let world = worlds.next_world()?;
        until_one_waits(&worlds, &world)?;
        if rank == Some(2) { last(worlds) } else { others(worlds) }
    };
    let all: Vec<Result<T>> = thread::scope(|scope| {
        let seats = [Some(0), Some(1), Some(2), None];
        let threads = seats.map(|seat| scope.spawn(move || rank(seat)));
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    all.into_iter().map(|outcome| outcome.unwrap_or_else(|error| panic!("{error}"))).collect()
}

#[test]
fn nobody_goes_on_with_newcomers_if_one_has_not_entered() {
    let stays = |mut worlds: Worlds| {
        let world = worlds.next_world()?;
        assert_eq!(place(&world)?[1..], [3, 1, 0]);
        place(&world)
    };
    let all = with_a_newcomer(
        |worlds| {
            drop(meet_by_hand(&worlds)?);
            stays(worlds)
        },
        stays,
        // It is refused, as all others have left it.
        |mut worlds| {
            assert!(worlds.next_world().unwrap_err().to_string().contains("has ended"));
            Ok([0; 4])
        },
    );
    assert_eq!(all, [[0, 3, 1, 0], [1, 3, 1, 0], [2, 3, 1, 0], [0; 4]]);
}

#[test]
fn one_that_does_not_know_whether_all_have_entered_follows_those_that_do() {
    let again = |mut worlds: Worlds| {
        let world = worlds.next_world()?;
        assert_eq!(place(&world)?[1..], [4, 1, 1]);
        world.comm.barrier().unwrap_err();
        place(&worlds.next_world()?)
    };
    let all = with_a_newcomer(
        |mut worlds| {
            let met = Processes::over(meet_by_hand(&worlds)?)?.configured_as(&worlds.processes);
            let met = Arc::new(met);
            let world = met.world(&NullRuntime::new())?;
            Word::of(worlds.run, worlds.is_host).tell(&world)?;
            let world = met.world(&NullRuntime::new())?;
            barrier(&world)?;
            // The others may not have seen its end.
            thread::sleep(Duration::from_millis(200));
            world.abort("a rank has died");
            worlds.entered = Some(met);
            place(&worlds.next_world()?)
        },
        again,
        again,
    );
    assert_eq!(all, [[0, 4, 2, 0], [1, 4, 2, 0], [2, 4, 2, 0], [3, 4, 2, 0]]);
}

#[test]
fn a_newcomer_that_does_not_call_for_long_is_left_out() {
    for slow in [WHILE * 3, WHILE * 3 / 4] {
        let goes_on = |mut worlds: Worlds| {
            let world = worlds.next_world()?;
            assert_eq!(place(&world)?[1..], [3, 1, 0]);
            place(&world)
        };
        let all = with_a_newcomer(goes_on, goes_on, |mut worlds| {
            thread::sleep(slow);
            worlds.next_world().unwrap_err();
            Ok([0; 4])
        });
        assert_eq!(all, [[0, 3, 1, 0], [1, 3, 1, 0], [2, 3, 1, 0], [0; 4]]);
    }
}

#[test]
fn the_first_rank_on_the_host_of_the_address_takes_newcomers_in() {
    let job = Job::new();
    let all: Vec<Result<[usize; 4]>> = thread::scope(|scope| {
        let run = |rank: Option<usize>| {
            let mut worlds = job.process(rank, 3)?;
            // The first rank is on another host.
            worlds.is_host = rank != Some(0);
            let mut world = worlds.next_world()?;
            if rank.is_some() {
                until_one_waits(&worlds, &world)?;
                assert_eq!(worlds.newcomers(), usize::from(rank == Some(1)));
                world = worlds.next_world()?;
            }
            place(&world)
        };
        let threads = [Some(0), Some(1), Some(2), None].map(|rank| scope.spawn(move || run(rank)));
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let all: Vec<[usize; 4]> = all.into_iter().map(|place| place.unwrap()).collect();
    assert_eq!(all, [[1, 4, 1, 1], [0, 4, 1, 1], [2, 4, 1, 1], [3, 4, 1, 1]]);
}

#[test]
fn newcomers_are_taken_in_without_a_time_to_join() {
    let job = Job::new();
    let all: Vec<Result<[usize; 4]>> = thread::scope(|scope| {
        let run = |rank: Option<usize>| {
            let mut worlds = job.process_with(rank, 2, Duration::MAX, Duration::MAX)?;
            let mut world = worlds.next_world()?;
            if rank.is_some() {
                until_one_waits(&worlds, &world)?;
                world = worlds.next_world()?;
            }
            place(&world)
        };
        let threads = [Some(0), Some(1), None].map(|rank| scope.spawn(move || run(rank)));
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let all: Vec<[usize; 4]> = all.into_iter().map(|place| place.unwrap()).collect();
    assert_eq!(all, [[0, 3, 1, 1], [1, 3, 1, 1], [2, 3, 1, 1]]);
}

#[test]
fn ranks_say_once_that_they_are_in_the_run() {
    let job = Job::new();
    fs::create_dir_all(job.folder()).unwrap();
    let all: Vec<Result<[usize; 4]>> = thread::scope(|scope| {
        let run = |rank: Option<usize>| {
            let mut worlds = job.process(rank, 1)?;
            let mut world = worlds.next_world()?;
            if rank.is_some() {
                assert!(job.folder().join("0").exists());
                fs::remove_dir_all(job.folder()).unwrap();
                until_one_waits(&worlds, &world)?;
                world = worlds.next_world()?;
            }
            place(&world)
        };
        let threads = [Some(0), None].map(|rank| scope.spawn(move || run(rank)));
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let all: Vec<[usize; 4]> = all.into_iter().map(|place| place.unwrap()).collect();
    assert_eq!(all, [[0, 2, 1, 1], [1, 2, 1, 1]]);
}

#[test]
fn a_newcomer_to_nobody_gives_up() {
    let job = Job::new();
    let error = job.process_within(None, 2, Duration::from_millis(100)).unwrap_err().to_string();
    assert!(error.contains(&job.0[1].to_string()), "{error}");
}
