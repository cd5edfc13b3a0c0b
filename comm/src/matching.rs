//! Matching of calls, and membership of groups that are split off: one set of rules for every engine.

use std::panic::Location;

use numcore::{Error, Result, Runtime};

use super::{ByteExchange, Communicator, Fingerprint, Places};

/// The reason for which two calls of one round are not one collective, if they are not. The calls are of two ranks of a
/// group with these world ranks.
pub fn mismatch(
    members: &[usize],
    (first, a): (usize, &Fingerprint),
    (second, b): (usize, &Fingerprint),
    places: Places,
) -> Option<String> {
    let agrees = match b.what.peer() {
        Some(_) => (b.dtype, &b.parts, b.header) == (a.dtype, &a.parts, a.header),
        None => b.agrees(a, places),
    };
    if agrees {
        return None;
    }
    let hint = match b.agrees(a, Places::Any) {
        true => "; a call must be made from one place in the program on all ranks",
        false if a.header != b.header => "; one of them moves its tensors over another communicator of these ranks",
        false => "",
    };
    let (first, second) = (members[first], members[second]);
    Some(format!("rank {first} called {}, rank {second} {}{hint}", a.in_world(members), b.in_world(members)))
}

/// A rank's place in a group that is split off.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SplitPlace {
    /// The color that the group's ranks have given.
    pub color: usize,
    /// This rank in the group.
    pub rank: usize,
    /// The world ranks of the group, in its order.
    pub members: Vec<usize>,
}

/// Exchanges a split with the other ranks, and returns this rank's place; none if it stays out.
pub fn split_place<R: Runtime>(
    comm: &impl Communicator<R>,
    color: Option<usize>,
    key: usize,
    at: &'static Location<'static>,
) -> Result<Option<SplitPlace>> {
    let own: Vec<u8> = color.iter().flat_map(|&color| [color, key]).flat_map(usize::to_le_bytes).collect();
    let all = comm.exchange_bytes(ByteExchange::new(&own, at))?;
    let Some(color) = color else { return Ok(None) };
    let ranks = ranks_of(&all, color);
    let rank = ranks.iter().position(|&rank| rank == comm.rank()).ok_or_else(|| {
        Error::internal("split", "the exchange of colors lost this rank's own").on_rank(comm.world_rank())
    })?;
    let members = ranks.into_iter().map(|rank| comm.members()[rank]).collect();
    Ok(Some(SplitPlace { color, rank, members }))
}

/// The ranks of a color, in the order of their keys, from the bytes of all ranks: none, or color and key.
fn ranks_of(all: &[Vec<u8>], color: usize) -> Vec<usize> {
    let key = |rank: &usize| {
        let (of, key) = all[*rank].split_first_chunk()?;
        (usize::from_le_bytes(*of) == color).then_some(usize::from_le_bytes(key.try_into().ok()?))
    };
    let mut ranks: Vec<usize> = (0..all.len()).filter(|rank| key(rank).is_some()).collect();
    ranks.sort_by_key(key);
    ranks
}

#[cfg(test)]
mod tests {
    use numcore::DType;

    use super::super::{Collective, Place, ReduceOp};
    use super::*;

    #[test]
    fn a_header_does_not_meet_a_call_that_moves_memory() {
        for what in [Collective::AllReduce(ReduceOp::Sum), Collective::Barrier, Collective::Send { to: 1 }] {
            let at = Place { file: "a.rs".into(), line: 1, column: 1 };
            let call =
                Fingerprint { what, dtype: DType::F32, in_place: true, header: false, parts: [4].into(), of: None, at };
            let header = Fingerprint { header: true, ..call.clone() };
            let outcome = |a, b| mismatch(&[0, 1], (0, a), (1, b), Places::Any);
            assert_eq!((outcome(&call, &call), outcome(&header, &header)), (None, None), "{call}");
            let why = outcome(&call, &header).unwrap_or_default();
            assert!(why.contains("over another communicator"), "{call}: {why}");
        }
    }
}
