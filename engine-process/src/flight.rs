//! A call on this rank from its start to its end: the ranks that have joined it, and the deadline of the others.

use std::{
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use comm::{
    Fingerprint,
    engine::{FailureReason, LEFT, mismatch},
};

use super::{
    inbox::Inbox,
    job::{CallHeaders, Job},
    message::{GroupId, Header, Key},
    world::World,
};

/// The time allowed for the error message of a rank that has left, since it may have failed.
const GRACE: Duration = Duration::from_millis(100);

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
    pub(crate) headers: CallHeaders,
    /// The tags of the messages to each rank of the group.
    pub(crate) tags: Vec<Range<u32>>,
    pub(crate) begun: bool,
    pub(crate) since: Instant,
    /// The time that the call may take.
    pub(crate) timeout: Duration,
    pub(crate) moved: Instant,
    /// The time at which a rank that is awaited was first known to have left the group.
    pub(crate) left_since: Option<Instant>,
    pub(crate) job: Box<dyn Job>,
}

/// The progress of gathering the headers of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Matching {
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
        Some(self.tags[to].clone())
    }

    /// Takes the headers that have arrived, compares them with this rank's call, and starts the job once all are there.
    pub(crate) fn match_headers(&mut self, inbox: &mut Inbox) -> Result<Matching, FailureReason> {
        if self.begun {
            return Ok(Matching::Complete);
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
            self.job
                .begin(std::mem::take(&mut self.headers))
                .map_err(|e| FailureReason::Peer { peer, cause: e.to_string() })?;
            return Ok(Matching::Complete);
        }
        self.check_left(inbox)?;
        Ok(if self.absent.len() < before { Matching::Moved } else { Matching::Waiting })
    }

    fn compare(&mut self, from: usize, header: Header) -> Result<(), FailureReason> {
        let (own, other) = ((self.rank, &self.call), (from, &header.call));
        let (first, second) = if from < self.rank { (other, own) } else { (own, other) };
        if let Some(why) = mismatch(&self.members, first, second, self.world.places) {
            return Err(FailureReason::Mismatch { why });
        }
        if let Some(why) = self.job.check(from, &header) {
            return Err(FailureReason::Mismatch { why });
        }
        if header.tag.checked_add(self.job.tags()).is_none() {
            let why = format!("rank {} numbers its messages from {} on", self.members[from], header.tag);
            return Err(FailureReason::Mismatch { why });
        }
        self.headers.tags[from].1 = header.tag;
        self.headers.payloads[from] = header.payload;
        Ok(())
    }

    /// Fails the call if an absent rank has left the group, since its header will never arrive.
    fn check_left(&mut self, inbox: &Inbox) -> Result<(), FailureReason> {
        let lost = self.absent.iter().map(|&r| self.members[r]).find(|&rank| inbox.has_left(&self.group, rank));
        self.check_lost(lost)
    }

    /// Fails the call, which has begun, if a process with unfinished transfers has come to its end. It had given the
    /// call up by then.
    pub(crate) fn check_gone(&mut self, gone: &[bool]) -> Result<(), FailureReason> {
        if !gone.contains(&true) {
            return Ok(());
        }
        let lost = self.job.waits_for().into_iter().map(|r| self.members[r]).find(|&rank| gone[rank]);
        self.check_lost(lost)
    }

    /// Fails the call for want of a process. The error waits for [`GRACE`] without a move, since last messages or the
    /// error message of that process may be in flight.
    fn check_lost(&mut self, lost: Option<usize>) -> Result<(), FailureReason> {
        let Some(peer) = lost else { return Ok(()) };
        if self.left_since.get_or_insert_with(Instant::now).max(&mut self.moved).elapsed() < GRACE {
            return Ok(());
        }
        let call = self.call.in_world(&self.members);
        Err(FailureReason::Peer { peer, cause: format!("{LEFT} while rank {} called {call}", self.world_rank()) })
    }

    /// The time since the call began, or since its last move.
    pub(crate) fn waited(&self) -> Duration {
        if self.begun { self.since.max(self.moved).elapsed() } else { self.since.elapsed() }
    }

    /// Returns an error if the caller has waited longer than the timeout. The error names the ranks whose header is
    /// absent, or, once the call has begun, the ranks with unfinished transfers.
    pub(crate) fn check_deadline(&self) -> Result<(), FailureReason> {
        let waited = self.waited();
        if waited < self.timeout || !self.job.is_waited_for() {
            return Ok(());
        }
        let missing = if self.begun { self.job.waits_for() } else { self.absent.clone() };
        let missing = missing.into_iter().map(|rank| self.members[rank]).collect();
        Err(FailureReason::Timeout { waited, missing, called: self.begun })
    }
}
