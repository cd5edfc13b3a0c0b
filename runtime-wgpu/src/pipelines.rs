//! Compiled kernels, cached by their keys.

use std::{
    collections::{HashMap, VecDeque},
    hash::Hash,
    sync::Arc,
};

use numcore::{Result, pointwise::Program};
use parking_lot::Mutex;
use smallvec::SmallVec;

use crate::{device::WgpuDevice, kernel_file::KernelFile, prelude};

/// The most kernels in the cache; beyond it the oldest is dropped.
const MOST: usize = 4096;

/// The number of compiled kernels after which the file is written.
const SAVED: usize = 64;

/// The cache key of a kernel. Sizes, strides, offsets and scalars are launch parameters and no part of it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PipelineKey {
    /// The family of the kernel.
    pub(crate) kind: &'static str,
    /// The pointwise program that the kernel runs, if any.
    pub(crate) program: Option<Program>,
    /// The types, ranks, bindings and layout classes.
    pub(crate) details: SmallVec<[u32; 32]>,
}

/// The compiled kernels and layouts of a device.
pub(crate) struct Pipelines {
    /// The layout of the bind group with launch parameters.
    pub(crate) params: wgpu::BindGroupLayout,
    /// The layouts for wgpu, by the number of storage buffers that a kernel binds.
    layouts: Mutex<Vec<Option<(wgpu::BindGroupLayout, wgpu::PipelineLayout)>>>,
    kept: Mutex<CachedPipeline>,
    file: Mutex<Option<KernelFile>>,
}

#[derive(Default)]
struct CachedPipeline {
    compiled: usize,
    pipelines: HashMap<PipelineKey, Arc<wgpu::ComputePipeline>>,
    age: VecDeque<PipelineKey>,
}

impl Pipelines {
    pub(crate) fn new(device: &wgpu::Device, file: Option<KernelFile>) -> Self {
        let ty = wgpu::BindingType::Buffer {
            ty: wgpu::BufferBindingType::Uniform,
            has_dynamic_offset: true,
            min_binding_size: None,
        };
        let entries = [entry(0, ty)];
        let params =
            device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor { label: None, entries: &entries });
        Pipelines { params, layouts: Mutex::default(), kept: Mutex::default(), file: Mutex::new(file) }
    }

    /// The kernel of a key, compiled from `source` (bindings, functions and `main`) if it is not cached.
    pub(crate) fn get(
        &self,
        device: &WgpuDevice,
        op: &'static str,
        key: PipelineKey,
        bindings: usize,
        source: impl FnOnce() -> Result<String>,
    ) -> Result<Arc<wgpu::ComputePipeline>> {
        if let Some(pipeline) = self.kept.lock().pipelines.get(&key) {
            return Ok(pipeline.clone());
        }
        let text = source()?;
        let pipeline = Arc::new(self.compile(device, op, &text, bindings)?);
        let mut kept = self.kept.lock();
        kept.compiled += 1;
        if kept.compiled.is_multiple_of(SAVED) {
            self.save();
        }
        if kept.age.len() >= MOST
            && let Some(oldest) = kept.age.pop_front()
        {
            kept.pipelines.remove(&oldest);
        }
        kept.age.push_back(key.clone());
        kept.pipelines.insert(key, pipeline.clone());
        Ok(pipeline)
    }

    fn save(&self) {
        self.file.lock().iter_mut().for_each(KernelFile::save);
    }

    /// The families of the kernels in the cache.
    #[cfg(test)]
    pub(crate) fn kinds(&self) -> Vec<&'static str> {
        self.kept.lock().age.iter().map(|key| key.kind).collect()
    }

    fn compile(
        &self,
        device: &WgpuDevice,
        op: &'static str,
        text: &str,
        bindings: usize,
    ) -> Result<wgpu::ComputePipeline> {
        let text = format!("{text}\n{}", prelude::needed(text));
        let scope = device.wgpu.push_error_scope(wgpu::ErrorFilter::Validation);
        let source = wgpu::ShaderSource::Wgsl(text.as_str().into());
        let checks = wgpu::ShaderRuntimeChecks { force_loop_bounding: false, ..wgpu::ShaderRuntimeChecks::checked() };
        // SAFETY: all checks are on except loop bounding, and no kernel of this crate has an endless loop.
        let module = unsafe {
            device.wgpu.create_shader_module_trusted(wgpu::ShaderModuleDescriptor { label: Some(op), source }, checks)
        };
        let layout = self.layout(&device.wgpu, bindings).1;
        let pipeline = device.wgpu.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some(op),
            layout: Some(&layout),
            module: &module,
            entry_point: Some("main"),
            compilation_options: wgpu::PipelineCompilationOptions {
                zero_initialize_workgroup_memory: false,
                ..Default::default()
            },
            cache: self.file.lock().as_ref().map(|file| file.cache.clone()).as_ref(),
        });
        match pollster::block_on(scope.pop()) {
            None => Ok(pipeline),
            Some(e) => Err(device.backend(op, format!("{e}\n{text}"))),
        }
    }

    /// The layouts of kernels with `n` storage buffers.
    pub(crate) fn layout(&self, device: &wgpu::Device, n: usize) -> (wgpu::BindGroupLayout, wgpu::PipelineLayout) {
        let mut layouts = self.layouts.lock();
        if layouts.len() <= n {
            layouts.resize(n + 1, None);
        }
        let make = || {
            let ty = wgpu::BindingType::Buffer {
                ty: wgpu::BufferBindingType::Storage { read_only: false },
                has_dynamic_offset: false,
                min_binding_size: None,
            };
            let entries: Vec<_> = (0..n as u32).map(|i| entry(i, ty)).collect();
            let buffers =
                device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor { label: None, entries: &entries });
            let layout = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
                label: None,
                bind_group_layouts: &[Some(&buffers), Some(&self.params)],
                immediate_size: 0,
            });
            (buffers, layout)
        };
        layouts[n].get_or_insert_with(make).clone()
    }
}

impl Drop for Pipelines {
    fn drop(&mut self) {
        self.save();
    }
}

fn entry(binding: u32, ty: wgpu::BindingType) -> wgpu::BindGroupLayoutEntry {
    wgpu::BindGroupLayoutEntry { binding, visibility: wgpu::ShaderStages::COMPUTE, ty, count: None }
}
