//! Adjacent parts of one memory, such as the queries, keys and values of one projection. They are recognized from
//! layouts alone. Results for the parts can then be adjacent too, and form one tensor without a copy.

use smallvec::SmallVec;

use super::Layout;

/// Axes as pairs of stride and size, innermost first.
type StrideAxes = SmallVec<[(isize, usize); 8]>;

impl Layout {
    /// The layouts of these parts in fresh memory that holds nothing else. `None` if the parts are not consecutive
    /// along an axis of a dense tensor.
    pub(crate) fn adjacent(pieces: &[Layout]) -> Option<SmallVec<[Layout; 4]>> {
        let split: SmallVec<[(usize, StrideAxes); 4]> = pieces.iter().map(Layout::runs).collect();
        let (first, (_, outer)) = (pieces.first()?, split.first()?);
        let mut next = first.offset;
        for (piece, (run, axes)) in pieces.iter().zip(&split) {
            if piece.offset != next || axes != outer || piece.numel() == 0 {
                return None;
            }
            next += run;
        }
        let dense = outer
            .iter()
            .try_fold(next - first.offset, |step, &(stride, size)| (stride == step as isize).then_some(step * size));
        dense?;
        Some(pieces.iter().map(|piece| Layout { offset: piece.offset - first.offset, ..*piece }).collect())
    }

    /// The layout that covers these parts of one memory, if they are consecutive along `axis`.
    pub(crate) fn joined(pieces: &[Layout], axis: usize) -> Option<Layout> {
        let (first, mut len) = (pieces.first()?, 0);
        for piece in pieces {
            let next = first.offset + len * usize::try_from(first.strides[axis]).ok()?;
            if piece.offset != next || piece.strides() != first.strides() {
                return None;
            }
            len += piece.shape[axis];
        }
        Some(Layout { shape: first.shape.with(axis, len), ..*first })
    }

    /// The length of the contiguous runs of this layout, and the axes outside them.
    fn runs(&self) -> (usize, StrideAxes) {
        let each = self.strides().iter().copied().zip(self.dims().iter().copied());
        let mut axes: StrideAxes = each.filter(|&(_, size)| size != 1).collect();
        axes.sort_unstable();
        let (mut run, mut inner) = (1, 0);
        while inner < axes.len() && axes[inner].0 == run as isize {
            run *= axes[inner].1;
            inner += 1;
        }
        (run, axes.drain(inner..).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Shape;

    /// The layout of heads in a part of `[2, 5, total]`, as `[2, heads, 5, 4]`.
    fn heads(total: usize, from: usize, count: usize) -> Layout {
        let part = Layout::contiguous(Shape::from([2, 5, total])).slice(2, from, 4 * count, 1).unwrap();
        part.reshape(Shape::from([2, 5, count, 4])).unwrap().permute(&[0, 2, 1, 3]).unwrap()
    }

    #[test]
    fn heads_of_one_projection_lie_beside_each_other() {
        // The number of queries equals the number of keys, with groups of queries that share keys.
        for counts in [[3, 3, 3], [6, 2, 2]] {
            let mut from = 0;
            let total = 4 * counts.iter().sum::<usize>();
            let all = counts.map(|count| {
                from += 4 * count;
                heads(total, from - 4 * count, count)
            });
            let moved = all.map(|l| l.at(7));
            let own = Layout::adjacent(&moved).unwrap();
            assert_eq!(own[..], all, "the same from the start of memory of their own");
            let flat = |l: &Layout, n| l.permute(&[0, 2, 1, 3]).unwrap().reshape(Shape::from([2, 5, 4 * n])).unwrap();
            let flat = [0, 1, 2].map(|i| flat(&own[i], counts[i]));
            assert_eq!(Layout::joined(&flat, 2), Some(Layout::contiguous(Shape::from([2, 5, total]))));
        }
    }

    #[test]
    fn others_do_not() {
        let [a, b, c] = [0, 12, 24].map(|from| heads(36, from, 3));
        assert_eq!(Layout::adjacent(&[a, b]), None, "a part of the memory is nobody's");
        assert_eq!(Layout::adjacent(&[a, c, b]), None, "another order");
        assert_eq!(Layout::adjacent(&[a, b, b]), None, "one of them twice");
        let repeated = a.slice(3, 0, 1, 1).unwrap().broadcast_to(*a.shape()).unwrap();
        assert_eq!(Layout::adjacent(&[repeated, b, c]), None);
        let flat = |l: Layout| l.permute(&[0, 2, 1, 3]).unwrap().reshape(Shape::from([2, 5, 12])).unwrap();
        assert_eq!(Layout::joined(&[flat(a), flat(c)], 2), None, "a gap");
        assert_eq!(Layout::joined(&[flat(a), flat(b)], 1), None, "another axis");
    }
}
