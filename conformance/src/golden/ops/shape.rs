//! Views, joins and indices.

use autograd::Var;
use numcore::{
    DType, Error, Result, Runtime, Tensor,
    ops::{Apply, IndexOps, JoinOps, PointwiseOps, ViewOps, cat, stack},
};
use serde_json::Value;

use crate::golden::call::{Call, OpFn, one};

pub(super) fn find<R: Runtime>(op: &str) -> Option<OpFn<R>> {
    let row: OpFn<R> = match op {
        "transpose" => |c| match c.attrs.list(&["dims"])?[..] {
            [a, b] => one(c.x(0)?.transpose(a, b)),
            _ => one(c.x(0)?.transpose(c.attrs.isize(&["dim0"], 0)?, c.attrs.isize(&["dim1"], 1)?)),
        },
        "permute" => |c| one(c.x(0)?.permute(&c.attrs.list(&["dims"])?)),
        "reshape" | "view" => reshape,
        "flatten" => |c| {
            one(c.x(0)?.flatten(c.attrs.isize(&["start_dim", "start"], 0)?, c.attrs.isize(&["end_dim", "end"], -1)?))
        },
        "squeeze" => |c| one(c.x(0)?.squeeze(axis(c, 0)?)),
        "unsqueeze" => |c| one(c.x(0)?.unsqueeze(axis(c, 0)?)),
        "broadcast_to" | "expand" => |c| one(c.x(0)?.broadcast_to(c.out_shape(0)?).and_then(|y| stated(c, y))),
        "narrow" => {
            |c| one(c.x(0)?.narrow(axis(c, 0)?, c.attrs.usize(&["start"], 0)?, c.attrs.need(&["len", "length"])?))
        }
        "select" => |c| one(c.x(0)?.select(axis(c, 0)?, c.attrs.need(&["index"])?)),
        "slice_step" => slice_step,
        "split" => |c| c.x(0)?.split(axis(c, 0)?, c.attrs.need(&["size", "split_size"])?),
        "chunk" => |c| c.x(0)?.chunk(axis(c, 0)?, c.attrs.need(&["chunks"])?),
        "unfold" => |c| one(c.x(0)?.unfold(axis(c, 0)?, c.attrs.need(&["size"])?, c.attrs.usize(&["step"], 1)?, 1)),
        "cat" => |c| one(cat(&c.all(), axis(c, 0)?)),
        "stack" => |c| one(stack(&c.all(), axis(c, 0)?)),
        "flip" => |c| one(c.x(0)?.flip(&c.attrs.list(&["dims", "dim"])?)),
        "roll" => roll,
        "pad" => |c| one(c.x(0)?.pad(&pads(c)?, c.attrs.f64("value", 0.0)?)),
        "tril" => |c| one(c.x(0)?.tril(c.attrs.isize(&["k", "diagonal"], 0)?)),
        "triu" => |c| one(c.x(0)?.triu(c.attrs.isize(&["k", "diagonal"], 0)?)),
        "index_select" => |c| one(c.x(0)?.index_select(axis(c, 0)?, c.x(1)?)),
        "gather" => |c| one(c.x(0)?.gather(axis(c, 0)?, c.x(1)?)),
        "scatter_add" => |c| one(c.x(0)?.scatter_add(axis(c, 0)?, c.x(1)?, c.x(2)?)),
        "index_add" => |c| {
            let alpha = c.attrs.f64("alpha", 1.0)?;
            let src = if alpha == 1.0 { c.x(2)?.clone() } else { c.x(2)?.mul(alpha)? };
            one(c.x(0)?.index_add(axis(c, 0)?, c.x(1)?, &src))
        },
        "embedding" => embedding,
        "masked_fill" => |c| one(c.x(0)?.masked_fill(c.x(1)?, c.attrs.f64("value", 0.0)?)),
        "one_hot" => |c| one(c.x(0)?.one_hot(c.attrs.need(&["classes", "num_classes"])?)),
        _ => return None,
    };
    Some(row)
}

fn axis<R: Runtime>(c: &Call<'_, R>, default: isize) -> Result<isize> {
    c.attrs.isize(&["dim", "axis"], default)
}

/// Checks that a stated shape equals that of the file (−1 stands for a size that is kept).
fn stated<R: Runtime>(c: &Call<'_, R>, y: Var<R>) -> Result<Var<R>> {
    let shape = c.attrs.list(&["shape", "size", "sizes"])?;
    let fits = shape.len() == y.dims().len() && shape.iter().zip(y.dims()).all(|(&s, d)| s == -1 || s == d as isize);
    if shape.is_empty() || fits {
        return Ok(y);
    }
    Err(Error::shape("golden", &[y.spec().shape], format!("the case states the shape {shape:?}")))
}

/// Reshapes to the stated shape, or else to that of the output; a note may request that two axes are exchanged before.
fn reshape<R: Runtime>(c: &Call<'_, R>) -> Result<Vec<Var<R>>> {
    let (mut x, note) = (c.x(0)?.clone(), c.note()?);
    if let Some((_, rest)) = note.split_once("transpose(") {
        let axes: Vec<isize> = rest.split([',', ')']).map_while(|s| s.trim().parse().ok()).collect();
        let [a, b] = axes[..] else { return Err(Error::format("golden", format!("the note `{note}` is not clear"))) };
        x = x.transpose(a, b)?;
    }
    let shape = c.attrs.list(&["shape", "size"])?;
    if shape.is_empty() {
        return one(x.reshape(c.out_shape(0)?));
    }
    let known: usize = shape.iter().filter(|&&d| d >= 0).map(|&d| d as usize).product();
    let rest = x.spec().shape.numel() / known.max(1);
    one(x.reshape(shape.iter().map(|&d| if d < 0 { rest } else { d as usize }).collect::<Vec<_>>()))
}

fn slice_step<R: Runtime>(c: &Call<'_, R>) -> Result<Vec<Var<R>>> {
    let (x, axis) = (c.x(0)?, axis(c, 0)?);
    let n = x.spec().shape[x.spec().shape.axis("golden", axis)?];
    let (start, step) = (c.attrs.usize(&["start"], 0)?.min(n), c.attrs.usize(&["step"], 1)?.max(1));
    let end = c.attrs.usize(&["end", "stop"], n)?.clamp(start, n);
    one(x.slice(axis, start, (end - start).div_ceil(step), step))
}

/// Looks up rows of a table; the row of the padding index gets no gradient.
fn embedding<R: Runtime>(c: &Call<'_, R>) -> Result<Vec<Var<R>>> {
    let table = c.x(0)?;
    let Some(padding) = c.attrs.maybe_isize(&["padding_idx"])? else { return one(table.embedding(c.x(1)?)) };
    let rows = table.dims()[0] as isize;
    let at = Tensor::arange(table.runtime(), 0i64, 1i64, rows as usize, DType::I64)?.reshape([rows as usize, 1])?;
    let frozen = Var::new(at.eq(padding.rem_euclid(rows.max(1)) as f64)?);
    one(table.detach().where_cond(&frozen, table)?.embedding(c.x(1)?))
}

/// Rolls elements along axes; without an axis, all elements in row-major order.
fn roll<R: Runtime>(c: &Call<'_, R>) -> Result<Vec<Var<R>>> {
    let (x, shifts) = (c.x(0)?, c.attrs.list(&["shift", "shifts"])?);
    let axes = c.attrs.list(&["dim", "dims"])?;
    if axes.is_empty() {
        let flat = x.reshape([x.spec().shape.numel()])?;
        return one(flat.roll(0, shifts.first().copied().unwrap_or(0))?.reshape(x.spec().shape));
    }
    one(axes.iter().zip(&shifts).try_fold(x.clone(), |x, (&a, &s)| x.roll(a, s)))
}

/// The padding of each axis, from a pair for each in order, or from PyTorch's flat list, which begins with the last
/// axis.
fn pads<R: Runtime>(c: &Call<'_, R>) -> Result<Vec<(usize, usize)>> {
    let bad = || Error::format("golden", "attribute `pad` must be pairs of counts");
    let given = c.attrs.raw("pad").and_then(Value::as_array).ok_or_else(bad)?;
    let count = |v: &Value| v.as_u64().map(|n| n as usize);
    if given.iter().all(Value::is_array) {
        let pair = |v: &Value| Some((count(v.get(0)?)?, count(v.get(1)?)?));
        return given.iter().map(|v| pair(v).ok_or_else(bad)).collect();
    }
    let flat: Vec<usize> = given.iter().map(|v| count(v).ok_or_else(bad)).collect::<Result<_>>()?;
    let mut pads: Vec<(usize, usize)> = flat.chunks(2).map(|p| (p[0], p.get(1).copied().unwrap_or(0))).collect();
    pads.resize(c.x(0)?.dims().len(), (0, 0));
    pads.reverse();
    Ok(pads)
}
