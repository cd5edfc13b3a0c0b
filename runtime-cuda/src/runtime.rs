//! [`Runtime`] for [`Cuda`]: each method calls the module of its family of operations.

use std::sync::Arc;

use numcore::{
    ArgOp, Capabilities, DeviceId, DeviceQueue, MemoryCategory, MemoryStats, Out, ProgramOperand as In, ReduceKind,
    Result, Runtime, Scalar, ScanOp, Shape, Support, View, ViewMut, fused::FusedOp, pointwise::Program,
};

use crate::{
    Cuda, CudaBuffer, CudaEvent, axis_ops, device_queue::ForeignQueue, fused, index, matmul, operand::Operand,
    pointwise, queue::Queue, reduce, sort,
};

impl Cuda {
    /// Notes that this queue is about to use these buffers, which may belong to other queues.
    fn lend<'a>(&self, buffers: impl IntoIterator<Item = &'a CudaBuffer>) {
        buffers.into_iter().for_each(|b| b.used_by(&self.queue.memory));
    }
}

impl Runtime for Cuda {
    type Buffer = CudaBuffer;
    type Event = CudaEvent;

    fn device(&self) -> DeviceId {
        self.queue.engine.device
    }

    fn capabilities(&self) -> &Capabilities {
        &self.queue.engine.capabilities
    }

    fn fork(&self) -> Result<Self> {
        self.queue.refuse_while_capturing("fork")?;
        Ok(Cuda { use_: self.use_, products: self.products, ..Cuda::on(self.queue.engine.clone())? })
    }

    fn fork_for_communication(&self) -> Result<Self> {
        self.queue.refuse_while_capturing("fork")?;
        let queue = Arc::new(Queue::with_priority(self.queue.engine.clone())?);
        Ok(Cuda { queue, use_: MemoryCategory::Communication, products: self.products })
    }

    fn is_capturing(&self) -> bool {
        self.queue.is_capturing()
    }

    fn recomputes_in_backward(&self) -> bool {
        false
    }

    fn device_queue(&self) -> Option<Arc<dyn DeviceQueue>> {
        Some(Arc::new(ForeignQueue(self.queue.clone())))
    }

    fn device_address(&self, x: View<'_, Self>) -> Option<u64> {
        self.lend([x.buffer()]);
        Some(Operand::from(x).address)
    }

    fn device_address_mut(&self, out: ViewMut<'_, Self>) -> Option<u64> {
        self.lend([out.buffer()]);
        Some(Operand::from(&out).address)
    }

    fn with_category(&self, use_: MemoryCategory) -> Self {
        Cuda { queue: Arc::clone(&self.queue), use_, products: self.products }
    }

    fn record(&self) -> Result<CudaEvent> {
        CudaEvent::record(&self.queue)
    }

    fn wait(&self, event: &CudaEvent) -> Result<()> {
        event.wait(&self.queue)
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

    fn alloc(&self, bytes: usize) -> Result<CudaBuffer> {
        self.scratch(bytes)
    }

    fn upload(&self, from: &[u8], out: ViewMut<'_, Self>) -> Result<()> {
        self.lend([out.buffer()]);
        if from.is_empty() { Ok(()) } else { self.queue.upload(from, Operand::from(&out).address) }
    }

    fn download(&self, x: View<'_, Self>, to: &mut [u8]) -> Result<()> {
        self.lend([x.buffer()]);
        if to.is_empty() { self.queue.check() } else { self.queue.download(Operand::from(x).address, to) }
    }

    fn pointwise(
        &self,
        program: &Program,
        ins: &[In<'_, Self>],
        scalars: &[Scalar],
        outs: &mut [Out<'_, Self>],
    ) -> Result<()> {
        self.lend(ins.iter().filter_map(|i| if let In::View(v) = i { Some(v.buffer()) } else { None }));
        self.lend(outs.iter().map(|o| o.view.buffer()));
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
        self.lend(ins.iter().map(|v| v.buffer()).chain([out.view.buffer()]));
        reduce::reduce(self, map, ins, scalars, full, op, out)
    }

    fn arg_reduce(&self, op: ArgOp, x: View<'_, Self>, axis: usize, out: ViewMut<'_, Self>) -> Result<()> {
        self.lend([x.buffer(), out.buffer()]);
        axis_ops::arg_reduce(self, op, x, axis, out)
    }

    fn matmul(&self, a: View<'_, Self>, b: View<'_, Self>, out: Out<'_, Self>) -> Result<()> {
        self.lend([a.buffer(), b.buffer(), out.view.buffer()]);
        matmul::matmul(self, a, b, out)
    }

    fn gather(&self, x: View<'_, Self>, axis: usize, index: View<'_, Self>, out: Out<'_, Self>) -> Result<()> {
        self.lend([x.buffer(), index.buffer(), out.view.buffer()]);
        index::gather(self, x, axis, index, out)
    }

    fn scatter_add(
        &self,
        src: View<'_, Self>,
        axis: usize,
        index: View<'_, Self>,
        out: ViewMut<'_, Self>,
    ) -> Result<()> {
        self.lend([src.buffer(), index.buffer(), out.buffer()]);
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
        self.lend([x.buffer(), out.buffer()].into_iter().chain(a.map(|a| a.buffer())));
        axis_ops::scan(self, op, x, a, axis, reverse, out)
    }

    fn sort(
        &self,
        x: View<'_, Self>,
        axis: usize,
        descending: bool,
        values: ViewMut<'_, Self>,
        index: ViewMut<'_, Self>,
    ) -> Result<()> {
        self.lend([x.buffer(), values.buffer(), index.buffer()]);
        sort::sort(self, x, axis, descending, values, index)
    }

    fn supports_strided_outputs(&self, op: &FusedOp) -> bool {
        fused::is_strided(op)
    }

    fn supports_accumulate(&self, op: &FusedOp) -> bool {
        fused::adds(op)
    }

    fn fused(&self, op: &FusedOp, ins: &[View<'_, Self>], outs: &mut [Out<'_, Self>]) -> Result<Support> {
        self.lend(ins.iter().map(|v| v.buffer()).chain(outs.iter().map(|o| o.view.buffer())));
        fused::run(self, op, ins, outs)
    }
}
