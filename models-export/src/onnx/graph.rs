//! Graphs in ONNX's format: nodes, small constants, and weights in a file of their own.

use std::{collections::BTreeSet, ffi::OsString, io, path::Path};

use data::protobuf::ProtoMessage;
use numcore::{Error, Result, safetensors::Replacement};

const OPSET: i64 = 17;
/// The version of the format that belongs to the opset.
const IR_VERSION: i64 = 8;
/// The alignment of weights in their file, in bytes.
const ALIGNMENT: usize = 64;

/// The element types of inputs and constants, with their numbers in files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OnnxType {
    /// 32-bit floating point.
    F32 = 1,
    /// 64-bit signed integers.
    I64 = 7,
}

/// An attribute of a node.
#[derive(Clone, Copy, Debug)]
pub(super) enum Attribute<'a> {
    /// An integer.
    Int(i64),
    /// A floating-point number.
    Float(f32),
    /// A list of integers.
    Ints(&'a [i64]),
}

/// A weight, and the source of its values.
struct OnnxWeight<'a> {
    name: String,
    shape: Vec<usize>,
    value: Box<dyn Fn() -> Result<Vec<f32>> + 'a>,
}

/// A size of an input or output.
#[derive(Clone, Copy, Debug)]
pub(super) enum Size {
    /// A size that varies, with its name.
    Any(&'static str),
    /// A fixed size.
    Is(usize),
}

/// A graph that is being built. Its values are referred to by name.
#[derive(Default)]
pub(super) struct OnnxGraph<'a> {
    name: &'static str,
    nodes: Vec<ProtoMessage>,
    constants: Vec<ProtoMessage>,
    weights: Vec<OnnxWeight<'a>>,
    inputs: Vec<ProtoMessage>,
    outputs: Vec<ProtoMessage>,
    names: BTreeSet<String>,
}

impl<'a> OnnxGraph<'a> {
    /// An empty graph.
    pub(super) fn new(name: &'static str) -> Self {
        OnnxGraph { name, ..OnnxGraph::default() }
    }

    /// Adds an input of the graph, and returns its name.
    pub(super) fn input(&mut self, name: &str, kind: OnnxType, sizes: &[Size]) -> String {
        self.inputs.push(described(name, kind, sizes));
        name.to_owned()
    }

    /// Makes `value` an output of the graph, called `name`.
    pub(super) fn output(&mut self, value: &str, name: &str, sizes: &[Size]) {
        self.push("Identity", &[value], &[name.to_owned()], &[]);
        self.outputs.push(described(name, OnnxType::F32, sizes));
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

    /// Splits a value along its last axis into parts of these sizes.
    pub(super) fn split(&mut self, value: &str, sizes: &[i64]) -> Vec<String> {
        let sizes_at = self.ints(sizes);
        let names: Vec<String> = sizes.iter().map(|_| self.fresh("Split")).collect();
        self.push("Split", &[value, &sizes_at], &names, &[("axis", Attribute::Int(-1))]);
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

    /// Adds a constant row of floating-point numbers, `[1, N]`.
    pub(super) fn row(&mut self, name: &str, values: &[f32]) -> String {
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.constant(name.to_owned(), OnnxType::F32, &[1, values.len()], &bytes)
    }

    /// Adds a weight; a second call with its name returns the first one.
    pub(super) fn weight(&mut self, name: &str, shape: &[usize], value: impl Fn() -> Result<Vec<f32>> + 'a) -> String {
        if self.names.insert(name.to_owned()) {
            self.weights.push(OnnxWeight { name: name.into(), shape: shape.into(), value: Box::new(value) });
        }
        name.to_owned()
    }

    /// Writes the graph to a file and the weights to another beside it, each all or nothing, one weight at a time.
    /// Unless `writes`, it computes all values and writes none: another rank writes.
    ///
    /// # Errors
    /// Fails if a value cannot be computed, or a file cannot be written.
    pub(super) fn save(self, path: &Path, writes: bool) -> Result<()> {
        if !writes {
            return self.weights.iter().try_for_each(|weight| (weight.value)().map(drop));
        }
        let Some(mut file) = path.file_name().map(OsString::from) else {
            return Err(unsuitable(path, "does not name a file"));
        };
        file.push(".data");
        let data = path.with_file_name(&file);
        let no_text = || unsuitable(path, "is not UTF-8, as names in this format must be");
        let location = file.to_str().ok_or_else(no_text)?;
        let (mut weights, mut offset) = (Replacement::new(&data)?, 0);
        let mut initializers = self.constants.clone();
        for weight in &self.weights {
            let bytes = weight.bytes()?;
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
        let graph = ProtoMessage::new()
            .each(1, &self.nodes)
            .bytes(2, self.name)
            .each(5, initializers)
            .each(11, &self.inputs)
            .each(12, &self.outputs);
        let opset = ProtoMessage::new().bytes(1, "").int(2, OPSET);
        ProtoMessage::new()
            .int(1, IR_VERSION)
            .bytes(2, "weftgrad")
            .bytes(3, env!("CARGO_PKG_VERSION"))
            .each(7, [&graph])
            .each(8, [&opset])
    }

    fn push(&mut self, kind: &str, inputs: &[&str], outputs: &[String], attributes: &[(&str, Attribute<'_>)]) {
        let node = inputs.iter().fold(ProtoMessage::new(), |node, input| node.bytes(1, input));
        let node = outputs.iter().fold(node, |node, output| node.bytes(2, output));
        let attributes: Vec<ProtoMessage> = attributes.iter().map(|(name, value)| value.described(name)).collect();
        let name = format!("node_{}", self.nodes.len());
        self.nodes.push(node.bytes(3, name).bytes(4, kind).each(5, &attributes));
    }

    fn fresh(&mut self, kind: &str) -> String {
        let name = format!("{}_{}", kind.to_lowercase(), self.names.len());
        self.names.insert(name.clone());
        name
    }

    fn constant(&mut self, name: String, kind: OnnxType, shape: &[usize], bytes: &[u8]) -> String {
        if self.names.insert(name.clone()) {
            self.constants.push(tensor(&name, kind, shape).bytes(9, bytes));
        }
        name
    }
}

impl OnnxWeight<'_> {
    fn bytes(&self) -> Result<Vec<u8>> {
        let values = (self.value)()?;
        if values.len() != self.shape.iter().product::<usize>() {
            let why = format!("has {} values, to be written as {:?}", values.len(), self.shape);
            return Err(Error::state(&*self.name, why));
        }
        Ok(values.iter().flat_map(|x| x.to_le_bytes()).collect())
    }

    /// The graph's entry for a weight that lies in another file.
    fn described(&self, location: &str, offset: usize, length: usize) -> ProtoMessage {
        const EXTERNAL: i64 = 1;
        let entry = |key: &str, value: &str| ProtoMessage::new().bytes(1, key).bytes(2, value);
        let place =
            [entry("location", location), entry("offset", &offset.to_string()), entry("length", &length.to_string())];
        tensor(&self.name, OnnxType::F32, &self.shape).each(13, &place).int(14, EXTERNAL)
    }
}

impl Attribute<'_> {
    fn described(self, name: &str) -> ProtoMessage {
        let attribute = ProtoMessage::new().bytes(1, name);
        match self {
            Attribute::Float(x) => attribute.float(2, x).int(20, 1),
            Attribute::Int(x) => attribute.int(3, x).int(20, 2),
            Attribute::Ints(list) => list.iter().fold(attribute, |a, &x| a.int(8, x)).int(20, 7),
        }
    }
}

fn unsuitable(path: &Path, why: &str) -> Error {
    Error::io(path, io::Error::new(io::ErrorKind::InvalidInput, why))
}

/// The message of a tensor, without its data.
fn tensor(name: &str, kind: OnnxType, shape: &[usize]) -> ProtoMessage {
    let sizes = shape.iter().fold(ProtoMessage::new(), |tensor, &n| tensor.int(1, n as i64));
    sizes.int(2, kind as i64).bytes(8, name)
}

/// The message of an input or output: its name, element type and sizes.
fn described(name: &str, kind: OnnxType, sizes: &[Size]) -> ProtoMessage {
    let size = |size: &Size| match size {
        Size::Is(n) => ProtoMessage::new().int(1, *n as i64),
        Size::Any(name) => ProtoMessage::new().bytes(2, name),
    };
    let sizes: Vec<ProtoMessage> = sizes.iter().map(size).collect();
    let shape = ProtoMessage::new().each(1, &sizes);
    let tensor = ProtoMessage::new().int(1, kind as i64).each(2, [&shape]);
    let kind = ProtoMessage::new().each(1, [&tensor]);
    ProtoMessage::new().bytes(1, name).each(2, [&kind])
}
