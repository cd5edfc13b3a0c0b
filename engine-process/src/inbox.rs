//! Headers of calls that other ranks have announced and this rank has not made yet.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use comm::engine::Failure;

use super::message::{GroupId, Header, Key, world_of};

/// Headers that have arrived, and the processes that have left each group. Processes are named by their world ranks.
#[derive(Default)]
pub(crate) struct Inbox {
    headers: BTreeMap<GroupId, BTreeMap<(Key, usize), Header>>,
    left: BTreeMap<GroupId, BTreeSet<usize>>,
    /// Groups that this process has left, each with the members that have not. Later messages about such a group are
    /// dropped.
    outlived_by: BTreeMap<GroupId, BTreeSet<usize>>,
    /// Members of the groups that this process is in.
    members: BTreeMap<GroupId, Arc<[usize]>>,
    /// Failures of worlds that this process has not made yet.
    failures: BTreeMap<u64, Failure>,
}

impl Inbox {
    /// Registers a group that this process is in. The first time, returns the headers that had arrived before.
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
        if !self.outlived_by.contains_key(&header.group) {
            self.headers.entry(header.group.clone()).or_default().insert((header.key, from), header);
        }
    }

    pub(crate) fn take(&mut self, group: &GroupId, key: Key, from: usize) -> Option<Header> {
        self.headers.get_mut(group)?.remove(&(key, from))
    }

    pub(crate) fn leave(&mut self, from: usize, group: GroupId) {
        match self.outlived_by.get_mut(&group) {
            Some(others) => {
                others.remove(&from);
                self.outlived_by.retain(|_, others| !others.is_empty());
            }
            None => _ = self.left.entry(group).or_default().insert(from),
        }
    }

    pub(crate) fn has_left(&self, group: &GroupId, rank: usize) -> bool {
        self.left.get(group).is_some_and(|left| left.contains(&rank))
    }

    /// Forgets a group that this process, `own`, has left. Members that have not left are remembered until their leave
    /// messages arrive, so that their later messages are dropped.
    pub(crate) fn forget(&mut self, group: &GroupId, members: &[usize], own: usize) {
        self.headers.remove(group);
        self.members.remove(group);
        let left = self.left.remove(group).unwrap_or_default();
        let others: BTreeSet<usize> =
            members.iter().copied().filter(|rank| *rank != own && !left.contains(rank)).collect();
        if !others.is_empty() {
            self.outlived_by.insert(group.clone(), others);
        }
    }

    /// Forgets a world and all of its groups.
    pub(crate) fn forget_world(&mut self, world: u64) {
        self.headers.retain(|group, _| world_of(group) != world);
        self.left.retain(|group, _| world_of(group) != world);
        self.members.retain(|group, _| world_of(group) != world);
        self.outlived_by.retain(|group, _| world_of(group) != world);
        self.failures.remove(&world);
    }

    /// The number of entries in all maps.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.headers.len() + self.left.len() + self.members.len() + self.outlived_by.len() + self.failures.len()
    }

    pub(crate) fn failed(&mut self, world: u64, failure: Failure) {
        self.failures.entry(world).or_insert(failure);
    }

    pub(crate) fn failure_of(&mut self, world: u64) -> Option<Failure> {
        self.failures.remove(&world)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_that_others_leave_later_leave_nothing() {
        let mut inbox = Inbox::default();
        for number in 0..10 {
            let group: GroupId = [0, number].into();
            inbox.enter(&group, &[0, 1, 2].into());
            inbox.leave(1, group.clone());
            assert!(inbox.has_left(&group, 1) && !inbox.has_left(&group, 2));
            inbox.forget(&group, &[0, 1, 2], 0);
            assert_eq!(inbox.len(), 1, "one that it waits for");
            inbox.leave(2, group);
            assert_eq!(inbox.len(), 0, "{number}");
        }
    }
}
