//! Shapes: the sizes of a tensor's dimensions, stored inline, so that creating and copying one allocates nothing.

use std::{fmt, ops::Deref};

use crate::{Error, Result, Within};

/// The largest number of dimensions of a tensor. Eight are enough for convolution (`[N, G, C, OH, OW, KH, KW]`), and
/// keep [`Shape`] a plain value.
pub const MAX_RANK: usize = 8;

/// The sizes of a tensor's dimensions, outermost first.
#[derive(Clone, Copy, Eq)]
pub struct Shape {
    dims: [usize; MAX_RANK],
    rank: u8,
}

impl Shape {
    /// The shape of a scalar: no dimensions, one element.
    pub const SCALAR: Shape = Shape { dims: [1; MAX_RANK], rank: 0 };

    /// A shape with these sizes.
    ///
    /// # Errors
    /// Fails for more than [`MAX_RANK`] dimensions, or if the number of elements overflows.
    #[track_caller]
    pub fn new(dims: &[usize]) -> Result<Shape> {
        if dims.len() > MAX_RANK {
            return Err(Error::range(
                "shape",
                "rank",
                dims.len(),
                format!("at most {MAX_RANK}; the sizes are {dims:?}"),
            ))
            .at_caller();
        }
        Self::of(dims).checked("shape")
    }

    /// Checks that memory can hold that many elements; the error names `op`. Sizes may come from any source (an array,
    /// two operands broadcast together), so every allocation and view checks its shape here first.
    #[track_caller]
    pub(crate) fn checked(self, op: &'static str) -> Result<Shape> {
        let nonzero = self.dims().iter().filter(|&&d| d != 0);
        if nonzero.copied().try_fold(16usize, usize::checked_mul).is_none_or(|n| n > isize::MAX as usize) {
            return Err(Error::shape(op, &[self], "has more elements than memory can hold")).at_caller();
        }
        Ok(self)
    }

    /// A shape of sizes that are already known to be valid; see [`Shape::new`].
    pub(crate) fn of(dims: &[usize]) -> Shape {
        let mut s = Shape::SCALAR;
        s.dims[..dims.len()].copy_from_slice(dims);
        s.rank = dims.len() as u8;
        s
    }

    /// The sizes of all axes.
    pub fn dims(&self) -> &[usize] {
        &self.dims[..self.rank as usize]
    }

    /// The number of dimensions.
    pub fn rank(&self) -> usize {
        self.rank as usize
    }

    /// The number of elements; `usize::MAX` if it overflows.
    pub fn numel(&self) -> usize {
        self.dims().iter().fold(1, |n: usize, &d| n.saturating_mul(d))
    }

    /// The position of `axis`; negative axes count from the end.
    #[track_caller]
    pub fn axis(&self, op: &'static str, axis: isize) -> Result<usize> {
        let rank = self.rank() as isize;
        let at = if axis < 0 { axis + rank } else { axis };
        if (0..rank).contains(&at) {
            return Ok(at as usize);
        }
        Err(Error::shape(op, &[*self], format!("axis {axis} of a tensor with {rank} dimensions"))).at_caller()
    }

    /// The positions of several axes; a repeated axis is an error, and so is an empty list. See [`Shape::axis`].
    #[track_caller]
    pub fn axes(&self, op: &'static str, axes: &[isize]) -> Result<AxisSet> {
        if axes.is_empty() {
            return Err(self.names_no_axis(op)).at_caller();
        }
        let mut set = AxisSet::default();
        for &a in axes {
            let at = self.axis(op, a)?;
            if set.contains(at) {
                return Err(Error::shape(op, &[*self], format!("axis {a} is named twice"))).at_caller();
            }
            set.insert(at);
        }
        Ok(set)
    }

    /// The error of an empty list of axes, which stands for all axes in some libraries and for none in others.
    pub(crate) fn names_no_axis(&self, op: &'static str) -> Error {
        Error::shape(op, &[*self], "the list of axes is empty; name each axis")
    }

    /// This shape with one size replaced.
    pub fn with(mut self, axis: usize, size: usize) -> Shape {
        debug_assert!(axis < self.rank());
        self.dims[axis] = size;
        self
    }

    /// This shape with a dimension inserted before `axis`.
    #[track_caller]
    pub fn insert(&self, axis: usize, size: usize) -> Result<Shape> {
        let mut dims = self.dims().to_vec();
        dims.insert(axis, size);
        Shape::new(&dims)
    }

    /// This shape without dimension `axis`.
    pub fn remove(&self, axis: usize) -> Shape {
        let mut s = Shape::SCALAR;
        s.rank = self.rank - 1;
        s.dims[..axis].copy_from_slice(&self.dims[..axis]);
        s.dims[axis..s.rank as usize].copy_from_slice(&self.dims[axis + 1..self.rank as usize]);
        s
    }

    /// The shape that two shapes broadcast to; `None` if they do not fit. NumPy's rule: aligned at the end, sizes equal
    /// or 1.
    pub fn broadcast(&self, other: &Shape) -> Option<Shape> {
        let rank = self.rank().max(other.rank());
        let mut out = Shape { rank: rank as u8, ..Shape::SCALAR };
        for i in 0..rank {
            let (a, b) = (self.nth_last(rank - 1 - i), other.nth_last(rank - 1 - i));
            out.dims[i] = match (a, b) {
                (a, b) if a == b => a,
                (1, b) => b,
                (a, 1) => a,
                _ => return None,
            };
        }
        Some(out)
    }

    /// The shape that all shapes broadcast to. The error lists the shapes and names `op`.
    pub(crate) fn broadcast_all(op: &'static str, shapes: &[Shape]) -> Result<Shape> {
        shapes.iter().try_fold(Shape::SCALAR, |acc, s| acc.broadcast(s)).ok_or_else(|| {
            Error::shape(op, shapes, "cannot be broadcast together (aligned at the end, sizes must be equal or 1)")
        })
    }

    /// This shape with the given axes set to 1: the shape of a reduction with `keepdim`.
    pub fn reduced(mut self, axes: AxisSet) -> Shape {
        (0..self.rank()).filter(|&i| axes.contains(i)).for_each(|i| self.dims[i] = 1);
        self
    }

    /// This shape with the given axes removed.
    pub fn dropped(&self, axes: AxisSet) -> Shape {
        let kept: smallvec::SmallVec<[usize; MAX_RANK]> =
            (0..self.rank()).filter(|&i| !axes.contains(i)).map(|i| self.dims[i]).collect();
        Shape::of(&kept)
    }

    /// This shape with axes of size 1 put in front, up to `rank` in total.
    pub(crate) fn padded(&self, rank: usize) -> Shape {
        let mut s = Shape { rank: rank as u8, ..Shape::SCALAR };
        s.dims[rank - self.rank()..rank].copy_from_slice(self.dims());
        s
    }

    fn nth_last(&self, i: usize) -> usize {
        if i < self.rank() { self.dims[self.rank() - 1 - i] } else { 1 }
    }
}

/// A set of axis positions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct AxisSet(u8);

impl AxisSet {
    /// The set of the first `rank` axes.
    pub fn all(rank: usize) -> Self {
        AxisSet(((1u16 << rank) - 1) as u8)
    }

    /// The set of one axis.
    pub fn one(axis: usize) -> Self {
        AxisSet(1 << axis)
    }

    /// Tells whether `axis` is in the set.
    pub fn contains(self, axis: usize) -> bool {
        self.0 >> axis & 1 == 1
    }

    /// Adds `axis` to the set.
    pub fn insert(&mut self, axis: usize) {
        self.0 |= 1 << axis
    }

    /// The positions in ascending order.
    pub fn iter(self) -> impl Iterator<Item = usize> {
        (0..MAX_RANK).filter(move |&i| self.contains(i))
    }
}

impl PartialEq for Shape {
    #[inline]
    fn eq(&self, other: &Self) -> bool {
        self.rank == other.rank && self.dims().iter().zip(other.dims()).all(|(a, b)| a == b)
    }
}

impl std::hash::Hash for Shape {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.dims().hash(state);
    }
}

impl Deref for Shape {
    type Target = [usize];
    fn deref(&self) -> &[usize] {
        self.dims()
    }
}

impl AsRef<[usize]> for Shape {
    fn as_ref(&self) -> &[usize] {
        self.dims()
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    fn from(dims: [usize; N]) -> Shape {
        const { assert!(N <= MAX_RANK, "more dimensions than MAX_RANK") };
        Shape::of(&dims)
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.dims())
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.dims())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broadcast_follows_numpy() {
        let b = |x: &[usize], y: &[usize]| Shape::of(x).broadcast(&Shape::of(y)).map(|s| s.to_vec());
        assert_eq!(b(&[4, 1], &[6]), Some(vec![4, 6]));
        assert_eq!(b(&[], &[2, 0]), Some(vec![2, 0]));
        assert_eq!(b(&[1, 0], &[5, 1]), Some(vec![5, 0]));
        assert_eq!(b(&[2], &[3]), None);
    }

    #[test]
    fn axes_count_from_the_end_and_refuse_repeats_and_none() {
        let s = Shape::from([2, 3, 4]);
        assert_eq!(s.axis("t", -1).unwrap(), 2);
        assert!(s.axis("t", 3).is_err() && s.axes("t", &[0, -3]).is_err() && s.axes("t", &[]).is_err());
        assert_eq!(s.reduced(s.axes("t", &[0, -1]).unwrap()), Shape::from([1, 3, 1]));
        assert_eq!(s.dropped(s.axes("t", &[1]).unwrap()), Shape::from([2, 4]));
    }

    #[test]
    fn refuses_shapes_no_memory_could_hold() {
        assert!(Shape::new(&[usize::MAX, 2]).is_err());
        assert!(Shape::new(&[1; 9]).is_err());
        assert_eq!(Shape::new(&[0, usize::MAX / 32]).unwrap().numel(), 0);
    }
}
