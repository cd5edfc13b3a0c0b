//! Adapters and devices. Every handle of one index shares one device, because tensors with equal [`DeviceId`] may be
//! used together.

use std::{
    collections::BTreeMap,
    fmt,
    path::PathBuf,
    sync::{Arc, Weak},
};

use numcore::{Capabilities, DType, DeviceId, DeviceKind, Error, ErrorKind, Result};
use parking_lot::Mutex;

use crate::{
    kernel_file::{self, KernelFile},
    pipelines::Pipelines,
};

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
    /// The least invocations of a subgroup; 1 without subgroups.
    pub(crate) subgroup: usize,
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
        let about = describe(&adapter);
        if about.software {
            eprintln!("wgpu:{index} is {about}: it runs on the CPU, and is slower than `cpu`");
        }
        let device = Arc::new(WgpuDevice::of(index, &adapter, adapter.limits(), kernel_file::folder())?);
        devices.insert(index, Arc::downgrade(&device));
        Ok(device)
    }

    /// A device that no other handle shares, changed before its first use.
    #[cfg(test)]
    pub(crate) fn apart(change: impl FnOnce(&mut WgpuDevice)) -> Result<WgpuDevice> {
        let adapter = found().into_iter().next().ok_or_else(|| refused(0, "open", "there is no adapter".into()))?;
        let mut device = WgpuDevice::of(0, &adapter, adapter.limits(), kernel_file::folder())?;
        change(&mut device);
        Ok(device)
    }

    fn of(index: u32, adapter: &wgpu::Adapter, limits: wgpu::Limits, cache: Option<PathBuf>) -> Result<WgpuDevice> {
        let descriptor = wgpu::DeviceDescriptor {
            label: Some("weftgrad"),
            required_features: adapter.features() & (wgpu::Features::PIPELINE_CACHE | wgpu::Features::SUBGROUP),
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
        let has_subgroups = wgpu.features().contains(wgpu::Features::SUBGROUP);
        let subgroup = if has_subgroups { adapter.get_info().subgroup_min_size as usize } else { 1 };
        let file = KernelFile::open(&wgpu, &adapter.get_info(), cache);
        let pipelines = Pipelines::new(&wgpu, file);
        let id = DeviceId { kind: DeviceKind::Wgpu, index };
        let software = about.software;
        Ok(WgpuDevice { id, wgpu, queue, software, subgroup, limits, capabilities, pipelines, failed })
    }

    /// The invocations of a subgroup that keeps a tile of a product. A software driver reads one element at a time, and
    /// fewer in a subgroup. On a GPU, an exchange between invocations takes as long as reading workgroup memory.
    pub(crate) fn lanes(&self) -> Option<usize> {
        (self.software && self.subgroup >= 4).then_some(self.subgroup)
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
    use numcore::{
        DType, MemoryCategory, Runtime, Shape, Tensor, TensorMut,
        ops::{MatmulOps, Op, PointwiseOps, Reduce, ViewOps, update},
        pointwise::Program,
    };

    use super::*;
    use crate::{Wgpu, queue::Queue};

    /// A device of its own for a test that breaks it: the devices of other tests stay alive.
    fn apart() -> Wgpu {
        with(|limits| limits, None)
    }

    /// A device of its own with other limits, and a folder for compiled kernels.
    fn with(limits: impl FnOnce(wgpu::Limits) -> wgpu::Limits, cache: Option<PathBuf>) -> Wgpu {
        let adapter = found().into_iter().next().expect("an adapter");
        let device = WgpuDevice::of(0, &adapter, limits(adapter.limits()), cache).expect("a device");
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

    /// A device with a few bindings computes what one with many does, of halves too, in place and in sums.
    #[test]
    fn programs_of_more_operands_than_bindings_are_computed() -> Result<()> {
        let few = |limits: wgpu::Limits| wgpu::Limits { max_storage_buffers_per_shader_stage: 5, ..limits };
        let many = Program::build("many", 7, 1, |_, x, s| {
            let sum = x[1..].iter().fold(x[0], |sum, x| sum * 2.0 + *x);
            vec![sum, x[6] - sum, x[3] + s[0]]
        });
        for dtype in [DType::F32, DType::F16] {
            let mut found = Vec::new();
            for gpu in [apart(), with(few, None)] {
                let numbers = |from: f64, dims: &[usize]| {
                    let all = Tensor::arange(&gpu, from, 1.0, dims.iter().product(), dtype)?;
                    all.reshape(dims)?.contiguous()?.copy()
                };
                let ins = [
                    numbers(0.0, &[6, 14])?.narrow(1, 3, 5)?,
                    numbers(1.0, &[5, 6])?.transpose(0, 1)?,
                    numbers(2.0, &[5])?.broadcast_to([6, 5])?,
                    numbers(3.0, &[6, 5])?,
                    numbers(4.0, &[6, 1])?.broadcast_to([6, 5])?,
                    numbers(5.0, &[6, 5])?,
                    numbers(6.0, &[6, 5])?,
                ];
                let refs: Vec<&Tensor<Wgpu>> = ins.iter().collect();
                let outs = refs[0].apply_program_all(&many, &refs[1..], &[0.5.into()])?;
                let sums = Op::from(Reduce::sum_of(
                    Program::new("sums", |[a, b, c, d, e], []| [a * b + c * d + e]),
                    Default::default(),
                    Shape::from([6, 1]),
                ));
                let mut sum = TensorMut::alloc(&gpu, Shape::from([6, 1]), dtype)?;
                sum.accumulate(&sums, &refs[..5])?;
                sum.accumulate(&sums, &refs[2..])?;
                // Outputs that are read, and written back from copies.
                let step = Program::build("step", 6, 0, |_, x, _| {
                    vec![x[0] + x[3], x[1] * 2.0 + x[4] + x[0], x[2] - x[5] - x[1]]
                });
                let own = |x: &Tensor<Wgpu>| x.copy()?.try_mut().map_err(|_| Error::argument("test", "is shared"));
                let mut state = [own(&ins[0])?, own(&ins[3])?, own(&ins[5])?];
                let [a, b, c] = &mut state;
                update(&step, &[&ins[1], &ins[4], &ins[6]], &[], &mut [a, b, c])?;
                let [x, w] = [numbers(0.0, &[2, 3, 4])?, numbers(0.0, &[5, 4])?];
                let [bias, residual] = [numbers(1.0, &[5])?, numbers(3.0, &[2, 3, 5])?];
                let mut all = outs;
                all.push(x.linear_onto(&w, Some(&bias), &residual)?);
                all.push(x.linear(&w, Some(&bias))?);
                all.push(sum.freeze()?);
                for state in state {
                    all.push(state.freeze()?);
                }
                found.push(all.iter().map(Tensor::to_f64s).collect::<Result<Vec<_>>>()?);
            }
            assert_eq!(found[0], found[1], "{dtype}");
        }
        Ok(())
    }

    /// Products of more operations than a launch may have: few in tests.
    #[test]
    fn large_products_are_computed_in_pieces() -> Result<()> {
        let gpu = apart();
        for dims in [[1, 130, 70, 50], [7, 3, 70, 50], [3, 130, 40, 1]] {
            let [batch, m, k, n] = dims;
            let a = Tensor::arange(&gpu, 0.0, 1.0, batch * k * m, DType::F32)?.reshape([batch, k, m])?;
            let a = a.rem(7.0)?.transpose(1, 2)?;
            let b = Tensor::arange(&gpu, 0.0, 1.0, k * n, DType::F32)?.rem(5.0)?.reshape([1, k, n])?;
            let product = a.matmul(&b.broadcast_to([batch, k, n])?)?.to_vec::<f32>()?;
            let (a, b) = (a.to_vec::<f32>()?, b.to_vec::<f32>()?);
            let at = |i: usize| (0..k).map(|t| a[i / n * k + t] * b[t * n + i % n]).sum::<f32>();
            assert_eq!(product, (0..batch * m * n).map(at).collect::<Vec<_>>(), "{dims:?}");
        }
        Ok(())
    }

    /// Compiled kernels of an earlier device are read from a file, and a damaged file is left out.
    #[test]
    fn compiled_kernels_are_kept_in_a_file() -> Result<()> {
        let folder = std::env::temp_dir().join(format!("weftgrad-wgpu-kernels-{}", std::process::id()));
        let files = || std::fs::read_dir(&folder).map_or(0, |files| files.count());
        let run = || {
            let gpu = with(|limits| limits, Some(folder.clone()));
            let keeps = gpu.queue.device.wgpu.features().contains(wgpu::Features::PIPELINE_CACHE);
            let x = Tensor::arange(&gpu, 0.0, 1.0, 4, DType::F32)?;
            assert_eq!(x.add(&x)?.to_vec::<f32>()?, [0.0, 2.0, 4.0, 6.0]);
            Ok::<bool, Error>(keeps)
        };
        if run()? {
            assert_eq!(files(), 1);
            run()?;
            let path = std::fs::read_dir(&folder).unwrap().next().unwrap().unwrap().path();
            let mut bytes = std::fs::read(&path).unwrap();
            bytes.truncate(bytes.len() - 1);
            std::fs::write(&path, bytes).unwrap();
            run()?;
            assert_eq!(files(), 1);
        }
        let _ = std::fs::remove_dir_all(&folder);
        Ok(())
    }
}
