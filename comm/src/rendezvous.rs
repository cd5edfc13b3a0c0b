//! The forming of worlds of ranks, again and again while ranks are lost and others come.

use std::time::Duration;

use numcore::{Error, Result, Runtime};

use super::Comm;

/// Forms worlds of the ranks that are present. A communicator is dead after its first error, and the remaining ranks
/// form a new world.
///
/// Each rank has its own value, its side of the rendezvous.
pub trait Rendezvous<R: Runtime>: Send {
    /// Blocks until a world is formed that this rank is in. Every rank that can go on calls it, each for itself.
    ///
    /// # Errors
    /// An error if the ranks that came cannot form a world. Either they are fewer than a [`Quorum`] requires, or no
    /// rank of the last world is left. All of them get the error; a newcomer that does not fit the others gets one
    /// alone.
    fn next_world(&mut self) -> Result<Membership<R>>;

    /// The number of waiting ranks that are in no world yet. It may differ between ranks.
    fn newcomers(&self) -> usize {
        0
    }

    /// Notes that the run has committed: a later world without a commit is an error, and does not start the run from
    /// its beginning.
    fn committed(&mut self) {}
}

/// A world that was formed, as one of its ranks has it.
#[derive(Debug)]
pub struct Membership<R: Runtime> {
    /// The communicator of the world.
    pub comm: Comm<R>,
    /// The number of the world, from 0: later ones have higher numbers.
    pub generation: u64,
    /// True if a rank of an earlier world has [committed](Rendezvous::committed).
    pub committed: bool,
    /// The number of ranks that were not in the previous world; 0 in the first world.
    pub newcomers: usize,
}

/// The condition under which present ranks may form a world.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quorum {
    /// The fewest ranks of a world, newcomers among them.
    pub min_ranks: usize,
    /// True if a world needs more than half of the previous world's ranks, so one of two cannot go on. It is for ranks
    /// that may be cut off from each other and would each go on by themselves. The ranks of one process never are.
    pub majority: bool,
    /// The time that present ranks wait for ranks of the last world that have not left: a rank that hangs is given up
    /// after that.
    pub join_timeout: Duration,
}

impl Default for Quorum {
    fn default() -> Self {
        Quorum { min_ranks: 1, majority: false, join_timeout: Duration::from_secs(60) }
    }
}

impl Quorum {
    /// The reason for which `ranks` ranks, `back` of which were among the `before` ranks of the last world, may not
    /// form a world. It is `None` if they may.
    pub fn missing(&self, ranks: usize, back: usize, before: usize) -> Option<String> {
        if self.majority && 2 * back <= before {
            return Some(format!("{back} of the last world's {before} ranks are no majority"));
        }
        (ranks < self.min_ranks)
            .then(|| format!("{ranks} ranks are present, and a world has at least {} (`min_ranks`)", self.min_ranks))
    }

    /// The error of ranks that may not form a world.
    pub fn refused(why: &str) -> Error {
        Error::argument("Rendezvous::next_world", format!("{why}: start the run again from its last checkpoint"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_majority_forbids_going_on_with_one_of_two() {
        let any = Quorum::default();
        assert_eq!(any.missing(1, 1, 2), None);
        let most = Quorum { majority: true, ..Quorum::default() };
        assert!(most.missing(1, 1, 2).unwrap().contains("no majority"));
        // Newcomers do not count for the majority.
        assert!(most.missing(5, 1, 2).is_some());
        assert_eq!(most.missing(2, 2, 3), None);
        // All ranks of the last world are a majority, too.
        assert_eq!(most.missing(2, 2, 2), None);
        let two = Quorum { min_ranks: 2, ..Quorum::default() };
        assert!(two.missing(1, 1, 3).unwrap().contains("at least 2"));
        assert_eq!(two.missing(2, 1, 3), None);
    }
}
