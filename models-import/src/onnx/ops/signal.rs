//! Transforms and windows.

use autograd::Var;
use numcore::{
    DType, Result, Runtime, Tensor,
    ops::{FftNorm, FftOps, GridSample, GridSampleOps, Interpolation, OutsideGrid, PointwiseOps, ViewOps, Window, cat},
};

use super::{
    super::call::{NodeCall, NodeOutputs, bad, size},
    OperatorRow, one, row,
};

pub(super) fn find<R: Runtime>(op: &str) -> Option<OperatorRow<R>> {
    const WINDOW: &[&str] = &["output_datatype", "periodic"];
    match op {
        "DFT" => row(&["axis", "inverse", "onesided"], transform),
        "STFT" => row(&["onesided"], short),
        "HannWindow" => row(WINDOW, |c| window(c, Window::Hann)),
        "HammingWindow" => row(WINDOW, hamming),
        "BlackmanWindow" => row(WINDOW, |c| window(c, Window::Blackman)),
        "GridSample" => row(&["align_corners", "mode", "padding_mode"], |c| one(c.x(0)?.grid_sample(c.x(1)?, grid(c)))),
        "AffineGrid" => row(&["align_corners"], |c| {
            let size = c.sizes(1)?;
            one(c.x(0)?.affine_grid(size.get(2..).unwrap_or_default(), c.flag("align_corners")))
        }),
        _ => None,
    }
}

/// Real and imaginary parts on a last axis, that real signals have with size 1.
fn complex<R: Runtime>(x: &Var<R>) -> Result<Var<R>> {
    Ok(if x.dims().last() == Some(&2) { x.clone() } else { cat(&[x, &x.mul(0.0)?], -1)? })
}

/// Input `i` as one size.
fn length<R: Runtime>(c: &NodeCall<'_, R>, i: usize) -> Result<Option<usize>> {
    c.number(i)?.map(|n| size(n as i64)).transpose()
}

fn transform<R: Runtime>(c: &NodeCall<'_, R>) -> NodeOutputs<R> {
    let x = c.x(0)?;
    let axis = c.number(2)?.map_or(c.int("axis", if c.opset() < 20 { 1 } else { -2 }), |axis| axis as i64);
    let (axis, n) = (c.axis(0, axis)? as isize, length(c, 1)?);
    if c.flag("onesided") && c.flag("inverse") {
        let size = n.unwrap_or(2 * x.dims()[axis as usize].max(1) - 2);
        return one(x.irfft(Some(size), axis, FftNorm::Backward)?.unsqueeze(-1));
    }
    if c.flag("onesided") {
        return one(x.squeeze(-1)?.rfft(n, axis, FftNorm::Backward));
    }
    let x = complex(x)?;
    one(if c.flag("inverse") { x.ifft(n, axis, FftNorm::Backward) } else { x.fft(n, axis, FftNorm::Backward) })
}

/// Frames of the signal, one transform for each.
fn short<R: Runtime>(c: &NodeCall<'_, R>) -> NodeOutputs<R> {
    let x = c.x(0)?.squeeze(-1)?;
    let step = length(c, 1)?.ok_or_else(|| bad("the step between frames is missing"))?;
    let of_window = c.opt(2)?.and_then(|w| w.dims().first().copied());
    let len = length(c, 3)?.or(of_window).ok_or_else(|| bad("the frames' length is missing"))?;
    let mut frames = x.unfold(1, len, step, 1)?;
    if let Some(window) = c.opt(2)? {
        frames = frames.mul(window)?;
    }
    if c.int("onesided", 1) == 1 {
        return one(frames.rfft(None, 2, FftNorm::Backward));
    }
    one(complex(&frames.unsqueeze(-1)?)?.fft(None, 2, FftNorm::Backward))
}

fn window<R: Runtime>(c: &NodeCall<'_, R>, kind: Window) -> NodeOutputs<R> {
    let n = length(c, 0)?.ok_or_else(|| bad("the size is missing"))?;
    let made = Tensor::window(c.device(), kind, n, c.int("periodic", 1) == 1, c.dtype("output_datatype", 1)?)?;
    Ok(vec![Var::new(made)])
}

/// ONNX's coefficients are 25/46 and 21/46, where PyTorch and the framework have 0.54 and 0.46.
fn hamming<R: Runtime>(c: &NodeCall<'_, R>) -> NodeOutputs<R> {
    let n = length(c, 0)?.ok_or_else(|| bad("the size is missing"))?;
    let around = if c.int("periodic", 1) == 1 { n } else { n.max(1) - 1 } as f64;
    let angles = Tensor::arange(c.device(), 0.0, std::f64::consts::TAU / around, n, DType::F64)?;
    let made = angles.cos()?.mul(-21.0 / 46.0)?.add(25.0 / 46.0)?.to_dtype(c.dtype("output_datatype", 1)?)?;
    Ok(vec![Var::new(made)])
}

fn grid<R: Runtime>(c: &NodeCall<'_, R>) -> GridSample {
    let mode = match c.text("mode", "linear") {
        "nearest" => Interpolation::Nearest,
        "cubic" | "bicubic" => Interpolation::Cubic,
        _ => Interpolation::Linear,
    };
    let outside = match c.text("padding_mode", "zeros") {
        "border" => OutsideGrid::Border,
        "reflection" => OutsideGrid::Reflection,
        _ => OutsideGrid::Zeros,
    };
    GridSample { mode, outside, align_corners: c.flag("align_corners") }
}
