//! Files, read tensor by tensor.

use std::{collections::BTreeMap, path::Path};

use numcore::{DType, Error, Result, Shape, Within};

use super::{ALIGNMENT, GgufType, GgufValue, MAGIC, VERSION, header::HeaderReader};
use crate::files::PositionedFile;

/// The most axes of a tensor in the format.
const MOST_AXES: u32 = 4;
/// The quantised bytes that are read at once.
const PART: usize = 1 << 18;

/// An open GGUF file of version 2 or 3. Its header is in memory; its tensors are read piece by piece, from several
/// threads at once.
///
/// ```no_run
/// # fn main() -> numcore::Result<()> {
/// let file = data::gguf::GgufFile::open("model.gguf")?;
/// let (kind, shape) = file.tensor("token_embd.weight")?;
/// let mut first = vec![0; shape[1] * kind.dtype().size()];
/// file.read("token_embd.weight", 0, &mut first)?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct GgufFile {
    file: PositionedFile,
    metadata: BTreeMap<String, Option<GgufValue>>,
    tensors: BTreeMap<String, GgufPlace>,
}

/// The type, shape and offset of a tensor in a file.
#[derive(Clone, Copy, Debug)]
struct GgufPlace {
    kind: GgufType,
    shape: Shape,
    at: u64,
}

impl GgufPlace {
    fn end(&self) -> u64 {
        self.at + self.kind.bytes(self.shape.numel()) as u64
    }
}

impl GgufFile {
    /// Tells whether a path is of a file that begins as the format does.
    pub fn is_at(path: impl AsRef<Path>) -> bool {
        let begins = |file: PositionedFile| {
            let mut first = [0; MAGIC.len()];
            file.read(0, &mut first).is_ok_and(|()| first == MAGIC)
        };
        path.as_ref().is_file() && PositionedFile::open(path.as_ref()).is_ok_and(begins)
    }

    /// Opens a file and checks its header.
    ///
    /// # Errors
    /// Fails if the file cannot be read, is big-endian, of another version, one of several parts, or malformed. Fails
    /// too if a tensor is of a type without a [`GgufType`], or lies past the end or over another.
    #[track_caller]
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let file = PositionedFile::open(path.as_ref()).at_caller()?;
        let (metadata, tensors) = header(&file).at_caller()?;
        Ok(GgufFile { file, metadata, tensors })
    }

    /// The path that the file was opened at.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// The keys of metadata, sorted.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.metadata.keys().map(String::as_str)
    }

    /// The value of a key, if the file has one of a type with a [`GgufValue`].
    pub fn get(&self, key: &str) -> Option<&GgufValue> {
        self.metadata.get(key)?.as_ref()
    }

    /// Reads the value of a key by a conversion; `None` if the file does not have the key.
    ///
    /// # Errors
    /// Fails if the value is not of the kind that the conversion takes.
    #[track_caller]
    pub fn typed<'a, T>(
        &'a self,
        key: &str,
        kind: &str,
        read: impl Fn(&'a GgufValue) -> Option<T>,
    ) -> Result<Option<T>> {
        if !self.metadata.contains_key(key) {
            return Ok(None);
        }
        let value = self.get(key).and_then(read);
        value.map(Some).ok_or_else(|| self.wrong(key, format_args!("is not {kind}"))).at_caller()
    }

    /// The names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The type and shape of a tensor, outermost axis first.
    ///
    /// # Errors
    /// Fails if the file has no tensor of this name.
    pub fn tensor(&self, name: &str) -> Result<(GgufType, Shape)> {
        self.place(name).map(|place| (place.kind, place.shape))
    }

    /// Reads elements of a tensor, row-major from element `from` on, as little-endian bytes of
    /// [`GgufType::dtype`]. Of quantised tensors, the blocks that hold them are read, a part at a time.
    ///
    /// # Errors
    /// Fails if the tensor is not there or has fewer elements, `into` holds no whole number of elements, or the file
    /// cannot be read.
    pub fn read(&self, name: &str, from: usize, into: &mut [u8]) -> Result<()> {
        let place = self.place(name)?;
        let (kind, size, elements) = (place.kind, place.kind.dtype().size(), place.shape.numel());
        let count = into.len() / size;
        if !into.len().is_multiple_of(size) || from.checked_add(count).is_none_or(|end| end > elements) {
            let why = format!("has {elements} elements, not {} bytes from element {from} on", into.len());
            return Err(Error::state(name, why));
        }
        let block = kind.block();
        if block == 1 {
            return self.file.read(place.at + (from * size) as u64, into);
        }
        let (mut at, mut rest) = (from, into);
        let (mut stored, mut values) = (Vec::new(), Vec::new());
        while !rest.is_empty() {
            let first = at / block;
            let most = PART / kind.bytes(block).max(1);
            let last = (at + rest.len() / size).div_ceil(block).min(first + most);
            stored.resize(kind.bytes((last - first) * block), 0);
            self.file.read(place.at + kind.bytes(first * block) as u64, &mut stored)?;
            values.clear();
            kind.decode(&stored, &mut values);
            let own = values.get(at - first * block..).unwrap_or_default();
            let (now, later) = rest.split_at_mut(rest.len().min(own.len() * DType::F32.size()));
            now.chunks_exact_mut(DType::F32.size()).zip(own).for_each(|(to, x)| to.copy_from_slice(&x.to_le_bytes()));
            (at, rest) = (last * block, later);
        }
        Ok(())
    }

    /// An error about a key, which names the file, the key and the reason.
    pub fn wrong(&self, key: &str, why: impl std::fmt::Display) -> Error {
        self.file.malformed(format!("`{key}` {why}"))
    }

    fn place(&self, name: &str) -> Result<&GgufPlace> {
        let none = || Error::state(name, format!("is not in {}", self.file.path().display()));
        self.tensors.get(name).ok_or_else(none)
    }
}

type Header = (BTreeMap<String, Option<GgufValue>>, BTreeMap<String, GgufPlace>);

fn header(file: &PositionedFile) -> Result<Header> {
    let wrong = |why: String| Err(file.malformed(why));
    let mut from = HeaderReader::new(file);
    if from.number()? != MAGIC {
        return wrong("does not begin with `GGUF`".into());
    }
    match from.u32()? {
        2 | VERSION => {}
        version if (2..=VERSION).contains(&version.swap_bytes()) => {
            return wrong("is big-endian: convert it to little-endian, by gguf's `gguf_convert_endian.py`".into());
        }
        version => return wrong(format!("is GGUF of version {version}; 2 and {VERSION} are read")),
    }
    // A tensor's entry has at least the lengths of its name and shape, a type and an offset; a pair a key and a type.
    let (tensors, pairs) = (from.count(24)?, from.count(13)?);
    let mut metadata = BTreeMap::new();
    for _ in 0..pairs {
        let key = from.text()?;
        let value = from.value(&key)?;
        if metadata.insert(key.clone(), value).is_some() {
            return wrong(format!("has the key `{key}` twice"));
        }
    }
    let number = |key: &str| metadata.get(key).and_then(Option::as_ref).and_then(GgufValue::count);
    if let Some(parts) = number("split.count").filter(|parts| *parts > 1) {
        return wrong(format!("is one of {parts} parts: merge them, by llama.cpp's `gguf-split --merge`"));
    }
    let alignment = match metadata.contains_key("general.alignment") {
        true => number("general.alignment").filter(|n| n.is_power_of_two() && *n <= 1 << 20),
        false => Some(ALIGNMENT),
    };
    let Some(alignment) = alignment else { return wrong("`general.alignment` is no power of two".into()) };
    let mut places = BTreeMap::new();
    for _ in 0..tensors {
        let name = from.text()?;
        let place = entry(&mut from, &name, alignment)?;
        if places.insert(name.clone(), place).is_some() {
            return wrong(format!("has the tensor `{name}` twice"));
        }
    }
    let start = from.at().next_multiple_of(alignment);
    let mut free = start;
    let mut sorted: Vec<(&String, &mut GgufPlace)> = places.iter_mut().collect();
    sorted.sort_by_key(|(_, place)| (place.at, place.end()));
    for (name, place) in sorted {
        match place.at.checked_add(start).filter(|at| at.checked_add(place.end() - place.at).is_some()) {
            Some(at) if at < free => return wrong(format!("`{name}` lies over another tensor, at {}", place.at)),
            Some(at) => place.at = at,
            None => return wrong(format!("`{name}` has the offset {}", place.at)),
        }
        free = place.end();
        if free > file.len() {
            let why = format!("`{name}` ends at {free}, and the file at {}: it is cut off", file.len());
            return wrong(why);
        }
    }
    Ok((metadata, places))
}

/// Reads a tensor's entry: sizes (innermost first), type and offset of the data.
fn entry(from: &mut HeaderReader<'_>, name: &str, alignment: u64) -> Result<GgufPlace> {
    let rank = from.u32()?;
    if rank > MOST_AXES {
        return Err(from.wrong(format!("`{name}` has {rank} axes, more than {MOST_AXES}")));
    }
    let mut dims = (0..rank).map(|_| from.u64()).collect::<Result<Vec<u64>>>()?;
    dims.reverse();
    let id = from.u32()?;
    let at = from.u64()?;
    let Some(kind) = GgufType::of(id) else {
        let known: Vec<String> = GgufType::ALL.iter().map(|kind| format!("{kind:?}")).collect();
        return Err(from.wrong(format!("`{name}` is of type {id}; read are {}", known.join(", "))));
    };
    let sizes: Option<Vec<usize>> = dims.iter().map(|&n| usize::try_from(n).ok()).collect();
    // Bounds keep sums of offsets and sizes within a `u64`.
    let fits = |dims: &Vec<usize>| {
        let numel = dims.iter().try_fold(1usize, |all, &n| all.checked_mul(n));
        numel.is_some_and(|n| n < 1 << 48) && dims.iter().all(|&n| n < 1 << 48) && at < 1 << 60
    };
    let Some(sizes) = sizes.filter(fits) else {
        return Err(from.wrong(format!("`{name}` has the sizes {dims:?} at {at}, which no file holds")));
    };
    if !sizes.last().copied().unwrap_or(1).is_multiple_of(kind.block()) {
        let why = format!("`{name}` is {kind:?} with rows of {:?}, no multiple of {}", sizes.last(), kind.block());
        return Err(from.wrong(why));
    }
    if !at.is_multiple_of(alignment) {
        return Err(from.wrong(format!("`{name}` lies at {at}, which is not aligned to {alignment}")));
    }
    Ok(GgufPlace { kind, shape: Shape::new(&sizes)?, at })
}
