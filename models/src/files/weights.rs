//! The weights of a model: one file of tensors, or several and their index.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map},
    fmt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use data::gguf::GgufFile;
use numcore::{DType, Error, Result, Runtime, Shape, Tensor, TensorMut, placement::TensorPlacement};
use serde_json::Value;

use super::{JsonObject, mxfp4, tensors::TensorFile, woven};
use crate::convert::{ConversionTable, Weave};

/// The most bytes of two tensors that are compared at a time.
const COMPARED: usize = 4 << 20;

/// The tensors of a model by name, read one at a time. A file is opened when one of its tensors is first read.
#[derive(Default)]
pub(crate) struct Weights {
    folder: PathBuf,
    /// The file of each tensor.
    places: BTreeMap<String, String>,
    open: Mutex<BTreeMap<String, Arc<TensorFile>>>,
    /// The table of names, if the files have their own.
    table: Option<ConversionTable>,
    /// The names of tensors in MXFP4, whose elements and scales are tensors of their own.
    packed: BTreeSet<String>,
    /// Weights that are made of several tensors.
    woven: BTreeMap<String, (Vec<String>, Weave)>,
}

impl Weights {
    /// Opens a GGUF file. Of a folder, opens the weights `NAME.safetensors`, those that `NAME.safetensors.index.json`
    /// lists, or the same of PyTorch's `.bin`. The first that is there is taken, as in transformers.
    ///
    /// # Errors
    /// Fails if none is there, or a file is malformed.
    pub(crate) fn open(path: &Path, name: &str) -> Result<Self> {
        if let (true, Some(parent), Some(file)) = (GgufFile::is_at(path), path.parent(), path.file_name()) {
            return Self::single(parent, &file.to_string_lossy(), path);
        }
        let folder = path;
        // The prefix of a model's files; adapters have none.
        let pickled = if name == "model" { "pytorch_model.bin".into() } else { format!("{name}.bin") };
        let single = format!("{name}.safetensors");
        for file in [&single, &pickled] {
            let (path, index) = (folder.join(file), folder.join(format!("{file}.index.json")));
            if path.is_file() {
                return Self::single(folder, file, &path);
            }
            if index.is_file() {
                let places = indexed(&JsonObject::open(&index)?)?;
                return Ok(Weights { folder: folder.into(), places, ..Default::default() });
            }
        }
        Err(missing(folder, &single, &pickled))
    }

    fn single(folder: &Path, name: &str, path: &Path) -> Result<Self> {
        let file = TensorFile::open(path)?;
        let places = file.names().into_iter().map(|tensor| (tensor, name.to_owned())).collect();
        let (table, woven) = (file.table(), file.woven());
        let open = Mutex::new(BTreeMap::from([(name.to_owned(), Arc::new(file))]));
        Ok(Weights { folder: folder.into(), places, open, table, woven, packed: BTreeSet::new() })
    }

    /// Takes elements and scales of MXFP4 for the weights that they are of, which are read in `bf16`.
    ///
    /// # Errors
    /// Fails if there is no such weight.
    pub(crate) fn with_mxfp4(mut self) -> Result<Self> {
        let whole = |name: &String| Some(name.strip_suffix(mxfp4::PARTS[0])?.to_owned());
        let has_both = |name: &String| self.places.contains_key(&format!("{name}{}", mxfp4::PARTS[1]));
        self.packed = self.places.keys().filter_map(whole).filter(has_both).collect();
        self.woven.extend(self.packed.iter().map(|name| (name.clone(), (vec![name.clone()], Weave::Turns))));
        match self.packed.is_empty() {
            true => Err(Error::state("quantization_config", "says that weights are in MXFP4, and none is")),
            false => Ok(self),
        }
    }

    /// Tells whether a tensor is a part of others alone.
    fn is_part(&self, name: &str) -> bool {
        let is_packed = |part| name.strip_suffix(part).is_some_and(|whole| self.packed.contains(whole));
        mxfp4::PARTS.into_iter().any(is_packed)
            || self.woven.values().any(|(parts, _)| parts.iter().any(|part| part == name))
    }

    /// The conversion table of names, if the files have others than the family's.
    pub(crate) fn table(&self) -> Option<ConversionTable> {
        self.table
    }

    /// The names of all tensors, sorted, and then those of weights that are made of several.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.places.keys().filter(|name| !self.is_part(name)).chain(self.woven.keys()).map(String::as_str)
    }

    /// Tells whether there is a tensor of this name.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.places.contains_key(name) || self.woven.contains_key(name)
    }

    /// The element type and shape of a tensor.
    ///
    /// # Errors
    /// Fails if it is not there, its file is malformed, or its element type is not supported.
    pub(crate) fn spec(&self, name: &str) -> Result<(DType, Shape)> {
        match self.woven.get(name) {
            Some((parts, weave)) => {
                let parts = parts.iter().map(|part| self.stored(part)).collect::<Result<Vec<_>>>()?;
                woven::spec(name, &parts, *weave)
            }
            None => self.stored(name),
        }
    }

    /// The element type and shape of a tensor as it is stored.
    fn stored(&self, name: &str) -> Result<(DType, Shape)> {
        if !self.packed.contains(name) {
            return self.reader(name)?.tensor(name);
        }
        let [elements, scales] = mxfp4::PARTS.map(|part| self.stored(&format!("{name}{part}")));
        mxfp4::spec(name, elements?, scales?)
    }

    /// Reads a tensor as the file holds it, and nothing else of the file.
    ///
    /// # Errors
    /// Fails if [`spec`](Weights::spec) would fail, or the bytes cannot be read.
    pub(crate) fn tensor<R: Runtime>(&self, rt: &R, name: &str) -> Result<Tensor<R>> {
        let (_, shape) = self.spec(name)?;
        self.piece(rt, name, &TensorPlacement::whole(shape))
    }

    /// Reads a piece of a tensor as the file holds it, and nothing else of the file. A tensor that is no row-major view
    /// of its storage, such as a transposed one of PyTorch's, is read whole.
    ///
    /// # Errors
    /// Fails if [`spec`](Weights::spec) would fail, the piece is of a tensor of another shape, or the bytes cannot be
    /// read.
    pub(crate) fn piece<R: Runtime>(&self, rt: &R, name: &str, piece: &TensorPlacement) -> Result<Tensor<R>> {
        let (dtype, shape) = self.spec(name)?;
        if shape != piece.logical() {
            let why = format!("a piece of the second shape is asked for of `{name}`, which has the first");
            return Err(Error::shape("weights", &[shape, piece.logical()], why));
        }
        let local = piece.local();
        // Host memory is read into directly.
        let mut memory = TensorMut::alloc(rt, local, dtype)?;
        if let Some(bytes) = memory.host_bytes_mut() {
            self.read_piece(name, piece, bytes)?;
            return memory.freeze();
        }
        let mut bytes = vec![0; local.numel() * dtype.size()];
        self.read_piece(name, piece, &mut bytes)?;
        Tensor::from_bytes(rt, local, dtype, &bytes)
    }

    /// Fills `bytes` with a piece of a tensor of the piece's logical shape.
    fn read_piece(&self, name: &str, piece: &TensorPlacement, bytes: &mut [u8]) -> Result<()> {
        let Some((parts, weave)) = self.woven.get(name) else { return self.read_stored(name, piece, bytes) };
        let sizes = [parts.len(), self.spec(name)?.0.size()];
        let read =
            |part: usize, piece: &TensorPlacement, bytes: &mut [u8]| self.read_stored(&parts[part], piece, bytes);
        match weave {
            Weave::Rows => woven::read_rows(piece, sizes, bytes, read),
            Weave::Turns => woven::read_turns(piece, sizes, bytes, read),
        }
    }

    /// Fills `bytes` with a piece of a tensor as it is stored.
    fn read_stored(&self, name: &str, piece: &TensorPlacement, bytes: &mut [u8]) -> Result<()> {
        if self.packed.contains(name) {
            let parts = mxfp4::PARTS.map(|part| format!("{name}{part}"));
            return mxfp4::read_piece(piece, bytes, |part, piece, bytes| self.read_stored(&parts[part], piece, bytes));
        }
        let reader = self.reader(name)?;
        let (size, runs) = (reader.tensor(name)?.0.size(), piece.runs(0..piece.local().numel()));
        if reader.is_row_major(name)? {
            return runs
                .into_iter()
                .try_for_each(|run| reader.read(name, run.logical, &mut bytes[run.local * size..][..run.len * size]));
        }
        let mut all = vec![0; piece.logical().numel() * size];
        reader.read(name, 0, &mut all)?;
        runs.into_iter().for_each(|run| {
            let from = &all[run.logical * size..][..run.len * size];
            bytes[run.local * size..][..run.len * size].copy_from_slice(from);
        });
        Ok(())
    }

    /// Reads the bytes of a tensor.
    ///
    /// # Errors
    /// Fails if it is not there, or cannot be read.
    pub(crate) fn bytes(&self, name: &str) -> Result<Vec<u8>> {
        let (dtype, shape) = self.spec(name)?;
        let mut bytes = vec![0; shape.numel() * dtype.size()];
        self.read_piece(name, &TensorPlacement::whole(shape), &mut bytes)?;
        Ok(bytes)
    }

    /// Tells whether two tensors have equal element types, shapes and bits.
    ///
    /// # Errors
    /// Fails if one of them is not there, or cannot be read.
    pub(crate) fn same(&self, a: &str, b: &str) -> Result<bool> {
        let (dtype, shape) = self.spec(a)?;
        if self.spec(b)? != (dtype, shape) {
            return Ok(false);
        }
        // A few rows at a time.
        let rows = shape.dims().first().copied().unwrap_or(0);
        if rows == 0 {
            return Ok(self.bytes(a)? == self.bytes(b)?);
        }
        let row = shape.numel() / rows * dtype.size();
        let each = (COMPARED / row.max(1)).max(1);
        let mut both = [vec![0; each.min(rows) * row], vec![0; each.min(rows) * row]];
        for first in (0..rows).step_by(each) {
            let of_rows = first..rows.min(first + each);
            let ranges = std::iter::once(of_rows).chain(shape.dims().iter().skip(1).map(|&size| 0..size));
            let piece = TensorPlacement::new(shape, ranges.map(|range| std::iter::once(range).collect()).collect())?;
            for (name, bytes) in [a, b].into_iter().zip(&mut both) {
                bytes.truncate(piece.local().numel() * dtype.size());
                self.read_piece(name, &piece, bytes)?;
            }
            if both[0] != both[1] {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The file that holds a tensor.
    fn reader(&self, name: &str) -> Result<Arc<TensorFile>> {
        let Some(file) = self.places.get(name) else {
            return Err(Error::state(name, format!("is not among the weights in {}", self.folder.display())));
        };
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(match open.entry(file.clone()) {
            btree_map::Entry::Occupied(reader) => reader.get().clone(),
            btree_map::Entry::Vacant(place) => {
                place.insert(Arc::new(TensorFile::open(&self.folder.join(file))?)).clone()
            }
        })
    }
}

impl fmt::Debug for Weights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Weights({})", self.folder.display())
    }
}

/// The file of each tensor, from an index. Files must be in the folder: a path that leads out of it is an error.
fn indexed(index: &JsonObject) -> Result<BTreeMap<String, String>> {
    let map = index.need("weight_map", index.object("weight_map")?)?;
    let place = |(tensor, file): (&String, &Value)| match file.as_str() {
        Some(file) if is_plain(file) => Ok((tensor.clone(), file.to_owned())),
        _ => Err(map.wrong(tensor, format_args!("is in {file}, which names no file of the folder"))),
    };
    map.fields().iter().map(place).collect()
}

fn is_plain(file: &str) -> bool {
    !file.is_empty() && Path::new(file).file_name().is_some_and(|name| name == file) && !file.contains('\\')
}

fn missing(folder: &Path, single: &str, pickled: &str) -> Error {
    let listing = std::fs::read_dir(folder).map(|entries| {
        let mut names: Vec<String> =
            entries.flatten().take(64).map(|e| e.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    });
    match listing {
        Err(e) => Error::io(folder, e),
        Ok(names) => {
            let why =
                format!("there is neither {single} nor {pickled}, and no index of either, among: {}", names.join(", "));
            Error::format(folder.display().to_string(), why)
        }
    }
}
