//! Operators that make, cut, join and arrange tensors.

use autograd::Var;
use numcore::{
    DType, Result, Runtime, Shape, Tensor,
    ops::{
        Apply, ColumnOps, InterpolateOps, JoinOps, PadMode, PadOps, PointwiseOps, PoolOptions, RepeatOps, ViewOps, cat,
    },
};

use super::{
    super::call::{NodeCall, NodeOutputs, array, bad, size, sizes},
    OperatorRow, one, row,
};

pub(super) fn find<R: Runtime>(op: &str) -> Option<OperatorRow<R>> {
    match op {
        "ConstantOfShape" => row(&["value"], |c| {
            let value = match c.tensor("value") {
                Some(value) => value.var(c.device())?.clone(),
                None => c.scalar(0.0, DType::F32)?,
            };
            one(value.reshape([0usize; 0])?.broadcast_to(c.sizes(0)?))
        }),
        "Reshape" => row(&["shape", "allowzero"], reshape),
        "Flatten" => row(&["axis"], |c| {
            let (x, axis) = (c.x(0)?, c.int("axis", 1));
            let dims = x.dims();
            let at = if axis == dims.len() as i64 { dims.len() } else { c.axis(0, axis)? };
            let (a, b) = dims.split_at(at);
            one(x.reshape([a.iter().product::<usize>(), b.iter().product()]))
        }),
        "Transpose" => row(&["perm"], |c| {
            let x = c.x(0)?;
            let order = c.ints("perm").unwrap_or_else(|| (0..x.dims().len() as i64).rev().collect());
            one(x.permute_axes(&sizes(&order)?))
        }),
        "Squeeze" => row(&["axes"], squeeze),
        "Unsqueeze" => row(&["axes"], unsqueeze),
        "Concat" => row(&["axis"], |c| one(cat(&c.all()?, c.int("axis", 0) as isize))),
        "Split" => row(&["axis", "split", "num_outputs"], split),
        "Slice" => row(&["axes", "starts", "ends"], slice),
        "Expand" => row(&[], |c| {
            let (x, to) = (c.x(0)?, Shape::new(&c.sizes(1)?)?);
            let from = x.spec().shape;
            let both = from.broadcast(&to).ok_or_else(|| bad(format!("{from} cannot be expanded to {to}")))?;
            one(x.broadcast_to(both))
        }),
        "Tile" => row(&[], |c| one(c.x(0)?.repeat(&c.sizes(1)?))),
        "Pad" => row(&["mode", "pads", "value"], pad),
        "Range" => row(&[], range),
        "EyeLike" => row(&["dtype", "k"], |c| {
            let x = c.x(0)?;
            let to = if c.has("dtype") { c.dtype("dtype", 1)? } else { x.dtype() };
            let [rows, columns] = array("the shape", &x.dims())?;
            let at = |n: usize| Tensor::arange(c.device(), 0i64, 1i64, n, DType::I64);
            let moved = at(rows)?.add(c.int("k", 0) as f64)?.reshape([rows, 1])?;
            one(Ok(Var::new(at(columns)?.eq(&moved)?.to_dtype(to)?)))
        }),
        "Trilu" => row(&["upper"], |c| {
            let (x, k) = (c.x(0)?, c.number(1)?.unwrap_or(0.0) as isize);
            one(if c.int("upper", 1) == 1 { x.triu(k) } else { x.tril(k) })
        }),
        "DepthToSpace" => row(&["blocksize", "mode"], depth_to_space),
        "SpaceToDepth" => row(&["blocksize", "mode"], space_to_depth),
        "CenterCropPad" => row(&["axes"], center),
        "ReverseSequence" => row(&["batch_axis", "time_axis"], reverse),
        "Col2Im" => row(&["dilations", "pads", "strides"], |c| {
            let image = c.sizes(1)?;
            match image.len() {
                1 => columns::<R, 1>(c, &image),
                2 => columns::<R, 2>(c, &image),
                _ => columns::<R, 3>(c, &image),
            }
        }),
        _ => None,
    }
}

fn reshape<R: Runtime>(c: &NodeCall<'_, R>) -> NodeOutputs<R> {
    let x = c.x(0)?;
    let (dims, wanted) = (x.dims(), c.list("shape", 1)?.ok_or_else(|| bad("the new shape is missing"))?);
    let mut to = Vec::new();
    for (i, &d) in wanted.iter().enumerate() {
        to.push(match d {
            0 if !c.flag("allowzero") => {
                *dims.get(i).ok_or_else(|| bad("keeps a size that the input does not have"))?
            }
            -1 => usize::MAX,
            d => size(d)?,
        });
    }
    let known = to.iter().filter(|&&d| d != usize::MAX).try_fold(1usize, |n, &d| n.checked_mul(d));
    let known = known.ok_or_else(|| bad(format!("has too many elements: {wanted:?}")))?;
    to.iter_mut().filter(|d| **d == usize::MAX).for_each(|d| *d = x.spec().shape.numel() / known.max(1));
    one(x.reshape(to))
}

fn squeeze<R: Runtime>(c: &NodeCall<'_, R>) -> NodeOutputs<R> {
    let x = c.x(0)?;
    let dims = x.dims();
    let axes = match c.list("axes", 1)? {
        Some(axes) => axes.iter().map(|&a| c.axis(0, a)).collect::<Result<Vec<_>>>()?,
        None => (0..dims.len()).filter(|&i| dims[i] == 1).collect(),
    };
    one(x.reshape((0..dims.len()).filter(|i| !axes.contains(i)).map(|i| dims[i]).collect::<Vec<_>>()))
}

fn unsqueeze<R: Runtime>(c: &NodeCall<'_, R>) -> NodeOutputs<R> {
    let x = c.x(0)?;
    let axes = c.list("axes", 1)?.ok_or_else(|| bad("the axes are missing"))?;
    let rank = (x.dims().len() + axes.len()) as i64;
    if axes.iter().any(|a| !(-rank..rank).contains(a)) {
        return Err(bad(format!("axes {axes:?} of a value with {rank} axes")));
    }
    let dims = x.dims();
    let mut rest = dims.iter();
    let new = |i: i64| axes.contains(&i) || axes.contains(&(i - rank));
    one(x.reshape((0..rank).map(|i| if new(i) { 1 } else { rest.next().copied().unwrap_or(1) }).collect::<Vec<_>>()))
}

fn split<R: Runtime>(c: &NodeCall<'_, R>) -> NodeOutputs<R> {
    let (x, axis) = (c.x(0)?, c.axis(0, c.int("axis", 0))?);
    let (all, parts) = (x.dims()[axis], c.size("num_outputs", c.outputs() as i64)?.max(1));
    let even = || {
        let most = all.div_ceil(parts);
        (0..parts.min(c.outputs())).map(|i| most.min(all.saturating_sub(i * most)) as i64).collect()
    };
    let lens = c.list("split", 1)?.unwrap_or_else(even);
    let (mut start, mut outs) = (0, Vec::new());
    for len in sizes(&lens)? {
        outs.push(x.narrow(axis as isize, start, len)?);
        start += len;
    }
    Ok(outs)
}

fn slice<R: Runtime>(c: &NodeCall<'_, R>) -> NodeOutputs<R> {
    let mut x = c.x(0)?.clone();
    let starts = c.list("starts", 1)?.ok_or_else(|| bad("the starts are missing"))?;
    let ends = c.list("ends", 2)?.ok_or_else(|| bad("the ends are missing"))?;
    let axes = c.list("axes", 3)?.unwrap_or_else(|| (0..starts.len() as i64).collect());
    let steps = c.host(4)?.unwrap_or(vec![1; starts.len()]);
    if [ends.len(), axes.len(), steps.len()] != [starts.len(); 3] {
        return Err(bad("needs as many starts as ends, axes and steps"));
    }
    for (i, &axis) in axes.iter().enumerate() {
        let axis = c.axis(0, axis)?;
        let (n, step) = (x.dims()[axis] as i64, steps[i]);
        let from_end = |v: i64| if v < 0 { v.saturating_add(n) } else { v };
        let (at, end) = (from_end(starts[i]), from_end(ends[i]));
        let every = usize::try_from(step.unsigned_abs()).unwrap_or(usize::MAX).min(n.max(1) as usize);
        if step > 0 {
            let (at, end) = (at.clamp(0, n), end.clamp(0, n));
            let len = (end - at).max(0) as usize;
            x = x.slice(axis as isize, at as usize, len.div_ceil(every), every)?;
        } else if step < 0 && n > 0 {
            let (at, end) = (at.clamp(0, n - 1), end.clamp(-1, n - 1));
            let len = (at - end).max(0) as usize;
            x = x.flip(&[axis as isize])?.slice(axis as isize, (n - 1 - at) as usize, len.div_ceil(every), every)?;
        } else if step == 0 {
            return Err(bad("has the step 0"));
        }
    }
    one(Ok(x))
}

fn pad<R: Runtime>(c: &NodeCall<'_, R>) -> NodeOutputs<R> {
    let x = c.x(0)?;
    let given = c.list("pads", 1)?.ok_or_else(|| bad("the pads are missing"))?;
    let axes = c.host(3)?.unwrap_or_else(|| (0..x.dims().len() as i64).collect());
    if given.len() != 2 * axes.len() || given.iter().any(|pad| pad.unsigned_abs() > 1 << 31) {
        return Err(bad(format!("has the pads {given:?} for {} axes, which need two each", axes.len())));
    }
    let mut pads = vec![(0isize, 0isize); x.dims().len()];
    for (i, &axis) in axes.iter().enumerate() {
        pads[c.axis(0, axis)?] = (given[i] as isize, given[i + axes.len()] as isize);
    }
    let mode = match c.text("mode", "constant") {
        "reflect" => PadMode::Reflect,
        "edge" => PadMode::Replicate,
        "wrap" => PadMode::Circular,
        _ => PadMode::Constant(c.number(2)?.unwrap_or(c.float("value", 0.0))),
    };
    one(x.pad_with(&pads, mode))
}

fn range<R: Runtime>(c: &NodeCall<'_, R>) -> NodeOutputs<R> {
    let of = c.x(0)?.dtype();
    let number = |i: usize| c.number(i)?.ok_or_else(|| bad(format!("input {i} is missing")));
    let (start, limit, step) = (number(0)?, number(1)?, number(2)?);
    let len = size(((limit - start) / step).ceil().max(0.0) as i64)?;
    one(Ok(Var::new(if of.is_int() {
        Tensor::arange(c.device(), start as i64, step as i64, len, of)?
    } else {
        Tensor::arange(c.device(), start, step, len, of)?
    })))
}

/// The sizes of an image, and the block's, which divides sizes.
fn blocks<R: Runtime>(c: &NodeCall<'_, R>) -> Result<([usize; 4], usize)> {
    let dims = array("the shape", &c.x(0)?.dims())?;
    match c.size("blocksize", 1)? {
        0 | 4097.. => Err(bad("the block's size must be in 1..=4096")),
        block => Ok((dims, block)),
    }
}

fn depth_to_space<R: Runtime>(c: &NodeCall<'_, R>) -> NodeOutputs<R> {
    let (x, ([n, channels, h, w], b)) = (c.x(0)?, blocks(c)?);
    if c.text("mode", "DCR") == "CRD" {
        return one(x.pixel_shuffle(b));
    }
    let rest = channels / (b * b);
    let split = x.reshape([n, b, b, rest, h, w])?.permute(&[0, 3, 4, 1, 5, 2])?;
    one(split.reshape([n, rest, h * b, w * b]))
}

fn space_to_depth<R: Runtime>(c: &NodeCall<'_, R>) -> NodeOutputs<R> {
    let (x, ([n, channels, h, w], b)) = (c.x(0)?, blocks(c)?);
    let order = if c.text("mode", "DCR") == "CRD" { [0, 1, 3, 5, 2, 4] } else { [0, 3, 5, 1, 2, 4] };
    let split = x.reshape([n, channels, h / b, b, w / b, b])?.permute(&order)?;
    one(split.reshape([n, channels * b * b, h / b, w / b]))
}

/// Cut or padded evenly at both ends.
fn center<R: Runtime>(c: &NodeCall<'_, R>) -> NodeOutputs<R> {
    let (x, to) = (c.x(0)?, c.sizes(1)?);
    let axes = c.ints("axes").unwrap_or_else(|| (0..to.len() as i64).collect());
    let mut pads = vec![(0isize, 0isize); x.dims().len()];
    for (&axis, &to) in axes.iter().zip(&to) {
        let at = c.axis(0, axis)?;
        let (n, to) = (x.dims()[at] as isize, to as isize);
        let before = if to >= n { (to - n) / 2 } else { -((n - to) / 2) };
        pads[at] = (before, to - n - before);
    }
    one(x.pad_with(&pads, PadMode::Constant(0.0)))
}

fn reverse<R: Runtime>(c: &NodeCall<'_, R>) -> NodeOutputs<R> {
    let (batch, time) = (c.axis(0, c.int("batch_axis", 1))? as isize, c.axis(0, c.int("time_axis", 0))? as isize);
    let x = c.x(0)?;
    let steps = x.dims()[time as usize];
    let mut rows = Vec::new();
    for (b, len) in c.sizes(1)?.into_iter().enumerate() {
        let (row, len) = (x.narrow(batch, b, 1)?, len.min(steps));
        let flipped = row.narrow(time, 0, len)?.flip(&[time])?;
        rows.push(cat(&[&flipped, &row.narrow(time, len, steps - len)?], time)?);
    }
    one(cat(&rows.iter().collect::<Vec<_>>(), batch))
}

fn columns<R: Runtime, const N: usize>(c: &NodeCall<'_, R>, image: &[usize]) -> NodeOutputs<R> {
    let list = |name: &str, default: usize| -> Result<Vec<usize>> {
        c.ints(name).map_or(Ok(vec![default; N]), |list| sizes(&list))
    };
    let image: [usize; N] = array("the image", image)?;
    let mut options = PoolOptions::new(array::<usize, N>("the block", &c.sizes(2)?)?);
    options.stride = array("strides", &list("strides", 1)?)?;
    options.dilation = array("dilations", &list("dilations", 1)?)?;
    // Pads may be wider than half of the block: the image is padded, and cut afterwards.
    let pads = list("pads", 0)?;
    if pads.len() < N {
        return Err(bad("needs a pad for each axis"));
    }
    let (before, after) = (&pads[..N], if pads.len() == 2 * N { &pads[N..] } else { &pads[..N] });
    let padded: [usize; N] = std::array::from_fn(|i| image[i] + before[i] + after[i]);
    let mut x = c.x(0)?.col2im(padded, &options)?;
    for (i, &pad) in before.iter().enumerate() {
        x = x.narrow((i + 2) as isize, pad, image[i])?;
    }
    one(Ok(x))
}
