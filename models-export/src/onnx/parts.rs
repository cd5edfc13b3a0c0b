//! The parts of a graph in ONNX's format, and their messages.

use data::protobuf::ProtoMessage;
use numcore::{DType, Error, Result};

/// The element types of inputs and constants, with their numbers in files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OnnxType {
    /// 32-bit floating point.
    F32 = 1,
    /// 8-bit unsigned integers.
    U8 = 2,
    /// 32-bit signed integers.
    I32 = 6,
    /// 64-bit signed integers.
    I64 = 7,
    /// Truth values, a byte each.
    Bool = 9,
    /// 64-bit floating point.
    F64 = 11,
    /// 32-bit unsigned integers.
    U32 = 12,
}

impl OnnxType {
    /// The type of elements of a dtype.
    ///
    /// # Errors
    /// Fails if the dtype is not written.
    pub(super) fn of(dtype: DType) -> Result<Self> {
        Ok(match dtype {
            DType::F32 => OnnxType::F32,
            DType::F64 => OnnxType::F64,
            DType::I64 => OnnxType::I64,
            DType::I32 => OnnxType::I32,
            DType::U32 => OnnxType::U32,
            DType::U8 => OnnxType::U8,
            DType::Bool => OnnxType::Bool,
            _ => return Err(Error::dtype("onnx", &[dtype], "is not written; cast the module to f32")),
        })
    }

    /// The bytes of an element.
    fn size(self) -> usize {
        match self {
            OnnxType::U8 | OnnxType::Bool => 1,
            OnnxType::F32 | OnnxType::I32 | OnnxType::U32 => 4,
            OnnxType::I64 | OnnxType::F64 => 8,
        }
    }
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
    /// A word.
    Text(&'a str),
}

/// A weight, and the source of its bytes.
pub(super) struct OnnxWeight<'a> {
    pub name: String,
    pub kind: OnnxType,
    pub shape: Vec<usize>,
    /// True if every forward pass has the same of this name; the values of others are compared.
    pub is_known: bool,
    pub bytes: Box<dyn Fn() -> Result<Vec<u8>> + 'a>,
}

/// A node, and the values that it reads and makes.
pub(super) struct OnnxNode {
    pub kind: String,
    pub inputs: Vec<String>,
    pub outputs: Vec<String>,
    pub attributes: Vec<Vec<u8>>,
}

/// A small constant.
pub(super) struct OnnxConstant {
    pub name: String,
    pub kind: OnnxType,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

/// An input or output of a graph.
pub(super) struct OnnxPort {
    pub name: String,
    pub kind: OnnxType,
    pub sizes: Vec<Size>,
}

/// A size of an input or output.
#[derive(Clone, Copy, Debug)]
pub(super) enum Size {
    /// A size that varies, with its name.
    Any(&'static str),
    /// A fixed size.
    Is(usize),
}

impl OnnxNode {
    pub(super) fn described(&self, at: usize) -> ProtoMessage {
        let node = self.inputs.iter().fold(ProtoMessage::new(), |node, input| node.bytes(1, input));
        let node = self.outputs.iter().fold(node, |node, output| node.bytes(2, output));
        let node = node.bytes(3, format!("node_{at}")).bytes(4, &self.kind);
        self.attributes.iter().fold(node, |node, attribute| node.bytes(5, attribute))
    }
}

impl OnnxConstant {
    pub(super) fn described(&self) -> ProtoMessage {
        tensor(&self.name, self.kind, &self.shape).bytes(9, &self.bytes)
    }
}

impl OnnxWeight<'_> {
    pub(super) fn checked_bytes(&self) -> Result<Vec<u8>> {
        let (bytes, count) = ((self.bytes)()?, self.shape.iter().product::<usize>());
        if bytes.len() != count * self.kind.size() {
            let why = format!("has {} bytes, to be written as {:?} of {:?}", bytes.len(), self.kind, self.shape);
            return Err(Error::state(&*self.name, why));
        }
        Ok(bytes)
    }

    /// The graph's entry for a weight that lies in another file.
    pub(super) fn described(&self, location: &str, offset: usize, length: usize) -> ProtoMessage {
        const EXTERNAL: i64 = 1;
        let entry = |key: &str, value: &str| ProtoMessage::new().bytes(1, key).bytes(2, value);
        let place =
            [entry("location", location), entry("offset", &offset.to_string()), entry("length", &length.to_string())];
        tensor(&self.name, self.kind, &self.shape).each(13, &place).int(14, EXTERNAL)
    }
}

impl Attribute<'_> {
    pub(super) fn described(self, name: &str) -> ProtoMessage {
        let attribute = ProtoMessage::new().bytes(1, name);
        match self {
            Attribute::Float(x) => attribute.float(2, x).int(20, 1),
            Attribute::Int(x) => attribute.int(3, x).int(20, 2),
            Attribute::Text(word) => attribute.bytes(4, word).int(20, 3),
            Attribute::Ints(list) => list.iter().fold(attribute, |a, &x| a.int(8, x)).int(20, 7),
        }
    }
}

/// The message of a tensor, without its data.
fn tensor(name: &str, kind: OnnxType, shape: &[usize]) -> ProtoMessage {
    let sizes = shape.iter().fold(ProtoMessage::new(), |tensor, &n| tensor.int(1, n as i64));
    sizes.int(2, kind as i64).bytes(8, name)
}

impl OnnxPort {
    /// The message of an input or output: its name, element type and sizes.
    pub(super) fn described(&self) -> ProtoMessage {
        let size = |size: &Size| match size {
            Size::Is(n) => ProtoMessage::new().int(1, *n as i64),
            Size::Any(name) => ProtoMessage::new().bytes(2, name),
        };
        let sizes: Vec<ProtoMessage> = self.sizes.iter().map(size).collect();
        let shape = ProtoMessage::new().each(1, &sizes);
        let tensor = ProtoMessage::new().int(1, self.kind as i64).each(2, [&shape]);
        let kind = ProtoMessage::new().each(1, [&tensor]);
        ProtoMessage::new().bytes(1, &self.name).each(2, [&kind])
    }
}
