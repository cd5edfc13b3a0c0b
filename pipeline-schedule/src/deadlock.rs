//! The error for a schedule that cannot end.

use numcore::Error;

use super::replay::BlockedRank;

/// An error that names the ranks which wait for each other in a cycle, or else the one that waits for something
/// impossible.
pub(super) fn deadlock_error(op: &'static str, stuck: &[BlockedRank]) -> Error {
    let lines: Vec<String> = wait_cycle(stuck)
        .iter()
        .map(|s| format!("rank {} at position {}, {}, waits for {}", s.rank, s.position, s.action, s.waits))
        .collect();
    Error::schedule(op, format!("deadlock: {}", lines.join("; ")))
}

/// Follows waits from rank to rank, to a cycle or to a rank that waits for no rank.
fn wait_cycle(stuck: &[BlockedRank]) -> Vec<&BlockedRank> {
    let next = |s: &BlockedRank| stuck.iter().find(|other| Some(other.rank) == s.on);
    let mut walk: Vec<&BlockedRank> = stuck.first().into_iter().collect();
    while let Some(follower) = walk.last().and_then(|last| next(last)) {
        if let Some(start) = walk.iter().position(|seen| seen.rank == follower.rank) {
            return walk.split_off(start);
        }
        walk.push(follower);
    }
    walk.split_off(walk.len().saturating_sub(1))
}
