//! Saving of checkpoints.

use std::{
    collections::BTreeMap,
    fs, io,
    path::Path,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use numcore::{DType, Error, Result, Runtime, Shape, placement::TensorPlacement, safetensors};
use serde_json::{Value, json};

use super::{
    CheckpointPart, Checkpointed, Folder, Manifest, Region, Snapshot,
    folder::{MANIFEST, create_all},
    manifest::{piece_of_json, piece_to_json},
};
use crate::comm::{Collectives, Comm, Communicator, all_ok, all_ok_after, gather_bytes};

impl Folder {
    /// Saves a checkpoint of `step` from all ranks, with the `notes` of rank 0. All ranks must see the same folder. An
    /// error on one rank is an error on all, and leaves the existing checkpoints as they were.
    pub fn save<R: Runtime>(
        &self,
        comm: &Comm<R>,
        step: u64,
        state: &(impl Checkpointed<R> + ?Sized),
        notes: &BTreeMap<String, String>,
    ) -> Result<()> {
        let parts = all_ok(comm, "save", state.parts())?;
        self.save_written(comm, step, notes, |at| {
            self.will("write a rank's file")?;
            let entries = parts.iter().map(PartEntry::of).collect::<Vec<_>>();
            write(at, comm.rank(), &entries, |i| parts[i].row.to_bytes(), &state.numbers())
        })
    }

    /// Saves the [snapshots](Snapshot::of) of all ranks, as [`save`](Folder::save) does, in any thread: the ranks train
    /// on while it is written. `comm` must have no other calls meanwhile: use a
    /// [split](crate::comm::Collectives::split) of the ranks' communicator.
    pub fn save_snapshot<R: Runtime>(
        &self,
        comm: &Comm<R>,
        step: u64,
        snapshot: &Snapshot,
        notes: &BTreeMap<String, String>,
    ) -> Result<()> {
        self.save_written(comm, step, notes, |at| {
            self.will("write a rank's file")?;
            let entries = snapshot.parts.iter().map(|part| part.entry()).collect::<Vec<_>>();
            write(at, comm.rank(), &entries, |i| Ok(&snapshot.parts[i].bytes), &snapshot.numbers)
        })
    }

    /// Saves the [snapshots](Snapshot::of) of a failed world, whose ranks can no longer communicate. Each rank writes
    /// its file, and rank 0 publishes the checkpoint if all files are there within `patience`. `run` is a name that the
    /// ranks of this run share, and no other run has.
    ///
    /// # Errors
    /// On rank 0, if a rank wrote nothing in time: it has failed in another step, or is gone.
    pub fn save_orphaned(
        &self,
        (rank, ranks): (usize, usize),
        step: u64,
        snapshot: &Snapshot,
        notes: &BTreeMap<String, String>,
        run: &str,
        patience: Duration,
    ) -> Result<()> {
        let at = self.orphaned(step, run);
        self.will("make a folder")?;
        create_all(&at)?;
        self.will("write a rank's file")?;
        let entries = snapshot.parts.iter().map(|part| part.entry()).collect::<Vec<_>>();
        let own = write(&at, rank, &entries, |i| Ok(&snapshot.parts[i].bytes), &snapshot.numbers)?;
        self.will("write a rank's table")?;
        safetensors::replace_file(table(&at, rank), own.as_bytes())?;
        if rank > 0 {
            return Ok(());
        }
        let begun = Instant::now();
        let missing = || (0..ranks).find(|&rank| !table(&at, rank).is_file());
        while let Some(rank) = missing() {
            if begun.elapsed() > patience {
                let why = format!("rank {rank} saved nothing of step {step} within {patience:?}");
                return Err(Error::io(&at, io::Error::new(io::ErrorKind::TimedOut, why)));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let read = |rank| fs::read(table(&at, rank)).map_err(|e| Error::io(table(&at, rank), e));
        let tables = (0..ranks).map(read).collect::<Result<Vec<_>>>()?;
        for rank in 0..ranks {
            fs::remove_file(table(&at, rank)).map_err(|e| Error::io(table(&at, rank), e))?;
        }
        self.finish(step, &at, &joined(&tables, notes)?)
    }

    /// Saves the files that `written` writes into a folder on every rank; it returns its rank's table of contents.
    fn save_written<R: Runtime>(
        &self,
        comm: &Comm<R>,
        step: u64,
        notes: &BTreeMap<String, String>,
        written: impl FnOnce(&Path) -> Result<String>,
    ) -> Result<()> {
        let at = self.unfinished(step, &name_of_save(comm)?);
        // A rank's part, and removals by rank 0, take as long as the file system does.
        let latest = all_ok_after(comm, "save", || if comm.rank() == 0 { self.begin(step, &at) } else { Ok(None) })?;
        let own = all_ok_after(comm, "save", || written(&at))?;
        let tables = gather_bytes(comm, 0, own.as_bytes())?;
        all_ok_after(comm, "save", || {
            let Some(tables) = tables else { return Ok(()) };
            self.check_latest(step, latest)?;
            self.finish(step, &at, &joined(&tables, notes)?)
        })
    }

    /// Writes the manifest, the last file in the folder `at`, and publishes the folder.
    pub(super) fn finish(&self, step: u64, at: &Path, manifest: &Manifest) -> Result<()> {
        self.will("write the manifest")?;
        safetensors::replace_file(at.join(MANIFEST), manifest.to_json().as_bytes())?;
        self.publish(step, at)
    }
}

/// A name that the ranks of a save share, and no other save has. It consists of the time of its start on rank 0, and of
/// the process there.
fn name_of_save<R: Runtime>(comm: &Comm<R>) -> Result<String> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let own = format!("{since:020x}-{:x}", std::process::id());
    let first = comm.exchange(own.as_bytes())?.swap_remove(0);
    Ok(String::from_utf8_lossy(&first).into_owned())
}

/// The path of the table of contents that a rank of a failed world writes.
fn table(folder: &Path, rank: usize) -> std::path::PathBuf {
    folder.join(format!("rank-{rank:05}.table"))
}

/// The path of a rank's file of tensors.
pub(super) fn file(folder: &Path, rank: usize) -> std::path::PathBuf {
    folder.join(format!("rank-{rank:05}.safetensors"))
}

/// An entry of a table of contents: a part without its bytes.
pub(super) struct PartEntry<'a> {
    pub(super) name: &'a str,
    pub(super) placement: &'a TensorPlacement,
    pub(super) start: usize,
    pub(super) dtype: DType,
    pub(super) len: usize,
}

impl<'a> PartEntry<'a> {
    pub(super) fn of<R: Runtime>(part: &'a CheckpointPart<R>) -> Self {
        let (dtype, len) = (part.row.dtype(), part.row.numel());
        PartEntry { name: &part.name, placement: &part.placement, start: part.start, dtype, len }
    }

    /// The name of the part in a rank's file.
    fn key(&self) -> String {
        format!("{}#{}", self.name, self.start)
    }
}

/// Writes a rank's file, with the bytes that `bytes` returns for each part; returns its table of contents as text.
fn write<B: AsRef<[u8]>>(
    at: &Path,
    rank: usize,
    parts: &[PartEntry<'_>],
    mut bytes: impl FnMut(usize) -> Result<B>,
    numbers: &BTreeMap<String, u64>,
) -> Result<String> {
    let tensor = |part: &PartEntry<'_>| Ok((part.key(), part.dtype, Shape::new(&[part.len])?));
    let tensors = parts.iter().map(tensor).collect::<Result<Vec<_>>>()?;
    let mut checksums = vec![0; parts.len()];
    safetensors::save_with(file(at, rank), &tensors, &BTreeMap::new(), |i| {
        let bytes = bytes(i)?;
        checksums[i] = crc32fast::hash(bytes.as_ref());
        Ok(bytes)
    })?;
    Ok(table_of(parts, &checksums, numbers))
}

/// A rank's table of contents as text.
pub(super) fn table_of(parts: &[PartEntry<'_>], checksums: &[u32], numbers: &BTreeMap<String, u64>) -> String {
    let line = |(part, checksum): (&PartEntry<'_>, &u32)| {
        let (shape, piece) = (part.placement.logical(), piece_to_json(part.placement));
        let dtype = part.dtype.to_string();
        json!([part.name, shape.dims(), dtype, part.key(), part.start, part.len, piece, checksum])
    };
    let table: Vec<Value> = parts.iter().zip(checksums).map(line).collect();
    let numbers: serde_json::Map<String, Value> = numbers.iter().map(|(k, v)| (k.clone(), json!(v))).collect();
    json!([table, numbers]).to_string()
}

/// Joins the tables of all ranks into one manifest.
pub(super) fn joined(tables: &[Vec<u8>], notes: &BTreeMap<String, String>) -> Result<Manifest> {
    let mut manifest = Manifest { ranks: tables.len(), notes: notes.clone(), ..Default::default() };
    for (rank, table) in tables.iter().enumerate() {
        let unreadable = || unreadable(rank);
        let json = json_of(table, rank)?;
        for (name, shape, dtype, region) in lines(&json, rank)? {
            manifest.add(&name, shape, dtype, region)?;
        }
        for (name, number) in json[1].as_object().ok_or_else(unreadable)? {
            manifest.numbers.insert(name.clone(), number.as_u64().ok_or_else(unreadable)?);
        }
    }
    manifest.check_complete()?;
    Ok(manifest)
}

fn unreadable(rank: usize) -> Error {
    Error::format(format!("the table of rank {rank}"), "cannot be read")
}

fn json_of(table: &[u8], rank: usize) -> Result<Value> {
    serde_json::from_slice(table).map_err(|_| unreadable(rank))
}

fn lines(json: &Value, rank: usize) -> Result<Vec<TableLine>> {
    let all = json[0].as_array().ok_or_else(|| unreadable(rank))?;
    all.iter().map(|line| line_of(line, rank).ok_or_else(|| unreadable(rank))).collect()
}

/// The parts in a rank's table, in its order.
pub(super) fn lines_of(table: &[u8], rank: usize) -> Result<Vec<TableLine>> {
    lines(&json_of(table, rank)?, rank)
}

/// A part of a table: the tensor's name, shape and dtype, and the region of its elements.
pub(super) type TableLine = (String, Shape, DType, Region);

fn line_of(line: &Value, rank: usize) -> Option<TableLine> {
    let size = |v: &Value| v.as_u64().map(|n| n as usize);
    let dims = line[1].as_array()?.iter().map(size).collect::<Option<Vec<_>>>()?;
    let dtype = DType::ALL.into_iter().find(|d| Some(d.to_string().as_str()) == line[2].as_str())?;
    let (key, start, len) = (line[3].as_str()?.into(), size(&line[4])?, size(&line[5])?);
    let (shape, checksum) = (Shape::new(&dims).ok()?, u32::try_from(line[7].as_u64()?).ok()?);
    let region = Region { rank, key, start, len, checksum, piece: piece_of_json(shape, &line[6])? };
    Some((line[0].as_str()?.into(), shape, dtype, region))
}
