//! Where the ranks of a program are, and what each computes on.

#[cfg(feature = "train")]
mod from_config;

use std::{num::NonZero, path::PathBuf, sync::Arc, thread::available_parallelism, time::Duration};

#[cfg(feature = "nccl")]
use distributed::comm::Communicator;
use distributed::comm::{Comm, NoOpCommunicator, Ranks};
use engine_process::{Processes, SharedFolder};
use numcore::Result;

use crate::{AnyRuntime, Device, ListedDevice, devices};

/// The ranks of a program, as this process sees them: one, threads with a device each, or processes that MPI or a shared folder joins. The program that they run is the same.
///
/// ```
/// use weftgrad::{Device, Launcher, distributed::comm::{Communicator, NoOpCommunicator}};
/// # fn main() -> weftgrad::Result<()> {
/// for ranks in [1, 3] {
///     let size = Launcher::threads(ranks).run(|comm| Ok(comm.size()))?;
///     assert_eq!(size, ranks);
/// }
/// # Ok(())
/// # }
/// ```
///
/// One rank on each GPU of the machine, or one rank on the CPU where there is none:
///
/// ```
/// # use weftgrad::Launcher;
/// let launcher = Launcher::per_gpu();
/// # assert!(launcher.size() >= 1);
/// ```
#[derive(Debug)]
#[doc(alias("torchrun"))]
pub struct Launcher {
    engine: LaunchEngine,
    /// Ranks of this machine take them in turn.
    devices: Vec<Device>,
    /// Of each rank on the CPU.
    threads: Option<usize>,
    /// What moves tensors between ranks, where it is not what joins them.
    #[cfg(feature = "nccl")]
    nccl: Option<engine_nccl::Nccl>,
}

#[derive(Debug)]
enum LaunchEngine {
    Threads(Ranks),
    Processes(Processes),
}

impl Launcher {
    /// So many ranks, threads of this process, on the CPU unless [`devices`](Launcher::devices) says otherwise; at least one.
    pub fn threads(ranks: usize) -> Self {
        Launcher::of(LaunchEngine::Threads(Ranks::new(ranks.max(1))))
    }

    /// A rank, which is a thread of this process, on each of these devices; one on the CPU, if there are none.
    pub fn per_device(devices: impl IntoIterator<Item = Device>) -> Self {
        let devices: Vec<Device> = devices.into_iter().collect();
        Launcher::threads(devices.len()).devices(devices)
    }

    /// A rank on each GPU of this machine that this build can use: CUDA's where there are some, and WebGPU's otherwise, which may be the same ones. One rank on the
    /// CPU where there is no GPU. Several ranks of CUDA exchange through [`nccl`](Launcher::nccl), which is asked for in addition.
    pub fn per_gpu() -> Self {
        Launcher::per_device(gpus(&devices()))
    }

    /// The processes that `mpirun`, or another launcher that speaks its protocol, has started.
    ///
    /// # Errors
    /// If MPI cannot be initialised, or this build has no feature `mpi`.
    #[cfg(feature = "mpi")]
    pub fn mpi() -> Result<Self> {
        Ok(Launcher::of(LaunchEngine::Processes(engine_mpi::init()?)))
    }

    /// The processes that `mpirun`, or another launcher that speaks its protocol, has started.
    ///
    /// # Errors
    /// If MPI cannot be initialised, or this build has no feature `mpi`.
    #[cfg(not(feature = "mpi"))]
    pub fn mpi() -> Result<Self> {
        let why =
            "this build has no MPI; build it with `--features mpi`, which needs Open MPI, or let ranks be threads";
        Err(numcore::Error::argument("Launcher::mpi", why))
    }

    /// The processes that meet in this folder, on one machine or on several that share a file system: nothing is installed for it. Whoever starts them says which is which:
    /// Slurm's `srun`, `torchrun`, or a script that sets `RANK`, `WORLD_SIZE` and `LOCAL_RANK`. Blocks until all have come.
    ///
    /// Through files it is slow: for gradients on the host use [`mpi`](Launcher::mpi); on GPUs [`nccl`](Launcher::nccl) moves them, and the folder is how ranks agree.
    ///
    /// # Errors
    /// As [`SharedFolder::join`].
    pub fn shared_folder(path: impl Into<PathBuf>) -> Result<Self> {
        Ok(Launcher::of(LaunchEngine::Processes(SharedFolder::new(path).join()?)))
    }

    /// Lets NCCL move tensors between ranks, each of which must be on an NVIDIA GPU of its own. What joins the ranks stays what it was, threads or
    /// processes, and is how they compare their calls and learn of failures. Ranks that are threads on several GPUs need it.
    ///
    /// # Errors
    /// If NCCL is not found, or this build has no feature `nccl`.
    #[cfg(feature = "nccl")]
    pub fn nccl(self) -> Result<Self> {
        Ok(Launcher { nccl: Some(engine_nccl::Nccl::load()?), ..self })
    }

    /// Lets NCCL move tensors between ranks, each of which must be on an NVIDIA GPU of its own. What joins the ranks stays what it was, threads or
    /// processes, and is how they compare their calls and learn of failures. Ranks that are threads on several GPUs need it.
    ///
    /// # Errors
    /// If NCCL is not found, or this build has no feature `nccl`.
    #[cfg(not(feature = "nccl"))]
    pub fn nccl(self) -> Result<Self> {
        let why = "this build has no NCCL; build it with `--features nccl`, which needs nothing to build";
        Err(numcore::Error::argument("Launcher::nccl", why))
    }

    /// What ranks compute on: the ranks of a machine take these devices in turn, so several may share one. No device is the CPU.
    pub fn devices(mut self, devices: impl IntoIterator<Item = Device>) -> Self {
        self.devices = first_at_least(devices.into_iter().collect(), Device::Cpu);
        self
    }

    /// Threads of each rank that is on the CPU. At first one rank has all; ranks that are threads share the machine, and a process among others has one.
    pub fn threads_per_rank(mut self, threads: usize) -> Self {
        self.threads = Some(threads.max(1));
        self
    }

    /// How long a rank waits for others in a call, before the call is an error on all of them: 60 seconds unless it is said. A process that is gone is noticed then,
    /// where processes share a folder.
    pub fn timeout(mut self, most: Duration) -> Self {
        self.engine = match self.engine {
            LaunchEngine::Threads(ranks) => LaunchEngine::Threads(ranks.timeout(most)),
            LaunchEngine::Processes(processes) => LaunchEngine::Processes(processes.timeout(most)),
        };
        self
    }

    /// How many ranks there are.
    pub fn size(&self) -> usize {
        match &self.engine {
            LaunchEngine::Threads(ranks) => ranks.size(),
            LaunchEngine::Processes(processes) => processes.size(),
        }
    }

    /// Whether this process has rank 0: what is said once, it says.
    pub fn leads(&self) -> bool {
        match &self.engine {
            LaunchEngine::Threads(_) => true,
            LaunchEngine::Processes(processes) => processes.rank() == 0,
        }
    }

    /// Runs a program on every rank, and gives what the lowest rank of this process returns.
    ///
    /// # Errors
    /// If a device cannot be opened, and what fails on a rank, on all of them.
    pub fn run<T: Send>(&self, program: impl Fn(Comm<AnyRuntime>) -> Result<T> + Sync) -> Result<T> {
        #[cfg(feature = "nccl")]
        if let Some(nccl) = &self.nccl {
            return self.run_over(nccl, program);
        }
        match &self.engine {
            LaunchEngine::Threads(ranks) if ranks.size() == 1 => self.run_alone(program),
            LaunchEngine::Threads(ranks) => Ok(ranks.run(|rank| self.open(rank), program)?.swap_remove(0)),
            LaunchEngine::Processes(processes) => processes.run(|local_rank| self.open(local_rank), program),
        }
    }

    /// Runs a program on every rank over NCCL: threads or processes are its control plane.
    #[cfg(feature = "nccl")]
    fn run_over<T: Send>(
        &self,
        nccl: &engine_nccl::Nccl,
        program: impl Fn(Comm<AnyRuntime>) -> Result<T> + Sync,
    ) -> Result<T> {
        let host = |_| Ok(runtime_cpu::Cpu::with_threads(1));
        let over = |control: Comm<runtime_cpu::Cpu>, local_rank: usize| {
            let comm = nccl.communicator(&control, &self.open(local_rank)?)?;
            distributed::comm::engine::guarded(&comm, &program)
        };
        match &self.engine {
            LaunchEngine::Threads(ranks) => {
                Ok(ranks.run(host, |control| over(control.clone(), control.rank()))?.swap_remove(0))
            }
            LaunchEngine::Processes(processes) => processes.run(host, |control| over(control, processes.local_rank())),
        }
    }

    /// Runs a program on a world of one, beside the others or in place of them, on the first device.
    ///
    /// # Errors
    /// If the device cannot be opened, and what fails.
    pub fn run_alone<T>(&self, program: impl FnOnce(Comm<AnyRuntime>) -> Result<T>) -> Result<T> {
        program(Arc::new(NoOpCommunicator::new(&self.open(0)?)))
    }

    /// The runtime of a rank, by its number on this machine.
    fn open(&self, local_rank: usize) -> Result<AnyRuntime> {
        let device = match self.devices[..] {
            // Processes of one machine take the devices from the one that was named on.
            [only] if self.is_of_processes() => only.after(local_rank),
            _ => self.devices[local_rank % self.devices.len()],
        };
        device.open_with(self.threads.or_else(|| self.share_of_threads()))
    }

    fn of(engine: LaunchEngine) -> Self {
        Launcher {
            engine,
            devices: vec![Device::Cpu],
            threads: None,
            #[cfg(feature = "nccl")]
            nccl: None,
        }
    }

    fn is_of_processes(&self) -> bool {
        match &self.engine {
            LaunchEngine::Threads(_) => false,
            LaunchEngine::Processes(_) => true,
        }
    }

    /// Threads of a rank on the CPU among others; one that is alone has all.
    fn share_of_threads(&self) -> Option<usize> {
        let all = available_parallelism().map_or(1, NonZero::get);
        let share = if self.is_of_processes() { 1 } else { (all / self.size()).max(1) };
        (self.size() > 1).then_some(share)
    }
}

/// CUDA's devices, or else WebGPU's: a GPU may be one of each.
fn gpus(listed: &[ListedDevice]) -> Vec<Device> {
    let of = |kind: fn(&Device) -> bool| listed.iter().map(|listed| listed.device).filter(kind).collect::<Vec<_>>();
    let cuda = of(|device| matches!(device, Device::Cuda(_)));
    if cuda.is_empty() { of(|device| matches!(device, Device::Wgpu(_))) } else { cuda }
}

fn first_at_least(devices: Vec<Device>, otherwise: Device) -> Vec<Device> {
    if devices.is_empty() { vec![otherwise] } else { devices }
}

#[cfg(test)]
mod tests {
    use distributed::comm::Communicator;

    use super::*;

    fn listed(devices: &[Device]) -> Vec<ListedDevice> {
        devices.iter().map(|&device| ListedDevice { device, name: String::new(), memory: None }).collect()
    }

    #[test]
    fn a_gpu_that_is_one_of_each_counts_once() {
        let all = [Device::Cuda(0), Device::Cuda(1), Device::Wgpu(0), Device::Wgpu(1), Device::Cpu];
        assert_eq!(gpus(&listed(&all)), [Device::Cuda(0), Device::Cuda(1)]);
        assert_eq!(gpus(&listed(&all[2..])), [Device::Wgpu(0), Device::Wgpu(1)]);
        assert_eq!(gpus(&listed(&all[4..])), []);
    }

    #[test]
    fn there_is_a_rank_on_each_device_and_one_without() {
        assert_eq!(Launcher::per_device([Device::Cpu; 3]).size(), 3);
        assert_eq!(Launcher::per_device([]).size(), 1);
        assert_eq!(Launcher::per_device([]).devices, [Device::Cpu]);
        assert_eq!(Launcher::threads(0).size(), 1);
    }

    #[test]
    fn ranks_wait_for_as_long_as_was_said() {
        let most = Duration::from_secs(7);
        let waits = Launcher::threads(2).timeout(most).run(|comm| Ok(comm.timeout()));
        assert_eq!(waits.unwrap(), most);
    }

    #[test]
    fn ranks_share_the_machine() {
        assert_eq!(Launcher::threads(1).share_of_threads(), None);
        assert_eq!(Launcher::threads(10_000).share_of_threads(), Some(1));
        // More ranks than devices take them in turn.
        assert!(Launcher::threads(2).devices([Device::Cpu, Device::Cpu]).open(5).is_ok());
    }
}
