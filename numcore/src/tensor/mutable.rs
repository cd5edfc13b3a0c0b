//! Memory with a single owner, to which kernels write.

use std::sync::Arc;

use smallvec::SmallVec;

use super::{Tensor, check_memory, check_operands, pieces::SplitMemory};
use crate::{
    Accumulate, DType, Error, ErrorKind, Layout, MemoryCategory, Out, Result, Runtime, Shape, View, ViewMut,
    ops::{self, Apply, Rule, Spec},
};

/// Owned memory, without a lifetime and not `Clone`: fresh, or a range that a [`Flat`](crate::Flat) lent.
///
/// It tracks whether it has been written: the first [`accumulate`](TensorMut::accumulate) overwrites, later ones add,
/// so that callers need no code for accumulation.
pub struct TensorMut<R: Runtime> {
    /// The memory, which is not read as a value meanwhile.
    pub(super) memory: Tensor<R>,
    pub(super) written: bool,
    pub(super) lent: Option<Lent>,
}

/// The memory that a [`TensorMut`] is a part of, and returns to.
#[derive(Clone, Debug)]
pub(crate) enum Lent {
    /// A range of a flat buffer.
    Range(usize),
    /// Several ranges of a flat buffer, with the gaps between them.
    Span { from: usize, to: usize },
    /// Part `at` of memory that was [`split`](TensorMut::split).
    Piece { cut: Arc<SplitMemory>, at: usize },
}

impl<R: Runtime> TensorMut<R> {
    /// Fresh row-major memory with arbitrary contents.
    pub fn alloc(rt: &R, shape: Shape, dtype: DType) -> Result<Self> {
        Self::alloc_at(rt.clone(), Layout::contiguous(shape), dtype)
    }

    /// Fresh memory booked under `use_`, whose value carries `rt` itself, so what is computed from it is booked as `rt`
    /// says.
    pub fn alloc_for(rt: &R, use_: MemoryCategory, shape: Shape, dtype: DType) -> Result<Self> {
        let buffer = rt.with_category(use_).alloc(shape.checked("alloc")?.numel() * dtype.size())?;
        Ok(Self::of(Tensor::own(rt.clone(), buffer, Layout::contiguous(shape), dtype)))
    }

    pub(crate) fn alloc_on(rt: R, shape: Shape, dtype: DType) -> Result<Self> {
        Self::alloc_at(rt, Layout::contiguous(shape), dtype)
    }

    /// Fresh memory for a dense layout with offset 0.
    pub(crate) fn alloc_at(rt: R, layout: Layout, dtype: DType) -> Result<Self> {
        layout.shape().checked("alloc")?;
        let buffer = rt.alloc(layout.numel() * dtype.size())?;
        Ok(Self::of(Tensor::own(rt, buffer, layout, dtype)))
    }

    /// Fresh memory for several layouts that cover it together without overlap.
    pub(super) fn alloc_beside<C: FromIterator<Self>>(rt: R, layouts: &[Layout], dtype: DType) -> Result<C> {
        let numel = layouts.iter().map(Layout::numel).sum();
        let whole = Self::alloc_on(rt, Shape::new(&[numel])?, dtype)?;
        Ok(layouts.iter().map(|&layout| whole.part(layout, None)).collect())
    }

    fn of(memory: Tensor<R>) -> Self {
        TensorMut { memory, written: false, lent: None }
    }

    /// Fresh memory filled with zeros.
    pub fn zeros(rt: &R, shape: Shape, dtype: DType) -> Result<Self> {
        let mut t = Self::alloc(rt, shape, dtype)?;
        t.zero()?;
        Ok(t)
    }

    /// The sizes of this memory.
    pub fn shape(&self) -> &Shape {
        self.memory.shape()
    }

    /// The element type of this memory.
    pub fn dtype(&self) -> DType {
        self.memory.dtype()
    }

    /// The runtime that owns this memory.
    pub fn runtime(&self) -> &R {
        self.memory.runtime()
    }

    /// Whether anything was written since the memory was allocated, lent or [`reset`](TensorMut::reset).
    pub fn is_written(&self) -> bool {
        self.written
    }

    /// Forgets what was written, so that the next writer overwrites.
    pub fn reset(&mut self) {
        self.written = false;
    }

    /// Fills the memory with zeros.
    pub fn zero(&mut self) -> Result<()> {
        self.written = true;
        ops::fill_zero(self.runtime(), Out { view: self.window(), how: Accumulate::Overwrite })
    }

    /// Writes the output of `op`, which must have one: the first writer overwrites, later ones add. A result of another
    /// shape, dtype or device than this memory, and operands that share it, are errors.
    pub fn accumulate(&mut self, op: &ops::Op, ins: &[&Tensor<R>]) -> Result<()> {
        self.check_result(op, ins, self.spec())?;
        op.run(ins, &mut [self.out()])
    }

    /// The shape and the element type of this memory.
    pub fn spec(&self) -> Spec {
        Spec { shape: *self.shape(), dtype: self.dtype() }
    }

    /// An error unless `op` has one output, which fits the part `seen` of this memory.
    fn check_result(&self, op: &ops::Op, ins: &[&Tensor<R>], seen: Spec) -> Result<()> {
        check_operands(op, ins)?;
        let specs: SmallVec<[Spec; 4]> = ins.iter().map(|t| t.spec()).collect();
        match op.infer(&specs)?[..] {
            [due] => check_memory(op, due, seen, self, ins),
            ref outs => {
                let why = format!("has {} outputs, and is given memory for one; use `compute_into`", outs.len());
                Err(Error::argument(op.name(), why))
            }
        }
    }

    /// Writes the output of `op` through a view of this memory (`views` as applied to the memory's shape); the first
    /// writer overwrites, later ones add, as in [`accumulate`](TensorMut::accumulate).
    ///
    /// When the view covers only a part and nothing was written yet, the rest is zeroed first. A view that strides
    /// cannot express is an error.
    pub fn accumulate_view(&mut self, views: &[ops::ViewOp], op: &ops::Op, ins: &[&Tensor<R>]) -> Result<()> {
        let mut layout = *self.memory.layout();
        for v in views {
            layout = v.layout(&layout)?.filter(|l| !l.overlaps_itself()).ok_or_else(|| {
                Error::shape(
                    "accumulate_view",
                    &[*self.shape()],
                    "this view of a gradient slot cannot be written through",
                )
            })?;
        }
        self.check_result(op, ins, Spec { shape: *layout.shape(), dtype: self.dtype() })?;
        if layout.numel() != self.shape().numel() && !self.written {
            self.zero()?;
        }
        let mut out = self.out();
        out.view.layout = &layout;
        op.run(ins, &mut [out])
    }

    /// Converts the memory to an immutable tensor. Memory that a flat buffer lent must go back to the buffer instead.
    pub fn freeze(self) -> Result<Tensor<R>> {
        if let Some(lent) = self.lent {
            let what = match lent {
                Lent::Piece { at, .. } => format!("it is piece {at} of split memory; `join` the pieces first"),
                part => format!("{part:?} is lent by a flat buffer; give it back with `restore`"),
            };
            return Err(ErrorKind::Lent { op: "freeze", what }.into());
        }
        Ok(self.memory)
    }

    pub(crate) fn written(memory: Tensor<R>) -> Self {
        TensorMut { memory, written: true, lent: None }
    }

    pub(crate) fn lend(memory: Tensor<R>, written: bool, lent: Lent) -> Self {
        TensorMut { memory, written, lent: Some(lent) }
    }

    /// Another range of the same memory.
    pub(crate) fn part(&self, layout: Layout, lent: Option<Lent>) -> Self {
        TensorMut { memory: self.memory.part(self.runtime().clone(), layout), written: self.written, lent }
    }

    pub(crate) fn lent(&self) -> Option<&Lent> {
        self.lent.as_ref()
    }

    /// Whether this is a part of `memory`.
    pub(crate) fn is_of(&self, memory: &Tensor<R>) -> bool {
        self.memory.shares_memory_with(memory)
    }

    pub(crate) fn view(&self) -> View<'_, R> {
        self.memory.view()
    }

    pub(crate) fn view_mut(&mut self) -> ViewMut<'_, R> {
        self.window()
    }

    fn window(&self) -> ViewMut<'_, R> {
        let View { buffer, layout, dtype } = self.memory.view();
        ViewMut { buffer, layout, dtype }
    }

    /// A mutable window like [`view_mut`](TensorMut::view_mut), for a kernel that fills all of it.
    pub(crate) fn rewritten(&mut self) -> ViewMut<'_, R> {
        self.written = true;
        self.view_mut()
    }

    pub(crate) fn out(&mut self) -> Out<'_, R> {
        let first = !std::mem::replace(&mut self.written, true);
        Out { view: self.view_mut(), how: if first { Accumulate::Overwrite } else { Accumulate::Add } }
    }
}
