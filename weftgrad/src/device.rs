//! The choice of a device at run time.

use std::{fmt, str::FromStr};

use numcore::{Error, Result, Runtime};

#[cfg(any(feature = "wgpu", feature = "cuda"))]
use numcore::Either;

/// The runtime of this build, the CPU. A program written over `R: Runtime` runs on it as on any other.
#[cfg(not(any(feature = "wgpu", feature = "cuda")))]
pub type AnyRuntime = runtime_cpu::Cpu;
/// One of the runtimes of this build, CPU or WebGPU. A program written over `R: Runtime` runs on it as on any other.
#[cfg(all(feature = "wgpu", not(feature = "cuda")))]
pub type AnyRuntime = Either<runtime_cpu::Cpu, runtime_wgpu::Wgpu>;
/// One of the runtimes of this build, CPU or CUDA. A program written over `R: Runtime` runs on it as on any other.
#[cfg(all(feature = "cuda", not(feature = "wgpu")))]
pub type AnyRuntime = Either<runtime_cpu::Cpu, runtime_cuda::Cuda>;
/// One of the runtimes of this build, CPU, WebGPU or CUDA. A program written over `R: Runtime` runs on it as on any
/// other.
#[cfg(all(feature = "wgpu", feature = "cuda"))]
pub type AnyRuntime = Either<runtime_cpu::Cpu, Either<runtime_wgpu::Wgpu, runtime_cuda::Cuda>>;

/// A device by its name on command lines: `cpu`, `wgpu`, `wgpu:1`, `cuda:0`.
///
/// ```
/// use weftgrad::{Device, prelude::*};
/// # fn main() -> Result<()> {
/// let rt = "cpu".parse::<Device>()?.open()?;
/// assert_eq!(Tensor::ones(&rt, [3], DType::F32)?.to_vec::<f32>()?, [1.0; 3]);
/// assert!("abacus".parse::<Device>().is_err());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Device {
    /// The CPU, with all threads or a given number of them ([`open_with`](Device::open_with)).
    #[default]
    Cpu,
    /// A GPU through WebGPU, by its index.
    Wgpu(u32),
    /// An NVIDIA GPU, by its index.
    Cuda(u32),
}

impl Device {
    /// Opens the runtime of the device, with all threads on the CPU.
    ///
    /// # Errors
    /// An error if this build lacks the runtime, or the machine has no such device.
    pub fn open(self) -> Result<AnyRuntime> {
        self.open_with(None)
    }

    /// The device with an index greater by `places`, for one of several processes of a machine. The CPU is always the
    /// same.
    pub fn after(self, places: usize) -> Device {
        let further = |index: u32| index.saturating_add(u32::try_from(places).unwrap_or(u32::MAX));
        match self {
            Device::Cpu => Device::Cpu,
            Device::Wgpu(index) => Device::Wgpu(further(index)),
            Device::Cuda(index) => Device::Cuda(further(index)),
        }
    }

    /// Opens the device as [`open`](Device::open) does, with the given number of `threads` on the CPU.
    pub fn open_with(self, threads: Option<usize>) -> Result<AnyRuntime> {
        match self {
            Device::Cpu => Ok(cpu(threads.map_or_else(runtime_cpu::Cpu::new, runtime_cpu::Cpu::with_threads))),
            Device::Wgpu(index) => wgpu(index),
            Device::Cuda(index) => cuda(index),
        }
    }
}

/// A device of this machine that this build can use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedDevice {
    /// The device, to be opened by [`Device::open`].
    pub device: Device,
    /// The name that the driver gives the GPU, or the processor's name.
    pub name: String,
    /// The bytes of memory, if known.
    pub memory: Option<u64>,
}

impl fmt::Display for ListedDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.device, self.name)?;
        self.memory.map_or(Ok(()), |bytes| write!(f, ", {:.1} GiB", bytes as f64 / (1u64 << 30) as f64))
    }
}

/// The devices of this machine that this build can use, GPUs first and the CPU last.
///
/// ```
/// let devices = weftgrad::devices();
/// assert_eq!(devices.last().map(|listed| listed.device), Some(weftgrad::Device::Cpu));
/// ```
pub fn devices() -> Vec<ListedDevice> {
    let mut all = cuda_devices();
    all.extend(wgpu_devices());
    let name = runtime_cpu::Cpu::with_threads(1).capabilities().name.clone();
    all.push(ListedDevice { device: Device::Cpu, name, memory: host_memory() });
    all
}

/// The bytes of memory of the machine, if the system tells them.
fn host_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10)
}

#[cfg(not(feature = "cuda"))]
fn cuda_devices() -> Vec<ListedDevice> {
    Vec::new()
}

#[cfg(feature = "cuda")]
fn cuda_devices() -> Vec<ListedDevice> {
    let listed = |index: u32| {
        let cuda = runtime_cuda::Cuda::new(index).ok()?;
        let about = cuda.capabilities();
        Some(ListedDevice {
            device: Device::Cuda(index),
            name: about.name.clone(),
            memory: Some(about.max_binding as u64),
        })
    };
    (0..).map_while(listed).collect()
}

#[cfg(not(feature = "wgpu"))]
fn wgpu_devices() -> Vec<ListedDevice> {
    Vec::new()
}

#[cfg(feature = "wgpu")]
fn wgpu_devices() -> Vec<ListedDevice> {
    let listed = |(index, adapter): (u32, runtime_wgpu::AdapterInfo)| ListedDevice {
        device: Device::Wgpu(index),
        name: adapter.to_string(),
        memory: None,
    };
    (0..).zip(runtime_wgpu::Wgpu::adapters()).map(listed).collect()
}

#[cfg(not(any(feature = "wgpu", feature = "cuda")))]
fn cpu(cpu: runtime_cpu::Cpu) -> AnyRuntime {
    cpu
}

#[cfg(any(feature = "wgpu", feature = "cuda"))]
fn cpu(cpu: runtime_cpu::Cpu) -> AnyRuntime {
    Either::A(cpu)
}

#[cfg(not(feature = "wgpu"))]
fn wgpu(_: u32) -> Result<AnyRuntime> {
    Err(left_out("wgpu"))
}

#[cfg(all(feature = "wgpu", not(feature = "cuda")))]
fn wgpu(index: u32) -> Result<AnyRuntime> {
    runtime_wgpu::Wgpu::new(index).map(Either::B)
}

#[cfg(all(feature = "wgpu", feature = "cuda"))]
fn wgpu(index: u32) -> Result<AnyRuntime> {
    runtime_wgpu::Wgpu::new(index).map(|rt| Either::B(Either::A(rt)))
}

#[cfg(not(feature = "cuda"))]
fn cuda(_: u32) -> Result<AnyRuntime> {
    Err(left_out("cuda"))
}

#[cfg(all(feature = "cuda", not(feature = "wgpu")))]
fn cuda(index: u32) -> Result<AnyRuntime> {
    runtime_cuda::Cuda::new(index).map(Either::B)
}

#[cfg(all(feature = "wgpu", feature = "cuda"))]
fn cuda(index: u32) -> Result<AnyRuntime> {
    runtime_cuda::Cuda::new(index).map(|rt| Either::B(Either::B(rt)))
}

#[cfg(not(all(feature = "wgpu", feature = "cuda")))]
fn left_out(feature: &str) -> Error {
    Error::unsupported("device", format!("this build has no `{feature}`; build it with `--features {feature}`"))
}

impl FromStr for Device {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let unknown = || Error::format("device", format!("`{text}` is none of cpu, wgpu[:N] and cuda[:N]"));
        let (kind, index) = text.split_once(':').unwrap_or((text, "0"));
        let index = index.parse().map_err(|_| unknown())?;
        match kind {
            "cpu" if !text.contains(':') => Ok(Device::Cpu),
            "wgpu" => Ok(Device::Wgpu(index)),
            "cuda" => Ok(Device::Cuda(index)),
            _ => Err(unknown()),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            Device::Wgpu(index) => write!(f, "wgpu:{index}"),
            Device::Cuda(index) => write!(f, "cuda:{index}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for text in ["cpu", "wgpu:0", "cuda:3"] {
            assert_eq!(text.parse::<Device>().unwrap().to_string(), text);
        }
        assert_eq!("wgpu".parse::<Device>().unwrap(), Device::Wgpu(0));
        for text in ["", "gpu", "cpu:2", "cuda:", "cuda:-1", "cuda:x"] {
            let e = text.parse::<Device>().unwrap_err().to_string();
            assert!(e.contains("none of cpu"), "{e}");
        }
    }

    #[test]
    #[cfg(not(feature = "cuda"))]
    fn a_device_that_was_left_out_is_named() {
        let e = Device::Cuda(0).open().unwrap_err().to_string();
        assert!(e.contains("--features cuda"), "{e}");
    }
}
