//! The ranks of an example: threads of this process, or processes joined over TCP or MPI.

use clap::{Args, ValueEnum};
use weftgrad::{Device, Launcher, process::Launch};

use crate::{Outcome, options::positive};

/// The engine that connects the ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Engine {
    /// Threads of this process.
    #[default]
    Threads,
    /// Processes that meet over TCP: those of `weftgrad-run`, torchrun or srun, or as many as `--ranks` says.
    Processes,
    /// Processes, under `mpirun` (a build with the feature `mpi`).
    Mpi,
    /// NCCL between NVIDIA GPUs (a build with the feature `nccl`): processes under a launcher, otherwise threads.
    Nccl,
}

/// The connection and the devices of the ranks of an example.
#[derive(Args, Clone, Debug)]
pub struct Joined {
    /// Engine that connects the ranks; a launcher sets their number.
    #[arg(long, value_enum, default_value_t)]
    engine: Engine,
    /// Devices of the ranks: cpu, or, if built in, wgpu:N or cuda:N. Ranks take several, as in cuda:0,cuda:1, in turn;
    /// processes of one machine take the devices from the named one on.
    #[arg(long, default_value = "cpu", value_delimiter = ',')]
    device: Vec<Device>,
    /// Threads of each rank on the CPU [default: all for one rank; threads as ranks share them; processes have one].
    #[arg(long, value_parser = positive)]
    threads: Option<usize>,
}

impl Joined {
    /// The named devices. NCCL does not support the CPU, so it takes the first GPUs instead.
    fn devices(&self, size: usize) -> Vec<Device> {
        match (self.engine, &self.device[..]) {
            (Engine::Nccl, [Device::Cpu]) if is_launched() => vec![Device::Cuda(0)],
            (Engine::Nccl, [Device::Cpu]) => (0..size).map(|rank| Device::Cuda(rank as u32)).collect(),
            (_, named) => named.to_vec(),
        }
    }

    /// The launcher of `size` ranks, unless another launcher sets their number.
    pub fn ranks(&self, size: usize) -> Outcome<Launcher> {
        let launcher = match self.engine {
            Engine::Mpi => Launcher::mpi()?,
            Engine::Nccl if cfg!(feature = "mpi") && is_of_mpirun() => Launcher::mpi()?,
            Engine::Nccl if is_launched() => Launcher::processes(size)?,
            Engine::Processes => Launcher::processes(size)?,
            Engine::Threads | Engine::Nccl => Launcher::threads(size),
        };
        let launcher = if matches!(self.engine, Engine::Nccl) { launcher.nccl()? } else { launcher };
        let launcher = launcher.devices(self.devices(size));
        Ok(match self.threads {
            Some(threads) => launcher.threads_per_rank(threads),
            None => launcher,
        })
    }
}

/// Tells whether a launcher has started this process.
fn is_launched() -> bool {
    Launch::from_env().is_some()
}

/// Tells whether that was `mpirun`, or another launcher of its protocol.
fn is_of_mpirun() -> bool {
    std::env::var_os("PMIX_RANK").is_some() || std::env::var_os("OMPI_COMM_WORLD_RANK").is_some()
}
