//! Graphs of a file as graphs whose names are resolved, and the check that every node is one that is computed.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use nn::{Buffer, Param};
use numcore::{DType, Error, Result, Runtime};

use super::{
    call::{NodeAttribute, NodeAttributes},
    control,
    graph::{NodeRule, ResolvedGraph, ResolvedNode},
    host::HostArray,
    host_ops, ops,
    proto::{AttributeProto, GraphProto, ModelProto, NodeProto},
    tensor::TensorProto,
    value::NodeValue,
};

/// The versions of the operator set that are computed.
const OPSETS: std::ops::RangeInclusive<i64> = 7..=28;

/// A constant of a graph: what it is to the model.
pub(super) enum HeldTensor<R: Runtime> {
    Constant(NodeValue<R>),
    Weight(Param<R>),
    Running(Buffer<R>),
}

/// A model whose names are resolved.
pub(super) struct ResolvedModel<R: Runtime> {
    pub(super) graph: ResolvedGraph<R>,
    pub(super) opset: i64,
    /// The number of places for values.
    pub(super) places: usize,
    /// Weights, buffers and constants with their places and names, in the order of the file.
    pub(super) held: Vec<(usize, String, HeldTensor<R>)>,
}

/// Builds the model of a file, whose weights may lie in `folder`.
pub(super) fn build<R: Runtime>(file: &ModelProto<'_>, folder: Option<&Path>, device: &R) -> Result<ResolvedModel<R>> {
    let opset = check::<R>(file)?;
    check_tensors(&file.graph, folder)?;
    let mut roles = BTreeMap::new();
    find_roles(&file.graph, &mut roles);
    let (tensors, free) = (BTreeMap::new(), BTreeSet::new());
    let mut builder = Resolver { device, folder, roles, tensors, free, held: Vec::new(), places: 0 };
    let mut graph = builder.graph(&file.graph, &BTreeMap::new())?;
    mark_last(&mut graph, &builder.held.iter().map(|(place, ..)| *place).collect());
    Ok(ResolvedModel { graph, opset, places: builder.places, held: builder.held })
}

/// Checks versions, operators and attributes, and returns the version of the operator set.
fn check<R: Runtime>(file: &ModelProto<'_>) -> Result<i64> {
    let opset = file.opsets.get("").or(file.opsets.get("ai.onnx")).copied();
    if let Some(version) = opset.filter(|version| !OPSETS.contains(version)) {
        let why = format!(
            "the file is of opset {version}, and {} to {} are supported: convert it by `onnx.version_converter`",
            OPSETS.start(),
            OPSETS.end()
        );
        return Err(Error::unsupported("onnx", why));
    }
    let mut unsupported = Vec::new();
    check_graph::<R>(&file.graph, &file.opsets, &mut unsupported);
    if unsupported.is_empty() {
        return Ok(opset.unwrap_or(*OPSETS.end()));
    }
    Err(Error::unsupported(
        "onnx",
        format!("{} nodes are not supported: {}", unsupported.len(), unsupported.join("; ")),
    ))
}

fn check_graph<R: Runtime>(graph: &GraphProto<'_>, opsets: &BTreeMap<&str, i64>, unsupported: &mut Vec<String>) {
    for node in &graph.nodes {
        if let Some(why) = refusal::<R>(node) {
            let domain = if node.domain.is_empty() { "ai.onnx" } else { node.domain };
            let version = opsets.get(node.domain).map_or("of no stated version".into(), |v| format!("version {v}"));
            unsupported.push(format!("{} ({domain}, {version}): {why}", label(node)));
        }
        for attribute in node.attributes.values() {
            if let AttributeProto::Graph(inner) = attribute {
                check_graph::<R>(inner, opsets, unsupported);
            }
        }
    }
}

/// Checks types, sizes and places of all tensors.
fn check_tensors(graph: &GraphProto<'_>, folder: Option<&Path>) -> Result<()> {
    graph.initializers.iter().try_for_each(|tensor| tensor.check(folder))?;
    let mut attributes = graph.nodes.iter().flat_map(|node| node.attributes.values());
    attributes.try_for_each(|attribute| match attribute {
        AttributeProto::Graph(inner) => check_tensors(inner, folder),
        AttributeProto::Tensor(tensor) => tensor.check(folder),
        _ => Ok(()),
    })
}

/// The reason why a node is not computed.
fn refusal<R: Runtime>(node: &NodeProto<'_>) -> Option<String> {
    let Some(known) = attributes_of::<R>(node) else { return Some("the operator is unknown".into()) };
    let other = node.attributes.keys().find(|name| !known.contains(*name));
    other.map(|name| format!("the attribute `{name}` is unknown"))
}

/// The attributes that a node's operator reads.
fn attributes_of<R: Runtime>(node: &NodeProto<'_>) -> Option<&'static [&'static str]> {
    if is_constant(node) {
        return Some(&["value", "value_float", "value_floats", "value_int", "value_ints"]);
    }
    rule::<R>(node).map(|(_, attributes)| attributes)
}

/// The computation of a node, and the attributes that it reads.
fn rule<R: Runtime>(node: &NodeProto<'_>) -> Option<(NodeRule<R>, &'static [&'static str])> {
    if let Some(row) = ops::find::<R>(node.domain, node.op) {
        return Some((NodeRule::Row(row.run), row.attributes));
    }
    special::<R>(node).map(|(special, attributes)| (NodeRule::Special(special), attributes))
}

/// An operator that handles values itself.
fn special<R: Runtime>(node: &NodeProto<'_>) -> Option<(control::SpecialRule<R>, &'static [&'static str])> {
    let own = matches!(node.domain, "" | "ai.onnx") || (node.domain == "ai.onnx.preview" && node.op == "FlexAttention");
    if own { control::find(node.op).or_else(|| host_ops::find(node.op)) } else { None }
}

fn is_constant(node: &NodeProto<'_>) -> bool {
    is_own(node, "Constant")
}

/// Tells whether a node is of this operator of the format's own domain.
fn is_own(node: &NodeProto<'_>, op: &str) -> bool {
    node.op == op && matches!(node.domain, "" | "ai.onnx")
}

/// The operator and the name of a node, for errors; without a name, its first output.
fn label(node: &NodeProto<'_>) -> String {
    let name = if node.name.is_empty() { node.outs.first().copied().unwrap_or_default() } else { node.name };
    format!("{} {name}", node.op)
}

/// Uses of an initializer in a file.
#[derive(Clone, Copy, PartialEq, Eq)]
struct InitializerRole {
    weight: bool,
    running: bool,
}

/// Finds the uses of all names. Statistics of a batch norm are buffers; inputs that are options are constants.
fn find_roles<'a>(graph: &GraphProto<'a>, roles: &mut BTreeMap<&'a str, InitializerRole>) {
    for node in &graph.nodes {
        for (i, name) in node.ins.iter().enumerate() {
            let role = roles.entry(name).or_insert(InitializerRole { weight: false, running: false });
            let running = is_own(node, "BatchNormalization") && i >= 3;
            role.running |= running;
            // An `Identity` makes a tensor of its own of an initializer, with the uses of its output's name.
            role.weight |= !running && !is_own(node, "Identity") && !is_option(node.op, i);
        }
        for attribute in node.attributes.values() {
            if let AttributeProto::Graph(inner) = attribute {
                find_roles(inner, roles);
            }
        }
    }
}

/// Tells whether a floating-point input of an operator is an option of it, which is not trained.
fn is_option(op: &str, i: usize) -> bool {
    match op {
        "Clip" | "Dropout" | "Pad" | "Resize" | "Upsample" | "OneHot" | "QuantizeLinear" | "DequantizeLinear" => i > 0,
        "STFT" => i == 2,
        "NonMaxSuppression" | "QLinearMatMul" | "QLinearConv" | "MatMulInteger" | "ConvInteger" => true,
        "Equal" | "Less" | "LessOrEqual" | "Greater" | "GreaterOrEqual" | "Range" | "Loop" | "If" => true,
        _ => false,
    }
}

struct Resolver<'a, R: Runtime> {
    device: &'a R,
    folder: Option<&'a Path>,
    roles: BTreeMap<&'a str, InitializerRole>,
    /// The tensors of the file, by the places that hold them.
    tensors: BTreeMap<usize, &'a TensorProto<'a>>,
    /// The places of statistics that no batch norm has yet.
    free: BTreeSet<usize>,
    held: Vec<(usize, String, HeldTensor<R>)>,
    places: usize,
}

/// The place of each value, by name.
type NamedPlaces<'a> = BTreeMap<&'a str, usize>;

impl<'a, R: Runtime> Resolver<'a, R> {
    /// A graph that may read the values `around` it.
    fn graph(&mut self, graph: &'a GraphProto<'a>, around: &NamedPlaces<'a>) -> Result<ResolvedGraph<R>> {
        let mut names = around.clone();
        for tensor in &graph.initializers {
            self.hold(&mut names, tensor.name, tensor)?;
        }
        // Before version 4 of the format, initializers are inputs too.
        let is_given = |name: &str| !graph.initializers.iter().any(|tensor| tensor.name == name);
        let given = graph.inputs.iter().filter(|input| is_given(&input.name));
        let inputs = given.map(|input| self.place(&mut names, &input.name)).collect();
        let mut nodes = Vec::new();
        for node in &graph.nodes {
            if is_constant(node) {
                let value = self.constant(node)?;
                let name = node.outs.first().ok_or_else(|| unresolved(node, "it has no output"))?;
                let place = self.place(&mut names, name);
                self.held.push((place, (*name).to_owned(), HeldTensor::Constant(value)));
            } else if let Some((tensor, name)) = self.renamed(node, &names) {
                self.hold(&mut names, name, tensor)?;
            } else {
                nodes.push(self.node(node, &mut names)?);
            }
        }
        let output = |output: &super::proto::OnnxInput| {
            let missing = || Error::format("an ONNX file", format!("no node makes the output `{}`", output.name));
            names.get(output.name.as_str()).copied().ok_or_else(missing)
        };
        Ok(ResolvedGraph { inputs, outputs: graph.outputs.iter().map(output).collect::<Result<_>>()?, nodes })
    }

    fn place(&mut self, names: &mut NamedPlaces<'a>, name: &'a str) -> usize {
        names.insert(name, self.places);
        self.places += 1;
        self.places - 1
    }

    fn node(&mut self, node: &'a NodeProto<'a>, names: &mut NamedPlaces<'a>) -> Result<ResolvedNode<R>> {
        let read = |name: &&str| match *name {
            "" => Ok(None),
            name => {
                let missing = || unresolved(node, &format!("no earlier node makes its input `{name}`"));
                names.get(name).copied().map(Some).ok_or_else(missing)
            }
        };
        let mut ins = node.ins.iter().map(read).collect::<Result<Vec<_>>>()?;
        if is_own(node, "BatchNormalization") {
            self.own_statistics(node, &mut ins)?;
        }
        let (mut attributes, mut graphs) = (NodeAttributes::new(), Vec::new());
        for (&name, attribute) in &node.attributes {
            let value = match attribute {
                AttributeProto::Graph(inner) => {
                    graphs.push((name.to_owned(), self.graph(inner, names)?));
                    continue;
                }
                AttributeProto::Tensor(tensor) => NodeAttribute::Tensor(self.value(tensor)?),
                AttributeProto::Float(value) => NodeAttribute::Float(*value),
                AttributeProto::Int(value) => NodeAttribute::Int(*value),
                AttributeProto::Text(value) => NodeAttribute::Text((*value).to_owned()),
                AttributeProto::Floats(_) => {
                    return Err(unresolved(node, &format!("the attribute `{name}` is a list of floats")));
                }
                AttributeProto::Ints(values) => NodeAttribute::Ints(values.clone()),
                AttributeProto::Texts(values) => NodeAttribute::Texts(values.iter().map(|&v| v.to_owned()).collect()),
                AttributeProto::Other(kind) => {
                    return Err(unresolved(node, &format!("the attribute `{name}` has the type {kind}")));
                }
            };
            attributes.insert(name.to_owned(), value);
        }
        let made = |name: &&'a str| (!name.is_empty()).then(|| self.place(names, name));
        let outs = node.outs.iter().map(made).collect();
        let (rule, _) = rule(node).ok_or_else(|| unresolved(node, "the operator is unknown"))?;
        let (op, label) = (node.op.to_owned(), label(node));
        Ok(ResolvedNode { op, label, rule, ins, outs, attributes, graphs, last: Vec::new() })
    }

    /// The value of a node `Constant`.
    fn constant(&self, node: &NodeProto<'a>) -> Result<NodeValue<R>> {
        let host = |dtype, dims: Vec<usize>, values: Vec<f64>| {
            let host = HostArray::new(dtype, dims, values);
            host.map(NodeValue::of).ok_or_else(|| unresolved(node, "its numbers are too many, or not exact"))
        };
        let floats = |values: &[f64]| values.to_vec();
        let ints = |values: &[i64]| values.iter().map(|&v| v as f64).collect::<Vec<_>>();
        match node.attributes.first_key_value() {
            Some((_, AttributeProto::Tensor(tensor))) => self.value(tensor),
            Some((_, AttributeProto::Float(x))) => host(DType::F32, vec![], floats(&[*x])),
            Some((_, AttributeProto::Int(x))) => host(DType::I64, vec![], ints(&[*x])),
            Some((_, AttributeProto::Floats(list))) => host(DType::F32, vec![list.len()], floats(list)),
            Some((_, AttributeProto::Ints(list))) => host(DType::I64, vec![list.len()], ints(list)),
            _ => Err(unresolved(node, "it has no number")),
        }
    }

    /// A tensor of the file as a constant.
    fn value(&self, tensor: &TensorProto<'_>) -> Result<NodeValue<R>> {
        NodeValue::constant(tensor.load(self.device, self.folder)?)
    }

    /// The initializer that an `Identity` copies, and the name of the copy.
    fn renamed(&self, node: &NodeProto<'a>, names: &NamedPlaces<'a>) -> Option<(&'a TensorProto<'a>, &'a str)> {
        let ([from], [to]) = (&node.ins[..], &node.outs[..]) else { return None };
        let tensor = self.tensors.get(names.get(from)?)?;
        is_own(node, "Identity").then_some((*tensor, *to))
    }

    /// Holds a tensor by the uses of its name.
    ///
    /// A floating-point tensor with axes is a weight unless all its uses are options. It is a buffer if all are as
    /// statistics.
    fn hold(&mut self, names: &mut NamedPlaces<'a>, name: &'a str, tensor: &'a TensorProto<'a>) -> Result<()> {
        let role = self.roles.get(name).copied().unwrap_or(InitializerRole { weight: false, running: false });
        let has_axes = tensor.dtype()?.is_float() && tensor.shape()?.rank() > 0;
        let place = self.place(names, name);
        let held = if !has_axes || !(role.weight || role.running) {
            HeldTensor::Constant(self.value(tensor)?)
        } else if role.weight {
            HeldTensor::Weight(Param::new(tensor.load(self.device, self.folder)?)?)
        } else {
            self.free.insert(place);
            HeldTensor::Running(Buffer::new(tensor.load(self.device, self.folder)?))
        };
        self.tensors.insert(place, tensor);
        self.held.push((place, name.to_owned(), held));
        Ok(())
    }

    /// Gives a batch norm buffers of its own for the tensors of the file that another node reads too.
    fn own_statistics(&mut self, node: &NodeProto<'a>, ins: &mut [Option<usize>]) -> Result<()> {
        for (place, name) in ins.iter_mut().skip(3).zip(["running_mean", "running_var"]) {
            let Some(shared) = place.filter(|shared| !self.free.remove(shared)) else { continue };
            let Some(tensor) = self.tensors.get(&shared) else { continue };
            let buffer = Buffer::new(tensor.load(self.device, self.folder)?);
            let name = format!("{}.{name}", node.outs.first().copied().unwrap_or_default());
            self.held.push((self.places, name, HeldTensor::Running(buffer)));
            *place = Some(self.places);
            self.places += 1;
        }
        Ok(())
    }
}

fn unresolved(node: &NodeProto<'_>, why: &str) -> Error {
    Error::format("an ONNX file", format!("the node `{}` cannot be computed: {why}", label(node)))
}

/// Marks the last node that reads each value, unless the value is held or an output.
fn mark_last<R: Runtime>(graph: &mut ResolvedGraph<R>, held: &BTreeSet<usize>) {
    let mut later: BTreeSet<usize> = held.iter().chain(&graph.outputs).copied().collect();
    for node in graph.nodes.iter_mut().rev() {
        let mut places = BTreeSet::new();
        read_places(node, &mut places);
        // A value that nobody reads ends where it is made.
        places.extend(node.outs.iter().flatten());
        node.last = places.iter().copied().filter(|place| later.insert(*place)).collect();
    }
}

/// The places that a node reads, in its graphs too.
fn read_places<R: Runtime>(node: &ResolvedNode<R>, places: &mut BTreeSet<usize>) {
    places.extend(node.ins.iter().flatten());
    for (_, graph) in &node.graphs {
        places.extend(&graph.outputs);
        graph.nodes.iter().for_each(|node| read_places(node, places));
    }
}
