//! Pools.

use numcore::{
    DType, Tensor,
    ops::{PadMode, PadOps, PointwiseOps, PoolOps, PoolOptions, ReduceOps, ViewOps},
};

use super::{
    one,
    products::{Window, by_axes},
    shape::sizes,
};
use crate::{call::Call, file::Answer, graph::T};

pub fn run(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    match c.op() {
        "MaxPool" => by_axes(c, largest::<1>, largest::<2>, largest::<3>),
        "AveragePool" => by_axes(c, mean::<1>, mean::<2>, mean::<3>),
        "LpPool" => by_axes(c, norm::<1>, norm::<2>, norm::<3>),
        "GlobalAveragePool" => one(c.x(0)?.mean_keepdim(&(2..c.x(0)?.dims().len() as isize).collect::<Vec<_>>())),
        "GlobalMaxPool" => one(c.x(0)?.amax_keepdim(&(2..c.x(0)?.dims().len() as isize).collect::<Vec<_>>())),
        "MaxUnpool" => unpool(c),
        _ => Ok(None),
    }
}

/// The options, and what is padded before: everything, where the two sides differ or are wider than half the window.
fn options<const N: usize>(c: &Call<'_>) -> Answer<(PoolOptions<N>, Vec<(isize, isize)>)> {
    let kernel: [usize; N] = sizes(&c.ints("kernel_shape").ok_or("a kernel's shape")?)[..].try_into()?;
    let window = Window::of(c, c.x(0)?, kernel)?;
    let mut options = PoolOptions::new(kernel);
    (options.stride, options.dilation) = (window.stride, window.dilation);
    options.ceil_mode = c.int("ceil_mode", 0) == 1;
    options.count_include_pad = c.int("count_include_pad", 0) == 1;
    let mut before = vec![(0, 0); N + 2];
    if window.pads.iter().zip(&kernel).all(|(&(a, b), &k)| a == b && 2 * a <= k) {
        options.padding = window.pads.map(|(a, _)| a);
    } else {
        (0..N).for_each(|i| before[i + 2] = (window.pads[i].0 as isize, window.pads[i].1 as isize));
    }
    Ok((options, before))
}

fn largest<const N: usize>(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    let (options, before) = options::<N>(c)?;
    let x = c.x(0)?;
    let lowest = if x.dtype().is_float() { f64::NEG_INFINITY } else { 0.0 };
    let padded =
        if before.iter().any(|&p| p != (0, 0)) { x.pad_with(&before, PadMode::Constant(lowest))? } else { x.clone() };
    if c.outputs() == 1 {
        return one(padded.max_pool(&options));
    }
    let (values, places) = padded.max_pool_with_indices(&options)?;
    let (rows, inner) = (x.dims()[0] * x.dims()[1], x.dims()[2..].iter().product::<usize>());
    let places = if c.int("storage_order", 0) == 1 { by_columns(&places, &x.dims()[2..])? } else { places };
    let start = Tensor::arange(c.cpu(), 0i64, inner as i64, rows, DType::I64)?;
    let mut along = vec![1; N + 2];
    along[..2].copy_from_slice(&x.dims()[..2]);
    Ok(Some(vec![values, places.add(&start.reshape(along)?)?]))
}

/// Row-major positions of two axes as column-major ones.
fn by_columns(places: &T, dims: &[usize]) -> numcore::Result<T> {
    let (rows, columns) = (dims[0] as f64, dims[1] as f64);
    places.rem(columns)?.mul(rows)?.add(&places.div(columns)?)
}

fn mean<const N: usize>(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    let (mut options, before) = options::<N>(c)?;
    let x = c.x(0)?;
    if before.iter().all(|&p| p == (0, 0)) {
        return one(x.avg_pool(&options));
    }
    // The sums over windows, divided by how many elements each of them counts.
    options.divisor = Some(1.0);
    let counted = if options.count_include_pad { 1.0 } else { 0.0 };
    let ones = Tensor::ones(c.cpu(), x.dims(), x.dtype())?.pad_with(&before, PadMode::Constant(counted))?;
    let sums = x.pad_with(&before, PadMode::Constant(0.0))?.avg_pool(&options)?;
    one(sums.div(&ones.avg_pool(&options)?))
}

fn norm<const N: usize>(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    let (mut options, before) = options::<N>(c)?;
    let p = c.int("p", 2) as f64;
    let mut before = before;
    (0..N)
        .filter(|&i| options.padding[i] > 0)
        .for_each(|i| before[i + 2] = (options.padding[i] as isize, options.padding[i] as isize));
    options.padding = [0; N];
    one(c.x(0)?.abs()?.pad_with(&before, PadMode::Constant(0.0))?.lp_pool(p, &options))
}

/// Positions are of the whole output, without the size that a third input states: that one is padded afterwards.
fn unpool(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    let (x, places) = (c.x(0)?, c.x(1)?);
    let kernel = sizes(&c.ints("kernel_shape").ok_or("a kernel's shape")?);
    let stride = c.ints("strides").map(|v| sizes(&v)).unwrap_or(vec![1; kernel.len()]);
    let &[_, _, h, w] = x.dims() else { return Err("four axes".into()) };
    let size = [(h - 1) * stride[0] + kernel[0], (w - 1) * stride[1] + kernel[1]];
    let y = x.max_unpool(&places.rem((size[0] * size[1]) as f64)?, size)?;
    let Some(stated) = c.host(2)? else { return one(Ok(y)) };
    let rest = |i: usize| (0, stated[i + 2] as isize - size[i] as isize);
    one(y.pad_with(&[(0, 0), (0, 0), rest(0), rest(1)], PadMode::Constant(0.0)))
}
