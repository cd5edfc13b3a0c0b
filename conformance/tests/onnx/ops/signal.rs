//! Transforms and windows.

use numcore::{
    DType, Tensor,
    ops::{FftNorm, FftOps, GridSample, GridSampleOps, Interpolation, OutsideGrid, PointwiseOps, ViewOps, Window, cat},
};

use super::{one, shape::sizes};
use crate::{
    call::{Call, dtype},
    file::Answer,
    graph::T,
};

pub fn run(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    match c.op() {
        "DFT" => transform(c),
        "STFT" => short(c),
        "HannWindow" => window(c, Window::Hann),
        "HammingWindow" => hamming(c),
        "BlackmanWindow" => window(c, Window::Blackman),
        "GridSample" => sample(c),
        "AffineGrid" => {
            let size = sizes(&c.host(1)?.ok_or("a size")?);
            one(c.x(0)?.affine_grid(&size[2..], c.int("align_corners", 0) == 1))
        }
        _ => Ok(None),
    }
}

/// Real and imaginary parts on a last axis, that real signals have with size 1.
fn complex(x: &T) -> Answer<T> {
    let last = x.dims().len() - 1;
    Ok(if x.dims()[last] == 2 { x.clone() } else { cat(&[x, &x.mul(0.0)?], -1)? })
}

fn transform(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    let x = c.x(0)?;
    let rank = x.dims().len() as i64;
    let axis = c.host(2)?.map_or(c.int("axis", if c.opset < 20 { 1 } else { -2 }), |axis| axis[0]);
    let axis = if axis < 0 { axis + rank } else { axis } as isize;
    let n = c.host(1)?.map(|n| n[0] as usize);
    if c.int("onesided", 0) == 1 && c.int("inverse", 0) == 1 {
        let size = n.unwrap_or(2 * (x.dims()[axis as usize] - 1));
        return one(x.irfft(Some(size), axis, FftNorm::Backward)?.unsqueeze(-1));
    }
    if c.int("onesided", 0) == 1 {
        return one(x.squeeze(-1)?.rfft(n, axis, FftNorm::Backward));
    }
    let x = complex(x)?;
    one(if c.int("inverse", 0) == 1 { x.ifft(n, axis, FftNorm::Backward) } else { x.fft(n, axis, FftNorm::Backward) })
}

/// Frames of the signal, one transform for each.
fn short(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    let x = c.x(0)?.squeeze(-1)?;
    let step = c.host(1)?.ok_or("a step")?[0] as usize;
    let len = c.host(3)?.map(|n| n[0] as usize).or(c.opt(2).map(|w| w.dims()[0])).ok_or("a frame's length")?;
    let mut frames = x.unfold(1, len, step, 1)?;
    if let Some(window) = c.opt(2) {
        frames = frames.mul(window)?;
    }
    if c.int("onesided", 1) == 1 {
        return one(frames.rfft(None, 2, FftNorm::Backward));
    }
    one(complex(&frames.unsqueeze(-1)?)?.fft(None, 2, FftNorm::Backward))
}

fn window(c: &Call<'_>, kind: Window) -> Answer<Option<Vec<T>>> {
    let n = c.host(0)?.ok_or("a size")?[0] as usize;
    one(Tensor::window(c.cpu(), kind, n, c.int("periodic", 1) == 1, dtype(c.int("output_datatype", 1))?))
}

/// ONNX's coefficients are 25/46 and 21/46, where PyTorch and the framework have 0.54 and 0.46.
fn hamming(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    let n = c.host(0)?.ok_or("a size")?[0] as usize;
    let of = dtype(c.int("output_datatype", 1))?;
    let around = if c.int("periodic", 1) == 1 { n } else { n - 1 } as f64;
    let angles = Tensor::arange(c.cpu(), 0.0, std::f64::consts::TAU / around, n, DType::F64)?;
    one(angles.cos()?.mul(-21.0 / 46.0)?.add(25.0 / 46.0)?.to_dtype(of))
}

fn sample(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
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
    one(c.x(0)?.grid_sample(c.x(1)?, GridSample { mode, outside, align_corners: c.int("align_corners", 0) == 1 }))
}
