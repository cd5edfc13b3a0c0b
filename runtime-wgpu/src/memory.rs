//! Device memory: one pool of buffers per queue.

use std::{fmt, sync::Arc};

use numcore::{ErrorKind, MemoryCategory, MemoryStats, Pool, Result};
use parking_lot::Mutex;

use crate::device::WgpuDevice;

/// A queue's memory: the pool of free buffers and the statistics.
pub(crate) struct Memory {
    device: Arc<WgpuDevice>,
    pool: Mutex<Pool<wgpu::Buffer>>,
}

/// A block of device memory, which returns to its queue's pool on drop.
pub struct WgpuBuffer {
    block: Option<(usize, wgpu::Buffer)>,
    bytes: usize,
    use_: MemoryCategory,
    memory: Arc<Memory>,
}

impl WgpuBuffer {
    /// The buffer of the device; `None` for a block of 0 bytes.
    pub(crate) fn block(&self) -> Option<&wgpu::Buffer> {
        self.block.as_ref().map(|(_, b)| b)
    }
}

impl fmt::Debug for WgpuBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WgpuBuffer({} bytes)", self.bytes)
    }
}

impl Drop for WgpuBuffer {
    fn drop(&mut self) {
        let mut pool = self.memory.pool.lock();
        pool.unbook(self.bytes, self.use_);
        if let Some((class, block)) = self.block.take() {
            pool.put(class, block);
        }
    }
}

impl Memory {
    pub(crate) fn new(device: Arc<WgpuDevice>) -> Arc<Self> {
        Arc::new(Memory { device, pool: Mutex::default() })
    }

    pub(crate) fn stats(&self) -> MemoryStats {
        self.pool.lock().stats().clone()
    }

    pub(crate) fn reset_peak(&self) {
        self.pool.lock().reset_peak();
    }

    /// Returns all free blocks to the driver. Recorded work keeps the blocks that it uses.
    pub(crate) fn trim(&self) {
        drop(self.pool.lock().drain());
    }

    /// Allocates `bytes` bytes, counted in the category `use_`. Their contents are arbitrary.
    pub(crate) fn alloc(self: &Arc<Self>, bytes: usize, use_: MemoryCategory) -> Result<WgpuBuffer> {
        let mut pool = self.pool.lock();
        let block = if bytes == 0 { None } else { Some(self.take(&mut pool, bytes)?) };
        pool.book(bytes, use_);
        drop(pool);
        Ok(WgpuBuffer { block, bytes, use_, memory: self.clone() })
    }

    fn take(&self, pool: &mut Pool<wgpu::Buffer>, bytes: usize) -> Result<(usize, wgpu::Buffer)> {
        let limit = self.device.limits.max_buffer_size;
        let class = Pool::<wgpu::Buffer>::class_of(bytes).filter(|_| bytes as u64 <= limit);
        let Some(class) = class else { return Err(self.exhausted(pool, bytes)) };
        if let Some(block) = pool.take(class) {
            return Ok(block);
        }
        // The size of a class near the limit may exceed the largest buffer.
        let size = (Pool::<wgpu::Buffer>::size_of(class) as u64).min(limit & !3);
        let block = self.create(size).or_else(|| {
            drop(pool.drain());
            self.create(size)
        });
        let block = block.ok_or_else(|| self.exhausted(pool, bytes))?;
        pool.reserve(class);
        Ok((class, block))
    }

    fn create(&self, size: u64) -> Option<wgpu::Buffer> {
        let device = &self.device.wgpu;
        let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST;
        let memory = device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        let rules = device.push_error_scope(wgpu::ErrorFilter::Validation);
        let buffer =
            device.create_buffer(&wgpu::BufferDescriptor { label: None, size, usage, mapped_at_creation: false });
        let refused = [pollster::block_on(rules.pop()), pollster::block_on(memory.pop())];
        refused.iter().all(Option::is_none).then_some(buffer)
    }

    fn exhausted(&self, pool: &Pool<wgpu::Buffer>, requested: usize) -> numcore::Error {
        ErrorKind::OutOfMemory { device: self.device.id, requested, report: Box::new(pool.report()) }.into()
    }
}
