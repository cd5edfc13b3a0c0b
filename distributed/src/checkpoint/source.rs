//! The sources of a checkpoint's bytes: files or memory.

use std::{
    collections::{BTreeMap, btree_map},
    path::PathBuf,
};

use numcore::{Error, Result, safetensors};

use super::{Region, manifest::TensorEntry, writer::file};

/// The source of regions: the files of a folder, or memory of this process.
pub(crate) enum RegionSource {
    Files {
        folder: PathBuf,
        /// The open files, by the rank that wrote them.
        open: BTreeMap<usize, safetensors::Reader>,
    },
    /// The bytes of regions, by rank and key.
    Memory(BTreeMap<(usize, String), Vec<u8>>),
}

impl RegionSource {
    pub(super) fn files(folder: PathBuf) -> Self {
        RegionSource::Files { folder, open: BTreeMap::new() }
    }

    /// Reads bytes of a region, from byte `at` on.
    pub(super) fn read_range(&mut self, region: &Region, at: usize, into: &mut [u8]) -> Result<()> {
        match self {
            RegionSource::Files { folder, open } => {
                opened(open, folder, region.rank)?.read_range(&region.key, at, into)
            }
            RegionSource::Memory(held) => {
                let bytes = held.get(&region_id(region)).and_then(|bytes| bytes.get(at..at + into.len()));
                into.copy_from_slice(bytes.ok_or_else(|| Error::state(&*region.key, "is in no commit in memory"))?);
                Ok(())
            }
        }
    }

    /// An error unless the region has the dtype and length of the manifest. Reads no elements.
    pub(super) fn check_slot(&mut self, name: &str, entry: &TensorEntry, region: &Region) -> Result<()> {
        let (dtype, numel, place) = match self {
            RegionSource::Files { folder, open } => {
                let file = opened(open, folder, region.rank)?;
                let (dtype, shape) = file.tensor(&region.key)?;
                (dtype, shape.numel(), file.path().display().to_string())
            }
            RegionSource::Memory(held) => {
                let len = held.get(&region_id(region)).map_or(0, Vec::len);
                (entry.dtype, len / entry.dtype.size(), MEMORY.to_string())
            }
        };
        if (dtype, numel) == (entry.dtype, region.len) {
            return Ok(());
        }
        let why =
            format!("is {numel} elements of {dtype} in {place}, the manifest says {} of {}", region.len, entry.dtype);
        Err(Error::state(name, why))
    }

    /// An error unless the checksum of a region's bytes matches; reads them through `block`.
    pub(super) fn check_bytes(
        &mut self,
        name: &str,
        entry: &TensorEntry,
        region: &Region,
        block: &mut [u8],
    ) -> Result<()> {
        let (mut hasher, mut at, len) = (crc32fast::Hasher::new(), 0, region.len * entry.dtype.size());
        while at < len {
            let part = block.len().min(len - at);
            self.read_range(region, at, &mut block[..part])?;
            hasher.update(&block[..part]);
            at += part;
        }
        if hasher.finalize() == region.checksum { Ok(()) } else { Err(self.corrupted(name, region)) }
    }

    pub(super) fn corrupted(&self, name: &str, region: &Region) -> Error {
        let place = match self {
            RegionSource::Files { folder, .. } => file(folder, region.rank).display().to_string(),
            RegionSource::Memory(_) => MEMORY.into(),
        };
        Error::state(name, format!("is corrupted in {place}: its checksum differs"))
    }
}

/// The name of memory in errors.
const MEMORY: &str = "a commit in memory";

fn region_id(region: &Region) -> (usize, String) {
    (region.rank, region.key.clone())
}

fn opened<'a>(
    open: &'a mut BTreeMap<usize, safetensors::Reader>,
    folder: &std::path::Path,
    rank: usize,
) -> Result<&'a safetensors::Reader> {
    Ok(match open.entry(rank) {
        btree_map::Entry::Occupied(open) => open.into_mut(),
        btree_map::Entry::Vacant(place) => place.insert(safetensors::Reader::open(file(folder, rank))?),
    })
}
