//! The commits that a rank holds, and the placement of their copies.

use std::collections::{BTreeMap, BTreeSet};

use numcore::{DType, Error, Result, Runtime, Shape, Tensor, TensorMut};

use distributed::{
    checkpoint::{HeldPiece, Manifest, Snapshot},
    comm::{
        Collectives, Comm, Communicator, all_ok,
        engine::{Portable, WireReader, Writer},
    },
};

/// The identity of a commit: the generation of the world that made it, and its number there. Later ones are greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct CommitId {
    pub(super) generation: u64,
    pub(super) number: u64,
}

/// A commit, as far as this rank holds it.
pub(super) struct Commit {
    pub(super) step: u64,
    pub(super) manifest: Manifest,
    /// The pieces by the rank that saved them.
    pub(super) pieces: BTreeMap<usize, HeldPiece>,
}

/// The commits that this rank holds: the last one that all ranks have, and later ones.
#[derive(Default)]
pub(super) struct Store(pub(super) BTreeMap<CommitId, Commit>);

/// The placement of the copies of a rank's commits.
#[derive(Clone, Debug)]
pub(super) struct Placing {
    /// The number of other ranks with a copy.
    pub(super) copies: usize,
    /// The machine of this rank.
    pub(super) host: String,
    /// The bytes of a message.
    pub(super) message: usize,
}

impl Default for Placing {
    /// One copy, and the system's name as the machine.
    fn default() -> Self {
        let name = std::fs::read_to_string("/proc/sys/kernel/hostname").or_else(|_| std::env::var("HOSTNAME"));
        Placing { copies: 1, host: name.unwrap_or_default().trim().to_string(), message: 64 << 20 }
    }
}

/// The ranks that hold copies of each rank's piece. Preferred are machines other than its own and those of its other
/// holders, then ranks with the fewest copies, then the next ranks after it.
fn holders(hosts: &[&str], copies: usize) -> Vec<Vec<usize>> {
    let n = hosts.len();
    let (mut holders, mut held) = (vec![Vec::<usize>::new(); n], vec![0; n]);
    for _ in 0..copies.min(n.saturating_sub(1)) {
        for (rank, own) in holders.iter_mut().enumerate() {
            let at_home = |other: usize| own.iter().chain([&rank]).filter(|&&at| hosts[at] == hosts[other]).count();
            let free = (0..n).filter(|other| *other != rank && !own.contains(other));
            let best = free.min_by_key(|&other| (at_home(other), held[other], (other + n - rank) % n));
            if let Some(best) = best {
                own.push(best);
                held[best] += 1;
            }
        }
    }
    holders
}

/// The transfers `(from, to)` of pieces, in rounds: in each a rank sends to at most one, and receives from at most one.
fn rounds(holders: &[Vec<usize>]) -> Vec<Vec<(usize, usize)>> {
    let mut rounds: Vec<Vec<(usize, usize)>> = Vec::new();
    let copies = holders.iter().map(Vec::len).max().unwrap_or(0);
    let nth = |k: usize| holders.iter().enumerate().filter_map(move |(from, to)| Some((from, *to.get(k)?)));
    for edge in (0..copies).flat_map(nth) {
        let is_free = |round: &&mut Vec<(usize, usize)>| round.iter().all(|at| at.0 != edge.0 && at.1 != edge.1);
        match rounds.iter_mut().find(is_free) {
            Some(round) => round.push(edge),
            None => rounds.push(vec![edge]),
        }
    }
    rounds
}

/// The description of a rank's piece that it sends to all.
struct PieceInfo {
    table: Vec<u8>,
    bytes: usize,
    notes: BTreeMap<String, String>,
    host: String,
}

impl PieceInfo {
    fn to_bytes(&self) -> Vec<u8> {
        let mut w = Writer::default();
        self.notes.write(w.bytes(&self.table).usize(self.bytes).text(&self.host));
        w.finish()
    }

    fn read(bytes: &[u8]) -> Result<Self> {
        let mut r = WireReader::new(bytes);
        let (table, bytes, host) = (r.bytes()?.to_vec(), r.usize()?, r.text()?.to_string());
        Ok(PieceInfo { table, bytes, notes: Portable::read(&mut r)?, host })
    }
}

impl Store {
    /// Saves each rank's piece on the rank and on `copies` others. On return this rank has its pieces; others may still
    /// be receiving.
    pub(super) fn add<R: Runtime>(
        &mut self,
        comm: &Comm<R>,
        (id, step): (CommitId, u64),
        snapshot: Result<Snapshot>,
        notes: &BTreeMap<String, String>,
        placing: &Placing,
    ) -> Result<()> {
        let (table, own) = all_ok(comm, "commit", snapshot)?.packed();
        let rank = comm.rank();
        let notes = if rank == 0 { notes.clone() } else { BTreeMap::new() };
        let own_info = PieceInfo { table, bytes: own.len(), notes, host: placing.host.clone() };
        let infos =
            comm.exchange(&own_info.to_bytes())?.iter().map(|bytes| PieceInfo::read(bytes)).collect::<Result<Vec<_>>>();
        let infos = all_ok(comm, "commit", infos)?;
        let tables: Vec<Vec<u8>> = infos.iter().map(|info| info.table.clone()).collect();
        let manifest = all_ok(comm, "commit", Manifest::of_tables(&tables, &infos[0].notes))?;
        let mut pieces = BTreeMap::new();
        let hosts: Vec<&str> = infos.iter().map(|info| &*info.host).collect();
        for round in rounds(&holders(&hosts, placing.copies)) {
            let to = round.iter().find(|(from, _)| *from == rank).map(|(_, to)| *to);
            let from = round.iter().find(|(_, to)| *to == rank).map(|(from, _)| *from);
            let due = from.map_or(0, |from| infos[from].bytes);
            let arrived = copied(comm, (&own, to), (due, from), placing.message)?;
            if let Some(from) = from {
                pieces.insert(from, HeldPiece::new(&tables[from], from, arrived)?);
            }
        }
        pieces.insert(rank, HeldPiece::new(&tables[rank], rank, own)?);
        self.0.insert(id, Commit { step, manifest, pieces });
        Ok(())
    }

    /// Drops earlier commits, once all ranks have this one.
    pub(super) fn forget_before(&mut self, id: CommitId) {
        self.0 = self.0.split_off(&id);
    }

    /// The inventory of this rank's commits and pieces, serialized for the other ranks.
    pub(super) fn inventory(&self) -> Vec<u8> {
        let mut w = Writer::default();
        w.usize(self.0.len());
        for (id, commit) in &self.0 {
            let pieces: Vec<usize> = commit.pieces.keys().copied().collect();
            w.u64(id.generation).u64(id.number).usize(commit.manifest.ranks()).list(&pieces);
        }
        w.finish()
    }
}

/// The ranks of a world that hold the pieces of a commit.
#[derive(Default)]
pub(super) struct Holders {
    /// The number of pieces.
    ranks: usize,
    by_piece: BTreeMap<usize, Vec<usize>>,
}

impl Holders {
    /// The holders of all commits, from the ranks' [inventories](Store::inventory).
    pub(super) fn read(inventories: &[Vec<u8>]) -> Result<BTreeMap<CommitId, Holders>> {
        let mut all: BTreeMap<CommitId, Holders> = BTreeMap::new();
        for (rank, inventory) in inventories.iter().enumerate() {
            let mut r = WireReader::new(inventory);
            for _ in 0..r.usize()? {
                let id = CommitId { generation: r.u64()?, number: r.u64()? };
                let holders = all.entry(id).or_default();
                holders.ranks = r.usize()?;
                r.list()?.into_iter().for_each(|piece| holders.by_piece.entry(piece).or_default().push(rank));
            }
        }
        Ok(all)
    }

    /// The pieces that no rank holds.
    pub(super) fn lost(&self) -> Vec<usize> {
        (0..self.ranks).filter(|piece| !self.by_piece.contains_key(piece)).collect()
    }

    /// The rank that sends a piece to others: the holders of different pieces take turns.
    pub(super) fn sender(&self, piece: usize) -> Option<usize> {
        let holders = self.by_piece.get(&piece)?;
        holders.get(piece % holders.len().max(1)).copied()
    }

    /// The lowest rank that holds any piece.
    pub(super) fn first_holder(&self) -> Option<usize> {
        self.by_piece.values().flatten().collect::<BTreeSet<_>>().first().map(|rank| **rank)
    }
}

/// Sends bytes to rank `to`, if any, and returns the `len` bytes from rank `from`, if any, in messages of `message`
/// bytes.
fn copied<R: Runtime>(
    comm: &Comm<R>,
    (own, to): (&[u8], Option<usize>),
    (len, from): (usize, Option<usize>),
    message: usize,
) -> Result<Vec<u8>> {
    let (rt, mut arrived) = (comm.runtime(), Vec::with_capacity(len));
    let most = if to.is_some() { own.len().max(len) } else { len };
    for round in 0..most.div_ceil(message) {
        let part = |len: usize| (round * message).min(len)..((round + 1) * message).min(len);
        let (bytes, due) = (&own[part(own.len())], part(len).len());
        let outgoing = to.filter(|_| !bytes.is_empty());
        let sent =
            outgoing.map(|to| Ok::<_, Error>((Tensor::from_slice(rt, [bytes.len()], bytes)?, to))).transpose()?;
        let incoming = from.filter(|_| due > 0);
        let into = incoming.map(|from| Ok::<_, Error>((TensorMut::alloc(rt, Shape::new(&[due])?, DType::U8)?, from)));
        let work = match (sent, into.transpose()?) {
            (Some((sent, to)), Some((into, from))) => comm.send_recv(&sent, to, into, from)?,
            (None, Some((into, from))) => comm.recv(into, from)?,
            (Some((sent, to)), None) => {
                comm.send(&sent, to)?.wait()?;
                continue;
            }
            (None, None) => continue,
        };
        arrived.extend(work.wait()?.freeze()?.to_vec::<u8>()?);
    }
    Ok(arrived)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_on_other_machines_where_there_are() {
        let of = |hosts: &[&str]| holders(hosts, 1).concat();
        assert_eq!(of(&["a", "a", "b", "b"]), [2, 3, 0, 1]);
        assert_eq!(of(&["a", "b", "a", "b"]), [1, 2, 3, 0]);
        assert_eq!(of(&["a"; 4]), [1, 2, 3, 0]);
        assert_eq!(of(&["a", "a", "a", "b", "b"]), [3, 4, 3, 0, 1]);
        assert_eq!(of(&["a", "a", "a", "b"]), [3, 3, 3, 0]);
        assert!(holders(&["a"], 2).concat().is_empty());
        // The second copy is on a third machine, if there is one.
        let two = holders(&["a", "a", "b", "b", "c"], 2);
        assert_eq!(two, [[2, 4], [3, 4], [4, 0], [0, 4], [1, 2]]);
        assert_eq!(holders(&["a"; 3], 5), [[1, 2], [2, 0], [0, 1]]);
    }

    #[test]
    fn a_rank_sends_and_receives_once_in_a_round() {
        assert_eq!(rounds(&holders(&["a"; 4], 2)).len(), 2);
        let hosts = ["a", "a", "a", "b", "b", "c"];
        let (holders, rounds) = (holders(&hosts, 2), rounds(&holders(&hosts, 2)));
        for round in &rounds {
            let distinct = |of: fn(&(usize, usize)) -> usize| round.iter().map(of).collect::<BTreeSet<_>>().len();
            assert_eq!([distinct(|edge| edge.0), distinct(|edge| edge.1)], [round.len(); 2]);
        }
        let mut all: Vec<(usize, usize)> = rounds.concat();
        let mut due: Vec<(usize, usize)> =
            holders.iter().enumerate().flat_map(|(from, to)| to.iter().map(move |to| (from, *to))).collect();
        all.sort_unstable();
        due.sort_unstable();
        assert_eq!(all, due);
    }
}
