//! A communicator with a function between those who call and the ranks: it sees every call, and what comes of it.

use std::{fmt, panic::Location};

use distributed::comm::Call;

use crate::prelude::*;

pub type Started<R> = Result<Work<Option<TensorMut<R>>>>;
type Start<R> = dyn Fn(&Comm<R>, Call<R>) -> Started<R> + Send + Sync;

pub struct Between<R: Runtime> {
    inner: Comm<R>,
    pub guarantees: Guarantees,
    start: Arc<Start<R>>,
}

impl<R: Runtime> Between<R> {
    pub fn new(inner: Comm<R>, start: impl Fn(&Comm<R>, Call<R>) -> Started<R> + Send + Sync + 'static) -> Self {
        Between { guarantees: inner.guarantees(), inner, start: Arc::new(start) }
    }
}

impl<R: Runtime> fmt::Debug for Between<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Between({:?})", self.inner)
    }
}

impl<R: Runtime> Communicator<R> for Between<R> {
    fn group(&self) -> &Group {
        self.inner.group()
    }
    fn runtime(&self) -> &R {
        self.inner.runtime()
    }
    fn timeout(&self) -> Duration {
        self.inner.timeout()
    }
    fn guarantees(&self) -> Guarantees {
        self.guarantees
    }
    fn next_number(&self) -> u64 {
        self.inner.next_number()
    }
    fn start(&self, call: Call<R>) -> Started<R> {
        (self.start)(&self.inner, call)
    }
    fn split_at(&self, color: Option<usize>, key: usize, at: &'static Location<'static>) -> Result<Option<Comm<R>>> {
        let group = self.inner.split_at(color, key, at)?;
        Ok(group.map(|inner| {
            Arc::new(Between { inner, guarantees: self.guarantees, start: self.start.clone() }) as Comm<R>
        }))
    }
    fn poll(&self) -> Result<()> {
        self.inner.poll()
    }
    fn abort_for(&self, world_rank: usize, cause: &str) {
        self.inner.abort_for(world_rank, cause);
    }
}
