//! Resizing: the positions and weights of taps are found on the host, and applied along one axis after another.

use autograd::Var;
use numcore::{
    Result, Runtime, Tensor,
    ops::{IndexOps, MatmulOps, PointwiseOps, ViewOps},
};

use super::{
    super::call::{NodeCall, NodeOutputs, bad, size},
    OperatorRow, one, row,
};

pub(super) fn find<R: Runtime>(op: &str) -> Option<OperatorRow<R>> {
    const RESIZE: &[&str] = &[
        "antialias",
        "axes",
        "coordinate_transformation_mode",
        "cubic_coeff_a",
        "exclude_outside",
        "extrapolation_value",
        "keep_aspect_ratio_policy",
        "mode",
        "nearest_mode",
    ];
    match op {
        "Resize" => row(RESIZE, resize),
        "Upsample" => row(&["mode"], |c| {
            let mut x = c.x(0)?.clone();
            let scales = c.numbers(1)?.ok_or_else(|| bad("the scales are missing"))?;
            if scales.len() != x.dims().len() || c.text("mode", "nearest") != "nearest" {
                return Err(bad("needs a scale for each axis, and the mode `nearest`"));
            }
            for (axis, scale) in scales.into_iter().enumerate() {
                let new = scaled(x.dims()[axis], scale)?;
                let of: Vec<i64> = (0..new).map(|i| (i as f64 / scale) as i64).collect();
                x = x.index_select(axis as isize, &c.integers(&of)?)?;
            }
            one(Ok(x))
        }),
        _ => None,
    }
}

/// One axis before and after, and the crop of `tf_crop_and_resize`.
struct ResizedAxis {
    old: usize,
    new: usize,
    scale: f64,
    crop: (f64, f64),
}

fn resize<R: Runtime>(c: &NodeCall<'_, R>) -> NodeOutputs<R> {
    let mut x = c.x(0)?.clone();
    // Before version 11, the scales are the second input.
    let (crop, scales) = if c.opset() < 11 { (None, c.numbers(1)?) } else { (c.numbers(1)?, c.numbers(2)?) };
    let axes = c.ints("axes").unwrap_or_else(|| (0..x.dims().len() as i64).collect());
    let axes = axes.iter().map(|&axis| c.axis(0, axis)).collect::<Result<Vec<_>>>()?;
    let (crop, scales) = (crop.unwrap_or_default(), scales.filter(|scales| !scales.is_empty()));
    let targets: Vec<(usize, f64)> = match scales {
        Some(scales) => {
            let target = |(&at, scale): (&usize, f64)| Ok((scaled(x.dims()[at], scale)?, scale));
            axes.iter().zip(scales).map(target).collect::<Result<_>>()?
        }
        None => kept_aspect(c, &x, &axes, &c.sizes(3)?)?,
    };
    if targets.len() != axes.len() {
        return Err(bad(format!("has {} sizes or scales for {} axes", targets.len(), axes.len())));
    }
    for (k, (&at, &(new, scale))) in axes.iter().zip(&targets).enumerate() {
        let old = x.dims()[at];
        let crop = crop.get(k).copied().zip(crop.get(k + axes.len()).copied()).unwrap_or((0.0, 1.0));
        let crops = c.text("coordinate_transformation_mode", "") == "tf_crop_and_resize" && crop != (0.0, 1.0);
        if new != old || scale != 1.0 || crops {
            x = along(c, &x, at, &ResizedAxis { old, new, scale, crop })?;
        }
    }
    one(Ok(x))
}

/// A size times a scale, rounded down after it is rounded to `f32`: 6 times 5/3 is 10.
fn scaled(old: usize, scale: f64) -> Result<usize> {
    size((old as f32 * scale as f32).floor() as i64)
}

/// Sizes and factors by `keep_aspect_ratio_policy`.
fn kept_aspect<R: Runtime>(c: &NodeCall<'_, R>, x: &Var<R>, axes: &[usize], to: &[usize]) -> Result<Vec<(usize, f64)>> {
    let each: Vec<f64> = axes.iter().zip(to).map(|(&a, &t)| t as f64 / x.dims()[a] as f64).collect();
    let all = match c.text("keep_aspect_ratio_policy", "stretch") {
        "not_larger" => each.iter().copied().fold(f64::INFINITY, f64::min),
        "not_smaller" => each.iter().copied().fold(0.0, f64::max),
        _ => return Ok(to.iter().copied().zip(each).collect()),
    };
    axes.iter().map(|&a| Ok((size((x.dims()[a] as f64 * all + 0.5).floor() as i64)?, all))).collect()
}

fn along<R: Runtime>(c: &NodeCall<'_, R>, x: &Var<R>, at: usize, axis: &ResizedAxis) -> Result<Var<R>> {
    if axis.old == 0 || !axis.scale.is_finite() || axis.scale <= 0.0 || axis.new.saturating_mul(axis.old) > 1 << 32 {
        return Err(bad(format!("resizes {} elements to {} by {}", axis.old, axis.new, axis.scale)));
    }
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
        let weights = Tensor::from_slice(c.device(), [axis.new, axis.old], &weights)?.to_dtype(x.dtype())?;
        x.transpose(at as isize, -1)?.matmul(&Var::new(weights.t()?))?.transpose(at as isize, -1)?
    };
    if !crops {
        return Ok(y);
    }
    let far: Vec<bool> = positions.iter().map(|&p| p < 0.0 || p > (axis.old - 1) as f64).collect();
    let mut shape = vec![1; x.dims().len()];
    shape[at] = axis.new;
    let far = Tensor::from_slice(c.device(), [axis.new], &far)?.reshape(shape)?;
    y.masked_fill(&Var::new(far), c.float("extrapolation_value", 0.0))
}

/// The position of a new element among the old ones.
fn position<R: Runtime>(c: &NodeCall<'_, R>, axis: &ResizedAxis, i: f64) -> f64 {
    let (old, scale) = (axis.old as f64, axis.scale);
    let new = old * scale;
    let default = if c.opset() < 11 { "asymmetric" } else { "half_pixel" };
    match c.text("coordinate_transformation_mode", default) {
        "align_corners" if axis.new == 1 => 0.0,
        "align_corners" => i * (old - 1.0) / (new - 1.0),
        "asymmetric" => i / scale,
        "pytorch_half_pixel" if axis.new == 1 => 0.0,
        "half_pixel_symmetric" => old / 2.0 * (1.0 - axis.new as f64 / new) + (i + 0.5) / scale - 0.5,
        "tf_crop_and_resize" => {
            let (start, end) = axis.crop;
            let rest = if axis.new == 1 {
                (end - start) * (old - 1.0) / 2.0
            } else {
                i * (end - start) * (old - 1.0) / (new - 1.0)
            };
            rest + start * (old - 1.0)
        }
        _ => (i + 0.5) / scale - 0.5,
    }
}

fn nearest<R: Runtime>(c: &NodeCall<'_, R>, p: f64) -> f64 {
    match c.text("nearest_mode", if c.opset() < 11 { "floor" } else { "round_prefer_floor" }) {
        "floor" => p.floor(),
        "ceil" => p.ceil(),
        "round_prefer_ceil" => (p + 0.5).floor(),
        _ => (p - 0.5).ceil(),
    }
}

/// The old elements that a position is computed from, and their weights.
fn taps<R: Runtime>(c: &NodeCall<'_, R>, axis: &ResizedAxis, p: f64) -> Vec<(usize, f64)> {
    let cubic = c.text("mode", "linear") == "cubic";
    let narrow = if c.flag("antialias") { axis.scale.min(1.0) } else { 1.0 };
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
    let skips = c.flag("exclude_outside");
    let mut found: Vec<(usize, f64)> = (first..=last)
        .filter(|&t| !skips || (0..=end).contains(&t))
        .map(|t| (t.clamp(0, end) as usize, kernel(p - t as f64)))
        .collect();
    let total: f64 = found.iter().map(|(_, weight)| weight).sum();
    found.iter_mut().for_each(|(_, weight)| *weight /= total);
    found
}
