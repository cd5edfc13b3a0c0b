//! Taking up a commit over another world than the one that made it.

use std::collections::{BTreeMap, BTreeSet};

use numcore::{DType, Error, Result, Runtime, Shape, Tensor, TensorMut};

use super::store::{CommitId, Holders, Store};
use crate::{
    checkpoint::{CheckpointReader, Checkpointed, Manifest, RegionId},
    comm::{
        Collectives, Comm, Communicator, all_ok,
        engine::{WireReader, Writer},
    },
    train::CheckpointNotes,
};

/// What a world has taken up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Restored {
    /// Updates up to the commit.
    pub step: u64,
    /// How many ranks made it, in which world.
    pub ranks: usize,
    /// The number of that world.
    pub generation: u64,
    /// What was committed beside the state.
    pub notes: CheckpointNotes,
}

/// Takes up the last commit of which everything is there; none where no rank holds any. `committed` tells whether the run has come to one.
pub(super) fn restore<R: Runtime>(
    store: &Store,
    comm: &Comm<R>,
    committed: bool,
    state: &mut (impl Checkpointed<R> + ?Sized),
    check: impl FnOnce(&CheckpointNotes) -> Result<()>,
) -> Result<Option<Restored>> {
    let told = comm.exchange(&store.told())?;
    let all = all_ok(comm, "restore", Holders::read(&told))?;
    let Some((id, holders)) = all.iter().rev().find(|(_, holders)| holders.lost().is_empty()) else {
        let lost = all.values().next_back().map(Holders::lost);
        return if committed { Err(nothing_to_take_up(lost)) } else { Ok(None) };
    };
    let own = store.0.get(id);
    let (step, manifest) = tell(comm, holders, own.map(|commit| (commit.step, commit.manifest.to_text())))?;
    let (ranks, notes) = (manifest.ranks(), manifest.notes().clone());
    all_ok(comm, "restore", check(&notes))?;
    let mut reader = CheckpointReader::in_memory(manifest);
    let wanted = reader.wanted_by(comm, state)?;
    let needed = reader.needed(&wanted);
    reader.hold(fetch(store, comm, *id, holders, &needed)?);
    let checked = reader.check_needed(&needed);
    reader.restore(comm, state, checked)?;
    Ok(Some(Restored { step, ranks, generation: id.generation, notes }))
}

fn nothing_to_take_up(lost: Option<Vec<usize>>) -> Error {
    let why = match lost {
        Some(lost) => format!(
            "too many ranks were lost at once: nobody holds the pieces of ranks {lost:?} of the last commit, nor those of the one before; have more copies \
             (`Elastic::copies`)"
        ),
        None => "nobody in this world has a commit of the run".into(),
    };
    Error::argument("ElasticWorld::restore", format!("{why}. Start the run again from its last checkpoint"))
}

/// What all ranks are told of the commit by one that holds it.
fn tell<R: Runtime>(comm: &Comm<R>, holders: &Holders, own: Option<(u64, String)>) -> Result<(u64, Manifest)> {
    let teller = holders.teller().unwrap_or(0);
    let mut w = Writer::default();
    if let Some((step, manifest)) = own.filter(|_| comm.rank() == teller) {
        w.u64(step).text(&manifest);
    }
    let told = comm.exchange(&w.finish())?;
    let mut r = WireReader::new(&told[teller]);
    let read = r.u64().and_then(|step| Ok((step, Manifest::from_text(r.text()?)?)));
    all_ok(comm, "restore", read)
}

/// Regions by piece and key.
type Regions = BTreeMap<(usize, String), Vec<u8>>;

/// The needed regions, from the ranks that hold them; each holder gives others what they need of it.
fn fetch<R: Runtime>(
    store: &Store,
    comm: &Comm<R>,
    id: CommitId,
    holders: &Holders,
    needed: &BTreeSet<RegionId>,
) -> Result<Regions> {
    let (n, rt) = (comm.size(), comm.runtime());
    let mut asked: Vec<Vec<&RegionId>> = vec![Vec::new(); n];
    for region in needed {
        if let Some(giver) = holders.giver(region.piece) {
            asked[giver].push(region);
        }
    }
    let told = comm.exchange(&requests(&asked))?;
    let given = given(store, id, comm.rank(), &told);
    let (send, sizes) = all_ok(comm, "restore", given)?;
    let coming: Vec<usize> = asked.iter().map(|regions| regions.iter().map(|region| region.len).sum()).collect();
    let arriving = TensorMut::alloc(rt, Shape::new(&[coming.iter().sum()])?, DType::U8)?;
    let sent = Tensor::from_slice(rt, [send.len()], &send)?;
    let arrived = comm.all_to_all_parts(&sent, &sizes, arriving, &coming)?.wait()?.freeze()?.to_vec::<u8>()?;
    let (mut rest, mut regions) = (&arrived[..], Regions::new());
    for region in asked.into_iter().flatten() {
        let (bytes, after) = rest.split_at(region.len);
        regions.insert((region.piece, region.key.clone()), bytes.to_vec());
        rest = after;
    }
    Ok(regions)
}

/// What a rank asks of each.
fn requests(asked: &[Vec<&RegionId>]) -> Vec<u8> {
    let mut w = Writer::default();
    for regions in asked {
        w.usize(regions.len());
        for region in regions {
            w.usize(region.piece).text(&region.key);
        }
    }
    w.finish()
}

/// The bytes that all ranks ask of rank `rank`, one rank's after another's, and how many are each one's.
fn given(store: &Store, id: CommitId, rank: usize, told: &[Vec<u8>]) -> Result<(Vec<u8>, Vec<usize>)> {
    let (mut send, mut sizes) = (Vec::new(), Vec::new());
    for asked in told {
        let (mut r, before) = (WireReader::new(asked), send.len());
        for giver in 0..told.len() {
            for _ in 0..r.usize()? {
                let (piece, key) = (r.usize()?, r.text()?);
                if giver == rank {
                    let held = store.0.get(&id).and_then(|commit| commit.pieces.get(&piece)?.region(key));
                    send.extend_from_slice(held.ok_or_else(|| Error::state(key, "is not in the piece of a commit"))?);
                }
            }
        }
        sizes.push(send.len() - before);
    }
    Ok((send, sizes))
}
