//! Repetition, rotation, differences and coordinate grids.

use super::{positions, room};
use crate::{
    Error, Result, Shape, Within,
    ops::{Apply, IndexOps, PointwiseOps, ReduceOps, ViewOps},
};

/// Repetition, rotation and differences.
pub trait RepeatOps: Apply {
    /// Repeats `self` `counts[i]` times along axis `i`; more counts than axes put new axes in front.
    #[doc(alias = "tile")]
    #[track_caller]
    fn repeat(&self, counts: &[usize]) -> Result<Self> {
        let shape = self.spec().shape;
        let Some(lead) = counts.len().checked_sub(shape.rank()) else {
            return Err(Error::shape("repeat", &[shape], format!("{} counts for more axes", counts.len())));
        };
        let mut x = self.reshape([&vec![1; lead][..], &shape].concat())?;
        for (axis, &count) in counts.iter().enumerate().filter(|(_, c)| **c != 1) {
            let now = x.spec().shape;
            let (outer, inner) = (now[..axis].iter().product(), now[axis..].iter().product());
            let wide = x.reshape([outer, 1, inner])?.broadcast_to([outer, count, inner])?;
            x = wide.reshape(now.with(axis, now[axis].saturating_mul(count)))?;
        }
        Ok(x)
    }
    /// Repeats every element along `axis` `count` times in a row: `[a, b]` becomes `[a, a, b, b]`.
    #[track_caller]
    fn repeat_interleave(&self, count: usize, axis: isize) -> Result<Self> {
        let shape = self.spec().shape;
        let at = shape.axis("repeat_interleave", axis)?;
        let (outer, inner) = (shape[..=at].iter().product(), shape[at + 1..].iter().product());
        let wide = self.reshape([outer, 1, inner])?.broadcast_to([outer, count, inner])?;
        wide.reshape(shape.with(at, shape[at].saturating_mul(count)))
    }
    /// Repeats element `i` along `axis` `counts[i]` times in a row.
    #[track_caller]
    fn repeat_interleave_each(&self, counts: &[usize], axis: isize) -> Result<Self> {
        let shape = self.spec().shape;
        let at = shape.axis("repeat_interleave", axis)?;
        if counts.len() != shape[at] {
            let why = format!("{} counts for axis {axis} of size {}", counts.len(), shape[at]);
            return Err(Error::shape("repeat_interleave", &[shape], why));
        }
        let total = counts.iter().fold(0, |n: usize, &c| n.saturating_add(c));
        shape.with(at, total).checked("repeat_interleave")?;
        let mut index: Vec<i64> = room("repeat_interleave", total)?;
        index.extend(counts.iter().enumerate().flat_map(|(i, &c)| std::iter::repeat_n(i as i64, c)));
        self.index_select(axis, &positions(self, [index.len()], &index)?)
    }
    /// Rotation by `times · 90°` in the plane of two axes, from the first towards the second.
    #[track_caller]
    fn rot90(&self, times: isize, axes: [isize; 2]) -> Result<Self> {
        let shape = self.spec().shape;
        let [a, b] = [shape.axis("rot90", axes[0])?, shape.axis("rot90", axes[1])?];
        if a == b {
            return Err(Error::shape("rot90", &[shape], format!("{axes:?} name one axis, a plane has two")));
        }
        match times.rem_euclid(4) {
            0 => Ok(self.clone()),
            1 => self.flip(&[b as isize])?.transpose(a as isize, b as isize),
            2 => self.flip(&[a as isize, b as isize]),
            _ => self.flip(&[a as isize])?.transpose(a as isize, b as isize),
        }
    }
    /// Differences of adjacent elements along `axis`, `y[i] = x[i + 1] − x[i]`, taken `times` times; each time shortens
    /// the axis by one.
    #[track_caller]
    fn diff(&self, times: usize, axis: isize) -> Result<Self> {
        let axis = self.spec().shape.axis("diff", axis)?;
        // No element is left after as many differences as there are elements.
        (0..times.min(self.spec().shape[axis])).try_fold(self.clone(), |x, _| {
            let n = x.spec().shape[axis].saturating_sub(1);
            let first = usize::from(x.spec().shape[axis] > 0);
            x.narrow(axis as isize, first, n)?.sub(&x.narrow(axis as isize, 0, n)?)
        })
    }
    /// The integral along `axis` of samples at spacing `step`, by the trapezoid rule; that axis is removed. Floating
    /// dtypes only.
    #[doc(alias = "trapz")]
    #[track_caller]
    fn trapezoid(&self, step: f64, axis: isize) -> Result<Self> {
        crate::ops::rule::float("trapezoid", self.spec())?;
        let shape = self.spec().shape;
        let at = shape.axis("trapezoid", axis)?;
        let n = shape[at].saturating_sub(1);
        let first = usize::from(shape[at] > 0);
        let pairs = self.narrow(axis, first, n)?.add(&self.narrow(axis, 0, n)?)?;
        pairs.sum(&[at as isize])?.mul(step / 2.0)
    }
    /// Rolls elements by `shifts[i]` along `axes[i]`, wrapping around.
    #[doc(alias = "roll")]
    #[track_caller]
    fn roll_axes(&self, shifts: &[isize], axes: &[isize]) -> Result<Self> {
        if shifts.len() != axes.len() {
            return Err(Error::lengths("roll", &[shifts.len(), axes.len()], "each axis needs one shift"));
        }
        if axes.is_empty() {
            return Err(self.spec().shape.names_no_axis("roll")).at_caller();
        }
        shifts.iter().zip(axes).try_fold(self.clone(), |x, (&shift, &axis)| x.roll(axis, shift))
    }
}

impl<T: Apply> RepeatOps for T {}

/// Coordinate grids of the vectors `xs[k]: [Nk]`: result `k` is `[N1 .. NK]` and varies along axis `k` alone. PyTorch's
/// `meshgrid` with `indexing="ij"`; exchange the first two axes for `"xy"`. The results are views, without a copy.
#[track_caller]
pub fn meshgrid<T: Apply>(xs: &[&T]) -> Result<Vec<T>> {
    let shapes: Vec<Shape> = xs.iter().map(|x| x.spec().shape).collect();
    if shapes.iter().any(|s| s.rank() != 1) {
        return Err(Error::shape("meshgrid", &shapes, "every row must have one axis"));
    }
    let full: Vec<usize> = shapes.iter().map(|s| s[0]).collect();
    let row = |(k, x): (usize, &&T)| x.reshape(super::along(full.len(), k, full[k]))?.broadcast_to(&full);
    xs.iter().enumerate().map(row).collect()
}
