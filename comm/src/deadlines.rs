//! The deadlines of calls, by kind.

use std::{collections::HashSet, fmt, panic::Location, sync::Arc, time::Duration};

use numcore::{Result, Runtime, TensorMut};

use super::{
    ByteExchange, Call, Collective, Comm, Communicator, Fingerprint, Guarantees, Place, Work, communicator::of_inner,
};

/// The time that a call may take, from its start to its result, before every rank gets an error. A [`Duration`] is one
/// time for all calls. NCCL gives every call the time of a call.
///
/// ```
/// # use comm::Deadlines;
/// # use std::time::Duration;
/// let short = Deadlines { call: Duration::from_secs(5), ..Deadlines::default() };
/// assert_eq!(short.first, Duration::from_secs(600));
/// assert_eq!(Deadlines::from(short.call).first, short.call);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadlines {
    /// The time of a call, by default 60 seconds.
    pub call: Duration,
    /// The time of the first call of a kind in a group, by default 10 minutes: another rank may compile kernels before
    /// it. Its kind is its collective, its name and its source line.
    pub first: Duration,
}

impl Default for Deadlines {
    fn default() -> Self {
        Deadlines { call: Duration::from_secs(60), first: Duration::from_secs(600) }
    }
}

impl From<Duration> for Deadlines {
    fn from(all: Duration) -> Self {
        Deadlines { call: all, first: all }
    }
}

/// The most kinds of calls that a rank remembers: programs have hundreds, unless names of calls have a step's number.
const MOST_KINDS: usize = 1 << 14;

/// The path of splits to a group, and a kind of its calls.
type CallKind = (Box<[u64]>, Collective, Option<Arc<str>>, Place);

/// The kinds of calls that a rank has made in groups, each by the path of splits that leads to it. Further ones than
/// 16384 are not remembered: each of their calls has the time of a first one.
#[derive(Debug, Default)]
pub struct CallKinds(HashSet<CallKind>);

impl CallKinds {
    /// The time of the rank's next call in a group: its own, or that of its kind.
    pub fn deadline(&mut self, group: &[u64], call: &Fingerprint, own: Option<Duration>, of: Deadlines) -> Duration {
        let kind = (group.into(), call.what, call.of.clone(), call.at.clone());
        let is_first = !self.0.contains(&kind);
        if is_first && self.0.len() < MOST_KINDS {
            self.0.insert(kind);
        }
        own.unwrap_or(if is_first { of.first } else { of.call })
    }
}

/// A communicator whose calls have a deadline of their own, such as that of ranks that save in the background.
pub struct Patient<R: Runtime> {
    inner: Comm<R>,
    timeout: Duration,
}

impl<R: Runtime> Patient<R> {
    /// Makes a communicator over `inner` whose calls, and those of its splits, may take `timeout`.
    pub fn over(inner: &Comm<R>, timeout: Duration) -> Comm<R> {
        Arc::new(Patient { inner: inner.clone(), timeout })
    }

    fn exchange_on_host(&self, exchange: ByteExchange<'_>) -> Result<Vec<Vec<u8>>> {
        self.inner.exchange_bytes(ByteExchange { timeout: exchange.timeout.or(Some(self.timeout)), ..exchange })
    }
}

impl<R: Runtime> Communicator<R> for Patient<R> {
    of_inner!(|own| own.timeout);

    fn guarantees(&self) -> Guarantees {
        self.inner.guarantees()
    }

    fn start_all(&self, calls: Vec<Call<R>>) -> Result<Vec<Work<Option<TensorMut<R>>>>> {
        let timed = |call: Call<R>| Call { timeout: call.timeout.or(Some(self.timeout)), ..call };
        self.inner.start_all(calls.into_iter().map(timed).collect())
    }

    fn split_at(&self, color: Option<usize>, key: usize, at: &'static Location<'static>) -> Result<Option<Comm<R>>> {
        Ok(self.inner.split_at(color, key, at)?.map(|inner| Patient::over(&inner, self.timeout)))
    }
}

impl<R: Runtime> fmt::Debug for Patient<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} within {:?}", self.inner, self.timeout)
    }
}

#[cfg(test)]
mod tests {
    use numcore::DType;

    use super::*;

    #[test]
    fn kinds_are_remembered_by_group_and_so_many() {
        let of = Deadlines::default();
        let call = |name: u64| Fingerprint {
            what: Collective::Barrier,
            dtype: DType::F32,
            in_place: false,
            header: false,
            parts: [].into(),
            of: Some(name.to_string().into()),
            at: Location::caller().into(),
        };
        let mut kinds = CallKinds::default();
        for (group, due) in [(&[0, 1][..], of.first), (&[0, 1], of.call), (&[0, 2], of.first), (&[], of.first)] {
            assert_eq!(kinds.deadline(group, &call(0), None, of), due, "{group:?}");
        }
        (0..2 * MOST_KINDS as u64).for_each(|name| _ = kinds.deadline(&[], &call(name), None, of));
        assert_eq!(kinds.0.len(), MOST_KINDS);
        assert_eq!(kinds.deadline(&[], &call(0), None, of), of.call);
    }
}
