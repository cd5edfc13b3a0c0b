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
    /// The runtime of this rank. The engine itself works on a fork of it.
    fn runtime(&self) -> &R;
    /// How long a call may take, from its start to its result, before it is an error.
    fn timeout(&self) -> Duration;

    /// Starts a call. Memory comes back from the work; an engine must check its [`fingerprint`](Call::fingerprint) against the
    /// other ranks'.
    fn start(&self, call: Call<R>) -> Result<Work<Option<TensorMut<R>>>>;

    /// Groups of ranks that name the same `color`, ordered by `key`, then by rank; `None` takes part and gets no group. Blocks.
    fn split_at(&self, color: Option<usize>, key: usize, at: &'static Location<'static>) -> Result<Option<Comm<R>>>;

    /// Ends every call of every rank with an error that gives this cause.
    fn abort(&self, cause: &str);
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

        fn runtime(&self) -> &R {
            self.inner.runtime()
        }

        fn timeout(&self) -> Duration {
            self.inner.timeout()
        }

        fn abort(&self, cause: &str) {
            self.inner.abort(cause);
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
    fn runtime(&self) -> &R {
        (**self).runtime()
    }
    fn timeout(&self) -> Duration {
        (**self).timeout()
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
}
