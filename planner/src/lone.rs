//! A rank without the others: the calls of a rank of any world, counted on one thread.

use std::{
    collections::BTreeMap,
    panic::Location,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use distributed::comm::{ByteExchange, Call, Comm, Communicator, Group, Guarantees, Traffic, Work, engine::Volume};
use numcore::{Error, NullRuntime, Result, TensorMut};
use parking_lot::Mutex;

/// Calls of a group, by its world ranks, the kind of collective, and the object that they belong to.
type CallKey = (Arc<[usize]>, &'static str, Option<Arc<str>>);

/// The calls that a rank has made since the last [`take`](CallCounts::take).
#[derive(Clone, Debug, Default)]
pub(crate) struct CallCounts(Arc<Mutex<BTreeMap<CallKey, Traffic>>>);

impl CallCounts {
    /// Returns the counts, and begins at 0 again.
    pub(crate) fn take(&self) -> BTreeMap<CallKey, Traffic> {
        std::mem::take(&mut *self.0.lock())
    }

    fn add(&self, key: CallKey, payload: u64, sent: u64) {
        let mut counts = self.0.lock();
        let count = counts.entry(key).or_default();
        *count = *count + Traffic { calls: 1, payload, sent, exposed: Duration::ZERO };
    }
}

/// One rank of a world whose other ranks do not exist. Its calls end at once, and are counted as
/// [`CountingCommunicator`](distributed::comm::CountingCommunicator) counts them. It is on the runtime without values,
/// so nothing that would arrive is missing: other ranks' bytes on the host are this rank's own.
#[derive(Clone, Debug)]
pub(crate) struct LoneRank {
    rt: NullRuntime,
    group: Group,
    numbers: Arc<AtomicU64>,
    counts: CallCounts,
}

impl LoneRank {
    /// Rank `rank` of `size`.
    pub(crate) fn world(rt: &NullRuntime, rank: usize, size: usize) -> (Comm<NullRuntime>, CallCounts) {
        let counts = CallCounts::default();
        let group = Group::world(rank, size);
        let lone = LoneRank { rt: rt.clone(), group, numbers: Arc::default(), counts: counts.clone() };
        (Arc::new(lone), counts)
    }
}

impl Communicator<NullRuntime> for LoneRank {
    fn group(&self) -> &Group {
        &self.group
    }

    fn runtime(&self) -> &NullRuntime {
        &self.rt
    }

    fn timeout(&self) -> Duration {
        Duration::MAX
    }

    fn guarantees(&self) -> Guarantees {
        Guarantees { exchanges_on_host: true, ..Guarantees::STRICT }
    }

    fn next_number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    fn start(&self, call: Call<NullRuntime>) -> Result<Work<Option<TensorMut<NullRuntime>>>> {
        let Volume { payload, sent, .. } = Volume::of(&call, self.rank(), self.size());
        self.counts.add((self.group.members().clone(), call.what().name(), call.of().cloned()), payload, sent);
        Ok(Work::ready(call.into_memory().1))
    }

    /// Counted as the gathers of lengths and bytes that it is on threads.
    fn exchange_bytes(&self, exchange: ByteExchange<'_>) -> Result<Vec<Vec<u8>>> {
        let (n, own) = (self.size(), exchange.own);
        for bytes in [size_of::<i64>(), own.len()].into_iter().filter(|&bytes| n > 1 && bytes > 0) {
            let key = (self.group.members().clone(), "all_gather", exchange.of.cloned());
            self.counts.add(key, (n * bytes) as u64, ((n - 1) * bytes) as u64);
        }
        Ok(vec![own.to_vec(); n])
    }

    fn split_at(
        &self,
        color: Option<usize>,
        _: usize,
        _: &'static Location<'static>,
    ) -> Result<Option<Comm<NullRuntime>>> {
        if self.size() == 1 {
            return Ok(color.map(|_| Arc::new(self.clone()) as Comm<NullRuntime>));
        }
        let why = "a rank without the others does not know their colors: split by `Communicator::split_by`";
        Err(Error::unsupported("planner", why).on_rank(self.world_rank()))
    }

    fn split_by(
        &self,
        color: &dyn Fn(usize) -> usize,
        _: &'static Location<'static>,
    ) -> Result<Option<Comm<NullRuntime>>> {
        let own = color(self.rank());
        let ranks: Vec<usize> = (0..self.size()).filter(|&rank| color(rank) == own).collect();
        let rank = ranks.iter().position(|&rank| rank == self.rank()).unwrap_or(0);
        let members = ranks.iter().map(|&rank| self.members()[rank]).collect();
        let group = Group::new("part", rank, members);
        Ok(Some(Arc::new(LoneRank { group, numbers: Arc::default(), ..self.clone() })))
    }

    fn poll(&self) -> Result<()> {
        Ok(())
    }

    fn abort_for(&self, _: usize, _: &str) {}
}
