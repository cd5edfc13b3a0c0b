//! Sums, means and power means of windows, one axis at a time.

use std::sync::LazyLock;

use super::{
    taps::{Taps, divided_along},
    widened,
    windows::{PoolOptions, WindowAxis, regions},
};
use crate::{
    Error, Result,
    ops::{Apply, JoinOps, PointwiseOps, ReduceOps, ViewOps, rule::float},
    pointwise::Program,
};

/// The sum of each window along the last `N` axes.
fn sums<const N: usize, T: Apply>(x: &T, axes: &[WindowAxis; N]) -> Result<T> {
    let rank = x.spec().shape.rank();
    let mut x = x.clone();
    for (i, a) in axes.iter().enumerate() {
        let axis = rank - N + i;
        if (a.before, a.after) != (0, 0) {
            let mut pads = vec![(0, 0); rank];
            pads[axis] = (a.before, a.after);
            x = x.pad(&pads, 0.0)?;
        }
        x = x.unfold(axis as isize, a.kernel, a.step, a.dilation)?.sum(&[-1])?;
    }
    Ok(x)
}

pub(crate) fn mean<const N: usize, T: Apply>(op: &'static str, x: &T, options: &PoolOptions<N>) -> Result<T> {
    float(op, x.spec())?;
    let axes = options.axes(op, x.spec().shape)?;
    let rank = x.spec().shape.rank();
    widened(x, |x| {
        let sums = sums(x, &axes)?;
        if let Some(divisor) = options.divisor {
            return sums.div(divisor);
        }
        // The number of elements of a window is the product of its sizes along the axes.
        axes.iter().enumerate().try_fold(sums, |sums, (i, a)| {
            let which = usize::from(options.count_include_pad);
            divided_along(&sums, rank - N + i, &a.counts().map(|c| c[which] as f64).collect::<Vec<_>>())
        })
    })
}

pub(super) fn power<const N: usize, T: Apply>(x: &T, p: f64, options: &PoolOptions<N>) -> Result<T> {
    // The derivative of a power below 1 is infinite at 0, and infinity times the sign there is NaN.
    static POWER: LazyLock<Program> = LazyLock::new(|| {
        Program::new("lp_pool", |[x], [p]| {
            let d = x.abs();
            let zero = d.eq(0.0);
            [zero.select(d, zero.select(1.0, d).pow(p))]
        })
    });
    static ROOT: LazyLock<Program> = LazyLock::new(|| {
        Program::new("lp_pool", |[s], [q]| {
            let zero = s.eq(0.0);
            [zero.select(s, zero.select(1.0, s).pow(q))]
        })
    });
    float("lp_pool", x.spec())?;
    if !(p > 0.0 && p.is_finite()) {
        return Err(Error::range("lp_pool", "power", p, "positive and finite"));
    }
    let axes = options.axes("lp_pool", x.spec().shape)?;
    widened(x, |x| {
        let powers = x.apply_program(&POWER, &[], &[p.into()])?;
        sums(&powers, &axes)?.apply_program(&ROOT, &[], &[(1.0 / p).into()])
    })
}

pub(crate) fn adaptive<const N: usize, T: Apply>(op: &'static str, x: &T, size: [usize; N]) -> Result<T> {
    float(op, x.spec())?;
    let regions = regions(op, x.spec().shape, size)?;
    let rank = x.spec().shape.rank();
    widened(x, |x| {
        regions.iter().enumerate().try_fold(x.clone(), |x, (i, of_axis)| {
            let len = x.spec().shape[rank - N + i];
            if len.is_multiple_of(size[i]) {
                let each = len / size[i];
                return x.unfold((rank - N + i) as isize, each, each, 1)?.mean(&[-1]);
            }
            let row = |r: usize| (of_axis[r].0..of_axis[r].1).map(|k| (k, 1.0)).collect();
            Taps::new(op, of_axis.len(), row)?.averaged().apply(op, &x, rank - N + i)
        })
    })
}
