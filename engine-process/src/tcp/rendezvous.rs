//! The rendezvous of processes at an address, and their connections to each other.
//!
//! 1. Rank 0 listens at the address. Every other process listens at a port of its own, connects to rank 0, and says
//!    size, wanted rank and where it listens.
//! 2. Once all have come, rank 0 answers each with its rank, the addresses of all, and a random number of this meeting.
//! 3. Each process connects to those of lower ranks, with that number, and accepts those of higher ranks.
//!
//! Ranks of a running job meet newcomers in the same way, at the job's [join address](super::door). Their meeting is
//! *open*: its size is known once all of these ranks have come.
//!
//! Both ends prove the secret and name their job first. A connection that proves nothing, or is of another meeting, is
//! closed, and keeps nobody waiting.

use std::{
    fmt::Display,
    io::{self, ErrorKind as Io},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    ops::Range,
    thread,
    time::{Duration, Instant},
};

use comm::engine::{WireReader, Writer};
use numcore::{Error, ErrorKind, Result};

use super::{
    OP, end_of,
    joined::{JoinedProcesses, failed},
    secret::{ConnectionEnd, Secret},
    socket::{PATIENCE, PAUSE, TimedStream, connect, has_ended, is_closed, is_silent, read, write},
    table::{Hello, ProcessTable},
    visitors::{Visit, Visitors},
};

/// The time between two looks for the end of rank 0, or of a rank of the running job.
pub(super) const TURN: Duration = Duration::from_millis(100);
/// The time in which a newcomer connects to the others, before it waits to be called again.
const MESH: Duration = Duration::from_secs(30);
/// The first byte of rank 0's answer.
const WELCOME: u8 = 0;
const REFUSED: u8 = 1;
/// Another job meets here now; later this one may.
const OTHER_JOB: u8 = 2;

/// A rendezvous, as one process sees it.
pub(super) struct Meeting {
    pub(super) addresses: Vec<SocketAddr>,
    pub(super) job: String,
    pub(super) secret: Secret,
    pub(super) bind: Option<IpAddr>,
    pub(super) rank: Option<usize>,
    /// The number of ranks that are awaited.
    pub(super) size: usize,
    /// True if processes without a rank may come beyond those.
    pub(super) is_open: bool,
    pub(super) until: Instant,
    /// The whole time for the meeting, which errors state.
    pub(super) timeout: Duration,
}

/// The reason to give a meeting up: a rank of the running job has failed meanwhile.
pub(super) type Check<'a> = &'a dyn Fn() -> Result<()>;

/// A failed attempt: to be tried again, or final.
enum JoinFailure {
    Again(String),
    /// The process that listens had proved the secret, and did not answer since.
    Unanswered(String),
    Final(Error),
}

impl From<io::Error> for JoinFailure {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            Io::PermissionDenied | Io::InvalidData => JoinFailure::Final(failed(error.to_string())),
            _ => JoinFailure::Again(error.to_string()),
        }
    }
}

impl From<Error> for JoinFailure {
    fn from(error: Error) -> Self {
        JoinFailure::Final(error)
    }
}

impl Meeting {
    pub(super) fn join(&self) -> Result<JoinedProcesses> {
        let check: Check<'_> = &|| Ok(());
        match self.rank {
            _ if self.is_open => self.meet(check),
            _ if self.size == 1 => Ok(JoinedProcesses { rank: 0, local_rank: 0, connections: vec![None] }),
            Some(0) => self.gather(&self.listen()?, Vec::new(), check),
            Some(_) => self.meet(check),
            None => match self.try_listen() {
                Ok(listener) => self.gather(&listener, Vec::new(), check),
                Err(_) => self.meet(check),
            },
        }
    }

    pub(super) fn try_listen(&self) -> io::Result<TcpListener> {
        let at = |own: Option<IpAddr>| {
            self.addresses.iter().map(move |at| SocketAddr::new(own.unwrap_or(at.ip()), at.port()))
        };
        let listener = TcpListener::bind(&at(self.bind).collect::<Vec<_>>()[..])?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    }

    /// Listens at the address of the job, once another job that meets there has gone.
    fn listen(&self) -> Result<TcpListener> {
        let until = self.until;
        loop {
            match self.try_listen() {
                Ok(listener) => return Ok(listener),
                Err(error) if error.kind() == Io::AddrInUse && Instant::now() < until => thread::sleep(PAUSE),
                Err(error) => {
                    let hint = match error.kind() {
                        Io::AddrNotAvailable => {
                            ": it is not an address of this machine; `Tcp::bind` names an interface"
                        }
                        Io::AddrInUse => ": perhaps two processes were given rank 0",
                        _ => "",
                    };
                    return Err(failed(format!("rank 0 cannot listen at {}: {error}{hint}", self.addresses[0])));
                }
            }
        }
    }

    /// Waits, as rank 0, for all others, and answers them; those that `wait` have come already.
    pub(super) fn gather(&self, listener: &TcpListener, wait: Vec<Visit>, check: Check<'_>) -> Result<JoinedProcesses> {
        let (until, mut wait) = (self.until, wait.into_iter());
        let mut come: Vec<(Hello, TcpStream)> = Vec::new();
        let mut refused = String::new();
        let mut visitors = Visitors::of(listener, &self.secret, &self.job);
        while !self.is_complete(&come) {
            let Some(visit) = wait.next().or_else(|| visitors.next(until.min(Instant::now() + TURN))) else {
                if Instant::now() < until {
                    check()?;
                    continue;
                }
                let missing = self.missing(&come);
                let words = format!("ranks {missing:?} did not come to {} in {:?}", self.addresses[0], self.timeout);
                // Newcomers wait for the next open meeting.
                if !self.is_open {
                    come.iter_mut().for_each(|(_, stream)| answer(stream, REFUSED, words.as_bytes()));
                }
                return Err(self.late(missing, &visitors.take_refused().unwrap_or(refused)));
            };
            if let Err(why) = self.admit(visit, &mut come) {
                refused = why;
            }
            // One that has died since is waited for again.
            if self.is_complete(&come) {
                come.retain(|(_, stream)| !is_closed(stream));
            }
        }
        if self.is_open {
            wait.for_each(|visit| drop(self.admit(visit, &mut come)));
            come.retain(|(hello, stream)| hello.rank.is_some() || !is_closed(stream));
        }
        self.number(&mut come);
        let random = || getrandom::u64().map_err(|error| failed(error.to_string()));
        let meeting = [random()?, random()?];
        // Of several addresses of the host, the one at which this process listens.
        let own = listener.local_addr().ok().filter(|at| !at.ip().is_unspecified()).unwrap_or(self.addresses[0]);
        let addresses: Vec<SocketAddr> = [own].into_iter().chain(come.iter().map(|(hello, _)| hello.listens)).collect();
        for (rank, (_, stream)) in (1..).zip(&mut come) {
            let table = ProcessTable { rank, meeting, addresses: addresses.clone() };
            // One that cannot be told is missed by the others.
            answer(stream, WELCOME, &table.to_bytes());
        }
        let connections = [None].into_iter().chain(come.into_iter().map(|(_, stream)| Some(stream)));
        JoinedProcesses { rank: 0, local_rank: 0, connections: connections.collect() }.ready()
    }

    /// Admits one that has connected to rank 0. One that cannot be of this meeting, perhaps a leftover of an earlier
    /// run, is told so, and the others are waited for.
    ///
    /// # Errors
    /// The reason that one was not admitted.
    fn admit(&self, visit: Visit, come: &mut Vec<(Hello, TcpStream)>) -> Result<(), String> {
        let Visit { mut stream, said } = visit;
        let from = stream.peer_addr().map_err(|error| error.to_string())?;
        let unheard = |error: &dyn Display| format!("{from}: {error}");
        let (job, bytes) = said.map_err(|error| unheard(&error))?;
        if job != self.job {
            answer(&mut stream, OTHER_JOB, &[]);
            return Err(format!("{from}: it is of the job `{job}`"));
        }
        let hello = Hello::from_bytes(&bytes).map_err(|error| unheard(&error))?;
        let (at, size) = (self.addresses[0], self.size);
        let refusal = match hello.rank {
            _ if hello.size != self.told_size() => Some(format!(
                "the process is one of {}, and rank 0 at {at} one of {size}: start all with one number",
                hello.size
            )),
            Some(rank) if rank == 0 || rank >= size => {
                Some(format!("nobody can come to {at} as rank {rank} of {size}"))
            }
            _ => None,
        };
        if let Some(why) = refusal {
            answer(&mut stream, REFUSED, why.as_bytes());
            return Err(why);
        }
        // If one of two is a leftover, it is the first: a run starts all of its processes at about the same time.
        let is_its = |(other, _): &(Hello, TcpStream)| hello.rank.is_some() && other.rank == hello.rank;
        let before = come.iter().position(is_its).map(|place| come.swap_remove(place));
        come.push((hello, stream));
        match before {
            Some((Hello { rank: Some(rank), .. }, mut stream)) if !is_closed(&stream) => {
                let why = format!("two processes have come to {at} as rank {rank}, and the second one counts");
                answer(&mut stream, REFUSED, why.as_bytes());
                Err(why)
            }
            _ => Ok(()),
        }
    }

    /// Puts those that have come in the order of their ranks; those that want none take the free ones.
    fn number(&self, come: &mut [(Hello, TcpStream)]) {
        let mut free = unasked(1..come.len() + 1, come).into_iter();
        for (hello, _) in come.iter_mut().filter(|(hello, _)| hello.rank.is_none()) {
            hello.rank = free.next();
        }
        come.sort_by_key(|(hello, _)| hello.rank);
    }

    /// Ranks that nobody has asked for.
    fn free(&self, come: &[(Hello, TcpStream)]) -> Vec<usize> {
        unasked(1..self.size, come)
    }

    /// Tells whether all have come that are awaited.
    fn is_complete(&self, come: &[(Hello, TcpStream)]) -> bool {
        if self.is_open { self.free(come).is_empty() } else { come.len() + 1 == self.size }
    }

    /// The number of processes that this one names to rank 0; an open meeting has none.
    fn told_size(&self) -> usize {
        if self.is_open { 0 } else { self.size }
    }

    /// Ranks that nobody has, where those that want none get the first ones.
    fn missing(&self, come: &[(Hello, TcpStream)]) -> Vec<usize> {
        let any = come.iter().filter(|(hello, _)| hello.rank.is_none() && !self.is_open).count();
        self.free(come).split_off(any)
    }

    /// Joins through rank 0: connects to it until it answers, and then to the others. A newcomer waits for as long as
    /// a process of the job keeps proving that it is there.
    pub(super) fn meet(&self, check: Check<'_>) -> Result<JoinedProcesses> {
        let (mut last, mut until) = (String::from("nobody listens there"), self.until);
        let is_newcomer = self.is_open && self.rank.is_none();
        while Instant::now() < until {
            let failure = self.attend(until, check);
            if is_newcomer && matches!(failure, Ok(_) | Err(JoinFailure::Unanswered(_))) {
                until = end_of(self.timeout);
            }
            match failure {
                Ok((table, first, listener)) if is_newcomer => {
                    match self.mesh(&table, first, &listener, (until.min(Instant::now() + MESH), check)) {
                        Ok(joined) => return Ok(joined),
                        // The ranks of the job go on without it, and call it again.
                        Err(error) => last = error.to_string(),
                    }
                }
                Ok((table, first, listener)) => return self.mesh(&table, first, &listener, (until, check)),
                Err(JoinFailure::Final(error)) => return Err(error),
                Err(JoinFailure::Again(why) | JoinFailure::Unanswered(why)) => last = why,
            }
            check()?;
            thread::sleep(PAUSE);
        }
        Err(self.late(vec![0], &last))
    }

    fn attend(&self, until: Instant, check: Check<'_>) -> Result<(ProcessTable, TcpStream, TcpListener), JoinFailure> {
        let mut stream = connect(&self.addresses, until)?;
        let own = stream.local_addr()?.ip();
        let listener = TcpListener::bind((self.bind.unwrap_or(own), 0))?;
        listener.set_nonblocking(true)?;
        let ip = self.bind.filter(|ip| !ip.is_unspecified()).unwrap_or(own);
        let listens = SocketAddr::new(ip, listener.local_addr()?.port());
        let mut timed = TimedStream { stream: &mut stream, until };
        let job = self.secret.prove(&mut timed, ConnectionEnd::Dialer, &self.job)?;
        let hello = Hello { size: self.told_size(), rank: self.rank, listens };
        write(&mut timed, &hello.to_bytes())?;
        while is_silent(timed.stream) && Instant::now() < until {
            check()?;
            thread::sleep(PAUSE);
        }
        let answer = read(&mut timed).map_err(|error| JoinFailure::Unanswered(error.to_string()))?;
        let words = |words: &[u8]| String::from_utf8_lossy(words).into_owned();
        match answer.split_first() {
            Some((&WELCOME, table)) => Ok((ProcessTable::from_bytes(table, self.told_size())?, stream, listener)),
            Some((&REFUSED, why)) => Err(failed(words(why)).into()),
            Some((&OTHER_JOB, _)) => Err(JoinFailure::Again(format!("the job `{job}` meets there"))),
            _ => Err(failed("rank 0 has answered with something else".into()).into()),
        }
    }

    /// Connects to the processes of lower ranks, and waits for those of higher ones.
    fn mesh(
        &self,
        table: &ProcessTable,
        first: TcpStream,
        listener: &TcpListener,
        (until, check): (Instant, Check<'_>),
    ) -> Result<JoinedProcesses> {
        let ProcessTable { rank, meeting, addresses } = table;
        let size = addresses.len();
        let mut connections: Vec<Option<TcpStream>> = (0..size).map(|_| None).collect();
        connections[0] = Some(first);
        let mut w = Writer::default();
        w.u64(meeting[0]).u64(meeting[1]).usize(*rank);
        let hello = w.finish();
        for lower in 1..*rank {
            connections[lower] = Some(loop {
                match self.dial(addresses[lower], &hello, until) {
                    Ok(stream) => break stream,
                    Err(error) if error.kind() == Io::PermissionDenied => {
                        return Err(failed(format!("rank {lower}, at {}: {error}", addresses[lower])));
                    }
                    Err(error) if Instant::now() >= until => return Err(self.late(vec![lower], &error.to_string())),
                    Err(_) => check_running(&connections).and_then(|()| check())?,
                }
                thread::sleep(PAUSE);
            });
        }
        let is_missing = |connections: &[Option<TcpStream>]| {
            (rank + 1..size).filter(|&rank| connections[rank].is_none()).collect::<Vec<_>>()
        };
        let mut refused = String::new();
        let mut visitors = Visitors::of(listener, &self.secret, &self.job);
        while !is_missing(&connections).is_empty() {
            let turn = until.min(Instant::now() + TURN);
            let Some(Visit { stream, said }) = visitors.next(turn) else {
                if Instant::now() >= until {
                    return Err(self.late(is_missing(&connections), &visitors.take_refused().unwrap_or(refused)));
                }
                check_running(&connections).and_then(|()| check())?;
                continue;
            };
            let of = |(job, bytes): (String, Vec<u8>)| {
                let mut r = WireReader::new(&bytes);
                let ours = [r.u64().ok()?, r.u64().ok()?] == *meeting && job == self.job;
                r.usize().ok().filter(|from| ours && *from > *rank && *from < size)
            };
            match said.map(of) {
                Ok(Some(from)) if connections[from].is_none() => connections[from] = Some(stream),
                Ok(_) => refused = "one of another meeting has come".into(),
                Err(error) => refused = error.to_string(),
            }
        }
        let here = addresses[*rank].ip();
        let local_rank = addresses[..*rank].iter().filter(|other| other.ip() == here).count();
        JoinedProcesses { rank: *rank, local_rank, connections }.ready()
    }

    /// Connects to a process of a lower rank.
    fn dial(&self, at: SocketAddr, hello: &[u8], until: Instant) -> io::Result<TcpStream> {
        let mut stream = connect(&[at], until)?;
        let mut timed = TimedStream { stream: &mut stream, until };
        self.secret.prove(&mut timed, ConnectionEnd::Dialer, &self.job)?;
        write(&mut timed, hello)?;
        Ok(stream)
    }

    fn late(&self, missing: Vec<usize>, why: &str) -> Error {
        let at = self.addresses[0];
        let why = if why.is_empty() { String::new() } else { format!("; the last that failed: {why}") };
        let calls = format!("they did not join the job `{}` at {at}{why}", self.job);
        ErrorKind::Timeout { op: OP, waited: self.timeout, missing, called: false, calls }.into()
    }
}

/// Ranks of a range that nobody has asked for.
fn unasked(ranks: Range<usize>, come: &[(Hello, TcpStream)]) -> Vec<usize> {
    ranks.filter(|&rank| come.iter().all(|(hello, _)| hello.rank != Some(rank))).collect()
}

/// An error if rank 0 has ended, for which nobody else will be waited.
fn check_running(connections: &[Option<TcpStream>]) -> Result<()> {
    match connections.first() {
        Some(Some(first)) if has_ended(first) => Err(failed(
            "rank 0 has ended while the others were connecting to each other: its own error says why".into(),
        )),
        _ => Ok(()),
    }
}

fn answer(stream: &mut TcpStream, kind: u8, words: &[u8]) {
    let mut timed = TimedStream { stream, until: Instant::now() + PATIENCE };
    // One that has gone needs no answer.
    let _ = write(&mut timed, &[&[kind], words].concat());
}
