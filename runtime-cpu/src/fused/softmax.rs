//! Softmax and its logarithm, rows at a time.

use numcore::Support;

use super::{
    Float, FusedCall, StoredFloat, grain, half_rows, one,
    row_reduce::{self, Prefetch},
};
use crate::{math::Math, simd::multiversion};

pub(super) fn forward<S: StoredFloat>(call: &FusedCall<'_>, log: bool) -> Support {
    let (rows, width) = call.rows(0);
    let (x, y, simd) = (call.input::<S>(0), call.output::<S>(0), call.engine().simd);
    call.engine().ranges(rows, grain(width), |part| {
        half_rows::blocks::<S, 2>(part, width, |rows, [x_buffer, y_buffer]| {
            let (from, len) = ((rows.start * width) as isize, rows.len() * width);
            // SAFETY: these rows of contiguous operands; the output rows are this task's alone.
            let (x, y) = unsafe { (x.slice(from, len), y.slice_mut(from, len)) };
            let x = half_rows::read(simd, x, x_buffer);
            half_rows::write(simd, y, y_buffer, |y| softmax_rows(simd, x, y, width, log));
        });
    });
    Support::Done
}

pub(super) fn backward<S: StoredFloat>(call: &FusedCall<'_>, log: bool) -> Support {
    let (rows, width) = call.rows(0);
    let (y, g, d, simd) = (call.input::<S>(0), call.input::<S>(1), call.output::<S>(0), call.engine().simd);
    call.engine().ranges(rows, grain(width), |part| {
        half_rows::blocks::<S, 3>(part, width, |rows, [y_buffer, g_buffer, d_buffer]| {
            let (from, len) = ((rows.start * width) as isize, rows.len() * width);
            // SAFETY: these rows of contiguous operands; the output rows are this task's alone.
            let (y, g, d) = unsafe { (y.slice(from, len), g.slice(from, len), d.slice_mut(from, len)) };
            let (y, g) = (half_rows::read(simd, y, y_buffer), half_rows::read(simd, g, g_buffer));
            half_rows::write(simd, d, d_buffer, |d| grad_rows(simd, y, g, d, width, log));
        });
    });
    Support::Done
}

multiversion! {
    fn softmax_rows<T: (Float)>(x: &[T], y: &mut [T], width: usize, log: bool) {
        for (x, y) in x.chunks_exact(width.max(1)).zip(y.chunks_exact_mut(width.max(1))) {
            let largest = row_reduce::max(x);
            let (top, prefetches) = (finite(largest), Prefetch::behind(x));
            // A difference is positive only where the largest is infinite.
            let sum = if top == largest {
                row_reduce::map_sum(x, y, prefetches, |v| Math::exp_negative(v - top))
            } else {
                row_reduce::map_sum(x, y, prefetches, |v| Math::exp(v - top))
            };
            if log {
                let lse = Math::log(sum);
                for (o, &v) in y.iter_mut().zip(x) {
                    *o = v - top - lse;
                }
            } else if sum != T::default() {
                // A division per element took a third of the time; multiplying by the reciprocal costs one more ULP of
                // error.
                let inverse = one::<T>() / sum;
                for o in y.iter_mut() {
                    *o = *o * inverse;
                }
            }
        }
    }

    fn grad_rows<T: (Float)>(y: &[T], g: &[T], d: &mut [T], width: usize, log: bool) {
        let rows = y.chunks_exact(width.max(1)).zip(g.chunks_exact(width.max(1)));
        for ((y, g), d) in rows.zip(d.chunks_exact_mut(width.max(1))) {
            if log {
                let sum = row_reduce::sum1(g, [Prefetch::row(d)], |g| g);
                row_reduce::map2(y, g, d, |y, g| g - Math::exp(y) * sum);
            } else {
                let dot = row_reduce::sum2(y, g, [Prefetch::row(d)], |y, g| y * g);
                row_reduce::map2(y, g, d, |y, g| y * (g - dot));
            }
        }
    }
}

/// The value subtracted before `exp`: the largest, or 0 where it is infinite (a row of `−∞` gives zeros).
#[inline(always)]
pub(super) fn finite<T: Float>(top: T) -> T {
    let infinite = T::from_f64(f64::INFINITY);
    if top == infinite || top == -infinite { T::default() } else { top }
}
