//! Tests of the rendezvous, and of strangers and leftovers that come to it.

use std::{
    cell::Cell,
    io::{self, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use comm::Collectives;
use numcore::{Error, ErrorKind, NullRuntime, Result};

use super::{
    Door, JoinAddress, Tcp, reachable,
    rendezvous::Meeting,
    resolve,
    secret::{ConnectionEnd, Secret},
    socket::{read, write},
    table::Hello,
    tests::{LONG, address},
};
use crate::Launch;

fn free() -> SocketAddr {
    address(&TcpListener::bind("127.0.0.1:0").expect("a free port"))
}

fn of(rank: usize, size: usize) -> Launch {
    Launch { rank, size, local_rank: rank }
}

/// Runs the processes of some jobs as threads.
fn all<T: Send>(processes: Vec<Tcp>, each: impl Fn(Tcp) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let each = &each;
        let threads: Vec<_> = processes.into_iter().map(|tcp| scope.spawn(move || each(tcp))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

/// The ranks that all processes of a job have.
fn gather(tcp: Tcp) -> Result<Vec<Vec<u8>>> {
    let processes = tcp.join_timeout(LONG / 4).join()?;
    let rank = processes.rank() as u8;
    processes.run(|_| Ok(NullRuntime::new()), |comm| comm.exchange(&[rank]))
}

/// The names of the jobs that all processes of a job have.
fn gather_jobs(tcp: Tcp) -> Result<Vec<String>> {
    let job = tcp.job.clone().unwrap_or_default();
    let all = tcp.join()?.run(|_| Ok(NullRuntime::new()), |comm| comm.exchange(job.as_bytes()))?;
    Ok(all.into_iter().map(|job| String::from_utf8(job).expect("a name")).collect())
}

fn ranks(size: usize) -> Vec<Vec<u8>> {
    (0..size as u8).map(|rank| vec![rank]).collect()
}

#[test]
fn processes_meet_with_ranks_and_without() {
    for (size, host) in [(1, "127.0.0.1:0"), (2, "127.0.0.1:0"), (3, "[::1]:0"), (5, "127.0.0.1:0")] {
        let Ok(listener) = TcpListener::bind(host) else { continue };
        let (at, secret) = (address(&listener), "0123456789abcdef");
        drop(listener);
        let named = (0..size).map(|rank| Tcp::from(at).launch(of(rank, size)).secret(secret));
        let any = (0..size).map(|_| Tcp::from(at).any_rank(size));
        for processes in [named.collect(), any.collect()] {
            for gathered in all(processes, gather) {
                assert_eq!(gathered.unwrap(), ranks(size));
            }
        }
    }
}

#[test]
fn two_jobs_at_one_address_meet_in_turn() {
    let at = free();
    let jobs = move |processes: [(&str, usize); 2]| {
        let processes = processes.map(|(job, rank)| Tcp::from(at).job(job).launch(of(rank, 2)));
        all(processes.into(), |tcp| gather_jobs(tcp.join_timeout(LONG / 4)).unwrap())
    };
    // Rank 1 of the other job is the first to come.
    let first = thread::spawn(move || jobs([("a", 0), ("b", 1)]));
    thread::sleep(Duration::from_millis(200));
    assert_eq!(jobs([("a", 1), ("b", 0)]), [["a"; 2], ["b"; 2]]);
    assert_eq!(first.join().unwrap(), [["a"; 2], ["b"; 2]]);
}

/// The errors of processes that cannot meet.
fn errors(processes: Vec<Tcp>) -> Vec<Error> {
    all(processes, |tcp| tcp.join_timeout(LONG / 30).join().expect_err("no meeting"))
}

#[test]
fn those_who_do_not_know_the_secret_do_not_join() {
    let at = free();
    let secrets = ["0123456789abcdef", "0123456789abcdeF"];
    let both = errors((0..2).map(|rank| Tcp::from(at).launch(of(rank, 2)).secret(secrets[rank])).collect());
    assert!(matches!(both[0].kind(), ErrorKind::Timeout { missing, .. } if missing[..] == [1]), "{}", both[0]);
    assert!(both[0].to_string().contains("does not know the secret"), "{}", both[0]);
    assert!(both[1].to_string().contains("is not that of the one that listens"), "{}", both[1]);
    for open in [Tcp::at("192.0.2.1:9"), Tcp::from(at).bind([0, 0, 0, 0].into())] {
        let error = open.launch(of(0, 2)).join().unwrap_err().to_string();
        assert!(error.contains("export WEFTGRAD_SECRET=$(openssl rand -hex 32)"), "{error}");
    }
    let error = Tcp::from(at).launch(of(0, 2)).secret("short").join().unwrap_err().to_string();
    assert!(error.contains("too short"), "{error}");
    assert!(!format!("{:?}", Tcp::from(at).secret("0123456789abcdef")).contains("0123"));
}

#[test]
fn those_that_do_not_come_are_named() {
    let at = free();
    let named = errors([0, 2].map(|rank| Tcp::from(at).launch(of(rank, 4))).into());
    assert!(matches!(named[0].kind(), ErrorKind::Timeout { missing, .. } if missing[..] == [1, 3]), "{}", named[0]);
    assert!(
        named[1].to_string().contains("[1, 3] did not come") || named[1].to_string().contains("rank 0"),
        "{}",
        named[1]
    );
    let alone = errors(vec![Tcp::from(at).launch(of(1, 2))]);
    assert!(matches!(alone[0].kind(), ErrorKind::Timeout { missing, .. } if missing[..] == [0]), "{}", alone[0]);
    // One that cannot be of the job is told why, and so is rank 0, which waits for another.
    for (others, says) in [
        ([of(1, 3), of(1, 3)], "as rank 1"),
        ([of(1, 3), of(2, 4)], "one of 4, and rank 0 at"),
        ([of(1, 3), of(3, 4)], "one of 4, and rank 0 at"),
    ] {
        let all = [of(0, 3), others[0], others[1]].map(|launch| Tcp::from(at).launch(launch));
        let errors = errors(all.into());
        assert!(matches!(errors[0].kind(), ErrorKind::Timeout { missing, .. } if missing[..] == [2]), "{}", errors[0]);
        let errors: Vec<_> = errors.iter().map(Error::to_string).collect();
        assert!(errors[0].contains(says), "{}", errors[0]);
        assert!(errors[1..].iter().any(|error| error.contains(says)), "{errors:?}");
        assert!(
            errors[1..].iter().all(|error| [says, "[2] did not come", "from rank 0"].iter().any(|w| error.contains(w))),
            "{errors:?}"
        );
    }
    let error = Tcp::at("127.0.0.1").launch(of(0, 2)).join().unwrap_err().to_string();
    assert!(error.contains("`127.0.0.1` is no host:port"), "{error}");
}

/// A connection to an address, once somebody listens there.
fn connected(at: SocketAddr) -> TcpStream {
    loop {
        match TcpStream::connect(at) {
            Ok(stream) if stream.local_addr().unwrap() != stream.peer_addr().unwrap() => return stream,
            _ => thread::sleep(Duration::from_millis(1)),
        }
    }
}

#[test]
fn leftovers_of_an_earlier_run_are_told_and_the_others_meet() {
    let at = free();
    let rank_0 = thread::spawn(move || gather(Tcp::from(at).launch(of(0, 3))));
    // One of another size, and one of a rank that comes again later.
    let other_size = Tcp::from(at).launch(of(1, 2)).join().unwrap_err().to_string();
    assert!(other_size.contains("one of 2, and rank 0 at") && other_size.contains("start all with"), "{other_size}");
    let mut leftover = connected(at);
    Secret::default().prove(&mut leftover, ConnectionEnd::Dialer, "job").unwrap();
    write(&mut leftover, &Hello { size: 3, rank: Some(1), listens: at }.to_bytes()).unwrap();
    // Rank 0 has read that before the others start.
    thread::sleep(Duration::from_millis(300));
    let rank_1 = thread::spawn(move || gather(Tcp::from(at).launch(of(1, 3))));
    let told = String::from_utf8(read(&mut leftover).unwrap()).unwrap();
    assert!(told.contains("two processes have come to") && told.contains("the second one counts"), "{told}");
    let rank_2 = gather(Tcp::from(at).launch(of(2, 3)));
    for gathered in [rank_0.join().unwrap(), rank_1.join().unwrap(), rank_2] {
        assert_eq!(gathered.unwrap(), ranks(3));
    }
}

#[test]
fn silent_strangers_keep_nobody_waiting() {
    let at = free();
    let begun = Instant::now();
    let rank_0 = thread::spawn(move || gather(Tcp::from(at).launch(of(0, 2))));
    let strangers: Vec<TcpStream> = (0..20).map(|_| connected(at)).collect();
    assert_eq!(gather(Tcp::from(at).launch(of(1, 2))).unwrap(), ranks(2));
    assert_eq!(rank_0.join().unwrap().unwrap(), ranks(2));
    // One after another, they would take 100 seconds.
    assert!(begun.elapsed() < LONG, "{:?}", begun.elapsed());
    drop(strangers);
}

#[test]
fn a_name_that_is_a_loopback_address_on_one_of_several_machines_is_refused() {
    let [local, v6, other] = ["127.0.1.1:9", "[::1]:9", "10.0.0.7:9"].map(|at| at.parse::<SocketAddr>().unwrap());
    let error = reachable("node-0:9", vec![local, v6], None).unwrap_err().to_string();
    assert!(error.contains("`node-0` is 127.0.1.1") && error.contains("--endpoint 10.0.0.1:9"), "{error}");
    assert_eq!(reachable("node-0:9", vec![local, other], None).unwrap(), [other]);
    // An interface that is named is the one at which this machine is reached; all of them are none.
    for (bound, due) in [(other.ip(), Some(other)), (local.ip(), Some(local)), ([0; 4].into(), None)] {
        let found = reachable("node-0:9", vec![local, v6], Some(bound));
        assert_eq!(found.ok(), due.map(|at| vec![at]), "{bound}");
    }
    // Tests of several nodes on one machine write it.
    for host in ["localhost:9", "a.localhost:9", "127.0.1.1:9", "[::1]:9"] {
        assert_eq!(reachable(host, vec![local], Some(other.ip())).unwrap(), [local], "{host}");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn ranks_of_one_host_are_counted_by_the_address_at_which_rank_0_listens() {
    let at = free();
    let addresses = vec![SocketAddr::new([127, 0, 0, 2].into(), at.port()), at];
    let meet = |rank| {
        let (job, secret, until) = ("job".into(), Secret::default(), Instant::now() + LONG);
        let (addresses, bind, rank) = (addresses.clone(), Some(at.ip()), Some(rank));
        let meeting = Meeting { addresses, job, secret, bind, rank, size: 2, is_open: false, until, timeout: LONG };
        meeting.join().map(|joined| joined.local_rank)
    };
    let meet = &meet;
    let local_ranks = thread::scope(|scope| {
        [0, 1].map(|rank| scope.spawn(move || meet(rank))).map(|thread| thread.join().unwrap().unwrap())
    });
    assert_eq!(local_ranks, [0, 1]);
}

#[test]
fn a_host_that_has_no_address_yet_is_looked_up_again() {
    let (times, at) = (Cell::new(0), free());
    let look_up = |_: &str| {
        times.set(times.get() + 1);
        if times.get() < 3 { Err(io::Error::other("no such host")) } else { Ok(vec![at]) }
    };
    assert_eq!(resolve("node-0:9", Instant::now() + LONG, look_up).unwrap(), [at]);
    let never = resolve("node-0:9", Instant::now(), |_| Err(io::Error::other("no such host")));
    assert!(never.unwrap_err().to_string().contains("no such host"));
}

/// The join address of a job `job`, and the door of its rank 0 there.
fn opened(at: SocketAddr) -> (JoinAddress, Door) {
    let (job, secret) = ("job".into(), Secret::default());
    let join = JoinAddress {
        addresses: vec![at],
        job,
        secret,
        bind: None,
        silence: LONG,
        lends_memory: true,
        member_file: None,
    };
    let door = join.listen().expect("a door");
    (join, door)
}

/// A connection that has said who it is.
fn said(at: SocketAddr, job: &str, hello: Hello) -> TcpStream {
    let mut stream = connected(at);
    Secret::default().prove(&mut stream, ConnectionEnd::Dialer, job).unwrap();
    write(&mut stream, &hello.to_bytes()).unwrap();
    stream
}

fn until_waiting(door: &Door, newcomers: usize) {
    let begun = Instant::now();
    while door.waiting() != newcomers {
        assert!(begun.elapsed() < LONG, "{} wait", door.waiting());
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn those_whom_a_meeting_refuses_are_no_newcomers() {
    let at = free();
    let (_join, door) = opened(at);
    let hello = |size| Hello { size, rank: None, listens: at };
    let _others = [said(at, "another job", hello(0)), said(at, "job", hello(3))];
    let _newcomer = said(at, "job", hello(0));
    // The newcomer is heard after them.
    until_waiting(&door, 1);
    thread::sleep(Duration::from_millis(200));
    assert_eq!(door.waiting(), 1);
}

#[test]
fn a_newcomer_that_has_gone_is_no_member() {
    let at = free();
    let (join, door) = opened(at);
    let newcomer = said(at, "job", Hello { size: 0, rank: None, listens: at });
    until_waiting(&door, 1);
    drop(newcomer);
    let (open, _door) = join.meet((0, 1), Some(door), LONG, &|| Ok(())).unwrap();
    assert_eq!(open().unwrap().size(), 1);
}

#[test]
fn a_newcomer_whose_meeting_fails_waits_for_the_next() {
    let at = free();
    let (join, door) = opened(at);
    let tcp = Tcp::from(at).job("job").launch(of(0, 2)).join_timeout(LONG / 4);
    let newcomer = Tcp { join_address: Some(at.to_string()), is_newcomer: true, ..tcp };
    let newcomer = thread::spawn(move || newcomer.join().map(|processes| processes.rank()));
    until_waiting(&door, 1);
    // Nobody listens where rank 1 says that it does, and rank 0 gives the meeting up.
    let rank_1 = said(at, "job", Hello { size: 0, rank: Some(1), listens: free() });
    let (open, door) = join.meet((0, 2), Some(door), LONG, &|| Ok(())).unwrap();
    drop((open, rank_1));
    let door = door.expect("a door");
    until_waiting(&door, 1);
    let (_open, _door) = join.meet((0, 1), Some(door), LONG, &|| Ok(())).unwrap();
    assert_eq!(newcomer.join().unwrap().unwrap(), 1);
}

#[test]
fn a_folder_that_was_cleaned_is_made_again_for_the_file_of_a_member() {
    let folder = std::env::temp_dir().join(format!("weftgrad-member-{}", std::process::id()));
    let (mut join, _door) = opened(free());
    join.member_file = Some(folder.join("rank-0"));
    join.announce_member().unwrap();
    assert!(folder.join("rank-0").exists());
    #[cfg(unix)]
    {
        let mode = std::os::unix::fs::MetadataExt::mode(&std::fs::metadata(&folder).unwrap());
        assert_eq!(mode & 0o777, 0o700, "others can use it");
    }
    // Something else is at the place of the folder.
    std::fs::remove_dir_all(&folder).unwrap();
    std::fs::write(&folder, "").unwrap();
    let error = join.announce_member().unwrap_err().to_string();
    std::fs::remove_file(&folder).unwrap();
    assert!(error.contains("rank-0") && error.contains("let TMPDIR name a folder"), "{error}");
}

#[test]
fn strangers_at_the_address_do_no_harm() {
    let at = free();
    let came = all((0..2).map(|rank| Tcp::from(at).launch(of(rank, 2))).collect(), |tcp| {
        if tcp.place.is_some_and(|(rank, ..)| rank == Some(0)) {
            return gather(tcp);
        }
        let mut stranger = connected(at);
        stranger.write_all(b"GET / HTTP/1.1\r\nHost: weftgrad\r\n\r\n").unwrap();
        gather(tcp)
    });
    for gathered in came {
        assert_eq!(gathered.unwrap(), ranks(2));
    }
}

#[test]
fn an_empty_variable_is_no_secret() {
    let file = std::env::temp_dir().join(format!("weftgrad-secret-{}", std::process::id()));
    std::fs::write(&file, "fedcba9876543210\n").unwrap();
    let path = file.to_str().expect("a path in UTF-8");
    let given = |secret: &str, file: &str| {
        let env = |name: &str| match name {
            "WEFTGRAD_SECRET" => Some(secret.to_string()),
            _ => Some(file.to_string()),
        };
        Tcp::at("127.0.0.1:9").secret_or(&env)
    };
    assert!(given("", "").unwrap().is_none());
    assert!(given("", path).unwrap().is_some());
    assert!(given("0123456789abcdef", "").unwrap().is_some());
    assert!(given("short", "").unwrap_err().to_string().contains("too short"));
    std::fs::remove_file(file).unwrap();
}
