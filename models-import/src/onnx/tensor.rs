//! Tensors of a file: their types and sizes, and where their bytes are.

use std::{
    fs::File,
    io::{Read, Seek, SeekFrom},
    path::{Component, Path},
};

use data::protobuf::{ProtoFields, ProtoValue};
use numcore::{DType, Error, Result, Runtime, Shape, Tensor};

use super::proto::{list, message, text, unknown};

/// A tensor of a file.
#[derive(Default)]
pub(super) struct TensorProto<'a> {
    pub(super) name: &'a str,
    kind: i64,
    dims: Vec<i64>,
    data: TensorBytes<'a>,
}

/// The place of a tensor's elements.
#[derive(Default)]
enum TensorBytes<'a> {
    #[default]
    Missing,
    /// In the file itself, little-endian.
    Raw(&'a [u8]),
    /// Elements as `float`, packed; likewise as `double`.
    Fixed(&'a [u8]),
    /// Elements as integers; halves as their bits.
    Ints(Vec<i64>),
    /// In another file, from an offset on.
    External(Vec<(&'a str, &'a str)>),
}

impl<'a> TensorProto<'a> {
    pub(super) fn read(bytes: &'a [u8]) -> Result<Self> {
        let mut tensor = TensorProto::default();
        let (mut ints, mut entries, mut external) = (Vec::new(), Vec::new(), false);
        for field in ProtoFields::new(bytes) {
            match field? {
                (1, value) => tensor.dims.extend(list(value)?),
                (2, ProtoValue::Int(kind)) => tensor.kind = kind,
                (4 | 10, value) => tensor.data = TensorBytes::Fixed(message(value)?),
                (5 | 7 | 11, value) => ints.extend(list(value)?),
                (8, value) => tensor.name = text(value)?,
                (9, value) => tensor.data = TensorBytes::Raw(message(value)?),
                (12 | 16, _) => {}
                (13, value) => entries.push(entry(message(value)?)?),
                (14, ProtoValue::Int(place)) => external = place == 1,
                (6, _) => tensor.data = TensorBytes::Missing,
                (number, _) => return Err(unknown("TensorProto", number)),
            }
        }
        if external {
            tensor.data = TensorBytes::External(entries);
        } else if matches!(tensor.data, TensorBytes::Missing) {
            tensor.data = TensorBytes::Ints(ints);
        }
        Ok(tensor)
    }

    /// The element type; none of these is an error that names the tensor.
    pub(super) fn dtype(&self) -> Result<DType> {
        dtype(self.kind).map_err(|error| Error::state(self.name, error.to_string()))
    }

    /// The sizes, and the number of bytes that they need.
    pub(super) fn shape(&self) -> Result<Shape> {
        let size = |&d: &i64| usize::try_from(d).map_err(|_| Error::state(self.name, format!("has the size {d}")));
        Shape::new(&self.dims.iter().map(size).collect::<Result<Vec<_>>>()?)
    }

    /// Checks type, sizes and place, and that there are as many bytes as elements need; no memory is taken.
    pub(super) fn check(&self, folder: Option<&Path>) -> Result<()> {
        let (due, shape) = (self.byte_count()?, self.shape()?);
        let size = self.dtype()?.size();
        let given = match &self.data {
            TensorBytes::Missing => {
                return Err(Error::state(self.name, "is a tensor of texts, which no element type has"));
            }
            TensorBytes::Raw(bytes) => bytes.len(),
            TensorBytes::Fixed(bytes) if self.dtype()? == DType::F32 || self.dtype()? == DType::F64 => bytes.len(),
            TensorBytes::Fixed(_) => return Err(Error::state(self.name, "has floats for elements of another type")),
            TensorBytes::Ints(values) => values.len().saturating_mul(size),
            TensorBytes::External(_) => self.located(folder)?.2,
        };
        if given != due {
            let why = format!("has {given} bytes for {shape} of {}, which needs {due}", self.dtype()?);
            return Err(Error::state(self.name, why));
        }
        Ok(())
    }

    fn byte_count(&self) -> Result<usize> {
        let (shape, size) = (self.shape()?, self.dtype()?.size());
        let too_many = || Error::state(self.name, format!("has {shape} elements, more than memory can hold"));
        shape.numel().checked_mul(size).filter(|&bytes| bytes <= isize::MAX as usize).ok_or_else(too_many)
    }

    /// The tensor on a device. It was [checked](TensorProto::check).
    pub(super) fn load<R: Runtime>(&self, device: &R, folder: Option<&Path>) -> Result<Tensor<R>> {
        let (shape, dtype) = (self.shape()?, self.dtype()?);
        let mut bytes = match &self.data {
            TensorBytes::Raw(bytes) if dtype == DType::Bool => bytes.to_vec(),
            TensorBytes::Raw(bytes) | TensorBytes::Fixed(bytes) => {
                return Tensor::from_bytes(device, shape, dtype, bytes);
            }
            TensorBytes::Ints(values) => {
                let size = dtype.size();
                values.iter().flat_map(|v| v.to_le_bytes().into_iter().take(size)).collect()
            }
            TensorBytes::External(_) => self.external(folder)?,
            TensorBytes::Missing => Vec::new(),
        };
        if dtype == DType::Bool {
            bytes.iter_mut().for_each(|byte| *byte = u8::from(*byte != 0));
        }
        Tensor::from_bytes(device, shape, dtype, &bytes)
    }

    /// The other file, the offset and the number of bytes.
    fn located(&self, folder: Option<&Path>) -> Result<(std::path::PathBuf, u64, usize)> {
        let TensorBytes::External(entries) = &self.data else {
            return Err(Error::state(self.name, "has no elements"));
        };
        let find = |key: &str| entries.iter().find(|(k, _)| *k == key).map(|(_, value)| *value);
        let Some(location) = find("location") else { return Err(Error::state(self.name, "names no file")) };
        let path = Path::new(location);
        if location.is_empty()
            || !path.components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir))
        {
            let why = format!("lies in `{location}`, outside of the model's folder");
            return Err(Error::state(self.name, why));
        }
        let Some(folder) = folder else {
            let why = format!("lies in the file `{location}`: load the model by its path");
            return Err(Error::state(self.name, why));
        };
        let path = folder.join(path);
        let held = std::fs::metadata(&path).map_err(|e| Error::io(&path, e))?.len();
        let number = |key: &str, default: u64| match find(key) {
            Some(text) => text.parse().map_err(|_| Error::state(self.name, format!("has the {key} `{text}`"))),
            None => Ok(default),
        };
        let offset = number("offset", 0)?;
        let length = number("length", held.saturating_sub(offset))?;
        if offset.checked_add(length).is_none_or(|end| end > held) {
            let why = format!("is {length} bytes from {offset} on of {}, which has {held}", path.display());
            return Err(Error::state(self.name, why));
        }
        Ok((path, offset, length as usize))
    }

    fn external(&self, folder: Option<&Path>) -> Result<Vec<u8>> {
        let (path, offset, length) = self.located(folder)?;
        let read = || {
            let mut file = File::open(&path)?;
            file.seek(SeekFrom::Start(offset))?;
            let mut bytes = vec![0; length];
            file.read_exact(&mut bytes)?;
            Ok(bytes)
        };
        read().map_err(|e| Error::io(&path, e))
    }
}

fn entry(bytes: &[u8]) -> Result<(&str, &str)> {
    let (mut key, mut value) = ("", "");
    for field in ProtoFields::new(bytes) {
        match field? {
            (1, found) => key = text(found)?,
            (2, found) => value = text(found)?,
            (number, _) => return Err(unknown("StringStringEntryProto", number)),
        }
    }
    Ok((key, value))
}

/// The element type with a number of the format's.
pub(super) fn dtype(number: i64) -> Result<DType> {
    Ok(match number {
        1 => DType::F32,
        2 => DType::U8,
        6 => DType::I32,
        7 => DType::I64,
        9 => DType::Bool,
        10 => DType::F16,
        11 => DType::F64,
        12 => DType::U32,
        16 => DType::BF16,
        _ => return Err(Error::unsupported("onnx", format!("no element type has the format's number {number}"))),
    })
}
