//! The members of a communicator.

use std::{fmt, sync::Arc};

/// A group of ranks, seen from one of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    name: Arc<str>,
    rank: usize,
    members: Arc<[usize]>,
}

impl Group {
    /// The world: ranks `0..size`, seen from `rank`.
    pub fn world(rank: usize, size: usize) -> Self {
        Group { name: "world".into(), rank, members: (0..size).collect() }
    }

    /// Makes the group called `name` of these world ranks, seen from the one at index `rank`.
    pub fn new(name: &str, rank: usize, members: Arc<[usize]>) -> Self {
        Group { name: name.into(), rank, members }
    }

    /// The name in messages: `world`, or the split that made the group.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// This rank's index in the group.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.members.len()
    }

    /// The world ranks of the group's ranks, in the group's order.
    pub fn members(&self) -> &Arc<[usize]> {
        &self.members
    }

    /// This rank's rank in the world.
    pub fn world_rank(&self) -> usize {
        self.members.get(self.rank).copied().unwrap_or(self.rank)
    }
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of ranks {:?}", self.name, self.members)
    }
}
