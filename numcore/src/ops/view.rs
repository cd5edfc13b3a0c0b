//! Views: the elements of a tensor under another layout, without a copy. Also the adjoints of views that select only
//! some elements.

use std::ops::RangeInclusive;

use smallvec::{SmallVec, smallvec};

use super::{Apply, Backprop, Bits, Op, Reduce, Rule, Saves, Spec, Specs, ViewOps, copy_into, fill_zero};
use crate::{Accumulate, AxisSet, Error, Layout, MAX_RANK, Out, Result, Runtime, Shape, Tensor};

/// A view: another layout of a tensor's elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ViewOp {
    /// Axes in another order.
    Permute(SmallVec<[usize; MAX_RANK]>),
    /// Axes of size 1 repeated, new axes in front.
    Broadcast(Shape),
    /// The elements in row-major order at another shape (copied if strides cannot express it).
    Reshape(Shape),
    /// Elements `start, start + step, …` along an axis.
    Slice {
        /// The axis that is sliced.
        axis: usize,
        /// The index of the first element taken.
        start: usize,
        /// The number of elements taken.
        len: usize,
        /// The step between elements taken.
        step: usize,
    },
    /// The order of elements reversed along these axes.
    Flip(AxisSet),
    /// Sliding windows along an axis, appended as a last axis.
    Unfold(Windows),
}

/// Sliding windows along an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Windows {
    /// The axis along which the windows slide.
    pub axis: usize,
    /// The number of elements of a window.
    pub size: usize,
    /// The stride between windows.
    pub step: usize,
    /// The distance between elements of a window.
    pub dilation: usize,
}

impl ViewOp {
    /// The layout of the view, or `None` if only a row-major copy has one.
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
            ViewOp::Flip(axes) => axes.iter().try_fold(*x, |l, a| l.flip(a)).map(Some),
            ViewOp::Unfold(w) => x.unfold(w.axis, w.size, w.step, w.dilation).map(Some),
        }
    }

    /// The op that maps a gradient of the view to a gradient of its input, of shape `from`, which the view must fit.
    pub fn adjoint(&self, from: Shape) -> Result<Op> {
        self.shape(from)?;
        Ok(match self {
            ViewOp::Permute(order) => ViewOp::Permute(inverse(order)).into(),
            ViewOp::Broadcast(_) => Reduce::sum_to(from).into(),
            ViewOp::Reshape(_) => ViewOp::Reshape(from).into(),
            ViewOp::Flip(_) => self.clone().into(),
            ViewOp::Slice { axis, start, step, .. } => {
                Embed { axis: *axis, start: *start, step: *step, shape: from }.into()
            }
            ViewOp::Unfold(windows) => Fold { windows: *windows, len: from[windows.axis] }.into(),
        })
    }

    /// This view, which repeats no element, of an input with another axis of this size in front.
    pub fn beside(&self, size: usize) -> Result<ViewOp> {
        let longer = |shape: &Shape| Shape::new(&[&[size], &shape[..]].concat());
        Ok(match self {
            ViewOp::Permute(order) => ViewOp::Permute([0].into_iter().chain(order.iter().map(|a| a + 1)).collect()),
            ViewOp::Broadcast(shape) | ViewOp::Reshape(shape) => ViewOp::Reshape(longer(shape)?),
            ViewOp::Slice { axis, start, len, step } => {
                ViewOp::Slice { axis: axis + 1, start: *start, len: *len, step: *step }
            }
            ViewOp::Flip(axes) => {
                let mut moved = AxisSet::default();
                axes.iter().for_each(|axis| moved.insert(axis + 1));
                ViewOp::Flip(moved)
            }
            ViewOp::Unfold(windows) => ViewOp::Unfold(Windows { axis: windows.axis + 1, ..*windows }),
        })
    }

    /// The shape of the view for an input of shape `x`.
    pub fn shape(&self, x: Shape) -> Result<Shape> {
        let dense = Layout::contiguous(x.checked(self.name())?);
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

    fn arity(&self) -> RangeInclusive<usize> {
        1..=1
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
        cx.give(0, self.adjoint(cx.input_spec(0)?.shape)?, &[&g])
    }
}

fn inverse(order: &[usize]) -> SmallVec<[usize; MAX_RANK]> {
    let mut back = smallvec![0; order.len()];
    order.iter().enumerate().for_each(|(i, &a)| back[a] = i);
    back
}

/// Zeros of `shape`, with the input at `start, start + step, …` along an axis: the adjoint of a slice.
#[derive(Clone, Debug)]
pub struct Embed {
    pub(super) axis: usize,
    pub(super) start: usize,
    pub(super) step: usize,
    pub(super) shape: Shape,
}

impl Embed {
    /// The slice of the output that holds an input with `len` elements along the axis.
    pub fn slice(&self, len: usize) -> ViewOp {
        ViewOp::Slice { axis: self.axis, start: self.start, len, step: self.step }
    }
}

impl Rule for Embed {
    fn name(&self) -> &'static str {
        "embed"
    }

    fn arity(&self) -> RangeInclusive<usize> {
        1..=1
    }

    fn infer(&self, ins: &[Spec]) -> Result<Specs> {
        let len = ins[0].shape.get(self.axis).copied().unwrap_or(0);
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
        let len = cx.input_spec(0)?.shape[self.axis];
        cx.give(0, self.slice(len).into(), &[&g])
    }
}

/// Windows (on the last axis) accumulated where they overlap: the adjoint of [`ViewOp::Unfold`].
#[derive(Clone, Debug)]
pub struct Fold {
    pub(super) windows: Windows,
    pub(super) len: usize,
}

impl Rule for Fold {
    fn name(&self) -> &'static str {
        "fold"
    }

    fn arity(&self) -> RangeInclusive<usize> {
        1..=1
    }

    fn infer(&self, ins: &[Spec]) -> Result<Specs> {
        let Some(rank) = ins[0].shape.rank().checked_sub(1).filter(|rank| self.windows.axis < *rank) else {
            return Err(Error::shape(self.name(), &[ins[0].shape], "needs windows on the last axis of at least two"));
        };
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
