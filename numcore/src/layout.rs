//! Layouts: sizes, strides and an offset, in elements, that place a tensor in its buffer. Every view is a new layout
//! over the same memory.

mod adjacent;
mod coalesce;

use std::fmt;

pub use coalesce::{LoopAxis, coalesce};

use crate::{Error, MAX_RANK, Result, Shape};

/// Sizes, strides and offset of a view, in elements. Strides may be 0 (broadcast) or negative (flip).
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Layout {
    shape: Shape,
    strides: [isize; MAX_RANK],
    offset: usize,
}

impl Layout {
    /// The row-major layout of `shape`, from the start of the buffer.
    #[inline]
    pub fn contiguous(shape: Shape) -> Layout {
        let mut strides = [0; MAX_RANK];
        let mut step = 1isize;
        for i in (0..shape.rank()).rev() {
            strides[i] = step;
            // Strides of a shape too large for any memory are meaningless, but such a shape never gets memory.
            step = step.wrapping_mul(shape[i].max(1) as isize);
        }
        Layout { shape, strides, offset: 0 }
    }

    /// The sizes of all axes.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The sizes, as a slice.
    pub fn dims(&self) -> &[usize] {
        self.shape.dims()
    }

    /// The stride of each axis: the distance in elements between adjacent indices.
    pub fn strides(&self) -> &[isize] {
        &self.strides[..self.shape.rank()]
    }

    /// The offset of the first element in the buffer, in elements.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// The number of dimensions.
    pub fn rank(&self) -> usize {
        self.shape.rank()
    }

    /// The number of elements.
    pub fn numel(&self) -> usize {
        self.shape.numel()
    }

    /// This layout with its offset increased by `offset` elements.
    pub fn at(mut self, offset: usize) -> Layout {
        self.offset += offset;
        self
    }

    /// Tells whether the layout is row-major without gaps, at any offset.
    pub fn is_contiguous(&self) -> bool {
        let mut step = 1isize;
        for i in (0..self.rank()).rev() {
            if self.shape[i] != 1 && self.strides[i] != step {
                return self.numel() == 0;
            }
            step *= self.shape[i] as isize;
        }
        true
    }

    /// The dense layout of `shape`, of the same rank, whose axes have the memory order of this layout's axes. It is
    /// row-major if this layout has no order (an axis repeats or runs backwards), or if the last axis would not be the
    /// innermost.
    pub(crate) fn dense_like(&self, shape: Shape) -> Layout {
        let mut out = Layout::contiguous(shape);
        let mut order: smallvec::SmallVec<[usize; MAX_RANK]> = (0..self.rank()).filter(|&i| shape[i] != 1).collect();
        let ordered = order.iter().all(|&i| self.shape[i] != 1 && self.strides[i] > 0);
        order.sort_by_key(|&i| self.strides[i]);
        if ordered && order.first().is_some_and(|&i| i + 1 == self.rank()) {
            let mut step = 1;
            for i in order {
                out.strides[i] = step;
                step *= shape[i] as isize;
            }
        }
        out
    }

    /// The range of buffer elements that the layout covers, `[from, to)`; empty if the layout has no elements.
    pub fn span(&self) -> (usize, usize) {
        if self.numel() == 0 {
            return (self.offset, self.offset);
        }
        let (mut lo, mut hi) = (self.offset as isize, self.offset as isize);
        for (&d, &s) in self.dims().iter().zip(self.strides()) {
            let reach = (d as isize - 1) * s;
            if reach < 0 { lo += reach } else { hi += reach }
        }
        (lo as usize, hi as usize + 1)
    }

    /// Tells whether two elements of this layout share memory, through a broadcast axis or overlapping windows.
    pub fn overlaps_itself(&self) -> bool {
        let mut axes: smallvec::SmallVec<[(usize, usize); MAX_RANK]> = self
            .dims()
            .iter()
            .zip(self.strides())
            .filter(|(d, _)| **d > 1)
            .map(|(&d, &s)| (s.unsigned_abs(), d))
            .collect();
        axes.sort_unstable();
        let mut reach = 0;
        for (stride, size) in axes {
            if stride <= reach {
                return self.numel() != 0;
            }
            reach += stride * (size - 1);
        }
        false
    }

    /// This layout with its axes in another order: axis `i` of the result is axis `order[i]` of this one.
    pub fn permute(&self, order: &[usize]) -> Result<Layout> {
        let mut out = *self;
        let mut seen = crate::AxisSet::default();
        order.iter().filter(|&&a| a < self.rank()).for_each(|&a| seen.insert(a));
        if order.len() != self.rank() || seen != crate::AxisSet::all(self.rank()) {
            return Err(Error::shape("permute", &[self.shape], format!("{order:?} is not an order of its axes")));
        }
        for (i, &a) in order.iter().enumerate() {
            out.shape = out.shape.with(i, self.shape[a]);
            out.strides[i] = self.strides[a];
        }
        Ok(out)
    }

    /// This layout broadcast to `shape`: new axes in front, axes of size 1 repeated with stride 0.
    pub fn broadcast_to(&self, shape: Shape) -> Result<Layout> {
        let lead = shape.rank().checked_sub(self.rank());
        let fits = lead.is_some_and(|l| self.dims().iter().zip(&shape[l..]).all(|(&d, &t)| d == t || d == 1));
        let Some(lead) = lead.filter(|_| fits) else {
            return Err(Error::shape(
                "broadcast_to",
                &[self.shape, shape],
                "the first cannot be broadcast to the second",
            ));
        };
        let shape = shape.checked("broadcast_to")?;
        let mut out = Layout { shape, strides: [0; MAX_RANK], offset: self.offset };
        for i in 0..self.rank() {
            out.strides[lead + i] = if self.shape[i] == shape[lead + i] { self.strides[i] } else { 0 };
        }
        Ok(out)
    }

    /// The layout of elements `start, start + step, …` along an axis, `len` of them.
    pub fn slice(&self, axis: usize, start: usize, len: usize, step: usize) -> Result<Layout> {
        let size = self.size("slice", axis)?;
        let last = len.checked_sub(1).and_then(|l| l.checked_mul(step)).and_then(|l| l.checked_add(start));
        if step == 0 || (len > 0 && last.is_none_or(|l| l >= size)) || start > size {
            return Err(Error::shape(
                "slice",
                &[self.shape],
                format!("{len} elements from {start} by {step} leave axis {axis} of size {size}"),
            ));
        }
        let mut out = *self;
        out.shape = out.shape.with(axis, len);
        if len > 0 {
            out.offset = (out.offset as isize + start as isize * self.strides[axis]) as usize;
        }
        // The stride of an axis with a single element may be any value.
        if len > 1 {
            out.strides[axis] *= step as isize;
        }
        Ok(out)
    }

    /// This layout with one axis reversed.
    pub fn flip(&self, axis: usize) -> Result<Layout> {
        let mut out = *self;
        let reach = self.size("flip", axis)?.saturating_sub(1) as isize * self.strides[axis];
        if self.numel() > 0 {
            out.offset = (out.offset as isize + reach) as usize;
        }
        out.strides[axis] = -self.strides[axis];
        Ok(out)
    }

    /// The size of an axis, or an error if the axis does not exist.
    fn size(&self, op: &'static str, axis: usize) -> Result<usize> {
        let missing = || Error::shape(op, &[self.shape], format!("axis {axis} of a tensor with {} axes", self.rank()));
        self.dims().get(axis).copied().ok_or_else(missing)
    }

    /// This layout with sliding windows along an axis, which becomes the number of windows; a last axis of `size` is
    /// appended. Windows start every `step` elements and take every `dilation`-th one.
    pub fn unfold(&self, axis: usize, size: usize, step: usize, dilation: usize) -> Result<Layout> {
        let Some(windows) = windows(self.size("unfold", axis)?, size, step, dilation) else {
            return Err(Error::shape(
                "unfold",
                &[self.shape],
                format!("axis {axis} is shorter than a window of {size} with dilation {dilation}, or a size is 0"),
            ));
        };
        let mut out = *self;
        out.shape = self.shape.with(axis, windows).insert(self.rank(), size)?;
        out.strides[self.rank()] = self.strides[axis] * if size > 1 { dilation as isize } else { 1 };
        if windows > 1 {
            out.strides[axis] *= step as isize;
        }
        Ok(out)
    }

    /// This layout at another shape, in row-major order; `None` if strides cannot express it.
    pub fn reshape(&self, shape: Shape) -> Option<Layout> {
        if shape.numel() != self.numel() {
            return None;
        }
        let mut out = Layout { offset: self.offset, ..Layout::contiguous(shape) };
        if self.numel() == 0 || self.is_contiguous() {
            return Some(out);
        }
        let axes = self.dims().iter().zip(self.strides()).map(|(&size, &stride)| LoopAxis { size, strides: [stride] });
        let mut axis = shape.rank();
        for LoopAxis { size, strides: [stride] } in coalesce(axes, usize::MAX).into_iter().rev() {
            let (mut left, mut step) = (size, stride);
            while left > 1 {
                axis = axis.checked_sub(1)?;
                out.strides[axis] = step;
                if left % shape[axis] != 0 {
                    return None;
                }
                left /= shape[axis];
                step *= shape[axis] as isize;
            }
        }
        Some(out)
    }
}

/// The length of `len` elements with `padding` on both sides; `None` if it overflows.
pub(crate) fn padded(len: usize, padding: usize) -> Option<usize> {
    len.checked_add(padding.checked_mul(2)?)
}

/// The number of windows of `size` (dilated) in `len` elements, one starting every `step`; `None` if none fits.
pub(crate) fn windows(len: usize, size: usize, step: usize, dilation: usize) -> Option<usize> {
    let reach = size.checked_sub(1)?.checked_mul(dilation)?;
    (step > 0 && dilation > 0).then_some(())?;
    Some(len.checked_sub(reach)?.checked_sub(1)? / step + 1)
}

impl fmt::Debug for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}/{:?}+{}", self.dims(), self.strides(), self.offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(dims: &[usize]) -> Layout {
        Layout::contiguous(Shape::of(dims))
    }

    /// The offsets of all elements in row-major order, which define a layout.
    fn offsets(l: &Layout) -> Vec<isize> {
        (0..l.numel())
            .map(|mut k| {
                let mut at = l.offset() as isize;
                for (&d, &s) in l.dims().iter().zip(l.strides()).rev() {
                    at += (k % d) as isize * s;
                    k /= d;
                }
                at
            })
            .collect()
    }

    #[test]
    fn views_name_the_elements_they_should() {
        let l = layout(&[2, 3]);
        assert_eq!(offsets(&l.permute(&[1, 0]).unwrap()), [0, 3, 1, 4, 2, 5]);
        assert_eq!(offsets(&l.flip(1).unwrap()), [2, 1, 0, 5, 4, 3]);
        assert_eq!(offsets(&l.slice(1, 0, 2, 2).unwrap()), [0, 2, 3, 5]);
        assert_eq!(offsets(&layout(&[3]).broadcast_to(Shape::from([2, 3])).unwrap()), [0, 1, 2, 0, 1, 2]);
        assert_eq!(offsets(&layout(&[5]).unfold(0, 2, 2, 1).unwrap()), [0, 1, 2, 3]);
        assert_eq!(offsets(&layout(&[5]).unfold(0, 2, 1, 3).unwrap()), [0, 3, 1, 4]);
    }

    #[test]
    fn reshape_is_a_view_exactly_when_strides_can_say_it() {
        let t = layout(&[4, 6]).permute(&[1, 0]).unwrap();
        assert_eq!(t.reshape(Shape::from([24])), None);
        let split = t.reshape(Shape::from([2, 3, 4])).unwrap();
        assert_eq!(offsets(&split), offsets(&t));
        let inner = layout(&[2, 3, 4]).slice(2, 1, 2, 1).unwrap();
        assert_eq!(offsets(&inner.reshape(Shape::from([6, 1, 2])).unwrap()), offsets(&inner));
        assert_eq!(inner.reshape(Shape::from([3, 4])), None);
        assert!(layout(&[0, 3]).reshape(Shape::from([3, 0])).is_some());
    }

    #[test]
    fn out_of_range_is_an_error() {
        let l = layout(&[4]);
        assert!(l.slice(0, 2, 3, 1).is_err() && l.slice(0, 0, 2, 0).is_err() && l.slice(0, usize::MAX, 1, 1).is_err());
        assert!(l.slice(0, 4, 0, 1).is_ok());
        assert!(l.unfold(0, 5, 1, 1).is_err() && l.unfold(0, 0, 1, 1).is_err());
        assert!(l.permute(&[1]).is_err() && l.broadcast_to(Shape::from([5])).is_err());
    }

    #[test]
    fn knows_overlap_and_span() {
        assert!(layout(&[5]).unfold(0, 3, 1, 1).unwrap().overlaps_itself());
        assert!(layout(&[1]).broadcast_to(Shape::from([2])).unwrap().overlaps_itself());
        assert!(!layout(&[4, 3]).permute(&[1, 0]).unwrap().overlaps_itself());
        assert_eq!(layout(&[6]).slice(0, 1, 2, 3).unwrap().flip(0).unwrap().span(), (1, 5));
    }

    #[test]
    fn dense_in_the_order_of_another() {
        // Heads of a part of a projection: [B, T, 3·H·D] as [B, H, T, D].
        let heads = layout(&[2, 5, 36]).slice(2, 12, 12, 1).unwrap().reshape(Shape::from([2, 5, 3, 4])).unwrap();
        let heads = heads.permute(&[0, 2, 1, 3]).unwrap();
        let like = heads.dense_like(Shape::from([2, 3, 5, 7]));
        assert!(like.permute(&[0, 2, 1, 3]).unwrap().is_contiguous() && !like.overlaps_itself());
        assert_eq!((like.offset(), like.span()), (0, (0, 210)));
        // No order, or not the last axis innermost.
        let repeated = layout(&[3, 1, 4]).broadcast_to(Shape::from([3, 2, 4])).unwrap();
        for other in [repeated, layout(&[2, 4, 3]).permute(&[0, 2, 1]).unwrap(), layout(&[3, 2, 4]).flip(0).unwrap()] {
            assert!(other.dense_like(*other.shape()).is_contiguous());
        }
    }
}
