//! The safetensors format: named tensors in one file, whose contents are not trusted.
//!
//! A file is the header's length (8 bytes, little endian), a JSON header, and the ranges without gaps. The header has
//! every tensor's dtype, shape and byte range. The crate `safetensors` parses the header. Its own reader is not used:
//! it panics if ranges sum to more than `usize` holds, and it needs the whole file in memory.

mod replacement;

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fs::File,
    io::{Read, Seek},
    ops::Range,
    path::{Path, PathBuf},
};

use ::safetensors::tensor::{Dtype, Metadata};

use crate::{DType, Error, Result, Runtime, Shape, Tensor, read_exact_at};
pub use replacement::Replacement;

const _: () = assert!(cfg!(target_endian = "little"), "files are little endian, and so must be the host");

/// Metadata of a file, sorted by key.
pub type Notes = BTreeMap<String, String>;

/// The longest header that is accepted, in bytes; the format's reference reader has the same limit.
const MAX_HEADER: u64 = 100_000_000;

const PREFIX: u64 = 8;

/// The header's key of the notes.
const NOTES: &str = "__metadata__";

/// Element types by their names in files.
const DTYPES: [(DType, Dtype); DType::ALL.len()] = [
    (DType::F32, Dtype::F32),
    (DType::F64, Dtype::F64),
    (DType::F16, Dtype::F16),
    (DType::BF16, Dtype::BF16),
    (DType::I32, Dtype::I32),
    (DType::I64, Dtype::I64),
    (DType::U32, Dtype::U32),
    (DType::U8, Dtype::U8),
    (DType::Bool, Dtype::BOOL),
    (DType::F8E4M3, Dtype::F8_E4M3),
    (DType::F8E5M2, Dtype::F8_E5M2),
];

const _: () = {
    let mut i = 0;
    while i < DTYPES.len() {
        assert!(DTYPES[i].0 as usize == i, "the table is in the order of `DType`, and is looked up by it");
        i += 1;
    }
};

/// A tensor of a file in host memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostTensor<'a> {
    /// The name of the tensor.
    pub name: String,
    /// The element type of the tensor.
    pub dtype: DType,
    /// The sizes of the tensor.
    pub shape: Shape,
    /// The elements of the tensor, row-major, at any alignment.
    pub bytes: &'a [u8],
}

/// Loads every tensor of a file onto `rt`, in the order of the file. One tensor at a time is in host memory.
pub fn load<R: Runtime>(path: impl AsRef<Path>, rt: &R) -> Result<Vec<(String, Tensor<R>)>> {
    let (mut file, header) = open(path.as_ref())?;
    let mut bytes = Vec::new();
    let mut load = |slot: TensorSlot| {
        crate::tensor::resize(&mut bytes, slot.range.len(), 0)?;
        file.read_exact(&mut bytes).map_err(|e| Error::io(path.as_ref(), e))?;
        let tensor = slot.checked(&header.what, &bytes)?.on(rt)?;
        Ok((slot.name, tensor))
    };
    header.slots.into_iter().map(&mut load).collect()
}

/// Loads every tensor of a file whose bytes are in memory already; see [`load`].
pub fn read<R: Runtime>(bytes: &[u8], rt: &R) -> Result<Vec<(String, Tensor<R>)>> {
    read_host(bytes)?.into_iter().map(|t| Ok((t.name.clone(), t.on(rt)?))).collect()
}

/// The tensors of a file in memory, in the order of the file, without a runtime and without a copy.
pub fn read_host(bytes: &[u8]) -> Result<Vec<HostTensor<'_>>> {
    let mut rest = bytes;
    let header = Header::read("safetensors bytes".into(), &mut rest, bytes.len() as u64)?;
    header.slots.iter().map(|s| s.checked(&header.what, &rest[s.range.clone()])).collect()
}

/// An open file whose tensors are read one at a time; several threads may read it at once.
pub struct Reader {
    path: PathBuf,
    file: File,
    start: u64,
    header: Header,
    /// The index in the header's slots of each name.
    places: HashMap<String, usize>,
}

impl Reader {
    /// Opens a file and checks its header.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let (mut file, header) = open(path)?;
        let start = file.stream_position().map_err(|e| Error::io(path, e))?;
        let places = header.slots.iter().enumerate().map(|(i, slot)| (slot.name.clone(), i)).collect();
        Ok(Reader { path: path.into(), file, start, header, places })
    }

    /// The names, dtypes and shapes, in the order of the file. Tensors of an element type without a `DType` are left
    /// out.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, DType, &Shape)> {
        self.header.slots.iter().filter_map(|s| Some((&*s.name, s.known?, &s.shape)))
    }

    /// All names, in the order of the file; [`tensor`](Reader::tensor) fails for tensors that cannot be read.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.header.slots.iter().map(|s| &*s.name)
    }

    /// The path that the file was opened at.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The dtype and shape of a tensor.
    ///
    /// # Errors
    /// Fails if the file has no tensor with this name, or if its element type has no `DType`.
    pub fn tensor(&self, name: &str) -> Result<(DType, &Shape)> {
        let slot = self.slot(name)?;
        Ok((slot.dtype(&self.header.what)?, &slot.shape))
    }

    /// Reads the bytes of a tensor, row-major.
    pub fn bytes(&self, name: &str) -> Result<Vec<u8>> {
        let mut bytes = crate::tensor::zeros(self.slot(name)?.range.len(), 0)?;
        self.read_range(name, 0, &mut bytes)?;
        Ok(bytes)
    }

    /// Fills `into` with the row-major bytes of a tensor from byte `from` on; nothing else of the file is read.
    pub fn read_range(&self, name: &str, from: usize, into: &mut [u8]) -> Result<()> {
        let slot = self.slot(name)?;
        let len = slot.range.len();
        if from.checked_add(into.len()).is_none_or(|end| end > len) {
            let why = format!("has {len} bytes in {}, not {} from {from} on", self.path.display(), into.len());
            return Err(Error::state(name, why));
        }
        let at = self.start + (slot.range.start + from) as u64;
        read_exact_at(&self.file, at, into).map_err(|e| Error::io(&self.path, e))?;
        slot.checked(&self.header.what, into)?;
        Ok(())
    }

    fn slot(&self, name: &str) -> Result<&TensorSlot> {
        let slot = self.places.get(name).and_then(|&place| self.header.slots.get(place));
        slot.ok_or_else(|| Error::state(name, format!("is not in {}", self.path.display())))
    }
}

/// Writes the bytes of a file, all or nothing, like [`save`].
pub fn replace_file(path: impl AsRef<Path>, bytes: &[u8]) -> Result<()> {
    let mut file = Replacement::new(path.as_ref())?;
    file.write(bytes)?;
    file.commit()
}

/// The metadata of a file, without reading its tensors.
pub fn metadata(path: impl AsRef<Path>) -> Result<Notes> {
    Ok(open(path.as_ref())?.1.notes)
}

/// Writes tensors and notes to a file, all or nothing. They go to a temporary file in the same folder, which replaces
/// `path` once it is on disk. On an error, the old file is unchanged. If `path` is a symbolic link, the link stays and
/// its target is replaced. A path that is not a regular file (a folder, a device, a pipe, a socket) is an error.
///
/// Tensors are stored by descending element size, then by name, so that readers which map the file find them aligned.
pub fn save<R: Runtime>(path: impl AsRef<Path>, tensors: &[(String, Tensor<R>)], notes: &Notes) -> Result<()> {
    let entries = tensors.iter().map(|(name, t)| (name.clone(), t.dtype(), *t.shape()));
    save_with(path, &entries.collect::<Vec<_>>(), notes, |i| tensors[i].1.to_bytes())
}

/// Writes tensors from any source, as [`save`] does. Entries are names, dtypes and shapes; a function returns the bytes
/// of the `i`-th tensor, and is called for one tensor at a time.
pub fn save_with<B: AsRef<[u8]>>(
    path: impl AsRef<Path>,
    tensors: &[(String, DType, Shape)],
    notes: &Notes,
    mut bytes: impl FnMut(usize) -> Result<B>,
) -> Result<()> {
    let mut sorted: Vec<usize> = (0..tensors.len()).collect();
    sorted.sort_by_key(|&i| (std::cmp::Reverse(tensors[i].1.size()), &tensors[i].0));
    let header = header_of(sorted.iter().map(|&i| &tensors[i]), notes)?;
    let mut file = Replacement::new(path.as_ref())?;
    file.write(&(header.len() as u64).to_le_bytes())?;
    file.write(header.as_bytes())?;
    for i in sorted {
        let (name, dtype, shape) = &tensors[i];
        let bytes = bytes(i)?;
        let bytes = bytes.as_ref();
        if bytes.len() != shape.numel() * dtype.size() {
            return Err(Error::state(name.as_str(), format!("{} bytes are no {dtype} {shape}", bytes.len())));
        }
        file.write(bytes)?;
    }
    file.commit()
}

impl HostTensor<'_> {
    fn on<R: Runtime>(&self, rt: &R) -> Result<Tensor<R>> {
        Tensor::from_bytes(rt, self.shape, self.dtype, self.bytes)
    }
}

/// The contents of a header, checked against the length of the data that follows it.
struct Header {
    what: String,
    notes: Notes,
    slots: Vec<TensorSlot>,
}

struct TensorSlot {
    name: String,
    /// The dtype, if there is a `DType` for the file's element type.
    known: Option<DType>,
    /// The element type as the file names it.
    stated: Dtype,
    shape: Shape,
    range: Range<usize>,
}

impl Header {
    /// Reads and checks a header, and leaves `from` at the first tensor. `len` is the length of the whole file.
    fn read(what: String, from: &mut impl Read, len: u64) -> Result<Header> {
        let bad = |why: String| Error::format(what.as_str(), why);
        let Some(rest) = len.checked_sub(PREFIX) else {
            return Err(bad(format!("{len} bytes are too few for a safetensors file")));
        };
        let mut stated = [0; PREFIX as usize];
        from.read_exact(&mut stated).map_err(|e| bad(e.to_string()))?;
        let first = stated[0];
        let stated = u64::from_le_bytes(stated);
        if stated > rest || stated > MAX_HEADER {
            if first == b'{' {
                return Err(bad("it begins as JSON does: of an index, open the files it names".into()));
            }
            return Err(bad(format!(
                "states a header of {stated} bytes, {rest} follow; it is truncated or no safetensors file"
            )));
        }
        let mut json = crate::tensor::zeros(stated as usize, 0)?;
        from.read_exact(&mut json).map_err(|e| bad(e.to_string()))?;
        let header: Metadata = serde_json::from_slice(&json).map_err(|e| bad(format!("its header is invalid: {e}")))?;
        let data = rest - stated;
        if header.data_len() as u64 != data {
            return Err(bad(format!("its tensors need {} bytes, {data} are there", header.data_len())));
        }
        let slots =
            header.offset_keys().into_iter().map(|name| TensorSlot::new(&header, name).map_err(|e| bad(e.to_string())));
        let slots = slots.collect::<Result<_>>()?;
        let notes = header.metadata().iter().flatten().map(|(k, v)| (k.clone(), v.clone())).collect();
        Ok(Header { what, notes, slots })
    }
}

impl TensorSlot {
    fn new(header: &Metadata, name: String) -> Result<TensorSlot> {
        let Some(info) = header.info(&name) else { return Err(Error::state(name, "is not in the header")) };
        let known = DTYPES.iter().find(|(_, d)| *d == info.dtype).map(|(dtype, _)| *dtype);
        let shape = Shape::new(&info.shape).map_err(|e| Error::state(name.clone(), e.to_string()))?;
        let (from, to) = info.data_offsets;
        Ok(TensorSlot { name, known, stated: info.dtype, shape, range: from..to })
    }

    fn dtype(&self, what: &str) -> Result<DType> {
        self.known.ok_or_else(|| {
            let why = format!("`{}` has element type {}, which no tensor here can have", self.name, self.stated);
            Error::format(what, why)
        })
    }

    fn checked<'a>(&self, what: &str, bytes: &'a [u8]) -> Result<HostTensor<'a>> {
        let dtype = self.dtype(what)?;
        if dtype == DType::Bool && bytes.iter().any(|&b| b > 1) {
            return Err(Error::format(
                what,
                format!("`{}` is bool and holds bytes that are neither 0 nor 1", self.name),
            ));
        }
        Ok(HostTensor { name: self.name.clone(), dtype, shape: self.shape, bytes })
    }
}

fn open(path: &Path) -> Result<(File, Header)> {
    let io = |e| Error::io(path, e);
    let mut file = File::open(path).map_err(io)?;
    let len = file.metadata().map_err(io)?.len();
    let header = Header::read(path.display().to_string(), &mut file, len)?;
    Ok((file, header))
}

/// The header of a file to be written, padded so that data starts at a multiple of 8. The format's crate does not write
/// it, since it would write metadata in the order of a hash map.
fn header_of<'a>(tensors: impl Iterator<Item = &'a (String, DType, Shape)>, notes: &Notes) -> Result<String> {
    let quoted = |s: &str| serde_json::Value::from(s).to_string();
    let mut fields = Vec::new();
    if !notes.is_empty() {
        let pairs: Vec<String> = notes.iter().map(|(k, v)| format!("{}:{}", quoted(k), quoted(v))).collect();
        fields.push(format!("\"{NOTES}\":{{{}}}", pairs.join(",")));
    }
    let (mut seen, mut offset) = (HashSet::new(), 0);
    for (name, dtype, shape) in tensors {
        if name == NOTES || !seen.insert(name) {
            return Err(Error::state(
                name.as_str(),
                "cannot name a tensor here: it is reserved, or names another one too",
            ));
        }
        let end = offset + shape.numel() * dtype.size();
        let (dtype, shape) = (DTYPES[*dtype as usize].1, shape.dims());
        fields.push(format!(
            "{}:{{\"dtype\":\"{dtype}\",\"shape\":{shape:?},\"data_offsets\":[{offset},{end}]}}",
            quoted(name)
        ));
        offset = end;
    }
    let mut header = format!("{{{}}}", fields.join(","));
    header.push_str(&" ".repeat(header.len().next_multiple_of(PREFIX as usize) - header.len()));
    if header.len() as u64 > MAX_HEADER {
        let allowed = format!("at most {MAX_HEADER} bytes for a reader to take it");
        return Err(Error::range("safetensors", "size of the header", header.len(), allowed));
    }
    Ok(header)
}
