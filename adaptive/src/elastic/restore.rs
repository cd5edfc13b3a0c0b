//! Restoring a commit over another world than the one that made it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use numcore::{DType, Error, Result, Runtime, Shape, Tensor, TensorMut};

use super::store::{CommitId, Holders, Store};
use distributed::{
    checkpoint::{Checkpointed, Manifest, RegionId},
    comm::{
        Collectives, Comm, Communicator, all_ok,
        engine::{WireReader, Writer},
    },
    train::CheckpointNotes,
};

/// The commit that a world has restored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Restored {
    /// The number of updates up to the commit.
    pub step: u64,
    /// The number of ranks that made it.
    pub ranks: usize,
    /// The generation of the world that made it.
    pub generation: u64,
    /// The notes of the commit.
    pub notes: CheckpointNotes,
}

/// Restores the last commit of which all pieces are present, in messages of `message` bytes; none if no rank holds any.
/// `committed` tells whether the run has committed before.
pub(super) fn restore<R: Runtime>(
    store: &Store,
    (comm, message): (&Comm<R>, usize),
    committed: bool,
    state: &mut (impl Checkpointed<R> + ?Sized),
    check: impl FnOnce(&CheckpointNotes) -> Result<()>,
) -> Result<Option<Restored>> {
    let inventories = comm.exchange(&store.inventory())?;
    let all = all_ok(comm, "restore", Holders::read(&inventories))?;
    let Some((id, holders)) = all.iter().rev().find(|(_, holders)| holders.lost().is_empty()) else {
        let lost = all.values().next_back().map(Holders::lost);
        return if committed { Err(nothing_to_restore(lost)) } else { Ok(None) };
    };
    let own = store.0.get(id);
    let (step, manifest) = broadcast_commit(comm, holders, own.map(|commit| (commit.step, commit.manifest.to_text())))?;
    let (ranks, notes) = (manifest.ranks(), manifest.notes().clone());
    all_ok(comm, "restore", check(&notes))?;
    manifest.restore(comm, state, |needed| fetch(store, comm, *id, holders, needed, message))?;
    Ok(Some(Restored { step, ranks, generation: id.generation, notes }))
}

fn nothing_to_restore(lost: Option<Vec<usize>>) -> Error {
    let why = match lost {
        Some(lost) => format!(
            "too many ranks were lost at once: no rank holds the pieces of ranks {lost:?} of the last commit, nor those of the one before; have more copies \
             (`Elastic::copies`)"
        ),
        None => "no rank of this world has a commit of the run".into(),
    };
    Error::argument("ElasticWorld::restore", format!("{why}. Start the run again from its last checkpoint"))
}

/// Broadcasts step and manifest of the commit from a rank that holds it.
fn broadcast_commit<R: Runtime>(
    comm: &Comm<R>,
    holders: &Holders,
    own: Option<(u64, String)>,
) -> Result<(u64, Manifest)> {
    let source = holders.first_holder().unwrap_or(0);
    let mut w = Writer::default();
    if let Some((step, manifest)) = own.filter(|_| comm.rank() == source) {
        w.u64(step).text(&manifest);
    }
    let commits = comm.exchange(&w.finish())?;
    let mut r = WireReader::new(&commits[source]);
    let read = r.u64().and_then(|step| Ok((step, Manifest::from_text(r.text()?)?)));
    all_ok(comm, "restore", read)
}

/// The bytes of regions, by piece and key.
type Regions = BTreeMap<(usize, String), Vec<u8>>;

/// Fetches the needed regions from their holders; each holder sends the other ranks the regions they request.
fn fetch<R: Runtime>(
    store: &Store,
    comm: &Comm<R>,
    id: CommitId,
    holders: &Holders,
    needed: &BTreeSet<RegionId>,
    message: usize,
) -> Result<Regions> {
    let mut requested: Vec<Vec<&RegionId>> = vec![Vec::new(); comm.size()];
    for region in needed {
        if let Some(sender) = holders.sender(region.piece) {
            requested[sender].push(region);
        }
    }
    let received = comm.exchange(&requests(&requested))?;
    let outgoing = all_ok(comm, "restore", requested_bytes(store, id, comm.rank(), &received))?;
    let incoming: Vec<usize> = requested.iter().map(|regions| regions.iter().map(|region| region.len).sum()).collect();
    let arrived = exchanged(comm, outgoing, &incoming, message)?;
    let mut all = Regions::new();
    for (mut bytes, regions) in arrived.into_iter().zip(requested) {
        for region in regions.into_iter().rev() {
            let own = bytes.split_off(bytes.len() - region.len);
            all.insert((region.piece, region.key.clone()), own);
        }
    }
    Ok(all)
}

/// Exchanges the outgoing bytes of all ranks in rounds: a device needs memory for `message` bytes that leave, and as
/// many that arrive.
fn exchanged<R: Runtime>(
    comm: &Comm<R>,
    mut outgoing: Vec<OutgoingBytes<'_>>,
    incoming: &[usize],
    message: usize,
) -> Result<Vec<Vec<u8>>> {
    let (rt, share) = (comm.runtime(), (message / comm.size()).max(1));
    let most = outgoing.iter().map(OutgoingBytes::len).chain(incoming.iter().copied()).max().unwrap_or(0);
    let rounds = comm.exchange_equal(most.div_ceil(share).to_le_bytes())?.into_iter().map(usize::from_le_bytes).max();
    let mut arrived: Vec<Vec<u8>> = incoming.iter().map(|len| Vec::with_capacity(*len)).collect();
    for _ in 0..rounds.unwrap_or(0) {
        let mut send = Vec::new();
        let sizes: Vec<usize> = outgoing.iter_mut().map(|to| to.take(share, &mut send)).collect();
        let due: Vec<usize> = incoming.iter().zip(&arrived).map(|(all, here)| share.min(all - here.len())).collect();
        let into = TensorMut::alloc(rt, Shape::new(&[due.iter().sum()])?, DType::U8)?;
        let sent = Tensor::from_slice(rt, [send.len()], &send)?;
        let bytes = comm.all_to_all_parts(&sent, &sizes, into, &due)?.wait()?.freeze()?.to_vec::<u8>()?;
        let mut rest = &bytes[..];
        for (here, due) in arrived.iter_mut().zip(due) {
            let (own, after) = rest.split_at(due);
            here.extend_from_slice(own);
            rest = after;
        }
    }
    Ok(arrived)
}

/// The requests of a rank for regions, by holder.
fn requests(requested: &[Vec<&RegionId>]) -> Vec<u8> {
    let mut w = Writer::default();
    for regions in requested {
        w.usize(regions.len());
        for region in regions {
            w.usize(region.piece).text(&region.key);
        }
    }
    w.finish()
}

/// The bytes of this rank's store that leave for another rank.
#[derive(Default)]
struct OutgoingBytes<'a>(VecDeque<&'a [u8]>);

impl OutgoingBytes<'_> {
    fn len(&self) -> usize {
        self.0.iter().map(|bytes| bytes.len()).sum()
    }

    /// Moves the next bytes, at most `most`, to `to`; returns their number.
    fn take(&mut self, most: usize, to: &mut Vec<u8>) -> usize {
        let mut taken = 0;
        while taken < most
            && let Some(first) = self.0.front_mut()
        {
            let (own, rest) = first.split_at(first.len().min(most - taken));
            to.extend_from_slice(own);
            (taken, *first) = (taken + own.len(), rest);
            if rest.is_empty() {
                self.0.pop_front();
            }
        }
        taken
    }
}

/// The bytes that each rank requests from rank `rank`.
fn requested_bytes<'a>(
    store: &'a Store,
    id: CommitId,
    rank: usize,
    requests: &[Vec<u8>],
) -> Result<Vec<OutgoingBytes<'a>>> {
    let mut all = Vec::with_capacity(requests.len());
    for request in requests {
        let (mut r, mut outgoing) = (WireReader::new(request), OutgoingBytes::default());
        for sender in 0..requests.len() {
            for _ in 0..r.usize()? {
                let (piece, key) = (r.usize()?, r.text()?);
                if sender == rank {
                    let held = store.0.get(&id).and_then(|commit| commit.pieces.get(&piece)?.region(key));
                    outgoing.0.push_back(held.ok_or_else(|| Error::state(key, "is not in the piece of a commit"))?);
                }
            }
        }
        all.push(outgoing);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use distributed::comm::{CountingCommunicator, Ranks};
    use runtime_cpu::Cpu;

    use super::*;

    #[test]
    fn messages_are_no_larger_than_the_limit() {
        let calls = Ranks::new(2).run(
            |_| Ok(Cpu::with_threads(1)),
            |comm| {
                let counted = Arc::new(CountingCommunicator::new(comm.clone()));
                let (own, other) = (vec![comm.rank() as u8; 1000], 1 - comm.rank());
                let mut outgoing: Vec<OutgoingBytes> = (0..2).map(|_| OutgoingBytes::default()).collect();
                outgoing[other].0.push_back(&own);
                let mut incoming = [0; 2];
                incoming[other] = own.len();
                let arrived = exchanged(&(counted.clone() as Comm<Cpu>), outgoing, &incoming, 64)?;
                assert_eq!(arrived[other], vec![other as u8; own.len()]);
                Ok(counted.of("all_to_all").calls)
            },
        );
        // Half of a message is for each rank.
        assert_eq!(calls.unwrap(), [1000u64.div_ceil(32); 2]);
    }
}
