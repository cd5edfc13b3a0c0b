//! Graphs: nodes in order, each of which reads named values; and the operators whose attributes are graphs.

use std::collections::HashMap;

use numcore::{
    DType, Tensor,
    ops::{ViewOps, stack},
};
use runtime_cpu::Cpu;
use serde_json::Value;

use crate::{
    call::Call,
    file::{Answer, Cases},
    ops,
};

pub type T = Tensor<Cpu>;
/// The values that have a name where a node is run; those of enclosing graphs are among them.
pub type Names = HashMap<String, T>;

/// The outputs of `graph`, whose inputs are `ins`; it may read the values `around` it.
pub fn run(cases: &Cases, graph: &Value, ins: &[T], around: &Names, opset: u64) -> Answer<Vec<T>> {
    let mut names = around.clone();
    for (name, id) in graph["constants"].as_object().ok_or("no constants")? {
        names.insert(name.clone(), cases.tensor(id)?);
    }
    let inputs = list(&graph["inputs"])?;
    let given = inputs.iter().filter(|name| !graph["constants"].as_object().is_some_and(|c| c.contains_key(**name)));
    for (name, x) in given.zip(ins) {
        names.insert(name.to_string(), x.clone());
    }
    for node in graph["nodes"].as_array().ok_or("no nodes")? {
        let op = node["op"].as_str().unwrap_or_default();
        let outs = step(cases, node, &names, opset).map_err(|error| format!("{op}: {error}"))?;
        for (name, x) in list(&node["out"])?.into_iter().zip(outs) {
            names.insert(name.to_string(), x);
        }
    }
    let output =
        |name: &&str| names.get(*name).cloned().ok_or_else(|| format!("nothing made the output {name}").into());
    list(&graph["outputs"])?.iter().map(output).collect()
}

fn list(names: &Value) -> Answer<Vec<&str>> {
    Ok(names.as_array().ok_or("a list of names")?.iter().filter_map(Value::as_str).collect())
}

fn step(cases: &Cases, node: &Value, names: &Names, opset: u64) -> Answer<Vec<T>> {
    let value = |name: &&str| match *name {
        "" => Ok(None),
        name => names.get(name).cloned().map(Some).ok_or(format!("nothing made {name}")),
    };
    let ins = list(&node["in"])?.iter().map(value).collect::<Result<Vec<_>, _>>()?;
    let call = Call { cases, node, ins, opset };
    match call.op() {
        "If" => {
            let branch = if call.x(0)?.item()? != 0.0 { "then_branch" } else { "else_branch" };
            run(cases, call.graph(branch)?, &[], names, opset)
        }
        "Loop" => repeat(&call, names),
        "Scan" => scan(&call, names),
        "FlexAttention" => {
            let with = |name: &str, scores: &T| match call.graph(name) {
                Ok(graph) => Ok(run(cases, graph, std::slice::from_ref(scores), names, opset)?.remove(0)),
                Err(_) => Ok(scores.clone()),
            };
            ops::attention::flex(&call, |scores| with("score_mod", &scores), |probs| with("prob_mod", &probs))
        }
        _ => ops::run(&call),
    }
}

/// ONNX's `Loop`: values that are carried on, then ones that are stacked.
fn repeat(call: &Call<'_>, names: &Names) -> Answer<Vec<T>> {
    let body = call.graph("body")?;
    let most = call.opt(0).map(|x| x.item_as::<i64>()).transpose()?.unwrap_or(i64::MAX);
    let mut going = call.opt(1).map(|x| x.item()).transpose()?.is_none_or(|x| x != 0.0);
    let mut carried: Vec<T> = (2..call.ins.len()).map(|i| call.x(i).cloned()).collect::<Answer<_>>()?;
    let count = carried.len();
    let mut kept: Vec<Vec<T>> = vec![Vec::new(); call.outputs().saturating_sub(count)];
    let mut i = 0;
    while going && i < most {
        let head = [call.scalar(i as f64, DType::I64)?, call.scalar(1.0, DType::Bool)?];
        let mut outs = run(call.cases, body, &[&head[..], &carried].concat(), names, call.opset)?;
        going = outs.remove(0).item()? != 0.0;
        kept.iter_mut().zip(outs.split_off(count)).for_each(|(kept, x)| kept.push(x));
        carried = outs;
        i += 1;
    }
    for kept in kept {
        carried.push(stack(&kept.iter().collect::<Vec<_>>(), 0)?);
    }
    Ok(carried)
}

/// ONNX's `Scan`: states that are carried on, and sequences that are read and written slice by slice.
fn scan(call: &Call<'_>, names: &Names) -> Answer<Vec<T>> {
    let (body, sequences) = (call.graph("body")?, call.int("num_scan_inputs", 0) as usize);
    if call.opset < 9 {
        return batched_scan(call, names);
    }
    let ins: Vec<T> = (0..call.ins.len()).map(|i| call.x(i).cloned()).collect::<Answer<_>>()?;
    let (states, sequences) = ins.split_at(ins.len() - sequences);
    scanned(call, body, states.to_vec(), sequences, names)
}

fn scanned(call: &Call<'_>, body: &Value, mut states: Vec<T>, sequences: &[T], names: &Names) -> Answer<Vec<T>> {
    let directions = |name: &str, n: usize| call.ints(name).unwrap_or(vec![0; n]);
    let (read, axes) =
        (directions("scan_input_directions", sequences.len()), directions("scan_input_axes", sequences.len()));
    let count = states.len();
    let mut kept: Vec<Vec<T>> = vec![Vec::new(); call.outputs() - count];
    let steps = sequences[0].spec_axis(axes[0])?;
    for i in 0..steps {
        let slice = |(k, x): (usize, &T)| {
            let at = if read[k] == 1 { steps - 1 - i } else { i };
            Ok(x.select(axes[k] as isize, at)?)
        };
        let slices = sequences.iter().enumerate().map(slice).collect::<Answer<Vec<_>>>()?;
        let mut outs = run(call.cases, body, &[states, slices].concat(), names, call.opset)?;
        kept.iter_mut().zip(outs.split_off(count)).for_each(|(kept, x)| kept.push(x));
        states = outs;
    }
    let written = directions("scan_output_directions", kept.len());
    let axes = directions("scan_output_axes", kept.len());
    for (k, mut kept) in kept.into_iter().enumerate() {
        if written[k] == 1 {
            kept.reverse();
        }
        states.push(stack(&kept.iter().collect::<Vec<_>>(), axes[k] as isize)?);
    }
    Ok(states)
}

/// Before version 9: every operand has a batch in front, and the first input is the sequences' lengths.
fn batched_scan(call: &Call<'_>, names: &Names) -> Answer<Vec<T>> {
    let body = call.graph("body")?;
    let sequences = call.int("num_scan_inputs", 0) as usize;
    let ins: Vec<T> = (1..call.ins.len()).map(|i| call.x(i).cloned()).collect::<Answer<_>>()?;
    let mut of_batch = Vec::new();
    for b in 0..ins[0].dims()[0] {
        let one = ins.iter().map(|x| Ok(x.select(0, b)?)).collect::<Answer<Vec<T>>>()?;
        let (states, sequences) = one.split_at(one.len() - sequences);
        of_batch.push(scanned(call, body, states.to_vec(), sequences, names)?);
    }
    let joined = |k: usize| Ok(stack(&of_batch.iter().map(|outs| &outs[k]).collect::<Vec<_>>(), 0)?);
    (0..of_batch[0].len()).map(joined).collect()
}

trait AxisSize {
    fn spec_axis(&self, axis: i64) -> Answer<usize>;
}

impl AxisSize for T {
    fn spec_axis(&self, axis: i64) -> Answer<usize> {
        Ok(self.dims()[self.shape().axis("scan", axis as isize)?])
    }
}
