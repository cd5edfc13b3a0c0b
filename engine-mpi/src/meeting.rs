//! What others have said of calls, until this rank makes them.

use std::collections::{BTreeMap, BTreeSet};

use comm::engine::Failure;

use crate::message::{GroupId, Header, Key};

/// Headers that have arrived, and who has left which group. Processes are told by their ranks.
#[derive(Default)]
pub(crate) struct Inbox {
    headers: BTreeMap<GroupId, BTreeMap<(Key, usize), Header>>,
    left: BTreeMap<GroupId, BTreeSet<usize>>,
    /// Failures of worlds that this process has not made yet.
    failures: BTreeMap<u64, Failure>,
}

impl Inbox {
    pub(crate) fn put(&mut self, from: usize, header: Header) {
        self.headers.entry(header.group.clone()).or_default().insert((header.key, from), header);
    }

    pub(crate) fn take(&mut self, group: &GroupId, key: Key, from: usize) -> Option<Header> {
        self.headers.get_mut(group)?.remove(&(key, from))
    }

    pub(crate) fn leave(&mut self, from: usize, group: GroupId) {
        self.left.entry(group).or_default().insert(from);
    }

    pub(crate) fn has_left(&self, group: &GroupId, rank: usize) -> bool {
        self.left.get(group).is_some_and(|left| left.contains(&rank))
    }

    /// This process has left the group.
    pub(crate) fn forget(&mut self, group: &GroupId) {
        self.headers.remove(group);
        self.left.remove(group);
    }

    pub(crate) fn failed(&mut self, world: u64, failure: Failure) {
        self.failures.entry(world).or_insert(failure);
    }

    pub(crate) fn failure_of(&mut self, world: u64) -> Option<Failure> {
        self.failures.remove(&world)
    }
}
