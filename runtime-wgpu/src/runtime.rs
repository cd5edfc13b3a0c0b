//! The implementation of [`Runtime`] for [`Wgpu`]: each method calls the module of its family.

use std::sync::Arc;

use numcore::{
    ArgOp, Capabilities, DeviceId, MemoryCategory, MemoryStats, Out, ProgramOperand, ReduceKind, Result, Runtime,
    Scalar, ScanOp, Shape, Support, View, ViewMut, fused::FusedOp, pointwise::Program,
};

use crate::{Wgpu, WgpuBuffer, fused, index, matmul, pointwise, queue::Queue, reduce, scan, sort};

impl Runtime for Wgpu {
    type Buffer = WgpuBuffer;
    /// Recorded work is submitted, and the device executes submissions in order, so there is nothing to wait for.
    type Event = ();

    fn device(&self) -> DeviceId {
        self.queue.device.id
    }

    fn capabilities(&self) -> &Capabilities {
        &self.queue.device.capabilities
    }

    fn fork(&self) -> Result<Self> {
        self.queue.device.check("fork")?;
        Ok(Wgpu { queue: Arc::new(Queue::new(self.queue.device.clone())), use_: self.use_ })
    }

    fn with_category(&self, use_: MemoryCategory) -> Self {
        Wgpu { queue: Arc::clone(&self.queue), use_ }
    }

    fn record(&self) -> Result<()> {
        self.queue.submit()
    }

    fn wait(&self, _: &()) -> Result<()> {
        self.queue.device.check("wait")
    }

    fn recomputes_in_backward(&self) -> bool {
        false
    }

    fn synchronize(&self) -> Result<()> {
        self.queue.synchronize()
    }

    fn memory(&self) -> MemoryStats {
        self.queue.memory.stats()
    }

    fn reset_peak(&self) {
        self.queue.memory.reset_peak();
    }

    fn trim(&self) {
        self.queue.memory.trim();
    }

    fn alloc(&self, bytes: usize) -> Result<WgpuBuffer> {
        self.queue.device.check("alloc")?;
        self.queue.memory.alloc(bytes, self.use_)
    }

    fn upload(&self, from: &[u8], out: ViewMut<'_, Self>) -> Result<()> {
        if from.is_empty() {
            return Ok(());
        }
        self.queue.upload(from, out.buffer(), out.layout().offset() * out.dtype().size())
    }

    fn download(&self, x: View<'_, Self>, to: &mut [u8]) -> Result<()> {
        self.queue.download(x.buffer(), x.layout().offset() * x.dtype().size(), to)
    }

    fn pointwise(
        &self,
        program: &Program,
        ins: &[ProgramOperand<'_, Self>],
        scalars: &[Scalar],
        outs: &mut [Out<'_, Self>],
    ) -> Result<()> {
        pointwise::run(self, program, ins, scalars, outs)
    }

    fn reduce(
        &self,
        map: &Program,
        ins: &[View<'_, Self>],
        scalars: &[Scalar],
        full: &Shape,
        op: ReduceKind,
        out: Out<'_, Self>,
    ) -> Result<()> {
        reduce::reduce(self, map, ins, scalars, full, op, out)
    }

    fn arg_reduce(&self, op: ArgOp, x: View<'_, Self>, axis: usize, out: ViewMut<'_, Self>) -> Result<()> {
        reduce::arg_reduce(self, op, x, axis, out)
    }

    fn matmul(&self, a: View<'_, Self>, b: View<'_, Self>, out: Out<'_, Self>) -> Result<()> {
        matmul::matmul(self, a, b, out)
    }

    fn gather(&self, x: View<'_, Self>, axis: usize, index: View<'_, Self>, out: Out<'_, Self>) -> Result<()> {
        index::gather(self, x, axis, index, out)
    }

    fn scatter_add(
        &self,
        src: View<'_, Self>,
        axis: usize,
        index: View<'_, Self>,
        out: ViewMut<'_, Self>,
    ) -> Result<()> {
        index::scatter_add(self, src, axis, index, out)
    }

    fn scan(
        &self,
        op: ScanOp,
        x: View<'_, Self>,
        a: Option<View<'_, Self>>,
        axis: usize,
        reverse: bool,
        out: ViewMut<'_, Self>,
    ) -> Result<()> {
        scan::scan(self, op, x, a, axis, reverse, out)
    }

    fn sort(
        &self,
        x: View<'_, Self>,
        axis: usize,
        descending: bool,
        values: ViewMut<'_, Self>,
        index: ViewMut<'_, Self>,
    ) -> Result<()> {
        sort::sort(self, x, axis, descending, values, index)
    }

    fn fused(&self, op: &FusedOp, ins: &[View<'_, Self>], outs: &mut [Out<'_, Self>]) -> Result<Support> {
        fused::run(self, op, ins, outs)
    }
}
