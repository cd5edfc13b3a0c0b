//! What a rank holds of commits.

use std::collections::{BTreeMap, BTreeSet};

use numcore::{DType, Result, Runtime, Shape, Tensor, TensorMut};

use crate::{
    checkpoint::{HeldPiece, Manifest, Snapshot},
    comm::{
        Collectives, Comm, Communicator, all_ok,
        engine::{Portable, WireReader, Writer},
    },
};

/// Which commit: the generation of the world that made it, and its number among the commits of that one. A later one is greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct CommitId {
    pub(super) generation: u64,
    pub(super) number: u64,
}

/// A commit, as far as this rank holds it.
pub(super) struct Commit {
    pub(super) step: u64,
    pub(super) manifest: Manifest,
    /// By the rank that saved it.
    pub(super) pieces: BTreeMap<usize, HeldPiece>,
}

/// The commits that this rank holds: the last one that all ranks have, and what came after it.
#[derive(Default)]
pub(super) struct Store(pub(super) BTreeMap<CommitId, Commit>);

/// What a rank tells of its piece.
struct Told {
    table: Vec<u8>,
    bytes: usize,
    notes: BTreeMap<String, String>,
}

impl Told {
    fn to_bytes(&self) -> Vec<u8> {
        let mut w = Writer::default();
        self.notes.write(w.bytes(&self.table).usize(self.bytes));
        w.finish()
    }

    fn read(bytes: &[u8]) -> Result<Self> {
        let mut r = WireReader::new(bytes);
        Ok(Told { table: r.bytes()?.to_vec(), bytes: r.usize()?, notes: Portable::read(&mut r)? })
    }
}

impl Store {
    /// Every rank saves its piece here and on the next `copies` ranks. All are there on this rank when it returns, and it does not know of the others.
    pub(super) fn add<R: Runtime>(
        &mut self,
        comm: &Comm<R>,
        (id, step): (CommitId, u64),
        snapshot: Result<Snapshot>,
        notes: &BTreeMap<String, String>,
        copies: usize,
    ) -> Result<()> {
        let (table, own) = all_ok(comm, "commit", snapshot)?.packed();
        let (rank, n) = (comm.rank(), comm.size());
        let notes = if rank == 0 { notes.clone() } else { BTreeMap::new() };
        let told = Told { table, bytes: own.len(), notes };
        let told = comm.exchange(&told.to_bytes())?.iter().map(|told| Told::read(told)).collect::<Result<Vec<_>>>();
        let told = all_ok(comm, "commit", told)?;
        let tables: Vec<Vec<u8>> = told.iter().map(|told| told.table.clone()).collect();
        let manifest = all_ok(comm, "commit", Manifest::of_tables(&tables, &told[0].notes))?;
        let mut pieces = BTreeMap::new();
        for k in 1..n.min(copies + 1) {
            let (to, from) = ((rank + k) % n, (rank + n - k) % n);
            let arrived = copied(comm, &own, to, from, told[from].bytes)?;
            pieces.insert(from, HeldPiece::new(&tables[from], from, arrived)?);
        }
        pieces.insert(rank, HeldPiece::new(&tables[rank], rank, own)?);
        self.0.insert(id, Commit { step, manifest, pieces });
        Ok(())
    }

    /// All ranks have this commit: none before it will be asked for.
    pub(super) fn forget_before(&mut self, id: CommitId) {
        self.0 = self.0.split_off(&id);
    }

    /// What this rank holds, as it tells the others.
    pub(super) fn told(&self) -> Vec<u8> {
        let mut w = Writer::default();
        w.usize(self.0.len());
        for (id, commit) in &self.0 {
            let pieces: Vec<usize> = commit.pieces.keys().copied().collect();
            w.u64(id.generation).u64(id.number).usize(commit.manifest.ranks()).list(&pieces);
        }
        w.finish()
    }
}

/// Which ranks of a world hold which pieces.
#[derive(Default)]
pub(super) struct Holders {
    /// How many pieces there are.
    ranks: usize,
    by_piece: BTreeMap<usize, Vec<usize>>,
}

impl Holders {
    /// Of all commits, from what the ranks [tell](Store::told).
    pub(super) fn read(told: &[Vec<u8>]) -> Result<BTreeMap<CommitId, Holders>> {
        let mut all: BTreeMap<CommitId, Holders> = BTreeMap::new();
        for (rank, told) in told.iter().enumerate() {
            let mut r = WireReader::new(told);
            for _ in 0..r.usize()? {
                let id = CommitId { generation: r.u64()?, number: r.u64()? };
                let holders = all.entry(id).or_default();
                holders.ranks = r.usize()?;
                r.list()?.into_iter().for_each(|piece| holders.by_piece.entry(piece).or_default().push(rank));
            }
        }
        Ok(all)
    }

    /// Pieces that nobody holds.
    pub(super) fn lost(&self) -> Vec<usize> {
        (0..self.ranks).filter(|piece| !self.by_piece.contains_key(piece)).collect()
    }

    /// Who gives a piece: the holders of different pieces take turns.
    pub(super) fn giver(&self, piece: usize) -> Option<usize> {
        let holders = self.by_piece.get(&piece)?;
        holders.get(piece % holders.len().max(1)).copied()
    }

    /// The lowest rank that holds any of it.
    pub(super) fn teller(&self) -> Option<usize> {
        self.by_piece.values().flatten().collect::<BTreeSet<_>>().first().map(|rank| **rank)
    }
}

/// Sends bytes to a rank, and gives those that come from another.
fn copied<R: Runtime>(comm: &Comm<R>, own: &[u8], to: usize, from: usize, len: usize) -> Result<Vec<u8>> {
    let rt = comm.runtime();
    let arriving = TensorMut::alloc(rt, Shape::new(&[len])?, DType::U8)?;
    comm.send_recv(&Tensor::from_slice(rt, [own.len()], own)?, to, arriving, from)?.wait()?.freeze()?.to_vec()
}
