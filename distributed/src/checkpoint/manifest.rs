//! The manifest of a checkpoint: which elements lie in which file.

use std::{
    collections::{BTreeMap, HashSet},
    hash::{DefaultHasher, Hasher},
    path::Path,
};

use numcore::{DType, Error, Result, Shape, placement::TensorPlacement};
use serde_json::{Map, Value, json};

/// The versions of the format. Version 2 adds pieces of tensors; a manifest without pieces is written as version 1.
const VERSIONS: [u64; 2] = [1, 2];
/// The key of a manifest's own checksum.
const CHECKSUM: &str = "checksum";

/// A region: consecutive elements of a tensor in a rank's file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    /// The rank that wrote the file.
    pub rank: usize,
    /// The name of the region in that file.
    pub key: String,
    /// The piece of the tensor that the elements belong to; none for the whole tensor.
    pub piece: Option<TensorPlacement>,
    /// The first element, as an index into the piece in row-major order.
    pub start: usize,
    /// The number of elements.
    pub len: usize,
    /// The CRC-32 of the elements' bytes.
    pub checksum: u32,
}

/// A tensor of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TensorEntry {
    pub(super) shape: Shape,
    pub(super) dtype: DType,
    pub(super) regions: Vec<Region>,
}

/// The table of contents of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Manifest {
    pub(super) ranks: usize,
    pub(super) entries: BTreeMap<String, TensorEntry>,
    pub(super) numbers: BTreeMap<String, u64>,
    pub(super) notes: BTreeMap<String, String>,
}

impl Manifest {
    /// The number of ranks that wrote the checkpoint.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// The logical names of the checkpoint's tensors.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// The numbers saved beside the tensors, by logical name: counts of steps and updates, hyper-parameters, state of
    /// ranks.
    pub fn numbers(&self) -> &BTreeMap<String, u64> {
        &self.numbers
    }

    /// The notes that the caller saved with the checkpoint: the position in its data, a description.
    pub fn notes(&self) -> &BTreeMap<String, String> {
        &self.notes
    }

    /// Adds a region of a tensor. An error unless all ranks report the same shape and dtype for the tensor.
    pub(super) fn add(&mut self, name: &str, shape: Shape, dtype: DType, region: Region) -> Result<()> {
        let fresh = || TensorEntry { shape, dtype, regions: Vec::new() };
        let entry = self.entries.entry(name.into()).or_insert_with(fresh);
        if (entry.shape, entry.dtype) != (shape, dtype) {
            let why = format!("ranks disagree: {} {} and {dtype} {shape}", entry.dtype, entry.shape);
            return Err(Error::state(name, why));
        }
        entry.regions.push(region);
        Ok(())
    }

    /// An error unless every element of every tensor exists exactly once.
    pub(super) fn check_complete(&mut self) -> Result<()> {
        self.entries.iter_mut().try_for_each(|(name, entry)| entry.check_complete(name))
    }

    pub(super) fn to_json(&self) -> String {
        let entry = |(name, e): (&String, &TensorEntry)| {
            let regions: Vec<Value> = e.regions.iter().map(Region::to_json).collect();
            (name.clone(), json!({ "dtype": e.dtype.to_string(), "shape": e.shape.dims(), "regions": regions }))
        };
        let tensors: Map<String, Value> = self.entries.iter().map(entry).collect();
        let pieces = self.entries.values().flat_map(|e| &e.regions).any(|r| r.piece.is_some());
        let (version, ranks, numbers, notes) = (VERSIONS[usize::from(pieces)], self.ranks, &self.numbers, &self.notes);
        let numbers: Map<String, Value> = numbers.iter().map(|(k, v)| (k.clone(), json!(v))).collect();
        let notes: Map<String, Value> = notes.iter().map(|(k, v)| (k.clone(), json!(v))).collect();
        let mut json =
            json!({ "version": version, "ranks": ranks, "tensors": tensors, "numbers": numbers, "notes": notes });
        json[CHECKSUM] = checksum(&json);
        json.to_string()
    }

    /// A digest, equal for equal contents within one build of the program: ranks compare it in place of the whole
    /// manifest.
    pub(super) fn digest(&self) -> [u8; 8] {
        let mut hasher = DefaultHasher::new();
        hasher.write(self.to_json().as_bytes());
        hasher.finish().to_le_bytes()
    }

    pub(super) fn parse(path: &Path, text: &str) -> Result<Self> {
        let wrong = |why: &str| Error::format(path.display().to_string(), why);
        let json: Value = serde_json::from_str(text).map_err(|e| wrong(&format!("not JSON: {e}")))?;
        match json["version"].as_u64() {
            Some(version) if VERSIONS.contains(&version) => {}
            Some(other) => return Err(wrong(&format!("version {other}; this program reads versions {VERSIONS:?}"))),
            None => return Err(wrong("not a manifest of a checkpoint: it has no version")),
        }
        let Value::Object(all) = json else { return Err(wrong("not a table")) };
        // In the order of the text: other crates may have made serde_json keep it.
        let (sum, rest): (Map<_, _>, Map<_, _>) = all.into_iter().partition(|(key, _)| key == CHECKSUM);
        let json = Value::Object(rest);
        if sum.get(CHECKSUM) != Some(&checksum(&json)) {
            return Err(wrong("is corrupted: its checksum differs"));
        }
        let ranks = json["ranks"].as_u64().ok_or_else(|| wrong("no number of ranks"))? as usize;
        let map = |key: &str| json[key].as_object().ok_or_else(|| wrong(&format!("no table `{key}`")));
        let mut manifest = Manifest { ranks, ..Default::default() };
        for (name, e) in map("tensors")? {
            let entry = entry(e, ranks).ok_or_else(|| wrong(&format!("the entry of `{name}` cannot be read")))?;
            manifest.entries.insert(name.clone(), entry);
        }
        for (name, v) in map("numbers")? {
            let v = v.as_u64().ok_or_else(|| wrong(&format!("`{name}` is not a number")))?;
            manifest.numbers.insert(name.clone(), v);
        }
        for (name, v) in map("notes")? {
            let v = v.as_str().ok_or_else(|| wrong(&format!("note `{name}` is no text")))?;
            manifest.notes.insert(name.clone(), v.into());
        }
        manifest.check_complete().map_err(|e| wrong(&e.to_string()))?;
        manifest.check_files().map_err(|e| wrong(&e.to_string()))?;
        Ok(manifest)
    }

    /// An error if two regions are the same tensor of a file: together they would exceed the file's contents.
    fn check_files(&self) -> Result<()> {
        let mut seen = HashSet::new();
        for (name, entry) in &self.entries {
            if let Some(twice) = entry.regions.iter().find(|r| !seen.insert((r.rank, r.key.as_str()))) {
                return Err(Error::state(&**name, format!("`{}` of rank {} is in two places", twice.key, twice.rank)));
            }
        }
        Ok(())
    }
}

/// The CRC-32 of the rest of a manifest.
fn checksum(rest: &Value) -> Value {
    json!(crc32fast::hash(rest.to_string().as_bytes()))
}

fn entry(e: &Value, ranks: usize) -> Option<TensorEntry> {
    let size = |v: &Value| v.as_u64().and_then(|n| usize::try_from(n).ok());
    let shape = Shape::new(&e["shape"].as_array()?.iter().map(size).collect::<Option<Vec<_>>>()?).ok()?;
    let dtype = DType::ALL.into_iter().find(|d| Some(d.to_string().as_str()) == e["dtype"].as_str())?;
    let region = |r: &Value| {
        let rank = size(&r[0]).filter(|&rank| rank < ranks)?;
        let (key, start, len) = (r[1].as_str()?.into(), size(&r[2])?, size(&r[3])?);
        start.checked_add(len)?;
        let piece = piece_of_json(shape, &r[5])?;
        Some(Region { rank, key, piece, start, len, checksum: u32::try_from(r[4].as_u64()?).ok()? })
    };
    let regions = e["regions"].as_array()?.iter().map(region).collect::<Option<Vec<_>>>()?;
    Some(TensorEntry { shape, dtype, regions })
}

impl Region {
    fn to_json(&self) -> Value {
        let mut all = vec![json!(self.rank), json!(self.key), json!(self.start), json!(self.len), json!(self.checksum)];
        all.extend(self.piece.as_ref().map(piece_to_json));
        Value::Array(all)
    }
}

/// A piece of a tensor as JSON: the ranges along each of its dimensions; `null` if it is the whole tensor.
pub(super) fn piece_to_json(piece: &TensorPlacement) -> Value {
    if piece.is_whole() {
        return Value::Null;
    }
    let pairs = |dim| piece.ranges(dim).iter().map(|r| json!([r.start, r.end])).collect::<Vec<Value>>();
    json!((0..piece.logical().rank()).map(pairs).collect::<Vec<_>>())
}

/// Parses the output of `piece_to_json`. The inner option is none for the whole tensor; the outer one, for invalid
/// JSON.
pub(super) fn piece_of_json(shape: Shape, json: &Value) -> Option<Option<TensorPlacement>> {
    if json.is_null() {
        return Some(None);
    }
    let size = |v: &Value| v.as_u64().and_then(|n| usize::try_from(n).ok());
    let range = |r: &Value| Some(size(&r[0])?..size(&r[1])?);
    let ranges = |dim: &Value| dim.as_array()?.iter().map(range).collect::<Option<Vec<_>>>();
    let dims = json.as_array()?.iter().map(ranges).collect::<Option<Vec<_>>>()?;
    TensorPlacement::new(shape, dims).ok().map(Some)
}
