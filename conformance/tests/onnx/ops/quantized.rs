//! Quantization to 8 bits without signs, and products of such integers.

use numcore::{
    DType,
    ops::{ConvOps, PadMode, PadOps, PointwiseOps, ReduceOps, ViewOps},
};

use super::{
    one,
    products::{Window, product},
};
use crate::{call::Call, file::Answer, graph::T};

pub fn run(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    match c.op() {
        "QuantizeLinear" => one(Ok(quantized(c, c.x(0)?, c.x(1)?, c.opt(2))?)),
        "DequantizeLinear" => one(Ok(real(c, c.x(0)?, c.x(1)?, c.opt(2))?)),
        "DynamicQuantizeLinear" => dynamic(c),
        "MatMulInteger" => {
            one(product(&shifted(c.x(0)?, c.opt(2))?, &shifted(c.x(1)?, c.opt(3))?)?.to_dtype(DType::I32))
        }
        "QLinearMatMul" => {
            let a = real(c, c.x(0)?, c.x(1)?, c.opt(2))?;
            let b = real(c, c.x(3)?, c.x(4)?, c.opt(5))?;
            one(Ok(quantized(
                c,
                &product(&a.to_dtype(DType::F32)?, &b.to_dtype(DType::F32)?)?,
                &c.x(6)?.to_dtype(DType::F32)?,
                c.opt(7),
            )?))
        }
        "ConvInteger" => {
            // Sums of products of bytes are exact in f64. A weight's zero point may be each output channel's own.
            let zero = c.opt(3).map(|zero| zero.reshape([zero.shape().numel(), 1, 1, 1])).transpose()?;
            let (x, weight) = (shifted(c.x(0)?, c.opt(2))?, shifted(c.x(1)?, zero.as_ref())?);
            one(Ok(convolved(c, &x.to_dtype(DType::F64)?, &weight.to_dtype(DType::F64)?)?.to_dtype(DType::I32)?))
        }
        "QLinearConv" => {
            let x = real(c, c.x(0)?, c.x(1)?, c.opt(2))?;
            let weight = real(c, c.x(3)?, c.x(4)?, c.opt(5))?;
            one(Ok(quantized(c, &convolved(c, &x, &weight)?, c.x(6)?, c.opt(7))?))
        }
        _ => Ok(None),
    }
}

fn convolved(c: &Call<'_>, x: &T, weight: &T) -> Answer<T> {
    let window = Window::<2>::of(c, x, weight.dims()[2..].try_into()?)?;
    let padded: Vec<_> = [(0, 0); 2].into_iter().chain(window.pads.map(|(a, b)| (a as isize, b as isize))).collect();
    let x = x.pad_with(&padded, PadMode::Constant(0.0))?;
    let window = Window { pads: [(0, 0); 2], ..window };
    Ok(x.conv(weight, None, &window.conv(c.int("group", 1) as usize))?)
}

fn shifted(x: &T, zero: Option<&T>) -> numcore::Result<T> {
    let x = x.to_dtype(DType::I32)?;
    match zero {
        Some(zero) => x.sub(&zero.to_dtype(DType::I32)?),
        None => Ok(x),
    }
}

/// A scale as it is broadcast: of everything, of an axis, or of blocks along it.
fn broadcast(c: &Call<'_>, scale: &T, x: &T) -> Answer<T> {
    let rank = x.dims().len();
    let axis =
        x.shape().axis("QuantizeLinear", if rank == 0 { 0 } else { c.int("axis", 1).min(rank as i64 - 1) as isize });
    match scale.dims().len() {
        0 => Ok(scale.clone()),
        1 if scale.dims()[0] == 1 => Ok(scale.reshape([0usize; 0])?),
        1 => {
            let mut along = vec![1; rank];
            along[axis?] = scale.dims()[0];
            Ok(scale.reshape(along)?)
        }
        _ => {
            let axis = axis?;
            let block = c.int("block_size", 0).max(1) as usize;
            let repeated = numcore::ops::RepeatOps::repeat_interleave(scale, block, axis as isize)?;
            Ok(repeated.narrow(axis as isize, 0, x.dims()[axis])?)
        }
    }
}

fn quantized(c: &Call<'_>, x: &T, scale: &T, zero: Option<&T>) -> Answer<T> {
    let wide = if scale.dtype().is_half() { DType::F32 } else { scale.dtype() };
    let steps = x.to_dtype(wide)?.div(&broadcast(c, scale, x)?.to_dtype(wide)?)?.round()?;
    let of = zero.map_or(DType::U8, |zero| zero.dtype());
    let shifted = match zero {
        Some(zero) => steps.add(&broadcast(c, zero, x)?.to_dtype(wide)?)?,
        None => steps,
    };
    Ok(shifted.clamp(0.0, 255.0)?.to_dtype(of)?)
}

fn real(c: &Call<'_>, x: &T, scale: &T, zero: Option<&T>) -> Answer<T> {
    let zero = zero.map(|zero| broadcast(c, zero, x)).transpose()?;
    Ok(shifted(x, zero.as_ref())?.to_dtype(scale.dtype())?.mul(&broadcast(c, scale, x)?)?)
}

/// The range of the values, 0 included, over 255 steps.
fn dynamic(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    let x = c.x(0)?;
    let flat = x.reshape([x.shape().numel()])?;
    let (low, high) = (flat.amin(&[0])?.minimum(0.0)?, flat.amax(&[0])?.maximum(0.0)?);
    let scale = high.sub(&low)?.div(255.0)?;
    let zero = low.neg()?.div(&scale)?.round()?.clamp(0.0, 255.0)?;
    let y = x.div(&scale)?.round()?.add(&zero)?.clamp(0.0, 255.0)?.to_dtype(DType::U8)?;
    Ok(Some(vec![y, scale, zero.to_dtype(DType::U8)?]))
}
