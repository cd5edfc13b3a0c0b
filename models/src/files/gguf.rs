//! The weights of a GGUF file, in the order of rows and with the values that this project computes with.

use std::{collections::BTreeMap, path::Path};

use data::gguf::{GgufFile, GgufValue};
use numcore::{DType, Error, Result, Shape};

use crate::convert::{ConversionTable, GGUF_FORMS, GGUF_TABLE, GgufForm, Weave};

/// The tensors of a GGUF file. For some architectures llama.cpp rotates adjacent components of a head together, and
/// files have the rows of queries and keys in that order. They are read in the order of halves.
pub(super) struct GgufWeightFile {
    file: GgufFile,
    /// The form of the architecture, if it is known.
    form: Option<&'static GgufForm>,
    /// The numbers of heads of queries and of keys, if their rows are reordered.
    heads: Option<[usize; 2]>,
}

impl GgufWeightFile {
    /// Opens a file.
    ///
    /// # Errors
    /// Fails if it is malformed.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let file = GgufFile::open(path)?;
        let architecture = file.get("general.architecture").and_then(GgufValue::text);
        let form = GGUF_FORMS.iter().find(|form| Some(form.architecture) == architecture);
        let interleaved = form.filter(|form| form.interleaved);
        let count = |name: &str| {
            let Some(form) = interleaved else { return Ok(None) };
            let count = file.typed(&format!("{}.attention.{name}", form.architecture), "a count", GgufValue::count)?;
            Ok::<_, Error>(count.and_then(|n| usize::try_from(n).ok()).filter(|n| *n > 0))
        };
        let queries = count("head_count")?;
        let heads = match queries {
            Some(queries) => Some([queries, count("head_count_kv")?.unwrap_or(queries)]),
            None => None,
        };
        Ok(GgufWeightFile { file, form, heads })
    }

    /// The names of weights.
    pub(super) fn table(&self) -> ConversionTable {
        self.form.map_or(GGUF_TABLE, |form| form.table)
    }

    /// Weights that are made of several tensors.
    pub(super) fn woven(&self) -> BTreeMap<String, (Vec<String>, Weave)> {
        self.form.map_or_else(BTreeMap::new, |form| form.woven(self.file.names()))
    }

    /// The names of all tensors, sorted.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.file.names()
    }

    /// The element type and shape of a tensor.
    pub(super) fn tensor(&self, name: &str) -> Result<(DType, Shape)> {
        self.file.tensor(name).map(|(kind, shape)| (kind.dtype(), shape))
    }

    /// Reads elements of a tensor from element `from` on, row by row where rows are reordered.
    pub(super) fn read(&self, name: &str, from: usize, into: &mut [u8]) -> Result<()> {
        let (kind, shape) = self.file.tensor(name)?;
        let offset = self.form.map_or(0.0, |form| form.norm_offset);
        if offset != 0.0 && name.ends_with("norm.weight") {
            if kind.dtype() != DType::F32 {
                let why = format!("is {kind:?}, and weights of norms are f32: convert the file again");
                return Err(Error::state(name, why));
            }
            self.file.read(name, from, into)?;
            for bytes in into.as_chunks_mut::<4>().0 {
                *bytes = (f32::from_le_bytes(*bytes) - offset).to_le_bytes();
            }
            return Ok(());
        }
        let [q, k] = self.heads.unwrap_or([1; 2]);
        let heads = if name.contains(".attn_q.") { q } else { k };
        let is_reordered = self.heads.is_some() && (name.contains(".attn_q.") || name.contains(".attn_k."));
        let rows = shape.first().copied().unwrap_or(1);
        let (columns, head) = (shape.numel() / rows.max(1), rows / heads);
        // Sizes that fit no heads are an error of the configuration, or of the shapes.
        if !is_reordered || columns == 0 || head == 0 || !head.is_multiple_of(2) || !rows.is_multiple_of(heads) {
            return self.file.read(name, from, into);
        }
        let size = kind.dtype().size();
        let (mut at, mut rest) = (from, into);
        while !rest.is_empty() {
            let (row, column) = (at / columns, at % columns);
            let (head_start, within) = (row / head * head, row % head);
            let stored = head_start + 2 * (within % (head / 2)) + within / (head / 2);
            let (now, later) = rest.split_at_mut(rest.len().min((columns - column) * size));
            self.file.read(name, stored * columns + column, now)?;
            at += now.len() / size;
            rest = later;
        }
        Ok(())
    }
}
