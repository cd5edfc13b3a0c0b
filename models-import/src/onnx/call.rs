//! A node with its inputs, as operators read it.

use std::collections::BTreeMap;

use autograd::Var;
use nn::Buffer;
use numcore::{
    DType, Error, Result, Runtime, Tensor,
    ops::{Apply, PointwiseOps},
};

use super::{
    graph::{PassFrame, ResolvedNode},
    host::HostArray,
    tensor,
    value::NodeValue,
};

/// The largest size, stride or count that an operator is given: products of two fit any integer of 64 bits.
const LARGEST: i64 = 1 << 31;

/// An attribute of a node.
pub(super) enum NodeAttribute<R: Runtime> {
    Float(f64),
    Int(i64),
    Text(String),
    Ints(Vec<i64>),
    Texts(Vec<String>),
    Tensor(NodeValue<R>),
}

/// The attributes of a node, by name.
pub(super) type NodeAttributes<R> = BTreeMap<String, NodeAttribute<R>>;
/// The outputs of an operator.
pub(super) type NodeOutputs<R> = Result<Vec<Var<R>>>;

/// One evaluation of a node.
pub(super) struct NodeCall<'a, R: Runtime> {
    pub(super) node: &'a ResolvedNode<R>,
    pub(super) ins: Vec<Option<NodeValue<R>>>,
    pub(super) frame: &'a PassFrame<'a, R>,
}

impl<R: Runtime> NodeCall<'_, R> {
    pub(super) fn device(&self) -> &R {
        self.frame.device
    }

    /// The version of the operator set.
    pub(super) fn opset(&self) -> i64 {
        self.frame.opset
    }

    pub(super) fn is_training(&self) -> bool {
        self.frame.training
    }

    /// The buffer that input `i` is, if it is one.
    pub(super) fn buffer(&self, i: usize) -> Option<Buffer<R>> {
        self.node.ins.get(i).copied().flatten().and_then(|place| (self.frame.buffers)(place))
    }

    /// The number of outputs that the node names.
    pub(super) fn outputs(&self) -> usize {
        self.node.outs.len()
    }

    /// Input `i`.
    pub(super) fn x(&self, i: usize) -> Result<&Var<R>> {
        self.opt(i)?.ok_or_else(|| bad(format!("input {i} is missing")))
    }

    /// Input `i`, if the node has it.
    pub(super) fn opt(&self, i: usize) -> Result<Option<&Var<R>>> {
        self.ins.get(i).and_then(Option::as_ref).map(|value| value.var(self.device())).transpose()
    }

    /// All inputs, at least one, none of which may be missing.
    pub(super) fn all(&self) -> Result<Vec<&Var<R>>> {
        (0..self.ins.len().max(1)).map(|i| self.x(i)).collect()
    }

    /// All inputs, if each is on the host or left out.
    pub(super) fn hosts(&self) -> Option<Vec<Option<&HostArray>>> {
        self.ins.iter().map(|value| value.as_ref().map_or(Some(None), |value| value.host().map(Some))).collect()
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.node.attributes.contains_key(name)
    }

    pub(super) fn int(&self, name: &str, default: i64) -> i64 {
        match self.node.attributes.get(name) {
            Some(NodeAttribute::Int(value)) => *value,
            _ => default,
        }
    }

    /// An attribute that is true unless it is 0.
    pub(super) fn flag(&self, name: &str) -> bool {
        self.int(name, 0) != 0
    }

    /// An attribute that is a size or count.
    pub(super) fn size(&self, name: &'static str, default: i64) -> Result<usize> {
        size(self.int(name, default))
    }

    pub(super) fn ints(&self, name: &str) -> Option<Vec<i64>> {
        match self.node.attributes.get(name) {
            Some(NodeAttribute::Ints(values)) => Some(values.clone()),
            _ => None,
        }
    }

    pub(super) fn float(&self, name: &str, default: f64) -> f64 {
        match self.node.attributes.get(name) {
            Some(NodeAttribute::Float(value)) => *value,
            _ => default,
        }
    }

    pub(super) fn text<'b>(&'b self, name: &str, default: &'b str) -> &'b str {
        match self.node.attributes.get(name) {
            Some(NodeAttribute::Text(value)) => value,
            _ => default,
        }
    }

    pub(super) fn texts(&self, name: &str) -> Option<&[String]> {
        match self.node.attributes.get(name) {
            Some(NodeAttribute::Texts(values)) => Some(values),
            _ => None,
        }
    }

    pub(super) fn tensor(&self, name: &str) -> Option<&NodeValue<R>> {
        match self.node.attributes.get(name) {
            Some(NodeAttribute::Tensor(value)) => Some(value),
            _ => None,
        }
    }

    /// The attribute `value` on the host, if it is small.
    pub(super) fn filled(&self) -> Option<HostArray> {
        self.tensor("value").and_then(NodeValue::host).cloned()
    }

    /// Input `i` as integers on the host: a shape, axes, sizes.
    pub(super) fn host(&self, i: usize) -> Result<Option<Vec<i64>>> {
        let read = |value: &NodeValue<R>| match value {
            NodeValue::Host(hosted) => Ok(hosted.host.ints()),
            NodeValue::Device(x) if x.dtype().is_float() => Err(bad(format!("input {i} must be of integers"))),
            NodeValue::Device(x) => x.value()?.to_dtype(DType::I64)?.to_vec::<i64>(),
        };
        self.ins.get(i).and_then(Option::as_ref).map(read).transpose()
    }

    /// Input `i` as numbers on the host.
    pub(super) fn numbers(&self, i: usize) -> Result<Option<Vec<f64>>> {
        let read = |value: &NodeValue<R>| match value {
            NodeValue::Host(hosted) => Ok(hosted.host.values.clone()),
            NodeValue::Device(x) => x.value()?.to_f64s(),
        };
        self.ins.get(i).and_then(Option::as_ref).map(read).transpose()
    }

    /// Input `i` as one number on the host.
    pub(super) fn number(&self, i: usize) -> Result<Option<f64>> {
        match self.numbers(i)?.as_deref() {
            None => Ok(None),
            Some([one]) => Ok(Some(*one)),
            Some(more) => Err(bad(format!("input {i} has {} elements, and must have one", more.len()))),
        }
    }

    /// Input `i` as sizes.
    pub(super) fn sizes(&self, i: usize) -> Result<Vec<usize>> {
        sizes(&self.host(i)?.ok_or_else(|| bad(format!("input {i}, a list of sizes, is missing")))?)
    }

    /// The position of an axis of input `i`, which may count from the end.
    pub(super) fn axis(&self, i: usize, axis: i64) -> Result<usize> {
        self.x(i)?.spec().shape.axis("onnx", axis as isize)
    }

    /// A list that newer versions have as input `i`, and older ones as an attribute.
    pub(super) fn list(&self, name: &str, i: usize) -> Result<Option<Vec<i64>>> {
        Ok(self.ints(name).or(self.host(i)?))
    }

    pub(super) fn scalar(&self, value: f64, dtype: DType) -> Result<Var<R>> {
        let shape = [0usize; 0];
        let made = match dtype {
            dtype if dtype.is_float() => Tensor::full(self.device(), shape, dtype, value)?,
            dtype => Tensor::full(self.device(), shape, dtype, value as i64)?,
        };
        Ok(Var::new(made))
    }

    /// Integers as a value of one axis.
    pub(super) fn integers(&self, values: &[i64]) -> Result<Var<R>> {
        Ok(Var::new(Tensor::from_slice(self.device(), [values.len()], values)?))
    }

    /// The element type that an attribute names.
    pub(super) fn dtype(&self, name: &str, default: i64) -> Result<DType> {
        tensor::dtype(self.int(name, default))
    }
}

/// An error of a node; the node's name is added where it is run.
pub(super) fn bad(why: impl Into<String>) -> Error {
    Error::argument("onnx", why)
}

/// A size or count.
pub(super) fn size(value: i64) -> Result<usize> {
    if (0..=LARGEST).contains(&value) {
        return Ok(value as usize);
    }
    Err(Error::range("onnx", "size", value, format_args!("in 0..={LARGEST}")))
}

/// Sizes, strides or counts.
pub(super) fn sizes(values: &[i64]) -> Result<Vec<usize>> {
    values.iter().map(|&value| size(value)).collect()
}

/// A list that must have `N` elements.
pub(super) fn array<T: Copy, const N: usize>(of: &str, list: &[T]) -> Result<[T; N]> {
    list.try_into().map_err(|_| bad(format!("{of} has {} elements, and must have {N}", list.len())))
}
