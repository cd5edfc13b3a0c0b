//! [`Tensor`]: an immutable value on a device. [`TensorMut`]: memory with one owner, which may be written.

mod create;
mod display;
mod host;
mod mutable;
mod pieces;

use std::sync::Arc;

pub(crate) use mutable::Lent;
pub use mutable::TensorMut;

use crate::{
    DType, DeviceId, Error, ErrorKind, Layout, Result, Runtime, Shape, Support, Use, View,
    ops::{Apply, Op, Outs, Rule, Spec, ViewOp},
};

/// An immutable array on a device: a runtime handle, shared memory and a layout. Cloning shares the memory;
/// views (transpose, slice, broadcast …) share it too.
pub struct Tensor<R: Runtime> {
    rt: R,
    buffer: Arc<R::Buffer>,
    layout: Layout,
    dtype: DType,
}

impl<R: Runtime> Clone for Tensor<R> {
    fn clone(&self) -> Self {
        Tensor { rt: self.rt.clone(), buffer: self.buffer.clone(), layout: self.layout, dtype: self.dtype }
    }
}

impl<R: Runtime> Tensor<R> {
    /// The sizes of its dimensions.
    pub fn shape(&self) -> &Shape {
        self.layout.shape()
    }

    /// The sizes of its dimensions, as a slice.
    pub fn dims(&self) -> &[usize] {
        self.layout.dims()
    }

    /// Its element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The device it lies on.
    pub fn device(&self) -> DeviceId {
        self.rt.device()
    }

    /// The runtime it was made with.
    pub fn runtime(&self) -> &R {
        &self.rt
    }

    /// Where its elements lie in its memory.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Whether two tensors share memory (they may still name different elements).
    pub fn shares_memory_with(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.buffer, &other.buffer)
    }

    /// A row-major tensor of the same values: itself when it already is one, a copy otherwise.
    pub fn contiguous(&self) -> Result<Self> {
        if self.layout.is_contiguous() {
            return Ok(self.clone());
        }
        self.copy()
    }

    /// The same values in memory of their own.
    pub fn copy(&self) -> Result<Self> {
        self.copy_on(&self.rt)
    }

    /// The same values in memory of their own, booked under `use_`; so is what is made of it alone.
    pub fn copy_for(&self, use_: Use) -> Result<Self> {
        self.copy_on(&self.rt.tagged(use_))
    }

    fn copy_on(&self, rt: &R) -> Result<Self> {
        let mut out = TensorMut::alloc(rt, *self.shape(), self.dtype)?;
        crate::ops::copy_into(self, out.out())?;
        out.freeze()
    }

    /// Takes the memory back for writing, if this is its only holder and it is one row-major piece; otherwise the tensor is returned.
    #[expect(clippy::result_large_err, reason = "the error is the tensor itself, handed back")]
    pub fn try_mut(mut self) -> std::result::Result<TensorMut<R>, Self> {
        let sole = self.layout.is_contiguous() && Arc::get_mut(&mut self.buffer).is_some();
        if sole { Ok(TensorMut::written(self.rt, self.buffer, self.layout, self.dtype)) } else { Err(self) }
    }

    pub(crate) fn from_parts(rt: R, buffer: Arc<R::Buffer>, layout: Layout, dtype: DType) -> Self {
        Tensor { rt, buffer, layout, dtype }
    }

    pub(crate) fn into_buffer(self) -> Arc<R::Buffer> {
        self.buffer
    }

    pub(crate) fn view(&self) -> View<'_, R> {
        View { buffer: &self.buffer, layout: self.layout, dtype: self.dtype }
    }

    /// A window on its elements at `shape`, for kernels that take operands already broadcast.
    pub(crate) fn view_at(&self, shape: Shape) -> Result<View<'_, R>> {
        if shape == *self.shape() {
            return Ok(self.view());
        }
        Ok(View { layout: self.layout.broadcast_to(shape)?, ..self.view() })
    }

    pub(crate) fn with_layout(&self, layout: Layout) -> Self {
        Tensor { layout, ..self.clone() }
    }

    fn reindexed(&self, op: &ViewOp) -> Result<Self> {
        match op.layout(&self.layout)? {
            Some(layout) => Ok(self.with_layout(layout)),
            None => self.copy()?.reindexed(op),
        }
    }
}

impl<R: Runtime> Apply for Tensor<R> {
    type Runtime = R;

    fn runtime(&self) -> &R {
        &self.rt
    }

    fn spec(&self) -> Spec {
        Spec { shape: *self.shape(), dtype: self.dtype }
    }

    fn constant(value: Tensor<R>) -> Self {
        value
    }

    fn detach(&self) -> Self {
        self.clone()
    }

    fn apply(op: Op, ins: &[&Self]) -> Result<Outs<Self>> {
        same_device(op.name(), ins)?;
        if let Op::View(view) = &op {
            return Ok(smallvec::smallvec![ins[0].reindexed(view)?]);
        }
        let specs: smallvec::SmallVec<[Spec; 4]> = ins.iter().map(|t| t.spec()).collect();
        let rt = &ins[0].rt.tagged(Use::Activations);
        let mut outs: smallvec::SmallVec<[TensorMut<R>; 2]> =
            op.infer(&specs)?.iter().map(|s| TensorMut::alloc(rt, s.shape, s.dtype)).collect::<Result<_>>()?;
        let mut to: smallvec::SmallVec<[_; 2]> = outs.iter_mut().map(TensorMut::out).collect();
        if let Op::Fused(fused) = &op {
            if fused.try_kernel(ins, &mut to)? == Support::Decompose {
                return fused.decompose(ins);
            }
        } else {
            op.run(ins, &mut to)?;
        }
        drop(to);
        outs.into_iter().map(TensorMut::freeze).collect()
    }
}

fn same_device<R: Runtime>(op: &'static str, ins: &[&Tensor<R>]) -> Result<()> {
    let first = ins[0].device();
    if ins.iter().all(|t| t.device() == first) {
        return Ok(());
    }
    Err(ErrorKind::Device { op, devices: ins.iter().map(|t| t.device()).collect() }.into())
}

/// The error of an operand whose type is not the one a host slice has.
pub(crate) fn wrong_element(op: &'static str, is: DType, asked: DType) -> Error {
    Error::dtype(op, &[is], format!("the tensor is {is}, {asked} was asked for; cast it first with `to_dtype`"))
}
