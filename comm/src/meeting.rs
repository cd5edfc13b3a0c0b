//! Whether calls can meet, and who belongs to a group that is split off: the same rules for every engine.

use super::{Fingerprint, Places};

/// Why two calls that meet are not one collective, if they are not: of two ranks of a group with these world ranks.
pub fn disagreement(
    members: &[usize],
    (first, a): (usize, &Fingerprint),
    (second, b): (usize, &Fingerprint),
    places: Places,
) -> Option<String> {
    let agrees = match b.what.peer() {
        Some(_) => (b.dtype, &b.parts) == (a.dtype, &a.parts),
        None => b.agrees(a, places),
    };
    if agrees {
        return None;
    }
    let hint = match b.agrees(a, Places::Any) {
        true => "; a call must be made from one place in the program on all ranks",
        false => "",
    };
    let (first, second) = (members[first], members[second]);
    Some(format!("rank {first} called {}, rank {second} {}{hint}", a.in_world(members), b.in_world(members)))
}

/// What a rank tells the others of a split. One that stays out tells nothing.
pub fn split_bytes(color: Option<usize>, key: usize) -> Vec<u8> {
    color.iter().flat_map(|&color| [color, key]).flat_map(usize::to_le_bytes).collect()
}

/// The ranks of the group of this color, in its order, from what all ranks have told.
pub fn split_ranks(all: &[Vec<u8>], color: usize) -> Vec<usize> {
    let key = |rank: &usize| {
        let (of, key) = all[*rank].split_first_chunk()?;
        (usize::from_le_bytes(*of) == color).then_some(usize::from_le_bytes(key.try_into().ok()?))
    };
    let mut ranks: Vec<usize> = (0..all.len()).filter(|rank| key(rank).is_some()).collect();
    ranks.sort_by_key(key);
    ranks
}
