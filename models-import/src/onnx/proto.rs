//! Files in ONNX's format, read into plain values: nothing is computed, and no memory is taken but for names.

use std::collections::BTreeMap;

use data::protobuf::{ProtoFields, ProtoValue};
use numcore::{DType, Error, Result};

use super::tensor::TensorProto;

/// The depth to which graphs may lie in attributes of nodes of other graphs.
const DEEPEST: usize = 8;

/// A file: a graph, and the versions of the sets of operators that it uses.
pub(super) struct ModelProto<'a> {
    pub(super) graph: GraphProto<'a>,
    pub(super) opsets: BTreeMap<&'a str, i64>,
}

/// A graph: nodes in order, each of which reads values by name.
#[derive(Default)]
pub(super) struct GraphProto<'a> {
    pub(super) nodes: Vec<NodeProto<'a>>,
    pub(super) initializers: Vec<TensorProto<'a>>,
    pub(super) inputs: Vec<OnnxInput>,
    pub(super) outputs: Vec<OnnxInput>,
}

/// A node. An empty name stands for an input or output that is left out.
#[derive(Default)]
pub(super) struct NodeProto<'a> {
    pub(super) op: &'a str,
    pub(super) domain: &'a str,
    pub(super) name: &'a str,
    pub(super) ins: Vec<&'a str>,
    pub(super) outs: Vec<&'a str>,
    pub(super) attributes: BTreeMap<&'a str, AttributeProto<'a>>,
}

/// The value of an attribute.
pub(super) enum AttributeProto<'a> {
    Float(f64),
    Int(i64),
    Text(&'a str),
    Tensor(TensorProto<'a>),
    Graph(GraphProto<'a>),
    Floats(Vec<f64>),
    Ints(Vec<i64>),
    Texts(Vec<&'a str>),
    /// A kind of value that no operator here reads.
    Other(i64),
}

/// An input or output of a graph.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OnnxInput {
    /// The name of the value.
    pub name: String,
    /// The element type, if the file states one that exists here.
    pub dtype: Option<DType>,
    /// The size along each axis, if the file states the number of axes.
    pub sizes: Option<Vec<OnnxSize>>,
}

/// A size of an input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OnnxSize {
    /// A fixed size.
    Is(usize),
    /// A size that each call may choose, with its name if it has one.
    Any(String),
}

impl<'a> ModelProto<'a> {
    pub(super) fn read(bytes: &'a [u8]) -> Result<Self> {
        let (mut graph, mut opsets) = (None, BTreeMap::new());
        for field in ProtoFields::new(bytes) {
            match field? {
                (7, value) => graph = Some(GraphProto::read(message(value)?, 0)?),
                (8, value) => {
                    let (domain, version) = opset(message(value)?)?;
                    opsets.insert(domain, version);
                }
                // The version of the format, the producer, the model's own version, texts, and training graphs' places.
                (1..=6 | 14, _) => {}
                (20, _) => return Err(refused("training_info", "a graph that trains")),
                // Functions: a node that calls one has a domain of its own, and is refused by name.
                (25, _) => {}
                (26, _) => return Err(refused("configuration", "a placement on several devices")),
                (number, _) => return Err(unknown("ModelProto", number)),
            }
        }
        let graph = graph.ok_or_else(|| Error::format("an ONNX file", "has no graph; is it in this format?"))?;
        Ok(ModelProto { graph, opsets })
    }
}

impl<'a> GraphProto<'a> {
    fn read(bytes: &'a [u8], depth: usize) -> Result<Self> {
        if depth > DEEPEST {
            return Err(Error::format("an ONNX file", format!("has graphs within graphs, more than {DEEPEST} deep")));
        }
        let mut graph = GraphProto::default();
        for field in ProtoFields::new(bytes) {
            match field? {
                (1, value) => graph.nodes.push(NodeProto::read(message(value)?, depth)?),
                (5, value) => graph.initializers.push(TensorProto::read(message(value)?)?),
                (11, value) => graph.inputs.push(OnnxInput::read(message(value)?)?),
                (12, value) => graph.outputs.push(OnnxInput::read(message(value)?)?),
                // The name, texts, the types of values in between, notes on quantization.
                (2 | 10 | 13 | 14 | 16, _) => {}
                (15, _) => return Err(refused("sparse_initializer", "a sparse tensor")),
                (number, _) => return Err(unknown("GraphProto", number)),
            }
        }
        Ok(graph)
    }
}

impl<'a> NodeProto<'a> {
    fn read(bytes: &'a [u8], depth: usize) -> Result<Self> {
        let mut node = NodeProto::default();
        for field in ProtoFields::new(bytes) {
            match field? {
                (1, value) => node.ins.push(text(value)?),
                (2, value) => node.outs.push(text(value)?),
                (3, value) => node.name = text(value)?,
                (4, value) => node.op = text(value)?,
                (5, value) => {
                    let (name, attribute) = attribute(message(value)?, depth)?;
                    node.attributes.insert(name, attribute);
                }
                // Texts, an overload of a function, placements on devices.
                (6 | 8 | 9 | 10, _) => {}
                (7, value) => node.domain = text(value)?,
                (number, _) => return Err(unknown("NodeProto", number)),
            }
        }
        Ok(node)
    }
}

/// The name and the value of an attribute.
fn attribute<'a>(bytes: &'a [u8], depth: usize) -> Result<(&'a str, AttributeProto<'a>)> {
    let (mut name, mut kind, mut one) = ("", 0, None);
    let (mut floats, mut ints, mut texts) = (Vec::new(), Vec::new(), Vec::new());
    for field in ProtoFields::new(bytes) {
        match field? {
            (1, value) => name = text(value)?,
            (2, ProtoValue::Fixed32(bits)) => one = Some(AttributeProto::Float(f64::from(f32::from_bits(bits)))),
            (3, ProtoValue::Int(value)) => one = Some(AttributeProto::Int(value)),
            (4, value) => one = Some(AttributeProto::Text(text(value)?)),
            (5, value) => one = Some(AttributeProto::Tensor(TensorProto::read(message(value)?)?)),
            (6, value) => one = Some(AttributeProto::Graph(GraphProto::read(message(value)?, depth + 1)?)),
            (7, value) => floats.extend(list32(value)?.map(|bits| f64::from(f32::from_bits(bits)))),
            (8, value) => ints.extend(list(value)?),
            (9, value) => texts.push(text(value)?),
            (10 | 11 | 13 | 14 | 15 | 22 | 23, _) => {}
            (20, ProtoValue::Int(value)) => kind = value,
            (21, _) => return Err(refused("ref_attr_name", "an attribute of a function")),
            (number, _) => return Err(unknown("AttributeProto", number)),
        }
    }
    // A default value may be left out of the file.
    let value = match kind {
        1 => one.unwrap_or(AttributeProto::Float(0.0)),
        2 => one.unwrap_or(AttributeProto::Int(0)),
        3 => one.unwrap_or(AttributeProto::Text("")),
        4 | 5 => one.unwrap_or(AttributeProto::Other(kind)),
        6 => AttributeProto::Floats(floats),
        7 => AttributeProto::Ints(ints),
        8 => AttributeProto::Texts(texts),
        _ => AttributeProto::Other(kind),
    };
    let agrees = match &value {
        AttributeProto::Float(_) => kind == 1,
        AttributeProto::Int(_) => kind == 2,
        AttributeProto::Text(_) => kind == 3,
        AttributeProto::Tensor(_) => kind == 4,
        AttributeProto::Graph(_) => kind == 5,
        _ => true,
    };
    if !agrees {
        return Err(Error::format("an ONNX file", format!("the attribute `{name}` is not of its own type {kind}")));
    }
    Ok((name, value))
}

impl OnnxInput {
    fn read(bytes: &[u8]) -> Result<Self> {
        let mut input = OnnxInput::default();
        for field in ProtoFields::new(bytes) {
            match field? {
                (1, value) => input.name = text(value)?.to_owned(),
                (2, value) => input.read_type(message(value)?)?,
                _ => {}
            }
        }
        Ok(input)
    }

    fn read_type(&mut self, bytes: &[u8]) -> Result<()> {
        for field in ProtoFields::new(bytes) {
            let (1, value) = field? else { continue };
            for field in ProtoFields::new(message(value)?) {
                match field? {
                    (1, ProtoValue::Int(number)) => self.dtype = super::tensor::dtype(number).ok(),
                    (2, value) => self.sizes = Some(sizes(message(value)?)?),
                    _ => {}
                }
            }
        }
        Ok(())
    }
}

/// The sizes of a shape.
fn sizes(bytes: &[u8]) -> Result<Vec<OnnxSize>> {
    let mut found = Vec::new();
    for field in ProtoFields::new(bytes) {
        let (1, value) = field? else { continue };
        let mut size = OnnxSize::Any(String::new());
        for field in ProtoFields::new(message(value)?) {
            match field? {
                // Some writers have sizes of −1 or 0 for any.
                (1, ProtoValue::Int(n)) if n > 0 => size = OnnxSize::Is(n as usize),
                (2, value) => size = OnnxSize::Any(text(value)?.to_owned()),
                _ => {}
            }
        }
        found.push(size);
    }
    Ok(found)
}

fn opset(bytes: &[u8]) -> Result<(&str, i64)> {
    let (mut domain, mut version) = ("", 1);
    for field in ProtoFields::new(bytes) {
        match field? {
            (1, value) => domain = text(value)?,
            (2, ProtoValue::Int(value)) => version = value,
            (number, _) => return Err(unknown("OperatorSetIdProto", number)),
        }
    }
    Ok((domain, version))
}

/// The bytes of a field that is a message, a text or a packed list.
pub(super) fn message(value: ProtoValue<'_>) -> Result<&[u8]> {
    match value {
        ProtoValue::Bytes(bytes) => Ok(bytes),
        other => Err(Error::format("an ONNX file", format!("has {other:?} for a message"))),
    }
}

pub(super) fn text(value: ProtoValue<'_>) -> Result<&str> {
    std::str::from_utf8(message(value)?).map_err(|_| Error::format("an ONNX file", "has a text that is not UTF-8"))
}

/// A repeated field of integers, packed or one by one.
pub(super) fn list(value: ProtoValue<'_>) -> Result<Vec<i64>> {
    match value {
        ProtoValue::Int(one) => Ok(vec![one]),
        other => ProtoFields::packed_ints(message(other)?),
    }
}

/// A repeated field of `float`, packed or one by one, as bits.
fn list32(value: ProtoValue<'_>) -> Result<impl Iterator<Item = u32>> {
    let bits = match value {
        ProtoValue::Fixed32(one) => vec![one],
        other => message(other)?.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
    };
    Ok(bits.into_iter())
}

pub(super) fn unknown(message: &str, number: u32) -> Error {
    Error::format("an ONNX file", format!("{message} has the unknown field {number}"))
}

fn refused(field: &str, kind: &str) -> Error {
    Error::unsupported("onnx", format!("the file has `{field}`, {kind}: export the model for inference"))
}
