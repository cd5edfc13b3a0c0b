//! The ranks of an example: threads of this process, processes started by `mpirun`, or processes joined over TCP.

use clap::{Args, ValueEnum};
use weftgrad::{Device, Launcher, process::Tcp};

use crate::{Outcome, options::positive};

/// The engine that connects the ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Engine {
    /// Threads of this process.
    #[default]
    Threads,
    /// Processes, under `mpirun` (a build with the feature `mpi`).
    Mpi,
    /// NCCL between NVIDIA GPUs (a build with the feature `nccl`): processes under `mpirun` if the build has `mpi` too,
    /// otherwise threads.
    Nccl,
}

/// The connection and the devices of the ranks of an example.
#[derive(Args, Clone, Debug)]
pub struct Joined {
    /// Engine that connects the ranks; with mpi, mpirun sets their number.
    #[arg(long, value_enum, default_value_t)]
    engine: Engine,
    /// Address, HOST:PORT, that joins processes over TCP as ranks, instead of threads; rank 0 listens there. With
    /// `--engine nccl`, NCCL moves their tensors. Start each with RANK, WORLD_SIZE and LOCAL_RANK set, or by srun or
    /// torchrun.
    #[arg(long)]
    tcp: Option<String>,
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
            (Engine::Nccl, [Device::Cpu]) if self.tcp.is_some() || cfg!(feature = "mpi") => {
                vec![Device::Cuda(0)]
            }
            (Engine::Nccl, [Device::Cpu]) => (0..size).map(|rank| Device::Cuda(rank as u32)).collect(),
            (_, named) => named.to_vec(),
        }
    }

    /// The launcher of `size` ranks, unless another launcher sets their number.
    pub fn ranks(&self, size: usize) -> Outcome<Launcher> {
        let launcher = match (self.engine, &self.tcp) {
            (Engine::Mpi, Some(_)) => {
                return Err("`--engine mpi` joins processes by itself: leave `--tcp` out".into());
            }
            (Engine::Mpi, None) => Launcher::mpi()?,
            (_, Some(address)) => Launcher::tcp(Tcp::at(address))?,
            (Engine::Nccl, None) if cfg!(feature = "mpi") => Launcher::mpi()?,
            (_, None) => Launcher::threads(size),
        };
        let launcher = if matches!(self.engine, Engine::Nccl) { launcher.nccl()? } else { launcher };
        let launcher = launcher.devices(self.devices(size));
        Ok(match self.threads {
            Some(threads) => launcher.threads_per_rank(threads),
            None => launcher,
        })
    }
}
