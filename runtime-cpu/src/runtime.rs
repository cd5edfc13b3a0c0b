//! The implementation of [`Runtime`] for [`Cpu`]: each method calls the module of its family.

use std::sync::Arc;

use numcore::{
    ArgOp, Capabilities, DeviceId, DeviceKind, MemoryCategory, MemoryStats, Out, ProgramOperand, ReduceKind, Result,
    Runtime, Scalar, ScanOp, Shape, Support, View, ViewMut,
    fused::FusedOp,
    ops::Rule,
    pointwise::Program,
    trace::{self, SpanKind},
};

use crate::{Cpu, CpuBuffer, arg_reduce, fused, gemm, index, operand, pointwise, reduce, scan, sort};

impl Runtime for Cpu {
    type Buffer = CpuBuffer;
    type Event = ();

    fn device(&self) -> DeviceId {
        DeviceId { kind: DeviceKind::Cpu, index: 0 }
    }

    fn capabilities(&self) -> &Capabilities {
        &self.queue.engine.capabilities
    }

    fn clock(&self) -> numcore::trace::ClockSource {
        crate::clock::source()
    }

    fn fork(&self) -> Result<Self> {
        Ok(Cpu { use_: self.use_, ..Cpu::on(self.queue.engine.clone()) })
    }

    fn with_category(&self, use_: MemoryCategory) -> Self {
        Cpu { queue: Arc::clone(&self.queue), use_ }
    }

    fn record(&self) -> Result<()> {
        Ok(())
    }

    fn wait(&self, _: &()) -> Result<()> {
        Ok(())
    }

    fn synchronize(&self) -> Result<()> {
        Ok(())
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

    fn alloc(&self, bytes: usize) -> Result<CpuBuffer> {
        self.queue.memory.alloc(bytes, self.use_)
    }

    fn upload(&self, from: &[u8], out: ViewMut<'_, Self>) -> Result<()> {
        let to = operand::Operand::from(&out);
        debug_assert_eq!(from.len(), to.bytes());
        // SAFETY: a contiguous output of exactly this size, which no other thread accesses.
        unsafe { operand::Base::new(to.ptr()).slice_mut(0, to.bytes()) }.copy_from_slice(from);
        Ok(())
    }

    fn download(&self, x: View<'_, Self>, to: &mut [u8]) -> Result<()> {
        let from = operand::Operand::from(x);
        debug_assert_eq!(to.len(), from.bytes());
        // SAFETY: a contiguous view of exactly this size.
        to.copy_from_slice(unsafe { operand::Base::new(from.ptr()).slice(0, from.bytes()) });
        Ok(())
    }

    fn host_bytes<'a>(&self, x: View<'a, Self>) -> Option<&'a [u8]> {
        let from = operand::Operand::from(x);
        // SAFETY: a contiguous view lies inside its buffer, whose memory is initialised and which nothing writes while
        // the view's borrow lasts.
        Some(unsafe { std::slice::from_raw_parts(from.ptr(), from.bytes()) })
    }

    fn host_bytes_mut<'a>(&self, out: ViewMut<'a, Self>) -> Option<&'a mut [u8]> {
        let to = operand::Operand::from(&out);
        // SAFETY: a contiguous output lies inside its buffer, whose memory is initialised and which nothing else sees
        // while its borrow lasts.
        Some(unsafe { std::slice::from_raw_parts_mut(to.ptr(), to.bytes()) })
    }

    fn pointwise(
        &self,
        program: &Program,
        ins: &[ProgramOperand<'_, Self>],
        scalars: &[Scalar],
        outs: &mut [Out<'_, Self>],
    ) -> Result<()> {
        let _span = trace::span(SpanKind::Kernel, program.name());
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
        let _span = trace::span(SpanKind::Kernel, "reduce");
        reduce::reduce(self, map, ins, scalars, full, op, out)
    }

    fn arg_reduce(&self, op: ArgOp, x: View<'_, Self>, axis: usize, out: ViewMut<'_, Self>) -> Result<()> {
        let _span = trace::span(SpanKind::Kernel, "arg_reduce");
        arg_reduce::arg_reduce(self, op, x, axis, out);
        Ok(())
    }

    fn matmul(&self, a: View<'_, Self>, b: View<'_, Self>, out: Out<'_, Self>) -> Result<()> {
        let _span = trace::span(SpanKind::Kernel, "matmul");
        gemm::matmul(self, a, b, out)
    }

    fn gather(&self, x: View<'_, Self>, axis: usize, index: View<'_, Self>, out: Out<'_, Self>) -> Result<()> {
        let _span = trace::span(SpanKind::Kernel, "gather");
        index::gather(self, x, axis, index, out)
    }

    fn scatter_add(
        &self,
        src: View<'_, Self>,
        axis: usize,
        index: View<'_, Self>,
        out: ViewMut<'_, Self>,
    ) -> Result<()> {
        let _span = trace::span(SpanKind::Kernel, "scatter_add");
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
        let _span = trace::span(SpanKind::Kernel, "scan");
        scan::scan(self, op, x, a, axis, reverse, out);
        Ok(())
    }

    fn sort(
        &self,
        x: View<'_, Self>,
        axis: usize,
        descending: bool,
        values: ViewMut<'_, Self>,
        index: ViewMut<'_, Self>,
    ) -> Result<()> {
        let _span = trace::span(SpanKind::Kernel, "sort");
        sort::sort(self, x, axis, descending, values, index);
        Ok(())
    }

    fn supports_strided_outputs(&self, op: &FusedOp) -> bool {
        fused::is_strided(op)
    }

    fn supports_accumulate(&self, op: &FusedOp) -> bool {
        fused::adds(op)
    }

    fn fused(&self, op: &FusedOp, ins: &[View<'_, Self>], outs: &mut [Out<'_, Self>]) -> Result<Support> {
        let start = trace::is_recorded(SpanKind::Kernel).then(trace::now);
        let support = fused::run(self, op, ins, outs)?;
        if let Some(start) = start.filter(|_| support == Support::Done) {
            trace::ended(SpanKind::Kernel, op.name(), None, start, 0);
        }
        Ok(support)
    }
}
