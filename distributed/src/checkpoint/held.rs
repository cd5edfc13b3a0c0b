//! Checkpoints that ranks hold in memory, in place of a folder.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    ops::Range,
    path::{Path, PathBuf},
    thread::sleep,
    time::{Duration, Instant},
};

use numcore::{DType, Error, Result, Runtime, Shape, safetensors};

use super::{
    CheckpointReader, Checkpointed, Folder, Manifest, Region, Snapshot, Wanted,
    folder::create_all,
    reader::BLOCK,
    source::RegionSource,
    writer::{file, joined, lines_of, table_of},
};
use crate::comm::Comm;

/// The part of a checkpoint that one rank has saved, in memory of that rank or of another.
#[derive(Clone, Debug)]
pub struct HeldPiece {
    /// The byte range of each region, by key.
    regions: BTreeMap<String, Range<usize>>,
    bytes: Vec<u8>,
}

/// A region of a checkpoint: the rank that saved it, its key, and its size in bytes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RegionId {
    /// The rank that saved the region.
    pub piece: usize,
    /// The key of the region in the rank's piece.
    pub key: String,
    /// The size in bytes.
    pub len: usize,
}

impl Snapshot {
    /// The snapshot's table of contents as text, and the bytes of all parts, concatenated.
    pub fn packed(&self) -> (Vec<u8>, Vec<u8>) {
        let checksums: Vec<u32> = self.parts.iter().map(|part| crc32fast::hash(&part.bytes)).collect();
        let entries: Vec<_> = self.parts.iter().map(|part| part.entry()).collect();
        let mut bytes = Vec::with_capacity(self.bytes());
        self.parts.iter().for_each(|part| bytes.extend_from_slice(&part.bytes));
        (table_of(&entries, &checksums, &self.numbers).into_bytes(), bytes)
    }
}

impl HeldPiece {
    /// Unpacks the table and bytes that rank `rank` has [packed](Snapshot::packed).
    pub fn new(table: &[u8], rank: usize, bytes: Vec<u8>) -> Result<Self> {
        let (mut regions, mut at) = (BTreeMap::new(), 0);
        for (_, _, dtype, region) in lines_of(table, rank)? {
            let end = at + region.len * dtype.size();
            regions.insert(region.key, at..end);
            at = end;
        }
        if at != bytes.len() {
            let why = format!("the table of rank {rank} has a piece of {at} bytes, and {} arrived", bytes.len());
            return Err(Error::state("a piece of a commit", why));
        }
        Ok(HeldPiece { regions, bytes })
    }

    /// The bytes of a saved range of a tensor, by the key of its [`RegionId`]; `None` if this piece lacks it.
    pub fn region(&self, key: &str) -> Option<&[u8]> {
        self.bytes.get(self.regions.get(key)?.clone())
    }
}

impl Folder {
    /// Writes the pieces of a checkpoint that this rank holds, as a survivor of a world that cannot go on. Once all
    /// pieces are there, one of the survivors publishes it; `holder` is the survivor's number. Returns true if all
    /// pieces came within `patience`, or the folder has this step or a later one already.
    pub fn save_held(
        &self,
        holder: usize,
        (step, manifest): (u64, &Manifest),
        pieces: &BTreeMap<usize, HeldPiece>,
        patience: Duration,
    ) -> Result<bool> {
        if self.latest()?.is_some_and(|latest| latest >= step) {
            return Ok(true);
        }
        let text = manifest.to_text();
        let run = format!("{:08x}", crc32fast::hash(text.as_bytes()));
        let (at, own) = (self.orphaned(step, &run), self.orphaned(step, &format!("{run}-{holder}")));
        self.will("make a folder")?;
        create_all(&at)?;
        create_all(&own)?;
        for (&rank, piece) in pieces {
            self.will("write a rank's file")?;
            piece.write(manifest, rank, &file(&own, rank))?;
            // Another survivor may have written the same piece.
            fs::rename(file(&own, rank), file(&at, rank)).map_err(|e| Error::io(&at, e))?;
        }
        let _ = fs::remove_dir(&own);
        let begun = Instant::now();
        while !(0..manifest.ranks).all(|rank| file(&at, rank).is_file()) {
            if begun.elapsed() > patience || !at.exists() {
                return Ok(self.step(step).exists());
            }
            sleep(Duration::from_millis(5));
        }
        // The first survivor to create this file publishes.
        if fs::OpenOptions::new().write(true).create_new(true).open(at.join("publisher")).is_ok() {
            self.finish(step, &at, manifest)?;
        }
        Ok(true)
    }
}

impl HeldPiece {
    /// Writes the piece as the rank that saved it would have.
    fn write(&self, manifest: &Manifest, rank: usize, path: &Path) -> Result<()> {
        let regions =
            manifest.entries.values().flat_map(|entry| entry.regions.iter().map(|region| (entry.dtype, region)));
        let own: Vec<_> = regions.filter(|(_, region)| region.rank == rank).collect();
        let tensor = |(dtype, region): &(DType, &Region)| Ok((region.key.clone(), *dtype, Shape::new(&[region.len])?));
        let tensors = own.iter().map(tensor).collect::<Result<Vec<_>>>()?;
        safetensors::save_with(path, &tensors, &BTreeMap::new(), |i| {
            let (_, region) = own[i];
            self.region(&region.key).ok_or_else(|| Error::state(&*region.key, "is not in the piece of a commit"))
        })
    }
}

impl Manifest {
    /// Joins the tables of contents of all ranks into one manifest.
    pub fn of_tables(tables: &[Vec<u8>], notes: &BTreeMap<String, String>) -> Result<Self> {
        joined(tables, notes)
    }

    /// The text that [`from_text`](Manifest::from_text) reads.
    pub fn to_text(&self) -> String {
        self.to_json()
    }

    /// Reads a manifest from text.
    pub fn from_text(text: &str) -> Result<Self> {
        Manifest::parse(Path::new(COMMIT), text)
    }
}

/// The name of a checkpoint in memory, in errors.
const COMMIT: &str = "a commit in memory";

impl Manifest {
    /// Restores `state` from the checkpoint that this manifest describes, over any number of ranks. `fetch` returns the
    /// bytes of the regions that this rank needs, by piece and key. Every rank calls it.
    ///
    /// # Errors
    /// On every rank, unless the checkpoint has all tensors that the ranks need, with matching checksums, and nothing
    /// else. Nothing is changed then.
    pub fn restore<R: Runtime>(
        self,
        comm: &Comm<R>,
        state: &mut (impl Checkpointed<R> + ?Sized),
        fetch: impl FnOnce(&BTreeSet<RegionId>) -> Result<BTreeMap<(usize, String), Vec<u8>>>,
    ) -> Result<()> {
        let source = RegionSource::Memory(BTreeMap::new());
        let mut reader = CheckpointReader { folder: PathBuf::from(COMMIT), manifest: self, source };
        let wanted = reader.wanted_by(comm, state)?;
        let needed = reader.needed(&wanted);
        reader.source = RegionSource::Memory(fetch(&needed)?);
        let checked = reader.check_needed(&needed);
        reader.restore(comm, state, checked)
    }
}

impl CheckpointReader {
    /// The regions that have any of the wanted elements, in order.
    fn needed(&self, wanted: &[Wanted]) -> BTreeSet<RegionId> {
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

    /// An error unless the needed regions are present and their checksums match.
    fn check_needed(&mut self, needed: &BTreeSet<RegionId>) -> Result<()> {
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
