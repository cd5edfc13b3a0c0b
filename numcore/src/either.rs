//! Two runtimes as one type, so that a program can choose its device at run time. `Either<A, Either<B, C>>` combines
//! more. The module is in this crate because only this crate may rebuild views.

use std::sync::Arc;

use smallvec::SmallVec;

use crate::{
    ArgOp, Capabilities, DeviceId, DeviceQueue, ErrorKind, MemoryCategory, MemoryStats, Out, ProgramOperand,
    ReduceKind, Result, Runtime, Scalar, ScanOp, Shape, Support, View, ViewMut, fused::FusedOp, pointwise::Program,
    trace::ClockSource,
};

/// One of two runtimes; every call is forwarded to the variant that is present.
#[derive(Clone, Debug)]
pub enum Either<A, B> {
    /// The first of the two runtimes.
    A(A),
    /// The second of the two runtimes.
    B(B),
}

/// The memory of one of two runtimes.
pub enum EitherBuffer<A, B> {
    /// Memory of the first runtime.
    A(A),
    /// Memory of the second runtime.
    B(B),
}

/// A point in a queue of one of two runtimes.
pub enum EitherEvent<A, B> {
    /// A point in a queue of the first runtime.
    A(A),
    /// A point in a queue of the second runtime.
    B(B),
}

type Pick<A, B, S> =
    fn(&EitherBuffer<<A as Runtime>::Buffer, <B as Runtime>::Buffer>) -> Option<&<S as Runtime>::Buffer>;

/// A translation of operands of `Either<A, B>` to operands of `S`, the runtime that is present.
struct EitherSide<'r, A: Runtime, B: Runtime, S: Runtime> {
    rt: &'r S,
    pick: Pick<A, B, S>,
}

impl<A: Runtime, B: Runtime, S: Runtime> EitherSide<'_, A, B, S> {
    fn buffer<'a>(&self, buffer: &'a EitherBuffer<A::Buffer, B::Buffer>) -> Result<&'a S::Buffer> {
        let devices = || vec![self.rt.device()];
        (self.pick)(buffer).ok_or_else(|| ErrorKind::Device { op: "dispatch", devices: devices() }.into())
    }

    fn view<'a>(&self, v: View<'a, Either<A, B>>) -> Result<View<'a, S>> {
        Ok(View { buffer: self.buffer(v.buffer)?, layout: v.layout, dtype: v.dtype })
    }

    fn view_mut<'a>(&self, v: ViewMut<'a, Either<A, B>>) -> Result<ViewMut<'a, S>> {
        Ok(ViewMut { buffer: self.buffer(v.buffer)?, layout: v.layout, dtype: v.dtype })
    }

    fn out<'a>(&self, o: Out<'a, Either<A, B>>) -> Result<Out<'a, S>> {
        Ok(Out { view: self.view_mut(o.view)?, how: o.how })
    }

    fn outs<'a>(&self, outs: &'a mut [Out<'_, Either<A, B>>]) -> Result<SmallVec<[Out<'a, S>; 4]>> {
        outs.iter_mut().map(|o| self.out(o.reborrow())).collect()
    }

    fn views<'a>(&self, ins: &[View<'a, Either<A, B>>]) -> Result<SmallVec<[View<'a, S>; 4]>> {
        ins.iter().map(|v| self.view(*v)).collect()
    }

    fn operands<'a>(&self, ins: &[ProgramOperand<'a, Either<A, B>>]) -> Result<SmallVec<[ProgramOperand<'a, S>; 8]>> {
        ins.iter()
            .map(|o| match o {
                ProgramOperand::View(v) => self.view(*v).map(ProgramOperand::View),
                ProgramOperand::Own(k) => Ok(ProgramOperand::Own(*k)),
            })
            .collect()
    }
}

fn pick_a<A, B>(buffer: &EitherBuffer<A, B>) -> Option<&A> {
    match buffer {
        EitherBuffer::A(b) => Some(b),
        EitherBuffer::B(_) => None,
    }
}

fn pick_b<A, B>(buffer: &EitherBuffer<A, B>) -> Option<&B> {
    match buffer {
        EitherBuffer::A(_) => None,
        EitherBuffer::B(b) => Some(b),
    }
}

/// Runs an expression with `$rt` bound to the runtime that is present, and `$side` to the translation of its operands.
macro_rules! on_side {
    ($self:ident, |$rt:ident, $side:ident| $body:expr) => {
        match $self {
            Either::A($rt) => {
                let $side = EitherSide::<A, B, A> { rt: $rt, pick: pick_a };
                $body
            }
            Either::B($rt) => {
                let $side = EitherSide::<A, B, B> { rt: $rt, pick: pick_b };
                $body
            }
        }
    };
}

/// Evaluates an expression for the runtime that is present.
macro_rules! either {
    ($self:ident, |$rt:ident| $body:expr) => {
        match $self {
            Either::A($rt) => $body,
            Either::B($rt) => $body,
        }
    };
}

impl<A: Runtime, B: Runtime> Runtime for Either<A, B> {
    type Buffer = EitherBuffer<A::Buffer, B::Buffer>;
    type Event = EitherEvent<A::Event, B::Event>;

    fn device(&self) -> DeviceId {
        either!(self, |rt| rt.device())
    }

    fn capabilities(&self) -> &Capabilities {
        either!(self, |rt| rt.capabilities())
    }

    fn clock(&self) -> ClockSource {
        either!(self, |rt| rt.clock())
    }

    fn fork(&self) -> Result<Self> {
        Ok(match self {
            Either::A(rt) => Either::A(rt.fork()?),
            Either::B(rt) => Either::B(rt.fork()?),
        })
    }

    fn fork_for_communication(&self) -> Result<Self> {
        Ok(match self {
            Either::A(rt) => Either::A(rt.fork_for_communication()?),
            Either::B(rt) => Either::B(rt.fork_for_communication()?),
        })
    }

    fn with_category(&self, use_: MemoryCategory) -> Self {
        match self {
            Either::A(rt) => Either::A(rt.with_category(use_)),
            Either::B(rt) => Either::B(rt.with_category(use_)),
        }
    }

    fn record(&self) -> Result<Self::Event> {
        Ok(match self {
            Either::A(rt) => EitherEvent::A(rt.record()?),
            Either::B(rt) => EitherEvent::B(rt.record()?),
        })
    }

    fn wait(&self, event: &Self::Event) -> Result<()> {
        match (self, event) {
            (Either::A(rt), EitherEvent::A(e)) => rt.wait(e),
            (Either::B(rt), EitherEvent::B(e)) => rt.wait(e),
            _ => Err(ErrorKind::Device { op: "wait", devices: vec![self.device()] }.into()),
        }
    }

    fn synchronize(&self) -> Result<()> {
        either!(self, |rt| rt.synchronize())
    }

    fn memory(&self) -> MemoryStats {
        either!(self, |rt| rt.memory())
    }

    fn reset_peak(&self) {
        either!(self, |rt| rt.reset_peak())
    }

    fn trim(&self) {
        either!(self, |rt| rt.trim());
    }

    fn alloc(&self, bytes: usize) -> Result<Self::Buffer> {
        Ok(match self {
            Either::A(rt) => EitherBuffer::A(rt.alloc(bytes)?),
            Either::B(rt) => EitherBuffer::B(rt.alloc(bytes)?),
        })
    }

    fn upload(&self, from: &[u8], out: ViewMut<'_, Self>) -> Result<()> {
        on_side!(self, |rt, side| rt.upload(from, side.view_mut(out)?))
    }

    fn download(&self, x: View<'_, Self>, to: &mut [u8]) -> Result<()> {
        on_side!(self, |rt, side| rt.download(side.view(x)?, to))
    }

    fn host_bytes<'a>(&self, x: View<'a, Self>) -> Option<&'a [u8]> {
        on_side!(self, |rt, side| rt.host_bytes(side.view(x).ok()?))
    }

    fn host_bytes_mut<'a>(&self, out: ViewMut<'a, Self>) -> Option<&'a mut [u8]> {
        on_side!(self, |rt, side| rt.host_bytes_mut(side.view_mut(out).ok()?))
    }

    fn recomputes_in_backward(&self) -> bool {
        either!(self, |rt| rt.recomputes_in_backward())
    }

    fn is_capturing(&self) -> bool {
        match self {
            Either::A(rt) => rt.is_capturing(),
            Either::B(rt) => rt.is_capturing(),
        }
    }

    fn device_queue(&self) -> Option<Arc<dyn DeviceQueue>> {
        match self {
            Either::A(rt) => rt.device_queue(),
            Either::B(rt) => rt.device_queue(),
        }
    }

    fn device_address(&self, x: View<'_, Self>) -> Option<u64> {
        on_side!(self, |rt, side| rt.device_address(side.view(x).ok()?))
    }

    fn device_address_mut(&self, out: ViewMut<'_, Self>) -> Option<u64> {
        on_side!(self, |rt, side| rt.device_address_mut(side.view_mut(out).ok()?))
    }

    fn pointwise(
        &self,
        program: &Program,
        ins: &[ProgramOperand<'_, Self>],
        scalars: &[Scalar],
        outs: &mut [Out<'_, Self>],
    ) -> Result<()> {
        on_side!(self, |rt, side| rt.pointwise(program, &side.operands(ins)?, scalars, &mut side.outs(outs)?))
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
        on_side!(self, |rt, side| rt.reduce(map, &side.views(ins)?, scalars, full, op, side.out(out)?))
    }

    fn arg_reduce(&self, op: ArgOp, x: View<'_, Self>, axis: usize, out: ViewMut<'_, Self>) -> Result<()> {
        on_side!(self, |rt, side| rt.arg_reduce(op, side.view(x)?, axis, side.view_mut(out)?))
    }

    fn matmul(&self, a: View<'_, Self>, b: View<'_, Self>, out: Out<'_, Self>) -> Result<()> {
        on_side!(self, |rt, side| rt.matmul(side.view(a)?, side.view(b)?, side.out(out)?))
    }

    fn gather(&self, x: View<'_, Self>, axis: usize, index: View<'_, Self>, out: Out<'_, Self>) -> Result<()> {
        on_side!(self, |rt, side| rt.gather(side.view(x)?, axis, side.view(index)?, side.out(out)?))
    }

    fn scatter_add(
        &self,
        src: View<'_, Self>,
        axis: usize,
        index: View<'_, Self>,
        out: ViewMut<'_, Self>,
    ) -> Result<()> {
        on_side!(self, |rt, side| rt.scatter_add(side.view(src)?, axis, side.view(index)?, side.view_mut(out)?))
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
        on_side!(self, |rt, side| {
            let a = a.map(|a| side.view(a)).transpose()?;
            rt.scan(op, side.view(x)?, a, axis, reverse, side.view_mut(out)?)
        })
    }

    fn sort(
        &self,
        x: View<'_, Self>,
        axis: usize,
        descending: bool,
        values: ViewMut<'_, Self>,
        index: ViewMut<'_, Self>,
    ) -> Result<()> {
        on_side!(self, |rt, side| rt.sort(
            side.view(x)?,
            axis,
            descending,
            side.view_mut(values)?,
            side.view_mut(index)?
        ))
    }

    fn supports_strided_outputs(&self, op: &FusedOp) -> bool {
        either!(self, |rt| rt.supports_strided_outputs(op))
    }

    fn supports_accumulate(&self, op: &FusedOp) -> bool {
        either!(self, |rt| rt.supports_accumulate(op))
    }

    fn fused(&self, op: &FusedOp, ins: &[View<'_, Self>], outs: &mut [Out<'_, Self>]) -> Result<Support> {
        on_side!(self, |rt, side| rt.fused(op, &side.views(ins)?, &mut side.outs(outs)?))
    }
}
