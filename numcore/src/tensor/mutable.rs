//! Memory with one owner: where kernels write.

use std::sync::Arc;

use super::{Tensor, pieces::Cut};
use crate::{Accumulate, DType, Error, ErrorKind, Layout, Out, Result, Runtime, Shape, Use, View, ViewMut, ops};

/// Owned memory, without a lifetime and not `Clone`: fresh, or a range that a [`Flat`](crate::Flat) lent.
///
/// It knows whether it has been written: the first to [`accumulate`](TensorMut::accumulate) overwrites, later ones add, so
/// that accumulating contributions needs no code anywhere else.
pub struct TensorMut<R: Runtime> {
    rt: R,
    buffer: Arc<R::Buffer>,
    pub(super) layout: Layout,
    dtype: DType,
    pub(super) written: bool,
    pub(super) lent: Option<Lent>,
}

/// What a [`TensorMut`] is a part of, and goes back to.
#[derive(Clone, Debug)]
pub(crate) enum Lent {
    /// A range of a flat buffer.
    Range(usize),
    /// Several of its ranges, with the gaps between them.
    Span { from: usize, to: usize },
    /// Piece `at` of memory that was [`split`](TensorMut::split).
    Piece { cut: Arc<Cut>, at: usize },
}

impl<R: Runtime> TensorMut<R> {
    /// Fresh row-major memory with arbitrary contents.
    pub fn alloc(rt: &R, shape: Shape, dtype: DType) -> Result<Self> {
        let bytes = shape.numel() * dtype.size();
        Ok(TensorMut {
            rt: rt.clone(),
            buffer: Arc::new(rt.alloc(bytes)?),
            layout: Layout::contiguous(shape),
            dtype,
            written: false,
            lent: None,
        })
    }

    /// Fresh memory booked under `use_`, whose value carries `rt` itself: what is computed from it is booked as `rt` says.
    pub fn alloc_for(rt: &R, use_: Use, shape: Shape, dtype: DType) -> Result<Self> {
        Ok(TensorMut { rt: rt.clone(), ..Self::alloc(&rt.tagged(use_), shape, dtype)? })
    }

    /// Fresh memory filled with zeros.
    pub fn zeros(rt: &R, shape: Shape, dtype: DType) -> Result<Self> {
        let mut t = Self::alloc(rt, shape, dtype)?;
        t.zero()?;
        Ok(t)
    }

    /// Its sizes.
    pub fn shape(&self) -> &Shape {
        self.layout.shape()
    }

    /// Its element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Its runtime.
    pub fn runtime(&self) -> &R {
        &self.rt
    }

    /// Whether anything was written since it was made, lent or [`reset`](TensorMut::reset).
    pub fn is_written(&self) -> bool {
        self.written
    }

    /// Forgets what was written: the next writer overwrites.
    pub fn reset(&mut self) {
        self.written = false;
    }

    /// Fills it with zeros.
    pub fn zero(&mut self) -> Result<()> {
        self.written = true;
        ops::fill_zero(&self.rt.clone(), Out { view: self.view_mut(), how: Accumulate::Overwrite })
    }

    /// Writes what `op` computes: overwriting if it is the first writer, adding otherwise.
    pub fn accumulate(&mut self, op: &ops::Op, ins: &[&Tensor<R>]) -> Result<()> {
        ops::Rule::run(op, ins, &mut [self.out()])
    }

    /// As [`accumulate`](TensorMut::accumulate), through a view of this memory (`views` as applied to its own shape).
    ///
    /// When the view covers only a part and nothing was written yet, the rest is zeroed first. A view that strides cannot
    /// express is an error.
    pub fn accumulate_view(&mut self, views: &[ops::ViewOp], op: &ops::Op, ins: &[&Tensor<R>]) -> Result<()> {
        let mut layout = self.layout;
        for v in views {
            layout = v.layout(&layout)?.filter(|l| !l.overlaps_itself()).ok_or_else(|| {
                Error::shape(
                    "accumulate_view",
                    &[*self.shape()],
                    "this view of a gradient slot cannot be written through",
                )
            })?;
        }
        if layout.numel() != self.layout.numel() && !self.written {
            self.zero()?;
        }
        let mut out = self.out();
        out.view.layout = layout;
        ops::Rule::run(op, ins, &mut [out])
    }

    /// The value, which no one can write any more. Memory that a flat buffer lent goes back to it instead.
    pub fn freeze(self) -> Result<Tensor<R>> {
        if let Some(lent) = self.lent {
            let what = match lent {
                Lent::Piece { at, .. } => format!("it is piece {at} of split memory; `join` the pieces first"),
                part => format!("{part:?} is lent by a flat buffer; give it back with `restore`"),
            };
            return Err(ErrorKind::Lent { op: "freeze", what }.into());
        }
        Ok(Tensor::from_parts(self.rt, self.buffer, self.layout, self.dtype))
    }

    pub(crate) fn written(rt: R, buffer: Arc<R::Buffer>, layout: Layout, dtype: DType) -> Self {
        TensorMut { rt, buffer, layout, dtype, written: true, lent: None }
    }

    pub(crate) fn lend(rt: R, buffer: Arc<R::Buffer>, layout: Layout, dtype: DType, written: bool, lent: Lent) -> Self {
        TensorMut { rt, buffer, layout, dtype, written, lent: Some(lent) }
    }

    /// Another part of the same memory.
    pub(super) fn part(&self, layout: Layout, lent: Option<Lent>) -> Self {
        let (rt, buffer) = (self.rt.clone(), self.buffer.clone());
        TensorMut { rt, buffer, layout, dtype: self.dtype, written: self.written, lent }
    }

    pub(crate) fn lent(&self) -> Option<&Lent> {
        self.lent.as_ref()
    }

    pub(crate) fn buffer(&self) -> &Arc<R::Buffer> {
        &self.buffer
    }

    pub(crate) fn view(&self) -> View<'_, R> {
        View { buffer: &self.buffer, layout: self.layout, dtype: self.dtype }
    }

    pub(crate) fn view_mut(&mut self) -> ViewMut<'_, R> {
        ViewMut { buffer: &self.buffer, layout: self.layout, dtype: self.dtype }
    }

    /// As [`view_mut`](TensorMut::view_mut), for a kernel that fills all of it.
    pub(crate) fn rewritten(&mut self) -> ViewMut<'_, R> {
        self.written = true;
        self.view_mut()
    }

    pub(crate) fn out(&mut self) -> Out<'_, R> {
        let first = !std::mem::replace(&mut self.written, true);
        Out { view: self.view_mut(), how: if first { Accumulate::Overwrite } else { Accumulate::Add } }
    }
}
