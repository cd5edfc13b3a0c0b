//! Operators that make, cut, join and arrange tensors.

use numcore::{
    DType, Tensor,
    ops::{ColumnOps, InterpolateOps, JoinOps, PadMode, PadOps, PointwiseOps, PoolOptions, RepeatOps, ViewOps, cat},
};

use super::one;
use crate::{
    call::{Call, dtype},
    file::Answer,
    graph::T,
};

pub fn run(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    match c.op() {
        "Constant" => constant(c),
        "ConstantOfShape" => {
            let value = c.tensor("value").unwrap_or_else(|| c.scalar(0.0, DType::F32))?;
            one(value.reshape([0usize; 0])?.broadcast_to(sizes(&c.host(0)?.ok_or("a shape")?)))
        }
        "Reshape" => one(reshape(c)),
        "Flatten" => {
            let x = c.x(0)?;
            let axis = c.int("axis", 1);
            let axis = if axis < 0 { axis + x.dims().len() as i64 } else { axis } as usize;
            let (a, b) = x.dims().split_at(axis);
            one(x.reshape([a.iter().product::<usize>(), b.iter().product()]))
        }
        "Transpose" => {
            let x = c.x(0)?;
            let order = c.ints("perm").unwrap_or_else(|| (0..x.dims().len() as i64).rev().collect());
            one(x.permute_axes(&sizes(&order)))
        }
        "Squeeze" => squeeze(c),
        "Unsqueeze" => unsqueeze(c),
        "Concat" => one(cat(&c.all()?, c.int("axis", 0) as isize)),
        "Split" => split(c),
        "Slice" => slice(c),
        "Expand" => {
            let x = c.x(0)?;
            let to = numcore::Shape::new(&sizes(&c.host(1)?.ok_or("a shape")?))?;
            one(x.broadcast_to(x.shape().broadcast(&to).ok_or("shapes that do not fit")?))
        }
        "Tile" => one(c.x(0)?.repeat(&sizes(&c.host(1)?.ok_or("counts")?))),
        "Pad" => pad(c),
        "Shape" => {
            let dims: Vec<i64> = c.x(0)?.dims().iter().map(|&d| d as i64).collect();
            let n = dims.len() as i64;
            let at = |i: i64| (if i < 0 { i + n } else { i }).clamp(0, n) as usize;
            let (start, end) = (at(c.int("start", 0)), at(c.int("end", n)));
            Ok(Some(vec![c.integers(&dims[start..end.max(start)])?]))
        }
        "Size" => Ok(Some(vec![c.scalar(c.x(0)?.shape().numel() as f64, DType::I64)?])),
        "Range" => range(c),
        "EyeLike" => {
            let x = c.x(0)?;
            let to = if c.has("dtype") { dtype(c.int("dtype", 1))? } else { x.dtype() };
            let (rows, columns) = (x.dims()[0], x.dims()[1]);
            let at = |n: usize| Tensor::arange(c.cpu(), 0i64, 1i64, n, DType::I64);
            let moved = at(rows)?.add(c.int("k", 0) as f64)?.reshape([rows, 1])?;
            one(at(columns)?.eq(&moved)?.to_dtype(to))
        }
        "Trilu" => trilu(c),
        "DepthToSpace" => depth_to_space(c),
        "SpaceToDepth" => {
            let (x, b) = (c.x(0)?, c.int("blocksize", 1) as usize);
            let &[n, ch, h, w] = x.dims() else { return Err("four axes".into()) };
            let order = if c.text("mode", "DCR") == "CRD" { [0, 1, 3, 5, 2, 4] } else { [0, 3, 5, 1, 2, 4] };
            let split = x.reshape([n, ch, h / b, b, w / b, b])?.permute(&order)?;
            one(split.reshape([n, ch * b * b, h / b, w / b]))
        }
        "CenterCropPad" => center(c),
        "ReverseSequence" => reverse(c),
        "Col2Im" => columns(c),
        _ => Ok(None),
    }
}

pub fn sizes(values: &[i64]) -> Vec<usize> {
    values.iter().map(|&v| v as usize).collect()
}

fn constant(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    if let Some(x) = c.tensor("value") {
        return Ok(Some(vec![x?]));
    }
    let floats = |values: Vec<f64>| -> Answer<T> { Ok(Tensor::from_vec(c.cpu(), values)?.to_dtype(DType::F32)?) };
    if let Some(values) = c.floats("value_floats") {
        return Ok(Some(vec![floats(values)?]));
    }
    if let Some(values) = c.ints("value_ints") {
        return Ok(Some(vec![c.integers(&values)?]));
    }
    if c.has("value_float") {
        return Ok(Some(vec![c.scalar(c.float("value_float", 0.0), DType::F32)?]));
    }
    if c.has("value_int") {
        return Ok(Some(vec![c.integers(&[c.int("value_int", 0)])?.reshape([0usize; 0])?]));
    }
    Err("a constant that is no number".into())
}

fn reshape(c: &Call<'_>) -> numcore::Result<T> {
    let x = c.ins[0].as_ref().map_or_else(|| Err(numcore::Error::argument("Reshape", "no input")), Ok)?;
    let wanted = c.list("shape", 1).ok().flatten().unwrap_or_default();
    let kept = |(i, &d): (usize, &i64)| if d == 0 && c.int("allowzero", 0) == 0 { x.dims()[i] as i64 } else { d };
    let mut to: Vec<i64> = wanted.iter().enumerate().map(kept).collect();
    let known: i64 = to.iter().filter(|&&d| d >= 0).product();
    to.iter_mut().filter(|d| **d < 0).for_each(|d| *d = x.shape().numel() as i64 / known.max(1));
    x.reshape(sizes(&to))
}

fn squeeze(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    let x = c.x(0)?;
    let axes = match c.list("axes", 1)? {
        Some(axes) => axes.iter().map(|&a| x.shape().axis("Squeeze", a as isize)).collect::<Result<Vec<_>, _>>()?,
        None => (0..x.dims().len()).filter(|&i| x.dims()[i] == 1).collect(),
    };
    let rest: Vec<usize> = (0..x.dims().len()).filter(|i| !axes.contains(i)).map(|i| x.dims()[i]).collect();
    one(x.reshape(rest))
}

fn unsqueeze(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    let x = c.x(0)?;
    let axes = c.list("axes", 1)?.ok_or("axes")?;
    let rank = x.dims().len() + axes.len();
    let axes: Vec<usize> = axes.iter().map(|&a| (if a < 0 { a + rank as i64 } else { a }) as usize).collect();
    let mut rest = x.dims().iter();
    let dims = (0..rank).map(|i| if axes.contains(&i) { 1 } else { rest.next().copied().unwrap_or(1) });
    one(x.reshape(dims.collect::<Vec<_>>()))
}

fn split(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    let (x, axis) = (c.x(0)?, c.int("axis", 0) as isize);
    let size = x.dims()[x.shape().axis("Split", axis)?];
    let parts = c.int("num_outputs", c.outputs() as i64) as usize;
    let even = || {
        let most = size.div_ceil(parts);
        (0..parts).map(|i| most.min(size.saturating_sub(i * most)) as i64).collect()
    };
    let lens = c.list("split", 1)?.unwrap_or_else(even);
    let mut start = 0;
    let mut outs = Vec::new();
    for len in sizes(&lens) {
        outs.push(x.narrow(axis, start, len)?);
        start += len;
    }
    Ok(Some(outs))
}

fn slice(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    let mut x = c.x(0)?.clone();
    let starts = c.list("starts", 1)?.ok_or("starts")?;
    let ends = c.list("ends", 2)?.ok_or("ends")?;
    let axes = c.list("axes", 3)?.unwrap_or_else(|| (0..starts.len() as i64).collect());
    let steps = c.host(4)?.unwrap_or(vec![1; starts.len()]);
    for (i, &axis) in axes.iter().enumerate() {
        let n = x.dims()[x.shape().axis("Slice", axis as isize)?] as i64;
        let (mut at, mut end, step) = (starts[i], ends[i], steps[i]);
        let from_end = |v: i64| if v < 0 { v + n } else { v };
        (at, end) = (from_end(at), from_end(end));
        if step > 0 {
            (at, end) = (at.clamp(0, n), end.clamp(0, n));
            let len = (end - at).max(0) as usize;
            x = x.slice(axis as isize, at.min(n) as usize, len.div_ceil(step as usize), step as usize)?;
        } else {
            (at, end) = (at.clamp(0, n - 1), end.clamp(-1, n - 1));
            let len = (at - end).max(0) as usize;
            let back = (n - 1 - at) as usize;
            let steps = step.unsigned_abs() as usize;
            x = x.flip(&[axis as isize])?.slice(axis as isize, back, len.div_ceil(steps), steps)?;
        }
    }
    one(Ok(x))
}

fn pad(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    let x = c.x(0)?;
    let given = c.list("pads", 1)?.ok_or("pads")?;
    let axes = c.host(3)?.unwrap_or_else(|| (0..x.dims().len() as i64).collect());
    let mut pads = vec![(0isize, 0isize); x.dims().len()];
    for (i, &axis) in axes.iter().enumerate() {
        let at = x.shape().axis("Pad", axis as isize)?;
        pads[at] = (given[i] as isize, given[i + axes.len()] as isize);
    }
    let value = c.opt(2).map(|x| x.item()).transpose()?.unwrap_or(c.float("value", 0.0));
    let mode = match c.text("mode", "constant") {
        "reflect" => PadMode::Reflect,
        "edge" => PadMode::Replicate,
        "wrap" => PadMode::Circular,
        _ => PadMode::Constant(value),
    };
    one(x.pad_with(&pads, mode))
}

fn range(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    let of = c.x(0)?.dtype();
    let [start, limit, step] = [c.x(0)?.item()?, c.x(1)?.item()?, c.x(2)?.item()?];
    let len = ((limit - start) / step).ceil().max(0.0) as usize;
    if of.is_int() {
        return one(Tensor::arange(c.cpu(), start as i64, step as i64, len, of));
    }
    one(Tensor::arange(c.cpu(), start, step, len, of))
}

fn trilu(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    let (x, k) = (c.x(0)?, c.host(1)?.map_or(0, |k| k[0]) as isize);
    one(if c.int("upper", 1) == 1 { x.triu(k) } else { x.tril(k) })
}

fn depth_to_space(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    let (x, b) = (c.x(0)?, c.int("blocksize", 1) as usize);
    if c.text("mode", "DCR") == "CRD" {
        return one(x.pixel_shuffle(b));
    }
    let &[n, ch, h, w] = x.dims() else { return Err("four axes".into()) };
    let rest = ch / (b * b);
    let split = x.reshape([n, b, b, rest, h, w])?.permute(&[0, 3, 4, 1, 5, 2])?;
    one(split.reshape([n, rest, h * b, w * b]))
}

/// Cut or padded evenly at both ends.
fn center(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    let x = c.x(0)?;
    let to = c.host(1)?.ok_or("a shape")?;
    let axes = c.ints("axes").unwrap_or_else(|| (0..to.len() as i64).collect());
    let mut pads = vec![(0isize, 0isize); x.dims().len()];
    for (&axis, &to) in axes.iter().zip(&to) {
        let at = x.shape().axis("CenterCropPad", axis as isize)?;
        let (n, to) = (x.dims()[at] as isize, to as isize);
        let before = if to >= n { (to - n) / 2 } else { -((n - to) / 2) };
        pads[at] = (before, to - n - before);
    }
    one(x.pad_with(&pads, PadMode::Constant(0.0)))
}

fn reverse(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    let x = c.x(0)?;
    let (batch, time) = (c.int("batch_axis", 1) as isize, c.int("time_axis", 0) as isize);
    let mut rows = Vec::new();
    for (b, len) in c.host(1)?.ok_or("lengths")?.into_iter().enumerate() {
        let row = x.narrow(batch, b, 1)?;
        let size = row.dims()[row.shape().axis("ReverseSequence", time)?];
        let flipped = row.narrow(time, 0, len as usize)?.flip(&[time])?;
        rows.push(cat(&[&flipped, &row.narrow(time, len as usize, size - len as usize)?], time)?);
    }
    one(cat(&rows.iter().collect::<Vec<_>>(), batch))
}

fn columns(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    let image = sizes(&c.host(1)?.ok_or("an image's shape")?);
    match image.len() {
        1 => columns_of::<1>(c, &image),
        2 => columns_of::<2>(c, &image),
        _ => columns_of::<3>(c, &image),
    }
}

fn columns_of<const N: usize>(c: &Call<'_>, image: &[usize]) -> Answer<Option<Vec<T>>> {
    let list = |name: &str, default: usize| -> Answer<[usize; N]> {
        let given = c.ints(name).map(|v| sizes(&v)).unwrap_or(vec![default; N]);
        Ok(given[..N].try_into()?)
    };
    let kernel: [usize; N] = sizes(&c.host(2)?.ok_or("a block's shape")?)[..].try_into()?;
    let mut options = PoolOptions::new(kernel);
    options.stride = list("strides", 1)?;
    options.dilation = list("dilations", 1)?;
    // Pads are even in the suite, and may be wider than half of the block: the image is padded, and cut afterwards.
    let pads: [usize; N] = list("pads", 0)?;
    let padded: [usize; N] = std::array::from_fn(|i| image[i] + 2 * pads[i]);
    let mut x = c.x(0)?.col2im(padded, &options)?;
    for (i, &pad) in pads.iter().enumerate() {
        x = x.narrow((i + 2) as isize, pad, image[i])?;
    }
    one(Ok(x))
}
