//! Adapters and devices. Every handle of one index shares one device, because tensors with equal [`DeviceId`] may be
//! used together.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Weak},
};

use numcore::{Capabilities, DType, DeviceId, DeviceKind, Error, ErrorKind, Result};
use parking_lot::Mutex;

use crate::pipelines::Pipelines;

/// The advice in an error when there is no adapter.
const INSTALL: &str =
    "install a Vulkan driver (on Debian or Ubuntu, `apt-get install mesa-vulkan-drivers` gives a software one)";

/// The open devices, by index.
static DEVICES: Mutex<BTreeMap<u32, Weak<WgpuDevice>>> = Mutex::new(BTreeMap::new());

/// A GPU of this machine with its driver, as listed by `Wgpu::adapters`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterInfo {
    /// The name of the adapter, as the driver reports it.
    pub name: String,
    /// The graphics API behind the adapter: `vulkan`, `metal`, `dx12`.
    pub backend: String,
    /// True if it is a software adapter, which runs on the CPU.
    pub software: bool,
}

impl fmt::Display for AdapterInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let software = if self.software { ", software" } else { "" };
        write!(f, "{} ({}{software})", self.name, self.backend)
    }
}

/// The state of a device, which all handles of its index share.
pub(crate) struct WgpuDevice {
    pub(crate) id: DeviceId,
    pub(crate) wgpu: wgpu::Device,
    pub(crate) queue: wgpu::Queue,
    /// True if the adapter runs on the host. Such a driver limits the iterations of a kernel's loops.
    pub(crate) software: bool,
    pub(crate) limits: wgpu::Limits,
    pub(crate) capabilities: Capabilities,
    pub(crate) pipelines: Pipelines,
    /// The first uncaptured failure, which every later call returns.
    failed: Arc<Mutex<Option<String>>>,
}

impl WgpuDevice {
    /// The device of adapter `index`, opened if it is not in use.
    pub(crate) fn open(index: u32) -> Result<Arc<WgpuDevice>> {
        let mut devices = DEVICES.lock();
        if let Some(device) = devices.get(&index).and_then(Weak::upgrade) {
            return Ok(device);
        }
        let all = found();
        let count = all.len();
        let adapter = all.into_iter().nth(index as usize).ok_or_else(|| {
            let there = if count == 0 { "there is no adapter".into() } else { format!("there are {count} adapters") };
            refused(index, "open", format!("{there}, number {index} was asked for; {INSTALL}"))
        })?;
        let device = Arc::new(WgpuDevice::of(index, &adapter)?);
        devices.insert(index, Arc::downgrade(&device));
        Ok(device)
    }

    fn of(index: u32, adapter: &wgpu::Adapter) -> Result<WgpuDevice> {
        let limits = adapter.limits();
        let descriptor = wgpu::DeviceDescriptor {
            label: Some("weftgrad"),
            required_features: wgpu::Features::empty(),
            required_limits: limits.clone(),
            ..Default::default()
        };
        let opened = pollster::block_on(adapter.request_device(&descriptor));
        let (wgpu, queue) = opened.map_err(|e| backend(index, "open", e.to_string()))?;
        let failed = Arc::new(Mutex::new(None));
        let first = failed.clone();
        wgpu.on_uncaptured_error(Arc::new(move |e: wgpu::Error| note(&first, e.to_string())));
        let first = failed.clone();
        wgpu.set_device_lost_callback(move |reason, message| {
            if reason != wgpu::DeviceLostReason::Destroyed {
                note(&first, format!("the device was lost: {message}"));
            }
        });
        let about = describe(adapter);
        let capabilities = Capabilities {
            name: about.to_string(),
            storage: DType::ALL.into_iter().filter(|d| !d.is_storage()).collect(),
            compute: DType::ALL.iter().copied().filter(|d| d.compute() == *d && *d != DType::F64).collect(),
            parallelism: 1,
            max_binding: limits.max_storage_buffer_binding_size as usize,
            // The binding size that every WebGPU implementation supports.
            piece: 128 << 20,
        };
        let pipelines = Pipelines::new(&wgpu);
        let id = DeviceId { kind: DeviceKind::Wgpu, index };
        Ok(WgpuDevice { id, wgpu, queue, software: about.software, limits, capabilities, pipelines, failed })
    }

    /// Returns the device's sticky failure as an error, if there is one.
    pub(crate) fn check(&self, op: &'static str) -> Result<()> {
        match &*self.failed.lock() {
            None => Ok(()),
            Some(message) => Err(self.backend(op, message.clone())),
        }
    }

    /// Records a failure that every later call returns, unless there is one already.
    pub(crate) fn fail(&self, message: String) {
        note(&self.failed, message);
    }

    /// An error with a driver's message.
    pub(crate) fn backend(&self, op: &'static str, message: String) -> Error {
        backend(self.id.index, op, message)
    }

    /// An error for an operation that this device does not support.
    pub(crate) fn unsupported(&self, op: &'static str, why: String) -> Error {
        refused(self.id.index, op, why)
    }
}

impl fmt::Debug for WgpuDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.id, self.capabilities.name)
    }
}

fn note(failed: &Mutex<Option<String>>, message: String) {
    failed.lock().get_or_insert(message);
}

fn refused(index: u32, op: &'static str, why: String) -> Error {
    Error::unsupported_on(DeviceId { kind: DeviceKind::Wgpu, index }, op, why)
}

fn backend(index: u32, op: &'static str, message: String) -> Error {
    ErrorKind::Backend { op, device: DeviceId { kind: DeviceKind::Wgpu, index }, message }.into()
}

/// The adapters, hardware before software, otherwise in the driver's order.
pub(crate) fn adapters() -> Vec<AdapterInfo> {
    found().iter().map(describe).collect()
}

fn found() -> Vec<wgpu::Adapter> {
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
    descriptor.backends = wgpu::Backends::VULKAN | wgpu::Backends::METAL | wgpu::Backends::DX12;
    descriptor.flags = wgpu::InstanceFlags::empty();
    let backends = descriptor.backends;
    let instance = wgpu::Instance::new(descriptor);
    let mut all = pollster::block_on(instance.enumerate_adapters(backends));
    let order = |a: &wgpu::Adapter| match a.get_info().device_type {
        wgpu::DeviceType::DiscreteGpu => 0,
        wgpu::DeviceType::IntegratedGpu => 1,
        wgpu::DeviceType::VirtualGpu => 2,
        wgpu::DeviceType::Other => 3,
        wgpu::DeviceType::Cpu => 4,
    };
    all.sort_by_key(order);
    all
}

fn describe(adapter: &wgpu::Adapter) -> AdapterInfo {
    let info = adapter.get_info();
    let software = info.device_type == wgpu::DeviceType::Cpu;
    AdapterInfo { name: info.name, backend: info.backend.to_string(), software }
}

#[cfg(test)]
mod tests {
    use numcore::{DType, MemoryCategory, Runtime, Tensor, ops::PointwiseOps};

    use super::*;
    use crate::{Wgpu, queue::Queue};

    /// A device of its own for a test that breaks it: the devices of other tests stay alive.
    fn apart() -> Wgpu {
        let adapter = found().into_iter().next().expect("an adapter");
        let device = WgpuDevice::of(0, &adapter).expect("a device");
        Wgpu { queue: Arc::new(Queue::new(Arc::new(device))), use_: MemoryCategory::Activations }
    }

    #[test]
    fn a_device_that_vanishes_is_an_error_from_then_on() {
        let gpu = apart();
        let x = Tensor::arange(&gpu, 0.0, 1.0, 100, DType::F32).expect("a tensor");
        x.add(&x).and_then(|y| y.to_vec::<f32>()).expect("a sum");
        gpu.queue.device.wgpu.destroy();
        let calls: [(&str, &dyn Fn() -> Result<()>); 3] = [
            ("add", &|| x.add(&x)?.to_vec::<f32>().map(drop)),
            ("download", &|| x.to_vec::<f32>().map(drop)),
            ("synchronize", &|| gpu.synchronize()),
        ];
        for (name, call) in calls {
            let error = call().expect_err(name).to_string();
            assert!(error.contains("wgpu:0"), "{name}: {error}");
        }
    }

    #[test]
    fn the_first_failure_stays() {
        let gpu = apart();
        gpu.queue.device.fail("out of memory".into());
        gpu.queue.device.fail("later".into());
        let error = Tensor::arange(&gpu, 0.0, 1.0, 100, DType::F32).expect_err("no tensor").to_string();
        assert!(error.contains("out of memory"), "{error}");
    }
}
