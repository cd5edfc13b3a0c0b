//! Pools.

use autograd::Var;
use numcore::{
    DType, Result, Runtime, Tensor,
    ops::{PadMode, PadOps, PointwiseOps, PoolOps, PoolOptions, ReduceOps, ViewOps},
};

use super::{
    super::call::{NodeCall, NodeOutputs, array, bad, sizes},
    OperatorRow, one,
    products::{SlidingWindow, by_axes},
    row,
};

pub(super) fn find<R: Runtime>(op: &str) -> Option<OperatorRow<R>> {
    const MAX: &[&str] = &["auto_pad", "ceil_mode", "dilations", "kernel_shape", "pads", "storage_order", "strides"];
    const MEAN: &[&str] =
        &["auto_pad", "ceil_mode", "count_include_pad", "dilations", "kernel_shape", "pads", "strides"];
    const NORM: &[&str] = &["auto_pad", "ceil_mode", "dilations", "kernel_shape", "p", "pads", "strides"];
    match op {
        "MaxPool" => row(MAX, |c| by_axes(c, largest::<R, 1>, largest::<R, 2>, largest::<R, 3>)),
        "AveragePool" => row(MEAN, |c| by_axes(c, mean::<R, 1>, mean::<R, 2>, mean::<R, 3>)),
        "LpPool" => row(NORM, |c| by_axes(c, norm::<R, 1>, norm::<R, 2>, norm::<R, 3>)),
        "GlobalAveragePool" => row(&[], |c| one(c.x(0)?.mean_keepdim(&positions(c)?))),
        "GlobalMaxPool" => row(&[], |c| one(c.x(0)?.amax_keepdim(&positions(c)?))),
        "MaxUnpool" => row(&["kernel_shape", "pads", "strides"], unpool),
        _ => None,
    }
}

/// The axes after the first two.
fn positions<R: Runtime>(c: &NodeCall<'_, R>) -> Result<Vec<isize>> {
    Ok((2..c.x(0)?.dims().len() as isize).collect())
}

/// The options, and the padding to do before: all of it, if the two sides differ or exceed half the window.
fn options<R: Runtime, const N: usize>(c: &NodeCall<'_, R>) -> Result<(PoolOptions<N>, Vec<(isize, isize)>)> {
    let kernel = c.ints("kernel_shape").ok_or_else(|| bad("the kernel's shape is missing"))?;
    let kernel: [usize; N] = array("kernel_shape", &sizes(&kernel)?)?;
    let window = SlidingWindow::of(c, c.x(0)?, kernel)?;
    let mut options = PoolOptions::new(kernel);
    (options.stride, options.dilation) = (window.stride, window.dilation);
    options.ceil_mode = c.flag("ceil_mode");
    options.count_include_pad = c.flag("count_include_pad");
    let mut before = vec![(0, 0); N + 2];
    if window.pads.iter().zip(&kernel).all(|(&(a, b), &k)| a == b && 2 * a <= k) {
        options.padding = window.pads.map(|(a, _)| a);
    } else {
        (0..N).for_each(|i| before[i + 2] = (window.pads[i].0 as isize, window.pads[i].1 as isize));
    }
    Ok((options, before))
}

fn largest<R: Runtime, const N: usize>(c: &NodeCall<'_, R>) -> NodeOutputs<R> {
    let (options, before) = options::<R, N>(c)?;
    let x = c.x(0)?;
    let lowest = if x.dtype().is_float() { f64::NEG_INFINITY } else { 0.0 };
    let pads = before.iter().any(|&p| p != (0, 0));
    let padded = if pads { x.pad_with(&before, PadMode::Constant(lowest))? } else { x.clone() };
    if c.outputs() == 1 {
        return one(padded.max_pool(&options));
    }
    let (values, places) = padded.max_pool_with_indices(&options)?;
    let dims = x.dims();
    let (rows, inner) = (dims[0] * dims[1], dims[2..].iter().product::<usize>());
    let places = if pads { unpadded(&places, &padded.dims()[2..], &before[2..], &dims[2..])? } else { places };
    let places = if c.flag("storage_order") { by_columns(&places, &dims[2..])? } else { places };
    let start = Tensor::arange(c.device(), 0i64, inner as i64, rows, DType::I64)?;
    let mut along = vec![1; N + 2];
    along[..2].copy_from_slice(&dims[..2]);
    Ok(vec![values, places.add(&Var::new(start.reshape(along)?))?])
}

/// Positions in a padded value as positions in the value itself.
fn unpadded<R: Runtime>(
    places: &Var<R>,
    padded: &[usize],
    before: &[(isize, isize)],
    dims: &[usize],
) -> Result<Var<R>> {
    let (mut rest, mut stride, mut own) = (places.clone(), 1, places.mul(0.0)?);
    for axis in (0..dims.len()).rev() {
        let along = rest.rem(padded[axis] as f64)?.sub(before[axis].0 as f64)?;
        own = own.add(&along.mul(stride as f64)?)?;
        rest = rest.div(padded[axis] as f64)?;
        stride *= dims[axis];
    }
    Ok(own)
}

/// OperatorRow-major positions of two axes as column-major ones.
fn by_columns<R: Runtime>(places: &Var<R>, dims: &[usize]) -> Result<Var<R>> {
    let [rows, columns] = array("the pooled shape", dims)?;
    places.rem(columns as f64)?.mul(rows as f64)?.add(&places.div(columns as f64)?)
}

fn mean<R: Runtime, const N: usize>(c: &NodeCall<'_, R>) -> NodeOutputs<R> {
    let (mut options, before) = options::<R, N>(c)?;
    let x = c.x(0)?;
    if before.iter().all(|&p| p == (0, 0)) {
        return one(x.avg_pool(&options));
    }
    // The sums over windows, divided by the number of elements that each of them counts.
    options.divisor = Some(1.0);
    let counted = if options.count_include_pad { 1.0 } else { 0.0 };
    let ones = Tensor::ones(c.device(), x.dims(), x.dtype())?.pad_with(&before, PadMode::Constant(counted))?;
    let sums = x.pad_with(&before, PadMode::Constant(0.0))?.avg_pool(&options)?;
    one(sums.div(&Var::new(ones.avg_pool(&options)?)))
}

fn norm<R: Runtime, const N: usize>(c: &NodeCall<'_, R>) -> NodeOutputs<R> {
    let (mut options, mut before) = options::<R, N>(c)?;
    for (i, &pad) in options.padding.iter().enumerate().filter(|(_, pad)| **pad > 0) {
        before[i + 2] = (pad as isize, pad as isize);
    }
    options.padding = [0; N];
    one(c.x(0)?.abs()?.pad_with(&before, PadMode::Constant(0.0))?.lp_pool(c.int("p", 2) as f64, &options))
}

/// Positions are of the whole output, without the size that a third input states: that one is padded afterwards.
fn unpool<R: Runtime>(c: &NodeCall<'_, R>) -> NodeOutputs<R> {
    let (x, places) = (c.x(0)?, c.x(1)?);
    let list =
        |name: &str| -> Result<[usize; 2]> { array(name, &c.ints(name).map_or(Ok(vec![1; 2]), |list| sizes(&list))?) };
    if c.ints("pads").is_some_and(|pads| pads.iter().any(|&pad| pad != 0)) {
        return Err(bad("has pads, which are not supported"));
    }
    let (kernel, stride) = (list("kernel_shape")?, list("strides")?);
    let [_, _, h, w] = array("the shape", &x.dims())?;
    let size = [h.max(1) - 1, w.max(1) - 1];
    let size: [usize; 2] = std::array::from_fn(|i| size[i] * stride[i] + kernel[i]);
    let y = x.max_unpool(&places.rem(size[0] as f64 * size[1] as f64)?, size)?;
    if c.ins.len() < 3 {
        return one(Ok(y));
    }
    let [_, _, h, w]: [usize; 4] = array("the output's shape", &c.sizes(2)?)?;
    let rest = |to: usize, from: usize| (0, to as isize - from as isize);
    one(y.pad_with(&[(0, 0), (0, 0), rest(h, size[0]), rest(w, size[1])], PadMode::Constant(0.0)))
}
