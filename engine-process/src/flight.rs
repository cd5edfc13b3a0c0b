//! A call on this rank from its start to its end: the ranks that have joined it, and the deadline of the others.

use std::{ops::Range, sync::Arc, time::Instant};

use comm::{
    Fingerprint,
    engine::{LEFT, Why, disagreement},
};

use super::{
    job::{Job, Met},
    meeting::Inbox,
    message::{GroupId, Header, Key},
    progress::GRACE,
    world::World,
};

pub(crate) struct Flight {
    pub(crate) world: Arc<World>,
    pub(crate) group: GroupId,
    /// The world ranks of the group; `rank` is this rank's index in them.
    pub(crate) members: Arc<[usize]>,
    pub(crate) rank: usize,
    pub(crate) key: Key,
    pub(crate) call: Fingerprint,
    pub(crate) payload: Vec<u8>,
    /// Ranks of the group that take part in the call beside this one.
    pub(crate) peers: Vec<usize>,
    /// Ranks of the group whose header has not arrived yet.
    pub(crate) absent: Vec<usize>,
    pub(crate) met: Met,
    /// The first tag of the messages to each rank of the group.
    pub(crate) tags: Vec<u32>,
    pub(crate) begun: bool,
    pub(crate) since: Instant,
    pub(crate) moved: Instant,
    /// The time at which an absent rank was first known to have left the group.
    pub(crate) deserted: Option<Instant>,
    pub(crate) job: Box<dyn Job>,
}

/// The progress of gathering the headers of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Meeting {
    Waiting,
    Moved,
    Complete,
}

impl Flight {
    pub(crate) fn world_rank(&self) -> usize {
        self.members[self.rank]
    }

    /// The range of tags for this call's messages to a process, if that process takes part.
    pub(crate) fn tags_to(&self, process: usize) -> Option<Range<u32>> {
        let to = self.peers.iter().copied().find(|&to| self.members[to] == process)?;
        let first = self.tags[to];
        Some(first..first + self.job.tags())
    }

    /// Takes the headers that have arrived, compares them with this rank's call, and starts the job once all are there.
    pub(crate) fn meet(&mut self, inbox: &mut Inbox) -> Result<Meeting, Why> {
        if self.begun {
            return Ok(Meeting::Complete);
        }
        let before = self.absent.len();
        for from in std::mem::take(&mut self.absent) {
            match inbox.take(&self.group, self.key, self.members[from]) {
                Some(header) => self.compare(from, header)?,
                None => self.absent.push(from),
            }
        }
        if self.absent.is_empty() {
            self.begun = true;
            self.moved = Instant::now();
            let peer = self.world_rank();
            self.job.begin(std::mem::take(&mut self.met)).map_err(|e| Why::Peer { peer, cause: e.to_string() })?;
            return Ok(Meeting::Complete);
        }
        self.check_deserted(inbox)?;
        Ok(if self.absent.len() < before { Meeting::Moved } else { Meeting::Waiting })
    }

    fn compare(&mut self, from: usize, header: Header) -> Result<(), Why> {
        let (own, other) = ((self.rank, &self.call), (from, &header.call));
        let (first, second) = if from < self.rank { (other, own) } else { (own, other) };
        if let Some(why) = disagreement(&self.members, first, second, self.world.places) {
            return Err(Why::Mismatch { why });
        }
        if let Some(why) = self.job.check(from, &header) {
            return Err(Why::Mismatch { why });
        }
        self.met.tags[from].1 = header.tag;
        self.met.payloads[from] = header.payload;
        Ok(())
    }

    /// Fails the call if an absent rank has left the group, since its header will never arrive. The error waits for
    /// [`GRACE`], because a failed rank's own error message may still be in flight.
    fn check_deserted(&mut self, inbox: &Inbox) -> Result<(), Why> {
        let lost = self.absent.iter().map(|&r| self.members[r]).find(|&rank| inbox.has_left(&self.group, rank));
        let Some(peer) = lost else { return Ok(()) };
        if self.deserted.get_or_insert_with(Instant::now).elapsed() < GRACE {
            return Ok(());
        }
        let call = self.call.in_world(&self.members);
        Err(Why::Peer { peer, cause: format!("{LEFT} while rank {} called {call}", self.world_rank()) })
    }

    /// Returns an error if the caller has waited longer than the timeout. The error names the ranks whose header is
    /// absent, or, once the call has begun, the ranks with unfinished transfers.
    pub(crate) fn check_deadline(&self) -> Result<(), Why> {
        let since = if self.begun { self.since.max(self.moved) } else { self.since };
        let waited = since.elapsed();
        if waited < self.world.timeout || !self.job.is_waited_for() {
            return Ok(());
        }
        let missing = if self.begun { self.job.waits_for() } else { self.absent.clone() };
        let missing = missing.into_iter().map(|rank| self.members[rank]).collect();
        Err(Why::Timeout { waited, missing, called: self.begun })
    }
}
