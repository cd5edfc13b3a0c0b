//! Quantization to 8 bits without signs, and products of such integers.

use autograd::Var;
use numcore::{
    DType, Result, Runtime,
    ops::{Apply, ConvOps, PadMode, PadOps, PointwiseOps, ReduceOps, RepeatOps, ViewOps},
};

use super::{
    super::call::{NodeCall, NodeOutputs, bad},
    OperatorRow,
    indexing::flat,
    one,
    products::{SlidingWindow, kernel, product},
    row,
};

/// The axis of a matrix's rows.
const ROWS: i64 = -2;

pub(super) fn find<R: Runtime>(op: &str) -> Option<OperatorRow<R>> {
    const LINEAR: &[&str] = &["axis", "block_size", "saturate", "output_dtype", "precision"];
    const CONV: &[&str] = &["auto_pad", "dilations", "group", "kernel_shape", "pads", "strides"];
    match op {
        "QuantizeLinear" => row(LINEAR, |c| one(quantized(c, c.int("axis", 1), c.x(0)?, c.x(1)?, c.opt(2)?))),
        "DequantizeLinear" => row(LINEAR, |c| one(real(c, c.int("axis", 1), c.x(0)?, c.x(1)?, c.opt(2)?))),
        "DynamicQuantizeLinear" => row(&[], dynamic),
        "MatMulInteger" => row(&[], |c| {
            let (a, b) = (c.x(0)?, c.x(1)?);
            let zero = c.opt(2)?.map(|zero| broadcast(c, ROWS, zero, a)).transpose()?;
            one(product(&shifted(a, zero.as_ref())?, &shifted(b, c.opt(3)?)?))
        }),
        "QLinearMatMul" => row(&[], |c| {
            let a = real(c, ROWS, c.x(0)?, c.x(1)?, c.opt(2)?)?.to_dtype(DType::F32)?;
            let b = real(c, -1, c.x(3)?, c.x(4)?, c.opt(5)?)?.to_dtype(DType::F32)?;
            one(quantized(c, ROWS, &product(&a, &b)?, &c.x(6)?.to_dtype(DType::F32)?, c.opt(7)?))
        }),
        "ConvInteger" => row(CONV, |c| {
            // Sums of products of bytes are exact in f64. A weight's zero point may be each output channel's own.
            let zero = c.opt(3)?.map(|zero| broadcast(c, 0, zero, c.x(1)?)).transpose()?;
            let (x, weight) = (shifted(c.x(0)?, c.opt(2)?)?, shifted(c.x(1)?, zero.as_ref())?);
            one(convolved(c, &x.to_dtype(DType::F64)?, &weight.to_dtype(DType::F64)?)?.to_dtype(DType::I32))
        }),
        "QLinearConv" => row(CONV, |c| {
            if c.opt(8)?.is_some() {
                return Err(bad("has a bias, which is not supported"));
            }
            let x = real(c, 1, c.x(0)?, c.x(1)?, c.opt(2)?)?;
            let weight = real(c, 0, c.x(3)?, c.x(4)?, c.opt(5)?)?;
            one(quantized(c, 1, &convolved(c, &x, &weight)?, c.x(6)?, c.opt(7)?))
        }),
        _ => None,
    }
}

fn convolved<R: Runtime>(c: &NodeCall<'_, R>, x: &Var<R>, weight: &Var<R>) -> Result<Var<R>> {
    let window = SlidingWindow::<2>::of(c, x, kernel(weight)?)?;
    let padded: Vec<_> = [(0, 0); 2].into_iter().chain(window.pads.map(|(a, b)| (a as isize, b as isize))).collect();
    let x = x.pad_with(&padded, PadMode::Constant(0.0))?;
    let window = SlidingWindow { pads: [(0, 0); 2], ..window };
    x.conv(weight, None, &window.conv(c.size("group", 1)?))
}

fn shifted<R: Runtime>(x: &Var<R>, zero: Option<&Var<R>>) -> Result<Var<R>> {
    let x = x.to_dtype(DType::I32)?;
    match zero {
        Some(zero) => x.sub(&zero.to_dtype(DType::I32)?),
        None => Ok(x),
    }
}

/// A scale as it is broadcast: of everything, of an axis, or of blocks along it.
fn broadcast<R: Runtime>(c: &NodeCall<'_, R>, axis: i64, scale: &Var<R>, x: &Var<R>) -> Result<Var<R>> {
    let (rank, dims) = (x.dims().len(), scale.dims());
    let axis = || x.spec().shape.axis("scales", axis.min(rank as i64 - 1) as isize);
    match dims[..] {
        [] => Ok(scale.clone()),
        [1] => scale.reshape([0usize; 0]),
        [n] => {
            let mut along = vec![1; rank];
            along[axis()?] = n;
            scale.reshape(along)
        }
        _ => {
            let axis = axis()?;
            let repeated = scale.repeat_interleave(c.size("block_size", 0)?.max(1), axis as isize)?;
            repeated.narrow(axis as isize, 0, x.dims()[axis])
        }
    }
}

fn quantized<R: Runtime>(
    c: &NodeCall<'_, R>,
    axis: i64,
    x: &Var<R>,
    scale: &Var<R>,
    zero: Option<&Var<R>>,
) -> Result<Var<R>> {
    let to = match zero {
        Some(zero) => zero.dtype(),
        None if c.has("output_dtype") && c.int("output_dtype", 0) != 0 => c.dtype("output_dtype", 0)?,
        None => DType::U8,
    };
    if to != DType::U8 {
        return Err(bad(format!("quantizes to {to}, and is supported for u8")));
    }
    let wide = if scale.dtype().is_half() { DType::F32 } else { scale.dtype() };
    let mut y = x.to_dtype(wide)?.div(&broadcast(c, axis, scale, x)?.to_dtype(wide)?)?.round()?;
    if let Some(zero) = zero {
        y = y.add(&broadcast(c, axis, zero, x)?.to_dtype(wide)?)?;
    }
    y.clamp(0.0, 255.0)?.to_dtype(DType::U8)
}

fn real<R: Runtime>(
    c: &NodeCall<'_, R>,
    axis: i64,
    x: &Var<R>,
    scale: &Var<R>,
    zero: Option<&Var<R>>,
) -> Result<Var<R>> {
    let zero = zero.map(|zero| broadcast(c, axis, zero, x)).transpose()?;
    shifted(x, zero.as_ref())?.to_dtype(scale.dtype())?.mul(&broadcast(c, axis, scale, x)?)
}

/// The range of the values, 0 included, over 255 steps.
fn dynamic<R: Runtime>(c: &NodeCall<'_, R>) -> NodeOutputs<R> {
    let x = c.x(0)?;
    let all = flat(x)?;
    let (low, high) = (all.amin(&[0])?.minimum(0.0)?, all.amax(&[0])?.maximum(0.0)?);
    let scale = high.sub(&low)?.div(255.0)?;
    let zero = low.neg()?.div(&scale)?.round()?.clamp(0.0, 255.0)?;
    let y = x.div(&scale)?.round()?.add(&zero)?.clamp(0.0, 255.0)?.to_dtype(DType::U8)?;
    Ok(vec![y, scale, zero.to_dtype(DType::U8)?])
}
