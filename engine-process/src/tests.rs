//! Tests with threads as processes, over TCP, whose deaths a test reports.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{SocketAddr, TcpListener},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use comm::{Collectives, Comm, Communicator, Deadlines, Patient, Quorum, ReduceOp, Rendezvous};
use numcore::{DType, ErrorKind, NullRuntime, Result, Tensor};
use parking_lot::Mutex;
use runtime_cpu::Cpu;

use super::{
    Channel, Launch, ProcessCommunicator, Processes, Request, Tcp, Test, Transport,
    flight::Flight,
    message::{Header, Message},
    moves::Limits,
    progress::{Command, Patience, Progress},
    world::World,
};

/// The state that a test shares with its processes, and their deaths.
#[derive(Clone, Default)]
struct Fate {
    dead: Arc<Mutex<BTreeSet<usize>>>,
    /// True if a process has aborted all.
    aborted: Arc<AtomicBool>,
    ends_together: bool,
}

/// A transport that reports the deaths of a test.
struct Reporting {
    inner: Box<dyn Transport>,
    fate: Fate,
    /// The senders of posted receives, by request.
    posted: BTreeMap<usize, usize>,
}

impl Transport for Reporting {
    fn name(&self) -> &'static str {
        "a test's"
    }

    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn size(&self) -> usize {
        self.inner.size()
    }

    fn tags(&self) -> u32 {
        self.inner.tags()
    }

    fn reports_deaths(&self) -> Result<(), String> {
        Ok(())
    }

    fn ends_together(&self) -> bool {
        self.fate.ends_together
    }

    // SAFETY: asked of callers as the trait says.
    unsafe fn send(&mut self, on: Channel, from: *const u8, bytes: usize, to: usize, tag: u32) -> Result<Request> {
        // SAFETY: the caller's promise.
        unsafe { self.inner.send(on, from, bytes, to, tag) }
    }

    // SAFETY: asked of callers as the trait says.
    unsafe fn receive(&mut self, on: Channel, into: *mut u8, bytes: usize, from: usize, tag: u32) -> Result<Request> {
        // SAFETY: the caller's promise.
        let request = unsafe { self.inner.receive(on, into, bytes, from, tag) }?;
        self.posted.insert(request.0, from);
        Ok(request)
    }

    fn test(&mut self, request: &Request) -> Test {
        let is_dead = self.posted.get(&request.0).is_some_and(|from| self.fate.dead.lock().contains(from));
        match self.inner.test(request) {
            Test::Pending if is_dead => {
                self.inner.cancel(request);
                Test::Dead
            }
            test => test,
        }
    }

    fn cancel(&mut self, request: &Request) {
        self.inner.cancel(request);
    }

    fn moves_while_tested(&self) -> bool {
        false
    }

    fn abort(&mut self) {
        self.fate.aborted.store(true, Ordering::SeqCst);
    }

    fn finish(self: Box<Self>) -> Result<()> {
        self.inner.finish()
    }
}

fn transport(at: SocketAddr, rank: usize, size: usize, fate: &Fate) -> Result<Box<dyn Transport>> {
    let (open, ..) = Tcp::from(at).launch(Launch { rank, size, local_rank: rank }).connect()?;
    Ok(Box::new(Reporting { inner: open()?, fate: fate.clone(), posted: BTreeMap::new() }))
}

pub(crate) fn free() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a free port")
}

/// Runs a program on each of `size` processes, which are threads.
fn processes<T: Send>(
    size: usize,
    fate: &Fate,
    program: impl Fn(Arc<Processes>) -> Result<T> + Sync,
) -> Vec<Result<T>> {
    let (at, program) = (free(), &program);
    thread::scope(|scope| {
        let start = |rank| {
            let fate = fate.clone();
            scope.spawn(move || program(Arc::new(Processes::over(move || transport(at, rank, size, &fate))?)))
        };
        let threads: Vec<_> = (0..size).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

pub(crate) fn within(timeout: Duration) -> Patience {
    Patience { timeout, leaves_out: None }
}

pub(crate) const LONG: Duration = Duration::from_secs(20);
/// Long enough for messages of the others to arrive.
const WHILE: Duration = Duration::from_millis(100);

fn all_well<T>(outcomes: Vec<Result<T>>) -> Vec<T> {
    outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(|error| panic!("{error}"))).collect()
}

#[test]
fn whoever_meets_again_knows_that_the_run_has_committed() {
    let met = processes(2, &Fate::default(), |processes| {
        let mut rendezvous = processes.rendezvous(NullRuntime::new(), Quorum::default())?;
        let first = rendezvous.next_world()?;
        rendezvous.committed();
        // The other may fail before this process learns that all have come.
        let _ = first.comm.barrier();
        first.comm.abort("a step failed");
        let again = rendezvous.next_world()?;
        again.comm.barrier()?;
        Ok([first.committed, again.committed])
    });
    assert_eq!(all_well(met), [[false, true]; 2]);
}

#[test]
fn those_that_recover_do_not_wait_for_one_that_comes_to_its_end_meanwhile() {
    let left = processes(3, &Fate::default(), |processes| {
        if processes.rank() == 2 {
            // The others are waiting for this process by now.
            thread::sleep(WHILE);
            return Ok(Vec::new());
        }
        let world: Comm<NullRuntime> = processes.recover_within(&NullRuntime::new(), within(LONG / 4))?;
        world.barrier()?;
        Ok(world.members().to_vec())
    });
    assert_eq!(all_well(left), [vec![0, 1], vec![0, 1], vec![]]);
}

#[test]
fn survivors_have_made_the_calls_that_they_made_before_the_loss() {
    let (ends, has_ended) = mpsc::sync_channel::<()>(1);
    let has_ended = Mutex::new(has_ended);
    let outcomes = processes(3, &Fate::default(), |processes| {
        let processes = Arc::into_inner(processes).expect("nobody else has it");
        let processes = processes.timeout(Deadlines { call: WHILE, first: 4 * LONG });
        let call = |comm: &Comm<NullRuntime>| comm.barrier();
        call(&processes.world(&NullRuntime::new())?)?;
        if processes.rank() == 2 {
            return Ok(());
        }
        let left = processes.recover_within(&NullRuntime::new(), within(LONG))?;
        if processes.rank() == 1 {
            let _ = has_ended.lock().recv_timeout(LONG);
            return Ok(());
        }
        let begun = Instant::now();
        let error = call(&left).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Timeout { missing, .. } if missing[..] == [1]), "{error}");
        assert!(begun.elapsed() < LONG, "it had the time of a first call");
        let _ = ends.send(());
        Ok(())
    });
    all_well(outcomes);
}

#[test]
fn what_was_said_in_one_recovery_is_not_heard_in_the_next() {
    let (fate, (dies, death)) = (Fate::default(), mpsc::sync_channel::<()>(1));
    let (death, rt) = (Mutex::new(death), NullRuntime::new());
    let outcomes = processes(4, &fate, |processes| match processes.rank() {
        2 => {
            thread::sleep(WHILE);
            drop(processes);
            // Its goodbye has arrived; then its death is reported too.
            thread::sleep(WHILE);
            fate.dead.lock().insert(2);
            thread::sleep(WHILE);
            let _ = dies.send(());
            Ok(Vec::new())
        }
        rank => {
            if rank == 3 {
                let _ = death.lock().recv();
            }
            let world = processes.recover_within(&rt, within(LONG))?;
            world.barrier()?;
            if rank != 0 {
                thread::sleep(4 * WHILE);
                return Ok(Vec::new());
            }
            // No other process begins the next recovery.
            match processes.recover_within(&rt, within(WHILE)).map(|_| ()).unwrap_err().kind() {
                ErrorKind::Timeout { missing, .. } => Ok(missing.clone()),
                other => panic!("{other:?}"),
            }
        }
    });
    assert_eq!(all_well(outcomes)[0], [1, 3]);
}

#[test]
fn a_process_that_hangs_is_left_out_by_a_majority_and_learns_of_it() {
    let (ends, heard) = mpsc::sync_channel::<()>(0);
    let heard = Mutex::new(heard);
    let outcomes = processes(3, &Fate::default(), |processes| {
        let quorum = Quorum { majority: true, join_timeout: 5 * WHILE, ..Quorum::default() };
        let mut worlds = processes.rendezvous(NullRuntime::new(), quorum)?;
        let first = worlds.next_world()?;
        // All have the world, and no abort comes into the call that gave it.
        let _ = first.comm.barrier();
        if processes.rank() == 2 {
            // It computes until the others have gone on.
            let _ = heard.lock().recv_timeout(LONG);
            let error = worlds.next_world().map(|_| ()).unwrap_err().to_string();
            assert!(error.contains("the others go on without it"), "{error}");
            return Ok(Vec::new());
        }
        first.comm.abort("a step failed");
        let world = worlds.next_world()?;
        world.comm.barrier()?;
        if processes.rank() == 0 {
            let _ = ends.send(());
        }
        Ok(world.comm.members().to_vec())
    });
    assert_eq!(all_well(outcomes), [vec![0, 1], vec![0, 1], vec![]]);
}

#[test]
fn a_call_that_nobody_waits_for_ends_with_its_process() {
    // The other rank makes its first call late, or one with a time of its own. Or it ends without the call, leaves its
    // world alone, or does none of these before this one has ended.
    for late in ["calls", "saves", "ends", "leaves", "hangs"] {
        let [call, first] = match late {
            "calls" => [WHILE / 4, 4 * LONG],
            "saves" => [WHILE / 4; 2],
            "ends" | "leaves" => [4 * LONG; 2],
            _ => [WHILE; 2],
        };
        let deadlines = Deadlines { call, first };
        let (ends, has_ended) = mpsc::sync_channel::<()>(1);
        let has_ended = Mutex::new(has_ended);
        let sums = processes(2, &Fate::default(), |processes| {
            let (rt, processes) = (Cpu::with_threads(1), Arc::into_inner(processes).expect("nobody else has it"));
            let processes = processes.timeout(deadlines);
            let world = processes.world(&rt)?;
            let comm = if late == "saves" { Patient::over(&world, 4 * LONG) } else { world.clone() };
            if processes.rank() == 1 {
                if late == "leaves" {
                    drop((comm, world));
                    let _ = has_ended.lock().recv_timeout(LONG);
                    return Ok(2.0);
                }
                match late {
                    "hangs" => drop(has_ended.lock().recv_timeout(LONG)),
                    // The other has left its group by then.
                    _ => thread::sleep(WHILE),
                }
                if late == "ends" || late == "hangs" {
                    return Ok(2.0);
                }
            }
            let one = Tensor::full(&rt, [1000], DType::F32, 1.0)?.try_mut().expect("nobody else has it");
            let sum = comm.all_reduce(one, ReduceOp::Sum)?;
            if processes.rank() == 1 {
                return Ok(sum.wait()?.freeze()?.to_vec::<f32>()?[999]);
            }
            drop((sum, comm, world));
            let begun = Instant::now();
            drop(processes);
            assert!(begun.elapsed() < LONG, "a process that {late} is waited for");
            let _ = ends.send(());
            Ok(2.0)
        });
        assert_eq!(all_well(sums), [2.0; 2], "{late}");
    }
}

#[test]
fn a_call_that_a_process_has_given_up_ends_with_an_error() {
    let (ends, has_ended) = mpsc::sync_channel::<()>(1);
    let has_ended = Mutex::new(has_ended);
    let outcomes = processes(2, &Fate::default(), |processes| {
        let (rt, processes) = (Cpu::with_threads(1), Arc::into_inner(processes).expect("nobody else has it"));
        let is_first = processes.rank() == 0;
        let processes = processes.timeout(if is_first { WHILE } else { 4 * LONG });
        let comm = processes.world(&rt)?;
        if !is_first {
            let _ = has_ended.lock().recv_timeout(LONG);
        }
        let begun = Instant::now();
        let one = Tensor::full(&rt, [100_000], DType::F32, 1.0)?.try_mut().expect("nobody else has it");
        let sum = comm.all_reduce(one, ReduceOp::Sum)?;
        if is_first {
            drop((sum, comm, processes));
            let _ = ends.send(());
            return Ok(());
        }
        let error = sum.wait().map(|_| ()).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Peer { peer: 0, .. }), "{error}");
        assert!(error.to_string().contains("it left while rank 1 called all_reduce"), "{error}");
        assert!(begun.elapsed() < LONG, "it had the time of the call");
        Ok(())
    });
    all_well(outcomes);
}

#[test]
fn a_process_that_does_not_come_to_its_end_is_waited_for_so_long_alone() {
    let fate = Fate { ends_together: true, ..Fate::default() };
    let aborted = processes(2, &fate, |processes| {
        let processes = Arc::into_inner(processes).expect("nobody else has it").end_timeout(WHILE);
        if processes.rank() == 1 {
            thread::sleep(4 * WHILE);
        }
        let before = fate.aborted.load(Ordering::SeqCst);
        drop(processes);
        Ok(before || fate.aborted.load(Ordering::SeqCst))
    });
    assert_eq!(all_well(aborted), [true; 2]);
}

/// The first of three processes, over a transport of few tags on which nothing arrives.
struct FewTags(u32);

impl Transport for FewTags {
    fn name(&self) -> &'static str {
        "a test's"
    }

    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        3
    }

    fn tags(&self) -> u32 {
        self.0
    }

    fn reports_deaths(&self) -> Result<(), String> {
        Ok(())
    }

    fn ends_together(&self) -> bool {
        false
    }

    // SAFETY: asked of callers as the trait says.
    unsafe fn send(&mut self, _: Channel, _: *const u8, _: usize, _: usize, _: u32) -> Result<Request> {
        Ok(Request(0))
    }

    // SAFETY: asked of callers as the trait says.
    unsafe fn receive(&mut self, _: Channel, _: *mut u8, _: usize, _: usize, _: u32) -> Result<Request> {
        Ok(Request(0))
    }

    fn test(&mut self, _: &Request) -> Test {
        Test::Pending
    }

    fn cancel(&mut self, _: &Request) {}

    fn moves_while_tested(&self) -> bool {
        false
    }

    fn abort(&mut self) {}

    fn finish(self: Box<Self>) -> Result<()> {
        Ok(())
    }
}

#[test]
fn tags_of_a_call_that_fails_as_it_starts_are_given_to_no_other() {
    let (link, commands) = mpsc::channel();
    let mut progress = Progress::new(Box::new(FewTags(4)), commands).unwrap();
    let (rt, limits) = (Cpu::with_threads(1), Limits { message: 1 << 20, chunk: 1 << 20 });
    let x = || Tensor::full(&rt, [4], DType::F32, 1.0);
    let mut start = |number, call: &dyn Fn(&Comm<Cpu>)| {
        let world = World::new(number, [0, 1, 2].into(), LONG.into(), Arc::default(), comm::Places::Same);
        progress.execute(Command::Enter(world.clone()));
        let comm = ProcessCommunicator::world(link.clone(), &world, 0, rt.clone(), limits).unwrap();
        call(&(Arc::new(comm) as Comm<Cpu>));
        while let Ok(command) = progress.commands.try_recv() {
            progress.execute(command);
        }
        world.failure().map(|failure| failure.error("start", 0).to_string())
    };
    // The first call leaves no tags to rank 2. Rank 1 has the header of the second one by then, and may have begun it.
    let both = |comm: &Comm<Cpu>| {
        drop(comm.send(&x().unwrap(), 2).unwrap());
        drop(comm.broadcast(x().unwrap().try_mut().expect("nobody else has it"), 0).unwrap());
    };
    let why = start(0, &both).expect("too many calls");
    assert!(why.contains("no free tags"), "{why}");
    let again = start(1, &|comm| drop(comm.send(&x().unwrap(), 1).unwrap()));
    assert!(again.is_some_and(|why| why.contains("no free tags")), "rank 1 waits for another message with this tag");
}

/// A call whose messages another process numbers beyond the last tag.
#[test]
fn tags_that_another_process_does_not_have_are_refused() {
    let (link, commands) = mpsc::channel();
    let mut progress = Progress::new(Box::new(FewTags(1 << 20)), commands).unwrap();
    let (rt, limits) = (Cpu::with_threads(1), Limits { message: 1 << 20, chunk: 1 << 20 });
    let world = World::new(0, [0, 1, 2].into(), LONG.into(), Arc::default(), comm::Places::Same);
    progress.execute(Command::Enter(world.clone()));
    let comm: Comm<Cpu> = Arc::new(ProcessCommunicator::world(link, &world, 0, rt.clone(), limits).unwrap());
    let x = Tensor::full(&rt, [4], DType::F32, 1.0).unwrap().try_mut().expect("nobody else has it");
    drop(comm.broadcast(x, 1).unwrap());
    while let Ok(command) = progress.commands.try_recv() {
        progress.execute(command);
    }
    let Flight { group, key, call, .. } = &progress.flights[0];
    let header =
        Header { group: group.clone(), key: *key, tag: u32::MAX, call: call.clone(), elements: 0, payload: Vec::new() };
    progress.handle(super::stream::Event::Message(1, Message::Call(header)));
    progress.turn();
    let why = world.failure().expect("a failure").error("broadcast", 0).to_string();
    assert!(why.contains("rank 1 numbers its messages from 4294967295 on"), "{why}");
}

#[test]
fn worlds_that_are_over_leave_nothing() {
    let (_link, commands) = mpsc::channel();
    let transport = transport(free(), 0, 1, &Fate::default()).unwrap();
    let mut progress = Progress::new(transport, commands).unwrap();
    for number in 0..20 {
        let world = World::new(number, [0].into(), LONG.into(), Arc::default(), comm::Places::Same);
        progress.execute(Command::Enter(world.clone()));
        assert!(progress.worlds.contains_key(&number));
        drop(world);
        let (group, members) = ([number].into(), [0].into());
        progress.execute(Command::Leave { group, members });
        // A late message of another process about the world.
        progress.handle(super::stream::Event::Message(0, Message::Leave([number, 1].into())));
        assert!(progress.worlds.is_empty() && progress.inbox.len() == 0, "{number}");
    }
}
