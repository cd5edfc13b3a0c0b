//! What a rank exchanges, counted.

use std::{collections::BTreeMap, panic::Location, sync::Arc, time::Duration, time::Instant};

use numcore::{Result, Runtime, TensorMut};
use parking_lot::Mutex;

use super::{Call, Collective, Comm, Communicator, Pending, Work, communicator::of_inner};

/// What one rank exchanged by one kind of collective.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Calls.
    pub calls: u64,
    /// Bytes of whole tensors: of what is combined, gathered or sent.
    pub payload: u64,
    /// Bytes this rank must send at least: `2(n−1)/n` of the payload for an all-reduce, `(n−1)/n` for a reduce-scatter, an all-gather
    /// or an all-to-all (less its own part).
    pub sent: u64,
    /// Time the host spent in `wait`: communication that nothing hid.
    pub exposed: Duration,
}

/// Counts what any communicator, and all that are split from it, exchanges.
pub struct CountingCommunicator<R: Runtime> {
    inner: Comm<R>,
    counts: Arc<Mutex<BTreeMap<&'static str, Traffic>>>,
}

impl<R: Runtime> CountingCommunicator<R> {
    /// With all counts at 0.
    pub fn new(inner: Comm<R>) -> Self {
        CountingCommunicator { inner, counts: Arc::default() }
    }

    /// What was exchanged by a kind of collective ([`Collective::name`]).
    pub fn of(&self, kind: &str) -> Traffic {
        self.counts.lock().get(kind).copied().unwrap_or_default()
    }

    /// All counts, by kind.
    pub fn counts(&self) -> BTreeMap<&'static str, Traffic> {
        self.counts.lock().clone()
    }

    /// The sum of all counts.
    pub fn total(&self) -> Traffic {
        let add = |a: Traffic, b: &Traffic| Traffic {
            calls: a.calls + b.calls,
            payload: a.payload + b.payload,
            sent: a.sent + b.sent,
            exposed: a.exposed + b.exposed,
        };
        self.counts.lock().values().fold(Traffic::default(), add)
    }

    /// Starts all counts anew.
    pub fn reset(&self) {
        self.counts.lock().clear();
    }
}

/// Elements a rank sends at least, and elements of the whole.
fn volume<R: Runtime>(call: &Call<R>, rank: usize, n: usize) -> (usize, usize) {
    let (send, recv): (usize, usize) = (call.send_parts().iter().sum(), call.recv_parts().iter().sum());
    match call.what() {
        Collective::AllReduce(_) => (2 * (n - 1) * send / n, send),
        Collective::ReduceScatter(_) => (send - call.send_parts()[rank], send),
        Collective::AllGather => ((n - 1) * recv / n, recv),
        Collective::AllToAll => (send - call.send_parts()[rank], send),
        Collective::Broadcast { root } => (if rank == root && n > 1 { send } else { 0 }, send),
        Collective::Reduce { root, .. } => (if rank == root { 0 } else { send }, send),
        Collective::Send { .. } => (send, send),
        Collective::Recv { .. } => (0, recv),
        Collective::Barrier => (0, 0),
    }
}

impl<R: Runtime> Communicator<R> for CountingCommunicator<R> {
    of_inner!();

    fn start(&self, call: Call<R>) -> Result<Work<Option<TensorMut<R>>>> {
        let (sent, payload) = volume(&call, self.rank(), self.size());
        let (name, bytes) = (call.what().name(), call.dtype().size());
        let work = self.inner.start(call)?;
        let mut counts = self.counts.lock();
        let count = counts.entry(name).or_default();
        count.calls += 1;
        count.payload += (payload * bytes) as u64;
        count.sent += (sent * bytes) as u64;
        Ok(Work::pending(Timed { work, name, counts: self.counts.clone() }))
    }

    fn split_at(&self, color: Option<usize>, key: usize, at: &'static Location<'static>) -> Result<Option<Comm<R>>> {
        let inner = self.inner.split_at(color, key, at)?;
        Ok(inner.map(|inner| Arc::new(CountingCommunicator { inner, counts: self.counts.clone() }) as Comm<R>))
    }
}

impl<R: Runtime> std::fmt::Debug for CountingCommunicator<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Counting({:?})", self.inner)
    }
}

struct Timed<T> {
    work: Work<T>,
    name: &'static str,
    counts: Arc<Mutex<BTreeMap<&'static str, Traffic>>>,
}

impl<T> Pending<T> for Timed<T>
where
    Work<T>: Send,
{
    fn wait(self: Box<Self>) -> Result<T> {
        let begun = Instant::now();
        let result = self.work.wait();
        self.counts.lock().entry(self.name).or_default().exposed += begun.elapsed();
        result
    }

    fn is_done(&self) -> bool {
        self.work.is_done()
    }
}
