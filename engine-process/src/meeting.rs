//! What others have said of calls, until this rank makes them.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use comm::engine::Failure;

use super::message::{GroupId, Header, Key};

/// Headers that have arrived, and who has left which group. Processes are told by their ranks.
#[derive(Default)]
pub(crate) struct Inbox {
    headers: BTreeMap<GroupId, BTreeMap<(Key, usize), Header>>,
    left: BTreeMap<GroupId, BTreeSet<usize>>,
    /// Members of the groups that this process is in.
    members: BTreeMap<GroupId, Arc<[usize]>>,
    /// Failures of worlds that this process has not made yet.
    failures: BTreeMap<u64, Failure>,
}

impl Inbox {
    /// This process is in the group from now on: what has arrived for it before, the first time.
    pub(crate) fn enter(&mut self, group: &GroupId, members: &Arc<[usize]>) -> Vec<(usize, &Header)> {
        if self.members.contains_key(group) {
            return Vec::new();
        }
        self.members.insert(group.clone(), members.clone());
        let early = self.headers.get(group).into_iter().flatten();
        early.map(|((_, from), header)| (*from, header)).collect()
    }

    pub(crate) fn members(&self, group: &GroupId) -> Option<Arc<[usize]>> {
        self.members.get(group).cloned()
    }

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
        self.members.remove(group);
    }

    pub(crate) fn failed(&mut self, world: u64, failure: Failure) {
        self.failures.entry(world).or_insert(failure);
    }

    pub(crate) fn failure_of(&mut self, world: u64) -> Option<Failure> {
        self.failures.remove(&world)
    }
}
