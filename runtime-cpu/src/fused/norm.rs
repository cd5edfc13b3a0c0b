//! Layer norm and RMS norm, rows at a time; the parameters' gradients in fixed groups of rows.

use numcore::{
    Element as _, Result, Support,
    fused::{Norm, NormGrad, NormKind},
};

use super::{
    Float, FusedCall, StoredFloat, grain, half_rows, one,
    row_reduce::{self, LANES, Prefetch},
};
use crate::{operand::Base, simd::multiversion};

/// Groups of rows for the parameters' gradients. Each group has partial sums of its own.
const GROUPS: usize = 32;

pub(super) fn forward<S: StoredFloat>(call: &FusedCall<'_>, op: &Norm) -> Result<Support> {
    let (rows, width) = call.rows(0);
    let (x, y, rstd) = (call.input::<S>(Norm::X), call.output::<S>(Norm::Y), call.output::<S::Lane>(Norm::RSTD));
    let mean = (op.kind == NormKind::Layer).then(|| call.output::<S::Lane>(Norm::MEAN));
    let mut buffers = [None, None];
    let [for_weight, for_bias] = &mut buffers;
    let weight = op.weight.then(|| call.parameter::<S>(1, width, for_weight)).transpose()?;
    let bias = op.bias.then(|| call.parameter::<S>(2, width, for_bias)).transpose()?;
    let (eps, simd) = (S::Lane::from_f64(op.eps), call.engine().simd);
    call.engine().ranges(rows, grain(width), |part| {
        half_rows::each::<S, 2>(part, width, |row, [x_buffer, y_buffer]| {
            let (i, from) = (row as isize, (row * width) as isize);
            // SAFETY: a row of contiguous operands; the output row is this task's alone.
            let (x, y) = unsafe { (x.slice(from, width), y.slice_mut(from, width)) };
            let x = half_rows::read(simd, x, x_buffer);
            let (m, r) =
                half_rows::write(simd, y, y_buffer, |y| norm_row(simd, x, y, weight, bias, mean.is_some(), eps));
            // SAFETY: this row's elements of the outputs.
            unsafe {
                rstd.set(i, r);
                if let Some(mean) = mean {
                    mean.set(i, m);
                }
            }
        });
    });
    Ok(Support::Done)
}

pub(super) fn backward<S: StoredFloat>(call: &FusedCall<'_>, op: &NormGrad) -> Result<Support> {
    let (rows, width) = call.rows(0);
    let (x, g, d) = (call.input::<S>(NormGrad::X), call.input::<S>(NormGrad::GRAD), call.output::<S>(0));
    let rstd = call.input::<S::Lane>(NormGrad::RSTD);
    let mean = (op.0.kind == NormKind::Layer).then(|| call.input::<S::Lane>(NormGrad::MEAN));
    let mut buffer = None;
    let weight = op.weight_at().map(|i| call.parameter::<S>(i, width, &mut buffer)).transpose()?;
    let group = rows.div_ceil(GROUPS).max(1);
    let groups = rows.div_ceil(group);
    let partial = call.cpu.scratch(groups * 2 * width * size_of::<S::Lane>())?;
    let (partial, simd, added) = (Base::<S::Lane>::new(partial.ptr().cast()), call.engine().simd, call.added[0]);
    call.engine().ranges(rows, group, |part| {
        let at = (part.start / group * 2 * width) as isize;
        // SAFETY: this group's partial sums, which are this task's alone.
        let sums = unsafe { partial.slice_mut(at, 2 * width) };
        sums.fill(S::Lane::default());
        let (dw, db) = sums.split_at_mut(width);
        half_rows::each::<S, 3>(part, width, |row, [x_buffer, g_buffer, d_buffer]| {
            let (i, from) = (row as isize, (row * width) as isize);
            // SAFETY: a row of contiguous operands; the output row is this task's alone.
            let (x, g, d) = unsafe { (x.slice(from, width), g.slice(from, width), d.slice_mut(from, width)) };
            let (x, g) = (half_rows::read(simd, x, x_buffer), half_rows::read(simd, g, g_buffer));
            // SAFETY: one statistic for each row.
            let (r, m) = unsafe { (rstd.get(i), mean.map_or(S::Lane::default(), |m| m.get(i))) };
            half_rows::update(simd, d, d_buffer, added, |d| {
                grad_row(simd, x, g, weight, RowGradients { d, added, dw, db }, (m, r, mean.is_some()));
            });
        });
    });
    for k in 0..usize::from(op.0.weight) + usize::from(op.0.bias) {
        // SAFETY: a contiguous output of this length, and the partial sums; no task runs any more.
        let (out, groups) =
            unsafe { (call.output::<S>(1 + k).slice_mut(0, width), partial.slice(0, groups * 2 * width)) };
        let added = call.added[1 + k];
        half_rows::each::<S, 1>(0..1, width, |_, [x_buffer]| {
            half_rows::update(simd, out, x_buffer, added, |out| sum_groups(simd, groups, k, out, added));
        });
    }
    Ok(Support::Done)
}

/// The destinations of a row's gradients. The gradient of the row is stored, or added if `added`; those of the
/// parameters are accumulated by its group.
struct RowGradients<'a, T> {
    d: &'a mut [T],
    added: bool,
    dw: &'a mut [T],
    db: &'a mut [T],
}

multiversion! {
    /// Normalizes a row; returns its mean (0 for RMS) and reciprocal deviation.
    fn norm_row<T: (Float)>(
        x: &[T], y: &mut [T], weight: Option<&[T]>, bias: Option<&[T]>, centered: bool, eps: T,
    ) -> (T, T) {
        let count = T::from_f64(x.len() as f64);
        let prefetches = [Prefetch::behind(x), Prefetch::row(y)];
        let (mean, variance) = if centered {
            let first = row_reduce::sum1(x, [Prefetch::row(y)], |v| v) / count;
            // The remainder of the rounded mean corrects both: a row of equal elements gives exactly their value, and
            // zeros.
            let (left, squares) = row_reduce::sums1(x, prefetches, |v| (v - first, (v - first) * (v - first)));
            let left = left / count;
            let variance = squares / count - left * left;
            (first + left, if variance < T::default() { T::default() } else { variance })
        } else {
            (T::default(), row_reduce::sum1(x, prefetches, |v| v * v) / count)
        };
        let rstd = one::<T>() / crate::math::Real::sqrt(variance + eps);
        match (weight, bias) {
            (Some(w), Some(b)) => for (((o, &v), &w), &b) in y.iter_mut().zip(x).zip(w).zip(b) {
                *o = ((v - mean) * rstd) * w + b;
            },
            (Some(w), None) => for ((o, &v), &w) in y.iter_mut().zip(x).zip(w) {
                *o = ((v - mean) * rstd) * w;
            },
            _ => for (o, &v) in y.iter_mut().zip(x) {
                *o = (v - mean) * rstd;
            },
        }
        (mean, rstd)
    }

    /// A row's gradient; `stats` are its mean, its reciprocal deviation, and whether the mean counts.
    fn grad_row<T: (Float)>(
        x: &[T], g: &[T], weight: Option<&[T]>, to: RowGradients<'_, T>, stats: (T, T, bool),
    ) {
        let (mean, rstd, centered) = stats;
        let count = T::from_f64(x.len() as f64);
        // Without a weight, the gradient stands in for its elementwise product with the weight.
        let of = |g: T, w: T| if weight.is_some() { g * w } else { g };
        let w = weight.unwrap_or(g);
        let (along, level) = row_reduce::sums3(x, g, w, Prefetch::row(to.d), |x, g, w| (of(g, w) * (x - mean), of(g, w)));
        let (along, level) = (along * rstd / count, if centered { level / count } else { T::default() });
        let RowGradients { d, added, dw, db } = to;
        let each = |x: T, g: T, w: T| {
            let hat = (x - mean) * rstd;
            ((of(g, w) - level - hat * along) * rstd, g * hat, g)
        };
        if added {
            row_reduce::each(x, g, w, d, dw, db, |x, g, w, d, dw, db| {
                let (v, vw, vb) = each(x, g, w);
                (*d, *dw, *db) = (*d + v, *dw + vw, *db + vb);
            });
        } else {
            row_reduce::each(x, g, w, d, dw, db, |x, g, w, d, dw, db| {
                let (v, vw, vb) = each(x, g, w);
                (*d, *dw, *db) = (v, *dw + vw, *db + vb);
            });
        }
    }

    /// Writes or adds the sums of the groups' rows of parameter `k`.
    fn sum_groups<T: (Float)>(groups: &[T], k: usize, out: &mut [T], added: bool) {
        let width = out.len();
        for (chunk, out) in out.chunks_mut(LANES).enumerate() {
            let mut sums = [T::default(); LANES];
            for group in groups.chunks_exact(2 * width) {
                let row = &group[k * width + chunk * LANES..][..out.len()];
                sums.iter_mut().zip(row).for_each(|(sum, &x)| *sum = *sum + x);
            }
            match added {
                true => out.iter_mut().zip(sums).for_each(|(o, sum)| *o = *o + sum),
                false => out.copy_from_slice(&sums[..out.len()]),
            }
        }
    }
}
