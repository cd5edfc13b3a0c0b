//! Checkpoints that ranks hold in memory, in place of a folder.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    path::{Path, PathBuf},
};

use numcore::{Error, Result};

use super::{
    CheckpointReader, Manifest, Snapshot, Wanted,
    reader::BLOCK,
    source::RegionSource,
    writer::{joined, lines_of, table_of},
};

/// What one rank has saved, in memory of that rank or of another.
#[derive(Clone, Debug)]
pub(crate) struct HeldPiece {
    /// By key.
    regions: BTreeMap<String, Range<usize>>,
    bytes: Vec<u8>,
}

/// A region of a checkpoint: the rank that saved it, its key, and its bytes' number.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RegionId {
    pub(crate) piece: usize,
    pub(crate) key: String,
    pub(crate) len: usize,
}

impl Snapshot {
    /// What it holds, as text, and the bytes of all parts, one after another.
    pub(crate) fn packed(&self) -> (Vec<u8>, Vec<u8>) {
        let checksums: Vec<u32> = self.parts.iter().map(|part| crc32fast::hash(&part.bytes)).collect();
        let entries: Vec<_> = self.parts.iter().map(|part| part.entry()).collect();
        let mut bytes = Vec::with_capacity(self.bytes());
        self.parts.iter().for_each(|part| bytes.extend_from_slice(&part.bytes));
        (table_of(&entries, &checksums, &self.numbers).into_bytes(), bytes)
    }
}

impl HeldPiece {
    /// What rank `rank` has [packed](Snapshot::packed).
    pub(crate) fn new(table: &[u8], rank: usize, bytes: Vec<u8>) -> Result<Self> {
        let (mut regions, mut at) = (BTreeMap::new(), 0);
        for (_, _, dtype, region) in lines_of(table, rank)? {
            let end = at + region.len * dtype.size();
            regions.insert(region.key, at..end);
            at = end;
        }
        if at != bytes.len() {
            let why = format!("rank {rank} says that its piece has {at} bytes, and {} came", bytes.len());
            return Err(Error::state("a piece of a commit", why));
        }
        Ok(HeldPiece { regions, bytes })
    }

    /// The bytes of a region.
    pub(crate) fn region(&self, key: &str) -> Option<&[u8]> {
        self.bytes.get(self.regions.get(key)?.clone())
    }
}

impl Manifest {
    /// The contents of a checkpoint, of the tables of all ranks.
    pub(crate) fn of_tables(tables: &[Vec<u8>], notes: &BTreeMap<String, String>) -> Result<Self> {
        joined(tables, notes)
    }

    /// What [`from_text`](Manifest::from_text) reads.
    pub(crate) fn to_text(&self) -> String {
        self.to_json()
    }

    pub(crate) fn from_text(text: &str) -> Result<Self> {
        Manifest::parse(Path::new(COMMIT), text)
    }
}

/// What messages call a checkpoint in memory.
const COMMIT: &str = "a commit in memory";

impl CheckpointReader {
    /// A checkpoint of which nothing is there yet but its contents.
    pub(crate) fn in_memory(manifest: Manifest) -> Self {
        let source = RegionSource::Memory(BTreeMap::new());
        CheckpointReader { folder: PathBuf::from(COMMIT), manifest, source }
    }

    /// The regions that have any of the wanted elements, in order.
    pub(crate) fn needed(&self, wanted: &[Wanted]) -> BTreeSet<RegionId> {
        let of = |wanted: &Wanted| {
            let entry = self.manifest.entries.get(&wanted.name)?;
            let id = |region: &super::Region| RegionId {
                piece: region.rank,
                key: region.key.clone(),
                len: region.len * entry.dtype.size(),
            };
            Some(entry.shared_with(wanted).map(|(region, _)| id(region)).collect::<Vec<_>>())
        };
        wanted.iter().filter_map(of).flatten().collect()
    }

    /// Takes regions into memory.
    pub(crate) fn hold(&mut self, regions: BTreeMap<(usize, String), Vec<u8>>) {
        self.source = RegionSource::Memory(regions);
    }

    /// An error unless the needed regions are what was saved.
    pub(crate) fn check_needed(&mut self, needed: &BTreeSet<RegionId>) -> Result<()> {
        let mut block = vec![0; BLOCK];
        for (name, entry) in &self.manifest.entries {
            for region in &entry.regions {
                let len = region.len * entry.dtype.size();
                if needed.contains(&RegionId { piece: region.rank, key: region.key.clone(), len }) {
                    self.source.check_slot(name, entry, region)?;
                    self.source.check_bytes(name, entry, region, &mut block)?;
                }
            }
        }
        Ok(())
    }
}
