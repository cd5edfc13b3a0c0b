//! Launching ranks by a configuration.

use engine_process::{Launch, Tcp};
use numcore::Result;
use train::compat::{DistributedBackend, DistributedTrainConfig, EngineKind, LaunchedProcess};

use super::{Launcher, first_at_least, gpus};
use crate::{Device, devices};

impl Launcher {
    /// Makes the ranks of a configuration, by its engine, world size, rank and backend.
    ///
    /// # Errors
    /// Errors of [`DistributedTrainConfig::engine`], [`mpi`](Launcher::mpi) and [`tcp`](Launcher::tcp).
    pub fn from_config(config: &DistributedTrainConfig) -> Result<Self> {
        let launcher = match config.engine(launched(config))? {
            EngineKind::NoOp => Launcher::threads(1),
            EngineKind::Threads => Launcher::threads(config.world_size),
            EngineKind::Mpi if cfg!(feature = "mpi") => Launcher::mpi()?,
            // Without MPI, the launcher's variables are an address.
            EngineKind::Mpi => Launcher::tcp(Tcp::from_env()?)?,
            EngineKind::Tcp => Launcher::at_address_of(config)?,
        };
        let listed = devices();
        let of = |kind: fn(&Device) -> bool| listed.iter().map(|listed| listed.device).filter(kind).collect::<Vec<_>>();
        // Without such a device, opening the first one gives the error.
        Ok(launcher.devices(match config.backend {
            DistributedBackend::Auto => gpus(&listed),
            DistributedBackend::Cpu => vec![Device::Cpu],
            DistributedBackend::Cuda => first_at_least(of(|device| matches!(device, Device::Cuda(_))), Device::Cuda(0)),
            DistributedBackend::Wgpu => first_at_least(of(|device| matches!(device, Device::Wgpu(_))), Device::Wgpu(0)),
        }))
    }

    fn at_address_of(config: &DistributedTrainConfig) -> Result<Self> {
        let &DistributedTrainConfig { rank, world_size, local_rank, coordinator_addr, .. } = config;
        let launch = Launch { rank, size: world_size, local_rank };
        coordinator_addr
            .map_or_else(Tcp::from_env, |address| Ok(Tcp::from(address)))
            .and_then(|tcp| Launcher::tcp(tcp.launch(launch)))
    }
}

/// The process that an external launcher has started, if this build can join it: without MPI, at an address.
fn launched(config: &DistributedTrainConfig) -> Option<LaunchedProcess> {
    let can_join = cfg!(feature = "mpi") || config.coordinator_addr.is_some() || Tcp::from_env().is_ok();
    let Launch { rank, size, local_rank } = Launch::from_env().filter(|_| can_join)?;
    Some(LaunchedProcess { rank, world_size: size, local_rank })
}

#[cfg(test)]
mod tests {
    use distributed::comm::{Collectives, Communicator};
    use train::compat::DistributedRole;

    use super::*;

    #[test]
    fn a_configuration_makes_ranks() {
        let config = DistributedTrainConfig { world_size: 3, backend: DistributedBackend::Cpu, ..Default::default() };
        let launcher = Launcher::from_config(&config).unwrap();
        assert_eq!((launcher.size(), launcher.is_rank_zero()), (3, true));
    }

    #[test]
    fn processes_of_a_configuration_meet_at_its_address() {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let rank = |rank: usize| {
            let role = if rank == 0 { DistributedRole::Coordinator } else { DistributedRole::Worker };
            let coordinator_addr = Some(free);
            let config = DistributedTrainConfig { world_size: 2, rank, role, coordinator_addr, ..Default::default() };
            let launcher = Launcher::from_config(&config).unwrap();
            launcher.run(|comm| comm.barrier().map(|()| comm.rank())).unwrap()
        };
        std::thread::scope(|scope| {
            let ranks = [0, 1].map(|r| scope.spawn(move || rank(r)));
            assert_eq!(ranks.map(|rank| rank.join().unwrap()), [0, 1]);
        });
    }
}
