//! Max pooling and its gradient, a channel of an image at a time. Windows are read where they are; what lies outside is cut off their
//! ranges, so the inner loops ask nothing.

use std::ops::Range;

use numcore::{
    Support,
    fused::{MaxPool, MaxPoolGrad},
};

use super::{Call, Float, grain};
use crate::{element::Lane, simd::leveled};

/// Windows that are taken side by side.
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

    /// Whether windows are squares of two by two that tile the image: how images are halved.
    #[inline(always)]
    fn halves(&self) -> bool {
        self.kernel == [2, 2] && self.stride == [2, 2] && self.padding == [0, 0]
    }

    /// Two lines of the image, of whole windows: those of row `p` of the windows.
    #[inline(always)]
    fn lines(&self, p: usize) -> [Range<usize>; 2] {
        [2 * p, 2 * p + 1].map(|i| i * self.size[1]..i * self.size[1] + 2 * self.pooled[1])
    }

    /// The places of the kernel along an axis that, for window `i`, lie in the image.
    #[inline(always)]
    fn inside(&self, axis: usize, i: usize) -> Range<usize> {
        let from = i * self.stride[axis];
        let before = self.padding[axis].saturating_sub(from);
        let end = (self.size[axis] + self.padding[axis]).saturating_sub(from);
        before..end.min(self.kernel[axis])
    }

    /// The windows along the last axis for which place `s` of the kernel lies in the image.
    #[inline(always)]
    fn windows(&self, s: usize) -> Range<usize> {
        let first = self.padding[1].saturating_sub(s).div_ceil(self.stride[1]);
        let end = (self.size[1] + self.padding[1]).saturating_sub(s).div_ceil(self.stride[1]);
        first..end.min(self.pooled[1]).max(first)
    }
}

pub(super) fn forward<T: Float>(call: &Call<'_>, op: &MaxPool) -> Support {
    let channel = Channel::new(op, call.ins[0].layout.dims(), call.outs[0].layout.dims());
    let (x, y) = (call.input::<T>(0), call.output::<T>(0));
    each(call, channel, |i, from, to| {
        // SAFETY: a channel of contiguous operands; that of the output is this task's alone.
        let (x, y) = unsafe { (x.slice((i * from) as isize, from), y.slice_mut((i * to) as isize, to)) };
        largest(call.engine().simd, x, y, channel);
    });
    Support::Done
}

/// From the input and the upstream gradient.
pub(super) fn backward<T: Float>(call: &Call<'_>, op: &MaxPoolGrad) -> Support {
    let channel = Channel::new(&op.0, call.ins[0].layout.dims(), call.ins[1].layout.dims());
    let (x, g, d) = (call.input::<T>(0), call.input::<T>(1), call.output::<T>(0));
    each(call, channel, |i, from, to| {
        let (at, pooled) = ((i * from) as isize, (i * to) as isize);
        // SAFETY: as in `forward`.
        let (x, g, d) = unsafe { (x.slice(at, from), g.slice(pooled, to), d.slice_mut(at, from)) };
        to_largest(call.engine().simd, x, g, d, channel);
    });
    Support::Done
}

/// Calls `body` with every channel's number, and the numbers in it and in its pooled form.
fn each(call: &Call<'_>, channel: Channel, body: impl Fn(usize, usize, usize) + Sync) {
    let dims = call.ins[0].layout.dims();
    let (from, to) = (channel.size.iter().product(), channel.pooled.iter().product());
    call.engine().ranges(dims[0] * dims[1], grain(from), |part| part.for_each(|i| body(i, from, to)));
}

leveled! {
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
                for s in 0..c.kernel[1] {
                    let windows = c.windows(s);
                    if windows.is_empty() {
                        continue;
                    }
                    let first = windows.start * c.stride[1] + s - c.padding[1];
                    let row = &mut row[windows];
                    // Two neighbours at a time is how images are halved, and what the compiler turns into shuffles.
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

/// [`to_largest`] where windows tile the image. It asks nothing of a number (which of four is the largest nobody predicts: a jump a
/// number took 40 cycles a window) and writes each once.
#[inline(always)]
fn to_largest_of_four<T: Float>(x: &[T], g: &[T], d: &mut [T], c: Channel) {
    // Beyond the last whole window.
    if c.size != c.pooled.map(|n| 2 * n) {
        d.fill(T::default());
    }
    let zero = T::default();
    for (p, row) in g.chunks_exact(c.pooled[1].max(1)).enumerate() {
        let [upper, lower] = c.lines(p);
        let [a, b] = [upper.clone(), lower.clone()].map(|at| x[at].chunks(2 * SOME));
        let (head, tail) = d.split_at_mut(lower.start);
        let (to_a, to_b) = (head[upper].chunks_mut(2 * SOME), tail[..2 * row.len()].chunks_mut(2 * SOME));
        for ((((g, a), b), to_a), to_b) in row.chunks(SOME).zip(a).zip(b).zip(to_a).zip(to_b) {
            // As many windows as a line of arrays has, so that the compiler takes them side by side.
            let mut of: [[T; SOME]; 4] = [[zero; SOME]; 4];
            for (i, (a, b)) in a.chunks_exact(2).zip(b.chunks_exact(2)).enumerate() {
                [of[0][i], of[1][i], of[2][i], of[3][i]] = [a[0], a[1], b[0], b[1]];
            }
            let mut upstream = [zero; SOME];
            upstream[..g.len()].copy_from_slice(g);
            let mut to = [[zero; SOME]; 4];
            for i in 0..SOME {
                let (best, second) = larger(of[0][i], of[1][i]);
                let (best, third) = larger(best, of[2][i]);
                let (_, fourth) = larger(best, of[3][i]);
                // A sum, as where windows overlap: of a zero's sign nothing is left.
                let g = zero + upstream[i];
                let unless = |is: bool, g: T| if is { zero } else { g };
                to[3][i] = unless(!fourth, g);
                let g = unless(fourth, g);
                to[2][i] = unless(!third, g);
                let g = unless(third, g);
                to[1][i] = unless(!second, g);
                to[0][i] = unless(second, g);
            }
            for (i, (a, b)) in to_a.chunks_exact_mut(2).zip(to_b.chunks_exact_mut(2)).enumerate() {
                (a[0], a[1], b[0], b[1]) = (to[0][i], to[1][i], to[2][i], to[3][i]);
            }
        }
    }
}

/// The larger of two, the first of equals, a NaN before all; and whether it is the second.
#[inline(always)]
fn larger<T: Float>(best: T, x: T) -> (T, bool) {
    let is = (x > best) | (Lane::is_nan(x) & !Lane::is_nan(best));
    (if is { x } else { best }, is)
}
