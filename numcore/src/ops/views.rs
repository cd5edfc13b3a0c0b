//! The view methods of tensors and variables.

use super::{Apply, Embed, Fold, Split, ViewOp, Windows};
use crate::{Error, Result, Shape};

/// Views of tensors and variables. Axes may be negative. No method copies unless it says so.
pub trait ViewOps: Apply {
    /// The elements in row-major order at another shape; copies if strides cannot express it.
    #[track_caller]
    fn reshape(&self, shape: impl AsRef<[usize]>) -> Result<Self> {
        let shape = Shape::new(shape.as_ref())?;
        if shape == self.spec().shape {
            return Ok(self.clone());
        }
        Self::apply1(ViewOp::Reshape(shape), &[self])
    }
    /// Merges axes `start..=end` into one; copies if strides cannot express it.
    #[track_caller]
    fn flatten(&self, start: isize, end: isize) -> Result<Self> {
        let shape = self.spec().shape;
        let (a, b) = (shape.axis("flatten", start)?, shape.axis("flatten", end)?);
        if a > b {
            return Err(Error::shape("flatten", &[shape], format!("axis {start} comes after {end}")));
        }
        let dims: Vec<usize> = [&shape[..a], &[shape[a..=b].iter().product()], &shape[b + 1..]].concat();
        self.reshape(dims)
    }
    /// Axes in another order; axis `i` of the result is axis `order[i]` of `self`.
    #[track_caller]
    fn permute(&self, order: &[isize]) -> Result<Self> {
        let shape = self.spec().shape;
        let order = order.iter().map(|&a| shape.axis("permute", a)).collect::<Result<Vec<_>>>()?;
        self.permute_axes(&order)
    }
    /// Axes in the given order, by position; see [`permute`](ViewOps::permute).
    #[track_caller]
    fn permute_axes(&self, order: &[usize]) -> Result<Self> {
        Self::apply1(ViewOp::Permute(order.into()), &[self])
    }
    /// The view with two axes exchanged.
    #[track_caller]
    fn transpose(&self, a: isize, b: isize) -> Result<Self> {
        let shape = self.spec().shape;
        let mut order: Vec<usize> = (0..shape.rank()).collect();
        order.swap(shape.axis("transpose", a)?, shape.axis("transpose", b)?);
        self.permute_axes(&order)
    }
    /// The transpose: the last two axes exchanged.
    #[track_caller]
    fn t(&self) -> Result<Self> {
        self.transpose(-2, -1)
    }
    /// A broadcast to `shape`: axes of size 1 are repeated, new axes come in front.
    #[track_caller]
    fn broadcast_to(&self, shape: impl AsRef<[usize]>) -> Result<Self> {
        let shape = Shape::new(shape.as_ref())?;
        if shape == self.spec().shape {
            return Ok(self.clone());
        }
        Self::apply1(ViewOp::Broadcast(shape), &[self])
    }
    /// The `len` elements from `start` on along `axis`.
    #[track_caller]
    fn narrow(&self, axis: isize, start: usize, len: usize) -> Result<Self> {
        self.slice(axis, start, len, 1)
    }
    /// The `len` elements `start, start + step, …` along `axis`.
    #[track_caller]
    fn slice(&self, axis: isize, start: usize, len: usize, step: usize) -> Result<Self> {
        let axis = self.spec().shape.axis("slice", axis)?;
        Self::apply1(ViewOp::Slice { axis, start, len, step }, &[self])
    }
    /// The slice at index `at` of `axis`, which is removed.
    #[track_caller]
    fn select(&self, axis: isize, at: usize) -> Result<Self> {
        let shape = self.spec().shape;
        let axis = shape.axis("select", axis)?;
        if at >= shape[axis] {
            return Err(Error::shape(
                "select",
                &[shape],
                format!("axis {axis} of size {} has no position {at}", shape[axis]),
            ));
        }
        self.slice(axis as isize, at, 1, 1)?.squeeze(axis as isize)
    }
    /// Chunks of `size` along `axis`; the last may be shorter.
    #[track_caller]
    fn split(&self, axis: isize, size: usize) -> Result<Vec<Self>> {
        let n = self.spec().shape[self.spec().shape.axis("split", axis)?];
        if size == 0 {
            return Err(Error::range("split", "size", size, "at least 1"));
        }
        if n == 0 {
            return Ok(Vec::new());
        }
        let axis = self.spec().shape.axis("split", axis)?;
        let sizes = (0..n.div_ceil(size)).map(|i| size.min(n - i * size)).collect();
        Ok(Self::apply(Split { axis, sizes }.into(), &[self])?.into_vec())
    }
    /// Splits `axis` into `parts` equal chunks.
    #[track_caller]
    fn chunk(&self, axis: isize, parts: usize) -> Result<Vec<Self>> {
        let n = self.spec().shape[self.spec().shape.axis("chunk", axis)?];
        if parts == 0 || !n.is_multiple_of(parts) {
            let why = format!("axis {axis} of size {n} does not divide into {parts} equal parts; use `split`");
            return Err(Error::shape("chunk", &[self.spec().shape], why));
        }
        if n == 0 { Ok(vec![self.clone(); parts]) } else { self.split(axis, n / parts) }
    }
    /// Removes an axis of size 1.
    #[track_caller]
    fn squeeze(&self, axis: isize) -> Result<Self> {
        let shape = self.spec().shape;
        let axis = shape.axis("squeeze", axis)?;
        if shape[axis] != 1 {
            return Err(Error::shape("squeeze", &[shape], format!("axis {axis} has size {}, not 1", shape[axis])));
        }
        self.reshape(shape.remove(axis))
    }
    /// Inserts a new axis of size 1 before `axis`; `axis == rank`, or −1, inserts it at the end.
    #[track_caller]
    fn unsqueeze(&self, axis: isize) -> Result<Self> {
        let shape = self.spec().shape;
        let rank = shape.rank() as isize;
        let at = if axis < 0 { axis + rank + 1 } else { axis };
        if !(0..=rank).contains(&at) {
            return Err(Error::shape("unsqueeze", &[shape], format!("no place {axis} in {rank} axes")));
        }
        self.reshape(shape.insert(at as usize, 1)?)
    }
    /// Reverses the order of elements along these axes.
    #[track_caller]
    fn flip(&self, axes: &[isize]) -> Result<Self> {
        Self::apply1(ViewOp::Flip(self.spec().shape.axes("flip", axes)?), &[self])
    }
    /// Sliding windows along `axis`: `[.., L, ..]` becomes `[.., windows, .., size]`.
    #[track_caller]
    fn unfold(&self, axis: isize, size: usize, step: usize, dilation: usize) -> Result<Self> {
        let axis = self.spec().shape.axis("unfold", axis)?;
        Self::apply1(ViewOp::Unfold(Windows { axis, size, step, dilation }), &[self])
    }
    /// Windows accumulated where they overlap: the adjoint of [`unfold`](ViewOps::unfold), back to `len` along `axis`.
    #[track_caller]
    fn fold(&self, axis: isize, len: usize, step: usize, dilation: usize) -> Result<Self> {
        let shape = self.spec().shape;
        let (axis, size) = (shape.axis("fold", axis)?, shape[shape.axis("fold", -1)?]);
        Self::apply1(Fold { windows: Windows { axis, size, step, dilation }, len }, &[self])
    }
    /// Zeros of size `len` along `axis` with `self` at `start, start + step, …`: the adjoint of
    /// [`slice`](ViewOps::slice).
    #[track_caller]
    fn embed(&self, axis: isize, len: usize, start: usize, step: usize) -> Result<Self> {
        let shape = self.spec().shape;
        let axis = shape.axis("embed", axis)?;
        Self::apply1(Embed { axis, start, step, shape: Shape::new(&shape.with(axis, len))? }, &[self])
    }
    /// Rolls elements by `shift` along `axis`, wrapping around.
    #[track_caller]
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
