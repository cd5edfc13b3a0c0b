//! One graph of two recordings, whose values differ, and whose batches may.

use std::collections::BTreeMap;

use numcore::{Error, Result};

use crate::onnx::{
    graph::OnnxGraph,
    parts::{OnnxConstant, OnnxType, OnnxWeight, Size},
};

/// Two recordings of one module, and the sizes of their batches.
struct Recordings<'g, 'a> {
    first: OnnxGraph<'a>,
    second: &'g OnnxGraph<'a>,
    batches: [usize; 2],
    /// The computed constants, by the constants of both recordings.
    computed: BTreeMap<(String, String), String>,
}

/// A size as a fixed part and a multiple of the batch, of which one is 0.
type BatchSize = (i64, i64);

/// The graph of two recordings: sizes that differ are computed from the batch.
///
/// # Errors
/// Fails if the recordings differ in more than multiples of their batches.
pub(super) fn merged<'a>(first: OnnxGraph<'a>, second: &OnnxGraph<'a>, batches: [usize; 2]) -> Result<OnnxGraph<'a>> {
    let mut both = Recordings { first, second, batches, computed: BTreeMap::new() };
    let nodes = std::mem::take(&mut both.first.nodes);
    if nodes.len() != second.nodes.len() {
        return Err(both.refused("the number of op calls"));
    }
    for weight in &both.first.weights {
        let other = second.weights.iter().find(|other| other.name == weight.name && other.shape == weight.shape);
        let is_like = |other: &OnnxWeight<'a>| Ok::<_, Error>(weight.is_known || (weight.bytes)()? == (other.bytes)()?);
        if !other.map(is_like).transpose()?.unwrap_or(false) {
            return Err(both.refused(&format!("the constant `{}`", weight.name)));
        }
    }
    let mut merged = Vec::with_capacity(nodes.len());
    for (mut node, other) in nodes.into_iter().zip(&second.nodes) {
        let is_like = node.kind == other.kind && node.attributes == other.attributes && node.outputs == other.outputs;
        if !is_like || node.inputs.len() != other.inputs.len() {
            return Err(both.refused(&format!("the operator {}", node.kind)));
        }
        let reshapes = node.kind == "Reshape";
        for (i, (input, theirs)) in node.inputs.iter_mut().zip(&other.inputs).enumerate() {
            if input != theirs {
                *input = both.computed(input, theirs, reshapes && i == 1)?;
            }
        }
        merged.push(node);
    }
    for (port, other) in [(&mut both.first.inputs, &second.inputs), (&mut both.first.outputs, &second.outputs)]
        .into_iter()
        .flat_map(|(ports, others)| ports.iter_mut().zip(others))
    {
        for (size, theirs) in port.sizes.iter_mut().zip(&other.sizes) {
            if let (Size::Is(a), Size::Is(b)) = (*size, *theirs)
                && a != b
            {
                *size = Size::Any(if [a, b] == batches { "batch" } else { "" });
            }
        }
    }
    both.first.nodes.extend(merged);
    both.first.prune();
    Ok(both.first)
}

impl Recordings<'_, '_> {
    /// The value that two constants have for any batch. The nodes that compute it are before all others.
    fn computed(&mut self, a: &str, b: &str, reshapes: bool) -> Result<String> {
        let key = (a.to_owned(), b.to_owned());
        if let Some(known) = self.computed.get(&key).filter(|_| !reshapes) {
            return Ok(known.clone());
        }
        let lists = [(&self.first, a), (self.second, b)].map(|(graph, name)| {
            let found = graph.constants.iter().find(|constant| constant.name == name)?;
            (found.kind == OnnxType::I64).then(|| (found.shape.clone(), integers(found)))
        });
        let [Some((shape, ours)), Some((other, theirs))] = lists else {
            return Err(self.refused(&format!("the value `{a}`")));
        };
        let sizes: Option<Vec<BatchSize>> = ours.iter().zip(&theirs).map(|(&a, &b)| self.size(a, b)).collect();
        let Some(sizes) = sizes.filter(|_| shape == other) else {
            return Err(self.refused(&format!("the sizes {ours:?}")));
        };
        let graph = &mut self.first;
        if reshapes && sizes.iter().filter(|(_, times)| *times != 0).count() == 1 {
            let open: Vec<i64> = sizes.iter().map(|&(fixed, times)| if times != 0 { -1 } else { fixed }).collect();
            return Ok(graph.ints(&open));
        }
        let input = graph.inputs[0].name.clone();
        let (all, first) = (graph.op("Shape", &[&input]), graph.int(0));
        let batch = graph.op("Gather", &[&all, &first]);
        let mut part = |of: fn(&BatchSize) -> i64| match &sizes[..] {
            [one] if shape.is_empty() => graph.int(of(one)),
            all => graph.ints(&all.iter().map(of).collect::<Vec<_>>()),
        };
        let (fixed, times) = (part(|size| size.0), part(|size| size.1));
        let product = graph.op("Mul", &[&batch, &times]);
        let sum = graph.op("Add", &[&product, &fixed]);
        self.computed.insert(key, sum.clone());
        Ok(sum)
    }

    fn size(&self, a: i64, b: i64) -> Option<BatchSize> {
        let [first, second] = self.batches.map(|n| n as i64);
        match (a % first, a / first) {
            _ if a == b => Some((a, 0)),
            (0, times) if b == times * second => Some((0, times)),
            _ => None,
        }
    }

    fn refused(&self, what: &str) -> Error {
        let [a, b] = self.batches;
        let why = match a == b {
            true => "the module reads values by other means than op calls on variables".to_owned(),
            false => format!("it is no multiple of the batch ({a} and {b}), or read from values: save fixed sizes"),
        };
        Error::unsupported("onnx", format!("{what} differs between two forward passes: {why}"))
    }
}

fn integers(constant: &OnnxConstant) -> Vec<i64> {
    let (words, _) = constant.bytes.as_chunks::<8>();
    words.iter().map(|word| i64::from_le_bytes(*word)).collect()
}
