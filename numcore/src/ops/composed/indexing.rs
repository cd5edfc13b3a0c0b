//! Parts of a tensor by position, as `x[0, 1:3, :, -1]` in Python.

use std::ops::{Bound, Range, RangeFrom, RangeFull, RangeInclusive, RangeTo, RangeToInclusive};

use crate::{
    Error, Result, Shape, Within,
    ops::{Apply, IndexOps, ViewOps},
};

/// One entry of an index: the part of an axis that is kept, or an operation between axes.
#[derive(Clone, Copy, Debug)]
pub enum AxisIndex<'a, T> {
    /// One position; the axis disappears. Negative positions count from the end.
    At(isize),
    /// A range of positions.
    Range(AxisRange),
    /// All axes that the other entries leave unindexed.
    Ellipsis,
    /// A new axis of size 1.
    NewAxis,
    /// The positions in a one-dimensional `i64` tensor, in its order; the only entry that copies.
    Take(&'a T),
}

/// A range of positions of one axis: `start..end` with a step. Negative bounds count from the end of the axis.
///
/// ```
/// use numcore::ops::AxisRange;
/// let every_second = AxisRange::from(1..-1).step(2);
/// assert_eq!(format!("{every_second}"), "1..-1 by 2");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AxisRange {
    start: Bound<isize>,
    end: Bound<isize>,
    step: usize,
}

impl AxisRange {
    /// Takes every `step`-th position only. A step of 0 is an error when the range is used.
    pub fn step(self, step: usize) -> Self {
        AxisRange { step, ..self }
    }

    /// The first position and the number of positions on an axis of `size` elements.
    fn resolve(self, size: usize) -> Option<(usize, usize)> {
        let bound = |bound: Bound<isize>, unbounded: isize, included: isize, excluded: isize| match bound {
            Bound::Unbounded => unbounded,
            Bound::Included(at) => from_end(at, size).saturating_add(included),
            Bound::Excluded(at) => from_end(at, size).saturating_add(excluded),
        };
        let start = bound(self.start, 0, 0, 1);
        let end = bound(self.end, size as isize, 1, 0);
        let fits = 0 <= start && start <= end && end <= size as isize && self.step > 0;
        fits.then(|| (start as usize, ((end - start) as usize).div_ceil(self.step)))
    }
}

impl std::fmt::Display for AxisRange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Bound::Included(start) | Bound::Excluded(start) = self.start {
            write!(f, "{start}")?;
        }
        match self.end {
            Bound::Included(end) => write!(f, "..={end}")?,
            Bound::Excluded(end) => write!(f, "..{end}")?,
            Bound::Unbounded => write!(f, "..")?,
        }
        if self.step != 1 { write!(f, " by {}", self.step) } else { Ok(()) }
    }
}

fn from_end(at: isize, size: usize) -> isize {
    if at < 0 { at + size as isize } else { at }
}

/// Marks a new axis of size 1 in an index: `x.i((.., NewAxis))`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewAxis;

/// A placeholder for as many whole axes as the other entries leave unindexed: `x.i((Ellipsis, 0))` is `x[..., 0]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ellipsis;

/// An index: one entry or a tuple of up to six. An entry is an integer, a range, [`AxisRange`], [`NewAxis`],
/// [`Ellipsis`] or a tensor of positions.
pub trait Indices<'a, T> {
    /// The entries, in order.
    fn entries(self) -> Vec<AxisIndex<'a, T>>;
}

/// Parts of tensors and variables by position.
pub trait IndexingOps: Apply {
    /// The part of `self` that `index` selects, as Python's `x[..]`: entries apply to the axes in order, and axes
    /// without an entry stay whole. Integers and ranges make views, and gradients flow back through them. Negative
    /// integers count from the end.
    ///
    /// ```
    /// use numcore::{NullRuntime, Tensor, DType, ops::{Ellipsis, IndexingOps, NewAxis}};
    /// # fn main() -> numcore::Result<()> {
    /// let x = Tensor::zeros(&NullRuntime::new(), [4, 5, 6], DType::F32)?;
    /// assert_eq!(x.i(0)?.dims(), [5, 6]);
    /// assert_eq!(x.i((.., 1..3))?.dims(), [4, 2, 6]);
    /// assert_eq!(x.i((-1, .., NewAxis, ..-2))?.dims(), [5, 1, 4]);
    /// assert_eq!(x.i((Ellipsis, 0))?.dims(), [4, 5]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// A position or a bound outside its axis (PyTorch cuts such ranges short), a step of 0, more entries than axes, or
    /// a second [`Ellipsis`]. So is a second tensor of positions (which PyTorch would pair with the first), or one that
    /// is not one-dimensional `i64`. Positions in a tensor do not count from the end.
    #[doc(alias = "index")]
    #[doc(alias = "__getitem__")]
    #[track_caller]
    fn i<'a>(&self, index: impl Indices<'a, Self>) -> Result<Self>
    where
        Self: 'a,
    {
        let entries = index.entries();
        let shape = self.spec().shape;
        let whole = left_over(&entries, &shape).at_caller()?;
        // The axis of `self` that the next entry applies to, and its position in the part made so far.
        let (mut part, mut from, mut to) = (self.clone(), 0, 0);
        for entry in entries {
            let axis = to as isize;
            part = match entry {
                AxisIndex::At(at) => part.select(axis, position_of(&shape, from, at).at_caller()?)?,
                AxisIndex::Range(range) => match range_of(&shape, from, range).at_caller()? {
                    (0, len) if len == shape[from] => part,
                    (start, len) => part.slice(axis, start, len, range.step)?,
                },
                AxisIndex::Ellipsis => part,
                AxisIndex::NewAxis => part.unsqueeze(axis)?,
                AxisIndex::Take(positions) => part.index_select(axis, positions)?,
            };
            let (read, kept) = match entry {
                AxisIndex::At(_) => (1, 0),
                AxisIndex::Range(_) | AxisIndex::Take(_) => (1, 1),
                AxisIndex::Ellipsis => (whole, whole),
                AxisIndex::NewAxis => (0, 1),
            };
            (from, to) = (from + read, to + kept);
        }
        Ok(part)
    }
}

impl<T: Apply> IndexingOps for T {}

/// The number of axes that the entries leave unindexed.
fn left_over<T>(entries: &[AxisIndex<'_, T>], shape: &Shape) -> Result<usize> {
    let named = entries.iter().filter(|e| !matches!(e, AxisIndex::Ellipsis | AxisIndex::NewAxis)).count();
    if entries.iter().filter(|e| matches!(e, AxisIndex::Ellipsis)).count() > 1 {
        return Err(Error::shape("i", &[*shape], "an index has one `Ellipsis` at most"));
    }
    if entries.iter().filter(|e| matches!(e, AxisIndex::Take(_))).count() > 1 {
        let why = "an index has one tensor of positions at most; where positions of two axes go in pairs, use `gather` or `gather_nd`";
        return Err(Error::shape("i", &[*shape], why));
    }
    shape
        .rank()
        .checked_sub(named)
        .ok_or_else(|| Error::shape("i", &[*shape], format!("an index of {named} entries for {} axes", shape.rank())))
}

fn position_of(shape: &Shape, axis: usize, at: isize) -> Result<usize> {
    let size = shape[axis];
    usize::try_from(from_end(at, size))
        .ok()
        .filter(|&position| position < size)
        .ok_or_else(|| Error::shape("i", &[*shape], format!("axis {axis} of size {size} has no position {at}")))
}

/// The first position of a range, and its number of positions.
fn range_of(shape: &Shape, axis: usize, range: AxisRange) -> Result<(usize, usize)> {
    let size = shape[axis];
    let why = || format!("axis {axis} of size {size} has no range {range}");
    range.resolve(size).ok_or_else(|| Error::shape("i", &[*shape], why()))
}

impl From<RangeFull> for AxisRange {
    fn from(_: RangeFull) -> Self {
        AxisRange { start: Bound::Unbounded, end: Bound::Unbounded, step: 1 }
    }
}

impl<T> From<RangeFull> for AxisIndex<'_, T> {
    fn from(range: RangeFull) -> Self {
        AxisIndex::Range(range.into())
    }
}

impl<T> From<AxisRange> for AxisIndex<'_, T> {
    fn from(range: AxisRange) -> Self {
        AxisIndex::Range(range)
    }
}

impl<T> From<NewAxis> for AxisIndex<'_, T> {
    fn from(_: NewAxis) -> Self {
        AxisIndex::NewAxis
    }
}

impl<T> From<Ellipsis> for AxisIndex<'_, T> {
    fn from(_: Ellipsis) -> Self {
        AxisIndex::Ellipsis
    }
}

impl<'a, T: Apply> From<&'a T> for AxisIndex<'a, T> {
    fn from(positions: &'a T) -> Self {
        AxisIndex::Take(positions)
    }
}

/// The position as `isize`; a value that does not fit becomes `isize::MAX`, which is out of range on every axis.
fn position<I: TryInto<isize>>(at: I) -> isize {
    at.try_into().unwrap_or(isize::MAX)
}

macro_rules! integers {
    ($($int:ty),*) => {$(
        impl<T> From<$int> for AxisIndex<'_, T> {
            fn from(at: $int) -> Self {
                AxisIndex::At(position(at))
            }
        }
        integers!(@ $int, Range, r => Bound::Included(position(r.start)), Bound::Excluded(position(r.end)));
        integers!(@ $int, RangeFrom, r => Bound::Included(position(r.start)), Bound::Unbounded);
        integers!(@ $int, RangeTo, r => Bound::Unbounded, Bound::Excluded(position(r.end)));
        integers!(@ $int, RangeToInclusive, r => Bound::Unbounded, Bound::Included(position(r.end)));
        integers!(@ $int, RangeInclusive, r => Bound::Included(position(*r.start())), Bound::Included(position(*r.end())));
        one!({T} $int, Range<$int>, RangeFrom<$int>, RangeTo<$int>, RangeToInclusive<$int>, RangeInclusive<$int>);
    )*};
    (@ $int:ty, $range:ident, $r:ident => $start:expr, $end:expr) => {
        impl From<$range<$int>> for AxisRange {
            fn from($r: $range<$int>) -> Self {
                AxisRange { start: $start, end: $end, step: 1 }
            }
        }
        impl<T> From<$range<$int>> for AxisIndex<'_, T> {
            fn from(range: $range<$int>) -> Self {
                AxisIndex::Range(range.into())
            }
        }
    };
}

/// Indices of one entry.
macro_rules! one {
    ({$t:ident} $($entry:ty),*) => {$(
        impl<'a, $t> Indices<'a, $t> for $entry {
            fn entries(self) -> Vec<AxisIndex<'a, $t>> {
                vec![self.into()]
            }
        }
    )*};
}

integers!(i32, i64, isize, usize);
one!({T} RangeFull, AxisRange, NewAxis, Ellipsis);

impl<'a, T: Apply> Indices<'a, T> for &'a T {
    fn entries(self) -> Vec<AxisIndex<'a, T>> {
        vec![self.into()]
    }
}

macro_rules! tuples {
    ($(($($entry:ident),+))*) => {$(
        impl<'a, T: 'a, $($entry: Into<AxisIndex<'a, T>>),+> Indices<'a, T> for ($($entry,)+) {
            #[expect(non_snake_case, reason = "each value has the name of its type")]
            fn entries(self) -> Vec<AxisIndex<'a, T>> {
                let ($($entry,)+) = self;
                vec![$($entry.into()),+]
            }
        }
    )*};
}

tuples! { (A) (A, B) (A, B, C) (A, B, C, D) (A, B, C, D, E) (A, B, C, D, E, F) }
