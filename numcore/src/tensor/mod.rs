//! [`Tensor`]: an immutable value on a device. [`TensorMut`]: writable memory with a single owner.

mod bits;
mod create;
mod device_address;
mod display;
mod host;
mod mutable;
mod pieces;

pub(crate) use create::room;

use std::{panic::Location, sync::Arc};

pub(crate) use host::{resize, zeros};
pub(crate) use mutable::Lent;
pub use mutable::TensorMut;

use crate::{
    DType, DeviceId, Error, ErrorKind, Layout, MemoryCategory, Result, Runtime, Shape, Support, View,
    ops::{Apply, Op, Outs, Rule, Spec, ViewOp, one_device},
    pointwise::stored_only,
    trace::{self, SpanKind},
};

/// An immutable array on a device: a runtime handle, shared memory and a layout. Cloning shares the memory; views
/// (transpose, slice, broadcast …) share it too.
///
/// One pointer wide, with the memory's handle in the same allocation, because the tape copies tensors more often than
/// anything else. Copying 176 bytes instead took half the time of a small op.
pub struct Tensor<R: Runtime>(Arc<TensorData<R>>);

struct TensorData<R: Runtime> {
    rt: R,
    memory: TensorMemory<R>,
    layout: Layout,
    dtype: DType,
}

/// The owner of a tensor's memory.
enum TensorMemory<R: Runtime> {
    Own(R::Buffer),
    /// A part of the memory that another tensor owns.
    Of(Tensor<R>),
}

impl<R: Runtime> Clone for Tensor<R> {
    fn clone(&self) -> Self {
        Tensor(self.0.clone())
    }
}

impl<R: Runtime> Tensor<R> {
    /// The sizes of the tensor's dimensions.
    pub fn shape(&self) -> &Shape {
        self.0.layout.shape()
    }

    /// The sizes of the tensor's dimensions, as a slice.
    pub fn dims(&self) -> &[usize] {
        self.0.layout.dims()
    }

    /// The element type of this tensor.
    pub fn dtype(&self) -> DType {
        self.0.dtype
    }

    /// The device that holds this tensor's memory.
    pub fn device(&self) -> DeviceId {
        self.0.rt.device()
    }

    /// The runtime that the tensor was created with.
    pub fn runtime(&self) -> &R {
        &self.0.rt
    }

    /// The layout of this tensor's elements in its memory.
    pub fn layout(&self) -> &Layout {
        &self.0.layout
    }

    /// Tells whether two tensors share memory; they may still cover different elements of it.
    pub fn shares_memory_with(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.owner().0, &other.owner().0)
    }

    /// An identifier of the memory, equal for tensors that [share](Tensor::shares_memory_with) it. For look-up only,
    /// and valid only while the memory is alive.
    pub fn memory_id(&self) -> usize {
        Arc::as_ptr(&self.owner().0) as usize
    }

    /// The size in bytes of the whole memory, of which this tensor may be a part.
    pub fn memory_bytes(&self) -> usize {
        let owner = self.owner();
        owner.shape().numel() * owner.dtype().size()
    }

    /// A row-major tensor of the same values: the tensor itself when it already is row-major, a copy otherwise.
    #[track_caller]
    pub fn contiguous(&self) -> Result<Self> {
        if self.0.layout.is_contiguous() {
            return Ok(self.clone());
        }
        self.copy()
    }

    /// A copy of the values in fresh memory.
    #[track_caller]
    pub fn copy(&self) -> Result<Self> {
        self.copy_on(&self.0.rt)
    }

    /// A copy of the values in fresh memory booked under `use_`. Copies of that copy are booked there, too; results of
    /// ops are booked as activations.
    #[track_caller]
    pub fn copy_for(&self, use_: MemoryCategory) -> Result<Self> {
        self.copy_on(&self.0.rt.with_category(use_))
    }

    fn copy_on(&self, rt: &R) -> Result<Self> {
        let mut out = TensorMut::alloc(rt, *self.shape(), self.dtype())?;
        crate::ops::copy_into(self, out.out())?;
        out.freeze()
    }

    /// Converts the tensor to writable memory, if it is contiguous and the only holder of that memory; returns the
    /// tensor otherwise.
    pub fn try_mut(mut self) -> std::result::Result<TensorMut<R>, Self> {
        let sole = self.0.layout.is_contiguous() && self.is_sole();
        if sole { Ok(TensorMut::written(self)) } else { Err(self) }
    }

    /// A tensor that owns its memory.
    fn own(rt: R, buffer: R::Buffer, layout: Layout, dtype: DType) -> Self {
        Tensor(Arc::new(TensorData { rt, memory: TensorMemory::Own(buffer), layout, dtype }))
    }

    /// Another range of elements of the same memory, for `rt`.
    pub(crate) fn part(&self, rt: R, layout: Layout) -> Self {
        Tensor(Arc::new(TensorData { rt, memory: TensorMemory::Of(self.owner().clone()), layout, dtype: self.dtype() }))
    }

    /// Tells whether the memory has no other holder.
    pub(crate) fn is_sole(&mut self) -> bool {
        Arc::get_mut(&mut self.0).is_some_and(|inner| match &mut inner.memory {
            TensorMemory::Own(_) => true,
            TensorMemory::Of(owner) => Arc::get_mut(&mut owner.0).is_some(),
        })
    }

    fn owner(&self) -> &Self {
        match &self.0.memory {
            TensorMemory::Own(_) => self,
            TensorMemory::Of(owner) => owner,
        }
    }

    fn buffer(&self) -> &R::Buffer {
        match &self.0.memory {
            TensorMemory::Own(buffer) => buffer,
            TensorMemory::Of(owner) => owner.buffer(),
        }
    }

    pub(crate) fn view(&self) -> View<'_, R> {
        View { buffer: self.buffer(), layout: &self.0.layout, dtype: self.0.dtype }
    }

    /// A view of the elements broadcast to `shape`, for kernels whose operands are already broadcast; `room` stores its
    /// layout.
    pub(crate) fn view_at<'a>(&'a self, shape: &Shape, room: &'a mut Option<Layout>) -> Result<View<'a, R>> {
        self.view().at_shape(shape, room)
    }

    fn reindexed(&self, op: &ViewOp) -> Result<Self> {
        match op.layout(&self.0.layout)? {
            Some(layout) => Ok(self.part(self.0.rt.clone(), layout)),
            None => self.copy()?.reindexed(op),
        }
    }
}

impl<R: Runtime> Apply for Tensor<R> {
    type Runtime = R;

    fn runtime(&self) -> &R {
        &self.0.rt
    }

    fn spec(&self) -> Spec {
        Spec { shape: *self.shape(), dtype: self.0.dtype }
    }

    fn constant(value: Tensor<R>) -> Self {
        value
    }

    fn detach(&self) -> Self {
        self.clone()
    }

    fn apply(op: Op, ins: &[&Self]) -> Result<Outs<Self>> {
        let caller = Location::caller();
        Self::compute(&op, ins).map_err(|error| error.at(caller))
    }
}

impl<R: Runtime> Tensor<R> {
    /// Applies `op` as [`apply`](Apply::apply) does, but borrows the op.
    pub fn compute(op: &Op, ins: &[&Self]) -> Result<Outs<Self>> {
        check_operands(op, ins)?;
        if let Op::View(view) = op {
            return Ok(smallvec::smallvec![ins[0].reindexed(view)?]);
        }
        if let Op::Split(split) = op {
            return split.views().map(|view| ins[0].reindexed(&view)).collect();
        }
        if let Op::Cat(cat) = op
            && let Some(whole) = cat.view(ins)
        {
            return Ok(smallvec::smallvec![whole]);
        }
        let _span = trace::span(SpanKind::Op, op.name());
        if let Op::Pointwise(op) = op
            && let Some(outs) = op.compute_alike(ins)?
        {
            return Ok(outs);
        }
        let mut outs = Self::make(op, ins, |_| None)?;
        let mut to: smallvec::SmallVec<[_; 2]> = outs.iter_mut().map(TensorMut::out).collect();
        if let Op::Fused(fused) = op {
            if fused.try_kernel(ins, &mut to)? == Support::Decompose {
                drop(to);
                drop(outs);
                return fused.decompose(ins);
            }
        } else {
            op.run(ins, &mut to)?;
        }
        drop(to);
        outs.into_iter().map(TensorMut::freeze).collect()
    }

    /// Computes `op` into the memory that `slot` returns for the index of each output. Memory that was written is
    /// accumulated into, other memory is overwritten. Outputs for which `slot` returns `None` are allocated. Memory of
    /// another shape, dtype or device than its output's, or shared with an input, is an error.
    pub fn compute_into(
        op: &Op,
        ins: &[&Self],
        mut slot: impl FnMut(usize) -> Option<TensorMut<R>>,
    ) -> Result<smallvec::SmallVec<[TensorMut<R>; 2]>> {
        Self::compute_through(op, ins, |k| Some((slot(k)?, &[])))
    }

    /// Computes `op` as [`compute_into`](Tensor::compute_into) does, into views of the memory that `slot` returns, as
    /// in [`accumulate_view`](TensorMut::accumulate_view).
    pub fn compute_through<'v>(
        op: &Op,
        ins: &[&Self],
        mut slot: impl FnMut(usize) -> Option<(TensorMut<R>, &'v [ViewOp])>,
    ) -> Result<smallvec::SmallVec<[TensorMut<R>; 2]>> {
        check_operands(op, ins)?;
        let _span = trace::span(SpanKind::Op, op.name());
        let mut through: smallvec::SmallVec<[&[ViewOp]; 4]> = smallvec::SmallVec::new();
        let given = |k| {
            let given = slot(k);
            through.push(given.as_ref().map_or(&[], |(_, views)| *views));
            given
        };
        let mut outs = Self::make(op, ins, given)?;
        let layouts = outs.iter().zip(through).map(|(memory, views)| memory.layout_through(views));
        let layouts = layouts.collect::<Result<smallvec::SmallVec<[Layout; 4]>>>()?;
        let to = outs.iter_mut().zip(&layouts).map(|(memory, layout)| memory.out_at(layout));
        let mut to = to.collect::<Result<smallvec::SmallVec<[_; 2]>>>()?;
        op.run(ins, &mut to)?;
        drop(to);
        Ok(outs)
    }

    /// The memory for the outputs of `op`: given, with the views to write, or freshly allocated.
    fn make<'v>(
        op: &Op,
        ins: &[&Self],
        mut given: impl FnMut(usize) -> Option<(TensorMut<R>, &'v [ViewOp])>,
    ) -> Result<smallvec::SmallVec<[TensorMut<R>; 2]>> {
        let specs: smallvec::SmallVec<[Spec; 4]> = ins.iter().map(|t| t.spec()).collect();
        let rt = &ins[0].0.rt.with_category(MemoryCategory::Activations);
        let layout = |k: usize, shape| match op {
            Op::Fused(op) => op.layout(rt, k, shape, ins),
            _ => Layout::contiguous(shape),
        };
        let specs = op.infer(&specs)?;
        let given = (0..specs.len()).map(&mut given).collect::<smallvec::SmallVec<[Option<_>; 2]>>();
        for (spec, (memory, views)) in
            specs.iter().zip(&given).filter_map(|(spec, given)| Some((spec, given.as_ref()?)))
        {
            let shape = if views.is_empty() { *memory.shape() } else { *memory.layout_through(views)?.shape() };
            check_memory(op, *spec, Spec { shape, dtype: memory.dtype() }, memory, ins)?;
        }
        if let Op::Fused(op) = op
            && given.iter().all(Option::is_none)
            && let Some(layouts) = op.adjacent_layouts(rt, &specs, ins)
        {
            return TensorMut::alloc_beside(rt.clone(), &layouts, specs[0].dtype);
        }
        let fresh = |k, s: &Spec| TensorMut::alloc_at(rt.clone(), layout(k, s.shape), s.dtype);
        let each = specs.iter().zip(given).enumerate();
        each.map(|(k, (s, given))| given.map_or_else(|| fresh(k, s), |(memory, _)| Ok(memory))).collect()
    }
}

/// Checks that the number of operands fits `op` and is at least one, and that all are on one device.
fn check_operands<R: Runtime>(op: &Op, ins: &[&Tensor<R>]) -> Result<()> {
    op.check_count(ins.len())?;
    if ins.is_empty() {
        let allowed = "at least 1, whose device it runs on; or use `Tensor::generate`";
        return Err(Error::range(op.name(), "number of operands", 0usize, allowed));
    }
    one_device(op.name(), ins.iter().map(|t| t.device()))
}

/// Checks properties of given output memory that kernels rely on and cannot check. The part of `memory` to write has
/// spec `seen`, which must be the output's spec `due`. `memory` must be on the operands' device, and no operand in
/// `ins` may share it.
fn check_memory<R: Runtime>(op: &Op, due: Spec, seen: Spec, memory: &TensorMut<R>, ins: &[&Tensor<R>]) -> Result<()> {
    let name = op.name();
    if seen.dtype != due.dtype {
        return Err(Error::dtype(name, &[due.dtype, seen.dtype], "the result is the first, its memory the second"));
    }
    if due.dtype.is_storage() && memory.is_written() {
        return Err(stored_only(name, due.dtype));
    }
    if seen.shape != due.shape {
        return Err(Error::shape(name, &[due.shape, seen.shape], "the result is the first, its memory the second"));
    }
    one_device(name, ins.iter().map(|t| t.device()).chain([memory.runtime().device()]))?;
    if ins.iter().any(|x| memory.is_of(x)) {
        return Err(
            ErrorKind::Shared { op: name, what: "an operand and the memory to write are parts of one".into() }.into()
        );
    }
    Ok(())
}

/// The error for an operand whose dtype differs from that of a host slice.
pub(crate) fn wrong_element(op: &'static str, is: DType, asked: DType) -> Error {
    Error::dtype(op, &[is], format!("the tensor is {is}, {asked} was asked for; cast it first with `to_dtype`"))
}
