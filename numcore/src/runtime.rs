//! The contract between tensors and devices: one trait with a small method per operation family, and the views that
//! kernels get.
//!
//! **Invariant**: only this crate builds [`View`] and [`ViewMut`]. They are inside their buffer, and an output never
//! overlaps itself, another output or an input. Every operand of a call has the shape that its method states. The
//! `unsafe` code of kernels relies on it.
//!
//! An output never shares its buffer with an input, not even in disjoint ranges, except through
//! [`ProgramOperand::Own`]. WebGPU refuses one buffer bound for reading and for writing. Outputs may share one.

use std::{
    fmt::{self, Debug},
    sync::Arc,
};

use crate::{
    Capabilities, DType, DeviceQueue, Layout, MemoryCategory, MemoryStats, Result, Scalar, Shape, fused::FusedOp,
    pointwise::Program, trace::ClockSource,
};

/// The kinds of devices that runtimes drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DeviceKind {
    /// No device: only shapes, and a count of launches.
    Null,
    /// The CPU of the host.
    Cpu,
    /// An NVIDIA GPU, through CUDA.
    Cuda,
    /// Any GPU, through WebGPU.
    Wgpu,
}

/// The identity of a device; only tensors of one device can be combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceId {
    /// The kind of device.
    pub kind: DeviceKind,
    /// The index among devices of this kind.
    pub index: u32,
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            DeviceKind::Null if self.index == 0 => write!(f, "null"),
            DeviceKind::Null => write!(f, "null:{}", self.index),
            DeviceKind::Cpu => write!(f, "cpu"),
            DeviceKind::Cuda => write!(f, "cuda:{}", self.index),
            DeviceKind::Wgpu => write!(f, "wgpu:{}", self.index),
        }
    }
}

/// The effect of a kernel on its output: overwrite, or accumulate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Accumulate {
    /// The output's old value is never read.
    Overwrite,
    /// The result is added to the old value (`bool`: or).
    Add,
}

/// The reductions of [`Runtime::reduce`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReduceKind {
    /// The sum; 0 over no elements.
    Sum,
    /// The product; 1 over no elements.
    Prod,
    /// The largest element; NaN wins. Over no elements, the dtype's lowest value.
    Max,
    /// The smallest element; NaN wins. Over no elements, the dtype's highest value.
    Min,
}

/// The extreme that [`Runtime::arg_reduce`] finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ArgOp {
    /// The position of the first largest element; NaN counts as largest.
    Max,
    /// The position of the first smallest element; NaN counts as smallest.
    Min,
}

/// A recurrence along an axis, for [`Runtime::scan`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScanOp {
    /// The cumulative sum, `y[t] = y[t-1] + x[t]`.
    Sum,
    /// The cumulative product, `y[t] = y[t-1] · x[t]`.
    Prod,
    /// The linear recurrence `y[t] = a[t] · y[t-1] + x[t]`, `y[-1] = 0`; the second operand is `a`.
    Linear,
}

/// The answer of a runtime to a fused operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Support {
    /// The runtime has a kernel, which has filled the outputs.
    Done,
    /// The runtime has no kernel for this call: run the decomposition.
    Decompose,
}

/// A device, one ordered queue on it, and its kernels. A cheap handle: clone freely.
///
/// Methods may be asynchronous; errors surface at the latest in [`synchronize`](Runtime::synchronize) or
/// [`download`](Runtime::download). An index out of range is reported once, and the queue continues. A failure of the
/// device (memory, a kernel, the driver) loses the work queued since. It is sticky: every later call on that queue
/// reports it.
///
/// This crate infers shapes and allocates memory; kernels fill outputs. Every operand of one call is on this device,
/// and `ins` are already broadcast to the call's full shape.
pub trait Runtime: Clone + Send + Sync + Debug + 'static {
    /// Owned device memory. No public method writes it; it returns to its pool on drop.
    type Buffer: Send + Sync + 'static;
    /// The type of a point in a queue, returned by `record`.
    type Event: Send + Sync + 'static;

    /// The device of this queue.
    fn device(&self) -> DeviceId;
    /// The capabilities of the device.
    fn capabilities(&self) -> &Capabilities;
    /// The clock for recordings during use of this runtime: the system's, unless the runtime can read a faster counter.
    fn clock(&self) -> ClockSource {
        ClockSource::default()
    }
    /// Another queue on the same device, with its own memory account.
    fn fork(&self) -> Result<Self>;
    /// A [`fork`](Runtime::fork) for exchanges with other ranks. A device that prioritizes queues runs its work first.
    fn fork_for_communication(&self) -> Result<Self> {
        self.fork()
    }
    /// A handle on this queue that books memory under category `use_`.
    fn with_category(&self, use_: MemoryCategory) -> Self;
    /// Marks the point in the queue after all work queued so far.
    fn record(&self) -> Result<Self::Event>;
    /// Orders later work of this queue after `event`.
    fn wait(&self, event: &Self::Event) -> Result<()>;
    /// Blocks until all queued work is finished; reports its failures.
    fn synchronize(&self) -> Result<()>;
    /// The memory account of this handle.
    fn memory(&self) -> MemoryStats;
    /// Resets peaks to the bytes that are live now.
    fn reset_peak(&self);

    /// Returns memory that is kept for reuse to the system. Call it after building a model, if a step will need blocks
    /// of other sizes.
    fn trim(&self) {}

    /// Allocates at least `bytes` bytes of memory with arbitrary contents, aligned to 256 bytes.
    fn alloc(&self, bytes: usize) -> Result<Self::Buffer>;
    /// Fills a contiguous output from host memory of exactly its size. The output starts at a multiple of 256 bytes,
    /// and no other tensor uses the rest of its last 4 bytes.
    fn upload(&self, from: &[u8], out: ViewMut<'_, Self>) -> Result<()>;
    /// Copies a contiguous view to host memory of exactly its size; blocks.
    fn download(&self, x: View<'_, Self>, to: &mut [u8]) -> Result<()>;

    /// The bytes of a contiguous view. `None` unless memory is the host's and calls are complete when they return.
    fn host_bytes<'a>(&self, x: View<'a, Self>) -> Option<&'a [u8]> {
        let _ = x;
        None
    }
    /// The bytes of a contiguous output; `None` in the same cases as [`host_bytes`](Runtime::host_bytes).
    fn host_bytes_mut<'a>(&self, out: ViewMut<'a, Self>) -> Option<&'a mut [u8]> {
        let _ = out;
        None
    }

    /// Tells whether work is being captured for repeated launches. Values that the host computes per step would be
    /// frozen in the capture.
    fn is_capturing(&self) -> bool {
        false
    }

    /// Tells whether backward recomputes values that are cheap to compute, rather than keeping them, unless the caller
    /// decides. It pays where memory is scarce or slow. Results have the same bits either way.
    fn recomputes_in_backward(&self) -> bool {
        true
    }

    /// This queue, for work that a library of the device's vendor queues on it; `None` if there is no such library.
    fn device_queue(&self) -> Option<Arc<dyn DeviceQueue>> {
        None
    }
    /// The device address of a contiguous view, for imminent work on this queue's
    /// [`device_queue`](Runtime::device_queue). The memory is not reused before that work is done. `None` if there is
    /// no such queue.
    fn device_address(&self, x: View<'_, Self>) -> Option<u64> {
        let _ = x;
        None
    }
    /// The device address of a contiguous output; otherwise as [`device_address`](Runtime::device_address).
    fn device_address_mut(&self, out: ViewMut<'_, Self>) -> Option<u64> {
        let _ = out;
        None
    }

    /// Runs `program` at every position of the outputs' common shape.
    fn pointwise(
        &self,
        program: &Program,
        ins: &[ProgramOperand<'_, Self>],
        scalars: &[Scalar],
        outs: &mut [Out<'_, Self>],
    ) -> Result<()>;
    /// Combines `map(ins)`, a program with one output, over the axes where `out` has size 1 and `full` has not. The
    /// result does not depend on the thread count.
    fn reduce(
        &self,
        map: &Program,
        ins: &[View<'_, Self>],
        scalars: &[Scalar],
        full: &Shape,
        op: ReduceKind,
        out: Out<'_, Self>,
    ) -> Result<()>;
    /// Finds the position (`i64`) of an extreme along `axis`; `out` has size 1 there.
    fn arg_reduce(&self, op: ArgOp, x: View<'_, Self>, axis: usize, out: ViewMut<'_, Self>) -> Result<()>;
    /// The matrix product of `a: [B.., M, K]` and `b: [B.., K, N]` into `out: [B.., M, N]`, with any strides, of one
    /// dtype. Half-precision `a` and `b` may also have an `out` of `f32`, which is not rounded to half precision.
    fn matmul(&self, a: View<'_, Self>, b: View<'_, Self>, out: Out<'_, Self>) -> Result<()>;
    /// Computes `out[.., i, ..] = x[.., index[.., i, ..], ..]` along `axis`. `index` (`i64`) has `out`'s shape, with
    /// which `x` agrees on the other axes. An index out of range is an error.
    fn gather(&self, x: View<'_, Self>, axis: usize, index: View<'_, Self>, out: Out<'_, Self>) -> Result<()>;
    /// Computes `out[.., index[.., i, ..], ..] += src[.., i, ..]` along `axis`, in ascending order of `i`; shapes as in
    /// `gather`.
    fn scatter_add(
        &self,
        src: View<'_, Self>,
        axis: usize,
        index: View<'_, Self>,
        out: ViewMut<'_, Self>,
    ) -> Result<()>;
    /// Computes the recurrence `op` along `axis`, from the end if `reverse`. `a` is given for [`ScanOp::Linear`] only.
    fn scan(
        &self,
        op: ScanOp,
        x: View<'_, Self>,
        a: Option<View<'_, Self>>,
        axis: usize,
        reverse: bool,
        out: ViewMut<'_, Self>,
    ) -> Result<()>;
    /// Sorts stably along `axis` into `values` and positions `index` (`i64`). NaN sorts as largest.
    fn sort(
        &self,
        x: View<'_, Self>,
        axis: usize,
        descending: bool,
        values: ViewMut<'_, Self>,
        index: ViewMut<'_, Self>,
    ) -> Result<()>;
    /// Tells whether kernels of `op` can write outputs whose axes have another order in memory. The last axis is
    /// innermost, and other outputs may lie between rows. Other kernels get row-major outputs.
    fn supports_strided_outputs(&self, op: &FusedOp) -> bool {
        let _ = op;
        false
    }
    /// Tells whether kernels of `op` can add to row-major outputs ([`Accumulate::Add`]); other kernels get outputs to
    /// overwrite.
    fn supports_accumulate(&self, op: &FusedOp) -> bool {
        let _ = op;
        false
    }
    /// Runs a fused operation, if there is a kernel for the call.
    fn fused(&self, op: &FusedOp, ins: &[View<'_, Self>], outs: &mut [Out<'_, Self>]) -> Result<Support> {
        let _ = (op, ins, outs);
        Ok(Support::Decompose)
    }
}

/// A read-only view of a buffer's elements.
pub struct View<'a, R: Runtime> {
    pub(crate) buffer: &'a R::Buffer,
    pub(crate) layout: &'a Layout,
    pub(crate) dtype: DType,
}

impl<R: Runtime> Clone for View<'_, R> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<R: Runtime> Copy for View<'_, R> {}

impl<'a, R: Runtime> View<'a, R> {
    /// The buffer that holds the elements of this view.
    pub fn buffer(&self) -> &'a R::Buffer {
        self.buffer
    }

    /// The layout of the view's elements in the buffer, in units of `dtype`.
    pub fn layout(&self) -> &'a Layout {
        self.layout
    }

    /// The element type of the view.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// This view broadcast to `shape`; `room` stores its layout.
    pub(crate) fn at_shape(self, shape: &Shape, room: &'a mut Option<Layout>) -> Result<Self> {
        if self.layout.shape() == shape {
            return Ok(self);
        }
        Ok(View { layout: room.insert(self.layout.broadcast_to(*shape)?), ..self })
    }
}

/// A writable view of a buffer's elements: no other view overlaps it while it exists.
pub struct ViewMut<'a, R: Runtime> {
    pub(crate) buffer: &'a R::Buffer,
    pub(crate) layout: &'a Layout,
    pub(crate) dtype: DType,
}

impl<'a, R: Runtime> ViewMut<'a, R> {
    /// The buffer that holds the elements of this view.
    pub fn buffer(&self) -> &'a R::Buffer {
        self.buffer
    }

    /// The layout of the view's elements in the buffer, in units of `dtype`.
    pub fn layout(&self) -> &'a Layout {
        self.layout
    }

    /// The element type of the view.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// A reborrow of this view for a shorter lifetime.
    pub(crate) fn reborrow(&mut self) -> ViewMut<'_, R> {
        ViewMut { buffer: self.buffer, layout: self.layout, dtype: self.dtype }
    }
}

/// An input of a pointwise program.
pub enum ProgramOperand<'a, R: Runtime> {
    /// A read-only view of an operand.
    View(View<'a, R>),
    /// The old value of output `k`, for work in place. There is never a second view of it, which the borrow checker and
    /// WGSL both refuse.
    Own(usize),
}

/// An output, to be overwritten or accumulated into.
pub struct Out<'a, R: Runtime> {
    /// The memory to fill.
    pub view: ViewMut<'a, R>,
    /// The mode of writing: overwrite, or accumulate.
    pub how: Accumulate,
}

impl<R: Runtime> Out<'_, R> {
    /// A reborrow of this output for a shorter lifetime.
    pub(crate) fn reborrow(&mut self) -> Out<'_, R> {
        Out { view: self.view.reborrow(), how: self.how }
    }
}
