//! Translation of errors of primitives into the terms of the composed operation that called them.

use super::{Error, ErrorKind};
use crate::Shape;

impl Error {
    /// Renames the operation in this error to `name`, if the error names an operation.
    pub(crate) fn of_op(mut self, name: &'static str) -> Self {
        match &mut self.0.kind {
            ErrorKind::Shape { op, .. }
            | ErrorKind::DType { op, .. }
            | ErrorKind::Argument { op, .. }
            | ErrorKind::Range { op, .. }
            | ErrorKind::Config { op, .. }
            | ErrorKind::Usage { op, .. }
            | ErrorKind::Unsupported { op, .. }
            | ErrorKind::Index { op, .. } => *op = name,
            _ => {}
        }
        self
    }

    /// Renames the operation in this error to `name`. Removes the axis of size 1 that the operation inserted before the
    /// third axis of its operands `[B, C, L]`.
    pub(crate) fn of_line(mut self, name: &'static str) -> Self {
        if let ErrorKind::Shape { shapes, .. } = &mut self.0.kind {
            shapes.iter_mut().filter(|s| s.rank() == 4 && s[2] == 1).for_each(|s| *s = s.remove(2));
        }
        self.of_op(name)
    }

    /// Rewrites an [`ErrorKind::Index`] in terms of `op`, whose indices have the shape `of`: each index was repeated,
    /// in row-major order.
    pub(crate) fn of_index(mut self, op: &'static str, of: Shape) -> Self {
        if let ErrorKind::Index { op: to, index: Some(_), position, of: inner, .. } = &mut self.0.kind {
            let place = position.iter().zip(inner.iter()).fold(0, |n, (i, size)| n * size + i);
            (*to, *position) = (op, unravel(place / (inner.numel() / of.numel().max(1)).max(1), of));
            *inner = of;
        }
        self
    }

    /// Rewrites an [`ErrorKind::Index`] in terms of `op`, whose index `[N]` was laid along `axis`.
    pub(crate) fn of_axis(mut self, op: &'static str, axis: usize) -> Self {
        if let ErrorKind::Index { op: to, index: Some(_), position, of, .. } = &mut self.0.kind {
            *to = op;
            (*position, *of) = ([position[axis]].into(), [of[axis]].into());
        }
        self
    }

    /// Rewrites an [`ErrorKind::Index`] in terms of `op`, whose index `[n]` was processed in parts, this one from
    /// `start` on.
    pub(crate) fn of_part(mut self, op: &'static str, start: usize, n: usize) -> Self {
        if let ErrorKind::Index { op: to, index: Some(_), position, of, .. } = &mut self.0.kind {
            *to = op;
            (*position, *of) = ([start + position[0]].into(), [n].into());
        }
        self
    }

    /// Rewrites an [`ErrorKind::Index`] of coordinate `k` in terms of `op`. The index `of: [.., K]` of `op` has these
    /// coordinates in row-major order; negative ones count from the end.
    pub(crate) fn of_coordinate(mut self, op: &'static str, of: Shape, k: usize) -> Self {
        if let ErrorKind::Index { op: to, index: Some(index), position, of: inner, size } = &mut self.0.kind {
            *to = op;
            if *index < 0 {
                *index = index.saturating_sub(size.unwrap_or(0) as i64);
            }
            let depth = of.last().copied().unwrap_or(1);
            *position = unravel(position.iter().product::<usize>() * depth + k, of);
            *inner = of;
        }
        self
    }

    /// Tells whether this error reports an index out of range.
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
