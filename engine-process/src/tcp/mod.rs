//! Processes that TCP joins: each has a connection to every other.

mod door;
mod environment;
mod frame;
mod joined;
mod lent;
#[cfg(all(test, target_os = "linux"))]
mod lent_tests;
mod link;
#[cfg(test)]
mod meeting_tests;
mod outbox;
mod rendezvous;
mod secret;
mod socket;
mod table;
#[cfg(test)]
mod tests;
mod transport;
mod visitors;

use std::{
    fmt, io,
    net::{IpAddr, SocketAddr, ToSocketAddrs},
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use numcore::{Error, Result};

pub(crate) use self::door::{Door, JoinAddress};
use self::{
    rendezvous::Meeting,
    secret::{LONGEST_JOB, Secret},
};
use crate::{Launch, Transport};

const OP: &str = "Tcp::join";
/// The most bytes in one message: those of a call go in turn over one connection.
pub(crate) const MESSAGE: usize = 16 << 20;
/// A time that no process waits for, in place of one that no clock reaches.
const YEAR: Duration = Duration::from_secs(365 * 24 * 60 * 60);
/// The pause before the address of a host is looked up again.
const LOOK_UP: Duration = Duration::from_millis(200);
/// The most processes, since each has a connection to every other.
const MOST: usize = 1 << 14;

/// The function that opens a transport, on the thread that owns it.
pub(crate) type OpenTransport = Box<dyn FnOnce() -> Result<Box<dyn Transport>> + Send>;

/// Processes that find each other at an address, and exchange messages over TCP.
///
/// The process of rank 0 listens at the address until all have come. Each process has its rank from its
/// [`Launch`], or none. One without a rank that listens takes rank 0; the others take ranks in the order of their
/// arrival.
///
/// On a loopback address everybody on the machine may join. Any other address needs a [`secret`](Tcp::secret), which
/// both ends of a connection prove to know before anything else is read. Messages are neither encrypted nor signed: the
/// network must be one that no stranger can change or read.
///
/// A dead process is noticed at once, and a silent one after a [while](Tcp::silence). All others get an error.
///
/// ```
/// use engine_process::{Launch, Tcp, comm::Collectives};
/// use numcore::{NullRuntime, Result};
///
/// # fn main() -> Result<()> {
/// # let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("its number");
/// # let address = free.to_string();
/// // Each rank is a process, usually; here both are threads of one.
/// let rank = |rank| {
///     let launch = Launch { rank, size: 2, local_rank: rank };
///     let processes = Tcp::at(address.as_str()).launch(launch).join()?;
///     processes.run(|_| Ok(NullRuntime::new()), |comm| comm.exchange(&[rank as u8]))
/// };
/// let all = std::thread::scope(|scope| {
///     [0, 1].map(|r| scope.spawn(move || rank(r))).map(|thread| thread.join().unwrap())
/// });
/// for gathered in all {
///     assert_eq!(gathered?, [[0], [1]]);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
#[doc(alias("TCPStore"), alias("init_process_group"), alias("MASTER_ADDR"), alias("gloo"))]
pub struct Tcp {
    address: String,
    job: Option<String>,
    place: Option<(Option<usize>, usize, Option<usize>)>,
    secret: Option<Vec<u8>>,
    bind: Option<IpAddr>,
    join_timeout: Duration,
    silence: Duration,
    /// True if long messages to processes of this host are copied from memory to memory.
    lends_memory: bool,
    /// The address at which processes join the running job.
    join_address: Option<String>,
    member_file: Option<PathBuf>,
    /// True if this process joins there.
    pub(crate) is_newcomer: bool,
}

impl Tcp {
    /// Uses an address, `host:port`, which is equal in all processes. The host is that of rank 0.
    pub fn at(address: impl Into<String>) -> Self {
        Tcp {
            address: address.into(),
            job: None,
            place: None,
            secret: None,
            bind: None,
            join_timeout: Duration::from_secs(300),
            silence: Duration::from_secs(10),
            lends_memory: true,
            join_address: None,
            member_file: None,
            is_newcomer: false,
        }
    }

    /// Takes address, rank and job from the environment of torchrun, Slurm or Open MPI, as
    /// [`from_lookup`](Tcp::from_lookup) describes.
    ///
    /// # Errors
    /// An error that names the variables to set, if no launcher has set them.
    pub fn from_env() -> Result<Self> {
        Tcp::from_lookup(|name| std::env::var(name).ok())
    }

    /// Sets the rank, size and local rank of this process, where the environment does not.
    pub fn launch(mut self, launch: Launch) -> Self {
        let Launch { rank, size, local_rank } = launch;
        self.place = Some((Some(rank), size, Some(local_rank)));
        self
    }

    /// Sets the number of processes, whose ranks come with their arrival. The first at the host of the address has
    /// rank 0.
    pub fn any_rank(mut self, size: usize) -> Self {
        self.place = Some((None, size, None));
        self
    }

    /// Sets the name of the job. Processes of another name at the address are not of this job, and meet after it if
    /// they have its secret. The default is the launcher's, or `job`.
    pub fn job(mut self, name: impl Into<String>) -> Self {
        self.job = Some(name.into());
        self
    }

    /// Sets the secret of the job, at least 16 bytes. By default it is that of the variable `WEFTGRAD_SECRET`, or of
    /// the file that `WEFTGRAD_SECRET_FILE` names.
    pub fn secret(mut self, secret: impl Into<Vec<u8>>) -> Self {
        self.secret = Some(secret.into());
        self
    }

    /// Sets the address of this machine at which this process listens: that of an interface, or `0.0.0.0` for all. By
    /// default rank 0 listens at the address of the job, and others where their connection to it begins.
    pub fn bind(mut self, interface: IpAddr) -> Self {
        self.bind = Some(interface);
        self
    }

    /// Sets the time that [`join`](Tcp::join) waits for the other processes. The default is 5 minutes.
    pub fn join_timeout(mut self, timeout: Duration) -> Self {
        self.join_timeout = timeout;
        self
    }

    /// Sets the time after which a process that writes nothing counts as lost. A process writes eight times as often,
    /// also while it computes. The default is 10 seconds.
    pub fn silence(mut self, most: Duration) -> Self {
        self.silence = most.max(Duration::from_millis(100));
        self
    }

    /// Sets whether processes of one host copy long messages from memory to memory, as they do by default on Linux. The
    /// system allows it to processes of one user that may trace each other. Otherwise, or if this is false on either
    /// side, messages go through the connection.
    pub fn lends_memory(mut self, lends: bool) -> Self {
        self.lends_memory = lends;
        self
    }

    /// Meets the others. Returns the function that opens the transport, the local rank, and the address for newcomers.
    pub(crate) fn connect(&self) -> Result<(OpenTransport, usize, Option<JoinAddress>)> {
        let env = |name: &str| std::env::var(name).ok();
        let until = end_of(self.join_timeout);
        let look_up = |address: &str| {
            let found = resolve(address, until, |address| Ok(address.to_socket_addrs()?.collect()))?;
            if environment::spans_hosts(&env) { reachable(address, found, self.bind) } else { Ok(found) }
        };
        let joins = self.join_address.as_deref().map(look_up).transpose()?;
        let addresses = match &joins {
            Some(joins) if self.is_newcomer => joins.clone(),
            _ => look_up(&self.address)?,
        };
        let secret = self.secret_or(&env)?;
        let bound = self.bind.map(|ip| SocketAddr::new(ip, 0));
        let is_local = addresses.iter().chain(joins.iter().flatten()).chain(&bound).all(|at| at.ip().is_loopback());
        if secret.is_none() && !is_local {
            let why = format!(
                "{} is not a loopback address, and everybody who reaches it could join: give all processes one secret, by \
                 `export WEFTGRAD_SECRET=$(openssl rand -hex 32)`, or a file of it by WEFTGRAD_SECRET_FILE",
                self.bind.map_or(self.address.clone(), |ip| ip.to_string())
            );
            return Err(Error::config(OP, "secret", why));
        }
        let launched = || Launch::from_env().map(|of| (Some(of.rank), of.size, Some(of.local_rank)));
        let (rank, size, local_rank) = self.place.or_else(launched).ok_or_else(|| {
            let why = "the rank of this process is unknown: start all with `weftgrad-run`, `srun` or `torchrun`, or set RANK, WORLD_SIZE and LOCAL_RANK for each, with ranks from 0";
            Error::config(OP, "launch", why)
        })?;
        if size == 0 || size > MOST {
            return Err(Error::range(OP, "number of processes", size, format!("in 1..={MOST}")));
        }
        if let Some(rank) = rank.filter(|&rank| rank >= size) {
            return Err(Error::range(OP, "rank", rank, format!("in 0..{size}")));
        }
        let job = self.job.clone().or_else(|| environment::job(&env)).unwrap_or_else(|| "job".into());
        if job.len() > LONGEST_JOB {
            return Err(Error::range(OP, "bytes of the job's name", job.len(), format!("at most {LONGEST_JOB}")));
        }
        let (secret, bind) = (secret.unwrap_or_default(), self.bind);
        let (silence, lends_memory) = (self.silence, self.lends_memory);
        let at = joins.map(|addresses| {
            let (job, secret, member_file) = (job.clone(), secret.clone(), self.member_file.clone());
            JoinAddress { addresses, job, secret, bind, silence, lends_memory, member_file }
        });
        let (is_open, timeout) = (self.is_newcomer, self.join_timeout);
        let rank = rank.filter(|_| !is_open);
        let meeting = Meeting { addresses, job, secret, bind, rank, size, is_open, until, timeout };
        let joined = meeting.join().map_err(|error| match rank {
            Some(rank) => error.on_rank(rank),
            None => error,
        })?;
        let local_rank = local_rank.unwrap_or(joined.local_rank);
        Ok((joined.opened(silence, timeout, lends_memory), local_rank, at))
    }

    fn secret_or(&self, env: &impl Fn(&str) -> Option<String>) -> Result<Option<Secret>> {
        let line = |bytes: Vec<u8>| bytes.trim_ascii_end().to_vec();
        // As the launcher, which takes an empty variable for none.
        let set = |name| env(name).filter(|value| !value.is_empty());
        let given = match (&self.secret, set("WEFTGRAD_SECRET"), set("WEFTGRAD_SECRET_FILE")) {
            (Some(secret), ..) => Some(secret.clone()),
            (None, Some(secret), _) => Some(line(secret.into_bytes())),
            (None, None, Some(file)) => Some(line(std::fs::read(&file).map_err(|error| Error::io(&file, error))?)),
            (None, None, None) => None,
        };
        let secret = |bytes: Vec<u8>| Secret::new(&bytes).map_err(|why| Error::config(OP, "secret", why));
        given.map(secret).transpose()
    }
}

/// The time at which a timeout that begins now has passed.
fn end_of(timeout: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(timeout).unwrap_or(now + YEAR)
}

/// The addresses of the host. One without an address is asked for again until a time: the name of a machine may
/// become known only when it starts.
fn resolve(
    address: &str,
    until: Instant,
    look_up: impl Fn(&str) -> io::Result<Vec<SocketAddr>>,
) -> Result<Vec<SocketAddr>> {
    let unusable = |why: String| Error::config(OP, "address", format!("`{address}` is no host:port: {why}"));
    loop {
        let why = match look_up(address) {
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => return Err(unusable(error.to_string())),
            Ok(addresses) if addresses.iter().any(|at| at.port() == 0) => {
                return Err(unusable("port 0 is no port that others can find".into()));
            }
            Ok(addresses) if !addresses.is_empty() => return Ok(addresses),
            Ok(_) => "the host has no address".into(),
            Err(error) => error.to_string(),
        };
        if Instant::now() >= until {
            return Err(unusable(why));
        }
        thread::sleep(LOOK_UP);
    }
}

/// The addresses of a host that other machines reach. A loopback address is meant only where it is written. The host of
/// a name that is one is this machine, whose processes listen at the interface `bound` if there is one.
fn reachable(address: &str, found: Vec<SocketAddr>, bound: Option<IpAddr>) -> Result<Vec<SocketAddr>> {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host).trim_matches(['[', ']']);
    if host == "localhost" || host.ends_with(".localhost") || host.parse::<IpAddr>().is_ok() {
        return Ok(found);
    }
    let (local, others): (Vec<SocketAddr>, Vec<SocketAddr>) = found.into_iter().partition(|at| at.ip().is_loopback());
    if let (Some(at), true) = (local.first(), others.is_empty()) {
        if let Some(ip) = bound.filter(|ip| !ip.is_unspecified()) {
            return Ok(vec![SocketAddr::new(ip, at.port())]);
        }
        let why = format!(
            "`{host}` is {} on this machine, where no other one can come: give its address in the network in place of \
             the name, as in `--endpoint 10.0.0.1:{}` or by `Tcp::bind`, or remove the line of /etc/hosts that says so",
            at.ip(),
            at.port()
        );
        return Err(Error::config(OP, "address", why));
    }
    Ok(others)
}

impl fmt::Debug for Tcp {
    /// Leaves the secret out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tcp({}, job {:?})", self.address, self.job)
    }
}

impl From<SocketAddr> for Tcp {
    fn from(address: SocketAddr) -> Self {
        Tcp::at(address.to_string())
    }
}
