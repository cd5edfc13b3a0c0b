//! Max pooling and its gradient, a channel of an image at a time. Windows are read in place. Their ranges are clipped
//! to the image, so the inner loops have no conditions.

use std::ops::Range;

use numcore::{
    Support,
    fused::{MaxPool, MaxPoolGrad},
};

use super::{Float, FusedCall, grain};
use crate::{element::Lane, simd::multiversion};

/// Elements of a row that are computed together.
const SOME: usize = 16;

/// Sizes of a channel, and of its pooled form.
#[derive(Clone, Copy)]
struct Channel {
    size: [usize; 2],
    pooled: [usize; 2],
    kernel: [usize; 2],
    stride: [usize; 2],
    padding: [usize; 2],
}

impl Channel {
    fn new(pool: &MaxPool, x: &[usize], y: &[usize]) -> Channel {
        let MaxPool { kernel, stride, padding } = *pool;
        Channel { size: [x[2], x[3]], pooled: [y[2], y[3]], kernel, stride, padding }
    }

    /// Tells whether windows are squares of two by two that tile the image, as when images are halved.
    #[inline(always)]
    fn halves(&self) -> bool {
        self.kernel == [2, 2] && self.stride == [2, 2] && self.padding == [0, 0]
    }

    /// The two image rows of row `p` of the windows, as far as windows are whole.
    #[inline(always)]
    fn lines(&self, p: usize) -> [Range<usize>; 2] {
        [2 * p, 2 * p + 1].map(|i| i * self.size[1]..i * self.size[1] + 2 * self.pooled[1])
    }

    /// The kernel taps along an axis that are inside the image, for window `i`.
    #[inline(always)]
    fn inside(&self, axis: usize, i: usize) -> Range<usize> {
        let from = i * self.stride[axis];
        let before = self.padding[axis].saturating_sub(from);
        let end = (self.size[axis] + self.padding[axis]).saturating_sub(from);
        before..end.min(self.kernel[axis])
    }

    /// The kernel taps along the last axis that are in the image for some window.
    #[inline(always)]
    fn anywhere_inside(&self) -> Range<usize> {
        let last = self.pooled[1].saturating_sub(1);
        let end = (self.size[1] + self.padding[1]).min(self.kernel[1]);
        self.inside(1, last).start.min(end)..end
    }

    /// The windows along the last axis for which kernel tap `s` is inside the image.
    #[inline(always)]
    fn windows(&self, s: usize) -> Range<usize> {
        let first = self.padding[1].saturating_sub(s).div_ceil(self.stride[1]);
        let end = (self.size[1] + self.padding[1]).saturating_sub(s).div_ceil(self.stride[1]);
        first..end.min(self.pooled[1]).max(first)
    }
}

pub(super) fn forward<T: Float>(call: &FusedCall<'_>, op: &MaxPool) -> Support {
    let channel = Channel::new(op, call.ins[0].layout.dims(), call.outs[0].layout.dims());
    let (x, y) = (call.input::<T>(0), call.output::<T>(0));
    each(call, channel, |i, from, to| {
        // SAFETY: a channel of contiguous operands; that of the output is this task's alone.
        let (x, y) = unsafe { (x.slice((i * from) as isize, from), y.slice_mut((i * to) as isize, to)) };
        largest(call.engine().simd, x, y, channel);
    });
    Support::Done
}

/// Computes the gradient from the input and the upstream gradient.
pub(super) fn backward<T: Float>(call: &FusedCall<'_>, op: &MaxPoolGrad) -> Support {
    let channel = Channel::new(&op.0, call.ins[0].layout.dims(), call.ins[1].layout.dims());
    let (x, g, d) = (call.input::<T>(0), call.input::<T>(1), call.output::<T>(0));
    each(call, channel, |i, from, to| {
        let (at, pooled) = ((i * from) as isize, (i * to) as isize);
        // SAFETY: a channel of contiguous operands; that of the output is this task's alone.
        let (x, g, d) = unsafe { (x.slice(at, from), g.slice(pooled, to), d.slice_mut(at, from)) };
        to_largest(call.engine().simd, x, g, d, channel);
    });
    Support::Done
}

/// Calls `body` with every channel's index, and its sizes before and after pooling.
fn each(call: &FusedCall<'_>, channel: Channel, body: impl Fn(usize, usize, usize) + Sync) {
    let dims = call.ins[0].layout.dims();
    let (from, to) = (channel.size.iter().product(), channel.pooled.iter().product());
    call.engine().ranges(dims[0] * dims[1], grain(from), |part| part.for_each(|i| body(i, from, to)));
}

multiversion! {
    fn largest<T: (Float)>(x: &[T], y: &mut [T], c: Channel) {
        for (p, row) in y.chunks_exact_mut(c.pooled[1].max(1)).enumerate() {
            if c.halves() {
                let [upper, lower] = c.lines(p).map(|at| x[at].chunks_exact(2));
                for ((y, a), b) in row.iter_mut().zip(upper).zip(lower) {
                    *y = Lane::max(Lane::max(Lane::max(a[0], a[1]), b[0]), b[1]);
                }
                continue;
            }
            row.fill(<T as Lane>::LOWEST);
            for r in c.inside(0, p) {
                let line = &x[(p * c.stride[0] + r - c.padding[0]) * c.size[1]..][..c.size[1]];
                for s in c.anywhere_inside() {
                    let windows = c.windows(s);
                    if windows.is_empty() {
                        continue;
                    }
                    let first = windows.start * c.stride[1] + s - c.padding[1];
                    let row = &mut row[windows];
                    // Pairs of adjacent elements are the common case, which the compiler turns into shuffles.
                    if c.stride[1] == 2 {
                        for (y, x) in row.iter_mut().zip(line[first..].chunks(2)) {
                            *y = Lane::max(*y, x[0]);
                        }
                    } else {
                        for (y, x) in row.iter_mut().zip(line[first..].iter().step_by(c.stride[1])) {
                            *y = Lane::max(*y, *x);
                        }
                    }
                }
            }
        }
    }

    fn to_largest<T: (Float)>(x: &[T], g: &[T], d: &mut [T], c: Channel) {
        if c.halves() {
            return to_largest_of_four(x, g, d, c);
        }
        d.fill(T::default());
        for (p, row) in g.chunks_exact(c.pooled[1].max(1)).enumerate() {
            let rows = c.inside(0, p);
            for (q, &g) in row.iter().enumerate() {
                let columns = c.inside(1, q);
                let top = (p * c.stride[0] + rows.start - c.padding[0]) * c.size[1];
                let mut best = top + q * c.stride[1] + columns.start - c.padding[1];
                for r in rows.clone() {
                    let line = (p * c.stride[0] + r - c.padding[0]) * c.size[1];
                    for s in columns.clone() {
                        let at = line + q * c.stride[1] + s - c.padding[1];
                        if x[at] > x[best] || Lane::is_nan(x[at]) && !Lane::is_nan(x[best]) {
                            best = at;
                        }
                    }
                }
                d[best] = d[best] + g;
            }
        }
    }
}

/// [`to_largest`] where windows tile the image. It has no branches (which of four is the largest is unpredictable: a
/// branch per element took 40 cycles a window) and writes each element once.
#[inline(always)]
fn to_largest_of_four<T: Float>(x: &[T], g: &[T], d: &mut [T], c: Channel) {
    // Beyond the last whole window.
    if c.size != c.pooled.map(|n| 2 * n) {
        d.fill(T::default());
    }
    for (p, row) in g.chunks_exact(c.pooled[1].max(1)).enumerate() {
        let [upper, lower] = c.lines(p);
        let (head, tail) = d.split_at_mut(lower.start);
        let (to_a, to_b) = (&mut head[upper.clone()], &mut tail[..lower.len()]);
        let (a, b) = (&x[upper], &x[lower]);
        if a.len() < SOME {
            of_few(a, b, row, to_a, to_b);
            continue;
        }
        for at in (0..a.len()).step_by(SOME) {
            // The last ones end with the row.
            let at = at.min(a.len() - SOME);
            let part = at..at + SOME;
            let numbers = |x: &[T]| -> [T; SOME] { std::array::from_fn(|i| x[i]) };
            let upstream = &row[at / 2..][..SOME / 2];
            let to =
                of_some(numbers(&a[part.clone()]), numbers(&b[part.clone()]), std::array::from_fn(|i| upstream[i / 2]));
            to_a[part.clone()].copy_from_slice(&to[0]);
            to_b[part].copy_from_slice(&to[1]);
        }
    }
}

/// The gradient of the windows of a short row, from its two image rows and the upstream gradients.
#[inline(always)]
fn of_few<T: Float>(a: &[T], b: &[T], g: &[T], to_a: &mut [T], to_b: &mut [T]) {
    // Pairs, not slices: a call of `memcpy` for two elements took longer than the rest.
    let mut lines = [[T::default(); SOME]; 3];
    for (i, ((a, b), g)) in a.chunks_exact(2).zip(b.chunks_exact(2)).zip(g).enumerate() {
        for (line, pair) in lines.iter_mut().zip([[a[0], a[1]], [b[0], b[1]], [*g; 2]]) {
            (line[2 * i], line[2 * i + 1]) = (pair[0], pair[1]);
        }
    }
    let to = of_some(lines[0], lines[1], lines[2]);
    for (i, (a, b)) in to_a.chunks_exact_mut(2).zip(to_b.chunks_exact_mut(2)).enumerate() {
        (a[0], a[1], b[0], b[1]) = (to[0][2 * i], to[0][2 * i + 1], to[1][2 * i], to[1][2 * i + 1]);
    }
}

/// The gradient of some adjacent windows, from their two image rows and the upstream gradient of each element's window.
/// Lanes hold elements in memory order: separating the windows' columns and interleaving them took as long as the rest.
#[inline(always)]
fn of_some<T: Float>(a: [T; SOME], b: [T; SOME], g: [T; SOME]) -> [[T; SOME]; 2] {
    let zero = T::default();
    let beside = |x: [T; SOME]| -> [T; SOME] { std::array::from_fn(|i| x[i ^ 1]) };
    let (beside_a, beside_b) = (beside(a), beside(b));
    let mut to = [[zero; SOME]; 2];
    for i in 0..SOME {
        let largest = Lane::max(Lane::max(a[i], beside_a[i]), Lane::max(b[i], beside_b[i]));
        let is = |x: T| (x == largest) | Lane::is_nan(x);
        let [here, beside, below, across] = [is(a[i]), is(beside_a[i]), is(b[i]), is(beside_b[i])];
        // A sum, as for overlapping windows, so that the sign of a zero is lost alike.
        let g = zero + g[i];
        // The first of a window's largest.
        let first = i % 2 == 0;
        to[0][i] = if here & (first | !beside) { g } else { zero };
        to[1][i] = if below & !(here | beside) & (first | !across) { g } else { zero };
    }
    to
}
