//! The trait that engines implement.

mod make_call;

use std::{fmt::Debug, panic::Location, sync::Arc, time::Duration};

use numcore::{Error, Result, Runtime, TensorMut};

pub(crate) use make_call::{MakeCall, row};

use super::{ByteExchange, Call, Group, Guarantees, Work};

/// A shared communicator of any engine.
pub type Comm<R> = Arc<dyn Communicator<R>>;

/// A group of ranks, seen from one of them. Every rank makes equal calls in one order; transfers between two ranks are
/// ordered for that pair and direction alone.
///
/// The collectives themselves are methods of [`Collectives`](super::Collectives).
#[doc(alias("DistributedComm"))]
pub trait Communicator<R: Runtime>: Send + Sync + Debug {
    /// The ranks of the group, and this rank among them. Roots and peers of calls are ranks of the group; errors name
    /// world ranks.
    fn group(&self) -> &Group;
    /// This rank, from 0.
    fn rank(&self) -> usize {
        self.group().rank()
    }
    /// The number of ranks.
    fn size(&self) -> usize {
        self.group().size()
    }
    /// The world ranks of this group's ranks, in the group's order.
    fn members(&self) -> &[usize] {
        self.group().members()
    }
    /// This rank's rank in the world from which the group was split.
    fn world_rank(&self) -> usize {
        self.group().world_rank()
    }
    /// The runtime of this rank. The engine itself works on a fork of it.
    fn runtime(&self) -> &R;
    /// The time that a call may take, from its start to its result, before it is an error. The
    /// [first of a kind](super::Deadlines) may take longer.
    fn timeout(&self) -> Duration;
    /// The engine's promises beyond this contract.
    fn guarantees(&self) -> Guarantees;

    /// The number of previous calls of this method on this rank's communicator. It numbers objects that all ranks make
    /// over it in one order, such as trainers, so that their calls are never mixed up. Wrappers of an engine forward
    /// it.
    fn next_number(&self) -> u64;

    /// Starts a call. Memory comes back from the work; an engine must check its [`fingerprint`](Call::fingerprint)
    /// against the other ranks'.
    fn start(&self, call: Call<R>) -> Result<Work<Option<TensorMut<R>>>>;

    /// Starts calls that run together: none of them waits for another. Engines whose transfers are independent start
    /// them one by one.
    fn start_all(&self, calls: Vec<Call<R>>) -> Result<Vec<Work<Option<TensorMut<R>>>>> {
        calls.into_iter().map(|call| self.start(call)).collect()
    }

    /// Gathers the bytes of every rank, by rank. Blocks.
    fn exchange_bytes(&self, exchange: ByteExchange<'_>) -> Result<Vec<Vec<u8>>> {
        self.exchange_by_gathers(exchange)
    }

    /// Splits the ranks into groups of equal `color`, ordered by `key`, then by rank; a rank with `None` takes part and
    /// gets no group. Blocks.
    fn split_at(&self, color: Option<usize>, key: usize, at: &'static Location<'static>) -> Result<Option<Comm<R>>>;

    /// Splits the ranks as [`split_at`](Communicator::split_at) does, by a color that each rank knows of all others. A
    /// communicator without other ranks, which cannot ask them, gets the whole group from it.
    fn split_by(&self, color: &dyn Fn(usize) -> usize, at: &'static Location<'static>) -> Result<Option<Comm<R>>> {
        self.split_at(Some(color(self.rank())), self.rank(), at)
    }

    /// Returns an error if the communicator has failed meanwhile, on this rank or another. Never blocks. Trainers call
    /// it once per step, right before the update: the last place at which an error that came late still prevents it.
    fn poll(&self) -> Result<()>;

    /// Ends every call of every rank of the world with an error that gives this cause and names this rank.
    fn abort(&self, cause: &str) {
        self.abort_for(self.world_rank(), cause);
    }

    /// Ends every call as [`abort`](Communicator::abort) does, naming the rank where the failure began, which may be
    /// another than this one.
    fn abort_for(&self, world_rank: usize, cause: &str);
}

/// Starts one call of a communicator that implements [`start_all`](Communicator::start_all).
pub(crate) fn start_one<R: Runtime>(
    comm: &(impl Communicator<R> + ?Sized),
    call: Call<R>,
) -> Result<Work<Option<TensorMut<R>>>> {
    let op = call.what().name();
    comm.start_all(vec![call])?.pop().ok_or_else(|| Error::internal(op, "a call was started, and nothing is in flight"))
}

/// Methods of a communicator over `self.inner` that it forwards, but for a timeout of its own. The wrapper handles
/// calls in its `start_all`, and bytes in its `exchange_on_host`.
macro_rules! of_inner {
    () => {
        of_inner!(|own| own.inner.timeout());
    };
    (|$own:ident| $timeout:expr) => {
        fn group(&self) -> &super::Group {
            self.inner.group()
        }

        fn runtime(&self) -> &R {
            self.inner.runtime()
        }

        fn timeout(&self) -> Duration {
            let $own = self;
            $timeout
        }

        fn next_number(&self) -> u64 {
            self.inner.next_number()
        }

        fn poll(&self) -> Result<()> {
            self.inner.poll()
        }

        fn start(&self, call: Call<R>) -> Result<Work<Option<TensorMut<R>>>> {
            super::communicator::start_one(self, call)
        }

        fn exchange_bytes(&self, exchange: super::ByteExchange<'_>) -> Result<Vec<Vec<u8>>> {
            if !self.guarantees().exchanges_on_host || self.size() == 1 {
                return super::communicator::MakeCall::exchange_by_gathers(self, exchange);
            }
            self.exchange_on_host(exchange)
        }

        fn abort_for(&self, world_rank: usize, cause: &str) {
            self.inner.abort_for(world_rank, cause);
        }
    };
}
pub(crate) use of_inner;

impl<R: Runtime, C: Communicator<R> + ?Sized> Communicator<R> for Arc<C> {
    fn group(&self) -> &Group {
        (**self).group()
    }
    fn runtime(&self) -> &R {
        (**self).runtime()
    }
    fn timeout(&self) -> Duration {
        (**self).timeout()
    }
    fn guarantees(&self) -> Guarantees {
        (**self).guarantees()
    }
    fn next_number(&self) -> u64 {
        (**self).next_number()
    }
    fn start(&self, call: Call<R>) -> Result<Work<Option<TensorMut<R>>>> {
        (**self).start(call)
    }
    fn start_all(&self, calls: Vec<Call<R>>) -> Result<Vec<Work<Option<TensorMut<R>>>>> {
        (**self).start_all(calls)
    }
    fn exchange_bytes(&self, exchange: ByteExchange<'_>) -> Result<Vec<Vec<u8>>> {
        (**self).exchange_bytes(exchange)
    }
    fn split_at(&self, color: Option<usize>, key: usize, at: &'static Location<'static>) -> Result<Option<Comm<R>>> {
        (**self).split_at(color, key, at)
    }
    fn split_by(&self, color: &dyn Fn(usize) -> usize, at: &'static Location<'static>) -> Result<Option<Comm<R>>> {
        (**self).split_by(color, at)
    }
    fn poll(&self) -> Result<()> {
        (**self).poll()
    }
    fn abort(&self, cause: &str) {
        (**self).abort(cause);
    }
    fn abort_for(&self, world_rank: usize, cause: &str) {
        (**self).abort_for(world_rank, cause);
    }
}
