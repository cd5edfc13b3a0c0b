//! The transport of messages through the logs of a job.

use std::{
    collections::{BTreeMap, VecDeque},
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    ptr, slice,
    time::{Duration, Instant},
};

use numcore::{Error, Result};

use super::log::{Arrived, LogReader, LogWriter};
use crate::{Channel, Request, Test, Transport};

/// The pause after a poll without arrivals, as a multiple of the time of that poll: polling loads a file server too.
const PAUSE: u32 = 10;
const SHORTEST_PAUSE: Duration = Duration::from_micros(50);
const LONGEST_PAUSE: Duration = Duration::from_millis(50);
/// The time that reads may fail before the log counts as broken: a file server may be unreachable for a while.
const PATIENCE: Duration = Duration::from_secs(5);
/// The interval of checks for dead processes while nothing arrives.
const LOOK: Duration = Duration::from_secs(1);

/// The request of every sent message: it has ended once the message is written.
const SENT: usize = 0;

/// The key by which messages match receives: sender, channel, tag.
type Address = (usize, u8, u32);

pub(super) struct FolderTransport {
    /// The folder of the job's logs, which the last process to leave deletes.
    job: PathBuf,
    /// True if all processes have come, so that this one has to note when it leaves.
    pub(super) has_started: bool,
    rank: usize,
    peers: Vec<Option<Peer>>,
    arrived: BTreeMap<Address, VecDeque<Vec<u8>>>,
    waiting: BTreeMap<Address, VecDeque<Receive>>,
    ended: BTreeMap<usize, Test>,
    requests: usize,
    next_poll: Instant,
    next_look: Instant,
    /// A file that is locked while this process lives; at its end, the system unlocks it.
    _alive: Option<File>,
}

struct Peer {
    to: LogWriter,
    from: LogReader,
    /// The time since which its log could not be read.
    failing: Option<Instant>,
    /// The reason that no more messages will arrive.
    broken: Option<String>,
}

/// A receive without a matching message so far.
struct Receive {
    request: usize,
    into: *mut u8,
    bytes: usize,
}

impl Peer {
    fn fail(&mut self, rank: usize, job: &Path, error: &io::Error) {
        let is_gone = error.kind() == io::ErrorKind::NotFound;
        if !is_gone && self.failing.get_or_insert_with(Instant::now).elapsed() < PATIENCE {
            return;
        }
        let hint = if is_gone { ": was it deleted, or another job started in its folder?" } else { "" };
        self.broken = Some(format!("the log of rank {rank} in {} cannot be read: {error}{hint}", job.display()));
    }
}

impl FolderTransport {
    /// The path of the log from one process to another.
    fn log(job: &Path, from: usize, to: usize) -> PathBuf {
        job.join(format!("{from}-{to}"))
    }

    /// Creates the logs that this process writes.
    pub(super) fn create(job: PathBuf, rank: usize, size: usize) -> io::Result<Self> {
        fs::create_dir_all(&job)?;
        let peer = |other| {
            let to = LogWriter::create(Self::log(&job, rank, other))?;
            Ok(Peer { to, from: LogReader::new(Self::log(&job, other, rank)), failing: None, broken: None })
        };
        let peers = (0..size).map(|other| (other != rank).then(|| peer(other)).transpose());
        let peers = peers.collect::<io::Result<_>>()?;
        let (arrived, waiting, ended) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let (has_started, now) = (false, Instant::now());
        let (next_poll, next_look, _alive) = (now, now + LOOK, alive(&job, rank)?);
        let requests = SENT;
        Ok(FolderTransport {
            job,
            has_started,
            rank,
            peers,
            arrived,
            waiting,
            ended,
            requests,
            next_poll,
            next_look,
            _alive,
        })
    }

    /// Finds processes of this machine that have ended without leaving. Their last messages are still delivered.
    fn look(&mut self) {
        for from in 0..self.peers.len() {
            if self.peers[from].as_ref().is_none_or(|peer| peer.broken.is_some()) || !self.has_died(from) {
                continue;
            }
            let Some(peer) = &mut self.peers[from] else { continue };
            let last = peer.from.poll().unwrap_or_default();
            peer.broken = Some(format!("the process of rank {from} has ended without leaving the job: was it killed?"));
            last.into_iter().for_each(|message| self.deliver(from, message));
        }
    }

    /// Tells whether a process of this machine has ended without leaving. Processes of other machines are not checked,
    /// since their locks and files may be seen late.
    fn has_died(&self, rank: usize) -> bool {
        let path = self.job.join(format!("alive-{rank}"));
        let is_here = fs::read_to_string(&path).is_ok_and(|machine| !machine.is_empty() && machine == this_machine());
        // The order matters: a process that leaves writes its file before it loses its lock.
        is_here && File::open(path).is_ok_and(|file| file.try_lock_shared().is_ok()) && !self.left(rank).exists()
    }

    /// The path of the file by which a process notes that it writes nothing more.
    fn left(&self, rank: usize) -> PathBuf {
        self.job.join(format!("left-{rank}"))
    }

    fn poll(&mut self) {
        let begun = Instant::now();
        if begun < self.next_poll {
            return;
        }
        let mut any = false;
        for from in 0..self.peers.len() {
            let Some(peer) = self.peers[from].as_mut().filter(|peer| peer.broken.is_none()) else { continue };
            match peer.from.poll() {
                Ok(messages) => {
                    peer.failing = None;
                    any |= !messages.is_empty();
                    messages.into_iter().for_each(|message| self.deliver(from, message));
                }
                Err(error) => peer.fail(from, &self.job, &error),
            }
        }
        if !any && begun >= self.next_look {
            self.next_look = begun + LOOK;
            self.look();
        }
        let took = begun.elapsed();
        let pause = if any { Duration::ZERO } else { (took * PAUSE).clamp(SHORTEST_PAUSE, LONGEST_PAUSE) };
        self.next_poll = begun + took + pause;
    }

    fn deliver(&mut self, from: usize, message: Arrived) {
        let address = address(from, message.on, message.tag);
        match self.waiting.get_mut(&address).and_then(VecDeque::pop_front) {
            Some(receive) => self.end(&receive, &message.bytes),
            None => self.arrived.entry(address).or_default().push_back(message.bytes),
        }
        self.waiting.retain(|_, queue| !queue.is_empty());
    }

    fn end(&mut self, receive: &Receive, bytes: &[u8]) {
        let &Receive { request, into, bytes: room } = receive;
        if bytes.len() > room {
            let why = format!(
                "a message of {} bytes came where {room} were due: all processes must have equal `Processes::message_limit`",
                bytes.len()
            );
            self.ended.insert(request, Test::Failed(why));
            return;
        }
        // SAFETY: the caller of `receive` has promised at least `room` bytes that nothing else uses until the receive
        // has ended, which is now. The message was read into separate memory.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), into, bytes.len()) };
        self.ended.insert(request, Test::Done(bytes.len()));
    }

    /// Drops a receive: nothing is written to its memory any more.
    fn forget(&mut self, request: &Request) {
        for queue in self.waiting.values_mut() {
            queue.retain(|receive| receive.request != request.0);
        }
        self.waiting.retain(|_, queue| !queue.is_empty());
    }

    /// Notes that this process writes nothing more. The last process to do so deletes the job.
    fn leave(&self) {
        if !self.has_started {
            return;
        }
        // Files that cannot be written or deleted are left to the next job in the folder.
        let _ = fs::write(self.left(self.rank), []);
        if (0..self.peers.len()).all(|rank| self.left(rank).exists()) {
            let _ = fs::remove_dir_all(&self.job);
        }
    }
}

impl Transport for FolderTransport {
    fn name(&self) -> &'static str {
        "the shared folder"
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.peers.len()
    }

    fn tags(&self) -> u32 {
        1 << 30
    }

    fn reports_deaths(&self) -> Result<(), String> {
        Err("processes that share a folder cannot go on when one of them dies: use TCP, or MPI (`mpirun --with-ft ulfm` of Open MPI 5), or save checkpoints and start again \
             from the last one, on as many processes as there are then"
            .into())
    }

    fn ends_together(&self) -> bool {
        false
    }

    // SAFETY: asked of callers as the trait says.
    unsafe fn send(&mut self, on: Channel, from: *const u8, bytes: usize, to: usize, tag: u32) -> Result<Request> {
        let Some(Some(peer)) = self.peers.get_mut(to) else {
            return Err(Error::range("send", "rank", to, "another process"));
        };
        // SAFETY: the caller promises that the bytes exist and do not change; they are not used after this call.
        let message = if bytes == 0 { &[][..] } else { unsafe { slice::from_raw_parts(from, bytes) } };
        let failed = |error: io::Error| {
            let why = format!("a message of {bytes} bytes for rank {to} could not be written: {error}");
            Error::io(&self.job, io::Error::new(error.kind(), why))
        };
        peer.to.append(on, tag, message).map_err(failed)?;
        Ok(Request(SENT))
    }

    // SAFETY: asked of callers as the trait says.
    unsafe fn receive(&mut self, on: Channel, into: *mut u8, bytes: usize, from: usize, tag: u32) -> Result<Request> {
        self.requests += 1;
        let receive = Receive { request: self.requests, into, bytes };
        let address = address(from, on, tag);
        match self.arrived.get_mut(&address).and_then(VecDeque::pop_front) {
            Some(message) => self.end(&receive, &message),
            None => self.waiting.entry(address).or_default().push_back(receive),
        }
        if self.arrived.get(&address).is_some_and(VecDeque::is_empty) {
            self.arrived.remove(&address);
        }
        Ok(Request(self.requests))
    }

    fn test(&mut self, request: &Request) -> Test {
        if request.0 == SENT {
            return Test::Done(0);
        }
        if let Some(ended) = self.ended.remove(&request.0) {
            return ended;
        }
        self.poll();
        if let Some(ended) = self.ended.remove(&request.0) {
            return ended;
        }
        let waits = |queue: &VecDeque<Receive>| queue.iter().any(|receive| receive.request == request.0);
        let from = self.waiting.iter().find_map(|(address, queue)| waits(queue).then_some(address.0));
        let Some(why) = from.and_then(|from| self.peers.get(from)?.as_ref()?.broken.clone()) else {
            return Test::Pending;
        };
        self.forget(request);
        Test::Failed(why)
    }

    fn cancel(&mut self, request: &Request) {
        self.forget(request);
        self.ended.entry(request.0).or_insert(Test::Done(0));
    }

    fn moves_while_tested(&self) -> bool {
        false
    }

    fn abort(&mut self) {}

    fn finish(self: Box<Self>) -> Result<()> {
        Ok(())
    }
}

impl Drop for FolderTransport {
    fn drop(&mut self) {
        self.leave();
    }
}

/// Creates the locked file that shows that a process of this machine lives; none if the file system has no locks. The
/// file is locked before it gets its name, so other processes never see it unlocked.
fn alive(job: &Path, rank: usize) -> io::Result<Option<File>> {
    let unnamed = job.join(format!("alive-{rank}.new"));
    fs::write(&unnamed, this_machine())?;
    let file = File::open(&unnamed)?;
    if file.try_lock().is_err() {
        return Ok(None);
    }
    fs::rename(unnamed, job.join(format!("alive-{rank}")))?;
    Ok(Some(file))
}

/// The identity of this machine's boot, if the system gives one.
fn this_machine() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default()
}

fn address(from: usize, on: Channel, tag: u32) -> Address {
    (from, u8::from(on == Channel::Data), tag)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::folder::tests::Scratch;

    #[test]
    fn a_process_that_has_left_has_not_died() {
        let folder = Scratch::new("left");
        let made = |rank| FolderTransport::create(folder.path().join("job"), rank, 3).unwrap();
        let (own, mut leaves, dies) = (made(0), made(1), made(2));
        leaves.has_started = true;
        assert!(!own.has_died(1) && !own.has_died(2));
        drop((leaves, dies));
        assert!(!own.has_died(1));
        assert_eq!(own.has_died(2), !this_machine().is_empty());
    }
}
