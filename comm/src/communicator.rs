//! What an engine implements.

use std::{fmt::Debug, panic::Location, sync::Arc, time::Duration};

use numcore::{Result, Runtime, TensorMut};

use super::{Call, Work};

/// Any communicator, as those who use it hold it.
pub type Comm<R> = Arc<dyn Communicator<R>>;

/// A group of ranks, seen from one of them. Every rank makes the same calls in the same order; transfers between two ranks are ordered
/// for that pair and direction alone.
///
/// What is called is in [`Collectives`](super::Collectives).
pub trait Communicator<R: Runtime>: Send + Sync + Debug {
    /// This rank, from 0.
    fn rank(&self) -> usize;
    /// How many ranks there are.
    fn size(&self) -> usize;
    /// The world ranks of this group's ranks, in the group's order. Roots and peers of calls are ranks of the group; errors name world
    /// ranks.
    fn members(&self) -> &[usize];
    /// This rank's rank in the world from which the group was split.
    fn world_rank(&self) -> usize {
        self.members().get(self.rank()).copied().unwrap_or(self.rank())
    }
    /// The runtime of this rank. The engine itself works on a fork of it.
    fn runtime(&self) -> &R;
    /// How long a call may take, from its start to its result, before it is an error.
    fn timeout(&self) -> Duration;

    /// How many times this was called before on this rank's communicator: numbers what all ranks make over it in one order, trainers for
    /// one, so that the calls of one are never taken for those of another. Whatever wraps an engine passes it on.
    fn next_number(&self) -> u64;

    /// Starts a call. Memory comes back from the work; an engine must check its [`fingerprint`](Call::fingerprint) against the
    /// other ranks'.
    fn start(&self, call: Call<R>) -> Result<Work<Option<TensorMut<R>>>>;

    /// Groups of ranks that name the same `color`, ordered by `key`, then by rank; `None` takes part and gets no group. Blocks.
    fn split_at(&self, color: Option<usize>, key: usize, at: &'static Location<'static>) -> Result<Option<Comm<R>>>;

    /// Ends every call of every rank of the world with an error that gives this cause and names this rank.
    fn abort(&self, cause: &str);

    /// As [`abort`](Communicator::abort), naming the rank where the failure began, which may be another than this one.
    fn abort_for(&self, world_rank: usize, cause: &str) {
        let _ = world_rank;
        self.abort(cause);
    }
}

/// What a communicator over `self.inner` says as that one does.
macro_rules! of_inner {
    () => {
        fn rank(&self) -> usize {
            self.inner.rank()
        }

        fn size(&self) -> usize {
            self.inner.size()
        }

        fn members(&self) -> &[usize] {
            self.inner.members()
        }

        fn runtime(&self) -> &R {
            self.inner.runtime()
        }

        fn timeout(&self) -> Duration {
            self.inner.timeout()
        }

        fn next_number(&self) -> u64 {
            self.inner.next_number()
        }

        fn abort(&self, cause: &str) {
            self.inner.abort(cause);
        }

        fn abort_for(&self, world_rank: usize, cause: &str) {
            self.inner.abort_for(world_rank, cause);
        }
    };
}
pub(super) use of_inner;

impl<R: Runtime, C: Communicator<R> + ?Sized> Communicator<R> for Arc<C> {
    fn rank(&self) -> usize {
        (**self).rank()
    }
    fn size(&self) -> usize {
        (**self).size()
    }
    fn members(&self) -> &[usize] {
        (**self).members()
    }
    fn runtime(&self) -> &R {
        (**self).runtime()
    }
    fn timeout(&self) -> Duration {
        (**self).timeout()
    }
    fn next_number(&self) -> u64 {
        (**self).next_number()
    }
    fn start(&self, call: Call<R>) -> Result<Work<Option<TensorMut<R>>>> {
        (**self).start(call)
    }
    fn split_at(&self, color: Option<usize>, key: usize, at: &'static Location<'static>) -> Result<Option<Comm<R>>> {
        (**self).split_at(color, key, at)
    }
    fn abort(&self, cause: &str) {
        (**self).abort(cause);
    }
    fn abort_for(&self, world_rank: usize, cause: &str) {
        (**self).abort_for(world_rank, cause);
    }
}
