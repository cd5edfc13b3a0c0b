//! Where the ranks of an example are: threads of this process, or processes that `mpirun` has started, or that meet in a folder.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use weftgrad::{Device, Launcher};

use crate::{Outcome, options::positive};

/// What joins the ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Engine {
    /// Threads of this process.
    #[default]
    Threads,
    /// Processes, under `mpirun` (a build with the feature `mpi`).
    Mpi,
    /// NCCL between NVIDIA GPUs (a build with the feature `nccl`): processes under `mpirun`, if the build has `mpi` too, and otherwise threads.
    Nccl,
}

/// How the ranks of an example are joined, and where they compute.
#[derive(Args, Clone, Debug)]
pub struct Joined {
    /// What joins the ranks: with mpi, there are as many as mpirun has started.
    #[arg(long, value_enum, default_value_t)]
    engine: Engine,
    /// Lets ranks be processes that meet in this folder, instead of threads; NCCL moves tensors between them, if it is the engine. Each is started with RANK, WORLD_SIZE and LOCAL_RANK
    /// set, or by srun or torchrun.
    #[arg(long)]
    shared_folder: Option<PathBuf>,
    /// Where ranks compute: cpu, or, if built in, wgpu:N or cuda:N. Of several, as in cuda:0,cuda:1, ranks take one after another; processes of one machine take the
    /// devices from the one named on.
    #[arg(long, default_value = "cpu", value_delimiter = ',')]
    device: Vec<Device>,
    /// Threads of each rank on the CPU [default: all for one rank; ranks that are threads share them, processes have one].
    #[arg(long, value_parser = positive)]
    threads: Option<usize>,
}

impl Joined {
    /// The devices that were named; over NCCL, which the CPU has none of, the first GPUs.
    fn devices(&self, size: usize) -> Vec<Device> {
        match (self.engine, &self.device[..]) {
            (Engine::Nccl, [Device::Cpu]) if self.shared_folder.is_some() || cfg!(feature = "mpi") => {
                vec![Device::Cuda(0)]
            }
            (Engine::Nccl, [Device::Cpu]) => (0..size).map(|rank| Device::Cuda(rank as u32)).collect(),
            (_, named) => named.to_vec(),
        }
    }

    /// The ranks, of which there are `size` unless a launcher says how many.
    pub fn ranks(&self, size: usize) -> Outcome<Launcher> {
        let launcher = match (self.engine, &self.shared_folder) {
            (Engine::Mpi, Some(_)) => {
                return Err("`--engine mpi` joins processes by itself: leave `--shared-folder` out".into());
            }
            (Engine::Threads, Some(folder)) => Launcher::shared_folder(folder)?,
            (Engine::Nccl, Some(folder)) => Launcher::shared_folder(folder)?.nccl()?,
            (Engine::Threads, None) => Launcher::threads(size),
            (Engine::Mpi, None) => Launcher::mpi()?,
            (Engine::Nccl, None) if cfg!(feature = "mpi") => Launcher::mpi()?.nccl()?,
            (Engine::Nccl, None) => Launcher::threads(size).nccl()?,
        };
        let launcher = launcher.devices(self.devices(size));
        Ok(match self.threads {
            Some(threads) => launcher.threads_per_rank(threads),
            None => launcher,
        })
    }
}
