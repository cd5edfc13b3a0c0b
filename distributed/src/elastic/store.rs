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

/// Where copies of what a rank commits go.
#[derive(Clone, Debug)]
pub(super) struct Placing {
    /// How many other ranks have one.
    pub(super) copies: usize,
    /// The machine of this rank.
    pub(super) host: String,
    /// Bytes that travel at once.
    pub(super) message: usize,
}

impl Default for Placing {
    /// One copy, on a machine that the system's name tells apart from others.
    fn default() -> Self {
        let name = std::fs::read_to_string("/proc/sys/kernel/hostname").or_else(|_| std::env::var("HOSTNAME"));
        Placing { copies: 1, host: name.unwrap_or_default().trim().to_string(), message: 64 << 20 }
    }
}

/// How far from a rank, in ranks, its copies are, the best first: where the fewest ranks have theirs on their own machine, and then the nearest.
fn distances(hosts: &[&str]) -> Vec<usize> {
    let n = hosts.len();
    let at_home = |k: usize| (0..n).filter(|&rank| hosts[rank] == hosts[(rank + k) % n]).count();
    let mut all: Vec<usize> = (1..n).collect();
    all.sort_by_cached_key(|&k| at_home(k));
    all
}

/// What a rank tells of its piece.
struct Told {
    table: Vec<u8>,
    bytes: usize,
    notes: BTreeMap<String, String>,
    host: String,
}

impl Told {
    fn to_bytes(&self) -> Vec<u8> {
        let mut w = Writer::default();
        self.notes.write(w.bytes(&self.table).usize(self.bytes).text(&self.host));
        w.finish()
    }

    fn read(bytes: &[u8]) -> Result<Self> {
        let mut r = WireReader::new(bytes);
        let (table, bytes, host) = (r.bytes()?.to_vec(), r.usize()?, r.text()?.to_string());
        Ok(Told { table, bytes, notes: Portable::read(&mut r)?, host })
    }
}

impl Store {
    /// Every rank saves its piece here and on as many others as there are `copies`. All are there on this rank when it returns, and it does not know of the others.
    pub(super) fn add<R: Runtime>(
        &mut self,
        comm: &Comm<R>,
        (id, step): (CommitId, u64),
        snapshot: Result<Snapshot>,
        notes: &BTreeMap<String, String>,
        placing: &Placing,
    ) -> Result<()> {
        let (table, own) = all_ok(comm, "commit", snapshot)?.packed();
        let (rank, n) = (comm.rank(), comm.size());
        let notes = if rank == 0 { notes.clone() } else { BTreeMap::new() };
        let told = Told { table, bytes: own.len(), notes, host: placing.host.clone() };
        let told = comm.exchange(&told.to_bytes())?.iter().map(|told| Told::read(told)).collect::<Result<Vec<_>>>();
        let told = all_ok(comm, "commit", told)?;
        let tables: Vec<Vec<u8>> = told.iter().map(|told| told.table.clone()).collect();
        let manifest = all_ok(comm, "commit", Manifest::of_tables(&tables, &told[0].notes))?;
        let mut pieces = BTreeMap::new();
        let hosts: Vec<&str> = told.iter().map(|told| &*told.host).collect();
        let rounds = told.iter().map(|told| told.bytes.div_ceil(placing.message)).max().unwrap_or(0);
        for k in distances(&hosts).into_iter().take(placing.copies) {
            let (to, from) = ((rank + k) % n, (rank + n - k) % n);
            let arrived = copied(comm, (&own, to), (told[from].bytes, from), (rounds, placing.message))?;
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

/// Sends bytes to a rank, and gives those that come from another, in rounds of so many bytes each.
fn copied<R: Runtime>(
    comm: &Comm<R>,
    (own, to): (&[u8], usize),
    (len, from): (usize, usize),
    (rounds, message): (usize, usize),
) -> Result<Vec<u8>> {
    let (rt, mut arrived) = (comm.runtime(), Vec::with_capacity(len));
    for round in 0..rounds {
        let part = |len: usize| (round * message).min(len)..((round + 1) * message).min(len);
        let (own, due) = (&own[part(own.len())], part(len).len());
        let arriving = TensorMut::alloc(rt, Shape::new(&[due])?, DType::U8)?;
        let work = comm.send_recv(&Tensor::from_slice(rt, [own.len()], own)?, to, arriving, from)?;
        arrived.extend(work.wait()?.freeze()?.to_vec::<u8>()?);
    }
    Ok(arrived)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_on_other_machines_where_there_are() {
        assert_eq!(distances(&["a", "a", "b", "b"]), [2, 1, 3]);
        assert_eq!(distances(&["a", "b", "a", "b"]), [1, 3, 2]);
        assert_eq!(distances(&["a"; 4]), [1, 2, 3]);
        assert_eq!(distances(&["a", "a", "a", "b", "b"]), [2, 3, 1, 4]);
        assert!(distances(&["a"]).is_empty());
    }
}
