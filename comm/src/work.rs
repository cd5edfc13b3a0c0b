//! A collective in flight.

use numcore::{Error, Result, Within};

/// An engine's handle of a call in flight. Dropping it does not stop the call: memory in flight is the engine's until
/// it is done.
pub trait Pending<T>: Send + Sync {
    /// Blocks until the result can be used by the caller's queue.
    fn wait(self: Box<Self>) -> Result<T>;
    /// Blocks until the result is there and no error can follow. It is [`wait`](Pending::wait) for engines whose `wait`
    /// does both.
    fn done(self: Box<Self>) -> Result<T> {
        self.wait()
    }
    /// Tells whether [`wait`](Pending::wait) would return at once.
    fn is_done(&self) -> bool;
}

/// A collective in flight; [`wait`](Work::wait) gives its memory back.
#[must_use = "the memory is in flight until `wait`, and an error would go unseen"]
pub struct Work<T>(WorkState<T>);

enum WorkState<T> {
    Ready(T),
    Pending(Box<dyn Pending<T>>),
}

impl<T> Work<T> {
    /// Makes a work that is done.
    pub fn ready(value: T) -> Self {
        Work(WorkState::Ready(value))
    }

    /// Makes a work that an engine is still doing.
    pub fn pending(pending: impl Pending<T> + 'static) -> Self {
        Work(WorkState::Pending(Box::new(pending)))
    }

    /// Waits for the result: the caller's queue is ordered after it, and the host blocks only where it must. An error
    /// if a rank failed, disagreed, or did not arrive before the deadline; the call's memory is not returned then.
    #[track_caller]
    pub fn wait(self) -> Result<T> {
        match self.0 {
            WorkState::Ready(value) => Ok(value),
            WorkState::Pending(pending) => pending.wait().at_caller(),
        }
    }

    /// Waits on the host until the result is there: no error of this call can follow. [`wait`](Work::wait) only orders
    /// the caller's queue, if errors may come after it by the engine's [`guarantees`](crate::Communicator::guarantees).
    #[track_caller]
    pub fn done(self) -> Result<T> {
        match self.0 {
            WorkState::Ready(value) => Ok(value),
            WorkState::Pending(pending) => pending.done().at_caller(),
        }
    }

    /// Tells whether [`wait`](Work::wait) would return at once.
    pub fn is_done(&self) -> bool {
        match &self.0 {
            WorkState::Ready(_) => true,
            WorkState::Pending(pending) => pending.is_done(),
        }
    }

    /// Makes a work that applies `f` to the result of this one.
    pub fn map<U>(self, f: impl FnOnce(T) -> Result<U> + Send + Sync + 'static) -> Work<U>
    where
        T: Send + Sync + 'static,
        U: 'static,
    {
        Work(WorkState::Pending(Box::new(Map { work: self, f })))
    }
}

impl<T> std::fmt::Debug for Work<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Work({})", if self.is_done() { "done" } else { "in flight" })
    }
}

struct Map<T, F> {
    work: Work<T>,
    f: F,
}

impl<T, U, F> Pending<U> for Map<T, F>
where
    T: Send + Sync,
    F: FnOnce(T) -> Result<U> + Send + Sync,
{
    fn wait(self: Box<Self>) -> Result<U> {
        let Map { work, f } = *self;
        f(work.wait()?)
    }

    fn done(self: Box<Self>) -> Result<U> {
        let Map { work, f } = *self;
        f(work.done()?)
    }

    fn is_done(&self) -> bool {
        self.work.is_done()
    }
}

/// The memory of a call, or an error if an engine lost it.
pub(crate) fn given<T>(memory: Option<T>) -> Result<T> {
    memory.ok_or_else(|| Error::internal("Work::wait", "the engine gave no memory back"))
}
