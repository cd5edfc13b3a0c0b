//! Padding with constants and with the tensor's own elements.

use crate::{
    Error, Result, Shape,
    ops::{Apply, JoinOps, ViewOps, cat},
};

/// The values of padding around a tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PadMode {
    /// Every padded element is this value.
    Constant(f64),
    /// Padding with the elements mirrored at the first and the last, which are not repeated: `[a, b, c]` becomes
    /// `c b | a b c | b a`.
    Reflect,
    /// Padding with the first and the last element repeated: `a a | a b c | c c`.
    Replicate,
    /// Padding with the elements of the other end: `b c | a b c | a b`.
    Circular,
}

impl PadMode {
    /// Tells whether the padding is zeros.
    pub fn is_zero(self) -> bool {
        self == PadMode::Constant(0.0)
    }

    /// The largest padding on either side of an axis of `size`.
    fn most(self, size: usize) -> usize {
        match self {
            PadMode::Constant(_) => usize::MAX,
            PadMode::Reflect => size.saturating_sub(1),
            PadMode::Replicate if size == 0 => 0,
            PadMode::Replicate => usize::MAX,
            PadMode::Circular => size,
        }
    }
}

/// Padding with PyTorch's modes.
pub trait PadOps: Apply {
    /// Pads `self`, of any dtype, with `pads[i] = (before, after)` elements around axis `i`, one pair for each axis. A
    /// negative count removes elements from that end; all removals come before anything is added.
    ///
    /// # Errors
    /// Fails for fewer or more pairs than axes, and for removing more elements than there are. Fails for
    /// [`PadMode::Reflect`] by the axis's size or more, [`PadMode::Circular`] by more than that size, and
    /// [`PadMode::Replicate`] of an empty axis.
    #[doc(alias = "pad")]
    #[doc(alias = "ReflectionPad2d")]
    #[doc(alias = "ReplicationPad2d")]
    #[doc(alias = "CircularPad2d")]
    #[track_caller]
    fn pad_with(&self, pads: &[(isize, isize)], mode: PadMode) -> Result<Self> {
        let shape = self.spec().shape;
        if pads.len() != shape.rank() {
            let why = format!("{} pairs of padding for {} axes", pads.len(), shape.rank());
            return Err(Error::shape("pad", &[shape], why));
        }
        let mut x = self.clone();
        for (axis, &(before, after)) in pads.iter().enumerate().filter(|(_, p)| p.0 < 0 || p.1 < 0) {
            x = cropped(&x, axis, before.min(0).unsigned_abs(), after.min(0).unsigned_abs())?;
        }
        let grown: Vec<(usize, usize)> = pads.iter().map(|p| (p.0.max(0) as usize, p.1.max(0) as usize)).collect();
        if let PadMode::Constant(value) = mode {
            return if grown.iter().all(|p| *p == (0, 0)) { Ok(x) } else { x.pad(&grown, value) };
        }
        for (axis, &(before, after)) in grown.iter().enumerate().filter(|(_, p)| **p != (0, 0)) {
            x = surrounded(&x, axis, before, after, mode)?;
        }
        Ok(x)
    }
}

impl<T: Apply> PadOps for T {}

#[track_caller]
fn cropped<T: Apply>(x: &T, axis: usize, before: usize, after: usize) -> Result<T> {
    let shape = x.spec().shape;
    match shape[axis].checked_sub(before).and_then(|n| n.checked_sub(after)) {
        Some(len) => x.narrow(axis as isize, before, len),
        None => {
            let why = format!("{before} and {after} elements cannot be removed from axis {axis}");
            Err(Error::shape("pad", &[shape], why))
        }
    }
}

/// `x` padded with its own elements.
#[track_caller]
fn surrounded<T: Apply>(x: &T, axis: usize, before: usize, after: usize, mode: PadMode) -> Result<T> {
    let shape = x.spec().shape;
    let (n, most) = (shape[axis], mode.most(shape[axis]));
    if before.max(after) > most {
        let why = format!("{mode:?} padding of {before} and {after} around axis {axis}; at most {most} elements fit");
        return Err(Error::shape("pad", &[shape], why));
    }
    let at = axis as isize;
    let repeated = |i: usize, len: usize| {
        let wide: Shape = shape.with(axis, len);
        x.narrow(at, i, 1)?.broadcast_to(wide)
    };
    let piece = |len: usize, side: PadSide| match (mode, side) {
        (PadMode::Reflect, PadSide::Before) => x.narrow(at, 1, len)?.flip(&[at]),
        (PadMode::Reflect, PadSide::After) => x.narrow(at, n - 1 - len, len)?.flip(&[at]),
        (PadMode::Circular, PadSide::Before) => x.narrow(at, n - len, len),
        (PadMode::Circular, PadSide::After) => x.narrow(at, 0, len),
        (_, PadSide::Before) => repeated(0, len),
        (_, PadSide::After) => repeated(n - 1, len),
    };
    let first = (before > 0).then(|| piece(before, PadSide::Before)).transpose()?;
    let last = (after > 0).then(|| piece(after, PadSide::After)).transpose()?;
    cat(&first.iter().chain([x]).chain(&last).collect::<Vec<_>>(), at)
}

#[derive(Clone, Copy)]
enum PadSide {
    Before,
    After,
}
