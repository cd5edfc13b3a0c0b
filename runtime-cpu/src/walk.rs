//! Walks over positions of several operands at once. Adjacent axes are merged where every operand's strides allow it.

use numcore::{Layout, LoopAxis, MAX_RANK, coalesce};
use smallvec::SmallVec;

/// An axis of a walk over `K` operands.
pub(crate) type WalkAxis<const K: usize> = LoopAxis<[isize; K]>;

/// The axes of a walk, outermost first.
#[derive(Clone, Debug)]
pub(crate) struct Walk<const K: usize>(SmallVec<[WalkAxis<K>; MAX_RANK]>);

impl<const K: usize> Walk<K> {
    /// A walk over the axes of operands of one shape, except the axes that `skip` selects.
    pub(crate) fn new(layouts: [&Layout; K], skip: impl Fn(usize) -> bool) -> Self {
        let dims = layouts[0].dims();
        let axis = |i: usize| WalkAxis { size: dims[i], strides: layouts.map(|l| l.strides()[i]) };
        Self::of((0..dims.len()).filter(|&i| !skip(i)).map(axis))
    }

    /// A walk over these axes, which are merged where possible.
    pub(crate) fn of(axes: impl IntoIterator<Item = WalkAxis<K>>) -> Self {
        Walk(coalesce(axes, usize::MAX))
    }

    /// The merged axes, outermost first.
    pub(crate) fn axes(&self) -> impl Iterator<Item = WalkAxis<K>> {
        self.0.iter().copied()
    }

    /// The number of positions.
    pub(crate) fn len(&self) -> usize {
        self.0.iter().map(|a| a.size).product()
    }

    /// Splits off the innermost axis if `want` accepts it, otherwise an axis of size 1.
    pub(crate) fn split_inner(mut self, want: impl Fn(&WalkAxis<K>) -> bool) -> (Self, WalkAxis<K>) {
        match self.0.last() {
            Some(last) if want(last) => {
                let inner = *last;
                self.0.pop();
                (self, inner)
            }
            _ => (self, WalkAxis { size: 1, strides: [1; K] }),
        }
    }

    /// Takes off the axis along which operand `k` has the smallest stride, so that adjacent elements are visited
    /// together.
    pub(crate) fn split_nearest(mut self, k: usize) -> (Self, WalkAxis<K>) {
        let nearest = (0..self.0.len()).min_by_key(|&i| (self.0[i].strides[k].unsigned_abs(), self.0.len() - i));
        let inner = nearest.map_or(WalkAxis { size: 1, strides: [1; K] }, |i| self.0.remove(i));
        (self, inner)
    }

    /// The offsets of position `n`, in row-major order.
    pub(crate) fn at(&self, mut n: usize) -> [isize; K] {
        let mut offsets = [0; K];
        for axis in self.0.iter().rev() {
            let i = (n % axis.size) as isize;
            n /= axis.size;
            (0..K).for_each(|k| offsets[k] += i * axis.strides[k]);
        }
        offsets
    }

    /// Calls `f` with the index and the offsets of positions `from..to`, in order.
    #[inline(always)]
    pub(crate) fn each(&self, from: usize, to: usize, mut f: impl FnMut(usize, [isize; K])) {
        if from >= to {
            return;
        }
        let Some((inner, _)) = self.0.split_last() else { return f(0, [0; K]) };
        let mut n = from;
        while n < to {
            let mut offsets = self.at(n);
            let end = to.min(n - n % inner.size + inner.size);
            while n < end {
                f(n, offsets);
                (0..K).for_each(|k| offsets[k] += inner.strides[k]);
                n += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use numcore::Shape;

    fn offsets(w: &Walk<2>, from: usize, to: usize) -> Vec<[isize; 2]> {
        let mut all = vec![];
        w.each(from, to, |n, o| {
            assert_eq!(o, w.at(n));
            all.push(o)
        });
        all
    }

    #[test]
    fn visits_every_position_in_order() {
        let dense = Layout::contiguous(Shape::from([2, 3, 4]));
        let other = Layout::contiguous(Shape::from([3, 2, 4])).permute(&[1, 0, 2]).unwrap();
        let w = Walk::new([&dense, &other], |_| false);
        let all = offsets(&w, 0, w.len());
        assert_eq!(all.len(), 24);
        assert!(all.iter().enumerate().all(|(i, o)| o[0] == i as isize));
        assert_eq!(all[4], [4, 8]);
        assert_eq!(offsets(&w, 5, 17), all[5..17]);
    }

    #[test]
    fn merges_contiguous_axes() {
        let dense = Layout::contiguous(Shape::from([2, 3, 4]));
        let row = Layout::contiguous(Shape::from([4])).broadcast_to(Shape::from([2, 3, 4])).unwrap();
        assert_eq!(Walk::new([&dense, &dense], |_| false).0.len(), 1);
        assert_eq!(Walk::new([&dense, &row], |_| false).0.len(), 2);
        assert_eq!(Walk::new([&dense, &row], |i| i == 2).0.len(), 1);
        let scalar = Layout::contiguous(Shape::SCALAR);
        assert_eq!(offsets(&Walk::new([&scalar, &scalar], |_| false), 0, 1), [[0, 0]]);
        let empty = Layout::contiguous(Shape::from([2, 0]));
        assert_eq!(Walk::new([&empty, &empty], |_| false).len(), 0);
    }
}
