//! A pickle machine that knows nothing but tensors by name.
//!
//! A pickle may call any function of Python. This machine knows the few that make tensors, as data; every other is an
//! error with its name, and nothing is ever run. Opcodes are those of Python's `pickletools.py`.

use std::{collections::BTreeMap, sync::Arc};

use numcore::{DType, Shape};

use super::tensor::{PickledTensor, Storage, StorageKind};

/// The most values of a pickle; a tensor by name takes some dozens.
const MAX_VALUES: usize = 1 << 20;

type Outcome<T> = Result<T, String>;

/// A function or type of Python that is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Known {
    Storage(StorageKind),
    OrderedDict,
    Tensor,
    Parameter,
    Size,
}

/// A value of the machine. Values name each other by index, so none is dropped by recursion.
#[derive(Clone, Debug)]
enum PickleValue {
    None,
    /// A number or flag that no tensor needs.
    Other,
    Int(i64),
    Text(Arc<str>),
    Tuple(Vec<usize>),
    List,
    Dict(Vec<(usize, usize)>),
    Known(Known),
    Storage(Storage),
    Tensor(PickledTensor),
}

/// Reads the tensors by name of a pickle.
///
/// # Errors
/// Fails with the reason if the pickle is malformed, needs anything but tensors, or a tensor is past its storage.
pub(super) fn unpickle(program: &[u8]) -> Outcome<BTreeMap<String, PickledTensor>> {
    let mut machine = Machine { rest: program, ..Machine::default() };
    while machine.step()? {}
    let root = machine.pop()?;
    let PickleValue::Dict(pairs) = &machine.values[root] else {
        return Err("holds no dictionary of tensors".into());
    };
    let mut tensors = BTreeMap::new();
    for &(key, value) in pairs {
        let PickleValue::Text(name) = &machine.values[key] else { return Err("has a key that is no name".into()) };
        let PickleValue::Tensor(tensor) = &machine.values[value] else {
            return Err(format!("`{name}` is no tensor: it is no model's file, or a checkpoint of a training run"));
        };
        // A later entry of a name replaces the earlier one, as in Python.
        tensors.insert(name.to_string(), tensor.clone());
    }
    Ok(tensors)
}

#[derive(Default)]
struct Machine<'a> {
    rest: &'a [u8],
    values: Vec<PickleValue>,
    stack: Vec<usize>,
    /// The heights of the stack at its marks.
    marks: Vec<usize>,
    memo: BTreeMap<u32, usize>,
}

impl Machine<'_> {
    /// Runs an instruction; false at the end.
    fn step(&mut self) -> Outcome<bool> {
        if self.values.len() > MAX_VALUES {
            return Err(format!("has more than {MAX_VALUES} values"));
        }
        let [code] = self.take()?;
        match code {
            // PROTO and FRAME
            0x80 => drop(self.take::<1>()?),
            0x95 => drop(self.take::<8>()?),
            b'.' => return Ok(false),
            b'(' => self.marks.push(self.stack.len()),
            b'0' => drop(self.pop()?),
            b'N' => self.push(PickleValue::None),
            0x88 | 0x89 => self.push(PickleValue::Other),
            b'G' => {
                self.take::<8>()?;
                self.push(PickleValue::Other);
            }
            b'K' => self.int(|m| Ok(m.take::<1>()?[0].into()))?,
            b'M' => self.int(|m| Ok(u16::from_le_bytes(m.take()?).into()))?,
            b'J' => self.int(|m| Ok(i32::from_le_bytes(m.take()?).into()))?,
            0x8a => self.int(Self::long)?,
            b'X' => self.text(|m| Ok(u32::from_le_bytes(m.take()?) as usize))?,
            0x8c => self.text(|m| Ok(m.take::<1>()?[0].into()))?,
            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                self.known(&module, &name)?;
            }
            0x93 => {
                let (name, module) = (self.pop()?, self.pop()?);
                let (module, name) = (self.as_text(module)?.clone(), self.as_text(name)?.clone());
                self.known(&module, &name)?;
            }
            b')' => self.push(PickleValue::Tuple(Vec::new())),
            0x85..=0x87 => {
                let from = self.stack.len().checked_sub(usize::from(code - 0x84)).ok_or_else(empty)?;
                self.tuple(from)?;
            }
            b't' => {
                let from = self.mark()?;
                self.tuple(from)?;
            }
            b']' => self.push(PickleValue::List),
            b'}' => self.push(PickleValue::Dict(Vec::new())),
            b'a' => drop(self.pop()?),
            b'e' => {
                let from = self.mark()?;
                self.popped(from)?;
            }
            b's' => {
                let (value, key) = (self.pop()?, self.pop()?);
                self.insert(&[key, value])?;
            }
            b'u' => {
                let from = self.mark()?;
                let items = self.popped(from)?;
                self.insert(&items)?;
            }
            // BUILD sets attributes, which no tensor needs.
            b'b' => {
                self.pop()?;
                let of = *self.stack.last().ok_or_else(empty)?;
                if !matches!(self.values[of], PickleValue::Dict(_) | PickleValue::Tensor(_)) {
                    return Err("sets attributes of what is no tensor".into());
                }
            }
            b'R' => self.reduce()?,
            b'Q' => self.storage()?,
            b'q' => {
                let [place] = self.take()?;
                self.remember(place.into())?;
            }
            b'r' => {
                let place = u32::from_le_bytes(self.take()?);
                self.remember(place)?;
            }
            0x94 => self.remember(self.memo.len() as u32)?,
            b'h' => {
                let [place] = self.take()?;
                self.recall(place.into())?;
            }
            b'j' => {
                let place = u32::from_le_bytes(self.take()?);
                self.recall(place)?;
            }
            other => return Err(format!("has the instruction {other:#04x}, which no file of tensors needs")),
        }
        Ok(true)
    }

    /// Calls a known function.
    fn reduce(&mut self) -> Outcome<()> {
        let (args, of) = (self.pop()?, self.pop()?);
        let (PickleValue::Tuple(args), PickleValue::Known(of)) = (&self.values[args], &self.values[of]) else {
            return Err("calls what is no function".into());
        };
        let value = match (of, args.first().map(|&first| (first, &self.values[first]))) {
            (Known::OrderedDict, None) => PickleValue::Dict(Vec::new()),
            // Values never change, so these are their arguments.
            (Known::Parameter, Some((data, PickleValue::Tensor(_))))
            | (Known::Size, Some((data, PickleValue::Tuple(_)))) => {
                self.stack.push(data);
                return Ok(());
            }
            (Known::Parameter, _) => return Err("makes a parameter of what is no tensor".into()),
            (Known::Size, _) => return Err("makes a size of what is no tuple".into()),
            (Known::Tensor, _) => PickleValue::Tensor(self.tensor(args)?),
            (Known::OrderedDict | Known::Storage(_), _) => return Err(format!("calls {of:?} with other arguments")),
        };
        self.push(value);
        Ok(())
    }

    /// Makes a tensor of its storage, offset, sizes and strides; hooks and flags are ignored. A seventh argument, of
    /// views that negate or conjugate their storage, must be empty.
    fn tensor(&self, args: &[usize]) -> Outcome<PickledTensor> {
        let &[storage, offset, shape, strides, ..] = args else { return Err("has a tensor without strides".into()) };
        let PickleValue::Storage(storage) = &self.values[storage] else {
            return Err("has a tensor without a storage".into());
        };
        let is_plain = |at: &usize| match &self.values[*at] {
            PickleValue::None => true,
            PickleValue::Dict(pairs) => pairs.is_empty(),
            _ => false,
        };
        if !args.iter().skip(6).all(is_plain) {
            return Err("has a tensor that negates or conjugates its storage, or is another kind of view".into());
        }
        let size = |at: usize| match self.values[at] {
            PickleValue::Int(x) => usize::try_from(x).map_err(|_| format!("has a tensor with the size {x}")),
            _ => Err("has a tensor with a size that is no number".into()),
        };
        let sizes = |at: usize| match &self.values[at] {
            PickleValue::Tuple(list) => list.iter().map(|&at| size(at)).collect::<Outcome<Vec<_>>>(),
            _ => Err("has a tensor with sizes that are no tuple".into()),
        };
        let (offset, dims, strides) = (size(offset)?, sizes(shape)?, sizes(strides)?);
        let shape = Shape::new(&dims).map_err(|e| e.to_string())?;
        // The last element, if there are any.
        let last = dims.iter().zip(&strides).try_fold(offset, |last, (&size, &stride)| {
            size.saturating_sub(1).checked_mul(stride).and_then(|more| more.checked_add(last))
        });
        let within = last.is_some_and(|last| last < storage.elements) && shape.numel() <= storage.elements;
        if dims.len() != strides.len() || !within && shape.numel() > 0 {
            let (key, elements) = (&storage.key, storage.elements);
            return Err(format!(
                "has a tensor {shape} with strides {strides:?} from {offset} on, and storage `{key}` has {elements} elements"
            ));
        }
        let offset = if shape.numel() == 0 { 0 } else { offset };
        Ok(PickledTensor { storage: storage.clone(), offset, shape, strides })
    }

    /// Pops `("storage", type, key, device, elements)`, and pushes the storage.
    fn storage(&mut self) -> Outcome<()> {
        let id = self.pop()?;
        let PickleValue::Tuple(parts) = &self.values[id] else { return Err("has an unknown persistent id".into()) };
        let &[tag, kind, key, _, elements] = &parts[..] else { return Err("has an unknown persistent id".into()) };
        let (PickleValue::Known(Known::Storage(kind)), PickleValue::Int(elements)) =
            (&self.values[kind], &self.values[elements])
        else {
            return Err("has a storage of unknown type or size".into());
        };
        let elements = usize::try_from(*elements).map_err(|_| "has a storage of negative size")?;
        if &**self.as_text(tag)? != "storage" {
            return Err("has an unknown persistent id".into());
        }
        let storage = Storage { kind: *kind, key: self.as_text(key)?.clone(), elements };
        self.push(PickleValue::Storage(storage));
        Ok(())
    }

    fn known(&mut self, module: &str, name: &str) -> Outcome<()> {
        let known = match (module, name) {
            ("collections", "OrderedDict") => Known::OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2" | "_rebuild_tensor") => Known::Tensor,
            ("torch._utils", "_rebuild_parameter") => Known::Parameter,
            ("torch", "Size") => Known::Size,
            ("torch", "FloatStorage") => Known::Storage(StorageKind::Of(DType::F32)),
            ("torch", "DoubleStorage") => Known::Storage(StorageKind::Of(DType::F64)),
            ("torch", "HalfStorage") => Known::Storage(StorageKind::Of(DType::F16)),
            ("torch", "BFloat16Storage") => Known::Storage(StorageKind::Of(DType::BF16)),
            ("torch", "IntStorage") => Known::Storage(StorageKind::Of(DType::I32)),
            ("torch", "LongStorage") => Known::Storage(StorageKind::Of(DType::I64)),
            ("torch", "ByteStorage") => Known::Storage(StorageKind::Of(DType::U8)),
            ("torch", "BoolStorage") => Known::Storage(StorageKind::Of(DType::Bool)),
            ("torch", "ShortStorage") => Known::Storage(StorageKind::Other(2)),
            ("torch", "CharStorage") => Known::Storage(StorageKind::Other(1)),
            _ => return Err(format!("asks for `{module}.{name}`: tensors alone are read, and no code is run")),
        };
        self.push(PickleValue::Known(known));
        Ok(())
    }

    fn insert(&mut self, items: &[usize]) -> Outcome<()> {
        let of = *self.stack.last().ok_or_else(empty)?;
        match &mut self.values[of] {
            PickleValue::Dict(pairs) if items.len().is_multiple_of(2) => {
                pairs.extend(items.as_chunks::<2>().0.iter().map(|&[key, value]| (key, value)));
                Ok(())
            }
            _ => Err("sets items of what is no dictionary".into()),
        }
    }

    fn tuple(&mut self, from: usize) -> Outcome<()> {
        let items = self.popped(from)?;
        self.push(PickleValue::Tuple(items));
        Ok(())
    }

    fn int(&mut self, read: impl Fn(&mut Self) -> Outcome<i64>) -> Outcome<()> {
        let x = read(self)?;
        self.push(PickleValue::Int(x));
        Ok(())
    }

    /// Reads an integer of any number of bytes, which must fit 64 bits.
    fn long(&mut self) -> Outcome<i64> {
        let [len] = self.take()?;
        let bytes = self.bytes(len.into())?;
        let is_negative = bytes.last().is_some_and(|last| *last >= 128);
        let mut wide = [if is_negative { 255 } else { 0 }; 8];
        wide.get_mut(..bytes.len()).ok_or("has an integer of more than 64 bits")?.copy_from_slice(bytes);
        Ok(i64::from_le_bytes(wide))
    }

    fn text(&mut self, len: impl Fn(&mut Self) -> Outcome<usize>) -> Outcome<()> {
        let len = len(self)?;
        let text = std::str::from_utf8(self.bytes(len)?).map_err(|_| "has a string that is no UTF-8")?.into();
        self.push(PickleValue::Text(text));
        Ok(())
    }

    fn as_text(&self, at: usize) -> Outcome<&Arc<str>> {
        if let PickleValue::Text(text) = &self.values[at] { Ok(text) } else { Err("needs a string".into()) }
    }

    fn line(&mut self) -> Outcome<String> {
        let end = self.rest.iter().position(|b| *b == b'\n').ok_or("is cut off")?;
        let line = std::str::from_utf8(self.bytes(end)?).map_err(|_| "has a name that is no UTF-8")?.to_owned();
        self.take::<1>()?;
        Ok(line)
    }

    fn remember(&mut self, place: u32) -> Outcome<()> {
        let value = *self.stack.last().ok_or_else(empty)?;
        self.memo.insert(place, value);
        Ok(())
    }

    fn recall(&mut self, place: u32) -> Outcome<()> {
        let value = *self.memo.get(&place).ok_or_else(|| format!("recalls value {place}, which it has not stored"))?;
        self.stack.push(value);
        Ok(())
    }

    fn push(&mut self, value: PickleValue) {
        self.stack.push(self.values.len());
        self.values.push(value);
    }

    /// Pops a value; those below the last mark stay.
    fn pop(&mut self) -> Outcome<usize> {
        let floor = self.marks.last().copied().unwrap_or(0);
        if self.stack.len() > floor { self.stack.pop().ok_or_else(empty) } else { Err(empty()) }
    }

    fn mark(&mut self) -> Outcome<usize> {
        self.marks.pop().ok_or_else(|| "has no mark where it needs one".into())
    }

    fn popped(&mut self, from: usize) -> Outcome<Vec<usize>> {
        if from > self.stack.len() || self.marks.last().is_some_and(|mark| *mark > from) {
            return Err(empty());
        }
        Ok(self.stack.split_off(from))
    }

    fn take<const N: usize>(&mut self) -> Outcome<[u8; N]> {
        let (first, rest) = self.rest.split_first_chunk().ok_or("is cut off")?;
        self.rest = rest;
        Ok(*first)
    }

    fn bytes(&mut self, len: usize) -> Outcome<&[u8]> {
        let (first, rest) = self.rest.split_at_checked(len).ok_or("is cut off")?;
        self.rest = rest;
        Ok(first)
    }
}

fn empty() -> String {
    "takes more values than it has".into()
}
