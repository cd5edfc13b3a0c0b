//! Layer norm and RMS norm, rows at a time; the parameters' gradients in fixed groups of rows.

use numcore::{
    Element as _, Result, Support,
    fused::{Norm, NormGrad, NormKind},
};

use super::{
    Call, Float, Number, grain,
    lanes::{self, Ahead},
    lines, one,
};
use crate::{operand::Base, simd::leveled};

/// Into how many groups rows are cut for the parameters' gradients; each group has partial sums of its own.
const GROUPS: usize = 32;

pub(super) fn forward<S: Number>(call: &Call<'_>, op: &Norm) -> Result<Support> {
    let (rows, width) = call.rows(0);
    let (x, y, rstd) = (call.input::<S>(0), call.output::<S>(0), call.output::<S::Lane>(1));
    let mean = (op.kind == NormKind::Layer).then(|| call.output::<S::Lane>(2));
    let mut rooms = [None, None];
    let [for_weight, for_bias] = &mut rooms;
    let weight = op.weight.then(|| call.parameter::<S>(1, width, for_weight)).transpose()?;
    let bias = op.bias.then(|| call.parameter::<S>(2, width, for_bias)).transpose()?;
    let (eps, simd) = (S::Lane::from_f64(op.eps), call.engine().simd);
    call.engine().ranges(rows, grain(width), |part| {
        lines::each::<S, 2>(part, width, |row, [wide_x, wide_y]| {
            let (i, from) = (row as isize, (row * width) as isize);
            // SAFETY: a row of contiguous operands; the output row is this task's alone.
            let (x, y) = unsafe { (x.slice(from, width), y.slice_mut(from, width)) };
            let x = lines::read(simd, x, wide_x);
            let (m, r) = lines::write(simd, y, wide_y, |y| norm_row(simd, x, y, weight, bias, mean.is_some(), eps));
            // SAFETY: this row's places of the outputs.
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

pub(super) fn backward<S: Number>(call: &Call<'_>, op: &NormGrad) -> Result<Support> {
    let (rows, width) = call.rows(0);
    let (x, g, rstd, d) = (call.input::<S>(0), call.input::<S>(1), call.input::<S::Lane>(2), call.output::<S>(0));
    let mean = (op.0.kind == NormKind::Layer).then(|| call.input::<S::Lane>(3));
    let mut room = None;
    let weight = op.weight_at().map(|i| call.parameter::<S>(i, width, &mut room)).transpose()?;
    let group = rows.div_ceil(GROUPS).max(1);
    let groups = rows.div_ceil(group);
    let partial = call.cpu.scratch(groups * 2 * width * size_of::<S::Lane>())?;
    let (partial, simd) = (Base::<S::Lane>::new(partial.ptr().cast()), call.engine().simd);
    call.engine().ranges(rows, group, |part| {
        let at = (part.start / group * 2 * width) as isize;
        // SAFETY: this group's partial sums, which are this task's alone.
        let sums = unsafe { partial.slice_mut(at, 2 * width) };
        sums.fill(S::Lane::default());
        let (dw, db) = sums.split_at_mut(width);
        lines::each::<S, 3>(part, width, |row, [wide_x, wide_g, wide_d]| {
            let (i, from) = (row as isize, (row * width) as isize);
            // SAFETY: a row of contiguous operands; the output row is this task's alone.
            let (x, g, d) = unsafe { (x.slice(from, width), g.slice(from, width), d.slice_mut(from, width)) };
            let (x, g) = (lines::read(simd, x, wide_x), lines::read(simd, g, wide_g));
            // SAFETY: one number per row.
            let (r, m) = unsafe { (rstd.get(i), mean.map_or(S::Lane::default(), |m| m.get(i))) };
            lines::write(simd, d, wide_d, |d| {
                grad_row(simd, x, g, d, weight, Sums { dw, db }, (m, r, mean.is_some()));
            });
        });
    });
    for k in 0..usize::from(op.0.weight) + usize::from(op.0.bias) {
        // SAFETY: a contiguous output of this length; no task runs any more.
        let out = unsafe { call.output::<S>(1 + k).slice_mut(0, width) };
        lines::each::<S, 1>(0..1, width, |_, [wide]| {
            lines::write(simd, out, wide, |out| {
                out.fill(S::Lane::default());
                for i in 0..groups {
                    // SAFETY: a group's partial sums.
                    let sums = unsafe { partial.slice(((2 * i + k) * width) as isize, width) };
                    out.iter_mut().zip(sums).for_each(|(o, &s)| *o = *o + s);
                }
            });
        });
    }
    Ok(Support::Done)
}

/// Where a group adds up the parameters' gradients.
struct Sums<'a, T> {
    dw: &'a mut [T],
    db: &'a mut [T],
}

leveled! {
    /// Normalizes a row; returns its mean (0 for RMS) and reciprocal deviation.
    fn norm_row<T: (Float)>(
        x: &[T], y: &mut [T], weight: Option<&[T]>, bias: Option<&[T]>, centered: bool, eps: T,
    ) -> (T, T) {
        let count = T::from_f64(x.len() as f64);
        let mean = if centered { lanes::sum(x) / count } else { T::default() };
        let squares = lanes::sum1(x, Ahead::of(x), |v| (v - mean) * (v - mean));
        let rstd = one::<T>() / crate::math::Real::sqrt(squares / count + eps);
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
        x: &[T], g: &[T], d: &mut [T], weight: Option<&[T]>, sums: Sums<'_, T>, stats: (T, T, bool),
    ) {
        let (mean, rstd, centered) = stats;
        let count = T::from_f64(x.len() as f64);
        // Without a weight, the gradient stands for its own product with it.
        let of = |g: T, w: T| if weight.is_some() { g * w } else { g };
        let w = weight.unwrap_or(g);
        let (along, level) = lanes::sums3(x, g, w, |x, g, w| (of(g, w) * (x - mean), of(g, w)));
        let (along, level) = (along * rstd / count, if centered { level / count } else { T::default() });
        let Sums { dw, db } = sums;
        for (((((o, &x), &g), &w), dw), db) in d.iter_mut().zip(x).zip(g).zip(w).zip(dw).zip(db) {
            let hat = (x - mean) * rstd;
            *o = (of(g, w) - level - hat * along) * rstd;
            *dw = *dw + g * hat;
            *db = *db + g;
        }
    }
}
