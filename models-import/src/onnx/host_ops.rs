//! Operators on values of the host: arithmetic of shapes, as exporters write it.

use numcore::{DType, Result, Runtime};

use super::{
    call::{NodeCall, bad},
    control::SpecialRule,
    graph::PassValues,
    host::HostArray,
    value::NodeValue,
};

/// The outputs of a node whose inputs are all on the host.
///
/// Returns `None` if the operator, or this use of it, is left to the device, which also reports errors.
pub(super) fn run<R: Runtime>(c: &NodeCall<'_, R>, op: &str) -> Option<Vec<HostArray>> {
    let ins: Vec<Option<&HostArray>> = c.hosts()?;
    let x = (*ins.first()?)?;
    let at = |i: usize| ins.get(i).copied().flatten();
    let binary = |dtype: DType, f: fn(f64, f64) -> f64| {
        let other = at(1).filter(|other| other.dtype == x.dtype && ins.len() == 2)?;
        Some(vec![x.zipped(other, dtype, f)?])
    };
    let unary = |f: fn(f64) -> f64| {
        Some(vec![HostArray::new(x.dtype, x.dims.clone(), x.values.iter().map(|&v| f(v)).collect())?])
    };
    let is_float = x.dtype.is_float();
    match op {
        "Identity" => Some(vec![x.clone()]),
        "Add" => binary(x.dtype, |a, b| a + b),
        "Sub" => binary(x.dtype, |a, b| a - b),
        "Mul" => binary(x.dtype, |a, b| a * b),
        "Div" if is_float => binary(x.dtype, |a, b| a / b),
        "Div" if at(1)?.values.iter().all(|&v| v != 0.0) => binary(x.dtype, |a, b| (a / b).trunc()),
        "Mod" if !is_float && c.int("fmod", 0) == 0 && at(1)?.values.iter().all(|&v| v > 0.0) => {
            binary(x.dtype, f64::rem_euclid)
        }
        "Min" => binary(x.dtype, f64::min),
        "Max" => binary(x.dtype, f64::max),
        "Equal" => binary(DType::Bool, |a, b| f64::from(a == b)),
        "Less" => binary(DType::Bool, |a, b| f64::from(a < b)),
        "LessOrEqual" => binary(DType::Bool, |a, b| f64::from(a <= b)),
        "Greater" => binary(DType::Bool, |a, b| f64::from(a > b)),
        "GreaterOrEqual" => binary(DType::Bool, |a, b| f64::from(a >= b)),
        "And" => binary(DType::Bool, |a, b| f64::from(a != 0.0 && b != 0.0)),
        "Or" => binary(DType::Bool, |a, b| f64::from(a != 0.0 || b != 0.0)),
        "Not" => unary(|a| f64::from(a == 0.0)),
        "Neg" => unary(|a| -a),
        "Abs" => unary(f64::abs),
        "Sqrt" if is_float => unary(f64::sqrt),
        "Floor" if is_float => unary(f64::floor),
        "Ceil" if is_float => unary(f64::ceil),
        "Cast" => cast(x, super::tensor::dtype(c.int("to", 0)).ok()?),
        "Where" => {
            let (a, b) = (at(1)?, at(2)?);
            let same = a.zipped(b, a.dtype, |a, _| a)?;
            let all = x.zipped(&same, DType::Bool, |mask, _| mask)?;
            let (a, b) = (a.expanded(&all.dims)?, b.expanded(&all.dims)?);
            let pick = |i: usize| if all.values[i] != 0.0 { a.values[i] } else { b.values[i] };
            let values = (0..all.values.len()).map(pick).collect();
            (a.dtype == b.dtype).then(|| Some(vec![HostArray::new(a.dtype, all.dims.clone(), values)?]))?
        }
        "Concat" => concat(&ins.iter().copied().collect::<Option<Vec<_>>>()?),
        "Gather" => gather(x, at(1)?, c.int("axis", 0)),
        "Slice" => slice(c, x),
        "Squeeze" => squeeze(x, c.list("axes", 1).ok()?),
        "Unsqueeze" => unsqueeze(x, &c.list("axes", 1).ok()??),
        "Reshape" if c.int("allowzero", 0) == 0 => reshape(x, &c.list("shape", 1).ok()??),
        "Expand" => {
            let to: Vec<usize> = at(1)?.ints().iter().map(|&d| usize::try_from(d).ok()).collect::<Option<_>>()?;
            let to = numcore::Shape::new(&x.dims).ok()?.broadcast(&numcore::Shape::new(&to).ok()?)?;
            Some(vec![x.expanded(to.dims())?])
        }
        "Range" => range(x, at(1)?, at(2)?),
        "ConstantOfShape" => {
            let zero = HostArray { dtype: DType::F32, dims: vec![], values: vec![0.0] };
            // A value that is not on the host is left to the device.
            let value = if c.has("value") { c.filled()? } else { zero };
            let to: Vec<usize> = x.ints().iter().map(|&d| usize::try_from(d).ok()).collect::<Option<_>>()?;
            Some(vec![value.sized(vec![])?.expanded(&to)?])
        }
        "ReduceProd" => reduce(c, x, |values| values.iter().product()),
        "ReduceSum" => reduce(c, x, |values| values.iter().sum()),
        "ReduceMax" => reduce(c, x, |values| values.iter().copied().fold(f64::NEG_INFINITY, f64::max)),
        "ReduceMin" => reduce(c, x, |values| values.iter().copied().fold(f64::INFINITY, f64::min)),
        _ => None,
    }
}

/// The operators whose outputs are always on the host, and the attributes that they read.
pub(super) fn find<R: Runtime>(op: &str) -> Option<(SpecialRule<R>, &'static [&'static str])> {
    Some(match op {
        "Shape" => (shape, &["start", "end"]),
        "Size" => {
            (|c, _| listed(HostArray::new(DType::I64, vec![], vec![dims(c)?.iter().product::<usize>() as f64])), &[])
        }
        _ => return None,
    })
}

fn shape<R: Runtime>(c: &NodeCall<'_, R>, _: &mut PassValues<R>) -> Result<Vec<NodeValue<R>>> {
    let dims: Vec<i64> = dims(c)?.iter().map(|&d| d as i64).collect();
    let n = dims.len() as i64;
    let at = |i: i64| (if i < 0 { i.saturating_add(n) } else { i }).clamp(0, n) as usize;
    let (start, end) = (at(c.int("start", 0)), at(c.int("end", n)));
    listed(HostArray::list(&dims[start..end.max(start)]))
}

fn dims<R: Runtime>(c: &NodeCall<'_, R>) -> Result<Vec<usize>> {
    match c.ins.first().and_then(Option::as_ref) {
        Some(NodeValue::Device(x)) => Ok(x.dims()),
        Some(NodeValue::Host(hosted)) => Ok(hosted.host.dims.clone()),
        None => Err(bad("input 0 is missing")),
    }
}

fn listed<R: Runtime>(host: Option<HostArray>) -> Result<Vec<NodeValue<R>>> {
    host.map(|host| vec![NodeValue::of(host)]).ok_or_else(|| bad("has sizes that no integer holds"))
}

/// A cast between integers, booleans and floats that represents every element.
fn cast(x: &HostArray, to: DType) -> Option<Vec<HostArray>> {
    let value = |&v: &f64| match to {
        DType::Bool => f64::from(v != 0.0),
        to if to.is_float() => v,
        _ => v.trunc(),
    };
    Some(vec![HostArray::new(to, x.dims.clone(), x.values.iter().map(value).collect())?])
}

/// Lists one after another; other tensors are joined on the device.
fn concat(all: &[&HostArray]) -> Option<Vec<HostArray>> {
    let dtype = all[0].dtype;
    if !all.iter().all(|x| x.dims.len() == 1 && x.dtype == dtype) {
        return None;
    }
    let values: Vec<f64> = all.iter().flat_map(|x| x.values.iter().copied()).collect();
    Some(vec![HostArray::new(dtype, vec![values.len()], values)?])
}

/// The elements of a list, at positions that may count from the end.
fn gather(x: &HostArray, index: &HostArray, axis: i64) -> Option<Vec<HostArray>> {
    let n = x.values.len() as i64;
    if x.dims.len() != 1 || !matches!(axis, 0 | -1) {
        return None;
    }
    let position = |i: i64| usize::try_from(if i < 0 { i.checked_add(n)? } else { i }).ok();
    let positions = index.ints().into_iter().map(position).collect::<Option<Vec<_>>>()?;
    Some(vec![x.taken(index.dims.clone(), positions)?])
}

/// A part of a list.
fn slice<R: Runtime>(c: &NodeCall<'_, R>, x: &HostArray) -> Option<Vec<HostArray>> {
    let one = |name: &str, i: usize, default: Option<i64>| match c.list(name, i).ok()? {
        Some(list) => <[i64; 1]>::try_from(list).ok().map(|[only]| only),
        None => default,
    };
    let (start, end) = (one("starts", 1, None)?, one("ends", 2, None)?);
    let (axis, step) = (one("axes", 3, Some(0))?, one("steps", 4, Some(1))?);
    if x.dims.len() != 1 || !matches!(axis, 0 | -1) || step < 1 {
        return None;
    }
    let n = x.values.len() as i64;
    let at = |v: i64| (if v < 0 { v.saturating_add(n) } else { v }).clamp(0, n) as usize;
    let positions: Vec<usize> = (at(start)..at(end)).step_by(step as usize).collect();
    Some(vec![x.taken(vec![positions.len()], positions)?])
}

fn squeeze(x: &HostArray, axes: Option<Vec<i64>>) -> Option<Vec<HostArray>> {
    let rank = x.dims.len() as i64;
    let gone = |i: usize| match &axes {
        Some(axes) => axes.iter().any(|&a| a == i as i64 || a == i as i64 - rank),
        None => x.dims[i] == 1,
    };
    let rest = (0..x.dims.len()).filter(|&i| !gone(i)).map(|i| x.dims[i]).collect();
    Some(vec![x.sized(rest)?])
}

fn unsqueeze(x: &HostArray, axes: &[i64]) -> Option<Vec<HostArray>> {
    let rank = x.dims.len() + axes.len();
    let new = |i: usize| axes.iter().any(|&a| a == i as i64 || a == i as i64 - rank as i64);
    let mut rest = x.dims.iter().copied();
    let dims: Vec<usize> = (0..rank).map(|i| if new(i) { Some(1) } else { rest.next() }).collect::<Option<_>>()?;
    Some(vec![x.sized(dims)?])
}

fn reshape(x: &HostArray, to: &[i64]) -> Option<Vec<HostArray>> {
    let kept = |(i, &d): (usize, &i64)| if d == 0 { x.dims.get(i).map(|&d| d as i64) } else { Some(d) };
    let to: Vec<i64> = to.iter().enumerate().map(kept).collect::<Option<_>>()?;
    let known = to.iter().filter(|&&d| d >= 0).try_fold(1i64, |n, &d| n.checked_mul(d))?;
    let rest = (x.values.len() as i64).checked_div(known)?;
    Some(vec![x.sized(to.iter().map(|&d| if d < 0 { rest as usize } else { d as usize }).collect())?])
}

fn range(start: &HostArray, limit: &HostArray, step: &HostArray) -> Option<Vec<HostArray>> {
    let [&[start_at], &[limit], &[step]] = [&start.values[..], &limit.values[..], &step.values[..]] else {
        return None;
    };
    let len = ((limit - start_at) / step).ceil().max(0.0);
    if start.dtype != DType::I64 || step == 0.0 || len > super::host::MOST as f64 {
        return None;
    }
    let values = (0..len as usize).map(|i| start_at + i as f64 * step).collect();
    Some(vec![HostArray::new(DType::I64, vec![len as usize], values)?])
}

/// The reduction of a list to one element.
fn reduce<R: Runtime>(c: &NodeCall<'_, R>, x: &HostArray, f: impl Fn(&[f64]) -> f64) -> Option<Vec<HostArray>> {
    let whole = match c.list("axes", 1).ok()? {
        Some(axes) => matches!(axes[..], [0 | -1]),
        None => c.int("noop_with_empty_axes", 0) == 0,
    };
    if x.dims.len() != 1 || x.dtype != DType::I64 || !whole {
        return None;
    }
    let dims = if c.int("keepdims", 1) == 1 { vec![1] } else { vec![] };
    Some(vec![HostArray::new(x.dtype, dims, vec![f(&x.values)])?])
}
