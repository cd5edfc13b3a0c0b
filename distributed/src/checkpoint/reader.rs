//! Loading, at any world size.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::PathBuf,
};

use numcore::{Error, Result, Runtime, Shape, Tensor, safetensors};

use super::{Checkpointed, Folder, Manifest, Region, Wanted, folder::MANIFEST, manifest::Entry, names, writer::file};
use crate::comm::{Collectives, Comm, unanimous};

impl Folder {
    /// Loads the last complete checkpoint, as [`load`](Folder::load) does; none if there is none.
    pub fn load_latest<R: Runtime>(
        &self,
        comm: &Comm<R>,
        state: &mut (impl Checkpointed<R> + ?Sized),
    ) -> Result<Option<Manifest>> {
        let latest = unanimous(comm, "load", self.latest())?;
        comm.agree("the last checkpoint", format!("{latest:?}").as_bytes())?;
        latest.map(|step| self.load(comm, step, state)).transpose()
    }

    /// Loads the checkpoint of a step on all ranks, however many wrote it, and gives its manifest. What is missing, unexpected, of another
    /// shape or dtype, truncated or corrupted is found on every rank before anything is changed.
    pub fn load<R: Runtime>(
        &self,
        comm: &Comm<R>,
        step: u64,
        state: &mut (impl Checkpointed<R> + ?Sized),
    ) -> Result<Manifest> {
        let opened = CheckpointReader::open(self.step(step));
        let mut reader = unanimous(comm, "load", opened)?;
        comm.agree("the checkpoint's manifest", reader.manifest.to_json().as_bytes())?;
        let numbers = state.numbers();
        let wanted = state.wanted().and_then(|wanted| {
            reader.check_names(&wanted, &numbers)?;
            wanted.iter().try_for_each(|w| reader.check(w))?;
            reader.check_own(comm.rank(), comm.size())?;
            Ok(wanted)
        });
        let wanted = unanimous(comm, "load", wanted)?;
        // Every name that is there must be wanted by someone.
        let own = wanted.iter().map(|w| w.name.as_str()).collect::<Vec<_>>().join("\n");
        let all = comm.exchange(own.as_bytes())?;
        let known: BTreeSet<String> =
            all.iter().flat_map(|b| String::from_utf8_lossy(b).lines().map(String::from).collect::<Vec<_>>()).collect();
        let extra: Vec<&str> = reader.manifest.names().filter(|n| !names::is_own(n) && !known.contains(*n)).collect();
        if !extra.is_empty() {
            let error = Error::state(extra.join(", "), "is in the checkpoint, and nothing here takes it");
            return Err(error.on_rank(comm.rank()));
        }
        let rt = comm.runtime().clone();
        let saved = reader.manifest.numbers.clone();
        let restored = state.restore(&mut |wanted| reader.read(&rt, wanted), &saved);
        unanimous(comm, "load", restored)?;
        Ok(reader.manifest)
    }
}

/// A checkpoint that is being read.
pub struct CheckpointReader {
    folder: PathBuf,
    manifest: Manifest,
    files: BTreeMap<usize, safetensors::Reader>,
}

impl CheckpointReader {
    /// Opens the checkpoint in a folder: reads its manifest.
    pub fn open(folder: impl Into<PathBuf>) -> Result<Self> {
        let folder = folder.into();
        let path = folder.join(MANIFEST);
        let text = fs::read_to_string(&path).map_err(|e| Error::io(&path, e))?;
        let manifest = Manifest::parse(&path, &text)?;
        Ok(CheckpointReader { folder, manifest, files: BTreeMap::new() })
    }

    /// What is in it.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// A whole tensor by its logical name, for export.
    pub fn tensor<R: Runtime>(&mut self, rt: &R, name: &str) -> Result<Tensor<R>> {
        use numcore::ops::ViewOps;
        let Some(entry) = self.manifest.entries.get(name) else {
            return Err(Error::state(name, format!("is not in {}", self.folder.display())));
        };
        let (shape, dtype) = (entry.shape, entry.dtype);
        let wanted = Wanted { name: name.into(), shape, dtype, elements: 0..shape.numel() };
        self.read(rt, &wanted)?.reshape(shape)
    }

    fn check_names(&self, wanted: &[Wanted], numbers: &BTreeMap<String, u64>) -> Result<()> {
        let tensors = wanted.iter().map(|w| &w.name);
        let tensors = tensors.filter(|n| !names::is_own(n) && !self.manifest.entries.contains_key(*n));
        let numbers = numbers.keys().filter(|n| !names::is_own(n) && !self.manifest.numbers.contains_key(*n));
        let missing: BTreeSet<&str> = tensors.chain(numbers).map(String::as_str).collect();
        if missing.is_empty() {
            return Ok(());
        }
        let names = missing.into_iter().collect::<Vec<_>>().join(", ");
        Err(Error::state(names, format!("is missing in {}", self.folder.display())))
    }

    /// An error unless these elements can be read as they are wanted; looks at the bytes.
    fn check(&mut self, wanted: &Wanted) -> Result<()> {
        self.bytes(wanted).map(|_| ())
    }

    /// An error unless what is the own of every `n`-th rank can be read: they may share out what more ranks than these left.
    fn check_own(&mut self, rank: usize, n: usize) -> Result<()> {
        for k in (rank..self.manifest.ranks).step_by(n) {
            let prefix = names::own(k, "");
            let own = self.manifest.entries.iter().filter(|(name, _)| name.starts_with(&prefix));
            let whole = |(name, e): (&String, &Entry)| Wanted {
                name: name.clone(),
                shape: e.shape,
                dtype: e.dtype,
                elements: 0..e.shape.numel(),
            };
            own.map(whole).collect::<Vec<_>>().iter().try_for_each(|w| self.check(w))?;
        }
        Ok(())
    }

    fn read<R: Runtime>(&mut self, rt: &R, wanted: &Wanted) -> Result<Tensor<R>> {
        let bytes = self.bytes(wanted)?;
        Tensor::from_bytes(rt, Shape::new(&[wanted.elements.len()])?, wanted.dtype, &bytes)
    }

    fn bytes(&mut self, wanted: &Wanted) -> Result<Vec<u8>> {
        let Some(entry) = self.manifest.entries.get(&wanted.name) else {
            if names::is_own(&wanted.name) {
                return Ok(vec![0; wanted.elements.len() * wanted.dtype.size()]);
            }
            return Err(Error::state(&*wanted.name, format!("is missing in {}", self.folder.display())));
        };
        if (entry.shape, entry.dtype) != (wanted.shape, wanted.dtype) {
            let why = format!("is {} {} here and {} {} there", wanted.dtype, wanted.shape, entry.dtype, entry.shape);
            return Err(Error::state(&*wanted.name, why));
        }
        let (size, want) = (wanted.dtype.size(), wanted.elements.clone());
        let mut bytes = Vec::with_capacity(want.len() * size);
        for region in entry.regions.clone() {
            let overlap = want.start.max(region.start)..want.end.min(region.start + region.len);
            if overlap.start < overlap.end {
                let all = self.region(&wanted.name, &region, size)?;
                bytes.extend_from_slice(
                    &all[(overlap.start - region.start) * size..(overlap.end - region.start) * size],
                );
            }
        }
        Ok(bytes)
    }

    fn region(&mut self, name: &str, region: &Region, size: usize) -> Result<Vec<u8>> {
        let path = file(&self.folder, region.rank);
        let reader = match self.files.entry(region.rank) {
            std::collections::btree_map::Entry::Occupied(open) => open.into_mut(),
            std::collections::btree_map::Entry::Vacant(place) => place.insert(safetensors::Reader::open(&path)?),
        };
        let bytes = reader.bytes(&region.key)?;
        if bytes.len() != region.len * size {
            let why =
                format!("has {} bytes in {}, the manifest says {}", bytes.len(), path.display(), region.len * size);
            return Err(Error::state(name, why));
        }
        if crc32fast::hash(&bytes) != region.checksum {
            return Err(Error::state(name, format!("is corrupted in {}: its checksum differs", path.display())));
        }
        Ok(bytes)
    }
}
