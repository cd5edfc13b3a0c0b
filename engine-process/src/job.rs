//! A call in flight as the progress thread knows it, without its element types.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use comm::engine::{Failure, FailureReason};
use numcore::Result;
use parking_lot::{Condvar, Mutex};

use super::{message::Header, transport::Transport};

/// The place in which a caller finds the result of its call.
pub(crate) struct Slot<T> {
    /// The caller's world rank.
    rank: usize,
    state: Mutex<Option<Result<T, Failure>>>,
    changed: Condvar,
    waited: AtomicBool,
}

impl<T> Slot<T> {
    pub(crate) fn new(rank: usize) -> Arc<Self> {
        Arc::new(Slot { rank, state: Mutex::new(None), changed: Condvar::new(), waited: AtomicBool::new(false) })
    }

    pub(crate) fn fill(&self, result: Result<T, Failure>) {
        *self.state.lock() = Some(result);
        self.changed.notify_all();
    }

    /// Stores an error if there is no result yet, since none will come any more.
    pub(crate) fn end(&self) {
        let cause = "the transport of this process was closed while the call was in flight".to_string();
        let mut state = self.state.lock();
        if state.is_none() {
            *state =
                Some(Err(Failure { reason: FailureReason::Peer { peer: self.rank, cause }, calls: String::new() }));
            self.changed.notify_all();
        }
    }

    pub(crate) fn is_filled(&self) -> bool {
        self.state.lock().is_some()
    }

    pub(crate) fn is_waited_for(&self) -> bool {
        self.waited.load(Ordering::Relaxed)
    }

    /// Blocks until there is a result. Calls `wake` first if there is none, so that the progress thread looks at once.
    pub(crate) fn wait(&self, wake: impl FnOnce()) -> Result<T, Failure> {
        self.waited.store(true, Ordering::Relaxed);
        if !self.is_filled() {
            wake();
        }
        let mut state = self.state.lock();
        loop {
            match state.take() {
                Some(result) => return result,
                None => self.changed.wait(&mut state),
            }
        }
    }
}

/// The contents of all headers of a call, which ranks exchange before data moves.
#[derive(Debug, Default)]
pub(crate) struct CallHeaders {
    /// For each rank of the group, the first tags of messages to it and from it.
    pub(crate) tags: Vec<(u32, u32)>,
    /// The payloads of the headers, by rank of the group.
    pub(crate) payloads: Vec<Vec<u8>>,
}

/// The progress of a job in one turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Advance {
    Waiting,
    Moved,
    Done,
}

/// The reason that a job ends early.
#[derive(Debug)]
pub(crate) enum JobError {
    /// A process has died: its rank in the group.
    Dead(usize),
    /// Any other reason, in words.
    Other(String),
}

/// The work of one call, whose element types are hidden.
pub(crate) trait Job: Send {
    /// The number of tags that this rank's messages to any one rank take.
    fn tags(&self) -> u32;
    /// The number of elements that go to a rank, for collectives in which every pair of ranks has its own length;
    /// otherwise 0.
    fn elements_for(&self, rank: usize) -> usize;
    /// Returns an error if the elements announced in a rank's header differ from those this rank expects of it.
    fn check(&self, from: usize, header: &Header) -> Option<String>;
    /// Starts the job, after the headers have shown that all participants make the same call.
    fn begin(&mut self, headers: CallHeaders) -> Result<()>;
    /// Tests the transfers under way, and starts those that have become possible.
    fn advance(&mut self, transport: &mut dyn Transport) -> Result<Advance, JobError>;
    /// Ranks of the group with unfinished transfers.
    fn waits_for(&self) -> Vec<usize>;
    /// Tells whether the caller is blocked on the result.
    fn is_waited_for(&self) -> bool;
    /// Stores the result for the caller.
    fn finish(self: Box<Self>) -> Result<(), Failure>;
    /// Stores the error for the caller. Memory that the transport may still read or write is leaked on purpose.
    fn fail(self: Box<Self>, failure: Failure);
}

/// An exchange of bytes, which travel in the headers; no other data moves.
pub(crate) struct Exchange {
    pub(crate) rank: usize,
    pub(crate) own: Vec<u8>,
    pub(crate) slot: Arc<Slot<Vec<Vec<u8>>>>,
}

impl Job for Exchange {
    fn tags(&self) -> u32 {
        0
    }

    fn elements_for(&self, _: usize) -> usize {
        0
    }

    fn check(&self, _: usize, _: &Header) -> Option<String> {
        None
    }

    fn begin(&mut self, mut headers: CallHeaders) -> Result<()> {
        headers.payloads[self.rank] = std::mem::take(&mut self.own);
        self.slot.fill(Ok(headers.payloads));
        Ok(())
    }

    fn advance(&mut self, _: &mut dyn Transport) -> Result<Advance, JobError> {
        Ok(Advance::Done)
    }

    fn waits_for(&self) -> Vec<usize> {
        Vec::new()
    }

    fn is_waited_for(&self) -> bool {
        self.slot.is_waited_for()
    }

    fn finish(self: Box<Self>) -> Result<(), Failure> {
        Ok(())
    }

    fn fail(self: Box<Self>, failure: Failure) {
        if !self.slot.is_filled() {
            self.slot.fill(Err(failure));
        }
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        self.slot.end();
    }
}
