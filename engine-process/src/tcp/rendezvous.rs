//! The rendezvous of processes at an address, and their connections to each other.
//!
//! 1. Rank 0 listens at the address. Every other process listens at a port of its own, connects to rank 0, and says
//!    size, wanted rank and where it listens.
//! 2. Once all have come, rank 0 answers each with its rank, the addresses of all, and a random number of this meeting.
//! 3. Each process connects to those of lower ranks, with that number, and accepts those of higher ranks.
//!
//! Both ends prove the secret and name their job first. A connection that proves nothing, or is of another meeting, is
//! closed, and keeps nobody waiting.

use std::{
    fmt::Display,
    io::{self, ErrorKind as Io},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use comm::engine::{WireReader, Writer};
use numcore::{Error, ErrorKind, Result};

use super::{
    OP,
    secret::{ConnectionEnd, Secret},
    socket::{PATIENCE, PAUSE, TimedStream, connect, has_ended, is_closed, read, write},
    table::{Hello, ProcessTable},
    visitors::{Visit, Visitors},
};

/// The time between two looks for the end of rank 0.
const TURN: Duration = Duration::from_millis(100);
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
    pub(super) size: usize,
    pub(super) until: Instant,
    /// The whole time for the meeting, which errors state.
    pub(super) timeout: Duration,
}

/// The connections to all others, by rank.
pub(super) struct JoinedProcesses {
    pub(super) rank: usize,
    pub(super) local_rank: usize,
    pub(super) connections: Vec<Option<TcpStream>>,
}

/// A failed attempt: to be tried again, or final.
enum JoinFailure {
    Again(String),
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
        let until = self.until;
        if self.size == 1 {
            return Ok(JoinedProcesses { rank: 0, local_rank: 0, connections: vec![None] });
        }
        match self.rank {
            Some(0) => self.gather(&self.listen(until)?, until),
            Some(_) => self.meet(until),
            None => match self.try_listen() {
                Ok(listener) => self.gather(&listener, until),
                Err(_) => self.meet(until),
            },
        }
    }

    fn try_listen(&self) -> io::Result<TcpListener> {
        let at = |own: Option<IpAddr>| {
            self.addresses.iter().map(move |at| SocketAddr::new(own.unwrap_or(at.ip()), at.port()))
        };
        let listener = TcpListener::bind(&at(self.bind).collect::<Vec<_>>()[..])?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    }

    /// Listens at the address of the job, once another job that meets there has gone.
    fn listen(&self, until: Instant) -> Result<TcpListener> {
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

    /// Waits, as rank 0, for all others, and answers them.
    fn gather(&self, listener: &TcpListener, until: Instant) -> Result<JoinedProcesses> {
        let mut come: Vec<(Hello, TcpStream)> = Vec::new();
        let mut refused = String::new();
        let mut visitors = Visitors::of(listener, &self.secret, &self.job);
        while come.len() + 1 < self.size {
            let Some(visit) = visitors.next(until) else {
                let missing = self.missing(&come);
                let words = format!("ranks {missing:?} did not come to {} in {:?}", self.addresses[0], self.timeout);
                come.iter_mut().for_each(|(_, stream)| answer(stream, REFUSED, words.as_bytes()));
                return Err(self.late(missing, &visitors.take_refused().unwrap_or(refused)));
            };
            if let Err(why) = self.admit(visit, &mut come) {
                refused = why;
            }
            // One that has died since is waited for again.
            if come.len() + 1 == self.size {
                come.retain(|(_, stream)| !is_closed(stream));
            }
        }
        self.number(&mut come);
        let mut meeting = [0; 16];
        getrandom::fill(&mut meeting).map_err(|error| failed(error.to_string()))?;
        let meeting = [0, 8].map(|at| u64::from_le_bytes(std::array::from_fn(|k| meeting[at + k])));
        let own = self.addresses[0];
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
            _ if hello.size != size => Some(format!(
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
        let mut free = self.free(come).into_iter();
        for (hello, _) in come.iter_mut().filter(|(hello, _)| hello.rank.is_none()) {
            hello.rank = free.next();
        }
        come.sort_by_key(|(hello, _)| hello.rank);
    }

    /// Ranks that nobody has asked for.
    fn free(&self, come: &[(Hello, TcpStream)]) -> Vec<usize> {
        (1..self.size).filter(|&rank| come.iter().all(|(hello, _)| hello.rank != Some(rank))).collect()
    }

    /// Ranks that nobody has, where those that want none get the first ones.
    fn missing(&self, come: &[(Hello, TcpStream)]) -> Vec<usize> {
        let any = come.iter().filter(|(hello, _)| hello.rank.is_none()).count();
        self.free(come).split_off(any)
    }

    /// Joins through rank 0: connects to it until it answers, and then to the others.
    fn meet(&self, until: Instant) -> Result<JoinedProcesses> {
        let mut last = String::from("nobody listens there");
        while Instant::now() < until {
            match self.attend(until) {
                Ok((table, first, listener)) => return self.mesh(&table, first, &listener, until),
                Err(JoinFailure::Final(error)) => return Err(error),
                Err(JoinFailure::Again(why)) => last = why,
            }
            thread::sleep(PAUSE);
        }
        Err(self.late(vec![0], &last))
    }

    fn attend(&self, until: Instant) -> Result<(ProcessTable, TcpStream, TcpListener), JoinFailure> {
        let mut stream = connect(&self.addresses, until)?;
        let own = stream.local_addr()?.ip();
        let listener = TcpListener::bind((self.bind.unwrap_or(own), 0))?;
        listener.set_nonblocking(true)?;
        let ip = self.bind.filter(|ip| !ip.is_unspecified()).unwrap_or(own);
        let listens = SocketAddr::new(ip, listener.local_addr()?.port());
        let mut timed = TimedStream { stream: &mut stream, until };
        let job = self.secret.prove(&mut timed, ConnectionEnd::Dialer, &self.job)?;
        let hello = Hello { size: self.size, rank: self.rank, listens };
        write(&mut timed, &hello.to_bytes())?;
        let answer = read(&mut timed)?;
        let words = |words: &[u8]| String::from_utf8_lossy(words).into_owned();
        match answer.split_first() {
            Some((&WELCOME, table)) => Ok((ProcessTable::from_bytes(table, self.size)?, stream, listener)),
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
        until: Instant,
    ) -> Result<JoinedProcesses> {
        let ProcessTable { rank, meeting, addresses } = table;
        let mut connections: Vec<Option<TcpStream>> = (0..self.size).map(|_| None).collect();
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
                    Err(_) => check_running(&connections)?,
                }
                thread::sleep(PAUSE);
            });
        }
        let is_missing = |connections: &[Option<TcpStream>]| {
            (rank + 1..self.size).filter(|&rank| connections[rank].is_none()).collect::<Vec<_>>()
        };
        let mut refused = String::new();
        let mut visitors = Visitors::of(listener, &self.secret, &self.job);
        while !is_missing(&connections).is_empty() {
            let turn = until.min(Instant::now() + TURN);
            let Some(Visit { stream, said }) = visitors.next(turn) else {
                if Instant::now() >= until {
                    return Err(self.late(is_missing(&connections), &visitors.take_refused().unwrap_or(refused)));
                }
                check_running(&connections)?;
                continue;
            };
            let of = |(job, bytes): (String, Vec<u8>)| {
                let mut r = WireReader::new(&bytes);
                let ours = [r.u64().ok()?, r.u64().ok()?] == *meeting && job == self.job;
                r.usize().ok().filter(|from| ours && *from > *rank && *from < self.size)
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

impl JoinedProcesses {
    /// Makes the connections those of a transport, which never waits for one.
    fn ready(self) -> Result<Self> {
        for stream in self.connections.iter().flatten() {
            let set = stream.set_nodelay(true).and_then(|()| stream.set_nonblocking(true));
            set.map_err(|error| failed(error.to_string()))?;
        }
        Ok(self)
    }
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

fn failed(why: String) -> Error {
    Error::argument(OP, why)
}
