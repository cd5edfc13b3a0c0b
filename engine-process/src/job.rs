//! A call in flight: what the progress thread knows of it, without its element types.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use comm::engine::{Failure, Why};
use numcore::Result;
use parking_lot::{Condvar, Mutex};

use super::{message::Header, transport::Transport};

/// Where a caller finds its result.
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

    /// Fills it with an error, if nothing else has: nobody will any more.
    pub(crate) fn end(&self) {
        let cause = "what joins the processes was ended in this one while the call was in flight".to_string();
        let mut state = self.state.lock();
        if state.is_none() {
            *state = Some(Err(Failure { why: Why::Peer { peer: self.rank, cause }, calls: String::new() }));
            self.changed.notify_all();
        }
    }

    pub(crate) fn is_filled(&self) -> bool {
        self.state.lock().is_some()
    }

    pub(crate) fn is_waited_for(&self) -> bool {
        self.waited.load(Ordering::Relaxed)
    }

    /// Blocks until it is filled, after `wake` has told those who fill it.
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

/// What ranks have told each other before data moves.
#[derive(Debug, Default)]
pub(crate) struct Met {
    /// By rank of the group: the first tag of what goes there, and of what comes from there.
    pub(crate) tags: Vec<(u32, u32)>,
    /// What came with the headers, by rank of the group.
    pub(crate) payloads: Vec<Vec<u8>>,
}

/// How far a job has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Advance {
    Waiting,
    Moved,
    Done,
}

/// What ends a job early.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// A process has died: its rank in the group.
    Dead(usize),
    /// Anything else, in words.
    Other(String),
}

/// The work of one call.
pub(crate) trait Job: Send {
    /// How many tags what this rank sends to each of the others takes.
    fn tags(&self) -> u32;
    /// Elements that go to a rank, where every pair has a length of its own.
    fn elements_for(&self, rank: usize) -> usize;
    /// An error if what a rank says it will send is not what is expected of it.
    fn check(&self, from: usize, header: &Header) -> Option<String>;
    /// All ranks that take part make the same call.
    fn begin(&mut self, met: Met) -> Result<()>;
    /// Tests what is under way, and starts what can be.
    fn advance(&mut self, transport: &mut dyn Transport) -> Result<Advance, Trouble>;
    /// Ranks of the group with which something is under way.
    fn waits_for(&self) -> Vec<usize>;
    /// Whether the caller waits.
    fn is_waited_for(&self) -> bool;
    /// Gives the caller its result.
    fn finish(self: Box<Self>) -> Result<(), Failure>;
    /// Gives the caller the error. Memory that the transport may still read or write is kept for good.
    fn fail(self: Box<Self>, failure: Failure);
}

/// Bytes of every rank, which come with the headers: nothing else moves.
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

    fn begin(&mut self, mut met: Met) -> Result<()> {
        met.payloads[self.rank] = std::mem::take(&mut self.own);
        self.slot.fill(Ok(met.payloads));
        Ok(())
    }

    fn advance(&mut self, _: &mut dyn Transport) -> Result<Advance, Trouble> {
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
