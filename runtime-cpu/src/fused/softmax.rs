//! Softmax and its logarithm, rows at a time.

use numcore::Support;

use super::{
    Call, Float, Number, grain,
    lanes::{self, Ahead},
    lines, one,
};
use crate::{math::Math, simd::multiversion};

pub(super) fn forward<S: Number>(call: &Call<'_>, log: bool) -> Support {
    let (rows, width) = call.rows(0);
    let (x, y, simd) = (call.input::<S>(0), call.output::<S>(0), call.engine().simd);
    call.engine().ranges(rows, grain(width), |part| {
        lines::blocks::<S, 2>(part, width, |rows, [wide_x, wide_y]| {
            let (from, len) = ((rows.start * width) as isize, rows.len() * width);
            // SAFETY: these rows of contiguous operands; the output rows are this task's alone.
            let (x, y) = unsafe { (x.slice(from, len), y.slice_mut(from, len)) };
            let x = lines::read(simd, x, wide_x);
            lines::write(simd, y, wide_y, |y| softmax_rows(simd, x, y, width, log));
        });
    });
    Support::Done
}

pub(super) fn backward<S: Number>(call: &Call<'_>, log: bool) -> Support {
    let (rows, width) = call.rows(0);
    let (y, g, d, simd) = (call.input::<S>(0), call.input::<S>(1), call.output::<S>(0), call.engine().simd);
    call.engine().ranges(rows, grain(width), |part| {
        lines::blocks::<S, 3>(part, width, |rows, [wide_y, wide_g, wide_d]| {
            let (from, len) = ((rows.start * width) as isize, rows.len() * width);
            // SAFETY: these rows of contiguous operands; the output rows are this task's alone.
            let (y, g, d) = unsafe { (y.slice(from, len), g.slice(from, len), d.slice_mut(from, len)) };
            let (y, g) = (lines::read(simd, y, wide_y), lines::read(simd, g, wide_g));
            lines::write(simd, d, wide_d, |d| grad_rows(simd, y, g, d, width, log));
        });
    });
    Support::Done
}

multiversion! {
    fn softmax_rows<T: (Float)>(x: &[T], y: &mut [T], width: usize, log: bool) {
        for (x, y) in x.chunks_exact(width.max(1)).zip(y.chunks_exact_mut(width.max(1))) {
            let largest = lanes::max(x);
            let (top, ahead) = (finite(largest), Ahead::of(x));
            // A difference is positive only where the largest is infinite.
            let sum = if top == largest {
                lanes::map_sum(x, y, ahead, |v| Math::exp_negative(v - top))
            } else {
                lanes::map_sum(x, y, ahead, |v| Math::exp(v - top))
            };
            if log {
                let lse = Math::log(sum);
                for (o, &v) in y.iter_mut().zip(x) {
                    *o = v - top - lse;
                }
            } else if sum != T::default() {
                // A division per element took a third of the time; the product is off by an ULP more.
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
                let sum = lanes::sum1(g, [Ahead::at(d)], |g| g);
                lanes::map2(y, g, d, |y, g| g - Math::exp(y) * sum);
            } else {
                let dot = lanes::sum2(y, g, [Ahead::at(d)], |y, g| y * g);
                lanes::map2(y, g, d, |y, g| y * (g - dot));
            }
        }
    }
}

/// What is subtracted before `exp`: the largest, or 0 where that is infinite (a row of `−∞` gives zeros).
#[inline(always)]
pub(super) fn finite<T: Float>(top: T) -> T {
    let infinite = T::from_f64(f64::INFINITY);
    if top == infinite || top == -infinite { T::default() } else { top }
}
