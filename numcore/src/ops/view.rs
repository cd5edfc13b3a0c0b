//! Views: the same elements seen another way, without moving them, and the adjoints of those that pick only some.

use smallvec::{SmallVec, smallvec};

use super::{Apply, Backprop, Bits, Op, Reduce, Rule, Saves, Spec, Specs, Split, copy_into, fill_zero};
use crate::{Accumulate, AxisSet, Error, Layout, MAX_RANK, Out, Result, Runtime, Shape, Tensor};

/// A way of seeing a tensor's elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ViewOp {
    /// Axes in another order.
    Permute(SmallVec<[usize; MAX_RANK]>),
    /// Axes of size 1 repeated, new axes in front.
    Broadcast(Shape),
    /// The same elements in row-major order at another shape (copies when strides cannot say it).
    Reshape(Shape),
    /// Elements `start, start + step, …` along an axis.
    Slice {
        /// Which axis.
        axis: usize,
        /// The first element.
        start: usize,
        /// How many.
        len: usize,
        /// From one to the next.
        step: usize,
    },
    /// Axes backwards.
    Flip(AxisSet),
    /// Sliding windows along an axis, appended as a last axis.
    Unfold(Windows),
}

/// Sliding windows along an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Windows {
    /// Which axis.
    pub axis: usize,
    /// Elements of a window.
    pub size: usize,
    /// From one window to the next.
    pub step: usize,
    /// From one element of a window to the next.
    pub dilation: usize,
}

impl ViewOp {
    /// The layout it gives, or `None` when only a row-major copy has one.
    pub fn layout(&self, x: &Layout) -> Result<Option<Layout>> {
        match self {
            ViewOp::Permute(order) => x.permute(order).map(Some),
            ViewOp::Broadcast(shape) => x.broadcast_to(*shape).map(Some),
            ViewOp::Reshape(shape) if shape.numel() == x.numel() => Ok(x.reshape(*shape)),
            ViewOp::Reshape(shape) => Err(Error::shape(
                "reshape",
                &[*x.shape(), *shape],
                format!("{} elements cannot become {}", x.numel(), shape.numel()),
            )),
            ViewOp::Slice { axis, start, len, step } => x.slice(*axis, *start, *len, *step).map(Some),
            ViewOp::Flip(axes) => Ok(Some(axes.iter().fold(*x, |l, a| l.flip(a)))),
            ViewOp::Unfold(w) => x.unfold(w.axis, w.size, w.step, w.dilation).map(Some),
        }
    }

    /// The op that takes a gradient of the view back to one of the whole, of shape `from`.
    pub fn adjoint(&self, from: Shape) -> Op {
        match self {
            ViewOp::Permute(order) => ViewOp::Permute(inverse(order)).into(),
            ViewOp::Broadcast(_) => Reduce::sum_to(from).into(),
            ViewOp::Reshape(_) => ViewOp::Reshape(from).into(),
            ViewOp::Flip(_) => self.clone().into(),
            ViewOp::Slice { axis, start, step, .. } => {
                Embed { axis: *axis, start: *start, step: *step, shape: from }.into()
            }
            ViewOp::Unfold(windows) => Fold { windows: *windows, len: from[windows.axis] }.into(),
        }
    }

    /// The shape it gives.
    pub fn shape(&self, x: Shape) -> Result<Shape> {
        let dense = Layout::contiguous(x);
        Ok(match self {
            ViewOp::Reshape(shape) => self.layout(&dense).map(|_| *shape)?,
            _ => self.layout(&dense)?.map_or(x, |l| *l.shape()),
        })
    }
}

impl Rule for ViewOp {
    fn name(&self) -> &'static str {
        match self {
            ViewOp::Permute(_) => "permute",
            ViewOp::Broadcast(_) => "broadcast_to",
            ViewOp::Reshape(_) => "reshape",
            ViewOp::Slice { .. } => "slice",
            ViewOp::Flip(_) => "flip",
            ViewOp::Unfold(_) => "unfold",
        }
    }

    fn infer(&self, ins: &[Spec]) -> Result<Specs> {
        Ok(smallvec![Spec { shape: self.shape(ins[0].shape)?, dtype: ins[0].dtype }])
    }

    fn run<R: Runtime>(&self, ins: &[&Tensor<R>], outs: &mut [Out<'_, R>]) -> Result<()> {
        let seen = Tensor::apply1(self.clone(), ins)?;
        copy_into(&seen, outs[0].reborrow())
    }

    fn saves(&self, _: Bits) -> Result<Saves> {
        Ok(Saves::NONE)
    }

    fn gradient<T: Apply>(&self, cx: &mut dyn Backprop<T>) -> Result<()> {
        let g = cx.grad()?;
        cx.give(0, self.adjoint(cx.input_spec(0).shape), &[&g])
    }
}

fn inverse(order: &[usize]) -> SmallVec<[usize; MAX_RANK]> {
    let mut back = smallvec![0; order.len()];
    order.iter().enumerate().for_each(|(i, &a)| back[a] = i);
    back
}

/// Zeros of `shape` with the input at `start, start + step, …` along an axis: the adjoint of a slice.
#[derive(Clone, Debug)]
pub struct Embed {
    axis: usize,
    start: usize,
    step: usize,
    shape: Shape,
}

impl Embed {
    fn slice(&self, len: usize) -> ViewOp {
        ViewOp::Slice { axis: self.axis, start: self.start, len, step: self.step }
    }
}

impl Rule for Embed {
    fn name(&self) -> &'static str {
        "embed"
    }

    fn infer(&self, ins: &[Spec]) -> Result<Specs> {
        let len = ins[0].shape[self.axis];
        if self.slice(len).shape(self.shape)? != ins[0].shape {
            return Err(Error::shape(self.name(), &[ins[0].shape, self.shape], "the first is no slice of the second"));
        }
        Ok(smallvec![Spec { shape: self.shape, dtype: ins[0].dtype }])
    }

    fn run<R: Runtime>(&self, ins: &[&Tensor<R>], outs: &mut [Out<'_, R>]) -> Result<()> {
        let out = &mut outs[0];
        if out.how == Accumulate::Overwrite {
            fill_zero(ins[0].runtime(), out.reborrow())?;
        }
        let layout = out.view.layout.slice(self.axis, self.start, ins[0].shape()[self.axis], self.step)?;
        let mut part = out.reborrow();
        part.view.layout = &layout;
        copy_into(ins[0], part)
    }

    fn saves(&self, _: Bits) -> Result<Saves> {
        Ok(Saves::NONE)
    }

    fn gradient<T: Apply>(&self, cx: &mut dyn Backprop<T>) -> Result<()> {
        let g = cx.grad()?;
        let len = cx.input_spec(0).shape[self.axis];
        cx.give(0, self.slice(len).into(), &[&g])
    }
}

/// Windows (on the last axis) added up where they overlap: the adjoint of [`ViewOp::Unfold`].
#[derive(Clone, Debug)]
pub struct Fold {
    windows: Windows,
    len: usize,
}

impl Rule for Fold {
    fn name(&self) -> &'static str {
        "fold"
    }

    fn infer(&self, ins: &[Spec]) -> Result<Specs> {
        let rank = ins[0].shape.rank() - 1;
        let shape = Shape::new(&ins[0].shape[..rank])?.with(self.windows.axis, self.len);
        if ViewOp::Unfold(self.windows).shape(shape)? != ins[0].shape {
            return Err(Error::shape(
                self.name(),
                &[ins[0].shape, shape],
                "the first does not hold the second's windows",
            ));
        }
        Ok(smallvec![Spec { shape, dtype: ins[0].dtype }])
    }

    fn run<R: Runtime>(&self, ins: &[&Tensor<R>], outs: &mut [Out<'_, R>]) -> Result<()> {
        let Windows { axis, size, step, dilation } = self.windows;
        let (x, out) = (ins[0], &mut outs[0]);
        if out.how == Accumulate::Overwrite {
            fill_zero(x.runtime(), out.reborrow())?;
        }
        let last = x.layout().rank() - 1;
        for k in 0..size {
            let of_k = x.select(last as isize, k)?;
            let layout = out.view.layout.slice(axis, k * dilation, x.shape()[axis], step)?;
            let mut part = out.reborrow();
            part.how = Accumulate::Add;
            part.view.layout = &layout;
            copy_into(&of_k, part)?;
        }
        Ok(())
    }

    fn saves(&self, _: Bits) -> Result<Saves> {
        Ok(Saves::NONE)
    }

    fn gradient<T: Apply>(&self, cx: &mut dyn Backprop<T>) -> Result<()> {
        let g = cx.grad()?;
        cx.give(0, ViewOp::Unfold(self.windows).into(), &[&g])
    }
}

/// Views of tensors and variables. Axes may be negative. Nothing is copied unless stated.
pub trait ViewOps: Apply {
    /// The same elements in row-major order at another shape; copies when strides cannot express it.
    fn reshape(&self, shape: impl AsRef<[usize]>) -> Result<Self> {
        let shape = Shape::new(shape.as_ref())?;
        if shape == self.spec().shape {
            return Ok(self.clone());
        }
        Self::apply1(ViewOp::Reshape(shape), &[self])
    }
    /// Axes `start..=end` merged into one; copies when strides cannot express it.
    fn flatten(&self, start: isize, end: isize) -> Result<Self> {
        let shape = self.spec().shape;
        let (a, b) = (shape.axis("flatten", start)?, shape.axis("flatten", end)?);
        if a > b {
            return Err(Error::shape("flatten", &[shape], format!("axis {start} comes after {end}")));
        }
        let dims: Vec<usize> = [&shape[..a], &[shape[a..=b].iter().product()], &shape[b + 1..]].concat();
        self.reshape(dims)
    }
    /// Axes in another order.
    fn permute(&self, order: &[isize]) -> Result<Self> {
        let shape = self.spec().shape;
        let order = order.iter().map(|&a| shape.axis("permute", a)).collect::<Result<Vec<_>>>()?;
        self.permute_axes(&order)
    }
    /// [`permute`](ViewOps::permute) by positions.
    fn permute_axes(&self, order: &[usize]) -> Result<Self> {
        Self::apply1(ViewOp::Permute(order.into()), &[self])
    }
    /// Two axes exchanged.
    fn transpose(&self, a: isize, b: isize) -> Result<Self> {
        let shape = self.spec().shape;
        let mut order: Vec<usize> = (0..shape.rank()).collect();
        order.swap(shape.axis("transpose", a)?, shape.axis("transpose", b)?);
        self.permute_axes(&order)
    }
    /// The last two axes exchanged.
    fn t(&self) -> Result<Self> {
        self.transpose(-2, -1)
    }
    /// Repeated to `shape`: sizes of 1 stretch, new axes come in front.
    fn broadcast_to(&self, shape: impl AsRef<[usize]>) -> Result<Self> {
        let shape = Shape::new(shape.as_ref())?;
        if shape == self.spec().shape {
            return Ok(self.clone());
        }
        Self::apply1(ViewOp::Broadcast(shape), &[self])
    }
    /// `len` elements from `start` along `axis`.
    fn narrow(&self, axis: isize, start: usize, len: usize) -> Result<Self> {
        self.slice(axis, start, len, 1)
    }
    /// `len` elements `start, start + step, …` along `axis`.
    fn slice(&self, axis: isize, start: usize, len: usize, step: usize) -> Result<Self> {
        let axis = self.spec().shape.axis("slice", axis)?;
        Self::apply1(ViewOp::Slice { axis, start, len, step }, &[self])
    }
    /// One element along `axis`, which disappears.
    fn select(&self, axis: isize, at: usize) -> Result<Self> {
        let axis = self.spec().shape.axis("select", axis)?;
        self.slice(axis as isize, at, 1, 1)?.squeeze(axis as isize)
    }
    /// Pieces of `size` along `axis`; the last may be shorter.
    fn split(&self, axis: isize, size: usize) -> Result<Vec<Self>> {
        let n = self.spec().shape[self.spec().shape.axis("split", axis)?];
        if size == 0 {
            return Err(Error::argument("split", "pieces of size 0"));
        }
        if n == 0 {
            return Ok(Vec::new());
        }
        let axis = self.spec().shape.axis("split", axis)?;
        let sizes = (0..n.div_ceil(size)).map(|i| size.min(n - i * size)).collect();
        Ok(Self::apply(Split { axis, sizes }.into(), &[self])?.into_vec())
    }
    /// `parts` equal pieces along `axis`.
    fn chunk(&self, axis: isize, parts: usize) -> Result<Vec<Self>> {
        let n = self.spec().shape[self.spec().shape.axis("chunk", axis)?];
        if parts == 0 || !n.is_multiple_of(parts) {
            let why = format!("axis {axis} of size {n} does not divide into {parts} equal parts; use `split`");
            return Err(Error::shape("chunk", &[self.spec().shape], why));
        }
        if n == 0 { Ok(vec![self.clone(); parts]) } else { self.split(axis, n / parts) }
    }
    /// Without an axis of size 1.
    fn squeeze(&self, axis: isize) -> Result<Self> {
        let shape = self.spec().shape;
        let axis = shape.axis("squeeze", axis)?;
        if shape[axis] != 1 {
            return Err(Error::shape("squeeze", &[shape], format!("axis {axis} has size {}, not 1", shape[axis])));
        }
        self.reshape(shape.remove(axis))
    }
    /// With a new axis of size 1 before `axis` (after the end: `axis == rank`, or −1).
    fn unsqueeze(&self, axis: isize) -> Result<Self> {
        let shape = self.spec().shape;
        let rank = shape.rank() as isize;
        let at = if axis < 0 { axis + rank + 1 } else { axis };
        if !(0..=rank).contains(&at) {
            return Err(Error::shape("unsqueeze", &[shape], format!("no place {axis} in {rank} axes")));
        }
        self.reshape(shape.insert(at as usize, 1)?)
    }
    /// Axes backwards.
    fn flip(&self, axes: &[isize]) -> Result<Self> {
        Self::apply1(ViewOp::Flip(self.spec().shape.axes("flip", axes)?), &[self])
    }
    /// Sliding windows along `axis`: `[.., L, ..]` becomes `[.., windows, .., size]`.
    fn unfold(&self, axis: isize, size: usize, step: usize, dilation: usize) -> Result<Self> {
        let axis = self.spec().shape.axis("unfold", axis)?;
        Self::apply1(ViewOp::Unfold(Windows { axis, size, step, dilation }), &[self])
    }
    /// Windows added up where they overlap: the adjoint of [`unfold`](ViewOps::unfold), back to `len` along `axis`.
    fn fold(&self, axis: isize, len: usize, step: usize, dilation: usize) -> Result<Self> {
        let shape = self.spec().shape;
        let (axis, size) = (shape.axis("fold", axis)?, shape[shape.axis("fold", -1)?]);
        Self::apply1(Fold { windows: Windows { axis, size, step, dilation }, len }, &[self])
    }
    /// Zeros of size `len` along `axis` with `self` at `start, start + step, …`: the adjoint of [`slice`](ViewOps::slice).
    fn embed(&self, axis: isize, len: usize, start: usize, step: usize) -> Result<Self> {
        let shape = self.spec().shape;
        let axis = shape.axis("embed", axis)?;
        Self::apply1(Embed { axis, start, step, shape: shape.with(axis, len) }, &[self])
    }
    /// Moved by `shift` along `axis`, wrapping around.
    fn roll(&self, axis: isize, shift: isize) -> Result<Self> {
        let n = self.spec().shape[self.spec().shape.axis("roll", axis)?];
        let by = if n == 0 { 0 } else { shift.rem_euclid(n as isize) as usize };
        if by == 0 {
            return Ok(self.clone());
        }
        super::cat(&[&self.narrow(axis, n - by, by)?, &self.narrow(axis, 0, n - by)?], axis)
    }
}

impl<T: Apply> ViewOps for T {}
