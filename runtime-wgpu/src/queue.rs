//! The ordered queue of a handle: work is recorded into one encoder and submitted in batches.
//!
//! Launch parameters and small uploads of a batch are collected in an arena on the host. The arena is written once
//! before the batch is submitted, so uploads keep their order relative to earlier and later kernels.

use std::sync::{Arc, mpsc};

use numcore::{Error, Result};
use parking_lot::Mutex;

use crate::{
    bindings::Bindings,
    device::WgpuDevice,
    memory::{Memory, WgpuBuffer},
    pipelines::PipelineKey,
};

/// The size of a batch's arena of parameters and small uploads, in bytes.
const ARENA: usize = 256 << 10;
/// The most bytes of one launch's parameters: the size of the binding.
const WINDOW: usize = 8 << 10;
/// The alignment of parameters in bytes: WebGPU's largest alignment of uniform buffers.
const ALIGN: usize = 256;
/// The number of kernels of a batch. More hide the cost of a submission, fewer let the device start earlier.
const BATCH: usize = 64;
/// The operations of a batch, after which it is submitted. A slow GPU computes them within a second, and drivers end
/// work that takes longer than two.
const WORK: u64 = 10_000_000_000;
/// The most operations of one launch: a slow GPU computes them within a second.
pub(crate) const LARGEST: u64 = if cfg!(test) { 100_000 } else { 100_000_000_000 };
/// The operations of a workgroup of a kernel without products, about.
const EACH_GROUP: u64 = 256 * 16;
/// The most bytes of an upload through the arena. A larger upload ends the batch.
const SMALL: usize = 16 << 10;

/// The state that clones of a handle share.
pub(crate) struct Queue {
    pub(crate) device: Arc<WgpuDevice>,
    pub(crate) memory: Arc<Memory>,
    batch: Mutex<CommandBatch>,
    /// A word: 0, or the complement of the ticket of the first launch that found an index out of range.
    pub(crate) flag: wgpu::Buffer,
}

struct CommandBatch {
    encoder: Option<wgpu::CommandEncoder>,
    pass: Option<wgpu::ComputePass<'static>>,
    kernels: usize,
    /// The operations of the kernels, about.
    work: u64,
    arena: Vec<u8>,
    on_device: wgpu::Buffer,
    params: wgpu::BindGroup,
    /// The launches that may find an index out of range, since the flag was last checked: their tickets and errors.
    tickets: Vec<(u32, IndexCheck)>,
    next_ticket: u32,
    /// The staging buffers of earlier downloads, kept for later ones.
    staging: Vec<wgpu::Buffer>,
}

/// The contents of an error about an index out of range: the op and the size of the indexed axis.
#[derive(Clone, Copy, Debug)]
pub(crate) struct IndexCheck {
    pub(crate) op: &'static str,
    pub(crate) size: usize,
}

/// A launch of a kernel: its key, bindings, parameters and number of workgroups.
pub(crate) struct Dispatch<'a, 'p> {
    pub(crate) op: &'static str,
    pub(crate) key: PipelineKey,
    pub(crate) bindings: Bindings<'a>,
    pub(crate) params: &'p [u32],
    pub(crate) groups: usize,
    /// The operations of products in it; other kernels have a few for each byte.
    pub(crate) work: u64,
}

impl Queue {
    pub(crate) fn new(device: Arc<WgpuDevice>) -> Queue {
        let make = |size: usize, usage| {
            let size = size as u64;
            device.wgpu.create_buffer(&wgpu::BufferDescriptor { label: None, size, usage, mapped_at_creation: false })
        };
        let copies = wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST;
        let on_device = make(ARENA + WINDOW, wgpu::BufferUsages::UNIFORM | copies);
        let flag = make(4, wgpu::BufferUsages::STORAGE | copies);
        let window = wgpu::BufferBinding { buffer: &on_device, offset: 0, size: wgpu::BufferSize::new(WINDOW as u64) };
        let params = device.wgpu.create_bind_group(&wgpu::BindGroupDescriptor {
            label: None,
            layout: &device.pipelines.params,
            entries: &[wgpu::BindGroupEntry { binding: 0, resource: wgpu::BindingResource::Buffer(window) }],
        });
        let batch = CommandBatch {
            encoder: None,
            pass: None,
            kernels: 0,
            work: 0,
            arena: Vec::new(),
            on_device,
            params,
            tickets: Vec::new(),
            next_ticket: 0,
            staging: Vec::new(),
        };
        Queue { memory: Memory::new(device.clone()), device, batch: Mutex::new(batch), flag }
    }

    /// Records a launch. `source` generates the kernel's source if the kernel is not compiled yet.
    pub(crate) fn launch(&self, launch: Dispatch<'_, '_>, source: impl FnOnce() -> Result<String>) -> Result<()> {
        let Dispatch { op, key, bindings, params, groups, work } = launch;
        let device = &*self.device;
        device.check(op)?;
        if groups == 0 {
            return Ok(());
        }
        let most = device.limits.max_compute_workgroups_per_dimension as usize;
        let x = groups.min(most);
        let y = groups.div_ceil(x);
        if y > most || params.len() * 4 > WINDOW {
            let why = format!(
                "{groups} groups of threads with {} parameters; at most {most}² and {}",
                params.len(),
                WINDOW / 4
            );
            return Err(device.unsupported(op, why));
        }
        let pipeline = device.pipelines.get(device, op, key, bindings.len(), source)?;
        let buffers = bindings.group(device);
        let mut batch = self.batch.lock();
        if batch.arena.len() + WINDOW > ARENA || batch.kernels >= BATCH || batch.work >= WORK {
            batch.submit(device);
        }
        let at = batch.put(params.iter().flat_map(|p| p.to_ne_bytes()));
        batch.kernels += 1;
        batch.work = batch.work.saturating_add(work.max(groups as u64 * EACH_GROUP));
        let group = batch.params.clone();
        let pass = batch.pass(device);
        pass.set_pipeline(&pipeline);
        pass.set_bind_group(0, &buffers, &[]);
        pass.set_bind_group(1, &group, &[at as u32]);
        pass.dispatch_workgroups(x as u32, y as u32, 1);
        Ok(())
    }

    /// Draws a ticket for a launch that may find an index out of range. The launch writes its complement to the flag.
    pub(crate) fn ticket(&self, ticket: IndexCheck) -> u32 {
        let mut batch = self.batch.lock();
        let number = batch.next_ticket;
        batch.next_ticket = number.wrapping_add(1);
        batch.tickets.push((number, ticket));
        number
    }

    /// Copies bytes to a buffer at offset `at`, a multiple of 4. The unused bytes of the last word become 0.
    pub(crate) fn upload(&self, from: &[u8], to: &WgpuBuffer, at: usize) -> Result<()> {
        self.device.check("upload")?;
        let Some(to) = to.block() else { return Ok(()) };
        let mut batch = self.batch.lock();
        if from.len() > SMALL {
            // Data written here is ordered after the last submission and before the next one.
            batch.submit(&self.device);
            let whole = from.len() & !3;
            self.device.queue.write_buffer(to, at as u64, &from[..whole]);
            if whole < from.len() {
                let mut last = [0; 4];
                last[..from.len() - whole].copy_from_slice(&from[whole..]);
                self.device.queue.write_buffer(to, (at + whole) as u64, &last);
            }
            return Ok(());
        }
        if batch.arena.len() + SMALL + WINDOW > ARENA {
            batch.submit(&self.device);
        }
        let start = batch.put(from.iter().copied());
        let source = batch.on_device.clone();
        batch.copies(&self.device).copy_buffer_to_buffer(
            &source,
            start as u64,
            to,
            at as u64,
            Some(from.len().next_multiple_of(4) as u64),
        );
        Ok(())
    }

    /// The number of recorded launches that are not submitted.
    #[cfg(test)]
    pub(crate) fn recorded(&self) -> usize {
        self.batch.lock().kernels
    }

    /// Submits the recorded work.
    pub(crate) fn submit(&self) -> Result<()> {
        self.batch.lock().submit(&self.device);
        self.device.check("record")
    }

    /// Waits for all recorded work. Returns its failure or an index out of range as an error.
    pub(crate) fn synchronize(&self) -> Result<()> {
        self.read("synchronize", None, &mut [])
    }

    /// Copies bytes from a buffer and waits for them. Returns a failure or an index out of range as an error.
    pub(crate) fn download(&self, from: &WgpuBuffer, at: usize, to: &mut [u8]) -> Result<()> {
        self.read("download", from.block().filter(|_| !to.is_empty()).map(|b| (b, at)), to)
    }

    fn read(&self, op: &'static str, from: Option<(&wgpu::Buffer, usize)>, to: &mut [u8]) -> Result<()> {
        self.device.check(op)?;
        let mut batch = self.batch.lock();
        // Those drawn since are of launches whose flags the next read sees.
        let tickets = std::mem::take(&mut batch.tickets);
        // Space for the flag's word, then for whole words around the requested range.
        let (start, words) = from.map_or((0, 0), |(_, at)| (at & !3, (at + to.len()).next_multiple_of(4) - (at & !3)));
        let staging = batch.staging(&self.device, 4 + words);
        let encoder = batch.copies(&self.device);
        encoder.copy_buffer_to_buffer(&self.flag, 0, &staging, 0, Some(4));
        encoder.clear_buffer(&self.flag, 0, None);
        if let Some((buffer, _)) = from {
            encoder.copy_buffer_to_buffer(buffer, start as u64, &staging, 4, Some(words as u64));
        }
        let submission = batch.submit(&self.device);
        drop(batch);
        let (tell, told) = mpsc::channel();
        staging.slice(..(4 + words) as u64).map_async(wgpu::MapMode::Read, move |mapped| {
            // The receiver is gone if this call has failed.
            let _ = tell.send(mapped);
        });
        let waited = self.device.wgpu.poll(wgpu::PollType::Wait { submission_index: submission, timeout: None });
        self.device.check(op)?;
        if let Err(e) = waited {
            self.device.fail(e.to_string());
            return self.device.check(op);
        }
        if !matches!(told.recv(), Ok(Ok(()))) {
            self.device.fail("memory could not be mapped".into());
            return self.device.check(op);
        }
        let flag = {
            let mapped = staging.slice(..(4 + words) as u64).get_mapped_range();
            let mapped = mapped.map_err(|e| self.device.backend(op, e.to_string()))?;
            if let Some((_, at)) = from {
                to.copy_from_slice(&mapped[4 + at - start..][..to.len()]);
            }
            u32::from_ne_bytes([mapped[0], mapped[1], mapped[2], mapped[3]])
        };
        staging.unmap();
        self.batch.lock().finish_batch(flag, &tickets, staging)
    }
}

impl CommandBatch {
    /// Puts bytes into the arena and returns their offset.
    fn put(&mut self, bytes: impl Iterator<Item = u8>) -> usize {
        let at = self.arena.len();
        self.arena.extend(bytes);
        self.arena.resize(self.arena.len().next_multiple_of(ALIGN), 0);
        at
    }

    /// The encoder for copies; ends the compute pass.
    fn copies(&mut self, device: &WgpuDevice) -> &mut wgpu::CommandEncoder {
        self.pass = None;
        self.encoder.get_or_insert_with(|| device.wgpu.create_command_encoder(&Default::default()))
    }

    /// The compute pass for kernels.
    fn pass(&mut self, device: &WgpuDevice) -> &mut wgpu::ComputePass<'static> {
        let CommandBatch { encoder, pass, .. } = self;
        let encoder = encoder.get_or_insert_with(|| device.wgpu.create_command_encoder(&Default::default()));
        pass.get_or_insert_with(|| encoder.begin_compute_pass(&Default::default()).forget_lifetime())
    }

    fn submit(&mut self, device: &WgpuDevice) -> Option<wgpu::SubmissionIndex> {
        self.pass = None;
        let encoder = self.encoder.take()?;
        if !self.arena.is_empty() {
            device.queue.write_buffer(&self.on_device, 0, &self.arena);
            self.arena.clear();
        }
        (self.kernels, self.work) = (0, 0);
        Some(device.queue.submit([encoder.finish()]))
    }

    /// A staging buffer of at least `bytes` bytes for a download.
    fn staging(&mut self, device: &WgpuDevice, bytes: usize) -> wgpu::Buffer {
        let fits = |b: &wgpu::Buffer| b.size() >= bytes as u64;
        if let Some(i) = self.staging.iter().position(fits) {
            return self.staging.swap_remove(i);
        }
        let size = bytes.next_power_of_two().max(4096).min(device.limits.max_buffer_size as usize & !3) as u64;
        let usage = wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST;
        device.wgpu.create_buffer(&wgpu::BufferDescriptor { label: None, size, usage, mapped_at_creation: false })
    }

    /// Keeps the staging buffer of a read. The error names the op that found an index out of range, by the flag and the
    /// tickets that the read has seen.
    fn finish_batch(&mut self, flag: u32, tickets: &[(u32, IndexCheck)], staging: wgpu::Buffer) -> Result<()> {
        // A large buffer is not kept: it takes as much memory as the data that was read.
        if self.staging.len() < 4 && staging.size() <= 16 << 20 {
            self.staging.push(staging);
        }
        if flag == 0 {
            return Ok(());
        }
        let known = tickets.iter().find(|(number, _)| *number == !flag).map(|(_, check)| *check);
        // A ticket that another thread's read has taken before its launch has no name.
        let (op, size) = known.map_or(("gather", None), |IndexCheck { op, size }| (op, Some(size)));
        Err(Error::late_index(op, size))
    }
}
