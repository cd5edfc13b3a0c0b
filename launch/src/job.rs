//! The description of a job: its program, its ranks, and where they meet.

use std::{
    env,
    ffi::OsString,
    io::{self, ErrorKind},
    path::PathBuf,
};

/// The most ranks of one node.
const MOST_RANKS: usize = 4096;
/// The variable with the secret of the job.
pub(crate) const SECRET: &str = "WEFTGRAD_SECRET";

/// The ranks of a program on this machine, as processes that are started, watched and ended together.
///
/// Each process has its rank, the number of ranks, the address at which all meet, and a secret in its environment.
/// `engine_process::Tcp::from_env` reads them. Their lines are passed on behind the number of the rank. Once one fails,
/// the others are ended: by SIGTERM, and by SIGKILL after 1.5 seconds. SIGINT, SIGTERM and SIGHUP are forwarded to all.
///
/// ```no_run
/// # fn main() -> std::io::Result<()> {
/// let status = launch::Job::new("target/release/ddp", 4).args(["--engine", "processes"]).run()?;
/// std::process::exit(status.into());
/// # }
/// ```
#[derive(Clone, Debug)]
#[doc(alias("torchrun"), alias("mpirun"), alias("accelerate"))]
pub struct Job {
    pub(crate) program: OsString,
    pub(crate) args: Vec<OsString>,
    /// The number of ranks of this node.
    pub(crate) ranks: usize,
    pub(crate) nodes: usize,
    pub(crate) node_rank: usize,
    pub(crate) endpoint: Option<String>,
    /// The name of the job, if one was given.
    pub(crate) name: Option<String>,
    pub(crate) max_restarts: usize,
    /// The fewest ranks of this node that go on without those that have failed; all, if none.
    pub(crate) min_ranks: Option<usize>,
    /// The most ranks that run at once, if processes may join.
    pub(crate) max_ranks: Option<usize>,
    pub(crate) log_dir: Option<PathBuf>,
    /// The program that [becomes a rank](crate::become_rank).
    pub(crate) through: Option<PathBuf>,
}

impl Job {
    /// Describes `ranks` processes of a program, on one node.
    pub fn new(program: impl Into<OsString>, ranks: usize) -> Self {
        Job {
            program: program.into(),
            args: Vec::new(),
            ranks,
            nodes: 1,
            node_rank: 0,
            endpoint: None,
            name: None,
            max_restarts: 0,
            min_ranks: None,
            max_ranks: None,
            log_dir: None,
            through: None,
        }
    }

    /// Describes `ranks` processes of the running program, with its arguments.
    ///
    /// # Errors
    /// An error if the path of the program is unknown.
    pub fn of_this_program(ranks: usize) -> io::Result<Self> {
        Ok(Job::new(env::current_exe()?, ranks).args(env::args_os().skip(1)))
    }

    /// Adds arguments of the program.
    pub fn args<A: Into<OsString>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// Makes this machine one of several nodes, each of which runs a launcher with equally many ranks. The ranks of
    /// node `node_rank` follow those of the nodes before it. All meet at `endpoint`, `host:port`, whose host is node 0.
    pub fn nodes(mut self, nodes: usize, node_rank: usize, endpoint: impl Into<String>) -> Self {
        (self.nodes, self.node_rank, self.endpoint) = (nodes, node_rank, Some(endpoint.into()));
        self
    }

    /// Names the job. Ranks of another name do not join it, such as those of an earlier job at the same address.
    /// Several nodes give one name; without it, theirs is the endpoint.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Starts all ranks of this node again, at most so many times, after one has failed. The default is 0. The variable
    /// `TORCHELASTIC_RESTART_COUNT` has the number of restarts so far. A program goes on from its last checkpoint.
    pub fn max_restarts(mut self, most: usize) -> Self {
        self.max_restarts = most;
        self
    }

    /// Lets the other ranks of this node go on when some fail, as long as at least so many are left. The default is all
    /// of them. The program must be one that goes on, such as an elastic run. Give as many as its quorum needs. A
    /// rank that is stopped for 5 seconds after all others have ended is killed.
    pub fn min_ranks(mut self, fewest: usize) -> Self {
        self.min_ranks = Some(fewest);
        self
    }

    /// Lets processes join the running ranks, of which there are `min` to `max` on this node then. A rank that has
    /// failed is started as a newcomer, which the others take in between two steps, at most
    /// [`max_restarts`](Job::max_restarts) times in all. Each SIGUSR1 to the launcher starts one more, up to `max`.
    /// Once fewer than `min` run here, the job ends. A rank that is stopped for 15 seconds is killed. With an endpoint,
    /// processes of all nodes join at the port after it, as long as a rank runs on its host.
    ///
    /// The program must be an elastic run. It makes the file that `WEFTGRAD_MEMBER_FILE` names once the process is in
    /// the run. Before the first such file, a failure starts all ranks again. At the end of the run, newcomers without
    /// one are ended.
    pub fn elastic(mut self, min: usize, max: usize) -> Self {
        (self.min_ranks, self.max_ranks) = (Some(min), Some(max));
        self
    }

    /// Writes the lines of each rank to a file `rank-R.log` in a folder too.
    pub fn log_dir(mut self, folder: impl Into<PathBuf>) -> Self {
        self.log_dir = Some(folder.into());
        self
    }

    /// Starts ranks through a program that calls [`become_rank`](crate::become_rank), so that they end with this
    /// process, however it ends.
    pub fn through(mut self, program: impl Into<PathBuf>) -> Self {
        self.through = Some(program.into());
        self
    }

    /// The rank with which a process of this node starts. Those beyond the first ranks of all nodes, which join later,
    /// follow them by nodes.
    pub(crate) fn rank_of(&self, local_rank: usize) -> usize {
        let more = self.max_ranks.map_or(0, |most| most - self.ranks);
        match local_rank.checked_sub(self.ranks) {
            Some(later) => self.world_size() + self.node_rank * more + later,
            None => self.node_rank * self.ranks + local_rank,
        }
    }

    /// The number of ranks of all nodes.
    pub(crate) fn world_size(&self) -> usize {
        self.ranks * self.nodes
    }

    /// Checks that the description does not contradict itself, and that several nodes have a secret.
    pub(crate) fn check(&self) -> io::Result<()> {
        let wrong = |why: String| Err(io::Error::new(ErrorKind::InvalidInput, why));
        let Job { ranks, nodes, node_rank, .. } = *self;
        if ranks == 0 || nodes == 0 {
            return wrong(format!("{ranks} ranks on each of {nodes} nodes are none: give at least 1 of both"));
        }
        if ranks > MOST_RANKS || ranks.checked_mul(nodes).is_none() {
            return wrong(format!(
                "{ranks} ranks on each of {nodes} nodes are too many: give at most {MOST_RANKS} of a node"
            ));
        }
        if let Some(fewest) = self.min_ranks.filter(|fewest| !(1..=ranks).contains(fewest)) {
            return wrong(format!("{fewest} ranks cannot be left of {ranks}: give 1 to {ranks}"));
        }
        if let Some(most) = self.max_ranks.filter(|most| *most < ranks || *most > MOST_RANKS) {
            return wrong(format!("{ranks} ranks cannot begin where at most {most} run: give {ranks} to {MOST_RANKS}"));
        }
        if node_rank >= nodes {
            return wrong(format!("node {node_rank} is none of {nodes}: nodes count from 0"));
        }
        if let Some(endpoint) = &self.endpoint {
            let (_, port) = host_and_port(endpoint)?;
            if self.max_ranks.is_some() && port == u16::MAX {
                return wrong(format!("processes join at the port after that of `{endpoint}`: give one below 65535"));
            }
        } else if nodes > 1 {
            return wrong(
                "several nodes need an address at which their ranks meet: give `--endpoint HOST:PORT` to all, with the host of node 0 and a free port of it".into(),
            );
        }
        if nodes > 1 && !has_secret() {
            return wrong(
                "ranks of several nodes prove a secret to each other, and the environment has none: type `(umask 077; openssl rand -hex 32 > secret)` once, copy the file to all \
                 nodes, and `export WEFTGRAD_SECRET_FILE=secret` on each; or `export WEFTGRAD_SECRET=...` with one value on all"
                    .into(),
            );
        }
        Ok(())
    }
}

/// Tells whether the environment has a secret, or names a file of it.
fn has_secret() -> bool {
    [SECRET, "WEFTGRAD_SECRET_FILE"].iter().any(|name| env::var_os(name).is_some_and(|value| !value.is_empty()))
}

pub(crate) fn host_and_port(endpoint: &str) -> io::Result<(&str, u16)> {
    let parts = endpoint.rsplit_once(':').filter(|(host, _)| !host.is_empty());
    parts.and_then(|(host, port)| Some((host, port.parse().ok().filter(|&port| port > 0)?))).ok_or_else(|| {
        let why = format!("`{endpoint}` is no host:port: give node 0's name or address, and a free port of it");
        io::Error::new(ErrorKind::InvalidInput, why)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_contradicts_itself_is_refused_with_what_to_give() {
        let of = |ranks: usize, nodes: usize, node: usize, at: &str| Job::new("true", ranks).nodes(nodes, node, at);
        for (job, says) in [
            (Job::new("true", 0), "at least 1"),
            (of(1, 0, 0, "a:1"), "at least 1"),
            (of(usize::MAX, 2, 0, "a:1"), "too many"),
            (Job::new("true", 5000), "at most 4096"),
            (Job::new("true", 2).min_ranks(3), "give 1 to 2"),
            (Job::new("true", 3).elastic(1, 2), "give 3 to 4096"),
            (of(2, 2, 0, "a:65535").elastic(1, 2), "below 65535"),
            (of(1, 2, 2, "a:1"), "nodes count from 0"),
            (of(1, 2, 0, "a"), "is no host:port"),
            (of(1, 2, 0, "a:x"), "is no host:port"),
            (Job { endpoint: None, ..of(1, 2, 0, "") }, "--endpoint HOST:PORT"),
        ] {
            let error = job.check().expect_err("refused").to_string();
            assert!(error.contains(says), "{error}");
        }
    }
}
