//! Writable memory with a single owner, the output of kernels.

use std::sync::Arc;

use smallvec::SmallVec;

use super::{Tensor, check_memory, check_operands, pieces::SplitMemory};
use crate::{
    Accumulate, DType, Error, ErrorKind, Layout, MemoryCategory, Out, Result, Runtime, Shape, View, ViewMut, Within,
    ops::{self, Apply, Rule, Spec},
};

/// Writable memory with a single owner, without a lifetime and not `Clone`: freshly allocated, or a range lent by a
/// [`Flat`](crate::Flat).
///
/// It tracks whether it was written: the first [`accumulate`](TensorMut::accumulate) overwrites and later ones add, so
/// callers need no code for gradient accumulation.
pub struct TensorMut<R: Runtime> {
    /// The memory; this handle is not read as a value while the `TensorMut` exists.
    pub(super) memory: Tensor<R>,
    pub(super) written: bool,
    pub(super) lent: Option<Lent>,
}

/// The origin of lent memory, to which it must be returned.
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
    #[track_caller]
    pub fn alloc(rt: &R, shape: Shape, dtype: DType) -> Result<Self> {
        Self::alloc_at(rt.clone(), Layout::contiguous(shape), dtype)
    }

    /// Fresh memory booked under `use_`. The tensor itself carries `rt`, so copies of it are booked under the category
    /// of `rt`.
    #[track_caller]
    pub fn alloc_for(rt: &R, use_: MemoryCategory, shape: Shape, dtype: DType) -> Result<Self> {
        check_stores(rt, dtype)?;
        let buffer = rt.with_category(use_).alloc(shape.checked("alloc")?.numel() * dtype.size())?;
        Ok(Self::of(Tensor::own(rt.clone(), buffer, Layout::contiguous(shape), dtype)))
    }

    #[track_caller]
    pub(crate) fn alloc_on(rt: R, shape: Shape, dtype: DType) -> Result<Self> {
        Self::alloc_at(rt, Layout::contiguous(shape), dtype)
    }

    /// Fresh memory for a dense layout with offset 0.
    #[track_caller]
    pub(crate) fn alloc_at(rt: R, layout: Layout, dtype: DType) -> Result<Self> {
        layout.shape().checked("alloc")?;
        check_stores(&rt, dtype)?;
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
    #[track_caller]
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

    /// Tells whether anything was written since the memory was allocated, lent or [`reset`](TensorMut::reset).
    pub fn is_written(&self) -> bool {
        self.written
    }

    /// Marks the memory as not written, so that the next writer overwrites it.
    pub fn reset(&mut self) {
        self.written = false;
    }

    /// Fills the memory with zeros.
    #[track_caller]
    pub fn zero(&mut self) -> Result<()> {
        self.written = true;
        ops::fill_zero(self.runtime(), Out { view: self.window(), how: Accumulate::Overwrite })
    }

    /// Writes the output of `op`, which must have one output: the first writer overwrites, later ones add.
    ///
    /// # Errors
    /// Fails if the output's shape, dtype or device differs from this memory's, or if an operand shares this memory.
    #[track_caller]
    pub fn accumulate(&mut self, op: &ops::Op, ins: &[&Tensor<R>]) -> Result<()> {
        self.check_result(op, ins, self.spec())?;
        op.run(ins, &mut [self.out()])
    }

    /// The shape and the element type of this memory.
    pub fn spec(&self) -> Spec {
        Spec { shape: *self.shape(), dtype: self.dtype() }
    }

    /// Checks that `op` has one output, and that it fits the part of this memory with spec `seen`.
    fn check_result(&self, op: &ops::Op, ins: &[&Tensor<R>], seen: Spec) -> Result<()> {
        check_operands(op, ins)?;
        let specs: SmallVec<[Spec; 4]> = ins.iter().map(|t| t.spec()).collect();
        match op.infer(&specs)?[..] {
            [due] => check_memory(op, due, seen, self, ins),
            ref outs => {
                let allowed = "1, as there is memory for one; or use `compute_into`";
                Err(Error::range(op.name(), "number of outputs", outs.len(), allowed))
            }
        }
    }

    /// Writes the output of `op` through a view of this memory; `views` are applied in order, the first to the memory's
    /// own shape. The first writer overwrites, later ones add, as in [`accumulate`](TensorMut::accumulate).
    ///
    /// A view that covers only a part of memory not yet written has the rest zeroed first. A view that strides cannot
    /// express, or whose elements overlap, is an error.
    #[track_caller]
    pub fn accumulate_view(&mut self, views: &[ops::ViewOp], op: &ops::Op, ins: &[&Tensor<R>]) -> Result<()> {
        let layout = self.layout_through(views)?;
        self.check_result(op, ins, Spec { shape: *layout.shape(), dtype: self.dtype() })?;
        op.run(ins, &mut [self.out_at(&layout)?])
    }

    /// The layout of a view of this memory.
    #[track_caller]
    pub(super) fn layout_through(&self, views: &[ops::ViewOp]) -> Result<Layout> {
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
        Ok(layout)
    }

    /// The memory as an output of this layout. The rest of memory that is not yet written is zeroed.
    pub(super) fn out_at<'a>(&'a mut self, layout: &'a Layout) -> Result<Out<'a, R>> {
        if layout.numel() != self.shape().numel() && !self.written {
            self.zero()?;
        }
        let mut out = self.out();
        out.view.layout = layout;
        Ok(out)
    }

    /// Converts the memory to an immutable tensor. Memory that a flat buffer lent, and a piece of split memory, is an
    /// error: return it to the buffer, or join the pieces first.
    #[track_caller]
    pub fn freeze(self) -> Result<Tensor<R>> {
        if let Some(lent) = self.lent {
            let what = match lent {
                Lent::Piece { at, .. } => format!("it is piece {at} of split memory; `join` the pieces first"),
                part => format!("{part:?} is lent by a flat buffer; give it back with `restore`"),
            };
            return Err(ErrorKind::Lent { op: "freeze", what }.into()).at_caller();
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

    /// Tells whether this is a part of `memory`.
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

    /// A mutable view like [`view_mut`](TensorMut::view_mut), for a kernel that fills all of it; the memory counts as
    /// written.
    pub(crate) fn rewritten(&mut self) -> ViewMut<'_, R> {
        self.written = true;
        self.view_mut()
    }

    pub(crate) fn out(&mut self) -> Out<'_, R> {
        let first = !std::mem::replace(&mut self.written, true);
        Out { view: self.view_mut(), how: if first { Accumulate::Overwrite } else { Accumulate::Add } }
    }
}
/// Checks that a device has an 8-bit float; every device stores the other dtypes.
fn check_stores<R: Runtime>(rt: &R, dtype: DType) -> Result<()> {
    if !dtype.is_storage() || rt.capabilities().storage.contains(&dtype) {
        return Ok(());
    }
    let why = format!("{} does not store {dtype}: cast it on the CPU, to bf16 or f32", rt.capabilities().name);
    Err(Error::dtype("alloc", &[dtype], why))
}
