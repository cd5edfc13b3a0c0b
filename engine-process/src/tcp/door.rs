//! The join address of a running job: newcomers wait there until its ranks take them in.
//!
//! One rank of the job listens, the first on the host of the address. Newcomers prove the secret, and wait. In an open
//! meeting the ranks of the job come with their ranks, and newcomers get those after them. The rank that listens has
//! rank 0 there. Each process then has a connection to every other. The
//! connections that the ranks had before stay: if the meeting fails, the job goes on over those.

use std::{
    fs::{DirBuilder, File},
    io,
    net::{IpAddr, SocketAddr, TcpListener},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use numcore::{Error, Result};
use parking_lot::Mutex;

use super::{
    OpenTransport, end_of,
    rendezvous::{Check, Meeting, TURN},
    secret::Secret,
    socket::{is_closed, is_own},
    table::Hello,
    visitors::{Visit, Visitors},
};

/// The address at which processes join a running job.
#[derive(Clone)]
pub(crate) struct JoinAddress {
    pub(super) addresses: Vec<SocketAddr>,
    pub(super) job: String,
    pub(super) secret: Secret,
    pub(super) bind: Option<IpAddr>,
    pub(super) silence: Duration,
    pub(super) lends_memory: bool,
    /// The file by which a process tells its launcher that it is in the run.
    pub(super) member_file: Option<PathBuf>,
}

impl JoinAddress {
    /// Tells whether this process is on the host of the address.
    pub(crate) fn is_here(&self) -> bool {
        self.addresses.iter().any(|at| is_own(at.ip()))
    }

    /// Tells the launcher of this process, if it wants to know, that the process is in the run. The launcher sees the
    /// file once: it may be removed later. Makes its folder again if something has cleaned the temporary files, and
    /// once more if that comes in between.
    ///
    /// # Errors
    /// An error with the path and a remedy, if the file cannot be made.
    pub(crate) fn announce_member(&self) -> Result<()> {
        let Some(file) = &self.member_file else { return Ok(()) };
        let mut folder = DirBuilder::new();
        folder.recursive(true);
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut folder, 0o700);
        let make = || file.parent().map_or(Ok(()), |at| folder.create(at)).and_then(|()| File::create(file)).map(drop);
        let unmade = |error: io::Error| {
            let why = format!(
                "{error}: the launcher waits for this file; let TMPDIR name a folder in which it and its ranks can \
                 make files, and start the job again"
            );
            Error::io(file, io::Error::new(error.kind(), why))
        };
        make().or_else(|_| make()).map_err(unmade)
    }

    /// Listens for newcomers; none while another process listens.
    pub(crate) fn listen(&self) -> Option<Door> {
        let listener = self.meeting(None, 0, Duration::ZERO).try_listen().ok()?;
        Door::new(listener, self.clone()).ok()
    }

    /// Meets the `size` ranks of the job and the newcomers that wait, as rank `rank`. Rank 0 passes its door. Ends with
    /// an error once `check` does. Returns the function that opens the transport, and the door.
    pub(crate) fn meet(
        &self,
        (rank, size): (usize, usize),
        door: Option<Door>,
        timeout: Duration,
        check: Check<'_>,
    ) -> Result<(OpenTransport, Option<Door>)> {
        let meeting = self.meeting(Some(rank), size, timeout);
        let (joined, door) = match door.filter(|_| rank == 0) {
            Some(door) => {
                let (listener, wait) = door.close()?;
                let joined = meeting.gather(&listener, wait, check)?;
                (joined, Door::new(listener, self.clone()).ok())
            }
            None => (meeting.meet(check)?, None),
        };
        Ok((joined.opened(self.silence, timeout, self.lends_memory), door))
    }

    fn meeting(&self, rank: Option<usize>, size: usize, timeout: Duration) -> Meeting {
        let JoinAddress { addresses, job, secret, bind, .. } = self.clone();
        Meeting { addresses, job, secret, bind, rank, size, is_open: true, until: end_of(timeout), timeout }
    }
}

/// A listener at the join address, and the connections that have proved the secret there. Dropping it closes them.
pub(crate) struct Door {
    thread: Option<JoinHandle<TcpListener>>,
    is_closing: Arc<AtomicBool>,
    visits: Arc<Mutex<Vec<Visit>>>,
    /// The name of the job that the newcomers join.
    job: String,
}

impl Door {
    fn new(listener: TcpListener, at: JoinAddress) -> Result<Self> {
        let (is_closing, visits) = (Arc::new(AtomicBool::new(false)), Arc::<Mutex<Vec<Visit>>>::default());
        let (closing, heard, job) = (is_closing.clone(), visits.clone(), at.job.clone());
        let listen = move || {
            let mut visitors = Visitors::of(&listener, &at.secret, &at.job);
            while !closing.load(Ordering::Relaxed) {
                let visit = visitors.next(Instant::now() + TURN).filter(|visit| visit.said.is_ok());
                heard.lock().extend(visit);
            }
            drop(visitors);
            listener
        };
        let thread = thread::Builder::new().name("door".into()).spawn(listen);
        let thread = Some(thread.map_err(|error| Error::io("thread door", error))?);
        Ok(Door { thread, is_closing, visits, job })
    }

    /// The number of newcomers that wait, and that a meeting admits.
    pub(crate) fn waiting(&self) -> usize {
        let mut visits = self.visits.lock();
        visits.retain(|visit| !is_closed(&visit.stream));
        let is_newcomer = |visit: &&Visit| {
            let said = visit.said.as_ref().ok().filter(|(job, _)| *job == self.job);
            let hello = said.and_then(|(_, bytes)| Hello::from_bytes(bytes).ok());
            hello.is_some_and(|hello| hello.rank.is_none() && hello.size == 0)
        };
        visits.iter().filter(is_newcomer).count()
    }

    /// Takes the listener and those that wait.
    fn close(mut self) -> Result<(TcpListener, Vec<Visit>)> {
        self.is_closing.store(true, Ordering::Relaxed);
        let lost = || Error::internal("Processes::rendezvous", "the thread that listens for newcomers has ended");
        let listener = self.thread.take().and_then(|thread| thread.join().ok()).ok_or_else(lost)?;
        let visits = std::mem::take(&mut *self.visits.lock());
        Ok((listener, visits))
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.is_closing.store(true, Ordering::Relaxed);
        // The port is free once the thread has ended, within a turn.
        drop(self.thread.take().map(JoinHandle::join));
    }
}
