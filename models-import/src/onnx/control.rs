//! Operators whose attributes are graphs: choices and loops.

use autograd::Var;
use numcore::{
    DType, Result, Runtime,
    ops::{Apply, ViewOps, stack},
};

use super::{
    call::{NodeCall, bad, size},
    graph::{PassValues, ResolvedGraph, on_device},
    host::HostArray,
    ops::attention,
    value::NodeValue,
};

/// The computation of a node with graphs.
pub(super) type SpecialRule<R> = fn(&NodeCall<'_, R>, &mut PassValues<R>) -> Result<Vec<NodeValue<R>>>;

/// The operator of this name, and the attributes that it reads.
pub(super) fn find<R: Runtime>(op: &str) -> Option<(SpecialRule<R>, &'static [&'static str])> {
    Some(match op {
        "If" => (choose, &["then_branch", "else_branch"]),
        "Loop" => (repeat, &["body"]),
        "Scan" => (
            scan,
            &[
                "body",
                "num_scan_inputs",
                "scan_input_directions",
                "scan_input_axes",
                "scan_output_directions",
                "scan_output_axes",
                "directions",
            ],
        ),
        "FlexAttention" => (flex, &["score_mod", "prob_mod", "scale", "softmax_precision"]),
        _ => return None,
    })
}

fn graph<'a, R: Runtime>(c: &NodeCall<'a, R>, name: &str) -> Result<&'a ResolvedGraph<R>> {
    c.node.graph(name).ok_or_else(|| bad(format!("the graph `{name}` is missing")))
}

fn choose<R: Runtime>(c: &NodeCall<'_, R>, values: &mut PassValues<R>) -> Result<Vec<NodeValue<R>>> {
    let yes = c.number(0)?.ok_or_else(|| bad("the condition is missing"))? != 0.0;
    graph(c, if yes { "then_branch" } else { "else_branch" })?.call(c.frame, values, [])
}

/// ONNX's `Loop`: values that are carried on, then ones that are stacked.
fn repeat<R: Runtime>(c: &NodeCall<'_, R>, values: &mut PassValues<R>) -> Result<Vec<NodeValue<R>>> {
    let body = graph(c, "body")?;
    let most = c.host(0)?.and_then(|list| list.first().copied()).unwrap_or(i64::MAX);
    let mut going = c.number(1)?.is_none_or(|x| x != 0.0);
    let mut carried = carried(c, 2)?;
    let count = carried.len();
    if c.outputs() < count || body.outputs.len() != c.outputs() + 1 {
        return Err(bad(format!("carries {count} values for {} outputs", c.outputs())));
    }
    let mut kept: Vec<Vec<Var<R>>> = vec![Vec::new(); c.outputs() - count];
    let scalar = |value: i64, dtype| NodeValue::of(HostArray { dtype, dims: vec![], values: vec![value as f64] });
    let mut i = 0;
    while going && i < most {
        let head = [scalar(i, DType::I64), scalar(1, DType::Bool)];
        let mut outs = body.call(c.frame, values, head.into_iter().chain(carried))?;
        let rest = outs.split_off(1);
        going = number(c, &outs[0])? != 0.0;
        carried = keep(c, rest, count, &mut kept)?;
        i += 1;
    }
    for kept in kept {
        let stacked = stack(&kept.iter().collect::<Vec<_>>(), 0)?;
        carried.push(NodeValue::Device(stacked));
    }
    Ok(carried)
}

/// The inputs from `first` on.
fn carried<R: Runtime>(c: &NodeCall<'_, R>, first: usize) -> Result<Vec<NodeValue<R>>> {
    let value = |i: usize| c.ins[i].clone().ok_or_else(|| bad(format!("input {i} is missing")));
    (first..c.ins.len()).map(value).collect()
}

fn number<R: Runtime>(c: &NodeCall<'_, R>, value: &NodeValue<R>) -> Result<f64> {
    match value.host() {
        Some(host) if host.values.len() == 1 => Ok(host.values[0]),
        _ => value.var(c.device())?.item(),
    }
}

/// The first `count` of a body's outputs; the others go where they are collected.
fn keep<R: Runtime>(
    c: &NodeCall<'_, R>,
    mut outs: Vec<NodeValue<R>>,
    count: usize,
    kept: &mut [Vec<Var<R>>],
) -> Result<Vec<NodeValue<R>>> {
    for (kept, x) in kept.iter_mut().zip(outs.split_off(count.min(outs.len()))) {
        kept.push(x.var(c.device())?.clone());
    }
    Ok(outs)
}

/// ONNX's `Scan`: states that are carried on, and sequences that are read and written slice by slice.
fn scan<R: Runtime>(c: &NodeCall<'_, R>, values: &mut PassValues<R>) -> Result<Vec<NodeValue<R>>> {
    let ins = (0..c.ins.len()).map(|i| c.x(i).cloned());
    // Before version 9 every operand has a batch in front, and the first input is the sequences' lengths.
    if c.opset() >= 9 {
        return Ok(on_device(scanned(c, ins.collect::<Result<Vec<_>>>()?, values)?));
    }
    let ins = ins.skip(1).collect::<Result<Vec<_>>>()?;
    let batch = ins.first().and_then(|x| x.dims().first().copied()).unwrap_or(0);
    let mut of_batch = Vec::new();
    for b in 0..batch {
        of_batch.push(scanned(c, ins.iter().map(|x| x.select(0, b)).collect::<Result<_>>()?, values)?);
    }
    let joined = |k: usize| stack(&of_batch.iter().map(|outs| &outs[k]).collect::<Vec<_>>(), 0);
    let count = of_batch.first().map_or(0, Vec::len);
    Ok(on_device((0..count).map(joined).collect::<Result<_>>()?))
}

fn scanned<R: Runtime>(
    c: &NodeCall<'_, R>,
    mut states: Vec<Var<R>>,
    values: &mut PassValues<R>,
) -> Result<Vec<Var<R>>> {
    let (body, count) = (graph(c, "body")?, size(c.int("num_scan_inputs", 0))?);
    let few = || bad("has too few inputs or outputs for its graph, or no sequence");
    let sequences = states.split_off(states.len().checked_sub(count).filter(|_| count > 0).ok_or_else(few)?);
    let outputs = body.outputs.len().checked_sub(states.len()).ok_or_else(few)?;
    let list = |name: &str, n: usize| {
        let list = c.ints(name).unwrap_or(vec![0; n]);
        if list.len() == n { Ok(list) } else { Err(bad(format!("{name} has {} elements for {n}", list.len()))) }
    };
    let (read, axes) = (list("scan_input_directions", count)?, list("scan_input_axes", count)?);
    let mut kept: Vec<Vec<Var<R>>> = vec![Vec::new(); outputs];
    let shape = sequences[0].spec().shape;
    let steps = shape[shape.axis("Scan", axes[0] as isize)?];
    let mut carried = on_device(states);
    for i in 0..steps {
        let slice = |(k, x): (usize, &Var<R>)| {
            let at = if read[k] == 1 { steps - 1 - i } else { i };
            Ok(NodeValue::Device(x.select(axes[k] as isize, at)?))
        };
        let slices = sequences.iter().enumerate().map(slice).collect::<Result<Vec<_>>>()?;
        let count = carried.len();
        let outs = body.call(c.frame, values, carried.into_iter().chain(slices))?;
        carried = keep(c, outs, count, &mut kept)?;
    }
    let (written, axes) = (list("scan_output_directions", outputs)?, list("scan_output_axes", outputs)?);
    let mut outs = carried.iter().map(|x| x.var(c.device()).cloned()).collect::<Result<Vec<_>>>()?;
    for (k, mut kept) in kept.into_iter().enumerate() {
        if written[k] == 1 {
            kept.reverse();
        }
        outs.push(stack(&kept.iter().collect::<Vec<_>>(), axes[k] as isize)?);
    }
    Ok(outs)
}

fn flex<R: Runtime>(c: &NodeCall<'_, R>, values: &mut PassValues<R>) -> Result<Vec<NodeValue<R>>> {
    let mut with = |name: &str, scores: Var<R>| match c.node.graph(name) {
        Some(graph) => {
            let outs = graph.call(c.frame, values, [NodeValue::Device(scores)])?;
            outs.first().ok_or_else(|| bad("a graph has no output"))?.var(c.device()).cloned()
        }
        None => Ok(scores),
    };
    Ok(on_device(attention::flex(c, &mut with)?))
}
