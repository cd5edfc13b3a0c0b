//! Counts of the data that a rank exchanges.

use std::{
    collections::BTreeMap,
    ops::Add,
    panic::Location,
    sync::Arc,
    time::{Duration, Instant},
};

use numcore::{Result, Runtime, TensorMut};
use parking_lot::Mutex;

use super::{ByteExchange, Call, Comm, Communicator, Pending, Work, communicator::of_inner, volume::Volume};

/// The amount of data that one rank exchanged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// The number of calls.
    pub calls: u64,
    /// The bytes of unsharded tensors: of the values that are combined, gathered or sent.
    pub payload: u64,
    /// The bytes that this rank must send at least: `2(n−1)/n` of the payload for an all-reduce. For a reduce-scatter,
    /// an all-gather or an all-to-all they are `(n−1)/n` of it (less its own part).
    pub sent: u64,
    /// The time that the host spent in `wait`: communication that nothing hid.
    pub exposed: Duration,
}

impl Add for Traffic {
    type Output = Traffic;

    fn add(self, other: Traffic) -> Traffic {
        Traffic {
            calls: self.calls + other.calls,
            payload: self.payload + other.payload,
            sent: self.sent + other.sent,
            exposed: self.exposed + other.exposed,
        }
    }
}

/// A kind of collective ([`Collective::name`](super::Collective::name)), the name of the object that the calls belong
/// to, and the world ranks of the group.
type CountKey = (&'static str, Option<Arc<str>>, Arc<[usize]>);
type Counts = Arc<Mutex<BTreeMap<CountKey, Traffic>>>;

/// Counts the data that a communicator, and all that are split from it, exchange.
pub struct CountingCommunicator<R: Runtime> {
    inner: Comm<R>,
    counts: Counts,
}

impl<R: Runtime> CountingCommunicator<R> {
    /// Wraps a communicator, with all counts at 0.
    pub fn new(inner: Comm<R>) -> Self {
        CountingCommunicator { inner, counts: Arc::default() }
    }

    /// The traffic of a kind of collective ([`Collective::name`](super::Collective::name)).
    pub fn of(&self, kind: &str) -> Traffic {
        self.counts().get(kind).copied().unwrap_or_default()
    }

    /// All counts, by kind.
    pub fn counts(&self) -> BTreeMap<&'static str, Traffic> {
        self.summed(|(kind, ..)| *kind)
    }

    /// All counts, by the object that was exchanged: `bucket 3` of gradients, ``unit `blocks.1` `` of parameters and
    /// their gradients. Unnamed calls (losses, flags, agreements) are under `None`.
    pub fn by_name(&self) -> BTreeMap<Option<Arc<str>>, Traffic> {
        self.summed(|(_, of, _)| of.clone())
    }

    /// All counts, by the world ranks of the group and the kind.
    pub fn by_group(&self) -> BTreeMap<(Arc<[usize]>, &'static str), Traffic> {
        self.summed(|(kind, _, group)| (group.clone(), *kind))
    }

    /// The sum of all counts.
    pub fn total(&self) -> Traffic {
        self.counts.lock().values().copied().fold(Traffic::default(), Add::add)
    }

    /// Resets all counts to 0.
    pub fn reset(&self) {
        self.counts.lock().clear();
    }

    fn summed<K: Ord>(&self, by: impl Fn(&CountKey) -> K) -> BTreeMap<K, Traffic> {
        let mut sums = BTreeMap::new();
        for (key, traffic) in &*self.counts.lock() {
            let sum: &mut Traffic = sums.entry(by(key)).or_default();
            *sum = *sum + *traffic;
        }
        sums
    }
}

impl<R: Runtime> CountingCommunicator<R> {
    fn exchange_on_host(&self, exchange: ByteExchange<'_>) -> Result<Vec<Vec<u8>>> {
        let begun = Instant::now();
        let all = self.inner.exchange_bytes(exchange)?;
        let payload = all.iter().map(Vec::len).sum::<usize>() as u64;
        let sent = ((self.size() - 1) * exchange.own.len()) as u64;
        let key = ("all_gather", None, self.group().members().clone());
        add(&self.counts, &key, Traffic { calls: 1, payload, sent, exposed: begun.elapsed() });
        Ok(all)
    }
}

impl<R: Runtime> Communicator<R> for CountingCommunicator<R> {
    of_inner!();

    fn guarantees(&self) -> super::Guarantees {
        self.inner.guarantees()
    }

    fn start_all(&self, calls: Vec<Call<R>>) -> Result<Vec<Work<Option<TensorMut<R>>>>> {
        let volume = |call: &Call<R>| {
            let Volume { payload, sent, .. } = Volume::of(call, self.rank(), self.size());
            let group = self.group().members().clone();
            ((call.what().name(), call.of.clone(), group), Traffic { calls: 1, payload, sent, exposed: Duration::ZERO })
        };
        let counted: Vec<(CountKey, Traffic)> = calls.iter().map(volume).collect();
        let works = self.inner.start_all(calls)?;
        let timed = |(work, (key, traffic)): (_, (CountKey, Traffic))| {
            add(&self.counts, &key, traffic);
            Work::pending(Timed { work, key, counts: self.counts.clone() })
        };
        Ok(works.into_iter().zip(counted).map(timed).collect())
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

fn add(counts: &Counts, key: &CountKey, more: Traffic) {
    let mut counts = counts.lock();
    let count = counts.entry(key.clone()).or_default();
    *count = *count + more;
}

struct Timed<T> {
    work: Work<T>,
    key: CountKey,
    counts: Counts,
}

impl<T> Pending<T> for Timed<T>
where
    Work<T>: Send + Sync,
{
    fn wait(self: Box<Self>) -> Result<T> {
        let begun = Instant::now();
        let result = self.work.wait();
        add(&self.counts, &self.key, Traffic { exposed: begun.elapsed(), ..Default::default() });
        result
    }

    fn done(self: Box<Self>) -> Result<T> {
        let begun = Instant::now();
        let result = self.work.done();
        add(&self.counts, &self.key, Traffic { exposed: begun.elapsed(), ..Default::default() });
        result
    }

    fn is_done(&self) -> bool {
        self.work.is_done()
    }
}
