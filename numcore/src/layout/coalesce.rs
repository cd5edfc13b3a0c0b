//! The axes of loops over several operands, merged if all operands allow it. The loops of every runtime start here.

use smallvec::SmallVec;

use crate::MAX_RANK;

/// One axis of loops over several operands: its size, and the stride of each operand in elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoopAxis<S> {
    /// The number of positions along the axis.
    pub size: usize,
    /// The stride of every operand.
    pub strides: S,
}

/// Merges adjacent axes, outermost first, that are contiguous with each other in every operand, and drops axes of size
/// 1. Axes are merged only up to `most` positions.
#[inline]
pub fn coalesce<S: AsRef<[isize]>>(
    axes: impl IntoIterator<Item = LoopAxis<S>>,
    most: usize,
) -> SmallVec<[LoopAxis<S>; MAX_RANK]> {
    let mut merged: SmallVec<[LoopAxis<S>; MAX_RANK]> = SmallVec::new();
    for axis in axes.into_iter().filter(|axis| axis.size != 1) {
        match merged.last_mut() {
            Some(outer) if continues(outer, &axis) && outer.size.saturating_mul(axis.size) <= most => {
                *outer = LoopAxis { size: outer.size * axis.size, strides: axis.strides };
            }
            _ => merged.push(axis),
        }
    }
    merged
}

/// Tells whether a step along `outer` is as long as the whole of `inner`, for every operand.
#[inline]
fn continues<S: AsRef<[isize]>>(outer: &LoopAxis<S>, inner: &LoopAxis<S>) -> bool {
    let mut strides = outer.strides.as_ref().iter().zip(inner.strides.as_ref());
    strides.all(|(outer, stride)| *outer == stride * inner.size as isize)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn merged<const K: usize>(axes: &[(usize, [isize; K])], most: usize) -> Vec<(usize, [isize; K])> {
        let axes = axes.iter().map(|&(size, strides)| LoopAxis { size, strides });
        coalesce(axes, most).into_iter().map(|axis| (axis.size, axis.strides)).collect()
    }

    #[test]
    fn axes_are_merged_where_all_operands_allow_it() {
        // A dense operand and a row that repeats: the last two axes are one.
        let axes = [(2, [12, 0]), (3, [4, 4]), (4, [1, 1])];
        assert_eq!(merged(&axes, usize::MAX), [(2, [12, 0]), (12, [1, 1])]);
        let dense = axes.map(|(size, [stride, _])| (size, [stride]));
        assert_eq!(merged(&dense, usize::MAX), [(24, [1])]);
        // Axes that run backwards, and axes that repeat.
        assert_eq!(merged(&[(2, [-3]), (3, [-1])], usize::MAX), [(6, [-1])]);
        assert_eq!(merged(&[(2, [0]), (3, [0])], usize::MAX), [(6, [0])]);
    }

    #[test]
    fn axes_of_one_position_are_dropped_and_empty_ones_kept() {
        assert_eq!(merged(&[(1, [99]), (3, [5]), (1, [7])], usize::MAX), [(3, [5])]);
        assert_eq!(merged(&[(1, [1])], usize::MAX), []);
        assert_eq!(merged(&[(2, [1]), (0, [1])], usize::MAX), [(2, [1]), (0, [1])]);
    }

    #[test]
    fn an_axis_grows_no_longer_than_it_may() {
        let axes = [(2, [12]), (3, [4]), (4, [1])];
        assert_eq!(merged(&axes, 12), [(6, [4]), (4, [1])]);
        assert_eq!(merged(&axes, 3), axes);
        let huge = [(2, [isize::MAX]), (usize::MAX, [isize::MAX])];
        assert_eq!(merged(&huge, usize::MAX - 1).len(), 2);
    }
}
