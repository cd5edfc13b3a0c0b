//! The launcher of a program's ranks, with the device of each.

#[cfg(feature = "train")]
mod from_config;

use std::{num::NonZero, sync::Arc, thread::available_parallelism};

#[cfg(feature = "nccl")]
use distributed::comm::Communicator;
use distributed::comm::{Comm, Deadlines, NoOpCommunicator, Ranks};
use engine_process::{Launch, Processes, Tcp};
use numcore::Result;

use crate::{AnyRuntime, Device, ListedDevice, devices};

/// The ranks of a program, as this process sees them: one, threads with a device each, or processes joined by
/// TCP or MPI. The program that they run is the same.
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
/// One rank on each GPU of the machine, or one rank on the CPU if there is no GPU:
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
    /// The devices that ranks of this machine take in turn.
    devices: Vec<Device>,
    /// The number of threads of each rank on the CPU.
    threads: Option<usize>,
    /// The library that moves tensors between ranks, if it is not the engine.
    #[cfg(feature = "nccl")]
    nccl: Option<engine_nccl::Nccl>,
}

#[derive(Debug)]
enum LaunchEngine {
    Threads(Ranks),
    Processes(Box<Processes>),
}

impl Launcher {
    /// Makes `ranks` ranks, at least one, as threads of this process; on the CPU unless [`devices`](Launcher::devices)
    /// names others.
    pub fn threads(ranks: usize) -> Self {
        Launcher::of(LaunchEngine::Threads(Ranks::new(ranks.max(1))))
    }

    /// Makes one rank on each of these devices, as threads of this process; one rank on the CPU if there are none.
    pub fn per_device(devices: impl IntoIterator<Item = Device>) -> Self {
        let devices: Vec<Device> = devices.into_iter().collect();
        Launcher::threads(devices.len()).devices(devices)
    }

    /// Makes one rank on each GPU of this machine that this build can use; one on the CPU if there is no GPU. CUDA
    /// devices are preferred to WebGPU's, which may be the same GPUs. Several CUDA ranks exchange through
    /// [`nccl`](Launcher::nccl), which has to be called in addition. The ranks are threads of this process. A process
    /// for each GPU, started by `weftgrad-run`, is the more robust form.
    pub fn per_gpu() -> Self {
        Launcher::per_device(gpus(&devices()))
    }

    /// Takes the processes that `mpirun`, or another launcher of the same protocol, has started.
    ///
    /// # Errors
    /// An error if MPI cannot be initialised, or this build lacks the feature `mpi`.
    #[cfg(feature = "mpi")]
    pub fn mpi() -> Result<Self> {
        Launcher::unless_replayed(engine_mpi::init)
    }

    /// Takes the processes that `mpirun`, or another launcher of the same protocol, has started.
    ///
    /// # Errors
    /// An error if MPI cannot be initialised, or this build lacks the feature `mpi`.
    #[cfg(not(feature = "mpi"))]
    pub fn mpi() -> Result<Self> {
        let why =
            "this build has no MPI; build it with `--features mpi`, which needs Open MPI, or let ranks be threads";
        Err(numcore::Error::unsupported("Launcher::mpi", why))
    }

    /// Takes the processes that `weftgrad-run`, `torchrun` or Slurm's `srun` has started, and joins them over TCP.
    /// Without such a launcher, this process becomes one: it starts `ranks` processes of its program, with its
    /// arguments, on this machine, and ends with them. So the lines before this call run in each process.
    ///
    /// # Errors
    /// Errors of [`Tcp::from_env`] and [`Tcp::join`], and an error if a process cannot be started. Also if the
    /// environment has a rank or a number of ranks, but not all that a launcher gives.
    #[doc(alias("spawn"))]
    pub fn processes(ranks: usize) -> Result<Self> {
        Launcher::unless_replayed(|| {
            if Launch::from_env().is_none() {
                let half = ["RANK", "WORLD_SIZE"].into_iter().find(|name| std::env::var_os(name).is_some());
                if let Some(half) = half {
                    let why = format!(
                        "{half} is set, and not all of RANK, WORLD_SIZE and LOCAL_RANK: set all three, or none to start {ranks} processes here"
                    );
                    return Err(numcore::Error::config("Launcher::processes", "launch", why));
                }
                let job = launch::Job::of_this_program(ranks).and_then(|job| job.run());
                std::process::exit(job.map_err(numcore::Error::other)?.into());
            }
            #[cfg(unix)]
            launch::end_with_launcher();
            Tcp::from_env()?.join()
        })
    }

    /// Joins processes over TCP, on one machine or on several; no library is needed. Each process has its rank from its
    /// [`Tcp::launch`], or from a launcher. Blocks until all processes have come.
    ///
    /// # Errors
    /// Errors of [`Tcp::join`].
    pub fn tcp(tcp: Tcp) -> Result<Self> {
        Launcher::unless_replayed(|| tcp.join())
    }

    /// Lets NCCL move tensors between ranks, each of which must be on its own NVIDIA GPU. The threads or processes stay
    /// the control plane, on which ranks compare their calls and learn of failures. Ranks that are threads on several
    /// GPUs need it.
    ///
    /// # Errors
    /// An error if NCCL is not found, or this build lacks the feature `nccl`.
    #[cfg(feature = "nccl")]
    pub fn nccl(self) -> Result<Self> {
        Ok(Launcher { nccl: Some(engine_nccl::Nccl::load()?), ..self })
    }

    /// Lets NCCL move tensors between ranks, each of which must be on its own NVIDIA GPU. The threads or processes stay
    /// the control plane, on which ranks compare their calls and learn of failures. Ranks that are threads on several
    /// GPUs need it.
    ///
    /// # Errors
    /// An error if NCCL is not found, or this build lacks the feature `nccl`.
    #[cfg(not(feature = "nccl"))]
    pub fn nccl(self) -> Result<Self> {
        let why = "this build has no NCCL; build it with `--features nccl`, which needs nothing to build";
        Err(numcore::Error::unsupported("Launcher::nccl", why))
    }

    /// Sets the devices of the ranks. The ranks of a machine take them in turn, so several may share one; an empty list
    /// means the CPU. With a single device, each further process of a machine takes the next index.
    pub fn devices(mut self, devices: impl IntoIterator<Item = Device>) -> Self {
        self.devices = first_at_least(devices.into_iter().collect(), Device::Cpu);
        self
    }

    /// Sets the number of threads of each rank on the CPU. By default a single rank has all; ranks that are threads
    /// share the machine, and a process among others has one.
    pub fn threads_per_rank(mut self, threads: usize) -> Self {
        self.threads = Some(threads.max(1));
        self
    }

    /// Sets the time that a rank waits for others in a call, before all of them get an error. It is a [`Deadlines`], or
    /// one duration for all calls. By default it is 60 seconds, and 10 minutes in the first call of a kind.
    pub fn timeout(mut self, most: impl Into<Deadlines>) -> Self {
        let most = most.into();
        self.engine = match self.engine {
            LaunchEngine::Threads(ranks) => LaunchEngine::Threads(ranks.timeout(most)),
            LaunchEngine::Processes(processes) => LaunchEngine::Processes(Box::new(processes.timeout(most))),
        };
        self
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        match &self.engine {
            LaunchEngine::Threads(ranks) => ranks.size(),
            LaunchEngine::Processes(processes) => processes.size(),
        }
    }

    /// Tells whether this process has rank 0, which prints and saves for all ranks.
    pub fn is_rank_zero(&self) -> bool {
        match &self.engine {
            LaunchEngine::Threads(_) => true,
            LaunchEngine::Processes(processes) => processes.rank() == 0,
        }
    }

    /// Runs a program on every rank, and returns the result of the lowest rank of this process.
    ///
    /// Started by `weftgrad-replay`, it takes one step of an earlier run again, on as many threads as that had ranks.
    /// Then it prints the step, and ends the process.
    ///
    /// # Errors
    /// An error if a device cannot be opened, and on all ranks if the program fails on one.
    pub fn run<T: Send>(&self, program: impl Fn(Comm<AnyRuntime>) -> Result<T> + Sync) -> Result<T> {
        #[cfg(feature = "train")]
        if let Some(replay) = train::StepReplay::from_env()? {
            // Threads on one device, whatever the devices of the run.
            println!("{}", replay.text(&replay.run(|_| self.open(0), program)?));
            std::process::exit(0);
        }
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

    /// Runs a program on every rank over NCCL, with threads or processes as its control plane.
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

    /// Runs a program in a world of one rank on the first device, without the other ranks.
    ///
    /// # Errors
    /// An error if the device cannot be opened, and errors of the program.
    pub fn run_alone<T>(&self, program: impl FnOnce(Comm<AnyRuntime>) -> Result<T>) -> Result<T> {
        program(Arc::new(NoOpCommunicator::new(&self.open(0)?)))
    }

    /// The runtime of a rank, given its number on this machine.
    fn open(&self, local_rank: usize) -> Result<AnyRuntime> {
        let device = match self.devices[..] {
            // Processes of one machine take consecutive devices, starting at the one that was named.
            [only] if self.is_of_processes() => only.after(local_rank),
            _ => self.devices[local_rank % self.devices.len()],
        };
        device.open_with(self.threads.or_else(|| self.share_of_threads()))
    }

    /// The processes that `join` gives. If this process was started to take a step again, as many threads as that had
    /// ranks.
    fn unless_replayed(join: impl FnOnce() -> Result<Processes>) -> Result<Self> {
        #[cfg(feature = "train")]
        if let Some(replay) = train::StepReplay::from_env()? {
            return Ok(Launcher::threads(replay.ranks()?));
        }
        Ok(Launcher::of(LaunchEngine::Processes(Box::new(join()?))))
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

    /// The number of threads of a rank on the CPU; `None`, for all, if it is the only rank.
    fn share_of_threads(&self) -> Option<usize> {
        let all = available_parallelism().map_or(1, NonZero::get);
        let share = if self.is_of_processes() { 1 } else { (all / self.size()).max(1) };
        (self.size() > 1).then_some(share)
    }
}

/// The CUDA devices, or WebGPU's if there are none: one GPU may be listed as both.
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
        let most = std::time::Duration::from_secs(7);
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
