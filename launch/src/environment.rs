//! The environment of a rank: torchrun's variables, and the secret of the job.

use std::{
    env,
    fmt::Write,
    fs::{self, DirBuilder},
    io::{self, ErrorKind},
    net::Ipv4Addr,
    os::{fd::OwnedFd, unix::fs::DirBuilderExt},
    path::PathBuf,
    process,
};

#[cfg(not(target_os = "linux"))]
use std::net::TcpListener;
#[cfg(target_os = "linux")]
use std::{net::SocketAddrV4, os::fd::AsRawFd};

#[cfg(target_os = "linux")]
use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrIn, bind, setsockopt, socket, sockopt::ReuseAddr};

use crate::job::{Job, SECRET, host_and_port};

/// The variable with the process number of the launcher.
pub(crate) const LAUNCHER: &str = "WEFTGRAD_LAUNCHER";
/// The variable of a rank that is a child of the launcher.
pub(crate) const IS_CHILD: &str = "WEFTGRAD_IS_CHILD";
/// Variables of launchers above this one, which would contradict its own.
pub(crate) const REMOVED: [&str; 8] = [
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "PMIX_RANK",
    "TORCHELASTIC_USE_AGENT_STORE",
    JOIN_ADDRESS,
    NEWCOMER,
    MEMBER_FILE,
];
/// The variable with the address at which processes join the running job, and that of one that does.
const JOIN_ADDRESS: &str = "WEFTGRAD_JOIN_ADDRESS";
const NEWCOMER: &str = "WEFTGRAD_NEWCOMER";
/// The variable with the file that a process makes once it is in a world of the run.
pub(crate) const MEMBER_FILE: &str = "WEFTGRAD_MEMBER_FILE";
/// The first of the ports for jobs of one node, and their number. The system gives these ports to no connection.
const PORTS: (u16, u16) = (10_000, 20_000);

/// The place where the ranks of one start of a job meet, and the secret that they share.
#[derive(Debug)]
pub(crate) struct Meeting {
    host: String,
    port: u16,
    /// The port at which processes join the running job, if they may.
    join_port: Option<u16>,
    /// The ports that this launcher has chosen.
    _reserved: Vec<ReservedPort>,
    /// The folder of the files by which processes say that they are in the run, in the same case.
    members: Option<MemberFolder>,
    /// The name of the job.
    name: String,
    /// The secret of the job, if this launcher starts all ranks. Otherwise the environment has it.
    secret: Option<String>,
}

impl Meeting {
    /// Makes the meeting of a start. On one node, each start has its own name and secret. So nothing that is left of an
    /// earlier one meets its ranks. Several nodes have no such name in common but their endpoint, or a given one.
    pub(crate) fn new(job: &Job) -> io::Result<Self> {
        let given = job.endpoint.as_deref().map(host_and_port).transpose()?;
        let mut reserved = Vec::new();
        let mut free_port = || {
            let port = ReservedPort::choose()?;
            let number = port.number;
            reserved.push(port);
            io::Result::Ok(number)
        };
        let (host, port) = match given {
            Some((host, port)) => (host.to_string(), port),
            None => (Ipv4Addr::LOCALHOST.to_string(), free_port()?),
        };
        let is_alone = job.nodes == 1;
        let name = match &job.name {
            Some(name) if !is_alone => name.clone(),
            None if !is_alone => format!("{host}:{port}"),
            name => format!("{}-{}", name.as_deref().unwrap_or("run"), hex::<8>()?),
        };
        let secret = if is_alone { Some(hex::<32>()?) } else { None };
        let join_port = |_| if job.endpoint.is_some() { Ok(port.saturating_add(1)) } else { free_port() };
        let join_port = job.max_ranks.map(join_port).transpose()?;
        let members = job.max_ranks.map(|_| MemberFolder::new()).transpose()?;
        Ok(Meeting { host, port, join_port, _reserved: reserved, members, name, secret })
    }

    /// The file that a process makes once it is in a world of the run, if others may join that. Makes its folder again
    /// if something has removed it, as programs do that clean the folder of temporary files.
    ///
    /// # Errors
    /// An error if the folder cannot be made.
    pub(crate) fn member_file(&self, local_rank: usize, start: usize) -> io::Result<Option<PathBuf>> {
        let Some(folder) = &self.members else { return Ok(None) };
        folder.make()?;
        Ok(Some(folder.0.join(format!("rank-{local_rank}-{start}"))))
    }

    /// The variables of a rank of this node, in the `start`-th start of the job. A newcomer joins the running ranks.
    pub(crate) fn variables(
        &self,
        job: &Job,
        local_rank: usize,
        (start, is_newcomer): (usize, bool),
    ) -> Vec<(&'static str, String)> {
        let rank = job.rank_of(local_rank);
        let mut all = vec![
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", job.world_size().max(rank + 1).to_string()),
            ("LOCAL_RANK", local_rank.to_string()),
            ("LOCAL_WORLD_SIZE", job.ranks.to_string()),
            ("GROUP_RANK", job.node_rank.to_string()),
            ("GROUP_WORLD_SIZE", job.nodes.to_string()),
            ("MASTER_ADDR", self.host.clone()),
            ("MASTER_PORT", self.port.to_string()),
            ("TORCHELASTIC_RESTART_COUNT", start.to_string()),
            ("TORCHELASTIC_MAX_RESTARTS", job.max_restarts.to_string()),
            ("TORCHELASTIC_RUN_ID", self.name.clone()),
            (LAUNCHER, process::id().to_string()),
        ];
        all.extend(self.join_port.map(|port| (JOIN_ADDRESS, format!("{}:{port}", self.host))));
        all.extend(is_newcomer.then(|| (NEWCOMER, "1".to_string())));
        all.extend(self.secret.iter().map(|secret| (SECRET, secret.clone())));
        all.extend(job.through.is_none().then(|| (IS_CHILD, "1".to_string())));
        all
    }
}

/// A folder that only this user can use. Dropping it removes it.
#[derive(Debug)]
struct MemberFolder(PathBuf);

impl MemberFolder {
    fn new() -> io::Result<Self> {
        let folder = MemberFolder(env::temp_dir().join(format!("weftgrad-run-{}-{}", process::id(), hex::<8>()?)));
        folder.make().map(|()| folder)
    }

    /// Makes the folder, unless it is there.
    fn make(&self) -> io::Result<()> {
        let made = DirBuilder::new().mode(0o700).recursive(true).create(&self.0);
        made.map_err(|error| io::Error::new(error.kind(), format!("the folder {}: {error}", self.0.display())))
    }
}

impl Drop for MemberFolder {
    fn drop(&mut self) {
        // One that cannot be removed has empty files alone.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A port of the loopback address at which nobody listens. On Linux it is bound without a listener, so no other
/// launcher gets it. That keeps out nobody who sets `SO_REUSEADDR`, as those who listen at a known port do.
#[derive(Debug)]
struct ReservedPort {
    number: u16,
    _bound: OwnedFd,
}

impl ReservedPort {
    fn choose() -> io::Result<Self> {
        let mut last = None;
        for _ in 0..100 {
            let number = PORTS.0 + u16::from_le_bytes(random()?) % PORTS.1;
            match Self::bind(number) {
                Ok(port) => return Ok(port),
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or_else(|| ErrorKind::AddrInUse.into()))
    }

    #[cfg(target_os = "linux")]
    fn bind(number: u16) -> io::Result<Self> {
        let bound = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
        bind(bound.as_raw_fd(), &SockaddrIn::from(SocketAddrV4::new(Ipv4Addr::LOCALHOST, number)))?;
        // Set afterwards, so that the port was nobody else's.
        setsockopt(&bound, ReuseAddr, &true)?;
        Ok(ReservedPort { number, _bound: bound })
    }

    #[cfg(not(target_os = "linux"))]
    fn bind(number: u16) -> io::Result<Self> {
        TcpListener::bind((Ipv4Addr::LOCALHOST, number))?;
        // Elsewhere a bound socket keeps rank 0 out.
        Ok(ReservedPort { number, _bound: fs::File::open("/dev/null")?.into() })
    }
}

fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(io::Error::other)?;
    Ok(bytes)
}

fn hex<const N: usize>() -> io::Result<String> {
    let mut text = String::new();
    for byte in random::<N>()? {
        write!(text, "{byte:02x}").map_err(io::Error::other)?;
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_a_node_follow_those_of_the_nodes_before() {
        let job = Job::new("true", 4).nodes(3, 2, "[::1]:29500");
        let meeting = Meeting::new(&job).unwrap();
        let all = meeting.variables(&job, 1, (5, false));
        let value = |name: &str| all.iter().find(|(of, _)| *of == name).map(|(_, value)| value.as_str());
        assert_eq!((value("RANK"), value("WORLD_SIZE"), value("LOCAL_RANK")), (Some("9"), Some("12"), Some("1")));
        assert_eq!((value("MASTER_ADDR"), value("MASTER_PORT")), (Some("[::1]"), Some("29500")));
        assert_eq!(value("TORCHELASTIC_RESTART_COUNT"), Some("5"));
        // Launchers of several nodes cannot draw one name and one secret.
        assert_eq!((value("TORCHELASTIC_RUN_ID"), value(SECRET)), (Some("[::1]:29500"), None));
        let named = Meeting::new(&job.name("night")).unwrap();
        assert_eq!(named.name, "night");
    }

    #[test]
    fn newcomers_of_several_nodes_join_at_one_address() {
        let all = [0, 1].map(|node| {
            let job = Job::new("true", 2).nodes(2, node, "a:29500").elastic(1, 4);
            let variables = Meeting::new(&job).unwrap().variables(&job, 3, (1, true));
            let value = |name| variables.iter().find(|(of, _)| *of == name).map(|(_, value)| value.clone()).unwrap();
            [value("RANK"), value("WORLD_SIZE"), value(JOIN_ADDRESS)]
        });
        assert_eq!(all, [["5", "6", "a:29501"], ["7", "8", "a:29501"]]);
    }

    #[test]
    fn each_process_has_a_file_of_its_own_in_a_folder_that_is_made_again() {
        let meeting = Meeting::new(&Job::new("true", 2).elastic(1, 2)).unwrap();
        let file = |start| meeting.member_file(0, start).unwrap().unwrap();
        assert!(file(0) != file(1) && !file(0).exists());
        fs::remove_dir_all(file(0).parent().unwrap()).unwrap();
        let newcomer = file(1);
        fs::write(&newcomer, "").unwrap();
        assert!(newcomer.exists());
        drop(meeting);
        assert!(!newcomer.exists());
        let fixed = Meeting::new(&Job::new("true", 2)).unwrap();
        assert_eq!(fixed.member_file(0, 0).unwrap(), None);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_reserved_port_is_rank_0s_and_no_other_launchers() {
        let port = ReservedPort::choose().unwrap();
        assert!(ReservedPort::bind(port.number).is_err(), "another launcher has it too");
        // The library sets SO_REUSEADDR.
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, port.number)).unwrap();
        let _connected = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        drop((listener, port));
    }

    #[test]
    fn each_start_on_one_node_has_a_name_and_a_secret_of_its_own() {
        let job = Job::new("true", 2);
        let [one, two] = [0, 1].map(|_| Meeting::new(&job).unwrap());
        assert!(one.name != two.name && one.secret != two.secret && one.secret.is_some_and(|s| s.len() == 64));
    }
}
