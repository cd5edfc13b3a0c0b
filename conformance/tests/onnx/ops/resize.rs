//! Resizing: the positions and weights of taps are found on the host, and applied by operations along one axis after another.

use numcore::{
    Tensor,
    ops::{IndexOps, MatmulOps, PointwiseOps, ViewOps},
};

use super::{one, shape::sizes};
use crate::{call::Call, file::Answer, graph::T};

pub fn run(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    match c.op() {
        "Resize" => resize(c),
        "Upsample" => {
            let mut x = c.x(0)?.clone();
            for (axis, scale) in c.x(1)?.to_f64s()?.into_iter().enumerate() {
                let old = x.dims()[axis];
                let of: Vec<i64> = (0..(old as f64 * scale) as usize).map(|i| (i as f64 / scale) as i64).collect();
                x = x.index_select(axis as isize, &c.integers(&of)?)?;
            }
            one(Ok(x))
        }
        _ => Ok(None),
    }
}

/// One axis before and after, and what `tf_crop_and_resize` reads of it.
struct Axis {
    old: usize,
    new: usize,
    scale: f64,
    crop: (f64, f64),
}

fn resize(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    let mut x = c.x(0)?.clone();
    let rank = x.dims().len();
    let axes = c.ints("axes").unwrap_or_else(|| (0..rank as i64).collect());
    let axes = axes.iter().map(|&a| x.shape().axis("Resize", a as isize)).collect::<Result<Vec<_>, _>>()?;
    let crop = c.opt(1).map(|roi| roi.to_f64s()).transpose()?.unwrap_or_default();
    let scales = c.opt(2).map(|s| s.to_f64s()).transpose()?.filter(|s| !s.is_empty());
    let targets = match c.host(3)? {
        Some(targets) => kept_aspect(c, &x, &axes, &sizes(&targets)),
        None => vec![],
    };
    for (k, &at) in axes.iter().enumerate() {
        let old = x.dims()[at];
        let scale = scales.as_ref().map_or_else(|| targets[k].1, |scales| scales[k]);
        let new = scales.as_ref().map_or_else(|| targets[k].0, |_| (old as f64 * scale).floor() as usize);
        let crop = crop.get(k).copied().zip(crop.get(k + axes.len()).copied()).unwrap_or((0.0, 1.0));
        let crops = c.text("coordinate_transformation_mode", "") == "tf_crop_and_resize" && crop != (0.0, 1.0);
        if new != old || scale != 1.0 || crops {
            x = along(c, &x, at, &Axis { old, new, scale, crop })?;
        }
    }
    one(Ok(x))
}

/// Sizes and factors, as `keep_aspect_ratio_policy` has them.
fn kept_aspect(c: &Call<'_>, x: &T, axes: &[usize], targets: &[usize]) -> Vec<(usize, f64)> {
    let each: Vec<f64> = axes.iter().zip(targets).map(|(&a, &t)| t as f64 / x.dims()[a] as f64).collect();
    let all = match c.text("keep_aspect_ratio_policy", "stretch") {
        "not_larger" => each.iter().copied().fold(f64::INFINITY, f64::min),
        "not_smaller" => each.iter().copied().fold(0.0, f64::max),
        _ => return targets.iter().copied().zip(each).collect(),
    };
    axes.iter().map(|&a| ((x.dims()[a] as f64 * all + 0.5).floor() as usize, all)).collect()
}

fn along(c: &Call<'_>, x: &T, at: usize, axis: &Axis) -> Answer<T> {
    let outside = c.float("extrapolation_value", 0.0);
    let crops = c.text("coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize";
    let positions: Vec<f64> = (0..axis.new).map(|i| position(c, axis, i as f64)).collect();
    let y = if c.text("mode", "nearest") == "nearest" {
        let nearest = |&p: &f64| (nearest(c, p) as i64).clamp(0, axis.old as i64 - 1);
        x.index_select(at as isize, &c.integers(&positions.iter().map(nearest).collect::<Vec<_>>())?)?
    } else {
        let mut weights = vec![0f64; axis.new * axis.old];
        for (i, &p) in positions.iter().enumerate() {
            for (tap, weight) in taps(c, axis, p) {
                weights[i * axis.old + tap] += weight;
            }
        }
        let weights = Tensor::from_slice(c.cpu(), [axis.new, axis.old], &weights)?.to_dtype(x.dtype())?;
        x.transpose(at as isize, -1)?.matmul(&weights.t()?)?.transpose(at as isize, -1)?
    };
    if !crops {
        return Ok(y);
    }
    let far: Vec<bool> = positions.iter().map(|&p| p < 0.0 || p > (axis.old - 1) as f64).collect();
    let mut shape = vec![1; x.dims().len()];
    shape[at] = axis.new;
    Ok(y.masked_fill(&Tensor::from_slice(c.cpu(), [axis.new], &far)?.reshape(shape)?, outside)?)
}

/// Where a new element lies among the old ones.
fn position(c: &Call<'_>, axis: &Axis, i: f64) -> f64 {
    let (old, scale) = (axis.old as f64, axis.scale);
    let new = old * scale;
    match c.text("coordinate_transformation_mode", "half_pixel") {
        "align_corners" if new == 1.0 => 0.0,
        "align_corners" => i * (old - 1.0) / (new - 1.0),
        "asymmetric" => i / scale,
        "pytorch_half_pixel" if new == 1.0 => -0.5,
        "half_pixel_symmetric" => old / 2.0 * (1.0 - axis.new as f64 / new) + (i + 0.5) / scale - 0.5,
        "tf_crop_and_resize" => {
            let (start, end) = axis.crop;
            let rest = if new == 1.0 {
                (end - start) * (old - 1.0) / 2.0
            } else {
                i * (end - start) * (old - 1.0) / (new - 1.0)
            };
            rest + start * (old - 1.0)
        }
        _ => (i + 0.5) / scale - 0.5,
    }
}

fn nearest(c: &Call<'_>, p: f64) -> f64 {
    match c.text("nearest_mode", "round_prefer_floor") {
        "floor" => p.floor(),
        "ceil" => p.ceil(),
        "round_prefer_ceil" => (p + 0.5).floor(),
        _ => (p - 0.5).ceil(),
    }
}

/// The old elements that a position is computed from, and their weights.
fn taps(c: &Call<'_>, axis: &Axis, p: f64) -> Vec<(usize, f64)> {
    let cubic = c.text("mode", "linear") == "cubic";
    let narrow = if c.int("antialias", 0) == 1 { axis.scale.min(1.0) } else { 1.0 };
    let reach = if cubic { 2.0 } else { 1.0 } / narrow;
    let a = c.float("cubic_coeff_a", -0.75);
    let kernel = |d: f64| match d.abs() * narrow {
        d if !cubic => (1.0 - d).max(0.0),
        d if d <= 1.0 => ((a + 2.0) * d - (a + 3.0)) * d * d + 1.0,
        d if d < 2.0 => ((a * d - 5.0 * a) * d + 8.0 * a) * d - 4.0 * a,
        _ => 0.0,
    };
    let (first, last) = ((p - reach).ceil() as i64, (p + reach).floor() as i64);
    let end = axis.old as i64 - 1;
    let skips = c.int("exclude_outside", 0) == 1;
    let mut found: Vec<(usize, f64)> = (first..=last)
        .filter(|&t| !skips || (0..=end).contains(&t))
        .map(|t| (t.clamp(0, end) as usize, kernel(p - t as f64)))
        .collect();
    let total: f64 = found.iter().map(|(_, weight)| weight).sum();
    found.iter_mut().for_each(|(_, weight)| *weight /= total);
    found
}
