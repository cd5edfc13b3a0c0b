//! Loading of checkpoints, at any world size.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    fs, io,
    path::PathBuf,
    thread::sleep,
    time::{Duration, Instant},
};

use numcore::{Error, Result, Runtime, Shape, Tensor};

use super::{
    Checkpointed, Folder, Manifest, Region, Wanted,
    folder::MANIFEST,
    manifest::TensorEntry,
    names,
    overlap::{Shared, shared},
    source::RegionSource,
};
use crate::comm::{Collectives, Comm, Communicator, Partial, ReduceOp, abort_on_err, all_ok, all_ok_after};

/// The interval at which a folder is checked for a checkpoint.
const POLL: Duration = Duration::from_millis(20);

impl Folder {
    /// Loads the last complete checkpoint, as [`load`](Folder::load) does; returns none if there is no checkpoint.
    pub fn load_latest<R: Runtime>(
        &self,
        comm: &Comm<R>,
        state: &mut (impl Checkpointed<R> + ?Sized),
    ) -> Result<Option<Manifest>> {
        let latest = self.latest_of_all(comm)?;
        latest.map(|step| self.load(comm, step, state)).transpose()
    }

    /// The [latest](Folder::latest) step on rank 0, once all ranks see that checkpoint. Ranks on several hosts see a
    /// change in a shared folder at different times. Collective: every rank calls it.
    pub fn latest_of_all<R: Runtime>(&self, comm: &Comm<R>) -> Result<Option<u64>> {
        let own = all_ok(comm, "load", if comm.rank() == 0 { self.latest() } else { Ok(None) })?;
        // The step is 0 without a checkpoint, so that ranks of a runtime without values read none as well.
        let [there, step] = [u64::from(own.is_some()), own.unwrap_or_default()];
        let latest = comm.exchange_equal((u128::from(there) << 64 | u128::from(step)).to_le_bytes())?;
        let latest = latest.first().map_or(0, |first| u128::from_le_bytes(*first));
        let Some(step) = (latest >> 64 != 0).then_some(latest as u64) else { return Ok(None) };
        all_ok_after(comm, "load", || self.await_step(step, comm.timeout().saturating_mul(2)))?;
        Ok(Some(step))
    }

    /// Waits until this rank sees the checkpoint of a step that another rank has published: shared file systems show it
    /// to ranks at different times.
    ///
    /// # Errors
    /// Fails if the checkpoint is not visible within `patience`.
    pub fn await_step(&self, step: u64, patience: Duration) -> Result<()> {
        let begun = Instant::now();
        while !self.step(step).join(MANIFEST).is_file() {
            if begun.elapsed() > patience {
                let why = format!(
                    "rank 0 has a checkpoint of step {step}, which this rank did not see within {patience:?}: do all ranks share this folder?"
                );
                return Err(Error::io(self.path(), io::Error::new(io::ErrorKind::TimedOut, why)));
            }
            sleep(POLL);
        }
        Ok(())
    }

    /// Loads the checkpoint of a step on all ranks, whatever number of ranks wrote it, and returns its manifest. Ranks
    /// share the checksums out: each checks a share of all bytes, then reads the elements it needs.
    ///
    /// # Errors
    /// Every rank fails, with nothing changed, if data is missing, unexpected, of another shape or dtype, truncated or
    /// corrupted. Every rank also fails if memory to be written has another holder. A later failure, such as a file
    /// that is changed meanwhile, ends the communicator: ranks then have different states.
    pub fn load<R: Runtime>(
        &self,
        comm: &Comm<R>,
        step: u64,
        state: &mut (impl Checkpointed<R> + ?Sized),
    ) -> Result<Manifest> {
        let opened = CheckpointReader::open(self.step(step));
        let mut reader = all_ok(comm, "load", opened)?;
        comm.agree("the checkpoint's manifest", &reader.manifest.digest())?;
        reader.wanted_by(comm, state)?;
        let checked = all_ok_after(comm, "load", || reader.check_share(comm.rank(), comm.size()));
        reader.restore(comm, state, checked)?;
        Ok(reader.manifest)
    }
}

/// A checkpoint that is being read.
pub struct CheckpointReader {
    pub(super) folder: PathBuf,
    pub(super) manifest: Manifest,
    pub(super) source: RegionSource,
}

impl CheckpointReader {
    /// Opens the checkpoint in a folder and reads its manifest, whose checksum must match.
    pub fn open(folder: impl Into<PathBuf>) -> Result<Self> {
        let folder = folder.into();
        let path = folder.join(MANIFEST);
        let text = fs::read_to_string(&path).map_err(|e| Error::io(&path, e))?;
        let manifest = Manifest::parse(&path, &text)?;
        let source = RegionSource::files(folder.clone());
        Ok(CheckpointReader { folder, manifest, source })
    }

    /// The manifest: names of tensors, counters and other numbers, the caller's notes, and the number of ranks that
    /// wrote the checkpoint.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Reads a whole tensor by its logical name, for export.
    pub fn tensor<R: Runtime>(&mut self, rt: &R, name: &str) -> Result<Tensor<R>> {
        use numcore::ops::ViewOps;
        let Some(entry) = self.manifest.entries.get(name) else {
            return Err(Error::state(name, format!("is not in {}", self.folder.display())));
        };
        let (shape, dtype) = (entry.shape, entry.dtype);
        self.read(rt, &Wanted::whole(name.into(), shape, dtype))?.reshape(shape)
    }

    /// The elements that this rank needs. An error on all ranks unless the checkpoint has all that they need, and
    /// nothing else.
    pub(super) fn wanted_by<R: Runtime>(
        &mut self,
        comm: &Comm<R>,
        state: &mut (impl Checkpointed<R> + ?Sized),
    ) -> Result<Vec<Wanted>> {
        state.expect(&self.manifest.numbers);
        let numbers = state.numbers();
        let wanted = state.wanted().and_then(|wanted| {
            self.check_wanted(&wanted, &numbers)?;
            Ok(wanted)
        });
        let wanted = all_ok(comm, "load", wanted)?;
        self.check_all_taken(comm, &wanted, &numbers)?;
        Ok(wanted)
    }

    /// Restores `state` on all ranks, if `checked` is no error and the state accepts the numbers, on every rank.
    pub(super) fn restore<R: Runtime>(
        &mut self,
        comm: &Comm<R>,
        state: &mut (impl Checkpointed<R> + ?Sized),
        checked: Result<()>,
    ) -> Result<()> {
        let saved = self.manifest.numbers.clone();
        all_ok(comm, "load", checked.and_then(|()| state.check_restore(&saved)))?;
        let rt = comm.runtime().clone();
        let mut restore = || abort_on_err(comm, state.restore(&mut |wanted| self.read(&rt, wanted), &saved));
        // No rank trains on before all are restored, which takes as long as reading does. The state may make calls of
        // its own meanwhile.
        match comm.split(Some(0), comm.rank())? {
            Some(beside) => all_ok_after(&beside, "load", restore),
            None => restore(),
        }
    }

    /// An error unless the tensors and numbers that this rank needs exist, with the needed shapes and dtypes.
    fn check_wanted(&self, wanted: &[Wanted], numbers: &BTreeMap<String, u64>) -> Result<()> {
        let tensors = wanted.iter().map(|w| &w.name);
        let must_be = |name: &str| !names::is_own(name) || names::is_local(name);
        let tensors = tensors.filter(|n| must_be(n) && !self.manifest.entries.contains_key(*n));
        let must_be = |name: &str| !names::is_own(name) && !names::is_hyper(name);
        let numbers = numbers.keys().filter(|n| must_be(n) && !self.manifest.numbers.contains_key(*n));
        let missing: BTreeSet<&str> = tensors.chain(numbers).map(String::as_str).collect();
        if !missing.is_empty() {
            let names = missing.into_iter().collect::<Vec<_>>().join(", ");
            return Err(Error::state(names, format!("is missing in {}", self.folder.display())));
        }
        let no_count = |(name, n): &(&String, &u64)| names::is_count(name) && i64::try_from(**n).is_err();
        if let Some((name, n)) = self.manifest.numbers.iter().find(no_count) {
            return Err(Error::state(&**name, format!("is {n}, which is no count of updates")));
        }
        let known = |w: &Wanted| self.manifest.entries.get(&w.name).map_or(Ok(()), |entry| check_kind(w, entry));
        wanted.iter().try_for_each(known)
    }

    /// An error unless every tensor and number, except ranks' own, is taken by some rank. Costs one all-reduce of a
    /// flag a name.
    fn check_all_taken<R: Runtime>(
        &self,
        comm: &Comm<R>,
        wanted: &[Wanted],
        numbers: &BTreeMap<String, u64>,
    ) -> Result<()> {
        let own: HashSet<&str> = wanted.iter().map(|w| &*w.name).chain(numbers.keys().map(|n| &**n)).collect();
        let all = self.manifest.names().chain(self.manifest.numbers.keys().map(|n| &**n));
        let all: Vec<&str> = all.filter(|name| !names::is_own(name) && !names::is_hyper(name)).collect();
        let taken: Vec<bool> = all.iter().map(|name| own.contains(name)).collect();
        let taken = Partial::new(Tensor::from_slice(comm.runtime(), [all.len()], &taken)?);
        let taken = taken.combine(comm, ReduceOp::Sum)?.to_vec::<bool>()?;
        let extra: Vec<&str> = all.iter().zip(taken).filter(|(_, taken)| !taken).map(|(name, _)| *name).collect();
        if extra.is_empty() {
            return Ok(());
        }
        let error = Error::state(extra.join(", "), "is in the checkpoint, and nothing restores it");
        Err(error.on_rank(comm.world_rank()))
    }

    /// An error unless rank `rank`'s share of the bytes matches its checksums. Each of `n` ranks reads about as many
    /// bytes, once; together they read all.
    fn check_share(&mut self, rank: usize, n: usize) -> Result<()> {
        let size = |entry: &TensorEntry| entry.shape.numel() as u128 * entry.dtype.size() as u128;
        let total = self.manifest.entries.values().map(size).sum::<u128>().max(1);
        let (mut before, mut block) = (0, vec![0; BLOCK]);
        for (name, entry) in &self.manifest.entries {
            for region in &entry.regions {
                let owner = before * n as u128 / total;
                before += region.len as u128 * entry.dtype.size() as u128;
                if owner.min(n as u128 - 1) == rank as u128 {
                    self.source.check_slot(name, entry, region)?;
                    self.source.check_bytes(name, entry, region, &mut block)?;
                }
            }
        }
        Ok(())
    }

    pub(super) fn read<R: Runtime>(&mut self, rt: &R, wanted: &Wanted) -> Result<Tensor<R>> {
        let bytes = self.bytes(wanted)?;
        Tensor::from_bytes(rt, Shape::new(&[wanted.elements.len()])?, wanted.dtype, &bytes)
    }

    /// Reads the bytes of the wanted elements alone. Allocates memory only after the files were found to hold that
    /// much.
    fn bytes(&mut self, wanted: &Wanted) -> Result<Vec<u8>> {
        let Some(entry) = self.manifest.entries.get(&wanted.name) else {
            if names::is_own(&wanted.name) {
                return zeros(wanted.elements.len() * wanted.dtype.size());
            }
            return Err(Error::state(&*wanted.name, format!("is missing in {}", self.folder.display())));
        };
        check_kind(wanted, entry)?;
        let (name, size, want) = (&*wanted.name, wanted.dtype.size(), wanted.elements.clone());
        let read: Vec<(&Region, Vec<Shared>)> = entry.shared_with(wanted).collect();
        for (region, _) in &read {
            self.source.check_slot(name, entry, region)?;
        }
        let mut bytes = zeros(want.len() * size)?;
        for (region, read) in read {
            let mut count = 0;
            for Shared { saved, wanted, len } in &read {
                let at = (wanted - want.start) * size;
                let into = &mut bytes[at..at + len * size];
                self.source.read_range(region, (saved - region.start) * size, into)?;
                count += len;
                if *len == region.len && crc32fast::hash(into) != region.checksum {
                    return Err(self.source.corrupted(name, region));
                }
            }
            // All elements of a region were read, though not in one run.
            if count == region.len && read.len() > 1 {
                self.source.check_bytes(name, entry, region, &mut vec![0; BLOCK])?;
            }
        }
        Ok(bytes)
    }
}

impl TensorEntry {
    /// The regions that have any of the wanted elements, with the runs of these.
    pub(super) fn shared_with(&self, wanted: &Wanted) -> impl Iterator<Item = (&Region, Vec<Shared>)> {
        let read = move |region: &Region| {
            let saved = (&self.piece_of(region), region.start..region.start + region.len);
            shared(saved, (&wanted.placement, wanted.elements.clone()))
        };
        self.regions.iter().map(move |region| (region, read(region))).filter(|(_, read)| !read.is_empty())
    }
}

/// The number of bytes that are checked at a time.
pub(super) const BLOCK: usize = 1 << 20;

/// An error unless the saved tensor has the wanted shape and dtype.
fn check_kind(wanted: &Wanted, entry: &TensorEntry) -> Result<()> {
    let shape = wanted.placement.logical();
    if (entry.shape, entry.dtype) != (shape, wanted.dtype) {
        let why = format!("is {} {shape} here and {} {} there", wanted.dtype, entry.dtype, entry.shape);
        return Err(Error::state(&*wanted.name, why));
    }
    let count = wanted.placement.local().numel();
    if wanted.elements.start > wanted.elements.end || wanted.elements.end > count {
        let why = format!("has {count} elements, {:?} are requested", wanted.elements);
        return Err(Error::state(&*wanted.name, why));
    }
    Ok(())
}

/// Zeros in host memory; an error if there is not enough.
fn zeros(len: usize) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let none = |_| Error::range("load", "number of bytes", len, "no more than the host's memory can hold");
    bytes.try_reserve_exact(len).map_err(none)?;
    bytes.resize(len, 0);
    Ok(bytes)
}
