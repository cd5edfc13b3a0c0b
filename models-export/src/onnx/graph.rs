//! Graphs in ONNX's format: nodes, small constants, and weights in a file of their own.

use std::{collections::BTreeSet, ffi::OsString, io, path::Path};

use data::protobuf::ProtoMessage;
use numcore::{DType, Error, Result, pointwise::Number, safetensors::Replacement};

use super::parts::{Attribute, OnnxConstant, OnnxNode, OnnxPort, OnnxType, OnnxWeight, Size};

const OPSET: i64 = 17;
/// The version of the format that belongs to the opset.
const IR_VERSION: i64 = 8;
/// The alignment of weights in their file, in bytes.
const ALIGNMENT: usize = 64;

/// A graph that is being built. Its values are referred to by name.
#[derive(Default)]
pub(super) struct OnnxGraph<'a> {
    name: &'static str,
    pub nodes: Vec<OnnxNode>,
    pub constants: Vec<OnnxConstant>,
    pub weights: Vec<OnnxWeight<'a>>,
    pub inputs: Vec<OnnxPort>,
    pub outputs: Vec<OnnxPort>,
    names: BTreeSet<String>,
    /// The number of names that were given to values.
    named: usize,
}

impl<'a> OnnxGraph<'a> {
    /// An empty graph.
    pub(super) fn new(name: &'static str) -> Self {
        OnnxGraph { name, ..OnnxGraph::default() }
    }

    /// Adds an input of the graph, and returns its name.
    pub(super) fn input(&mut self, name: &str, kind: OnnxType, sizes: &[Size]) -> String {
        self.inputs.push(OnnxPort { name: name.to_owned(), kind, sizes: sizes.to_vec() });
        self.reserve(name);
        name.to_owned()
    }

    /// Makes `value` an output of the graph, called `name`.
    pub(super) fn output(&mut self, value: &str, name: &str, kind: OnnxType, sizes: &[Size]) {
        self.push("Identity", &[value], &[name.to_owned()], &[]);
        self.outputs.push(OnnxPort { name: name.to_owned(), kind, sizes: sizes.to_vec() });
    }

    /// Adds a node with one output, and returns the output's name.
    pub(super) fn op(&mut self, kind: &str, inputs: &[&str]) -> String {
        self.op_with(kind, inputs, &[])
    }

    /// Adds a node with attributes and one output, and returns the output's name.
    pub(super) fn op_with(&mut self, kind: &str, inputs: &[&str], attributes: &[(&str, Attribute<'_>)]) -> String {
        let name = self.fresh(kind);
        self.push(kind, inputs, std::slice::from_ref(&name), attributes);
        name
    }

    /// Splits a value along an axis into parts of these sizes.
    pub(super) fn split(&mut self, value: &str, axis: i64, sizes: &[i64]) -> Vec<String> {
        let sizes_at = self.ints(sizes);
        let names: Vec<String> = sizes.iter().map(|_| self.fresh("Split")).collect();
        self.push("Split", &[value, &sizes_at], &names, &[("axis", Attribute::Int(axis))]);
        names
    }

    /// Adds a node with two outputs, and returns their names.
    pub(super) fn op_of_two(
        &mut self,
        kind: &str,
        inputs: &[&str],
        attributes: &[(&str, Attribute<'_>)],
    ) -> [String; 2] {
        let names = [self.fresh(kind), self.fresh(kind)];
        self.push(kind, inputs, &names, attributes);
        names
    }

    /// Adds a constant list of integers, `[N]`.
    pub(super) fn ints(&mut self, list: &[i64]) -> String {
        let name = format!("ints{}", list.iter().map(|x| format!("_{x}")).collect::<String>());
        let bytes: Vec<u8> = list.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.constant(name, OnnxType::I64, &[list.len()], &bytes)
    }

    /// Adds a constant integer.
    pub(super) fn int(&mut self, value: i64) -> String {
        self.constant(format!("int_{value}"), OnnxType::I64, &[], &value.to_le_bytes())
    }

    /// Adds a constant floating-point number.
    pub(super) fn float(&mut self, value: f32) -> String {
        self.constant(format!("float_{value:e}"), OnnxType::F32, &[], &value.to_le_bytes())
    }

    /// Adds a constant number of a dtype.
    ///
    /// # Errors
    /// Fails if the dtype is not written.
    pub(super) fn number(&mut self, value: Number, dtype: DType) -> Result<String> {
        let (kind, value) = (OnnxType::of(dtype)?, value.cast(dtype));
        if kind == OnnxType::F32 {
            return Ok(self.float(value.to_f64() as f32));
        }
        if kind == OnnxType::F64 {
            let value = value.to_f64();
            return Ok(self.constant(format!("double_{value:e}"), kind, &[], &value.to_le_bytes()));
        }
        let whole = value.to_i64();
        if kind == OnnxType::I64 {
            return Ok(self.int(whole));
        }
        Ok(self.constant(format!("{dtype}_{whole}"), kind, &[], &whole.to_le_bytes()[..dtype.size()]))
    }

    /// Adds a constant row of floating-point numbers, `[1, N]`.
    pub(super) fn row(&mut self, name: &str, values: &[f32]) -> String {
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.constant(name.to_owned(), OnnxType::F32, &[1, values.len()], &bytes)
    }

    /// Adds a weight; a second call with its name returns the first one.
    pub(super) fn weight(&mut self, name: &str, shape: &[usize], value: impl Fn() -> Result<Vec<f32>> + 'a) -> String {
        let bytes = move || Ok(value()?.iter().flat_map(|x| x.to_le_bytes()).collect());
        self.tensor(name, OnnxType::F32, shape, bytes)
    }

    /// Adds a weight of any type by its bytes; a second call with its name returns the first one.
    pub(super) fn tensor(
        &mut self,
        name: &str,
        kind: OnnxType,
        shape: &[usize],
        bytes: impl Fn() -> Result<Vec<u8>> + 'a,
    ) -> String {
        self.reserve(name);
        if self.weights.iter().all(|weight| weight.name != name) {
            let (shape, bytes) = (shape.into(), Box::new(bytes));
            self.weights.push(OnnxWeight { name: name.into(), kind, shape, is_known: true, bytes });
        }
        name.to_owned()
    }

    /// Adds a tensor that a forward pass made.
    pub(super) fn made(&mut self, kind: OnnxType, shape: &[usize], bytes: impl Fn() -> Result<Vec<u8>> + 'a) -> String {
        let (name, shape, bytes) = (self.fresh("constant"), shape.into(), Box::new(bytes));
        self.weights.push(OnnxWeight { name: name.clone(), kind, shape, is_known: false, bytes });
        name
    }

    /// Keeps a name for a value that may be added later.
    pub(super) fn reserve(&mut self, name: &str) {
        self.names.insert(name.to_owned());
    }

    /// Makes a name that no value has.
    pub(super) fn fresh(&mut self, kind: &str) -> String {
        loop {
            let name = format!("{}_{}", kind.to_lowercase(), self.named);
            self.named += 1;
            if self.names.insert(name.clone()) {
                return name;
            }
        }
    }

    /// Drops the nodes, constants and weights on which no output depends.
    pub(super) fn prune(&mut self) {
        let mut needed: BTreeSet<String> = self.outputs.iter().map(|output| output.name.clone()).collect();
        let mut kept: Vec<OnnxNode> = Vec::new();
        while let Some(node) = self.nodes.pop() {
            if node.outputs.iter().any(|output| needed.contains(output)) {
                needed.extend(node.inputs.iter().cloned());
                kept.push(node);
            }
        }
        kept.reverse();
        self.nodes = kept;
        self.constants.retain(|constant| needed.contains(&constant.name));
        self.weights.retain(|weight| needed.contains(&weight.name));
    }

    /// Writes the graph to a file and the weights to another beside it, each all or nothing, one weight at a time.
    /// Unless `writes`, it computes all values and writes none: another rank writes.
    ///
    /// # Errors
    /// Fails if a value cannot be computed, or a file cannot be written.
    pub(super) fn save(self, path: &Path, writes: bool) -> Result<()> {
        if !writes {
            return self.weights.iter().try_for_each(|weight| (weight.bytes)().map(drop));
        }
        let Some(mut file) = path.file_name().map(OsString::from) else {
            return Err(unsuitable(path, "does not name a file"));
        };
        file.push(".data");
        let data = path.with_file_name(&file);
        let no_text = || unsuitable(path, "is not UTF-8, as names in this format must be");
        let location = file.to_str().ok_or_else(no_text)?;
        let (mut weights, mut offset) = (Replacement::new(&data)?, 0);
        let mut initializers: Vec<ProtoMessage> = self.constants.iter().map(OnnxConstant::described).collect();
        for weight in &self.weights {
            let bytes = weight.checked_bytes()?;
            initializers.push(weight.described(location, offset, bytes.len()));
            offset += bytes.len().next_multiple_of(ALIGNMENT);
            weights.write(&bytes)?;
            weights.write(&vec![0; bytes.len().next_multiple_of(ALIGNMENT) - bytes.len()])?;
        }
        let model = self.model(&initializers).into_bytes();
        let mut graph = Replacement::new(path)?;
        graph.write(&model)?;
        weights.commit()?;
        graph.commit()
    }

    /// The message of the full file.
    fn model(&self, initializers: &[ProtoMessage]) -> ProtoMessage {
        let nodes: Vec<ProtoMessage> = self.nodes.iter().enumerate().map(|(i, node)| node.described(i)).collect();
        let [inputs, outputs] =
            [&self.inputs, &self.outputs].map(|ports| ports.iter().map(OnnxPort::described).collect::<Vec<_>>());
        let graph = ProtoMessage::new()
            .each(1, &nodes)
            .bytes(2, self.name)
            .each(5, initializers)
            .each(11, &inputs)
            .each(12, &outputs);
        let opset = ProtoMessage::new().bytes(1, "").int(2, OPSET);
        ProtoMessage::new()
            .int(1, IR_VERSION)
            .bytes(2, "weftgrad")
            .bytes(3, env!("CARGO_PKG_VERSION"))
            .each(7, [&graph])
            .each(8, [&opset])
    }

    fn push(&mut self, kind: &str, inputs: &[&str], outputs: &[String], attributes: &[(&str, Attribute<'_>)]) {
        let attributes = attributes.iter().map(|(name, value)| value.described(name).into_bytes()).collect();
        let inputs = inputs.iter().map(|&input| input.to_owned()).collect();
        self.nodes.push(OnnxNode { kind: kind.to_owned(), inputs, outputs: outputs.to_vec(), attributes });
    }

    fn constant(&mut self, name: String, kind: OnnxType, shape: &[usize], bytes: &[u8]) -> String {
        if self.names.insert(name.clone()) {
            let (shape, bytes) = (shape.to_vec(), bytes.to_vec());
            self.constants.push(OnnxConstant { name: name.clone(), kind, shape, bytes });
        }
        name
    }
}

fn unsuitable(path: &Path, why: &str) -> Error {
    Error::io(path, io::Error::new(io::ErrorKind::InvalidInput, why))
}
