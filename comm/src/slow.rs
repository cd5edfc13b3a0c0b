//! A simulated slow network, to measure its effect on a model before renting one.

use std::{
    panic::Location,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use numcore::{Error, Result, Runtime, TensorMut};
use parking_lot::Mutex;

use super::{
    ByteExchange, Call, Collective, Comm, Communicator, Pending, Work, communicator::of_inner, volume::Volume,
};

/// The connection of a rank to the others, which moves bytes in both directions at once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// The time of a call, however little it moves.
    pub latency: Duration,
    /// Bytes per second, each way: 1.25e9 for ten gigabit Ethernet.
    pub bandwidth: f64,
}

impl Link {
    /// The time of `calls` calls that move `bytes` in all, one after another.
    ///
    /// ```
    /// use std::time::Duration;
    /// use comm::Link;
    /// let link = Link { latency: Duration::from_micros(50), bandwidth: 1.25e9 };
    /// assert_eq!(link.time(2, 1_250_000), Duration::from_micros(2 * 50 + 1000));
    /// ```
    pub fn time(&self, calls: u64, bytes: u64) -> Duration {
        let seconds = calls as f64 * self.latency.as_secs_f64() + bytes as f64 / self.bandwidth;
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }
}

/// A communicator whose calls take at least as long as over a slow [`Link`]. Values are unchanged.
///
/// A call enters the link when it is started and when the calls before it have left the link. It stays for the link's
/// latency and the time of its bytes (of a ring, or of the two ranks of a transfer). It is done when both this time and
/// the call itself are over; computation meanwhile hides it. Sends and receives use one direction each, everything else
/// both. All groups split from it share the link. A world of one has none.
///
/// The host does the waiting, and the link is this rank's own. Its time runs from the rank's own start of a call,
/// whether or not the others have come to it. A receive that was posted long before its send thus costs no more than
/// the wait for it. For ranks in step, as in data parallelism, the slowest rank sets the time of all, as on a network.
/// Pipelines come out too fast by up to a transfer for each receive.
///
/// ```
/// use std::{sync::Arc, time::Duration};
/// use comm::{Collectives, Comm, CountingCommunicator, Link, Ranks, ReduceOp, SlowCommunicator};
/// use numcore::{DType, TensorMut};
/// use runtime_cpu::Cpu;
/// # fn main() -> numcore::Result<()> {
/// let link = Link { latency: Duration::from_micros(50), bandwidth: 1.25e9 };
/// Ranks::new(2).run(|_| Ok(Cpu::with_threads(1)), |comm| {
///     let slow: Comm<_> = Arc::new(SlowCommunicator::new(comm, link)?);
///     let counted = CountingCommunicator::new(slow.clone());
///     let x = TensorMut::zeros(slow.runtime(), [1000].into(), DType::F32)?;
///     counted.all_reduce(x, ReduceOp::Sum)?.wait()?;
///     assert!(counted.total().exposed > Duration::ZERO);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
pub struct SlowCommunicator<R: Runtime> {
    inner: Comm<R>,
    link: Link,
    lanes: Arc<Mutex<Lanes>>,
}

impl<R: Runtime> SlowCommunicator<R> {
    /// Wraps this rank's communicator, with an idle link. An error unless the bandwidth is more than 0 (it may be
    /// infinite).
    pub fn new(inner: Comm<R>, link: Link) -> Result<Self> {
        if link.bandwidth.is_nan() || link.bandwidth <= 0.0 {
            let error = Error::range("SlowCommunicator", "bandwidth", link.bandwidth, "above 0 bytes/s");
            return Err(error.on_rank(inner.world_rank()));
        }
        Ok(SlowCommunicator { inner, link, lanes: Arc::default() })
    }

    /// The time at which a call that is started now has left the link. A time later than the call's timeout is an
    /// error, on this rank and all others.
    fn due(&self, call: &Call<R>, now: Instant) -> Result<Instant> {
        let volume = Volume::of(call, self.rank(), self.size());
        let due = self.lanes.lock().book(&self.link, call.what(), volume, now);
        let last = now.checked_add(self.timeout());
        due.filter(|due| last.is_none_or(|last| *due <= last)).ok_or_else(|| {
            let (bytes, limit) = (volume.sent.max(volume.received), self.timeout());
            let why = format!("{bytes} bytes and those before them take longer than {limit:?} over {:?}", self.link);
            self.inner.abort(&why);
            Error::argument(call.what().name(), why).on_rank(self.world_rank())
        })
    }
}

impl<R: Runtime> SlowCommunicator<R> {
    /// Exchanges bytes without the link: agreements are no part of a step.
    fn exchange_on_host(&self, exchange: ByteExchange<'_>) -> Result<Vec<Vec<u8>>> {
        self.inner.exchange_bytes(exchange)
    }
}

impl<R: Runtime> Communicator<R> for SlowCommunicator<R> {
    of_inner!();

    fn guarantees(&self) -> super::Guarantees {
        self.inner.guarantees()
    }

    fn start_all(&self, calls: Vec<Call<R>>) -> Result<Vec<Work<Option<TensorMut<R>>>>> {
        if self.size() == 1 {
            return self.inner.start_all(calls);
        }
        let now = Instant::now();
        let due = calls.iter().map(|call| self.due(call, now)).collect::<Result<Vec<Instant>>>()?;
        let works = self.inner.start_all(calls)?;
        Ok(works.into_iter().zip(due).map(|(work, due)| Work::pending(OnLink { work, due })).collect())
    }

    fn split_at(&self, color: Option<usize>, key: usize, at: &'static Location<'static>) -> Result<Option<Comm<R>>> {
        let inner = self.inner.split_at(color, key, at)?;
        let (link, lanes) = (self.link, self.lanes.clone());
        Ok(inner.map(|inner| Arc::new(SlowCommunicator { inner, link, lanes }) as Comm<R>))
    }
}

impl<R: Runtime> std::fmt::Debug for SlowCommunicator<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Slow({:?}, {:?})", self.inner, self.link)
    }
}

/// The times until which each direction, out and back, is busy; none at first.
#[derive(Debug, Default)]
struct Lanes([Option<Instant>; 2]);

impl Lanes {
    /// Queues a call that is started `now`, and returns the time at which it has left the link; none if that overflows.
    fn book(&mut self, link: &Link, what: Collective, volume: Volume, now: Instant) -> Option<Instant> {
        let used = match what {
            Collective::Send { .. } => &mut self.0[..1],
            Collective::Recv { .. } => &mut self.0[1..],
            _ => &mut self.0[..],
        };
        let begin = used.iter().flatten().copied().fold(now, Instant::max);
        let due = begin.checked_add(link.time(1, volume.sent.max(volume.received)));
        used.fill(due);
        due
    }
}

struct OnLink<T> {
    work: Work<T>,
    due: Instant,
}

impl<T> Pending<T> for OnLink<T>
where
    Work<T>: Send + Sync,
{
    fn wait(self: Box<Self>) -> Result<T> {
        // The call is waited for first, so that its error is returned at once.
        let result = self.work.wait()?;
        thread::sleep(self.due.saturating_duration_since(Instant::now()));
        Ok(result)
    }

    fn is_done(&self) -> bool {
        self.work.is_done() && Instant::now() >= self.due
    }
}

#[cfg(test)]
mod tests {
    use super::super::ReduceOp;
    use super::*;

    const SUM: Collective = Collective::AllReduce(ReduceOp::Sum);
    const LINK: Link = Link { latency: Duration::from_millis(1), bandwidth: 1e6 };

    /// The times at which calls have left the link, in milliseconds, given their start in milliseconds and their size
    /// in kilobytes.
    fn through(calls: &[(Collective, u64, u64)]) -> Vec<u128> {
        let (mut lanes, begin) = (Lanes::default(), Instant::now());
        let book = |&(what, at, kilobytes): &(Collective, u64, u64)| {
            let volume = Volume { payload: 0, sent: kilobytes * 1000, received: kilobytes * 500 };
            let due = lanes.book(&LINK, what, volume, begin + Duration::from_millis(at));
            due.unwrap().duration_since(begin).as_millis()
        };
        calls.iter().map(book).collect()
    }

    #[test]
    fn calls_queue_behind_each_other_while_the_link_is_busy() {
        assert_eq!(through(&[(SUM, 0, 10), (SUM, 0, 10), (SUM, 5, 1), (SUM, 100, 2)]), [11, 22, 24, 103]);
        assert_eq!(through(&[(Collective::Barrier, 0, 0), (Collective::Barrier, 0, 0)]), [1, 2]);
    }

    #[test]
    fn transfers_of_two_directions_pass_each_other() {
        let (send, recv) = (Collective::Send { to: 1 }, Collective::Recv { from: 1 });
        assert_eq!(through(&[(send, 0, 10), (recv, 0, 10), (recv, 0, 10), (SUM, 0, 1)]), [11, 11, 22, 24]);
    }

    #[test]
    fn what_would_never_arrive_has_no_time() {
        let never = Link { bandwidth: 1e-300, ..LINK };
        let volume = Volume { sent: 1, ..Default::default() };
        assert_eq!(Lanes::default().book(&never, SUM, volume, Instant::now()), None);
    }
}
