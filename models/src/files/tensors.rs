//! Files of named tensors, of any format that is read.

use std::{collections::BTreeMap, path::Path};

use numcore::{DType, Result, Shape, safetensors::Reader};

use super::{gguf::GgufWeightFile, pickle::PickleFile};
use crate::convert::{ConversionTable, Weave};

/// An open file of tensors, which are read piece by piece.
pub(super) enum TensorFile {
    Safetensors(Reader),
    Gguf(GgufWeightFile),
    Pickle(PickleFile),
}

impl TensorFile {
    /// Opens a file of the format that its first bytes or its name show.
    pub(super) fn open(path: &Path) -> Result<Self> {
        if data::gguf::GgufFile::is_at(path) {
            return GgufWeightFile::open(path).map(TensorFile::Gguf);
        }
        match path.extension().is_some_and(|end| end == "bin") {
            true => PickleFile::open(path).map(TensorFile::Pickle),
            false => Reader::open(path).map(TensorFile::Safetensors),
        }
    }

    /// The names of all tensors.
    pub(super) fn names(&self) -> Vec<String> {
        match self {
            TensorFile::Safetensors(file) => file.names().map(str::to_owned).collect(),
            TensorFile::Gguf(file) => file.names().map(str::to_owned).collect(),
            TensorFile::Pickle(file) => file.names().map(str::to_owned).collect(),
        }
    }

    /// The table of names, if the format has its own.
    pub(super) fn table(&self) -> Option<ConversionTable> {
        if let TensorFile::Gguf(file) = self { Some(file.table()) } else { None }
    }

    /// Weights that are made of several tensors.
    pub(super) fn woven(&self) -> BTreeMap<String, (Vec<String>, Weave)> {
        if let TensorFile::Gguf(file) = self { file.woven() } else { BTreeMap::new() }
    }

    /// The element type and shape of a tensor.
    pub(super) fn tensor(&self, name: &str) -> Result<(DType, Shape)> {
        match self {
            TensorFile::Safetensors(file) => file.tensor(name).map(|(dtype, shape)| (dtype, *shape)),
            TensorFile::Gguf(file) => file.tensor(name),
            TensorFile::Pickle(file) => file.tensor(name),
        }
    }

    /// Tells whether the elements of a tensor are in the file in row-major order, so that a run of them is read alone.
    pub(super) fn is_row_major(&self, name: &str) -> Result<bool> {
        if let TensorFile::Pickle(file) = self { file.is_row_major(name) } else { Ok(true) }
    }

    /// Fills `into` with the row-major bytes of a tensor from element `from` on.
    pub(super) fn read(&self, name: &str, from: usize, into: &mut [u8]) -> Result<()> {
        match self {
            TensorFile::Safetensors(file) => file.read_range(name, from * file.tensor(name)?.0.size(), into),
            TensorFile::Gguf(file) => file.read(name, from, into),
            TensorFile::Pickle(file) => file.read(name, from, into),
        }
    }
}
