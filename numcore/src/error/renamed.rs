//! Errors of the operations that a composed operation is made of, in the terms of the composed operation.

use super::{Error, ErrorKind};
use crate::Shape;

impl Error {
    /// Renames the operation in this error to `name`, where the error names an operation and its operands.
    pub(crate) fn of_op(mut self, name: &'static str) -> Self {
        match &mut self.0.kind {
            ErrorKind::Shape { op, .. }
            | ErrorKind::DType { op, .. }
            | ErrorKind::Argument { op, .. }
            | ErrorKind::Index { op, .. } => *op = name,
            _ => {}
        }
        self
    }

    /// Renames the operation in this error to `name`, and removes the axis of size 1 that it put before the third axis
    /// of its operands `[B, C, L]`.
    pub(crate) fn of_line(mut self, name: &'static str) -> Self {
        if let ErrorKind::Shape { shapes, .. } = &mut self.0.kind {
            shapes.iter_mut().filter(|s| s.rank() == 4 && s[2] == 1).for_each(|s| *s = s.remove(2));
        }
        self.of_op(name)
    }

    /// Rewrites an [`ErrorKind::Index`] in terms of `op`, whose indices have the shape `of`: each of them was repeated,
    /// in row-major order.
    pub(crate) fn of_index(mut self, op: &'static str, of: Shape) -> Self {
        if let ErrorKind::Index { op: to, position, of: inner, .. } = &mut self.0.kind {
            let place = position.iter().zip(inner.iter()).fold(0, |n, (i, size)| n * size + i);
            (*to, *position) = (op, unravel(place / (inner.numel() / of.numel().max(1)).max(1), of));
            *inner = of;
        }
        self
    }

    /// An [`ErrorKind::Index`] in terms of `op`, whose index `[N]` was laid along `axis`.
    pub(crate) fn of_axis(mut self, op: &'static str, axis: usize) -> Self {
        if let ErrorKind::Index { op: to, position, of, .. } = &mut self.0.kind {
            *to = op;
            (*position, *of) = ([position[axis]].into(), [of[axis]].into());
        }
        self
    }

    /// An [`ErrorKind::Index`] in terms of `op`, whose index `[n]` was given from `start` on.
    pub(crate) fn of_part(mut self, op: &'static str, start: usize, n: usize) -> Self {
        if let ErrorKind::Index { op: to, position, of, .. } = &mut self.0.kind {
            *to = op;
            (*position, *of) = ([start + position[0]].into(), [n].into());
        }
        self
    }

    /// An [`ErrorKind::Index`] of coordinate `k`, counted from the end where it is negative, in terms of `op`, whose
    /// index `of: [.., K]` has these coordinates in row-major order.
    pub(crate) fn of_coordinate(mut self, op: &'static str, of: Shape, k: usize) -> Self {
        if let ErrorKind::Index { op: to, index, position, of: inner, size } = &mut self.0.kind {
            *to = op;
            if *index < 0 {
                *index = index.saturating_sub(*size as i64);
            }
            let depth = of.last().copied().unwrap_or(1);
            *position = unravel(position.iter().product::<usize>() * depth + k, of);
            *inner = of;
        }
        self
    }

    /// Whether this error reports an index out of range.
    pub(crate) fn is_index(&self) -> bool {
        matches!(self.kind(), ErrorKind::Index { .. })
    }
}

/// The multi-index in `of` of the element at row-major position `place`.
fn unravel(mut place: usize, of: Shape) -> Shape {
    let mut position = of;
    for axis in (0..of.rank()).rev() {
        position = position.with(axis, place % of[axis].max(1));
        place /= of[axis].max(1);
    }
    position
}
