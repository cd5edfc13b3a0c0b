//! Ranks by configuration: their number, the rank of this process, and the engine that joins them.

use std::net::SocketAddr;

use numcore::{Error, Result, Within};

/// The position of this process among the ranks, for programs that are configured with world size, rank, role and
/// address. [`engine`](DistributedTrainConfig::engine) returns the kind of engine; `weftgrad::Launcher::from_config`
/// makes the ranks.
///
/// ```
/// use train::compat::{DistributedTrainConfig, EngineKind};
/// # fn main() -> numcore::Result<()> {
/// let four = DistributedTrainConfig { world_size: 4, ..Default::default() };
/// assert_eq!(four.engine(None)?, EngineKind::Threads);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DistributedTrainConfig {
    /// The number of ranks that train.
    pub world_size: usize,
    /// The rank of this process; 0 where all ranks are threads of it.
    pub rank: usize,
    /// The rank among the ranks on this machine, which selects the device.
    pub local_rank: usize,
    /// The role of this rank beside training.
    pub role: DistributedRole,
    /// The address at which the processes join over TCP, where rank 0 listens. Without an address, a launcher joins the
    /// processes, or ranks are threads.
    pub coordinator_addr: Option<SocketAddr>,
    /// The kind of device that ranks compute on.
    pub backend: DistributedBackend,
}

/// The role of a rank beside training: every rank trains on its share, and gradients are exchanged by all with all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DistributedRole {
    /// Rank 0: its clock counts, and it sends measurements to sinks.
    #[default]
    Coordinator,
    /// Any other rank.
    Worker,
}

/// The kind of device that ranks compute on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DistributedBackend {
    /// GPUs where the program was built with them and the machine has some, and otherwise the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// NVIDIA GPUs.
    Cuda,
    /// GPUs through WebGPU.
    Wgpu,
}

/// The engine that joins the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineKind {
    /// No engine: there is one rank.
    NoOp,
    /// Threads: each rank is a thread of this process.
    Threads,
    /// MPI: each rank is a process. In a build without MPI, the launcher's variables give an address for TCP.
    Mpi,
    /// TCP: processes join at the address of rank 0.
    Tcp,
}

/// The process's place in the world, as a launcher such as `mpirun` gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchedProcess {
    /// The rank of the process.
    pub rank: usize,
    /// The number of processes.
    pub world_size: usize,
    /// The rank among the processes of this machine.
    pub local_rank: usize,
}

impl Default for DistributedTrainConfig {
    /// A world of one rank, on a GPU if there is one.
    fn default() -> Self {
        DistributedTrainConfig {
            world_size: 1,
            rank: 0,
            local_rank: 0,
            role: DistributedRole::Coordinator,
            coordinator_addr: None,
            backend: DistributedBackend::Auto,
        }
    }
}

impl DistributedTrainConfig {
    /// The configuration of a process that a launcher has started.
    pub fn launched(process: LaunchedProcess) -> Self {
        let LaunchedProcess { rank, world_size, local_rank } = process;
        let role = if rank == 0 { DistributedRole::Coordinator } else { DistributedRole::Worker };
        DistributedTrainConfig { world_size, rank, local_rank, role, ..Default::default() }
    }

    /// The engine that joins the ranks, given the launcher's data of this process, if one has started it.
    ///
    /// # Errors
    /// An error if the numbers or the role contradict each other or the launcher. Also if ranks would have to be
    /// processes and no launcher has started them. The error names the field to set or the command that starts the
    /// program.
    #[track_caller]
    pub fn engine(&self, process: Option<LaunchedProcess>) -> Result<EngineKind> {
        self.check().at_caller()?;
        let &DistributedTrainConfig { world_size, rank, coordinator_addr, .. } = self;
        if let Some(process) = process.filter(|process| process.world_size > 1) {
            return self.joined_by(process).at_caller();
        }
        if world_size == 1 {
            return Ok(EngineKind::NoOp);
        }
        if coordinator_addr.is_some() {
            return Ok(EngineKind::Tcp);
        }
        if rank != 0 {
            let why = format!(
                "this process is to be rank {rank} of {world_size}, and no launcher has started it: give a `coordinator_addr` at which all processes join; or start all \
                 with `weftgrad-run -n {world_size} PROGRAM`, or with `mpirun` in a build with the feature `mpi`; or, for {world_size} ranks that are threads of one process, give rank 0"
            );
            return Err(wrong("rank", why)).at_caller();
        }
        Ok(EngineKind::Threads)
    }

    /// Checks that a communicator has as many ranks as are configured.
    pub(crate) fn check_world(&self, ranks: usize) -> Result<()> {
        self.check()?;
        if ranks == self.world_size {
            return Ok(());
        }
        let why = format!(
            "the configuration is for {} ranks, and the communicator has {ranks}: make its ranks by `weftgrad::Launcher::from_config`, or give world_size {ranks}",
            self.world_size
        );
        Err(wrong("world_size", why))
    }

    fn joined_by(&self, process: LaunchedProcess) -> Result<EngineKind> {
        let configured = (self.rank, self.world_size);
        if configured == (process.rank, process.world_size) {
            return Ok(if self.coordinator_addr.is_some() { EngineKind::Tcp } else { EngineKind::Mpi });
        }
        let why = format!(
            "the launcher has started this process as rank {} of {}, and it is configured as rank {} of {}: take rank and world size from the launcher, with \
             `DistributedTrainConfig::launched`",
            process.rank, process.world_size, self.rank, self.world_size
        );
        Err(wrong("rank", why))
    }

    fn check(&self) -> Result<()> {
        let &DistributedTrainConfig { world_size, rank, local_rank, role, .. } = self;
        if world_size == 0 {
            return Err(wrong("world_size", "there is no world of 0 ranks: give 1 or more".into()));
        }
        if rank >= world_size || local_rank >= world_size {
            let why = format!(
                "rank {rank}, on its machine rank {local_rank}, is not one of {world_size}: ranks count from 0"
            );
            return Err(wrong("rank", why));
        }
        match (role, rank) {
            (DistributedRole::Coordinator, 1..) => {
                let why = format!(
                    "rank {rank} cannot be the coordinator, which is rank 0: make it a worker. Every rank trains, the coordinator too"
                );
                Err(wrong("role", why))
            }
            (DistributedRole::Worker, 0) => {
                let why = "rank 0 is the coordinator: make it that, or give this worker a rank from 1 on. Every rank trains, the coordinator too";
                Err(wrong("role", why.into()))
            }
            _ => Ok(()),
        }
    }
}

fn wrong(field: &'static str, why: String) -> Error {
    Error::config("DistributedTrainConfig", field, why)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(rank: usize, world_size: usize) -> DistributedTrainConfig {
        DistributedTrainConfig { rank, world_size, role: DistributedRole::Worker, ..Default::default() }
    }

    fn says(config: &DistributedTrainConfig, process: Option<LaunchedProcess>) -> String {
        config.engine(process).expect_err("no engine").to_string()
    }

    #[test]
    fn configurations_that_fit_have_an_engine() {
        let one = DistributedTrainConfig::default();
        assert_eq!(one.engine(None).unwrap(), EngineKind::NoOp);
        assert_eq!(DistributedTrainConfig { world_size: 3, ..one }.engine(None).unwrap(), EngineKind::Threads);
        for rank in 0..4 {
            let process = LaunchedProcess { rank, world_size: 4, local_rank: rank % 2 };
            let config = DistributedTrainConfig::launched(process);
            assert_eq!(config.engine(Some(process)).unwrap(), EngineKind::Mpi);
            // An address joins them with a launcher and without.
            let address = Some("10.0.0.1:9000".parse().unwrap());
            let config = DistributedTrainConfig { coordinator_addr: address, ..config };
            assert_eq!(config.engine(Some(process)).unwrap(), EngineKind::Tcp);
            assert_eq!(config.engine(None).unwrap(), EngineKind::Tcp);
            assert!(config.check_world(4).is_ok());
        }
        let alone = LaunchedProcess { rank: 0, world_size: 1, local_rank: 0 };
        assert_eq!(DistributedTrainConfig::launched(alone).engine(Some(alone)).unwrap(), EngineKind::NoOp);
    }

    #[test]
    fn others_are_told_what_to_write() {
        let error = says(&worker(2, 4), None);
        assert!(error.contains("this process is to be rank 2 of 4") && error.contains("weftgrad-run -n 4"), "{error}");
        let process = LaunchedProcess { rank: 1, world_size: 2, local_rank: 1 };
        let error = says(&worker(2, 4), Some(process));
        assert!(error.contains("as rank 1 of 2, and it is configured as rank 2 of 4"), "{error}");
        let coordinator = DistributedTrainConfig { role: DistributedRole::Coordinator, ..worker(2, 4) };
        assert!(says(&coordinator, None).contains("rank 2 cannot be the coordinator"));
        assert!(says(&worker(0, 4), None).contains("rank 0 is the coordinator"));
        assert!(says(&worker(4, 4), None).contains("rank 4"));
        assert!(says(&worker(1, 0), None).contains("no world of 0 ranks"));
        let error = worker(1, 4).check_world(2).unwrap_err().to_string();
        assert!(error.contains("for 4 ranks, and the communicator has 2"), "{error}");
    }
}
