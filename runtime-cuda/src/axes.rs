//! The loops of a launch: axes in a chosen order, merged where every operand allows it, and the number of adjacent
//! elements that a thread moves at once. Pure arithmetic, without a device.

use numcore::{LoopAxis, MAX_RANK, coalesce};
use smallvec::SmallVec;

/// The strides of one operand along each axis, in elements.
pub(crate) type Steps = [isize; MAX_RANK];

/// Bytes of the widest load.
const WIDEST: usize = 16;
/// The most adjacent elements that a thread moves at once.
const LANES: usize = 8;

/// The first offset that takes 64 bits; below, an offset plus one group of lanes still fits 31.
pub(crate) const WIDE: usize = i32::MAX as usize - LANES;

/// The strides with 0 along `axis`.
pub(crate) fn without(mut steps: Steps, axis: usize) -> Steps {
    steps[axis] = 0;
    steps
}

/// Nested loops, outermost first, over operands that are walked together.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LoopAxes {
    pub sizes: SmallVec<[usize; MAX_RANK]>,
    /// Strides: one row per operand.
    pub steps: SmallVec<[Steps; 8]>,
}

/// The access pattern of an operand along the innermost axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum InnerStride {
    /// Adjacent elements are contiguous and read together.
    Unit,
    /// One element for all lanes of a thread.
    Splat,
    /// Elements are moved one by one.
    Any,
}

/// The address of an operand's first element, and its element size; `None` for operands without memory (positions).
#[derive(Clone, Copy, Debug)]
pub(crate) struct MemoryRef {
    pub address: u64,
    pub size: usize,
}

impl LoopAxes {
    /// Merges the axes `order` of `dims`. Axes of size 1 are dropped, and adjacent axes are merged where every operand
    /// is contiguous across them.
    pub(crate) fn of(dims: &[usize], operands: &[Steps], order: impl IntoIterator<Item = usize>) -> LoopAxes {
        Self::merged(dims, operands, order, usize::MAX)
    }

    /// Axes like [`of`](Self::of), where merged sizes fit the `int` of hand-written kernels if the sizes of `dims` do.
    pub(crate) fn narrow(dims: &[usize], operands: &[Steps], order: impl IntoIterator<Item = usize>) -> LoopAxes {
        Self::merged(dims, operands, order, i32::MAX as usize)
    }

    fn merged(dims: &[usize], operands: &[Steps], order: impl IntoIterator<Item = usize>, most: usize) -> LoopAxes {
        let strides = |axis: usize| operands.iter().map(|steps| steps[axis]).collect::<SmallVec<[isize; 8]>>();
        let merged = coalesce(order.into_iter().map(|a| LoopAxis { size: dims[a], strides: strides(a) }), most);
        let steps = SmallVec::from_elem([0; MAX_RANK], operands.len());
        let mut axes = LoopAxes { sizes: merged.iter().map(|axis| axis.size).collect(), steps };
        for (at, axis) in merged.iter().enumerate() {
            axes.steps.iter_mut().zip(&axis.strides).for_each(|(steps, &stride)| steps[at] = stride);
        }
        if axes.sizes.is_empty() {
            axes.sizes.push(1);
        }
        axes
    }

    pub(crate) fn rank(&self) -> usize {
        self.sizes.len()
    }

    pub(crate) fn count(&self) -> usize {
        self.sizes.iter().product()
    }

    /// Tells whether offsets or positions need more than 31 bits.
    pub(crate) fn is_wide(&self) -> bool {
        self.count() >= WIDE || self.reaches().any(|r| r >= WIDE)
    }

    /// The greatest distance of each operand's elements from its first one, in elements.
    pub(crate) fn reaches(&self) -> impl Iterator<Item = usize> + '_ {
        let reach = |steps: &Steps| {
            let each = self.sizes.iter().zip(steps).map(|(&d, s)| d.saturating_sub(1).saturating_mul(s.unsigned_abs()));
            each.fold(0, usize::saturating_add)
        };
        self.steps.iter().map(reach)
    }

    /// The number of adjacent elements of the innermost axis that a thread may move at once: a power of two, and 1
    /// where an operand does not allow more. With a single axis the last group may be shorter.
    pub(crate) fn lanes(&self, places: &[Option<MemoryRef>]) -> usize {
        let last = self.rank() - 1;
        let inner = |s: &Steps| s[last];
        if self.steps.iter().any(|s| !matches!(inner(s), 0 | 1)) {
            return 1;
        }
        let moving = || places.iter().zip(&self.steps).filter_map(|(p, s)| p.filter(|_| inner(s) == 1).map(|p| (p, s)));
        let widest = moving().map(|(p, _)| p.size).max().unwrap_or(WIDEST);
        let mut lanes = (WIDEST / widest).clamp(1, LANES);
        let fits = |lanes: usize| {
            let aligned = |(p, s): (MemoryRef, &Steps)| {
                let outer = s[..last].iter().zip(&self.sizes);
                p.address.is_multiple_of((lanes * p.size) as u64)
                    && outer.filter(|(_, d)| **d > 1).all(|(s, _)| s.unsigned_abs().is_multiple_of(lanes))
            };
            (last == 0 || self.sizes[last].is_multiple_of(lanes)) && moving().all(aligned)
        };
        while lanes > 1 && !fits(lanes) {
            lanes /= 2;
        }
        lanes
    }

    /// The access pattern of an operand when `lanes` adjacent elements are moved at once.
    pub(crate) fn inner(&self, operand: usize, lanes: usize) -> InnerStride {
        match self.steps[operand][self.rank() - 1] {
            _ if lanes == 1 => InnerStride::Any,
            0 => InnerStride::Splat,
            _ => InnerStride::Unit,
        }
    }

    /// The sizes, with the innermost axis in groups of `lanes`.
    pub(crate) fn units(&self, lanes: usize) -> SmallVec<[usize; MAX_RANK]> {
        let mut sizes = self.sizes.clone();
        let last = sizes.len() - 1;
        sizes[last] = sizes[last].div_ceil(lanes);
        sizes
    }

    /// An operand's strides, with the innermost axis in groups of `lanes`.
    pub(crate) fn unit_steps(&self, operand: usize, lanes: usize) -> SmallVec<[isize; MAX_RANK]> {
        let mut steps: SmallVec<[isize; MAX_RANK]> = self.steps[operand][..self.rank()].into();
        steps[self.rank() - 1] *= lanes as isize;
        steps
    }
}

/// Axes in descending order of the strides of `reference`, so that adjacent threads access adjacent memory.
pub(crate) fn by_steps(rank: usize, reference: &Steps) -> SmallVec<[usize; MAX_RANK]> {
    let mut order: SmallVec<[usize; MAX_RANK]> = (0..rank).collect();
    order.sort_by_key(|&a| std::cmp::Reverse(reference[a].unsigned_abs()));
    order
}

/// Constants for a division by `d` in 32 bits (Granlund & Montgomery 1994). They are `(magic, shift)`, so that
/// `(high(n · magic) + n) >> shift` is `n / d` for every `n < 2³¹`.
pub(crate) fn magic(d: u32) -> (u32, u32) {
    let shift = u64::from(d).next_power_of_two().trailing_zeros();
    let magic = ((1u64 << 32) * ((1u64 << shift) - u64::from(d))) / u64::from(d) + 1;
    (magic as u32, shift)
}

#[cfg(test)]
mod tests {
    use numcore::{Layout, Shape};

    use super::*;

    fn steps(layout: &Layout) -> Steps {
        let mut steps = [0; MAX_RANK];
        steps.iter_mut().zip(layout.strides()).for_each(|(to, s)| *to = *s);
        steps
    }

    fn dense(dims: &[usize]) -> Layout {
        Layout::contiguous(Shape::new(dims).unwrap())
    }

    #[test]
    fn dense_operands_are_one_axis() {
        let l = dense(&[2, 1, 3, 4]);
        let axes = LoopAxes::of(&[2, 1, 3, 4], &[steps(&l), steps(&l)], 0..4);
        assert_eq!((&axes.sizes[..], axes.steps[0][0]), (&[24usize][..], 1));
    }

    #[test]
    fn a_broadcast_row_keeps_two_axes_and_moves_four_at_once() {
        let x = dense(&[5, 8]);
        let b = dense(&[8]).broadcast_to(Shape::from([5, 8])).unwrap();
        let axes = LoopAxes::of(&[5, 8], &[steps(&x), steps(&b)], 0..2);
        assert_eq!(&axes.sizes[..], [5, 8]);
        let at = |address| Some(MemoryRef { address, size: 4 });
        assert_eq!(axes.lanes(&[at(256), at(512)]), 4);
        assert_eq!(axes.lanes(&[at(256), at(516)]), 1);
        assert_eq!(axes.lanes(&[at(256), at(520)]), 2);
        assert_eq!((&axes.units(4)[..], &axes.unit_steps(0, 4)[..]), (&[5usize, 2][..], &[8isize, 4][..]));
    }

    #[test]
    fn rows_that_do_not_divide_move_alone_but_one_run_has_a_tail() {
        let x = dense(&[5, 7]).slice(1, 0, 6, 1).unwrap();
        let axes = LoopAxes::of(&[5, 6], &[steps(&x)], 0..2);
        let place = Some(MemoryRef { address: 0, size: 2 });
        assert_eq!(axes.lanes(&[place]), 1);
        let run = LoopAxes::of(&[7], &[steps(&dense(&[7]))], 0..1);
        assert_eq!((run.lanes(&[place]), run.units(8)[0]), (8, 1));
    }

    #[test]
    fn a_transposed_output_is_walked_in_its_own_order() {
        let out = dense(&[3, 4]).permute(&[1, 0]).unwrap();
        assert_eq!(&by_steps(2, &steps(&out))[..], [1, 0]);
    }

    #[test]
    fn large_views_are_wide() {
        assert!(LoopAxes::of(&[1 << 31], &[steps(&dense(&[1 << 31]))], 0..1).is_wide());
        assert!(LoopAxes::of(&[2, 2], &[[1 << 31, 1, 0, 0, 0, 0, 0, 0]], 0..2).is_wide());
        assert!(!LoopAxes::of(&[1 << 20], &[steps(&dense(&[1 << 20]))], 0..1).is_wide());
    }

    #[test]
    fn division_by_magic_numbers_is_exact() {
        let divide = |n: u32, d: u32| {
            let (magic, shift) = magic(d);
            let high = ((u64::from(n) * u64::from(magic)) >> 32) as u32;
            (high + n) >> shift
        };
        for d in (1..200).chain([255, 256, 257, 65_535, 65_536, 1 << 30, i32::MAX as u32 - 1, i32::MAX as u32]) {
            let near = (0..5).flat_map(|k| [k * d.min(1 << 20), (k * d.min(1 << 20)).saturating_sub(1)]);
            for n in near.chain([0, 1, d - 1, d, i32::MAX as u32, i32::MAX as u32 - 1]).filter(|n| *n < 1 << 31) {
                assert_eq!(divide(n, d), n / d, "{n} / {d}");
            }
        }
    }
}
